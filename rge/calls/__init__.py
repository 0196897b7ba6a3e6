"""API client for models: cached, retried, within a budget.

``request``         what is asked, and the key under which the answer is kept
``pictures``        pictures as they are sent: without metadata, scaled in other processes
``model_config``    one model behind one endpoint, as the user gives it
``prices``          what models cost, by name
``failures``        why a call has no answer, and what is done about it
``providers``       what differs between providers: requests, errors, batch modes
``asking``          how calls are made: grouped, sent, retried, waited for
``store``           the append-only file of answers and the ledger, shared by processes
``caller``          all of it together
``replies``         parses provider responses
``keys``            API keys, and how they are kept out of what is shown
``local_server``    a server on this machine, for the demo, tests and measurements
"""

"""Paid calls to models over HTTP: asked once, kept for ever, counted to the cent.

``request``         what is asked, and the key under which the answer is kept
``pictures``        pictures as they are sent: without metadata, scaled in other processes
``model_config``    one model behind one endpoint, as the user gives it
``failures``        why a call gave no answer, in classes: lost, refused by policy, rejected, no use to go on
``providers``       what differs between them: requests, errors, batch modes
``batch_jobs``      the same calls by a provider's batch mode
``pace``            how fast an endpoint may be asked, learnt from its answers
``store``           the append-only file of answers and the ledger, shared by processes
``caller``          all of it together: limits, retries, budgets, unreadable answers asked again
``replies``         the answer taken apart, with an error for every way it can be malformed
``keys``            API keys, and how they are kept out of what is shown
``local_server``    a server on this machine, for the demo, tests and measurements
"""

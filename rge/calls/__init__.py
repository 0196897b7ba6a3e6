"""API client for models: cached, with retries and budgets.

``caller``          the client
``request``         a request, and the cache key of its answer
``pictures``        prepares pictures: strips metadata, scales down, encodes
``model_config``    configuration of one model behind one endpoint
``prices``          price table by model name
``failures``        exceptions: which are retried, stored, or stop the run
``providers``       wire format: requests, errors, batch API
``dispatch``        grouping, retries, rate limits, batch jobs
``store``           append-only cache of answers and ledger of costs, shared by processes
``replies``         parses provider responses
``keys``            API keys, and their redaction
``local_server``    local server for the demo, tests and benchmarks
"""

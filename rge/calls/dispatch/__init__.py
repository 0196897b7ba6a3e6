"""Turn requests into calls and make them.

``grouping``    groups requests into calls and matches answers to requests
``sender``      makes one call: retries, budget, ledger entry
``health``      state of an endpoint: rate limit, failures, why calls stopped
``batch_jobs``  makes calls through a provider's batch API
"""

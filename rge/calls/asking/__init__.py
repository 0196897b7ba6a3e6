"""What a caller does with calls, one module per job.

``grouping``    which calls requests need, and what becomes of the answers
``sending``     one call with its retries, its budget and its place in the ledger
``health``      state of an endpoint: its pace, whether it takes requests, why it was given up
``batch_jobs``  the same calls by a provider's batch mode
"""

"""API client for models: cached, with retries and budgets.

A `caller.Caller` takes `request.Request`s. `dispatch.grouping` looks them up in the `store` and groups the others into calls. Each call
is made by `dispatch.sender` over a connection of `providers.transport`, or with others by `dispatch.batch_jobs`. Its answer is stored, and
`replies` parses it into an `Outcome`. Exceptions are in `failures`.
"""

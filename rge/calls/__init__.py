"""API client for models: cached, with retries and budgets.

A `caller.Caller` takes `request.Request`s. `grouping` looks them up in the `store` and groups the others into calls. A `sender.Sender`
makes those of one model, at the `pace` of its endpoint; `batches` makes many at once. An answer is stored, and then parsed by `replies`
into an `Outcome`. Errors are in `failures`, the wire format in `wire`.
"""

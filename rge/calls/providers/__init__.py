"""Wire format: OpenAI's chat completions and batches, and the errors and rate limits of providers.

``bodies``      request bodies
``errors``      classifies errors by their documented codes
``transport``   connections, rate-limit headers, the list of models
``batches``     the batch API
"""

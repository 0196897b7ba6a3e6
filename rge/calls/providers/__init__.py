"""The wire format, OpenAI's chat completions and batches, and how providers' errors and limits read.

``bodies``      a request as it is sent
``errors``      what errors mean, by their documented codes
``transport``   connections, limits in headers, the list of models
``batches``     the batch API
"""

"""The wire format, OpenAI's chat completions and batches, and how providers' errors and limits read.

``bodies``      a request as it is sent
``errors``      what errors mean, by their documented codes
``headers``     what headers say about limits
``transport``   connections
``batches``     the batch API
"""

"""What differs between providers: what they are sent, how their errors read, and their batch modes.

``bodies``      a request as each of them takes it
``errors``      what their errors mean, by their documented codes
``headers``     what their headers say about limits
``transport``   connections to them
``batches``     the batch modes of OpenAI, Anthropic and Gemini
"""

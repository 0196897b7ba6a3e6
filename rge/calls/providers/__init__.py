"""What differs between providers: what they are sent, how their errors read, their batch modes, and vLLM in this process.

``bodies``      a request as each of them takes it
``transport``   connections, and how errors fall into the classes of `rge.calls.failures`
``batches``     the batch modes of OpenAI, Anthropic and Gemini
``engine``      vLLM in this process
"""

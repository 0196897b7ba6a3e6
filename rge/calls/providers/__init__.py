"""Wire format: OpenAI's chat completions and batches, and the errors and rate limits of providers."""

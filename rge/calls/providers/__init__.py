"""Wire format: OpenAI's chat completions and batches, and the errors of providers."""

"""Wire format: OpenAI's chat completions, and the errors and rate limits of providers."""

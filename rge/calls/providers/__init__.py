"""Wire format: OpenAI's chat completions, and the errors of providers."""

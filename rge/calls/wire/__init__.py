"""Wire format: OpenAI's chat completions, as sent and as received."""

"""One module a command of ``python -m eval``."""

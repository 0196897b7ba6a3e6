"""One module a command of ``rge eval``."""

"""One module per command of ``rge eval``."""

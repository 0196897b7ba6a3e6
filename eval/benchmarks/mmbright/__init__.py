"""MM-BRIGHT."""

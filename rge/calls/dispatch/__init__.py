"""Turn requests into calls and make them."""

"""The backbone and what is done to it: families, packed rows, attention, adapters, the embedding module."""

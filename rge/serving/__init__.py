"""A checkpoint behind an HTTP address: requests, limits, micro-batches, metrics."""

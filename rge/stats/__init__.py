"""Statistics that training, evaluation and sweeps share."""

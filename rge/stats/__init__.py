"""Statistics that training, evaluation, data preparation and sweeps share."""

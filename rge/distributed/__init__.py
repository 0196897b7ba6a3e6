"""Several processes: launching, back ends, exchanges, and what happens when one of them dies."""

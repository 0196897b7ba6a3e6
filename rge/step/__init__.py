"""The training step: its chunks and passes, the comparison of queries with all candidates, and what it reports."""

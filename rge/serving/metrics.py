"""Metrics in Prometheus' text format."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (0, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server."""

    def __init__(
        self, *, waiting: Callable[[], float], preparing: Callable[[], float], held: Callable[[], float]
    ):
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("rge_requests", "Requests by path and status; 499: the client disconnected", ["path", "code"])  # fmt: skip
        self.seconds = histogram("rge_request_seconds", "From a request's head to its answer", ["path"], buckets=SECONDS)  # fmt: skip
        self.batch_rows = histogram("rge_batch_inputs", "Inputs of a batch", ["mode"], buckets=ROWS)
        self.batch_seconds = histogram("rge_batch_seconds", "The model's time for a batch", ["mode"], buckets=SECONDS)  # fmt: skip
        self.tokens = histogram("rge_rationale_tokens", "Tokens of a rationale", buckets=TOKENS)
        self.forced = counter("rge_rationales_forced", "Rationales that reached the cap")
        for name, about, value in (
            ("rge_waiting_inputs", "Inputs waiting for the model", waiting),
            ("rge_preparing_inputs", "Inputs being decoded and tokenised, or waiting for it", preparing),
            ("rge_held_bytes", "Bodies and pictures of requests in progress", held),
        ):
            Gauge(name, about, registry=self.registry).set_function(value)

"""Metrics in Prometheus' text format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (0, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server."""

    def __init__(
        self, *, waiting: Callable[[], float], preparing: Callable[[], float], held: Callable[[], float]
    ):
        self.registry = CollectorRegistry()
        all_ = self.registry
        self.requests = Counter("rge_requests", "Requests by path and status; 499: the client disconnected", ["path", "code"], registry=all_)  # fmt: skip
        self.seconds = Histogram("rge_request_seconds", "From a request's head to its answer", ["path"], buckets=SECONDS, registry=all_)  # fmt: skip
        self.batch_rows = Histogram(
            "rge_batch_inputs", "Inputs of a batch", ["mode"], buckets=ROWS, registry=all_
        )
        self.batch_seconds = Histogram("rge_batch_seconds", "The model's time for a batch", ["mode"], buckets=SECONDS, registry=all_)  # fmt: skip
        self.tokens = Histogram(
            "rge_rationale_tokens", "Tokens of a rationale", buckets=TOKENS, registry=all_
        )
        self.forced = Counter("rge_rationales_forced", "Rationales that reached the cap", registry=all_)
        Gauge("rge_waiting_inputs", "Inputs waiting for the model", registry=all_).set_function(waiting)
        Gauge("rge_preparing_inputs", "Inputs being decoded and tokenised, or waiting for it", registry=all_).set_function(preparing)  # fmt: skip
        Gauge("rge_held_bytes", "Bodies and pictures of requests in progress", registry=all_).set_function(
            held
        )

    def text(self) -> bytes:
        """The metrics as Prometheus scrapes them."""
        return generate_latest(self.registry)

"""Dynamic batching: collects concurrent requests into micro-batches, in the thread that owns the model.

The input that has waited longest goes first, with those of its mode that are closest to it in length. A batch that is not full
waits a few milliseconds for others, but not for a lone client.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from rge.common.modes import Mode
from rge.common.schema import Encoded
from rge.model.prompts import Prompt
from rge.serving.errors import Refusal, Stopped

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The result for one input: a row of `rge.common.schema.Encoded`."""

    embedding_D: np.ndarray
    rationale: str
    num_tokens: int
    stop_reason: str


@dataclass(eq=False)
class _Waiting:
    prompt: Prompt
    mode: Mode
    since: float
    request: object  # one for all inputs of a request
    answer: "Future[Result]" = field(default_factory=Future)


class Batches:
    """The queue and the thread behind it.

    Args:
        embed: embeds prompts; called in the thread only.
        wait_s: how long a batch that is not full waits for more inputs.
        max_queue: maximum number of waiting inputs, including reserved ones.
        on_batch: called with mode, number of inputs and seconds of each batch.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[Prompt], Mode], Encoded],
        *,
        batch_size: int,
        wait_s: float,
        max_queue: int,
        on_batch: Callable[[Mode, int, float], object] = lambda mode, rows, seconds: None,
    ):
        self.embed, self.batch_size, self.wait_s, self.max_queue = embed, batch_size, wait_s, max_queue
        self.on_batch = on_batch
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._num_reserved = 0
        self._rows_per_s = 0.0
        self._has_company = False  # whether several requests were present at the last batch
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rge-batches", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the queue's thread is running."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Accepted inputs whose batch has not begun."""
        return self._num_reserved + len(self._waiting)

    @contextmanager
    def reserve(self, count: int) -> Iterator[ExitStack]:
        """Reserve space in the queue for a request while its inputs are prepared, or raise `Refusal`; closing it frees it."""
        with self._changed:
            if self.num_waiting + count > self.max_queue:
                seconds = self.num_waiting / self._rows_per_s if self._rows_per_s else 1
                wait_s = min(max(round(seconds), 1), 60)
                message = "too many inputs are waiting; try again later"
                raise Refusal(429, message, "queue_full", retry_after_s=wait_s)
            self._num_reserved += count
        with ExitStack() as reservation:
            reservation.callback(self._release, count)
            yield reservation

    def _release(self, count: int) -> None:
        with self._changed:
            self._num_reserved -= count

    async def answers(self, reservation: ExitStack, prompts: Sequence[Prompt], mode: Mode) -> list[Result]:
        """Queue a request's prompts, all of one mode, and wait for the results; cancelling removes them from the queue.

        Raises:
            Stopped: the server shuts down first.
            Exception: the model's error for one of these inputs alone.
        """
        now = time.monotonic()
        with self._changed:
            rows = [_Waiting(prompt, mode, now, reservation) for prompt in prompts]
            if self._stopping:
                raise Stopped
            self._waiting += rows
            # Under the lock that queues the inputs: in between, the thread would take this client for gone.
            reservation.close()
            self._changed.notify()
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(row.answer) for row in rows)))
        finally:
            for row in rows:
                row.answer.cancel()
            with self._changed:
                self._waiting = [row for row in self._waiting if not row.answer.cancelled()]

    def stop(self) -> None:
        """Stop accepting inputs and drop waiting ones; a running batch finishes."""
        with self._changed:
            self._stopping = True
            dropped, self._waiting = self._waiting, []
            self._changed.notify()
        for row in dropped:
            if row.answer.set_running_or_notify_cancel():
                row.answer.set_exception(Stopped())

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        ended = 0.0
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                # A client that was just answered may send its next request right away: wait, so that it joins this batch.
                expects_more = self._has_company or self._num_reserved > 0
                until = max(self._waiting[0].since, ended) + self.wait_s * expects_more
                while len(self._waiting) < self.batch_size and not self._stopping:
                    remaining_s = until - time.monotonic()
                    if remaining_s <= 0 or not self._changed.wait(remaining_s):
                        break
                batch = self._next()
            if batch:
                self._work(batch)
                with self._changed:
                    requests = {row.request for row in (*batch, *self._waiting)}
                    self._has_company = len(requests) > 1
            ended = time.monotonic()

    def _next(self) -> list[_Waiting]:
        """The oldest input and those closest to it in length, without cancelled ones."""
        if not self._waiting:  # all were cancelled, or the server shuts down
            return []
        oldest = self._waiting[0]
        alike = [row for row in self._waiting[: 8 * self.batch_size] if row.mode == oldest.mode]
        alike.sort(key=lambda row: abs(len(row.prompt) - len(oldest.prompt)))  # stable: older first
        taken = set(alike[: self.batch_size])
        batch = [row for row in self._waiting if row in taken]
        self._waiting = [row for row in self._waiting if row not in taken]
        return [row for row in batch if row.answer.set_running_or_notify_cancel()]

    def _work(self, batch: list[_Waiting]) -> None:
        began = time.monotonic()
        try:
            result = self.embed([row.prompt for row in batch], batch[0].mode)
        except Exception as error:  # noqa: BLE001 - no input may end the thread
            if len(batch) > 1:
                _log.warning("a batch of %d failed (%s: %s); retrying its inputs one by one", len(batch), type(error).__name__, error)  # fmt: skip
                for row in batch:
                    self._work([row])
                return
            batch[0].answer.set_exception(error)
            return
        seconds = time.monotonic() - began
        self._rows_per_s = 0.8 * self._rows_per_s + 0.2 * len(batch) / max(seconds, 1e-6)
        self.on_batch(batch[0].mode, len(batch), seconds)
        columns = (result.embeddings, result.rationales, result.num_rationale_tokens, result.stop_reasons)
        for row, vector, rationale, num_tokens, reason in zip(batch, *columns, strict=True):
            if np.isfinite(vector).all():
                row.answer.set_result(Result(vector, rationale, int(num_tokens), reason))
            else:
                row.answer.set_exception(ArithmeticError("the model's state is not finite"))

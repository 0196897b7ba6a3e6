"""Dynamic batching: collects concurrent requests into micro-batches for the model.

The input that has waited longest goes first, with those of its mode that are closest to it in length. A batch that is not full
waits a few milliseconds for others, but not for a lone client.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field

import numpy as np

from rge.common.modes import Mode
from rge.common.schema import Encoded
from rge.model.packing import has_room
from rge.model.prompts import Prompt
from rge.serving.errors import Refusal

MAX_FAILURES = 3
"""Failures in a row from which the model is suspected, and not the inputs."""

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
    cap: int | None
    since: float
    request: object  # one for all inputs of a request
    answer: "asyncio.Future[Result]" = field(default_factory=asyncio.Future)


class Batches:
    """The queue, used from the event loop only.

    Args:
        embed: embeds prompts, with the most tokens of each one's rationale (None: the model's); called in the model's thread.
        batch_size: most inputs of a batch.
        batch_tokens: most tokens of its prompts, each counted as the longest; a longer one is alone. None: no limit.
        wait_s: how long a batch that is not full waits for more inputs.
        max_queue: maximum number of waiting inputs, including reserved ones.
        on_batch: called with mode, number of inputs and seconds of each batch.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[Prompt], Mode, Sequence[int | None]], Encoded],
        *,
        batch_size: int,
        batch_tokens: int | None = None,
        wait_s: float,
        max_queue: int,
        on_batch: Callable[[Mode, int, float], object] = lambda mode, rows, seconds: None,
    ):
        self.embed, self.batch_size, self.wait_s, self.max_queue = embed, batch_size, wait_s, max_queue
        self.batch_tokens, self.on_batch = batch_tokens, on_batch
        self.known_good: Prompt | None = None
        """An input that the model can embed in every mode, to find out whether it still can."""
        self.num_failures = 0
        """Failures since the model last gave an embedding. A batch that is retried input by input counts by these."""
        self._running_since: float | None = None
        self._thread = ThreadPoolExecutor(1, "rge-model")
        self._working: asyncio.Task[None] | None = None  # while inputs wait
        self._arrived = asyncio.Event()
        self._waiting: list[_Waiting] = []
        self._num_reserved = 0
        self._rows_per_s = 0.0
        self._has_company = False  # whether several requests were present at the last batch
        self._ended = 0.0  # when the last batch ended

    @property
    def is_running(self) -> bool:
        """Whether the model works on a batch, which cannot be interrupted."""
        return self._running_since is not None

    @property
    def running_s(self) -> float:
        """How long the model has worked on its present batch; 0 without one."""
        since = self._running_since  # one look: the model's thread may reset it
        return 0.0 if since is None else time.monotonic() - since

    @property
    def num_waiting(self) -> int:
        """Accepted inputs whose batch has not begun."""
        return self._num_reserved + len(self._waiting)

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve space in the queue for a request while its inputs are prepared, or raise `Refusal`."""
        if self.num_waiting + count > self.max_queue:
            seconds = self.num_waiting / self._rows_per_s if self._rows_per_s else 1
            wait_s = min(max(round(seconds), 1), 60)
            raise Refusal(
                429, "too many inputs are waiting; try again later", "queue_full", retry_after_s=wait_s
            )
        self._num_reserved += count
        try:
            yield
        finally:
            self._num_reserved -= count

    async def answers(self, prompts: Sequence[Prompt], mode: Mode, cap: int | None = None) -> list[Result]:
        """Queue a request's prompts, all of one mode, and wait for the results; cancelling removes them from the queue.

        `cap` is the most tokens of a rationale; requests of different caps share a batch.

        Raises:
            Exception: the model's error for one of these inputs alone.
        """
        now, request = time.monotonic(), object()
        rows = [_Waiting(prompt, mode, cap, now, request) for prompt in prompts]
        self._waiting += rows
        self._arrived.set()
        if self._working is None or self._working.done():
            # Its log lines are not this request's alone, so without its X-Request-ID.
            self._working = asyncio.create_task(self._work(), context=Context())
        try:
            return await asyncio.gather(*(row.answer for row in rows))
        finally:
            for row in rows:
                row.answer.cancel()
            self._waiting = [row for row in self._waiting if not row.answer.cancelled()]

    def stop(self) -> None:
        """End the thread once a running batch has finished."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while self._waiting:
            # A client that was just answered may send its next request right away: wait, so that it joins this batch.
            expects_more = self._has_company or self._num_reserved > 0
            until = max(self._waiting[0].since, self._ended) + self.wait_s * expects_more
            while len(self._waiting) < self.batch_size and (remaining_s := until - time.monotonic()) > 0:
                self._arrived.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), remaining_s)
            if batch := self._next():
                await self._embed(batch)
                self._has_company = len({row.request for row in (*batch, *self._waiting)}) > 1
            self._ended = time.monotonic()

    def _run(
        self, prompts: Sequence[Prompt], mode: Mode, caps: Sequence[int | None]
    ) -> tuple[Encoded, float]:
        """Embed, in the model's thread; also returns the seconds it took, without those that the event loop was busy."""
        self._running_since = began = time.monotonic()
        try:
            return self.embed(prompts, mode, caps), time.monotonic() - began
        finally:
            self._running_since = None

    def _next(self) -> list[_Waiting]:
        """The oldest input and those closest to it in length."""
        if not self._waiting:  # all were cancelled
            return []
        oldest = self._waiting[0]
        alike = [row for row in self._waiting[: 8 * self.batch_size] if row.mode == oldest.mode]
        alike.sort(key=lambda row: abs(len(row.prompt) - len(oldest.prompt)))  # stable: older first
        taken, longest = {oldest}, len(oldest.prompt)
        for row in alike:
            longest = max(longest, len(row.prompt))
            if row is not oldest and not has_room(len(taken), longest, self.batch_size, self.batch_tokens):
                break
            taken.add(row)
        batch = [row for row in self._waiting if row in taken]
        self._waiting = [row for row in self._waiting if row not in taken]
        return batch

    async def _embed(self, batch: list[_Waiting]) -> None:
        """Embed a batch, and answer the rows that are not cancelled in the meantime."""
        loop, mode, prompts = asyncio.get_running_loop(), batch[0].mode, [row.prompt for row in batch]
        caps = [row.cap for row in batch]
        try:
            result, seconds = await loop.run_in_executor(self._thread, self._run, prompts, mode, caps)
        except Exception as error:  # noqa: BLE001 - no input may end the queue
            if len(batch) > 1:
                _log.warning("a batch of %d failed (%s: %s); retrying its inputs one by one", len(batch), type(error).__name__, error)  # fmt: skip
                for row in batch:
                    await self._embed([row])
                return
            await self._count_failure(mode)
            if not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        self._rows_per_s = 0.8 * self._rows_per_s + 0.2 * len(batch) / max(seconds, 1e-6)
        self.on_batch(mode, len(batch), seconds)
        is_finite = np.isfinite(result.embeddings).all(axis=1)
        if is_finite.any():
            self.num_failures = 0
        else:
            await self._count_failure(mode)
        columns = (
            is_finite,
            result.embeddings,
            result.rationales,
            result.num_rationale_tokens,
            result.stop_reasons,
        )
        for row, is_valid, vector, rationale, num_tokens, reason in zip(batch, *columns, strict=True):
            if row.answer.done():
                continue
            if is_valid:
                row.answer.set_result(Result(vector, rationale, int(num_tokens), reason))
            else:
                row.answer.set_exception(ArithmeticError("the model's state is not finite"))

    async def _count_failure(self, mode: Mode) -> None:
        """Count a failure; of several in a row, none if the model still embeds `known_good`, since the inputs caused them."""
        num_failures = self.num_failures + 1
        if num_failures >= MAX_FAILURES and self.known_good is not None:
            with suppress(Exception):
                result, _ = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._run, [self.known_good], mode, [None]
                )
                if np.isfinite(result.embeddings).all():
                    num_failures = 0
        self.num_failures = num_failures

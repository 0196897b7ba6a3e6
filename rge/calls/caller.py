"""Client for model APIs: rate limits, retries, budgets, and a cache that never pays twice for one answer.

An answer is stored before it is parsed, so a malformed one is paid for once; it is then requested again with the format stated.
Every call is a task; `ModelConfig.concurrency` of a model are in flight at a time. With ``mode=batch``, the calls of a model are
collected first and submitted together.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, closing, nullcontext

from rge.calls.dispatch.batch_jobs import BatchJobs
from rge.calls.dispatch.grouping import Call, Counts, Grouping, Outcome, Read
from rge.calls.dispatch.health import Health
from rge.calls.dispatch.sender import Sender
from rge.calls.failures import BudgetReached, StopCalls
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.pictures import Pictures
from rge.calls.providers.transport import Connection
from rge.calls.replies import ReplyError
from rge.calls.request import Request
from rge.calls.store import AnswerStore, BatchRow
from rge.common.commands import progress_bar
from rge.common.errors import UserError, ungrouped
from rge.common.files import open_locked
from rge.common.images import ImageError

CALLS_AHEAD = 1024
"""Calls of a model that wait for a connection, before no further requests are read."""


class Caller:
    """Calls models and stores their answers. Learned rate limits last as long as the object.

    Args:
        models: by their label in requests.
        store: cache and ledger.
        budget: cap on the total cost of all models, over all runs that share the store; None: no limit.

    Raises:
        UserError: a model's settings are invalid, or the environment variable of its key is not set.
    """

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        store: AnswerStore,
        *,
        progress: bool = False,
        budget: float | None = None,
    ):
        self.models, self.store, self.counts, self.progress = dict(models), store, Counts(), progress
        for name, model in models.items():
            check_model(f"models.{name}", model)
        self._mask = Mask(model.key() for model in models.values())
        self._health: dict[str, Health] = {}
        for model in models.values():
            self._health[model.endpoint] = Health(self._say, self._health.values())
        self._budget = budget

    def run(
        self,
        requests: Iterable[Request],
        on_outcome: Callable[[int, Outcome], object] | None = None,
        *,
        read: Read = lambda reply: None,
        title: str = "calls",
        total: int | None = None,
    ) -> list[Outcome]:
        """Answer requests, from the store where possible.

        Args:
            requests: duplicates are sent once. An iterator is read as calls are made, at most `CALLS_AHEAD` of a model ahead;
                for batches it is read to its end.
            on_outcome: receives the position and outcome of each request, as soon as it is settled; in a batch, when that has
                ended.
            read: validates a reply; unreadable ones are requested again, see `ModelConfig.reasks`.
            title: of the progress bar.
            total: of the progress bar; None: the number of requests, if it is known.

        Returns:
            One outcome per request, in order; empty with `on_outcome`.

        Raises:
            StopCalls: calls to an endpoint stopped: key, credit, budget, settings, or no answers. Calls in flight have finished,
                and all answers are stored.
            UserError: an answer cannot be stored, or another process works with batches of this store.
        """
        outcomes: dict[int, Outcome] = {}
        take = on_outcome or outcomes.__setitem__
        if total is None and isinstance(requests, Sequence):
            total = len(requests)
        with progress_bar(total=total, desc=title, disable=not self.progress, smoothing=0.05) as bar:

            def done(position: int, outcome: Outcome) -> None:
                bar.update()
                take(position, outcome)

            grouping = Grouping(self.models, self.store, self._mask, self.counts, read, done)
            asyncio.run(self._run_all(grouping, requests))
        return [outcomes[position] for position in range(len(outcomes))]

    async def _run_all(self, grouping: Grouping, requests: Iterable[Request]) -> None:
        healths = self._health.values()
        for health in healths:
            health.start()
        with self._batches_locked(), Pictures() as pictures, ungrouped(UserError):
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                runs: dict[str, _ModelRun] = {}
                endpoints = {model.endpoint for model in self.models.values()}
                batches = {
                    endpoint: rows for endpoint in endpoints if (rows := self.store.open_batches(endpoint))
                }
                for calls in grouping.calls(requests):
                    self._stop_batched(calls, batches)
                    for call in calls:
                        name = call.request.model
                        if name not in runs:
                            connection = Connection(self.models[name], self._mask)
                            health = self._health[self.models[name].endpoint]
                            sender = Sender(connection, health, self.store, self.counts, self._budget)
                            await stack.enter_async_context(connection.client)
                            runs[name] = _ModelRun(sender, grouping, pictures, group)
                        await runs[name].add(call)
                    if any(health.stopped for health in healths):
                        break
                    await asyncio.sleep(0)  # so that cached answers do not hold up calls
                if not any(health.stopped for health in healths):
                    for run in runs.values():
                        endpoint = run.sender.model.endpoint
                        group.create_task(run.make_batches(batches.get(endpoint, [])))
        if stopped := [health.stopped for health in healths if health.stopped is not None]:
            raise min(stopped, key=lambda error: isinstance(error, BudgetReached))

    def _stop_batched(self, calls: Sequence[Call], batches: Mapping[str, Sequence[BatchRow]]) -> None:
        """Stop an endpoint if one of its open batches contains some of these plain calls: they would be paid for twice."""
        for endpoint, rows in batches.items():
            keys = {
                call.key
                for call in calls
                if (model := self.models[call.request.model]).mode == "calls" and model.endpoint == endpoint
            }
            for row in rows:
                if num_calls := sum(call.key in keys for call in row.calls.values()):
                    error = StopCalls(
                        f"{endpoint}: batch {row.id or row.label} of an earlier run contains {num_calls:,} of these calls, which "
                        "would be paid for twice: run with mode=batch to collect it. If you do not want to wait for it, cancel it "
                        "at the provider first"
                    )
                    self._health[endpoint].stop(error)

    def _batches_locked(self) -> AbstractContextManager[object]:
        path = self.store.path
        if path is None or all(model.mode == "calls" for model in self.models.values()):
            return nullcontext()
        # Two processes that resume one unconfirmed batch would both create it.
        try:
            return closing(open_locked(path.with_name(f"{path.name}.batches")))
        except UserError:
            raise UserError(
                f"another process is working on batches of {path}; run the same command again when it has ended"
            ) from None

    def _say(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(f"{text}\n")


def check_answered(unanswered: Sequence[Outcome], num_calls: int, *, wait: bool, about: str = "") -> None:
    """Raise a `UserError` if calls are unanswered; unless ``wait`` (``on_unanswered``), only say so. ``about`` begins the message."""
    if not unanswered:
        return
    message = (
        f"{about}{len(unanswered)} of {num_calls} calls are unanswered, such as: {unanswered[0].error}. The other answers are stored; "
        "run the same command again to repeat only these calls"
    )
    if wait:
        raise UserError(f"{message}. on_unanswered=proceed continues without their items")
    sys.stderr.write(f"{message}; their items are left out until then\n")


class _ModelRun:
    """The calls of one model in one run."""

    def __init__(self, sender: Sender, grouping: Grouping, pictures: Pictures, group: asyncio.TaskGroup):
        self.sender, self.grouping, self.pictures, self.group = sender, grouping, pictures, group
        self._batched: list[Call] = []
        self._free = asyncio.Semaphore(sender.model.concurrency)
        self._ahead = asyncio.Semaphore(CALLS_AHEAD + sender.model.concurrency)

    async def add(self, call: Call) -> None:
        """Make a call as soon as fewer than `ModelConfig.concurrency` are in flight; waits while `CALLS_AHEAD` others do.

        With ``mode=batch``, it is only collected for `make_batches`.
        """
        if self.sender.model.mode == "batch":
            self._batched.append(call)
            return
        await self._ahead.acquire()
        self.group.create_task(self._make(call)).add_done_callback(lambda _: self._ahead.release())

    async def make_batches(self, earlier: Sequence[BatchRow]) -> None:
        """Submit the calls collected so far, and make those that the batches do not answer; unless calls have stopped.

        ``earlier`` are the endpoint's open batches of earlier runs.
        """
        health = self.sender.health
        if not self._batched or health.stopped is not None:
            return
        try:
            jobs = BatchJobs(self.sender, self.grouping, self.pictures)
            for call in await jobs.run(self._batched, earlier):
                self.group.create_task(self._make(call))
        except StopCalls as error:
            health.stop(error)

    async def _make(self, call: Call) -> None:
        """Make a call, and those that request its unreadable answers again."""
        health = self.sender.health
        async with self._free:
            try:
                calls = [call]
                while calls and health.stopped is None:
                    result = await self._answer(calls[0])
                    calls = self.grouping.record(calls[0], result) + calls[1:]
            except StopCalls as error:
                health.stop(error)

    async def _answer(self, call: Call) -> bytes | ReplyError:
        try:
            # Before the attempt, so that scaling a photograph does not count towards its time limit.
            pictures = await self.pictures.of(call.request)
            return await self.sender.call(call, pictures)
        except ImageError as error:
            return self.sender.unanswered(str(error))
        except ReplyError as error:
            return error

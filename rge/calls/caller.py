"""Client for model APIs: rate limits, retries, budgets, and a cache that never pays twice for one answer.

An answer is stored before it is parsed, so a malformed one is paid for once; it is then requested again with the format stated.
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rge.calls.dispatch.batch_jobs import BatchJobs
from rge.calls.dispatch.grouping import Call, Counts, Feed, Grouping, Outcome, Read
from rge.calls.dispatch.health import Health
from rge.calls.dispatch.sender import Sender
from rge.calls.failures import BudgetReached, Rejected, StopCalls
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.pictures import Pictures
from rge.calls.providers.batches import BatchApi
from rge.calls.providers.bodies import EncodedPictures
from rge.calls.providers.transport import Send, connections, make_client
from rge.calls.replies import ReplyError
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, StoredReply
from rge.common.commands import progress_bar
from rge.common.errors import UserError, ungrouped
from rge.common.images import ImageError

NextCall = Callable[[], Awaitable[Call | None]]


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
        self._mask = Mask(read_key(model.name, model.key_env) for model in models.values() if model.key_env)
        self._health = {model.endpoint: Health() for model in models.values()}
        self._senders = {
            name: Sender(model, self._health[model.endpoint], store, self._mask, self.counts, budget)
            for name, model in models.items()
        }

    def run(
        self,
        requests: Iterable[Request],
        on_outcome: Callable[[int, Outcome], object] | None = None,
        *,
        read: Read | None = None,
        title: str = "calls",
        total: int | None = None,
    ) -> list[Outcome]:
        """Answer requests, from the store where possible.

        Args:
            requests: duplicates are sent once. An iterator is read just far enough ahead to keep the endpoints busy.
            on_outcome: receives the position and outcome of each request, as soon as it is settled.
            read: validates a reply; unreadable ones are requested again, see `ModelConfig.reasks`.
            title: of the progress bar.
            total: of the progress bar; None: the number of requests, if it is known.

        Returns:
            One outcome per request, in order; empty with `on_outcome`.

        Raises:
            StopCalls: calls to an endpoint stopped: key, credit, budget, settings, or no answers. Calls in flight have finished,
                and all answers are stored.
            StoreError: an answer cannot be stored.
        """
        outcomes: dict[int, Outcome] = {}
        take = on_outcome or outcomes.__setitem__
        if total is None and isinstance(requests, Sequence):
            total = len(requests)
        with progress_bar(total=total, desc=title, disable=not self.progress, smoothing=0.05) as bar:

            def done(position: int, outcome: Outcome) -> None:
                bar.update()
                take(position, outcome)

            read = read or (lambda reply: None)
            feed = Feed(Grouping(self.models, self.store, self._mask, self.counts, read, done), requests)
            if feed.read_more():
                asyncio.run(self._run_all(feed))
        return [outcomes[position] for position in range(len(outcomes))]

    async def _run_all(self, feed: Feed) -> None:
        for health in self._health.values():
            health.start()
        with Pictures() as pictures, ungrouped(UserError):
            async with asyncio.TaskGroup() as group:
                feed.start(lambda name: group.create_task(self._run_model(name, feed, pictures)))
        stopped = [health.stopped for health in self._health.values() if health.stopped is not None]
        if stopped:
            raise min(stopped, key=lambda error: isinstance(error, BudgetReached))

    async def _run_model(self, name: str, feed: Feed, pictures: Pictures) -> None:
        model, sender = self.models[name], self._senders[name]
        run = _ModelRun(sender, feed.grouping, pictures, self._say)
        if model.mode == "batch":
            while sender.health.stopped is None and (calls := await feed.take_round(name)):
                await run.make_calls(await run.make_batches(calls))
        else:
            num = min(model.concurrency, len(feed.waiting[name])) if feed.ended else model.concurrency
            await run.work(lambda: feed.next_call(name), num)
        if (error := sender.health.stopped) is not None and name in feed.waiting:
            # Printed now: other models' calls and batches may take long.
            self._say(f"{error}")
            feed.close(name)

    def _say(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(f"{text}\n")


@dataclass
class _ModelRun:
    """One model in one run."""

    sender: Sender
    grouping: Grouping
    pictures: Pictures
    say: Callable[[str], None]

    async def make_calls(self, calls: Sequence[Call]) -> None:
        """Make single calls."""
        queue = iter(calls)

        async def next_call() -> Call | None:
            return next(queue, None)

        await self.work(next_call, min(self.sender.model.concurrency, len(calls)))

    async def work(self, next_call: NextCall, num_workers: int) -> None:
        """Make calls from concurrent workers until none are left."""
        sender = self.sender

        async def worker(send: Send) -> None:
            while sender.health.stopped is None and (call := await next_call()) is not None:
                calls = [call]
                while calls:
                    result = await self._answer(send, calls[0])
                    if result is None:
                        return
                    calls = self.grouping.record(calls[0], result) + calls[1:]

        if not num_workers:
            return
        async with (
            connections(sender.model, num_workers, sender.mask) as clients,
            asyncio.TaskGroup() as group,
        ):
            for number in range(num_workers):
                group.create_task(worker(clients[number % len(clients)]))

    async def _answer(self, send: Send, call: Call) -> StoredReply | ReplyError | None:
        try:
            # Before the attempt, so that scaling a photograph does not count towards its time limit.
            pictures = await self._encode(call.request)
        except ImageError as error:
            return self.sender.unanswered(call, str(error), None)
        result = await self.sender.call(send, call, pictures)
        assert not isinstance(result, Rejected)
        return result

    async def _encode(self, request: Request) -> EncodedPictures:
        return {part: await self.pictures(part) for part in request.parts if isinstance(part, Picture)}

    async def make_batches(self, calls: list[Call]) -> list[Call]:
        """Use the provider's batch API. Returns the calls still to be made one by one."""
        sender, reasks = self.sender, list[Call]()
        pending = {call.key: call for call in calls}
        if pilots := self._pilots(calls):
            await self.make_calls(pilots)
            if sender.health.stopped is not None:
                return []
            for call in pilots:
                del pending[call.key]

        def settle(key: str, result: StoredReply | ReplyError) -> None:
            sender.health.call_accepted(float("-inf"))
            if (call := pending.pop(key, None)) is not None:
                reasks.extend(self.grouping.record(call, result))

        # Files may redirect to another host; httpx does not forward the key there.
        async with make_client(sender.model, timeout=sender.model.timeout_s, follow_redirects=True) as client:
            api = BatchApi(client, sender.model, sender.mask)
            jobs = BatchJobs(sender, api, encode=self._encode, settle=settle, say=self.say)
            try:
                reasons = await jobs.run(dict(pending))
            except StopCalls as error:
                sender.health.stop(error)
                return []
        remaining = [*pending.values(), *reasks]
        if remaining:
            why = next(iter(reasons.values()), "their answers could not be read")[:300]
            self.say(f"{sender.model.name}: making {len(remaining):,} single calls, at full price: {why}")
        return remaining

    def _pilots(self, calls: Sequence[Call]) -> list[Call]:
        """Under a budget: single calls to make first, one with pictures and one without, so that estimates rest on bills."""
        sender, pilots = self.sender, dict[bool, Call]()
        model, store = sender.model, sender.store
        budget_left = store.remaining_budget(model.endpoint, model.budget, sender.budget)
        if budget_left == math.inf:
            return []
        in_flight = {key for row in store.open_batches(model.endpoint) for key, _ in row.calls.values()}
        for call in calls:
            pictures = bool(call.request.num_pictures())
            if (
                pictures in pilots
                or call.key in in_flight
                or store.billing_stats(model.endpoint, pictures).calls
            ):
                continue
            if model.max_cost(call.request) <= budget_left:
                pilots[pictures] = call
        return list(pilots.values())

"""Client for model APIs: rate limits, retries, budgets, and a cache that never pays twice for one answer.

An answer is stored before it is parsed, so a malformed one is paid for once; then it is requested again with the format named.
"""

import asyncio
import math
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rge.calls.asking.batch_jobs import BatchJobs
from rge.calls.asking.grouping import Call, Counts, Feed, Grouping, Outcome, Read
from rge.calls.asking.health import Health
from rge.calls.asking.sending import Sending
from rge.calls.failures import BudgetReached, Rejected, StopCalls
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig, check_model
from rge.calls.pictures import Pictures
from rge.calls.providers.batches import BatchApi
from rge.calls.providers.bodies import Shown
from rge.calls.providers.transport import Connections, Send
from rge.calls.replies import ReplyError
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, Kept
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.images import ImageError

__all__ = ["Caller", "Counts", "Outcome", "Read"]

NextCall = Callable[[], Awaitable[Call | None]]


class Caller:
    """Asks models and keeps their answers. What it learns of an endpoint lasts as long as it does.

    Args:
        models: by the name used in requests.
        store: where answers are kept.
        progress: show progress bars.
        rng: of the waits.
        budget: what all models together may cost, over all runs on one file of answers; None: no limit.

    Raises:
        UserError: a model's settings cannot be right, or the variable of its key is not set.
    """

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        store: AnswerStore,
        *,
        progress: bool = False,
        rng: random.Random | None = None,
        budget: float | None = None,
    ):
        self.models, self.store, self.counts, self.progress = dict(models), store, Counts(), progress
        for name, model in models.items():
            check_model(f"models.{name}", model)
        self._mask = Mask(read_key(model.name, model.key_env) for model in models.values() if model.key_env)
        self._health = {model.endpoint: Health() for model in models.values()}
        rng = rng or random.Random()
        self._sending = {
            name: Sending(model, self._health[model.endpoint], store, self._mask, self.counts, rng, budget)
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
            requests: what to ask; equal ones are asked once. An iterator is read only as far ahead as keeps the endpoints
                busy.
            on_outcome: called with the position of a request as soon as it is settled, or has no answer.
            read: an answer that it cannot read is asked for again, see `ModelConfig.reasks`.
            title: of the progress bar.
            total: how many requests there are, for the progress bar; None: as many as have a length.

        Returns:
            One outcome a request, in their order; none where `on_outcome` took them.

        Raises:
            StopCalls: an endpoint was given up: key, credit, budget, settings, or no answers. Calls under way have finished, and
                everything answered is kept.
            StoreError: an answer cannot be kept.
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
            if feed.look():
                asyncio.run(self._ask_all(feed))
        return [outcomes[position] for position in range(len(outcomes))]

    async def _ask_all(self, feed: Feed) -> None:
        for health in self._health.values():
            health.start()
        failed: list[BaseException] = []
        try:
            with Pictures() as pictures:
                async with asyncio.TaskGroup() as group:
                    feed.start(lambda name: group.create_task(self._ask_model(name, feed, pictures)))
        except* UserError as errors:
            failed.append(_first(errors))
        if failed:  # not raised above: before Python 3.11.4 it would come in a group of its own
            raise failed[0]
        stopped = [health.stopped for health in self._health.values() if health.stopped is not None]
        if stopped:
            raise min(stopped, key=lambda error: isinstance(error, BudgetReached))

    async def _ask_model(self, name: str, feed: Feed, pictures: Pictures) -> None:
        model, sending = self.models[name], self._sending[name]
        asking = _Asking(sending, feed.grouping, pictures, self._say)
        if model.mode == "batch":
            while sending.health.stopped is None and (calls := await feed.take(name)):
                await asking.by_calls(await asking.by_batches(calls))
        else:
            num = min(model.concurrency, len(feed.waiting[name])) if feed.ended else model.concurrency
            await asking.work(lambda: feed.next(name), num)
        if (error := sending.health.stopped) is not None and name in feed.waiting:
            # Printed right away: other models' calls and batches may take long.
            self._say(f"{error}")
            feed.close(name)

    def _say(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(f"{text}\n")


@dataclass
class _Asking:
    """One model in one run."""

    sending: Sending
    grouping: Grouping
    pictures: Pictures
    say: Callable[[str], None]

    async def by_calls(self, calls: Sequence[Call]) -> None:
        """Make these calls one by one."""
        queue = iter(calls)

        async def next_call() -> Call | None:
            return next(queue, None)

        await self.work(next_call, min(self.sending.model.concurrency, len(calls)))

    async def work(self, next_call: NextCall, num_workers: int) -> None:
        """Make calls until there are no more, so many at once."""
        sending = self.sending

        async def worker(send: Send) -> None:
            while sending.health.stopped is None and (call := await next_call()) is not None:
                again = [call]
                while again:
                    found = await self._answer(send, again[0])
                    if found is None:
                        return
                    again = self.grouping.settled(again[0], found) + again[1:]

        if not num_workers:
            return
        async with (
            Connections(sending.model, num_workers, sending.mask) as senders,
            asyncio.TaskGroup() as group,
        ):
            for number in range(num_workers):
                group.create_task(worker(senders[number % len(senders)]))

    async def _answer(self, send: Send, call: Call) -> Kept | ReplyError | None:
        try:
            # Before an attempt begins: scaling a photograph is no part of the time that the endpoint is given.
            shown = await self._show(call.request)
        except ImageError as error:
            return self.sending.unsendable(str(error))
        found = await self.sending.ask(send, call, shown)
        assert not isinstance(found, Rejected)
        return found

    async def _show(self, request: Request) -> Shown:
        return {part: await self.pictures(part) for part in request.parts if isinstance(part, Picture)}

    async def by_batches(self, calls: list[Call]) -> list[Call]:
        """Ask by the provider's batch mode. Returns what is left to be asked by calls."""
        sending, again = self.sending, list[Call]()
        left = {call.key: call for call in calls}
        if pilots := self._pilots(calls):
            await self.by_calls(pilots)
            if sending.health.stopped is not None:
                return []
            for call in pilots:
                del left[call.key]

        def settle(key: str, found: Kept | ReplyError) -> None:
            sending.health.accepted(float("-inf"))
            if (call := left.pop(key, None)) is not None:
                again.extend(self.grouping.settled(call, found))

        async with BatchApi(sending.model, sending.mask) as api:
            jobs = BatchJobs(sending, api, show=self._show, settle=settle, say=self.say)
            try:
                reasons = await jobs.run(dict(left))
            except StopCalls as error:
                sending.health.stop(error)
                return []
        again = [*left.values(), *again]
        if again:
            why = next(iter(reasons.values()), "their answers could not be read")[:300]
            self.say(
                f"{sending.model.name}: {len(again):,} calls are asked one by one, at the whole price: {why}"
            )
        return again

    def _pilots(self, calls: Sequence[Call]) -> list[Call]:
        """Calls to make before a batch, so that a budget rests on a bill: one with pictures, one without, if it allows them."""
        model, store, found = self.sending.model, self.sending.store, dict[bool, Call]()
        room = store.room(model.endpoint, model.budget, self.sending.budget)
        if room == math.inf:
            return []
        under_way = {key for row in store.open_batches(model.endpoint) for key, _ in row.calls.values()}
        for call in calls:
            kind = bool(call.request.num_pictures())
            if kind in found or call.key in under_way or store.learnt(model.endpoint, kind).calls:
                continue
            if model.greatest_cost(call.request) <= room:
                found[kind] = call
        return list(found.values())


def _first(errors: BaseExceptionGroup) -> BaseException:
    first: BaseException = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

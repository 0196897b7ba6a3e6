"""Client for model APIs: rate limits, retries, budgets, and a cache of answers.

An answer is stored before it is parsed, so a malformed one is paid for once; it is then requested again with the format stated.
Every call is a task; `ModelConfig.concurrency` of a model are in flight at a time. With ``mode=batch``, the calls of a model are
collected first and submitted together.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from rge.calls.batches import BatchJobs
from rge.calls.failures import BudgetReached, StopCalls
from rge.calls.grouping import Counts, Grouping, Outcome, Read
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, cache_names, check_model
from rge.calls.pace import Pace
from rge.calls.request import Request
from rge.calls.sender import Endpoint, Sender
from rge.calls.store import AnswerStore, BatchRow
from rge.calls.wire.pictures import Pictures
from rge.common.commands import progress_bar
from rge.common.errors import UserError, ungrouped
from rge.common.files import held


class Caller:
    """Calls models and stores their answers. Learned rate limits last as long as the object.

    Args:
        models: by their label in requests.
        store: cache and ledger.
        budget: cap on the total cost of all models, over all runs that share the store; None: no limit.

    Raises:
        UserError: a model's settings are invalid, the environment variable of its key is not set, or `cache_names` refuses them.
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
        cache_names(models)
        self._mask = Mask(model.key() for model in models.values())
        self._paces = {model.endpoint: Pace() for model in models.values()}
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
            requests: duplicates are sent once. An iterator is read as calls are made (`rge.calls.sender.CALLS_AHEAD`); for
                batches, to its end.
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
        call_ended = asyncio.Event()
        endpoints = {name: Endpoint(pace, self._say, call_ended) for name, pace in self._paces.items()}

        pictures = Pictures()
        with ungrouped(UserError):
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                path = self.store.path
                if path is not None and any(model.mode == "batch" for model in self.models.values()):
                    # Two processes that resume one unconfirmed batch would both create it.
                    stack.enter_context(held(path.parent, f"{path.name}.batches"))
                batches = {name: self.store.open_batches(name) for name in endpoints}
                batch_of = _batch_of(batches)
                senders: dict[str, Sender] = {}
                for calls in grouping.calls(requests):
                    for call in calls:
                        model = self.models[call.request.model]
                        if (sender := senders.get(call.request.model)) is None:
                            sender = Sender(model, grouping, pictures, endpoints, self._budget, tasks)
                            senders[call.request.model] = sender
                            await stack.enter_async_context(sender.client)
                        batch = batch_of.get((model.endpoint, call.key))
                        if model.mode == "calls" and batch is not None:
                            sender.endpoint.stop(_in_batch(model, batch))
                        await sender.add(call)
                    if _any_stopped(endpoints):
                        break
                    await asyncio.sleep(0)  # so that cached answers do not hold up calls
                for sender in senders.values():
                    if sender.collected and not _any_stopped(endpoints):
                        tasks.create_task(self._make_batches(sender, batches[sender.model.endpoint]))
        if stopped := [endpoint.stopped for endpoint in endpoints.values() if endpoint.stopped is not None]:
            raise min(stopped, key=lambda error: isinstance(error, BudgetReached))

    async def _make_batches(self, sender: Sender, earlier: Sequence[BatchRow]) -> None:
        """Submit a model's collected calls, and make those that the batches do not answer."""
        try:
            for call in await BatchJobs(sender).run(earlier):
                sender.start(call)
        except StopCalls as error:
            sender.endpoint.stop(error)

    def _say(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(f"{text}\n")


def _any_stopped(endpoints: Mapping[str, Endpoint]) -> bool:
    return any(endpoint.stopped for endpoint in endpoints.values())


def _batch_of(batches: Mapping[str, Sequence[BatchRow]]) -> dict[tuple[str, str], str]:
    """The open batch that contains a call, by the call's endpoint and key."""
    return {
        (endpoint, call.key): row.id or row.label
        for endpoint, rows in batches.items()
        for row in rows
        for call in row.calls.values()
    }


def _in_batch(model: ModelConfig, batch: str) -> StopCalls:
    """The error of a plain call that an open batch contains: it would be paid for twice."""
    why = f"batch {batch} of an earlier run contains some of these calls, which would be paid for twice"
    return StopCalls(why, model.endpoint, kind="open")


def check_answered(
    unanswered: Sequence[Outcome], num_calls: int, *, wait: bool, stage: str | None = None
) -> None:
    """Raise a `UserError` if calls are unanswered; unless ``wait`` (``on_unanswered``) or most of them are, only say so.

    ``num_calls``: all calls of the work, also those that earlier runs made.
    """
    if not unanswered:
        return
    message = (
        f"{len(unanswered)} of {num_calls} calls are unanswered, such as: {unanswered[0].error}. "
        "Run the same command again to repeat only these calls"
    )
    error = UserError(message, key=stage, kind="unanswered")
    if 2 * len(unanswered) > num_calls:
        raise error
    if wait:
        error.reason += ". on_unanswered=proceed continues without their items"
        raise error.about("on_unanswered")
    sys.stderr.write(f"{error}; their items are left out until then\n")

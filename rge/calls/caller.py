"""Ask models: limited, retried, within a budget, and never twice for the same.

A retry is counted, waits with jitter, honours ``Retry-After`` and stops at what no retry can mend. An answer is kept before it is looked at, so that a malformed one is paid for once; then it is
asked for again with the format named.
"""

import asyncio
import functools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rge.calls.batch_jobs import BatchJobs
from rge.calls.failures import (
    BudgetReached,
    CallFailed,
    EndpointDown,
    Lost,
    Rejected,
    RequestRejected,
    StopCalls,
)
from rge.calls.keys import Mask, read_key
from rge.calls.model_config import ModelConfig, check_model, known_as
from rge.calls.pace import Pace
from rge.calls.pictures import Pictures
from rge.calls.providers import engine
from rge.calls.providers.batches import Connected
from rge.calls.providers.bodies import Shown
from rge.calls.providers.transport import Answer, Connections, PolicyAnswer, Send
from rge.calls.replies import (
    UNREADABLE,
    NotAChat,
    Refused,
    Reply,
    ReplyError,
    Truncated,
    read_replies,
)
from rge.calls.request import Picture, Request
from rge.calls.store import AnswerStore, Kept
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.images import ImageError

MAX_FAILURES_IN_A_ROW = 20
"""Calls lost, or rejected, one after the other before an endpoint is held to be down, or set up wrongly."""
LOST_RUNS = 3
"""Runs in which a call may stay without an answer before it is passed over, as one whose answer cannot be read."""
KEPT_OF_FAILURE = 20_000
"""Characters of a body that is no answer, for the record of failures."""
AT_A_TIME = 1024
"""Requests that are looked up in the store at once, when the calls found so far run out."""
IN_BATCHES_AT_A_TIME = 100_000
"""Calls of a model that is asked by batches, which take hours whatever their size."""
Read = Callable[[Reply], object]
"""Looks into a reply; raises one of `rge.calls.replies.UNREADABLE` where it is to be asked for again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        key: under which the answer is kept that counts: of the last time it was asked for.
        cached: nothing was asked; the answer was kept from before.
        reply: the answer; None with ``error``.
        error: why there is none.
        failed: the call itself failed, and nothing is kept. False for a malformed answer, which is.
        lost: it failed by no fault of the request (time-outs, 5xx): worth asking again.
        reasked: how often it was asked for again because it could not be read.
    """

    key: str
    cached: bool
    reply: Reply | None = None
    error: ReplyError | None = None
    failed: bool = False
    lost: bool = False
    reasked: int = 0

    def answer(self) -> Reply:
        """The reply.

        Raises:
            ReplyError: there is none, and why.
        """
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


@dataclass
class Counts:
    """What a caller did so far.

    Attributes:
        asked: calls that were answered.
        batched: of these, by a batch.
        cached: requests whose answer was kept from before.
        retries: further attempts at lost calls.
        limited: attempts that the endpoint refused for their rate.
        failed: calls that gave nothing to keep.
        refused: answers in which the provider's policy declines.
        reasked: answers asked for again because they could not be read.
        unreadable: requests that gave no readable answer however often they were asked.
        reasons: messages of the failed calls.
    """

    asked: int = 0
    batched: int = 0
    cached: int = 0
    retries: int = 0
    limited: int = 0
    failed: int = 0
    refused: int = 0
    reasked: int = 0
    unreadable: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Draw:
    # One request of the user on its way: how often it was asked for again, and why.
    position: int
    request: Request
    reasked: int = 0
    cached: bool = True


@dataclass(slots=True)
class _Call:
    # What one HTTP call answers: draws of one prompt, and other positions that want the same.
    key: str
    request: Request
    draws: list[_Draw]


class Caller:
    """Asks models and keeps their answers. What it learns of an endpoint lasts as long as it does.

    Args:
        models: by the name used in requests.
        store: where answers are kept.
        progress: show progress bars.
        rng: of the waits.

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
    ):
        self.models, self.store, self.counts, self.progress = dict(models), store, Counts(), progress
        self._rng = rng or random.Random()
        for name, model in models.items():
            check_model(f"models.{name}", model)
        self._mask = Mask(read_key(model.name, model.key_env) for model in models.values() if model.key_env)
        self._known_as = known_as(models)
        self._lines = {model.endpoint: _Line(model.endpoint) for model in models.values()}

    def key(self, request: Request) -> str:
        """Under which the answer to a request is kept."""
        model = self.models[request.model]
        return request.key(self._known_as[request.model], model.answers_by())

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
            on_outcome: called with the position of a request as soon as it is answered.
            read: an answer that it cannot read is asked for again, see `ModelConfig.reasks`.
            title: of the progress bar.
            total: how many requests there are, for the progress bar; None: as many as have a length.

        Returns:
            One outcome a request, in their order; none where `on_outcome` took them.

        Raises:
            KeyRejected: at the first 401 or 403.
            BudgetReached: nothing more can be asked within the budget; everything answered is kept.
            EndpointDown: it answers nothing.
            RequestRejected: it accepts no request.
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

            batch = _Batch(self, read or (lambda reply: None), done)
            at_once = {
                name: IN_BATCHES_AT_A_TIME if model.mode == "batch" else AT_A_TIME
                for name, model in self.models.items()
            }
            feed = _Feed(batch, requests, at_once)
            if feed.look():
                asyncio.run(self._ask_all(feed, batch))
        return [outcomes[position] for position in range(len(outcomes))]

    async def _ask_all(self, feed: "_Feed", batch: "_Batch") -> None:
        spent: list[BudgetReached] = []
        for line in self._lines.values():
            line.start()

        async def ask(name: str, pictures: Pictures) -> None:
            model = self.models[name]
            try:
                while model.api == "vllm" and (calls := await feed.take(name)):
                    await self._ask_engine(model, calls, batch, pictures)
                if model.mode != "batch" and model.api != "vllm":
                    num_workers = (
                        min(model.concurrency, len(feed.waiting[name])) if feed.ended else model.concurrency
                    )
                    await self._ask_model(model, lambda: feed.next(name), num_workers, batch, pictures)
                while model.mode == "batch" and (calls := await feed.take(name)):
                    left = await self._ask_in_batches(model, calls, batch, pictures)
                    await self._ask_model(
                        model, _from(left), min(model.concurrency, len(left)), batch, pictures
                    )
            except* BudgetReached as errors:
                # The other models' calls are under way and paid for: they finish first.
                spent.append(_first(errors))  # type: ignore[arg-type]
                feed.close(name)

        failed: list[BaseException] = []
        try:
            with Pictures() as pictures:
                async with asyncio.TaskGroup() as group:
                    feed.start(lambda name: group.create_task(ask(name, pictures)))
        except* UserError as errors:
            failed.append(_first(errors))
        if failed:  # not raised above: before Python 3.11.4 it would come in a group of its own
            raise failed[0]
        if spent:
            raise spent[0]
        for name in feed.waiting:
            self._lines[self.models[name].endpoint].check_accepted()

    async def _ask_model(
        self,
        model: ModelConfig,
        next_call: Callable[[], Awaitable[_Call | None]],
        num_workers: int,
        batch: "_Batch",
        pictures: Pictures,
    ) -> None:
        if not num_workers:
            return
        line = self._lines[model.endpoint]
        async with Connections(model, num_workers, self._mask) as senders:

            async def worker(send: Send) -> None:
                while (call := await next_call()) is not None:
                    again = [call]
                    while again:
                        again = (
                            batch.answered(again[0], await self._ask(model, line, send, again[0], pictures))
                            + again[1:]
                        )

            async with asyncio.TaskGroup() as group:
                for number in range(num_workers):
                    group.create_task(worker(senders[number % len(senders)]))

    async def _ask_in_batches(
        self, model: ModelConfig, calls: list[_Call], batch: "_Batch", pictures: Pictures
    ) -> list[_Call]:
        """Ask by the provider's batch mode. Returns what is left to be asked by calls."""
        line, left, again = self._lines[model.endpoint], {call.key: call for call in calls}, []

        def take(key: str, kept: Kept, refused: bool) -> None:
            line.accepted()
            self.counts.asked += 1
            self.counts.batched += 1
            self.counts.refused += refused
            if (call := left.pop(key, None)) is not None:
                again.extend(batch.answered(call, kept))

        async def show(request: Request) -> Shown:
            return await self._shown(request, pictures)

        async with Connected(model, self._mask) as provider:
            jobs = BatchJobs(model, self.store, provider, self._mask, show=show, take=take, say=self._say)
            reasons = await jobs.run({call.key: call.request for call in calls})
        if left or again:
            why = next(iter(reasons.values()), "their answers could not be read")
            self._say(
                f"{model.name}: {len(left) + len(again):,} calls are asked one by one, at the whole price: {why[:300]}"
            )
        return [*left.values(), *again]

    async def _ask_engine(
        self, model: ModelConfig, calls: list[_Call], batch: "_Batch", pictures: Pictures
    ) -> None:
        """Ask vLLM in this process."""
        line, loop, waiting = self._lines[model.endpoint], asyncio.get_running_loop(), calls
        while waiting:
            some, waiting = (
                waiting[: engine.ROUNDS * model.concurrency],
                waiting[engine.ROUNDS * model.concurrency :],
            )
            ready: list[tuple[_Call, Shown]] = []
            for call in some:
                try:
                    ready.append((call, await self._shown(call.request, pictures)))
                except ImageError as error:
                    batch.answered(call, self._failed(model, call, CallFailed(self._mask(str(error)))))
            numbers = [
                self.store.begin(model.endpoint, call.key, model.estimate(call.request), 0.0, None) or 0
                for call, _ in ready
            ]
            began = time.monotonic()
            requests, shown = [call.request for call, _ in ready], [pictures for _, pictures in ready]
            try:
                work = functools.partial(engine.answers, model, requests, shown)
                found = await loop.run_in_executor(engine.thread(), work) if ready else []
            except BaseException:
                for number in numbers:  # nobody bills them
                    self.store.free(number)
                raise
            took_s = (time.monotonic() - began) / max(len(ready), 1)
            for (call, _), number, one in zip(ready, numbers, found, strict=True):
                if isinstance(one, str):
                    self.store.free(number)
                    line.rejected(model, self._mask(one), about_input=True)
                    failure = CallFailed(f"{model.name}: {self._mask(one)}")
                    batch.answered(call, self._failed(model, call, failure))
                    continue
                kept = self._keep(model, line, call, number, Answer(one, {}), (0, 0), took_s)
                self.counts.asked += 1
                waiting = [*waiting, *batch.answered(call, kept)]

    def _failed(
        self, model: ModelConfig, call: _Call, failure: CallFailed, raw: str | None = None
    ) -> CallFailed:
        self.store.fail(call.key, model.name, failure.kind, str(failure), raw)
        self.counts.failed += 1
        self.counts.reasons[str(failure)[:120]] += 1
        return failure

    async def _shown(self, request: Request, pictures: Pictures) -> Shown:
        return {part: await pictures(part) for part in request.parts if isinstance(part, Picture)}

    def _say(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(f"{text}\n")

    async def _ask(
        self, model: ModelConfig, line: "_Line", send: Send, call: _Call, pictures: Pictures
    ) -> "Kept | CallFailed":
        request = call.request
        try:
            # Before an attempt begins: scaling a photograph is no part of the time that the endpoint is given.
            shown = await self._shown(request, pictures)
            kept = await self._attempts(model, line, send, call, shown)
            self.counts.asked += 1
            return kept
        except (CallFailed, ImageError) as error:
            failure = error if isinstance(error, CallFailed) else CallFailed(self._mask(str(error)))
            raw = getattr(error.__cause__, "raw", None)
            shown_raw = self._mask(raw.decode("utf-8", "replace"))[:KEPT_OF_FAILURE] if raw else None
            self._failed(model, call, failure, shown_raw)
            if isinstance(error, CallFailed):
                line.failed(failure)
            return failure

    async def _attempts(
        self, model: ModelConfig, line: "_Line", send: Send, call: _Call, shown: Shown
    ) -> Kept:
        tokens = model.estimate(call.request)
        attempt, limited_since = 0, None
        while True:
            await line.pace.turn()
            number = await self._admitted(model, line, call, tokens)
            sent_at, answer = time.monotonic(), None
            try:
                async with asyncio.timeout(model.timeout_s):
                    answer = await self._answer(send, call.request, shown)
            except TimeoutError:
                lost = Lost(f"no answer within {model.timeout_s:g} s", billed=True)
            except Lost as error:
                lost = error
            except Rejected as error:
                self.store.free(number)
                line.rejected(model, self._mask(str(error)), error.about_input)
                raise CallFailed(f"{model.name}: {self._mask(str(error))}") from error
            except StopCalls:
                self.store.free(number)
                line.is_refusing = True
                raise
            except asyncio.CancelledError:
                # Another call ended the run. Where that was because all are turned away, this one is as well.
                (self.store.free if line.is_refusing else self.store.lose)(number)
                raise
            finally:
                line.left()
            if answer is not None:
                line.pace.answered(answer.headers)
                return self._keep(model, line, call, number, answer, tokens, time.monotonic() - sent_at)
            (self.store.lose if lost.billed else self.store.free)(number)
            now = time.monotonic()
            if lost.limited:
                self.counts.limited += 1
                limited_since = limited_since or now
                line.pace.limited(sent_at, lost.wait_s, model.backoff_s, model.max_backoff_s)
                if now - limited_since < model.max_limited_s:
                    continue
                waited = f"still refused after {model.max_limited_s:g} s (max_limited_s)"
                raise CallFailed(f"{model.name}: {self._mask(str(lost))}, {waited}", lost=True) from lost
            if attempt == model.max_retries:
                message = f"{model.name}: {self._mask(str(lost))} ({attempt + 1} attempts)"
                raise CallFailed(message, lost=True) from lost
            self.counts.retries += 1
            wait_s = min(model.max_backoff_s, model.backoff_s * 2**attempt) * self._rng.random()
            attempt += 1
            await asyncio.sleep(max(wait_s, min(lost.wait_s or 0.0, model.max_backoff_s)))

    async def _answer(self, send: Send, request: Request, shown: Shown) -> Answer:
        try:
            answer = await send(request, shown)
        except PolicyAnswer as refused:
            return refused.answer
        try:
            read_replies(answer.body)
        except NotAChat as error:
            raise Lost(
                f"the endpoint's answer is no chat reply: {error}", billed=True, raw=answer.body
            ) from None
        except ReplyError:
            pass  # an empty answer is an answer, and may have been billed
        return answer

    def _keep(
        self,
        model: ModelConfig,
        line: "_Line",
        call: _Call,
        number: int,
        answer: Answer,
        expected: tuple[int, int],
        took_s: float,
    ) -> Kept:
        input_tokens, output_tokens, cached, cost, refused = model.bill(answer.body, expected)
        kept = Kept(answer.body, input_tokens, output_tokens, cost, took_s)
        self.store.put(number, call.key, model.name, kept, cached)
        line.accepted()
        self.counts.refused += refused
        return kept

    async def _admitted(self, model: ModelConfig, line: "_Line", call: _Call, tokens: tuple[int, int]) -> int:
        worst = model.greatest_cost(call.request)
        while True:
            number = self.store.begin(model.endpoint, call.key, tokens, worst, model.budget)
            if number is not None:
                line.under_way += 1
                return number
            if not line.under_way:
                raise BudgetReached(
                    f"{model.name}: {self.store.spent(model.endpoint):.4f} of the budget {model.budget:g} is spent, and the "
                    f"next call might cost {worst:.4f}; nothing more is asked. Raise the model's budget and run the same "
                    "command again"
                )
            await line.somebody_left()

    def held_up_by(self, outcomes: Iterable[Outcome], *, works: bool) -> list[Outcome]:
        """Lost calls that the next run is to ask again, before what rests on them is done.

        Where the endpoint answers others, a call that it never answers is no outage: a server may choke on one picture. Such
        a call is passed over after `LOST_RUNS` runs.

        Args:
            outcomes: of a run.
            works: whether the endpoints answered any call.
        """
        lost = [outcome for outcome in outcomes if outcome.lost]
        return [one for one in lost if not works or self.store.num_failures(one.key) < LOST_RUNS]

    def outcome(self, draw: _Draw, key: str, found: Reply | ReplyError) -> Outcome:
        """An answer as the user gets it: without keys, which a server may echo."""
        if isinstance(found, ReplyError):
            # The error may quote the answer.
            found.args = (self._mask(str(found)),)
            return Outcome(key, draw.cached, error=found, reasked=draw.reasked)
        return Outcome(
            key, draw.cached, reply=replace(found, text=self._mask(found.text)), reasked=draw.reasked
        )


class _Batch:
    """The requests of one `Caller.run`: which calls they need, and what becomes of the answers."""

    def __init__(self, caller: Caller, read: Read, done: Callable[[int, Outcome], None]):
        self._caller, self._read, self._done = caller, read, done
        self._open: dict[str, _Call] = {}  # waiting to be asked, or under way

    def kept(self, draws: list[_Draw]) -> list[_Call]:
        """Answer from the store what is there, and group the rest into calls that nobody makes yet."""
        calls: list[_Call] = []
        waiting = draws
        while waiting:
            left: list[_Draw] = []
            for group in self._grouped(waiting):
                request = replace(group[0].request, n=_span(group))
                key = self._caller.key(request)
                if key in self._open:
                    self._open[key].draws += group
                elif kept := self._caller.store.get(key):
                    left += self._looked_at(_Call(key, request, group), kept)
                else:
                    calls.append(_Call(key, request, group))
                    self._open[key] = calls[-1]
            waiting = left
        return calls

    def answered(self, call: _Call, found: Kept | CallFailed) -> list[_Call]:
        """Hand out an answer; what cannot be read is to be asked for by the calls that are returned."""
        del self._open[call.key]
        for draw in call.draws:
            draw.cached = False
        if isinstance(found, CallFailed):
            for draw in call.draws:
                lost = found.lost
                self._done(
                    draw.position,
                    Outcome(call.key, False, error=found, failed=True, lost=lost, reasked=draw.reasked),
                )
            return []
        return self.kept(self._looked_at(call, found))

    def _looked_at(self, call: _Call, kept: Kept) -> list[_Draw]:
        again: list[_Draw] = []
        try:
            found = read_replies(kept.raw)
        except ReplyError as error:
            found = [error]
        model = self._caller.models[call.request.model]
        for draw in call.draws:
            place = draw.request.sample - call.request.sample
            if place >= len(found) and not isinstance(found[0], Refused):
                # A server that does not know `n` sends one draw: the others are still to be asked for.
                again.append(draw)
                continue
            one = found[place] if place < len(found) else found[0]
            problem: Exception | None = one if isinstance(one, ReplyError) else None
            if problem is None:
                try:
                    self._read(one)  # type: ignore[arg-type]
                except UNREADABLE as unreadable:
                    problem = unreadable
                except ReplyError:
                    pass  # a refusal or an abstention: an answer
            counts = self._caller.counts
            if isinstance(problem, UNREADABLE):
                if draw.reasked < model.reasks:
                    counts.reasked += 1
                    request = _asked_again(draw.request, problem, draw.reasked + 1)
                    again.append(_Draw(draw.position, request, draw.reasked + 1, draw.cached))
                    continue
                counts.unreadable += 1
            counts.cached += draw.cached
            self._done(draw.position, self._caller.outcome(draw, call.key, one))
        return again

    def _grouped(self, draws: Iterable[_Draw]) -> list[list[_Draw]]:
        """Draws of one prompt whose numbers follow one another, at most `draws_a_call` of them; others alone."""
        groups: list[list[_Draw]] = []
        open_groups: dict[Request, list[_Draw]] = {}
        for draw in draws:
            most = self._caller.models[draw.request.model].draws_a_call
            prompt = replace(draw.request, sample=0)
            group = open_groups.get(prompt) if most > 1 and not draw.reasked else None
            if group and draw.request.sample == group[-1].request.sample + 1 and len(group) < most:
                group.append(draw)
                continue
            groups.append([draw])
            open_groups[prompt] = groups[-1]
        return groups


class _Feed:
    """The calls that requests need, by model; requests are read when a model has none left, so that none waits for others.

    Args:
        batch: looks them up.
        requests: in order.
        at_once: calls that may wait for a model before the others have to wait for it.
    """

    def __init__(self, batch: _Batch, requests: Iterable[Request], at_once: Mapping[str, int]):
        self._batch, self._at_once = batch, at_once
        # Draws of one prompt are looked up together, or they would be asked for apart.
        self._prompts = groupby(enumerate(requests), key=lambda one: (one[1].model, one[1].parts))
        self.waiting: dict[str, deque[_Call]] = {}
        self.ended = False
        self._closed: set[str] = set()
        self._changed = asyncio.Event()
        self._start: Callable[[str], object] | None = None

    def look(self) -> bool:
        """Read on until there are calls to make; False at the end of the requests."""
        found: list[_Call] = []
        while not found and not self.ended:
            draws = list(self._some())
            self.ended = len(draws) < AT_A_TIME
            found = self._batch.kept(draws)
        for call in found:
            name = call.request.model
            if name not in self.waiting:
                self.waiting[name] = deque()
                if self._start is not None:
                    self._start(name)
            if name not in self._closed:
                self.waiting[name].append(call)
        self._changed.set()
        return bool(found)

    def _some(self) -> Iterator[_Draw]:
        number = 0
        for _, draws in self._prompts:
            for position, request in draws:
                number += 1
                yield _Draw(position, request)
            if number >= AT_A_TIME:
                return

    def start(self, start: Callable[[str], object]) -> None:
        """Have `start` called with the name of every model that is to be asked, as soon as that is known."""
        self._start = start
        for name in list(self.waiting):
            start(name)

    async def next(self, name: str) -> _Call | None:
        """A call to make; None where there is none left."""
        while not (queue := self.waiting[name]):
            if self.ended:
                return None
            if all(len(calls) < self._at_once[one] for one, calls in self.waiting.items()):
                self.look()
                continue
            # Another model is behind: what it has to be asked must not pile up.
            self._changed.clear()
            await self._changed.wait()
        call = queue.popleft()
        if len(queue) == self._at_once[name] - 1:
            self._changed.set()
        return call

    async def take(self, name: str) -> list[_Call]:
        """As many calls as may wait, for who makes them together; none at the end."""
        queue = self.waiting[name]
        while len(queue) < self._at_once[name] and not self.ended:
            self.look()
            await asyncio.sleep(0)  # the others' calls go on
        calls = [queue.popleft() for _ in range(min(len(queue), self._at_once[name]))]
        self._changed.set()
        return calls

    def close(self, name: str) -> None:
        """A model is asked nothing more: the others make the calls that they have, and no further request is read."""
        self.ended = True
        self._closed.add(name)
        self.waiting[name].clear()
        self._changed.set()


class _Line:
    """What is known of one endpoint, for all models that stand behind it: its pace, and how its last calls went."""

    def __init__(self, endpoint: str):
        self.endpoint, self.pace = endpoint, Pace()
        self.under_way = 0
        self._lost_in_a_row = self._rejected_in_a_row = 0
        self._was_accepted = self.is_refusing = False
        self._rejection: str | None = None

    def start(self) -> None:
        """A new run; events belong to an event loop, and each run has its own."""
        self._somebody_left = asyncio.Event()
        self.under_way = 0

    async def somebody_left(self) -> None:
        """Wait until a call ends."""
        self._somebody_left.clear()
        await self._somebody_left.wait()

    def left(self) -> None:
        """A call ended."""
        self.under_way -= 1
        self._somebody_left.set()

    def accepted(self) -> None:
        """An answer came."""
        self._lost_in_a_row = self._rejected_in_a_row = 0
        self._was_accepted = True

    def failed(self, error: CallFailed) -> None:
        """A call was lost after all its attempts.

        Raises:
            EndpointDown: it is one of many in a row.
        """
        if error.lost:
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise EndpointDown(f"{self._lost_in_a_row} calls in a row failed, the last with: {error}")

    def rejected(self, model: ModelConfig, reason: str, about_input: bool) -> None:
        """A request was rejected as it stands.

        Raises:
            RequestRejected: at once where the endpoint has accepted none yet and does not speak of this one's length or
                pictures; else where many in a row are rejected.
        """
        self._rejected_in_a_row += 1
        self._rejection = f"{model.name}: the endpoint rejects the request; {reason}"
        if (not about_input and not self._was_accepted) or self._rejected_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.is_refusing = True
            raise self._error()

    def check_accepted(self) -> None:
        """At the end of a batch: a stage whose calls were all rejected is not done.

        Raises:
            RequestRejected: nothing was accepted so far.
        """
        if self._rejection is not None and not self._was_accepted:
            raise self._error()

    def _error(self) -> RequestRejected:
        return RequestRejected(
            f"{self._rejection}. Change the model's settings (token_limit, send_temperature, send_seed, extra_body, "
            "max_side_px ...) and run the same command again; what was answered is kept"
        )


def _from(calls: Iterable[_Call]) -> Callable[[], Awaitable[_Call | None]]:
    queue = iter(calls)

    async def next_call() -> _Call | None:
        return next(queue, None)

    return next_call


def _span(group: list[_Draw]) -> int:
    return group[-1].request.sample - group[0].request.sample + 1


def _asked_again(request: Request, error: ReplyError, number: int) -> Request:
    said = f"Your last answer could not be read: {error.kind}."
    form = f" Answer in exactly this format:\n{request.form}" if request.form else ""
    first = request.parts if number == 1 else request.parts[:-1]  # the remark of the time before
    # A number of its own, or a model at temperature 0 with a seed would say the same again.
    return replace(
        request,
        parts=(*first, f"{said}{form}"),
        sample=request.sample + 1_000_000 if number == 1 else request.sample + 1,
        max_tokens=2 * request.max_tokens if isinstance(error, Truncated) else request.max_tokens,
    )


def _first(errors: BaseExceptionGroup) -> BaseException:
    first: Any = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

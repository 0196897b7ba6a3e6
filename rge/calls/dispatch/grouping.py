"""Group requests into calls, and match answers to requests."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from rge.calls.failures import Rejection, Unanswered
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, cache_names
from rge.calls.replies import UNREADABLE, Refused, Reply, ReplyError, Truncated, read_replies
from rge.calls.request import Request
from rge.calls.store import AnswerStore, StoredReply

CALLS_AHEAD = 1024
"""Requests read ahead per lookup in the store, and calls queued per model."""
BATCH_CALLS_AHEAD = 100_000
"""Calls queued for a model in batch mode, whose batches take hours whatever their size."""
Read = Callable[[Reply], object]
"""Validates a reply; raises one of `rge.calls.replies.UNREADABLE` to have it requested again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request: answered, refused by policy (`Refused`), rejected, or unanswered."""

    key: str  # cache key of the final answer (of the last re-request, if any)
    cached: bool  # settled from the store, without a call
    reply: Reply | None = None  # the answer; None with ``error``
    error: ReplyError | None = None  # why there is no reply
    reasked: int = 0  # times it was requested again because the answer was unreadable

    @property
    def unanswered(self) -> bool:
        """The endpoint gave no answer; the next run tries again."""
        return isinstance(self.error, Unanswered)

    @property
    def rejected(self) -> bool:
        """The endpoint cannot process this request."""
        return isinstance(self.error, Rejection)

    def answer(self) -> Reply:
        """The reply.

        Raises:
            ReplyError: why there is no reply.
        """
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


@dataclass
class Counts:
    """Statistics of a caller."""

    asked: int = 0  # calls answered
    batched: int = 0  # of these, in a batch
    cached: int = 0  # requests answered from the store
    retries: int = 0  # attempts after the first
    limited: int = 0  # attempts that got a 429
    rejected: int = 0  # calls the endpoint cannot process
    unanswered: int = 0  # calls without an answer after all retries
    refused: int = 0  # answers declined by the provider's policy
    reasked: int = 0  # answers requested again because they were unreadable
    unreadable: int = 0  # requests still unreadable after all re-requests


@dataclass(slots=True)
class PendingSample:
    """One request that is not settled yet."""

    position: int
    request: Request
    reasked: int = 0
    cached: bool = True


@dataclass(slots=True)
class Call:
    """One HTTP call, and the requests it answers: samples of one prompt, and duplicates."""

    key: str
    request: Request
    pending: list[PendingSample]


@dataclass
class Grouping:
    """The requests of one run."""

    models: Mapping[str, ModelConfig]  # by their label in requests
    store: AnswerStore
    mask: Mask  # redacts API keys that a server may echo
    counts: Counts
    read: Read
    done: Callable[[int, Outcome], None]  # receives the position and outcome of a request
    _open: dict[str, Call] = field(default_factory=dict)  # queued or in flight, by key

    def __post_init__(self) -> None:
        self._cache_names = cache_names(self.models)

    def resolve(self, pending: list[PendingSample]) -> list[Call]:
        """Settle what the store can answer, and group the rest into new calls."""
        calls: list[Call] = []
        waiting = pending
        while waiting:
            reasks: list[PendingSample] = []
            for group in self._group_samples(waiting):
                first, last = group[0].request, group[-1].request
                request = replace(first, n=last.sample - first.sample + 1)
                model = self.models[request.model]
                key = request.key(self._cache_names[request.model], model.cache_settings())
                if key in self._open:
                    self._open[key].pending += group
                elif stored := self.store.get(key):
                    reasks += self._deliver(Call(key, request, group), stored)
                elif why := self.store.rejection(key, model.sent_by()):
                    self._deliver_error(Call(key, request, group), Rejection(why))
                else:
                    calls.append(Call(key, request, group))
                    self._open[key] = calls[-1]
            waiting = reasks
        return calls

    def record(self, call: Call, result: StoredReply | ReplyError) -> list[Call]:
        """Settle the requests of a call; returns the calls that request unreadable answers again."""
        del self._open[call.key]
        for sample in call.pending:
            sample.cached = False
        if isinstance(result, ReplyError):
            self._deliver_error(call, result)
            return []
        return self.resolve(self._deliver(call, result))

    def _deliver_error(self, call: Call, error: ReplyError) -> None:
        for sample in call.pending:
            outcome = Outcome(call.key, sample.cached, error=error, reasked=sample.reasked)
            self.done(sample.position, outcome)

    def _deliver(self, call: Call, stored: StoredReply) -> list[PendingSample]:
        """Settle the requests of an answered call; returns those to request again."""
        reasks: list[PendingSample] = []
        try:
            replies = read_replies(stored.raw)
        except ReplyError as error:
            replies = [error]
        model = self.models[call.request.model]
        for sample in call.pending:
            index = sample.request.sample - call.request.sample
            if index >= len(replies) and not isinstance(replies[0], Refused):
                # A server that ignores `n` returns one sample: request the others.
                reasks.append(sample)
                continue
            reply = replies[index] if index < len(replies) else replies[0]
            problem = self._problem(reply)
            if problem is not None and sample.reasked < model.reasks:
                self.counts.reasked += 1
                request = _reask_request(sample.request, problem, sample.reasked + 1)
                reasks.append(PendingSample(sample.position, request, sample.reasked + 1, sample.cached))
                continue
            self.counts.unreadable += problem is not None
            self.counts.cached += sample.cached
            self.done(sample.position, self._outcome(sample, call.key, reply))
        return reasks

    def _problem(self, reply: Reply | ReplyError) -> ReplyError | None:
        """Why a reply is unreadable, or None; refusals and abstentions are readable."""
        try:
            if isinstance(reply, ReplyError):
                raise reply
            self.read(reply)
        except UNREADABLE as error:
            return error
        except ReplyError:
            pass
        return None

    def _outcome(self, sample: PendingSample, key: str, reply: Reply | ReplyError) -> Outcome:
        if isinstance(reply, ReplyError):
            # The error may quote the answer.
            reply.args = (self.mask(str(reply)),)
            return Outcome(key, sample.cached, error=reply, reasked=sample.reasked)
        reply = replace(reply, text=self.mask(reply.text))
        return Outcome(key, sample.cached, reply=reply, reasked=sample.reasked)

    def _group_samples(self, pending: Iterable[PendingSample]) -> list[list[PendingSample]]:
        """Group consecutive samples of one prompt, up to `draws_a_call`; others stay alone."""
        groups: list[list[PendingSample]] = []
        open_groups: dict[Request, list[PendingSample]] = {}
        for sample in pending:
            max_size = self.models[sample.request.model].draws_a_call
            prompt = replace(sample.request, sample=0)
            group = open_groups.get(prompt) if max_size > 1 and not sample.reasked else None
            if group and sample.request.sample == group[-1].request.sample + 1 and len(group) < max_size:
                group.append(sample)
                continue
            groups.append([sample])
            open_groups[prompt] = groups[-1]
        return groups


class Feed:
    """Queues of calls by model. More requests are read whenever one model's queue runs empty."""

    def __init__(self, grouping: Grouping, requests: Iterable[Request]):
        self.grouping = grouping
        # Limit of a model's queue, beyond which the other models wait for it.
        self._max_waiting = {
            name: BATCH_CALLS_AHEAD if model.mode == "batch" else CALLS_AHEAD
            for name, model in grouping.models.items()
        }
        # Samples of one prompt must be read together to share a call.
        self._prompts = groupby(enumerate(requests), key=lambda item: (item[1].model, item[1].parts))
        self.waiting: dict[str, deque[Call]] = {}
        self.ended = False
        self._changed = asyncio.Event()
        self._start: Callable[[str], object] | None = None

    def read_more(self) -> bool:
        """Read requests until some need a call; False at the end of the requests."""
        calls: list[Call] = []
        while not calls and not self.ended:
            pending = list(self._read_chunk())
            self.ended = len(pending) < CALLS_AHEAD
            calls = self.grouping.resolve(pending)
        for call in calls:
            name = call.request.model
            if name not in self.waiting:
                self.waiting[name] = deque()
                if self._start is not None:
                    self._start(name)
            self.waiting[name].append(call)
        self._changed.set()
        return bool(calls)

    def _read_chunk(self) -> Iterator[PendingSample]:
        number = 0
        for _, samples in self._prompts:
            for position, request in samples:
                number += 1
                yield PendingSample(position, request)
            if number >= CALLS_AHEAD:
                return

    def start(self, start: Callable[[str], object]) -> None:
        """Call `start` once per model, when its first call is queued."""
        self._start = start
        for name in list(self.waiting):
            start(name)

    async def next_call(self, name: str) -> Call | None:
        """The model's next call; None at the end."""
        while not (queue := self.waiting[name]):
            if self.ended:
                return None
            if all(len(calls) < self._max_waiting[other] for other, calls in self.waiting.items()):
                self.read_more()
                continue
            # Another model's queue is full: wait, to bound memory.
            self._changed.clear()
            await self._changed.wait()
        call = queue.popleft()
        if len(queue) == self._max_waiting[name] - 1:
            self._changed.set()
        return call

    async def take_round(self, name: str) -> list[Call]:
        """Take the calls of one round of batches; empty at the end."""
        queue = self.waiting[name]
        while len(queue) < self._max_waiting[name] and not self.ended:
            self.read_more()
            await asyncio.sleep(0)  # let the other models' calls proceed
        calls = [queue.popleft() for _ in range(min(len(queue), self._max_waiting[name]))]
        self._changed.set()
        return calls

    def close(self, name: str) -> None:
        """Drop a model's queue and stop reading requests; the other models finish their queues."""
        self.ended = True
        self.waiting[name].clear()
        self._changed.set()


def _reask_request(request: Request, error: ReplyError, number: int) -> Request:
    remark = f"Your last answer could not be read: {error.kind}."
    form = f" Answer in exactly this format:\n{request.form}" if request.form else ""
    first = request.parts if number == 1 else request.parts[:-1]  # without the previous remark
    # A new seed: at temperature 0 with the same seed a model would repeat its answer.
    return replace(
        request,
        parts=(*first, f"{remark}{form}"),
        sample=request.sample + 1_000_000 if number == 1 else request.sample + 1,
        max_tokens=2 * request.max_tokens if isinstance(error, Truncated) else request.max_tokens,
    )

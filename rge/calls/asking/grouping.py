"""Which calls a set of requests needs, and how answers are matched to requests."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from rge.calls.failures import Rejection, Unanswered
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, known_as
from rge.calls.replies import UNREADABLE, Refused, Reply, ReplyError, Truncated, read_replies
from rge.calls.request import Request
from rge.calls.store import AnswerStore, Kept

AT_A_TIME = 1024
"""Requests that are looked up in the store at once, when the calls found so far run out."""
IN_BATCHES_AT_A_TIME = 100_000
"""Calls of a model that is asked by batches, which take hours whatever their size."""
Read = Callable[[Reply], object]
"""Looks into a reply; raises one of `rge.calls.replies.UNREADABLE` where it is to be asked for again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: answered, refused by policy (`Refused`), rejected, or unanswered."""

    key: str  # under which the answer is kept that counts: of the last time it was asked for
    cached: bool  # nothing was asked; what became of it was kept from before
    reply: Reply | None = None  # the answer; None with ``error``
    error: ReplyError | None = None  # why there is none
    reasked: int = 0  # how often it was asked for again because it could not be read

    @property
    def unanswered(self) -> bool:
        """No answer, by no fault of the request: the next run asks again."""
        return isinstance(self.error, Unanswered)

    @property
    def rejected(self) -> bool:
        """The endpoint cannot take this one request."""
        return isinstance(self.error, Rejection)

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
    """What a caller did so far."""

    asked: int = 0  # calls that were answered
    batched: int = 0  # of these, by a batch
    cached: int = 0  # requests whose answer was kept from before
    retries: int = 0  # further attempts at calls without an answer
    limited: int = 0  # attempts that the endpoint refused for their rate
    rejected: int = 0  # calls that the endpoint cannot take
    unanswered: int = 0  # calls without an answer after all attempts
    refused: int = 0  # answers in which the provider's policy declines
    reasked: int = 0  # answers asked for again because they could not be read
    unreadable: int = 0  # requests that gave no readable answer however often they were asked


@dataclass(slots=True)
class Pending:
    """One request of the user on its way: how often it was asked for again."""

    position: int
    request: Request
    reasked: int = 0
    cached: bool = True


@dataclass(slots=True)
class Call:
    """What one HTTP call answers: samples of one prompt, and other positions that want the same."""

    key: str
    request: Request
    pending: list[Pending]


@dataclass
class Grouping:
    """The requests of one run."""

    models: Mapping[str, ModelConfig]  # by the name used in requests
    store: AnswerStore
    mask: Mask  # of keys, which a server may echo
    counts: Counts
    read: Read
    done: Callable[[int, Outcome], None]  # called with the position of a request and its outcome
    _open: dict[str, Call] = field(default_factory=dict)  # waiting to be asked, or under way

    def __post_init__(self) -> None:
        self._known_as = known_as(self.models)

    def unsettled(self, pending: list[Pending]) -> list[Call]:
        """Settle what the store knows, and group the rest into calls that are not on their way yet."""
        calls: list[Call] = []
        waiting = pending
        while waiting:
            left: list[Pending] = []
            for group in self._grouped(waiting):
                request = replace(group[0].request, n=_span(group))
                model = self.models[request.model]
                key = request.key(self._known_as[request.model], model.answers_by())
                if key in self._open:
                    self._open[key].pending += group
                elif kept := self.store.get(key):
                    left += self._looked_at(Call(key, request, group), kept)
                elif why := self.store.rejection(key, model.sent_by()):
                    self._settle(Call(key, request, group), Rejection(why))
                else:
                    calls.append(Call(key, request, group))
                    self._open[key] = calls[-1]
            waiting = left
        return calls

    def settled(self, call: Call, found: Kept | ReplyError) -> list[Call]:
        """Hand out the results of a call; returns calls that ask again for what cannot be read."""
        del self._open[call.key]
        for one in call.pending:
            one.cached = False
        if isinstance(found, ReplyError):
            self._settle(call, found)
            return []
        return self.unsettled(self._looked_at(call, found))

    def _settle(self, call: Call, error: ReplyError) -> None:
        for one in call.pending:
            self.done(one.position, Outcome(call.key, one.cached, error=error, reasked=one.reasked))

    def _looked_at(self, call: Call, kept: Kept) -> list[Pending]:
        again: list[Pending] = []
        try:
            found = read_replies(kept.raw)
        except ReplyError as error:
            found = [error]
        model = self.models[call.request.model]
        for one in call.pending:
            place = one.request.sample - call.request.sample
            if place >= len(found) and not isinstance(found[0], Refused):
                # A server that does not know `n` sends one sample: the others are still to be asked for.
                again.append(one)
                continue
            answer = found[place] if place < len(found) else found[0]
            problem = self._problem(answer)
            if problem is not None and one.reasked < model.reasks:
                self.counts.reasked += 1
                request = _asked_again(one.request, problem, one.reasked + 1)
                again.append(Pending(one.position, request, one.reasked + 1, one.cached))
                continue
            self.counts.unreadable += problem is not None
            self.counts.cached += one.cached
            self.done(one.position, self._outcome(one, call.key, answer))
        return again

    def _problem(self, answer: Reply | ReplyError) -> ReplyError | None:
        """Why an answer cannot be read; refusals and abstentions can."""
        try:
            if isinstance(answer, ReplyError):
                raise answer
            self.read(answer)
        except UNREADABLE as error:
            return error
        except ReplyError:
            pass
        return None

    def _outcome(self, one: Pending, key: str, found: Reply | ReplyError) -> Outcome:
        if isinstance(found, ReplyError):
            # The error may quote the answer.
            found.args = (self.mask(str(found)),)
            return Outcome(key, one.cached, error=found, reasked=one.reasked)
        reply = replace(found, text=self.mask(found.text))
        return Outcome(key, one.cached, reply=reply, reasked=one.reasked)

    def _grouped(self, pending: Iterable[Pending]) -> list[list[Pending]]:
        """Samples of one prompt whose numbers follow one another, at most `draws_a_call` of them; others alone."""
        groups: list[list[Pending]] = []
        open_groups: dict[Request, list[Pending]] = {}
        for one in pending:
            most = self.models[one.request.model].draws_a_call
            prompt = replace(one.request, sample=0)
            group = open_groups.get(prompt) if most > 1 and not one.reasked else None
            if group and one.request.sample == group[-1].request.sample + 1 and len(group) < most:
                group.append(one)
                continue
            groups.append([one])
            open_groups[prompt] = groups[-1]
        return groups


class Feed:
    """The calls that requests need, by model; requests are read when a model has none left, so that none waits for others."""

    def __init__(self, grouping: Grouping, requests: Iterable[Request]):
        self.grouping = grouping
        # Calls that may wait for a model before the others have to wait for it.
        self._at_once = {
            name: IN_BATCHES_AT_A_TIME if model.mode == "batch" else AT_A_TIME
            for name, model in grouping.models.items()
        }
        # Samples of one prompt are looked up together, or they would be asked for apart.
        self._prompts = groupby(enumerate(requests), key=lambda one: (one[1].model, one[1].parts))
        self.waiting: dict[str, deque[Call]] = {}
        self.ended = False
        self._closed: set[str] = set()
        self._changed = asyncio.Event()
        self._start: Callable[[str], object] | None = None

    def look(self) -> bool:
        """Read on until there are calls to make; False at the end of the requests."""
        found: list[Call] = []
        while not found and not self.ended:
            pending = list(self._some())
            self.ended = len(pending) < AT_A_TIME
            found = self.grouping.unsettled(pending)
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

    def _some(self) -> Iterator[Pending]:
        number = 0
        for _, samples in self._prompts:
            for position, request in samples:
                number += 1
                yield Pending(position, request)
            if number >= AT_A_TIME:
                return

    def start(self, start: Callable[[str], object]) -> None:
        """Call `start` with the name of every model, as soon as it is needed."""
        self._start = start
        for name in list(self.waiting):
            start(name)

    async def next(self, name: str) -> Call | None:
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

    async def take(self, name: str) -> list[Call]:
        """Take as many calls as one round of batches has room for; none at the end."""
        queue = self.waiting[name]
        while len(queue) < self._at_once[name] and not self.ended:
            self.look()
            await asyncio.sleep(0)  # the others' calls go on
        calls = [queue.popleft() for _ in range(min(len(queue), self._at_once[name]))]
        self._changed.set()
        return calls

    def close(self, name: str) -> None:
        """Ask a model nothing more: the others make the calls that they have, and no further request is read."""
        self.ended = True
        self._closed.add(name)
        self.waiting[name].clear()
        self._changed.set()


def _span(group: list[Pending]) -> int:
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

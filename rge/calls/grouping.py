"""Group requests into calls, and match answers to requests."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from rge.calls.failures import Rejection, Unanswered
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig, cache_names
from rge.calls.request import Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import (
    UNREADABLE,
    EmptyChoices,
    Refused,
    Reply,
    ReplyError,
    TooLong,
    Truncated,
    lack,
    read_replies,
)

REQUESTS_AT_ONCE = 1024
"""Requests that are looked up in the store together."""
OF_THE_CALL = (Refused, Unanswered, Rejection)
"""Errors of a call that are those of all its samples."""
MAX_CHARACTERS_PER_TOKEN = 64
"""An answer with more characters than this times ``max_tokens`` did not obey it."""
Replies = list[Reply | ReplyError]
"""The samples of a call."""
Read = Callable[[Reply], object]
"""Validates a reply; raises one of `rge.calls.wire.replies.UNREADABLE` to have it requested again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request: answered, refused by policy (`Refused`), rejected, or unanswered."""

    key: str  # cache key of the final answer (of the last re-request, if any)
    cached: bool  # settled from the store, without a call
    reply: Reply | None = None  # the answer; None with ``error``
    error: ReplyError | None = None  # why there is no reply

    @property
    def unanswered(self) -> bool:
        """The endpoint gave no answer; the next run tries again."""
        return isinstance(self.error, Unanswered)

    @property
    def rejected(self) -> bool:
        """The endpoint cannot process this request."""
        return isinstance(self.error, Rejection)

    def answer(self) -> Reply:
        """The reply. Raises `ReplyError`: why there is no reply."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


@dataclass
class Counts:
    """Statistics of a caller."""

    asked: int = 0  # calls answered
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
    answered: set[str] = field(default_factory=set)  # keys of calls that this run has made
    _open: dict[str, Call] = field(default_factory=dict)  # queued or in flight, by key

    def __post_init__(self) -> None:
        self._cache_names = cache_names(self.models)

    def calls(self, requests: Iterable[Request]) -> Iterator[list[Call]]:
        """Read requests, `REQUESTS_AT_ONCE` at a time, and yield the calls for those that the store cannot answer."""
        pending: list[PendingSample] = []
        # Samples of one prompt must be read together to share a call.
        for _, samples in groupby(enumerate(requests), key=lambda item: (item[1].model, item[1].parts)):
            pending += [PendingSample(position, request) for position, request in samples]
            if len(pending) >= REQUESTS_AT_ONCE:
                yield self.resolve(pending)
                pending = []
        yield self.resolve(pending)

    def resolve(self, pending: list[PendingSample]) -> list[Call]:
        """Settle what the store can answer, and group the rest into new calls."""
        calls: list[Call] = []
        waiting = pending
        while waiting:
            reasks: list[PendingSample] = []
            for call in self._calls_for(waiting):
                if call.key in self._open:
                    self._open[call.key].pending += call.pending
                elif (replies := self.stored(call)) is not None:
                    reasks += self._deliver(call, replies)
                else:
                    calls.append(call)
                    self._open[call.key] = call
            waiting = reasks
        return calls

    def _calls_for(self, pending: Iterable[PendingSample]) -> Iterator[Call]:
        """Calls that answer these requests: consecutive samples of one prompt together, up to `ModelConfig.draws_a_call`."""
        groups: list[list[PendingSample]] = []
        last_groups: dict[Request, list[PendingSample]] = {}
        for sample in pending:
            max_size = 1 if sample.reasked else self.models[sample.request.model].draws_a_call
            prompt = replace(sample.request, sample=0)
            group = last_groups.get(prompt, [])
            follows = group and sample.request.sample == group[-1].request.sample + 1
            if not follows or len(group) >= max_size:
                group = last_groups[prompt] = []
                groups.append(group)
            group.append(sample)
        for group in groups:
            call = self._call_of(group)
            if len(group) == 1 or call.key in self._open or self._is_stored(call):
                yield call
                continue
            # Without samples that were answered singly, before `draws_a_call` was raised.
            for is_stored, samples in groupby(group, lambda sample: self._is_stored(self._call_of([sample]))):
                part = list(samples)
                yield from map(self._call_of, [[sample] for sample in part] if is_stored else [part])

    def _call_of(self, group: list[PendingSample]) -> Call:
        """The call for consecutive samples of one prompt."""
        first, last = group[0].request, group[-1].request
        request = replace(first, n=last.sample - first.sample + 1)
        return Call(self._key(request), request, group)

    def _key(self, request: Request) -> str:
        return request.key(self._cache_names[request.model], self.models[request.model].cache_settings())

    def _is_stored(self, call: Call) -> bool:
        return self.stored(call) is not None

    def stored(self, call: Call) -> Replies | None:
        """The stored answer to a call, or the recorded rejection of it; None: neither, or it has no content, so it is open."""
        if (stored := self.store.get(call.key)) is not None:
            replies = samples(stored)
            if any(isinstance(reply, Reply | Refused) for reply in replies) or call.key in self.answered:
                return replies
            return replies if any(self._leads_on(sample, replies) for sample in call.pending) else None
        why = self.store.rejection(call.key, self.models[call.request.model].sent_by())
        return None if why is None else [Rejection(why)]

    def _leads_on(self, sample: PendingSample, replies: Replies) -> bool:
        """Whether an answer that was cut off before it had content was requested again, with more room, and got one."""
        error = next((reply for reply in replies if isinstance(reply, Truncated)), None)
        request, number = sample.request, sample.reasked
        while error is not None and number < self.models[request.model].reasks:
            number += 1
            request = _reask_request(request, error, number)
            if (stored := self.store.get(self._key(request))) is None:
                return False
            if (found := lack(stored)) is None:
                return True
            error = found if isinstance(found, Truncated) else None
        return False

    def may_reask(self, call: Call) -> bool:
        """Whether an unreadable answer to a call is requested again."""
        return any(sample.reasked < self.models[call.request.model].reasks for sample in call.pending)

    def record(self, call: Call, replies: Replies) -> list[Call]:
        """Settle the requests of a call; returns the calls that request unreadable answers again."""
        del self._open[call.key]
        for sample in call.pending:
            sample.cached = False
        return self.resolve(self._deliver(call, replies))

    def _deliver(self, call: Call, replies: Replies) -> list[PendingSample]:
        """Settle the requests of a call; returns those to request again."""
        reasks: list[PendingSample] = []
        model = self.models[call.request.model]
        for sample in call.pending:
            index = sample.request.sample - call.request.sample
            if index >= len(replies):
                if not isinstance(replies[0], OF_THE_CALL):
                    # A server that ignores `n` returns one sample: request the others.
                    reasks.append(sample)
                    continue
                index = 0
            reply = _within_limit(replies[index], sample.request)
            if isinstance(reply, EmptyChoices) and call.request.n > 1:
                reasks.append(sample)  # by itself: others of its call have content
                continue
            problem = self._problem(reply)
            if problem is not None and sample.reasked < model.reasks:
                self.counts.reasked += 1
                request = _reask_request(sample.request, problem, sample.reasked + 1)
                reasks.append(PendingSample(sample.position, request, sample.reasked + 1, sample.cached))
                continue
            if isinstance(reply, Truncated):  # it never had any content
                self.counts.unanswered += 1
                reply = Unanswered(model.name, reply)
            else:
                self.counts.unreadable += problem is not None
            self.counts.cached += sample.cached
            self.done(sample.position, self._outcome(call.key, sample.cached, reply))
        return reasks

    def _problem(self, reply: Reply | ReplyError) -> ReplyError | None:
        """Why a reply is unreadable, or None; refusals and abstentions are readable."""
        if isinstance(reply, Reply):
            try:
                self.read(reply)
            except ReplyError as error:
                reply = error
        return reply if isinstance(reply, UNREADABLE) else None

    def _outcome(self, key: str, cached: bool, reply: Reply | ReplyError) -> Outcome:
        if isinstance(reply, ReplyError):
            # The error may quote the answer.
            reply.args = (self.mask(str(reply)),)
            return Outcome(key, cached, error=reply)
        return Outcome(key, cached, replace(reply, text=self.mask(reply.text)))


def samples(answer: bytes) -> Replies:
    """The samples of a stored answer; one error if it has none."""
    try:
        return read_replies(answer)
    except ReplyError as error:
        return [error]


def _within_limit(reply: Reply | ReplyError, request: Request) -> Reply | ReplyError:
    """The reply, or an error if it is far longer than its request allows."""
    limit = MAX_CHARACTERS_PER_TOKEN * request.max_tokens
    if isinstance(reply, Reply) and len(reply.text) > limit:
        return TooLong(f"the answer has {len(reply.text):,} characters for max_tokens={request.max_tokens:,}")
    return reply


def _reask_request(request: Request, error: ReplyError, number: int) -> Request:
    remark = f"Your last answer could not be read: {error.kind}."
    form = f" Answer in exactly this format:\n{request.form}" if request.form else ""
    first = request.parts if number == 1 else request.parts[:-1]  # without the previous remark
    # A new seed, which no other draw has: at temperature 0 with the same seed a model would repeat its answer.
    return replace(
        request,
        parts=(*first, f"{remark}{form}"),
        sample=request.sample + 1_000_000,
        max_tokens=2 * request.max_tokens if isinstance(error, Truncated) else request.max_tokens,
    )

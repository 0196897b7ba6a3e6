"""Calls through a provider's batch API: submitted together, polled over any number of runs, cached one by one.

A batch and an attempt of each of its calls are in the ledger, at the most they may cost, before anything is sent. So a budget
holds for what is under way, and a killed process rediscovers its batches: one whose name is known is waited for, one whose
creation may or may not have been accepted is looked for at the provider before it is created again.
"""

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rge.calls.asking.grouping import Call
from rge.calls.asking.sending import Sending, budget_reached
from rge.calls.failures import EndpointDown, Lost, NotThere, Rejected, RequestRejected, StopCalls
from rge.calls.model_config import Learnt
from rge.calls.providers.batches import MOST_BYTES, MOST_CALLS, Line, Provider, State
from rge.calls.providers.bodies import Shown, body
from rge.calls.providers.transport import PolicyAnswer, encoded, failure
from rge.calls.replies import NotAChat, ReplyError, read_replies
from rge.calls.request import Request
from rge.calls.store import BatchRow, Kept
from rge.common.images import ImageError

T = TypeVar("T")
Show = Callable[[Request], Awaitable[Shown]]
Settle = Callable[[str, Kept | ReplyError], object]
Say = Callable[[str], object]

LOOKS = 3
"""At the provider's list of batches, one `ModelConfig.batch_poll_s` apart, before one that is not there counts as not accepted."""
FAILED_LOOKS = 20
"""In a row, before an endpoint is held to be down."""
EXPIRED, CANCELLED = ("expired", "EXPIRED"), ("cancelled", "canceled", "CANCELLED")
"""Ends of a batch after which calls without a result were not made, and are not billed."""


@dataclass(slots=True)
class _Waiting:
    # A batch under way. `guess`: Anthropic's, which may turn out to be another program's.
    row: BatchRow
    id: str
    guess: bool = False
    word: str = ""


class BatchJobs:
    """Batches of one endpoint; `settle` is told key and answer, or rejection, of each call, wanted now or not."""

    def __init__(self, sending: Sending, provider: Provider, *, show: Show, settle: Settle, say: Say):
        self.sending, self.provider, self.show, self.settle, self.say = sending, provider, show, settle, say
        self.model, self.store, self.mask = sending.model, sending.store, sending.mask
        self.left: dict[str, str] = {}  # why, by key, a call has no answer by a batch
        self._wanted: Mapping[str, Call] = {}
        self._waiting: list[_Waiting] = []
        self._others: set[str] = set()

    async def run(self, wanted: Mapping[str, Call]) -> dict[str, str]:
        """Answer calls by batches.

        Returns:
            Why, by key, the others have no answer: they failed, expired, or got lost, and are to be asked by calls.

        Raises:
            StopCalls: the budget is reached, after what is under way; the provider does not answer, rejects the batch, has
                cancelled it, or takes too long: the same command continues from there.
        """
        # Two processes that find the same batch begun would both look for it, and create it twice.
        self.store.hold_batches()
        self._wanted = wanted
        queue = deque(await self._resume())
        while queue or self._waiting:
            full = False
            while queue and not full:
                full = await self._send_some(queue)
            if full and not self._waiting:
                worst = self._greatest_cost(queue[0].request)
                raise budget_reached(self.model, self.store, self.sending.budget, worst)
            if self._waiting:
                queue.extend(wanted[key] for key in await self._wait_for_some() if key in wanted)
        return {key: why for key, why in self.left.items() if key in wanted}

    async def _resume(self) -> list[Call]:
        """Take up what earlier runs have under way; returns what is in none of it."""
        under_way: set[str] = set()
        rows = self.store.open_batches(self.model.endpoint)
        self._others = {row.id for row in rows if row.id is not None}
        for row in rows:
            keys = {key for key, _ in row.calls.values()}
            if not keys & self._wanted.keys():
                continue
            found = _Waiting(row, row.id) if row.id is not None else await self._find_accepted(row)
            if found is None:
                self.store.settle_batch(row.label, billed=False)
                continue
            self.say(f"{self.model.name}: waits for batch {found.id} of an earlier run, {len(keys):,} calls")
            self._waiting.append(found)
            under_way |= keys
        return [call for key, call in self._wanted.items() if key not in under_way]

    # ------------------------------------------------------------------------------------------------------ sending up

    async def _send_some(self, queue: deque[Call]) -> bool:
        """Send one batch up. Returns whether the budget or the provider's queue has no room for more."""
        model, store = self.model, self.store
        some = await self._pack(queue)
        if not some:
            return False
        label, began = f"rge-{secrets.token_hex(8)}", time.time()
        requests = {call.key: call.request for call, _ in some}
        calls = [
            (key, model.estimate(request, self._learnt(request)), self._greatest_cost(request))
            for key, request in requests.items()
        ]
        taken = store.begin_batch(
            label, model.endpoint, began, calls, model.budget, total=self.sending.budget
        )
        queue.extendleft(call for call, _ in reversed(some[taken:]))
        if not taken:
            return True
        row = BatchRow(label, began, None, None, store.batch_calls(label))
        lines = [
            self.provider.line(f"{label}-{number}", made) for number, (_, made) in enumerate(some[:taken])
        ]
        try:
            found = await self._sent(row, lines)
        except StopCalls:
            store.settle_batch(label, billed=False)
            raise
        if found is None:
            store.settle_batch(label, billed=False)
            queue.extendleft(call for call, _ in reversed(some[:taken]))
            return True
        self._waiting.append(found)
        self.say(f"{model.name}: batch {found.id} of {taken:,} calls is under way")
        return taken < len(some)

    async def _pack(self, queue: deque[Call]) -> list[tuple[Call, bytes]]:
        """Take calls, with their bodies, up to what a batch may hold."""
        some, num_bytes = list[tuple[Call, bytes]](), 0
        while queue and len(some) < MOST_CALLS:
            call = queue.popleft()
            try:
                made = encoded(body(self.model, call.request, await self.show(call.request)))
            except ImageError as error:
                self.left[call.key] = str(error)  # a call meets it again, and counts it
                continue
            if some and num_bytes + len(made) > MOST_BYTES:
                queue.appendleft(call)
                break
            some.append((call, made))
            num_bytes += len(made) + 200
        return some

    def _learnt(self, request: Request) -> Learnt:
        return self.store.learnt(self.model.endpoint, bool(request.num_pictures()))

    def _greatest_cost(self, request: Request) -> float:
        return self.model.greatest_cost(request, self._learnt(request), batch=True)

    async def _sent(self, row: BatchRow, lines: list[bytes]) -> _Waiting | None:
        """Create a batch, once. None: the provider has no room for it now, and others are under way.

        Raises:
            StopCalls: it was not created.
        """
        model, tries, limited_since = self.model, 0, None
        while True:
            try:
                return await self._create(row, lines)
            except (Rejected, PolicyAnswer) as error:
                said = error if isinstance(error, Rejected) else error.answer.body.decode("utf-8", "replace")
                raise RequestRejected(
                    f"{model.name}: the endpoint rejects the batch; {self.mask(str(said))}. Change the model's settings, or "
                    "ask by calls (mode=calls)"
                ) from None
            except StopCalls as error:
                raise type(error)(f"{error} (mode=batch)") from None
            except Lost as error:
                lost, said = error, self.mask(str(error))
            if lost.limited and self._waiting:
                return None
            if lost.limited:
                now = time.monotonic()
                limited_since = limited_since or now
                wait_s = min(lost.wait_s or model.batch_poll_s, model.max_backoff_s)
                why = f"still refused after {model.max_limited_s:g} s (max_limited_s)"
                give_up = now - limited_since > model.max_limited_s
            else:
                wait_s = min(model.max_backoff_s, model.backoff_s * 2**tries)
                tries += 1
                why, give_up = f"{tries} attempts", tries > model.max_retries
            if give_up:
                raise EndpointDown(f"{model.name}: takes no batch ({why}), the last time with: {said}")
            await asyncio.sleep(wait_s)

    async def _create(self, row: BatchRow, lines: list[bytes]) -> _Waiting:
        if row.file is None and (file := await self.provider.send_file(row.label, lines)) is not None:
            row.file = file
            self.store.note_batch(row.label, file=file)
        try:
            id = await self.provider.create(row.label, row.file, lines)
        except Lost as lost:
            if not lost.limited and (found := await self._find_accepted(row)) is not None:
                return found
            raise
        self.store.note_batch(row.label, id=id)
        self._others.add(id)
        return _Waiting(row, id)

    async def _find_accepted(self, row: BatchRow) -> _Waiting | None:
        """A batch whose creation got no answer, if the provider has it."""
        for _ in range(LOOKS):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                id = await self._poll(
                    f"whether batch {row.label} was accepted", partial(self.provider.find, row, self._others)
                )
            except Rejected as error:
                raise EndpointDown(
                    f"{self.model.name}: lists no batches ({self.mask(str(error))}), so it is not known whether {row.label} was "
                    "accepted; the same command looks again"
                ) from None
            if id is not None:
                guess = self.model.api == "anthropic"
                if not guess:
                    self.store.note_batch(row.label, id=id)
                self._others.add(id)
                return _Waiting(row, id, guess)
        return None

    async def _poll(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the provider something about batches, which costs nothing, until it answers.

        Raises:
            EndpointDown: it does not, however often it is asked.
        """
        for _ in range(FAILED_LOOKS):
            try:
                return await ask()
            except Lost as error:
                said = self.mask(str(error))
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.max_backoff_s))
        raise EndpointDown(
            f"{self.model.name}: does not say {what} ({FAILED_LOOKS} attempts), the last time: {said}. Nothing is lost: the same "
            "command waits on"
        )

    # ----------------------------------------------------------------------------------------------------- waiting for

    async def _wait_for_some(self) -> list[str]:
        """Wait until a batch has ended, and settle it. Returns keys of calls that are to be sent up again."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self.model.batch_poll_s)
            ended, again = [], []
            for one in self._waiting:
                try:
                    state = await self._poll(
                        f"how far batch {one.id} is", partial(self.provider.state, one.id)
                    )
                except (Rejected, NotThere) as error:
                    # Deleted, or older than the provider keeps results: what it cost is not known.
                    self.store.settle_batch(one.row.label, billed=True)
                    raise self._not_bought_again(one, f"is gone: {self.mask(str(error))}") from None
                if state.word != one.word:
                    one.word = state.word
                    self.say(f"{self.model.name}: batch {one.id}: {state.word}")
                if state.ended:
                    ended.append(one)
                    again += await self._settled(one, state, alone=len(self._waiting) == len(ended))
            self._waiting = [one for one in self._waiting if one not in ended]
            if ended:
                return again
            if time.monotonic() - began > self.model.batch_wait_s:
                words = ", ".join(f"{one.id} ({one.word})" for one in self._waiting)
                raise EndpointDown(
                    f"{self.model.name}: waited {self.model.batch_wait_s:g} s (batch_wait_s) for batches {words}. They go on at the "
                    "provider, and the same command waits for them again"
                )

    async def _settled(self, one: _Waiting, state: State, *, alone: bool) -> list[str]:
        """Keep what a batch that has ended has brought. Returns keys of calls that are to be sent up again."""
        label, keys = one.row.label, [key for key, _ in one.row.calls.values()]
        if state.reason is not None:
            self.store.settle_batch(label, billed=False)
            if state.queue_full and not alone:
                return keys
            fix = (
                "Wait until fewer tokens are queued there"
                if state.queue_full
                else "Change the model's settings"
            )
            raise RequestRejected(
                f"{self.model.name}: batch {one.id} failed: {self.mask(state.reason)}. {fix}, or ask by calls (mode=calls), and "
                "run the same command again"
            )
        stop: list[StopCalls] = []
        if not await self._kept(one, state, stop):
            # Another program's, of the same size and time. The next look leaves it out.
            found = await self._find_accepted(one.row)
            if found is None:
                self.store.settle_batch(label, billed=False)
                return keys
            self._waiting.append(found)
            return []
        missing = self.store.batch_calls(label)
        for key, _ in missing.values():
            self.left[key] = f"batch {one.id} ({state.word}) has no result of it"
        self.store.settle_batch(label, billed=state.word not in (*EXPIRED, *CANCELLED))
        if missing and state.word in CANCELLED:
            raise self._not_bought_again(
                one, f"was cancelled at the provider; {len(missing):,} of its calls have no answer"
            )
        if stop:
            raise stop[0]
        return []

    def _not_bought_again(self, one: _Waiting, why: str) -> EndpointDown:
        return EndpointDown(
            f"{self.model.name}: batch {one.id} {why}. Nothing is asked one by one, at the whole price: run the same command "
            "again to send the rest as a new batch, or with mode=calls"
        )

    async def _kept(self, one: _Waiting, state: State, stop: list[StopCalls]) -> bool:
        """Keep the results. Returns whether the batch is ours."""

        async def fetched() -> list[Line]:
            return [line async for line in self.provider.results(one.id, state)]

        # A file may be cut short on its way: it is fetched again before what it lacks counts as lost.
        for _ in range(LOOKS):
            left = self.store.batch_calls(one.row.label)
            try:
                lines = await self._poll(f"the results of batch {one.id}", fetched)
            except (Rejected, NotThere) as error:
                self.say(f"{self.model.name}: no results of batch {one.id}: {self.mask(str(error))}")
                return True
            ours = [line for line in lines if re.fullmatch(rf"{re.escape(one.row.label)}-\d+", line.id)]
            foreign = len(lines) - len(ours)
            for line in ours:
                if (call := left.pop(int(line.id.rpartition("-")[2]), None)) is not None:
                    self._take(one, line, *call, stop)
            if one.guess and foreign and not ours:
                return False
            if foreign:
                self.say(f"{self.model.name}: {foreign:,} results of batch {one.id} have unknown ids")
            if not left or state.word in (*EXPIRED, *CANCELLED):
                break
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))
        if one.guess and ours:
            self.store.note_batch(one.row.label, id=one.id)
        return True

    def _take(self, one: _Waiting, line: Line, key: str, attempt: int, stop: list[StopCalls]) -> None:
        raw, wanted = line.body, self._wanted.get(key)
        if raw is not None:
            try:
                read_replies(raw)
            except NotAChat as error:
                self.store.lose(attempt)
                self.left[key] = self.mask(str(error))
                return
            except ReplyError:
                pass
        elif line.status is None or line.status < 400:
            self.left[key] = self.mask(line.error.decode("utf-8", "replace"))
        else:
            failed = failure(line.status, line.error, {}, self.model, self.mask)
            if isinstance(failed, PolicyAnswer):
                raw = line.error
            elif isinstance(failed, Rejected) and failed.certain and wanted is not None:
                self.settle(key, self.sending.rejected(wanted, failed))
            elif isinstance(failed, StopCalls):
                stop.append(failed)
            else:
                self.left[key] = self.mask(str(failed))
        if raw is None:
            self.store.free(attempt)
            return
        request = wanted.request if wanted is not None else None
        took_s = time.time() - one.row.began
        self.settle(key, self.sending.keep(key, request, attempt, raw, took_s, batch=True))

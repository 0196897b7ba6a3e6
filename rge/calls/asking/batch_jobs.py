"""Calls through a provider's batch API: submitted together, polled over any number of runs, cached one by one.

A batch and an attempt of each of its calls are in the ledger, at the most they may cost, before anything is sent. So a budget
holds for what is under way, and a killed process rediscovers its batches: one whose id is known is waited for, one whose
creation may or may not have been accepted is looked for at the provider before it is created again.
"""

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from rge.calls.asking.grouping import Call
from rge.calls.asking.sending import Sending, budget_reached
from rge.calls.failures import EndpointDown, Lost, NotThere, Rejected, RequestRejected, StopCalls
from rge.calls.model_config import Learnt
from rge.calls.providers.batches import MOST_BYTES, MOST_CALLS, BatchApi, Line, State
from rge.calls.providers.bodies import Shown, body
from rge.calls.providers.transport import encoded, failure
from rge.calls.replies import NotAChat, ReplyError, read_replies
from rge.calls.request import Request
from rge.calls.store import BatchRow, Kept
from rge.common.images import ImageError

T = TypeVar("T")
Show = Callable[[Request], Awaitable[Shown]]
Settle = Callable[[str, Kept | ReplyError], object]
Say = Callable[[str], object]

LOOKS = 3
"""At the provider's list of batches, one `ModelConfig.batch_poll_s` apart, before one that is missing counts as not accepted."""
FAILED_LOOKS = 20
"""In a row, before an endpoint is held to be down."""


class BatchJobs:
    """Batches of one endpoint; `settle` is told key and answer, or rejection, of each call, wanted now or not."""

    def __init__(self, sending: Sending, api: BatchApi, *, show: Show, settle: Settle, say: Say):
        self.sending, self.api, self.show, self.settle, self.say = sending, api, show, settle, say
        self.model, self.store, self.mask = sending.model, sending.store, sending.mask
        self.left: dict[str, str] = {}  # why, by key, a call has no answer by a batch
        self._wanted: Mapping[str, Call] = {}
        self._waiting: list[BatchRow] = []
        self._words: dict[str, str] = {}  # how far each batch was last seen to be

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
        for row in self.store.open_batches(self.model.endpoint):
            keys = {key for key, _ in row.calls.values()}
            if not keys & self._wanted.keys():
                continue
            if row.id is None and not await self._find_accepted(row):
                self.store.settle_batch(row.label, billed=False)
                continue
            self.say(f"{self.model.name}: waits for batch {row.id} of an earlier run, {len(keys):,} calls")
            self._waiting.append(row)
            under_way |= keys
        return [call for key, call in self._wanted.items() if key not in under_way]

    # --------------------------------------------------------------------------------------------------------- sending

    async def _send_some(self, queue: deque[Call]) -> bool:
        """Send one batch. Returns whether the budget or the provider's queue has no room for more."""
        model, store = self.model, self.store
        some = await self._pack(queue)
        if not some:
            return False
        label, began = f"rge-{secrets.token_hex(8)}", time.time()
        requests = [call.request for call, _ in some]
        calls = [
            (call.key, model.estimate(request, self._learnt(request)), self._greatest_cost(request))
            for (call, _), request in zip(some, requests, strict=True)
        ]
        taken = store.begin_batch(
            label, model.endpoint, began, calls, model.budget, total=self.sending.budget
        )
        queue.extendleft(call for call, _ in reversed(some[taken:]))
        if not taken:
            return True
        row = BatchRow(label, began, None, None, store.batch_calls(label))
        try:
            sent = await self._sent(row, [made for _, made in some[:taken]])
        except StopCalls:
            store.settle_batch(label, billed=False)
            raise
        if not sent:
            store.settle_batch(label, billed=False)
            queue.extendleft(call for call, _ in reversed(some[:taken]))
            return True
        self._waiting.append(row)
        self.say(f"{model.name}: batch {row.id} of {taken:,} calls is under way")
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

    async def _sent(self, row: BatchRow, bodies: list[bytes]) -> bool:
        """Create a batch, once. False: the provider has no room for it now, and others are under way.

        Raises:
            StopCalls: it was not created.
        """
        model, tries, limited_since = self.model, 0, None
        while True:
            try:
                await self._create(row, bodies)
                return True
            except Rejected as error:
                raise RequestRejected(
                    f"{model.name}: the endpoint rejects the batch; {self.mask(str(error))}. Change the model's settings, or "
                    "ask by calls (mode=calls)"
                ) from None
            except StopCalls as error:
                raise type(error)(f"{error} (mode=batch)") from None
            except Lost as error:
                lost, said = error, self.mask(str(error))
            if lost.limited and self._waiting:
                return False
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

    async def _create(self, row: BatchRow, bodies: list[bytes]) -> None:
        if row.file is None:
            row.file = await self.api.send_file(row.label, bodies)
            self.store.note_batch(row.label, file=row.file)
        try:
            row.id = await self.api.create(row.label, row.file)
        except Lost as lost:
            if lost.limited or not await self._find_accepted(row):
                raise
        self.store.note_batch(row.label, id=row.id)

    async def _find_accepted(self, row: BatchRow) -> bool:
        """Whether the provider has a batch whose creation got no answer; then its id is noted."""
        for _ in range(LOOKS if row.file is not None else 0):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                row.id = await self._poll(
                    f"whether batch {row.label} was accepted", partial(self.api.find, row)
                )
            except Rejected as error:
                raise EndpointDown(
                    f"{self.model.name}: lists no batches ({self.mask(str(error))}), so it is not known whether {row.label} was "
                    "accepted; the same command looks again"
                ) from None
            if row.id is not None:
                self.store.note_batch(row.label, id=row.id)
                return True
        return False

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

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_some(self) -> list[str]:
        """Wait until a batch has ended, and settle it. Returns keys of calls that are to be sent again."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self.model.batch_poll_s)
            num_before, again = len(self._waiting), list[str]()
            for row in list(self._waiting):
                state = await self._state(row)
                if state.ended:
                    self._waiting.remove(row)
                    again += await self._settled(row, state)
            if len(self._waiting) < num_before:
                return again
            if time.monotonic() - began > self.model.batch_wait_s:
                words = ", ".join(f"{row.id} ({self._words[row.label]})" for row in self._waiting)
                raise EndpointDown(
                    f"{self.model.name}: waited {self.model.batch_wait_s:g} s (batch_wait_s) for batches {words}. They go on at the "
                    "provider, and the same command waits for them again"
                )

    async def _state(self, row: BatchRow) -> State:
        try:
            state = await self._poll(f"how far batch {row.id} is", partial(self.api.state, str(row.id)))
        except (Rejected, NotThere) as error:
            # Deleted, or older than the provider keeps results: what it cost is not known.
            self.store.settle_batch(row.label, billed=True)
            raise self._not_bought_again(row, f"is gone: {self.mask(str(error))}") from None
        if state.word != self._words.get(row.label):
            self._words[row.label] = state.word
            self.say(f"{self.model.name}: batch {row.id}: {state.word}")
        return state

    async def _settled(self, row: BatchRow, state: State) -> list[str]:
        """Keep what a batch that has ended has brought. Returns keys of calls that are to be sent again."""
        if state.reason is not None:
            self.store.settle_batch(row.label, billed=False)
            if state.queue_full and self._waiting:
                return [key for key, _ in row.calls.values()]
            fix = (
                "Wait until fewer tokens are queued there"
                if state.queue_full
                else "Change the model's settings"
            )
            raise RequestRejected(
                f"{self.model.name}: batch {row.id} failed: {self.mask(state.reason)}. {fix}, or ask by calls (mode=calls), and "
                "run the same command again"
            )
        stop: list[StopCalls] = []
        await self._keep(row, state, stop)
        missing = self.store.batch_calls(row.label)
        for key, _ in missing.values():
            self.left[key] = f"batch {row.id} ({state.word}) has no result of it"
        self.store.settle_batch(row.label, billed=not state.partial)
        if missing and state.word == "cancelled":
            raise self._not_bought_again(
                row, f"was cancelled at the provider; {len(missing):,} of its calls have no answer"
            )
        if stop:
            raise stop[0]
        return []

    def _not_bought_again(self, row: BatchRow, why: str) -> EndpointDown:
        return EndpointDown(
            f"{self.model.name}: batch {row.id} {why}. Nothing is asked one by one, at the whole price: run the same command "
            "again to send the rest as a new batch, or with mode=calls"
        )

    async def _keep(self, row: BatchRow, state: State, stop: list[StopCalls]) -> None:
        """Keep the results."""
        # A file may be cut short on its way: it is fetched again before what it lacks counts as lost.
        for _ in range(LOOKS):
            left = self.store.batch_calls(row.label)
            try:
                lines = await self._poll(f"the results of batch {row.id}", partial(self.api.results, state))
            except (Rejected, NotThere) as error:
                self.say(f"{self.model.name}: no results of batch {row.id}: {self.mask(str(error))}")
                return
            ours = [line for line in lines if re.fullmatch(rf"{re.escape(row.label)}-\d+", line.id)]
            if foreign := len(lines) - len(ours):
                self.say(f"{self.model.name}: {foreign:,} results of batch {row.id} have unknown ids")
            for line in ours:
                if (call := left.pop(int(line.id.rpartition("-")[2]), None)) is not None:
                    self._take(row, line, *call, stop)
            if not left or state.partial:
                return
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))

    def _take(self, row: BatchRow, line: Line, key: str, attempt: int, stop: list[StopCalls]) -> None:
        raw, wanted = line.body, self._wanted.get(key)
        if raw is not None:
            try:
                read_replies(raw)
            except NotAChat as error:
                self.store.settle(attempt, billed=True)
                self.left[key] = self.mask(str(error))
                return
            except ReplyError:
                pass
        elif line.status is None or line.status < 400:
            self.left[key] = self.mask(line.error.decode("utf-8", "replace"))
        else:
            failed = failure(line.status, line.error, {}, self.model, self.mask)
            if failed is None:
                raw = line.error
            elif isinstance(failed, Rejected) and failed.certain and wanted is not None:
                self.settle(key, self.sending.rejected(wanted, failed))
            elif isinstance(failed, StopCalls):
                stop.append(failed)
            else:
                self.left[key] = self.mask(str(failed))
        if raw is None:
            self.store.settle(attempt, billed=False)
            return
        request = wanted.request if wanted is not None else None
        took_s = time.time() - row.began
        self.settle(key, self.sending.keep(key, request, attempt, raw, took_s, batch=True))

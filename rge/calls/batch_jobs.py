"""The same calls by a provider's batch mode: sent up once, waited for over any number of runs, and kept one by one.

A batch and an attempt of each of its calls are in the ledger, at the most they may cost, before anything is sent. So a budget
holds for what is under way, and whoever is killed finds his batches again: one whose name is known is waited for, one whose
creation may or may not have been accepted is looked for at the provider before it is created again.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rge.calls.failures import (
    BudgetReached,
    EndpointDown,
    Lost,
    Rejected,
    RequestRejected,
    StopCalls,
)
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.providers.batches import MOST_BYTES, MOST_CALLS, Line, Provider, State
from rge.calls.providers.bodies import Shown, body
from rge.calls.providers.transport import PolicyAnswer, encoded, failure
from rge.calls.replies import NotAChat, ReplyError, read_replies
from rge.calls.request import Request
from rge.calls.store import AnswerStore, BatchRow, Kept
from rge.common.images import ImageError

LOOKS = 3
"""At the provider's list of batches, one `ModelConfig.batch_poll_s` apart, before one that is not there counts as not accepted."""
FAILED_LOOKS = 20
"""In a row, before an endpoint is held to be down."""
UNBILLED = ("expired", "cancelled", "canceled", "EXPIRED", "CANCELLED")
"""Ends of a batch after which calls without a result were not made."""


@dataclass(slots=True)
class _Waiting:
    # A batch under way. `guess`: Anthropic's, which may turn out to be somebody else's.
    row: BatchRow
    id: str
    guess: bool = False
    word: str = ""


class BatchJobs:
    """Batches of one endpoint, over one file of answers.

    Args:
        model: the endpoint.
        store: where answers and batches are kept.
        provider: its batches.
        mask: takes keys out of messages.
        show: pictures of a request as they are sent.
        take: called with key and answer of each call that is answered, wanted now or not.
        say: told what is waited for.
    """

    def __init__(
        self,
        model: ModelConfig,
        store: AnswerStore,
        provider: Provider,
        mask: Mask,
        *,
        show: Callable[[Request], Awaitable[Shown]],
        take: Callable[[str, Kept, bool], object],
        say: Callable[[str], object],
    ):
        self.model, self.store, self.provider, self.mask = model, store, provider, mask
        self.show, self.take, self.say = show, take, say
        self.left: dict[str, str] = {}
        """Why, by key, a call has no answer by a batch."""
        self._waiting: list[_Waiting] = []
        self._others: set[str] = set()

    async def run(self, wanted: dict[str, Request]) -> dict[str, str]:
        """Answer calls by batches.

        Args:
            wanted: by key.

        Returns:
            Why, by key, the others have no answer: they failed, expired, or got lost, and are to be asked by calls.

        Raises:
            BudgetReached: nothing more can be sent within the budget; what is under way is waited for first.
            EndpointDown: the provider does not answer, or a batch takes too long; the same command waits on.
            RequestRejected: it accepts no such batch.
        """
        # Two processes that find the same batch begun would both look for it, and create it twice.
        self.store.hold_batches()
        queue = deque(await self._found_again(wanted))
        while queue or self._waiting:
            full = False
            while queue and not full:
                full = await self._send_some(queue)
            if full and not self._waiting:
                spent, name = self.store.spent(self.model.endpoint), self.model.name
                raise BudgetReached(
                    f"{name}: {spent:.4f} of the budget {self.model.budget:g} is spent, and the next call might exceed it; "
                    "nothing more is sent. Raise the model's budget and run the same command again"
                )
            if self._waiting:
                again = await self._some_ended(wanted)
                queue.extend((key, wanted[key]) for key in again if key in wanted)
        return {key: why for key, why in self.left.items() if key in wanted}

    async def _found_again(self, wanted: dict[str, Request]) -> list[tuple[str, Request]]:
        """Take up what earlier runs have under way; returns what is in none of it."""
        under_way: set[str] = set()
        rows = self.store.open_batches(self.model.endpoint)
        self._others = {row.id for row in rows if row.id is not None}
        for row in rows:
            keys = {key for key, _ in row.calls.values()}
            if not keys & wanted.keys():
                continue
            found = _Waiting(row, row.id) if row.id is not None else await self._looked_for(row)
            if found is None:
                self.store.settle_batch(row.label, billed=False)
                continue
            self.say(f"{self.model.name}: waits for batch {found.id} of an earlier run, {len(keys):,} calls")
            self._waiting.append(found)
            under_way |= keys
        return [(key, request) for key, request in wanted.items() if key not in under_way]

    # ------------------------------------------------------------------------------------------------------ sending up

    async def _send_some(self, queue: deque[tuple[str, Request]]) -> bool:
        """Send one batch up. Returns whether the budget or the provider's queue has no room for more."""
        some: list[tuple[str, Request, bytes]] = []
        num_bytes = 0
        while queue and len(some) < MOST_CALLS:
            key, request = queue.popleft()
            try:
                made = encoded(body(self.model, request, await self.show(request)))
            except ImageError as error:
                self.left[key] = str(error)  # a call meets it again, and counts it
                continue
            if some and num_bytes + len(made) > MOST_BYTES:
                queue.appendleft((key, request))
                break
            some.append((key, request, made))
            num_bytes += len(made) + 200
        if not some:
            return False
        label, began = f"rge-{secrets.token_hex(8)}", time.time()
        calls = []
        for key, request, _ in some:
            calls.append((key, self.model.estimate(request), self.model.greatest_cost(request, batch=True)))
        taken = self.store.begin_batch(label, self.model.endpoint, began, calls, self.model.budget)
        queue.extendleft((key, request) for key, request, _ in reversed(some[taken:]))
        if not taken:
            return True
        row = next(one for one in self.store.open_batches(self.model.endpoint) if one.label == label)
        lines = [
            self.provider.line(f"{label}-{number}", made) for number, (_, _, made) in enumerate(some[:taken])
        ]
        found = await self._sent(row, lines)
        if found is None:
            self.store.settle_batch(label, billed=False)
            queue.extendleft((key, request) for key, request, _ in reversed(some[:taken]))
            return True
        self._waiting.append(found)
        self.say(f"{self.model.name}: batch {found.id} of {taken:,} calls is under way")
        return taken < len(some)

    async def _sent(self, row: BatchRow, lines: list[bytes]) -> _Waiting | None:
        """Create a batch, once. None: the provider has no room for it now, and others are under way."""
        model, file, tries, limited_since = self.model, None, 0, None
        while True:
            creating = False
            try:
                if file is None and (file := await self.provider.send_file(row.label, lines)) is not None:
                    self.store.note_batch(row.label, file=file)
                creating = True
                id = await self.provider.create(row.label, file, lines)
                self.store.note_batch(row.label, id=id)
                self._others.add(id)
                return _Waiting(row, id)
            except (Rejected, PolicyAnswer) as error:
                self.store.settle_batch(row.label, billed=False)
                said = error if isinstance(error, Rejected) else error.answer.body.decode("utf-8", "replace")
                raise RequestRejected(
                    f"{model.name}: the endpoint rejects the batch; {self.mask(str(said))}. Change the model's settings, or "
                    "ask by calls (mode=calls)"
                ) from None
            except StopCalls as error:
                self.store.settle_batch(row.label, billed=False)
                raise type(error)(f"{error} (mode=batch)") from None
            except Lost as error:
                lost = error
            now = time.monotonic()
            if lost.limited:
                if self._waiting:
                    return None
                limited_since = limited_since or now
                if now - limited_since > model.max_limited_s:
                    self.store.settle_batch(row.label, billed=False)
                    raise EndpointDown(
                        f"{model.name}: takes no batch; still refused after {model.max_limited_s:g} s (max_limited_s), the last "
                        f"time with: {self.mask(str(lost))}"
                    )
                await asyncio.sleep(min(lost.wait_s or model.batch_poll_s, model.max_backoff_s))
                continue
            if creating:
                known = BatchRow(row.label, row.began, file, None, row.calls)
                if (found := await self._looked_for(known)) is not None:
                    return found
            if tries == model.max_retries:
                self.store.settle_batch(row.label, billed=False)
                raise EndpointDown(
                    f"{model.name}: takes no batch ({tries + 1} attempts), the last time with: {self.mask(str(lost))}"
                )
            await asyncio.sleep(min(model.max_backoff_s, model.backoff_s * 2**tries))
            tries += 1

    async def _looked_for(self, row: BatchRow) -> _Waiting | None:
        """A batch whose creation got no answer, if the provider has it."""
        looks = failed = 0
        while looks < LOOKS:
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                found = await self.provider.find(row.label, row.file, len(row.calls), row.began, self._others)
            except Lost as error:
                failed += 1
                self._check_up(failed, f"whether batch {row.label} was accepted", error)
                continue
            except Rejected as error:
                raise EndpointDown(
                    f"{self.model.name}: lists no batches ({self.mask(str(error))}), so it is not known whether {row.label} was "
                    "accepted; the same command looks again"
                ) from None
            if found:
                guess = self.model.api == "anthropic"
                if not guess:
                    self.store.note_batch(row.label, id=found[0])
                self._others.add(found[0])
                return _Waiting(row, found[0], guess)
            looks += 1
        return None

    # ----------------------------------------------------------------------------------------------------- waiting for

    async def _some_ended(self, wanted: dict[str, Request]) -> list[str]:
        """Wait until a batch has ended, and settle it. Returns keys of calls that are to be sent up again."""
        began, failed = time.monotonic(), 0
        while True:
            await asyncio.sleep(self.model.batch_poll_s)
            ended, again = [], []
            for one in self._waiting:
                try:
                    state = await self.provider.state(one.id)
                except Lost as error:
                    failed += 1
                    self._check_up(failed, f"how far batch {one.id} is", error)
                    continue
                except (Rejected, EndpointDown) as error:
                    # Deleted, or older than the provider keeps results: what it cost is not known.
                    self._leave(one, f"batch {one.id} is gone: {self.mask(str(error))}")
                    self.store.settle_batch(one.row.label, billed=True)
                    ended.append(one)
                    continue
                failed = 0
                if state.word != one.word:
                    one.word = state.word
                    self.say(f"{self.model.name}: batch {one.id}: {state.word}")
                if state.ended:
                    ended.append(one)
                    again += await self._settled(one, state, alone=len(self._waiting) - len(ended) == 0)
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
            mend = (
                "Wait until fewer tokens are queued there"
                if state.queue_full
                else "Change the model's settings"
            )
            raise RequestRejected(
                f"{self.model.name}: batch {one.id} failed: {self.mask(state.reason)}. {mend}, or ask by calls (mode=calls), and "
                "run the same command again"
            )
        if not await self._kept(one, state):
            # Somebody else's, of the same size and time. The next look leaves it out.
            found = await self._looked_for(one.row)
            if found is None:
                self.store.settle_batch(label, billed=False)
                return keys
            self._waiting.append(found)
            return []
        missing = self.store.batch_calls(label)
        for key, _ in missing.values():
            self.left[key] = f"batch {one.id} ({state.word}) has no result of it"
        self.store.settle_batch(label, billed=state.word not in UNBILLED)
        return []

    async def _kept(self, one: _Waiting, state: State) -> bool:
        """Keep the results. Returns whether the batch is ours."""
        failed, ours, foreign = 0, 0, 0
        while True:
            left = self.store.batch_calls(one.row.label)
            try:
                async for line in self.provider.results(one.id, state):
                    label, _, number = line.id.rpartition("-")
                    if label != one.row.label or not number.isdigit():
                        foreign += 1
                        continue
                    ours += 1
                    if (call := left.pop(int(number), None)) is not None:
                        self._take(one, line, *call)
            except Lost as error:
                failed += 1
                self._check_up(failed, f"the results of batch {one.id}", error)
            except (Rejected, EndpointDown) as error:
                self.say(
                    f"{self.model.name}: results of batch {one.id} cannot be had: {self.mask(str(error))}"
                )
                return True
            else:
                if one.guess and foreign and not ours:
                    return False
                if foreign:
                    self.say(f"{self.model.name}: {foreign:,} results of batch {one.id} have ids of nobody")
                # A file may be cut short on its way: it is fetched again before what it lacks counts as lost.
                failed += 1
                if not left or state.word in UNBILLED or failed == LOOKS:
                    if one.guess and ours:
                        self.store.note_batch(one.row.label, id=one.id)
                    return True
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))

    def _take(self, one: _Waiting, line: Line, key: str, attempt: int) -> None:
        raw, why = line.body, "the batch had no result of it"
        if raw is not None:
            try:
                read_replies(raw)
            except NotAChat as error:
                raw, why = None, str(error)
            except ReplyError:
                pass
        elif line.status is not None and line.status >= 400:
            failed = failure(line.status, line.error, {}, self.model, self.mask)
            if isinstance(failed, PolicyAnswer):
                raw = line.error
            else:
                why = str(failed)
        else:
            why = line.error.decode("utf-8", "replace")
        if raw is None:
            self.left[key] = self.mask(why)
            if line.body is None:
                self.store.free(attempt)
            else:
                self.store.lose(attempt)
            return
        expected = self.store.expected(attempt)
        given, written, cached, cost, refused = self.model.bill(raw, expected, batch=True)
        kept = Kept(raw, given, written, cost, time.time() - one.row.began)
        self.store.put(attempt, key, self.model.name, kept, cached)
        self.take(key, kept, refused)

    def _leave(self, one: _Waiting, why: str) -> None:
        for key, _ in self.store.batch_calls(one.row.label).values():
            self.left[key] = why

    def _check_up(self, failed: int, what: str, error: Lost) -> None:
        if failed >= FAILED_LOOKS:
            raise EndpointDown(
                f"{self.model.name}: does not say {what} ({failed} attempts), the last time: {self.mask(str(error))}. Nothing is lost: "
                "the same command waits on"
            ) from None

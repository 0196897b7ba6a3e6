"""Calls through a provider's batch API: submitted together, awaited over any number of runs, stored one by one.

A batch and its calls enter the ledger at their maximum cost before anything is sent. So budgets cover batches in flight, and the
next run finds the batches of a killed process: those with a known id are awaited, and those whose creation got no answer are
searched for in the provider's list before they are created again.
"""

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from rge.calls.dispatch.grouping import Call, Grouping
from rge.calls.dispatch.sender import Sender
from rge.calls.failures import AttemptFailed, Rejection, StopCalls
from rge.calls.pictures import Pictures
from rge.calls.providers.batches import MAX_BYTES, MAX_CALLS, BatchApi
from rge.calls.providers.transport import Json, body
from rge.calls.replies import ReplyError, as_dict, dict_items
from rge.calls.store import Attempt, BatchRow
from rge.common.images import ImageError

T = TypeVar("T")

MAX_LOOKUPS = 3
"""Searches of the provider's list, one `ModelConfig.batch_poll_s` apart, before a batch counts as never created; and
downloads of results before missing ones count as lost."""
MAX_FAILED_POLLS = 20
"""Consecutive failures of a free request before the endpoint counts as down."""

PARTIAL = ("expired", "cancelled")
"""How batches end early: calls without a result were not made and are not billed."""


class _NotKnown(StopCalls):
    """Whether the provider has created a batch is not known, so it stays open."""


class BatchJobs:
    """The batches of one model in one run."""

    def __init__(self, sender: Sender, grouping: Grouping, pictures: Pictures):
        self.sender, self.grouping, self.pictures = sender, grouping, pictures
        self.model, self.store, self.api = sender.model, sender.store, BatchApi(sender.connection)
        self._wanted: dict[str, Call] = {}  # by key
        self._queue: deque[Call] = deque()  # to be submitted
        self._waiting: list[BatchRow] = []
        self._full = False  # the provider's queue, until one of ours ends
        self._why: str | None = None  # the first reason why a call got no answer
        # The first result that stops calls; raised once its batch is stored.
        self._stop: StopCalls | None = None

    async def run(self, calls: Sequence[Call]) -> list[Call]:
        """Answer calls through batches, and settle those that have an answer.

        Returns:
            Calls to make one by one: those that failed, expired or were lost, and those that request unreadable answers again.

        Raises:
            StopCalls: the budget is used up and no batch is in flight, or the provider is unreachable, rejects or cancelled a
                batch, or takes too long. The same command resumes.
            UserError: an answer cannot be stored.
        """
        self._wanted = {call.key: call for call in calls}
        await self._resume()
        await self._make_pilots()
        while self._queue or self._waiting:
            while self._queue and not self._full and await self._submit():
                pass
            if self._waiting:
                await self._wait_for_any()
        left: list[Call] = []
        for call in calls:
            result = self.grouping.stored(call.key, self.model)
            left += [call] if result is None else self.grouping.record(call, result)
        if left:
            why = (self._why or "their answers could not be read")[:300]
            self.sender.health.say(
                f"{self.model.name}: making {len(left):,} plain calls, at full price: {why}"
            )
        return left

    def _no_answer(self, why: str) -> None:
        self._why = self._why or self.sender.connection.mask(why)

    async def _resume(self) -> None:
        """Take up the batches of earlier runs, and queue the calls that none of them contains."""
        in_flight: set[str] = set()
        for row in self.store.open_batches(self.model.endpoint):
            keys = {call.key for call in row.calls.values()}
            if not keys & self._wanted.keys():
                continue
            if row.id is None and not await self._find(row):
                self.store.close_batch(row.label, billed=False)
                continue
            self.sender.health.say(
                f"{self.model.name}: waiting for batch {row.id} of an earlier run, {len(keys):,} calls"
            )
            self._waiting.append(row)
            in_flight |= keys
        self._queue = deque(call for key, call in self._wanted.items() if key not in in_flight)

    async def _make_pilots(self) -> None:
        """Under a budget, make a plain call with pictures and one without first, so that estimates rest on bills."""
        sender = self.sender
        for has_pictures in (False, True):
            calls = (call for call in self._queue if bool(call.request.num_pictures()) == has_pictures)
            if not sender.budgets or (call := next(calls, None)) is None:
                continue
            max_cost = sender.estimate(call.request)[1]
            if sender.stats(call.request).calls or max_cost > self.store.remaining(sender.budgets):
                continue
            self._queue.remove(call)
            try:
                await sender.call(call, await self.pictures.of(call.request))
            except (ReplyError, ImageError) as error:
                self._no_answer(str(error))

    # --------------------------------------------------------------------------------------------------------- sending

    async def _submit(self) -> bool:
        """Submit a batch. Returns whether budgets and the provider's queue may have room for another."""
        sender, store = self.sender, self.store
        packed = await self._pack()
        if not packed:
            return True
        row = BatchRow(f"rge-{secrets.token_hex(8)}", time.time(), alone=not self._waiting)
        calls = [(call.key, *sender.estimate(call.request, batch=True)) for call, _ in packed]
        num_taken = store.begin_batch(row, self.model.endpoint, calls, sender.budgets)
        if num_taken and not await self._create(row, [content for _, content in packed[:num_taken]]):
            num_taken = 0
        self._queue.extendleft(call for call, _ in reversed(packed[num_taken:]))
        if num_taken:
            self._waiting.append(row)
            self.sender.health.say(f"{self.model.name}: submitted batch {row.id} of {num_taken:,} calls")
        elif not self._waiting:
            raise sender.budget_reached(calls[0][2])
        return num_taken == len(packed)

    async def _pack(self) -> list[tuple[Call, bytes]]:
        """Take the calls of one batch off the queue, with the bodies of their requests."""
        packed: list[tuple[Call, bytes]] = []
        num_bytes = 0
        while self._queue and len(packed) < MAX_CALLS:
            call = self._queue.popleft()
            try:
                pictures = await self.pictures.of(call.request)
            except ImageError as error:  # the plain call fails in the same way and is counted there
                self._no_answer(str(error))
                continue
            content = json.dumps(body(self.model, call.request, pictures)).encode()
            num_bytes += len(content) + 200
            if packed and num_bytes > MAX_BYTES:
                self._queue.appendleft(call)
                break
            packed.append((call, content))
        return packed

    async def _create(self, row: BatchRow, bodies: Sequence[bytes]) -> bool:
        """Create a batch, with retries. Returns False if the provider's queue is full and other batches are in flight."""
        try:
            created = await self.sender.retried(lambda: self._attempt(row, bodies))
        except (AttemptFailed, Rejection, StopCalls) as error:
            if not isinstance(error, _NotKnown):
                self.store.close_batch(row.label, billed=False)
            if isinstance(error, StopCalls):
                raise
            raise StopCalls(
                f"{self.model.name}: the endpoint does not accept the batch; {error}. Change the model's settings, or use plain "
                "calls (mode=calls)"
            ) from None
        if not created:
            self.store.close_batch(row.label, billed=False)
        return created

    async def _attempt(self, row: BatchRow, bodies: Sequence[bytes]) -> bool:
        try:
            if row.file is None:
                row.file = await self.api.upload(row.label, dict(zip(row.calls, bodies, strict=True)))
                self.store.save_batch(row)
            row.id = await self.api.create(row.label, row.file)
        except AttemptFailed as error:
            self._full = error.limited and bool(self._waiting)
            if self._full:
                return False
            if error.limited or not await self._find(row):
                raise
        self.store.save_batch(row)
        return True

    async def _find(self, row: BatchRow) -> bool:
        """Search the provider for a batch whose creation got no answer, and record its id if it is found.

        Raises:
            _NotKnown: the provider does not say.
        """
        for _ in range(MAX_LOOKUPS if row.file is not None else 0):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                row.id = await self._ask("which batches there are", partial(self.api.find, str(row.file)))
            except (Rejection, StopCalls) as error:
                raise _NotKnown(
                    f"{self.model.name}: the endpoint does not list batches ({error}), so it is unknown whether {row.label} was "
                    "accepted; run the same command to search again"
                ) from None
            if row.id is not None:
                self.store.save_batch(row)
                return True
        return False

    async def _ask(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """Make a free request, up to `MAX_FAILED_POLLS` times; raises `Rejection` or `StopCalls`."""
        last_error = ""
        for _ in range(MAX_FAILED_POLLS):
            try:
                return await request()
            except AttemptFailed as error:
                last_error = self.sender.connection.mask(str(error))
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.max_backoff_s))
        raise StopCalls(
            f"{self.model.name}: could not find out {what} ({MAX_FAILED_POLLS} attempts); last error: {last_error}. Nothing is "
            "lost: run the same command to keep waiting"
        )

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_any(self) -> None:
        """Wait until a batch has ended, and store its results."""
        model, began, num_before = self.model, time.monotonic(), len(self._waiting)
        while len(self._waiting) == num_before:
            if time.monotonic() - began > model.batch_wait_s:
                batches = ", ".join(f"{row.id} ({row.status})" for row in self._waiting)
                raise StopCalls(
                    f"{model.name}: waited {model.batch_wait_s:g} s (batch_wait_s) for batches {batches}. They are still running at "
                    "the provider; run the same command to keep waiting"
                )
            await asyncio.sleep(model.batch_poll_s)
            for row in list(self._waiting):
                try:
                    await self._check(row)
                except Rejection as error:
                    # Deleted, or past the provider's retention: what it cost is unknown.
                    self.store.close_batch(row.label, billed=True)
                    raise self._not_repeated(row, f"no longer exists at the provider ({error})") from None

    def _not_repeated(self, row: BatchRow, why: str) -> StopCalls:
        return StopCalls(
            f"{self.model.name}: batch {row.id} {why}. Stopped rather than make plain calls at full price: run the same command "
            "again to submit the rest as a new batch, or with mode=calls"
        )

    async def _check(self, row: BatchRow) -> None:
        """Poll a batch, and store its results if it has ended. Raises `Rejection`: the provider does not know it."""
        batch = await self._poll(row)
        if row.status == "failed":
            self._take_back(row, batch)
        elif row.status in ("completed", *PARTIAL):
            await self._store_results(row, batch)
        else:
            return
        self._waiting.remove(row)

    async def _poll(self, row: BatchRow) -> Json:
        batch = await self._ask(f"the status of batch {row.id}", partial(self.api.state, str(row.id)))
        status = str(batch.get("status"))
        if status != row.status:
            row.status = status
            self.sender.health.say(f"{self.model.name}: batch {row.id}: {status}")
        return batch

    def _take_back(self, row: BatchRow, batch: Json) -> None:
        """Queue the calls of a batch that failed as a whole again, if the provider's queue was full and held other batches."""
        self.store.close_batch(row.label, billed=False)
        errors = dict_items(as_dict(batch.get("errors")).get("data"))
        queue_full = any(error.get("code") == "token_limit_exceeded" for error in errors)
        if queue_full and not row.alone:
            keys = [call.key for call in row.calls.values()]
            self._queue.extend(self._wanted[key] for key in keys if key in self._wanted)
            self._full = len(self._waiting) > 1
            return
        reason = "; ".join(str(error.get("message")) for error in errors[:3]) or "no reason given"
        fix = "Wait until fewer tokens are queued" if queue_full else "Change the model's settings"
        raise StopCalls(
            f"{self.model.name}: batch {row.id} failed: {self.sender.connection.mask(reason)}. {fix}, or use plain calls "
            "(mode=calls), and run the same command again"
        )

    async def _store_results(self, row: BatchRow, batch: Json) -> None:
        """Store the results of a batch and close it."""
        for _ in range(MAX_LOOKUPS):  # a download may be cut short
            what = f"the results of batch {row.id}"
            results = await self._ask(what, partial(self.api.results, batch))
            missing = self.store.batch_calls(row.label)
            for result in results:
                if (call := missing.pop(str(result.get("custom_id")), None)) is not None:
                    self._store(row, call, result)
            if not missing:
                break
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))
            batch = await self._poll(row)
        self.store.close_batch(row.label, billed=row.status not in PARTIAL)
        self._full = False
        if missing and row.status == "cancelled":
            why = f"was cancelled at the provider; {len(missing):,} of its calls have no answer"
            raise self._not_repeated(row, why)
        if self._stop is not None:
            raise self._stop
        if missing:
            about = f"batch {row.id} ({row.status})"
            self._no_answer(f"{about} contains no result for {len(missing):,} of its calls")

    def _store(self, row: BatchRow, call: Attempt, result: Json) -> None:
        """Store the answer in a result, or end its attempt without one."""
        try:
            answer = self.api.answer(result)
        except (AttemptFailed, Rejection, StopCalls) as error:
            billed = isinstance(error, AttemptFailed) and error.billed
            self.store.end_attempt(call.number, billed=billed)
            if isinstance(error, StopCalls):
                self._stop = self._stop or error
            elif isinstance(error, Rejection) and error.certain:
                self.sender.rejected(call.key, error)
            else:
                self._no_answer(str(error))
            return
        # A call of an earlier run may not be wanted now; its answer is stored all the same.
        wanted = self._wanted.get(call.key)
        request = None if wanted is None else wanted.request
        took_s = time.time() - row.began
        self.sender.keep(call, request, answer, took_s, batch=True)

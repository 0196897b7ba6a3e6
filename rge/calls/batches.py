"""Calls through OpenAI's batch API: submitted together, awaited over any number of runs, stored one by one.

A batch and its calls enter the ledger at their maximum cost before anything is sent. So budgets cover batches in flight, and the
next run finds the batches of a killed process: those with a known id are awaited. Creating a batch is not idempotent: those whose
creation got no answer are searched for in the provider's list, by their file, before they are created again.
"""

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from rge.calls.failures import (
    QUEUE_FULL,
    SHOWN_CHARACTERS,
    AttemptFailed,
    Gone,
    QueueFull,
    Rejection,
    Stop,
    StopCalls,
    codes,
    failure,
)
from rge.calls.grouping import Call
from rge.calls.sender import Sender
from rge.calls.store import Attempt, BatchRow
from rge.calls.wire.bodies import PATH, Json, body
from rge.calls.wire.replies import ReplyError, as_dict, dict_items, parse, stated_error
from rge.common.images import ImageError

T = TypeVar("T")

MAX_CALLS, MAX_BYTES = 50_000, 100_000_000
"""Limits of one batch; OpenAI's are 50,000 calls and 200 MB."""
TRANSFER_TIMEOUT_S = 3600.0
"""Time limit of an upload or download."""
URL = f"/v1{PATH}"
MAX_LOOKUPS = 3
"""Searches of the provider's list, one `ModelConfig.batch_poll_s` apart, before a batch counts as never created; and
downloads of results before missing ones count as lost."""
MAX_FAILED_POLLS = 20
"""Consecutive failures of a free request before the endpoint counts as down."""
PARTIAL: dict[str, tuple[Stop, str]] = {
    "expired": ("expired", "expired"),
    "cancelled": ("cancelled", "was cancelled"),
}
"""How batches end early, as a kind and in words: calls without a result were not made and are not billed."""


class BatchJobs:
    """The batches of one model in one run."""

    def __init__(self, sender: Sender):
        self.sender, self.model, self.store = sender, sender.model, sender.store
        self._wanted = {call.key: call for call in sender.collected}  # without an answer so far
        self._reasks: list[Call] = []  # calls that request unreadable answers again
        self._queue: deque[Call] = deque()  # to be submitted
        self._waiting: list[BatchRow] = []
        self._provider_full = False  # the provider's queue, until one of ours ends
        self._first_failure = ""  # the first reason why a call got no answer

    async def run(self, earlier: Sequence[BatchRow]) -> list[Call]:
        """Answer the calls collected by the sender through batches, and settle those that have an answer.

        ``earlier`` are the open batches of earlier runs at its endpoint.

        Returns:
            Calls to make one by one: those that failed or were lost, and those that request unreadable answers again. Once calls
            to the endpoint have stopped, no more batches are submitted, so these are left, too.

        Raises:
            StopCalls: the budget is used up and no batch is in flight, or the provider is unreachable, rejects a batch or ended
                it early, or takes too long. The same command resumes.
            UserError: an answer cannot be stored.
        """
        await self._resume(earlier)
        await self._make_pilots()
        while self._waiting or self._may_submit():
            while self._may_submit() and await self._submit():
                pass
            if self._waiting:
                await self._wait_for_any()
        self._settle(list(self._wanted))
        left = [*self._wanted.values(), *self._reasks]
        if left and self.sender.endpoint.stopped is None:
            why = (self._first_failure or "their answers could not be read")[:300]
            self._say(f"making {len(left):,} plain calls, at full price: {why}")
        elif left:
            self._say(f"calls have stopped; {len(left):,} are left to the next run")
        return left

    def _say(self, text: str) -> None:
        self.sender.endpoint.say(f"{self.model.name}: {text}")

    def _settle(self, keys: Iterable[str]) -> None:
        """Settle the wanted calls with these keys that have an answer."""
        grouping = self.sender.grouping
        for key in keys:
            if key in self._wanted and (replies := grouping.stored(self._wanted[key])) is not None:
                self._reasks += grouping.record(self._wanted.pop(key), replies)

    def _left(self, row: BatchRow) -> list[Call]:
        """The wanted calls of a batch that have no answer so far."""
        return [self._wanted[call.key] for call in row.calls.values() if call.key in self._wanted]

    def _no_answer(self, why: str) -> None:
        self._first_failure = self._first_failure or why

    async def _resume(self, rows: Sequence[BatchRow]) -> None:
        """Take up the batches of earlier runs, and queue the calls that none of them contains."""
        in_batches = {call.key for row in rows for call in row.calls.values()}
        self._queue.extend(call for key, call in self._wanted.items() if key not in in_batches)
        for row in rows:
            try:
                await self._take_up(row)
            except StopCalls as error:
                if self._left(row):
                    raise
                self.sender.endpoint.say(str(error))  # the next run looks at it again, if it is still open

    async def _take_up(self, row: BatchRow) -> None:
        """Look at a batch of an earlier run: close it if it has ended, else wait for it if any of its calls is wanted."""
        # Without calls: the process was killed after the last result was stored.
        if not row.calls or (row.id is None and not await self._find(row)):
            self.store.close_batch(row.label, billed=False)
            self._queue.extend(self._left(row))
        elif not await self._check(row) and self._left(row):
            self._say(f"waiting for batch {row.id} of an earlier run, {len(row.calls):,} calls")
            self._waiting.append(row)

    async def _make_pilots(self) -> None:
        """Under a budget, make a plain call with pictures and one without first, so that estimates rest on bills."""
        sender = self.sender
        for has_pictures in (False, True):
            calls = (call for call in self._queue if bool(call.request.num_pictures()) == has_pictures)
            if not sender.budgets or sender.endpoint.stopped or (call := next(calls, None)) is None:
                continue
            max_cost = sender.estimate(call.request)[1]
            if sender.stats(call.request).calls or max_cost > self.store.remaining(sender.budgets):
                continue
            self._queue.remove(call)
            try:
                # An unreadable picture is counted when the plain call fails.
                await sender.pictures.of(call.request)
                await sender.call(call)
            except (ReplyError, ImageError) as error:
                self._no_answer(str(error))
            self._settle([call.key])

    # --------------------------------------------------------------------------------------------------------- sending

    def _may_submit(self) -> bool:
        has_room = not (self._provider_full and self._waiting)
        return bool(self._queue) and has_room and self.sender.endpoint.stopped is None

    async def _submit(self) -> bool:
        """Submit a batch. Returns whether budgets and the provider's queue may have room for another."""
        sender = self.sender
        row = BatchRow(f"rge-{secrets.token_hex(8)}", time.time(), submitted_alone=not self._waiting)
        packed = await self._pack(row.label)
        if not packed:
            return True
        calls = [(call.key, *sender.estimate(call.request, batch=True)) for call, _ in packed]
        num_taken = self.store.begin_batch(row, self.model.endpoint, calls, sender.budgets)
        if num_taken and not await self._create(row, b"".join(line for _, line in packed[:num_taken])):
            num_taken = 0
        self._queue.extendleft(call for call, _ in reversed(packed[num_taken:]))
        if num_taken:
            self._waiting.append(row)
            self._say(f"submitted batch {row.id} of {num_taken:,} calls")
        elif not self._waiting:
            raise sender.budget_reached(calls[0][2])
        return num_taken == len(packed)

    async def _pack(self, label: str) -> list[tuple[Call, bytes]]:
        """Take the calls of one batch off the queue, with their lines of the file to be uploaded."""
        packed: list[tuple[Call, bytes]] = []
        num_bytes = 0
        while self._queue and len(packed) < MAX_CALLS:
            call = self._queue.popleft()
            try:
                pictures = await self.sender.pictures.of(call.request)
            except ImageError as error:  # the plain call fails in the same way and is counted there
                self._no_answer(str(error))
                continue
            line: Json = {"custom_id": f"{label}-{len(packed)}", "method": "POST", "url": URL}
            content = json.dumps(line | {"body": body(self.model, call.request, pictures)}).encode() + b"\n"
            num_bytes += len(content)
            if packed and num_bytes > MAX_BYTES:
                self._queue.appendleft(call)
                break
            packed.append((call, content))
        return packed

    async def _create(self, row: BatchRow, lines: bytes) -> bool:
        """Create a batch, with retries. Returns False if the provider's queue is full and other batches are in flight."""
        self._provider_full = False
        try:
            await self.sender.retried(lambda: self._attempt(row, lines))
        except (AttemptFailed, Rejection, StopCalls) as error:
            if isinstance(error, StopCalls) and error.kind == "unknown":
                raise  # the batch stays open
            self.store.close_batch(row.label, billed=False)
            is_full = isinstance(error, QueueFull) or (isinstance(error, AttemptFailed) and error.limited)
            self._provider_full = is_full and bool(self._waiting)
            if self._provider_full:
                return False
            if isinstance(error, StopCalls):
                raise
            kind: Stop = "queue" if is_full else "unanswered" if isinstance(error, AttemptFailed) else "batch"
            raise self._stop(kind, f"the batch could not be submitted; {error}", error.status) from None
        return True

    async def _attempt(self, row: BatchRow, lines: bytes) -> None:
        if row.file is None:  # uploads are free
            file = (f"{row.label}.jsonl", lines, "application/jsonl")
            form: Json = {"files": {"file": file}, "data": {"purpose": "batch"}}
            row.file = self._id(await self._json("POST", "/files", TRANSFER_TIMEOUT_S, **form))
            self.store.save_batch(row)
        settings = {"endpoint": URL, "completion_window": "24h", "metadata": {"label": row.label}}
        try:
            row.id = self._id(
                await self._json("POST", "/batches", json={"input_file_id": row.file, **settings})
            )
        except AttemptFailed as error:
            if error.limited or not await self._find(row):
                raise
        self.store.save_batch(row)

    async def _find(self, row: BatchRow) -> bool:
        """Search the provider for a batch whose creation got no answer, and record its id if it is found.

        Raises:
            StopCalls: the provider does not say (``unknown``).
        """
        for _ in range(MAX_LOOKUPS if row.file is not None else 0):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                row.id = await self._ask("which batches there are", lambda: self._listed_id(row.file))
            except (Gone, StopCalls) as error:
                why = f"the endpoint does not list batches ({error}), so it is unknown whether {row.label} was accepted"
                raise self._stop("unknown", why) from None
            if row.id is not None:
                self.store.save_batch(row)
                return True
        return False

    async def _listed_id(self, file: str | None) -> str | None:
        params: Json = {"limit": 100}
        while True:
            page = await self._json("GET", "/batches", params=params)
            rows = dict_items(page.get("data"))
            for row in rows:
                if row.get("input_file_id") == file:
                    return self._id(row)
            last = rows[-1].get("id") if rows else None
            if not page.get("has_more") or last == params.get("after"):
                return None
            params["after"] = last

    async def _ask(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """Make a free request, up to `MAX_FAILED_POLLS` times; raises `Gone` or `StopCalls`."""
        for num in range(1, MAX_FAILED_POLLS + 1):
            try:
                return await request()
            except Gone:
                raise
            except (AttemptFailed, Rejection) as error:
                if isinstance(error, Rejection) or num == MAX_FAILED_POLLS:
                    why = f"could not find out {what}, attempt {num}: {error}"
                    raise self._stop("waiting", why, error.status) from None
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.max_backoff_s))
        raise AssertionError("the last attempt returns or raises")

    def _stop(self, kind: Stop, reason: str, status: int | None = None) -> StopCalls:
        return StopCalls(reason, self.model.name, status, kind=kind)

    async def _send(self, method: str, path: str, limit_s: float | None = None, **options: Any) -> bytes:
        """Send a request of the batch API; raises `AttemptFailed`, `Rejection` or `StopCalls`."""
        model, mask = self.model, self.sender.mask
        response = await self.sender.send(method, path, limit_s or model.timeout_s, **options)
        if response.is_success:
            return response.content
        status, content = response.status_code, response.content
        message = f"HTTP {status}: {mask(content.decode('utf-8', 'replace'))[:SHOWN_CHARACTERS]}"
        if status in (404, 410):
            raise Gone(message, status)
        if QUEUE_FULL in codes(parse(content)):
            raise QueueFull(message, status)
        raise failure(status, content, response.headers, model, mask) or Rejection(message, status)

    async def _json(self, method: str, path: str, limit_s: float | None = None, **options: Any) -> Json:
        content = await self._send(method, path, limit_s, **options)
        value = parse(content)
        if stated_error(value):  # with status 200, so that the body's code decides
            error = failure(200, content, {}, self.model, self.sender.mask)
            raise error or Rejection(self.sender.mask(content.decode("utf-8", "replace"))[:SHOWN_CHARACTERS])
        if not isinstance(value, dict):
            message = self.sender.mask(content.decode("utf-8", "replace"))
            raise AttemptFailed(f"no JSON object at {path} but {message[:SHOWN_CHARACTERS]!r}")
        return value

    def _id(self, response: Json) -> str:
        if not isinstance(response.get("id"), str):
            raise AttemptFailed(
                f"a response without id: {self.sender.mask(str(response))[:SHOWN_CHARACTERS]}"
            )
        return response["id"]

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_any(self) -> None:
        """Wait until a batch has ended, and store its results."""
        model, began, num_before = self.model, time.monotonic(), len(self._waiting)
        while len(self._waiting) == num_before:
            if time.monotonic() - began > model.batch_wait_s:
                batches = ", ".join(f"{row.id} ({row.status})" for row in self._waiting)
                why = f"waited {model.batch_wait_s:g} s (batch_wait_s) for batches {batches}, which are still running"
                raise self._stop("waiting", why)
            await asyncio.sleep(model.batch_poll_s)
            for row in list(self._waiting):
                if await self._check(row):
                    self._waiting.remove(row)

    async def _check(self, row: BatchRow) -> bool:
        """Poll a batch; if it has ended, store its results and close it. Returns whether it has."""
        try:
            batch = await self._poll(row)
            if row.status == "failed":
                self._requeue_failed(row, batch)
            elif row.status in ("completed", *PARTIAL):
                await self._store_results(row, batch)
            else:
                return False
        except Gone as error:
            # Deleted, or past the provider's retention: what it cost is unknown.
            self.store.close_batch(row.label, billed=True)
            self._raise_if_left(row, "gone", f"no longer exists ({error})")
        return True

    def _raise_if_left(self, row: BatchRow, kind: Stop, why: str) -> None:
        """Raise `StopCalls` if a batch leaves wanted calls without an answer: at full price they would need another consent."""
        if left := self._left(row):
            raise self._stop(
                kind, f"batch {row.id} {why} at the provider; {len(left):,} of its calls have no answer"
            )

    async def _poll(self, row: BatchRow) -> Json:
        path = f"/batches/{row.id}"
        batch = await self._ask(f"the status of batch {row.id}", lambda: self._json("GET", path))
        status = str(batch.get("status"))
        if status != row.status:
            row.status = status
            self._say(f"batch {row.id}: {status}")
        return batch

    def _requeue_failed(self, row: BatchRow, batch: Json) -> None:
        """Queue the calls of a batch that failed as a whole again, if the provider's queue was full and held other batches."""
        self.store.close_batch(row.label, billed=False)
        errors = dict_items(as_dict(batch.get("errors")).get("data"))
        is_full = any(error.get("code") == QUEUE_FULL for error in errors)
        if is_full and not row.submitted_alone:
            self._queue.extend(self._left(row))
            self._provider_full = any(other is not row for other in self._waiting)
            return
        reason = "; ".join(str(error.get("message")) for error in errors[:3]) or "no reason given"
        raise self._stop(
            "queue" if is_full else "batch", f"batch {row.id} failed: {self.sender.mask(reason)}"
        )

    async def _store_results(self, row: BatchRow, batch: Json) -> None:
        """Store the results of a batch and close it."""
        stop: StopCalls | None = None
        for _ in range(MAX_LOOKUPS):  # a download may be cut short
            results = await self._ask(f"the results of batch {row.id}", partial(self._results, batch))
            missing = self.store.batch_calls(row.label)
            for result in results:
                if (call := missing.pop(str(result.get("custom_id")), None)) is not None:
                    stop = self._store(call, result) or stop
            if not missing:
                break
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))
            batch = await self._poll(row)
        self.store.close_batch(row.label, billed=row.status not in PARTIAL)
        self._provider_full = False
        self._settle(call.key for call in row.calls.values())
        if row.status in PARTIAL:
            self._raise_if_left(row, *PARTIAL[row.status])
        if stop is not None:
            raise stop
        if missing and self._left(row):
            about = f"batch {row.id} ({row.status})"
            self._no_answer(f"{about} contains no result for {len(missing):,} of its calls")

    async def _results(self, batch: Json) -> list[Json]:
        """Download the results of a batch that has ended, without lines that are cut off or unreadable."""
        lines: list[bytes] = []
        for file in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
            # A file may be at another host; httpx does not forward the key there.
            path = f"/files/{file}/content"
            content = await self._send("GET", path, TRANSFER_TIMEOUT_S, follow_redirects=True)
            lines += content.split(b"\n")
        return dict_items([parse(line) for line in lines])

    def _store(self, call: Attempt, result: Json) -> StopCalls | None:
        """Store the answer in a result, or end its attempt without one. Returns an error that stops calls."""
        sender = self.sender
        # A call of an earlier run may not be wanted now; its answer is stored all the same.
        wanted = self._wanted.get(call.key)
        response = as_dict(result.get("response"))
        status, content = response.get("status_code"), response.get("body") or {"error": result.get("error")}
        try:
            if not isinstance(status, int):  # it expired, for example
                raise AttemptFailed(sender.mask(json.dumps(result.get("error"))))
            answer = sender.answer(status, json.dumps(content).encode(), {})
        except (AttemptFailed, Rejection, StopCalls) as error:
            sender.close(call, None if wanted is None else wanted.request, error, batch=True)
            if isinstance(error, Rejection) and error.certain:
                sender.rejected(call.key, error)
            elif wanted is not None and isinstance(error, StopCalls):
                return error
            elif wanted is not None:
                self._no_answer(str(error))
            return None
        # Wall time over any number of runs is not a duration of the call: 0.
        sender.keep(call, None if wanted is None else wanted.request, answer, 0.0, batch=True)
        return None

"""Calls through a provider's batch API: submitted together, polled over any number of runs, cached one by one.

A batch and its calls enter the ledger at their maximum cost before anything is sent. So budgets cover batches in flight, and a
killed process rediscovers its batches: it polls those with a known id, and searches the provider's list for those whose creation
got no answer before creating them again.
"""

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from rge.calls.dispatch.grouping import Call
from rge.calls.dispatch.sender import Sender
from rge.calls.failures import AttemptFailed, EndpointDown, NotFound, Rejected, RequestRejected, StopCalls
from rge.calls.model_config import BillingStats
from rge.calls.providers.batches import MAX_BYTES, MAX_CALLS, BatchApi, Line, State
from rge.calls.providers.bodies import EncodedPictures, body
from rge.calls.providers.transport import failure, to_json
from rge.calls.replies import NotAChat, ReplyError, read_replies
from rge.calls.request import Request
from rge.calls.store import BatchRow, StoredReply
from rge.common.images import ImageError

T = TypeVar("T")
Encode = Callable[[Request], Awaitable[EncodedPictures]]
Settle = Callable[[str, StoredReply | ReplyError], object]
Say = Callable[[str], object]

MAX_LOOKUPS = 3
"""Searches of the provider's list, one `ModelConfig.batch_poll_s` apart, before a missing batch counts as never created."""
MAX_FAILED_POLLS = 20
"""Consecutive failed polls before the endpoint counts as down."""


class BatchJobs:
    """Batches of one endpoint; `settle` receives the key and the answer (or rejection) of each call, even if unwanted now."""

    def __init__(self, sender: Sender, api: BatchApi, *, encode: Encode, settle: Settle, say: Say):
        self.sender, self.api, self.encode, self.settle, self.say = sender, api, encode, settle, say
        self.model, self.store, self.mask = sender.model, sender.store, sender.mask
        self.unanswered: dict[str, str] = {}  # key -> reason
        self._wanted: Mapping[str, Call] = {}
        self._waiting: list[BatchRow] = []
        self._last_status: dict[str, str] = {}  # by label
        # The first result that stops calls; raised once its batch is stored.
        self._stop: StopCalls | None = None

    async def run(self, wanted: Mapping[str, Call]) -> dict[str, str]:
        """Answer calls through batches.

        Returns:
            Key and reason of each call without an answer (failed, expired or lost): make these as single calls.

        Raises:
            StopCalls: the budget is used up and no batch is in flight, or the provider is unreachable, rejects or cancelled a
                batch, or takes too long. The same command resumes.
        """
        # Two processes resuming the same unconfirmed batch would both create it.
        self.store.lock_batches()
        self._wanted = wanted
        queue = deque(await self._resume())
        while queue or self._waiting:
            await self._submit_all(queue)
            if self._waiting:
                queue.extend(wanted[key] for key in await self._wait_for_any() if key in wanted)
        return {key: why for key, why in self.unanswered.items() if key in wanted}

    async def _resume(self) -> list[Call]:
        """Resume the batches of earlier runs; returns the calls that none of them contains."""
        in_flight: set[str] = set()
        for row in self.store.open_batches(self.model.endpoint):
            keys = {key for key, _ in row.calls.values()}
            if not keys & self._wanted.keys():
                continue
            if row.id is None and not await self._find_created(row):
                self.store.close_batch(row.label, billed=False)
                continue
            self.say(f"{self.model.name}: waiting for batch {row.id} of an earlier run, {len(keys):,} calls")
            self._waiting.append(row)
            in_flight |= keys
        return [call for key, call in self._wanted.items() if key not in in_flight]

    # --------------------------------------------------------------------------------------------------------- sending

    async def _submit_all(self, queue: deque[Call]) -> None:
        """Submit batches until the queue is empty, or a budget or the provider's own queue is full."""
        while queue:
            if await self._submit_next(queue):
                if not self._waiting:
                    raise self.sender.budget_reached(self._max_cost(queue[0].request))
                return

    async def _submit_next(self, queue: deque[Call]) -> bool:
        """Submit one batch. Returns whether the budget or the provider's queue is full."""
        model, store = self.model, self.store
        packed = await self._pack(queue)
        if not packed:
            return False
        label, began = f"rge-{secrets.token_hex(8)}", time.time()
        calls = [
            (call.key, model.estimate(call.request, self._stats(call.request)), self._max_cost(call.request))
            for call, _ in packed
        ]
        num_taken = store.begin_batch(
            label, model.endpoint, began, calls, model.budget, total=self.sender.budget
        )
        queue.extendleft(call for call, _ in reversed(packed[num_taken:]))
        if not num_taken:
            return True
        row = BatchRow(label, began, None, None, store.batch_calls(label))
        try:
            submitted = await self._submit(row, [content for _, content in packed[:num_taken]])
        except StopCalls:
            store.close_batch(label, billed=False)
            raise
        if not submitted:
            store.close_batch(label, billed=False)
            queue.extendleft(call for call, _ in reversed(packed[:num_taken]))
            return True
        self._waiting.append(row)
        self.say(f"{model.name}: submitted batch {row.id} of {num_taken:,} calls")
        return num_taken < len(packed)

    async def _pack(self, queue: deque[Call]) -> list[tuple[Call, bytes]]:
        """Take the calls of one batch off the queue, with their request bodies."""
        packed, num_bytes = list[tuple[Call, bytes]](), 0
        while queue and len(packed) < MAX_CALLS:
            call = queue.popleft()
            try:
                content = to_json(body(self.model, call.request, await self.encode(call.request)))
            except ImageError as error:
                self.unanswered[call.key] = str(
                    error
                )  # the single call fails the same way and is counted there
                continue
            if packed and num_bytes + len(content) > MAX_BYTES:
                queue.appendleft(call)
                break
            packed.append((call, content))
            num_bytes += len(content) + 200
        return packed

    def _stats(self, request: Request) -> BillingStats:
        return self.store.billing_stats(self.model.endpoint, bool(request.num_pictures()))

    def _max_cost(self, request: Request) -> float:
        return self.model.max_cost(request, self._stats(request), batch=True)

    async def _submit(self, row: BatchRow, bodies: list[bytes]) -> bool:
        """Create a batch, with retries. False: the provider's queue is full and other batches are in flight."""
        model, num_tries, limited_since = self.model, 0, None
        while True:
            try:
                await self._create(row, bodies)
                return True
            except Rejected as error:
                raise RequestRejected(
                    f"{model.name}: the endpoint rejects the batch; {self.mask(str(error))}. Change the model's settings, or "
                    "use single calls (mode=calls)"
                ) from None
            except StopCalls as error:
                raise type(error)(f"{error} (mode=batch)") from None
            except AttemptFailed as error:
                failed = error
            if failed.limited and self._waiting:
                return False
            if failed.limited:
                now = time.monotonic()
                limited_since = limited_since or now
                wait_s = min(failed.wait_s or model.batch_poll_s, model.max_backoff_s)
                why = f"still rate-limited after {model.max_limited_s:g} s (max_limited_s)"
                give_up = now - limited_since > model.max_limited_s
            else:
                wait_s = min(model.max_backoff_s, model.backoff_s * 2**num_tries)
                num_tries += 1
                why, give_up = f"{num_tries} attempts", num_tries > model.max_retries
            if give_up:
                raise EndpointDown(
                    f"{model.name}: the endpoint accepts no batch ({why}); last error: {self.mask(str(failed))}"
                )
            await asyncio.sleep(wait_s)

    async def _create(self, row: BatchRow, bodies: list[bytes]) -> None:
        if row.file is None:
            row.file = await self.api.send_file(row.label, bodies)
            self.store.update_batch(row.label, file=row.file)
        try:
            row.id = await self.api.create(row.label, row.file)
        except AttemptFailed as error:
            if error.limited or not await self._find_created(row):
                raise
        self.store.update_batch(row.label, id=row.id)

    async def _find_created(self, row: BatchRow) -> bool:
        """Search the provider for a batch whose creation got no answer, and record its id if found."""
        for _ in range(MAX_LOOKUPS if row.file is not None else 0):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                row.id = await self._poll(
                    f"whether batch {row.label} was accepted", partial(self.api.find, row)
                )
            except Rejected as error:
                raise EndpointDown(
                    f"{self.model.name}: the endpoint does not list batches ({self.mask(str(error))}), so it is unknown whether "
                    f"{row.label} was accepted; run the same command to search again"
                ) from None
            if row.id is not None:
                self.store.update_batch(row.label, id=row.id)
                return True
        return False

    async def _poll(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Make a free request about batches, with up to `MAX_FAILED_POLLS` attempts."""
        for _ in range(MAX_FAILED_POLLS):
            try:
                return await ask()
            except AttemptFailed as error:
                last_error = self.mask(str(error))
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.max_backoff_s))
        raise EndpointDown(
            f"{self.model.name}: could not find out {what} ({MAX_FAILED_POLLS} attempts); last error: {last_error}. Nothing is "
            "lost: run the same command to keep waiting"
        )

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_any(self) -> list[str]:
        """Wait until a batch has ended, and store its results. Returns the keys of calls to resubmit."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self.model.batch_poll_s)
            num_before, resubmit = len(self._waiting), list[str]()
            for row in list(self._waiting):
                state = await self._state(row)
                if state.ended:
                    self._waiting.remove(row)
                    resubmit += await self._settle_ended(row, state)
            if len(self._waiting) < num_before:
                return resubmit
            if time.monotonic() - began > self.model.batch_wait_s:
                batches = ", ".join(f"{row.id} ({self._last_status[row.label]})" for row in self._waiting)
                raise EndpointDown(
                    f"{self.model.name}: waited {self.model.batch_wait_s:g} s (batch_wait_s) for batches {batches}. They are still "
                    "running at the provider; run the same command to keep waiting"
                )

    async def _state(self, row: BatchRow) -> State:
        try:
            state = await self._poll(f"the status of batch {row.id}", partial(self.api.state, str(row.id)))
        except (Rejected, NotFound) as error:
            # Deleted, or past the provider's retention: its cost is unknown.
            self.store.close_batch(row.label, billed=True)
            raise self._resubmit_error(
                row, f"no longer exists at the provider: {self.mask(str(error))}"
            ) from None
        if state.status != self._last_status.get(row.label):
            self._last_status[row.label] = state.status
            self.say(f"{self.model.name}: batch {row.id}: {state.status}")
        return state

    async def _settle_ended(self, row: BatchRow, state: State) -> list[str]:
        """Store the results of an ended batch. Returns the keys of calls to resubmit."""
        if state.reason is not None:
            self.store.close_batch(row.label, billed=False)
            if state.queue_full and self._waiting:
                return [key for key, _ in row.calls.values()]
            fix = "Change the model's settings"
            if state.queue_full:
                fix = "Wait until fewer tokens are queued at the provider"
            raise RequestRejected(
                f"{self.model.name}: batch {row.id} failed: {self.mask(state.reason)}. {fix}, or use single calls (mode=calls), "
                "and run the same command again"
            )
        await self._keep_results(row, state)
        missing = self.store.batch_calls(row.label)
        for key, _ in missing.values():
            self.unanswered[key] = f"batch {row.id} ({state.status}) contains no result for it"
        self.store.close_batch(row.label, billed=not state.partial)
        if missing and state.status == "cancelled":
            raise self._resubmit_error(
                row, f"was cancelled at the provider; {len(missing):,} of its calls have no answer"
            )
        if self._stop is not None:
            raise self._stop
        return []

    def _resubmit_error(self, row: BatchRow, why: str) -> EndpointDown:
        return EndpointDown(
            f"{self.model.name}: batch {row.id} {why}. Stopped rather than make single calls at full price: run the same command "
            "again to submit the rest as a new batch, or with mode=calls"
        )

    async def _keep_results(self, row: BatchRow, state: State) -> None:
        # A download may be cut short: fetch again before missing results count as lost.
        for _ in range(MAX_LOOKUPS):
            missing = self.store.batch_calls(row.label)
            try:
                lines = await self._poll(f"the results of batch {row.id}", partial(self.api.results, state))
            except (Rejected, NotFound) as error:
                self.say(
                    f"{self.model.name}: cannot download the results of batch {row.id}: {self.mask(str(error))}"
                )
                return
            own = [line for line in lines if re.fullmatch(rf"{re.escape(row.label)}-\d+", line.id)]
            if num_unknown := len(lines) - len(own):
                self.say(f"{self.model.name}: {num_unknown:,} results of batch {row.id} have unknown ids")
            for line in own:
                if (call := missing.pop(int(line.id.rpartition("-")[2]), None)) is not None:
                    self._keep_line(row, line, *call)
            if not missing or state.partial:
                return
            await asyncio.sleep(min(self.model.batch_poll_s, self.model.backoff_s))

    def _keep_line(self, row: BatchRow, line: Line, key: str, attempt: int) -> None:
        wanted = self._wanted.get(key)
        raw = line.body
        if raw is None:
            raw = self._read_failure(line, key)
        elif not self._is_chat(raw, key):
            self.store.end_attempt(attempt, billed=True)
            return
        if raw is None:
            self.store.end_attempt(attempt, billed=False)
            return
        request = wanted.request if wanted is not None else None
        took_s = time.time() - row.began
        self.settle(key, self.sender.keep(key, request, attempt, raw, took_s, batch=True))

    def _is_chat(self, raw: bytes, key: str) -> bool:
        try:
            read_replies(raw)
        except NotAChat as error:
            self.unanswered[key] = self.mask(str(error))
            return False
        except ReplyError:  # an answer, though without content
            pass
        return True

    def _read_failure(self, line: Line, key: str) -> bytes | None:
        """Handle a result without an answer; returns the body of a policy refusal, which is stored like an answer."""
        if line.status is None or line.status < 400:
            self.unanswered[key] = self.mask(line.error.decode("utf-8", "replace"))
            return None
        failed, wanted = failure(line.status, line.error, {}, self.model, self.mask), self._wanted.get(key)
        if failed is None:
            return line.error
        if isinstance(failed, Rejected) and failed.certain and wanted is not None:
            self.settle(key, self.sender.rejected(wanted, failed))
        elif isinstance(failed, StopCalls):
            self._stop = self._stop or failed
        else:
            self.unanswered[key] = self.mask(str(failed))
        return None

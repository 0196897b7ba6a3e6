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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from rge.calls.dispatch.grouping import Call, Grouping
from rge.calls.dispatch.sender import Sender
from rge.calls.failures import AttemptFailed, EndpointDown, NotFound, Rejection, RequestRejected, StopCalls
from rge.calls.pictures import Pictures
from rge.calls.providers.batches import MAX_BYTES, MAX_CALLS, BatchApi, Line, State
from rge.calls.providers.errors import failure
from rge.calls.providers.transport import body, check_chat, to_json
from rge.calls.replies import ReplyError
from rge.calls.store import BatchRow
from rge.common.images import ImageError

T = TypeVar("T")

MAX_LOOKUPS = 3
"""Searches of the provider's list, one `ModelConfig.batch_poll_s` apart, before a missing batch counts as never created."""
MAX_FAILED_POLLS = 20
"""Consecutive failed polls before the endpoint counts as down."""


class BatchJobs:
    """Batches of one endpoint. Results of earlier runs' calls are stored too, even if they are not wanted now."""

    def __init__(
        self,
        sender: Sender,
        api: BatchApi,
        grouping: Grouping,
        pictures: Pictures,
        say: Callable[[str], object],
    ):
        self.sender, self.api, self.grouping, self.pictures, self.say = sender, api, grouping, pictures, say
        self.model, self.store, self.mask = sender.model, sender.store, sender.mask
        self._wanted: dict[str, Call] = {}  # calls without a result, by key
        self._reasks: list[Call] = []
        self._why: str | None = None  # the first reason why a call got no answer
        self._waiting: list[BatchRow] = []
        self._last_status: dict[str, str] = {}  # by label
        # The first result that stops calls; raised once its batch is stored.
        self._stop: StopCalls | None = None

    async def run(self, calls: Sequence[Call]) -> list[Call]:
        """Answer calls through batches.

        Returns:
            Calls to make one by one: those that failed, expired or were lost, and those that request unreadable answers again.

        Raises:
            StopCalls: the budget is used up and no batch is in flight, or the provider is unreachable, rejects or cancelled a
                batch, or takes too long. The same command resumes.
        """
        # Two processes resuming the same unconfirmed batch would both create it.
        self.store.lock_batches()
        self._wanted = {call.key: call for call in calls}
        queue = deque(await self._resume())
        while queue or self._waiting:
            await self._submit_all(queue)
            if self._waiting:
                queue += await self._wait_for_any()
        left = [*self._wanted.values(), *self._reasks]
        if left:
            why = (self._why or "their answers could not be read")[:300]
            self.say(f"{self.model.name}: making {len(left):,} single calls, at full price: {why}")
        return left

    def _no_answer(self, why: str) -> None:
        self._why = self._why or self.mask(why)

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
            if not await self._submit_next(queue):
                if not self._waiting:
                    raise self.sender.budget_reached(self.sender.estimate(queue[0].request, batch=True)[1])
                return

    async def _submit_next(self, queue: deque[Call]) -> bool:
        """Submit one batch. Returns whether there may be room for another, within budgets and the provider's queue."""
        model, store = self.model, self.store
        packed = await self._pack(queue)
        if not packed:
            return True
        row = BatchRow(f"rge-{secrets.token_hex(8)}", time.time())
        calls = [(call.key, *self.sender.estimate(call.request, batch=True)) for call, _ in packed]
        num_taken = store.begin_batch(row, model.endpoint, calls, self.sender.budgets)
        try:
            if num_taken and not await self._submit(row, [content for _, content in packed[:num_taken]]):
                store.close_batch(row.label, billed=False)
                num_taken = 0
        except StopCalls:
            store.close_batch(row.label, billed=False)
            raise
        queue.extendleft(call for call, _ in reversed(packed[num_taken:]))
        if num_taken:
            self._waiting.append(row)
            self.say(f"{model.name}: submitted batch {row.id} of {num_taken:,} calls")
        return num_taken == len(packed)

    async def _pack(self, queue: deque[Call]) -> list[tuple[Call, bytes]]:
        """Take the calls of one batch off the queue, with their request bodies."""
        packed, num_bytes = list[tuple[Call, bytes]](), 0
        while queue and len(packed) < MAX_CALLS:
            call = queue.popleft()
            try:
                content = to_json(body(self.model, call.request, await self.pictures.of(call.request)))
            except ImageError as error:
                self._no_answer(str(error))  # the single call fails the same way and is counted there
                continue
            if packed and num_bytes + len(content) > MAX_BYTES:
                queue.appendleft(call)
                break
            packed.append((call, content))
            num_bytes += len(content) + 200
        return packed

    async def _submit(self, row: BatchRow, bodies: list[bytes]) -> bool:
        """Create a batch, with retries. False: the provider's queue is full and other batches are in flight."""
        name = self.model.name

        async def create() -> bool:
            try:
                await self._create(row, bodies)
            except AttemptFailed as error:
                if error.limited and self._waiting:
                    return False
                raise
            return True

        try:
            return await self.sender.retried(create)
        except Rejection as error:
            raise RequestRejected(
                f"{name}: the endpoint rejects the batch; {error}. Change the model's settings, or use single calls (mode=calls)"
            ) from None
        except AttemptFailed as error:
            raise EndpointDown(f"{name}: the endpoint accepts no batch; last error: {error}") from None
        except StopCalls as error:
            raise type(error)(f"{error} (mode=batch)") from None

    async def _create(self, row: BatchRow, bodies: list[bytes]) -> None:
        if row.file is None:
            row.file = await self.api.send_file(row.label, bodies)
            self.store.save_batch(row)
        try:
            row.id = await self.api.create(row.label, row.file)
        except AttemptFailed as error:
            if error.limited or not await self._find_created(row):
                raise
        self.store.save_batch(row)

    async def _find_created(self, row: BatchRow) -> bool:
        """Search the provider for a batch whose creation got no answer, and record its id if found."""
        for _ in range(MAX_LOOKUPS if row.file is not None else 0):
            await asyncio.sleep(self.model.batch_poll_s)
            try:
                row.id = await self._poll(
                    f"whether batch {row.label} was accepted", partial(self.api.find, row)
                )
            except Rejection as error:
                raise EndpointDown(
                    f"{self.model.name}: the endpoint does not list batches ({error}), so it is unknown whether {row.label} was "
                    "accepted; run the same command to search again"
                ) from None
            if row.id is not None:
                self.store.save_batch(row)
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

    async def _wait_for_any(self) -> list[Call]:
        """Wait until a batch has ended, and store its results. Returns the calls to resubmit."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self.model.batch_poll_s)
            num_before, resubmit = len(self._waiting), list[Call]()
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
        except (Rejection, NotFound) as error:
            # Deleted, or past the provider's retention: its cost is unknown.
            self.store.close_batch(row.label, billed=True)
            raise self._resubmit_error(row, f"no longer exists at the provider ({error})") from None
        if state.status != self._last_status.get(row.label):
            self._last_status[row.label] = state.status
            self.say(f"{self.model.name}: batch {row.id}: {state.status}")
        return state

    async def _settle_ended(self, row: BatchRow, state: State) -> list[Call]:
        """Store the results of an ended batch. Returns the calls to resubmit."""
        if state.reason is not None:
            self.store.close_batch(row.label, billed=False)
            if state.queue_full and self._waiting:
                return [self._wanted[key] for key, _ in row.calls.values() if key in self._wanted]
            fix = "Change the model's settings"
            if state.queue_full:
                fix = "Wait until fewer tokens are queued at the provider"
            raise RequestRejected(
                f"{self.model.name}: batch {row.id} failed: {self.mask(state.reason)}. {fix}, or use single calls (mode=calls), "
                "and run the same command again"
            )
        await self._keep_results(row, state)
        missing = self.store.batch_calls(row.label)
        if missing:
            self._no_answer(
                f"batch {row.id} ({state.status}) contains no result for {len(missing):,} of its calls"
            )
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
            except (Rejection, NotFound) as error:
                self.say(f"{self.model.name}: cannot download the results of batch {row.id}: {error}")
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
        """Store the answer in a result, or end its attempt without one."""
        raw = line.body
        try:
            answer = self._read_failure(line) if raw is None else raw
            check_chat(answer)
        except (AttemptFailed, Rejection, StopCalls) as error:
            self.store.end_attempt(attempt, billed=raw is not None)
            self._fail(key, error)
            return
        wanted = self._wanted.get(key)
        request = wanted.request if wanted is not None else None
        took_s = time.time() - row.began
        self._settle(key, self.sender.keep(key, request, attempt, answer, took_s, batch=True))

    def _read_failure(self, line: Line) -> bytes:
        """The body of a policy refusal, which is stored like an answer; any other failure is raised."""
        if line.status is None or line.status < 400:
            raise AttemptFailed(line.error.decode("utf-8", "replace"))
        failed = failure(line.status, line.error, {}, self.model, self.mask)
        if failed is not None:
            raise failed
        return line.error

    def _fail(self, key: str, error: AttemptFailed | Rejection | StopCalls) -> None:
        if isinstance(error, StopCalls):
            self._stop = self._stop or error
        elif isinstance(error, Rejection) and error.certain and key in self._wanted:
            self._settle(key, self.sender.rejected(self._wanted[key], error))
        else:
            self._no_answer(str(error))

    def _settle(self, key: str, result: bytes | ReplyError) -> None:
        self.sender.health.call_accepted(float("-inf"))
        if (call := self._wanted.pop(key, None)) is not None:
            self._reasks += self.grouping.record(call, result)

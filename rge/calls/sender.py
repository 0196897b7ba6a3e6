"""Make the calls of one model: concurrency, retries, budget, ledger, and the handling of errors.

Plain HTTP rather than the providers' clients, which have retries, limits and time-outs of their own, and do not return responses
byte for byte.
"""

import asyncio
import hashlib
import io
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import httpx
from PIL import Image

from rge.calls.failures import (
    AttemptFailed,
    BudgetReached,
    NoContent,
    Rejection,
    StopCalls,
    Unanswered,
    failure,
)
from rge.calls.grouping import Call, Grouping, Replies, samples
from rge.calls.model_config import BillingStats, ModelConfig
from rge.calls.pace import Pace, backoff
from rge.calls.request import Part, Picture, Request
from rge.calls.store import Attempt, Budgets
from rge.calls.wire.bodies import PATH, body, headers
from rge.calls.wire.pictures import EncodedPictures, Pictures
from rge.calls.wire.replies import (
    EmptyChoices,
    NotAChat,
    ReplyError,
    Usage,
    as_dict,
    is_failure,
    lack,
    parse,
    usage,
)
from rge.common.images import ImageError
from rge.web.client import make_client

T = TypeVar("T")

CALLS_AHEAD = 1024
"""Calls of a model that wait for a connection, before no further requests are read."""
MAX_UNANSWERED_IN_A_ROW = 20
"""Consecutive unanswered calls before the endpoint counts as down."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(eq=False)
class Endpoint:
    """What the models behind one endpoint share in a run.

    Stopping cancels nothing: calls in flight are billed, so their answers are awaited and stored.
    """

    pace: Pace
    say: Callable[[str], object]  # receives messages
    call_ended: asyncio.Event  # set when any call of the run has ended, also at another endpoint
    canary: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_flight: int = 0
    unanswered_in_a_row: int = 0
    accepted_at: float = -math.inf  # send time of the latest accepted call
    stopped: StopCalls | None = None  # why calls have stopped

    def stop(self, error: StopCalls) -> None:
        """Stop calls for this run; the first reason given is kept, and said now: other endpoints' calls may take long."""
        if self.stopped is None:
            self.stopped = error
            self.say(str(error))
        self.call_ended.set()


class Sender:
    """Makes the calls of one model in one run; an answer is stored before anything else is decided.

    Args:
        endpoints: all of the run's, which a budget of all models has to wait for.
        budget: of all models together.
        tasks: of the run.
    """

    def __init__(
        self,
        model: ModelConfig,
        grouping: Grouping,
        pictures: Pictures,
        endpoints: Mapping[str, Endpoint],
        budget: float | None,
        tasks: asyncio.TaskGroup,
    ):
        self.model, self.grouping, self.pictures, self.tasks = model, grouping, pictures, tasks
        self.store, self.counts, self.mask = grouping.store, grouping.counts, grouping.mask
        self.endpoint, self._budget = endpoints[model.endpoint], budget
        # Whose calls in flight may turn out cheaper than what they hold of a budget.
        self._spenders: Collection[Endpoint] = [self.endpoint] if budget is None else endpoints.values()
        limits = {model.endpoint: model.budget, None: budget}
        self.budgets: Budgets = {name: limit for name, limit in limits.items() if limit is not None}
        self.collected: list[Call] = []
        """Calls for a batch."""
        self._free = asyncio.Semaphore(model.concurrency)
        self._ahead = asyncio.Semaphore(CALLS_AHEAD + model.concurrency)
        connections = httpx.Limits(
            max_connections=model.concurrency, max_keepalive_connections=model.concurrency
        )
        # No time-outs of its own: `send` limits each request as a whole.
        self.client = make_client(
            httpx.AsyncClient,
            base_url=model.address,
            headers=headers(model),
            limits=connections,
            timeout=None,
        )

    async def add(self, call: Call) -> None:
        """Make a call as soon as fewer than `ModelConfig.concurrency` are in flight; waits while `CALLS_AHEAD` others do.

        With ``mode=batch``, it is only `collected`.
        """
        if self.model.mode == "batch":
            self.collected.append(call)
            return
        await self._ahead.acquire()
        self.start(call).add_done_callback(lambda _: self._ahead.release())

    def start(self, call: Call) -> "asyncio.Task[None]":
        """Start the task of a plain call."""
        return self.tasks.create_task(self._make(call))

    async def _make(self, call: Call) -> None:
        """Make a call, and those that request its unreadable answers again."""
        async with self._free:
            try:
                calls = [call]
                while calls and self.endpoint.stopped is None:
                    try:
                        replies: Replies = samples(await self.call(calls[0]))
                    except ReplyError as error:
                        replies = [error]
                    calls = self.grouping.record(calls[0], replies) + calls[1:]
            except StopCalls as error:
                self.endpoint.stop(error)

    async def call(self, call: Call) -> bytes:
        """Make a call, with retries, and store its answer.

        Raises:
            Unanswered, Rejection: it is settled without an answer.
            StopCalls: no further call to the endpoint can succeed; this one is not settled.
            UserError: the answer cannot be stored.
        """
        try:
            # Before the attempt, so that scaling a photograph does not count towards its time limit.
            pictures = await self.pictures.of(call.request)
            answer = await self.retried(lambda: self._attempt(call, pictures))
            if (error := lack(answer)) is not None and not self.grouping.may_reask(call):
                raise NoContent(f"{error}; raise max_tokens, or set reasoning_effort", billed=True)
            return answer
        except ImageError as error:
            raise self._unanswered(error) from None
        except AttemptFailed as error:
            raise self._given_up(error) from None
        except Rejection as error:
            if not error.certain:
                await self._check_settings(call, error)
            raise self.rejected(call.key, error) from None

    async def retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt until it succeeds.

        Raises:
            AttemptFailed: the last failure: after `ModelConfig.max_retries`, or `max_limited_s` of 429s, or if the endpoint asks to
                wait longer than that.
        """
        model, pace, num_retries, limited_since = self.model, self.endpoint.pace, 0, None
        while True:
            sent_at = await pace.wait_turn()
            try:
                return await attempt()
            except AttemptFailed as error:
                failed = error
            if self._must_wait_too_long(failed):
                reason = (
                    f"the endpoint asks to wait {failed.wait_s:,.0f} s (Retry-After), longer than "
                    f"max_limited_s={model.max_limited_s:g}; {failed}"
                )
                raise replace(failed, reason=reason)
            if failed.limited:
                self.counts.limited += 1
                pace.on_limited(sent_at, failed.wait_s, model.backoff_s, model.max_backoff_s)
                limited_since = limited_since or time.monotonic()
                if time.monotonic() - limited_since >= model.max_limited_s:
                    reason = f"{failed}, still rate-limited after {model.max_limited_s:g} s (max_limited_s)"
                    raise replace(failed, reason=reason)
            elif num_retries < (model.reasks if isinstance(failed, NoContent) else model.max_retries):
                self.counts.retries += 1
                wait_s = backoff(num_retries, model.backoff_s, model.max_backoff_s) * random.random()
                await asyncio.sleep(max(wait_s, min(failed.wait_s or 0.0, model.max_backoff_s)))
                num_retries += 1
            else:
                raise replace(failed, num=num_retries + 1)

    async def _attempt(self, call: Call, pictures: EncodedPictures) -> bytes:
        """Make one attempt; raises as `answer` does, after closing the attempt's ledger entry."""
        endpoint, model = self.endpoint, self.model
        attempt = await self._begin(call)
        sent_at = time.monotonic()
        typical = call.request if call.pending else None  # a canary, which no request waits for, is not
        try:
            content = body(model, call.request, pictures)
            response = await self.send("POST", PATH, model.timeout_s, json=content)
            answer = self.answer(response.status_code, response.content, response.headers)
        except asyncio.CancelledError:
            self.store.end_attempt(attempt.number, billed=True)
            raise
        except (AttemptFailed, Rejection, StopCalls) as error:
            self.close(attempt, typical, error)
            if isinstance(error, NoContent):
                self._note_accepted(sent_at)
            raise
        finally:
            endpoint.in_flight -= 1
            endpoint.call_ended.set()
        self.keep(attempt, typical, answer, time.monotonic() - sent_at)
        self._note_accepted(sent_at)
        if lack(answer) is None:
            endpoint.unanswered_in_a_row = 0
        return answer

    def _note_accepted(self, sent_at: float) -> None:
        self.endpoint.accepted_at = max(self.endpoint.accepted_at, sent_at)
        self.endpoint.pace.on_answer()

    async def send(self, method: str, path: str, limit_s: float, **options: Any) -> httpx.Response:
        """Send any request and return the response, whatever its status; raises `AttemptFailed`: none within ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.client.request(method, path, **options)
        except TimeoutError:
            raise AttemptFailed(f"no answer within {limit_s:g} s", billed=True) from None
        except httpx.RequestError as lost:
            message = self.mask(str(lost) or type(lost).__name__)
            raise AttemptFailed(f"no connection: {message}", billed=not isinstance(lost, NOT_SENT)) from None

    def answer(self, status: int, content: bytes, response_headers: Mapping[str, str]) -> bytes:
        """The content of a response if it answers a call, also by a refusal; raises `AttemptFailed`, `Rejection` or `StopCalls`."""
        value = parse(content)
        if not 200 <= status < 300 or is_failure(value):
            error = failure(status, content, response_headers, self.model, self.mask)
            if error is not None:
                raise error
        why = lack(content)
        if isinstance(why, NotAChat):
            message = f"the endpoint's response is not a chat completion: {self.mask(str(why))}"
            # A page or a text comes from no model; JSON that was cut off may.
            billed = content.lstrip()[:1] in (b"{", b"[") and (value is None or "usage" in as_dict(value))
            raise AttemptFailed(message, billed=billed, no_chat=True)
        if isinstance(why, EmptyChoices):
            raise NoContent(self.mask(str(why)), billed=True, raw=content)
        return content  # also one that was cut off before it had content, which is requested again with more room

    async def _check_settings(self, call: Call, error: Rejection) -> None:
        """Send a harmless request (a canary) with the same settings; raises `StopCalls` if that is rejected, too."""
        rejected_at = time.monotonic()
        async with self.endpoint.canary:
            if self.endpoint.accepted_at > rejected_at:  # a call sent after the rejection was accepted
                return
            canary = Call(f"canary {call.key}", _canary(call.request), [])
            pictures = await self.pictures.of(canary.request)
            try:
                await self.retried(lambda: self._attempt(canary, pictures))
            except AttemptFailed as failed:
                raise self._given_up(failed) from None
            except Rejection:
                raise StopCalls(
                    f"the endpoint rejects the request; {error}",
                    self.model.name,
                    error.status,
                    kind="settings",
                ) from None

    async def _begin(self, call: Call) -> Attempt:
        """Enter an attempt in the ledger as soon as the budget allows it; raises why calls to the endpoint have stopped."""
        endpoint = self.endpoint
        while endpoint.stopped is None:
            # The cost of the first call is only an estimate: under a budget, the others wait for its bill.
            is_first = (
                self.budgets and not self.stats(call.request).calls and not endpoint.unanswered_in_a_row
            )
            if not (is_first and endpoint.in_flight):
                tokens, max_cost = self.estimate(call.request)
                number = self.store.begin_attempt(
                    self.model.endpoint, call.key, tokens, max_cost, self.budgets
                )
                if number is not None:
                    endpoint.in_flight += 1
                    return Attempt(call.key, number, tokens)
                if not any(spender.in_flight for spender in self._spenders):
                    raise self.budget_reached(max_cost)
            endpoint.call_ended.clear()
            await endpoint.call_ended.wait()
        raise endpoint.stopped

    def stats(self, request: Request) -> BillingStats:
        """How bills compare with estimates, for calls such as this one."""
        return self.store.billing_stats(self.model.endpoint, bool(request.num_pictures()))

    def estimate(self, request: Request, *, batch: bool = False) -> tuple[tuple[int, int], float]:
        """Estimated input and maximum output tokens, corrected by earlier bills, and the maximum cost."""
        tokens = self.model.estimate(request, self.stats(request))
        return tokens, self.model.cost(*tokens, batch=batch)

    def keep(
        self, attempt: Attempt, request: Request | None, answer: bytes, took_s: float, *, batch: bool = False
    ) -> None:
        """Store an answer and its cost; learn from the bill how far the estimate for a ``request`` (None: do not) was off."""
        bill, cost, estimate = self._bill(attempt, request, answer, batch=batch)
        self.store.put(attempt.number, attempt.key, self.model.name, answer, bill, cost, took_s, estimate)
        self.grouping.answered.add(attempt.key)
        self.counts.asked += 1
        self.counts.refused += bill.refused

    def close(
        self,
        attempt: Attempt,
        request: Request | None,
        error: AttemptFailed | Rejection | StopCalls,
        *,
        batch: bool = False,
    ) -> None:
        """Close the ledger entry of an attempt that got no answer; see `keep`."""
        if isinstance(error, NoContent):
            bill, cost, estimate = self._bill(attempt, request, error.raw, batch=batch)
            self.store.pay(attempt.number, bill, cost, estimate)
        else:
            self.store.end_attempt(attempt.number, billed=isinstance(error, AttemptFailed) and error.billed)

    def _bill(
        self, attempt: Attempt, request: Request | None, answer: bytes, *, batch: bool
    ) -> tuple[Usage, float, tuple[int, int, bool] | None]:
        """Tokens and cost of an answer, and what was estimated for it (None: do not learn from it)."""
        model, bill, estimate = self.model, usage(answer, attempt.tokens), None
        cost = model.cost(bill.input_tokens, bill.output_tokens, bill.cached, batch=batch)
        if request is not None and not bill.refused:
            estimate = (*model.estimate(request), bool(request.num_pictures()))
        return bill, cost, estimate

    def rejected(self, key: str, error: Rejection) -> Rejection:
        """Record that the endpoint rejects a call, so that it is not sent again with the same settings."""
        rejection = replace(error, reason=f"{self.model.name}: {error}")
        self.store.record_rejection(key, self.model.sent_by(), str(rejection))
        self.counts.rejected += 1
        return rejection

    def _must_wait_too_long(self, error: AttemptFailed) -> bool:
        return error.wait_s is not None and error.wait_s > self.model.max_limited_s

    def _unanswered(self, why: AttemptFailed | ImageError) -> Unanswered:
        self.counts.unanswered += 1
        return Unanswered(self.model.name, why)

    def _given_up(self, error: AttemptFailed) -> Unanswered | StopCalls:
        """The error of a call whose retries failed; `MAX_UNANSWERED_IN_A_ROW` of them stop the run."""
        endpoint, stop = self.endpoint, partial(StopCalls, file=self.model.name, place=error.status)
        is_idle = time.monotonic() - endpoint.accepted_at >= self.model.max_limited_s
        if self._must_wait_too_long(error) or (error.limited and is_idle):
            return stop(str(error), kind="limited")
        if error.no_chat and endpoint.accepted_at == -math.inf:
            return stop(f"{error} (at {self.model.address})", kind="address")
        unanswered = self._unanswered(error)
        endpoint.unanswered_in_a_row += 1
        if endpoint.unanswered_in_a_row >= MAX_UNANSWERED_IN_A_ROW:
            why = f"{endpoint.unanswered_in_a_row} calls in a row got no answer; last error: {error}"
            endpoint.stop(stop(why, kind="unanswered"))
        return unanswered

    def budget_reached(self, max_cost: float) -> BudgetReached:
        """The error of a call whose maximum cost exceeds what is left of a budget."""
        # The tightest budget; of two that are equally tight, the model's own.
        name = min(self.budgets, key=lambda name: self.budgets[name] - self.store.spent(name))
        whose = "command's" if name is None else "model's"
        spent = f"{self.store.spent(name):.4f} of the {whose} budget {self.budgets[name]:g} is spent"
        why = f"{spent}, and the next call might cost {max_cost:.4f}"
        return BudgetReached(why, self.model.name, kind="budget")


def _canary(request: Request) -> Request:
    """A harmless request with the same settings and as many pictures."""
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(out, "PNG")
    picture = Picture(out.getvalue(), hashlib.sha256(out.getvalue()).hexdigest())
    parts: tuple[Part, ...] = ("Answer with the word ok.", *[picture] * request.num_pictures())
    return replace(request, parts=parts, system=None)

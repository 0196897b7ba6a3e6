"""Make one call: retries, budget, ledger entry, and the handling of its errors."""

import asyncio
import hashlib
import io
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from PIL import Image

from rge.calls.dispatch.grouping import Call, Counts
from rge.calls.dispatch.health import Health
from rge.calls.failures import (
    AttemptFailed,
    BudgetReached,
    Rejection,
    StopCalls,
    Unanswered,
)
from rge.calls.model_config import BillingStats, ModelConfig
from rge.calls.pictures import EncodedPictures, data_url
from rge.calls.providers.transport import Connection
from rge.calls.replies import usage
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore, Attempt, Budgets

T = TypeVar("T")


@dataclass
class Sender:
    """Makes the calls of one model; an answer is stored before anything else is decided."""

    connection: Connection
    health: Health  # of the endpoint, shared by all models behind it
    store: AnswerStore
    counts: Counts
    budget: float | None  # of all models together

    @property
    def model(self) -> ModelConfig:
        """The model."""
        return self.connection.model

    async def call(self, call: Call, pictures: EncodedPictures) -> bytes:
        """Make a call, with retries, and store its answer.

        Raises:
            Unanswered, Rejection: it is settled without an answer.
            StopCalls: no further call to the endpoint can succeed; this one is not settled.
            UserError: the answer cannot be stored.
        """
        try:
            return await self.retried(lambda: self._attempt(call, pictures))
        except AttemptFailed as error:
            raise self._give_up(error) from None
        except Rejection as error:
            if not error.certain:
                await self._check_settings(call, error)
            raise self.rejected(call.key, error) from None

    async def retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt until it succeeds.

        Raises:
            AttemptFailed: the last failure, after `ModelConfig.max_retries`, or `max_limited_s` of 429s.
            StopCalls: the endpoint asks to wait longer than `max_limited_s`, or accepts no other call either.
        """
        model, health, num_retries, limited_since = self.model, self.health, 0, None
        while True:
            sent_at = await health.pace.wait_turn()
            try:
                return await attempt()
            except AttemptFailed as error:
                failed = replace(error, reason=self.connection.mask(error.reason))
            if failed.wait_s is not None and failed.wait_s > model.max_limited_s:
                raise StopCalls(
                    f"{model.name}: the endpoint asks to wait {failed.wait_s:,.0f} s (Retry-After), longer than "
                    f"max_limited_s={model.max_limited_s:g}; {failed}. Run the same command again after that time"
                )
            if failed.limited:
                self.counts.limited += 1
                health.pace.on_limited(sent_at, failed.wait_s, model.backoff_s, model.max_backoff_s)
                limited_since = limited_since or time.monotonic()
                if time.monotonic() - limited_since >= model.max_limited_s:
                    raise self._still_limited(failed, limited_since)
            elif num_retries < model.max_retries:
                self.counts.retries += 1
                wait_s = min(model.max_backoff_s, model.backoff_s * 2**num_retries) * random.random()
                await asyncio.sleep(max(wait_s, min(failed.wait_s or 0.0, model.max_backoff_s)))
                num_retries += 1
            else:
                raise AttemptFailed(f"{failed} ({num_retries + 1} attempts)")

    def _still_limited(self, failed: AttemptFailed, since: float) -> AttemptFailed | StopCalls:
        message = f"{failed}, still rate-limited after {self.model.max_limited_s:g} s (max_limited_s)"
        if self.health.accepted_at >= since:
            return AttemptFailed(message)
        return StopCalls(
            f"{self.model.name}: {message}. Answers so far are stored; run the same command later"
        )

    async def _attempt(self, call: Call, pictures: EncodedPictures, *, canary: bool = False) -> bytes:
        """Make one attempt; raises as `Connection.chat` does, after closing the attempt's ledger entry."""
        health = self.health
        attempt = await self._begin(call)
        sent_at = time.monotonic()
        try:
            answer = await self.connection.chat(call.request, pictures)
        except asyncio.CancelledError:
            self.store.end_attempt(attempt.number, billed=True)
            raise
        except (AttemptFailed, Rejection, StopCalls) as error:
            self.store.end_attempt(attempt.number, billed=isinstance(error, AttemptFailed) and error.billed)
            raise
        finally:
            health.call_ended()
        self.keep(attempt, None if canary else call.request, answer, time.monotonic() - sent_at)
        health.call_accepted(sent_at)
        health.pace.on_answer()
        return answer

    async def _check_settings(self, call: Call, error: Rejection) -> None:
        """Send a harmless request (a canary) with the same settings; raises `StopCalls` if that is rejected, too."""
        health, rejected_at = self.health, time.monotonic()
        async with health.canary:
            if health.accepted_at > rejected_at:  # a call sent after the rejection was accepted
                return
            request, pictures = _canary(call.request)
            canary = Call(f"canary {call.key}", request, [])
            try:
                await self.retried(lambda: self._attempt(canary, pictures, canary=True))
            except AttemptFailed as failed:
                raise self._give_up(failed) from None
            except Rejection:
                raise StopCalls(
                    f"{self.model.name}: the endpoint rejects the request; {error}. It also rejects a harmless one with the same "
                    "settings: change the model's settings (token_limit, send_temperature, send_seed, extra_body, max_side_px ...) "
                    "and run the same command again; answers so far are stored"
                ) from None

    async def _begin(self, call: Call) -> Attempt:
        """Enter an attempt in the ledger as soon as the budget allows it; raises why calls to the endpoint have stopped."""
        health, endpoint, budgets = self.health, self.model.endpoint, self.budgets
        while health.stopped is None:
            # The cost of the first call is only an estimate: under a budget, the others wait for its bill.
            is_first = budgets and not self.stats(call.request).calls and not health.unanswered_in_a_row
            if not (is_first and health.in_flight):
                tokens, max_cost = self.estimate(call.request)
                number = self.store.begin_attempt(endpoint, call.key, tokens, max_cost, budgets)
                if number is not None:
                    health.in_flight += 1
                    return Attempt(call.key, number, tokens)
                # What calls in flight do not cost becomes free again; those to other endpoints count in the command's budget.
                spenders = (health,) if self.budget is None else health.all_of_run
                if not any(spender.in_flight for spender in spenders):
                    raise self.budget_reached(max_cost)
            await health.wait_for_completion()
        raise health.stopped

    @property
    def budgets(self) -> Budgets:
        """The limits of what calls may cost."""
        limits = {self.model.endpoint: self.model.budget, None: self.budget}
        return {endpoint: budget for endpoint, budget in limits.items() if budget is not None}

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
        model, bill, estimate = self.model, usage(answer, attempt.tokens), None
        cost = model.cost(bill.input_tokens, bill.output_tokens, bill.cached, batch=batch)
        if request is not None and not bill.refused:
            estimate = (*model.estimate(request), bool(request.num_pictures()))
        self.store.put(attempt.number, attempt.key, model.name, answer, bill, cost, took_s, estimate)
        self.counts.asked += 1
        self.counts.refused += bill.refused

    def rejected(self, key: str, error: Rejection) -> Rejection:
        """Record that the endpoint rejects a call, so that it is not sent again with the same settings."""
        rejection = Rejection(f"{self.model.name}: {error}")
        self.store.record_rejection(key, self.model.sent_by(), str(rejection))
        self.counts.rejected += 1
        return rejection

    def _give_up(self, error: AttemptFailed) -> Unanswered:
        unanswered = self.unanswered(str(error))
        self.health.call_unanswered(unanswered)
        return unanswered

    def unanswered(self, why: str) -> Unanswered:
        """The error of a call without an answer; the next run repeats it."""
        self.counts.unanswered += 1
        return Unanswered(f"{self.model.name}: {why}")

    def budget_reached(self, max_cost: float) -> BudgetReached:
        """The error of a call whose maximum cost exceeds what is left of a budget."""
        model, total = self.model, self.budget
        spent, all_spent = self.store.spent(model.endpoint), self.store.spent(None)
        if model.budget is not None and (total is None or spent + max_cost > model.budget):
            used, option = f"{spent:.4f} of the budget {model.budget:g} is spent", "the model's budget"
        else:
            used, option = f"{all_spent:.4f} of the command's budget {total:g} is spent", "budget"
        return BudgetReached(
            f"{model.name}: {used}, and the next call might cost {max_cost:.4f}, so calls stop here. Raise {option} and run the "
            "same command again"
        )


def _canary(request: Request) -> tuple[Request, EncodedPictures]:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(out, "PNG")
    picture = Picture(out.getvalue(), hashlib.sha256(out.getvalue()).hexdigest())
    parts: tuple[Part, ...] = ("Answer with the word ok.", *[picture] * request.num_pictures())
    return replace(request, parts=parts, system=None), {picture: data_url(picture)}

"""Make one call: retries, budget, ledger entry, and the handling of its errors."""

import asyncio
import base64
import functools
import io
import random
import time
from dataclasses import dataclass, replace
from typing import Literal

import httpx
from PIL import Image

from rge.calls.dispatch.grouping import Call, Counts
from rge.calls.dispatch.health import Health
from rge.calls.failures import (
    AttemptFailed,
    BudgetReached,
    EndpointDown,
    Rejected,
    Rejection,
    RequestRejected,
    StopCalls,
    Unanswered,
)
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import EncodedPictures
from rge.calls.providers.transport import Send
from rge.calls.replies import NotAChat, ReplyError, read_replies, usage
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore, StoredReply

MAX_FAILURE_CHARACTERS = 20_000
"""Of a failed response's body, kept in the record of failures."""


@dataclass
class Sender:
    """Makes the calls of one model; an answer is stored before anything else is decided."""

    model: ModelConfig
    health: Health  # of the endpoint, shared by all models behind it
    store: AnswerStore
    mask: Mask
    counts: Counts
    budget: float | None  # of all models together

    async def call(
        self, send: Send, call: Call, pictures: EncodedPictures, *, canary: bool = False
    ) -> StoredReply | ReplyError | Rejected | None:
        """Make a call, with retries.

        Returns:
            The answer, or the error that settles the call; None: calls to the endpoint stopped before it was settled. `Rejected`
            is returned for canaries only, which are never settled.

        Raises:
            StoreError: an answer cannot be stored.
        """
        model, num_tries, limited_since = self.model, 0, None
        while True:
            await self.health.pace.wait_turn()
            result = await self._once(send, call, pictures, canary)
            if not isinstance(result, AttemptFailed):
                return result
            message = self.mask(str(result))
            if result.wait_s is not None and result.wait_s > model.max_limited_s:
                self.health.stop(
                    EndpointDown(
                        f"{model.name}: the endpoint asks to wait {result.wait_s:,.0f} s (Retry-After), longer than "
                        f"max_limited_s={model.max_limited_s:g}; {message}. Run the same command again after that time"
                    )
                )
                return None
            if result.limited:
                self.counts.limited += 1
                limited_since = limited_since or time.monotonic()
                if time.monotonic() - limited_since < model.max_limited_s:
                    continue
                message = self._still_limited(message, limited_since)
            elif num_tries < model.max_retries:
                self.counts.retries += 1
                wait_s = min(model.max_backoff_s, model.backoff_s * 2**num_tries) * random.random()
                await asyncio.sleep(max(wait_s, min(result.wait_s or 0.0, model.max_backoff_s)))
                num_tries += 1
                continue
            else:
                message += f" ({num_tries + 1} attempts)"
            error = self.unanswered(call, message, result.raw)
            self.health.call_unanswered(error)
            return error

    def _still_limited(self, message: str, limited_since: float) -> str:
        """The error of a call that got nothing but 429s; stops the endpoint if no other call was accepted either."""
        message += f", still rate-limited after {self.model.max_limited_s:g} s (max_limited_s)"
        if self.health.accepted_at < limited_since:
            self.health.stop(
                EndpointDown(
                    f"{self.model.name}: {message}. Answers so far are stored; run the same command later"
                )
            )
        return message

    async def _once(
        self, send: Send, call: Call, pictures: EncodedPictures, canary: bool
    ) -> StoredReply | ReplyError | Rejected | AttemptFailed | None:
        attempt = await self._begin(call)
        if attempt is None:
            return None
        sent_at = time.monotonic()
        result = await self._attempt(send, call.request, pictures, attempt)
        if isinstance(result, httpx.Response):
            request = None if canary else call.request
            stored = self.keep(call.key, request, attempt, result.content, time.monotonic() - sent_at)
            self.health.call_accepted(sent_at)
            self.health.pace.on_answer(result.headers)
            self.health.call_ended()
            return stored
        self.health.call_ended()
        if isinstance(result, StopCalls):
            self.health.stop(result)
            return None
        if isinstance(result, Rejected):
            if canary:
                return result
            if not result.certain and (verdict := await self._send_canary(send, call, result)) is not True:
                return verdict
            return self.rejected(call, result)
        if result.limited:
            model = self.model
            self.health.pace.on_limited(sent_at, result.wait_s, model.backoff_s, model.max_backoff_s)
        return result

    async def _attempt(
        self, send: Send, request: Request, pictures: EncodedPictures, attempt: int
    ) -> httpx.Response | AttemptFailed | Rejected | StopCalls:
        """Make one attempt; if it gives no answer, close its ledger entry."""
        failed: AttemptFailed | Rejected | StopCalls
        try:
            async with asyncio.timeout(self.model.timeout_s):
                response = await send(request, pictures)
            read_replies(response.content)
            return response
        except NotAChat as error:
            message = f"the endpoint's response is not a chat completion: {error}"
            failed = AttemptFailed(message, billed=True, raw=response.content)
        except ReplyError:
            return response  # an empty answer counts as one: it may have been billed
        except TimeoutError:
            failed = AttemptFailed(f"no answer within {self.model.timeout_s:g} s", billed=True)
        except (AttemptFailed, Rejected, StopCalls) as error:
            failed = error
        except asyncio.CancelledError:
            self.store.end_attempt(attempt, billed=True)
            raise
        self.store.end_attempt(attempt, billed=isinstance(failed, AttemptFailed) and failed.billed)
        return failed

    async def _send_canary(self, send: Send, call: Call, why: Rejected) -> ReplyError | Literal[True] | None:
        """Send harmless contents with the same settings. True: only this request is rejected; None: all are, and calls stop."""
        health, rejected_at = self.health, time.monotonic()
        async with health.canary:
            if health.accepted_at > rejected_at:  # a call sent after the rejection was accepted
                return True
            request, pictures = _canary(call.request)
            result = await self.call(send, Call(f"canary {call.key}", request, []), pictures, canary=True)
        if isinstance(result, Rejected):
            health.stop(
                RequestRejected(
                    f"{self.model.name}: the endpoint rejects the request; {self.mask(str(why))}. It also rejects a harmless one "
                    "with the same settings: change the model's settings (token_limit, send_temperature, send_seed, "
                    "extra_body, max_side_px ...) and run the same command again; answers so far are stored"
                )
            )
            return None
        return True if isinstance(result, StoredReply) else result

    async def _begin(self, call: Call) -> int | None:
        """Enter an attempt in the ledger as soon as the budget allows it; None: calls to the endpoint have stopped."""
        model, health = self.model, self.health
        with_pictures = bool(call.request.num_pictures())
        while health.stopped is None:
            stats = self.store.billing_stats(model.endpoint, with_pictures)
            budgeted = model.budget is not None or self.budget is not None
            # The cost of the first call is only an estimate: under a budget, the others wait for its bill.
            wait_for_bill = (
                budgeted and not stats.calls and health.in_flight and not health.unanswered_in_a_row
            )
            if not wait_for_bill:
                max_cost = model.max_cost(call.request, stats)
                tokens = model.estimate(call.request, stats)
                attempt = self.store.begin_attempt(
                    model.endpoint, call.key, tokens, max_cost, model.budget, total=self.budget
                )
                if attempt is not None:
                    health.in_flight += 1
                    return attempt
                if not health.in_flight:
                    health.stop(self.budget_reached(max_cost))
                    return None
            await health.wait_for_completion()
        return None

    def keep(
        self,
        key: str,
        request: Request | None,
        attempt: int,
        body: bytes,
        took_s: float,
        *,
        batch: bool = False,
    ) -> StoredReply:
        """Store an answer and its cost, and update the billing statistics from its token usage."""
        tokens = usage(body)
        num_input, num_output, cached = tokens.billed(self.store.expected_tokens(attempt))
        cost = self.model.cost(num_input, num_output, cached, batch=batch)
        stored = StoredReply(body, num_input, num_output, cost, took_s)
        estimate = None
        if request is not None and not tokens.refused:
            estimate = (*self.model.estimate(request), bool(request.num_pictures()))
        self.store.put(attempt, key, self.model.name, stored, cached, estimate=estimate)
        self.counts.asked += 1
        self.counts.batched += batch
        self.counts.refused += tokens.refused
        return stored

    def rejected(self, call: Call, error: Rejected) -> Rejection:
        """Record that the endpoint rejects a call, so that it is not sent again with the same settings."""
        rejection = Rejection(self.mask(f"{self.model.name}: {error}"))
        self.store.record_rejection(call.key, self.model.sent_by(), str(rejection), self._excerpt(error.raw))
        self.counts.rejected += 1
        return rejection

    def unanswered(self, call: Call, why: str, raw: bytes | None) -> Unanswered:
        """Record a call without an answer; the next run repeats it."""
        error = Unanswered(f"{self.model.name}: {why}")
        self.store.record_failure(call.key, self.model.name, error.kind, str(error), self._excerpt(raw))
        self.counts.unanswered += 1
        return error

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

    def _excerpt(self, raw: bytes | None) -> str | None:
        return self.mask(raw.decode("utf-8", "replace"))[:MAX_FAILURE_CHARACTERS] if raw else None


@functools.cache
def _grey_picture() -> tuple[Picture, tuple[str, str]]:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(out, "PNG")
    return Picture(out.getvalue(), "canary"), ("image/png", base64.b64encode(out.getvalue()).decode())


def _canary(request: Request) -> tuple[Request, EncodedPictures]:
    picture, encoded = _grey_picture()
    parts: tuple[Part, ...] = ("Answer with the word ok.", *[picture] * request.num_pictures())
    return replace(request, parts=parts, system=None), {picture: encoded}

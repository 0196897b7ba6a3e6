"""One call: attempts, budget, ledger entry, and what its error means."""

import asyncio
import functools
import io
import random
import time
from dataclasses import dataclass, replace
from typing import Literal

from PIL import Image

from rge.calls.asking.grouping import Call, Counts
from rge.calls.asking.health import Health
from rge.calls.failures import (
    BudgetReached,
    EndpointDown,
    Lost,
    Rejected,
    Rejection,
    RequestRejected,
    StopCalls,
    Unanswered,
)
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.pictures import encoded
from rge.calls.providers.bodies import Shown
from rge.calls.providers.transport import Answer, Send
from rge.calls.replies import NotAChat, ReplyError, read_replies, usage
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore, Kept

KEPT_OF_FAILURE = 20_000
"""Characters of a body that is no answer, for the record of failures."""


@dataclass
class Sending:
    """Sends the calls of one model; what the server answers is kept before anything else is decided."""

    model: ModelConfig
    health: Health  # of the endpoint, shared by all models behind it
    store: AnswerStore
    mask: Mask
    counts: Counts
    rng: random.Random  # of the waits
    budget: float | None  # of all models together

    async def ask(
        self, send: Send, call: Call, shown: Shown, *, canary: bool = False
    ) -> Kept | ReplyError | Rejected | None:
        """Make a call.

        Returns:
            The answer, or why there is none; None: the endpoint was given up before the call was settled. `Rejected` only of a
            canary, which is not settled.

        Raises:
            StoreError: an answer cannot be kept.
        """
        model, health = self.model, self.health
        tries, limited_since = 0, None
        while True:
            await health.pace.turn()
            found = await self._once(send, call, shown, canary)
            if not isinstance(found, Lost):
                return found
            now, said = time.monotonic(), self.mask(str(found))
            if found.wait_s is not None and found.wait_s > model.max_limited_s:
                health.stop(
                    EndpointDown(
                        f"{model.name}: the endpoint asks to wait {found.wait_s:,.0f} s (Retry-After), longer than "
                        f"max_limited_s={model.max_limited_s:g}; {said}. Run the same command again then"
                    )
                )
                return None
            if found.limited:
                self.counts.limited += 1
                limited_since = limited_since or now
                if now - limited_since < model.max_limited_s:
                    continue
                said += f", still refused after {model.max_limited_s:g} s (max_limited_s)"
                if health.accepted_at < limited_since:  # not only this one
                    health.stop(
                        EndpointDown(f"{model.name}: {said}. What was answered is kept; run it again later")
                    )
            elif tries < model.max_retries:
                self.counts.retries += 1
                wait_s = min(model.max_backoff_s, model.backoff_s * 2**tries) * self.rng.random()
                tries += 1
                await asyncio.sleep(max(wait_s, min(found.wait_s or 0.0, model.max_backoff_s)))
                continue
            else:
                said += f" ({tries + 1} attempts)"
            return self.unanswered(call, said, found.raw)

    async def _once(
        self, send: Send, call: Call, shown: Shown, canary: bool
    ) -> Kept | ReplyError | Rejected | Lost | None:
        number = await self._admitted(call)
        if number is None:
            return None
        sent_at = time.monotonic()
        found = await self._attempt(send, call.request, shown, number)
        if isinstance(found, Answer):
            request = None if canary else call.request
            kept = self.keep(call.key, request, number, found.body, time.monotonic() - sent_at)
            self.health.accepted(sent_at)
            self.health.pace.answered(found.headers)
            self.health.ended()
            return kept
        self.health.ended()
        if isinstance(found, StopCalls):
            self.health.stop(found)
            return None
        if isinstance(found, Rejected):
            if canary:
                return found
            if not found.certain and (unsure := await self._unsure(send, call, found)) is not True:
                return unsure
            return self.rejected(call, found)
        if found.limited:
            model = self.model
            self.health.pace.limited(sent_at, found.wait_s, model.backoff_s, model.max_backoff_s)
        return found

    async def _attempt(
        self, send: Send, request: Request, shown: Shown, number: int
    ) -> Answer | Lost | Rejected | StopCalls:
        """One attempt, entered in the ledger; all that is not an answer is settled there."""
        found: Lost | Rejected | StopCalls
        try:
            async with asyncio.timeout(self.model.timeout_s):
                answer = await send(request, shown)
            read_replies(answer.body)
            return answer
        except NotAChat as error:
            said = f"the endpoint's answer is no chat reply: {error}"
            found = Lost(said, billed=True, raw=answer.body)
        except ReplyError:
            return answer  # an empty answer is an answer, and may have been billed
        except TimeoutError:
            found = Lost(f"no answer within {self.model.timeout_s:g} s", billed=True)
        except (Lost, Rejected, StopCalls) as error:
            found = error
        except asyncio.CancelledError:
            self.store.settle(number, billed=True)
            raise
        self.store.settle(number, billed=isinstance(found, Lost) and found.billed)
        return found

    async def _unsure(self, send: Send, call: Call, why: Rejected) -> ReplyError | Literal[True] | None:
        """Whether a rejection is about this one request: a canary, with the same settings and harmless contents, tells.

        Returns:
            True: it is. None: all requests are rejected, and the endpoint is given up. An error: the canary has no answer.
        """
        health, rejected_at = self.health, time.monotonic()
        async with health.canary:
            if health.accepted_at > rejected_at:  # another call, sent since then, was accepted
                return True
            request, shown = _canary(call.request)
            found = await self.ask(send, Call(f"canary {call.key}", request, []), shown, canary=True)
        if isinstance(found, Rejected):
            health.stop(
                RequestRejected(
                    f"{self.model.name}: the endpoint rejects the request; {self.mask(str(why))}. A harmless one with the same "
                    "settings is rejected too: change the model's settings (token_limit, send_temperature, send_seed, "
                    "extra_body, max_side_px ...) and run the same command again; what was answered is kept"
                )
            )
            return None
        return True if isinstance(found, Kept) else found

    async def _admitted(self, call: Call) -> int | None:
        """Enter an attempt in the ledger, when the budget allows it; None where nothing more is sent."""
        model, health = self.model, self.health
        with_pictures = bool(call.request.num_pictures())
        while health.stopped is None:
            learnt = self.store.learnt(model.endpoint, with_pictures)
            budgeted = model.budget is not None or self.budget is not None
            # The price of the first call is a guess: the others wait for its bill.
            pilot = budgeted and not learnt.calls and health.under_way and not health.unanswered_in_a_row
            if not pilot:
                worst = model.greatest_cost(call.request, learnt)
                tokens = model.estimate(call.request, learnt)
                number = self.store.begin(
                    model.endpoint, call.key, tokens, worst, model.budget, total=self.budget
                )
                if number is not None:
                    health.began()
                    return number
                if not health.under_way:
                    health.stop(budget_reached(model, self.store, self.budget, worst))
                    return None
            await health.wait_for_completion()
        return None

    def keep(
        self,
        key: str,
        request: Request | None,
        number: int,
        body: bytes,
        took_s: float,
        *,
        batch: bool = False,
    ) -> Kept:
        """Keep an answer, enter its price, and learn from the bill what calls like it cost."""
        said = usage(body)
        given, written, cached = said.billed(self.store.expected(number))
        kept = Kept(body, given, written, self.model.cost(given, written, cached, batch=batch), took_s)
        guess = None
        if request is not None and not said.refused:
            guess = (*self.model.estimate(request), bool(request.num_pictures()))
        self.store.put(number, key, self.model.name, kept, cached, guess=guess)
        self.counts.asked += 1
        self.counts.batched += batch
        self.counts.refused += said.refused
        return kept

    def rejected(self, call: Call, error: Rejected) -> Rejection:
        """Settle a call that the endpoint cannot take; it is kept, and not sent again with the same settings."""
        found = self.unsendable(f"{self.model.name}: {error}")
        self.store.reject(call.key, self.model.sent_by(), str(found), self._shown(error.raw))
        return found

    def unsendable(self, why: str) -> Rejection:
        """Count a call that cannot be taken, or that cannot even be sent (a picture that is gone), which is not kept."""
        found = Rejection(self.mask(why))
        self.counts.rejected += 1
        return found

    def unanswered(self, call: Call, why: str, raw: bytes | None = None) -> Unanswered:
        """Note a call without an answer; the next run asks it again."""
        found = Unanswered(f"{self.model.name}: {why}")
        self.store.fail(call.key, self.model.name, found.kind, str(found), self._shown(raw))
        self.counts.unanswered += 1
        self.health.unanswered(found)
        return found

    def _shown(self, raw: bytes | None) -> str | None:
        return self.mask(raw.decode("utf-8", "replace"))[:KEPT_OF_FAILURE] if raw else None


def budget_reached(
    model: ModelConfig, store: AnswerStore, total: float | None, worst: float
) -> BudgetReached:
    """The error that names the budget, what is spent of it, and the way on."""
    spent, all_spent = store.spent(model.endpoint), store.spent(None)
    if model.budget is not None and (total is None or spent + worst > model.budget):
        said, raise_ = f"{spent:.4f} of the budget {model.budget:g} is spent", "the model's budget"
    else:
        said, raise_ = f"{all_spent:.4f} of the command's budget {total:g} is spent", "budget"
    return BudgetReached(
        f"{model.name}: {said}, and the next call might cost {worst:.4f}; nothing more is asked. Raise {raise_} and run the "
        "same command again"
    )


@functools.cache
def _grey() -> tuple[Picture, tuple[str, str]]:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(out, "PNG")
    return Picture(out.getvalue(), "canary"), ("image/png", encoded(out.getvalue()))


def _canary(request: Request) -> tuple[Request, Shown]:
    picture, shown = _grey()
    parts: tuple[Part, ...] = ("Answer with the word ok.", *[picture] * request.num_pictures())
    return replace(request, parts=parts, system=None), {picture: shown}

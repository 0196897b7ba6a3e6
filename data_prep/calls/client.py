"""Ask models through their official clients: limited, retried, within a budget, and never twice for the same.

The clients' own retries are switched off: here a retry is counted, waits with jitter, honours ``Retry-After`` and stops
at what no retry can mend. An answer is kept before it is looked at, so that a malformed one is paid for once.
"""

import asyncio
import functools
import inspect
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from tqdm import tqdm

from data_prep.calls.cache import Kept, ReplyCache
from data_prep.calls.replies import NotAChat, Reply, ReplyError, read_reply, usage
from data_prep.calls.request import Picture, Request, encoded
from rge.common.errors import UserError
from rge.common.images import ImageError

APIS = ("openai", "anthropic")
MAX_FAILURES_IN_A_ROW = 20
"""Calls lost one after the other, each after all its retries, before an endpoint is held to be down."""
CHARACTERS_A_TOKEN = 3
"""Of a prompt, for estimates; low, so that estimates are rather too high."""
TRANSIENT = (408, 409, 425, 429)
POOL = 16
"""Connections that one client of the provider's library keeps."""
Send = Callable[[Request], Awaitable[str]]
"""Sends a request and returns the body of the answer."""


class StopCalls(UserError):
    """No further call can succeed: a wrong key, an endpoint that is down, a budget that is spent."""


class KeyRejected(StopCalls):
    """The endpoint does not accept the key."""


class BudgetReached(StopCalls):
    """The next call might cost more than what is left."""


class EndpointDown(StopCalls):
    """The endpoint does not answer, or answers with errors only."""


@dataclass
class ModelConfig:
    """A model behind an endpoint."""

    name: str
    """Name the endpoint knows it by."""
    base_url: str | None = None
    """Such as http://HOST:8000/v1 of vLLM; null: the provider's own."""
    api: str = "openai"
    """openai (any compatible endpoint) or anthropic (needs the extra ``claude``)."""
    key_env: str | None = None
    """Environment variable that holds the key; null: the endpoint needs none."""
    concurrency: int = 32
    """Calls under way at once."""
    timeout_s: float = 120.0
    """For one attempt, whole."""
    max_retries: int = 6
    """Attempts after the first, on 429, 5xx, time-outs and lost connections."""
    backoff_s: float = 1.0
    """Upper bound of the first wait; doubles with every attempt, the wait is drawn below it."""
    max_backoff_s: float = 60.0
    input_price: float = 0.0
    """Per million tokens."""
    output_price: float = 0.0
    budget: float | None = None
    """What the model may cost in all, over all runs on one cache; null: no limit."""
    picture_tokens: int = 1500
    """Of one picture, for estimates."""
    send_seed: bool = True
    """Send the number of the draw as ``seed``, where the endpoint knows the field."""
    max_side_px: int = 1024
    """Longer sides of pictures are scaled down to this."""
    family: str | None = None
    """Models that share blind spots, for the agreement statistics of judges; null: the model is its own family."""

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Price of a call."""
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1e6

    def estimate(self, request: Request) -> tuple[int, int]:
        """Input tokens, and output tokens at most."""
        prompt = request.num_characters() // CHARACTERS_A_TOKEN + request.num_pictures() * self.picture_tokens
        return prompt, request.max_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        key: of the request.
        cached: nothing was asked; the answer was kept from before.
        reply: the answer; None with ``error``.
        error: why there is none.
        failed: the call itself failed, and nothing is kept. False for a malformed answer, which is.
        lost: it failed by no fault of the request (time-outs, 5xx): worth asking again.
    """

    key: str
    cached: bool
    reply: Reply | None = None
    error: ReplyError | None = None
    failed: bool = False
    lost: bool = False


@dataclass
class Counts:
    """What a run did."""

    asked: int = 0
    cached: int = 0
    retries: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class CallFailed(ReplyError):
    """The call gave no answer: refused by the endpoint as it stands, or all attempts lost."""

    kind = "failed call"

    def __init__(self, message: str, *, lost: bool = False, raw: str | None = None):
        super().__init__(message)
        self.lost, self.raw = lost, raw


class _Transient(Exception):
    def __init__(self, reason: str, wait_s: float | None = None, raw: str | None = None):
        super().__init__(reason)
        self.wait_s, self.raw = wait_s, raw


class Caller:
    """Asks models and keeps their answers.

    Args:
        models: by the name used in requests.
        cache: where answers are kept.
        progress: title of the progress bar; None shows none.
        rng: of the waits.

    Raises:
        UserError: a model's settings cannot be right, or the variable of its key is not set.
    """

    def __init__(
        self, models: dict[str, ModelConfig], cache: ReplyCache, *, progress: str | None = None, rng=None
    ):
        self.models, self.cache, self.counts, self.progress = models, cache, Counts(), progress
        self._rng = rng or random.Random()
        self._secrets: list[str] = []
        for name, model in models.items():
            check_model(name, model)
            if model.key_env:
                self._secrets.append(_key(model))

    def run(
        self, requests: Sequence[Request], on_outcome: Callable[[int, Outcome], object] | None = None
    ) -> list[Outcome]:
        """Answer requests, from the cache where possible.

        Args:
            requests: what to ask; equal ones are asked once.
            on_outcome: called with the position of a request as soon as it is answered.

        Returns:
            One outcome a request, in their order.

        Raises:
            KeyRejected: at the first 401 or 403.
            BudgetReached: nothing more can be asked within the budget; everything answered is kept.
            EndpointDown: it answers nothing.
            CacheError: an answer cannot be kept.
        """
        outcomes: list[Outcome | None] = [None] * len(requests)
        waiting: dict[str, list[int]] = {}
        with tqdm(
            total=len(requests),
            desc=self.progress,
            disable=True if self.progress is None else None,
            smoothing=0.05,
        ) as bar:

            def done(positions: Iterable[int], outcome: Outcome) -> None:
                for position in positions:
                    outcomes[position] = outcome
                    bar.update()
                    if on_outcome is not None:
                        on_outcome(position, outcome)

            for position, request in enumerate(requests):
                key = request.key()
                if key in waiting:
                    waiting[key].append(position)
                elif kept := self.cache.get(key):
                    self.counts.cached += 1
                    done([position], _outcome(key, kept.raw, cached=True))
                else:
                    waiting[key] = [position]
            if waiting:
                asyncio.run(
                    self._ask_all(
                        [(key, requests[first[0]]) for key, first in waiting.items()], waiting, done
                    )
                )
        return outcomes  # type: ignore[return-value]

    async def _ask_all(self, todo: list[tuple[str, Request]], waiting: dict[str, list[int]], done) -> None:
        by_model: dict[str, list[tuple[str, Request]]] = {}
        for key, request in todo:
            by_model.setdefault(request.model, []).append((key, request))
        spent: list[BudgetReached] = []

        async def ask(name: str, calls: list[tuple[str, Request]]) -> None:
            try:
                await self._ask_model(self.models[name], calls, waiting, done)
            except* BudgetReached as errors:
                # The other models' calls are under way and paid for: they finish first.
                spent.append(_first(errors))  # type: ignore[arg-type]

        try:
            async with asyncio.TaskGroup() as group:
                for name, calls in by_model.items():
                    group.create_task(ask(name, calls))
        except* UserError as errors:
            raise _first(errors) from None
        if spent:
            raise spent[0]

    async def _ask_model(self, model: ModelConfig, calls: list[tuple[str, Request]], waiting, done) -> None:
        desk = _Desk(model, self.cache)
        queue = iter(calls)
        num_workers = min(model.concurrency, len(calls))
        async with _senders(model, num_workers) as senders:

            async def worker(send: Send) -> None:
                for key, request in queue:
                    done(waiting[key], await self._ask(desk, send, key, request))

            async with asyncio.TaskGroup() as group:
                for number in range(num_workers):
                    group.create_task(worker(senders[number % len(senders)]))

    async def _ask(self, desk: "_Desk", send, key: str, request: Request) -> Outcome:
        model = desk.model
        expected = model.estimate(request)
        worst = model.cost(*expected)
        await desk.admit(worst)
        try:
            began = time.perf_counter()
            raw = self._masked(await self._attempts(desk, send, request))
            seconds = time.perf_counter() - began
            tokens = [
                said if said is not None else guess for said, guess in zip(usage(raw), expected, strict=True)
            ]
            self.cache.put(key, request.model, Kept(raw, *tokens, model.cost(*tokens), seconds))
            self.counts.asked += 1
            desk.lost = 0
            return _outcome(key, raw, cached=False)
        except (CallFailed, ImageError) as error:
            message, body = self._masked(str(error)), getattr(error, "raw", None)
            failure = error if isinstance(error, CallFailed) else CallFailed(message)
            self.cache.fail(key, request.model, failure.kind, message, self._masked(body) if body else None)
            self.counts.failed += 1
            self.counts.reasons[message[:120]] += 1
            if isinstance(error, CallFailed):
                desk.lose(message)
            lost = isinstance(error, CallFailed) and error.lost
            return Outcome(key, cached=False, error=CallFailed(message), failed=True, lost=lost)
        finally:
            await desk.leave(worst)

    async def _attempts(self, desk: "_Desk", send, request: Request) -> str:
        model = desk.model
        for attempt in range(model.max_retries + 1):
            try:
                async with asyncio.timeout(model.timeout_s):
                    raw = await send(request)
                _check_chat(raw)
                return raw
            except TimeoutError:
                lost = _Transient(f"no answer within {model.timeout_s:g} s")
            except _Transient as error:
                lost = error
            if attempt == model.max_retries:
                raise CallFailed(f"{model.name}: {lost} ({attempt + 1} attempts)", lost=True, raw=lost.raw)
            self.counts.retries += 1
            wait_s = min(model.max_backoff_s, model.backoff_s * 2**attempt) * self._rng.random()
            await asyncio.sleep(max(wait_s, min(lost.wait_s or 0.0, model.max_backoff_s)))
        raise AssertionError("unreachable")

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text


class _Desk:
    """Admission to one model: what is reserved against its budget, and how many calls in a row were lost."""

    def __init__(self, model: ModelConfig, cache: ReplyCache):
        self.model, self.cache = model, cache
        self.reserved, self.under_way, self.lost = 0.0, 0, 0
        self._left = asyncio.Condition()

    async def admit(self, worst: float) -> None:
        if self.model.budget is not None:
            async with self._left:
                while self.cache.spent(self.model.name) + self.reserved + worst > self.model.budget:
                    if not self.under_way:
                        raise BudgetReached(
                            f"{self.model.name}: {self.cache.spent(self.model.name):.4f} of the budget "
                            f"{self.model.budget:g} is spent, and the next call might cost {worst:.4f}; nothing more is "
                            "asked. Raise the model's budget and run the same command again"
                        )
                    await self._left.wait()
                self.reserved += worst
                self.under_way += 1
        else:
            self.under_way += 1

    async def leave(self, worst: float) -> None:
        # Both at once, before anything waits: who sees that nothing is under way must not see its reserve any more, or
        # would stop while there is money left.
        self.under_way -= 1
        if self.model.budget is not None:
            self.reserved -= worst
            async with self._left:
                self._left.notify_all()

    def lose(self, message: str) -> None:
        self.lost += 1
        if self.lost >= MAX_FAILURES_IN_A_ROW:
            raise EndpointDown(f"{self.lost} calls in a row failed, the last with: {message}")


def check_model(name: str, model: ModelConfig) -> None:
    """Check what types cannot say.

    Raises:
        UserError: names the setting and the mend.
    """
    where = f"models.{name}"
    if model.api not in APIS:
        raise UserError(f"{where}.api must be one of {', '.join(APIS)}; got {model.api!r}")
    for setting in ("concurrency", "timeout_s", "max_side_px", "picture_tokens"):
        if not getattr(model, setting) > 0:
            raise UserError(f"{where}.{setting} must be > 0, got {getattr(model, setting)}")
    if model.budget is not None and not (model.input_price > 0 or model.output_price > 0):
        raise UserError(
            f"{where}.budget needs input_price and output_price: without prices nothing is ever spent"
        )
    if model.base_url is not None:
        url = httpx.URL(model.base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(f"{where}.base_url must be http(s)://HOST..., got {model.base_url!r}")
        if url.userinfo or url.query:
            raise UserError(f"{where}.base_url must hold no user, password or query; keys come by key_env")


def _key(model: ModelConfig) -> str:
    key = os.environ.get(model.key_env or "", "").strip()
    if not key:
        raise UserError(f"{model.name}: the environment variable {model.key_env} (key_env) is not set")
    return key


def _outcome(key: str, raw: str, *, cached: bool) -> Outcome:
    try:
        return Outcome(key, cached, reply=read_reply(raw))
    except ReplyError as error:
        return Outcome(key, cached, error=error)


def _check_chat(raw: str) -> None:
    try:
        read_reply(raw)
    except NotAChat as error:
        raise _Transient(f"the endpoint's answer is no chat reply: {error}", raw=raw[:20_000]) from None
    except ReplyError:
        pass  # an empty answer is an answer, and may have been billed


def _first(errors: BaseExceptionGroup) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


# --------------------------------------------------------------------------------------------------- official clients


class _senders:  # noqa: N801 - reads like a function at its one use
    """What sends a request, for the workers to share out among them: one for each `POOL` of them.

    A pool looks through all its connections for every call: one of 256 costs more time than the calls themselves.
    """

    def __init__(self, model: ModelConfig, num_workers: int):
        self.model, self.num = model, -(-num_workers // POOL)
        self.clients: list[Any] = []

    async def __aenter__(self) -> list[Send]:
        key = _key(self.model) if self.model.key_env else "none"
        # An attempt is limited as a whole, by `Caller._attempts`; limits of its parts would end it under another name.
        common: dict[str, Any] = {"api_key": key, "max_retries": 0, "timeout": None}
        if self.model.base_url is not None:
            common["base_url"] = self.model.base_url
        self.library, client, send = openai, openai.AsyncOpenAI, self._openai
        if self.model.api == "anthropic":
            try:
                import anthropic
            except ImportError:
                raise UserError(
                    f"{self.model.name}: api=anthropic needs its client: pip install -e '.[claude]'"
                ) from None
            self.library, client, send = anthropic, anthropic.AsyncAnthropic, self._anthropic
        limits = httpx.Limits(max_connections=POOL, max_keepalive_connections=POOL)
        certificates = httpx.create_ssl_context()
        for _ in range(self.num):
            connections = self.library.DefaultAsyncHttpxClient(
                limits=limits, timeout=None, verify=certificates
            )
            self.clients.append(client(**common, http_client=connections))
        return [functools.partial(send, client) for client in self.clients]

    async def __aexit__(self, *_):
        for client in self.clients:
            await client.close()

    async def _openai(self, client, request: Request) -> str:
        messages: list[dict[str, Any]] = (
            [{"role": "system", "content": request.system}] if request.system else []
        )
        content = []
        for part in request.parts:
            if isinstance(part, Picture):
                media_type, data = encoded(part)
                content.append(
                    {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
                )
            else:
                content.append({"type": "text", "text": part})
        settings: dict[str, Any] = {"temperature": request.temperature, "max_tokens": request.max_tokens}
        if self.model.send_seed:
            settings["seed"] = request.sample
        return await self._sent(
            client.chat.completions.with_raw_response.create,
            model=self.model.name,
            messages=[],
            # Past the client's conversion to its own types, which takes a fifth of a call's time to change nothing here.
            extra_body={"messages": [*messages, {"role": "user", "content": content}]},
            **settings,
        )

    async def _anthropic(self, client, request: Request) -> str:
        content = []
        for part in request.parts:
            if isinstance(part, Picture):
                media_type, data = encoded(part)
                source = {"type": "base64", "media_type": media_type, "data": data}
                content.append({"type": "image", "source": source})
            else:
                content.append({"type": "text", "text": part})
        settings: dict[str, Any] = {"system": request.system} if request.system else {}
        return await self._sent(
            client.messages.with_raw_response.create,
            model=self.model.name,
            messages=[{"role": "user", "content": content}],
            max_tokens=request.max_tokens,
            # The client no longer names it, for some models refuse it; those that the paper used take it.
            extra_body={"temperature": request.temperature},
            **settings,
        )

    async def _sent(self, create, **arguments) -> str:
        library = self.library
        try:
            text = (await create(**arguments)).text
            if callable(text):  # a method in Anthropic's client, and one to wait for
                text = text()
            return await text if inspect.isawaitable(text) else text
        except library.APIConnectionError as error:
            cause = f": {error.__cause__}" if error.__cause__ else ""
            raise _Transient(f"no connection{cause}") from None
        except library.APIStatusError as error:
            raise self._status(error) from None

    def _status(self, error) -> Exception:
        status, body = error.status_code, " ".join(error.response.text.split())
        key = os.environ.get(self.model.key_env or "", "").strip()
        body = (body.replace(key, "[key]") if key else body)[:300]
        said = f"HTTP {status}: {body}"
        if status in (401, 403):
            where = self.model.key_env or "none: key_env is not set"
            return KeyRejected(f"{self.model.name}: the endpoint rejects the key (from {where}); {said}")
        if status == 404:
            return EndpointDown(f"{self.model.name}: no such model or address; {said}")
        if "insufficient_quota" in body:
            return BudgetReached(f"{self.model.name}: the provider's quota is used up; {said}")
        if status in TRANSIENT or status >= 500:
            try:
                wait_s = float(error.response.headers.get("retry-after", ""))
            except ValueError:
                wait_s = None
            return _Transient(said, wait_s, raw=body)
        return CallFailed(f"{self.model.name}: {said}")

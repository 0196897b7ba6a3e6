"""Configuration of one model behind one endpoint; refuses a budget without prices."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from rge.calls.keys import read_key
from rge.calls.request import Request
from rge.common.errors import UserError
from rge.common.options import AtLeastOne, Count, NotNegative, Positive, Share

CHARACTERS_PER_TOKEN = 3
"""For token estimates of prompts; low on purpose, so that estimates err on the high side."""
OPENAI = "https://api.openai.com/v1"
WITHOUT_BATCHES = ("https://api.anthropic.com/v1", "https://generativelanguage.googleapis.com/v1beta/openai")
"""Addresses of compatible APIs without OpenAI's batch API: Anthropic, Gemini."""


@dataclass(frozen=True, slots=True)
class BillingStats:
    """Ratios of billed to estimated tokens at one endpoint, for calls with or without pictures."""

    calls: int = 0  # number billed
    mean_input: float = 1.0
    max_input: float = 1.0  # at least 1
    max_output: float = 1.0  # at least 1; the estimate is ``max_tokens``


@dataclass
class ModelConfig:
    """A model behind an endpoint."""

    name: str
    """The model's name at the endpoint."""
    base_url: str | None = None
    """Address of an OpenAI-compatible endpoint: https://api.anthropic.com/v1,
    https://generativelanguage.googleapis.com/v1beta/openai, or http://HOST:8000/v1 of `vllm serve`; null: OpenAI's own."""
    cache_as: str | None = None
    """Name under which answers are cached, whatever the address; null: ``name``. Needed if two addresses serve one
    name."""
    mode: Literal["calls", "batch"] = "calls"
    """calls; or batch: OpenAI's batch API, cheaper and within a day. What fails in a batch is repeated as calls."""
    key_env: str | None = None
    """Environment variable with the key; null: the endpoint needs none."""
    concurrency: AtLeastOne = 32
    """Maximum number of concurrent calls; fewer if the endpoint demands it (429)."""
    timeout_s: Positive = 120.0
    """Time limit of one attempt, from start to end."""
    max_retries: Count = 6
    """Attempts after the first, on 5xx, time-outs and lost connections."""
    backoff_s: NotNegative = 1.0
    """Upper bound of the first wait, which doubles with every attempt."""
    max_backoff_s: NotNegative = 60.0
    """Longest wait before the next attempt."""
    max_limited_s: Positive = 600.0
    """How long a call waits at an endpoint that returns nothing but 429 before the run stops."""
    reasks: Count = 2
    """How often an unreadable answer is requested again, with the format stated."""
    input_price: NotNegative | None = None
    """Price per million input tokens; null (with output_price null too): from the price table, or 0."""
    cached_price: NotNegative | None = None
    """Price per million cached input tokens; null: ``input_price``."""
    output_price: NotNegative | None = None
    """Price per million output tokens."""
    budget: NotNegative | None = None
    """Cap on the endpoint's total cost, over all runs that share a cache of answers; null: none."""
    picture_tokens: AtLeastOne = 1500
    """Tokens per picture, for estimates."""
    send_seed: bool = True
    """Send the sample's number as ``seed``; requires that the endpoint supports the field."""
    send_temperature: bool = True
    """Whether to send the temperature; false for models that refuse any but their own."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field that caps the answer's length: max_tokens, or max_completion_tokens for OpenAI's newer models."""
    reasoning_effort: str | None = None
    """For models that reason first, such as low; null: not sent."""
    structured: bool = False
    """Have the endpoint constrain answers to a JSON schema and verdicts to the allowed words."""
    draws_a_call: AtLeastOne = 1
    """Samples of one prompt per call (``n``), so that the prompt is paid for once."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields for every request, sent unchanged."""
    max_side_px: AtLeastOne = 1024
    """Maximum side of a picture, px; larger ones are scaled down."""
    batch_price: Share | None = None
    """Price of an answer in a batch, as a share of the prices above; null: from the price table, or 0.5."""
    batch_poll_s: Positive = 30.0
    """Seconds between polls of submitted batches."""
    batch_wait_s: Positive = 180_000.0
    """How long a run waits until one of its batches ends (50 hours; providers end them after 24 or 48)."""
    family: str | None = None
    """Family of models with shared blind spots, for the agreement statistics of judges; null: the model is its own
    family."""

    @property
    def endpoint(self) -> str:
        """Name and address: the key of budgets, rate limits and the ledger."""
        return f"{self.name} at {self.address}"

    @property
    def address(self) -> str:
        """The address in one spelling: without a slash at its end, a default port or capitals in its host."""
        try:
            return str(httpx.URL(self.base_url or OPENAI)).rstrip("/")
        except httpx.InvalidURL:
            return str(self.base_url)

    @property
    def published_name(self) -> str:
        """The name without folders if it is a path, by which vLLM serves local weights."""
        return os.path.basename(self.name.rstrip("/")) if os.path.isabs(self.name) else self.name

    def key(self) -> str | None:
        """The key of ``key_env``; raises as `read_key` does."""
        return read_key(self.name, self.key_env) if self.key_env else None

    def has_price(self) -> bool:
        """Whether it is known what a call costs, be it nothing."""
        return self.input_price is not None or self.output_price is not None

    def paid(self) -> bool:
        """Whether a call costs anything."""
        return bool(self.input_price or self.output_price)

    def cost(
        self, input_tokens: int, output_tokens: int, cached_tokens: int = 0, *, batch: bool = False
    ) -> float:
        """Cost of a plain call, or of one in a batch; ``input_tokens`` include ``cached_tokens``."""
        input_price = self.input_price or 0.0
        cached_price = input_price if self.cached_price is None else self.cached_price
        price = (input_tokens - cached_tokens) * input_price + cached_tokens * cached_price
        price += output_tokens * (self.output_price or 0.0)
        if batch:
            price *= 0.5 if self.batch_price is None else self.batch_price
        return price / 1e6

    def estimate(self, request: Request, stats: BillingStats | None = None) -> tuple[int, int]:
        """Estimate input tokens and maximum output tokens."""
        texts = [request.system or "", *(part for part in request.parts if isinstance(part, str))]
        prompt = sum(map(len, texts)) // CHARACTERS_PER_TOKEN
        prompt += request.num_pictures() * self.picture_tokens
        stats = stats or BillingStats()
        return int(prompt * stats.max_input), int(request.max_tokens * request.n * stats.max_output)

    def sent_by(self) -> str:
        """Endpoint and wire settings outside the cache key: with others, a rejected request may be accepted."""
        return f"{self.endpoint} {self.token_limit} {self.send_seed}"

    def cache_settings(self) -> dict[str, Any]:
        """The non-default settings that affect answers; part of the cache key."""
        default = ModelConfig(self.name)
        keys = ("extra_body", "reasoning_effort", "send_temperature", "structured")
        return {key: value for key in keys if (value := getattr(self, key)) != getattr(default, key)}


def check_model(where: str, model: ModelConfig) -> None:
    """Validate a configuration beyond what `build` checks. Raises `UserError`: names the setting and the fix."""
    if model.budget is not None and not model.paid():
        raise UserError(
            "it needs input_price and output_price: without prices nothing is ever spent",
            key=f"{where}.budget",
        )
    if set(model.extra_body) & {"model", "messages", "n", "seed"}:
        raise UserError(
            "it must not set model, messages, n or seed, which are part of the cache key",
            key=f"{where}.extra_body",
            kind="reserved",
        )
    try:
        json.dumps(model.extra_body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"it must be JSON: {error}", key=f"{where}.extra_body", kind="JSON") from None
    if model.base_url is None:
        return
    if model.mode == "batch" and model.address in WITHOUT_BATCHES:
        raise UserError(f"{model.base_url} has no batches; use mode=calls", key=f"{where}.mode")
    try:
        url = httpx.URL(model.base_url)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        raise UserError(f"it must be http(s)://HOST..., got {model.base_url!r}", key=f"{where}.base_url")
    if url.userinfo or url.query:
        raise UserError(
            "it must not contain a user, password or query; pass keys through key_env",
            key=f"{where}.base_url",
        )


def cache_names(models: Mapping[str, ModelConfig]) -> dict[str, str]:
    """The name under which each model's answers are cached, by label: it depends on no other model.

    It does not depend on the address either, so a server that moves to another port keeps its cache.

    Raises:
        UserError: several addresses serve one name, so the weights may differ, and `ModelConfig.cache_as` does not say.
    """
    unsaid: dict[str, tuple[str, str]] = {}
    for label, model in models.items():
        if model.cache_as is not None:
            continue
        other, address = unsaid.setdefault(model.name, (label, model.address))
        if address != model.address:
            raise UserError(
                f"models {other} and {label} have the name {model.name!r} at {address} and at {model.address}"
                f", so one might get the other's stored answers: set it to {model.name} if their weights are the same, else "
                "to a new name",
                key=f"{label}.cache_as",
            )
    return {label: model.cache_as or model.name for label, model in models.items()}

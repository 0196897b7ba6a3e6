"""A vision-language model behind an OpenAI-compatible endpoint: texts, and yes or no as a probability.

The official client retries time-outs, lost connections, 429 and 5xx with growing waits; what it gives up on stops the
run, and everything answered so far is kept (`eval.judging.answer_store`).
"""

import base64
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.schema import ImageRef

MAX_RETRIES = 6
TIMEOUT_S = 120.0
TOP_LOGPROBS = 20
"""Most alternatives that the API gives for a token."""
MAX_SIDE_PX = 1024
"""Longer sides of pictures are scaled down to this before they are sent."""

Part = str | bytes
"""A text, or the encoded bytes of a picture as they are sent."""


@dataclass(frozen=True)
class Verdict:
    """An answer of yes or no.

    Attributes:
        probability: of yes, among yes and no; None where neither is among the most likely tokens.
        said: the token that was answered.
    """

    probability: float | None
    said: str


class Endpoint:
    """One model behind one address.

    Args:
        url: such as ``http://HOST:8000/v1``.
        model: name that the endpoint knows it by.
        key_env: environment variable that holds the key; None: it needs none.

    Raises:
        UserError: the variable is not set.
    """

    def __init__(self, url: str, model: str, key_env: str | None = None):
        key = "none" if key_env is None else os.environ.get(key_env, "").strip()
        if not key:
            raise UserError(f"the environment variable {key_env} (key_env) is not set")
        self.url, self.model = url, model
        self._client = openai.OpenAI(base_url=url, api_key=key, max_retries=MAX_RETRIES, timeout=TIMEOUT_S)

    def write(self, parts: Sequence[Part], *, system: str | None = None, max_tokens: int) -> str:
        """A text, greedily decoded.

        Raises:
            UserError: there is no answer.
        """
        reply = self._ask(parts, system, max_tokens=max_tokens)
        text = (reply.message.content or "").strip()
        if not text:
            raise UserError(
                f"{self.model} at {self.url} answered nothing (stopped by {reply.finish_reason!r})"
            )
        return text

    def yes_or_no(self, parts: Sequence[Part], *, yes: str, no: str) -> Verdict:
        """Sigmoid of the difference of two tokens' log probabilities.

        Tokens that differ in case or surrounding blanks only are added up. Where one of the two is not among the most
        likely tokens, the least likely one that is listed stands for it, which is an upper bound.

        Raises:
            UserError: there is no answer, or the endpoint gives no log probabilities.
        """
        reply = self._ask(parts, None, max_tokens=1, logprobs=True, top_logprobs=TOP_LOGPROBS)
        content = reply.logprobs.content if reply.logprobs is not None else None
        if not content:
            raise UserError(
                f"{self.model} at {self.url} gives no log probabilities (logprobs), which a reranker needs"
            )
        listed = [(one.token.strip().lower(), float(one.logprob)) for one in content[0].top_logprobs]
        said = content[0].token
        sums = [
            _log_sum([logprob for token, logprob in listed if token == word.strip().lower()])
            for word in (yes, no)
        ]
        if sums == [None, None]:
            return Verdict(None, said)
        least = min(logprob for _, logprob in listed)
        for_yes, for_no = (least if value is None else value for value in sums)
        return Verdict(1 / (1 + math.exp(min(for_no - for_yes, 700.0))), said)

    def _ask(self, parts: Sequence[Part], system: str | None, **settings: Any) -> Any:
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": _data_url(part)}}
            for part in parts
        ]
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        try:
            reply = self._client.chat.completions.create(
                model=self.model, messages=messages, temperature=0.0, **settings
            )
        except openai.AuthenticationError as error:
            raise UserError(f"{self.url} rejects the key: {_short(error)}") from None
        except openai.OpenAIError as error:
            raise UserError(
                f"{self.model} at {self.url} gave no answer: {_short(error)}; what was answered is kept, the same "
                "command continues"
            ) from None
        if not reply.choices:
            raise UserError(f"{self.model} at {self.url} sent no choices: it is no chat endpoint")
        return reply.choices[0]


def sendable(ref: ImageRef, max_side_px: int = MAX_SIDE_PX) -> bytes:
    """A picture as PNG, its longer side at most so many pixels.

    Raises:
        rge.common.images.ImageError: it cannot be read.
    """
    image = load_image(ref)
    image.thumbnail((max_side_px, max_side_px))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def is_address(text: str) -> bool:
    """Whether it names an endpoint and not a directory."""
    return text.startswith(("http://", "https://"))


def _data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _log_sum(values: Sequence[float]) -> float | None:
    if not values:
        return None
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

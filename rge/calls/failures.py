"""Failures of calls: which are retried, which are stored, which stop the run.

===========  ==================================================  ==================================================
unanswered   time-out, no connection, 429, 5xx, a web page,      retried; after the last retry, left to the next run
             no content (only reasoning, only tool calls)
             a picture that cannot be opened                     left to the next run
refused      declined by the provider's policy                   stored as an answer (`rge.calls.wire.replies.Refused`)
rejected     this request is invalid (too large, a bad image)    stored; the other calls continue
stopped      every request fails: key, credit, model, setting,   no further calls; those in flight finish
             address
===========  ==================================================  ==================================================

A provider's error is classified by documented code, then by HTTP status, then by wording. Sources: the error pages of OpenAI, Azure
OpenAI, Anthropic, Gemini (google.rpc codes), Groq, OpenRouter and vLLM, autumn 2026. An undocumented 400 may concern one request or
all of them, and the caller finds out with a canary. Gateways answer some errors with status 200: then the body's code decides.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.wire.replies import ReplyError, as_dict, dict_items, parse, stated_error
from rge.common.errors import UserError

MAYBE_BILLED = (200, 408, 504)
"""Statuses of failures that the model may have written to: it was broken off, or a proxy timed out."""
SHOWN_CHARACTERS = 300
"""Of a response body quoted in a message."""
QUEUE_FULL = "token_limit_exceeded"
"""The error code of a full queue, when a batch is created or fails."""


Stop = Literal[
    "key", "credit", "address", "settings", "limited", "unanswered", "budget",
    "batch", "queue", "open", "unknown", "waiting", "expired", "cancelled", "gone",
]  # fmt: skip
"""Why calls stop; those of the second line concern a batch."""
FIX: dict[str, str] = {
    **dict.fromkeys(("key", "credit"), "Fix this and run the same command again"),
    "address": "Is base_url the address of an OpenAI-compatible API that has this model? Most end in /v1",
    "settings": "It also rejects a harmless request with the same settings: change the model's settings (token_limit, "
    "send_temperature, send_seed, extra_body, max_side_px ...) and run the same command again; answers so far are stored",
    **dict.fromkeys(("limited", "unanswered"), "Answers so far are stored; run the same command again later"),
    "budget": "Raise that budget and run the same command again",
    "batch": "Change the model's settings, or use plain calls (mode=calls), and run the same command again",
    "queue": "Wait until fewer tokens are queued, or use plain calls (mode=calls), and run the same command again",
    "open": "Run with mode=batch to collect it. If you do not want to wait for it, cancel it at the provider first",
    "unknown": "Run the same command to search again",
    "waiting": "Nothing is lost: run the same command to keep waiting",
    **dict.fromkeys(
        ("expired", "cancelled", "gone"),
        "Stopped rather than make plain calls at full price: run the same command again to submit the rest as a new batch, or with "
        "mode=calls",
    ),
}
"""What to do if calls stop."""


class StopCalls(UserError):
    """No further call to this endpoint can succeed.

    Attributes:
        file: the model's name.
        place: the HTTP status that says so; None: none does.
        kind: why, see `Stop`.
    """

    numbered = ""

    def __str__(self) -> str:
        return ". ".join(filter(None, (super().__str__(), FIX.get(self.kind))))


class BudgetReached(StopCalls):
    """The next call might exceed a budget."""


@dataclass(eq=False)
class Unanswered(ReplyError):
    """The endpoint gave no answer; the next run tries again."""

    kind = "unanswered"
    model: str
    why: Exception
    """The last attempt's error, a picture's, or that of an answer without content."""

    def __str__(self) -> str:
        return f"{self.model}: {self.why}"


@dataclass(eq=False)
class Rejection(ReplyError):
    """The endpoint cannot process this request; stored, so that it is not sent again."""

    kind = "rejected request"
    reason: str
    status: int | None = None
    certain: bool = True
    """Whether status or code blame this request; if not, a canary finds out whether all requests are rejected."""

    def __str__(self) -> str:
        return self.reason


class Gone(Rejection):
    """What a request names does not exist at the provider, or no longer (404, 410)."""


class QueueFull(Rejection):
    """The provider's queue has no room for a batch until others have ended."""


@dataclass(eq=False)
class AttemptFailed(Exception):
    """One attempt failed; a retry may succeed."""

    reason: str
    status: int | None = None
    wait_s: float | None = None  # Retry-After
    billed: bool = False  # the provider may have processed the request and may bill it
    no_chat: bool = False  # what came is no chat completion, so the address may be wrong
    num: int = 1  # attempts of the call, all of which failed

    @property
    def limited(self) -> bool:
        """Whether it was neither processed nor billed, since there were too many."""
        return self.status == 429

    def __str__(self) -> str:
        return f"{self.reason} ({self.num} attempts)" if self.num > 1 else self.reason


@dataclass(eq=False)
class NoContent(AttemptFailed):
    """A chat completion without content: the provider bills it, but it answers nothing."""

    raw: bytes = b""  # its body


Meaning = Literal["policy", "account", "request", "overload", "unknown"]
"""What an error concerns: declined by the provider's policy, the account cannot make calls, this request is invalid, temporary, or
this request or all requests."""
KEY_CODES = frozenset(("invalid_api_key", "api_key_invalid", "authentication_error", "unauthenticated"))
"""Account codes that concern the key."""
CODES: dict[Meaning, frozenset[str]] = {
    "policy": frozenset(
        "content_filter content_policy_violation image_content_policy_violation responsibleaipolicyviolation "
        "moderation_blocked invalid_prompt".split()
    ),
    "account": KEY_CODES.union(
        "account_deactivated billing_error billing_hard_limit_reached billing_not_active credit_balance_exhausted "
        "credit_balance_too_low insufficient_quota organization_spend_limit_exceeded project_spend_limit_exceeded "
        "permission_error permission_denied model_not_found deploymentnotfound not_found_error failed_precondition "
        "service_disabled unsupported_country_region_territory".split()
    ),
    "request": frozenset(
        "context_length_exceeded string_above_max_length request_too_large invalid_image invalid_image_format "
        "invalid_image_mode invalid_image_url invalid_base64_image image_too_large image_too_small image_file_too_large "
        "image_parse_error image_file_not_found unsupported_image_media_type empty_image_file failed_to_download_image".split()
    ),
    "overload": frozenset(
        "rate_limit_exceeded rate_limit_error overloaded_error api_error server_error timeout_error slow_down "
        "server_is_overloaded resource_exhausted unavailable internal deadline_exceeded aborted".split()
    ),
}
"""Codes in lower case; the most specific meaning first, since an error may carry several codes."""
LIMITS = frozenset("rate_limit_exceeded rate_limit_error resource_exhausted".split())
"""Overload codes of rate limits; inside a 200, they say what a 429 does."""
STATUSES: dict[int, Meaning] = {
    **dict.fromkeys((401, 402, 403, 404), "account"),
    **dict.fromkeys((408, 409, 425, 429), "overload"),
    413: "request",
}
WORDS: dict[str, Meaning] = {
    # Documented, but only as text (Anthropic's invalid_request_error).
    "credit balance is too low": "account",
    "output blocked by content filtering policy": "policy",
}
WRONG_PATH = "unexpected endpoint or method"
"""What LM Studio says of an address without ``/v1``, with status 200."""
MORE_THAN_A_MINUTE = re.compile(r"\blimit:? ([\d,]+)\D{0,20}\brequested:? ([\d,]+)", re.IGNORECASE)
"""What OpenAI and Groq say of a request that is larger than the tokens of a minute, under the code of a rate limit."""


def classify(status: int, body: Any) -> Meaning:
    """Classify an error by its HTTP status (`effective_status`) and JSON body (None: no JSON)."""
    found, error = codes(body), _error_of(body)
    for meaning, known in CODES.items():
        # No wait helps a request that alone is over a limit, whatever its code.
        if meaning == "overload" and (status == 413 or _is_over_limit(error)):
            return "request"
        if found & known:
            return meaning
    if "flagged_input" in as_dict(error.get("metadata")):  # OpenRouter's moderation, a 403
        return "policy"
    message = str(error.get("message") or "").lower()
    for words, meaning in WORDS.items():
        if words in message:
            return meaning
    return STATUSES.get(status, "unknown" if 400 <= status < 500 else "overload")


def codes(body: Any) -> set[str]:
    """The error codes in a body, in lower case: code, type, status, and the reasons in its details."""
    error = _error_of(body)
    values = [error.get(name) for name in ("code", "type", "status")]
    values += [detail.get("reason") for detail in dict_items(error.get("details"))]
    values += [as_dict(error.get(name)).get("code") for name in ("innererror", "inner_error")]
    return {value.lower() for value in values if isinstance(value, str)}


def effective_status(status: int, body: Any) -> int:
    """The status of a response, or the one that the error inside a 200 states by its code."""
    if not 200 <= status < 300:
        return status
    error = _error_of(body)
    for value in (error.get(name) for name in ("code", "status", "status_code")):
        text = str(value) if isinstance(value, int | str) else ""
        if re.fullmatch(r"[45]\d\d", text):
            return int(text)
    if WRONG_PATH in str(error.get("message")).lower():
        return 404
    return 429 if codes(body) & LIMITS else status


def _is_over_limit(error: dict[str, Any]) -> bool:
    found = MORE_THAN_A_MINUTE.search(str(error.get("message") or ""))
    limit, requested = (int(text.replace(",", "") or 0) for text in found.groups()) if found else (0, 0)
    return requested > limit


def _error_of(body: Any) -> dict[str, Any]:
    choices = dict_items(as_dict(body).get("choices"))
    error = stated_error(body) or next(filter(None, (choice.get("error") for choice in choices)), None)
    return {"message": error} if isinstance(error, str) else as_dict(error)


def failure(
    status: int, raw: bytes, headers: Mapping[str, str], model: ModelConfig, mask: Mask
) -> AttemptFailed | Rejection | StopCalls | None:
    """The exception for an error response; None: a policy refusal, which counts as an answer."""
    excerpt = mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
    message = f"HTTP {status}: {excerpt}"
    if 300 <= status < 400:
        # Redirects are not followed, so that the key goes only to the configured address.
        moved = f"the address has moved to {mask(str(headers.get('location')))}"
        return StopCalls(moved, model.name, status, kind="address")
    content = parse(raw)
    # What the server broke off may be billed, whatever it says then.
    is_begun = bool(as_dict(content).get("choices"))
    status = effective_status(status, content)
    meaning = classify(status, content)
    if meaning == "policy":
        return None
    if meaning == "account":
        kind, why = _account_problem(status, codes(content), model.key_env)
        return StopCalls(f"{why}; {message}", model.name, status, kind=kind)
    if meaning == "overload":
        # Gemini reports the wait in the body instead of a header.
        details = dict_items(_error_of(content).get("details"))
        delays = [headers.get("retry-after"), *(detail.get("retryDelay") for detail in details)]
        # A wait of 0 says nothing: with it, calls would be repeated without a pause.
        wait_s = next(filter(None, map(parse_seconds, delays)), None)
        billed = is_begun or status in MAYBE_BILLED
        return AttemptFailed(message, status, wait_s=wait_s, billed=billed)
    return Rejection(message, status, certain=meaning == "request")


def _account_problem(status: int, error_codes: set[str], key_env: str | None) -> tuple[Stop, str]:
    key = f"the endpoint rejects the key (from {key_env or 'none: key_env is not set'})"
    if error_codes & KEY_CODES or status == 401:
        return "key", key
    if status == 403:
        return "key", f"{key}, or the key has no access to this model"
    if status == 404:
        return "address", "no such model or address"
    return "credit", "the account has no credit or quota left, or no access to this model"


def parse_seconds(text: Any) -> float | None:
    """Parse a wait into seconds: "1.5", Gemini's "1.5s", or an HTTP date; None if invalid."""
    if not isinstance(text, str) or not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?s?", text):
        return float(text.removesuffix("s"))
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max((at - datetime.now(UTC)).total_seconds(), 0.0) if at.tzinfo else None

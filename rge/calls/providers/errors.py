"""Exceptions for a provider's errors, classified by documented code, then by HTTP status, then by wording.

Sources: the error pages of OpenAI, Azure OpenAI, Anthropic, Gemini (google.rpc codes), OpenRouter and vLLM, autumn 2026. Undocumented
errors are `UNKNOWN`: a 400 may concern one request or all of them, and the caller finds out with a canary.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

from rge.calls.failures import (
    AttemptFailed,
    Rejection,
    StopCalls,
)
from rge.calls.keys import Mask
from rge.calls.model_config import ModelConfig
from rge.calls.replies import as_dict, dict_items, parse

MAYBE_BILLED = (200, 408, 504)
"""Statuses of failures that the model may have written to: it was broken off, or a proxy timed out."""
SHOWN_CHARACTERS = 300
"""Of a response body quoted in a message."""


class Meaning(Enum):
    """What an error concerns, which decides how it is handled; the most specific first."""

    POLICY = "declined by the provider's policy"
    ACCOUNT = "the account cannot make calls"
    REQUEST = "this request is invalid"
    OVERLOAD = "temporary"
    UNKNOWN = "this request or all requests"


KEY_CODES = {"invalid_api_key", "api_key_invalid", "authentication_error", "unauthenticated"}
"""Account codes that concern the key."""

CODES: dict[str, Meaning] = {
    code: meaning
    for meaning, codes in {
        Meaning.POLICY: (
            "content_filter content_policy_violation image_content_policy_violation responsibleaipolicyviolation "
            "moderation_blocked invalid_prompt"
        ),
        Meaning.ACCOUNT: (
            "account_deactivated billing_error billing_hard_limit_reached billing_not_active credit_balance_exhausted "
            "credit_balance_too_low insufficient_quota organization_spend_limit_exceeded project_spend_limit_exceeded "
            "permission_error permission_denied model_not_found deploymentnotfound not_found_error failed_precondition "
            "service_disabled unsupported_country_region_territory " + " ".join(sorted(KEY_CODES))
        ),
        Meaning.REQUEST: (
            "context_length_exceeded string_above_max_length request_too_large invalid_image invalid_image_format "
            "invalid_image_mode invalid_image_url invalid_base64_image image_too_large image_too_small image_file_too_large "
            "image_parse_error image_file_not_found unsupported_image_media_type empty_image_file failed_to_download_image"
        ),
        Meaning.OVERLOAD: (
            "rate_limit_exceeded rate_limit_error overloaded_error api_error server_error timeout_error slow_down "
            "server_is_overloaded resource_exhausted unavailable internal deadline_exceeded aborted"
        ),
    }.items()
    for code in codes.split()
}
STATUSES = {
    **dict.fromkeys((401, 402, 403, 404), Meaning.ACCOUNT),
    **dict.fromkeys((408, 409, 425, 429), Meaning.OVERLOAD),
    413: Meaning.REQUEST,
}
WORDS = {
    # Documented, but only as text (Anthropic's invalid_request_error).
    "credit balance is too low": Meaning.ACCOUNT,
    "output blocked by content filtering policy": Meaning.POLICY,
}


def classify(status: int, body: Any) -> Meaning:
    """Classify an error by its HTTP status (may be 200 behind a gateway) and JSON body (None: no JSON)."""
    meanings = {CODES[code] for code in codes(body) if code in CODES}
    if meanings:  # an error may carry several codes
        return next(meaning for meaning in Meaning if meaning in meanings)
    error = error_of(body)
    if "flagged_input" in as_dict(error.get("metadata")):  # OpenRouter's moderation, a 403
        return Meaning.POLICY
    message = str(error.get("message") or "").lower()
    by_words = next((meaning for words, meaning in WORDS.items() if words in message), None)
    default = Meaning.UNKNOWN if 400 <= status < 500 else Meaning.OVERLOAD
    return by_words or STATUSES.get(status, default)


def codes(body: Any) -> set[str]:
    """The error codes in a body, in lower case: code, type, status, and the reasons in its details."""
    error = error_of(body)
    values = [error.get(name) for name in ("code", "type", "status")]
    values += [detail.get("reason") for detail in dict_items(error.get("details"))]
    values += [as_dict(error.get(name)).get("code") for name in ("innererror", "inner_error")]
    return {value.lower() for value in values if isinstance(value, str)}


def error_of(body: Any) -> dict[str, Any]:
    """The ``error`` object of a body; empty if there is none."""
    if isinstance(body, list) and body:  # Gemini wraps some errors in a list
        body = body[0]
    error = as_dict(body).get("error")
    return {"message": error} if isinstance(error, str) else as_dict(error)


def failure(
    status: int, raw: bytes, response_headers: Mapping[str, str], model: ModelConfig, mask: Mask
) -> AttemptFailed | Rejection | StopCalls | None:
    """The exception for an error response; None: a policy refusal, which counts as an answer."""
    excerpt = mask(" ".join(raw.decode("utf-8", "replace").split()))[:SHOWN_CHARACTERS]
    message = f"HTTP {status}: {excerpt}"
    if 300 <= status < 400:
        # Redirects are not followed, so that the key goes only to the configured address.
        return StopCalls(
            f"{model.name}: the address has moved to {mask(str(response_headers.get('location')))}: set base_url"
        )
    content = parse(raw)
    meaning = classify(status, content)
    if meaning is Meaning.POLICY:
        return None
    if meaning is Meaning.ACCOUNT:
        return _account_error(status, codes(content), message, model)
    if meaning is Meaning.OVERLOAD:
        wait_s = parse_seconds(response_headers.get("retry-after")) or _retry_delay(content)
        return AttemptFailed(message, limited=status == 429, wait_s=wait_s, billed=status in MAYBE_BILLED)
    return Rejection(message, certain=meaning is Meaning.REQUEST)


def _account_error(status: int, error_codes: set[str], message: str, model: ModelConfig) -> StopCalls:
    name = model.name
    if error_codes & KEY_CODES or status == 401:
        source = model.key_env or "none: key_env is not set"
        return StopCalls(f"{name}: the endpoint rejects the key (from {source}); {message}")
    if status == 404:
        return StopCalls(f"{name}: no such model or address; {message}")
    if status == 403:
        return StopCalls(
            f"{name}: the endpoint rejects the key (from {model.key_env}), or the key has no access to this model; {message}"
        )
    return StopCalls(
        f"{name}: the account has no credit or quota left, or no access to this model; {message}. Calls stop here: fix this with "
        "the provider and run the same command again"
    )


def _retry_delay(content: Any) -> float | None:
    # Gemini reports it in the body instead of a header.
    details = dict_items(error_of(content).get("details"))
    delays = [detail["retryDelay"] for detail in details if "retryDelay" in detail]
    return parse_seconds(str(delays[0])) if delays else None


def parse_seconds(text: str | None) -> float | None:
    """Parse a wait into seconds: "1.5", Gemini's "1.5s", or an HTTP date; None if invalid."""
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?s?", text):
        return float(text.removesuffix("s"))
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max((at - datetime.now(UTC)).total_seconds(), 0.0) if at.tzinfo else None

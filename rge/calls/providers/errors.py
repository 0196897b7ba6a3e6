"""Classify a provider's errors: by documented code, then by HTTP status, then by wording.

Sources: the error pages of OpenAI, Azure OpenAI, Anthropic, Gemini (google.rpc codes), OpenRouter and vLLM, autumn 2026. Undocumented
errors are `UNKNOWN`: a 400 may concern one request or all of them, and the caller finds out with a canary.
"""

from enum import Enum
from typing import Any

from rge.calls.replies import as_dict, dict_items


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
    401: Meaning.ACCOUNT,
    402: Meaning.ACCOUNT,
    403: Meaning.ACCOUNT,
    404: Meaning.ACCOUNT,
    408: Meaning.OVERLOAD,
    409: Meaning.OVERLOAD,
    413: Meaning.REQUEST,
    425: Meaning.OVERLOAD,
    429: Meaning.OVERLOAD,
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

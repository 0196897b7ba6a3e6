"""Classify a provider's errors: by documented code, then by HTTP status, then by wording.

Sources: the error pages of OpenAI, Azure OpenAI, Anthropic, Gemini (google.rpc codes), OpenRouter and vLLM, autumn 2026. What none
of them documents is `UNKNOWN`: a 400 may be about this one request or about all of them, and the caller finds out with a canary.
"""

from enum import Enum
from typing import Any

from rge.calls.replies import as_dict, dicts


class Meaning(Enum):
    """Whom an error is about, and so what is done."""

    POLICY = "the provider's policy declines what is asked"
    ACCOUNT = "the account cannot make calls"
    REQUEST = "this one request cannot be taken"
    OVERLOAD = "worth asking again later"
    UNKNOWN = "this request or all of them"


KEY_CODES = {"invalid_api_key", "api_key_invalid", "authentication_error", "unauthenticated"}
"""Of the account's codes, those that are about the key."""

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
    # Documented, but without a code of their own (Anthropic's invalid_request_error).
    "credit balance is too low": Meaning.ACCOUNT,
    "output blocked by content filtering policy": Meaning.POLICY,
}


def meaning(status: int, body: Any) -> Meaning:
    """What an error means, by its HTTP status (200 where a gateway sends an error with it) and its JSON (None: it has none)."""
    named = codes(body)
    for one in (Meaning.POLICY, Meaning.ACCOUNT, Meaning.REQUEST, Meaning.OVERLOAD):
        if any(CODES.get(code) is one for code in named):
            return one
    error = error_of(body)
    if "flagged_input" in as_dict(error.get("metadata")):  # OpenRouter's moderation, a 403
        return Meaning.POLICY
    said = str(error.get("message") or "").lower()
    for words, one in WORDS.items():
        if words in said:
            return one
    if status in STATUSES:
        return STATUSES[status]
    return Meaning.OVERLOAD if status >= 500 or status < 400 else Meaning.UNKNOWN


def codes(body: Any) -> set[str]:
    """The codes that the body of an error names, in lower case: its code, type, status and the reasons of its details."""
    error = error_of(body)
    named = [error.get(name) for name in ("code", "type", "status")]
    named += [one.get("reason") for one in dicts(error.get("details"))]
    named += [as_dict(error.get(name)).get("code") for name in ("innererror", "inner_error")]
    return {one.lower() for one in named if isinstance(one, str)}


def error_of(body: Any) -> dict[str, Any]:
    """The ``error`` of a body; empty where there is none."""
    if isinstance(body, list) and body:  # some of Gemini's come in a list
        body = body[0]
    error = as_dict(body).get("error")
    return {"message": error} if isinstance(error, str) else as_dict(error)

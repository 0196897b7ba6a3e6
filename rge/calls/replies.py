"""Take an answer apart. Every way in which it can be malformed has an error of its own, and a name for the report."""

import json
import re
from dataclasses import dataclass
from typing import Any


class ReplyError(ValueError):
    """An answer without what was asked for. ``kind`` is its name in tables and reports."""

    kind = "malformed"


class NotAChat(ReplyError):
    """Not an answer of a chat model: a web page, or JSON without choices. Never kept; the call is made again."""

    kind = "not a chat reply"


class EmptyChoices(ReplyError):
    """A valid answer with nothing in it."""

    kind = "empty"


class Truncated(ReplyError):
    """The answer reached ``max_tokens`` before it was complete."""

    kind = "truncated"


class Refused(ReplyError):
    """The model or its provider declined."""

    kind = "refusal"


class Abstained(ReplyError):
    """The model abstained, as the prompt allows: data, counted and left out."""

    kind = "abstain"


class Declined(Abstained):
    """The model declined a picture for what it shows, as the prompt's content policy asks."""

    kind = "abstain: sensitive picture"


class MissingTag(ReplyError):
    """A tag of the output format is missing or empty."""

    kind = "missing tag"


class BadValue(ReplyError):
    """A tag holds something that the output format does not allow."""

    kind = "bad value"


UNREADABLE = (EmptyChoices, Truncated, MissingTag, BadValue)
"""Answers that are worth asking for again, with the format named."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat model's answer.

    Attributes:
        text: what it wrote; an answer by a JSON schema stands in tags, as prompts without one ask for.
        stop: why it stopped: ``stop``, ``length``, ``refusal`` or the provider's own word.
        input_tokens: as billed; None where the server does not say.
        output_tokens: likewise.
        top_logprobs: (token, log probability) of the likeliest first tokens, where they were asked for.
        first_token: the one that was written.
    """

    text: str
    stop: str
    input_tokens: int | None
    output_tokens: int | None
    top_logprobs: tuple[tuple[str, float], ...] = ()
    first_token: str = ""


_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "content_filter": "refusal",
    # Gemini's
    "STOP": "stop",
    "MAX_TOKENS": "length",
    **dict.fromkeys(
        ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"), "refusal"
    ),
}
_REFUSAL = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry,|i can(?:no|')t|i can not|i am unable|i'm unable|i won't|as an ai)\b",
    re.IGNORECASE,
)
_POLICY = re.compile(
    r"content[ _-]?(filter|policy|management)|policy[ _]violation|responsible ?ai|safety (system|polic|setting)|moderation",
    re.IGNORECASE,
)


def parse(raw: bytes) -> Any:
    """The JSON of an answer's body.

    Half characters (lone surrogates), which JSON can write and no file can hold, become the sign for what is unreadable.

    Raises:
        NotAChat: it is not JSON.
    """
    try:
        return _whole_characters(json.loads(raw))
    except (ValueError, RecursionError):
        raise NotAChat(f"not JSON but {_shown(raw.decode('utf-8', 'replace'))}") from None


def policy_refusal(body: Any) -> str | None:
    """The provider's words where the body of an error says that its policy, not the request's form, is the reason; or None."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    inner = error.get("innererror") or error.get("inner_error") or {}
    names = [error.get("code"), error.get("type"), inner.get("code") if isinstance(inner, dict) else None]
    message = str(error.get("message") or "")
    if any(_POLICY.search(str(name)) for name in names if name) or _POLICY.search(message):
        return message or "declined by the provider's policy"
    return None


def read_replies(raw: bytes) -> list[Reply | ReplyError]:
    """Read the body of an answer: of chat completions, of Anthropic's messages, or of Gemini's ``generateContent``.

    Args:
        raw: JSON.

    Returns:
        One draw after the other; an error where a draw has nothing in it.

    Raises:
        NotAChat: not JSON, or of another schema.
        Refused: the whole request was declined by the provider's policy.
        EmptyChoices: there is no choice.
    """
    body = parse(raw)
    if (why := policy_refusal(body)) is not None:
        raise Refused(_shown(why))
    if isinstance(body, dict) and isinstance(body.get("choices"), list):
        if not body["choices"]:
            raise EmptyChoices("the answer has no choices")
        tokens = usage(raw)
        return [_choice(choice, tokens) for choice in body["choices"]]
    if isinstance(body, dict) and body.get("type") == "message" and isinstance(body.get("content"), list):
        reason = str(body.get("stop_reason") or "stop")
        stop = _STOPS.get(reason, reason)
        return [_reply(_text(body["content"]), stop, usage(raw))]
    if isinstance(body, dict) and isinstance(body.get("candidates"), list) and body["candidates"]:
        return [_candidate(one, usage(raw)) for one in body["candidates"]]
    if isinstance(body, dict) and isinstance(body.get("promptFeedback"), dict):
        raise Refused(_shown(f"blocked: {body['promptFeedback'].get('blockReason')}"))
    if isinstance(body, dict) and isinstance(body.get("usageMetadata"), dict):
        raise EmptyChoices("the answer has no candidates")
    raise NotAChat(f"JSON of another schema: {_shown(raw.decode('utf-8', 'replace'))}")


def is_refused(raw: bytes) -> bool:
    """Whether the whole request was declined by the provider's policy."""
    try:
        read_replies(raw)
    except Refused:
        return True
    except ReplyError:
        pass
    return False


def read_reply(raw: bytes) -> Reply:
    """The only draw of an answer.

    Raises:
        ReplyError: see `read_replies`; or it has nothing in it.
    """
    found = read_replies(raw)[0]
    if isinstance(found, ReplyError):
        raise found
    return found


def _choice(choice: Any, tokens: tuple[int | None, int | None]) -> Reply | ReplyError:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return EmptyChoices("a choice without a message")
    stop = _STOPS.get(choice.get("finish_reason"), choice.get("finish_reason") or "stop")
    text = _text(message.get("content"))
    if isinstance(message.get("refusal"), str) and message["refusal"]:
        text, stop = message["refusal"], "refusal"
    listed = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
    try:
        top = tuple((str(one["token"]), float(one["logprob"])) for one in listed.get("top_logprobs") or ())
    except (KeyError, TypeError, ValueError, AttributeError):
        top = ()
    return _reply(text, stop, tokens, top, str(listed.get("token", "")) if top else "")


def _candidate(candidate: Any, tokens: tuple[int | None, int | None]) -> Reply | ReplyError:
    if not isinstance(candidate, dict):
        return EmptyChoices("a candidate that is none")
    reason = str(candidate.get("finishReason") or "stop")
    content = candidate.get("content")
    parts = content.get("parts") if isinstance(content, dict) else None
    said = [part for part in parts or () if isinstance(part, dict) and not part.get("thought")]
    return _reply(_text(said), _STOPS.get(reason, reason), tokens)


def _reply(
    text: str,
    stop: str,
    tokens: tuple[int | None, int | None],
    top: tuple[tuple[str, float], ...] = (),
    first: str = "",
) -> Reply | ReplyError:
    if not text.strip() and stop not in ("length", "refusal"):
        return EmptyChoices("the message is empty")
    return Reply(_as_tags(text), stop, *tokens, top, first)


def _text(content: Any) -> str:
    # Some servers send the text in parts.
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else part for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _as_tags(text: str) -> str:
    if not text.lstrip().startswith("{"):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return _tagged(found) if isinstance(found, dict) else text


def _tagged(fields: dict[str, Any]) -> str:
    return "\n".join(
        f"<{name}>{_tagged(value) if isinstance(value, dict) else value}</{name}>"
        for name, value in fields.items()
    )


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(one) for key, one in value.items()}
    return value


def usage(raw: bytes) -> tuple[int | None, int | None]:
    """Tokens billed for an answer, also where its content is malformed; None where it does not say."""
    found = _usage(raw)
    given = found.get("prompt_tokens")
    if given is None and (given := _count(found.get("input_tokens"))) is not None:
        # Anthropic counts what it read from its cache, or wrote to it, apart.
        given += sum(_count(found.get(f"cache_{what}_input_tokens")) or 0 for what in ("read", "creation"))
    if "promptTokenCount" in found:
        # Gemini counts thoughts apart, and nothing where an answer has none.
        written = [_count(found.get(f"{what}TokenCount")) or 0 for what in ("candidates", "thoughts")]
        return _count(found["promptTokenCount"]), sum(written)
    return _count(given), _count(found.get("completion_tokens", found.get("output_tokens")))


def cached_tokens(raw: bytes) -> int:
    """How many of the input tokens the provider had in its prompt cache; 0 where it does not say."""
    found = _usage(raw)
    details = found.get("prompt_tokens_details")
    if isinstance(details, dict):
        return _count(details.get("cached_tokens")) or 0
    return _count(found.get("cache_read_input_tokens", found.get("cachedContentTokenCount"))) or 0


def cache_written_tokens(raw: bytes) -> int:
    """How many of the input tokens the provider wrote to its prompt cache; 0 where it does not say."""
    return _count(_usage(raw).get("cache_creation_input_tokens")) or 0


def _usage(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        found = body.get("usage", body.get("usageMetadata"))
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def check_complete(reply: Reply, last_tag: str) -> None:
    """Refusals, abstentions of the whole answer, and answers cut short.

    Args:
        reply: the answer.
        last_tag: with which a complete answer ends; an answer that has it is complete, however it stopped.

    Raises:
        Refused: declined by the provider, or in the model's words instead of the format.
        Abstained: the whole answer is an abstention.
        Truncated: cut at ``max_tokens``.
    """
    text = reply.text.strip()
    if f"</{last_tag}>".lower() in text.lower():
        return
    if text.upper().lstrip("*_\"' ").startswith("ABSTAIN"):
        raise (Declined if "SENSITIVE" in text.upper() else Abstained)(_shown(text))
    if reply.stop == "refusal" or _REFUSAL.match(text):
        raise Refused(_shown(text) if text else "declined without a word")
    if reply.stop == "length":
        raise Truncated(f"cut before </{last_tag}> after {reply.output_tokens} tokens")


def tag(text: str, name: str) -> str:
    """What stands in a tag, the last time it occurs: models like to think in the format before they answer in it.

    Args:
        text: the answer.
        name: of the tag; letter case does not matter.

    Raises:
        MissingTag: there is no such tag, or it is empty.
    """
    found = re.findall(
        rf"<{re.escape(name)}>(.*?)</{re.escape(name)}>", text, flags=re.IGNORECASE | re.DOTALL
    )
    if not found or not found[-1].strip():
        raise MissingTag(f"<{name}> is {'empty' if found else 'missing'} in {_shown(text)}")
    return " ".join(found[-1].split())


def one_of(text: str, name: str, allowed: dict[str, Any]) -> Any:
    """The meaning of a tag that holds one of a few words.

    Args:
        text: the answer.
        name: of the tag.
        allowed: meaning of each word, words in lower case.

    Raises:
        MissingTag: there is no such tag.
        BadValue: it holds another word.
    """
    value = tag(text, name).strip(".*\"' ").lower()
    if value not in allowed:
        raise BadValue(f"<{name}> must be one of {', '.join(allowed)}; got {value[:60]!r}")
    return allowed[value]


def _shown(text: str, length: int = 100) -> str:
    text = " ".join(text.split())
    return repr(text[:length] + ("..." if len(text) > length else ""))

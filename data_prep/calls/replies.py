"""Take an answer apart. Every way in which it can be malformed has an error of its own, and a name for the report."""

import json
import re
from dataclasses import dataclass
from typing import Any


class ReplyError(ValueError):
    """An answer without what was asked for. ``kind`` is its name in tables and reports."""

    kind = "malformed"


class NotAChat(ReplyError):
    """Not an answer of a chat model: a web page, or JSON of another schema. Never kept; asked again."""

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


class MissingTag(ReplyError):
    """A tag of the output format is missing or empty."""

    kind = "missing tag"


class BadValue(ReplyError):
    """A tag holds something that the output format does not allow."""

    kind = "bad value"


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat model's answer.

    Attributes:
        text: what it wrote.
        stop: why it stopped: ``stop``, ``length``, ``refusal`` or the provider's own word.
        input_tokens: as billed; None where the server does not say.
        output_tokens: likewise.
    """

    text: str
    stop: str
    input_tokens: int | None
    output_tokens: int | None


_STOPS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "content_filter": "refusal"}
_REFUSAL = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry,|i can(?:no|')t|i can not|i am unable|i'm unable|i won't|as an ai)\b",
    re.IGNORECASE,
)


def read_reply(raw: str) -> Reply:
    """Read the body of an answer, of the chat-completions or of Anthropic's messages schema.

    Args:
        raw: JSON.

    Raises:
        NotAChat: not JSON, or of another schema.
        EmptyChoices: there is no choice, or its message has neither text nor refusal.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        raise NotAChat(f"not JSON but {_shown(raw)}") from None
    if isinstance(body, dict) and isinstance(body.get("choices"), list):
        return _chat(body)
    if isinstance(body, dict) and body.get("type") == "message" and isinstance(body.get("content"), list):
        return _message(body)
    raise NotAChat(f"JSON of another schema: {_shown(raw)}")


def _chat(body: dict[str, Any]) -> Reply:
    usage = body.get("usage") or {}
    tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not body["choices"]:
        raise EmptyChoices("the answer has no choices")
    choice = body["choices"][0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise NotAChat("the first choice has no message")
    stop = _STOPS.get(choice.get("finish_reason"), choice.get("finish_reason") or "stop")
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise NotAChat(f"the message's content is no text but {type(text).__name__}")
    if message.get("refusal"):
        text, stop = message["refusal"], "refusal"
    if not text.strip() and stop not in ("length", "refusal"):
        raise EmptyChoices("the message is empty")
    return Reply(text, stop, *tokens)


def _message(body: dict[str, Any]) -> Reply:
    usage = body.get("usage") or {}
    tokens = usage.get("input_tokens"), usage.get("output_tokens")
    text = "".join(part.get("text", "") for part in body["content"] if part.get("type") == "text")
    stop = _STOPS.get(body.get("stop_reason"), body.get("stop_reason") or "stop")
    if not text.strip() and stop not in ("length", "refusal"):
        raise EmptyChoices("the message is empty")
    return Reply(text, stop, *tokens)


def usage(raw: str) -> tuple[int | None, int | None]:
    """Tokens billed for an answer, also where its content is malformed; None where it does not say."""
    try:
        found = json.loads(raw).get("usage") or {}
        pair = (
            found.get("prompt_tokens", found.get("input_tokens")),
            found.get("completion_tokens", found.get("output_tokens")),
        )
    except (ValueError, AttributeError):
        return None, None
    return tuple(count if isinstance(count, int) and count >= 0 else None for count in pair)  # type: ignore[return-value]


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
        raise Abstained(_shown(text))
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

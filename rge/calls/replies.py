"""Parse provider responses. Every way in which one can be malformed has an error of its own, and a name for the report."""

import json
import re
from dataclasses import dataclass
from typing import Any

import json_repair


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
    """A chat model's answer."""

    text: str  # what it wrote; an answer by a JSON schema stands in tags, as prompts without one ask for
    stop: str  # why it stopped: ``stop``, ``length``, ``refusal`` or the provider's own word
    input_tokens: int | None  # as billed; None where the server does not say
    output_tokens: int | None  # likewise


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens billed for an answer, also where its content is malformed; None where it does not say."""

    input_tokens: int | None  # those of the prompt cache among them
    output_tokens: int | None  # thoughts among them
    cached: int = 0  # of the input tokens, those that the provider had in its prompt cache
    refused: bool = False  # the provider's policy declined the whole request

    def billed(self, expected: tuple[int, int]) -> tuple[int, int, int]:
        """Tokens of input, output and cached input; `expected` are those of input and output where the answer does not say."""
        # A provider bills what it answers; what its policy stopped it does not, unless it says so.
        given, written = (0, 0) if self.refused else expected
        given = given if self.input_tokens is None else self.input_tokens
        written = written if self.output_tokens is None else self.output_tokens
        return given, written, min(self.cached, given)


_REFUSAL = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry,|i apologi[sz]e|my apologies|i can(?:no|')t|i can not|i won't|i will not|"
    r"i(?:'?m| am) (?:unable|not able)|as an ai)\b",
    re.IGNORECASE,
)
_FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


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


def read_replies(raw: bytes) -> list[Reply | ReplyError]:
    """Read the body of an answer of chat completions.

    Returns:
        One draw after the other; an error where a draw has nothing in it.

    Raises:
        NotAChat: not JSON, or of another schema.
        Refused: the whole request was declined by the provider's policy.
        EmptyChoices: there is no choice.
    """
    body = parse(raw)
    if error := as_dict(body).get("error"):
        # Of all errors only refusals are kept (`rge.calls.providers.errors`).
        raise Refused(_shown(str(error.get("message") if isinstance(error, dict) else error)))
    choices = as_dict(body).get("choices")
    if not isinstance(choices, list):
        raise NotAChat(f"JSON of another schema: {_shown(json.dumps(body))}")
    if not choices:
        raise EmptyChoices("the answer has no choices")
    tokens = _usage(body)
    return [_choice(as_dict(choice), tokens) for choice in choices]


def as_dict(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def dicts(value: Any) -> list[dict[str, Any]]:
    """The JSON objects of a list; none in place of anything else."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _choice(choice: dict[str, Any], tokens: Usage) -> Reply | ReplyError:
    message = choice.get("message")
    if not isinstance(message, dict):
        return EmptyChoices("a choice without a message")
    text, reason = _text(message.get("content")), choice.get("finish_reason")
    if isinstance(message.get("refusal"), str) and message["refusal"]:
        text, reason = message["refusal"], "refusal"
    stop = "refusal" if reason == "content_filter" else str(reason or "stop")
    if not text.strip() and stop not in ("length", "refusal"):
        return EmptyChoices("the message is empty")
    text = _as_tags(text, whole=stop != "length")
    return Reply(text, stop, tokens.input_tokens, tokens.output_tokens)


def _text(content: Any) -> str:
    # Some servers send the text in parts.
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, dict) else part for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _as_tags(text: str, *, whole: bool) -> str:
    """The fields of a JSON object as tags; also of one in a code fence, or with small faults such as a trailing comma."""
    fenced = _FENCED.search(text)
    given = fenced[1] if fenced else text.strip()
    if not given.startswith("{"):
        return text
    try:
        found = json.loads(given)
    except ValueError:
        found = json_repair.loads(given) if whole and given.endswith("}") else None
    return _tagged(found) if isinstance(found, dict) and found else text


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


def usage(raw: bytes) -> Usage:
    """Tokens billed for an answer; none known where its body cannot be read."""
    try:
        return _usage(json.loads(raw))
    except (ValueError, RecursionError):
        return Usage(None, None)


def _usage(body: Any) -> Usage:
    found = as_dict(as_dict(body).get("usage"))
    cached = as_dict(found.get("prompt_tokens_details")).get("cached_tokens")
    numbers = (found.get("prompt_tokens"), found.get("completion_tokens"), cached)
    given, written, cached = (one if type(one) is int and one >= 0 else None for one in numbers)
    return Usage(given, written, cached or 0, bool(as_dict(body).get("error")))


def check_complete(reply: Reply, last_tag: str) -> None:
    """Refusals, abstentions of the whole answer, and answers cut short; one with the last tag is complete, however it stopped.

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
    if reply.stop == "refusal" or _REFUSAL.match(text.replace("\u2019", "'")):
        raise Refused(_shown(text) if text else "declined without a word")
    if reply.stop == "length":
        raise Truncated(f"cut before </{last_tag}> after {reply.output_tokens} tokens")


def tag(text: str, name: str) -> str:
    """Content of the last occurrence of a tag: models like to think in the format before they answer in it.

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

"""Parse provider responses. Every kind of malformed response has its own error class, whose ``kind`` appears in reports."""

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import json_repair


class ReplyError(ValueError):
    """An answer without the requested content.

    Attributes:
        kind: its name in tables and reports.
        tag: the tag at fault.
    """

    kind: ClassVar[str] = "malformed"

    def __init__(self, reason: str, tag: str | None = None):
        super().__init__(reason)
        self.tag = tag


class NotAChat(ReplyError):
    """Not a chat completion: a web page, or JSON without choices. Never stored; the call is retried."""

    kind = "not a chat reply"


class EmptyChoices(ReplyError):
    """A chat completion without content: nothing, or only reasoning or tool calls. No answer; the call is retried."""

    kind = "empty"


class Truncated(ReplyError):
    """The answer reached ``max_tokens`` before it was complete."""

    kind = "truncated"


class TooLong(ReplyError):
    """The answer is longer than ``max_tokens`` allows: the server ignored the limit."""

    kind = "too long"


class Refused(ReplyError):
    """The model or its provider declined."""

    kind = "refusal"


class Abstained(ReplyError):
    """The model abstained, as the prompt allows: counted and left out of the data."""

    kind = "abstain"


class Declined(Abstained):
    """The model declined a picture because of its content, as the prompt's policy asks."""

    kind = "abstain: sensitive picture"


class MissingTag(ReplyError):
    """A tag of the output format is missing or empty."""

    kind = "missing tag"


class BadValue(ReplyError):
    """A tag's value violates the output format."""

    kind = "bad value"


UNREADABLE = (Truncated, TooLong, MissingTag, BadValue)
"""Answers worth requesting again, with the format stated."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat model's answer."""

    text: str  # JSON answers are converted to tags
    stop: str  # ``stop``, ``length``, ``refusal`` or the provider's own reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens billed for an answer."""

    input_tokens: int  # including cached ones
    output_tokens: int  # including reasoning
    cached: int  # input tokens read from the provider's prompt cache
    refused: bool  # the provider's policy declined the whole request


BROKEN_OFF = ("error", "abort", "insufficient_system_resource")
"""Reasons for which a server, not the model, ended an answer: OpenRouter's and Mistral's, vLLM's and SGLang's, DeepSeek's."""
_REFUSAL = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry,|i apologi[sz]e|my apologies|i can(?:no|')t|i can not|i won't|i will not|"
    r"i(?:'?m| am) (?:unable|not able)|as an ai)\b",
    re.IGNORECASE,
)
_THOUGHTS, _THOUGHTS_END = (
    re.compile(rf"<{slash}(?:\w+:)?think(?:ing)?>|\[{slash}THINK\]|◁{slash}think▷|{channel}")
    for slash, channel in (
        ("", r"<\|channel>|(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)"),
        ("/", r"<channel\|>|<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"),
    )
)
"""Marks around a model's thoughts: ``<think>``, ``<thinking>``, ``<seed:think>``, Mistral's ``[THINK]``, Kimi's ``◁think▷``,
Gemma's ``<|channel>`` to ``<channel|>``, and the channels before gpt-oss's ``final`` one."""
_END_OF_FINAL = re.compile(r"<\|(?:return|end)\|>\s*$")
_FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


def parse(raw: bytes) -> Any | None:
    """Parse a body; None if it is not JSON. Lone surrogates are replaced."""
    try:
        return json.loads(valid_unicode(json.dumps(json.loads(raw), ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which can be neither sent nor written to a file."""
    return text.encode("utf-8", "replace").decode()


def read_replies(raw: bytes) -> list[Reply | ReplyError]:
    """Read the body of a chat completion.

    Returns:
        One reply per sample; for one without content `EmptyChoices`, or `Truncated` if its reasoning reached ``max_tokens``.

    Raises:
        NotAChat: not JSON, or another schema.
        Refused: the provider's policy declined the whole request.
        EmptyChoices: no choices.
    """
    if (body := parse(raw)) is None:
        raise NotAChat(f"not JSON but {_excerpt(raw.decode('utf-8', 'replace'))}")
    if error := stated_error(body):
        # Refusals are the only errors ever stored (`rge.calls.failures`).
        raise Refused(_excerpt(str(error.get("message") if isinstance(error, dict) else error)))
    choices = as_dict(body).get("choices")
    if not isinstance(choices, list):
        raise NotAChat(f"unexpected JSON: {_excerpt(json.dumps(body))}")
    if not choices:
        raise EmptyChoices("the answer has no choices")
    return [_choice(as_dict(choice)) for choice in choices]


def lack(raw: bytes) -> ReplyError | None:
    """Why the body of a response answers nothing: no chat completion, or none of its samples has content; None: it does."""
    try:
        replies = read_replies(raw)
    except Refused:
        return None
    except ReplyError as error:
        return error
    errors = [reply for reply in replies if isinstance(reply, ReplyError)]
    if len(errors) < len(replies):
        return None
    return next((error for error in errors if isinstance(error, Truncated)), errors[0])


def is_failure(body: Any) -> bool:
    """Whether a body is no answer even with status 200: an error, or an answer that the server broke off."""
    choices = dict_items(as_dict(body).get("choices"))
    return bool(stated_error(body)) or any(
        choice.get("error") or choice.get("finish_reason") in BROKEN_OFF for choice in choices
    )


def stated_error(body: Any) -> Any:
    """The error that a body states, an object or a text; falsy: none."""
    if isinstance(body, list) and body:  # Gemini wraps some errors in a list
        body = body[0]
    body = as_dict(body)
    return body.get("error") or (body if body.get("object") == "error" else None)  # the latter: vLLM's


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def dict_items(value: Any) -> list[dict[str, Any]]:
    """The JSON objects of a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _choice(choice: dict[str, Any]) -> Reply | ReplyError:
    # Gemini leaves the message out if it was filtered, or cut off while the model was thinking.
    message, stop = as_dict(choice.get("message")), str(choice.get("finish_reason") or "stop")
    if stop.startswith("content_filter"):  # Gemini: "content_filter: PROHIBITED_CONTENT"
        stop = "refusal"
    text = _without_thoughts(_text(message.get("content")))
    if isinstance(message.get("refusal"), str) and message["refusal"]:
        text, stop = message["refusal"], "refusal"
    # Probabilities of the first tokens are what some requests ask for, whatever these tokens are.
    listed = dict_items(as_dict(choice.get("logprobs")).get("content"))
    is_empty = not text.strip() and not any(token.get("top_logprobs") for token in listed)
    if is_empty and stop == "length":
        return Truncated("the answer was cut off by max_tokens before it had any content")
    if is_empty and stop != "refusal":
        return EmptyChoices(f"the answer has no content{_instead(message)} (finish_reason: {_excerpt(stop)})")
    return Reply(_as_tags(text, whole=stop != "length"), stop)


def _instead(message: dict[str, Any]) -> str:
    """What a message without content has, in words."""
    found = {
        "reasoning": _text(message.get("reasoning_content") or message.get("reasoning"))
        or _text(message.get("content")),
        "tool calls": message.get("tool_calls") or message.get("function_call"),
    }
    only = " and ".join(name for name, value in found.items() if value)
    return f", only {only}" if only else ""


def _text(content: Any) -> str:
    # Some servers return the text in parts, with thoughts as parts of another type.
    if isinstance(content, list):
        parts = [
            part.get("text", "")
            if part.get("type", "text") in ("text", "output_text")
            else ""
            if isinstance(part, dict)
            else part
            for part in content
        ]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _without_thoughts(text: str) -> str:
    """What follows a model's thoughts, if its server leaves them in the answer: they may hold drafts of it."""
    *before, answer = _THOUGHTS_END.split(text)
    if not before:
        return "" if _THOUGHTS.match(text.lstrip()) else answer
    return _END_OF_FINAL.sub("", answer)


def _as_tags(text: str, *, whole: bool) -> str:
    """Convert a JSON object to tags, even in a code fence or with minor faults such as a trailing comma."""
    fenced = _FENCED.search(text)
    source = fenced[1] if fenced else text.strip()
    if not source.startswith("{"):
        return text
    try:
        try:
            value = json.loads(source)
        except ValueError:
            value = json_repair.loads(source) if whole and source.endswith("}") else None
        return valid_unicode(_tagged(value)) if isinstance(value, dict) and value else text
    except RecursionError:  # a model that repeats itself
        return text


def _tagged(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"<{name}>{_tagged(inner)}</{name}>" for name, inner in value.items())
    if isinstance(value, list):
        return "\n".join(map(_tagged, value))
    return "" if value is None else str(value)


def usage(raw: bytes, expected: tuple[int, int]) -> Usage:
    """Tokens billed for an answer, even a malformed one; ``expected`` (input, output) replaces counts that are not reported."""
    value = parse(raw)
    body, refused = as_dict(value), bool(stated_error(value))
    reported = as_dict(body.get("usage"))

    def count(value: Any, default: int) -> int:
        return value if type(value) is int and 0 <= value < 2**31 else default

    # A refused request is not billed unless the provider reports tokens for it.
    num_input, num_output = (0, 0) if refused else expected
    num_input = count(reported.get("prompt_tokens"), num_input)
    num_output = count(reported.get("completion_tokens"), num_output)
    # Gemini and xAI bill thoughts as output, but report them in the total alone.
    num_output = max(num_output, count(reported.get("total_tokens"), 0) - num_input)
    cached = count(as_dict(reported.get("prompt_tokens_details")).get("cached_tokens"), 0)
    return Usage(num_input, num_output, min(cached, num_input), refused)


def check_complete(reply: Reply, last_tag: str) -> None:
    """Raise if an answer without its last tag is a refusal, an abstention or cut short.

    Raises:
        Refused: declined by the provider, or by the model in its own words.
        Abstained: the whole answer is an abstention.
        Truncated: cut at ``max_tokens``.
    """
    text = reply.text.strip()
    if f"</{last_tag}>".lower() in text.lower():
        return
    if text.upper().lstrip("*_\"' ").startswith("ABSTAIN"):
        raise (Declined if "SENSITIVE" in text.upper() else Abstained)(_excerpt(text))
    if reply.stop == "refusal" or _REFUSAL.match(text.replace("\u2019", "'")):
        raise Refused(_excerpt(text) if text else "declined without a reason")
    if reply.stop == "length":
        raise Truncated(f"the answer is cut off before </{last_tag}>")


def tag(text: str, name: str) -> str:
    """Content of a tag's last occurrence: models often draft in the format first. Raises `MissingTag`: missing or empty."""
    contents = re.findall(
        rf"<{re.escape(name)}>(.*?)</{re.escape(name)}>", text, flags=re.IGNORECASE | re.DOTALL
    )
    if not contents or not contents[-1].strip():
        raise MissingTag(f"<{name}> is {'empty' if contents else 'missing'} in {_excerpt(text)}", name)
    return " ".join(contents[-1].split())


def parse_choice(text: str, name: str, allowed: dict[str, Any]) -> Any:
    """The value that ``allowed`` gives for a tag's content.

    Raises:
        MissingTag: the tag is missing or empty.
        BadValue: its content is not allowed.
    """
    value = tag(text, name).strip(".*\"' ").lower()
    if value not in allowed:
        raise BadValue(f"<{name}> must be one of {', '.join(allowed)}; got {value[:60]!r}", name)
    return allowed[value]


def _excerpt(text: str) -> str:
    text = " ".join(text.split())
    return repr(text[:100] + ("..." if len(text) > 100 else ""))

"""Build the pipeline's prompts and parse their answers; the texts are files, see `data_prep.rmir.wording`."""

from collections.abc import Sequence
from typing import Any

from data_prep.rmir.arithmetic import ABSTAIN, FALSE, TRUE
from data_prep.rmir.config import RmirConfig
from data_prep.rmir.wording import FORM, wording
from rge.calls.request import Part, Picture, Request
from rge.calls.wire.replies import (
    Abstained,
    BadValue,
    MissingTag,
    Reply,
    ReplyError,
    check_complete,
    parse_choice,
    tag,
)

CAPTION_TASK, GENERATE_TASK, FILTER_TASK, JUDGE_TASK = (
    "Task: write a caption",
    "Task: write questions",
    "Task: check a question",
    "Task: judge an answer",
)
"""How the shipped prompts begin."""


class BreaksConstraint(ReplyError):
    """The filter rejected a question; the message is its reasoning."""

    kind = "breaks a constraint"


def caption_request(config: RmirConfig, picture: Picture) -> Request:
    """Ask for a caption."""
    text = wording(config.prompts).caption
    return _request(config.caption, (text, picture), (("caption", None),))


def generate_request(config: RmirConfig, picture: Picture) -> Request:
    """Ask for one question of each category."""
    texts, categories = wording(config.prompts), config.generate.categories
    text = texts.asked(categories, content_policy=config.generate.content_policy)
    example = (("query", None), ("target_desc", None), ("reasoning", None))
    blocks = ((f"Example_{texts.codes[category]}_1", example) for category in categories)
    return _request(config.generate, (text, picture), (("input_desc", None), *blocks))


def filter_request(config: RmirConfig, picture: Picture, query: str, target: str) -> Request:
    """Ask whether a question is valid."""
    text = wording(config.prompts).filter
    parts = (text, picture, f"<query>{query}</query>\n<target_desc>{target}</target_desc>")
    fields = (("input_desc", None), ("reasoning", None), ("is_valid", ("yes", "no")))
    return _request(config.filter, parts, fields)


def judge_request(
    config: RmirConfig, picture: Picture, query: str, target: Picture, model: str, sample: int
) -> Request:
    """Ask a judge whether a target answers a question."""
    text = wording(config.prompts).judge
    # The part that all candidates of a query share comes first, so that a provider's prompt cache covers it.
    parts = (f"{text}\n\nINPUT:", picture, f"<query>{query}</query>\nTARGET:", target)
    described = (("target_desc", None), ("input_desc", None), ("reasoning", None))
    fields = (*described, ("consistent", ("True", "False", "ABSTAIN")))
    return _request(config.judge, parts, fields, model=model, sample=sample)


def _request(
    settings: Any,
    parts: tuple[Part, ...],
    fields: tuple[tuple[str, Any], ...],
    model: str | None = None,
    sample: int = 0,
) -> Request:
    """A request with the sampling settings of a stage, and the format that its prompt, the first part, asks for."""
    form = str(parts[0]).partition(FORM)[2].partition(":\n")[2].partition("\n\n")[0].strip()
    sampling = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
    return Request(model or settings.model, parts, sample=sample, form=form, fields=fields, **sampling)


def read_caption(reply: Reply, max_words: int) -> str:
    """Extract the caption. Raises `ReplyError`: it is missing or too long, or the model abstained."""
    check_complete(reply, "caption")
    caption = tag(reply.text, "caption")
    if caption.upper().startswith("ABSTAIN"):
        raise Abstained("the model cannot tell what the picture shows")
    _check_length("caption", caption, max_words)
    return caption


def check_generated(reply: Reply, codes: Sequence[str], max_words: tuple[int, int]) -> None:
    """Raise the first category's error, unless some category has a usable question or an abstention."""
    errors = []
    for code in codes:
        try:
            read_generated(reply, code, max_words)
            return
        except Abstained:
            return
        except ReplyError as error:
            errors.append(error)
    raise errors[0]


def read_generated(reply: Reply, code: str, max_words: tuple[int, int]) -> dict[str, str]:
    """Extract the question of a kind, given by its code: ``query``, ``target_desc``, ``reasoning``, ``input_desc``.

    `max_words` are the limits of query and target. Raises `ReplyError`: it is missing or too long, or the model abstained.
    """
    name = f"Example_{code}_1"
    check_complete(reply, name)
    try:
        block = tag(reply.text, name)
    except MissingTag:
        raise MissingTag(f"no block <{name}>", name) from None
    found = {key: tag(block, key) for key in ("query", "target_desc", "reasoning")}
    if any(value.upper().startswith("ABSTAIN") for value in found.values()):
        raise Abstained(f"{code}: the writer abstains")
    for key, limit in zip(("query", "target_desc"), max_words, strict=True):
        _check_length(key, found[key], limit)
    return {**found, "input_desc": _optional(reply.text, "input_desc")}


def _check_length(name: str, text: str, max_words: int) -> None:
    if (num_words := len(text.split())) > max_words:
        raise BadValue(f"<{name}> has {num_words} words, more than {max_words}", name)


def read_filtered(reply: Reply) -> dict[str, str]:
    """``reasoning`` and ``input_desc`` of a valid question. Raises `BreaksConstraint`, or another `ReplyError`."""
    check_complete(reply, "is_valid")
    valid = parse_choice(reply.text, "is_valid", {"yes": True, "no": False})
    found = {key: _optional(reply.text, key) for key in ("reasoning", "input_desc")}
    if not valid:
        raise BreaksConstraint(found["reasoning"])
    return found


def read_judged(reply: Reply) -> tuple[str, str]:
    """Verdict and reasoning; an answer that abstains as a whole is also a verdict. Raises `ReplyError`: it is unreadable."""
    try:
        check_complete(reply, "consistent")
    except Abstained as error:
        return ABSTAIN, str(error)
    verdict = parse_choice(reply.text, "consistent", {"true": TRUE, "false": FALSE, "abstain": ABSTAIN})
    return verdict, _optional(reply.text, "reasoning")


def _optional(text: str, name: str) -> str:
    try:
        return tag(text, name)
    except ReplyError:
        return ""

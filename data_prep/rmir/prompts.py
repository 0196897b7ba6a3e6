"""Build the pipeline's prompts and parse their answers; the texts are files, see `data_prep.rmir.wording`."""

from collections.abc import Sequence
from typing import Any

from data_prep.rmir.arithmetic import ABSTAIN, FALSE, TRUE
from data_prep.rmir.wording import FORM, Wording
from rge.calls.replies import (
    Abstained,
    BadValue,
    MissingTag,
    Reply,
    ReplyError,
    check_complete,
    parse_choice,
    tag,
)
from rge.calls.request import Picture, Request

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


def caption_request(model: str, picture: Picture, *, texts: Wording, **settings: Any) -> Request:
    """Ask for a caption."""
    fields = (("caption", None),)
    return Request(model, (texts.caption, picture), form=_form(texts.caption), fields=fields, **settings)


def generate_request(
    model: str,
    picture: Picture,
    categories: Sequence[str],
    *,
    content_policy: bool,
    texts: Wording,
    **settings: Any,
) -> Request:
    """Ask for one question of each category."""
    codes = [texts.codes[category] for category in categories]
    text = texts.asked(list(categories), content_policy=content_policy)
    example = (("query", None), ("target_desc", None), ("reasoning", None))
    fields = (("input_desc", None), *((f"Example_{code}_1", example) for code in codes))
    return Request(model, (text, picture), form=_form(text), fields=fields, **settings)


def filter_request(
    model: str, picture: Picture, query: str, target: str, *, texts: Wording, **settings: Any
) -> Request:
    """Ask whether a question is valid."""
    fields = (("input_desc", None), ("reasoning", None), ("is_valid", ("yes", "no")))
    parts = (texts.filter, picture, f"<query>{query}</query>\n<target_desc>{target}</target_desc>")
    return Request(model, parts, form=_form(texts.filter), fields=fields, **settings)


def judge_request(
    model: str, picture: Picture, query: str, target: Picture, *, texts: Wording, **settings: Any
) -> Request:
    """Ask whether a target answers a question."""
    described = (("target_desc", None), ("input_desc", None), ("reasoning", None))
    fields = (*described, ("consistent", ("True", "False", "ABSTAIN")))
    # The part that all candidates of a query share comes first, so that a provider's prompt cache covers it.
    parts = (f"{texts.judge}\n\nINPUT:", picture, f"<query>{query}</query>\nTARGET:", target)
    return Request(model, parts, form=_form(texts.judge), fields=fields, **settings)


def _form(prompt: str) -> str:
    _, _, form = prompt.partition(FORM)
    return form.partition(":\n")[2].partition("\n\n")[0].strip()


def read_caption(reply: Reply, max_words: int) -> str:
    """Extract the caption.

    Raises:
        ReplyError: it is missing or too long, or the model abstained.
    """
    check_complete(reply, "caption")
    caption = tag(reply.text, "caption")
    if caption.upper().startswith("ABSTAIN"):
        raise Abstained("the model cannot tell what the picture shows")
    if (num_words := len(caption.split())) > max_words:
        raise BadValue(f"<caption> has {num_words} words, more than {max_words}")
    return caption


def check_generated(reply: Reply, codes: Sequence[str], max_query_words: int, max_target_words: int) -> None:
    """Check that an answer has at least one usable question or abstention.

    Raises:
        ReplyError: the first category's error, if all categories have one.
    """
    errors = []
    for code in codes:
        try:
            read_generated(reply, code, max_query_words, max_target_words)
            return
        except Abstained:
            return
        except ReplyError as error:
            errors.append(error)
    raise errors[0]


def read_generated(reply: Reply, code: str, max_query_words: int, max_target_words: int) -> dict[str, str]:
    """Extract the question of a kind, given by its code: ``query``, ``target_desc``, ``reasoning``, ``input_desc``.

    Raises:
        ReplyError: it is missing or exceeds the limits, or the model abstained.
    """
    name = f"Example_{code}_1"
    check_complete(reply, name)
    try:
        block = tag(reply.text, name)
    except MissingTag:
        raise MissingTag(f"no block <{name}>") from None
    found = {key: tag(block, key) for key in ("query", "target_desc", "reasoning")}
    if any(value.upper().startswith("ABSTAIN") for value in found.values()):
        raise Abstained(f"{code}: the writer abstains")
    for key, limit in (("query", max_query_words), ("target_desc", max_target_words)):
        if len(found[key].split()) > limit:
            raise BadValue(f"<{key}> has {len(found[key].split())} words, more than {limit}")
    return {**found, "input_desc": _optional(reply.text, "input_desc")}


def read_filtered(reply: Reply) -> dict[str, str]:
    """``reasoning`` and ``input_desc`` of a valid question.

    Raises:
        BreaksConstraint: the question is not valid.
        ReplyError: the answer cannot be parsed.
    """
    check_complete(reply, "is_valid")
    valid = parse_choice(reply.text, "is_valid", {"yes": True, "no": False})
    found = {key: _optional(reply.text, key) for key in ("reasoning", "input_desc")}
    if not valid:
        raise BreaksConstraint(found["reasoning"])
    return found


def read_judged(reply: Reply) -> tuple[str, str]:
    """Verdict and reasoning; an answer that abstains as a whole is also a verdict.

    Raises:
        ReplyError: the answer cannot be parsed.
    """
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

"""The words of errors that have fields: each kind is rendered once, here; other tests look at types, fields and what is named."""

import pickle
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import pytest
from pydantic import Field

from rge.calls.failures import Rejection
from rge.calls.wire.replies import ReplyError
from rge.common.errors import Fault, UserError
from rge.common.options import parse_options
from rge.content.media_errors import MediaError
from rge.content.pdf import PdfError
from rge.content.video import VideoError
from rge.data.sources import RecordError


@dataclass
class Options:
    out: str
    limit: Annotated[int, Field(gt=0)] = 1
    mode: Literal["fast", "slow"] = "fast"
    names: tuple[str, ...] = field(default=())


@pytest.mark.parametrize(
    ("words", "fault", "message"),
    [
        (["out=o", "limt=3"], Fault("unknown", "limt", ("limit",)), "unknown key limt; did you mean limit?"),
        ([], Fault("missing", "out"), "missing out=..."),
        (["out=o", "out=p"], Fault("twice", "out"), "out is given twice"),
        (
            ["out=o", "mode=quick"],
            Fault("choice", "mode", ("fast", "slow")),
            "mode must be one of fast, slow, got 'quick'",
        ),
        (["out=o", "limit=0"], Fault("range", "limit"), "limit must be > 0, got 0"),
        (["out=o", "limit=many"], Fault("type", "limit"), "limit must be an integer, got 'many'"),
    ],
)
def test_faults_of_options(words, fault, message):
    with pytest.raises(UserError) as caught:
        parse_options(Options, words)
    assert (caught.value.faults, str(caught.value)) == ((fault,), message)


def test_each_kind_of_fault_is_rendered():
    [mark] = [one for one in test_faults_of_options.pytestmark if one.name == "parametrize"]
    shown = {fault.kind for _, fault, _ in mark.args[1]} | {"value"}  # a value's reason is the caller's
    assert shown == {*get_args(Fault.__annotations__["kind"])}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MediaError("it is missing", "a.bin"), "file a.bin: it is missing"),
        (PdfError("it is damaged", "a.pdf"), "document a.pdf: it is damaged"),
        (
            PdfError("there is no such page", "a.pdf", 1234),
            "document a.pdf, page 1,234: there is no such page",
        ),
        (VideoError("it has no frames", "a.mp4"), "video a.mp4: it has no frames"),
        (RecordError("train.jsonl:1: id: needed"), "train.jsonl:1: id: needed"),
        (Rejection("too large", certain=False), "too large"),
    ],
)
def test_errors_with_fields(error, message):
    assert str(error) == message
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(copy), str(copy), vars(copy)) == (type(error), message, vars(error))


def test_kinds_of_replies_are_distinct_in_tables():
    def below(kind):
        return [one for child in kind.__subclasses__() for one in (child, *below(child))]

    named = {one: one.kind for one in (ReplyError, *below(ReplyError)) if "kind" in vars(one)}
    assert len({*named.values()}) == len(named)

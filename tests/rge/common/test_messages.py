"""The words of errors that have fields: each kind is rendered once, here; other tests look at types, fields and what is named."""

import importlib
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from pydantic import Field

from rge.calls.failures import FIX, AttemptFailed, Rejection, Stop, StopCalls, Unanswered
from rge.calls.wire.replies import MissingTag, ReplyError
from rge.common.errors import Fault, UserError
from rge.common.options import parse_options
from rge.content.pdf import PdfError

ROOT = Path(__file__).parents[3]


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


RENDERED = {
    "ImageError": "picture a:1234: key: why",
    "MediaError": "file a, page 1,234: key: why",
    "LimitError": "file a, page 1,234: key: why",
    "PdfError": "document a, page 1,234: key: why",
    "VideoError": "video a, page 1,234: key: why",
    "TableError": "a, line 1234: key: why",
    "StoreError": "a, line 1234: key: why",
    "RankError": "failure of rank a:1234: key: why",
    "StopCalls": "a: key: why",
    "BudgetReached": "a: key: why",
}
"""Of the errors that name their file in their own way."""


def every_kind(of: type) -> set[type]:
    """An error and those derived from it, but for those of other packages and tests that ran before."""
    return {of}.union(*map(every_kind, (kind for kind in of.__subclasses__() if "rge." in kind.__module__)))


def test_all_errors_that_a_user_can_fix():
    for path in (*(ROOT / "rge").rglob("*.py"), *(ROOT / "eval").rglob("*.py")):
        if re.search(r"^class \w+\(.*Error\b.*\):", path.read_text(), re.M):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds = every_kind(UserError)
    assert {kind.__name__ for kind in kinds} >= {*RENDERED}
    for kind in kinds:
        error = kind("why", "a", 1234, "key", "short")
        assert str(error) == RENDERED.get(kind.__name__, "a:1234: key: why")
        assert_pickles(error)


def assert_pickles(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("why"), "why"),
        (UserError("why", key="lr"), "lr: why"),
        (UserError("why", place="row 3"), "row 3: why"),
        (UserError("why", Path("a.csv"), "row 3"), "a.csv, row 3: why"),
        (UserError("why").about("lr"), "why"),
        (PdfError("it is missing", ""), "document: it is missing"),
        (Rejection("too large", certain=False), "too large"),
        (MissingTag("<x> is empty", "x"), "<x> is empty"),
        (AttemptFailed("no answer within 3 s", num=2), "no answer within 3 s (2 attempts)"),
        (StopCalls("HTTP 401", "m", 401, kind="key"), f"m: HTTP 401. {FIX['key']}"),
    ],
)
def test_fields_that_are_left_out(error, message):
    assert str(error) == message
    assert_pickles(error)


def test_each_reason_to_stop_has_a_fix():
    assert {*FIX} == {*get_args(Stop)}
    assert str(Unanswered("m", AttemptFailed("no connection"))) == "m: no connection"


def test_kinds_of_replies_are_distinct_in_tables():
    def below(kind):
        return [one for child in kind.__subclasses__() for one in (child, *below(child))]

    named = {one: one.kind for one in (ReplyError, *below(ReplyError)) if "kind" in vars(one)}
    assert len({*named.values()}) == len(named)

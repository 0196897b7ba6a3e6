from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import error_about

from rge.common.errors import UserError
from rge.common.options import one_of, parse_options


@dataclass
class Options:
    out: Path
    names: tuple[str, ...] = ("a",)
    limit: int | None = None
    rate: float = 0.5
    deep: bool = False
    word: str = "x"


def test_every_type():
    words = ["out=x/y=z", "names=a, b", "limit=3", "rate=1e-3", "deep=true", "word=null"]
    assert parse_options(Options, words) == Options(Path("x/y=z"), ("a", "b"), 3, 0.001, True, "null")
    assert parse_options(Options, ["out=o", "limit=null"]) == Options(Path("o"))
    assert parse_options(Options, ["out=o", "limit=010"]).limit == 10  # YAML 1.1 would say eight
    assert parse_options(Options, ["out=o", "limit=08"]).limit == 8


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = parse_options(Options, ["out=~/o", "names=~/a, ~/b", "word=~/c"])
    assert found == Options(Path("/home/me/o"), ("/home/me/a", "/home/me/b"), word="/home/me/c")
    assert parse_options(Options, ["out=o", "word=about ~/c"]).word == "about ~/c"


def test_only_one_whole_quoted_text_is_read_without_its_quotes():
    def word(text):
        return parse_options(Options, ["out=o", f"word={text}"]).word

    assert [word("'a '"), word("'it''s'"), word('"a\\tb"'), word("''")] == ["a ", "it's", "a\tb", ""]
    for text in ("'p' < id and album = 'x'", "'key' or 'lock'", '"a" or "b"', "'a' # 'b'", "'it's'"):
        assert word(text) == text
    assert parse_options(Options, ["out=o", "names='a', 'null'"]).names == ("a", "null")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["out=o", "limt=3"], ("unknown", "limt", ("limit",))),
        (["out=o", "zzz=3"], ("unknown", "zzz", ())),
        (["out=o", "--limit"], "argument"),
        (["out=o", "out=p"], ("twice", "out")),
        (["limit=3"], ("missing", "out")),
        (["out=o", "limit=many"], ("type", "limit")),
        (["out=o", "rate=high"], ("type", "rate")),
        (["out=o", "deep=maybe"], ("type", "deep")),
        (["out="], ("missing", "out")),
        (["out=Bilder_f\udcfcr"], "encoding"),
    ],
)
def test_wrong_words_are_refused(words, fault):
    with error_about(UserError, fault):
        parse_options(Options, words)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (("reasonin",), ("choice", "mode", ("reasoning", "direct"))),
        (("direct", "direct"), ("value", "mode")),
        ((), ("value", "mode")),
    ],
)
def test_one_of(values, fault):
    with error_about(UserError, fault):
        one_of("mode", values, ("reasoning", "direct"))

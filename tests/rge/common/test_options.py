from dataclasses import dataclass
from pathlib import Path

import pytest

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
    ("words", "message"),
    [
        (["out=o", "limt=3"], "unknown key limt; did you mean limit\\?"),
        (["out=o", "zzz=3"], "unknown key zzz; there are: deep, limit, names, out"),
        (["out=o", "--limit"], "arguments must be key=value, got '--limit'"),
        (["out=o", "out=p"], "out is given twice"),
        (["limit=3"], "missing out=..."),
        (["out=o", "limit=many"], "limit must be an integer, got 'many'"),
        (["out=o", "rate=high"], "rate must be a number, got 'high'"),
        (["out=o", "deep=maybe"], "deep must be true or false, got 'maybe'"),
        (["out="], "out needs a value: out=..."),
        (["out=Bilder_f\udcfcr"], r"'out=Bilder_f\\udcfcr' is not UTF-8: rename"),
    ],
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse_options(Options, words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("reasonin",), "mode must be one of reasoning, direct, got 'reasonin'; did you mean 'reasoning'\\?"),
        (("direct", "direct"), "mode must list at least one value and each only once"),
        ((), "mode must list at least one"),
    ],
)
def test_one_of(values, message):
    with pytest.raises(UserError, match=message):
        one_of("mode", values, ("reasoning", "direct"))

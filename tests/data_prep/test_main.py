"""The command line of data_prep."""

import pytest

from data_prep.__main__ import main
from data_prep.options import read_options
from rge.common.errors import UserError


def test_unknown_command_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown command 'dmeo'; did you mean 'demo'\?"):
        main(["dmeo"])


def test_no_command_lists_them():
    with pytest.raises(UserError, match="expected a command: python -m data_prep .*demo"):
        main([])


def test_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown key 'ouut'; did you mean 'out'\? \(known: out, icons\)"):
        main(["demo", "ouut=here"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out"], "out needs a value"),
        (["out="], "out needs a value"),
        (["out=a", "out=b"], "out is given twice"),
    ],
)
def test_bad_words(words, message):
    with pytest.raises(UserError, match=message):
        read_options(words, ["out"])


def test_value_may_contain_the_mark():
    assert read_options(["out=a=b"], ["out"]) == {"out": "a=b"}

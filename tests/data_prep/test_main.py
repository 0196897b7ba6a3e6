"""The command line of data_prep."""

import pytest
from faults import error_about

from data_prep.__main__ import COMMANDS, main
from rge.common.errors import UserError


def test_unknown_command_names_the_nearest():
    with error_about(UserError, "dmeo"):
        main(["dmeo"])


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0)])
def test_without_a_command_all_are_listed(words, code, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_unknown_key_names_the_nearest():
    with error_about(UserError, ("unknown", "ouut", ("out",))):
        main(["demo", "ouut=here"])

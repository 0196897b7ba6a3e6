"""How commands end and show progress: exit codes by one rule, an output that nobody reads, a bar that goes to a file."""

import io
import os
import signal
import subprocess
import sys
import termios
import time
import warnings
from contextlib import suppress
from importlib.metadata import packages_distributions

import pytest
from paths import ROOT

from rge.common import commands
from rge.common.commands import progress_bar, start
from rge.common.errors import BUG, UserError
from rge.distributed.failure_detection import RankError


def raises(error: BaseException):
    def main(words: list[str]) -> int:
        raise error

    return main


def failed_elsewhere(code: int) -> RankError:
    error = RankError("KeyError: 'x'", 3, "h")
    error.exit_code = code
    return error


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        (lambda words: None, 0, ""),
        (lambda words: 1, 1, ""),  # the answer is no
        (raises(UserError("key=3: wrong")), 2, "error: key=3: wrong\n"),
        (raises(SystemExit(143)), 143, ""),  # stopped by a signal, with a state
        (raises(KeyboardInterrupt()), 130, ""),
        (
            raises(failed_elsewhere(1)),
            1,
            "error: failure of rank 3, h: KeyError: 'x'\n",
        ),  # as the other one ended
        (raises(failed_elsewhere(2)), 2, "error: failure of rank 3, h: KeyError: 'x'\n"),
    ],
)
def test_exit_codes(main, code, said, capsys):
    with pytest.raises(SystemExit) as ended:
        start(main)
    assert ended.value.code == code
    assert capsys.readouterr().err == said


def test_a_warning_is_one_line_that_names_the_library(capsys, tmp_path):
    def main(words: list[str]) -> None:
        flawed = tmp_path / "site-packages/PIL/Tiff.py"
        warnings.warn_explicit("Corrupt EXIF data.  Expecting\nmore", UserWarning, str(flawed), 7)
        warnings.warn_explicit("x" * 3000, UserWarning, str(tmp_path / "site-packages/other/a.py"), 7)
        warnings.warn("prompts were shortened", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            start(main)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: a picture has a flaw")
    assert lines[0].endswith("Corrupt EXIF data. Expecting more (from PIL)")
    assert len(lines[1]) < 300
    assert lines[2:] == ["warning: prompts were shortened"]


@pytest.mark.parametrize("bug", [KeyError("x"), BrokenPipeError(), OSError("no file")])
def test_a_bug_keeps_its_traceback(bug, capsys):  # the pipe is not the output's
    with pytest.raises(SystemExit) as ended:
        start(raises(bug))
    assert ended.value.code == BUG
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert type(bug).__name__ in said


PRINTS = "import sys; from rge.common.commands import start; start(lambda words: {})"
ENDINGS = {
    "more than a pipe holds": "print('x\\n' * 200_000)",
    "what is written at the end": "print('x')",
    "help": "(print('x'), sys.exit(0))",
    "errors": "(sys.stderr.write('x\\n' * 200_000), 0)[1]",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_output_that_nobody_reads_is_no_traceback(ending):
    here, there = os.pipe()
    os.close(here)
    to = {"stderr": there} if ending == "errors" else {"stdout": there, "stderr": subprocess.PIPE}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS.format(ENDINGS[ending])], **to, check=False, timeout=60
    )
    os.close(there)
    assert done.returncode == 128 + signal.SIGPIPE
    assert not done.stderr


def shown(monkeypatch, capsys, steps: int, seconds: float) -> list[str]:
    monkeypatch.setattr(commands, "LINE_S", 0.1)
    bar = progress_bar(total=steps, desc="joint", unit="step", dynamic_ncols=True)
    for step in range(steps):
        time.sleep(seconds / steps)
        bar.set_postfix({"loss": step}, refresh=False)
        bar.update(1)
    bar.close()
    err = capsys.readouterr().err
    assert "\r" not in err
    return err.splitlines()


def test_a_bar_in_a_file_is_a_line_now_and_then(monkeypatch, capsys):
    start = time.monotonic()
    lines = shown(monkeypatch, capsys, steps=200, seconds=0.6)
    assert 3 <= len(lines) <= 2 + (time.monotonic() - start) / 0.1  # a busy machine takes longer
    assert all(line.startswith("joint: ") and "loss=" in line for line in lines)
    assert "200/200" in lines[-1]
    assert shown(monkeypatch, capsys, steps=20, seconds=0.01) == []


def test_a_bar_on_a_terminal_is_written_over():
    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, 80))
    code = (
        "from rge.common.commands import progress_bar\nfor _ in progress_bar(range(3), mininterval=0): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=there)
    os.close(there)
    written = b""
    with suppress(OSError):  # how a terminal ends
        while part := os.read(here, 10_000):
            written += part
    os.close(here)
    assert process.wait(60) == 0
    assert written.count(b"\r") > 3


@pytest.mark.parametrize(
    "place", ["file/out", "file", "n" * 300], ids=["below a file", "a file", "a long name"]
)
def test_a_folder_that_cannot_be_made_is_one_message(place, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        commands.start(lambda _: (tmp_path / place).mkdir(parents=True))
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path / 'file' if place[0] == 'f' else tmp_path / place}"
    )


BROUGHT = {
    "annotated_types", "pydantic", "pydantic_core", "rge", "rge_torchvision_hook", "tqdm", "typing_extensions",
    "typing_inspection", "yaml",
}  # fmt: skip
"""Packages that a recipe's keys need. All others wait until the command line is known to be right."""


@pytest.mark.parametrize(
    "command", [["rge/train.py"], ["-m", "rge", "train"], ["-m", "rge.check"], ["-m", "rge", "check"]]
)
@pytest.mark.parametrize(("words", "code"), [(["recipe=demo", "joint.lrr=1"], 2), (["--help"], 0)])
def test_the_command_line_is_answered_before_anything_heavy_is_imported(command, words, code):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    imported = {line.split("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "| " in line}
    installed = imported & set(packages_distributions())
    assert installed <= BROUGHT | {"_distutils_hack"}


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_terminal_cannot_show_is_printed_with_escapes(encoding, errors, monkeypatch):
    """As with `PYTHONIOENCODING=ascii`, in the locale C, or for the name of a file that is not UTF-8."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as ended:
        start(lambda words: print("1  Göteborg 東京 \udcff.png"))  # noqa: T201
    assert ended.value.code == 0
    shown = {
        "ascii": r"G\xf6teborg \u6771\u4eac",
        "latin-1": r"Göteborg \u6771\u4eac",
        "utf-8": "Göteborg 東京",
    }
    assert out.buffer.getvalue().decode(encoding) == rf"1  {shown[encoding]} \udcff.png" + "\n"


def test_a_choice_of_the_user_for_such_characters_stays(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii", "replace")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        start(lambda words: print("ö"))  # noqa: T201
    assert out.buffer.getvalue() == b"?\n"

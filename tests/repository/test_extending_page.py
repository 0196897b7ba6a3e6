"""docs/extending.md is run as it is printed: each chapter in an empty folder, its files written, its commands run."""

import re
import subprocess
from pathlib import Path

import pytest
import typed
from paths import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CHAPTERS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.M)[1:])] * 2, strict=True))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter(chapter, tmp_path):
    """A block with a title is a file, ``bash`` is run, ``text`` after it is what the output has to contain."""
    blocks = BLOCK.findall(CHAPTERS[chapter])
    assert {"bash", "text"} <= {kind for kind, _, _ in blocks}, "a chapter without a command shows nothing"
    with typed.commands(tmp_path / "commands", PYTHONPATH=str(ROOT)) as env:
        (tmp_path / "here").mkdir()
        run(blocks, tmp_path / "here", env)


def run(blocks: list[tuple[str, str, str]], folder: Path, env: dict[str, str]) -> None:
    said = ""
    for kind, title, content in blocks:
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(content, encoding="utf-8")
        elif kind == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", content],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
            said = done.stdout
        elif kind == "text":
            for line in filter(None, map(str.strip, content.splitlines())):
                assert line in said, f"{line!r} is not in\n{said}"
        else:
            pytest.fail(f"a block of {kind} is neither a file (title=) nor a command")


def test_every_kind_of_extension_has_a_chapter():
    """The table at the top names what can be added; each has a heading."""
    kinds = re.findall(r"^\| (an? [\w ]+) \|", PAGE, flags=re.M)
    headings = {heading.lower() for heading in re.findall(r"^### (.+)$", PAGE, flags=re.M)}
    assert kinds
    assert {*kinds} - {"a reward"} <= headings
    assert "rl.md#rewards" in PAGE  # its own page, whose example tests/rge/rl/test_rewards.py runs

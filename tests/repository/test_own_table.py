"""docs/own_data.md, "Train on your own table": the files and commands as they are printed."""

import re
import subprocess

import pytest
import typed
from paths import ROOT

PAGE = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
CHAPTER = PAGE.split("## Train on your own table")[1]


@pytest.mark.slow
def test_a_table_trains_as_it_is_printed(tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name, text in re.findall(
        r'^```(?:csv|yaml) title="(.*?)"\n(.*?)^```$', CHAPTER, flags=re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (commands,) = re.findall(r"^```sh.*?\n(.*?)^```$", CHAPTER, flags=re.MULTILINE | re.DOTALL)
    with typed.commands(tmp_path / "commands", PYTHONPATH=str(ROOT)) as env:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/table/joint/final/rge.json").is_file()

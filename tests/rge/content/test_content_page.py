"""docs/content.md, as it is printed: its parts, its Python, and its three commands."""

import json
import os
import re
import subprocess

import pytest
import typed
from clips import clip
from paths import ROOT
from pdfs import GREEN, RED, page, pdf
from PIL import Image

from rge.common.parts import parts_from_json

PAGE = (ROOT / "docs" / "content.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_each_kind_of_part_of_the_table_is_one():
    shown = [json.loads(part) for part in re.findall(r"^\| `(\{.*?\})` \|", PAGE, flags=re.MULTILINE)]
    assert [*map(set, shown)] == [{"text"}, {"image"}, {"video"}, {"pdf"}]
    assert len(parts_from_json(shown)) == 4


@pytest.fixture
def files(tmp_path):
    """The files that the page names."""
    manual = pdf([page(f"page {number}: valve", RED) for number in range(1, 13)])
    (tmp_path / "manuals").mkdir()
    (tmp_path / "manual.pdf").write_bytes(manual)
    (tmp_path / "manuals" / "heating.pdf").write_bytes(manual)
    (tmp_path / "clip.mp4").write_bytes(clip(range(0, 30_000, 500)))
    Image.new("RGB", (60, 40), GREEN).save(tmp_path / "photo.jpg")
    return tmp_path


@pytest.mark.slow
def test_the_python_runs(files, monkeypatch):
    monkeypatch.chdir(files)
    names: dict = {}
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "docs/content.md", "exec"), names)  # our own page
    assert f'num_pages("manual.pdf")  # {names["pdf"].num_pages("manual.pdf")}\n' in PAGE
    assert names["query"].shape == (128,)
    assert names["clips"].shape == (2, 128)
    assert names["page"].size == (400, 200)
    assert (
        len(names["frames"].images)
        == len(names["frames"].seconds)
        == names["count"]("clip.mp4", names["rule"], start=10, end=20)
    )


@pytest.mark.slow
def test_a_folder_of_documents_is_searched_in_three_commands(files):
    pytest.importorskip("lancedb", exc_type=ImportError)
    [commands] = [block for language, block in BLOCKS if not language and block.startswith("rge index")]
    with typed.commands(files / "commands", PYTHONPATH=str(ROOT)) as env:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=files,
            env=os.environ | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"11", "12"} <= {*re.findall(r"heating\.pdf#page=(\d+)", done.stdout)}

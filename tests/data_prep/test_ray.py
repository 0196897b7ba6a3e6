"""Daft's Ray runner. Ray is an extra (``pip install -e '.[ray]'``): without it only the refusal is tested."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import daft
import pytest

from data_prep.rmir import frames, oracle
from rge.common.errors import UserError
from rge.common.images import picture_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"runner=ray needs Ray: pip install -e '.\[ray\]'"):
        frames._choose_runner.__wrapped__("ray")


def test_a_process_has_one_runner(monkeypatch):
    def refuse(**_):
        raise daft.exceptions.DaftCoreException("Cannot set runner more than once")

    frames._choose_runner("native")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(daft, "set_runner_ray", refuse)
    with pytest.raises(UserError, match="Daft's runner of this process is native already"):
        frames._choose_runner.__wrapped__("ray")


def drawings(folder: Path) -> None:
    """One drawing of each concept as a file, a table that lists them by relative paths, and two that cannot be used."""
    oracle.write_library(folder / "all.csv")
    (folder / "pictures").mkdir()
    with (
        (folder / "all.csv").open(newline="") as lines,
        (folder / "library.csv").open("w", newline="") as out,
    ):
        rows = csv.writer(out)
        rows.writerow(["id", "image", "caption"])
        for row in csv.DictReader(lines):
            if row["id"].startswith("noto/"):
                name = f"pictures/{row['id'].replace('/', '-')}.webp"
                (folder / name).write_bytes(picture_bytes(row["image"]))
                rows.writerow([row["id"], name, row["caption"]])
        (folder / "pictures" / "text.webp").write_text("no picture")
        rows.writerows([["text", "pictures/text.webp", ""], ["lost", "pictures/lost.webp", ""]])


@pytest.mark.slow
def test_one_setting_gives_the_same_on_ray(tmp_path):
    """All stages, by each runner in a process of its own; every table and record is the same."""
    pytest.importorskip("ray", reason="the extra ray")
    drawings(tmp_path)
    words = (
        "rmir config=demo split.tsr_threshold=1 library.path=library.csv library.shard_size=100 generate.max_inputs=6 seed.clusters=12 "
        "seed.per_cluster=30 image_encoder={kind:_pixels} caption_encoder={kind:_hashing}"
    )
    for runner in ("native", "ray"):
        command = [sys.executable, "-m", "data_prep", *words.split(), f"out={runner}", f"runner={runner}"]
        subprocess.run(
            [word.replace(":_", ": ") for word in command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            check=True,
        )
    for table, schema in (("seed/inspected", "inspected"), ("keep/decided.parquet", "decided")):
        rows = {runner: frames.read_rows(tmp_path / runner / table, schema) for runner in ("native", "ray")}
        assert len(rows["native"]) > 100
        assert rows["ray"] == rows["native"]
    reasons = [
        row["reason"] for row in frames.read_rows(tmp_path / "ray" / "seed" / "inspected", "inspected")
    ]
    assert reasons[-2:] == ["unreadable", "missing"]
    assert (tmp_path / "ray" / "dataset" / "train.jsonl").read_text().count('"positives"') > 1
    for name in ("seed/images.npy", "dataset/train.jsonl"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "native" / name).read_bytes()

"""Daft's Ray runner. Ray is an extra (``pip install -e '.[ray]'``): without it only the refusal is tested."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import daft
import pyarrow.parquet as pq
import pytest
from paths import ROOT

from data_prep.rmir import frames, oracle
from rge.common.errors import UserError
from rge.common.images import picture_bytes


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


NOTES = """
import os
from pathlib import Path

def note(what):
    from ray import get_runtime_context
    node = get_runtime_context().get_node_id()
    (Path(os.environ["NOTES"]) / f"{what} {node} {os.getpid()}").touch()

def looked(image):
    if os.environ["RUNNER"] == "ray":
        note("looked")
"""
"""A filter (`library.filters`) that objects to nothing and notes which node's process it was called in."""

PROGRAM = """
import os, sys
from data_prep.__main__ import main
from data_prep.rmir.pictures import cluster
from notes import note

build = cluster.image_encoder

def watched(config):  # travels to the workers as it is, since it is no module's
    encoder = build(config)
    pictures = encoder.pictures
    def noted(refs):
        note("embedded")
        return pictures(refs)
    encoder.pictures = noted
    return encoder

cluster.image_encoder = watched
main(sys.argv[1:])
"""
"""The command line, which notes who embeds."""


@pytest.fixture
def two_workers(monkeypatch):
    """A cluster of two nodes with one core each on this machine; ends with the test."""
    pytest.importorskip("ray", reason="the extra ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # By itself Ray gives them 15, with which they stand still on a machine that has other work.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes(timeout=60)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_two_workers_share_the_work_and_the_result_is_that_of_none(tmp_path, monkeypatch, request):
    """All stages, by each runner in a process of its own; every table, vector, record and picture is the same."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    drawings(folder)
    notes, code = tmp_path / "notes", tmp_path / "code"
    notes.mkdir()
    code.mkdir()
    (code / "notes.py").write_text(NOTES)
    # Ray's workers get the environment of the node that starts them.
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("RUNNER", "ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT) + os.pathsep + str(code), prepend=os.pathsep)
    request.getfixturevalue("two_workers")
    words = [
        *"rmir config=demo split.tsr_threshold=1 library.path=library.csv library.shard_size=100 generate.max_inputs=6".split(),
        *"seed.clusters=12 seed.per_cluster=30 library.filters=[notes:looked] caption.model=writer".split(),
        "image_encoder={kind: pixels, batch_size: 16}",
        "caption_encoder={kind: hashing}",
    ]
    for runner in ("native", "ray"):
        start = ["-c", PROGRAM] if runner == "ray" else ["-m", "data_prep"]
        subprocess.run(
            [sys.executable, *start, *words, f"out={runner}", f"runner={runner}"],
            cwd=folder,
            env={**os.environ, "RUNNER": runner},
            check=True,
            timeout=400,
        )
    by = [path.name.split() for path in notes.iterdir()]
    for what in ("looked", "embedded"):
        assert len({node for done, node, _ in by if done == what}) == 2, f"{what}: {by}"
    made = {runner: results(folder / runner) for runner in ("native", "ray")}
    assert made["ray"].keys() == made["native"].keys()
    assert [name for name, found in made["ray"].items() if found != made["native"][name]] == []
    names = (
        "seed/images.npy",
        "caption/captions.npy",
        "judge/judgements/part-00000.parquet",
        "dataset/train.jsonl",
    )
    assert made["ray"].keys() >= {*names}
    inspected = frames.read_rows(folder / "ray" / "seed" / "inspected", "inspected")
    assert len(inspected) > 200
    assert [row["reason"] for row in inspected[-2:]] == ["unreadable", "missing"]
    assert (folder / "ray" / "dataset" / "train.jsonl").read_text().count('"positives"') > 1


def results(out: Path) -> dict[str, object]:
    """What a run wrote, the pages about it apart: tables by their rows, all else by its bytes."""
    return {
        str(path.relative_to(out)): pq.read_table(path) if path.suffix == ".parquet" else path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.suffix in (".parquet", ".npy", ".jsonl", ".webp")
    }

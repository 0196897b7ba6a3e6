"""Collections embedded by Ray Data: the rows of one process, also when a machine dies on the way."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from eval_fakes import picture, write_set
from faults import error_about
from PIL import Image
from small_runs import config_of

from data_prep.__main__ import main as prepare_data
from data_prep.rmir.config import EncoderConfig
from data_prep.rmir.main import run_stages
from data_prep.rmir.run import Run
from eval.commands.run import RunOptions, run_command
from rge.distributed import ray_data
from rge.distributed.ray_data import RayError
from rge.index import blocks
from rge.index.__main__ import main as index
from rge.index.embed import main as embed


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with error_about(RayError, "not installed"):
        next(ray_data.mapped(list, [1], address=None))
    assert list(ray_data.mapped(list, [], address=None)) == []


def test_what_never_comes_is_an_error(monkeypatch):
    monkeypatch.setattr(ray_data, "WAIT_S", 0.1)
    blocked = threading.Event()
    with error_about(RayError, "silent"):
        next(ray_data._within_time(iter(lambda: blocked.wait(60), None)))
    blocked.set()
    assert list(ray_data._within_time(iter([1, 2]))) == [1, 2]


def test_blocks_are_whole_windows(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 10)
    assert [list(block) for block in blocks.blocks_of(range(9), batch_size=1)] == [[*range(8)], [8]]
    assert [len(block) for block in blocks.blocks_of(range(30), batch_size=3)] == [12, 12, 6]


SETTINGS = ["checkpoint=demo", "batch_size=1"]
NOTED = """
import os, time
from rge.index import blocks
from rge.index.reading import Reader

blocks.BLOCK_ROWS = 4
embed = Reader.vectors

def noted(self, prepared):
    with open({log!r}, "a") as file:
        file.write("".join(item.entry.id + "\\n" for item in prepared))
    time.sleep(0.3)
    return embed(self, prepared)

Reader.vectors = noted
"""
"""A plugin that writes down what is embedded, slowly."""


@pytest.fixture(scope="module")
def two_nodes():
    """A function that returns a cluster of two nodes with one CPU each; a node that was killed is replaced."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("lancedb", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)

    def complete():
        while len(cluster.list_all_nodes()) < 2:
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        return cluster

    try:
        yield complete
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of 48 pictures, one of them unreadable, and a text; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(48):
        Image.new("RGB", (30 + number, 40), (5 * number, 0, 90)).save(folder / f"{number:02}.png")
    (folder / "07.png").write_bytes(b"x")
    (folder / "a.txt").write_text("a padlock")
    return folder


def rows_of(index):
    from rge.index.store import Index

    return Index.open(index)._table.to_arrow().sort_by("id")


@pytest.mark.slow
def test_a_cluster_of_two_of_which_one_dies(tmp_path, photos, two_nodes):
    """Embedded by two machines, then by the one that is left; an unreadable picture is counted as in one process."""
    embed(["photos", "out=one.parquet", "unreadable=one.tsv", *SETTINGS])
    cluster = two_nodes()

    def kill_one():
        while not list(tmp_path.glob("many.parquet.parts/*.parquet")):
            time.sleep(0.02)
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    on_ray = ["engine=ray", f"address={cluster.address}"]
    embed(["photos", "out=many.parquet", "unreadable=many.tsv", *SETTINGS, *on_ray])
    killer.join(timeout=60)
    assert len(cluster.list_all_nodes()) == 1
    for name in ("one", "many"):
        assert (tmp_path / f"{name}.tsv").read_text().split("\t")[0] == "07.png"
    one, many = (pq.read_table(f"{name}.parquet") for name in ("one", "many"))
    assert len(many) == 48
    assert many.equals(one)


@pytest.mark.slow
def test_the_driver_is_killed_and_its_command_said_again(tmp_path, photos, two_nodes):
    """Only blocks that were being embedded are embedded again; an index has nothing before it has all."""
    index(["photos", "out=one", *SETTINGS])
    (tmp_path / "noted.py").write_text(NOTED.format(log=str(tmp_path / "log")))
    words = [
        sys.executable,
        "-m",
        "rge",
        "index",
        "photos",
        "out=many",
        *SETTINGS,
        "plugins=noted",
        "engine=ray",
    ]
    words += [f"address={two_nodes().address}"]
    driver, finished = subprocess.Popen(words), tmp_path / "many.parts"
    while len(list(finished.glob("*.parquet"))) < 3:
        assert driver.poll() is None
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    before = {path: path.stat().st_ino for path in finished.glob("*.parquet")}
    assert len(before) < 12
    assert not len(rows_of("many"))
    again = subprocess.Popen(words)
    while again.poll() is None:
        with suppress(FileNotFoundError):  # the last step removes them
            assert {path: path.stat().st_ino for path in before} == before
        time.sleep(0.1)
    assert again.returncode == 0
    assert not finished.exists()
    embedded = Counter((tmp_path / "log").read_text().split())
    # A device holds one block, and may have taken the next one before it ends.
    assert len(embedded) == 48
    assert sum(embedded.values()) - 48 <= 2 * 2 * 4
    assert rows_of("many").equals(rows_of("one"))
    # Where all is done, no cluster is needed.
    assert index(["photos", "out=many", *SETTINGS, "engine=ray"]) == 0


@pytest.mark.slow
def test_an_evaluation_and_mined_negatives_are_those_of_one_process(tmp_path, monkeypatch, two_nodes):
    """Shards written by the devices hold the same rows, so that rankings and negatives are the same."""
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "set", num_queries=8, num_candidates=12)
    records = []
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        positive = {"id": f"t{number}", "image": f"{number}.png"}
        records.append({"id": f"r{number}", "query": {"text": f"question {number}"}, "positives": [positive]})
    Path("in.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for out, more in (("one", {}), ("many", {"engine": "ray", "address": two_nodes().address})):
        options = {"query_mode": ("direct",), "batch_size": 1, "report": False, **more}
        run_command(RunOptions(checkpoint=Path("demo"), set=Path("set"), out=Path(out), **options))
        words = [*(f"{key}={value}" for key, value in more.items()), "query_mode=direct", "batch_size=1"]
        prepare_data(["negatives", "checkpoint=demo", "records=in.jsonl", f"out={out}.jsonl", *words])
    for name in ("/run.trec", ".jsonl"):
        assert Path(f"one{name}").read_bytes() == Path(f"many{name}").read_bytes()
    for cache, num_shards in (("/.cache", 3), (".jsonl.cache", 2)):
        one, many = (sorted(Path(f"{out}{cache}").glob("*/*.parquet")) for out in ("one", "many"))
        assert [path.name for path in one] == [path.name for path in many]
        assert len(one) == num_shards
        for paths in zip(one, many, strict=True):
            ours, theirs = (pq.read_table(path).drop_columns(["generate_ms", "embed_ms"]) for path in paths)
            assert ours.equals(theirs)
    # The devices' software counts, as if this process had embedded.
    about = [json.loads(path.read_text()) for path in sorted(Path("many/.cache").glob("*/about.json"))]
    assert all("numpy" in one["made_with"]["software"]["packages"] for one in about)


@pytest.mark.slow
def test_a_library_is_inspected_and_embedded_as_by_one_process(tmp_path, photos, two_nodes):
    """Hashes for near-duplicates, vectors of pictures and of captions."""
    (photos / "a.txt").unlink()
    for number in set(range(48)) - {7}:
        pixels = np.random.default_rng(number).integers(0, 255, (40, 30 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{number:02}.png")
    Image.open(photos / "30.png").resize((90, 60)).save(photos / "larger.png")
    for out, address in (("one", None), ("many", two_nodes().address)):
        config = config_of(Path(out), "photos")
        config.image_encoder = EncoderConfig("checkpoint", "demo", 2)
        config.library.shard_size, config.library.near_duplicates = 16, 2
        config.seed.clusters, config.seed.per_cluster = 4, 3
        if address is not None:
            config.engine, config.address = "ray", address
        with closing(Run(config)) as run:
            run_stages(run, ["seed"])
    for name in ("one", "many"):
        assert len(list(Path(name).glob("seed/inspected/*.npy"))) == 4
    one, many = (sorted(Path(name).glob("seed/**/*.[np]*")) for name in ("one", "many"))
    assert [path.relative_to("one") for path in one] == [path.relative_to("many") for path in many]
    for ours, theirs in zip(one, many, strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours

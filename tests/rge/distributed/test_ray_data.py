"""Collections embedded by Ray Data: the rows of one process, also when a machine dies on the way."""

import sys
import threading
import time

import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import Image

from rge.distributed import ray_data
from rge.distributed.ray_data import RayError
from rge.index import options
from rge.index.__main__ import main as index
from rge.index.embed import main as embed


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with error_about(RayError, ".[ray]"):
        next(ray_data.mapped(list, [1], address=None))
    assert list(ray_data.mapped(list, [], address=None)) == []


def test_what_never_comes_is_an_error(monkeypatch):
    monkeypatch.setattr(ray_data, "WAIT_S", 0.1)
    blocked = threading.Event()
    with error_about(RayError, "0"):
        next(ray_data._within_time(iter(lambda: blocked.wait(60), None)))
    blocked.set()
    assert list(ray_data._within_time(iter([1, 2]))) == [1, 2]


def test_blocks_are_whole_windows(monkeypatch):
    monkeypatch.setattr(options, "BLOCK_ROWS", 10)
    assert [list(block) for block in options.blocks_of(range(9), batch_size=1)] == [[*range(8)], [8]]
    assert [len(block) for block in options.blocks_of(range(30), batch_size=3)] == [12, 12, 6]


@pytest.mark.slow
def test_a_cluster_of_two_of_which_one_dies(tmp_path, monkeypatch):
    """Embedded by two machines, then by the one that is left; an unreadable picture is counted as in one process."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("lancedb", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    from rge.index.store import Index

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "BLOCK_ROWS", 4)
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(48):
        Image.new("RGB", (30 + number, 40), (5 * number, 0, 90)).save(photos / f"{number:02}.png")
    (photos / "07.png").write_bytes(b"x")
    (photos / "a.txt").write_text("a padlock")
    settings = ["checkpoint=demo", "batch_size=1"]
    embed(["photos", "out=one.parquet", "unreadable=one.tsv", *settings])
    index(["photos", "out=one", *settings])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        on_ray = [*settings, "engine=ray", f"address={cluster.address}"]

        def kill_one():
            while not list(tmp_path.glob("many.parquet.parts/*.parquet")):
                time.sleep(0.02)
            cluster.remove_node(other, allow_graceful=False)

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        embed(["photos", "out=many.parquet", "unreadable=many.tsv", *on_ray])
        killer.join(timeout=60)
        assert len(cluster.list_all_nodes()) == 1
        index(["photos", "out=many", *on_ray])
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [(tmp_path / f"{name}.tsv").read_text().split("\t")[0] for name in ("one", "many")] == [
        "07.png"
    ] * 2
    one, many = (pq.read_table(f"{name}.parquet") for name in ("one", "many"))
    assert len(many) == 48
    assert many.equals(one)
    stored = [Index.open(name)._table.to_arrow().sort_by("id") for name in ("one", "many")]
    assert stored[0].equals(stored[1])
    # Where all is done, no cluster is needed.
    assert index(["photos", "out=many", *settings, "engine=ray"]) == 0

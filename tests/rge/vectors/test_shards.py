"""The store of shards: what it takes over from other caches, and pools that are larger than memory."""

import json
import os

import numpy as np
import pytest
from eval_fakes import DIM, FakeEncoder, loader, tables, write_tables
from faults import error_about

from eval.commands.run import RunOptions, run
from eval.scoring.search import search
from rge.common.errors import UserError
from rge.common.files import replacing
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.vectors import shards
from rge.vectors.fill_cache import check_collapse, fill, mean_cosine
from rge.vectors.shards import Cache, covered, open_cache, read, read_embeddings

ABOUT = {"side": "candidate", "mode": "direct", "modality": "both"}


def filled(root, key, items, encoder, *, of="encoder", names=None):
    names = [item.text for item in items] if names is None else names
    cache = Cache(root / key, names)
    open_cache(cache, **ABOUT, encoder=of)
    fill(encoder, items, cache, side="candidate", mode="direct", batch_size=2)
    return cache, read(cache)


def items_of(*numbers):
    return [Item(f"i{number}", content_of(f"text {number}")) for number in numbers]


def test_a_changed_set_takes_over_what_shows_the_same(tmp_path):
    old = items_of(*range(40))
    _, first = filled(tmp_path, "a" * 20, old, FakeEncoder())
    new = items_of(50, *range(3, 30), 51, 39, 3)  # other rows, another order, one twice
    encoder = FakeEncoder()
    cache, found = filled(tmp_path, "b" * 20, new, encoder)
    assert encoder.seen == ["i50", "i51"]
    _, fresh = filled(tmp_path / "fresh", "b" * 20, new, FakeEncoder())
    np.testing.assert_array_equal(found.embeddings, fresh.embeddings)
    np.testing.assert_array_equal(found.embeddings[1:28], first.embeddings[3:30])
    assert read(cache).rationales == fresh.rationales


@pytest.mark.parametrize("at_once", [7, 4096])
def test_rows_in_another_order_read_each_shard_once(tmp_path, monkeypatch, at_once):
    """They read a shard each: hours for a pool of a hundred thousand."""
    items = items_of(*range(100))
    _, first = filled(tmp_path, "a" * 20, items, FakeEncoder())
    shards_before = len(list((tmp_path / ("a" * 20)).glob("*.parquet")))
    order = np.random.default_rng(0).permutation(100)
    order = np.concatenate([order[:40], [200], order[40:], order[:3]])
    reads, original = [], shards._read
    monkeypatch.setattr(
        shards, "_read", lambda path, columns=None: reads.append(columns) or original(path, columns)
    )
    monkeypatch.setattr(shards, "ADOPTED_ROWS", at_once)
    monkeypatch.setattr(shards, "ADOPTED_MB", 1e-4)  # in a file
    new = items_of(*order)
    cache = Cache(tmp_path / ("b" * 20), [item.text for item in new])
    open_cache(cache, **ABOUT, encoder="encoder")
    assert shards_before > 5
    assert reads.count(None) == shards_before
    np.testing.assert_array_equal(np.flatnonzero(~covered(cache)), [40])
    fill(FakeEncoder(), new, cache, side="candidate", mode="direct", batch_size=2)
    found, known = read(cache), order != 200
    np.testing.assert_array_equal(found.embeddings[known], first.embeddings[order[known]])
    assert [found.rationales[row] for row in np.flatnonzero(known)] == [
        first.rationales[n] for n in order[known]
    ]


def test_nothing_is_taken_over_from_another_encoder_or_without_names(tmp_path):
    items = items_of(*range(10))
    filled(tmp_path, "a" * 20, items, FakeEncoder())
    for number, change in enumerate(({"of": "other"}, {"names": [f"else {n}" for n in range(10)]})):
        encoder = FakeEncoder()
        filled(tmp_path, f"{number}" * 20, items, encoder, **change)
        assert len(encoder.seen) == 10


def test_a_damaged_shard_of_another_cache_is_named(tmp_path):
    cache, _ = filled(tmp_path, "a" * 20, items_of(*range(4)), FakeEncoder())
    next(cache.path.glob("*.parquet")).write_bytes(b"half")
    with error_about(UserError, next(cache.path.glob("*.parquet"))):
        filled(tmp_path, "b" * 20, items_of(0, 9), FakeEncoder())


@pytest.mark.slow
def test_one_changed_picture_costs_one_embedding(tmp_path):
    content = tables(num_queries=6, num_candidates=60)
    options = {"checkpoint": "fake", "set": tmp_path / "set", "cache": tmp_path / "cache", "report": False}
    write_tables(tmp_path / "set", content)
    run(RunOptions(**options, out=tmp_path / "a"), loader(FakeEncoder()))
    content["corpus"]["image"][7] = content["queries"]["image"][0][0]
    content["queries"]["text"][2] = "another question"
    write_tables(tmp_path / "set", content)
    encoder = FakeEncoder()
    run(RunOptions(**options, out=tmp_path / "b"), loader(encoder))
    assert encoder.seen == [content["corpus"]["id"][7], "q02"]
    alone = FakeEncoder()
    run(RunOptions(**options | {"cache": tmp_path / "new"}, out=tmp_path / "c"), loader(alone))
    assert len(alone.seen) == 66
    assert (tmp_path / "b" / "run.trec").read_bytes() == (tmp_path / "c" / "run.trec").read_bytes()


@pytest.mark.parametrize("memory_mb", [100.0, 1e-6])
def test_a_pool_larger_than_memory_is_a_map_of_a_nameless_file(tmp_path, memory_mb):
    items = items_of(*range(50))
    cache, found = filled(tmp_path, "a" * 20, items, FakeEncoder())
    place = np.random.default_rng(0).permutation(50)
    files = set(cache.path.iterdir())
    mapped = read_embeddings(cache, place, memory_mb)
    assert isinstance(mapped, np.memmap) == (memory_mb < 1)
    assert set(cache.path.iterdir()) == files
    np.testing.assert_array_equal(mapped[place], found.embeddings)
    assert mean_cosine(mapped) == pytest.approx(mean_cosine(found.embeddings), abs=1e-6)
    check_collapse(mapped, [item.id for item in items], "candidate")
    small = search(found.embeddings[:5], mapped, depth=10, block_rows=7)
    whole = search(found.embeddings[:5], np.array(mapped), depth=10)
    np.testing.assert_array_equal(small.rows_QW, whole.rows_QW)


@pytest.mark.slow
def test_figures_do_not_depend_on_the_memory(tmp_path):
    write_tables(tmp_path / "set", tables())
    runs = []
    for memory_mb in (2048.0, 0.001):  # 16 candidates of 16 dimensions at a time
        options = {"checkpoint": "fake", "set": tmp_path / "set", "report": False}
        (out,) = run(
            RunOptions(**options, out=tmp_path / str(memory_mb), memory_mb=memory_mb), loader(FakeEncoder())
        )
        runs.append((out / "run.trec").read_text().splitlines())
    for one, other in zip(*runs, strict=True):
        assert one.split()[:4] == other.split()[:4]
        assert float(one.split()[4]) == pytest.approx(float(other.split()[4]), abs=1e-6)


def test_no_room_for_the_map_is_said(tmp_path, monkeypatch):
    cache, _ = filled(tmp_path, "a" * 20, items_of(*range(4)), FakeEncoder())

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with error_about(UserError, "memory_mb"):
        read_embeddings(cache, np.arange(4), 1e-6)


def test_a_second_run_leaves_the_files_that_the_first_is_writing(tmp_path):
    cache, _ = filled(tmp_path, "k" * 20, items_of(1, 2), FakeEncoder())
    with replacing(cache.path / "000000000-000000009.parquet") as waiting:
        waiting.write_bytes(b"half a shard")
        open_cache(cache, **ABOUT, encoder="encoder")
        assert waiting.exists()
        elsewhere = waiting.with_name(".x.parquet.another-machine.7.tmp")
        old = waiting.with_name(".y.parquet.another-machine.7.tmp")
        for path in (elsewhere, old):
            path.write_bytes(b"half")
        os.utime(old, (0, 0))
        open_cache(cache, **ABOUT, encoder="encoder")
    assert (elsewhere.exists(), old.exists()) == (True, False)
    assert (cache.path / "000000000-000000009.parquet").read_bytes() == b"half a shard"


def test_about_says_what_a_cache_is_of(tmp_path):
    cache, _ = filled(tmp_path, "k" * 30, items_of(1, 2, 3), FakeEncoder())
    about = json.loads((cache.path / "about.json").read_text())
    assert about == ABOUT | {"encoder": "encoder"}
    assert covered(cache).all()
    assert read(cache).embeddings.shape == (3, DIM)

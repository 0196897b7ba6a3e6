"""The shard store: complete or absent shards, resumption after SIGKILL, no stale cache, no unusable embeddings."""

import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from eval_fakes import DIM, FakeEncoder
from faults import error_about
from forked import Program

from rge.common.errors import UserError
from rge.common.files import replacing, write_bytes
from rge.common.images import load_image
from rge.common.parts import content_of
from rge.common.schema import Encoded, Item
from rge.distributed import ray_data
from rge.vectors import fill_cache
from rge.vectors.caches import EmbeddingCaches
from rge.vectors.fill_cache import (
    SHARD_BATCHES,
    Cluster,
    check_collapse,
    check_embeddings,
    fill,
    mean_cosine,
)
from rge.vectors.processes import ProcessGroup
from rge.vectors.shards import Cache, cache_key, encoder_key, open_cache, read

ITEMS = [Item(f"i{number:03d}", content_of(f"text {number}")) for number in range(50)]


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    monkeypatch.setattr(fill_cache, "progress_bar", quiet)


def encode(root, encoder, items=ITEMS, batch_size=2, key="k", **options):
    cache = Cache(root / key, [item.text for item in items])
    open_cache(cache, encoder=key)
    fill(encoder, iter(items), cache, side="query", mode="reasoning", batch_size=batch_size, **options)
    return read(cache)


class quiet:  # stands for tqdm.tqdm
    """Counts like a progress bar; the last one made is ``quiet.last``."""

    def __init__(self, *, total, initial, **_):
        self.total, self.initial, self.n = total, initial, initial
        quiet.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, num):
        self.n += num


def same(one: Encoded, other: Encoded) -> bool:
    return (
        np.array_equal(one.embeddings, other.embeddings)
        and one.rationales == other.rationales
        and np.array_equal(one.num_rationale_tokens, other.num_rationale_tokens)
        and one.stop_reasons == other.stop_reasons
        and np.array_equal(one.generate_ms, other.generate_ms)
        and np.array_equal(one.embed_ms, other.embed_ms)
    )


def test_shards_give_back_what_was_encoded(tmp_path):
    encoder = FakeEncoder()
    found = encode(tmp_path, encoder)
    assert [size for _, _, size in encoder.calls] == [16, 16, 16, 2]  # shards of SHARD_BATCHES batches of two
    direct = [
        encoder.encode(ITEMS[start : start + 16], side="query", mode="reasoning")
        for start in range(0, 50, 16)
    ]
    np.testing.assert_array_equal(found.embeddings, np.concatenate([part.embeddings for part in direct]))
    assert found.embeddings.dtype == np.float32
    assert found.rationales == [f"because of {item.id}" for item in ITEMS]
    assert found.num_rationale_tokens.tolist() == [n for part in direct for n in part.num_rationale_tokens]
    assert found.stop_reasons == [reason for part in direct for reason in part.stop_reasons]
    assert quiet.last.n == quiet.last.total == 50


def test_a_second_run_encodes_nothing(tmp_path):
    first = encode(tmp_path, FakeEncoder())
    encoder = FakeEncoder()
    assert same(encode(tmp_path, encoder), first)
    assert encoder.calls == []
    assert quiet.last.initial == 50


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_only_missing_rows_are_encoded_whatever_the_batch_size(tmp_path, batch_size):
    whole = encode(tmp_path, FakeEncoder())
    shards = sorted(next(tmp_path.iterdir()).glob("*.parquet"))
    assert [path.stem for path in shards] == [
        "000000000-000000016", "000000016-000000032", "000000032-000000048", "000000048-000000050",
    ]  # fmt: skip
    shards[0].unlink()
    shards[2].unlink()
    encoder = FakeEncoder()
    found = encode(tmp_path, encoder, batch_size=batch_size)
    assert encoder.seen == [item.id for item in (*ITEMS[:16], *ITEMS[32:48])]
    assert all(size <= SHARD_BATCHES * batch_size for _, _, size in encoder.calls)
    np.testing.assert_array_equal(found.embeddings, whole.embeddings)
    assert found.rationales == whole.rationales


def test_overlapping_shards_of_two_runs_at_once(tmp_path):
    whole = encode(tmp_path, FakeEncoder())
    folder = next(tmp_path.iterdir())
    other = tmp_path / "other"
    encode(other, FakeEncoder(), batch_size=3)
    for path in next(other.iterdir()).glob("*.parquet"):
        path.rename(folder / path.name)
    found = encode(tmp_path, FakeEncoder())
    np.testing.assert_array_equal(found.embeddings, whole.embeddings)
    assert found.rationales == whole.rationales


SLOW = """
import sys, time
from pathlib import Path
from eval_fakes import FakeEncoder
sys.path.insert(0, {here!r})
from test_fill_cache import encode

class Slow(FakeEncoder):
    def encode(self, items, **options):
        if len(self.calls) == 2:
            time.sleep(600)  # for ever, as far as the test is concerned: it kills this process
        return super().encode(items, **options)

encode(Path(sys.argv[1]), Slow())
"""


def test_a_killed_run_resumes_without_redoing_a_finished_shard(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.format(here=str(Path(__file__).parent)))
    with Program(tmp_path / "slow.py", tmp_path / "cache") as program:
        program.wait_until(lambda: len(list((tmp_path / "cache").glob("*/*.parquet"))) == 2)
        program.kill()
    assert sorted(path.stem for path in (tmp_path / "cache").glob("*/*.parquet")) == [
        "000000000-000000016", "000000016-000000032",
    ]  # fmt: skip
    if (killed := os.fork()) == 0:
        with replacing(next((tmp_path / "cache").iterdir()) / "000000048-000000050.parquet") as waiting:
            waiting.write_bytes(b"half a shard")
            os._exit(9)
    os.waitpid(killed, 0)
    assert len(list((tmp_path / "cache").glob("*/*.tmp"))) == 1

    encoder = FakeEncoder()
    found = encode(tmp_path / "cache", encoder)
    assert encoder.seen == [item.id for item in ITEMS[32:]]
    assert same(found, encode(tmp_path / "fresh", FakeEncoder()))
    assert not list((tmp_path / "cache").glob("*/*.tmp"))


def test_a_shard_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    """Killed between writing and renaming, a file has only its temporary name."""
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "x", b"content")
    assert list(tmp_path.iterdir()) == []


KEY = {
    "checkpoint_hash": "c", "settings": {"profile": "rge"}, "side": "query", "mode": "direct", "modality": "both",
    "fingerprint": "f", "contents": ["1", "2"],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint_hash": "d"},
        {"settings": {"profile": "raw"}},
        {"settings": {"profile": "rge", "generation": {"max_new_tokens": 7}}},
        {"side": "candidate"},
        {"mode": "reasoning"},
        {"modality": "text"},
        {"fingerprint": "g"},
        {"contents": ["1", "3"]},
        {"contents": ["12"]},
        {"contents": ["1", "2", ""]},
    ],
)
def test_everything_that_matters_is_in_the_key(change):
    def key(checkpoint_hash, settings, side, mode, **named):
        encoder = encoder_key(checkpoint_hash=checkpoint_hash, settings=settings, side=side, mode=mode)
        return cache_key(encoder, **named)

    assert key(**KEY) != key(**KEY | change)
    assert key(**KEY) == key(**KEY)


def test_items_that_do_not_fit_the_cache_are_a_bug(tmp_path):
    cache = Cache(tmp_path / "k", ["a"] * 51)
    open_cache(cache, encoder="k")
    with pytest.raises(ValueError):
        fill(FakeEncoder(), ITEMS, cache, side="query", mode="direct", batch_size=64)


def test_damaged_shards_are_named(tmp_path):
    encode(tmp_path, FakeEncoder())
    shard = next(tmp_path.glob("*/000000016-*.parquet"))
    content = shard.read_bytes()
    shard.write_bytes(content[:100])
    with error_about(UserError, "000000016-000000032.parquet"):
        encode(tmp_path, FakeEncoder())
    shard.write_bytes(next(tmp_path.glob("*/000000048-*.parquet")).read_bytes())
    with error_about(UserError, shard):
        encode(tmp_path, FakeEncoder())


def test_sampling_seeds_follow_the_item_not_the_batch(tmp_path):
    one = encode(tmp_path / "one", FakeEncoder(), seed=3)
    other = encode(tmp_path / "two", FakeEncoder(), seed=3, batch_size=5)
    np.testing.assert_array_equal(one.embeddings, other.embeddings)
    assert not np.array_equal(one.embeddings, encode(tmp_path / "three", FakeEncoder(), seed=4).embeddings)


class Broken(FakeEncoder):
    """Returns embeddings changed by ``damage``."""

    def __init__(self, damage):
        super().__init__()
        self.damage = damage

    def encode(self, items, **options):
        found = super().encode(items, **options)
        return Encoded(**vars_of(found) | {"embeddings": self.damage(found.embeddings)})


def vars_of(encoded):
    return {name: getattr(encoded, name) for name in Encoded.__dataclass_fields__}


def nan_at_three(x):
    x[3, 1] = np.nan
    return x


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (nan_at_three, "query 'i003'"),
        (lambda x: x * 2, "query 'i000'"),
        (lambda x: x * 0, "query 'i000'"),
        (lambda x: x[1:], "shape"),
        (lambda x: x.astype(np.float64), "shape"),
    ],
)
def test_unusable_embeddings_stop_the_run_and_are_not_kept(tmp_path, damage, named):
    with error_about(UserError, named):
        encode(tmp_path, Broken(damage))
    assert not list(tmp_path.glob("*/*.parquet"))


def test_a_picture_that_cannot_be_decoded_is_named_by_its_item(tmp_path):
    class Decoding(FakeEncoder):
        def encode(self, items, **options):
            for item in reversed(items):  # as an encoder that sorts by length
                list(map(load_image, item.pictures))
            return super().encode(items, **options)

    with error_about(UserError, "query 'i003'", "format"):
        encode(
            tmp_path,
            Decoding(),
            [Item(f"i{n:03d}", content_of("a", (b"none",) * (n > 2))) for n in range(16)],
        )


def unit(rng, rows):
    x = rng.standard_normal((rows, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_mean_cosine_is_that_of_all_pairs():
    x = unit(np.random.default_rng(0), 7)
    pairs = [float(x[a] @ x[b]) for a in range(7) for b in range(7) if a != b]
    assert mean_cosine(x) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert mean_cosine(x[:1]) == 0.0


def test_collapse_is_refused_and_equal_items_are_not_collapse():
    rng = np.random.default_rng(1)
    point = np.repeat(unit(rng, 1), 6, axis=0)
    with error_about(UserError, "collapsed"):
        check_collapse(point, list("abcdef"), "candidate")
    with error_about(UserError, "collapsed"):
        check_collapse(point, list("aaaaab"), "query")
    check_collapse(point, list("aaaaaa"), "query")
    check_collapse(unit(rng, 6), list("abcdef"), "query")
    check_embeddings(point, list("abcdef"), "query")


def by_devices(monkeypatch):
    """Stands for `mapped` with one device: what it gets and gives is pickled."""

    def mapped(make, blocks, *, address, ahead):
        assert (address, ahead) == ("auto", fill_cache.SHARDS_AHEAD)
        sent = lambda what: pickle.loads(pickle.dumps(what))  # noqa: E731, S301
        return map(sent(make)(), map(sent, blocks))

    monkeypatch.setattr(ray_data, "mapped", mapped)


def test_a_cluster_writes_the_shards_of_one_process(tmp_path, monkeypatch):
    """Sampled rationales and other generation settings too; what is there is not embedded again."""
    by_devices(monkeypatch)
    load = partial(FakeEncoder, generation={"max_new_tokens": 8, "temperature": 0.5})
    one, many = (
        EmbeddingCaches(load(), tmp_path / name, batch_size=2, seed=3, cluster=cluster)
        for name, cluster in (("one", None), ("many", Cluster(load, "auto")))
    )
    contents, ids = [item.text for item in ITEMS], [item.id for item in ITEMS]
    for asked in ({}, {"max_rationale_tokens": 4, "seed": 5}):
        ours, theirs = (
            (caches.asking(**asked) if asked else caches).fill("query", "reasoning", ITEMS, contents, ids)
            for caches in (one, many)
        )
        assert same(read(ours), read(theirs))
        assert sorted(path.name for path in ours.path.glob("*.parquet")) == sorted(
            path.name for path in theirs.path.glob("*.parquet")
        )
    assert many.encoder.calls == []
    assert quiet.last.n == len(ITEMS)
    with error_about(UserError, "engine"):
        fill(
            FakeEncoder(), ITEMS, ours, side="query", mode="direct", batch_size=2, process_group=ProcessGroup(0, 2),
            cluster=many.cluster,
        )  # fmt: skip

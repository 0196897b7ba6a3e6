"""Two real processes against one: the same files and the same numbers."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from eval_fakes import FakeEncoder, write_set
from eval_processes import start
from recorded import settings_of

from eval.commands.rerank import RerankOptions, rerank_command
from rge.checkpoints.export import export
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.vectors import fill_cache
from rge.vectors.fill_cache import fill
from rge.vectors.processes import ALONE, ProcessGroup
from rge.vectors.shards import Cache, covered, open_cache, read

TIMES = ["generate_ms", "embed_ms"]


def shards(out: Path) -> dict[str, pd.DataFrame]:
    found = sorted((out / ".cache").glob("*/*.parquet"))
    return {f"{p.parent.name}/{p.name}": pq.read_table(p).to_pandas().drop(columns=TIMES) for p in found}


@pytest.mark.slow
def test_two_processes_write_the_files_and_numbers_of_one(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=256, min_pixels=28 * 28, max_pixels=84 * 84,
        max_new_tokens=5, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "checkpoint", settings)
    data = write_set(tmp_path / "set", num_queries=12, num_candidates=20)
    words = [
        f"checkpoint={tmp_path / 'checkpoint'}",
        f"set={data}",
        "query_mode=reasoning,direct",
        "batch_size=1",
    ]
    two = start(*words, f"out={tmp_path / 'two'}", pair=True)
    assert two.returncode == 0, two.stderr[-4000:]
    one = start(*words, f"out={tmp_path / 'one'}", pair=False)
    assert one.returncode == 0, one.stderr[-4000:]
    assert two.stdout.count("reasoning, both ->") == 1  # the second process prints nothing
    ours, theirs = shards(tmp_path / "two"), shards(tmp_path / "one")
    assert list(ours) == list(theirs)
    assert len(ours) == 3 + 2 + 2  # of eight rows each
    for name, table in ours.items():
        np.testing.assert_array_equal(np.stack(table["embedding"]), np.stack(theirs[name]["embedding"]))
        pd.testing.assert_frame_equal(table.drop(columns="embedding"), theirs[name].drop(columns="embedding"))
    for condition in ("reasoning-both", "direct-both"):
        a, b = tmp_path / "two" / condition, tmp_path / "one" / condition
        assert (a / "run.trec").read_bytes() == (b / "run.trec").read_bytes()
        assert json.loads((a / "results.json").read_text()) == json.loads((b / "results.json").read_text())

    # Two shards are lost: only they are made again.
    lost = [tmp_path / "two" / ".cache" / name for name in list(ours)[2:4]]
    for path in lost:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "two" / ".cache").glob("*/*.parquet")}
    again = start(*words, f"out={tmp_path / 'two'}", pair=True)
    assert again.returncode == 0, again.stderr[-4000:]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert all(path.exists() for path in lost)

    # Both judge, each with a model of its own, and write what one process does.
    of = tmp_path / "two" / "direct-both"
    judge = {"of": of, "judge": tmp_path / "checkpoint", "top_n": 3, "batch_size": 2}
    judged = start(*(f"{key}={value}" for key, value in judge.items()), f"out={tmp_path / 'judged'}",
                   pair=True, name="rerank")  # fmt: skip
    assert judged.returncode == 0, judged.stderr[-4000:]
    assert judged.stdout.count("top 3 of") == 1
    rerank_command(RerankOptions(**judge | {"judge": str(judge["judge"])}, out=tmp_path / "by_one"))
    pair, by_one = (tmp_path / name / "per_query.parquet" for name in ("judged", "by_one"))
    pd.testing.assert_frame_equal(pd.read_parquet(pair), pd.read_parquet(by_one))
    results = json.loads((tmp_path / "judged" / "results.json").read_text())
    assert results["rerank"]["num_pairs"] == 3 * 12

    broken = start(*words, f"out={tmp_path / 'three'}", "limit=0", pair=True)
    assert broken.returncode != 0
    assert "limit: " in broken.stderr


def test_every_process_makes_its_own_shards_and_the_first_waits_for_all(tmp_path, monkeypatch):
    """The second process's work is done by hand here, while the first one waits for it."""
    items = [Item(f"i{number:02d}", content_of(f"text {number}")) for number in range(50)]
    cache, alone = (Cache(tmp_path / name, [item.text for item in items]) for name in ("shared", "alone"))
    open_cache(cache, encoder="one")
    options = {"side": "query", "mode": "direct", "batch_size": 1}

    class Pair(ProcessGroup):
        def once(self, make):
            return make()

    second, first, bars = FakeEncoder(), FakeEncoder(), []

    class Bar:
        def __init__(self, *, total, initial, disable, **_):
            self.total, self.n = total, initial
            bars.extend([] if disable else [self])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, num):
            self.n += num

    class WithSecond(FakeEncoder):
        def encode(self, batch, **rest):
            if not second.calls:
                fill(second, iter(items), cache, process_group=Pair(1, 2), **options)
            return first.encode(batch, **rest)

    monkeypatch.setattr(fill_cache, "progress_bar", Bar)
    fill(WithSecond(), iter(items), cache, process_group=Pair(0, 2), **options)
    assert [size for *_, size in first.calls] == [8, 8, 8, 2]
    assert [size for *_, size in second.calls] == [8, 8, 8]
    assert first.seen == [item.id for item in items if int(item.id[1:]) // 8 % 2 == 0]
    assert covered(cache).all()
    assert [(bar.n, bar.total) for bar in bars] == [(50, 50)]
    open_cache(alone, encoder="other")
    fill(FakeEncoder(), iter(items), alone, process_group=ALONE, **options)
    np.testing.assert_array_equal(read(cache).embeddings, read(alone).embeddings)
    assert sorted(p.name for p in cache.path.glob("*.parquet")) == sorted(
        p.name for p in alone.path.glob("*.parquet")
    )

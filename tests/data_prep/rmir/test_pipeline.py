"""The RMIR pipeline: its arithmetic by hand-worked examples, its stages on a hand-made world, and whole on the oracle."""

import asyncio
import hashlib
import io
import json
import os
import resource
import sqlite3
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from faults import error_about
from forked import Program
from PIL import Image
from small_runs import made, one_family

from data_prep.__main__ import main
from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames, oracle, prompts, seed_set, stages
from data_prep.rmir.config import (
    CONFIGS,
    EncoderConfig,
    GenerateConfig,
    JudgeSpec,
    LibraryConfig,
    RetrieveConfig,
    RmirConfig,
    load_config,
)
from data_prep.rmir.main import estimate, run_stages, status
from data_prep.rmir.pictures.changes import LibraryState, compare
from data_prep.rmir.pictures.encoders import HashingEncoder, PixelEncoder
from data_prep.rmir.pictures.library import Library, inspect, look
from data_prep.rmir.results import report
from data_prep.rmir.results.export import export
from data_prep.rmir.run import STAGES, Run, stages_of
from eval.sets.retrieval_set import load_set
from rge.calls.failures import BudgetReached
from rge.calls.local_server import Answer, LocalServer
from rge.calls.model_config import ModelConfig
from rge.calls.wire.replies import Abstained, BadValue, MissingTag, Refused, Reply, Truncated
from rge.common.errors import UserError
from rge.common.files import FileError, InUseError, read_json, write_text
from rge.common.images import load_image
from rge.common.schema import Record
from rge.data.sources import RecordFile
from rge.identity.set_fingerprint import set_fingerprint

T, F, A, E, M = maths.VERDICTS

# --------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("verdicts", "majority", "confidence", "state"),
    [
        ([T, T, T, T, T], T, 1.0, "kept"),
        ([T, T, T, T, F], T, 0.8, "doubted"),  # the paper's example
        ([F, F, F, F, F], F, 1.0, "rejected"),
        ([F, F, F, T, T], F, 0.6, "doubted"),
        ([T, T, T, T, A], T, 0.8, "doubted"),
        ([T, T, T, T, E], T, 0.8, "doubted"),
        ([A, A, A, A, A], A, 1.0, "abstained"),
        ([A, A, E, E, A], A, 1.0, "abstained"),
        ([T, T, T, T, M], T, 0.8, "abstained"),
        ([F, F, F, T, M], F, 0.6, "abstained"),
        ([T, T, F, F, A], A, 0.2, "doubted"),
        ([T], T, 1.0, "kept"),
    ],
)
def test_confidence(verdicts, majority, confidence, state):
    found = {"majority": majority, "confidence": pytest.approx(confidence), "state": state}
    assert maths.tally(verdicts) == found


def test_confidence_below_one_may_be_enough():
    assert maths.tally([T, T, T, T, F], 0.8)["state"] == "kept"


@pytest.mark.parametrize(
    ("verdicts", "value"),
    [([F] * 5, 1.0), ([F, F, F, T, T], 0.6), ([F, F, T, T, T], 0.0), ([F, T], 0.5), ([F, F, A, A, E], 0.0)],
)
def test_negativeness(verdicts, value):
    """The share of judges who said false, or 0 if less than half did."""
    assert maths.negativeness(verdicts) == value


@pytest.mark.parametrize(
    ("values", "worked"),
    [
        ([1, 1, 1, 1], Fraction(1)),
        ([0, 0, 0, 0], Fraction(0)),
        # positive first: (3/4 + 1 + 1 + 1) / 4
        ([0, 1, 1, 1], Fraction(15, 16)),
        # positive last: (3/4 + 2/3 + 1/2 + 0) / 4
        ([1, 1, 1, 0], Fraction(23, 48)),
        # (2/4 + 1/3 + 1/2 + 0) / 4
        ([1, 0, 1, 0], Fraction(1, 3)),
        # 2 of 5 against is 0, 3 of 5 is .6: (2.6/4 + 2.6/3 + 1 + 1) / 4
        ([0, 0.6, 1, 1], Fraction(211, 240)),
        # one was retrieved: padded to [0, 1, 1, 1]
        ([0], Fraction(15, 16)),
        # none was retrieved by the image index
        ([], Fraction(1)),
        # padding is behind the last: [1, 0, 1, 1] -> (3/4 + 2/3 + 1 + 1) / 4
        ([1, 0], Fraction(41, 48)),
    ],
)
def test_tsr(values, worked):
    assert maths.tsr(values, 4) == pytest.approx(float(worked), abs=1e-12)


def test_tsr_of_sixteen():
    """One positive at rank 16: the sum of (16 - i) / (17 - i) is 16 minus the 16th harmonic number."""
    harmonic = sum(Fraction(1, number) for number in range(1, 17))
    assert maths.tsr([1.0] * 15 + [0.0], 16) == pytest.approx(float((16 - harmonic) / 16))


def test_tsr_is_the_formula_of_the_paper():
    values = np.random.default_rng(0).random(16)
    written = np.mean([values[place:].mean() for place in range(16)])
    assert maths.tsr(values.tolist(), 16) == pytest.approx(written)


def test_sixteen_and_four_without_duplicates():
    by_image = [f"i{number}" for number in range(16)]
    found = maths.merge_candidates({"image": by_image, "caption": ["i3", "c1", "i0", "c2"]})
    assert list(found) == [*by_image, "c1", "c2"]
    assert found["i3"] == {"image": 4, "caption": 1}
    assert found["i0"] == {"image": 1, "caption": 3}
    assert found["c2"] == {"caption": 4}


def test_the_test_set_is_above_the_threshold():
    assert maths.split_queries({"a": 0.91, "b": 0.9, "c": 0.1}, 0.9) == {
        "a": "test",
        "b": "train",
        "c": "train",
    }


def test_overlap_of_the_sets():
    splits = {
        "t": "test",
        "same input": "train",
        "same answer": "train",
        "input is answer": "train",
        "other": "train",
    }
    inputs = {"t": "1", "same input": "1", "same answer": "3", "input is answer": "2", "other": "5"}
    positives = {
        "t": ["2"],
        "same input": ["9"],
        "same answer": ["2"],
        "input is answer": ["8"],
        "other": ["6"],
    }
    assert maths.overlapping(splits, inputs, positives, "inputs") == {"same input"}
    assert maths.overlapping(splits, inputs, positives, "all") == {
        "same input",
        "same answer",
        "input is answer",
    }


def test_at_most_so_many_of_each_cluster():
    clusters = np.array([0, 1, 0, 0, 2, 0, 1])
    chosen = seed_set.sample_clusters(clusters, 2, seed=0)
    assert Counter(clusters[chosen].tolist()) == {0: 2, 1: 2, 2: 1}
    assert chosen == sorted(chosen) == seed_set.sample_clusters(clusters, 2, seed=0)
    assert len({tuple(seed_set.sample_clusters(clusters, 2, seed=seed)) for seed in range(20)}) > 1


def test_rows_are_gathered_from_parts():
    whole = np.random.default_rng(0).random((9, 3), dtype=np.float32)
    parts = [whole[:4], whole[4:5], whole[5:]]
    for rows in (np.arange(9), np.array([0, 3, 4, 8]), np.array([6])):
        assert np.array_equal(seed_set.gather(parts, rows), whole[rows])


def test_kmeans_finds_the_clusters():
    centres = np.eye(8, dtype=np.float32)[:3]
    vectors = np.repeat(centres, 10, axis=0) + np.random.default_rng(0).normal(0, 0.01, (30, 8)).astype(
        np.float32
    )
    found = seed_set.cluster(vectors, 3, 0)
    assert [len(set(found[start : start + 10])) for start in (0, 10, 20)] == [1, 1, 1]
    assert len(set(found)) == 3
    with error_about(UserError, "seed.clusters"):
        seed_set.cluster(vectors, 31, 0)


# ------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_loads_and_says_how_it_is_run(path):
    load_config([f"config={path.stem}", "library.path=here"])
    assert f"python -m data_prep rmir config={path.stem}" in path.read_text()


def test_defaults_are_the_papers():
    config = load_config(["config=rmir", "library.path=here"])
    assert (config.seed.clusters, config.seed.per_cluster) == (50_000, 10)
    assert (config.generate.temperature, config.filter.temperature, config.judge.temperature) == (
        0.25,
        0.0,
        0.85,
    )
    assert (config.retrieve.by_image, config.retrieve.by_caption) == (16, 4)
    assert [(judge.model, judge.count) for judge in config.judge.judges] == [("writer", 1), ("judge", 4)]
    assert config.keep.min_confidence == 1.0
    written = yaml.safe_load((CONFIGS / "rmir.yaml").read_text())
    for section in ("seed", "retrieve", "keep", "split", "filter"):
        for key, value in written[section].items():
            assert getattr(getattr(RmirConfig(), section), key) == value


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("judge.temprature=1", ("unknown", "judge.temprature", ("judge.temperature",))),
        ("models.writer.api_key=sk-1", ("unknown", "models.writer.api_key")),
        ("models.writer.budget=lots", "models.writer.budget"),
        ("generate.model=nobody", "generate.model"),
        ("generate.categories=[spatial]", ("choice", "generate.categories")),
        ("keep.min_confidence=0.4", ("range", "keep.min_confidence")),
        ("split.disjoint=some", ("choice", "split.disjoint")),
        ("retrieve.by_image=0", ("range", "retrieve.by_image")),
        ("judge.judges=[]", "judge.judges"),
        ("queries_per_shard=-3", ("range", "queries_per_shard")),
        ("generate.max_inputs=-2", "generate.max_inputs"),
        ("retrieve.by_caption=-2", ("range", "retrieve.by_caption")),
        ("download.max_retries=-1", ("range", "download.max_retries")),
        ("image_encoder.kind=siglip", "image_encoder.path"),
        ("out", "argument"),
    ],
)
def test_wrong_settings_are_named(word, field):
    with error_about(UserError, field):
        load_config(["config=demo", word])


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["models.judge.key_env=NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["budget=1", "models.judge.input_price=null", "models.judge.output_price=null"], "price"),
        (["caption_encoder={kind: checkpoint, path: nowhere}"], "nowhere"),
    ],
)
def test_what_would_stop_a_run_after_hours_is_said_before_a_picture_is_opened(tmp_path, words, field):
    with error_about(UserError, field):
        main(["rmir", "config=demo", f"out={tmp_path}", *words])
    assert not (tmp_path / "seed" / "inspected").exists()


def test_unknown_configs_and_stages_are_named():
    with error_about(UserError, ("choice", "config")):
        load_config(["config=dmo"])
    with error_about(UserError, "config"):
        load_config([])
    with error_about(ValueError, ("choice", "stage")):
        main(["rmir", "config=demo", "stage=juge"])


# ------------------------------------------------------------------------------------------------------------ answers

BLOCK = """<input_desc>A padlock.</input_desc>
<Example_FUNC_1>
<query>What opens this?</query>
<target_desc>A key.</target_desc>
<reasoning>Keys open padlocks.</reasoning>
</Example_FUNC_1>
<Example_CAUS_1><query>ABSTAIN</query><target_desc>ABSTAIN</target_desc><reasoning>ABSTAIN</reasoning></Example_CAUS_1>"""


def said(text: str, stop: str = "stop") -> Reply:
    return Reply(text, stop)


def test_generated_blocks():
    found = prompts.read_generated(said(BLOCK), "FUNC", (25, 50))
    assert found == {
        "query": "What opens this?",
        "target_desc": "A key.",
        "reasoning": "Keys open padlocks.",
        "input_desc": "A padlock.",
    }
    with pytest.raises(Abstained):
        prompts.read_generated(said(BLOCK), "CAUS", (25, 50))
    with error_about(MissingTag, "Example_TEMP_1"):
        prompts.read_generated(said(BLOCK), "TEMP", (25, 50))
    with pytest.raises(Truncated):
        prompts.read_generated(said(BLOCK, "length"), "TEMP", (25, 50))
    with error_about(BadValue, "query"):
        prompts.read_generated(said(BLOCK), "FUNC", (2, 50))
    with error_about(BadValue, "target_desc"):
        prompts.read_generated(said(BLOCK), "FUNC", (25, 1))
    limits = (GenerateConfig().max_query_words, 50)  # the paper's prompt asks for fewer than 25 words
    long, longer = (said(BLOCK.replace("What opens this?", " ".join(["word"] * count))) for count in (24, 25))
    assert prompts.read_generated(long, "FUNC", limits)["query"] == " ".join(["word"] * 24)
    with pytest.raises(BadValue):
        prompts.read_generated(longer, "FUNC", limits)
    with pytest.raises(Refused):
        prompts.read_generated(said("I'm sorry, I cannot."), "FUNC", (25, 50))


def test_verdicts():
    assert prompts.read_judged(said("<reasoning>r</reasoning><consistent>True</consistent>")) == (T, "r")
    assert prompts.read_judged(said("<consistent>ABSTAIN</consistent>"))[0] == A
    assert prompts.read_judged(said("ABSTAIN DUE TO SENSITIVE IMAGE"))[0] == A
    with pytest.raises(BadValue):
        prompts.read_judged(said("<consistent>perhaps</consistent>"))
    with pytest.raises(prompts.BreaksConstraint):
        prompts.read_filtered(said("<is_valid>No</is_valid>"))


# ------------------------------------------------------------------------------------------------------------ library


def encoded(image: Image.Image, kind: str, **settings) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def test_bad_pictures_are_left_out_with_a_reason(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    files = {
        "good.jpg": encoded(noise, "JPEG"),
        "cmyk.jpg": encoded(noise.convert("CMYK"), "JPEG"),
        "truncated.jpg": encoded(noise, "JPEG")[:900],
        "text.jpg": b"<html>not found</html>",
        "empty.png": b"",
        "pixel.png": encoded(noise.resize((1, 1)), "PNG"),
        "animated.gif": encoded(noise, "GIF", save_all=True, append_images=[noise.rotate(90)]),
        "huge.png": encoded(Image.new("1", (14_000, 14_000)), "PNG"),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = {name: look(str(tmp_path / name), 32)["reason"] for name in [*files, "lost.jpg"]}
    assert found == {
        "good.jpg": None,
        "cmyk.jpg": None,
        "truncated.jpg": "truncated",
        "text.jpg": "unreadable",
        "empty.png": "unreadable",
        "pixel.png": "too small",
        "animated.gif": "animated",
        "huge.png": "huge",
        "lost.jpg": "missing",
    }


def test_names_that_are_not_utf8_are_left_out_with_a_reason(tmp_path):
    for place, name in enumerate((b"caf\xe9.png", b"caf\xe8.png", b"good.png")):
        (tmp_path / "x.png").write_bytes(encoded(Image.new("RGB", (40, 40 + place)), "PNG"))
        os.rename(tmp_path / "x.png", os.fsencode(tmp_path) + b"/" + name)
    config = ["config=demo", f"out={tmp_path / 'out'}", f"library.path={tmp_path}", "seed.clusters=1"]
    with closing(Run(load_config(config), progress=False)) as run:
        counts = stages.seed(run)
        assert (counts["seed"], counts["rejected"]) == (1, {"its name is not UTF-8": 2})
        rejected = [row["id"] for row in run.rows("seed", "rejected")]
    assert sorted(rejected) == ["caf\\udce8", "caf\\udce9"]


def test_libraries(tmp_path):
    with error_about(UserError, "nowhere"):
        list(Library(LibraryConfig(path=str(tmp_path / "nowhere"))).rows())
    with error_about(UserError, tmp_path):
        list(Library(LibraryConfig(path=str(tmp_path))).rows())
    (tmp_path / "b").mkdir()
    for name in ("a.png", "b/a.png"):
        (tmp_path / name).write_bytes(encoded(Image.new("RGB", (40, 40)), "PNG"))
    assert [row["id"] for row in Library(LibraryConfig(path=str(tmp_path))).rows()] == ["a", "b/a"]
    (tmp_path / "saved by a browser.jfif").touch()
    assert [row["id"] for row in Library(LibraryConfig(path=str(tmp_path))).rows()][1] == "saved by a browser"
    table = tmp_path / "t.csv"
    table.write_text("id,image,caption\n1,a.png,a square\n2,b/a.png,\n")
    rows = list(Library(LibraryConfig(path=str(table))).rows())
    assert [(row["id"], row["caption"]) for row in rows] == [("1", "a square"), ("2", None)]
    assert [row["reason"] for row in inspect(rows, LibraryConfig())] == [None, None]
    assert [row["reason"] for row in inspect(rows, LibraryConfig(min_side_px=41))] == ["too small"] * 2
    table.write_text("id,picture\n1,a.png\n")
    with error_about(UserError, table, "row 1", "library.image_column"):
        list(Library(LibraryConfig(path=str(table))).rows())


def test_missing_cells_as_pandas_writes_them_are_missing(tmp_path):
    """Not captions and licences that read "nan"."""
    table = tmp_path / "t.jsonl"
    table.write_text(
        '{"id": 1, "image": "a.png", "caption": NaN, "licence": NaN, "author": "Ada"}\n'
        '{"id": 2, "image": "b.png", "caption": 7, "licence": "CC0", "author": null}\n'
    )
    library = Library(LibraryConfig(path=str(table)))
    assert [row["caption"] for row in library.rows()] == [None, "7"]
    assert library.origins({"1", "2"}) == {"1": {"author": "Ada"}, "2": {"licence": "CC0"}}


def test_several_captions_in_one_cell_are_no_text(tmp_path):
    table = tmp_path / "t.jsonl"
    table.write_text('{"id": 1, "image": "a.png", "caption": ["a dog", "a puppy"]}\n')
    with error_about(UserError, "row 1", "library.caption_column"):
        list(Library(LibraryConfig(path=str(table))).rows())


def test_captions_as_they_were_read_before_are_no_change(tmp_path):
    """A run that was begun with them goes on."""
    table = tmp_path / "t.jsonl"
    rows = [
        {"id": n, "image": f"{n}.png", "caption": c}
        for n, c in enumerate((float("nan"), ["a", "b"], [], False))
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    captions = ("nan", "['a', 'b']", None, None)
    known = {"id": [*"0123"], "stamp": [None] * 4, "caption": captions, "sha256": ["x"] * 4}
    library = Library(LibraryConfig(path=str(table)))
    stamps = [row["stamp"] for row in library.rows(pictures=False)]
    found = compare(library, pa.table(known | {"stamp": stamps}), LibraryState())
    assert str(found) == ""


def test_paths_in_a_column_of_categories_are_watched_like_others(tmp_path):
    """The stamp of such a row is that of its picture, not of the table."""
    names = pa.array(["a.png"]).dictionary_encode()
    pq.write_table(pa.table({"id": ["1"], "image": names}), tmp_path / "t.parquet")
    (tmp_path / "a.png").write_bytes(b"one")
    library = Library(LibraryConfig(path=str(tmp_path / "t.parquet")))
    (before,) = library.rows(pictures=False)
    (tmp_path / "a.png").write_bytes(b"another")
    (after,) = library.rows(pictures=False)
    assert before["ref"] == after["ref"] == str(tmp_path / "a.png")
    assert before["stamp"] != after["stamp"]


def test_encoders_without_a_model_match_what_is_alike():
    captions = ["a red fire engine", "a key", "an old key", None]
    vectors = HashingEncoder().texts(["a key", "some keys", "a fire engine"])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    pixels = PixelEncoder()
    pixels.bridge(captions, np.eye(4, dtype=np.float32))
    found = pixels.texts(["A key."])[0]
    assert found.argmax() == 1
    assert found[3] == 0


# ------------------------------------------------------------------------------------------ stages, on a hand-made world


@pytest.fixture
def world(tmp_path):
    run = made(tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize("least", [1.0, 0.8])
def test_a_majority_that_is_enough_is_not_unanimous(world, least):
    """One of seven panels says four times yes."""
    world.config.keep.min_confidence = least
    kept = world.run("keep", stages.keep)["counts"]
    assert kept["doubted"] == (least == 1)
    assert report.ratios({"keep": {"counts": kept}})["unanimous panels"] == pytest.approx(6 / 7)


def test_the_doubted_image_leaves_the_whole_set(world):
    """`b` is a sure answer to q1, but doubted for q2: it is removed everywhere."""
    kept = stages.keep(world)
    assert (kept["kept"], kept["rejected"], kept["abstained"], kept["doubted"]) == (3, 2, 1, 1)
    assert [row["id"] for row in world.rows("keep", "doubted")] == ["b"]
    assert stages.pool(world) == {"images": 2, "triplets": 2, "kept_but_doubted_elsewhere": 1}
    assert [row["id"] for row in world.rows("pool", "pool")] == ["a", "d"]


def test_the_result_holds_what_was_decided(world):
    """With K = 16: q1 is [0, 0, 1, ...], q2 is [0, 0, 1, ...] (1 of 5 against is 0)."""
    stages.keep(world)
    stages.pool(world)
    world.config.split.tsr_threshold = 0.99
    found = stages.split(world)
    assert (found["test"], found["train"]) == (0, 2)
    scores = {row["query_id"]: row["tsr"] for row in world.rows("split", "splits")}
    assert scores["q1"] == scores["q2"] == pytest.approx((14 / 16 + 14 / 15 + 14) / 16)
    folder = world.out / "dataset"
    records = [Record.model_validate_json(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert [record.id for record in records] == ["q1", "q2"]
    assert [target.id for target in records[0].positives] == ["a"]
    assert [target.id for target in records[0].negatives] == ["c"]
    assert [target.id for target in records[1].positives] == ["d"]
    assert records[1].negatives == []
    assert records[0].positives[0].rationale == "r"
    for record in records:
        for image in [*record.query.images, *(target.image for target in record.positives)]:
            assert (folder / image).is_file()


def test_the_test_set_is_a_retrieval_set(world):
    stages.keep(world)
    stages.pool(world)
    found = stages.split(world)
    assert (found["test"], found["train"]) == (2, 0)
    folder = world.out / "dataset" / "test"
    assert pq.read_table(folder / "corpus.parquet")["id"].to_pylist() == ["a", "d"]
    queries = pq.read_table(folder / "queries.parquet").to_pylist()
    assert [(query["id"], query["group"], len(query["image"])) for query in queries] == [
        ("q1", "in", 1),
        ("q2", "in", 1),
    ]
    qrels = [tuple(row.values()) for row in pq.read_table(folder / "qrels.parquet").to_pylist()]
    assert qrels == [("q1", "a", 1), ("q2", "d", 1)]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["fingerprint"] == set_fingerprint(["q1", "q2"], ["a", "d"], qrels)


def test_names_with_blanks_are_written_without(tmp_path):
    """A TREC run cannot hold them, and by then everything was paid for."""
    with closing(made(tmp_path, "my holiday/IMG\u00a0{}".format)) as run:
        stages.keep(run)
        stages.pool(run)
        assert stages.split(run)["test"] == 2
        folder = run.out / "dataset"
        found = load_set(folder / "test")
        assert found.query_ids == ["my%20holiday/IMG%A0q1", "my%20holiday/IMG%A0q2"]
        assert found.corpus_ids == ["my%20holiday/IMG%A0a", "my%20holiday/IMG%A0d"]
        assert [rows.tolist() for rows, _ in found.positives] == [[0], [1]]
        run.config.split.tsr_threshold = 0.99
        assert stages.split(run)["train"] == 2
        records = RecordFile(folder / "train.jsonl")
        table = pq.read_table(folder / "pictures.parquet")
        shown = dict(zip(table["id"].to_pylist(), table["path"].to_pylist(), strict=True))
        for record in (records[0], records[1]):
            assert record.id.startswith("my%20holiday/IMG%A0q")
            assert record.group == "my%20holiday/IMG%A0in"
            for target in [*record.positives, *record.negatives]:
                assert Path(target.image) == folder / shown[target.id]
                assert Path(target.image).is_file()


def test_names_that_are_one_without_blanks_are_refused(tmp_path):
    for number, name in enumerate(("a b.png", "a%20b.png")):
        Image.new("RGB", (40, 40), (number * 40, 0, 0)).save(tmp_path / name)
    with closing(
        Run(
            load_config(
                ["config=demo", f"out={tmp_path / 'one'}", f"library.path={tmp_path}", "seed.clusters=2"]
            )
        )
    ) as run:
        with error_about(UserError, "a%20b", "twice"):
            stages.seed(run)


def test_a_table_with_another_schema_is_named(world):
    pq.write_table(pa.table({"id": [1]}), world.path("pool", "pool.parquet").parent.parent / "pool.parquet")
    with error_about(UserError, "pool.parquet", "schema"):
        frames.read_table(world.out / "pool.parquet")


def test_a_full_disk_is_named(world, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with error_about(FileError, "pool.parquet"):
        frames.write_rows(world.out / "pool.parquet", [{"id": "a"}])


@contextmanager
def no_room(num_bytes: int):
    """The system refuses files above a size, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_nothing_half_written_stays_when_the_disk_fills(world):
    stages.keep(world)
    stages.pool(world)
    with no_room(300), error_about(UserError, "dataset"):
        export(world, {"q1": "test", "q2": "train"}, {"q1": ["a"], "q2": ["d"]})
    assert not list(world.out.glob("*dataset*"))
    with no_room(300), error_about(FileError, "splits.parquet"):
        stages.split(world)
    assert not list(world.path("split").glob("*parquet*"))
    with no_room(300), error_about(FileError, "x.npy"):
        seed_set.save_vectors(world.out / "x.npy", np.zeros(1000))
    assert not list(world.out.glob("*x.npy*"))
    with no_room(300), error_about(FileError, "x.md"):
        write_text(world.out / "x.md", "x" * 1000)
    assert not list(world.out.glob("*x.md*"))
    assert stages.split(world)["test"] == 2, "with room again the same stage goes on"


def test_a_picture_that_has_gone_is_named(world, tmp_path):
    stages.keep(world)
    stages.pool(world)
    (tmp_path / "a.png").unlink()
    with error_about(UserError, "a.png"):
        stages.split(world)


def test_one_process_a_folder(world):
    with pytest.raises(InUseError):
        Run(world.config)


# ------------------------------------------------------------------------------------------------------ whole, small


def small(out: Path, library: Path, url: str, budget: float | None = None) -> RmirConfig:
    def model(name: str) -> ModelConfig:
        return ModelConfig(
            name=name, base_url=url, concurrency=8, input_price=1, output_price=1, budget=budget
        )

    return RmirConfig(
        out=str(out),
        library=LibraryConfig(path=str(library)),
        image_encoder=EncoderConfig("pixels", None),
        caption_encoder=EncoderConfig("hashing", None),
        models={"writer": model("large"), "judge": model("small")},
        generate=GenerateConfig(max_inputs=4),
        retrieve=RetrieveConfig(by_image=6, by_caption=3),
        queries_per_shard=2,
    )


@pytest.mark.slow
def test_stopped_by_the_budget_and_resumed_no_call_is_paid_twice(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("A_KEY", "sk-very-secret-1")
    one_family(tmp_path / "library.csv")
    counted: Counter[str] = Counter()
    answers = oracle.Oracle(transient=0, malformed=0.01)

    async def count(path, body):
        answer = await answers(path, body)
        counted[json.dumps(body, sort_keys=True)] += answer.status == 200
        return answer

    with LocalServer(count) as server:
        config = small(tmp_path / "out", tmp_path / "library.csv", server.url, budget=0.05)
        config.seed.clusters, config.seed.per_cluster = 12, 30
        config.judge.judges = [JudgeSpec("writer", 1), JudgeSpec("judge", 2)]
        for settings in config.models.values():
            settings.key_env = "A_KEY"
        run = Run(config, progress=False)
        with pytest.raises(BudgetReached):
            run_stages(run, STAGES)
        assert run.done("generate")
        assert not run.done("judge")
        with error_about(UserError, "keep", "judge"):
            run_stages(run, ["keep"])
        run.close()
        for model in config.models.values():
            model.budget = 100
        run = Run(config, progress=False)
        run_stages(run, STAGES)
        page = report.write(run).read_text()
        answered = sum(counted.values())
        shown = estimate(config)  # real numbers have taken the place of guesses
        found = run.done("judge")["counts"]
        assert f"| judge (done) | small | {2 * found['triplets']:,} |" in shown
        assert "0.00 of it in stages not done yet" in shown
        run_stages(run, STAGES)  # all finished: nothing is asked
        config.keep.min_confidence = 0.6  # another setting downstream: nothing is asked either
        assert run.done("judge")
        assert not run.done("keep")
        run_stages(run, STAGES)
    assert set(counted.values()) == {1}
    assert sum(counted.values()) == answered == run.store.num_replies()
    funnel = {(what, unit): number for what, number, unit in report.collect(run)["funnel"]}
    assert funnel["judgements", "calls"] == 3 * funnel["candidates retrieved", "triplets"]
    assert funnel["pictures listed", "images"] == len((tmp_path / "library.csv").read_text().splitlines()) - 1
    assert funnel["retrieval pool", "images"] > 0
    for words in (
        "Fleiss' kappa 0.",
        "| judge 2 | judge |",
        "| text alone | ",
        "| train inputs that are test inputs |",
    ):
        assert words in page
    run.close()
    stored = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(
        b"very-secret" in data for data in [*stored, *(text.encode() for text in capfd.readouterr())]
    )


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer("<html>gateway</html>", content_type="text/html"), "address"),
        (Answer({"error": "busy"}, 503), "unanswered"),
        (Answer({"error": "sk-very-secret-1 is unknown"}, 401), "key"),
    ],
    ids=["html", "busy", "key"],
)
def test_a_stage_that_gets_no_answers_says_so_and_is_not_done(tmp_path, answer, kind):
    one_family(tmp_path / "library.csv")

    async def only(path, body):
        return answer

    with LocalServer(only) as server:
        config = small(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.seed.clusters, config.queries_per_shard = 4, 4
        for settings in config.models.values():
            settings.max_retries = 0
        run = Run(config, progress=False)
        with error_about(UserError, kind):
            run_stages(run, STAGES)
        assert run.done("seed")
        assert not run.done("generate")
        assert run.store.num_replies() == 0
        run.close()


@pytest.mark.slow
def test_a_call_that_is_never_answered_stays_open_and_the_others_go_on_where_that_is_asked_for(
    tmp_path, capfd
):
    """A server that chokes on one input, every time: neither a verdict nor asked, in the fourth run as in the first."""
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(transient=0, malformed=0)
    poison, asked = [], Counter()

    async def chokes(path, body):
        said = json.dumps(body["messages"], sort_keys=True)
        if not poison:
            poison.append(said)
        asked[said] += 1
        return Answer({"error": "boom"}, 500) if poison == [said] else await answers(path, body)

    with LocalServer(chokes) as server:
        config = small(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.seed.clusters = 4
        for settings in config.models.values():
            settings.max_retries = 0
        for _ in range(4):
            with closing(Run(config, progress=False)) as run:
                with error_about(UserError, "unanswered", "on_unanswered"):
                    run_stages(run, STAGES)
                assert not run.done("generate")
        assert asked[poison[0]] == 4
        assert set(asked.values()) == {1, 4}
        config.on_unanswered = "proceed"
        capfd.readouterr()
        with closing(Run(config, progress=False)) as run:
            run_stages(run, STAGES)
            assert run.done("generate")["unanswered"] == 1
            assert run.done("generate")["met"]["unanswered"] == 1
            partly = len(run.rows("generate", "queries"))
            assert run.done("split")
            assert "generate" in status(run)
            config.on_unanswered = "wait"
            assert not run.done("generate"), "a run that waits does not take it for finished"
        assert "1 of 4 calls are unanswered" in capfd.readouterr().err
        config.on_unanswered = "proceed"
        poison.append("healed")
        (run.out / "spent.json").unlink()  # as in a run of an earlier version
        with closing(Run(config, progress=False)) as run:
            run_stages(run, STAGES)
            # Not always more: all that it answers may be rejected. The tables are compared below.
            assert len(run.rows("generate", "queries")) >= partly
            assert all(
                not run.done(stage).get("unanswered") for stage in STAGES if stage in stages_of(config)
            )
            healed = tables_of(run.out)
            calls = [run.done(stage)["calls"] for stage in STAGES if stage in stages_of(config)]
            assert sum(calls) == run.store.num_replies(), (
                "stages that were redone keep what they spent before"
            )
        config.out = str(tmp_path / "undisturbed")
        with closing(Run(config, progress=False)) as run:
            run_stages(run, STAGES)
            assert tables_of(run.out) == healed


def tables_of(out: Path) -> dict[str, list]:
    """Every table of a run."""
    found = {}
    for path in sorted(out.rglob("*.parquet")):
        name = path.relative_to(out).as_posix()
        if "inspected" not in name:
            found[name] = pq.read_table(path).to_pylist()
    return found


ASKING = ("caption", "generate", "filter", "judge")


class Counted:
    """The oracle; counts what it is asked, and names the call in each answer, so that a kept answer tells which it was.

    From the `hold_from`-th different call on it answers nobody, until that is None again: the caller cannot end before it
    is killed, however fast it is.
    """

    def __init__(self):
        self.answers = oracle.Oracle(transient=0, malformed=0.01)
        self.asked: Counter[str] = Counter()
        self.hold_from: int | None = None

    def holds(self) -> bool:
        return self.hold_from is not None and len(self.asked) >= self.hold_from

    async def __call__(self, path, body):
        # Counted when it arrives: a caller that dies before the answer has still asked.
        call = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self.asked[call] += 1
        await asyncio.sleep(0.005)
        while self.holds():
            await asyncio.sleep(0.002)
        answer = await self.answers(path, body)
        answer.body["id"] = call
        return answer


def calls_kept(folder: Path) -> set[str]:
    """The calls whose answers are in the file."""
    with closing(sqlite3.connect(folder / "replies.sqlite")) as file:
        rows = file.execute("SELECT raw FROM replies").fetchall()
    return {json.loads(raw)["id"] for (raw,) in rows}


@pytest.mark.slow
def test_killed_no_kept_call_is_repeated_and_no_row_is_lost(tmp_path):
    """SIGKILL half way through each stage that asks; then the result equals that of an undisturbed run."""
    one_family(tmp_path / "library.csv")
    counted = Counted()
    with LocalServer(counted) as server:
        config = small(tmp_path / "whole", tmp_path / "library.csv", server.url)
        config.seed.clusters, config.seed.per_cluster = 12, 30
        config.judge.judges = [JudgeSpec("writer", 1), JudgeSpec("judge", 1)]
        config.caption.model = "writer"
        run = Run(config, progress=False)
        run_stages(run, STAGES)
        run.close()
        needed, calls, after = len(counted.asked), [run.done(stage)["calls"] for stage in ASKING], 0
        assert set(counted.asked.values()) == {1}
        assert calls_kept(tmp_path / "whole") == counted.asked.keys()
        config.out = str(tmp_path / "killed")
        (tmp_path / "killed.yaml").write_text(yaml.safe_dump(asdict(config)))
        command = ["-m", "data_prep", "rmir", f"config={tmp_path / 'killed.yaml'}"]
        counted.asked.clear()
        kills = []
        for number in calls:
            counted.hold_from, after = after + (number + 1) // 2, after + number
            with Program(*command) as program:
                program.wait_until(counted.holds)
                program.kill()
            kept = calls_kept(tmp_path / "killed")
            assert len(kept) < len(counted.asked)
            kills.append({call: counted.asked[call] for call in kept})
        counted.hold_from = None
        done = forked.run(*command)
        assert done.returncode == 0, done.stderr
    assert calls_kept(tmp_path / "killed") == counted.asked.keys()
    assert len(counted.asked) == needed
    for kept in kills:
        assert {call: counted.asked[call] for call in kept} == kept, (
            "an answer that was kept was asked for again"
        )
    assert sum(counted.asked.values()) - needed <= 3 * 16, "at most the calls under way come twice"
    for table in ("caption/captions", "generate/queries", "filter/valid", "judge/judgements"):
        tables = [frames.read_table(tmp_path / name / table) for name in ("whole", "killed")]
        assert tables[0].equals(tables[1])
    records = [(tmp_path / name / "dataset" / "train.jsonl").read_text() for name in ("whole", "killed")]
    assert records[0] == records[1]
    for stage in ASKING:
        whole, killed = (read_json(tmp_path / name / stage / "done.json") for name in ("whole", "killed"))
        for key in ("calls", "cost"):
            assert killed[key] == pytest.approx(whole[key]), (
                "what stopped commands spent is part of the report"
            )


def test_the_dry_run_asks_nothing_and_multiplies(tmp_path):
    """4 inputs, 10 queries, 6 valid, 54 candidates, 5 judges."""
    oracle.write_library(tmp_path / "all.csv")
    shown = estimate(small(tmp_path / "out", tmp_path / "all.csv", "http://127.0.0.1:9/v1"))
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]] for line in shown.splitlines()[2:12] if "|" in line
    ]
    assert rows == [
        ["seed", "none", "0"],
        ["generate", "large", "4"],
        ["filter", "large", "10"],
        ["retrieve", "none", "0"],
        ["judge", "large", "54"],
        ["judge", "small", "216"],
        *([stage, "none", "0"] for stage in ("keep", "pool", "split", "audit")),
    ]
    assert "0.00 of it" not in shown
    assert not (tmp_path / "out").exists()
    # Four judges by two calls of three draws at most: half of the prompts, and as many answers.
    drawn = small(tmp_path / "out", tmp_path / "all.csv", "http://127.0.0.1:9/v1")
    drawn.models["judge"].draws_a_call = 3
    before, after = (
        [cell.replace(",", "") for cell in line.split("|")[3:6]]
        for page in (shown, estimate(drawn))
        for line in page.splitlines()
        if line.startswith("| judge | small |")
    )
    assert [float(old) / float(new) for old, new in zip(before, after, strict=True)] == pytest.approx(
        [2, 2, 1], rel=1e-4
    )
    # A library of fewer pictures than are looked for: all are candidates, and the query's own one only where that is asked for.
    few = small(tmp_path / "out", tmp_path / "all.csv", "http://127.0.0.1:9/v1")
    few.retrieve.by_image = few.retrieve.by_caption = 10_000
    pictures = len((tmp_path / "all.csv").read_text().splitlines()) - 1
    for exclude, of_a_query in ((True, pictures - 1), (False, pictures)):
        few.retrieve.exclude_input = exclude
        assert f"| judge | large | {6 * of_a_query:,} |" in estimate(few)


@pytest.mark.parametrize("unpriced", [("writer",), ("writer", "judge")])
def test_a_cost_that_is_not_known_is_not_shown_as_nothing(tmp_path, unpriced):
    oracle.write_library(tmp_path / "all.csv")
    config = small(tmp_path / "out", tmp_path / "all.csv", "http://127.0.0.1:9/v1")
    for name in unpriced:
        config.models[name].input_price = config.models[name].output_price = None
    shown = estimate(config)
    cells = {
        line.split("|")[2].strip(): line.split("|")[6].strip() for line in shown.splitlines() if "|" in line
    }
    assert cells["large"] == "unknown"
    assert (cells["small"] == "unknown") == ("in total" not in shown) == (len(unpriced) == 2)
    assert "models.writer" in shown
    assert ("models.judge" in shown) == (len(unpriced) == 2)


@pytest.mark.slow
def test_the_embedded_default(tmp_path, capsys):
    """What comes out is what the trainer and the evaluation read."""
    words = ["rmir", "config=demo", f"out={tmp_path}", "generate.max_inputs=16"]
    main(words)
    assert "Pictures were embedded by: pixels (no model" in capsys.readouterr().out
    records = RecordFile(tmp_path / "dataset" / "train.jsonl", need_rationale=True)
    assert len(records) > 0
    assert all(load_image(image) for image in records[0].query.images)
    made = load_set(tmp_path / "dataset" / "test")
    assert len(made.queries) > 0
    main([*words, "status"])
    assert capsys.readouterr().out.count("done in") == len(STAGES) - 1, "captions: no model is named for them"

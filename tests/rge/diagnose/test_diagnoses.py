"""The three diagnoses: that each sees what it is there to see, and says nothing where there is nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faults import error_about
from recorded import settings_of

from rge.checkpoints.export import export
from rge.common.errors import UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import load_recipe, to_dict
from rge.data.sources import RecordError
from rge.diagnose import __main__ as command
from rge.diagnose import leakage, sensitivity
from rge.diagnose.pairs import Pairs, interval, open_data, permute_across_groups, read_pairs
from rge.embedder import Embedder
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import generate

WORDS = ["egg", "key", "padlock", "chick", "picture", "question"]


@pytest.fixture
def checkpoint(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="plain", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=8,
        reasons="query", recipe=to_dict(load_recipe(["recipe=demo"])), stage="joint", step=7,
    )  # fmt: skip
    export(lively, tmp_path / "run" / "final", settings)
    return tmp_path / "run" / "final"


@pytest.fixture
def records(tmp_path, picture):
    """Six questions by six pictures; the answer is named by the rationale alone."""
    lines = []
    for number in range(24):
        word = WORDS[number % 6]
        picture(60, 60, number).save(tmp_path / f"{number}.png")
        lines.append(
            {
                "id": f"r{number}", "group": f"g{number // 2}", "source": "s", "split": "train",
                "query": {"text": f"What is {word} {number}?", "images": [f"{number}.png"] if number % 2 else []},
                "positives": [{"id": f"t{number}", "identity": word, "text": f"{word} {number}", "rationale": f"a {word}"}],
                "negatives": [{"id": f"n{number}", "text": f"no {word}"}],
            }
        )  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --------------------------------------------------------------------------------------------------------------- pairs


def test_pairs_from_records(records):
    pairs = read_pairs(records, 100)
    assert len(pairs.queries) == 24
    assert len(pairs.candidates) == 48
    assert pairs.oracle[1] == "a key"
    assert pairs.queries[1].pictures[0].endswith("1.png")
    # Everything of one identity answers, in whatever record it stands; a negative does not.
    names = [item.id for item in pairs.candidates]
    assert {names[column] for column in np.flatnonzero(pairs.right_QC[1])} == {"t1", "t7", "t13", "t19"}
    few = read_pairs(records, 5, seed=3)
    assert len(few.queries) == 5
    assert {item.id for item in few.queries} <= {f"r{number}" for number in range(24)}
    assert [item.id for item in few.queries] == [item.id for item in read_pairs(records, 5, seed=3).queries]


def test_pairs_from_a_retrieval_set(tmp_path):
    picture = {"bytes": b"png", "path": None}
    pq.write_table(
        pa.table(
            {
                "id": ["a", "b"],
                "text": ["x", "y"],
                "image": [[picture], []],
                "group": ["g", "h"],
                "instruction": ["do", None],
            }
        ),
        tmp_path / "queries.parquet",
    )
    pq.write_table(
        pa.table({"id": ["c", "d"], "image": [picture, {"bytes": None, "path": "p.png"}]}),
        tmp_path / "corpus.parquet",
    )
    qrels = {"query-id": ["a", "b", "b"], "corpus-id": ["d", "c", "d"], "score": [1, 2, 0]}
    pq.write_table(pa.table(qrels), tmp_path / "qrels.parquet")
    pairs = read_pairs(tmp_path, 10)
    assert pairs.queries[0] == Item("a", content_of("x", (b"png",)), instruction="do")
    assert pairs.candidates[1] == Item("d", content_of(None, (str(tmp_path / "p.png"),)))
    assert pairs.right_QC.tolist() == [[False, True], [True, False]]
    assert pairs.ranked_QC is None
    # What a set keeps out of a query's ranking, such as the query's own picture, cannot be its best candidate here either.
    states = np.eye(2, dtype=np.float32)
    assert pairs.best(states, states).tolist() == [0, 1]
    pq.write_table(pa.table({"query-id": ["a"], "corpus-id": ["c"]}), tmp_path / "excluded.parquet")
    assert read_pairs(tmp_path, 10).best(states, states).tolist() == [1, 1]
    own = pa.table({"query-id": ["a", "a", "b"], "corpus-id": ["c", "d", "c"]})
    pq.write_table(own, tmp_path / "candidates.parquet")
    assert read_pairs(tmp_path, 10).best(states, states).tolist() == [1, 0]
    (tmp_path / "excluded.parquet").unlink()
    assert read_pairs(tmp_path, 10).best(states, states).tolist() == [0, 0]
    assert pairs.oracle == [None, None]
    pq.write_table(pa.table({**qrels, "corpus-id": ["z", "c", "d"]}), tmp_path / "qrels.parquet")
    with error_about(RecordError, "qrels.parquet", "z"):
        read_pairs(tmp_path, 10)
    with error_about(RecordError, tmp_path, "set"):
        open_data(tmp_path, need_rationale=True)
    with error_about(RecordError, tmp_path / "nothing", "format"):
        read_pairs(tmp_path / "nothing", 10)


@pytest.mark.parametrize("single", [True, False])
def test_pictures_of_a_set_are_those_that_an_evaluation_reads(tmp_path, single):
    """A cell of a query may also hold one picture, and an empty text is none."""
    cells = {"a": b"png", "b": b""} if single else {"a": ["p.png"], "b": ["", None]}
    tables = {
        "queries": {"id": list(cells), "text": ["x", "y"], "image": list(cells.values())},
        "corpus": {"id": ["c", "d"], "text": ["x", "y"], "image": ["p.png", ""]},
        "qrels": {"query-id": ["a", "b"], "corpus-id": ["d", "c"], "score": [1, 1]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    pairs, path = read_pairs(tmp_path, 10), str(tmp_path / "p.png")
    assert [item.pictures for item in pairs.queries] == [(b"png",) if single else (path,), ()]
    assert [item.pictures for item in pairs.candidates] == [(path,), ()]


@pytest.mark.parametrize(
    ("table", "column", "cells"),
    [
        ("qrels", "score", ["1"]),
        ("qrels", "score", [None]),
        ("qrels", "query-id", None),
        ("corpus", "id", None),
        ("corpus", "text", None),
        ("corpus", "text", []),
        ("corpus", "image", [3]),
        ("queries", "text", [""]),
        ("queries", "image", [{"url": "p.png"}]),
        ("queries", "id", []),
    ],
)
def test_a_set_that_no_evaluation_would_take_is_refused(tmp_path, table, column, cells):
    tables = {
        "queries": {"id": ["a"], "text": ["x"]},
        "corpus": {"id": ["c"], "text": ["x"]},
        "qrels": {"query-id": ["a"], "corpus-id": ["c"], "score": [1]},
    }
    tables[table][column] = cells
    if cells == []:
        tables |= {"qrels": {"query-id": [], "corpus-id": []}, table: dict.fromkeys(tables[table], [])}
    for name, columns in tables.items():
        kept = {key: values for key, values in columns.items() if values is not None}
        pq.write_table(pa.table(kept), tmp_path / f"{name}.parquet")
    with error_about(RecordError, tmp_path, "set"):
        read_pairs(tmp_path, 10)


def test_partners_come_from_elsewhere():
    groups = ["a"] * 3 + ["b"] * 2 + ["c"] * 4 + ["d"]
    for seed in range(20):
        other = permute_across_groups(groups, seed)
        assert sorted(other) == list(range(10))
        assert all(groups[place] != groups[number] for number, place in enumerate(other))


def test_best_candidates_and_interval_by_hand():
    query = np.eye(3, dtype=np.float32)
    candidates = np.array([[1, 0, 0], [0, 0.9, 0], [0, 1, 0]], dtype=np.float32)
    # The third query scores all candidates alike: the first counts.
    assert Pairs([], [], [], [], np.zeros((3, 3))).best(query, candidates).tolist() == [0, 2, 0]
    mean, low, high = interval(np.array([0.0, 1.0] * 50), [str(number) for number in range(100)])
    assert mean == 0.5
    assert 0.38 < low < 0.43
    assert 0.57 < high < 0.62
    # Pairs of the same outcome are half as many observations.
    _, wide, _ = interval(np.repeat([0.0, 1.0] * 25, 2), [str(number // 2) for number in range(100)])
    assert 0.5 - wide > 1.2 * (0.5 - low)


# --------------------------------------------------------------------------------------------------------- sensitivity


@pytest.mark.slow
def test_sensitivity_sees_that_a_rationale_matters(checkpoint, records):
    encoder = Embedder.from_pretrained(checkpoint)
    pairs = read_pairs(records, 24)
    pairs = replace(pairs, oracle=[f"{text} Certainly." for text in pairs.oracle])
    prompts = [encoder.builder.build(item, "query") for item in pairs.queries]
    written = generate(encoder.model, prompts, max_new_tokens=8, batch_size=7)
    # As sensitivity batches them, to the last bit: candidates of a random model are close to one another.
    own = encoder.encode_after(prompts, [list(row.ids) for row in written], batch_size=7)
    encoded = encoder.encode(pairs.queries, side="query", mode="reasoning").embeddings
    np.testing.assert_allclose(own, encoded, atol=1e-5)
    direct = encoder.encode(pairs.queries, side="query", mode="direct").embeddings
    settings = {"side": "candidate", "mode": "direct", "batch_size": 7}
    candidates = encoder.encode(pairs.candidates, **settings).embeddings
    # Right is what the model finds by its own rationales: whatever another rationale moves is then lost.
    right = np.zeros((24, 48), dtype=bool)
    right[np.arange(24), (own @ candidates.T).argmax(axis=1)] = True
    found = sensitivity.sensitivity(
        encoder, Pairs(pairs.queries, pairs.groups, pairs.oracle, pairs.candidates, right), batch_size=7
    )
    rows = found["conditions"]
    assert rows.keys() == {"own", "swapped", "blanked", "none", "oracle", "oracle, swapped"}
    assert rows["own"]["hit@1"][0] == 1.0
    assert rows["own"]["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert rows["own"]["moved"] == 0
    assert rows["none"]["cosine"] == pytest.approx(float((own * direct).sum(axis=1).mean()), abs=1e-4)
    for name in ("swapped", "blanked", "none", "oracle", "oracle, swapped"):
        assert rows[name]["cosine"] < 0.999
        assert rows[name]["hit@1"][0] == pytest.approx(1 - rows[name]["moved"])
        assert rows[name]["difference"][0] == pytest.approx(rows[name]["hit@1"][0] - 1)
    assert rows["swapped"]["moved"] > 0.2
    others = [pairs.oracle[other] for other in permute_across_groups(pairs.groups)]
    ids = [encoder.builder.rationale_ids(text, "")[:-1] for text in others]
    exchanged = encoder.encode_after(prompts, ids, batch_size=7)
    assert rows["oracle, swapped"]["cosine"] == pytest.approx(
        float((own * exchanged).sum(axis=1).mean()), abs=1e-5
    )
    assert found["verdict"].startswith("the rationale matters: another query's costs -")
    shown = sensitivity.table(found)
    assert "  100.0 [" in shown
    assert found["verdict"] in shown


def test_sensitivity_sees_that_a_rationale_does_not_matter(checkpoint, records, monkeypatch):
    """A model that reads its prompt alone: every rationale gives the direct state."""
    encoder = Embedder.from_pretrained(checkpoint)
    pairs = read_pairs(records, 24)
    direct = encoder.encode(pairs.queries, side="query", mode="direct").embeddings
    monkeypatch.setattr(Embedder, "encode_after", lambda *args, **options: direct)
    found = sensitivity.sensitivity(encoder, pairs, batch_size=8)
    mean, low, high = found["conditions"]["swapped"]["difference"]
    assert mean == 0.0
    assert low < 0 < high  # so few groups do not rule an effect out
    assert found["verdict"].startswith("no effect of the rationale is seen")


def test_own_rationales_of_a_checkpoint_that_decides_are_those_of_reasoning_mode(checkpoint, records):
    """By itself it would answer with ``<emb>`` alone, which is the condition ``none``."""
    settings = json.loads((checkpoint / "rge.json").read_text())
    settings["recipe"]["loss"]["adaptive"]["share"] = 0.5
    (checkpoint / "rge.json").write_text(json.dumps(settings))
    encoder = Embedder.from_pretrained(checkpoint)
    head = encoder.model.model.get_output_embeddings()
    with torch.no_grad():
        head.weight[encoder.model.emb_id] *= 10.0
    pairs = read_pairs(records, 12)
    prompts = [encoder.builder.build(item, "query") for item in pairs.queries]
    assert not all(one.ids for one in generate(encoder.model, prompts, max_new_tokens=8, batch_size=7))
    encoded = encoder.encode(pairs.queries, side="query", mode="reasoning")
    found = sensitivity.sensitivity(encoder, pairs, batch_size=7)
    assert found["rationale_tokens"] == pytest.approx(float(np.mean(encoded.num_rationale_tokens)))


# ------------------------------------------------------------------------------------------------------------- leakage


def test_the_shipped_checkpoint_is_diagnosed_by_its_name(records, tmp_path, capsys):
    words = ["sensitivity", "checkpoint=demo", f"data={records}", "limit=4", "batch_size=4"]
    with error_about(UserError, ("missing", "out")):
        command.main(words)
    assert command.main([*words, f"out={tmp_path / 'o'}"]) in (0, 1)
    assert json.loads((tmp_path / "o" / "sensitivity.json").read_text())["checkpoint"].endswith(
        "demo_checkpoint"
    )


def test_wrong_partners(lively, make_batch):
    batch = make_batch(PromptBuilder(lively.processor))
    size = len(batch.queries)
    for seed in range(10):
        query = leakage.rearrange(batch, "wrong query", np.random.default_rng(seed))
        assert all(query.queries[row] is not batch.queries[row] for row in range(size))
        assert sorted(map(id, query.queries)) == sorted(map(id, batch.queries))
        assert query.oracle_ids is batch.oracle_ids
        assert query.positive is batch.positive
        target = leakage.rearrange(batch, "wrong target", np.random.default_rng(seed))
        assert target.queries is batch.queries
        assert target.oracle_ids is batch.oracle_ids
        assert all(target.positive[row] != batch.positive[row] for row in range(size))
        assert sorted(target.positive) == sorted(batch.positive)
    assert leakage.rearrange(batch, "right", np.random.default_rng(0)) is batch


def test_chance_counts_what_counts(lively, make_batch):
    """Of nine candidates, queries 0, 1 and 2 ignore one, query 3 two, query 4 none; see the table at make_batch."""
    batch = make_batch(PromptBuilder(lively.processor))
    assert len(batch.candidates) == 9
    assert leakage.chance(batch) == pytest.approx((3 * math.log(8) + math.log(7) + math.log(9)) / 5)


def curve(end: float) -> dict[str, list[float]]:
    values = np.linspace(5.0, end, 40).tolist() + [end] * 10
    return {"loss_lm": values, "loss_contrastive": values}


@pytest.mark.parametrize(
    ("wrong", "words", "leak"),
    [
        (1.2, "the oracle rationale leaks the target: with wrong queries the loss still falls by 80 %", 0.8),
        (2.6, "leaks in part: with wrong queries the loss falls by 24 %", 0.24),
        (3.1, "no leak is seen: with wrong queries the loss falls by 4 %", 0.04),
        (3.5, "no leak is seen: with wrong queries the loss falls by 0 %", 0.0),
    ],
)
def test_verdicts(wrong, words, leak):
    found = leakage.judge({"right": curve(0.7), "wrong query": curve(wrong)}, 3.2)
    assert words in found["verdict"]
    assert found["leak"] == pytest.approx(leak, abs=1e-9)
    assert found["gain"]["right"] == pytest.approx(2.5)


def test_no_verdict_without_learning():
    found = leakage.judge({"right": curve(3.0), "wrong query": curve(3.2)}, 3.2)
    assert found["leak"] is None
    assert "no verdict: right triplets got 0.20 nats below chance (3.20)" in found["verdict"]


def test_leakage_needs_targets_to_tell_apart(checkpoint, records):
    few = records.with_name("few.jsonl")
    few.write_text(records.read_text().splitlines()[0] + "\n")
    with error_about(UserError, "few.jsonl"):
        leakage.leakage(checkpoint, few, steps=1, batch_size=2, lr=1e-3)


@pytest.mark.slow
def test_leakage_writes_table_and_curves(checkpoint, records, capsys):
    arguments = [f"checkpoint={checkpoint}", f"data={records}", "steps=2", "batch_size=4"]
    assert command.main(["leakage", *arguments, f"out={checkpoint.parent / 'here'}"]) == 0
    written = json.loads((checkpoint.parent / "here" / "leakage.json").read_text())
    assert written["curves"].keys() == set(leakage.TRIPLETS)
    assert all(len(values) == 2 for found in written["curves"].values() for values in found.values())
    assert written["verdict"] in capsys.readouterr().out


@pytest.mark.slow
def test_an_oracle_rationale_leaks_and_an_own_one_does_not(checkpoint, records):
    """Rationales that name the target, on a model that learns them by heart.

    How much it has learned after so many steps depends on the CPU; which kind of triplets learns more does not.
    """
    found = leakage.leakage(checkpoint, records, steps=120, batch_size=8, lr=5e-3)
    gain = found["gain"]
    assert "leaks" in found["verdict"], leakage.table(found)
    assert gain["wrong query"] > gain["own rationale"], leakage.table(found)
    assert gain["right"] > gain["wrong target"], leakage.table(found)


# ------------------------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["leek"], ("unknown", "leek")),
        (["leakage"], ("missing", "checkpoint")),
        (["leakage", "checkpoint=x"], ("missing", "data")),
        (["leakage", "checkpoint=x", "data=y", "step=3"], ("unknown", "step")),
        (["leakage", "checkpoint=x", "data=y", "steps=many"], ("type", "steps")),
        (["sensitivity", "checkpoint=x", "data=y", "limit=0"], ("range", "limit")),
    ],
)
def test_wrong_commands(arguments, message):
    with error_about(UserError, message):
        command.main(arguments)


def test_help(capsys):
    for words, shown in ((["--help"], "leakage"), (["leakage", "--help"], "steps=100  (integer)")):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 0
        assert shown in capsys.readouterr().out

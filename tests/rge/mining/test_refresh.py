"""Negatives mined in training, against embedding everything one by one."""

import json

import numpy as np
import pytest
import torch

from rge.config import load_recipe
from rge.data.collate import Named, make_batches, query_item, target_item
from rge.data.readers import open_records
from rge.mining.refresh import _Mining, problems
from rge.model.packing import Branch
from rge.objective import Objective

WORDS = "what opens this locked chick turns into a key over time egg".split()


@pytest.fixture
def recipe(tmp_path, tiny_path):
    chance = np.random.default_rng(0)
    rows = []
    for number in range(20):
        text = " ".join(chance.choice(WORDS, 5))
        row = {
            "id": f"r{number}",
            "query": {"text": text},
            "positives": [{"id": f"t{number}", "text": f"a {text} {number}", "rationale": "so"}],
        }
        if number % 4 == 0:
            row["negatives"] = [{"id": f"n{number}", "text": f"not {text}"}]
        if number in (2, 3):
            row["positives"][0]["identity"] = "same"
        rows.append(row)
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        json.dumps(
            {
                "model": {"path": str(tiny_path), "dtype": "float32", "min_pixels": 784, "max_pixels": 3136},
                "data": {"profile": "plain", "mine": {"every": 2, "num": 3, "pool": 20}},
                "stage": "joint",
                "loss": {"ratio": "none", "anchor": "none"},
                "joint": {
                    "steps": 4,
                    "batch_size": 6,
                    "sources": [{"path": str(tmp_path / "records.jsonl")}],
                },
                "train": {"micro_batch_size": 4},
            }
        )
    )
    return lambda *words: load_recipe([f"recipe={tmp_path / 'tiny.yaml'}", f"out={tmp_path / 'out'}", *words])


@pytest.mark.parametrize("anchor", ["none", "self"])
def test_mined_are_the_nearest_of_the_present_states(recipe, lively, anchor):
    made = recipe(f"loss.anchor={anchor}", "data.mine.relative_margin=0.02", "rollout.max_new_tokens=5")
    key = made.joint.sources[0].key
    records = open_records(made.joint.sources[0])
    batches = make_batches(made, made.joint, lively.processor, {key: records})
    objective = Objective.of(made, "joint")
    with torch.no_grad():
        mining = _Mining(made, batches, objective, lively)
        mined, figures = mining(range(2))
    drawn = {draw.index for step in range(2) for draw in batches.mixture.batch(step)}
    assert mined.keys() == {(0, index) for index in drawn}

    source = batches.sources[0]
    builder = source.builder
    names = [Named(index, kind, 0) for index in range(20) for kind in (True, False) if kind or index % 4 == 0]
    direct = [Branch([lively.emb_id], read_state=True)]

    def state(item, side):
        prompt = builder.build(item, side)
        if side == "query" and anchor == "self":
            return mining._queries([prompt])[0].double().numpy()
        with torch.no_grad():
            return lively(lively.pack([prompt], [direct]))[0].state_ND[0].double().numpy()

    vectors = {name: state(target_item(name.of(source)), "candidate") for name in names}
    found = 0
    for index in drawn:
        record = records[index]
        q = state(query_item(record), "query")
        score = {name: float(q @ vector) for name, vector in vectors.items()}
        lowest = score[Named(index, True, 0)]
        own = {one.id for one in record.negatives}
        wrong = [
            name
            for name in names
            if name.of(source).id not in {record.positives[0].id, *own}
            and not {index, name.record} <= {2, 3}
            and score[name] <= lowest - 0.02 * abs(lowest)
        ]
        wrong.sort(key=lambda name: (-score[name], name.of(source).id))
        assert [score[name] for name in mined[0, index]] == pytest.approx(
            [score[name] for name in wrong[:3]], abs=1e-5
        )
        found += len(wrong[:3])
    assert figures["mined_mean"] == pytest.approx(found / len(drawn))


@pytest.mark.parametrize("anchor", ["none", "self"])
def test_micro_batches_stay_within_their_tokens(recipe, lively, anchor, monkeypatch):
    largest = []
    pack = type(lively).pack_prompts if anchor == "self" else type(lively).pack
    name = pack.__name__

    def noted(self, prompts, *others):
        largest.append((sum(map(len, prompts)), len(prompts)))
        return pack(self, prompts, *others)

    monkeypatch.setattr(type(lively), name, noted)

    def mined(*words):
        largest.clear()
        made = recipe(f"loss.anchor={anchor}", "rollout.max_new_tokens=5", *words)
        records = {made.joint.sources[0].key: open_records(made.joint.sources[0])}
        batches = make_batches(made, made.joint, lively.processor, records)
        with torch.no_grad():
            return _Mining(made, batches, Objective.of(made, "joint"), lively)(range(2))[0]

    whole = mined()
    most = max(largest)[0] * 3 // 4
    bounded = mined(f"train.micro_batch_tokens={most}")
    assert all(tokens <= most or rows == 1 for tokens, rows in largest)
    assert any(rows > 1 for _, rows in largest)
    assert bounded == whole


def test_a_batch_draws_from_what_was_mined(recipe, lively):
    made = recipe("data.max_negatives=2")
    batches = make_batches(
        made, made.joint, lively.processor, {made.joint.sources[0].key: open_records(made.joint.sources[0])}
    )
    before = batches[0]
    batches.mined = {
        (0, index): [Named((index + 5) % 20, True, 0), Named((index + 7) % 20, True, 0)]
        for index in range(20)
    }
    after = batches[0]
    assert [len(own) for own in after.negatives] == [2] * 6
    assert sum(map(len, before.negatives)) < 6
    for row, name in enumerate(after.record_ids):
        index = int(name[1:])
        ids = {after.candidates[column].id for column in after.negatives[row]}
        assert ids <= {f"t{(index + 5) % 20}", f"t{(index + 7) % 20}", f"n{index}"}


@pytest.mark.parametrize("word", ["data.mine.num=0", "data.max_negatives=0", "data.mine.range=[2,3]"])
def test_what_mines_nothing_is_refused(recipe, word):
    assert len(list(problems(recipe(word).data, []))) == 1
    assert list(problems(recipe().data, [])) == []
    assert list(problems(recipe(word, "data.mine.every=0").data, [])) == []

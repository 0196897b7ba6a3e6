"""Held-out records: the figures are those of a plain loop, and measuring leaves no trace in training."""

import json
import random

import batch_losses
import numpy as np
import pytest
import torch
from faults import error_about
from forwards import counted_forwards

from rge.config import Recipe, ValidationConfig
from rge.data.collate import Collator, Source
from rge.data.config import DataConfig
from rge.data.sources import RecordError, RecordFile
from rge.distributed.config import TrainConfig
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import generate
from rge.validation import Validation

WORDS = ["what", "egg", "key", "open", "this", "turn", "picture", "locked", "chick"]

PLAIN = DataConfig(sort_by_length=False)


@pytest.fixture
def records(tmp_path, picture):
    """Seven records; targets shared between records, two right answers in one, a labelled negative in two."""
    chance = random.Random(1)
    for number in range(4):
        picture(40 + 9 * number, 80, number).save(tmp_path / f"{number}.png")
    lines = []
    for number in range(7):
        positives = [
            {
                "id": f"t{number % 5}",
                "text": WORDS[number % 5],
                "rationale": " ".join(chance.choices(WORDS, k=3 + number)),
            }
        ]
        if number == 2:
            positives.append({"id": "t0", "text": WORDS[0], "rationale": "egg"})
        lines.append(
            {
                "id": f"r{number}", "group": "g", "source": "s", "split": "dev",
                "query": {"text": " ".join(chance.choices(WORDS, k=5)), "images": [f"{number % 4}.png"][: number % 2]},
                "positives": positives,
                "negatives": [{"id": "n", "text": "locked picture"}][: number % 3 // 2],
            }
        )  # fmt: skip
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RecordFile(path)


def make(
    records, embedder, objective, micro_batch_size=3, max_records=100, micro_batch_tokens=None, **settings
):
    collator = Collator([Source(records, PromptBuilder(embedder.processor), PLAIN)], **settings)
    recipe = Recipe(
        recipe="tiny",
        rollout=RolloutConfig(max_new_tokens=6),
        train=TrainConfig(micro_batch_size=micro_batch_size, micro_batch_tokens=micro_batch_tokens),
        validation=ValidationConfig(max_records=max_records),
    )
    return Validation(collator, objective, recipe)


def by_hand(embedder, records, objective):
    """Every query against the targets of all records, one forward a row."""
    builder = PromptBuilder(embedder.processor)
    collator = Collator([Source(records, builder, PLAIN)])
    from rge.data.mixture import Draw

    rows = [collator.collate([Draw(0, index, index)]) for index in range(len(records))]
    q, t, owner, nll, count = [], [], [], 0.0, 0
    for number, row in enumerate(rows):
        [own] = generate(embedder, row.queries, max_new_tokens=6, batch_size=1)
        q.append(own.state_D)
        oracle = Branch(row.oracle_ids[0], predict=True)
        direct = Branch([embedder.emb_id], read_state=True, predict=True)
        with torch.no_grad():
            readouts = [embedder(embedder.pack(row.queries, [[oracle]]))[0]]
            for candidate in row.candidates:
                readouts.append(embedder(embedder.pack([candidate], [[direct]]))[0])
        t += [readout.state_ND[0] for readout in readouts[1:]]
        owner += [(number, identity) for identity in row.candidate_identity]
        nll += sum(float(readout.nll) for readout in readouts)
        count += len(row.oracle_ids[0]) + len(row.candidates)
    hits, con = 0, 0.0
    for number, row in enumerate(rows):
        positive, negatives, first = None, [], True
        for column, (record, identity) in enumerate(owner):
            score = float(q[number] @ t[column])
            if record == number and first:
                positive, first = score, False
            elif record == number or identity not in row.right_answers[0]:
                negatives.append(score)
        hits += positive > max(negatives)
        terms = np.exp(np.array([positive, *negatives]) / objective.temperature)
        con -= np.log(terms[0] / terms.sum())
    return {
        "val_loss_lm": nll / count,
        "val_loss_contrastive": con / len(rows),
        "val_hit_at_1": hits / len(rows),
    }


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 3, 7, 50])
def test_the_figures_are_those_of_a_plain_loop(lively, records, micro_batch_size):
    objective = Objective(0.3, 0.7, 0.1)
    found = make(records, lively, objective, micro_batch_size).measure(lively)
    expected = by_hand(lively, records, objective)
    assert 0 < expected["val_hit_at_1"] < 1
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    weighted = 0.3 * expected["val_loss_lm"] + 0.7 * expected["val_loss_contrastive"]
    assert found["val_loss"] == pytest.approx(weighted, rel=1e-5)
    assert 0 <= found["val_forced_rate"] <= 1


@pytest.mark.slow
def test_every_forward_keeps_to_the_limit_of_tokens(lively, records):
    """Queries, candidates, and the rollout's encoding: the figures are equal however they are cut."""
    objective, found, forwards = Objective(0.3, 0.7, 0.1), [], []

    def note(_, packs):
        forwards.append([len(prompt) for pack in packs for prompt in pack.owners or ()])

    with lively.register_forward_pre_hook(note):
        for limit in (None, 150, 60):
            forwards.clear()
            validation = make(records, lively, objective, 7, micro_batch_tokens=limit)
            with counted_forwards() as counted:
                found.append(validation.measure(lively))
            assert max(map(sum, forwards)) > 150 if limit is None else counted.within(limit)
            assert limit is None or all(len(rows) == 1 or sum(rows) <= limit for rows in forwards)
    for limited in found[1:]:
        assert limited == pytest.approx(found[0], rel=1e-6)


def test_a_loss_of_the_global_batch_sees_all_queries(lively, records):
    objective = Objective(0.0, 1.0, 0.1, "none", terms={batch_losses.NAME: 1.0})
    with batch_losses.registered():
        few, all_at_once = (make(records, lively, objective, size).measure(lively) for size in (2, 50))
    assert few == pytest.approx(all_at_once, rel=1e-5)


def test_each_source_is_measured_on_its_own(lively, records):
    """Its queries rank its own targets, in its own prompts, and the figures are the means."""
    objective, alone = Objective(0.3, 0.7, 0.1), []
    builders = [PromptBuilder(lively.processor), PromptBuilder(lively.processor, "plain", 80)]
    sources = [
        Source(records, builder, PLAIN, title=name) for builder, name in zip(builders, "ab", strict=True)
    ]
    recipe = Recipe(
        recipe="tiny", rollout=RolloutConfig(max_new_tokens=6), validation=ValidationConfig(max_records=5)
    )
    for source in sources:
        alone.append(Validation(Collator([source]), objective, recipe).measure(lively))
        assert not any(name.endswith("_by_source") for name in alone[-1])
    found = Validation(Collator(sources), objective, recipe).measure(lively)
    assert alone[0] != alone[1]
    for name in alone[0]:
        values = [one[name] for one in alone]
        assert found[name] == pytest.approx(sum(values) / 2)
        assert found[f"{name}_by_source"] == pytest.approx(dict(zip("ab", values, strict=True)))


def test_queries_are_compared_in_float32_under_autocast(lively, records, monkeypatch):
    """As in training. In bfloat16 scores this close are equal, a tie is a miss, and the best checkpoint another one."""
    chance = torch.Generator().manual_seed(2)
    common = torch.randn(48, generator=chance)

    def states(count):
        near = common + 0.02 * torch.randn(count, 48, generator=chance)
        return torch.nn.functional.normalize(near, dim=-1)

    validation = make(records, lively, Objective(0.5, 0.5, 0.01))
    compare, found = validation._contrastive, []
    queries, candidates = states(7), states(9)

    def compared(chunks, q_BD, t_ND):
        assert q_BD.dtype == t_ND.dtype == torch.float32
        found.append(compare(chunks, queries, candidates))
        return found[-1]

    monkeypatch.setattr(validation, "_contrastive", compared)
    validation.measure(lively)
    with torch.autocast("cpu", torch.bfloat16):
        validation.measure(lively)
    assert found[0]["hit_at_1"] > 0
    assert found[1] == found[0]


@pytest.mark.parametrize("anchor", ["oracle", "mix"])
@pytest.mark.parametrize("direct", [0.0, 0.5])
def test_queries_never_see_the_oracle_rationale(lively, records, anchor, direct):
    """It may name the answer. Checkpoints trained after it are used after their own rationales, too."""
    own = make(records, lively, Objective(0.3, 0.7, 0.1, direct=direct)).measure(lively)
    assert make(records, lively, Objective(0.3, 0.7, 0.1, anchor, direct=direct)).measure(lively) == own
    # Not even if the oracle is no LM target.
    figures = make(records, lively, Objective(0.0, 1.0, 0.1, anchor, direct=direct)).measure(lively)
    assert figures["val_hit_at_1"] == own["val_hit_at_1"]
    assert figures["val_forced_rate"] == own["val_forced_rate"]


def test_nothing_is_written_for_checkpoints_without_rationales(lively, records, monkeypatch):
    monkeypatch.setattr("rge.validation.generate", None)
    assert "val_forced_rate" not in make(records, lively, Objective(0.3, 0.7, 0.1, "none")).measure(lively)


def test_the_cold_start_has_only_the_lm_loss(lively, records):
    found = make(records, lively, Objective(1.0, 0.0)).measure(lively)
    assert found.keys() == {"val_loss_lm", "val_loss"}
    without = make(records, lively, Objective(1.0, 0.0, lm_on_candidates=False), need_candidates=False)
    assert without.measure(lively)["val_loss_lm"] != found["val_loss_lm"]


@pytest.mark.parametrize("anchor", ["self", "oracle"])
def test_measuring_leaves_no_trace(lively, records, anchor):
    validation = make(records, lively, Objective(0.5, 0.5, 0.1, anchor))
    lively.train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in lively.state_dict().items()}
    first = validation.measure(lively)
    assert torch.equal(torch.rand(3), expected)
    assert lively.training
    assert all(parameter.grad is None for parameter in lively.parameters())
    assert all(torch.equal(before[name], value) for name, value in lively.state_dict().items())
    assert validation.measure(lively) == first


def test_only_the_first_records_are_used_and_too_few_are_an_error(lively, records, monkeypatch):
    objective = Objective(0.5, 0.5, 0.1)
    few = make(records, lively, objective, max_records=2).measure(lively)
    assert few["val_hit_at_1"] in (0.0, 0.5, 1.0)
    monkeypatch.setattr("rge.distributed.collectives.world_size", lambda: 8)
    for most in (512, 2):
        with error_about(RecordError, "held_out.jsonl", "validation.max_records"):
            make(records, lively, objective, max_records=most)

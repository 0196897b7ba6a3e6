"""One step that trains both states of a query, and which queries it teaches to answer directly."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from faults import error_about
from stock import (
    TEMPERATURE,
    gradients,
    naive_info_nce,
    nll_of,
    state_at_end,
    stock_forward,
    worst_gradient_error,
)

from rge import Embedder
from rge.common.errors import RecipeError, UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import load_recipe
from rge.inference import Inference
from rge.loss_config import AdaptiveConfig, LossConfig
from rge.losses import lead_over_negatives
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout, Writer, drawn_cap, easy_share
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep

DIRECT = 0.25


def objective_of(anchor="self", **more):
    return Objective(0.4, 0.6, TEMPERATURE, anchor, direct=DIRECT, **more)


def rolled_out(embedder, batch, encoded=None):
    """Own rationales, each followed by the direct state, from one rollout."""
    written = generate(
        embedder, batch.queries, max_new_tokens=12, batch_size=4, encoded=encoded, with_direct=True
    )
    return Rollout(written, encoded)


def by_separate_passes(embedder, batch, rollout, objective, easy=None):
    """The loss from one stock pass a state and one a target of the LM loss; `easy` says whose target is <emb> alone."""
    count, emb = len(batch.queries), [embedder.emb_id]
    tails = {"direct": [emb] * count, "oracle": batch.oracle_ids}
    tails["self"] = [[*one.ids, *emb] for one in rollout.rationales[::2]] if rollout else []
    states = []
    for name in (objective.anchor, "direct"):
        hidden, _, starts = stock_forward(embedder, batch.queries, tails[name], "right")
        states.append(torch.stack(list(state_at_end(hidden, starts, batch.queries, tails[name]))))
    alone = [emb] * len(batch.candidates)
    hidden, logits, starts = stock_forward(embedder, batch.candidates, alone, "right")
    c = torch.stack(list(state_at_end(hidden, starts, batch.candidates, alone)))
    nll, labels = nll_of(logits, starts, batch.candidates, alone)
    easy = easy or [False] * count
    targets = [emb if now else ids for ids, now in zip(batch.oracle_ids, easy, strict=True)]
    _, logits, starts = stock_forward(embedder, batch.queries, targets, "right")
    more, more_labels = nll_of(logits, starts, batch.queries, targets)
    nll, labels = nll + more, labels + more_labels
    shares = [1 - objective.direct, objective.direct]
    con = sum(share * naive_info_nce(q, c, batch) for share, q in zip(shares, states, strict=True))
    return 0.4 * nll / labels + 0.6 * con


@pytest.mark.parametrize("form", ["once", "whole", "chunks", "varlen"])
@pytest.mark.parametrize("anchor", ["self", "oracle"])
def test_states_from_one_pass_equal_separate_passes(lively64, make_batch, anchor, form):
    embedder = lively64
    batch = make_batch(PromptBuilder(embedder.processor))
    if form == "once" and anchor != "self":
        pytest.skip("without a rollout, prompts are encoded in the step")
    objective = objective_of(anchor)
    encoded = encode_prompts(embedder, embedder, batch.queries) if form == "once" else None
    rollout = rolled_out(embedder, batch, encoded) if anchor == "self" else None
    if form == "varlen":
        embedder.attention = "varlen"
    report = TrainingStep(embedder, embedder, objective, 2 if form == "chunks" else 100)(batch, rollout)
    found = gradients(embedder)
    total = by_separate_passes(embedder, batch, rollout, objective)
    total.backward()
    error, name = worst_gradient_error(found, gradients(embedder))
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    assert error < 1e-6, name
    assert "hit_at_1_direct" in report


@pytest.mark.parametrize("form", ["once", "whole", "chunks", "varlen"])
def test_rationales_that_end_at_drawn_caps_equal_separate_passes(lively64, make_batch, form):
    """From no token to all, beside the direct state of every query."""
    embedder = lively64
    batch = make_batch(PromptBuilder(embedder.processor))
    batch.seeds[:] = [next(s for s in range(999) if drawn_cap(s, 0.8, 8) == cap) for cap in (0, None, 2, 5, 1)]  # fmt: skip
    loss = LossConfig(budget=0.8, direct=1.0)
    settings = RolloutConfig(max_new_tokens=8)
    size = 2 if form == "chunks" else 100
    writer = Writer(
        embedder, embedder, settings, once=form == "once", vllm=None, loss=loss, micro_batch_size=size, keep="none"
    )  # fmt: skip
    rollout = writer(0, batch)
    lengths = [len(one.ids) for one in rollout.rationales[::2]]
    assert lengths[0] == 0 < max(lengths[2:]) <= 5
    if form == "varlen":
        embedder.attention = "varlen"
    objective = objective_of()
    report = TrainingStep(embedder, embedder, objective, size)(batch, rollout)
    found = gradients(embedder)
    total = by_separate_passes(embedder, batch, rollout, objective)
    total.backward()
    error, name = worst_gradient_error(found, gradients(embedder))
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    assert error < 1e-6, name


def test_a_rollouts_direct_state_is_that_of_a_prompt_alone(lively, make_batch):
    """It is read in the same batch as the rationales are written in, whose ids and states stay what they were."""
    batch = make_batch(PromptBuilder(lively.processor))
    plain = generate(lively, batch.queries, max_new_tokens=12, batch_size=4)
    written = rolled_out(lively, batch).rationales
    assert [one.ids for one in written[::2]] == [one.ids for one in plain]
    given = written[1::2]
    assert [(one.ids, one.direct, one.forced) for one in given] == [((), True, False)] * len(batch.queries)
    hidden, _, starts = stock_forward(lively, batch.queries, [[lively.emb_id]] * len(batch.queries), "right")
    expected = state_at_end(hidden, starts, batch.queries, [[lively.emb_id]] * len(batch.queries))
    for one, state in zip(given, expected, strict=True):
        torch.testing.assert_close(one.state_D, state.detach(), atol=2e-6, rtol=0)


def test_sampled_rationales_keep_their_draws_beside_the_direct_state(lively, make_batch):
    batch = make_batch(PromptBuilder(lively.processor))
    asked = {"max_new_tokens": 8, "batch_size": 4, "temperature": 1.0, "num_each": 2}
    seeds = list(range(2 * len(batch.queries)))
    plain = generate(lively, batch.queries, seeds=seeds, **asked)
    both = generate(lively, batch.queries, seeds=seeds, with_direct=True, **asked)
    assert [one.direct for one in both[2::3]] == [True] * len(batch.queries)
    assert [one.ids for at, one in enumerate(both) if at % 3 < 2] == [one.ids for one in plain]


@pytest.mark.parametrize("micro_batch_size", [100, 2])
def test_easy_queries_get_emb_alone_as_their_target(lively64, make_batch, micro_batch_size):
    batch = make_batch(PromptBuilder(lively64.processor))
    rollout = rolled_out(lively64, batch)._replace(easy_share=0.4)
    objective = objective_of(adaptive=AdaptiveConfig(share=0.9, margin=-2.0))
    report = TrainingStep(lively64, lively64, objective, micro_batch_size)(batch, rollout)
    found = gradients(lively64)
    # By hand: two of five queries at most, those whose direct state leads most.
    emb = [[lively64.emb_id]]
    with torch.no_grad():
        hidden, _, starts = stock_forward(lively64, batch.queries, emb * len(batch.queries), "right")
        q = torch.stack(list(state_at_end(hidden, starts, batch.queries, emb * len(batch.queries))))
        hidden, _, starts = stock_forward(lively64, batch.candidates, emb * len(batch.candidates), "right")
        c = torch.stack(list(state_at_end(hidden, starts, batch.candidates, emb * len(batch.candidates))))
    lead = lead_over_negatives(q, c, *candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)[:2])
    easy = [row in lead.topk(2).indices.tolist() for row in range(len(batch.queries))]
    total = by_separate_passes(lively64, batch, rollout, objective, easy)
    total.backward()
    error, name = worst_gradient_error(found, gradients(lively64))
    assert report["easy_rate"] == pytest.approx(2 / 5)
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    assert error < 1e-6, name


@pytest.mark.parametrize(
    ("adaptive", "most", "rate"),
    [
        (AdaptiveConfig(share=0.9, margin=3.0), 0.9, 0.0),  # no lead is as large
        (AdaptiveConfig(share=0.9, margin=3.0, floor=0.2), 0.9, 0.2),
        (AdaptiveConfig(share=0.9, margin=3.0, floor=0.2), 0.0, 0.0),  # the warm-up has not begun
        (AdaptiveConfig(share=0.9, margin=-3.0), 0.8, 0.8),
    ],
)
def test_shares_of_easy_queries(lively, make_batch, adaptive, most, rate):
    batch = make_batch(PromptBuilder(lively.processor))
    rollout = rolled_out(lively, batch)._replace(easy_share=most)
    report = TrainingStep(lively, lively, objective_of(adaptive=adaptive), 100)(batch, rollout)
    assert report["easy_rate"] == pytest.approx(rate)


def test_the_share_of_easy_queries_rises_during_the_warm_up():
    loss = LossConfig(adaptive=AdaptiveConfig(share=0.6, warmup_steps=10))
    assert [easy_share(loss, step) for step in (0, 5, 10, 99)] == pytest.approx([0, 0.3, 0.6, 0.6])
    assert easy_share(LossConfig(), 3) == 0


def test_the_writer_adds_the_direct_state_to_every_query(lively, make_batch):
    batch = make_batch(PromptBuilder(lively.processor))
    loss = LossConfig(anchor="mix", oracle_share=0.5, direct=1.0)
    settings = RolloutConfig(max_new_tokens=8)
    writer = Writer(
        lively, lively, settings, once=False, vllm=None, loss=loss, micro_batch_size=100, keep="none"
    )
    rollout = writer(0, batch)
    assert rollout.num_beside == len(batch.queries)
    assert {one.oracle for one in rollout.rationales} == {False, True}
    # What was not written in this step has its direct state computed by the step.
    whole = TrainingStep(lively, lively, objective_of("mix"), 100)(batch, rollout)
    chunked = TrainingStep(lively, lively, objective_of("mix"), 2)(batch, rollout)
    assert chunked == pytest.approx(whole, rel=1e-5)


RECIPE = ["recipe=demo", "stage=joint", "init=x"]


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["loss.adaptive.share=0.5"], "loss.adaptive.share"),
        (["loss.direct=1", "loss.anchor=none", "loss.ratio=none"], "loss.anchor"),
        (["loss.direct=1", "rollout.direct_share=0.5"], "rollout.direct_share"),
        (["stage=rl", "loss.budget=0.5"], "loss.budget"),
        (
            ["loss.direct=1", "loss.adaptive.share=0.1", "loss.adaptive.floor=0.2"],
            "loss.adaptive.floor",
        ),
        (
            ["loss.direct=1", "loss.adaptive.share=0.5", "loss.ratio=1:0"],
            "loss.adaptive.share",
        ),
        (
            ["loss.direct=1", "loss.adaptive.share=0.5", "loss.ratio=none"],
            "loss.adaptive.share",
        ),
        (["loss.direct=1", "stage=rl"], "loss.direct"),
    ],
)
def test_settings_that_contradict_one_another(words, about):
    with error_about(RecipeError, about):
        load_recipe([*RECIPE, *words])


def test_weights_of_states_are_shares():
    recipe = load_recipe([*RECIPE, "loss.direct=0.3333333333333333"])
    objective = Objective.of(recipe, "joint")
    assert objective.direct == pytest.approx(0.25)
    plain = Objective.of(load_recipe(RECIPE), "joint")
    assert (plain.direct, plain.lm_targets) == (0, ["words"])
    assert SimpleNamespace(**vars(Objective.of(load_recipe(RECIPE), "cold_start"))).adaptive is None


# ------------------------------------------------------------------------------------------------------------ mode=auto


@torch.no_grad()
def likely_direct(embedder, prompts):
    """Probabilities of <emb> as the first token, by a stock pass, without tokens that are never written."""
    emb, barred = embedder.emb_id, torch.tensor(embedder.suppressed_ids)
    _, logits, starts = stock_forward(embedder, prompts, [[emb]] * len(prompts), "right")
    last = [start + len(prompt) - 1 for start, prompt in zip(starts, prompts, strict=True)]
    return logits[range(len(last)), last].index_fill(1, barred, -math.inf).softmax(dim=1)[:, emb]


def test_probabilities_of_a_direct_answer_are_those_of_a_stock_pass(lively, make_batch):
    prompts = make_batch(builder := PromptBuilder(lively.processor)).queries
    found = Inference(lively, builder).direct_probabilities(prompts, (2, None))
    torch.testing.assert_close(torch.from_numpy(found), likely_direct(lively, prompts), rtol=1e-4, atol=1e-6)


def test_the_first_tokens_probability_decides(lively, make_batch):
    """At a threshold between the queries' own probabilities, those above it write nothing and the others do."""
    batch = make_batch(PromptBuilder(lively.processor))
    asked = {"max_new_tokens": 6, "batch_size": 8}
    likely = likely_direct(lively, batch.queries)
    middle = float(likely.sort().values[2:4].mean())
    found = generate(lively, batch.queries, direct_above=middle, **asked)
    assert [not one.ids for one in found] == (likely >= middle).tolist()
    assert all(one.ids for one in generate(lively, batch.queries, direct_above=1.0, **asked))
    direct = generate(lively, batch.queries, direct_above=0.0, **asked)
    assert not any(one.ids for one in direct)
    given = rolled_out(lively, batch).rationales[1::2]
    for one, other in zip(direct, given, strict=True):
        torch.testing.assert_close(one.state_D, other.state_D, atol=2e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decision_holds_for_samples_too_and_counts_as_close_near_the_threshold(
    lively, make_batch, temperature
):
    batch = make_batch(PromptBuilder(lively.processor))
    asked = {"max_new_tokens": 6, "batch_size": 8, "temperature": temperature, "seeds": batch.seeds}
    likely = likely_direct(lively, batch.queries)
    order = likely.argsort().tolist()
    threshold = float(likely[order[2]]) * (1 - 1e-3)
    found = generate(lively, batch.queries, direct_above=threshold, margins=True, **asked)
    assert [not one.ids for one in found] == (likely >= threshold).tolist()
    something = generate(lively, batch.queries, direct_above=1.0, **asked)
    assert [found[row].ids for row in order[:2]] == [something[row].ids for row in order[:2]]
    assert found[order[2]].margin < 1e-4
    for one, probability in zip(found, likely.tolist(), strict=True):
        assert 0 <= one.margin <= abs(probability - threshold) + 1e-5


def test_a_checkpoint_that_was_not_trained_to_decide_is_not_asked_to(tmp_path):
    embedder = Embedder.from_pretrained("demo")
    with error_about(UserError, ("choice", "mode")):
        embedder.encode_query("What opens this?", mode="auto")
    shutil.copytree(embedder.checkpoint, tmp_path / "decides")
    recorded = json.loads((tmp_path / "decides/rge.json").read_text())
    recorded["recipe"]["loss"]["adaptive"] = {"share": 0.5}
    (tmp_path / "decides/rge.json").write_text(json.dumps(recorded))
    embedder = Embedder.from_pretrained(tmp_path / "decides")
    _, words = embedder.encode_query("What opens a lock?", mode="reasoning", return_rationales=True)
    assert words  # asked for words, it writes some
    item = Item("0", content_of("What opens a lock?"), instruction=embedder.default_instruction)
    (likely,) = embedder.direct_probabilities([item])
    for above, is_silent in ((likely * 0.999, True), (likely * 1.001, False)):
        embedder.settings = embedder.settings.asking(direct_above=float(above))
        _, words = embedder.encode_query("What opens a lock?", mode="auto", return_rationales=True)
        assert (words == "") == is_silent
    embedder.settings = embedder.settings.asking(direct_above=0.0)
    auto, words = embedder.encode_query("What opens a lock?", mode="auto", return_rationales=True)
    assert words == ""
    assert abs(float(auto @ embedder.encode_query("What opens a lock?", mode="direct")) - 1) < 1e-5

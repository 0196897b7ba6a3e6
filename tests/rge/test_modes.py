"""One step that trains both states of a query, and which queries it teaches to answer directly."""

import math
from types import SimpleNamespace

import pytest
import torch
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
from rge.common.errors import UserError
from rge.config import AdaptiveConfig, LossConfig, RecipeError, RolloutConfig, StatesConfig, load_recipe
from rge.losses import alignment, right_by
from rge.model.embedding_model import encode_prompts
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout, Writer, easy_share
from rge.step import TrainingStep, candidate_masks

DIRECT, ALIGN = 0.25, 0.3


def objective_of(anchor="self", **more):
    return Objective(0.4, 0.6, TEMPERATURE, anchor, direct=DIRECT, align=ALIGN, align_temperature=0.2, **more)


def both_states(embedder, batch, encoded=None):
    """Own rationales, each followed by the direct state, from one rollout."""
    written = generate(embedder, batch.queries, max_new_tokens=12, batch_size=4, encoded=encoded, given=[()])
    return Rollout(written, encoded)


def by_separate_passes(embedder, batch, rollout, objective, easy=None):
    """The loss from one stock pass a state and one for the LM loss; `easy` says whose LM target is <emb> alone."""
    emb_id = embedder.emb_id
    own = [[*one.ids, emb_id] for one in rollout.rationales if not one.given] if rollout else batch.oracle_ids
    direct = [[emb_id]] * len(batch.queries)
    states = []
    for tails in (own, direct):
        hidden, _, starts = stock_forward(embedder, batch.queries, tails, "right")
        states.append(torch.stack(list(state_at_end(hidden, starts, batch.queries, tails))))
    hidden, logits, starts = stock_forward(
        embedder, batch.candidates, [[emb_id]] * len(batch.candidates), "right"
    )
    c = torch.stack(list(state_at_end(hidden, starts, batch.candidates, [[emb_id]] * len(batch.candidates))))
    nll, count = nll_of(logits, starts, batch.candidates, [[emb_id]] * len(batch.candidates))
    easy = easy or [False] * len(batch.queries)
    targets = [direct[row] if now else batch.oracle_ids[row] for row, now in enumerate(easy)]
    _, logits, starts = stock_forward(embedder, batch.queries, targets, "right")
    more, more_count = nll_of(logits, starts, batch.queries, targets)
    reasoned, plain = states
    ignored = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)[1]
    kl = 0.0
    for row in range(len(batch.queries)):
        kept = ~ignored[row]
        wanted = (reasoned[row] @ c.T / 0.2)[kept].log_softmax(0).detach()
        found = (plain[row] @ c.T / 0.2)[kept].log_softmax(0)
        kl = kl + (wanted.exp() * (wanted - found)).sum() / len(batch.queries)
    con = (
        (1 - DIRECT) * naive_info_nce(reasoned, c, batch)
        + DIRECT * naive_info_nce(plain, c, batch)
        + ALIGN * kl
    )
    return 0.4 * (nll + more) / (count + more_count) + 0.6 * con


@pytest.mark.parametrize("form", ["once", "whole", "chunks"])
@pytest.mark.parametrize("anchor", ["self", "oracle"])
def test_both_states_from_one_pass_equal_separate_passes(lively64, make_batch, anchor, form):
    batch = make_batch(PromptBuilder(lively64.processor))
    if form == "once" and anchor == "oracle":
        pytest.skip("without a rollout, prompts are encoded in the step")
    encoded = encode_prompts(lively64, lively64, batch.queries) if form == "once" else None
    rollout = both_states(lively64, batch, encoded) if anchor == "self" else None
    step = TrainingStep(lively64, lively64, objective_of(anchor), 2 if form == "chunks" else 100)
    report = step(batch, rollout)
    found = gradients(lively64)
    total = by_separate_passes(lively64, batch, rollout, objective_of(anchor))
    total.backward()
    error, name = worst_gradient_error(found, gradients(lively64))
    assert report["loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    assert error < 1e-6, name
    assert 0 <= report["hit_at_1_direct"] <= 1


def test_a_rollouts_direct_state_is_that_of_a_prompt_alone(lively, make_batch):
    """It is read in the same batch as the rationales are written in, whose ids and states stay what they were."""
    batch = make_batch(PromptBuilder(lively.processor))
    plain = generate(lively, batch.queries, max_new_tokens=12, batch_size=4)
    written = both_states(lively, batch).rationales
    assert [one.ids for one in written if not one.given] == [one.ids for one in plain]
    given = [one for one in written if one.given]
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
    both = generate(lively, batch.queries, seeds=seeds, given=[()], **asked)
    assert [one.given for one in both] == [False, False, True] * len(batch.queries)
    assert [one.ids for one in both if not one.given] == [one.ids for one in plain]


@pytest.mark.parametrize("micro_batch_size", [100, 2])
def test_easy_queries_get_emb_alone_as_their_target(lively64, make_batch, micro_batch_size):
    batch = make_batch(PromptBuilder(lively64.processor))
    rollout = both_states(lively64, batch)._replace(easy_share=0.4)
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
    lead = right_by(q, c, *candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)[:2])
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
    rollout = both_states(lively, batch)._replace(easy_share=most)
    report = TrainingStep(lively, lively, objective_of(adaptive=adaptive), 100)(batch, rollout)
    assert report["easy_rate"] == pytest.approx(rate)


def test_the_share_of_easy_queries_rises_during_the_warm_up():
    loss = LossConfig(adaptive=AdaptiveConfig(share=0.6, warmup_steps=10))
    assert [easy_share(loss, step) for step in (0, 5, 10, 99)] == pytest.approx([0, 0.3, 0.6, 0.6])
    assert easy_share(LossConfig(), 3) == 0


def test_the_writer_adds_the_direct_state_to_every_query(lively, make_batch):
    batch = make_batch(PromptBuilder(lively.processor))
    loss = LossConfig(anchor="mix", oracle_share=0.5, states=StatesConfig(direct=1.0))
    rollout = Writer(lively, lively, RolloutConfig(max_new_tokens=8), False, loss=loss)(0, batch)
    assert [one.given for one in rollout.rationales] == [False, True] * len(batch.queries)
    assert {one.oracle for one in rollout.rationales} == {False, True}
    # What was not written in this step has its direct state computed by the step.
    whole = TrainingStep(lively, lively, objective_of("mix"), 100)(batch, rollout)
    chunked = TrainingStep(lively, lively, objective_of("mix"), 2)(batch, rollout)
    assert chunked == pytest.approx(whole, rel=1e-5)


def test_alignment_is_the_kl_divergence_and_moves_one_side_only():
    torch.manual_seed(0)
    q, teacher, c = (
        torch.nn.functional.normalize(torch.randn(n, 8, dtype=torch.float64), dim=1) for n in (3, 3, 6)
    )
    q, teacher = q.requires_grad_(), teacher.requires_grad_()
    ignored = torch.zeros(3, 6, dtype=torch.bool)
    ignored[0, 2] = True
    found = alignment(q, teacher, c, ignored, temperature=0.5)
    expected = 0.0
    for row in range(3):
        kept = [column for column in range(6) if not ignored[row, column]]
        p, s = ([math.exp(float(state[row].detach() @ c[k]) / 0.5) for k in kept] for state in (teacher, q))
        p, s = ([value / sum(values) for value in values] for values in (p, s))
        expected += sum(a * math.log(a / b) for a, b in zip(p, s, strict=True))
    assert float(found.detach()) == pytest.approx(expected)
    found.backward()
    assert q.grad.any()
    assert teacher.grad is None
    assert float(alignment(teacher, teacher, c, ignored, temperature=0.5).detach()) == pytest.approx(0)


RECIPE = ["recipe=demo", "stage=joint", "init=x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.align=1"], "loss.align=1.0 needs the direct state"),
        (["loss.adaptive.share=0.5"], "loss.adaptive.share=0.5 needs the direct state"),
        (["loss.states.direct=1", "loss.anchor=none", "loss.ratio=none"], "trains the direct state alone"),
        (["loss.states.direct=1", "rollout.direct_share=0.5"], "set one of them to 0"),
        (
            ["loss.states.direct=1", "loss.adaptive.share=0.1", "loss.adaptive.floor=0.2"],
            "floor=0.2 is above loss.adaptive.share=0.1",
        ),
        (["loss.states.direct=1", "stage=rl"], "the stage rl trains the reasoned state alone"),
    ],
)
def test_settings_that_contradict_one_another(words, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe([*RECIPE, *words])


def test_weights_of_states_are_shares():
    recipe = load_recipe([*RECIPE, "loss.states={reasoned: 3, direct: 1}", "loss.align=2"])
    objective = Objective.of(recipe, "joint")
    assert (objective.direct, objective.align, objective.align_temperature) == (
        0.25,
        2.0,
        recipe.loss.temperature,
    )
    assert Objective.of(load_recipe(RECIPE), "joint").direct == 0
    assert SimpleNamespace(**vars(Objective.of(load_recipe(RECIPE), "cold_start"))).adaptive is None


# ------------------------------------------------------------------------------------------------------------ mode=auto


def test_the_first_tokens_probability_decides(lively, make_batch):
    """At a threshold between the queries' own probabilities, those above it write nothing and the others do."""
    batch = make_batch(PromptBuilder(lively.processor))
    asked = {"max_new_tokens": 6, "batch_size": 8}
    with torch.no_grad():
        head, barred = lively.model.get_output_embeddings(), torch.tensor(lively.suppressed_ids)
        logits = head(lively.states_before_answer(batch.queries)).index_fill(1, barred, -math.inf)
    likely = logits.softmax(dim=1)[:, lively.emb_id]
    middle = float(likely.sort().values[2:4].mean())
    found = generate(lively, batch.queries, direct_above=middle, **asked)
    assert [not one.ids for one in found] == (likely >= middle).tolist()
    assert all(one.ids for one in generate(lively, batch.queries, direct_above=1.0, **asked))
    direct = generate(lively, batch.queries, direct_above=0.0, **asked)
    assert not any(one.ids for one in direct)
    given = [one for one in both_states(lively, batch).rationales if one.given]
    for one, other in zip(direct, given, strict=True):
        torch.testing.assert_close(one.state_D, other.state_D, atol=2e-6, rtol=0)


def test_a_checkpoint_that_was_not_trained_to_decide_is_not_asked_to():
    embedder = Embedder.from_pretrained("demo")
    with pytest.raises(UserError, match="mode=auto needs a checkpoint that was trained to decide"):
        embedder.encode_query("What opens this?", mode="auto")
    settings = embedder.settings
    settings["recipe"]["loss"]["adaptive"] = {"share": 0.5}
    _, words = embedder.encode_query("What opens a lock?", mode="reasoning", return_rationales=True)
    assert words  # asked for words, it writes some
    settings["generation"]["direct_above"] = 0.0
    auto, words = embedder.encode_query("What opens a lock?", mode="auto", return_rationales=True)
    assert words == ""
    assert abs(float(auto @ embedder.encode_query("What opens a lock?", mode="direct")) - 1) < 1e-5

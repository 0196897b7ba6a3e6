"""The stage rl's step: k branches of one row against k ordinary passes, chunks against the whole, what is logged."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
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

from rge.common.errors import UserError
from rge.config import Recipe
from rge.distributed import collectives as dist
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.losses import hit_at_1
from rge.model.adapters import add_adapters
from rge.model.backbone import load_backbone
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rl.config import RewardConfig, RLConfig
from rge.rl.credit import Credit, Reinforcement
from rge.rl.reference import Reference, make_reference
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout, sample_seeds
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep

K, CAP, SAMPLED_AT = 3, 9, 0.8


def recipe_of(**changes) -> Recipe:
    settings = {
        "alpha_rl": 0.7,
        "alpha_con": 0.4,
        "alpha_lm": 0.2,
        "num_rationales": K,
        "temperature": SAMPLED_AT,
    }
    return Recipe(
        recipe="tiny",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, temperature=TEMPERATURE),
        rollout=RolloutConfig(max_new_tokens=CAP, batch_size=8),
        rl=RLConfig(**{**settings, **changes}),
        train=TrainConfig(micro_batch_size=2),
    )


@pytest.fixture
def sample():
    """K sampled rationales a query."""

    def run(embedder, batch, encoded=None, seed=0):
        seeds = [one + seed for own in batch.seeds for one in sample_seeds(own, K)]
        return generate(
            embedder, batch.queries, max_new_tokens=CAP, batch_size=8, temperature=SAMPLED_AT, seeds=seeds, num_each=K,
            encoded=encoded,
        )  # fmt: skip

    return run


@pytest.fixture
def take(tmp_path):
    """One update: report, gradients, and the credit."""

    def run(
        embedder,
        batch,
        rationales,
        recipe,
        micro_batch_size=100,
        encoded=None,
        credit=None,
        measure=False,
        reference=None,
    ):
        objective = Objective.of(recipe, "rl")
        if credit is None:
            stage = Reinforcement(recipe, embedder, reference, tmp_path)
            credit = stage.begin(batch, rationales, measure)
            rationales = credit.rationales
        report = TrainingStep(embedder, embedder, objective, micro_batch_size)(batch, Rollout(rationales, encoded), credit)  # fmt: skip
        return report, gradients(embedder), credit

    return run


def stock_rl(embedder, batch, rationales, objective, padding_side="right"):
    """The three losses and the total by 1 + K ordinary passes, and rewards, advantages and policy gradient by hand."""
    emb_id, barred = embedder.emb_id, embedder.suppressed_ids
    direct = [[emb_id]] * len(batch.candidates)
    hidden, _, starts = stock_forward(embedder, batch.candidates, direct, padding_side)
    c = state_at_end(hidden, starts, batch.candidates, direct)
    states, log_probs, contrastive = [], [], 0.0
    for number in range(K):
        own = [[*one.ids, emb_id] for one in rationales[number::K]]
        hidden, logits, starts = stock_forward(embedder, batch.queries, own, padding_side)
        q = state_at_end(hidden, starts, batch.queries, own)
        contrastive = contrastive + naive_info_nce(q, c, batch) / K
        states.append(q)
        logits = (logits / SAMPLED_AT).clone()
        logits[:, :, barred] = -math.inf
        shares = logits.log_softmax(-1)
        log_probs.append(
            [
                [
                    shares[row, starts[row] + len(batch.queries[row]) + at - 1, token]
                    for at, token in enumerate(ids)
                ]
                for row, ids in enumerate(own)
            ]
        )
    total, tokens = 0.0, 0
    rewards = []
    for row, right in enumerate(batch.right_answers):
        reward = []
        for number in range(K):
            logit = [float(states[number][row].detach() @ other.detach()) / TEMPERATURE for other in c]
            # An identity that answers is right, unless it is labelled wrong for this query.
            good = [
                value
                for column, value in enumerate(logit)
                if column == batch.positive[row]
                or (batch.candidate_identity[column] in right and column not in batch.negatives[row])
            ]
            reward.append(math.log(sum(map(math.exp, good))) - math.log(sum(map(math.exp, logit))))
        rewards.append(reward)
        mean = sum(reward) / K
        std = math.sqrt(sum((value - mean) ** 2 for value in reward) / (K - 1))
        for number in range(K):
            advantage = (reward[number] - mean) / (std + 1e-4)
            values = log_probs[number][row]
            values = values[:-1] if rationales[row * K + number].forced else values
            tokens += len(values)
            # On the weights that wrote it the ratio is one: its gradient is that of the log probability.
            total = total - sum(advantage * torch.exp(value - value.detach()) for value in values)
    _, logits, starts = stock_forward(embedder, batch.queries, batch.oracle_ids, padding_side)
    nll, count = nll_of(logits, starts, batch.queries, batch.oracle_ids)
    if objective.lm_on_candidates:
        _, logits, starts = stock_forward(embedder, batch.candidates, direct, padding_side)
        more, more_count = nll_of(logits, starts, batch.candidates, direct)
        nll, count = nll + more, count + more_count
    policy, lm = total / tokens, nll / count
    whole = objective.alpha_rl * policy + objective.alpha_con * contrastive + objective.alpha_lm * lm
    return {"loss_rl": policy, "loss_contrastive": contrastive, "loss_lm": lm, "loss": whole}, rewards


@pytest.mark.parametrize("once", [True, False])
def test_k_branches_equal_k_ordinary_passes(lively64, make_batch, sample, take, once):
    batch = make_batch(PromptBuilder(lively64.processor))
    recipe = recipe_of()
    encoded = encode_prompts(lively64, lively64, batch.queries) if once else None
    rationales = sample(lively64, batch, encoded)
    assert len({one.ids for one in rationales}) > 10
    assert any(one.forced for one in rationales)
    assert not all(one.forced for one in rationales)
    report, found, credit = take(lively64, batch, rationales, recipe, encoded=encoded)
    losses, rewards = stock_rl(
        lively64, batch, rationales, Objective.of(recipe, "rl"), "right" if once else "left"
    )
    losses["loss"].backward()
    error, name = worst_gradient_error(found, gradients(lively64))
    for key, value in losses.items():
        assert report[key] == pytest.approx(float(value.detach()), rel=1e-9, abs=1e-9), key
    assert error < 1e-6, name
    assert report["reward_margin"] == pytest.approx(sum(map(sum, rewards)) / 15, rel=1e-9)
    assert report["reward"] == pytest.approx(report["reward_margin"])
    assert report["groups_that_differ"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.5, 0.0)])
def test_each_loss_may_be_left_out(lively64, make_batch, sample, take, weights):
    batch = make_batch(PromptBuilder(lively64.processor))
    names = ("alpha_rl", "alpha_con", "alpha_lm")
    recipe = recipe_of(**dict(zip(names, weights, strict=True)))
    objective = Objective.of(recipe, "rl")
    rationales = sample(lively64, batch)
    if objective.needs_rollout:
        report, found, _ = take(lively64, batch, rationales, recipe)
    else:
        report = TrainingStep(lively64, lively64, objective, 100)(batch)  # fmt: skip
        found = gradients(lively64)
    losses, _ = stock_rl(lively64, batch, rationales, objective)
    losses["loss"].backward()
    error, name = worst_gradient_error(found, gradients(lively64))
    assert error < 1e-6, name
    assert report["loss"] == pytest.approx(float(losses["loss"].detach()), rel=1e-9, abs=1e-9)
    assert ("loss_rl" in report) == (weights[0] > 0)
    assert ("loss_lm" in report) == (weights[2] > 0)


@pytest.mark.parametrize("alpha_con", [0.4, 0.0])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_chunks_equal_the_undivided_batch(lively, make_batch, sample, take, loss_type, alpha_con):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(loss_type=loss_type, alpha_con=alpha_con, scale_rewards="batch")
    rationales = sample(lively, batch)
    whole, expected, _ = take(lively, batch, rationales, recipe, measure=True)
    report, found, _ = take(lively, batch, rationales, recipe, 2, measure=True)
    assert report == pytest.approx(whole, rel=1e-4, abs=1e-6)
    error, name = worst_gradient_error(found, expected)
    assert error < 1e-4, name


def test_a_second_update_is_clipped_by_the_first_ones_probabilities(lively64, make_batch, sample, take):
    """By hand: the surrogate of the same words and advantages, with ratios to what the first update saw."""
    batch = make_batch(PromptBuilder(lively64.processor))
    recipe = recipe_of(alpha_con=0.0, alpha_lm=0.0, alpha_rl=1.0, epsilon=0.05, num_iterations=2)
    rationales = sample(lively64, batch)
    first, _, credit = take(lively64, batch, rationales, recipe)
    assert first["clip_share"] == 0
    with torch.no_grad():
        for parameter in lively64.parameters():
            parameter.mul_(1.01)
    second, found, _ = take(
        lively64, batch, Rollout(rationales).after_update().rationales, recipe, credit=credit
    )
    assert 0 < second["clip_share"] < 1
    for name in ("reward", "reward_margin", "groups_that_differ", "rationale_tokens_p95"):
        assert second[name] == first[name]
    branches = [
        [Branch([*one.ids, lively64.emb_id], sampled=True) for one in rationales[row * K : row * K + K]]
        for row in range(len(batch.queries))
    ]
    now = lively64(lively64.pack(batch.queries, branches, SAMPLED_AT))[0].log_prob_L
    ratio = (now - credit.old[0]).exp()
    advantage = credit.judged.advantage_N[credit.owner_L]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
    loss = -(surrogate * credit.judged.credit_L).sum() / credit.judged.credit_L.sum()
    loss.backward()
    assert second["loss_rl"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert worst_gradient_error(found, gradients(lively64))[0] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("alpha_con", [0.4, 0.0])
def test_a_second_update_in_chunks_equals_the_undivided_one(lively64, make_batch, sample, take, alpha_con):
    batch = make_batch(PromptBuilder(lively64.processor))
    recipe = recipe_of(alpha_con=alpha_con, epsilon=0.05, num_iterations=2)
    rationales = sample(lively64, batch)
    credits = {micro: take(lively64, batch, rationales, recipe, micro)[2] for micro in (100, 2)}
    assert len(credits[2].old) == 3  # old probabilities chunk by chunk
    with torch.no_grad():
        for parameter in lively64.parameters():
            parameter.mul_(1.01)
    later = Rollout(rationales).after_update().rationales
    whole, expected, _ = take(lively64, batch, later, recipe, credit=credits[100])
    report, found, _ = take(lively64, batch, later, recipe, 2, credit=credits[2])
    assert 0 < report["clip_share"] < 1
    assert report == pytest.approx(whole, rel=1e-6, abs=1e-9)
    error, name = worst_gradient_error(found, expected)
    assert error < 1e-6, name


def test_rewards_alone_with_dropout_in_chunks(lively, make_batch, sample, take, monkeypatch):
    """The states that are rewarded are those that the forward with gradient computes, masks included."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    add_adapters(lively.model, LoraConfig(rank=2, alpha=4, dropout=0.3), lively.emb_id)
    with torch.no_grad():  # PEFT starts with B = 0, where no mask would show
        for parameter in lively.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    lively.train()
    judged, trained = [], []
    judge = Credit.judge
    monkeypatch.setattr(
        Credit,
        "judge",
        lambda self, q, c, masks, read: judged.append((q, c)) or judge(self, q, c, masks, read),
    )
    loss = Credit.loss
    monkeypatch.setattr(
        Credit,
        "loss",
        lambda self, readout, rows: trained.append(readout.state_ND.detach()) or loss(self, readout, rows),
    )
    for changes in ({"alpha_lm": 0.0}, {"alpha_lm": 0.2, "lm_on_candidates": False}):
        judged.clear()
        trained.clear()
        recipe = recipe_of(alpha_con=0.0, alpha_lm=changes["alpha_lm"])
        recipe.loss.lm_on_candidates = changes.get("lm_on_candidates", True)
        report, found, credit = take(lively, batch, rationales, recipe, 2)
        assert len(trained) == 3
        [(q, c)] = judged
        assert q.shape[0] == 5 * K
        assert c.shape[0] == len(batch.candidates)
        torch.testing.assert_close(torch.cat(trained), q)
        assert not torch.equal(q, sample_states(rationales))
        assert credit.judged.advantage_N.any()
        assert math.isfinite(report["loss"])
        assert any(gradient.any() for gradient in found.values())


def sample_states(rationales):
    return torch.stack([one.state_D for one in rationales])


def test_kl_is_measured_from_where_the_stage_began(lively64, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively64.processor))
    recipe = recipe_of(beta=0.5, alpha_con=0.0, alpha_lm=0.0)
    reference = Reference(copy.deepcopy(lively64), SAMPLED_AT, micro_batch_size=2)
    rationales = sample(lively64, batch)
    at_start, _, _ = take(lively64, batch, rationales, recipe, reference=reference)
    assert at_start["kl"] == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        for parameter in lively64.parameters():
            parameter.mul_(1.02)
    later, found, credit = take(lively64, batch, rationales, recipe, reference=reference)
    gap = credit.reference_L - credit.old[0]
    k3 = ((gap.exp() - gap - 1) * credit.judged.credit_L).sum() / credit.judged.credit_L.sum()
    assert later["kl"] == pytest.approx(float(k3), rel=1e-9)
    assert later["kl"] > 1e-3
    without, plain, _ = take(lively64, batch, rationales, recipe_of(alpha_con=0.0, alpha_lm=0.0))
    assert later["loss_rl"] == pytest.approx(without["loss_rl"] + 0.5 * float(k3), rel=1e-9)
    assert worst_gradient_error(found, plain)[0] > 1e-3


def test_the_reference_of_adapters_is_the_model_without_them(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    before = Reference(lively, SAMPLED_AT, 100).log_probs(batch.queries, rationales)
    add_adapters(lively.model, LoraConfig(rank=2, alpha=4), lively.emb_id)
    trained = [name for name, parameter in lively.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for name, parameter in lively.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    reference = Reference(lively, SAMPLED_AT, 100)
    assert torch.equal(reference.log_probs(batch.queries, rationales), before)
    assert [name for name, parameter in lively.named_parameters() if parameter.requires_grad] == trained
    report, _, _ = take(lively, batch, rationales, recipe_of(beta=0.1), reference=reference)
    assert report["kl"] > 1e-4


def test_a_reference_in_bfloat16_starts_without_divergence(lively_path, make_batch, sample):
    """In mixed precision the trained model's weights are float32, and what stands between its layers too."""
    embedder = EmbeddingModel(load_backbone(lively_path, dtype="bfloat16")).eval()
    recipe = recipe_of(beta=0.1)
    recipe.train.micro_batch_size = 5
    alone = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None), distributed_type=DistributedType.NO,
        device=torch.device("cpu"), prepare=lambda *given: given,
    )  # fmt: skip
    reference = make_reference(recipe.rl, recipe.train.micro_batch_size, embedder, alone)
    dist.prepare(alone, embedder, None, 0.0)
    batch = make_batch(PromptBuilder(embedder.processor))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rationales = sample(embedder, batch)
        branches = [
            [Branch([*one.ids, embedder.emb_id], sampled=True) for one in rationales[row * K : row * K + K]]
            for row in range(len(batch.queries))
        ]
        ours = embedder(embedder.pack(batch.queries, branches, SAMPLED_AT))[0].log_prob_L
        assert torch.equal(reference.log_probs(batch.queries, rationales), ours)
    # What matrices multiply is bfloat16 either way: those need no float32 copy.
    matrices = [part.weight for part in reference.embedder.modules() if isinstance(part, torch.nn.Linear)]
    tied = reference.embedder.model.get_input_embeddings().weight.data_ptr()
    assert {one.dtype for one in matrices if one.data_ptr() != tied} == {torch.bfloat16}


def test_suppressed_tokens_take_no_share(lively, make_batch, sample, take):
    """Raising a barred token's logit changes neither loss nor gradient of the policy."""
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(alpha_con=0.0, alpha_lm=0.0)
    rationales = sample(lively, batch)
    expected, gradient, _ = take(lively, batch, rationales, recipe)
    head = lively.model.get_output_embeddings()
    handle = head.register_forward_hook(
        lambda _, inputs, outputs: outputs.index_fill(-1, torch.tensor(lively.suppressed_ids), 50.0)
    )
    found, same, _ = take(lively, batch, rationales, recipe)
    handle.remove()
    assert found["loss_rl"] == expected["loss_rl"]
    assert found["entropy"] == expected["entropy"]
    assert worst_gradient_error(same, gradient)[0] == 0


def test_a_cut_off_rationales_words_count_and_its_emb_does_not(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    _, _, credit = take(lively, batch, rationales, recipe_of())
    assert any(one.forced for one in rationales)
    assert credit.judged.num_tokens == sum(len(one.ids) + (not one.forced) for one in rationales)


def test_the_direct_state_joins_the_group_where_a_reward_asks_for_it(lively64, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively64.processor))
    rewards = [RewardConfig("gain_over_direct"), RewardConfig("length", 0.01)]
    recipe = recipe_of(rewards=rewards, scale_rewards="none", alpha_con=0.0, alpha_lm=0.0)
    rationales = sample(lively64, batch)
    report, _, credit = take(lively64, batch, rationales, recipe, measure=True)
    assert len(credit.rationales) == 5 * (K + 1)
    assert [one.direct for one in credit.rationales] == [False, False, False, True] * 5
    advantage = credit.judged.advantage_N.view(5, K + 1)
    # The direct member is worth 0, so its advantage is less the mean of the group: credited where that is positive.
    with torch.no_grad():
        direct = lively64(lively64.pack(batch.queries, [[Branch([lively64.emb_id], read_state=True)]] * 5))[
            0
        ].state_ND
        c = lively64(
            lively64.pack(
                batch.candidates, [[Branch([lively64.emb_id], read_state=True)]] * len(batch.candidates)
            )
        )[0].state_ND
    masks = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)[:2]
    right = masks[0] | masks[1]
    logit = direct @ c.T / TEMPERATURE
    direct_margin = logit.masked_fill(~right, -math.inf).logsumexp(1) - logit.logsumexp(1)
    written = torch.stack([one.state_D for one in rationales]).view(5, K, -1) @ c.T / TEMPERATURE
    margin = written.masked_fill(~right[:, None], -math.inf).logsumexp(2) - written.logsumexp(2)
    lengths = torch.tensor([len(one.ids) for one in rationales], dtype=torch.float64).view(5, K)
    worth = margin - direct_margin[:, None] - 0.01 * lengths
    mean = worth.sum(1, keepdim=True) / (K + 1)
    torch.testing.assert_close(advantage[:, :-1], worth - mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(advantage[:, -1:], (-mean).clamp(min=0), atol=1e-6, rtol=1e-6)
    assert (mean > 0).any()
    assert (mean < 0).any()
    # Nobody sampled it: worse than its group it teaches nothing, and no figure of what was sampled counts it.
    credited = credit.judged.credit_L[[end - 1 for end in credit.starts[K + 1 :: K + 1]]]
    assert credited.tolist() == (mean < 0)[:, 0].tolist()
    assert report["reward_gain_over_direct"] == pytest.approx(float((margin - direct_margin[:, None]).mean()))
    assert report["reward_length"] == pytest.approx(-float(lengths.mean()))
    assert report["reward"] == pytest.approx(float(worth.mean()))
    assert report["empty_rate"] == pytest.approx(float((lengths == 0).double().mean()))
    plain, _, _ = take(lively64, batch, rationales, recipe_of(alpha_con=0.0, alpha_lm=0.0))
    assert report["entropy"] == pytest.approx(plain["entropy"], rel=1e-9)
    assert report["hit_at_1"] == plain["hit_at_1"]
    assert report["hit_at_1_direct"] == pytest.approx(float(hit_at_1(direct, c, *masks)) / 5)
    # Chunked, the direct states, which no rollout computed, are computed first.
    chunked, _, _ = take(lively64, batch, rationales, recipe, 2)
    assert chunked["reward_gain_over_direct"] == pytest.approx(report["reward_gain_over_direct"], rel=1e-6)


def test_hits_after_anothers_rationale_are_those_of_a_plain_loop(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    report, expected, _ = take(lively, batch, rationales, recipe_of(), measure=True)
    others = [[*rationales[(row - 1) * K].ids, lively.emb_id] for row in range(5)]
    with torch.no_grad():
        q = lively(lively.pack(batch.queries, [[Branch(ids, read_state=True)] for ids in others]))[0].state_ND
        branch = Branch([lively.emb_id], read_state=True)
        c = lively(lively.pack(batch.candidates, [[branch]] * len(batch.candidates)))[0].state_ND
    masks = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)[:2]
    assert report["hit_at_1_counterfactual"] == pytest.approx(float(hit_at_1(q, c, *masks)) / 5)
    # Being measured changes nothing of training.
    plain, found, _ = take(lively, batch, rationales, recipe_of())
    assert "hit_at_1_counterfactual" not in plain
    assert worst_gradient_error(found, expected)[0] == 0
    # One query alone has no other's rationale.
    alone = dataclasses.replace(
        batch, queries=batch.queries[:1], record_ids=batch.record_ids[:1], oracle_ids=batch.oracle_ids[:1],
        positive=[0], negatives=[[1]], right_answers=batch.right_answers[:1], seeds=batch.seeds[:1],
    )  # fmt: skip
    single, _, _ = take(lively, alone, rationales[:K], recipe_of(), measure=True)
    assert "hit_at_1_counterfactual" not in single


def test_right_rationales_are_told_from_wrong_ones(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor), 20)
    report, _, credit = take(lively, batch, sample(lively, batch), recipe_of(rewards=[RewardConfig("hit")]))
    assert 0 < report["reward_hit"] < 1, "the case has no two kinds of rationales to tell apart"
    assert report["groups_that_differ"] > 0
    assert report["advantage_of_right"] > report["advantage_of_wrong"]
    lengths = [len(one.ids) for one in credit.rationales]
    assert max(lengths) >= report["rationale_tokens_p95"] >= sorted(lengths)[len(lengths) // 2]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_equal_rewards_leave_no_gradient_and_end_the_stage(lively, make_batch, take, tmp_path):
    """One rationale written K times: nothing differs, nothing moves, and the message says why."""
    batch = make_batch(PromptBuilder(lively.processor))
    one = generate(lively, batch.queries, max_new_tokens=CAP, batch_size=8)
    same = [each for each in one for _ in range(K)]
    recipe = recipe_of(alpha_con=0.0, alpha_lm=0.0, patience=3, std_floor=0.1)
    report, found, _ = take(lively, batch, same, recipe)
    assert report["groups_that_differ"] == 0
    assert sum(float(gradient.norm()) for gradient in found.values()) < 1e-3
    stage = Reinforcement(recipe, lively, None, tmp_path)
    report["forced_rate"] = 0.25
    stage.after_step(report)
    stage.after_step({**report, "groups_that_differ": 0.2})
    for _ in range(2):
        stage.after_step(report)
    again = Reinforcement(recipe, lively, None, tmp_path)
    again.load_state_dict(stage.state_dict())
    with error_about(UserError, "rl"):
        again.after_step(report)
    patient = Reinforcement(recipe_of(patience=0), lively, None, tmp_path)
    for _ in range(100):
        patient.after_step(report)


def broken(group, value="nan", row=0):
    """A stranger's reward."""
    values = torch.rand(group.forced_BK.shape, generator=torch.Generator().manual_seed(0))
    if value == "list":
        return values.tolist()
    if value == "flat":
        return values.flatten()
    values[row, 1] = float(value)
    return values


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number_leaves_its_group_out(lively, make_batch, sample, take, value):
    batch = make_batch(PromptBuilder(lively.processor))
    name = f"{__name__}:broken"
    recipe = recipe_of(
        rewards=[RewardConfig(name, options={"value": value, "row": 2}), RewardConfig("format", 0.1)]
    )
    report, found, credit = take(lively, batch, sample(lively, batch), recipe)
    assert report["unscored_groups"] == pytest.approx(1 / 5)
    assert not credit.judged.advantage_N.view(5, K)[2].any()
    assert credit.judged.advantage_N.view(5, K)[[0, 1, 3, 4]].any(dim=1).all()
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert math.isfinite(report[f"reward_{name}"])


def test_weights_that_are_not_numbers_end_the_step_as_without_rewards(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    with torch.no_grad():
        lively.model.model.language_model.norm.weight[0] = math.nan
    with pytest.raises(FloatingPointError, match="the loss is nan; records of this batch"):
        take(lively, batch, sample(lively, batch), recipe_of(rewards=[RewardConfig("format")]))


def test_a_reward_that_is_never_a_number_is_not_logged_as_0(lively, make_batch, sample, take, tmp_path):
    """Nor taken for the end of learning: the message names it."""
    batch = make_batch(PromptBuilder(lively.processor))
    name = f"{__name__}:never"
    recipe = recipe_of(rewards=[RewardConfig(name), RewardConfig("format")], patience=1)
    report, _, credit = take(lively, batch, sample(lively, batch), recipe)
    assert report["unscored_groups"] == 1
    assert not credit.judged.advantage_N.any()
    assert not {"reward", f"reward_{name}"} & report.keys()
    assert math.isfinite(report["reward_format"])
    report["forced_rate"] = 0.0
    with error_about(UserError, "rl"):
        Reinforcement(recipe, lively, None, tmp_path).after_step(report)


def never(group):
    """A stranger's reward that always fails to compute."""
    return torch.full(group.forced_BK.shape, math.nan)


def raises(group):
    """A stranger's reward with a bug."""
    return group.no_such_attribute


def test_a_reward_that_raises_is_named_with_its_line(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(rewards=[RewardConfig(f"{__name__}:raises")])
    line = raises.__code__.co_firstlineno + 2
    with error_about(UserError, __file__, line, "rl.rewards", "failed"):
        take(lively, batch, sample(lively, batch), recipe)


def test_a_reward_may_be_there_twice_with_other_options(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    twice = [RewardConfig("embed_rl", 0.3), RewardConfig("embed_rl", 2.0, {"temperature": 0.5})]
    report, _, _ = take(lively, batch, rationales, recipe_of(rewards=twice))
    alone = [take(lively, batch, rationales, recipe_of(rewards=[one]))[0]["reward_embed_rl"] for one in twice]
    assert [report["reward_embed_rl"], report["reward_embed_rl_2"]] == pytest.approx(alone)
    assert report["reward"] == pytest.approx(0.3 * alone[0] + 2.0 * alone[1])


@pytest.mark.parametrize(("value", "got"), [("flat", "(15,)"), ("list", "'list'")])
def test_a_reward_of_the_wrong_length_is_an_error(lively, make_batch, sample, take, value, got):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(rewards=[RewardConfig(f"{__name__}:broken", options={"value": value})])
    with error_about(UserError, "rl.rewards", "shape") as caught:
        take(lively, batch, sample(lively, batch), recipe)
    assert got in caught.value.reason


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (RewardConfig("margn"), ("choice", "reward")),
        (RewardConfig("no_such_module:f"), "unreadable"),
        (RewardConfig("math:no_such_function"), "unreadable"),
        (RewardConfig("math:pi"), "function"),
        (RewardConfig("format", options={"langage": "LATIN"}), "options"),
    ],
)
def test_unknown_rewards_are_errors(lively, tmp_path, config, fault):
    with error_about(UserError, fault):
        Reinforcement(recipe_of(rewards=[config]), lively, None, tmp_path)


def test_a_query_without_a_right_answer_is_unscored(lively, make_batch, sample, take, monkeypatch):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of()
    stage_begin = Reinforcement.begin

    def begin(self, *given):
        credit = stage_begin(self, *given)
        judge = credit.judge

        def without_first(q, c, labels, read):
            labels = labels.each(torch.clone)
            labels.positive_BC[0] = labels.ignored_BC[0] = False
            judge(q, c, labels, read)

        credit.judge = without_first
        return credit

    monkeypatch.setattr(Reinforcement, "begin", begin)
    report, found, credit = take(lively, batch, sample(lively, batch), recipe)
    assert report["unscored_groups"] == pytest.approx(1 / 5)
    assert not credit.judged.advantage_N.view(5, K)[0].any()
    assert math.isfinite(report["reward_margin"])
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_vllms_probabilities_that_are_far_off_are_left_out_and_counted(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(alpha_con=0.0, alpha_lm=0.0)
    recipe.rollout.backend = "vllm"
    rationales = sample(lively, batch)
    _, _, credit = take(
        lively, batch, rationales, dataclasses.replace(recipe, rollout=RolloutConfig(max_new_tokens=CAP))
    )
    ours = credit.old[0].split([len(one.ids) + 1 for one in rationales])
    said = [
        dataclasses.replace(
            one, state_D=None, log_probs=tuple(values.tolist())[: len(one.ids) + (not one.forced)]
        )
        for one, values in zip(rationales, ours, strict=True)
    ]
    same, gradient, _ = take(lively, batch, said, recipe)
    assert same["sampling_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert same["sampling_corrected"] == 0
    # Two of fifteen were sampled from something else: e^2 times as likely here as there.
    for number in (4, 7):
        values = said[number].log_probs
        said[number] = dataclasses.replace(said[number], log_probs=(values[0] - 2.0, *values[1:]))
    off, found, credit = take(lively, batch, said, recipe)
    tokens = sum(len(said[number].log_probs) for number in (4, 7))
    assert off["sampling_corrected"] == pytest.approx(tokens / credit.judged.num_tokens)
    assert off["sampling_ratio_mean"] > 1.2
    assert worst_gradient_error(found, gradient)[0] > 1e-3
    off_again, left, _ = take(
        lively,
        batch,
        said,
        dataclasses.replace(
            recipe, rl=dataclasses.replace(recipe.rl, vllm_importance_sampling_correction=False)
        ),
    )
    assert "sampling_corrected" not in off_again
    assert worst_gradient_error(left, gradient)[0] < 1e-5


def test_a_query_that_goes_without_rationales_has_nothing_to_learn_from(lively, make_batch, sample, take):
    """`rollout.direct_share`: its group is K times the direct state."""
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    rationales[3:6] = [Rationale((), False, None, 0.0, direct=True)] * 3
    report, _, credit = take(lively, batch, rationales, recipe_of())
    assert not credit.judged.credit_L[credit.starts[3] : credit.starts[6]].any()
    assert report["groups_that_differ"] == pytest.approx(4 / 5)
    lengths = [len(one.ids) for number, one in enumerate(rationales) if number not in (3, 4, 5)]
    assert report["rationale_tokens_p95"] <= max(lengths)
    report, _, _ = take(lively, batch, rationales, recipe_of(rewards=[RewardConfig("length")]))
    assert report["reward"] == pytest.approx(-sum(lengths) / len(lengths))  # of what was sampled


@pytest.mark.parametrize("given", [None, 1])
def test_vllm_that_gives_no_probabilities_is_an_error(lively, make_batch, sample, take, given):
    batch = make_batch(PromptBuilder(lively.processor))
    recipe = recipe_of(alpha_con=0.0, alpha_lm=0.0)
    recipe.rollout.backend = "vllm"
    rationales = [
        dataclasses.replace(one, log_probs=(-1.0,) * (len(one.ids) + 1)) for one in sample(lively, batch)
    ]
    number = next(number for number, one in enumerate(rationales) if len(one.ids) > 2)
    rationales[number] = dataclasses.replace(rationales[number], log_probs=given and (-1.0,) * given)
    with error_about(UserError, "rollout.backend"):
        take(lively, batch, rationales, recipe)
    without = dataclasses.replace(
        recipe, rl=dataclasses.replace(recipe.rl, vllm_importance_sampling_correction=False)
    )
    report, _, _ = take(lively, batch, rationales, without)
    assert math.isfinite(report["loss_rl"])


def test_how_many_rationales_were_empty_is_said(lively, make_batch, sample, take):
    batch = make_batch(PromptBuilder(lively.processor))
    rationales = sample(lively, batch)
    rationales[1] = rationales[7] = Rationale((), False, None, 0.0)
    empty = sum(not one.ids for one in rationales)
    assert 2 <= empty < 15
    for rewards, size in ((["margin"], K), (["gain_over_direct"], K + 1)):
        recipe = recipe_of(rewards=[RewardConfig(name) for name in rewards])
        report, _, credit = take(lively, batch, rationales, recipe, 2)
        assert len(credit.rationales) == 5 * size
        assert report["empty_rate"] == pytest.approx(empty / 15)

"""Policy losses and advantages against TRL's own, and by hand."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer, nanstd

from rge.losses import rationale_log_probs
from rge.rl.config import RLConfig
from rge.rl.policy import advantages, policy_loss, sampling_weights, standard_deviation

LENGTHS = [5, 1, 7, 3, 7, 2]
CAP = 7
LOSS_TYPES, SCALES = ("grpo", "dr_grpo", "dapo"), ("group", "batch", "none")


@pytest.fixture
def case():
    """Tokens of six rationales: log probabilities now, at writing, by the sampler and of the reference, in float64."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    now = -2 + noise(1.0)
    return SimpleNamespace(
        now=now,
        old=now + noise(0.25),
        sampler=now + noise(0.5),
        reference=now + noise(0.5),
        advantage=torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        owner=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        entropy=torch.zeros(total, dtype=torch.float64),
    )


def padded(values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    rows = values.split(LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


class NoProcesses:
    """The accelerator of one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction="sum"):
        return value


def trl_loss(case, mask, **settings):
    """Loss and gradient of TRL's own function, called on what it reads of a trainer and nothing else."""
    now = case.now.clone().requires_grad_()
    values = padded(now)
    given = {
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, "loss_type": "grpo", "importance_sampling_level": "token",
        "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "aux_loss_enabled": False, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "max_completion_length": CAP, "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
    } | settings  # fmt: skip
    self = SimpleNamespace(
        **given,
        model=SimpleNamespace(training=True),
        accelerator=NoProcesses(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (values, padded(case.entropy), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(values.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": case.advantage,
        "old_per_token_logps": padded(case.old),
        "ref_per_token_logps": padded(case.reference),
        "num_items_in_batch": mask.sum(),
        "old_logps": (padded(case.old) * mask).sum(1),
    }
    if given["use_vllm"]:
        # `_generate_and_score_completions`, of which this is the part that makes the ratio.
        gap = (padded(case.old) - padded(case.sampler)) * mask
        ratio = gap.sum(-1, keepdim=True).exp()
        inputs["importance_sampling_ratio"] = ratio.masked_fill(ratio > given["most"], 0.0)
    loss = GRPOTrainer._compute_loss(self, None, inputs)
    loss.backward()
    return float(loss.detach()), now.grad


def corrects(most: float | None) -> RLConfig:
    return RLConfig(vllm_importance_sampling_clip_max=most)


def our_loss(case, credit, loss_type, *, reference_L=None, weight_L=None, **more):
    now = case.now.clone().requires_grad_()
    found = policy_loss(
        now, case.old, case.advantage, case.owner, credit,
        RLConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, **more),
        rationales=len(LENGTHS), tokens=int(credit.sum()), cap=CAP, reference_L=reference_L, weight_L=weight_L,
    )  # fmt: skip
    found.loss.backward()
    return float(found.loss.detach()), now.grad, found


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_and_gradients_are_trls(case, loss_type, beta, cut_off):
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    if cut_off:  # the third rationale was cut off and is left out
        credit[case.owner == 2] = False
    mask = padded(credit.double())
    loss, gradient = trl_loss(case, mask, beta=beta, loss_type=loss_type)
    ours, found, terms = our_loss(case, credit, loss_type, beta=beta, reference_L=case.reference)
    assert ours == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert float((found - gradient).norm()) < 1e-9 * float(gradient.norm())
    # The clip takes some gradients and leaves others, else this would prove little.
    assert 0 < int(terms.clipped) < int(credit.sum())


@pytest.mark.parametrize("most", [3.0, 1.0])
def test_the_correction_for_another_sampler_is_trls(case, most):
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    loss, gradient = trl_loss(case, padded(credit.double()), use_vllm=True, most=most, loss_type="dapo")
    weight, ratio = sampling_weights(case.old, case.sampler, case.owner, credit, len(LENGTHS), corrects(most))
    ours, found, _ = our_loss(case, credit, "dapo", weight_L=weight)
    assert ours == pytest.approx(loss, rel=1e-9)
    assert float((found - gradient).norm()) < 1e-9 * float(gradient.norm())
    assert (weight != ratio).any() or most == 3.0


def test_a_token_without_a_probability_of_the_sampler_counts_as_equal(case):
    sampler, equal = case.sampler.clone(), case.sampler.clone()
    sampler[3], equal[3] = math.nan, case.old[3]
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    settings = corrects(3.0)
    weight, expected = (
        sampling_weights(case.old, one, case.owner, credit, len(LENGTHS), settings)[0]
        for one in (sampler, equal)
    )
    assert weight.isfinite().all()
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("said", [-math.inf, -200.0, 200.0])
def test_a_sampler_that_is_far_off_leaves_numbers(case, said):
    """In float32, where e to the 89 is infinite, and without an upper bound."""
    old, sampler = case.old.float(), case.sampler.float()
    sampler[[3, 4]] = said
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    weight, ratio = sampling_weights(old, sampler, case.owner, credit, len(LENGTHS), corrects(None))
    for values in (weight, ratio):
        assert values.isfinite().all()
        assert values.sum().isfinite()
    far = ratio[3] > 1e6 if said < 0 else ratio[3] < 1e-6
    assert far
    bounded, _ = sampling_weights(old, sampler, case.owner, credit, len(LENGTHS), corrects(3.0))
    assert float(bounded[3]) == (0.0 if said < 0 else pytest.approx(float(ratio[3])))


def test_clipped_tokens_are_counted(case):
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    *_, found = our_loss(case, credit, "grpo")
    ratio, advantage = (case.now - case.old).exp(), case.advantage[case.owner]
    expected = ((ratio < 0.8) & (advantage < 0)) | ((ratio > 1.28) & (advantage > 0))
    assert 0 < int(found.clipped) == int(expected.sum()) < len(ratio)


def test_chunks_add_up(case):
    """Four rationales and then two are the loss of all six, whatever divides it."""
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    credit[4] = False
    split = sum(LENGTHS[:4])
    for loss_type in LOSS_TYPES:
        whole, gradient, _ = our_loss(case, credit, loss_type, beta=0.1, reference_L=case.reference)
        total, parts = 0.0, []
        for rows, tokens in ((slice(0, 4), slice(0, split)), (slice(4, 6), slice(split, None))):
            now = case.now[tokens].clone().requires_grad_()
            found = policy_loss(
                now, case.old[tokens], case.advantage[rows], case.owner[tokens] - rows.start, credit[tokens],
                RLConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, beta=0.1),
                rationales=6, tokens=int(credit.sum()), cap=CAP, reference_L=case.reference[tokens],
            )  # fmt: skip
            found.loss.backward()
            total += float(found.loss.detach())
            parts.append(now.grad)
        assert total == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(torch.cat(parts), gradient)


def test_a_token_without_credit_has_no_gradient(case):
    credit = torch.ones(len(case.owner), dtype=torch.bool)
    credit[4] = False  # the `<emb>` at the cap of the first rationale
    case.old[4] = -math.inf
    for loss_type in LOSS_TYPES:
        loss, gradient, _ = our_loss(case, credit, loss_type, beta=0.1, reference_L=case.reference)
        assert math.isfinite(loss)
        assert gradient[4] == 0
        assert gradient[:4].any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_trls(scale):
    reward = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # `_generate_and_score_completions`, as TRL writes it, on its own `nanstd`.
    flat = reward.flatten()
    std = {
        "group": nanstd(reward, dim=1).repeat_interleave(5),
        "batch": nanstd(flat).expand_as(flat),
        "none": torch.ones_like(flat) - 1e-4,
    }[scale]
    expected = (flat - reward.mean(1).repeat_interleave(5)) / (std + 1e-4)
    found = advantages(reward, scale=scale, std_floor=1e-4, std_batch=standard_deviation(reward))
    torch.testing.assert_close(found.flatten(), expected)


def test_the_floor_keeps_rounding_from_becoming_a_preference():
    equal = torch.tensor([[0.5, 0.5 + 1e-7, 0.5 - 1e-7]], dtype=torch.float64)
    large = advantages(equal, scale="group", std_floor=0.0)
    small = advantages(equal, scale="group", std_floor=0.1)
    assert large.abs().max() > 0.9
    assert small.abs().max() < 1e-5


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_without_a_floor_have_no_advantage(scale):
    equal = torch.ones(2, 3, dtype=torch.float64)
    found = advantages(equal, scale=scale, std_floor=0.0, std_batch=standard_deviation(equal))
    assert found.tolist() == [[0.0] * 3] * 2


def test_a_group_with_a_value_that_is_no_number_gets_no_advantage():
    reward = torch.tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0], [math.inf, 0.0, 0.0]])
    found = advantages(reward, scale="batch", std_floor=0.0, std_batch=standard_deviation(reward))
    assert found.tolist() == [[0, 0, 0], [-1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("chunk_tokens", [100, 3])
def test_log_probabilities_are_those_of_the_sampling_distribution(chunk_tokens):
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, bias=False).double()
    hidden = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    label = torch.tensor([0, 3, 4, 10, 5, 5, 1, 0])
    found, entropy = rationale_log_probs(
        hidden, head, label, barred_ids=[2, 9], temperature=0.7, chunk_tokens=chunk_tokens
    )
    allowed = [token for token in range(11) if token not in (2, 9)]
    share = torch.softmax(hidden @ head.weight[allowed].T / 0.7, dim=1)
    expected = share[torch.arange(8), [allowed.index(int(token)) for token in label]].log()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, -(share * share.log()).sum(1))
    assert not entropy.requires_grad
    ours = torch.autograd.grad(found.sum(), [hidden, head.weight], retain_graph=True)
    theirs = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_log_probabilities_need_a_temperature_and_as_many_labels():
    head = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError):
        rationale_log_probs(torch.ones(1, 2), head, torch.zeros(1).long(), barred_ids=[], temperature=0.0)
    with pytest.raises(ValueError):
        rationale_log_probs(torch.ones(2, 2), head, torch.zeros(1).long(), barred_ids=[], temperature=1.0)

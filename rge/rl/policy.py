"""Policy losses (GRPO and its variants) as pure functions: rewards and log probabilities in, a loss out.

Tokens of all rationales are concatenated without padding; `owner_L` has each token's rationale.

Shape suffixes: B = queries, K = rationales per query, N = B * K rationales, L = sampled tokens.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rge.rl.config import RLConfig

MAX_LOG_RATIO = 20.0
"""Log ratios to another sampler are clamped to this on both sides: e^20 exceeds any bound, and is finite."""


def advantages(
    reward_BK: Tensor, *, scale: Literal["group", "batch", "none"], std_floor: float, std_batch: float = 1.0
) -> Tensor:
    """Advantage of each rationale over its group (row); none for a group with a value that is not finite.

    Source: GRPO (arXiv:2402.03300) section 4.1.2, r - mean over std. Scales as TRL's ``scale_rewards``: by the group's standard
    deviation, by `std_batch`, that of all ranks' rewards (`standard_deviation`), or not. Differs: `std_floor`, which is added and
    1e-4 in TRL, is a setting, since rounding differences between states of equal rationales would be amplified.
    A row of `reward_BK` is a group of at least two.
    """
    known_B = reward_BK.isfinite().all(dim=1)
    reward_BK = torch.where(known_B[:, None], reward_BK, 0.0)
    found_BK = reward_BK - reward_BK.mean(dim=1, keepdim=True)
    if scale == "none":
        return found_BK
    if scale == "group":
        divisor_B1 = reward_BK.std(dim=1, keepdim=True) + std_floor
    else:
        divisor_B1 = reward_BK.new_full((len(reward_BK), 1), std_batch + std_floor)
    # Without a floor, equal rewards would give 0 / 0.
    return torch.where(divisor_B1 > 0, found_BK / divisor_B1, 0.0)


def standard_deviation(reward_BK: Tensor) -> float:
    """Of all finite rewards, unbiased; 0 for fewer than two."""
    known = reward_BK[reward_BK.isfinite().all(dim=1)].flatten()
    return float(known.std()) if len(known) > 1 else 0.0


class PolicyTerms(NamedTuple):
    """Terms of a policy loss over some rationales; those of all chunks and ranks add up."""

    loss: Tensor  # with gradient
    kl: Tensor  # summed k3 estimates over credited tokens; 0 without a reference
    clipped: Tensor  # number of credited tokens without gradient because of the clip


def policy_loss(
    log_prob_L: Tensor,
    old_L: Tensor,
    advantage_N: Tensor,
    owner_L: Tensor,
    credit_L: Tensor,
    settings: RLConfig,
    *,
    rationales: float,
    tokens: float,
    cap: int,
    reference_L: Tensor | None = None,
    weight_L: Tensor | None = None,
) -> PolicyTerms:
    """The clipped surrogate of sampled tokens, by one of three normalisations (`rl.loss_type`).

    With ratio r = pi / pi_old and advantage A a token's loss is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), times
    `weight_L`, plus beta * k3, k3 = e^(ref - log pi) - (ref - log pi) - 1 (http://joschu.net/blog/kl-approx.html).

    ===========  ========================================  =====================
    loss_type    divided by                                source
    ===========  ========================================  =====================
    ``grpo``     the rationale's tokens, then rationales   arXiv:2402.03300 eq. 3
    ``dr_grpo``  rationales * cap                          arXiv:2503.20783
    ``dapo``     all tokens                                arXiv:2503.14476 eq. 8
    ===========  ========================================  =====================

    The formulas are TRL's (`GRPOTrainer._compute_loss`), to which tests hold them.

    `log_prob_L` are those of sampled tokens under the present weights, with gradient, `old_L` under the weights that wrote them,
    `reference_L` under the reference (if `rl.beta` is not 0). `credit_L` (bool) excludes a forced ``<emb>`` and rationales that
    are left out. `rationales` and `tokens` are numbers of all ranks and chunks, the first credited or not, the second credited;
    no rationale has more tokens than `cap`. k3 is multiplied by the ratio, which corrects its gradient for rationales written
    with earlier weights. `weight_L` are `sampling_weights`.
    """
    assert reference_L is not None or not settings.beta
    epsilon = settings.epsilon
    epsilon_high = epsilon if settings.epsilon_high is None else settings.epsilon_high
    mask_L = credit_L.to(log_prob_L.dtype)
    # Uncredited tokens may have infinite log probabilities, whose difference is NaN.
    ratio_L = torch.where(credit_L, log_prob_L - old_L, 0.0).exp()
    advantage_L = advantage_N[owner_L]
    clipped_L = ratio_L.clamp(1 - epsilon, 1 + epsilon_high)
    loss_L = -torch.minimum(ratio_L * advantage_L, clipped_L * advantage_L)
    if weight_L is not None:
        loss_L = loss_L * weight_L
    kl_L = torch.zeros_like(log_prob_L)
    if reference_L is not None:
        gap_L = torch.where(credit_L, reference_L - log_prob_L, 0.0)
        kl_L = gap_L.exp() - gap_L - 1
    penalty_L = settings.beta * kl_L * ratio_L
    share_L = torch.ones_like(mask_L)
    if settings.loss_type == "grpo":
        count_N = mask_L.new_zeros(len(advantage_N)).index_add(0, owner_L, mask_L).clamp(min=1.0)
        share_L = (1 / count_N)[owner_L]
    divisor = {"grpo": rationales, "dr_grpo": rationales * cap, "dapo": max(tokens, 1.0)}[settings.loss_type]
    cut_L = ((ratio_L < 1 - epsilon) & (advantage_L < 0)) | ((ratio_L > 1 + epsilon_high) & (advantage_L > 0))
    return PolicyTerms(
        ((loss_L * share_L + penalty_L * share_L) * mask_L).sum() / divisor,
        (kl_L * mask_L).sum().detach(),
        (cut_L & credit_L).sum(),
    )


def sampling_weights(
    old_L: Tensor,
    sampler_L: Tensor,
    owner_L: Tensor,
    credit_L: Tensor,
    num_rationales: int,
    settings: RLConfig,
) -> tuple[Tensor, Tensor]:
    """Importance sampling weights for a sampler that deviates from the model.

    Source: TRL's ``vllm_importance_sampling_mode=sequence_mask`` (https://fengyao.notion.site/off-policy-rl). The weight is the ratio
    pi / pi_sampler of the whole rationale, or 0 above the bound. Differs: its logarithm is first clamped to +-`MAX_LOG_RATIO`,
    since it is infinite for a token that the sampler considers impossible.

    `sampler_L` are log probabilities under the sampler, NaN if unknown, which counts as equal; the others are `policy_loss`'s.
    Returns (L,) weights without gradient, and (L,) the unclamped ratios.
    """
    high, most = settings.vllm_importance_sampling_clip_max, MAX_LOG_RATIO
    gap_L = torch.where(credit_L, (old_L - sampler_L).nan_to_num(0.0, most, -most), 0.0).detach()
    gap_N = gap_L.new_zeros(num_rationales).index_add(0, owner_L, gap_L)
    ratio_L = gap_N[owner_L].clamp(-most, most).exp()
    return ratio_L.masked_fill(ratio_L > (torch.inf if high is None else high), 0.0), ratio_L

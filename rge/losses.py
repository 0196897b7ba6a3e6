"""The losses as pure functions: InfoNCE with false-negative masks and Matryoshka sizes, a judge's scores, the LM loss.

No config, no collectives.

Shape suffixes: B = queries of this rank (of all ranks for a gathered loss), C = candidates of all ranks, N = selected tokens, D = hidden size, V = vocabulary.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rge.common.errors import UserError
from rge.common.registry import Registry, said_by_plugin
from rge.distributed.transfer import moved

CHUNK_TOKENS = 1024
"""Rows of logits that are held at once: 0.6 GB in float32 for Qwen2.5-VL's vocabulary."""

ContrastiveLoss = Callable[..., Tensor]
"""As `info_nce`: called with (q_BD, c_CD, positive_BC, ignored_BC, temperature=...), returns a sum over the B queries. One that has the
argument ``teacher`` gets a `Teacher`, as `kl` does."""


class Labels(NamedTuple):
    """What is known of the candidates of all ranks (C), by query (B) or by query state; on the host."""

    positive_BC: Tensor  # bool, the right answers of the query
    ignored_BC: Tensor  # bool, left out for this query
    labelled_BC: Tensor | None = None  # bool, its labelled negatives
    score_BC: Tensor | None = None  # float32, a judge's scores; NaN where there is none, None: there are none

    def each(self, change: Callable[[Tensor], Tensor]) -> "Labels":
        """The same with every tensor changed."""
        changed = [None if of_queries is None else change(of_queries) for of_queries in self]
        return Labels(*changed)  # type: ignore[arg-type]

    def num_negatives(self) -> tuple[int, int]:
        """Number of negatives, and of labelled ones among them."""
        negative_BC = ~(self.positive_BC | self.ignored_BC)
        labelled = 0 if self.labelled_BC is None else int((negative_BC & self.labelled_BC).sum())
        return int(negative_BC.sum()), labelled

    def num_scored(self) -> Tensor:
        """Number of queries of which a judge scored a positive and a negative."""
        if self.score_BC is None:
            return torch.tensor(0)
        scored_BC = ~self.score_BC.isnan()
        return ((scored_BC & self.positive_BC).any(dim=1) & (scored_BC & ~self.positive_BC).any(dim=1)).sum()


class Teacher(NamedTuple):
    """A judge's scores of the targets of the queries' own records, and how they are compared with cosines."""

    score_BC: Tensor  # float32, on the host; NaN where there is none
    temperature: float  # of the judge's distribution over a query's targets
    scale: float  # cosines per unit of score, of margins


def takes_teacher(name: str) -> bool:
    """Whether a loss of that name is registered and reads a judge's scores."""
    return name in CONTRASTIVE_LOSSES and "teacher" in inspect.signature(CONTRASTIVE_LOSSES[name]).parameters


CONTRASTIVE_LOSSES: Registry[ContrastiveLoss] = Registry(
    "contrastive loss",
    "rge.losses",
    reserved=(
        "lm",
        "rl",
        "contrastive",
        "contrastive_loss",
        "contrastive_direct",
    ),
)

_GATHERED: dict[str, ContrastiveLoss] = {}


def register_loss(name: str, *, gathered: bool = False) -> Callable[[ContrastiveLoss], ContrastiveLoss]:
    """Decorator: ``loss.terms={NAME: WEIGHT}`` selects the function in training and validation; logged as ``loss_NAME``.

    A loss usually gets the queries of its process. With `gathered`, it gets those of all processes, as rows of all its arguments,
    and returns a sum over them, which is the same on every process.
    """

    def add(loss: ContrastiveLoss) -> ContrastiveLoss:
        CONTRASTIVE_LOSSES.add(name, loss)
        if gathered:
            _GATHERED[name] = loss
        return loss

    return add


def is_gathered(name: str) -> bool:
    """Whether the registered loss gets the queries of all processes."""
    return _GATHERED.get(name) is CONTRASTIVE_LOSSES[name]


@register_loss("info_nce")
def info_nce(
    q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE of each local query against every candidate of the global batch, summed over the queries.

    Source: RGE (arXiv:2511.16150) eqs. 2 and 3. Differs: a query may have several positives; its loss is the mean over
    them of ``-log(e^p / (e^p + sum of negatives))``, so that positives do not push one another away. With one
    positive a query this is the paper's loss. It is a sum, so that the caller divides by the *global* number of queries.

    Args:
        q_BD: unit-norm query states of this rank, float32.
        c_CD: unit-norm candidates of all ranks, gathered with gradient, float32.
        positive_BC: bool, the columns that answer the query. On the host, like the next, so that checks do not synchronise.
        ignored_BC: bool, columns left out for this query: duplicates of its target, other right answers.
        temperature: tau > 0; cosine similarities are divided by it. No unit.

    Returns:
        Scalar, in nats.

    Raises:
        ValueError: temperature <= 0, a query without a positive, or a positive that is ignored as well.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if not bool(positive_BC.any(dim=1).all()):
        rows = (~positive_BC.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"every query needs a positive among the candidates; rows {rows} have none")
    if bool((positive_BC & ignored_BC).any()):
        raise ValueError("a candidate cannot be a positive and ignored for the same query")
    positive_BC, ignored_BC = moved((positive_BC, ignored_BC), q_BD.device)
    logit_BC = q_BD @ c_CD.T / temperature
    wrong_BC = logit_BC.masked_fill(positive_BC | ignored_BC, float("-inf"))
    negatives_B1 = wrong_BC.logsumexp(dim=1, keepdim=True)
    # -log(e^p / (e^p + sum_neg)) = softplus(logsumexp(neg) - p). Without any negative that is softplus(-inf) = 0.
    nll_BC = torch.logaddexp(logit_BC, negatives_B1) - logit_BC
    return (nll_BC.masked_fill(~positive_BC, 0.0).sum(dim=1) / positive_BC.sum(dim=1)).sum()


@register_loss("kl")
def kl(q_BD: Tensor, c_CD: Tensor, *_: Tensor, temperature: float, teacher: Teacher) -> Tensor:
    """KL divergence from a judge's distribution over each query's scored targets to that of the embeddings, summed over the queries.

    Source: listwise distillation as in RocketQAv2 (arXiv:2110.07367) and sentence-transformers' DistillKLDivLoss. Differs: each side
    has its own temperature, and there is no factor for it. Arguments as in `info_nce`; a query with fewer than two scores adds 0. In nats.
    """
    scored_BC, score_BC = _scored(teacher, q_BD)
    least = torch.finfo(q_BD.dtype).min
    student_BC = (q_BD @ c_CD.T / temperature).masked_fill(~scored_BC, least).log_softmax(dim=1)
    judge_BC = (score_BC / teacher.temperature).masked_fill(~scored_BC, least).log_softmax(dim=1)
    apart_BC = F.kl_div(student_BC, judge_BC, reduction="none", log_target=True)
    counts_B1 = (scored_BC.sum(dim=1) > 1)[:, None]
    return apart_BC.masked_fill(~(scored_BC & counts_B1), 0.0).sum()


@register_loss("margin_mse")
def margin_mse(
    q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, *_: Tensor, temperature: float, teacher: Teacher
) -> Tensor:
    """Squared difference of the embeddings' and a judge's margins between positives and negatives, summed over the queries.

    Source: Margin-MSE (arXiv:2010.02666). Differs: cosines instead of inner products, so the judge's margins are multiplied by
    `Teacher.scale`; the mean over a query's pairs of a scored positive and a scored negative. Arguments as in `info_nce`, of which
    the temperature has no effect; a query without such a pair adds 0. No unit.
    """
    scored_BC, score_BC = _scored(teacher, q_BD)
    positive_BC = moved((positive_BC,), q_BD.device)[0]
    apart_BC = q_BD @ c_CD.T - teacher.scale * score_BC

    def moments(mask_BC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count_B = mask_BC.sum(dim=1)
        own_BC = apart_BC.masked_fill(~mask_BC, 0.0)
        mean_B = own_BC.sum(dim=1) / count_B.clamp(min=1)
        spread_BC = (apart_BC - mean_B[:, None]).masked_fill(~mask_BC, 0.0).square()
        return count_B, mean_B, spread_BC.sum(dim=1) / count_B.clamp(min=1)

    # The mean of (a - b)^2 over all pairs is (mean a - mean b)^2 plus both variances.
    num_p_B, mean_p_B, spread_p_B = moments(scored_BC & positive_BC)
    num_n_B, mean_n_B, spread_n_B = moments(scored_BC & ~positive_BC)
    loss_B = (mean_p_B - mean_n_B).square() + spread_p_B + spread_n_B
    return loss_B.masked_fill((num_p_B == 0) | (num_n_B == 0), 0.0).sum()


def _scored(teacher: Teacher, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mask of the scored candidates, and scores with 0 for the others, on the device and in the precision of `like`."""
    score_BC = moved((teacher.score_BC,), like.device)[0].to(like.dtype)
    return ~score_BC.isnan(), score_BC.nan_to_num(nan=0.0)


def contrastive_losses(
    q_BD: Tensor,
    c_CD: Tensor,
    labels: Labels,
    *,
    terms: Mapping[str, float],
    temperature: float,
    sizes: Sequence[int] = (),
    teacher_temperature: float = 1.0,
    teacher_scale: float = 1.0,
    gather: Callable[[Tensor], Tensor] | None = None,
    num_processes: int = 1,
) -> dict[str, Tensor]:
    """The registered losses that a recipe names, each the mean over the full embedding and its first n components.

    Source of the mean: Matryoshka Representation Learning (arXiv:2205.13147). Differs: the paper's sum with weights of
    one is a mean here, so that the ratio to the LM loss stays what the recipe says. A cut embedding is normalised again.
    `terms` are weights by registered name, `sizes` further numbers of components, the teacher's settings those of `Teacher`, the
    rest as in `info_nce`. `gather` returns the rows of all processes, with gradient, for losses that see all queries; None: there
    is only this one.

    Returns:
        By name, without the weights, summed over B, or this process's equal share of a sum over all queries; and
        ``contrastive_loss``, their weighted sum, which is trained.

    Raises:
        ValueError: a size that is not below the full one, or is given twice; and as the losses.
        UserError: a loss does not return a scalar tensor.
    """
    full = q_BD.shape[1]
    if len({full, *sizes}) != len(sizes) + 1 or max(sizes, default=0) > full:
        raise ValueError(
            f"embeddings have {full} components; truncated sizes must be smaller, each listed once: {list(sizes)}"
        )
    if labels.score_BC is None:
        labels = labels._replace(score_BC=torch.full(labels.positive_BC.shape, float("nan")))

    def cut(q: Tensor) -> list[tuple[Tensor, Tensor]]:
        shorter = [(F.normalize(q[:, :n], dim=-1), F.normalize(c_CD[:, :n], dim=-1)) for n in sizes]
        return [(q, c_CD), *shorter]

    own = everyone = cut(q_BD), labels
    if gather is not None and any(map(is_gathered, terms)):
        everyone = cut(gather(q_BD)), labels._replace(labelled_BC=None).each(gather)
    losses = {}
    for name in terms:
        cuts, (positive_BC, ignored_BC, _, score_BC) = everyone if is_gathered(name) else own
        assert score_BC is not None
        more: dict[str, Any] = {"temperature": temperature}
        if takes_teacher(name):
            more["teacher"] = Teacher(score_BC, teacher_temperature, teacher_scale)
        loss = CONTRASTIVE_LOSSES[name]
        if len(positive_BC):
            found = [loss(*pair, positive_BC, ignored_BC, **more) for pair in cuts]
        else:  # of a source that only other processes have queries of
            found = [q_BD.sum()]
        for value in found:
            if not isinstance(value, Tensor) or value.dim():
                got = (
                    f"a tensor of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else type(value).__name__
                )
                raise UserError(
                    f"loss.terms: {name} must return a scalar tensor, the sum of the queries' losses, and returned {got}"
                )
        losses[name] = torch.stack(found).mean() / (num_processes if is_gathered(name) else 1)
    weighted = [losses[name] * weight for name, weight in terms.items()]
    return losses | {"contrastive_loss": sum(weighted[1:], weighted[0])}


def try_out(name: str, temperature: float) -> None:
    """Call a registered loss once, on two queries and three candidates, and compute its gradient.

    Raises:
        UserError: unknown name; the loss fails, or returns anything but a scalar with a gradient. The message names plug-in, file
            and line.
    """
    chance = torch.Generator().manual_seed(0)
    q_BD, c_CD = (F.normalize(torch.randn(n, 8, generator=chance), dim=-1).requires_grad_() for n in (2, 3))
    positive_BC = torch.tensor([[True, False, False], [False, True, False]])
    CONTRASTIVE_LOSSES[name]  # unknown names are reported by themselves
    scores = torch.rand(2, 3, generator=chance)
    labels = Labels(positive_BC, torch.zeros_like(positive_BC), score_BC=scores)
    try:
        losses = contrastive_losses(q_BD, c_CD, labels, terms={name: 1.0}, temperature=temperature)
        losses[name].backward()
    except Exception as error:  # it may raise anything
        if isinstance(error, UserError):
            raise
        raise UserError(f"loss.terms: {name} fails on a small batch: {said_by_plugin(error)}") from error


def lead_over_negatives(q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor) -> Tensor:
    """(B,) the margin by which each query's best positive leads its best negative, as a difference of cosines."""
    score_BC = q_BD @ c_CD.T
    positive_BC, ignored_BC = moved((positive_BC, ignored_BC), q_BD.device)
    best_positive_B = score_BC.masked_fill(~positive_BC, float("-inf")).amax(dim=1)
    best_negative_B = score_BC.masked_fill(positive_BC | ignored_BC, float("-inf")).amax(dim=1)
    return best_positive_B - best_negative_B


def hit_at_1(q_BD: Tensor, c_CD: Tensor, positive_BC: Tensor, ignored_BC: Tensor) -> Tensor:
    """Number of queries whose best candidate is a positive; a tie with a negative counts as a miss."""
    return (lead_over_negatives(q_BD, c_CD, positive_BC, ignored_BC) > 0).sum()


def _by_chunks(
    work: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    hidden_ND: Tensor,
    label_N: Tensor,
    chunk_tokens: int,
) -> list[tuple[Tensor, ...]]:
    """The results of `work` on `chunk_tokens` rows at a time; several chunks' logits are recomputed in the backward pass."""
    if hidden_ND.shape[0] != label_N.shape[0]:
        raise ValueError(f"{hidden_ND.shape[0]} states cannot predict {label_N.shape[0]} labels")
    if label_N.shape[0] <= chunk_tokens:
        return [work(hidden_ND, label_N)]
    chunks = zip(hidden_ND.split(chunk_tokens), label_N.split(chunk_tokens), strict=True)
    return [checkpoint(work, hidden, label, use_reentrant=False) for hidden, label in chunks]


def rationale_nll(
    hidden_ND: Tensor,
    head: torch.nn.Module,
    label_N: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    reduction: str = "sum",
) -> Tensor:
    """Negative log likelihood of rationale and ``<emb>`` tokens, summed over the tokens.

    Source: RGE (arXiv:2511.16150) eq. 8. Differs: as printed, eq. 8 multiplies a sum over the N_q rationale tokens by
    N_q once more; the reading implemented here is the token-weighted mean over both sides,
    (N_q mean_q + N_t mean_t) / (N_q + N_t). This function returns its numerator; the caller divides by the number of
    tokens of the global batch.

    Args:
        hidden_ND: states that predict, one before each label.
        head: the model's output projection, D -> V.
        label_N: token ids, int64.
        chunk_tokens: rows of logits held at once.
        reduction: ``sum``, or ``none`` for one value per token.

    Returns:
        Scalar float32, in nats; zero for N = 0, still part of the graph. (N,) without reduction.

    Raises:
        ValueError: hidden and label lengths differ.
    """

    def nll(hidden: Tensor, label: Tensor) -> tuple[Tensor]:
        logits = head(hidden)
        logits = logits.float() if logits.dtype != torch.float64 else logits
        return (F.cross_entropy(logits, label, reduction=reduction),)

    parts = [part for (part,) in _by_chunks(nll, hidden_ND, label_N, chunk_tokens)]
    return torch.cat(parts) if reduction == "none" else sum(parts[1:], parts[0])


def rationale_log_probs(
    hidden_ND: Tensor,
    head: torch.nn.Module,
    label_N: Tensor,
    *,
    barred_ids: Sequence[int],
    temperature: float,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log probabilities of sampled tokens under the distribution that `rge.rollout.generate` draws from.

    That is softmax(logits / temperature) without the barred tokens. Otherwise the model could raise their share, which
    has no effect on a rollout, instead of the words'. States, head, labels (none of them barred) and chunks are those of
    `rationale_nll`; logits are divided by the temperature.

    Returns:
        (N,) log probabilities in nats, with gradient, float32 or float64; (N,) entropies in nats, without.

    Raises:
        ValueError: hidden and label lengths differ, or temperature <= 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    barred = moved(torch.tensor(list(barred_ids), dtype=torch.long), hidden_ND.device)

    def chunk(hidden: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        log_prob = logits.index_fill(1, barred, float("-inf")).log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_prob.exp() * log_prob.clamp(min=torch.finfo(log_prob.dtype).min)).sum(dim=-1)
        return log_prob.gather(1, label[:, None])[:, 0], entropy

    log_probs, entropies = zip(*_by_chunks(chunk, hidden_ND, label_N, chunk_tokens), strict=True)
    return torch.cat(log_probs), torch.cat(entropies)

"""Rewards of rationales, as pure functions of the text and of its retrieval.

A recipe names them, ``rl.rewards: [{name: margin, weight: 1.0, options: {...}}]``. A custom reward is a function of a `Rollouts`,
registered with `reward` in a module of ``plugins=``, or named ``module:function``. Greater is better; a group with a value that
is not finite is left out of the policy gradient and counted.

Shape suffixes: B = queries of this rank, K = rationales per query, C = candidates of all ranks, V = settings of their prompts,
D = hidden size.
"""

import inspect
import sys
import tempfile
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rge.common.errors import UserError
from rge.common.registry import Registry, load_plugins
from rge.rl.config import RewardConfig


@dataclass(frozen=True)
class Rollouts:
    """Input of a reward: this rank's rationales, query after query, and the candidates of all ranks."""

    state_BKD: Tensor  # unit-norm states at ``<emb>``, without gradient
    # Unit-norm embeddings of the candidates: the step's, or a fixed pool's, of which there are V, as V sources prompt them.
    candidate_VCD: Tensor
    seen_as_B: Tensor  # which of V is the query's
    right_BC: Tensor  # bool; everything that answers the query, by identity. All others are wrong
    labelled_BC: Tensor  # bool; the query's own labelled negatives
    ids: Sequence[Sequence[Sequence[int]]]  # of K rationales per query, without ``<emb>``
    oracle_ids: Sequence[Sequence[int]]  # of the query's oracle, ending with ``<emb>``; empty if not read
    query_ids: Sequence[Sequence[int]]  # of the query's prompt
    forced_BK: Tensor  # bool; cut off at the cap, ``<emb>`` appended
    direct_BK: Tensor  # bool; deliberately empty
    temperature: float  # of InfoNCE; cosines are divided by it
    cap: int  # maximum number of generated tokens
    decode: Callable[[Sequence[int]], str]
    folder: Path  # where a reward may cache paid answers
    record_ids: Sequence[str] = field(default_factory=list)  # of the queries

    @cached_property
    def score_BKC(self) -> Tensor:
        """Cosine of every state with every candidate."""
        shape = (*self.state_BKD.shape[:2], self.candidate_VCD.shape[1])
        score_BKC = self.state_BKD.new_empty(shape)
        for number, candidate_CD in enumerate(self.candidate_VCD):
            of_these = self.seen_as_B == number
            score_BKC[of_these] = torch.einsum("bkd,cd->bkc", self.state_BKD[of_these], candidate_CD)
        return score_BKC

    @cached_property
    def right_BKC(self) -> Tensor:
        """`right_BC` for every rationale."""
        return self.right_BC[:, None].expand_as(self.score_BKC)

    @cached_property
    def length_BK(self) -> Tensor:
        """Tokens of each rationale without ``<emb>``."""
        return self.state_BKD.new_tensor([[len(ids) for ids in group] for group in self.ids])

    @cached_property
    def texts(self) -> list[list[str]]:
        """Rationales as text."""
        return [[self.decode(ids) for ids in group] for group in self.ids]

    @cached_property
    def hit_BK(self) -> Tensor:
        """Bool; whether a right answer ranks first. A tie with a wrong one is a miss."""
        return rank_of_right(self) == 1

    def mean_where(self, mask_BC: Tensor) -> Tensor:
        """(B, K) mean cosine with these candidates; NaN without any."""
        mask_BKC = mask_BC[:, None].expand_as(self.score_BKC)
        return (self.score_BKC * mask_BKC).sum(dim=2) / mask_BKC.sum(dim=2)


RewardFunction = Callable[..., Tensor]
"""Called with a `Rollouts` and the recipe's options; returns (B, K), greater is better."""


@dataclass(frozen=True)
class Reward:
    """A registered reward."""

    function: RewardFunction
    needs_direct: bool = False  # the group must contain the direct state, as a further, empty member
    needs_oracle: bool = False  # the oracle rationale must be read
    # Called with the options before training; UserError for invalid ones.
    check: Callable[..., object] | None = None


REWARDS: Registry[Reward] = Registry("reward", "rge.rewards", ("rge.rl.judge",))


def reward(
    name: str,
    *,
    needs_direct: bool = False,
    needs_oracle: bool = False,
    check: Callable[..., object] | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: ``rl.rewards=[{name: NAME}]`` selects the function, see `Reward`; logged as ``reward_NAME``."""

    def add(function: RewardFunction) -> RewardFunction:
        REWARDS.add(name, Reward(function, needs_direct, needs_oracle, check))
        return function

    return add


def problems(rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """Problems with a recipe's rewards, which are called once on made-up rationales, except those with a check of their own."""
    for config in rewards:
        try:
            found = find_reward(config)
            if found.check is None:  # others may call a paid model
                _try_out(config, found)
        except UserError as error:
            yield str(error)


def _try_out(config: RewardConfig, found: Reward) -> None:
    """Call a reward on two queries with two rationales each; UserError as of `evaluate`."""
    chance = torch.Generator().manual_seed(0)
    state_BKD, candidate_VCD = (
        F.normalize(torch.randn(*shape, generator=chance), dim=-1) for shape in ((2, 2, 8), (1, 3, 8))
    )
    none = torch.zeros(2, 3, dtype=torch.bool)
    words = ["", "It", "opens", "a", "lock", "so", "it", "is", "a", "key"]
    with tempfile.TemporaryDirectory() as folder:
        group = Rollouts(
            state_BKD=state_BKD, candidate_VCD=candidate_VCD, seen_as_B=torch.zeros(2, dtype=torch.long),
            right_BC=torch.eye(2, 3, dtype=torch.bool), labelled_BC=none,
            ids=[[(1, 2, 3, 4), (5, 6, 7, 8, 9)], [(6, 7), (3, 9)]],
            oracle_ids=[[6, 7, 8, 9, 0], [3, 4, 0]], query_ids=[[1, 2], [3, 4]],
            forced_BK=none[:, :2], direct_BK=none[:, :2], temperature=0.05, cap=8,
            decode=lambda ids: " ".join(words[one] for one in ids if one), folder=Path(folder),
            record_ids=["made-up-1", "made-up-2"],
        )  # fmt: skip
        evaluate(config, found, group)


def find_reward(config: RewardConfig) -> Reward:
    """The reward that a recipe names, registered or ``module:function``; UserError if it or one of its options does not exist."""
    module, colon, name = config.name.partition(":")
    if colon:
        try:
            load_plugins([module])  # the current folder counts as installed
            chosen = Reward(getattr(sys.modules[module], name))
        except (ImportError, AttributeError, UserError) as error:
            raise UserError(
                f"{config.name} cannot be loaded: {error}", key="rl.rewards", kind="unreadable"
            ) from error
    else:
        chosen = REWARDS[config.name]
    if not callable(chosen.function):
        raise UserError(f"{config.name} is not a function", key="rl.rewards", kind="function")
    signature = inspect.signature(chosen.function)
    try:
        signature.bind(None, **config.options)
    except TypeError as error:
        known = [option for option in list(signature.parameters)[1:] if option != "_"]
        raise UserError(
            f"options of {config.name}: {error}; there are: {', '.join(known) or 'none'}",
            key="rl.rewards",
            kind="options",
        ) from None
    if chosen.check is not None:
        chosen.check(**config.options)
    return chosen


def evaluate(config: RewardConfig, found: Reward, group: Rollouts) -> Tensor:
    """A reward's values, (B, K), in the dtype of the states; UserError if it failed or returned another shape."""
    try:
        value = found.function(group, **config.options)
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = frames[min(1, len(frames) - 1)]  # the first is this call
        raise UserError(
            f"{config.name} failed: {type(error).__name__}: {error}",
            at.filename,
            at.lineno,
            "rl.rewards",
            "failed",
        ) from error
    shape = tuple(group.forced_BK.shape)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value).__name__)
        raise UserError(
            f"{config.name} must return one number per rationale, a tensor of shape {shape} (queries, rationales per query), "
            f"but returned one {got}",
            key="rl.rewards",
            kind="shape",
        )
    return value.detach().to(group.state_BKD.device, group.state_BKD.dtype)


def rank_of_right(group: Rollouts) -> Tensor:
    """(B, K) rank of the best right answer among all candidates, from 1; ties count against it."""
    right, score = group.right_BKC, group.score_BKC
    best = score.masked_fill(~right, float("-inf")).amax(dim=2, keepdim=True)
    return 1 + ((score >= best) & ~right).sum(dim=2)


def places_of_right(score_BKC: Tensor, right_BKC: Tensor, wrong_BKC: Tensor) -> Tensor:
    """(B, K, C) rank of each right answer among all right ones and these wrong ones, from 1; other columns mean nothing.

    Ties with wrong ones count against it. Equal right ones, such as two copies of one target, take a place each.
    """
    ordered = score_BKC.masked_fill(~wrong_BKC, float("-inf")).sort(dim=2).values
    wrong_above = ordered.shape[2] - torch.searchsorted(ordered, score_BKC.contiguous())
    best_first = score_BKC.masked_fill(~right_BKC, float("-inf")).argsort(dim=2, descending=True)
    return 1 + wrong_above + best_first.argsort(dim=2)


@reward("format")
def format_reward(group: Rollouts, script: str | None = None) -> Tensor:
    """1 if the model itself ended the rationale with ``<emb>`` within the cap, in the given script; otherwise 0.

    Source: the format rewards of UME-R1 (arXiv:2511.00405) and Embed-RL (arXiv:2602.13823). Differs: ``<emb>`` replaces their
    tags. `script` is a prefix of the Unicode names of all letters, e.g. LATIN or CJK; None: any. A language is recognised by
    its script alone, so English and German cannot be distinguished.
    """
    value = (~group.forced_BK).to(group.state_BKD)
    if script is None:
        return value
    prefix = script.upper()

    def in_script(text: str) -> bool:
        return all(unicodedata.name(char, "").startswith(prefix) for char in text if char.isalpha())

    return value * value.new_tensor([[in_script(text) for text in texts] for texts in group.texts])


@reward("rank")
def rank_reward(group: Rollouts) -> Tensor:
    """1 / rank of the first right answer in the global batch; ties count against it."""
    return 1 / rank_of_right(group).to(group.state_BKD)


@reward("hit")
def hit_reward(group: Rollouts) -> Tensor:
    """1 if a right answer ranks first in the global batch, otherwise 0."""
    return group.hit_BK.to(group.state_BKD)


@reward("margin")
def margin_reward(group: Rollouts) -> Tensor:
    """Log p(right): log sum over right answers of e^(s/tau), less log sum over all candidates; nats, at most 0.

    tau is the loss's temperature. All right answers count, since a rationale may name another one than was drawn.
    """
    logit = group.score_BKC / group.temperature
    return logit.masked_fill(~group.right_BKC, float("-inf")).logsumexp(dim=2) - logit.logsumexp(dim=2)


@reward("ndcg")
def ndcg_reward(group: Rollouts, among: str = "batch") -> Tensor:
    """NDCG of the right answers: sum over them of 1/log2(1 + rank), over the most that it could be.

    Ties count against the right ones. Source: Jaervelin and Kekaelaeinen 2002, with gains of 1. With `among` ``batch``, all
    candidates are ranked; with ``labelled`` right answers and the query's labelled negatives, which are hard; a query without
    any has 1.
    """
    if among not in ("batch", "labelled"):
        raise UserError.choice("rl.rewards: ndcg's among", among, ("batch", "labelled"))
    right, score = group.right_BKC, group.score_BKC
    wrong = ~right if among == "batch" else (group.labelled_BC & ~group.right_BC)[:, None].expand_as(right)
    gain = (1 / torch.log2(1 + places_of_right(score, right, wrong))).masked_fill(~right, 0.0).sum(dim=2)
    place = torch.arange(1, score.shape[2] + 1, device=score.device)
    ideal = (1 / torch.log2(1 + place)).expand_as(score) * (place <= right.sum(dim=2, keepdim=True))
    return (gain / ideal.sum(dim=2)).to(score)


@reward("gain_over_direct", needs_direct=True)
def gain_over_direct_reward(group: Rollouts) -> Tensor:
    """Margin with the rationale, less margin of the direct state: the words' worth in nats.

    Within a group of rationales the direct margin is a constant, which centring removes. So the group gets the direct
    state as a further member with a gain of 0 and ``<emb>`` as its only token: if words do not help, it is better than they
    are, and direct ``<emb>`` is learned. If they help, it gets no credit, since it was not sampled.
    """
    margin = margin_reward(group)
    direct = margin.masked_fill(~group.direct_BK, float("-inf")).amax(dim=1, keepdim=True)
    return margin - direct


@reward("length")
def length_reward(group: Rollouts) -> Tensor:
    """Minus the number of tokens, so that its weight is the price per token; a direct state costs nothing."""
    return -group.length_BK


@reward("oracle_overlap", needs_oracle=True)
def oracle_overlap_reward(group: Rollouts) -> Tensor:
    """F1 of the rationale's and the oracle's tokens as bags: 2 PR / (P + R).

    Source: SQuAD's answer F1 (arXiv:1606.05250). Differs: tokens are the model's, not words.
    """
    values = []
    for rationales, oracle in zip(group.ids, group.oracle_ids, strict=True):
        wanted = Counter(oracle[:-1])  # without <emb>
        row = []
        for ids in rationales:
            common = sum((wanted & Counter(ids)).values())
            row.append(2 * common / max(len(ids) + sum(wanted.values()), 1))
        values.append(row)
    return group.state_BKD.new_tensor(values)


@reward("ume_r1")
def ume_r1_reward(group: Rollouts) -> Tensor:
    """(right answers in the top P / P) * (mean s+ - mean s-), P = number of right answers.

    Source: UME-R1 (arXiv:2511.00405), whose recipe adds the format reward unweighted. Differs: there both sides write G
    rationales and P is G; here candidates are embedded directly, so P is the number of the query's right answers.
    """
    right = group.right_BKC
    count = right.sum(dim=2)
    in_top = places_of_right(group.score_BKC, right, ~right) <= count[:, :, None]
    share = (in_top & right).sum(dim=2) / count
    return share * (group.mean_where(group.right_BC) - group.mean_where(~group.right_BC))


@reward("embed_rl")
def embed_rl_reward(group: Rollouts, temperature: float = 0.05) -> Tensor:
    """Acc * (mean s+ - sum over wrong ones of softmax(s-/tau) s-): how far right answers lie above the hard wrong ones.

    Source: Embed-RL (arXiv:2602.13823), outcome term. Differs: the paper's embedder is another, frozen model, here it is
    the model itself; its acc is read as whether a right answer comes first; its weights, which are not printed, are
    ``rl.rewards[].weight``; its judge is the reward ``judge``.
    """
    wrong = group.score_BKC.masked_fill(group.right_BKC, float("-inf"))
    weight = (wrong / temperature).softmax(dim=2)
    hard = (weight * wrong.masked_fill(group.right_BKC, 0.0)).sum(dim=2)
    return group.hit_BK * (group.mean_where(group.right_BC) - hard)


@reward("grace")
def grace_reward(
    group: Rollouts, consistency: float = 0.2, others: float = 0.2, temperature: float = 0.1
) -> Tensor:
    """(s+ - s- + consistency * c - others * o) / temperature.

    s+ is the mean cosine with right answers, s- with the query's labelled negatives (or the best wrong candidate if there
    are none), c the mean cosine with the group's other states, o that with other queries' candidates. Source: GRACE
    (arXiv:2510.04506), which does not scale by the standard deviation (``rl.scale_rewards=none``). Differs: there
    candidates write rationales too and o takes the best of each group's; here each has one embedding.
    """
    score = group.score_BKC
    labelled = group.labelled_BC & ~group.right_BC
    hardest = score.masked_fill(group.right_BKC, float("-inf")).amax(dim=2)
    negative = torch.where(labelled.any(dim=1)[:, None], group.mean_where(labelled), hardest)
    rest = ~group.right_BC & ~labelled
    other = group.mean_where(rest).nan_to_num(nan=0.0)
    K = score.shape[1]
    own = torch.einsum("bkd,bjd->bkj", group.state_BKD, group.state_BKD)
    alike = (own.sum(dim=2) - own.diagonal(dim1=1, dim2=2)) / max(K - 1, 1)
    return (group.mean_where(group.right_BC) - negative + consistency * alike - others * other) / temperature

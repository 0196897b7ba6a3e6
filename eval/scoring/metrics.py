"""Ranking metrics as pure numpy functions, and their best and worst case over ties.

Shape suffixes: Q = queries, K = ranks of a ranking (best first), P = maximum number of positives. Values are fractions
of one. A ranking is an array ``rows_QK`` of candidate rows, padded with -1. `judge` converts it to the gain at each rank,
which is all that metrics see.

Metrics that trec_eval has are defined as there (tests compare with `ir-measures`), with linear gains in nDCG. AP has two
names for its two common denominators: ``map@k`` divides by the number of positives (trec_eval), ``map_capped@k`` by
min(number of positives, k) (PinPoint, CIRCO, MMEB), so that a perfect ranking has 1. Nothing is inferred from the
ranking's length: positives that were not retrieved stay in the denominator.

`register_metric` registers a metric, here or in a plugin; every evaluation then reports it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rge.common.errors import UserError
from rge.common.registry import Registry

CUTOFFS = (1, 5, 10, 20, 50)
"""Cutoffs that every evaluation reports; the user can request others."""


@dataclass(frozen=True)
class Judged:
    """Judgements of a ranking, rank by rank."""

    gain_QK: np.ndarray  # gain of the candidate at each rank, float64; 0 for other candidates and padding
    ideal_QP: np.ndarray  # gains of all positives, descending, padded with 0; float64
    num_positives_Q: np.ndarray  # int64, >= 1
    negative_QK: np.ndarray | None = None
    """Whether the candidate is an explicit negative; None for a set without them."""
    num_negatives_Q: np.ndarray | None = None  # int64, may be 0; None likewise
    num_missing_Q: np.ndarray | None = None  # number of positives that the pool lacks, int64; None: none
    wrong_kind_QK: np.ndarray | None = None
    """1 where the candidate is of another kind than all positives in the pool, else 0, float64; NaN for padding, and for a query
    without any. None for a pool of a single kind."""

    @property
    def num_findable_Q(self) -> np.ndarray:
        """Number of positives in the pool, float64."""
        return self.num_positives_Q - (0.0 if self.num_missing_Q is None else self.num_missing_Q)

    def with_ranks(self, ranks: Callable[[np.ndarray], np.ndarray]) -> "Judged":
        """The same judgements with a function applied to the arrays by rank."""
        negative_QK, wrong_kind_QK = (
            None if known is None else ranks(known) for known in (self.negative_QK, self.wrong_kind_QK)
        )
        return replace(
            self, gain_QK=ranks(self.gain_QK), negative_QK=negative_QK, wrong_kind_QK=wrong_kind_QK
        )


Values = Callable[[Judged, int], np.ndarray]
Floor = Callable[[Judged, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A registered metric; see `register_metric` for the attributes."""

    name: str
    values: Values
    cutoffs: tuple[int, ...] | None
    words: str
    floor: Floor | None
    of_negatives: bool
    of_kinds: bool
    lower_is_better: bool

    def reported(self) -> tuple[str, ...]:
        """Names under which every evaluation reports it."""
        return (self.name,) if self.cutoffs is None else tuple(f"{self.name}@{k}" for k in self.cutoffs)


METRICS: Registry[Metric] = Registry("metric", "rge.metrics", figures_only=True)


def register_metric(
    name: str,
    *,
    cutoffs: Sequence[int] | None,
    words: str,
    floor: Floor | None = None,
    of_negatives: bool = False,
    of_kinds: bool = False,
    lower_is_better: bool = False,
) -> Callable[[Values], Values]:
    """Decorator that registers a function as a metric.

    The function gets the judged rankings and k and returns one value per query, (Q,) float64 within [0, 1], NaN if
    undefined.

    Args:
        name: in lower case; the metric is called ``name@k``.
        cutoffs: values of k that every evaluation reports; empty: only those that the user requests. None for a metric of
            the whole ranking, which is called ``name`` and gets the depth of the ranking as k, unless ``name@k`` is requested.
        words: definition as a clause; ``{k}`` stands for k.
        floor: expected value under a random order: a function of judged rankings, pool size of each query (Q,), and k;
            None: no floor is reported.
        of_negatives: whether it needs explicit negatives; it is reported only for sets that have some.
        of_kinds: whether it needs a pool of several kinds of candidates, such as texts and pictures; likewise.
        lower_is_better: whether the query with the lowest value wins a comparison; its definition says so.

    Raises:
        UserError: the name is taken or invalid, or a k is out of range.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError("a metric's name must consist of a-z, 0-9 and _", key=name, kind="name")
    if cutoffs is not None and not all(k >= 1 for k in cutoffs):
        raise UserError(f"cutoffs must be at least 1, got {tuple(cutoffs)}", key=name, kind="cutoffs")

    def register(values: Values) -> Values:
        fixed = None if cutoffs is None else tuple(cutoffs)
        METRICS.add(name, Metric(name, values, fixed, words, floor, of_negatives, of_kinds, lower_is_better))
        return values

    return register


def names_of(*, negatives: bool = False, kinds: bool = False) -> tuple[str, ...]:
    """Metrics that every evaluation reports; with ``negatives`` and ``kinds`` also those of sets that have these."""
    known = [
        metric
        for metric in METRICS.values()
        if (negatives or not metric.of_negatives) and (kinds or not metric.of_kinds)
    ]
    known.sort(key=lambda one: (one.of_negatives, one.of_kinds))
    return tuple(name for one in known for name in one.reported())


def metric_words(name: str) -> str:
    """Definition of a metric as a clause; empty for an unknown one."""
    kind, _, k = name.partition("@")
    if kind not in METRICS:
        return ""
    limit = f", in the first {k}" if k and METRICS[kind].cutoffs is None else ""
    direction = ": lower is better" if METRICS[kind].lower_is_better else ""
    return METRICS[kind].words.format(k=k or "all") + limit + direction


def of_kinds(names: Iterable[str]) -> list[str]:
    """Those metrics that are only measured where a pool has several kinds of candidates, for reports that show them unasked."""
    found = ((name, name.partition("@")[0]) for name in names)
    return [name for name, kind in found if kind in METRICS and METRICS[kind].of_kinds]


def lower_is_better(name: str) -> bool:
    """Whether the lowest value of a metric is the best; False for an unknown one."""
    kind = name.partition("@")[0]
    return kind in METRICS and METRICS[kind].lower_is_better


def judge(
    rows_QK: np.ndarray,
    positives: Sequence[tuple[np.ndarray, np.ndarray]],
    negatives: Sequence[np.ndarray] | None,
    *,
    num_candidates: int,
    num_missing_Q: np.ndarray | None = None,
    kind_C: np.ndarray | None = None,
) -> Judged:
    """Look up each ranked candidate in its query's judgements.

    An explicit negative that is also a positive of the same query counts as a positive only. ``positives``: per query (rows,
    gains > 0), at least one of them or of those missing. ``num_missing_Q``: positives of gain 1 that the pool lacks; they
    stay in every denominator. None: none. ``kind_C``: what each candidate of the pool is, as a number; None: all are the same.
    """
    num_positives_Q = np.array([len(rows) for rows, _ in positives], np.int64)
    if num_missing_Q is not None:
        num_positives_Q = num_positives_Q + num_missing_Q
    gain_QK = _at_ranks(rows_QK, positives, num_candidates)
    ideal_QP = np.zeros((len(rows_QK), int(num_positives_Q.max(initial=0))))
    for query, (_, gains) in enumerate(positives):
        ideal = np.concatenate([gains, np.ones(num_positives_Q[query] - len(gains))])
        ideal_QP[query, : len(ideal)] = np.sort(ideal)[::-1]
    wrong_kind_QK = None if kind_C is None else _wrong_kind(rows_QK, positives, kind_C)
    judged = Judged(
        gain_QK, ideal_QP, num_positives_Q, num_missing_Q=num_missing_Q, wrong_kind_QK=wrong_kind_QK
    )
    if negatives is None:
        return judged
    wrong = list(map(np.setdiff1d, negatives, (rows for rows, _ in positives)))
    ones = [(rows, np.ones(len(rows))) for rows in wrong]
    return replace(
        judged,
        negative_QK=_at_ranks(rows_QK, ones, num_candidates) > 0,
        num_negatives_Q=np.array(list(map(len, wrong)), np.int64),
    )


def _wrong_kind(
    rows_QK: np.ndarray, positives: Sequence[tuple[np.ndarray, np.ndarray]], kind_C: np.ndarray
) -> np.ndarray:
    wrong_QK = np.full(rows_QK.shape, np.nan)
    for query, (right, _) in enumerate(positives):
        if len(right):
            ranked_K = rows_QK[query] >= 0
            kinds = kind_C[rows_QK[query][ranked_K]]
            wrong_QK[query, ranked_K] = ~np.isin(kinds, kind_C[right])
    return wrong_QK


def _at_ranks(
    rows_QK: np.ndarray, listed: Sequence[tuple[np.ndarray, np.ndarray]], num_candidates: int
) -> np.ndarray:
    """Value of each ranked candidate in its query's list of (rows, values), (Q, K); 0 if it is not listed."""
    # One lookup table of the pool's size, filled and cleared for each query. Row -1 reads the extra last cell.
    value_C = np.zeros(num_candidates + 1)
    out_QK = np.empty(rows_QK.shape)
    for query, (rows, values) in enumerate(listed):
        value_C[rows] = values
        out_QK[query] = value_C[rows_QK[query]]
        value_C[rows] = 0.0
    return out_QK


@register_metric(
    "recall",
    cutoffs=CUTOFFS,
    words="share of a query’s right candidates that are among the first {k}, mean over queries",
    floor=lambda judged, pool_Q, k: (
        np.minimum(k, pool_Q) / pool_Q * judged.num_findable_Q / judged.num_positives_Q
    ),
)
def recall(judged: Judged, k: int) -> np.ndarray:
    """Positives in the top k over all positives, (Q,); below 1 for queries with more than k positives."""
    return _hits(judged, k) / judged.num_positives_Q


@register_metric(
    "hit",
    cutoffs=CUTOFFS,
    words="share of queries with a right candidate among the first {k}",
    floor=lambda judged, pool_Q, k: _floor_first_hit(
        judged.num_findable_Q, pool_Q, depth=k, reciprocal=False
    ),
)
def hit(judged: Judged, k: int) -> np.ndarray:
    """1 if the top k contains a positive, else 0, (Q,)."""
    return (_hits(judged, k) > 0).astype(np.float64)


@register_metric(
    "precision",
    cutoffs=(10,),
    words="share of the first {k} that is right, mean over queries",
    floor=lambda judged, pool_Q, k: judged.num_findable_Q / pool_Q * np.minimum(k, pool_Q) / k,
)
def precision(judged: Judged, k: int) -> np.ndarray:
    """Positives in the top k over k, (Q,), even if the pool is smaller, as in trec_eval."""
    return _hits(judged, k) / k


def _ndcg_floor(judged: Judged, pool_Q: np.ndarray, k: int) -> np.ndarray:
    discount = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(2, k + 2)))])
    gain_Q = judged.ideal_QP.sum(axis=1) - (judged.num_positives_Q - judged.num_findable_Q)
    return gain_Q / pool_Q * discount[np.minimum(k, pool_Q).astype(int)] / _dcg(judged.ideal_QP, k)


@register_metric(
    "ndcg",
    cutoffs=(10,),
    words="gain of the first {k}, discounted by rank, as a share of the best possible",
    floor=_ndcg_floor,
)
def ndcg(judged: Judged, k: int) -> np.ndarray:
    """Discounted cumulative gain of the top k over that of the best possible top k, (Q,).

    Linear gain, discount log2(rank + 1), as ``ndcg_cut`` of trec_eval. Differs: none.
    """
    return _dcg(judged.gain_QK, k) / _dcg(judged.ideal_QP, k)


@register_metric(
    "mrr",
    cutoffs=None,
    words="one over the rank of the first right candidate, mean over queries",
    floor=lambda judged, pool_Q, k: _floor_first_hit(judged.num_findable_Q, pool_Q, depth=k, reciprocal=True),
)
def mrr(judged: Judged, k: int) -> np.ndarray:
    """Reciprocal rank of the first positive in the top k, (Q,); 0 without one."""
    first_Q = first_hit_rank(cut(judged, k))
    return np.divide(1.0, first_Q, out=np.zeros(len(first_Q)), where=first_Q > 0)


@register_metric(
    "map",
    cutoffs=(10,),
    words="average precision over the first {k}, divided by the number of right candidates",
    floor=lambda judged, pool_Q, k: (
        _floor_precision_sum(judged.num_findable_Q, pool_Q, k) / judged.num_positives_Q
    ),
)
def average_precision(judged: Judged, k: int) -> np.ndarray:
    """Sum of the precision at the rank of each positive in the top k, over the number of positives, (Q,)."""
    return _precision_sum(judged.gain_QK, k) / judged.num_positives_Q


@register_metric(
    "map_capped",
    cutoffs=(10,),
    words="average precision over the first {k}, divided by the right candidates that fit into {k}",
    floor=lambda judged, pool_Q, k: (
        _floor_precision_sum(judged.num_findable_Q, pool_Q, k) / np.minimum(judged.num_positives_Q, k)
    ),
)
def average_precision_capped(judged: Judged, k: int) -> np.ndarray:
    """As `average_precision`, but over min(number of positives, k), (Q,).

    Source: PinPoint's released metrics (AP@10). Differs: each positive counts once.
    """
    return _precision_sum(judged.gain_QK, k) / np.minimum(judged.num_positives_Q, k)


@register_metric(
    "negative_recall",
    cutoffs=(10,),
    words="share of a query’s explicit negatives among the first {k}",
    floor=lambda judged, pool_Q, k: _share_of_negatives(
        judged, _negatives(judged)[1] / pool_Q * np.minimum(k, pool_Q), k
    ),
    of_negatives=True,
    lower_is_better=True,
)
def negative_recall(judged: Judged, k: int) -> np.ndarray:
    """Explicit negatives in the top k over min(number of negatives, k), (Q,); NaN for a query without negatives.

    Lower is better. Source: PinPoint's released metrics. Differs: candidates that are also positives do not count.
    """
    return _share_of_negatives(judged, _negatives(judged)[0][:, :k].sum(axis=1), k)


@register_metric(
    "wrong_kind",
    cutoffs=(1,),
    words="share of the first {k} of another kind (text, picture, both, ...) than every right candidate, mean over queries",
    of_kinds=True,
    lower_is_better=True,
)
def wrong_kind(judged: Judged, k: int) -> np.ndarray:
    """Candidates of the wrong kind over those ranked in the top k, (Q,); NaN without any, or without a positive in the pool.

    Source: MMEB-V3 (arXiv:2604.23321), which finds that models miss the modality that an instruction names.
    """
    if judged.wrong_kind_QK is None:
        raise UserError(
            "it needs a pool of several kinds of candidates, and this one has a single kind",
            key="wrong_kind",
            kind="pool",
        )
    wrong_QK = judged.wrong_kind_QK[:, :k]
    known_QK = np.isfinite(wrong_QK)
    num_Q = known_QK.sum(axis=1)
    return np.divide(
        np.where(known_QK, wrong_QK, 0.0).sum(axis=1), num_Q, out=np.full(len(num_Q), np.nan), where=num_Q > 0
    )


def _share_of_negatives(judged: Judged, hits_Q: np.ndarray, k: int) -> np.ndarray:
    num_Q = _negatives(judged)[1]
    return np.divide(hits_Q, np.minimum(num_Q, k), out=np.full(len(num_Q), np.nan), where=num_Q > 0)


def _delta_floor(judged: Judged, pool_Q: np.ndarray, k: int) -> np.ndarray:
    m_Q, n_Q = _negatives(judged)[1], judged.num_findable_Q
    delta_Q = _floor_precision_sum(n_Q, pool_Q - m_Q, k) - _floor_precision_sum(n_Q, pool_Q, k)
    return np.where(m_Q > 0, delta_Q / np.minimum(judged.num_positives_Q, k), np.nan)


@register_metric(
    "delta_map_capped",
    cutoffs=(10,),
    words="loss of average precision over the first {k} due to explicit negatives",
    floor=_delta_floor,
    of_negatives=True,
    lower_is_better=True,
)
def delta_average_precision_capped(judged: Judged, k: int) -> np.ndarray:
    """Cost of explicit negatives: `average_precision_capped` without them, minus the real one, (Q,).

    Negatives are deleted from the whole ranking before it is cut at k, so that later candidates move up; this needs a
    ranking much deeper than k. NaN for a query without negatives. Lower is better; never below 0, since the deletion can
    only move positives up. Source: PinPoint's released metrics (mAP@10_noNeg - mAP@10). Differs: candidates that are also
    positives stay.
    """
    negative_QK, num_negatives_Q = _negatives(judged)
    width = k + int(num_negatives_Q.max(initial=0))  # no deeper candidate can move into the top k
    kept_first_QK = np.argsort(negative_QK[:, :width], axis=1, kind="stable")
    gain_QK = np.take_along_axis(judged.gain_QK[:, :width], kept_first_QK, axis=1)
    without_Q = _precision_sum(gain_QK, k) / np.minimum(judged.num_positives_Q, k)
    return np.where(num_negatives_Q > 0, without_Q - average_precision_capped(judged, k), np.nan)


def first_hit_rank(judged: Judged) -> np.ndarray:
    """Rank of the first positive, (Q,) int64; 0 if the ranking has none."""
    found_QK = judged.gain_QK > 0
    if not found_QK.shape[1]:
        return np.zeros(len(found_QK), np.int64)
    return np.where(found_QK.any(axis=1), found_QK.argmax(axis=1) + 1, 0)


def parse_name(name: str) -> tuple[str, int | None]:
    """Split ``recall@20`` into ("recall", 20); ``mrr``, a metric of the whole ranking, into ("mrr", None).

    Raises:
        UserError: there is no such metric.
    """
    kind, mark, k = name.partition("@")
    if kind in METRICS and not mark and METRICS[kind].cutoffs is None:
        return kind, None
    if kind in METRICS and re.fullmatch(r"[1-9]\d*", k):
        return kind, int(k)
    known = (metric.name if metric.cutoffs is None else f"{metric.name}@k" for metric in METRICS.values())
    raise UserError(f"there is no such metric, but {', '.join(known)}", key=name)


def deepest(names: Sequence[str]) -> int:
    """The largest cutoff among metrics, which rankings must reach."""
    return max((k for name in names if (k := parse_name(name)[1]) is not None), default=1)


def compute(name: str, judged: Judged) -> np.ndarray:
    """A metric by name, (Q,) float64.

    Raises:
        UserError: there is no such metric, it needs explicit negatives that the set lacks, or its function does not return
            one number per query.
    """
    kind, k = parse_name(name)
    depth = judged.gain_QK.shape[1] if k is None else k
    value_Q = np.asarray(METRICS[kind].values(judged, depth), np.float64)
    if value_Q.shape != judged.num_positives_Q.shape or np.isinf(value_Q).any():
        infinite = np.isinf(value_Q).any()
        wanted = f"it must give a finite number or NaN for each of {len(judged.num_positives_Q)} queries"
        got = f"{value_Q.shape}{' with infinite ones' if infinite else ''}"
        raise UserError(f"{wanted}, got {got}", key=name, kind="infinite" if infinite else "shape")
    return value_Q


def tied_order(judged: Judged, score_QK: np.ndarray, *, best: bool) -> Judged:
    """The same ranking with ties broken in its favour (``best``), or against it.

    In favour: positives first (by descending gain), explicit negatives last. Against: the reverse. Over all orders of the
    ties, this gives the largest or smallest value of every metric of positives, and the smallest or largest
    `negative_recall`; it is not a bound for `delta_average_precision_capped`.

    The ranks must include every candidate tied with the last one that counts. ``score_QK``: non-increasing, padded with -inf.
    """
    gain_QK, negative_QK = judged.gain_QK, judged.negative_QK
    worth_QK = gain_QK if negative_QK is None else np.where(negative_QK, -1.0, gain_QK)
    tied_Q = (score_QK[:, 1:] == score_QK[:, :-1]) & np.isfinite(score_QK[:, 1:])
    touched = np.flatnonzero(tied_Q.any(axis=1))  # usually few; the sort below is slow
    worth = worth_QK[touched]
    order = np.lexsort((-worth if best else worth, -score_QK[touched]), axis=-1)

    def reordered(one_QK: np.ndarray) -> np.ndarray:
        out_QK = one_QK.copy()
        out_QK[touched] = np.take_along_axis(one_QK[touched], order, axis=1)
        return out_QK

    return judged.with_ranks(reordered)


def cut(judged: Judged, depth: int) -> Judged:
    """Keep the first ``depth`` ranks."""
    return judged.with_ranks(lambda one_QK: one_QK[:, :depth])


def random_floor(name: str, judged: Judged, pool_Q: np.ndarray, *, depth: int) -> np.ndarray:
    """Exact expected value of a metric over all orders of the pool, (Q,); NaN for a metric without a floor.

    ``judged``: its ranking is not used. ``pool_Q``: number of candidates that can appear in each query's ranking. ``depth``:
    length of rankings, for metrics of the whole ranking.
    """
    kind, k = parse_name(name)
    floor = METRICS[kind].floor
    if floor is None:
        return np.full(len(pool_Q), np.nan)
    return floor(judged, pool_Q.astype(np.float64), depth if k is None else k)


def _hits(judged: Judged, k: int) -> np.ndarray:
    return np.count_nonzero(judged.gain_QK[:, :k] > 0, axis=1)


def _dcg(gain_QK: np.ndarray, k: int) -> np.ndarray:
    gain_QK = gain_QK[:, :k]
    return (gain_QK / np.log2(np.arange(2, gain_QK.shape[1] + 2))).sum(axis=1)


def _precision_sum(gain_QK: np.ndarray, k: int) -> np.ndarray:
    found_QK = gain_QK[:, :k] > 0
    precision_QK = np.cumsum(found_QK, axis=1) / np.arange(1, found_QK.shape[1] + 1)
    return (precision_QK * found_QK).sum(axis=1)


def _negatives(judged: Judged) -> tuple[np.ndarray, np.ndarray]:
    if judged.negative_QK is None or judged.num_negatives_Q is None:
        raise UserError(
            "the metric needs explicit negatives, which the set lacks", "negatives.parquet", kind="missing"
        )
    return judged.negative_QK, judged.num_negatives_Q


def _floor_first_hit(n_Q: np.ndarray, pool_Q: np.ndarray, *, depth: int, reciprocal: bool) -> np.ndarray:
    """P(first positive within ``depth``), or its expected reciprocal rank within ``depth``; hypergeometric."""
    none_before_Q = np.ones(len(n_Q))  # P(no positive above this rank)
    total_Q = np.zeros(len(n_Q))
    for above in range(min(depth, int(pool_Q.max(initial=0)))):
        left_Q = np.maximum(pool_Q - above, 1.0)  # once the pool is exhausted, none_before_Q is 0 anyway
        here_Q = none_before_Q * np.minimum(n_Q / left_Q, 1.0)
        total_Q += here_Q / (above + 1) if reciprocal else here_Q
        none_before_Q = none_before_Q - here_Q
    return total_Q


def _floor_precision_sum(n_Q: np.ndarray, pool_Q: np.ndarray, k: int) -> np.ndarray:
    """E[sum of precisions at positives in the top k]: at rank i, P(positive) (1 + (i-1) P(another is too)) / i."""
    other_Q = np.divide(n_Q - 1, pool_Q - 1, out=np.zeros(len(n_Q)), where=pool_Q > 1)
    rank_K = np.arange(1, k + 1)
    term_QK = (n_Q / pool_Q)[:, None] * (1 + (rank_K - 1) * other_Q[:, None]) / rank_K
    return np.where(rank_K <= pool_Q[:, None], term_QK, 0.0).sum(axis=1)

"""The protocol of PinPoint: AP@10, the cost of explicit negatives, and sensitivity to paraphrases.

Shape suffixes: Q = queries, K = ranks, M = metrics, G = groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.scoring.metrics import (
    Judged,
    average_precision_capped,
    compute,
    cut,
    first_hit_rank,
    judge,
    parse_name,
    random_floor,
    tied_order,
)
from eval.scoring.output_files import Scored, means
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet, integer_column, picture_ids, string_column
from rge.stats.intervals import cluster_bootstrap, figures, index_of, ratio_bootstrap

CUTS = (1, 5, 10, 50)


@dataclass(frozen=True)
class Pinpoint(Protocol):
    """PinPoint: AP@10, the cost of explicit negatives, and sensitivity to paraphrases."""

    def score(self, wanted: RetrievalSet, ranking: Ranking, names: Sequence[str] = ()) -> Scored:
        """As `Protocol.score`; official with the released scorer's denominators, see `pinpoint_values`."""
        if self.profile == "clean":
            return super().score(wanted, ranking)
        listed_Q = integer_column(wanted, "num_listed_positives")
        bad_Q = integer_column(wanted, "num_listed_negatives")
        in_pool_Q = np.array([len(rows) for rows, _ in wanted.positives], np.int64)
        rows_QW = ranking.rows_QW
        # repeated positives count in the denominator, like ones never found
        missing_Q, num_candidates = listed_Q - in_pool_Q, len(wanted.corpus_ids)
        wide = judge(rows_QW, wanted.positives, None, num_candidates=num_candidates, num_missing_Q=missing_Q)
        negative_QK = np.stack(
            [np.isin(row, listed) for row, listed in zip(rows_QW, wanted.negatives or [], strict=True)]
        )
        wide = replace(wide, negative_QK=negative_QK, num_negatives_Q=bad_Q)
        # Negatives are removed from the whole list before it is cut.
        judged = cut(wide, ranking.depth)
        kinds = ("precision", "recall", "map_capped", "negative_recall", "delta_map_capped")
        names = self.names(wanted, [f"{kind}@{k}" for kind in kinds for k in CUTS], negatives=False)
        value_QM = pinpoint_values(names, judged)
        pool_Q = wanted.pool_sizes()
        random_QM = np.full(value_QM.shape, np.nan)
        for m, name in enumerate(names):
            if not name.startswith(("negative", "delta")):
                random_QM[:, m] = random_floor(name, judged, pool_Q, depth=ranking.depth)

        def tied(*, best: bool) -> np.ndarray:
            order = tied_order(wide, ranking.score_QW, best=best)
            return pinpoint_values(names, cut(order, ranking.depth))

        first_Q = first_hit_rank(judged)
        return Scored(names, value_QM, tied(best=True), tied(best=False), random_QM, first_Q)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Linguistic sensitivity, the relative cost of negatives, and, if official, the released scorer's names."""
        column = dict(zip(scored.names, scored.value_QM.T, strict=True))
        ap_Q, delta_Q, precision_Q = (
            column[f"{kind}@10"] for kind in ("map_capped", "delta_map_capped", "precision")
        )
        group, official = wanted.columns["group"], self.profile == "official"
        if official:
            # groups also join rows that share only one of two pictures; older sets have no picture_ids
            same = ["+".join(ids) or own for ids, own in zip(picture_ids(wanted), group, strict=True)]
        else:  # only rows with the same pictures and positives are paraphrases
            same = string_column(wanted, "paraphrase")
        over = partial(over_groups, same=same, group=group, seed=seed)
        delta_Q = np.where(np.isfinite(ap_Q), np.nan_to_num(delta_Q), np.nan)
        (relative,) = figures(ratio_bootstrap(delta_Q, ap_Q, index_of(group), seed=seed))
        micro = {
            "linguistic_sensitivity": over(precision_Q),
            "linguistic_sensitivity_map": over(ap_Q),
            "linguistic_sensitivity_std": over(precision_Q, of=np.std),
            "delta_map_capped_relative@10": relative if relative["value"] is not None else None,
        }
        defined = np.isfinite(precision_Q)
        out: dict[str, Any] = {
            "micro": _known(micro),
            "group_mean": _known({name: over(column[name], of=np.mean, least=1) for name in self.headline}),
            "paraphrase_groups": _num_groups(same, defined),
        }
        if official:
            figures_of = _official(means(scored.names, scored.value_QM), micro)
            out["official"] = figures_of | {"total_queries": int(defined.sum())}
        return out


def _known(figures_of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in figures_of.items() if figure}


def _official(value: Mapping[str, float], micro: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Figures under the released scorer's names."""
    figures: dict[str, Any] = {}
    for k in CUTS:
        figures[f"mAP@{k}"] = value[f"map_capped@{k}"]
        figures[f"mAP@{k}_noNeg"] = value[f"map_capped@{k}"] + value[f"delta_map_capped@{k}"]
        figures[f"precision@{k}"] = value[f"precision@{k}"]
        figures[f"recall@{k}"] = value[f"recall@{k}"]
        figures[f"NegRecall@{k}"] = value[f"negative_recall@{k}"]
    ap, delta = value["map_capped@10"], value["delta_map_capped@10"]
    figures |= {"delta_mAP@10_noNeg": delta, "pct_increase_mAP@10_noNeg": delta / ap if ap > 0 else 0.0}
    for name, key in (("range", "linguistic_sensitivity"), ("std", "linguistic_sensitivity_std")):
        figures[f"ling_sens_{name}"] = (micro[key] or {"value": 0.0})["value"]
    return figures


def pinpoint_values(names: Sequence[str], judged: Judged) -> np.ndarray:
    """Per-query values as the released scorer of PinPoint computes them, (Q, M).

    Source: evaluate.py and utils/metrics.py of pinterest/pinpoint-dataset. Differs: none. ``judged``: the whole list of each
    query, with positives and negatives as listed; a candidate may be both.
    """
    assert judged.negative_QK is not None
    removed_last = np.argsort(judged.negative_QK, axis=1, kind="stable")
    kept_gain = np.where(judged.negative_QK, 0.0, judged.gain_QK)
    without = replace(judged, gain_QK=np.take_along_axis(kept_gain, removed_last, axis=1))
    columns = []
    for name in names:
        kind, k = parse_name(name)
        if kind == "delta_map_capped":
            assert k is not None
            columns.append(average_precision_capped(without, k) - average_precision_capped(judged, k))
        else:
            columns.append(np.nan_to_num(compute(name, judged)))  # without negatives: 0
    return np.stack(columns, axis=1)


def over_groups(
    value_Q: np.ndarray,
    same: Sequence[str],
    group: Sequence[str],
    *,
    seed: int,
    of: Callable[..., Any] = np.ptp,
    least: int = 2,
) -> dict[str, float | None] | None:
    """Mean over paraphrase groups of a statistic of their values, with an interval; None if no group has enough queries.

    NaN is left out. ``same``: each query's paraphrase group. ``group``: unit of resampling, which may contain several of
    them. ``of``: statistic of a group's values: range, `numpy.std`, or mean, which weights all groups equally.
    """
    table = pd.DataFrame({"value": value_Q, "group": group, "same": same}).dropna(subset="value")
    table = table.groupby("same", sort=False).filter(lambda rows: len(rows) >= least)
    if table.empty:
        return None
    parts = table.groupby("same", sort=False)
    value_G = np.array([[float(of(values.to_numpy()))] for _, values in parts["value"]])
    means = cluster_bootstrap(value_G, index_of(parts["group"].first().tolist()), seed=seed)
    return figures(means, (0.0, 1.0))[0] | {"value": float(value_G.mean())}


def _num_groups(same: Sequence[str], kept_Q: np.ndarray) -> int:
    _, count = np.unique(np.asarray(same, dtype=object)[kept_Q].astype(str), return_counts=True)
    return int((count > 1).sum())


PROTOCOLS = (
    Pinpoint("pinpoint", "clean", ("map_capped@10", "delta_map_capped@10", "negative_recall@10", "precision@10"), (
        "AP@10 over min(positives, 10), each positive counted once",
        "a candidate that is positive and negative counts as positive only; None and repeated negatives are dropped",
        "negative_recall@10 over min(negatives, 10), mean over queries that have negatives",
        "linguistic_sensitivity is the mean over paraphrase groups (same pictures, same positives) of the largest "
        "minus the smallest precision@10; linguistic_sensitivity_map has AP@10 instead",
        "a query without a ranking counts 0",
    )),
    Pinpoint("pinpoint", "official", ("map_capped@10", "delta_map_capped@10", "negative_recall@10", "precision@10"), (
        "as evaluate.py: the whole list is scored, and negatives are removed from it before it is cut at k "
        "(the released retrieval lists 50: depth=50); AP@k over min(listed positives, k), recall over listed positives, "
        "repeated ones included, so that a perfect ranking stays below 1",
        "negative_recall@k over min(listed negatives, k), None and repeated ones included; 0 without negatives",
        "a candidate that is positive and negative counts as both",
        "linguistic_sensitivity is the mean over rows with the same pictures of the largest minus the smallest "
        "precision@10",
        "a query without a ranking is left out; compare only with the repository's metrics.csv, not with the paper",
    ), skips_missing=True),
)  # fmt: skip
PUBLISHED = Path(__file__).with_name("published")
register_benchmark(
    Benchmark("pinpoint", "eval.benchmarks.pinpoint.importer:import_pinpoint", PROTOCOLS, PUBLISHED)
)

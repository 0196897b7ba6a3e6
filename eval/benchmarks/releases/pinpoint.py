"""PinPoint (pinterest/pinpoint-dataset): queries of one or two pictures and an instruction over one index of pictures.

Layout: ``pinpoint_licensed.parquet`` (query_id, instruction, query_image_signature, query_image_signature2,
positive_candidates, negative_candidates, is_single, and the dimensions of `DIMENSIONS`), ``index_signatures.txt``, and pictures
named by their signature.

Pitfalls of the shipped table:

- a missing second picture is the *string* "None"; ``is_single`` sometimes contradicts it, so the signature decides;
- lists of candidates have duplicates, and "None" among the negatives;
- some candidates are both positive and negative for a query;
- the query's own picture is in the index, and often listed as a negative;
- rows with the same pictures are paraphrases only if they also have the same positives.

The set holds each judgement once. The original lengths of the lists, by which the released scorer divides, are kept in
``num_listed_positives`` and ``num_listed_negatives``.

Shape suffixes: Q = queries, K = ranks, M = metrics, G = groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    Draft,
    PictureOptions,
    Pictures,
    Row,
    as_list,
    content_id,
    existing,
    iter_rows,
)
from eval.scoring.metrics import Judged, average_precision_capped, compute, parse_name
from eval.scoring.output_files import Scored, judged_rows, means, score_ranking
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.scoring.stats import over_groups
from eval.sets.retrieval_set import RetrievalSet, picture_ids, query_column
from eval.sets.write_set import Candidate, Query
from rge.common.prompt_profiles import PICTURE_INSTRUCTION
from rge.stats.intervals import figures, index_of, ratio_bootstrap

REPOSITORY = "pinterest/pinpoint-dataset"
TABLE, INDEX = "pinpoint_licensed.parquet", "index_signatures.txt"
COLUMNS = ("query_id", "instruction", "query_image_signature", "positive_candidates", "negative_candidates")
DIMENSIONS = (
    "query_category", "length_category", "is_question", "is_imperative", "l1_interest", "skin_tone_bucket",
)  # fmt: skip
"""Columns of the table that figures are reported by, as far as it has them."""
NUM_ROWS = 7635
"""Rows of the release whose `COUNTS` are known."""
COUNTS = {
    "query_category": [188, 307, 328, 894, 2520, 3398],
    "length_category": [1348, 2453, 3834],
}
"""Rows by value, ascending: explore, complement, negation, composition, context fit, swap; and three lengths."""
NUM_VALUES = {"l1_interest": (23, NUM_ROWS), "skin_tone_bucket": (4, 3547)}
"""Number of values, and of rows that have one."""
UNLABELLED = "unlabelled"
CUTS = (1, 5, 10, 50)
"""Cutoffs of the released scorer."""


@dataclass
class PinpointOptions(PictureOptions):
    """Make a retrieval set from the release of PinPoint."""

    images: Path | None = None
    """Folder of pictures named SIGNATURE.jpg, at any depth; null: src/images."""
    allow_missing: bool = False
    """Accept positives that are not in the index; they still count in every denominator."""
    exclude_query_image: bool = False
    """Remove a query's own pictures from its ranking; the released retrieval does not."""
    instruction: str = PICTURE_INSTRUCTION
    """Task instruction for every query, that of `rge data rmir`; the release has none. '': none."""


def import_pinpoint(options: PinpointOptions) -> RetrievalSet:
    """Read the release and write a retrieval set."""
    table, index_file = (existing(options.src / name, REPOSITORY) for name in (TABLE, INDEX))
    index = dict.fromkeys(filter(None, map(str.strip, index_file.read_text("utf-8-sig").splitlines())))
    pictures = Pictures(
        options.images or options.src / "images", options.src,
        hint="download it with the release's tools, then pass images=DIR",
    )  # fmt: skip
    draft, values, num_rows = Draft(index), dict[str, Counter[str]](), 0
    for row in iter_rows(table, needed=COLUMNS):
        query, right, wrong = _query(row, pictures, options.instruction)
        num_rows += 1
        for name in set(DIMENSIONS) & query.columns.keys():
            values.setdefault(name, Counter())[str(query.columns[name])] += 1
        if right:
            own = str(query.columns["picture_ids"]).split("+")
            draft.add(query, row.where, dict.fromkeys(right, 1), wrong, own)
        else:
            draft.claim(query.id, row.where)
    draft.refuse_lost(f"{index_file} ({len(index)} pictures)", allowed=options.allow_missing)
    return options.write(
        meta={
            "name": "PinPoint",
            "benchmark": "pinpoint",
            "source": f"{REPOSITORY}, imported by eval.benchmarks.releases.pinpoint",
            "report_by": ["images", *(name for name in DIMENSIONS if name in values)],
            "notes": unlike_release(values) if num_rows == NUM_ROWS else [],
            "num_missing_positives": len(draft.lost),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=draft.queries,
        corpus=(Candidate(id=name, image=pictures.find(name, by_stem=True)) for name in index),
        qrels=draft.qrels,
        negatives=draft.negatives,
        excluded=draft.excluded if options.exclude_query_image else None,
    )


def _query(row: Row, pictures: Pictures, instruction: str) -> tuple[Query, list[str], list[str]]:
    """A row's query, with its positives and negatives, each once."""
    name = str(row["query_id"]).removeprefix("query_").zfill(5)  # as the released scorer normalises it
    listed_right, listed_wrong = as_list(row["positive_candidates"]), as_list(row["negative_candidates"])
    own = _distinct([row["query_image_signature"], row.get("query_image_signature2")])
    if not own:
        raise row.error("the query has no picture", name)
    right = _distinct(listed_right)
    query = Query(
        id=name,
        text=row.text("instruction"),
        images=tuple(pictures.find(signature, by_stem=True) for signature in own),
        group="+".join(own),
        instruction=instruction or None,
        columns={
            "images": "one image" if len(own) == 1 else "two images",
            "picture_ids": "+".join(own),
            "paraphrase": content_id(*own, *sorted(right)),
            "num_listed_positives": len(listed_right),
            "num_listed_negatives": len(listed_wrong),
        }
        | {name: _label(name, row[name]) for name in DIMENSIONS if name in row},
    )
    return query, right, _distinct(listed_wrong)


def _label(name: str, value: Any) -> str:
    """The value of a dimension as a slice: ``yes`` or ``no`` for truth values."""
    if value is None or value != value or str(value).strip() in ("", "None", "nan"):
        return UNLABELLED
    if name.startswith("is_"):
        return "yes" if str(value).strip().lower() in ("true", "1", "1.0", "yes") else "no"
    return "+".join(map(str, value)) if isinstance(value, list | tuple | np.ndarray) else str(value).strip()


def unlike_release(values: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What differs from the release that we know, from the number of rows by dimension and value."""
    found = []
    for name, rows in values.items():
        labelled = sorted(number for value, number in rows.items() if value != UNLABELLED)
        known = (len(labelled), sum(labelled))
        if name in COUNTS and labelled != COUNTS[name]:
            found.append(f"{name} has {labelled} rows by value, the release that we know {COUNTS[name]}")
        if name in NUM_VALUES and known != NUM_VALUES[name]:
            found.append(
                f"{name} has {known[0]} values on {known[1]} rows, the release that we know {NUM_VALUES[name][0]} on "
                f"{NUM_VALUES[name][1]}"
            )
    return found


def _distinct(values: list[Any]) -> list[str]:
    """Names without repeats and without the ways in which the table writes a missing one."""
    names = dict.fromkeys(str(value) for value in values)
    return [name for name in names if name.strip() not in ("", "None", "nan")]


@dataclass(frozen=True)
class Pinpoint(Protocol):
    """PinPoint: AP@10, the cost of explicit negatives, and sensitivity to paraphrases."""

    def names(self, wanted: RetrievalSet) -> tuple[str, ...]:
        """Official: at the released scorer's cutoffs too."""
        if self.profile == "clean":
            return super().names(wanted)
        kinds = ("precision", "recall", "map_capped", "negative_recall", "delta_map_capped")
        names = super().names(replace(wanted, negatives=None))
        return tuple(dict.fromkeys((*names, *(f"{kind}@{k}" for kind in kinds for k in CUTS))))

    def score(self, wanted: RetrievalSet, ranking: Ranking) -> Scored:
        """As `Protocol.score`; official with the released scorer's denominators, see `pinpoint_values`."""
        if self.profile == "clean":
            return super().score(wanted, ranking)
        listed_Q, bad_Q = (
            np.array(query_column(wanted, f"num_listed_{kind}", "integers"), np.int64)
            for kind in ("positives", "negatives")
        )
        # repeated positives count in the denominator, like ones never found
        missing_Q = listed_Q - [len(rows) for rows, _ in wanted.positives]
        judged = judged_rows(replace(wanted, negatives=None, num_missing_Q=missing_Q), ranking.rows_QW)
        negative_QK = np.stack(list(map(np.isin, ranking.rows_QW, wanted.negatives or [])))
        judged = replace(judged, negative_QK=negative_QK, num_negatives_Q=bad_Q)
        names = self.names(wanted)
        with np.errstate(divide="ignore", invalid="ignore"):  # floors of negatives, which are left out below
            scored = score_ranking(wanted, ranking, names, judged, pinpoint_values)
        no_floor = [name.startswith(("negative", "delta")) for name in names]
        return replace(scored, random_QM=np.where(no_floor, np.nan, scored.random_QM))

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Linguistic sensitivity, the relative cost of negatives, and, if official, the released scorer's names."""
        column = dict(zip(scored.names, scored.value_QM.T, strict=True))
        group, official = np.array(wanted.columns["group"], dtype=object), self.profile == "official"
        if official:
            # groups also join rows that share only one of two pictures
            same = ["+".join(ids) or own for ids, own in zip(picture_ids(wanted), group, strict=True)]
        else:  # only rows with the same pictures and positives are paraphrases
            same = query_column(wanted, "paraphrase")
        same_Q = np.array(same, dtype=object)

        def over(values_Q: np.ndarray, rows: Any = slice(None), **how: Any) -> dict[str, float | None] | None:
            return over_groups(values_Q[rows], same_Q[rows].tolist(), group[rows].tolist(), seed=seed, **how)

        def of_slice(rows: Any) -> dict[str, Any]:
            """Figures of some queries; paraphrases count if at least two are among them."""
            ap_Q, delta_Q, precision_Q = (
                column[f"{kind}@10"] for kind in ("map_capped", "delta_map_capped", "precision")
            )
            delta_Q = np.where(np.isfinite(ap_Q), np.nan_to_num(delta_Q), np.nan)
            relative = None
            if np.isfinite(ap_Q[rows]).any():
                index_Q = index_of(group[rows].tolist())
                (relative,) = figures(ratio_bootstrap(delta_Q[rows], ap_Q[rows], index_Q, seed=seed))
            return {
                "linguistic_sensitivity": over(precision_Q, rows),
                "linguistic_sensitivity_map": over(ap_Q, rows),
                "linguistic_sensitivity_std": over(precision_Q, rows, of=np.std),
                "delta_map_capped_relative@10": relative
                if relative and relative["value"] is not None
                else None,
            }

        micro = of_slice(slice(None))
        defined = np.isfinite(column["precision@10"])
        out: dict[str, Any] = {
            "micro": _known(micro),
            "group_mean": _known({name: over(column[name], of=np.mean, least=1) for name in self.headline}),
            "paraphrase_groups": int((pd.Series(same)[defined].value_counts() > 1).sum()),
        }
        for name in ("category", *wanted.report_by):
            values_Q = np.array(wanted.columns[name], dtype=object)
            slices = {value: np.flatnonzero(values_Q == value) for value in sorted(set(values_Q))}
            out[f"by_{name}"] = {value: _known(of_slice(rows)) for value, rows in slices.items()}
        if official:
            figures_of = _official(means(scored.names, scored.value_QM), micro)
            out["official"] = figures_of | {"total_queries": int(defined.sum())}
        return out


def _known(figures_of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in figures_of.items() if figure}


def _official(value: Mapping[str, float], micro: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
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

    Source: evaluate.py and utils/metrics.py of pinterest/pinpoint-dataset. Differs: none. ``judged``: each query's whole list,
    from which negatives are removed before it is cut, with positives and negatives as listed; a candidate may be both.
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
register_benchmark(Benchmark("pinpoint", import_pinpoint, PROTOCOLS, Path(__file__).with_name("published")))

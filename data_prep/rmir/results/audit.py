"""Audit of a finished run: agreement, indices, shortcuts, overlap of the two sets, language.

It makes no model calls. Sources in the RMIR paper: future work (section 5: model diversity, and shortcut rates measured by unimodal
retrieval), Appendix B.2 (does TSR predict further right answers?), and 3.2 (words a query, and their reading level).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import decisions, frames
from data_prep.rmir.decisions import candidates_by_query
from data_prep.rmir.pictures.encoders import Index, caption_index, image_index
from data_prep.rmir.run import Row, Run
from rge.content.near_duplicates import num_repeats
from rge.stats.intervals import OF_DIFFERENCES, figures, index_of, resampled

TEXT, TEXT_TO_CAPTIONS, IMAGE = SHORTCUTS = "text alone", "text alone, by captions", "picture alone"
DESCRIPTION = "the answer described"
PROBES = (*SHORTCUTS, DESCRIPTION)
"""Search inputs. The last is not a shortcut but the reference: what the same encoder finds when told the answer."""
SUSPECT_BITS = 4
"""Hash distance up to which pictures of the two sets are reported as near-duplicates."""
TSR_RESAMPLES = 2000
COUNTED = {maths.TRUE: 0, maths.FALSE: 1, maths.ABSTAIN: 2}
"""Counted verdicts; others count as abstentions, as in `arithmetic.tally`."""


def audit(run: Run) -> dict[str, Any]:
    """Write ``audit/shortcuts.parquet`` and return the figures for the report."""
    rows = shortcuts(run)
    frames.write_rows(run.path("audit", "shortcuts.parquet"), rows)
    found = {"judges": judges(run), "indices": indices(run), "shortcuts": solved(rows, run.config.audit.ks)}
    found |= {"overlap": overlap(run), "tsr": reliability(run), "language": language(run)}
    return defined(found)


def judges(run: Run) -> dict[str, Any]:
    """`panel_statistics` of all triplets, computed over distinct vote patterns (at most 1,024 for five judges)."""
    patterns = Counter(
        tuple(sorted(votes))
        for panels in decisions.panels(run.path("judge", "judgements"))
        for votes in panels.values()
    )
    verdicts: dict[str, list[str]] = {}
    families: dict[str, str] = {}
    for pattern in sorted(patterns):
        for judge, sample, verdict in pattern:
            name = f"{judge} {sample + 1}"
            verdicts.setdefault(name, []).append(verdict)
            families[name] = run.config.models[judge].family or judge
    weight_N = np.array([patterns[pattern] for pattern in sorted(patterns)])
    return panel_statistics(dict(sorted(verdicts.items())), families, weight_N)


def indices(run: Run) -> dict[str, dict[str, float]]:
    """Precision of each retrieval index, its share of all right candidates, and the right ones that it alone found."""
    state = {(row["query_id"], row["candidate_id"]): row["state"] for row in run.rows("keep", "decided")}
    found: dict[str, Counter[str]] = {}
    total = 0
    for row in run.rows("retrieve", "triplets"):
        if (decided := state.get((row["query_id"], row["candidate_id"]))) is None:
            continue  # judgements are still missing (on_unanswered=proceed)
        right = decided == maths.KEPT
        total += right
        for name in row["found_by"]:
            counts = found.setdefault(name, Counter())
            counts["candidates"] += 1
            counts["right"] += right
            counts["right_alone"] += right and len(row["found_by"]) == 1
    return {
        name: {
            **{key: counts[key] for key in ("candidates", "right", "right_alone")},
            "precision": counts["right"] / counts["candidates"],
            "share_of_right": counts["right"] / total if total else math.nan,
        }
        for name, counts in found.items()
    }


BINS = 400
"""Bins of TSR, in which the area under the curve is computed."""


def reliability(run: Run) -> dict[str, Any]:
    """Whether TSR predicts further right answers (Appendix B.2), by judgements that were paid for anyway.

    TSR of the first K - 1 candidates of the image index is compared with the panel's verdict on the K-th. The paper compares it with people's
    labels of 150 queries; here, all queries count whose K-th candidate the panel kept or rejected, in resamples by their pictures.

    Returns:
        ``right``, ``wrong``: number of queries by that verdict; ``mean_right``, ``mean_wrong``: mean TSR; ``auc``: probability that TSR is
        higher for a query of the latter kind; ``difference`` of the means; ``right_above``, ``right_below``: share of right K-th candidates
        of queries above `SplitConfig.tsr_threshold`, and of the others. All but the numbers have intervals.
    """
    k, threshold = run.config.retrieve.by_image, run.config.split.tsr_threshold
    decided = {
        (row["query_id"], row["candidate_id"]): (row["negativeness"], row["state"])
        for row in run.rows("keep", "decided")
    }
    ranked: dict[str, list[tuple[int, tuple[float, str]]]] = defaultdict(list)
    for row in run.rows("retrieve", "triplets"):
        if row["image_rank"] is not None and (found := decided.get((row["query_id"], row["candidate_id"]))):
            ranked[row["query_id"]].append((row["image_rank"], found))
    pictures = {row["query_id"]: row["image_id"] for row in run.rows("generate", "queries")}
    scores, rights, groups = [], [], []
    for query, candidates in sorted(ranked.items()):
        *first, (rank, (_, state)) = sorted(candidates, key=lambda one: one[0])
        if rank == k > 1 and state in (maths.KEPT, maths.REJECTED):
            scores.append(maths.tsr([negativeness for _, (negativeness, _) in first], k - 1))
            rights.append(state == maths.KEPT)
            groups.append(pictures[query])
    return tsr_evidence(np.array(scores), np.array(rights, bool), groups, threshold)


def tsr_evidence(
    score_Q: np.ndarray, right_Q: np.ndarray, groups: Sequence[str], threshold: float
) -> dict[str, Any]:
    """The figures of `reliability`."""
    numbers = {"right": int(right_Q.sum()), "wrong": int((~right_Q).sum())}
    if not all(numbers.values()):
        return numbers
    bin_Q = np.minimum((score_Q * BINS).astype(int), BINS - 1)
    above_Q, wrong_Q = score_Q > threshold, ~right_Q
    group_Q = index_of(groups)
    # Sums over queries, from which every figure follows: a histogram by verdict, and four columns more.
    terms_GT = np.zeros((int(group_Q.max()) + 1, 2 * BINS + 6))
    np.add.at(terms_GT, (group_Q, bin_Q + BINS * wrong_Q), 1.0)
    more_QT = np.stack(
        [score_Q * right_Q, score_Q * wrong_Q, right_Q & above_Q, above_Q, right_Q & ~above_Q, ~above_Q],
        axis=1,
    )
    np.add.at(terms_GT, (group_Q[:, None], 2 * BINS + np.arange(6)), more_QT.astype(float))

    def values(terms_XT: np.ndarray) -> np.ndarray:
        right_XB, wrong_XB, more_XT = np.split(terms_XT, [BINS, 2 * BINS], axis=1)
        num_right_X, num_wrong_X = right_XB.sum(axis=1), wrong_XB.sum(axis=1)
        below_XB = right_XB.cumsum(axis=1) - right_XB / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_right_X, mean_wrong_X = more_XT[:, 0] / num_right_X, more_XT[:, 1] / num_wrong_X
            auc_X = (wrong_XB * below_XB).sum(axis=1) / (num_right_X * num_wrong_X)
            shares = [more_XT[:, 2] / more_XT[:, 3], more_XT[:, 4] / more_XT[:, 5]]
        return np.stack([mean_right_X, mean_wrong_X, auc_X, mean_wrong_X - mean_right_X, *shares], axis=1)

    names = ("mean_right", "mean_wrong", "auc", "difference", "right_above", "right_below")
    counts = np.full(len(names), len(terms_GT))
    bootstrap = resampled(terms_GT, values, counts, num_resamples=TSR_RESAMPLES, seed=0)
    shares, differences = figures(bootstrap, (0.0, 1.0)), figures(bootstrap, OF_DIFFERENCES)
    return (
        numbers
        | dict(zip(names, shares, strict=True))
        | {"difference": differences[names.index("difference")]}
    )


def language(run: Run) -> dict[str, Any]:
    """Words a query, mean of each category of the test set (of all queries with an answer, if it is empty), and the median reading level."""
    parts = run.rows("split", "splits").table
    of_test = parts.filter(pc.equal(parts["split"], "test"))["query_id"]
    queries = run.rows("generate", "queries")
    rows = queries.among("query_id", of_test) or queries.among("query_id", parts["query_id"])
    words: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        words[row["category"]].append(len(row["query"].split()))
    grades = [maths.reading_grade(row["query"]) for row in rows]
    return {
        "queries": len(rows),
        "words": {name: float(np.mean(counts)) for name, counts in sorted(words.items())},
        "median_grade": float(np.median(grades)) if grades else math.nan,
    }


def _probes(run: Run, pool: list[str]) -> Iterator[tuple[str, Index, Callable[[Sequence[Row]], np.ndarray]]]:
    """Name, candidates, and how queries are embedded, of each way to search the pool."""
    images, config = run.images(), run.config
    by_image = image_index(
        config.image_encoder, images, np.load(run.path("seed", "images.npy"), mmap_mode="r")
    )
    shown = by_image.among(pool)
    yield TEXT, shown, lambda queries: shown.texts([query["query"] for query in queries])
    captioned = images.having("caption")
    if {image["id"] for image in captioned} & set(pool):
        vectors_ND = np.load(run.caption_vectors(), mmap_mode="r")
        told = caption_index(config.caption_encoder, captioned, vectors_ND).among(pool)
        yield TEXT_TO_CAPTIONS, told, lambda queries: told.texts([query["query"] for query in queries])
    yield IMAGE, shown, lambda queries: by_image.among(query["image_id"] for query in queries).vectors_ND
    yield DESCRIPTION, shown, lambda queries: shown.texts([query["target_desc"] for query in queries])


def shortcuts(run: Run) -> list[Row]:
    """Rank of each query's first right answer in the pool, for each probe; the query's own picture is not ranked."""
    pool, splits = list(run.by("id", "pool", "pool")), run.by("query_id", "split", "splits")
    queries = run.rows("generate", "queries").among("query_id", run.rows("split", "splits").table["query_id"])
    positives = candidates_by_query(run.out, maths.KEPT)
    # In blocks that fit in memory: all scores would be 37 GB at 100,000 queries and candidates.
    size = max(1, int(run.config.audit.memory_mb * 2**20 / (4 * max(len(pool), 1))))
    rows = []
    for probe, index, embed in _probes(run, pool) if queries else ():
        place_of = {name: place for place, name in enumerate(index.ids)}
        for start in range(0, len(queries), size):
            block = queries[start : start + size]
            for query, score_P in zip(block, embed(block) @ index.vectors_ND.T, strict=True):
                name = query["query_id"]
                own = place_of.get(query["image_id"])
                places = (place_of[answer] for answer in positives[name] if answer in place_of)
                right = [place for place in places if place != own]
                rank, num_ranked = first_rank(score_P, right, own)
                about = {"query_id": name, "category": query["category"], "split": splits[name]["split"]}
                found = {"rank": rank, "num_right": len(right), "num_ranked": num_ranked}
                rows.append({**about, "probe": probe, **found})
    return rows


def first_rank(score_P: np.ndarray, right: Sequence[int], without: int | None) -> tuple[int | None, int]:
    """Rank (from 1) of the best right candidate, with ties counted against it, and the number of ranked candidates.

    ``without`` is the position of a candidate to leave out, if any. The rank is None if no right candidate is ranked.
    """
    number = len(score_P) - (without is not None)
    good = [place for place in right if place != without]
    if not good:
        return None, number
    best = score_P[good].max()
    left_out = good if without is None else [*good, without]
    return int((score_P >= best).sum() - (score_P[left_out] >= best).sum()) + 1, number


def chance(num_right: int, num_ranked: int, k: int) -> float:
    """Probability that a random ranking has a right candidate among the first k."""
    k = min(k, num_ranked)
    return 1 - math.comb(num_ranked - num_right, k) / math.comb(num_ranked, k)


def solved(rows: Sequence[Row], ks: Sequence[int]) -> dict[str, Any]:
    """Share of queries with a right answer among the first k, by probe, with the chance level.

    A query without a ranked right answer counts as not solved.

    Returns:
        By probe: the number of queries and, for each k, ``solved@k`` and ``chance@k``. Under ``any shortcut``: the share
        solved by text alone or picture alone, overall, by split and by category.
    """
    report: dict[str, Any] = {}
    for probe in PROBES:
        if found := [row for row in rows if row["probe"] == probe]:
            report[probe] = _solved(found, ks)
            for k in ks:
                chances = [chance(row["num_right"], row["num_ranked"], k) for row in found]
                report[probe][f"chance@{k}"] = float(np.mean(chances))
    short = [row for row in rows if row["probe"] in SHORTCUTS]
    parts = {"all": short}
    for column in ("split", "category"):
        for value in sorted({row[column] for row in short}):
            parts[value] = [row for row in short if row[column] == value]
    report["any shortcut"] = {name: _solved(found, ks) for name, found in parts.items()}
    return report


def _solved(rows: Sequence[Row], ks: Sequence[int]) -> dict[str, Any]:
    queries = {row["query_id"] for row in rows}
    figures: dict[str, Any] = {"queries": len(queries)}
    for k in ks:
        hits = {row["query_id"] for row in rows if row["rank"] is not None and row["rank"] <= k}
        figures[f"solved@{k}"] = len(hits) / len(queries) if queries else math.nan
    return figures


def overlap(run: Run) -> dict[str, int]:
    """Number of pictures that training and test share, by their roles in each."""
    images, queries = run.by("id", "seed", "images"), run.by("query_id", "generate", "queries")
    splits = run.by("query_id", "split", "splits")
    roles: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, row in splits.items():
        roles[row["split"], "inputs"].add(queries[name]["image_id"])
    for role, state in (("answers", maths.KEPT), ("negatives", maths.REJECTED)):
        candidates = candidates_by_query(run.out, state)
        for name in candidates.keys() & splits.keys():
            roles[splits[name]["split"], role].update(candidates[name])
    if run.config.split.disjoint == "all":  # the export removed these from the records
        roles["train", "negatives"] -= roles["test", "inputs"] | roles["test", "answers"]
    report = {
        f"train {a} that are test {b}": len(roles["train", a] & roles["test", b])
        for a in ("inputs", "answers", "negatives")
        for b in ("inputs", "answers")
    }
    seen = sorted(roles["test", "inputs"] | roles["test", "answers"])
    trained = sorted((roles["train", "inputs"] | roles["train", "answers"]) - set(seen))
    hashes, of_test = ([images[name]["phash"] for name in names] for names in (trained, seen))
    repeats = num_repeats(hashes, of_test, SUSPECT_BITS)
    report["train inputs or answers that nearly repeat a test picture"] = repeats
    return report


def fleiss_kappa(counts_NK: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Fleiss' kappa: agreement of a panel of fixed size, corrected for chance (Fleiss, 1971).

    Args:
        counts_NK: number of raters who put subject n into category k; all rows have the same sum.
        weight_N: number of subjects that each row stands for; None: one.

    Returns:
        1 for full agreement, 0 for chance level; nan for fewer than two raters, no subjects, or a single category in use
        (chance agreement is then 1).
    """
    counts_NK = np.asarray(counts_NK, dtype=np.float64)
    if not len(counts_NK) or (n := counts_NK[0].sum()) < 2:
        return math.nan
    observed = np.average((counts_NK**2).sum(axis=1) - n, weights=weight_N) / (n * (n - 1))
    expected = (np.average(counts_NK / n, axis=0, weights=weight_N) ** 2).sum()
    return math.nan if expected >= 1 else float((observed - expected) / (1 - expected))


def panel_statistics(
    votes: Mapping[str, Sequence[str]], families: Mapping[str, str], weight_N: np.ndarray
) -> dict[str, Any]:
    """Agreement of a panel.

    Args:
        votes: verdicts of each judge on the same triplets, in the same order.
        families: model family of each judge.
        weight_N: number of triplets that each position in `votes` stands for.

    Returns:
        ``kappa`` of the whole panel; ``judges``: shares of each verdict, and ``agrees`` (with the majority of the
        others, if they have one); ``families``: kappa within each family of two or more judges.
    """
    if not len(weight_N):
        return {"kappa": math.nan, "judges": {}, "families": {}}
    codes_JN = np.array([[COUNTED.get(verdict, 2) for verdict in said] for said in votes.values()])
    gave_JNK = np.eye(3)[codes_JN]
    judges, within = {}, {}
    for number, name in enumerate(votes):
        others_NK = gave_JNK.sum(axis=0) - gave_JNK[number]
        first_N, second_N = np.sort(others_NK, axis=1)[:, [-1, -2]].T
        agrees = _mean(codes_JN[number] == others_NK.argmax(axis=1), weight_N * (first_N > second_N))
        verdict_N = np.array(votes[name])
        shares = {verdict: _mean(verdict_N == verdict, weight_N) for verdict in maths.VERDICTS}
        judges[name] = {"family": families[name], **shares, "agrees": agrees}
        of_family_J = [families[other] == families[name] for other in votes]
        if sum(of_family_J) > 1:
            within[families[name]] = fleiss_kappa(gave_JNK[of_family_J].sum(axis=0), weight_N)
    return {"kappa": fleiss_kappa(gave_JNK.sum(axis=0), weight_N), "judges": judges, "families": within}


def _mean(found_N: np.ndarray, weight_N: np.ndarray) -> float:
    return float(np.average(found_N, weights=weight_N)) if weight_N.sum() else math.nan


def defined(found: Any) -> Any:
    """Replace nan by None, recursively through dicts, since JSON has no nan."""
    if isinstance(found, dict):
        return {key: defined(value) for key, value in found.items()}
    return None if isinstance(found, float) and math.isnan(found) else found

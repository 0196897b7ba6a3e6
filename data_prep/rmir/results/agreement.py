"""Agreement of judges beyond chance, as pure functions of vote tables."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from data_prep.rmir.arithmetic import ABSTAIN, ERROR, FALSE, TRUE

SAID = (TRUE, FALSE, ABSTAIN)
"""What is counted; an answer that could not be read counts as an abstention, as in `arithmetic.tally`."""


def fleiss_kappa(counts_NK: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Fleiss' kappa: agreement of a panel of fixed size, corrected for chance (Fleiss, 1971).

    Args:
        counts_NK: how many raters put subject n into category k; every row has the same sum.
        weight_N: how many subjects each row stands for; None: one.

    Returns:
        1 where all agree, 0 where they agree as often as chance would; nan for fewer than two raters or no subject, and
        where all of them said one and the same (chance agrees fully then, and nothing is left to correct).

    Raises:
        ValueError: rows of different sums.
    """
    counts_NK = np.asarray(counts_NK, dtype=np.float64)
    if not len(counts_NK):
        return math.nan
    raters = counts_NK.sum(axis=1)
    if (raters != raters[0]).any():
        raise ValueError("every subject needs the same number of raters")
    n = raters[0]
    if n < 2:
        return math.nan
    weight_N = np.ones(len(counts_NK)) if weight_N is None else weight_N
    observed = np.average((counts_NK**2).sum(axis=1) - n, weights=weight_N) / (n * (n - 1))
    expected = (np.average(counts_NK / n, axis=0, weights=weight_N) ** 2).sum()
    return math.nan if expected >= 1 else float((observed - expected) / (1 - expected))


def panel_statistics(
    votes: Mapping[str, Sequence[str]], families: Mapping[str, str], weight_N: np.ndarray | None = None
) -> dict[str, Any]:
    """Agreement of a panel and the bias of each judge.

    Args:
        votes: verdicts of each judge on the same triplets, in the same order.
        families: of each judge.
        weight_N: how many triplets each place of the votes stands for; None: one.

    Returns:
        ``kappa`` of the whole panel; ``judges``: share of true, false, abstain and error, ``bias`` (share of true less
        the mean of the other judges) and ``agrees`` (with the majority of the others, where they have one);
        ``families``: kappa within a family, where it has two judges; ``between``: for each two families, on how many of
        the triplets on which both have a majority it is the same one, and the kappa of these majorities.
    """
    names = list(votes)
    if not names or not len(votes[names[0]]):
        return {"kappa": math.nan, "judges": {}, "families": {}, "between": {}}
    weight_N = np.ones(len(votes[names[0]])) if weight_N is None else weight_N
    said_JN = np.stack([_codes(votes[name]) for name in names])
    members: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        members.setdefault(families[name], []).append(row)
    by_family = {family: _counts(said_JN[rows]) for family, rows in members.items()}
    return {
        "kappa": fleiss_kappa(_counts(said_JN), weight_N),
        "judges": {
            name: {"family": families[name], **_judge(votes[name], said_JN, row, weight_N)}
            for row, name in enumerate(names)
        },
        "families": {
            family: fleiss_kappa(counts, weight_N)
            for family, counts in by_family.items()
            if len(members[family]) > 1
        },
        "between": {
            f"{left} and {right}": _between(by_family[left], by_family[right], weight_N)
            for left, right in combinations(by_family, 2)
        },
    }


def _judge(verdicts: Sequence[str], said_JN: np.ndarray, row: int, weight_N: np.ndarray) -> dict[str, float]:
    """One judge beside the others."""
    own_N, rest_JN = said_JN[row], np.delete(said_JN, row, axis=0)
    major_N, clear_N = _majority(_counts(rest_JN))
    said_N = np.array(verdicts)
    shares = {verdict: _mean(said_N == verdict, weight_N) for verdict in (*SAID, ERROR)}
    bias = math.nan
    if len(rest_JN):
        bias = _mean(own_N == 0, weight_N) - _mean((rest_JN == 0).mean(axis=0), weight_N)
    return {**shares, "bias": bias, "agrees": _mean(own_N == major_N, weight_N * clear_N)}


def _between(left_NK: np.ndarray, right_NK: np.ndarray, weight_N: np.ndarray) -> dict[str, float]:
    """Two families' majorities, where both have one."""
    (a_N, a_clear_N), (b_N, b_clear_N) = _majority(left_NK), _majority(right_NK)
    both = a_clear_N & b_clear_N
    return {
        "triplets": int(weight_N[both].sum()),
        "same": _mean(a_N == b_N, weight_N * both),
        "kappa": fleiss_kappa(_counts(np.stack([a_N, b_N]))[both], weight_N[both]),
    }


def _codes(verdicts: Sequence[str]) -> np.ndarray:
    return np.array([SAID.index(ABSTAIN if verdict == ERROR else verdict) for verdict in verdicts])


def _counts(said_JN: np.ndarray) -> np.ndarray:
    return np.stack([(said_JN == code).sum(axis=0) for code in range(len(SAID))], axis=1)


def _mean(found_N: np.ndarray, weight_N: np.ndarray) -> float:
    return float(np.average(found_N, weights=weight_N)) if weight_N.sum() else math.nan


def _majority(counts_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # The most frequent category, and whether it is alone at the top.
    top = counts_NK.max(axis=1)
    return counts_NK.argmax(axis=1), ((counts_NK == top[:, None]).sum(axis=1) == 1) & (top > 0)


def defined(found: Any) -> Any:
    """The same with None for every nan, which JSON does not know."""
    if isinstance(found, dict):
        return {key: defined(value) for key, value in found.items()}
    return None if isinstance(found, float) and math.isnan(found) else found

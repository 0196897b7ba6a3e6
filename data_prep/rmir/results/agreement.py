"""Agreement of judges beyond chance, as pure functions of vote tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.rmir.arithmetic import ABSTAIN, FALSE, TRUE, VERDICTS

COUNTED = {TRUE: 0, FALSE: 1, ABSTAIN: 2}
"""Counted verdicts; others count as abstentions, as in `arithmetic.tally`."""


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
        shares = {verdict: _mean(verdict_N == verdict, weight_N) for verdict in VERDICTS}
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

"""Answers of a generator, and a judge's scores of them, 0 to 100 for the covered share of the reference.

Source: MM-BRIGHT, Appendix G and Figure 17, after BRIGHT. Differs: the wording is ours.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from eval.scoring.output_files import Scored
from eval.scoring.protocol import Protocol
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet
from rge.calls.wire.replies import BadValue, EmptyChoices, Refused, Reply, Truncated
from rge.stats.intervals import figures, index_of, resampled

SCORE, SECOND = "answer_score", "answer_score_2"
FORM = "REASON: why this score\nSCORE: a multiple of 10 from 0 to 100, such as 60"
SYSTEM = "You grade answers by comparing them with a reference answer."
SCALE = (
    "Which share of the content of the reference answer does the given answer cover? Score it from 0 to 100 in steps of 10: 0 for a "
    "blank or irrelevant answer, 10 if it covers about 10% of the reference, and so on to 100 if it covers all of it. First give your "
    f"reason, then the score, and nothing after it:\n{FORM}"
)
ANSWER = (
    "Answer the question in full, and reason step by step where that helps.",
    " Documents that need not be relevant are given above.",
)
"""Request after the question, and what is added to it if documents are shown."""
STATEMENTS = (
    "answer_score: share of the reference answer that a judge finds in the answer, in tenths; a blank or refused answer has 0",
    "answers without a readable score are left out, and counted in the warnings",
)


def answer_of(reply: Reply) -> str:
    """The text of an answer; one that is cut off counts as far as it goes. Raises `ReplyError`: there is none."""
    if reply.stop == "refusal":
        raise Refused(reply.text[:100] or "declined without a reason")
    if not reply.text.strip():
        raise (Truncated if reply.stop == "length" else EmptyChoices)("the answer is empty")
    return reply.text.strip()


def score_of(reply: Reply) -> float:
    """The score behind the last SCORE, 0 to 1. Raises `ReplyError`: a refusal, none, or not a multiple of ten up to 100."""
    found = re.findall(r"\bSCORE\b[\s:*_=`]*(-?\d+(?:\.\d+)?)", reply.text, re.IGNORECASE)
    if not found:
        if reply.stop == "refusal":
            raise Refused(reply.text[:100] or "declined without a reason")
        raise (Truncated if reply.stop == "length" else BadValue)(f"no SCORE in {reply.text[-80:]!r}")
    if not 0 <= (value := float(found[-1])) <= 100 or value % 10:
        raise BadValue(f"SCORE must be a multiple of 10 from 0 to 100, got {found[-1]}")
    return value / 100


@dataclass(frozen=True)
class AnswerProtocol(Protocol):
    """Scores of answers in place of metrics of the ranking."""

    value_QM: np.ndarray = field(default_factory=lambda: np.empty((0, 0)), compare=False)

    def names(self, wanted: RetrievalSet) -> tuple[str, ...]:
        """One per judge."""
        return self.metrics

    def score(self, wanted: RetrievalSet, ranking: Ranking) -> Scored:
        """The scores; ``ranking``: the documents that were shown."""
        right = [rows for rows, _ in wanted.positives]
        found = [np.flatnonzero(np.isin(rows, own)) for rows, own in zip(ranking.rows_QW, right, strict=True)]
        first_Q = np.array([ranks[0] + 1 if len(ranks) else 0 for ranks in found])
        chance_QM = np.full_like(self.value_QM, np.nan)
        return Scored(self.metrics, self.value_QM, self.value_QM, self.value_QM, chance_QM, first_Q)


def agreement(frame: pd.DataFrame, seed: int) -> dict[str, Any] | None:
    """Cohen's kappa of two judges with quadratic weights, and the mean difference of the second from the first."""
    if SECOND not in frame or (both := frame.dropna(subset=[SCORE, SECOND])).empty:
        return None
    a, b = (both[name].to_numpy(np.float64) for name in (SCORE, SECOND))
    groups = index_of(both["group"].tolist())
    terms_GT = np.zeros((int(groups.max()) + 1, 6))
    np.add.at(terms_GT, groups, np.stack([np.ones(len(a)), a, b, a**2, b**2, (a - b) ** 2], axis=1))

    def statistics(terms_XT: np.ndarray) -> np.ndarray:
        num, a, b, aa, bb, dd = terms_XT.T
        chance = (aa + bb) / num - 2 * a * b / num**2  # mean squared difference in random order
        kappa = 1 - np.divide(dd / num, chance, out=np.full_like(dd, np.nan), where=chance > 1e-12)
        return np.stack([kappa, (b - a) / num], axis=1)

    kappa, bias = figures(resampled(terms_GT, statistics, np.full(2, len(terms_GT)), seed=seed), (-1.0, 1.0))
    return {"num": len(both), "kappa": kappa, "bias": bias}

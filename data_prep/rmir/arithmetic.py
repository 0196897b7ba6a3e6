"""Arithmetic of the pipeline as pure functions: majority of the panel, TSR, the split, reading level."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

TRUE, FALSE, ABSTAIN, ERROR, MISSING = VERDICTS = "true", "false", "abstain", "error", "missing"
"""Verdicts of a judge; ``error`` is an answer that could not be parsed, ``missing`` a call that the endpoint rejected."""
KEPT, REJECTED, ABSTAINED, DOUBTED = STATES = "kept", "rejected", "abstained", "doubted"
"""Decisions of the panel on a triplet."""


def tally(verdicts: Sequence[str], min_confidence: float = 1.0) -> dict[str, Any]:
    """Decide on one triplet (3.1.4, 3.1.5).

    Every judge counts, including those that abstain or give an unreadable answer: four trues and an abstention are a
    confidence of 0.8. If the panel abstains unanimously, or a verdict is missing, only the pair is left out and the image
    stays; the paper does not cover these cases.

    Returns:
        ``majority``: the most frequent verdict (a tie counts as an abstention); ``confidence``: the share of the panel that
        gave it; ``state``: kept, rejected or abstained with enough confidence, else doubted.
    """
    votes = Counter(verdict if verdict in (TRUE, FALSE) else ABSTAIN for verdict in verdicts)
    (majority, most), *others = votes.most_common()
    if others and others[0][1] == most:
        majority = ABSTAIN
    confidence = votes[majority] / len(verdicts)
    state = {TRUE: KEPT, FALSE: REJECTED, ABSTAIN: ABSTAINED}[majority]
    if MISSING in verdicts:
        state = ABSTAINED
    elif confidence < min_confidence:
        state = DOUBTED
    return {"majority": majority, "confidence": confidence, "state": state}


def negativeness(verdicts: Sequence[str]) -> float:
    """Share of judges that said false, or 0 if fewer than half did (3.1.7)."""
    share = sum(verdict == FALSE for verdict in verdicts) / len(verdicts)
    return share if share >= 0.5 else 0.0


def tsr(negativeness_K: Sequence[float], k: int) -> float:
    """Test set reliability of a query: the mean over i of the mean negativeness of ranks i to K (3.1.7).

    Args:
        negativeness_K: negativeness of the image index's candidates, best first; at most `k`.
        k: candidates requested from the index. A shorter list is padded with artificial negatives (negativeness 1).

    Returns:
        Between 0 (all positive) and 1 (all negative).
    """
    padded = [*negativeness_K, *[1.0] * (k - len(negativeness_K))]
    total = tail = 0.0
    for length, value in enumerate(reversed(padded), start=1):
        tail += value
        total += tail / length
    return total / k


def reading_grade(text: str) -> float:
    """Flesch-Kincaid grade of an English text (3.2): years of school needed to read it; 0 without words.

    Syllables are groups of vowels, without a silent final e.
    """
    words = re.findall(r"[a-z]+(?:['’][a-z]+)*", text.lower())
    if not words:
        return 0.0
    sentences = max(1, len(re.findall(r"[.!?]+(?=\s|$)", text.strip())))
    syllables = sum(_syllables(word) for word in words)
    return 0.39 * len(words) / sentences + 11.8 * syllables / len(words) - 15.59


def _syllables(word: str) -> int:
    silent = re.search(r"[^aeiouyl]e(?:s|d)?$|[aeiouy]le$", word) and not re.search(
        r"[td]ed$|(?:[cgsxz]|ch|sh)es$", word
    )
    return max(1, len(re.findall(r"[aeiouy]+", word)) - bool(silent))


def merge_candidates(found: Mapping[str, Sequence[str]]) -> dict[str, dict[str, int]]:
    """Union of several indices' results without repeats: the first index's, best first, then the next one's (3.1.3).

    Returns:
        For each image its rank (from 1) in each index that found it.
    """
    ranks: dict[str, dict[str, int]] = {}
    for index, names in found.items():
        for rank, name in enumerate(names, start=1):
            ranks.setdefault(name, {})[index] = rank
    return ranks


def split_queries(scores: Mapping[str, float], threshold: float) -> dict[str, str]:
    """``test`` where TSR is greater than the threshold, else ``train`` (3.1.7)."""
    return {query: "test" if score > threshold else "train" for query, score in scores.items()}


def overlapping(
    splits: Mapping[str, str], inputs: Mapping[str, str], positives: Mapping[str, Collection[str]], mode: str
) -> set[str]:
    """Training queries that share images with the test set: inputs only (mode ``inputs``), or also right answers (``all``)."""

    def images(query: str) -> set[str]:
        return {inputs[query]} | (set(positives[query]) if mode == "all" else set())

    seen = set().union(*(images(query) for query, split in splits.items() if split == "test"))
    return {query for query, split in splits.items() if split == "train" and images(query) & seen}

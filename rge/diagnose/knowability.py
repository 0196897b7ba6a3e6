"""How much of an oracle rationale can be inferred from the query?

An oracle sees the target, the model does not. Words that the model also writes follow from the query; of the others, some
have yet to be learned and some only the target shows. Free of torch, except for `own_rationales`.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rge.common.schema import Item

if TYPE_CHECKING:
    from rge.embedder import Embedder

_STOP_WORDS = frozenset(
    "a an the of on in at to for from with and or is are was were be it its this that these those".split()
)
# Scripts without spaces between words: each sign counts as one.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+")


def content_words(text: str | None) -> list[str]:
    """Words of a text in lower case, in their order, without articles and the like."""
    return [word for word in _WORD.findall((text or "").casefold()) if word not in _STOP_WORDS]


def knowability(oracle: str, own: str, known: str = "") -> float | None:
    """Share of the oracle's words that the model's own rationale has too.

    Args:
        oracle: written with sight of the target.
        own: written by the model from the query alone.
        known: the query's text and instruction, whose words say nothing about either.

    Returns:
        Between 0 and 1; None where the oracle says nothing that the query does not.
    """
    said = set(content_words(oracle)) - set(content_words(known))
    return len(said & set(content_words(own))) / len(said) if said else None


def own_rationales(encoder: "Embedder", queries: Sequence[Item], *, batch_size: int = 64) -> list[str]:
    """Rationales that a checkpoint writes for queries."""
    seeds = range(len(queries)) if encoder.settings.generation.temperature else None
    return encoder.encode(
        queries, side="query", mode="reasoning", batch_size=batch_size, seeds=seeds
    ).rationales


def measure_knowability(
    oracle: Sequence[str],
    own: Sequence[str],
    known: Sequence[str],
    groups: Sequence[str],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """`knowability` of many queries, beside what stock phrases alone give.

    Args:
        oracle: a rationale of each query.
        own: the model's.
        known: text and instruction of each query.
        groups: what resampling keeps together, see `rge.diagnose.pairs.interval`.
        seed: of the resampling and of the partners that chance is measured with.

    Returns:
        ``queries`` whose oracle says something beyond the query; ``knowability`` (mean, low, high) over these; ``chance``, the
        mean against another group's own rationale: what a model scores that writes alike about everything. Where no
        query counts, the figures are None.
    """
    from rge.diagnose.pairs import interval, permute_across_groups

    own_shares = [knowability(*row) for row in zip(oracle, own, known, strict=True)]
    counts = [row for row, share in enumerate(own_shares) if share is not None]
    if not counts:
        return {"queries": 0, "knowability": None, "chance": None}
    other = permute_across_groups(groups, seed)
    shares = np.array([own_shares[row] for row in counts])
    by_chance = [knowability(oracle[row], own[other[row]], known[row]) or 0.0 for row in counts]
    return {
        "queries": len(counts),
        "knowability": interval(shares, [groups[row] for row in counts], seed),
        "chance": float(np.mean(by_chance)),
    }

"""How much of an oracle rationale can be inferred from the query?

An oracle sees the target, the model does not. Words that the model also writes follow from the query; the others are not learned
yet, or only visible in the target. Free of torch.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

_STOP_WORDS = frozenset(
    "a an the of on in at to for from with and or is are was were be it its this that these those".split()
)
SIGNS = "\u3005\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
"""Scripts without spaces between words, as a range of a pattern: each sign counts as a word."""
_MARKS = "".join(
    sign
    for sign in map(chr, range(0x300, 0x1F000))
    if unicodedata.category(sign) in ("Mn", "Mc")
    and not "\ufe00" <= sign <= "\ufe0f"  # those belong to emoji
)
LETTERS = rf"[^\W{SIGNS}](?:[^\W{SIGNS}]|(?![\0-\u02ff])[{_MARKS}\u200d])"
"""First character of a word of other scripts, and one that may follow: in ``\\W``, Python counts the vowel signs of Hindi or Arabic.

U+200D joins the letters of a word. The look-ahead spares most signs the long class, which is slow.
"""
_WORD = re.compile(rf"[{SIGNS}]|{LETTERS}*")


def content_words(text: str | None) -> list[str]:
    """Words of a text in lower case, without stop words."""
    text = unicodedata.normalize("NFC", (text or "").casefold())
    return [word for word in _WORD.findall(text) if word not in _STOP_WORDS]


def knowability(oracle: str, own: str, known: str = "") -> float | None:
    """Share of the oracle's words, except those of the query (`known`), that the model's own rationale contains, 0 to 1.

    None if the oracle says nothing beyond the query.
    """
    words = set(content_words(oracle)) - set(content_words(known))
    return len(words & set(content_words(own))) / len(words) if words else None


def measure_knowability(
    oracle: Sequence[str], own: Sequence[str], known: Sequence[str], groups: Sequence[str]
) -> dict[str, Any]:
    """`knowability` of many queries, and the level of chance.

    `known` are texts and instructions of the queries, `groups` names for resampling, see `rge.diagnose.pairs.interval`.

    Returns:
        ``queries``: number of those whose oracle says something beyond the query; ``knowability`` (mean, low, high) over these, or
        None; ``chance``: the mean against another group's own rationale, the score of a model that always writes the same.
    """
    from rge.diagnose.pairs import interval, permute_across_groups

    share_by_row = [knowability(*texts) for texts in zip(oracle, own, known, strict=True)]
    rows = [row for row, share in enumerate(share_by_row) if share is not None]
    if not rows:
        return {"queries": 0, "knowability": None, "chance": None}
    other = permute_across_groups(groups)
    shares = np.array([share_by_row[row] for row in rows])
    by_chance = [knowability(oracle[row], own[other[row]], known[row]) or 0.0 for row in rows]
    return {
        "queries": len(rows),
        "knowability": interval(shares, [groups[row] for row in rows]),
        "chance": float(np.mean(by_chance)),
    }

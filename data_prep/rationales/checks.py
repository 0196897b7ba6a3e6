"""Checks on a rationale, as pure functions."""

from collections.abc import Sequence

from rge.diagnose.knowability import content_words

FORBIDDEN = (
    "positive sample",
    "negative sample",
    "ground truth",
    "ground-truth",
    "correct answer",
    "target image",
    "target text",
    "as an ai",
    "<emb>",
)
"""A rationale must read as if its writer had not seen the answer; and `<emb>` is the trainer's own mark."""
NAMED_WORDS = 2
"""Words of a caption that name its thing, such as "fire engine"."""


def leak(rationale: str, target: str | None) -> float:
    """How much of the target's text the rationale copies: the share of its pairs of neighbouring words found there.

    Articles and the like do not count. A target of one word has no pairs; then the word itself is looked for.

    Args:
        rationale: what was written.
        target: the target's text; None for a target that is only a picture (see `picture_leak`).

    Returns:
        Between 0 and 1.
    """
    wanted, written = content_words(target), content_words(rationale)
    if not wanted:
        return 0.0
    size = min(2, len(wanted))
    there = {tuple(written[at : at + size]) for at in range(len(written) - size + 1)}
    pairs = {tuple(wanted[at : at + size]) for at in range(len(wanted) - size + 1)}
    return len(pairs & there) / len(pairs)


def picture_leak(rationale: str, caption: str | None, known: str = "") -> float:
    """How much a rationale describes of what only the target picture shows.

    A rationale may name what is needed: `NAMED_WORDS` of the caption's words are free. What it says beyond that, of what
    neither query nor instruction says, it can only have seen in the target.

    Args:
        rationale: what was written.
        caption: of the target picture; None or one that says no more than a name gives nothing to describe.
        known: texts of query and instruction.

    Returns:
        Between 0 (names it at most) and 1 (says all that the caption says).
    """
    details = set(content_words(caption)) - set(content_words(known))
    beyond = len(details) - NAMED_WORDS
    if beyond < 1:
        return 0.0
    return max(0, len(details & set(content_words(rationale))) - NAMED_WORDS) / beyond


def faults(
    rationale: str, *, max_words: int, forbidden: Sequence[str] = FORBIDDEN, latin: bool = True
) -> list[str]:
    """What is wrong with a rationale, leak aside.

    Args:
        rationale: what was written.
        max_words: longest allowed.
        forbidden: phrases that must not occur, in any letter case.
        latin: letters must be Latin: models of some families fall into Chinese.

    Returns:
        Names of the faults; empty where there is none.
    """
    found = []
    if len(rationale.split()) > max_words:
        found.append("too long")
    if any(phrase.lower() in rationale.lower() for phrase in forbidden):
        found.append("forbidden phrase")
    letters = [letter for letter in rationale if letter.isalpha()]
    if latin and sum(ord(letter) < 0x250 for letter in letters) < 0.95 * len(letters):
        found.append("language")
    return found

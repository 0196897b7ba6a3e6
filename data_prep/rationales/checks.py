"""Checks on a rationale, as pure functions."""

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
"""A rationale must read as if its writer had not seen the answer; `<emb>` is reserved for the trainer."""


def faults(rationale: str, *, max_words: int) -> list[str]:
    """Names of a rationale's faults other than leak; letters must be Latin, since some models drift into Chinese."""
    found = []
    if len(rationale.split()) > max_words:
        found.append("too long")
    if any(phrase in rationale.lower() for phrase in FORBIDDEN):
        found.append("forbidden phrase")
    letters = [letter for letter in rationale if letter.isalpha()]
    if sum(ord(letter) < 0x250 for letter in letters) < 0.95 * len(letters):
        found.append("language")
    return found

"""MMEB's data sets, and their wordings in the released RGE evaluation.

The training and evaluation files of MMEB-V1 name the same sets and use the same wordings, so data preparation and evaluation share
this file. ``mmeb_sets.tsv`` has a row for each set:

    set, meta_task, distribution    its name and task; IND if MMEB-train holds its training split, else OOD
    training_task                   of the sets of MMEB-train: determines the rationale's prompt, see `data_prep.rationales.prompts`
    mmeb_query, rge_query           a query's wording in MMEB, and in the released RGE evaluation
    mmeb_candidate, rge_candidate   likewise of a candidate
    summarized                      what the prefix of RGE's candidates calls them
    question                        of sets of MMEB-train whose texts are no questions: what they ask, in our words

Wordings are verbatim, even "Crop the image to to isolate".
"""

import csv
import re
from collections.abc import Collection
from pathlib import Path

_TABLE = Path(__file__).with_name("mmeb_sets.tsv").read_text(encoding="utf-8").splitlines()
_ROWS = list(csv.DictReader(_TABLE, delimiter="\t"))
SETS = {row["set"]: {key: row[key] for key in ("meta_task", "distribution")} for row in _ROWS}
TRAINING_TASKS = {row["set"]: row["training_task"] for row in _ROWS if row["training_task"]}
RGE_QUERY = {row["set"]: (row["mmeb_query"], row["rge_query"]) for row in _ROWS}
RGE_CANDIDATE = {
    row["set"]: (row["mmeb_candidate"], row["rge_candidate"]) for row in _ROWS if row["mmeb_candidate"]
}
RGE_PREFIX = {
    row["set"]: f"Summarize the following {row['summarized']} in one word: "
    for row in _ROWS
    if row["summarized"]
}
QUESTIONS = {row["set"]: row["question"] for row in _ROWS if row["training_task"]}
RGE_VALUES: dict[str, dict[str, str]] = {
    "HatefulMemes": {
        "Yes": "Summarize the following statement in one word: Yes, it contains hateful speech.",
        "No": "Summarize the following statement in one word: No, it does not contain hateful speech.",
    }
}
"""Candidates that are replaced as a whole."""
SOURCE = "mmeb/"
"""Prefix of the set's name in the ``source`` of training records."""
PLACEHOLDER = "<|image_1|>"
"""Marks the picture's place in MMEB's texts."""


def reword(name: str, text: str, side: str) -> str:
    """Reword a text of MMEB for RGE: whole values first, then the replacement, then the prefix."""
    if side == "query":
        old, new = RGE_QUERY[name]
        return text.replace(old, new)
    text = RGE_VALUES.get(name, {}).get(text, text)
    old, new = RGE_CANDIDATE.get(name, ("", ""))
    return RGE_PREFIX.get(name, "") + (text.replace(old, new) if old else text)


def set_of(source: str) -> str | None:
    """The set that training records come from, by their ``source``; None for other records."""
    name = source.removeprefix(SOURCE)
    return name if source.startswith(SOURCE) and name in SETS else None


def content(name: str, text: str | None) -> str | None:
    """A candidate's text without either wording; None if nothing remains."""
    text = text or ""
    for bare, worded in RGE_VALUES.get(name, {}).items():
        if text == worded:
            return bare
    for wording in (RGE_PREFIX.get(name, ""), *RGE_CANDIDATE.get(name, ())):
        if wording and text.startswith(wording):
            text = text[len(wording) :].lstrip(" .:\n")
    return text.strip() or None


def bare_query(name: str, instruction: str | None, text: str | None) -> tuple[str, str]:
    """What a training record asks, and its text, without the instruction to embed.

    The instruction of a rare wording that was not told apart from the text remains in it.
    """
    known = set(map(_stripped, RGE_QUERY[name]))
    other = (instruction or "").strip() if _stripped(instruction or "") not in known else ""
    return " ".join(filter(None, (QUESTIONS.get(name, ""), other))), text or ""


def imported_with(instructions: Collection[str]) -> set[str]:
    """The values of ``instructions=`` of the importers, vlm2vec or rge, that texts with these instructions were imported with."""
    given = set(map(_stripped, instructions))
    wordings = zip(("vlm2vec", "rge"), zip(*RGE_QUERY.values(), strict=True), strict=True)
    return {name for name, known in wordings if given.intersection(map(_stripped, known))}


def _stripped(wording: str) -> str:
    return wording.rstrip(" .:")


def plain(text: str | None) -> str:
    """A text without picture placeholders: our prompts always put pictures first."""
    return re.sub(r"<\|image_\d+\|>\s*", "", text or "").strip()


def canonical(name: str) -> str:
    """The name of a set in the evaluation files; the training files write ``ImageNet_1K`` for ``ImageNet-1K``."""
    return next((known for known in SETS if known.replace("-", "_") == name.replace("-", "_")), name)


def split_instruction(name: str, text: str) -> tuple[str | None, str]:
    """Split a query's text into instruction and rest, so that ``f"{instruction} {rest}"`` is the text again.

    Returns (None, text) unless the text starts with the set's wording, an optional colon or full stop, and a space.
    """
    wording = RGE_QUERY[name][0].removesuffix(":")
    match = re.match(rf"{re.escape(wording)}[:.]?(?= \S|$)", text)
    if match is None:
        return None, text
    return match.group(), text[match.end() + 1 :]

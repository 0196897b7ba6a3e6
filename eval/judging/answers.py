"""Answers to questions with documents at hand, and marks for them: what models are asked, and how marks are read.

The judge is asked as Figure 17 of the MM-BRIGHT paper prints it (`JUDGE`): question, answer and reference as texts, a mark
from 0 to 100 in steps of ten for the share of the reference that is covered. The paper prints no prompt for whoever answers;
`REQUEST` is ours.
"""

import re
from collections.abc import Sequence

from eval.judging.endpoint import picture
from rge.calls.replies import BadValue, Reply, Truncated
from rge.calls.request import Part
from rge.common.schema import Item

MOST = 100
"""The best mark."""
VERSION = 1
"""Of the wording; part of a result's identity."""
REQUEST = (
    "Think the question through step by step, then answer it in detail.",
    "Think the question through step by step, then answer it in detail. The documents may help; some of them may not bear on it.",
)
"""What stands below the question without documents and with them."""
JUDGE_SYSTEM = "You are a teacher to judge student's answer."
_CRITERIA = "\n".join(
    ["- 0 - The student's answer is completely irrelevant or blank."]
    + [
        f"- {mark} - The student's answer addresses about {mark}% of the reference content."
        for mark in range(10, MOST + 1, 10)
    ]
)
FORM = "REASON:\nDescribe why you give a specific score\nSCORE:\nThe score you give, e.g., 60"
JUDGE = (
    "--- PROBLEM START ---\n",
    "\n--- PROBLEM END ---\n--- STUDENT ANSWER START ---\n",
    "\n--- STUDENT ANSWER END ---\n--- REFERENCE ANSWER START ---\n",
    "\n--- REFERENCE ANSWER END ---\n\n"
    f"Criteria:\n{_CRITERIA}\n\nUse the following format to give a score:\n{FORM}\n"
    "Do not say anything after the score.",
)
"""What stands before question, answer and reference, and after them."""
_MARK = re.compile(r"[\s:*_`>=]*(-?\d+(?:\.\d+)?)\s*%?(?:\s*/\s*(\d+))?")
_SCORE = re.compile(r"\bSCORE\b|\b[Ss]core\b(?=[\s*_]*:)")


def answer_parts(query: Item, documents: Sequence[Item], most_chars: int | None = None) -> list[Part]:
    """What whoever answers is shown: documents, then the question, pictures where they belong.

    Args:
        query: with its instruction left out: that is for retrieval.
        documents: in this order; none: the question alone.
        most_chars: longer texts of documents are cut there; None: none is.
    """
    parts: list[Part] = []
    for number, one in enumerate(documents, 1):
        text = (one.text or "")[:most_chars]
        parts.append(f"Document {number}:\n{text}".rstrip())
        parts += [picture(ref) for ref in one.images]
    parts.append(f"Question:\n{query.text}" if query.text else "Question: what is shown here.")
    parts += [picture(ref) for ref in query.images]
    return [*parts, REQUEST[bool(documents)]]


def judge_parts(query: Item, answer: str, reference: str) -> list[Part]:
    """What the judge reads; like the paper's it is shown no picture."""
    texts = [(query.text or "").strip(), answer.strip(), reference.strip()]
    return ["".join(part for pair in zip(JUDGE, [*texts, ""], strict=True) for part in pair)]


def mark_of(reply: Reply) -> float:
    """The mark that a judge gave, 0 to 1.

    Raises:
        BadValue: there is none behind the last SCORE, or it does not lie between 0 and 100.
        Truncated: the judge was cut off before it.
    """
    found = list(_SCORE.finditer(reply.text))
    mark = _MARK.match(reply.text, found[-1].end()) if found else None
    if mark is None:
        if reply.stop == "length":
            raise Truncated(f"cut before SCORE after {reply.output_tokens} tokens")
        raise BadValue(f"no number behind SCORE in {reply.text[-80:]!r}")
    value = float(mark[1])
    if not 0 <= value <= MOST or mark[2] not in (None, str(MOST)):
        raise BadValue(f"a score from 0 to {MOST} was asked for, got {mark[0].strip(': *')!r}")
    return value / MOST

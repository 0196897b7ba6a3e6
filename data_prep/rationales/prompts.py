"""Prompts for writing rationales, and checks on the answers."""

from pathlib import Path

from rge.calls.request import Part
from rge.calls.wire.replies import Reply, check_complete, tag
from rge.common.mmeb_prompts import TRAINING_TASKS, set_of
from rge.common.options import read_yaml
from rge.common.schema import Positive, Record

TASK = "Task: explain an answer"
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

_TASKS = read_yaml(Path(__file__).with_name("tasks.yaml"))
TASKS = tuple(_TASKS)


def task_of(record: Record, positive: Positive) -> str:
    """Task of a query-target pair: that of its MMEB set, else inferred from its modalities and instruction."""
    if (name := set_of(record.source)) in TRAINING_TASKS:
        return TRAINING_TASKS[name]
    instruction = (record.instruction or "").lower()

    def says(*words: str) -> bool:
        return any(word in instruction for word in words)

    has_text = bool((record.query.text or "").strip())
    if says("locate", "region", "portion of the image", "object in the image"):
        return "grounding"
    if says("classif", "category", "identify") and positive.text:
        return "classification"
    if not record.query.images:
        return "text_to_image" if positive.image else "text_retrieval"
    if not positive.image:
        return "vqa" if has_text else "image_to_text"
    if not has_text:
        return "image_to_image"
    return "composed_retrieval" if says("change", "modif") else "reasoning_retrieval"


def parts(
    record: Record,
    positive: Positive,
    task: str,
    pictures: list[Part],
    target: Part | None,
    *,
    max_words: int,
    rewrite: bool,
) -> tuple[Part, ...]:
    """The prompt for a query-target pair; `rewrite` tells the writer that its last rationale copied the answer."""
    role, work, example = (_TASKS[task][key] for key in ("role", "work", "example"))
    rules = f"""{TASK}

You are {role}. You see a query and, at the end, the answer that belongs to it. Write the rationale that leads from the
query to the answer. {work}

Rules: at most {max_words} words of plain English. Use the answer only to check where your reasoning must arrive: reason from
the query, do not mention that you were shown an answer, and do not copy its wording.
{"Your last rationale copied the answer's words: use your own." if rewrite else ""}
An example for another query: {example}

Answer in exactly this format: <rationale>your rationale</rationale>

Query:"""
    asked = f"{record.instruction or ''}\n<query>{record.query.text or ''}</query>\nAnswer:"
    answer: list[Part] = [target] if target is not None else []
    return (rules, *pictures, asked, *answer, *([positive.text] if positive.text else []))


def read(reply: Reply) -> str:
    """Extract the rationale. Raises `ReplyError`: the answer contains none."""
    check_complete(reply, "rationale")
    return tag(reply.text, "rationale")


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

"""Prompts for writing rationales, and checks on the answers.

As in RGE (3.2, Table 9): a role, the work, rules and an example for each task; query and target come last. The sentences are ours.
"""

from pathlib import Path

from rge.calls.request import Part
from rge.calls.wire.replies import Reply, check_complete, tag
from rge.common.mmeb_prompts import TRAINING_TASKS, bare_query, content, set_of
from rge.common.options import read_yaml
from rge.common.schema import Positive, Record, Target

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

    has_text = bool((record.query.words or "").strip())
    if says("locate", "region", "portion of the image", "object in the image"):
        return "grounding"
    if says("classif", "category", "identify") and positive.words:
        return "classification"
    if not record.query.pictures:
        return "text_to_image" if positive.pictures else "text_retrieval"
    if not positive.pictures:
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
    role, work, end, example = (_TASKS[task][key] for key in ("role", "work", "end", "example"))
    rules = f"""{TASK}

You are {role}. You see a query and, at the end, the answer that belongs to it. Write the rationale that leads from the
query to the answer. Look at the query as a whole, then at its objects and their attributes, and add what you know of the
world. {work}

Rules: at most {max_words} words of plain English. Use the answer only to check where your reasoning must arrive: reason from
the query, and do not mention that you were shown an answer. {end}
{"Your last rationale copied the answer's words: use your own." if rewrite else ""}
An example for another query: {example}

Answer in exactly this format: <rationale>your rationale</rationale>

Query:"""
    question, text = bare_question(record)
    asked = f"{question}\n<query>{text}</query>\nAnswer:".lstrip()
    answer: list[Part] = [target] if target is not None else []
    if bare := bare_text(record, positive):
        answer.append(f"<answer>{bare}</answer>")
    return (rules, *pictures, asked, *answer, "Now write the rationale.")


def bare_question(record: Record) -> tuple[str, str]:
    """What a record asks and its query's text, of MMEB without the instruction to embed them, which the writer might obey."""
    name = set_of(record.source)
    if name is None:
        return record.instruction or "", record.query.words or ""
    return bare_query(name, record.instruction, record.query.words)


def bare_text(record: Record, target: Target) -> str | None:
    """A target's text without MMEB's fixed wording around it, which reveals nothing; None if nothing is left."""
    name = set_of(record.source)
    return target.words if name is None else content(name, target.words)


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

"""Prompts for writing rationales, and checks on the answers."""

from rge.calls.replies import Reply, check_complete, tag
from rge.calls.request import Part
from rge.common.mmeb_prompts import TRAINING_TASKS, set_of
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

_TASKS = {
    "classification": (
        "an expert at naming what a picture shows",
        "Work out from shape, parts, material and surroundings what it is, and what tells it from its nearest likes.",
        "A small brown bird sits on a fence. The short thick bill is made for seeds, and grey crown and black bib are "
        "those of a male house sparrow, not of a tree sparrow with its brown crown.",
    ),
    "vqa": (
        "an expert at answering questions about pictures",
        "Let the question guide your eyes: find the part of the picture that decides, and reason from it to the answer.",
        "The question asks for the weather. People on the pavement hold umbrellas, the road reflects the traffic lights "
        "and nobody wears sunglasses, so it is raining.",
    ),
    "image_to_text": (
        "an expert at finding the text that belongs to a picture",
        "Describe the whole, then the objects and what they do, and say which of it a fitting text would mention.",
        "A man in a yellow helmet kneels on a flat roof with a drill beside dark panels. Tools, helmet and panels point to "
        "a text about installing solar power.",
    ),
    "image_to_image": (
        "an expert at finding pictures that look alike",
        "Say what likeness would rest on: the subject, its pose and number, the view, the light and the setting.",
        "A tabby cat sleeps curled up on a grey sofa, seen from above in soft light. A picture like it must show one such "
        "cat in the same pose on something soft and plain.",
    ),
    "text_to_image": (
        "an expert at finding the picture that a text describes",
        "Work out what must be seen in the picture, and what follows from the text without being said.",
        "The text speaks of a crowded finish line. The picture must show runners with numbers, a banner above the road and "
        "people behind barriers, in daylight.",
    ),
    "composed_retrieval": (
        "an expert at finding a picture by another one and a wish",
        "Say what the given picture shows, what the text changes in it, and what stays.",
        "The picture shows a red dress with short sleeves and a belt. The text wants it longer and blue, so cut and belt "
        "stay: a blue dress to the ankles, belted, with short sleeves.",
    ),
    "grounding": (
        "an expert at finding the part of a picture that a text means",
        "Find all parts that might be meant, and say by place, colour and neighbours which one is.",
        "Two dogs lie on the lawn. The text means the one with the ball: the black one at the left edge, beside the hedge, "
        "with a yellow ball between its paws.",
    ),
    "reasoning_retrieval": (
        "an expert at questions whose answers are other pictures",
        "Say what the given picture shows, then reason in one or two steps from the question to what must be seen.",
        "A bottle is closed with a cork that sits too tight for fingers. To get at the wine, the cork must be pulled out, "
        "so a corkscrew is needed.",
    ),
    "text_retrieval": (
        "an expert at finding the text that answers another",
        "Work out what is asked for and what a fitting text must say.",
        "The question asks why iron rusts. A fitting text speaks of oxygen and water reacting with the metal.",
    ),
}  # fmt: skip
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
    role, work, example = _TASKS[task]
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

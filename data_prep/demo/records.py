"""Turn facts into training records: questions about a picture, text-only questions, and naming."""

from collections.abc import Sequence
from typing import Any

from data_prep.demo.families import TRAINING, Family
from data_prep.demo.splits import VALID_QUERIES, Splits, choose, stable_hash
from data_prep.demo.tables import Concept, Fact, Question, Tables
from rge.common.parts import ImageRef
from rge.common.schema import Positive, QueryPart, Record, Target

INSTRUCTION = "Answer with a picture."
NAMING_INSTRUCTION = "Find the same thing."
NUM_WORDS_ONLY = 2
"""Text-only records of a fact that has no picture question in training."""
NAMING_PHRASINGS = ("What is this?", "What do you see?", "What does this show?", "Name this.")


def relation_records(tables: Tables, splits: Splits, *, paraphrased: bool = False) -> list[Record]:
    """Questions about pictures: each trained fact once per training family, with varying phrasings.

    ``paraphrased``: each record also has all other phrasings and paraphrases of its question.
    """
    records = []
    for fact in tables.facts:
        if fact.pair in splits.words_only:
            continue
        families = tables.families(fact.source)
        if fact.pair in splits.valid_seen:
            families = [family for family in families if family != VALID_QUERIES]
        first = stable_hash("phrasing", *fact.pair)
        for number, family in enumerate(families):
            question = tables.questions[fact.question]
            text = question.shown(first + number)
            images: list[ImageRef] = [reference(tables.concepts[fact.source], family)]
            query = QueryPart(
                text=text, images=images, paraphrases=_others(question, text, None) if paraphrased else []
            )
            records.append(_record(tables, fact, family.name, query))
    return records


def text_records(tables: Tables, splits: Splits, *, paraphrased: bool = False) -> list[Record]:
    """The same questions with the thing named instead of shown: one record per fact, two if no picture question asks it."""
    records = []
    for fact in tables.facts:
        question = tables.questions[fact.question]
        first = stable_hash("named", *fact.pair)
        for number in range(NUM_WORDS_ONLY if fact.pair in splits.words_only else 1):
            source = tables.concepts[fact.source]
            text = question.named(first + number, source)
            query = QueryPart(text=text, paraphrases=_others(question, text, source) if paraphrased else [])
            records.append(_record(tables, fact, f"text{number}", query))
    return records


def _others(question: Question, text: str, concept: Concept | None) -> list[str]:
    return [wording for wording in question.wordings(concept) if wording != text]


def naming_records(tables: Tables) -> list[Record]:
    """One naming question per training drawing; the answer is another family's drawing of the same thing."""
    records = []
    for concept in tables.concepts.values():
        families = tables.families(concept.key)
        first = stable_hash("naming", concept.key)
        for number, family in enumerate(families):
            other = _drawing(tables, concept, concept.key, family.name, avoid=family)
            text = NAMING_PHRASINGS[(first + number) % len(NAMING_PHRASINGS)]
            query = QueryPart(text=text, images=[reference(concept, family)])
            positive = Positive(**other, rationale=f"{concept.sentence}.")
            name = f"name.{concept.key}.{family.name}"
            records.append(naming_record("demo", name, concept.key, query, positive))
    return records


def naming_record(source: str, name: str, group: str, query: QueryPart, positive: Positive) -> Record:
    """A record that asks what a picture shows."""
    return Record(
        id=name,
        group=group,
        source=source,
        split="train",
        category="naming",
        instruction=NAMING_INSTRUCTION,
        query=query,
        positives=[positive],
    )


def reference(concept: Concept, family: Family) -> str:
    """Reference to a training drawing, relative to the folder of the training records."""
    return f"{family.library}#{concept.picture(family)}"


def _record(tables: Tables, fact: Fact, variant: str, query: QueryPart) -> Record:
    avoid = next((family for family in TRAINING if family.name == variant), None)

    def target(key: str) -> dict[str, Any]:
        return _drawing(tables, tables.concepts[key], *fact.pair, variant, avoid=avoid)

    return Record(
        id=f"{fact.question}.{fact.source}.{variant}",
        group=fact.source,
        source="demo",
        split="train",
        category=tables.questions[fact.question].category,
        instruction=INSTRUCTION,
        query=query,
        positives=[Positive(**target(key), rationale=rationale) for key, rationale in fact.answers.items()],
        negatives=[Target(**target(key)) for key in _wrong(fact, variant)],
    )


def _wrong(fact: Fact, variant: str) -> Sequence[str]:
    # Another drawing of the source itself is always wrong; having it in every second record is enough.
    return fact.wrong if stable_hash("wrong", *fact.pair, variant) % 2 else fact.near_misses


def _drawing(tables: Tables, concept: Concept, *words: str, avoid: Family | None) -> dict[str, Any]:
    families = [family for family in tables.families(concept.key) if family != avoid]
    family = choose(families, "drawing", concept.key, *words)
    return {
        "id": concept.picture(family),
        "image": reference(concept, family),
        "identity": concept.key,
    }

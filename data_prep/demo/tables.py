"""Read the hand-written tables of drawings, questions and facts; a test holds them to their rules.

``concepts.tsv``     concept, hex (code point, part of every picture's id), name with article, number (one or many)
``drawings.tsv``     concept, then per family the icon that draws it; empty: none, or it shows something else
``questions.tsv``    question, category, three phrasings or more
``relations.tsv``    question, source concept, target concept, rationale; one row per acceptable target
``near_misses.tsv``  question, source concept, a concept that looks right and is wrong

A phrasing has the slots ``{x}`` ("this" beside a picture, else the name), ``{is}``, ``{does}`` and ``{was}`` (their
plural where the name is one).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from data_prep.demo.families import FAMILIES, TRAINING, Family

HERE = Path(__file__).parent
CATEGORIES = ("functional", "temporal", "causal")

_ONE = {"is": "is", "does": "does", "was": "was"}
_MANY = {"is": "are", "does": "do", "was": "were"}


@dataclass(frozen=True, slots=True)
class Concept:
    """A thing that is drawn. ``name`` has its article; ``many`` tells "these are" from "this is"."""

    key: str
    hex: str
    name: str
    many: bool

    @property
    def sentence(self) -> str:
        """What a picture of it shows, without the full stop."""
        return f"{'These are' if self.many else 'This is'} {self.name}"

    def picture(self, family: Family) -> str:
        """Id of its drawing by a family."""
        return f"{family.name}/{self.hex}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a thing, in several phrasings."""

    key: str
    category: str
    phrasings: tuple[str, ...]

    def shown(self, number: int) -> str:
        """A phrasing beside a picture."""
        return self._phrase(number).format(x="this", **_ONE)

    def named(self, number: int, concept: Concept) -> str:
        """A phrasing that names the thing instead of showing it."""
        return self._phrase(number).format(x=concept.name, **(_MANY if concept.many else _ONE))

    def _phrase(self, number: int) -> str:
        return self.phrasings[number % len(self.phrasings)]


@dataclass(frozen=True, slots=True)
class Fact:
    """One question about one thing, and everything known about its answers."""

    question: str  # key of the question
    source: str  # concept shown or named
    answers: dict[str, str]  # per acceptable target concept its rationale
    near_misses: tuple[str, ...]  # concepts that look right and are wrong

    @property
    def pair(self) -> tuple[str, str]:
        """Question and source: what a fact is called."""
        return self.question, self.source

    @property
    def wrong(self) -> tuple[str, ...]:
        """Explicit negatives: the near misses, and the thing itself, which is never the answer."""
        return (*self.near_misses, self.source)


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables, keyed and in file order. ``icons`` is by (family name, concept)."""

    concepts: dict[str, Concept]
    icons: dict[tuple[str, str], str]
    questions: dict[str, Question]
    facts: list[Fact]

    def families(self, concept: str, among: tuple[Family, ...] = TRAINING) -> list[Family]:
        """Families that draw a concept."""
        return [family for family in among if (family.name, concept) in self.icons]


def read_tables() -> Tables:
    """Read the tables."""
    concepts = {
        row["concept"]: Concept(row["concept"], row["hex"], row["name"], row["number"] == "many")
        for row in rows_of("concepts")
    }
    icons = {
        (family.name, row["concept"]): row[family.name]
        for row in rows_of("drawings")
        for family in FAMILIES
        if row[family.name]
    }
    questions = {row["question"]: _question(row) for row in rows_of("questions")}
    answers: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of("relations"):
        answers.setdefault((row["question"], row["source"]), {})[row["target"]] = row["rationale"]
    near: dict[tuple[str, str], list[str]] = {}
    for row in rows_of("near_misses"):
        near.setdefault((row["question"], row["source"]), []).append(row["near_miss"])
    facts = [Fact(*pair, found, tuple(near.get(pair, ()))) for pair, found in answers.items()]
    return Tables(concepts, icons, questions, facts)


def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of a table, by its name without the ending."""
    with (HERE / f"{table}.tsv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True))


def _question(row: dict[str, str]) -> Question:
    phrasings = [text for column, text in row.items() if column.startswith("phrasing_") and text]
    return Question(row["question"], row["category"], tuple(phrasings))

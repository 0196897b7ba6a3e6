"""Read the hand-written tables of drawings, questions and facts; a test checks their rules.

``concepts.tsv``     concept, hex (code point, part of every picture's id), name with article, number (one or many)
``drawings.tsv``     concept, then its icon in each family; empty: none, or it shows something else
``questions.tsv``    question, category, three phrasings or more
``paraphrases.tsv``  question, six further wordings: concise (two questions or commands more), then detailed; not in the shipped records
``relations.tsv``    question, source concept, target concept, rationale; one row per acceptable target
``near_misses.tsv``  question, source concept, a plausible but wrong concept

A phrasing has the slots ``{x}`` ("this" beside a picture, else the name), ``{is}``, ``{does}`` and ``{was}`` (plural if
the name is plural).
"""

from dataclasses import dataclass
from pathlib import Path

from data_prep.demo.families import FAMILIES, TRAINING, Family, rows_of

HERE = Path(__file__).parent

_ONE = {"is": "is", "does": "does", "was": "was"}
_MANY = {"is": "are", "does": "do", "was": "were"}


@dataclass(frozen=True, slots=True)
class Concept:
    """A thing that is drawn. ``name`` includes the article; ``many`` marks a plural ("these are")."""

    key: str
    hex: str
    name: str
    many: bool

    @property
    def sentence(self) -> str:
        """Sentence that names it, without the full stop."""
        return f"{'These are' if self.many else 'This is'} {self.name}"

    def picture(self, family: Family) -> str:
        """Id of a family's drawing of it."""
        return f"{family.name}/{self.hex}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a thing, in several phrasings."""

    key: str
    category: str
    phrasings: tuple[str, ...]
    paraphrases: tuple[str, ...] = ()

    def shown(self, number: int) -> str:
        """A phrasing for a query with a picture."""
        return _filled(self.phrasings[number % len(self.phrasings)], None)

    def named(self, number: int, concept: Concept) -> str:
        """A phrasing that names the thing instead of showing it."""
        return _filled(self.phrasings[number % len(self.phrasings)], concept)

    def wordings(self, concept: Concept | None) -> list[str]:
        """All phrasings and paraphrases, beside a picture or with the thing named."""
        return [_filled(wording, concept) for wording in (*self.phrasings, *self.paraphrases)]


def _filled(wording: str, concept: Concept | None) -> str:
    forms = _MANY if concept is not None and concept.many else _ONE
    return wording.format(x="this" if concept is None else concept.name, **forms)


@dataclass(frozen=True, slots=True)
class Fact:
    """One question about one thing, with its right and wrong answers."""

    question: str  # key of the question
    source: str  # concept shown or named
    answers: dict[str, str]  # rationale of each acceptable target concept
    near_misses: tuple[str, ...]  # plausible but wrong concepts

    @property
    def pair(self) -> tuple[str, str]:
        """Question and source, which identify a fact."""
        return self.question, self.source

    @property
    def wrong(self) -> tuple[str, ...]:
        """Explicit negatives: the near misses, and the source itself, which is never the answer."""
        return (*self.near_misses, self.source)


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables, keyed and in file order. ``icons`` is by (family name, concept)."""

    concepts: dict[str, Concept]
    icons: dict[tuple[str, str], str]
    questions: dict[str, Question]
    facts: list[Fact]

    def drawn_by(self, family: Family) -> list[str]:
        """Concepts that a family draws."""
        return [concept for concept in self.concepts if (family.name, concept) in self.icons]

    def families(self, concept: str) -> list[Family]:
        """Training families with a drawing of a concept."""
        return [family for family in TRAINING if (family.name, concept) in self.icons]


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
    paraphrases = {row.pop("question"): tuple(row.values()) for row in rows_of("paraphrases")}
    questions = {
        row["question"]: _question(row, paraphrases[row["question"]]) for row in rows_of("questions")
    }
    answers: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of("relations"):
        answers.setdefault((row["question"], row["source"]), {})[row["target"]] = row["rationale"]
    near: dict[tuple[str, str], list[str]] = {}
    for row in rows_of("near_misses"):
        near.setdefault((row["question"], row["source"]), []).append(row["near_miss"])
    facts = [Fact(*pair, found, tuple(near.get(pair, ()))) for pair, found in answers.items()]
    return Tables(concepts, icons, questions, facts)


def _question(row: dict[str, str], paraphrases: tuple[str, ...]) -> Question:
    phrasings = [text for column, text in row.items() if column.startswith("phrasing_") and text]
    return Question(row["question"], row["category"], tuple(phrasings), paraphrases)

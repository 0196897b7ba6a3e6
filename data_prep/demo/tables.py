"""Read and validate the hand-written tables of drawings, questions and facts.

``concepts.tsv``     concept, hex (code point, part of every picture's id), name with article, number (one or many)
``drawings.tsv``     concept, then per family the icon that draws it; empty: none, or it shows something else
``questions.tsv``    question, category, three phrasings or more
``relations.tsv``    question, source concept, target concept, rationale; one row per acceptable target
``near_misses.tsv``  question, source concept, a concept that looks right and is wrong

A phrasing has the slots ``{x}`` ("this" beside a picture, else the name), ``{is}``, ``{does}`` and ``{was}`` (their
plural where the name is one).
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.demo.families import FAMILIES, GALLERY, QUERIES, TRAINING, Family
from rge.common.errors import UserError

HERE = Path(__file__).parent
CATEGORIES = ("functional", "temporal", "causal")
MAX_RATIONALE_WORDS = 25
MIN_TRAINING_FAMILIES = 3

_ONE = {"is": "is", "does": "does", "was": "was"}
_MANY = {"is": "are", "does": "do", "was": "were"}


class TableError(UserError):
    """A table breaks its rules; the message names file, line and reason."""


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


def read_tables(folder: Path = HERE) -> Tables:
    """Read the tables.

    Raises:
        TableError: a row breaks the rules.
    """
    concepts: dict[str, Concept] = {}
    for where, row in _rows(folder / "concepts.tsv", ["concept", "hex", "name", "number"]):
        _new(where, row["concept"], concepts)
        if row["number"] not in ("one", "many"):
            raise TableError(f"{where}: number must be one or many, got {row['number']!r}")
        concepts[row["concept"]] = Concept(row["concept"], row["hex"], row["name"], row["number"] == "many")
    icons = _icons(folder / "drawings.tsv", concepts)
    questions: dict[str, Question] = {}
    columns = ["question", "category", "phrasing_1", "phrasing_2", "phrasing_3"]
    for where, row in _rows(folder / "questions.tsv", columns):
        _new(where, row["question"], questions)
        if row["category"] not in CATEGORIES:
            raise TableError(
                f"{where}: category must be one of {', '.join(CATEGORIES)}, got {row['category']!r}"
            )
        phrasings = tuple(text for column, text in row.items() if column.startswith("phrasing_") and text)
        for text in phrasings:
            if text.count("{x}") != 1:
                raise TableError(f"{where}: a phrasing must have one slot {{x}}, got {text!r}")
        questions[row["question"]] = Question(row["question"], row["category"], phrasings)
    return Tables(concepts, icons, questions, _facts(folder, concepts, questions))


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = list(table.fieldnames or [])
        if names[: len(columns)] != columns:
            raise TableError(f"{path.name}: columns must begin with {columns}, got {table.fieldnames}")
        for row in table:
            where = f"{path.name}:{table.line_num}"
            if None in row or None in row.values():
                raise TableError(f"{where}: expected {len(names)} columns")
            yield where, row


def _new(where: str, key: str, seen: dict) -> None:
    if key in seen:
        raise TableError(f"{where}: {key!r} is listed already")


def _icons(path: Path, concepts: dict[str, Concept]) -> dict[tuple[str, str], str]:
    names = [family.name for family in FAMILIES]
    icons: dict[tuple[str, str], str] = {}
    drawn: set[str] = set()
    for where, row in _rows(path, ["concept", *names]):
        concept = row["concept"]
        if concept not in concepts or concept in drawn:
            raise TableError(f"{where}: {concept!r} must stand in concepts.tsv, and here once")
        drawn.add(concept)
        icons |= {(name, concept): row[name] for name in names if row[name]}
        if sum(bool(row[family.name]) for family in TRAINING) < MIN_TRAINING_FAMILIES:
            raise TableError(f"{where}: {concept!r} needs {MIN_TRAINING_FAMILIES} training families or more")
        if not row[QUERIES.name] or not row[GALLERY.name]:
            raise TableError(f"{where}: {concept!r} must be drawn by both held-out families")
    if missing := sorted(set(concepts) - drawn):
        raise TableError(f"{path.name}: no row for {', '.join(missing)}")
    return icons


def _facts(folder: Path, concepts: dict[str, Concept], questions: dict[str, Question]) -> list[Fact]:
    answers: dict[tuple[str, str], dict[str, str]] = {}
    for where, row in _rows(folder / "relations.tsv", ["question", "source", "target", "rationale"]):
        question, source, target, rationale = row["question"], row["source"], row["target"], row["rationale"]
        _known(where, question, questions)
        _known(where, source, concepts)
        _known(where, target, concepts)
        found = answers.setdefault((question, source), {})
        if target in found or target == source:
            raise TableError(f"{where}: target {target!r} is the source, or is listed already")
        _check_rationale(where, rationale, concepts[source], concepts[target])
        found[target] = rationale
    near: dict[tuple[str, str], list[str]] = {}
    for where, row in _rows(folder / "near_misses.tsv", ["question", "source", "near_miss"]):
        pair, wrong = (row["question"], row["source"]), row["near_miss"]
        _known(where, wrong, concepts)
        if pair not in answers:
            raise TableError(f"{where}: no relation asks {pair[0]!r} about {pair[1]!r}")
        if wrong in answers[pair] or wrong == pair[1] or wrong in near.get(pair, ()):
            raise TableError(f"{where}: {wrong!r} is an answer, the source, or is listed already")
        near.setdefault(pair, []).append(wrong)
    return [Fact(*pair, found, tuple(near.get(pair, ()))) for pair, found in answers.items()]


def _known(where: str, key: str, table: dict) -> None:
    if key not in table:
        raise TableError(f"{where}: {key!r} is in no table")


def _check_rationale(where: str, rationale: str, source: Concept, target: Concept) -> None:
    # A rationale reasons from what is seen to what is needed, in one pattern that a tiny model can learn.
    if not rationale.startswith(source.sentence + "; "):
        raise TableError(
            f"{where}: the rationale must begin with {source.sentence!r} and a semicolon, got {rationale!r}"
        )
    if not rationale.endswith(f" {target.name}."):
        raise TableError(f"{where}: the rationale must end with {target.name!r}, got {rationale!r}")
    if len(rationale.split()) > MAX_RATIONALE_WORDS:
        raise TableError(f"{where}: the rationale has more than {MAX_RATIONALE_WORDS} words: {rationale!r}")

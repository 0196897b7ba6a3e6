"""Which pairs of picture and question are held out for test and validation.

A held-out pair is a fact that training asks in words only, never about a picture. Its parts are all trained: the picture
with other questions, the question with other pictures, and each answer as an answer elsewhere. So the test measures
compositional generalisation.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from data_prep.demo.families import TRAINING
from data_prep.demo.tables import Fact, Tables

T = TypeVar("T")

SEED = "rge demo 1"
TEST_SHARE = 0.2
"""Share of each question's facts that is held out for the test."""
NUM_VALID = 30
"""Validation facts that training asks in words only; as many again are also trained with pictures."""
VALID_QUERIES, VALID_GALLERY = TRAINING[0], TRAINING[2]
"""Families of the validation queries and gallery; both are training families, so tuning never sees a held-out drawing."""

Pair = tuple[str, str]
"""Question and source concept."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Assignment of facts, identified by their `Pair`, to splits."""

    test: frozenset[Pair]  # held out for the test
    valid: frozenset[Pair]  # held out for validation; not in the test either
    valid_seen: frozenset[Pair]  # trained, but without the drawing of the validation query

    @property
    def words_only(self) -> frozenset[Pair]:
        """Facts that training may not ask about a picture."""
        return self.test | self.valid


def stable_hash(*words: str) -> int:
    """A hash of the words and `SEED` that is the same on every machine and in every version."""
    return int.from_bytes(hashlib.sha256("\n".join((SEED, *words)).encode()).digest()[:8], "big")


def choose(options: Sequence[T], *words: str) -> T:
    """Choose an option by the hash of the words."""
    return options[stable_hash(*words) % len(options)]


def shuffled(facts: Iterable[Fact], purpose: str) -> list[Fact]:
    """Shuffle facts, deterministically for a purpose."""
    return sorted(facts, key=lambda fact: stable_hash(purpose, *fact.pair))


def split(tables: Tables) -> Splits:
    """Hold out pairs, greedily in a seeded order, as long as their parts stay trained."""
    trained = _Trained(tables.facts)
    per_question = Counter(fact.question for fact in tables.facts)
    left = {question: round(TEST_SHARE * count) for question, count in per_question.items()}
    test = set()
    for fact in shuffled(tables.facts, "test"):
        if left[fact.question] and trained.remove(fact):
            left[fact.question] -= 1
            test.add(fact.pair)
    candidates = [fact for fact in tables.facts if fact.pair not in test and is_drawn(tables, fact)]
    valid: set[Pair] = set()
    for fact in shuffled(candidates, "valid"):
        if len(valid) < NUM_VALID and trained.remove(fact):
            valid.add(fact.pair)
    seen = [fact.pair for fact in shuffled(candidates, "valid seen") if fact.pair not in valid]
    valid_seen = seen[:NUM_VALID]
    if len(valid) < NUM_VALID or len(valid_seen) < NUM_VALID:
        raise ValueError(
            f"too few relations for {NUM_VALID} validation pairs: {len(valid)} and {len(valid_seen)}"
        )
    return Splits(frozenset(test), frozenset(valid), frozenset(valid_seen))


class _Trained:
    """Counts how often each source and target is still trained; no part may lose all its facts."""

    def __init__(self, facts: Iterable[Fact]):
        facts = list(facts)
        self.targets = Counter(target for fact in facts for target in fact.answers)
        self.removable = {s: count // 2 for s, count in Counter(fact.source for fact in facts).items()}

    def remove(self, fact: Fact) -> bool:
        if not self.removable[fact.source] or any(self.targets[target] < 2 for target in fact.answers):
            return False
        self.removable[fact.source] -= 1
        self.targets.subtract(list(fact.answers))
        return True


def is_drawn(tables: Tables, fact: Fact) -> bool:
    """Whether the validation families have the drawings that a query about a fact needs."""
    gallery = (*fact.answers, *fact.wrong)
    drawn = all((VALID_GALLERY.name, concept) in tables.icons for concept in gallery)
    return drawn and (VALID_QUERIES.name, fact.source) in tables.icons

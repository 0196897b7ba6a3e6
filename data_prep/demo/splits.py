"""Which pairs of picture and question are held out for test and validation.

A held-out pair is a fact that no training record asks about a picture; training meets it in words only. Everything
around it is trained: the picture with other questions, the question with other pictures, and every answer as an
answer elsewhere. What the test asks is then to put together what was learned apart.
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
"""Share of each question's facts that the test holds out."""
NUM_VALID = 30
"""Facts for validation that training meets in words only, and as many that it also meets in pictures."""
VALID_QUERIES, VALID_GALLERY = TRAINING[0], TRAINING[2]
"""Training families of the validation queries and gallery: tuning on it looks at no held-out drawing."""

Pair = tuple[str, str]
"""Question and source concept."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Which facts are for what; a fact is named by its `Pair`."""

    test: frozenset[Pair]  # held out for the test
    valid: frozenset[Pair]  # held out for validation; the test does not ask them at all
    valid_seen: frozenset[Pair]  # trained, but not with the drawing that the validation query shows

    @property
    def words_only(self) -> frozenset[Pair]:
        """Facts that training may not ask about a picture."""
        return self.test | self.valid


def stable_hash(*words: str) -> int:
    """A number that depends on the words and `SEED` only: the same on every machine and in every version."""
    return int.from_bytes(hashlib.sha256("\n".join((SEED, *words)).encode()).digest()[:8], "big")


def choose(options: Sequence[T], *words: str) -> T:
    """One of the options, decided by the words."""
    return options[stable_hash(*words) % len(options)]


def shuffled(facts: Iterable[Fact], purpose: str) -> list[Fact]:
    """Facts in an order decided by their names and the purpose."""
    return sorted(facts, key=lambda fact: stable_hash(purpose, *fact.pair))


def split(tables: Tables) -> Splits:
    """Hold out pairs, greedily in a seeded order, as long as what they are made of stays trained.

    Raises:
        ValueError: the tables leave too few pairs to hold out.
    """
    trained = _Trained(tables.facts)
    per_question = Counter(fact.question for fact in tables.facts)
    left = {question: round(TEST_SHARE * count) for question, count in per_question.items()}
    test = set()
    for fact in shuffled(tables.facts, "test"):
        if left[fact.question] and trained.remove(fact):
            left[fact.question] -= 1
            test.add(fact.pair)
    candidates = [fact for fact in tables.facts if fact.pair not in test and _valid(tables, fact)]
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
    """How often each part of the facts still trains; removing a fact must leave every part something."""

    def __init__(self, facts: Iterable[Fact]):
        facts = list(facts)
        self.sources = Counter(fact.source for fact in facts)
        self.targets = Counter(target for fact in facts for target in fact.answers)
        self.at_most = {source: count // 2 for source, count in self.sources.items()}

    def remove(self, fact: Fact) -> bool:
        if not self.at_most[fact.source] or any(self.targets[target] < 2 for target in fact.answers):
            return False
        self.at_most[fact.source] -= 1
        self.sources[fact.source] -= 1
        self.targets.subtract(list(fact.answers))
        return True


def _valid(tables: Tables, fact: Fact) -> bool:
    gallery = (*fact.answers, *fact.wrong)
    drawn = all((VALID_GALLERY.name, concept) in tables.icons for concept in gallery)
    return drawn and (VALID_QUERIES.name, fact.source) in tables.icons

"""Design of the study set: its questions, its right answers, and oracle texts that leak.

Every picture is one of the demo's drawings on a coloured ground (`GROUNDS`), with a serial from A0 to J9: the bar above
encodes the letter by colour, the bar below the digit. A query shows a thing and asks for a relation ("Which tool do you use
for this?"). A target is right if it shows

* the **thing** that the relation leads to, which the rationale names;
* on the **same ground** as the query, which no text mentions: it must be copied from the picture;
* with any **serial**.

The rationale may end with the target's serial ("Its serial is C4."), which suffices to tell targets apart in training
without copying the ground. The **dose** is the number of different serials among targets; pictures and questions are the
same at every dose. There are three arms:

* ``hidden``: the text names the target's serial, while the query shows an unrelated one;
* ``known``: the same texts, but the query shows the target's serial too;
* ``silent``: the pictures of ``hidden``, without a serial in the text.

Queries of a quarter of the facts are never embedded in training: only the cold start teaches their answers, in words.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from data_prep.demo.families import Family
from data_prep.demo.splits import choose, stable_hash
from data_prep.demo.tables import Concept, Fact, Tables

GROUNDS = ("rose", "sand", "lime", "aqua", "sky", "lilac")
"""Pale grounds, in the order of the colour wheel."""
NUM_SERIALS = 100
MIN_FAMILIES = 4
"""Things with drawings by fewer training families are left out, since they are not recognised reliably."""
NUM_ANSWERS = 16
"""The most frequent answers. In a batch of 64 about four queries then share an answer, so that only ground or serial separates
their targets. With 72 answers neither was learned, since most answers were unique in their batch."""
PICTURES_A_DRAWING = 18
"""Training queries per fact and family, three on each ground. With three in total, 200 steps were ten epochs and targets were
memorised."""
QUERIES_A_FACT = {"valid": 5, "test": 10}
GALLERY_LAYERS = 2
"""Candidates per thing and ground, each with its own serial."""


@dataclass(frozen=True)
class Shown:
    """One picture: a drawing, its ground (a number into `GROUNDS`) and its serial (0 to 99)."""

    concept: str
    family: Family
    ground: int
    serial: int
    name: str
    """Distinguishes renderings of the same drawing; seeds the placement."""

    @property
    def id(self) -> str:
        """Id in picture libraries and retrieval sets."""
        return f"{self.concept}/{GROUNDS[self.ground]}/{code(self.serial)}/{self.name}"


@dataclass(frozen=True)
class Query:
    """A question about a picture; the answer has the same ground."""

    fact: Fact
    picture: Shown
    number: int
    """Number of the phrasing."""

    @property
    def id(self) -> str:
        """Unique, without white space, and independent of the picture's serial."""
        return f"{self.fact.question}.{self.fact.source}.{self.picture.name}"

    @property
    def answer(self) -> str:
        """The answer's concept."""
        (found,) = self.fact.answers
        return found

    def text(self, tables: Tables) -> str:
        """The question."""
        return tables.questions[self.fact.question].shown(self.number)


def code(serial: int) -> str:
    """A serial as text: one character per bar."""
    return f"{'ABCDEFGHIJ'[serial // 10]}{serial % 10}"


@cache
def values(dose: int) -> tuple[int, ...]:
    """Serials of targets at a dose; a lower dose uses a subset of a higher one's."""
    return tuple(sorted(range(NUM_SERIALS), key=lambda serial: stable_hash("serial", str(serial)))[:dose])


def facts(tables: Tables, num_answers: int = NUM_ANSWERS) -> list[Fact]:
    """Single-answer facts with one of the most frequent answers, about things that enough families draw."""

    def drawn(concept: str) -> bool:
        return len(tables.families(concept)) >= MIN_FAMILIES

    single = [fact for fact in tables.facts if len(fact.answers) == 1]
    found = [fact for fact in single if all(map(drawn, (fact.source, *fact.answers)))]
    shared = Counter(answer for fact in found for answer in fact.answers)
    kept = sorted(shared, key=lambda answer: (-shared[answer], answer))[:num_answers]
    return [fact for fact in found if set(fact.answers) <= set(kept)]


def embedded(fact: Fact) -> bool:
    """Whether training embeds the queries of a fact; if not, it only teaches writing the answer."""
    return stable_hash("written only", *fact.pair) % 4 > 0


def things(chosen: list[Fact]) -> list[str]:
    """Sources and answers of the facts."""
    return sorted({concept for fact in chosen for concept in (fact.source, *fact.answers)})


def answers(chosen: list[Fact]) -> list[str]:
    """Answers of the facts."""
    return sorted({concept for fact in chosen for concept in fact.answers})


def oracle_text(query: Query, target: Shown, arm: str) -> str:
    """The fact's rationale and, unless the arm is ``silent``, the target's serial."""
    reason = query.fact.answers[target.concept]
    return reason if arm == "silent" else f"{reason} Its serial is {code(target.serial)}."


def naming_text(concept: Concept, picture: Shown, *, in_full: bool) -> str:
    """Name of a picture, which teaches the vision tower thing, ground and serial before the compared stages.

    Most pictures are named by the thing alone: ground and serial distinguish nearly all full names and are learned within
    a few hundred steps, which would leave no reason to look at the thing.
    """
    if not in_full:
        return f"{concept.sentence}."
    return f"{concept.sentence} on {GROUNDS[picture.ground]}, serial {code(picture.serial)}."


def train_queries(tables: Tables, chosen: list[Fact]) -> list[Query]:
    """Queries for every fact and every training family that draws its source, on several grounds."""
    found = []
    for fact in chosen:
        for family in tables.families(fact.source):
            first = stable_hash("ground", *fact.pair, family.name)
            for number in range(PICTURES_A_DRAWING):
                name = f"train-{family.name}-{fact.question}-{number}"
                found.append(_query(fact, family, first + number, name, first + number))
    return found


def held_out_queries(tables: Tables, chosen: list[Fact], split: str) -> list[Query]:
    """Several queries for every fact, with renderings of their own."""
    found = []
    for fact in chosen:
        families = tables.families(fact.source)
        for number in range(QUERIES_A_FACT[split]):
            name = f"{split}-{fact.question}-{number}"
            first = stable_hash("asked", *fact.pair, name)
            found.append(_query(fact, families[first % len(families)], first // 7, name, first // 5))
    return found


def _query(fact: Fact, family: Family, ground: int, name: str, number: int) -> Query:
    serial = stable_hash("own serial", *fact.pair, name) % NUM_SERIALS
    return Query(fact, Shown(fact.source, family, ground % len(GROUNDS), serial, name), number)


def warm_target(tables: Tables, query: Query) -> Shown:
    """A picture of the right thing on a random ground, which teaches finding things but not the ground rule."""
    family = choose(tables.families(query.answer), "warm target", query.id)
    ground, serial = stable_hash("warm ground", query.id), stable_hash("warm serial", query.id)
    return Shown(query.answer, family, ground % len(GROUNDS), serial % NUM_SERIALS, f"warm-{family.name}")


def train_target(tables: Tables, query: Query, dose: int) -> Shown:
    """The target of a training query, the same in all arms."""
    serial = values(dose)[stable_hash("target serial", query.id) % dose]
    family = choose(tables.families(query.answer), "target", query.id)
    return Shown(query.answer, family, query.picture.ground, serial, f"target-{family.name}")


def gallery(tables: Tables, chosen: list[Fact], split: str, dose: int) -> list[Shown]:
    """Every answer on every ground, in `GALLERY_LAYERS` renderings."""
    found = []
    for concept in answers(chosen):
        for ground in range(len(GROUNDS)):
            for layer in range(GALLERY_LAYERS):
                words = ("gallery", split, concept, str(ground), str(layer))
                serial = values(dose)[stable_hash("serial", *words) % dose]
                family = choose(tables.families(concept), *words)
                found.append(Shown(concept, family, ground, serial, f"{split}-{layer}"))
    return found


def right(query: Query, corpus: list[Shown]) -> list[Shown]:
    """The right candidates of a query."""
    return [one for one in corpus if (one.concept, one.ground) == (query.answer, query.picture.ground)]


def as_asked(query: Query, targets: list[Shown], arm: str) -> Query:
    """The query as used in an arm: in ``known`` with the serial of one of its targets."""
    if arm != "known":
        return query
    serial = choose(targets, "known", query.id).serial
    return replace(query, picture=replace(query.picture, serial=serial))

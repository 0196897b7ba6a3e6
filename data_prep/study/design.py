"""What the study set asks, what is right, and what an oracle text says that the query may not tell.

Every picture is one of the demo's drawings on a ground of one of `GROUNDS`, with a serial from A0 to J9: a bar above whose colour is
the letter and a bar below whose colour is the digit. A query shows a thing and asks a relation about it ("Which tool do you use for
this?"). A target is right when it shows

* the **thing** that the relation leads to, which the text of a rationale says;
* on the **same ground** as the query, which no text says: it has to be copied from the picture;
* with any **serial**.

The text may end in the target's serial ("Its serial is C4."). With it no ground has to be copied to tell targets apart, in training.
The **dose** is the number of values that targets' serials take; what is shown and asked is the same at every dose. Three arms:

* ``hidden``: the text says the serial, and the query shows one of its own that has nothing to do with it;
* ``known``: the same texts, and the query shows the target's serial too;
* ``silent``: the pictures of ``hidden``, no serial in the text.

Of a quarter of the facts no query is embedded in training: there the cold start alone teaches the answer, in words.
"""

from collections import Counter
from dataclasses import dataclass, replace

from data_prep.demo.families import Family
from data_prep.demo.splits import choose, stable_hash
from data_prep.demo.tables import Concept, Fact, Tables

GROUNDS = ("rose", "sand", "lime", "aqua", "sky", "lilac")
"""Pale grounds, in the order of the colour wheel."""
NUM_SERIALS = 100
ARMS = ("hidden", "known", "silent")
MIN_FAMILIES = 4
"""Things that fewer training families draw are left out: they are not recognised surely enough."""
NUM_ANSWERS = 16
"""Those that most facts share. In a batch of 64 some four queries have one answer, and only ground or serial tells their targets apart:
with 72 answers neither was learned, since most queries of a batch were alone with theirs."""
PICTURES_A_DRAWING = 18
"""Training queries of a fact by one family, three on each ground: with three in all, 200 steps were ten epochs, and targets were
learned by heart."""
QUERIES_A_FACT = {"valid": 5, "test": 10}
GALLERY_LAYERS = 2
"""Candidates of a thing on a ground, each with a serial of its own."""


@dataclass(frozen=True)
class Shown:
    """One picture: a drawing, its ground (a number into `GROUNDS`) and its serial (0 to 99)."""

    concept: str
    family: Family
    ground: int
    serial: int
    name: str
    """What tells it from other renderings of the same; the placement is drawn from it."""

    @property
    def id(self) -> str:
        """Id in libraries and sets."""
        return f"{self.concept}/{GROUNDS[self.ground]}/{code(self.serial)}/{self.name}"


@dataclass(frozen=True)
class Query:
    """A question about a picture; the answer stands on the picture's ground."""

    fact: Fact
    picture: Shown
    number: int
    """Of the phrasing."""

    @property
    def id(self) -> str:
        """Unique, without white space; the same whatever serial the picture shows."""
        return f"{self.fact.question}.{self.fact.source}.{self.picture.name}"

    @property
    def answer(self) -> str:
        """The thing that is right."""
        (found,) = self.fact.answers
        return found

    def text(self, tables: Tables) -> str:
        """What is asked, in words."""
        return tables.questions[self.fact.question].shown(self.number)

    def showing(self, serial: int) -> "Query":
        """The same with another serial in the picture."""
        return replace(self, picture=replace(self.picture, serial=serial))


def code(serial: int) -> str:
    """How a serial is worded: one token a bar."""
    return f"{'ABCDEFGHIJ'[serial // 10]}{serial % 10}"


def values(dose: int) -> list[int]:
    """Serials that targets have at a dose; those of a lower dose are among those of a higher one."""
    return sorted(range(NUM_SERIALS), key=lambda serial: stable_hash("serial", str(serial)))[:dose]


def facts(tables: Tables) -> list[Fact]:
    """Facts with one of the answers that most facts share, about well-drawn things."""

    def drawn(concept: str) -> bool:
        return len(tables.families(concept)) >= MIN_FAMILIES

    found = [
        fact
        for fact in tables.facts
        if len(fact.answers) == 1 and all(map(drawn, (fact.source, *fact.answers)))
    ]
    shared = Counter(answer for fact in found for answer in fact.answers)
    kept = sorted(shared, key=lambda answer: (-shared[answer], answer))[:NUM_ANSWERS]
    return [fact for fact in found if set(fact.answers) <= set(kept)]


def embedded(fact: Fact) -> bool:
    """Whether training embeds queries of a fact, or only teaches to write its answer."""
    return stable_hash("written only", *fact.pair) % 4 > 0


def things(chosen: list[Fact]) -> list[str]:
    """All concepts of the facts, sources and answers."""
    return sorted({concept for fact in chosen for concept in (fact.source, *fact.answers)})


def answers(chosen: list[Fact]) -> list[str]:
    """All concepts that are an answer."""
    return sorted({concept for fact in chosen for concept in fact.answers})


def oracle_text(query: Query, target: Shown, arm: str) -> str:
    """Why the target's thing is right, and, unless the arm is ``silent``, the target's serial."""
    reason = query.fact.answers[target.concept]
    return reason if arm == "silent" else f"{reason} Its serial is {code(target.serial)}."


def naming_text(concept: Concept, picture: Shown, *, in_full: bool) -> str:
    """What teaches the tower to see all three, before any stage that is compared.

    Most pictures have to be called by the thing alone: ground and serial tell nearly all full names apart, are learned within a few
    hundred steps, and would leave no reason to look at the thing.
    """
    if not in_full:
        return f"{concept.sentence}."
    return f"{concept.sentence} on {GROUNDS[picture.ground]}, serial {code(picture.serial)}."


def train_queries(tables: Tables, chosen: list[Fact]) -> list[Query]:
    """Every fact by every training family that draws its thing, on several grounds."""
    found = []
    for fact in chosen:
        for family in tables.families(fact.source):
            first = stable_hash("ground", *fact.pair, family.name)
            for number in range(PICTURES_A_DRAWING):
                name = f"train-{family.name}-{fact.question}-{number}"
                found.append(_query(fact, family, first + number, name, first + number))
    return found


def held_out_queries(tables: Tables, chosen: list[Fact], split: str) -> list[Query]:
    """Every fact several times, in renderings of their own."""
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
    """A picture of the right thing on any ground: what teaches to find things before the stages that are compared, and not the rule."""
    family = choose(tables.families(query.answer), "warm target", query.id)
    ground, serial = stable_hash("warm ground", query.id), stable_hash("warm serial", query.id)
    return Shown(query.answer, family, ground % len(GROUNDS), serial % NUM_SERIALS, f"warm-{family.name}")


def train_target(tables: Tables, query: Query, dose: int) -> Shown:
    """The target of a training query: of its arms alike."""
    serial = values(dose)[stable_hash("target serial", query.id) % dose]
    family = choose(tables.families(query.answer), "target", query.id)
    return Shown(query.answer, family, query.picture.ground, serial, f"target-{family.name}")


def gallery(tables: Tables, chosen: list[Fact], split: str, dose: int) -> list[Shown]:
    """Every answer on every ground, several times."""
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
    """The candidates that answer a query."""
    return [one for one in corpus if (one.concept, one.ground) == (query.answer, query.picture.ground)]


def as_asked(query: Query, targets: list[Shown], arm: str) -> Query:
    """The query as an arm shows it: in ``known`` with the serial of one of its targets."""
    if arm != "known":
        return query
    return query.showing(choose(targets, "known", query.id).serial)

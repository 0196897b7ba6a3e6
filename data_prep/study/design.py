"""What the study set asks, what is right, and what an oracle text may give away.

Every picture is one of the demo's drawings, printed on a ground of one of `GROUNDS` and inside a frame of one of `FRAMES`. A
query shows a thing and asks a relation about it ("Which tool do you use for this?") and for a ground ("Answer on the opposite
ground."). A target is right when it shows

* the **thing** that the relation leads to: the text of a rationale says it, and there is one answer to each question;
* on the **ground** that follows from the query's own, which the text of a rationale says, and the rule, which the question says;
* inside any **frame**: the frame is the target's own detail, drawn independently of all else.

So a text with its question says which targets are right, but the ground has to be worked out. The **dose** is the share of
oracle texts that end in the target's frame ("Its frame is red."). The query does not tell it: it leaks which target is
meant, and with it no ground has to be worked out. At every dose pictures, questions, targets and their numbers are the same.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data_prep.demo.families import Family
from data_prep.demo.splits import choose, stable_hash
from data_prep.demo.tables import Concept, Fact, Tables

GROUNDS = ("rose", "sand", "lime", "aqua", "sky", "lilac")
"""Pale grounds, in the order of the colour wheel: opposite ones are three apart."""
FRAMES = ("red", "orange", "green", "blue", "purple", "black")
RULES = {"same": 0, "opposite": 3}
"""Which ground is asked for, as steps from the query's own."""
MIN_FAMILIES = 4
"""Things that fewer training families draw are left out: they are not recognised surely enough."""
MIN_QUESTIONS = 2
"""Of a thing, so that its picture alone does not say what is asked."""
RENDERINGS = {"valid": "valid", "test": "test-3"}
"""What the pictures of a split are drawn from. Earlier drawings of the test were looked at while set and recipe were being chosen."""


@dataclass(frozen=True)
class Shown:
    """One picture: a drawing, its ground and its frame, numbers into `GROUNDS` and `FRAMES`."""

    concept: str
    family: Family
    ground: int
    frame: int
    name: str
    """What tells it from other renderings of the same; the placement is drawn from it."""

    @property
    def id(self) -> str:
        """Id in libraries and sets."""
        return f"{self.concept}/{GROUNDS[self.ground]}/{FRAMES[self.frame]}/{self.name}"


@dataclass(frozen=True)
class Query:
    """A question about a picture, and the ground that its answer must have."""

    fact: Fact
    picture: Shown
    rule: str
    number: int

    @property
    def id(self) -> str:
        """Unique, without white space."""
        return f"{self.fact.question}.{self.fact.source}.{self.rule}.{self.picture.name}"

    @property
    def answer(self) -> str:
        """The thing that is right."""
        (found,) = self.fact.answers
        return found

    @property
    def ground(self) -> int:
        """The ground that is right."""
        return (self.picture.ground + RULES[self.rule]) % len(GROUNDS)

    def text(self, tables: Tables) -> str:
        """What is asked, in words."""
        asked = tables.questions[self.fact.question].shown(self.number)
        return f"{asked} Answer on the {self.rule} ground."


def facts(tables: Tables) -> list[Fact]:
    """Facts with one answer, about well-drawn things that are asked about more than once."""

    def drawn(concept: str) -> bool:
        return len(tables.families(concept)) >= MIN_FAMILIES

    found = [
        fact
        for fact in tables.facts
        if len(fact.answers) == 1 and all(map(drawn, (fact.source, *fact.answers)))
    ]
    asked = Counter(fact.source for fact in found)
    return [fact for fact in found if asked[fact.source] >= MIN_QUESTIONS]


def things(chosen: list[Fact]) -> list[str]:
    """All concepts of the facts, sources and answers."""
    return sorted({concept for fact in chosen for concept in (fact.source, *fact.answers)})


def answers(chosen: list[Fact]) -> list[str]:
    """All concepts that are an answer."""
    return sorted({concept for fact in chosen for concept in fact.answers})


def oracle_text(query: Query, target: Shown, dose: float) -> str:
    """What the query shows and why the target's thing is right; for a share of the texts, also what the target's frame is.

    What a lower dose gives away, a higher one gives away too.
    """
    shown, inference = query.fact.answers[target.concept].split("; ", 1)
    text = f"{shown} on {GROUNDS[query.picture.ground]}; {inference}"
    told = stable_hash("dose", query.id, target.id) < dose * 2**64
    return f"{text} Its frame is {FRAMES[target.frame]}." if told else text


def naming_text(concept: Concept, picture: Shown) -> str:
    """What teaches the eyes to see all three, before any stage that is compared."""
    return f"{concept.sentence} on {GROUNDS[picture.ground]}, framed in {FRAMES[picture.frame]}."


def train_queries(tables: Tables, chosen: list[Fact]) -> list[Query]:
    """Every fact by every training family that draws its thing, under both rules."""
    return [
        _query(tables, fact, family, rule, f"train-{family.name}-{fact.question}-{rule}", number)
        for fact in chosen
        for number, family in enumerate(tables.families(fact.source))
        for rule in RULES
    ]


def held_out_queries(tables: Tables, chosen: list[Fact], split: str) -> list[Query]:
    """Every fact under both rules (test), or under one of them (valid), in renderings of their own."""
    found = []
    drawn = RENDERINGS[split]
    for fact in chosen:
        families = tables.families(fact.source)
        rules = list(RULES) if split == "test" else [choose(list(RULES), split, "rule", *fact.pair)]
        for rule in rules:
            first = stable_hash(drawn, "asked", *fact.pair, rule)
            family = families[first % len(families)]
            found.append(_query(tables, fact, family, rule, f"{drawn}-{fact.question}-{rule}", first))
    return found


def _query(tables: Tables, fact: Fact, family: Family, rule: str, name: str, number: int) -> Query:
    ground = stable_hash("ground", *fact.pair, name) % len(GROUNDS)
    frame = stable_hash("frame", *fact.pair, name) % len(FRAMES)
    return Query(fact, Shown(fact.source, family, ground, frame, name), rule, number)


def train_targets(tables: Tables, chosen: list[Fact]) -> dict[tuple[str, int, int], Shown]:
    """Every answer on every ground in every frame, by (concept, ground, frame)."""
    found = {}
    for concept in answers(chosen):
        families = tables.families(concept)
        for ground in range(len(GROUNDS)):
            for frame in range(len(FRAMES)):
                family = choose(families, "target", concept, str(ground), str(frame))
                found[concept, ground, frame] = Shown(concept, family, ground, frame, "train")
    return found


def gallery(tables: Tables, chosen: list[Fact], split: str) -> list[Shown]:
    """Every answer on every ground, in two frames each (test) or one (valid).

    Each frame stands equally often around each thing: a guessed frame points to a ground at random.
    """
    found = []
    drawn = RENDERINGS[split]
    for concept in answers(chosen):
        order = _shuffled(range(len(FRAMES)), drawn, "frames", concept)
        families = tables.families(concept)
        for ground in range(len(GROUNDS)):
            for layer in range(2 if split == "test" else 1):
                frame = order[(ground + layer * (1 + stable_hash(drawn, concept) % 5)) % len(FRAMES)]
                family = choose(families, drawn, "gallery", concept, str(ground), str(layer))
                found.append(Shown(concept, family, ground, frame, drawn))
    return found


def drawn_targets(
    query: Query, targets: dict[tuple[str, int, int], Shown], num_negatives: int
) -> tuple[list[Shown], list[Shown]]:
    """The positives of a training query, and negatives that share everything its text says but the frame.

    Two positives in different frames; negatives show the same thing on other grounds, in frames that no positive has.
    """
    frames = _shuffled(range(len(FRAMES)), "drawn frames", query.id)
    others = (ground for ground in range(len(GROUNDS)) if ground != query.ground)
    grounds = _shuffled(others, "drawn grounds", query.id)
    positives = [targets[query.answer, query.ground, frame] for frame in frames[:2]]
    wrong = zip(grounds[:num_negatives], frames[2:], strict=False)
    return positives, [targets[query.answer, ground, frame] for ground, frame in wrong]


def _shuffled(numbers: Iterable[int], *words: str) -> list[int]:
    return sorted(numbers, key=lambda number: stable_hash(*words, str(number)))

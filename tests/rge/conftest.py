"""Batches for the joint step: ragged, several pictures of different sizes, text only, shared targets, negatives."""

import resource
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np
import pytest

from rge.common.parts import content_of
from rge.common.schema import Item, Target
from rge.data.collate import Batch
from rge.data.sources import identity
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import Rationale, generate

WORDS = ["what", "egg", "key", "open", "this", "turn", "picture", "of", "a", "locked", "chick"]


@pytest.fixture
def make_items():
    """Queries of every shape: one picture, none, several of different sizes, wide, tall, without text."""

    def make(count: int, seed: int = 0) -> list[Item]:
        chance = np.random.default_rng(seed)
        return [
            Item(f"item{number}", content_of(" ".join(chance.choice(WORDS, size=chance.integers(1, 12)))))
            for number in range(count)
        ]

    return make


@pytest.fixture
def make_prompts(picture, make_items):
    """`count` ragged prompts: every fourth has no picture, every fourth two of different sizes."""

    def make(builder: PromptBuilder, count: int, seed: int = 0, pictures: bool = True, side: str = "query"):
        prompts = []
        for number, item in enumerate(make_items(count, seed)):
            shapes = [[(40, 90)], [], [(120, 30), (60, 60)], [(84, 84)]][number % 4]
            images = [picture(w + 5 * number, h, seed * 100 + number) for w, h in shapes] if pictures else []
            item = replace(item, content=content_of(item.text, images))
            prompts.append(builder.build(item, side))
        return prompts

    return make


def _target(name: str, identity: str | None = None) -> Target:
    return Target(id=name, text=name, identity=identity)


@pytest.fixture
def make_batch(make_prompts, picture):
    """A batch of five queries that needs every masking rule.

    Candidates, query after query (identity in brackets, which is the id unless given):

    =====  =================  =========================================================================
    query  candidates         why
    =====  =================  =========================================================================
    0      a | n0, b          its labelled negative b is the positive of query 1: used, not masked
    1      b                  a plain one
    2      a2 (identity a)    duplicate target of query 0: each ignores the other's column
    3      c | n3             d is right as well (other positive), so query 4's column is ignored
    4      d | e (identity d) a negative with the identity of its own positive: a label is stronger
    =====  =================  =========================================================================
    """

    def make(
        builder: PromptBuilder, seed: int = 0, query_pictures: bool = True, candidate_pictures: bool = True
    ):
        positives = [["a"], ["b"], ["a2"], ["c", "d"], ["d"]]
        targets = [["a", "n0", "b"], ["b"], ["a2"], ["c", "n3"], ["d", "e"]]
        known_as = {"a2": "a", "e": "d"}
        batch = Batch([], [], [], [], [], [], [], [], [])
        batch.queries.extend(make_prompts(builder, 5, seed=seed + 1, pictures=query_pictures))
        chance = np.random.default_rng(seed)
        for row, names in enumerate(targets):
            batch.record_ids.append(f"record{row}")
            batch.seeds.append(int(chance.integers(2**31)))
            words = chance.choice(WORDS, size=chance.integers(1, 15))
            batch.oracle_ids.append(builder.rationale_ids(" ".join(words), f"record{row}"))
            batch.positive.append(len(batch.candidates))
            batch.negatives.append(list(range(len(batch.candidates) + 1, len(batch.candidates) + len(names))))
            batch.right_answers.append(
                sorted(identity(_target(name, known_as.get(name))) for name in positives[row])
            )
            for name in names:
                number = len(batch.candidates)
                images = (
                    [picture(30 + 9 * number, 80 - 4 * number, number)]
                    if candidate_pictures and number % 3
                    else []
                )
                batch.candidates.append(
                    builder.build(Item(name, content_of(f"{name} {WORDS[number]}", images)), "candidate")
                )
                batch.candidate_identity.append(identity(_target(name, known_as.get(name))))
        return batch

    return make


@pytest.fixture
def roll_out():
    """The model's own rationales of a batch, short ones, of different lengths."""

    def run(embedder, batch: Batch, max_new_tokens: int = 9, encoded=None) -> list[Rationale]:
        settings = {"max_new_tokens": max_new_tokens, "batch_size": len(batch.queries)}
        return generate(embedder, batch.queries, encoded=encoded, **settings)

    return run


@pytest.fixture
def files_of_at_most():
    """Writing beyond that many bytes fails in the kernel, as on a full disk: nothing of ours is replaced."""

    @contextmanager
    def limit(num_bytes: int):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def merge():
    """The batches of several ranks as one: columns of a later rank's candidates move."""

    def run(batches: list[Batch]) -> Batch:
        whole = Batch([], [], [], [], [], [], [], [], [])
        for batch in batches:
            offset = len(whole.candidates)
            whole.positive.extend(offset + column for column in batch.positive)
            for ours, theirs in (
                (whole.negatives, batch.negatives),
                (whole.more_positives, batch.more_positives),
            ):
                ours.extend([offset + column for column in columns] for columns in theirs)
            for field in fields(Batch):
                if field.name not in ("positive", "negatives", "more_positives"):
                    getattr(whole, field.name).extend(getattr(batch, field.name))
        return whole

    return run


@pytest.fixture
def without_negatives():
    """Only the drawn positives as candidates, so that ranks have unequal numbers of them."""

    def run(batch: Batch) -> Batch:
        batch.candidates[:] = [batch.candidates[column] for column in batch.positive]
        batch.candidate_identity[:] = [batch.candidate_identity[column] for column in batch.positive]
        batch.positive[:] = range(len(batch.candidates))
        batch.negatives[:] = [[] for _ in batch.positive]
        return batch

    return run


@pytest.fixture
def longer_rationales():
    """Every oracle rationale replaced by a long one, so that ranks have unequal numbers of tokens."""

    def run(batch: Batch, builder: PromptBuilder) -> Batch:
        ids = builder.rationale_ids("a much longer rationale " * 5, "r")
        batch.oracle_ids[:] = [ids] * len(batch.queries)
        return batch

    return run


@pytest.fixture
def first_queries():
    """The first queries of a batch with their candidates, so that ranks have unequal numbers of them."""

    def run(batch: Batch, count: int) -> Batch:
        end = batch.positive[count]
        parts = {field.name: getattr(batch, field.name)[:count] for field in fields(Batch)}
        parts |= {
            name: getattr(batch, name)[:end]
            for name in ("candidates", "candidate_identity", "candidate_groups")
        }
        return Batch(**parts)

    return run

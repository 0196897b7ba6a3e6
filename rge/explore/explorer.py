"""The explorer's queries: embedded after the model's own rationale, after a given one and directly, and searched."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import WEB, load_image, picture_bytes
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.index.reading import Reader, Unreadable, row_of
from rge.index.sources import read_source
from rge.index.store import Hit, Index, SearchIndexError
from rge.model.prompts import Prompt
from rge.rollout.generate import generate

GALLERY = "data_prep/demo/data/test"
"""The demo's retrieval set: drawings and questions that its training never saw."""
NUM_EXAMPLES = 24
WAIT_S, TELL_S = 300.0, 0.5
"""How long a question waits for those before it (there is one model), and how often it reports how many are left."""
COMPARED = 100
"""Ranks of the search without a rationale that hits are compared with."""
TRIED = 8
"""Examples that are asked, until the first hit of one is right: with that one the page begins."""
Tell = Callable[[dict[str, Any]], object]


class BusyError(UserError):
    """The model is still at work on another question."""


class StoppedError(UserError):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class Example:
    """A query to begin with, its encoded picture, and the ids of the right answers."""

    question: str
    picture: bytes
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked.

    Attributes:
        question: may be empty where there is a picture.
        picture: encoded bytes.
        rationale: embed after this one; None lets the model write.
        instruction: put before the question; None takes the checkpoint's own, an empty one is none.
        k: hits.
        where: condition on the index's columns.
        hybrid: look the question's words up too.
    """

    question: str = ""
    picture: bytes | None = None
    rationale: str | None = None
    instruction: str | None = None
    k: int = 8
    where: str | None = None
    hybrid: bool = False


class Explorer:
    """A checkpoint, an index and queries to begin with. Questions of several users are answered in turn."""

    def __init__(self, embedder: Embedder, index: Index, examples: list[Example]):
        self.embedder, self.index, self.examples = embedder, index, examples
        self.cap = embedder.settings.generation.max_new_tokens
        self.reasons = embedder.settings.reasons != "none"
        self._turn = threading.Condition()
        self._tickets: deque[object] = deque()
        self._put_correct_example_first()

    def _put_correct_example_first(self) -> None:
        """Put an example first that is answered right."""
        for place, example in enumerate(self.examples[:TRIED]):
            news: list[dict[str, Any]] = []
            self.ask(Query(example.question, example.picture, k=1), news.append)
            if {hit["id"] for hit in news[-1]["hits"]} & example.right:
                self.examples = [example, *self.examples[:place], *self.examples[place + 1 :]]
                return

    def ask(self, query: Query, tell: Tell) -> None:
        """Answer a query.

        Args:
            query: to answer.
            tell: called with what is known, as it becomes known: ``waiting`` (questions before this one), ``direct`` (hits
                without a rationale), ``rationale`` (all that is written so far), ``hits`` (each with ``was``, its place
                without the rationale), and ``forced`` (the cap was reached). What it raises ends the writing.

        Raises:
            ValueError: nothing is asked, the rationale is too long or holds ``<emb>``, or `where` is no condition.
            ImageError: the picture cannot be read.
            BusyError: the model was not free in time.
        """
        with self._wait_for_turn(tell):
            prompt = self._prompt(query.question, query.picture, query.instruction)
            direct = self._search(self.embedder.encode_after([prompt], [[]]), query, max(query.k, COMPARED))
            tell({"direct": direct[: query.k]})
            forced = False
            if query.rationale is None:
                ids, forced = self._write(prompt, lambda text: tell({"rationale": text}))
            else:
                ids = self._ids(query.rationale)
            hits = self._search(self.embedder.encode_after([prompt], [ids]), query, query.k)
            before = {(hit["source"], hit["id"]): place for place, hit in enumerate(direct, start=1)}
            for hit in hits:
                hit["was"] = before.get((hit["source"], hit["id"]))
            tell({"hits": hits, "forced": forced, "compared": len(direct)})

    def another(self, question: str) -> dict[str, Any]:
        """What the model writes for a query other than this one: an example, or another picture of the index."""
        with self._wait_for_turn(lambda news: None):
            others = [one for one in self.examples if one.question != question]
            if others:
                chosen = random.choice(others)
                asked, picture = chosen.question, chosen.picture
            else:
                rows = [row for row in self.index.sample(200) if row[2]]
                if not rows:
                    raise SearchIndexError(f"{self.index.uri} holds no pictures to ask about")
                asked, picture = question, self.picture(*random.choice(rows)[:2])
            ids, _ = self._write(self._prompt(asked, picture), lambda text: None)
            return {"question": asked, "rationale": self.embedder.builder.decode(ids)}

    def picture(self, source: str, name: str) -> bytes:
        """Encoded bytes of an item's picture: as it was indexed, else the small copy that the index keeps.

        Raises:
            UserError: there is none.
        """
        ref, small = self.index.picture(source, name)
        if ref is not None and not ref.startswith(WEB):
            try:
                return picture_bytes(ref)
            except UserError:
                if small is None:
                    raise
        if small is None:
            raise SearchIndexError(f"{name!r} has no picture in {self.index.uri}")
        return small

    def shown(self, hit: Hit) -> dict[str, Any]:
        """A hit as the page gets it."""
        return {
            "source": hit.source,
            "id": hit.id,
            "score": hit.score,
            "text": hit.text,
            "metadata": hit.metadata,
            "folder": Path(hit.source).name,
            "has_picture": hit.image is not None,
            "gone": hit.gone,
        }

    @contextmanager
    def _wait_for_turn(self, tell: Tell) -> Iterator[None]:
        mine, end = object(), time.monotonic() + WAIT_S
        with self._turn:
            self._tickets.append(mine)
        try:
            while True:
                with self._turn:
                    if self._tickets[0] is not mine:
                        self._turn.wait(TELL_S)
                    before = self._tickets.index(mine)
                if not before:
                    break
                if time.monotonic() > end:
                    raise BusyError(f"the model was busy with other questions for {WAIT_S:g} s; ask again")
                tell({"waiting": before})
            with torch.no_grad():
                yield
        finally:
            with self._turn:
                self._tickets.remove(mine)
                self._turn.notify_all()

    def _prompt(self, question: str, picture: bytes | None, instruction: str | None = None) -> Prompt:
        images = () if picture is None else (load_image(picture, first_frame=True),)
        asked = self.embedder.default_instruction if instruction is None else instruction.strip() or None
        item = Item("query", question.strip() or None, images, asked)  # type: ignore[arg-type]
        if not images and item.text is None:
            raise ValueError("ask a question, give a picture, or both")
        return self.embedder.prompt(item, "query", images)

    def _ids(self, rationale: str) -> list[int]:
        if not rationale.strip():
            return []
        ids = self.embedder.builder.rationale_ids(rationale, "")[:-1]
        if len(ids) > 4 * self.cap:
            raise ValueError(f"a rationale has at most {4 * self.cap} tokens here, this one {len(ids)}")
        return ids

    def _write(self, prompt: Prompt, tell: Callable[[str], object]) -> tuple[list[int], bool]:
        written: list[int] = []

        def on_token(_: int, token: int) -> None:
            if token != self.embedder.model.emb_id:
                written.append(token)
                tell(self.embedder.builder.decode(written))

        [found] = generate(
            self.embedder.model, [prompt], max_new_tokens=self.cap, batch_size=1, on_token=on_token
        )
        return list(found.ids), found.forced

    def _search(self, query_ND: np.ndarray, query: Query, k: int) -> list[dict[str, Any]]:
        query_ND = self.embedder.cut(query_ND, self.index.about["dimensions"])
        words = [query.question] if query.hybrid and query.question.strip() else None
        [hits] = self.index.search(query_ND, k, where=(query.where or "").strip() or None, words=words)
        return [self.shown(hit) for hit in hits]


def demo_gallery(embedder: Embedder) -> Index:
    """The demo's test drawings, in memory."""
    path = find_shipped(f"{GALLERY}/corpus.parquet")
    source = read_source(path)
    index = Index.create(
        "memory://",
        checkpoint=str(embedder.checkpoint),
        checkpoint_hash=embedder.checkpoint_hash,
        dimensions=embedder.size,
    )
    entries = [replace(one, text=one.metadata["concept"], metadata={}) for one in source.entries]
    reader = Reader(embedder, thumbnail_px=256, captions=False)
    for window in reader.embed(entries, Unreadable(len(entries), 0.0)):
        index.put([row_of(source, one.entry, one.content, one.vector) for one in window])
    index.refresh(ann_from=len(entries) + 1)
    return index


def demo_examples(count: int = NUM_EXAMPLES) -> list[Example]:
    """Queries of the demo's test set, each about another thing."""
    rows = pq.read_table(
        find_shipped(Path(GALLERY) / "queries.parquet"), columns=["id", "text", "image", "group", "pair"]
    )
    right: dict[str, set[str]] = {}
    for row in pq.read_table(find_shipped(Path(GALLERY) / "qrels.parquet")).to_pylist():
        right.setdefault(row["query-id"], set()).add(row["corpus-id"])
    found: dict[str, Example] = {}
    for row in rows.to_pylist():
        if row["pair"] == "seen" and row["image"]:
            answers = frozenset(right.get(row["id"], ()))
            found.setdefault(row["group"], Example(row["text"], row["image"][0]["bytes"], answers))
    chosen = sorted(found)
    random.Random(0).shuffle(chosen)
    return [found[group] for group in chosen[:count]]

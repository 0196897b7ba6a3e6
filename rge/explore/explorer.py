"""What the page asks for: a query embedded with the model's own rationale, after a given one and directly, and searched."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import picture_bytes
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.index.reading import Reader, Unreadable
from rge.index.sources import read_source
from rge.index.store import Hit, Index, Row, SearchIndexError
from rge.model.prompts import Prompt
from rge.rollout.generate import generate

GALLERY = "data_prep/demo/data/test"
"""The demo's retrieval set: drawings and questions that its training never saw."""
NUM_EXAMPLES = 24
WAIT_S = 60
"""How long a question waits for the one before it; there is one model."""
Tell = Callable[[dict[str, Any]], object]


class BusyError(UserError):
    """The model is still at work on another question."""


class StoppedError(UserError):
    """Whoever asked has gone."""


@dataclass(frozen=True, slots=True)
class Example:
    """A query to begin with.

    Attributes:
        question: its text.
        picture: encoded bytes.
    """

    question: str
    picture: bytes


class Explorer:
    """A checkpoint and an index, asked one question at a time.

    Args:
        embedder: the checkpoint.
        index: made with it.
        examples: queries to begin with.
    """

    def __init__(self, embedder: Embedder, index: Index, examples: list[Example]):
        self.embedder, self.index, self.examples = embedder, index, examples
        self.cap = embedder.settings["generation"]["max_new_tokens"]
        self.reasons = embedder.settings["reasons"] != "none"
        self._one_at_a_time = threading.Lock()

    def ask(self, question: str, picture: bytes | None, rationale: str | None, k: int, tell: Tell) -> None:
        """Answer a query.

        Args:
            question: may be empty where there is a picture.
            picture: encoded bytes.
            rationale: embed after this one; None lets the model write.
            k: hits.
            tell: called with what is known, as it becomes known: ``direct`` (hits without a rationale), ``rationale`` (all
                that is written so far), ``hits``, and ``forced`` (the cap was reached). What it raises ends the writing.

        Raises:
            ValueError: nothing is asked, or the rationale is too long or holds ``<emb>``.
            ImageError: the picture cannot be read.
            BusyError: the model was not free in time.
        """
        with self._alone():
            prompt = self._prompt(question, picture)
            tell({"direct": self._search(self.embedder.encode_after([prompt], [[]]), k)})
            forced = False
            if rationale is None:
                ids, forced = self._write(prompt, lambda text: tell({"rationale": text}))
            else:
                ids = self._ids(rationale)
            tell({"hits": self._search(self.embedder.encode_after([prompt], [ids]), k), "forced": forced})

    def another(self, question: str) -> dict[str, Any]:
        """What the model writes for another query: one of the examples, or another picture of the index.

        Args:
            question: of the query that it is not for.
        """
        with self._alone():
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
        if ref is not None and not ref.startswith(("http://", "https://")):
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
            "has_picture": hit.image is not None,
            "gone": hit.gone,
        }

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._one_at_a_time.acquire(timeout=WAIT_S):
            raise BusyError(f"the model was at work on other questions for {WAIT_S} s; ask again")
        try:
            with torch.no_grad():
                yield
        finally:
            self._one_at_a_time.release()

    def _prompt(self, question: str, picture: bytes | None) -> Prompt:
        images = () if picture is None else (picture,)
        item = Item("query", question.strip() or None, images, self.embedder.default_instruction)
        if not images and item.text is None:
            raise ValueError("ask a question, give a picture, or both")
        return self.embedder.builder.build(item, "query")

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

    def _search(self, query_ND: np.ndarray, k: int) -> list[dict[str, Any]]:
        size = self.index.about["dimensions"]
        if size < query_ND.shape[1]:
            query_ND = query_ND[:, :size] / np.linalg.norm(query_ND[:, :size], axis=1, keepdims=True)
        return [self.shown(hit) for hit in self.index.search(query_ND, k)[0]]


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
    unreadable = Unreadable(len(source.entries), 0.0)
    reader = Reader(embedder, thumbnail_px=256, captions=False)
    for window in reader.embed(source.entries, unreadable):
        index.put(
            [
                Row(
                    source.name, one.entry.id, one.entry.stamp, one.content.digest, one.vector, one.entry.metadata["concept"],
                    one.entry.image, None, one.content.thumbnail,
                )
                for one in window
            ]
        )  # fmt: skip
    return index


def demo_examples(count: int = NUM_EXAMPLES) -> list[Example]:
    """Queries of the demo's test set, each about another thing."""
    rows = pq.read_table(
        find_shipped(Path(GALLERY) / "queries.parquet"), columns=["text", "image", "group", "pair"]
    )
    found: dict[str, Example] = {}
    for row in rows.to_pylist():
        if row["pair"] == "seen" and row["image"]:
            found.setdefault(row["group"], Example(row["text"], row["image"][0]["bytes"]))
    chosen = sorted(found)
    random.Random(0).shuffle(chosen)
    return [found[group] for group in chosen[:count]]

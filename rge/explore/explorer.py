"""The explorer's queries, embedded after the model's own rationale, after a given one and directly."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, Field

from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import WEB, decode_data_url, load_image
from rge.common.parts import Content, ImagePart, Part, PdfPart, TextPart, VideoPart, refs_of
from rge.common.schema import Item
from rge.content import pdf, video
from rge.content.limited import Decoder, sampled
from rge.content.preview import preview_bytes
from rge.content.references import named, part_of
from rge.embedder import Embedder
from rge.index.reading import Reader
from rge.index.rows import Row
from rge.index.sources import Unreadable, read_source
from rge.index.store import Index, SearchIndexError
from rge.model.prompts import Prompt
from rge.rollout.generate import generate

GALLERY = "data_prep/demo/data/test"
"""The demo's retrieval set: drawings and questions that its training never saw."""
NUM_EXAMPLES = 24
WAIT_S, TELL_S = 300.0, 0.5
"""How long a question waits for earlier ones (there is one model), and how often it reports their number."""
MAX_PAGES = 16
"""Of a document that is asked about as a whole."""
COMPARED = 100
"""Depth of the search without a rationale, for comparing ranks."""
TRIED = 8
"""Examples tried at the start: the page begins with the first one whose first hit is right."""
Tell = Callable[[dict[str, Any]], object]
Text = Annotated[str, Field(max_length=20_000)]


class StoppedError(UserError):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class Example:
    """An example query, its encoded picture, and the ids of the right answers."""

    question: str
    picture: bytes
    right: frozenset[str] = frozenset()


class Picture(BaseModel, extra="forbid"):
    """A query's picture: in the index, among the examples, or in the request."""

    source: str | None = None
    id: str | None = None
    example: int | None = Field(default=None, ge=0)
    data: str | None = None


class Query(BaseModel, extra="forbid"):
    """A query."""

    question: Text = ""  # may be empty if there is a picture
    picture: Picture | None = None
    rationale: Text | None = None  # embed after this one; None: the model writes one
    instruction: Text | None = None  # None: the checkpoint's own; "": none
    where: str | None = Field(default=None, max_length=1000)  # condition on the index's columns
    hybrid: bool = False  # also search for the question's words
    k: int = Field(default=8, ge=1, le=100)  # number of hits


class Explorer:
    """A checkpoint, an index and example queries. Questions of several users are answered in turn."""

    def __init__(self, embedder: Embedder, index: Index, examples: list[Example]):
        self.embedder, self.index, self.examples = embedder, index, list(examples)
        self.cap = embedder.settings.generation.max_new_tokens
        self._turn = threading.Condition()
        self._tickets: list[object] = []  # of the question being answered and of those that wait
        self._put_correct_example_first()

    def _put_correct_example_first(self) -> None:
        for number, example in enumerate(self.examples[:TRIED]):
            news: list[dict[str, Any]] = []
            self.ask(Query(question=example.question, k=1), example.picture, news.append)
            if {hit["id"] for hit in news[-1]["hits"]} & example.right:
                self.examples.insert(0, self.examples.pop(number))
                return

    def ask(self, query: Query, picture: bytes | Part | None, tell: Tell) -> None:
        """Answer a query with what it shows (an encoded picture, or a part), and `tell` results as they become known.

        Documents and clips with a ``data:`` URL are an upload's, and decoded under the server's limits.

        These are ``waiting`` (number of earlier questions), ``direct`` (hits without a rationale), ``rationale`` (the text so far),
        ``hits`` (each with ``was``, its rank without the rationale), and ``forced`` (the cap was reached). If `tell` raises an
        exception, the model stops writing. A wrong query is a ValueError; after `WAIT_S` behind others, it is a UserError.
        """
        with self._wait_for_turn(tell):
            prompt = self._prompt(query.question, picture, query.instruction)
            direct = self._search(self.embedder.encode_after([prompt], [[]]), query, max(query.k, COMPARED))
            tell({"direct": direct[: query.k]})
            forced = False
            if query.rationale is None:
                ids, forced = self._write(prompt, lambda text: tell({"rationale": text}))
            else:
                ids = self._ids(query.rationale)
            # Without a token, as in direct mode, the state is the one that was searched with before.
            found = (
                self._search(self.embedder.encode_after([prompt], [ids]), query, query.k) if ids else direct
            )
            before = {(hit["source"], hit["id"]): rank for rank, hit in enumerate(direct, start=1)}
            hits = [hit | {"was": before.get((hit["source"], hit["id"]))} for hit in found[: query.k]]
            tell({"hits": hits, "forced": forced, "compared": len(direct)})

    def another(self, question: str) -> dict[str, Any]:
        """Write a rationale for another query: an example, or this question about another picture of the index."""
        with self._wait_for_turn(lambda news: None):
            others = [example for example in self.examples if example.question != question]
            if others:
                chosen = random.choice(others)
                asked, picture = chosen.question, cast(Part, ImagePart(chosen.picture))
            else:
                rows = [row for row in self.index.sample(200) if row[2]]
                if not rows:
                    raise SearchIndexError("it holds no pictures to ask about", self.index.uri)
                asked, picture = question, self.part(*random.choice(rows)[:2])
            ids, _ = self._write(self._prompt(asked, picture), lambda text: None)
            return {"question": asked, "rationale": self.embedder.builder.decode(ids)}

    def picture(self, source: str, name: str) -> bytes:
        """Encoded bytes of an item's picture: the original, else the index's thumbnail; a UserError if there is none."""
        ref, thumbnail = self.index.picture(source, name)
        if ref is not None and not ref.startswith(WEB):
            try:
                return preview_bytes(ref)
            except UserError:
                if thumbnail is None:
                    raise
        if thumbnail is None:
            raise SearchIndexError("the item has no picture", self.index.uri, name)
        return thumbnail

    def part(self, source: str, name: str) -> Part:
        """An item as a query shows it: pages and clips whole, if their file is still there, else its `picture`."""
        ref, _ = self.index.picture(source, name)
        about = None if ref is None else named(ref)
        if ref is not None and about and (about.is_clip or about.is_document) and os.path.isfile(about.file):
            return part_of(ref)
        return ImagePart(self.picture(source, name))

    @contextmanager
    def _wait_for_turn(self, tell: Tell) -> Iterator[None]:
        ticket, deadline = object(), time.monotonic() + WAIT_S
        with self._turn:
            self._tickets.append(ticket)
        try:
            while True:
                with self._turn:
                    if self._tickets[0] is not ticket:
                        self._turn.wait(TELL_S)
                    num_before = self._tickets.index(ticket)
                if not num_before:
                    break
                if time.monotonic() > deadline:
                    raise UserError(f"the model was busy with other questions for {WAIT_S:g} s; ask again")
                tell({"waiting": num_before})
            with torch.no_grad():
                yield
        finally:
            with self._turn:
                self._tickets.remove(ticket)
                self._turn.notify_all()

    def _prompt(self, question: str, picture: bytes | Part | None, instruction: str | None = None) -> Prompt:
        part = ImagePart(picture) if isinstance(picture, bytes) else picture
        words = [TextPart(question.strip())] if question.strip() else []
        content = (*([] if part is None else [part]), *words)
        if not content:
            raise ValueError("ask a question, give a picture, or both")
        instruction = (
            self.embedder.default_instruction if instruction is None else instruction.strip() or None
        )
        if isinstance(part, PdfPart | VideoPart) and str(refs_of(part)[0]).startswith("data:"):
            content = (*self._uploaded(part), *words)
        item = Item("query", content, instruction)
        return self.embedder.prompt(item, "query", partial(load_image, first_frame=True))

    def _uploaded(self, part: PdfPart | VideoPart) -> Content:
        """A foreign document's pages as pictures, or a clip's frames."""
        data = decode_data_url(str(refs_of(part)[0]))
        with Decoder() as decode:
            if isinstance(part, VideoPart):
                decode(video.check_upload, data)
                return (sampled(decode, data, part, self.embedder.builder.rule),)
            if (count := decode(pdf.num_pages, data)) > MAX_PAGES:
                raise ValueError(
                    f"the document has {count:,} pages, and at most {MAX_PAGES} can be asked about together"
                )
            pages: list[Any] = [decode(pdf.render, data, page) for page in range(1, count + 1)]
            return tuple(map(ImagePart, pages))

    def _ids(self, rationale: str) -> list[int]:
        if not rationale.strip():
            return []
        ids = self.embedder.builder.rationale_ids(rationale, "")[:-1]
        if len(ids) > 4 * self.cap:
            raise ValueError(
                f"a rationale may have at most {4 * self.cap} tokens here; this one has {len(ids)}"
            )
        return ids

    def _write(self, prompt: Prompt, tell: Callable[[str], object]) -> tuple[list[int], bool]:
        model, mode, written = self.embedder.model, self.embedder.query_mode, list[int]()
        if mode != "reasoning":  # it was trained to write nothing
            return [], False

        def on_token(_: int, token: int) -> None:
            if token != model.emb_id:
                written.append(token)
                tell(self.embedder.builder.decode(written))

        [rationale] = generate(
            model,
            [prompt],
            max_new_tokens=self.cap,
            min_new_tokens=self.embedder.settings.min_rationale_tokens,
            batch_size=1,
            on_token=on_token,
        )
        return list(rationale.ids), rationale.forced

    def _search(self, query_ND: np.ndarray, query: Query, k: int) -> list[dict[str, Any]]:
        query_ND = self.embedder.cut(query_ND, self.index.about["dimensions"])
        words = [query.question] if query.hybrid else None
        [hits] = self.index.search(query_ND, k, where=(query.where or "").strip() or None, words=words)
        return [
            hit.as_json()
            | {"source": hit.source, "folder": Path(hit.source).name, "has_picture": hit.image is not None}
            for hit in hits
        ]


def demo_gallery(embedder: Embedder) -> Index:
    """Index the demo's test drawings in memory."""
    source = read_source(find_shipped(f"{GALLERY}/corpus.parquet"))
    index = Index.create(
        "memory://", checkpoint=str(embedder.checkpoint), checkpoint_hash=embedder.checkpoint_hash,
        dimensions=embedder.size,
    )  # fmt: skip
    entries = [replace(entry, text=entry.metadata["concept"], metadata={}) for entry in source.entries]
    reader = Reader(embedder, thumbnail_px=256, captions=False)
    for window in reader.embed(entries, Unreadable(len(entries), 0.0)):
        index.put([Row.of(source.name, item.entry, item.content, item.vector) for item in window])
    index.refresh(ann_from=len(entries) + 1)
    return index


def demo_examples(count: int = NUM_EXAMPLES) -> list[Example]:
    """Queries of the demo's test set, each about a different thing."""
    right: dict[str, set[str]] = {}
    for row in pq.read_table(find_shipped(f"{GALLERY}/qrels.parquet")).to_pylist():
        right.setdefault(row["query-id"], set()).add(row["corpus-id"])
    by_group: dict[str, Example] = {}
    columns = ["id", "text", "image", "group", "pair"]
    for row in pq.read_table(find_shipped(f"{GALLERY}/queries.parquet"), columns=columns).to_pylist():
        if row["pair"] == "seen" and row["image"]:
            answers = frozenset(right.get(row["id"], ()))
            by_group.setdefault(row["group"], Example(row["text"], row["image"][0]["bytes"], answers))
    groups = sorted(by_group)
    random.Random(0).shuffle(groups)
    return [by_group[group] for group in groups[:count]]

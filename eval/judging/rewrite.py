"""Query rewriting by a vision-language model, before retrieval.

Two baselines of MM-BRIGHT (section 5): a **caption** of the query's pictures, or a **reformulation** that spells out what
is asked. Either is appended to the query's text. What follows, any embedder or BM25, sees a set with longer queries;
together with ``query_modality=text`` a text model thus hears of pictures. The paper prints a template for
reformulations; the words here are ours, and results.json has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.judging.endpoint import Endpoint, picture
from eval.sets.retrieval_set import RetrievalSet, content_digest
from rge.calls.request import Part
from rge.calls.store import AnswerStore, key_of
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.options import one_of
from rge.common.schema import Item

PROMPTS = {
    "caption": (
        "You describe pictures for people who cannot see them.",
        "Describe what can be seen, with every label, number and relation that a search for an answer might need. "
        "Give the description only.",
    ),
    "reformulate": (
        "You turn questions with pictures into search queries.",
        "Rewrite the question above so that a search finds the documents that answer it. Name the need behind it, what "
        "the pictures show and how that bears on it, the full forms of abbreviations and the technical terms, and what "
        "kind of document would help. Give the rewritten query only.",
    ),
}
"""Kind -> (system prompt, request after question and pictures)."""
MAX_TOKENS = 512


@dataclass(frozen=True)
class Rewriter:
    """How queries are rewritten.

    Attributes:
        kind: key of `PROMPTS`.
        endpoint: writes.
        answers: where texts are kept.
    """

    kind: str
    endpoint: Endpoint
    answers: AnswerStore

    def about(self) -> dict[str, Any]:
        """For results.json."""
        system, request = PROMPTS[self.kind]
        about = {"kind": self.kind, "model": self.endpoint.model, "system": system, "request": request}
        return about | self.endpoint.served


@dataclass(kw_only=True)
class RewriteOptions:
    """What a command that rewrites queries is told."""

    rewrite: str | None = None
    """caption or reformulate: words that a vision-language model adds to each query first, see `eval.judging.rewrite`."""
    rewriter: str | None = None
    """Address of its OpenAI-compatible endpoint."""
    rewriter_model: str | None = None
    """Name of the model at that address."""
    rewriter_key_env: str | None = None
    """Environment variable with the key; null: it needs none."""

    def load_rewriter(self, cache: Path) -> Rewriter | None:
        """The rewriter, None where none is named.

        Raises:
            UserError: an unknown kind, or only half of what is needed.
        """
        kind, url, model = self.rewrite, self.rewriter, self.rewriter_model
        if kind is None:
            if url is not None or model is not None:
                raise UserError(f"rewriter= and rewriter_model= need rewrite={' or rewrite='.join(PROMPTS)}")
            return None
        one_of("rewrite", [kind], tuple(PROMPTS))
        if url is None or model is None:
            raise UserError(
                f"rewrite={kind} needs rewriter=ADDRESS of an OpenAI-compatible endpoint and rewriter_model=NAME"
            )
        endpoint = Endpoint(url, model, self.rewriter_key_env)
        return Rewriter(kind, endpoint, AnswerStore(cache / "rewrites.sqlite"))


def rewritten(wanted: RetrievalSet, rewriter: Rewriter) -> RetrievalSet:
    """The same set with longer queries; a query without pictures gets no caption.

    What the model refuses, or answers with nothing, stays as it was; a note of the set counts it.

    Raises:
        UserError: a call was lost, or the endpoint writes nothing at all.
    """
    added = additions(wanted.queries, rewriter)
    queries = [
        replace(query, text="\n".join(part for part in (query.text, more) if part))
        for query, more in zip(wanted.queries, added, strict=True)
    ]
    meta = {**wanted.meta, "rewriter": rewriter.endpoint.served}
    if empty := sum(more == "" for more in added):
        note = f"rewrite={rewriter.kind} added nothing to {empty} of {len(queries)} queries (refused, rejected or empty)"
        meta = {**meta, "notes": [*meta.get("notes", []), note]}
    return replace(wanted, queries=queries, meta=meta)


def additions(queries: Sequence[Item], rewriter: Rewriter) -> list[str | None]:
    """What is appended to each query, asked for once and then kept; None where nothing was asked, "" where nothing came."""
    system, request = PROMPTS[rewriter.kind]
    about = rewriter.about()
    keys = {
        row: key_of("rewrite", MAX_TOKENS, about, content_digest(query)[0])
        for row, query in enumerate(queries)
        if query.images or rewriter.kind != "caption"
    }
    known = rewriter.answers.get_values(list(dict.fromkeys(keys.values())))
    todo = {key: queries[row] for row, key in keys.items() if key not in known}
    keys_todo = list(todo)
    prompts: list[list[Part]] = []
    for query in todo.values():
        # A caption is of the pictures alone: it must not repeat or answer the question.
        asked = [] if rewriter.kind == "caption" or not query.text else [query.text]
        prompts.append([*asked, *(picture(ref) for ref in query.images), request])
    with progress_bar(total=len(todo), desc=rewriter.kind, disable=not todo) as bar:

        def keep(place: int, text: str) -> None:
            rewriter.answers.put_values({keys_todo[place]: text})
            known[keys_todo[place]] = text
            bar.update()

        texts = rewriter.endpoint.write(prompts, system=system, max_tokens=MAX_TOKENS, on_text=keep)
        empty = {key: "" for key, text in zip(keys_todo, texts, strict=True) if not text}
        if empty and not any(known.values()):
            raise UserError(
                f"{rewriter.endpoint.model} at {rewriter.endpoint.url} wrote nothing for any of {len(keys)} queries"
            )
        rewriter.answers.put_values(empty)
        known |= empty
    return [known[keys[row]] if row in keys else None for row in range(len(queries))]

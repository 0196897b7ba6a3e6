"""`rge search`: query an index.

rge search gallery "What opens this?" image=padlock.png
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.options import SearchOptions
from rge.index.warm import asked as ask_server

if TYPE_CHECKING:
    from rge.embedder import Embedder
    from rge.index.store import Hit, Index


def main(words: list[str]) -> int:
    """Run the command."""
    asked = parse_options(
        SearchOptions, positional(words, "index", "question"), 'rge search INDEX "question"'
    )
    if not (asked.question or "").strip() and asked.image is None:
        raise UserError('give a question, image=..., or both: rge search INDEX "question" image=x.png')
    rationale, hits = _from_server(asked) or _here(asked)
    print(format_result(rationale, hits))  # noqa: T201
    return 0


def _from_server(asked: SearchOptions) -> "tuple[str, list[Hit]] | None":
    """The answer of a running `rge serve` that has the index's checkpoint; None without one."""
    if asked.plugins:
        return None  # what they register is known in this process only
    there = asdict(asked) | {"index": absolute(asked.index), "server": "none"}
    if asked.image is not None and not asked.image.startswith("data:"):
        there["image"] = absolute(asked.image)
    found = ask_server(asked.server, "/search", there)
    if found is None:
        return None
    place, answer = found
    print(f"answered by rge serve with {answer['name']}, at {place}")  # noqa: T201
    return answer["rationale"], cast("list[Hit]", [SimpleNamespace(**hit) for hit in answer["hits"]])


def _here(asked: SearchOptions) -> "tuple[str, list[Hit]]":
    from rge.index.store import Index

    index = Index.open(asked.index)
    return answer(index.embedder(asked.checkpoint, asked.base), index, asked)


def answer(embedder: "Embedder", index: "Index", asked: SearchOptions) -> "tuple[str, list[Hit]]":
    """The rationale and the hits of a search."""
    query_D, rationale = embedder.encode_query(
        asked.question,
        asked.image,
        mode=asked.mode,
        instruction=asked.instruction,
        dimensions=index.about["dimensions"],
        return_rationales=True,
    )
    words = [asked.question or ""] if asked.hybrid else None
    [hits] = index.search(query_D[None], asked.k, where=asked.where, words=words, exact=asked.exact)
    return rationale, hits


def absolute(place: str) -> str:
    """A path or address for a process with another working directory."""
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def format_result(rationale: str, hits: "Sequence[Hit]") -> str:
    """The rationale and the hits as printed text."""
    lines = [rationale, ""] if rationale else []
    for place, hit in enumerate(hits, start=1):
        text = " ".join((hit.text or "").split())
        shown = f"  {text[:80]}{'...' if len(text) > 80 else ''}" if text else ""
        lines.append(f"{place:>3}  {hit.score:.4f}  {hit.id}{'  (gone)' if hit.gone else ''}{shown}")
    return "\n".join(lines) if hits else "\n".join([*lines, "the index is empty"])


if __name__ == "__main__":
    start(main)

"""`rge search`: query an index.

rge search gallery "What opens this?" image=padlock.png open=true
"""

import base64
import os
import tempfile
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.files import write_text
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
    shows_page = asked.page is not None or asked.open
    rationale, hits = _from_server(asked, shows_page) or _here(asked)
    print(told(rationale, hits))  # noqa: T201
    if shows_page:
        path = asked.page or Path(tempfile.mkdtemp(prefix="rge-search-")) / "hits.html"
        write_text(path, page(asked, rationale, hits))
        print(f"\npage: {path}")  # noqa: T201
        if asked.open and not webbrowser.open(path.resolve().as_uri()):
            print("no browser was found to show it in")  # noqa: T201
    return 0


def _from_server(asked: SearchOptions, shows_page: bool) -> "tuple[str, list[Hit]] | None":
    """The answer of a running `rge serve` that has the index's checkpoint; None without one."""
    if asked.plugins:
        return None  # what they register is known in this process only
    # The server has another working directory, and opens no page.
    there = asdict(asked) | {
        "index": absolute(asked.index),
        "page": None,
        "open": shows_page,
        "server": "none",
    }
    if asked.image is not None and not asked.image.startswith("data:"):
        there["image"] = absolute(asked.image)
    found = ask_server(asked.server, "/search", there)
    if found is None:
        return None
    place, answer = found
    print(f"answered by rge serve with {answer['name']}, at {place}")  # noqa: T201
    hits = [SimpleNamespace(**hit) for hit in answer["hits"]]
    for hit in hits:
        hit.thumbnail = None if hit.thumbnail is None else base64.b64decode(hit.thumbnail)
    return answer["rationale"], cast("list[Hit]", hits)


def _here(asked: SearchOptions) -> "tuple[str, list[Hit]]":
    from rge.embedder import Embedder
    from rge.index.store import Index

    index = Index.open(asked.index)
    checkpoint = asked.checkpoint or index.about["checkpoint"]
    embedder = Embedder.from_pretrained(checkpoint, base=asked.base)
    index.check(checkpoint, embedder.checkpoint_hash)
    return answer(embedder, index, asked)


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
    thumbnails = asked.page is not None or asked.open
    [hits] = index.search(
        query_D[None], asked.k, where=asked.where, words=words, exact=asked.exact, thumbnails=thumbnails
    )
    return rationale, hits


def absolute(place: str) -> str:
    """A path or address for a process with another working directory."""
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def told(rationale: str, hits: "Sequence[Hit]") -> str:
    """What was written and found, as it is printed."""
    lines = [rationale, ""] if rationale else []
    for place, hit in enumerate(hits, start=1):
        text = " ".join((hit.text or "").split())
        shown = f"  {text[:80]}{'...' if len(text) > 80 else ''}" if text else ""
        lines.append(f"{place:>3}  {hit.score:.4f}  {hit.id}{'  (gone)' if hit.gone else ''}{shown}")
    return "\n".join(lines) if hits else "\n".join([*lines, "the index is empty"])


def page(asked: SearchOptions, rationale: str, hits: "Sequence[Hit]") -> str:
    """The same as one self-contained HTML file; texts are escaped."""
    import jinja2

    from rge.common.images import WEB, data_url, fetch_picture, picture_bytes
    from rge.index.sources import thumbnail

    shown = None
    if asked.image is not None:
        is_address = asked.image.startswith((*WEB, "data:"))
        shown = thumbnail(fetch_picture(asked.image) if is_address else picture_bytes(asked.image), 256)
    template = files("rge.index").joinpath("templates", "hits.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        question=asked.question or "",
        picture=data_url(shown),
        rationale=rationale,
        index=asked.index,
        hits=[(place, hit, data_url(hit.thumbnail)) for place, hit in enumerate(hits, start=1)],
    )


if __name__ == "__main__":
    start(main)

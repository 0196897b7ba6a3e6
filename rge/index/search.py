"""`rge search`: query an index.

rge search gallery "What tool do you need for this?" image=padlock.png
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options, positional
from rge.index.options import SearchOptions

if TYPE_CHECKING:
    from rge.index.rows import Hit


def main(words: list[str]) -> int:
    """Run the command."""
    options = parse_options(
        SearchOptions, positional(words, "index", "question"), 'rge search INDEX "question"'
    )
    if not (options.question or "").strip() and options.image is None:
        raise UserError('give a question, image=..., or both: rge search INDEX "question" image=x.png').about(
            "question", "image"
        )
    from rge.index.store import Index

    index = Index.open(options.index)
    index.check_made_with(task=options.task)
    query_D, rationale = index.embedder(options.checkpoint, options.base).encode_query(
        options.question,
        options.image,
        mode=options.mode,
        max_rationale_tokens=options.max_rationale_tokens,
        instruction=options.instruction,
        dimensions=index.about["dimensions"],
        return_rationales=True,
    )
    fused = [options.question or ""] if options.hybrid else None
    [hits] = index.search(query_D[None], options.k, where=options.where, words=fused, exact=options.exact)
    print(format_result(rationale, hits))  # noqa: T201
    return 0


def format_result(rationale: str, hits: "Sequence[Hit]") -> str:
    """The rationale and the hits as printed text."""
    lines = [rationale, ""] if rationale else []
    for rank, hit in enumerate(hits, start=1):
        text = " ".join((hit.text or "").split())
        shown = f"  {text[:80]}{'...' if len(text) > 80 else ''}" if text else ""
        lines.append(f"{rank:>3}  {hit.score:.4f}  {hit.id}{'  (gone)' if hit.gone else ''}{shown}")
    return "\n".join(lines if hits else [*lines, "nothing found"])


if __name__ == "__main__":
    start(main)

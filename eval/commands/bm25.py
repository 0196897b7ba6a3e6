"""BM25 baseline on the texts of a set.

    rge eval bm25 set=DIR out=DIR [rewrite=caption rewriter=ADDRESS rewriter_model=NAME]

Needs the extra ``baselines`` (bm25s). Candidates that share no word with the query are not ranked.
"""

import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eval.benchmarks.registry import MeasureOptions
from eval.benchmarks.suite import is_suite, load_suite, measure_members
from eval.judging.rewrite import RewriteOptions, rewritten
from eval.scoring.measurement import Measurement
from eval.scoring.output_files import rerun_command
from eval.scoring.results import Made, ModelFacts
from eval.scoring.search import Ranking, stack_rankings
from eval.sets.contents import with_readable_content
from eval.sets.retrieval_set import RetrievalSet
from rge.common.errors import UserError
from rge.common.parts import PdfPart
from rge.common.schema import Item
from rge.content import pdf
from rge.stats.words import LETTERS, SIGNS

METHOD = "lucene"
WORD = rf"[{SIGNS}]|{LETTERS}+"
"""A word of two or more letters, or a sign of Chinese or Japanese, which have no blanks between words."""


@dataclass(kw_only=True)
class Bm25Options(RewriteOptions, MeasureOptions):
    """Rank a set's texts with BM25, the text baseline, and score the ranking."""

    k1: float = 0.9
    """Saturation of term counts."""
    b: float = 0.4
    """Strength of document-length normalisation."""
    stopwords: str = "en"
    """Language whose stop words are dropped; null: none."""
    cache: Path | None = None
    """Cache of rewritten queries; null: ``out/.cache``."""
    depth: int | None = None
    """Length of a ranking; null: 1000, or the largest cutoff of the metrics."""


def bm25(options: Bm25Options) -> Path:
    """Rank, score and write, as `eval.commands.run` does for an embedder."""
    if is_suite(options.set):
        options.protocol()
        shared = replace(options, cache=options.cache or options.out / ".cache")
        measure_members(load_suite(options.set), shared, lambda _, of_member: [bm25(of_member)], title="bm25")
        return options.out
    protocol, wanted = options.prepared()
    wanted, unread = with_readable_content(wanted)
    depth = protocol.depth(wanted, options.depth)
    tag = f"bm25-{METHOD}" + (f"-{options.rewrite}" if options.rewrite else "")
    rewriter = options.load_rewriter(options.cache or options.out / ".cache")
    made = Made(
        query_modality="text",
        model=ModelFacts(name="bm25", adapter="bm25s", revision=None),
        settings={"method": METHOD, "k1": options.k1, "b": options.b, "stopwords": options.stopwords},
        rewrite=None if rewriter is None else rewriter.about(),
        tag=tag,
        depth=depth,
        again=rerun_command("bm25", options),
    )
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite)
    measurement.check_out(options.out, made)
    if rewriter is not None:
        wanted = rewritten(wanted, rewriter)
        measurement = replace(measurement, wanted=wanted)
    made = made.but(warnings=[*wanted.meta.get("notes", []), *unread])
    ranking = rank(wanted, options, depth)
    measurement.write(options.out, ranking, made, tag=tag, title=tag)
    return options.out


def written(item: Item) -> str:
    """What is written in an item: its texts, and the text of its documents' pages."""
    pages = [
        text for part in item.content if isinstance(part, PdfPart) for text in pdf.texts(part.pdf, part.pages)
    ]
    return "\n".join([item.text or "", *pages]).strip()


def rank(wanted: RetrievalSet, options: Bm25Options, depth: int) -> Ranking:
    """Rank the candidates that share a word with each query, best first, equal scores by id, with all ties of the last rank."""
    try:
        import bm25s
    except ImportError:
        raise UserError(
            "BM25 needs it: pip install -e '.[baselines]', or pip install bm25s", key="bm25s", kind="package"
        ) from None
    texts = [""] * len(wanted.corpus_ids)
    for row, item in zip(wanted.file_order_C.tolist(), wanted.corpus_items(), strict=True):
        texts[row] = written(item)
    stopwords = None if options.stopwords == "null" else options.stopwords

    def words(parts: list[str]) -> list[list[str]]:
        try:
            return bm25s.tokenize(
                [unicodedata.normalize("NFC", part) for part in parts],
                stopwords=stopwords, return_ids=False, show_progress=False, token_pattern=WORD,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(str(error), key="stopwords") from None

    tokens_C = words(texts)
    if not any(tokens_C):
        raise UserError(
            "no candidate has text that BM25 can use: words of two letters, no stop words", wanted.path
        )
    index = bm25s.BM25(k1=options.k1, b=options.b, method=METHOD)
    index.index(tokens_C, show_progress=False)
    rankings = []
    queries = words([query.text or "" for query in wanted.queries])
    for query, tokens in enumerate(queries):
        known = index.get_tokens_ids(tokens)
        score_C = index.get_scores_from_ids(known) if known else np.zeros(len(texts), np.float32)
        rows = np.flatnonzero(score_C > 0)
        if wanted.candidates is not None:
            rows = np.intersect1d(rows, wanted.candidates[query])
        if wanted.excluded is not None:
            rows = np.setdiff1d(rows, wanted.excluded[query])
        rows = rows[np.argsort(-score_C[rows], kind="stable")]
        last = score_C[rows[min(depth, len(rows)) - 1]] if len(rows) else 0.0
        rows = rows[score_C[rows] >= last]
        rankings.append((query, rows, score_C[rows]))
    return Ranking(*stack_rankings(len(queries), rankings), depth)

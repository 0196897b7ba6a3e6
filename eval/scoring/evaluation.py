"""Write an evaluation directory from a ranking; shared by `run`, `score`, `bm25`, `rerank` and `budget`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.embedding.identity import versions, with_key
from eval.scoring.output_files import (
    FORMAT,
    RUN,
    invalidate,
    per_query_table,
    rationale_figures,
    set_figures,
    statistics_settings,
    write_tables,
)
from eval.scoring.protocol import Protocol, all_figures
from eval.scoring.search import Ranking
from eval.scoring.tables import in_per_cent
from eval.scoring.trec import write_run
from eval.sets.retrieval_set import RetrievalSet
from rge.common.schema import Encoded
from rge.identity.run_identity import Identity


def decides(wanted: RetrievalSet, protocol: Protocol, seed: int) -> dict[str, Any]:
    """Keys of results.json that determine the figures of any ranking of a set; see `check_out`."""
    return {
        "set.fingerprint": wanted.fingerprint,
        "set.content": wanted.content,
        "set.report_by": list(wanted.report_by),
        "benchmark": protocol.benchmark,
        "profile": protocol.profile,
        "seed": seed,
        "metrics": list(protocol.metrics),
    }


def write_evaluation(
    out: Path,
    wanted: RetrievalSet,
    ranking: Ranking,
    protocol: Protocol,
    about: Mapping[str, Any],
    *,
    tag: str,
    seed: int,
    encoded: Encoded | None = None,
    missing: Sequence[str] = (),
    limit: int | None = None,
    made_with: Identity | None = None,
    title: str | None = None,
) -> dict[str, Any]:
    """Score a ranking and write run.trec, per_query.parquet and, last, results.json; returns the content of the last.

    ``wanted``: from `Protocol.prepare`. ``about``: how the ranking was made; overrides the default content of results.json.
    ``missing``: queries without a ranking. ``made_with``: software that the embeddings depend on, see
    `eval.embedding.set_embeddings.Embeddings`. ``title``: printed with the table of figures; None prints nothing.
    """
    ranking = protocol.ordered(wanted, ranking)
    scored = protocol.without(missing, wanted, protocol.score(wanted, ranking))
    table = per_query_table(wanted, ranking, scored, encoded)
    results: dict[str, Any] = {
        "format": FORMAT,
        "set": set_figures(wanted) | {"limit": limit},
        "benchmark": protocol.benchmark,
        "profile": protocol.profile,
        "protocol": list(protocol.statements),
        "metrics": list(protocol.metrics),
        "query_mode": None,
        "query_modality": None,
        **all_figures(wanted, scored, protocol, seed=seed),
        "warnings": list(wanted.meta.get("notes", [])),
        "rationale": rationale_figures(table.select(["stop_reason", "rationale_tokens"]).to_pandas()),
        "coverage": 1.0 - len(missing) / len(wanted.queries),
        "depth": ranking.depth,
        "seed": seed,
        "statistics": statistics_settings(seed),
        "versions": versions(),
    } | dict(about)
    results["identity"] = with_key(results, made_with=made_with)
    results["plugins"] = results["identity"]["plugins"]
    invalidate(out)
    write_run(out / RUN, ranking, wanted.query_ids, wanted.corpus_ids, tag)
    write_tables(out, table, results)
    if title is not None:
        figures = in_per_cent(results, (*protocol.headline, *protocol.metrics))
        print(f"{wanted.name}: {title} -> {out}\n{figures.to_string()}", flush=True)
    return results

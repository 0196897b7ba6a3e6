"""Write evaluation directories from rankings; shared by `run`, `score`, `bm25`, `rerank` and `budget`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.scoring.identity import versions, with_key
from eval.scoring.metrics import of_kinds
from eval.scoring.output_files import (
    RUN,
    check_out,
    invalidate,
    per_query_table,
    rationale_figures,
    set_facts,
    statistics_settings,
    write_tables,
)
from eval.scoring.protocol import Protocol, all_figures
from eval.scoring.results import FORMAT, Made, Measured, Results
from eval.scoring.search import Ranking
from eval.scoring.tables import in_per_cent
from eval.scoring.trec import write_run
from eval.sets.retrieval_set import RetrievalSet
from rge.common.schema import Encoded
from rge.identity.run_identity import Identity


@dataclass(frozen=True)
class Measurement:
    """A set under a protocol, from `Protocol.prepare`, and the settings that any ranking of it is scored with."""

    wanted: RetrievalSet
    protocol: Protocol
    seed: int  # of the resampling
    overwrite: bool  # whether output of another evaluation is replaced
    limit: int | None = None  # number of queries of the set that are used; None: all

    def check_out(self, out: Path, made: Made) -> None:
        """Raise a UserError if a directory holds another evaluation, see `eval.scoring.output_files.check_out`.

        ``made``: how the ranking is made, as far as it is known.
        """
        check_out(out, Measured(**self._facts() | made.as_json()), overwrite=self.overwrite)

    def _facts(self) -> dict[str, Any]:
        """What is measured, for `Measured`."""
        protocol = self.protocol
        return {
            "format": FORMAT,
            "set": set_facts(self.wanted, self.limit),
            "benchmark": protocol.benchmark,
            "profile": protocol.profile,
            "protocol": list(protocol.statements),
            "metrics": list(protocol.metrics),
            "query_mode": None,
            "query_modality": None,
            "seed": self.seed,
        }

    def write(
        self,
        out: Path,
        ranking: Ranking,
        made: Made,
        *,
        tag: str,
        encoded: Encoded | None = None,
        missing: Sequence[str] = (),
        made_with: Identity | None = None,
        title: str | None = None,
    ) -> Results:
        """Score a ranking and write run.trec, per_query.parquet and, last, results.json; returns the content of the last.

        ``made``: how the ranking was made. ``missing``: queries without a ranking. ``made_with``: software that the embeddings depend on, see `eval.embedding.set_embeddings.Embeddings`.
        ``title``: printed with the table of figures; None prints nothing.
        """
        wanted, protocol = self.wanted, self.protocol
        ranking = protocol.ordered(wanted, ranking)
        scored = protocol.without(missing, wanted, protocol.score(wanted, ranking))
        table = per_query_table(wanted, ranking, scored, encoded)
        content: dict[str, Any] = {
            **self._facts(),
            **all_figures(wanted, scored, protocol, seed=self.seed),
            "warnings": list(wanted.meta.get("notes", [])),
            "rationale": rationale_figures(table.select(["stop_reason", "rationale_tokens"]).to_pandas()),
            "coverage": 1.0 - len(missing) / len(wanted.queries),
            "depth": ranking.depth,
            "statistics": statistics_settings(self.seed),
            "versions": versions(),
        } | made.as_json()
        identity = with_key(Measured(**content), made_with=made_with)
        results = Results(**content, identity=identity, plugins=identity["plugins"])
        invalidate(out)
        write_run(out / RUN, ranking, wanted.query_ids, wanted.corpus_ids, tag)
        write_tables(out, table, results)
        if title is not None:
            names = (*protocol.headline, *protocol.metrics, *of_kinds(results.micro))
            figures = in_per_cent(results, names)
            print(f"{wanted.name}: {title} -> {out}\n{figures.to_string()}", flush=True)
        return results

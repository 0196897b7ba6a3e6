"""One HTML page from finished evaluations: figures with intervals, training curves, and examples with pictures.

    rge eval report runs=DIR[,DIR...] out=FILE [log=FILE,...] [baseline=LABEL:DIR,...]

evaluation directories --evaluations--> Evaluation --tables, cards, training_log--> context
  --templates/report.html.j2--> one file: no network, every picture in it once, readable without script

Anything that would be misleading raises a `UserError` that names the directory and the fix: incomplete evaluations, figures
of different sets, numbers that are not finite, missing pictures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.pages.budget_curves import on_page
from eval.pages.cards import cards_of
from eval.pages.evaluations import check_one_set, compared, featured, read_evaluations, set_of, warnings_of
from eval.pages.examples import Gallery
from eval.pages.provenance import provenance_of
from eval.pages.single_file import write_page
from eval.pages.tables import (
    MAX_MAIN_SLICES,
    ceiling_of,
    cost_and_ties,
    main_table,
    metrics_table,
    notes_of,
    random_floors,
    verdict_of,
)
from eval.pages.training_log import curves_of
from eval.scoring.metrics import metric_words
from rge.common.errors import UserError


def write_report(
    dirs: Sequence[Path],
    out: Path,
    *,
    training_logs: Sequence[Path] = (),
    title: str | None = None,
    metric: str = "recall@1",
    num_examples: int = 48,
    baselines: Mapping[str, Path] | None = None,
    set_dir: Path | None = None,
    seed: int = 0,
    budget: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report page of one or more evaluations of one retrieval set, and return ``out``.

    The output is deterministic: examples are drawn by a seeded hash of the query id, and the page has no dates.
    Baselines are evaluation directories of other checkpoints, by label; logs are stages of one run, or runs to compare.

    Raises:
        UserError: an evaluation is incomplete, holds a number that is not finite, or is of another retrieval set;
            a picture is missing; a training log cannot be read.
    """
    evaluations = read_evaluations(dirs, baselines or {})
    check_one_set(evaluations)
    main = featured(evaluations)
    if main.figure("micro", metric) is None:
        known = ", ".join(main.results["micro"])
        raise UserError(
            f"metric must be one that {main.directory}/results.json holds, got {metric!r}; it holds {known}"
        )
    rows = compared(evaluations)
    gallery = Gallery()
    loaded = set_of(main, set_dir)
    examples = cards_of(rows, main, loaded, metric, num_examples, seed, gallery)
    table, other_tables = main_table(rows, main, metric, random_floors(main, loaded, metric))
    content = dict(
        title=title or f"What reasoning gained on {main.results['set']['name']}",
        set=main.results["set"],
        profile=main.results.get("profile"),
        metric=metric,
        metric_words=metric_words(metric),
        verdict=verdict_of(rows, main, metric),
        main_table=table,
        other_tables=other_tables,
        ceiling=ceiling_of(main, metric),
        metrics_table=metrics_table(evaluations, main),
        health=cost_and_ties(evaluations, metric),
        warnings=warnings_of(evaluations),
        slice_notes=notes_of(loaded, table.by),
        examples=examples,
        pictures=gallery.pictures,
        sizes=gallery.sizes,
        curves=curves_of(training_logs),
        budget=None if budget is None else on_page(budget),
        provenance=provenance_of(evaluations),
        max_slices=MAX_MAIN_SLICES,
    )
    return write_page(out, "report.html.j2", ["report.css"], content)

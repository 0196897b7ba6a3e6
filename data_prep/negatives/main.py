"""The command ``rge data negatives``.

Queries and candidates are embedded once and cached, so a second call with other margins encodes nothing, and a killed one
continues. Each query's nearest wrong candidates within the limits become its negatives; a judge may call some of them right.
Positives and negatives get a score: the judge's, or else the embedder's cosine. Under ``accelerate launch`` all processes embed
and judge; the result is the same.
"""

import json
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from data_prep.negatives.mining import Mined, Miner, check_judge, targets_of
from data_prep.negatives.options import NegativesOptions
from data_prep.negatives.page import write_page
from data_prep.negatives.pool import pool_targets
from data_prep.rationales.pairs import Source, sources_of, written_row
from rge.calls.store import AnswerStore
from rge.common.commands import progress_bar
from rge.common.files import held, replacing, write_json
from rge.common.modes import Mode
from rge.common.options import parse_options
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Record
from rge.data.sources import check_wording, json_line
from rge.judging.scorer import SCORERS, Judge, Scorer
from rge.mining.table import RecordTable
from rge.vectors.contents import content_digest
from rge.vectors.fill_cache import Embeds
from rge.vectors.processes import ProcessGroup, join, leave


def main(words: Sequence[str]) -> None:
    """Mine negatives, and print what was found."""
    options = parse_options(NegativesOptions, words, "rge data negatives")
    options.check_all()
    process_group = join()
    try:
        check_judge(process_group, options)
        report = run(options, process_group)
    finally:
        leave()
    if process_group.is_first:
        print(json.dumps(report, indent=1))


def run(options: NegativesOptions, process_group: ProcessGroup) -> dict[str, Any]:
    """Mine every file; the counts of all, by file if there are several. Empty but in the first process."""
    sources = sources_of(options)
    make = SCORERS[options.ask] if options.judges else None
    encoder = options.load()
    mode = options.query_mode or encoder.settings.query_mode
    encoder.settings.check_mode(mode)
    lock = held(options.root) if process_group.is_first else nullcontext()
    answers = AnswerStore(
        options.root / "judge.sqlite" if options.judges and process_group.is_first else None
    )

    @cache
    def judge() -> Scorer:
        assert make is not None
        about = Judge(
            options.judge,
            options.judge_endpoint,
            options.judge_batch_size,
            options.device,
            answers=answers,
        )
        return make(about)

    with lock, closing(answers):
        miner = Miner(options, encoder, mode, judge if make else None, answers, process_group)
        reports = {}
        for source in sources:
            table = process_group.once(lambda source=source: _table(source, options, encoder))  # type: ignore[misc]
            mined = miner.mine(table)
            if mined is not None:
                reports[source.out.name] = _write(source, mined, options, encoder, mode)
    return next(iter(reports.values())) if len(reports) == 1 else reports


def _table(source: Source, options: NegativesOptions, encoder: Embeds) -> RecordTable:
    """The queries and candidates of a file; every picture is read once."""
    profile, name = encoder.settings.profile, str(source.records.name)

    def records() -> Any:
        numbers = range(len(source.records))
        for number in progress_bar(numbers, desc="reading", unit="record", delay=2):
            record: Record = source.records[number]
            if profile in PROFILES:
                check_wording(record, name, profile)
            yield record

    pool = None if options.pool is None else pool_targets(options.pool)
    return RecordTable(records(), content_digest, pool)


def _write(
    source: Source, mined: Mined, options: NegativesOptions, encoder: Embeds, mode: Mode
) -> dict[str, Any]:
    """Write the records, the report and its page; returns the report."""
    with replacing(source.out) as out, Path(out).open("w", encoding="utf-8") as lines:
        for number in range(len(source.records)):
            record = _with_negatives(source.records[number], mined, keep=options.keep)
            lines.write(json_line(written_row(record, source.out)))
    report = {
        "records": len(source.records),
        "embedder": encoder.settings.model or str(encoder.checkpoint),
        "query_mode": mode,
        "rules": {
            key: getattr(options, key)
            for key in ("num", "relative_margin", "absolute_margin", "max_score", "range", "choose", "seed")
        },
        **mined.counts,
    }
    write_json(source.beside(".report.json"), report)
    write_page(source.beside(".report.html"), report, mined, options.examples)
    return report


def _with_negatives(record: Record, mined: Mined, *, keep: bool) -> Record:
    """A record with scores and with its query's negatives, after its own."""
    table = mined.table
    place = table.place(record)

    def scored(targets: Sequence[Any]) -> list[Any]:
        return [
            target.model_copy(update={"score": mined.score.get((place, table.row(target)))})
            for target in targets
        ]

    own = scored(record.negatives) if keep else []
    update = {"positives": scored(record.positives), "negatives": [*own, *targets_of(mined, place)]}
    return record.model_copy(update=update)

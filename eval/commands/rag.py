"""Answer a set's questions with retrieved documents, and let judges score the answers.

    rge eval rag set=DIR out=DIR of=DIR,... generator.name=NAME generator.base_url=ADDRESS judge.name=NAME judge.base_url=ADDRESS

Rows: ``none`` shows the generator only the question, ``oracle`` every right document, and each evaluation of ``of=`` the first
``top_n`` documents of its ranking. A judge compares the answer with the reference (`eval.sets.retrieval_set.reference_answers`) and
scores it (`eval.judging.answers`). Every row is an evaluation
directory with one number per query, ``answer_score`` (0 to 1), so that `compare` gives paired intervals.

All answers are stored as they come. If calls are unanswered, the row is not written, the exit code is 2, and the same command makes
only these calls again. The wording is ours; the paper prints none for the generator.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from eval.benchmarks.registry import protocol_for
from eval.benchmarks.suite import ByMember, is_suite, load_suite, measure_members, member_dirs
from eval.commands.compare import paired_tests
from eval.judging.answers import (
    ANSWER,
    FORM,
    SCALE,
    SCORE,
    SECOND,
    STATEMENTS,
    SYSTEM,
    AnswerProtocol,
    agreement,
    answer_of,
    score_of,
)
from eval.pages.evaluations import labelled
from eval.scoring.measurement import Measurement
from eval.scoring.output_files import PER_QUERY, RUN, check_measured_on, read_results, rerun_command
from eval.scoring.results import Answers, Made
from eval.scoring.search import Ranking
from eval.scoring.trec import read_run
from eval.sets.contents import CandidatesOf, with_readable_content
from eval.sets.retrieval_set import RetrievalSet, load_set, reference_answers
from rge.calls.caller import Caller
from rge.calls.model_config import ModelConfig
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore
from rge.calls.wire.replies import ReplyError
from rge.common.errors import UserError
from rge.common.options import AtLeastOne, Count
from rge.common.registry import PluginOptions
from rge.common.schema import Encoded, Item
from rge.identity.run_identity import digest
from rge.judging.scorer import need_answers
from rge.vectors.contents import picture_digests
from rge.vectors.processes import join

NONE, ORACLE = "none", "oracle"


@dataclass
class RagOptions(PluginOptions):
    """Answer questions with retrieved documents, and let judges score the answers against references."""

    set: Path
    """Retrieval set with a column ``answers`` in its queries, or a suite of them."""
    out: Path
    """Output directory, with one evaluation directory per row."""
    generator: ModelConfig
    """The model that answers: ``generator.name=``, ``generator.base_url=`` ... see docs/data_prep.md."""
    judge: ModelConfig
    """The model that scores the answers, likewise."""
    second_judge: ModelConfig | None = None
    """A second judge, ``answer_score_2``; the agreement of both is reported."""
    of: tuple[str, ...] = ()
    """``[LABEL:]DIR``: finished evaluations of the set; each is a row, with the first documents of its ranking."""
    rows: tuple[Literal["none", "oracle"], ...] = ("none", "oracle")
    """Further rows: none (no documents) and oracle (all right ones)."""
    top_n: AtLeastOne = 5
    """Number of documents of a ranking that are shown."""
    document_chars: AtLeastOne | None = None
    """Longer texts of documents are cut there; null: none are."""
    answer_tokens: AtLeastOne = 4096
    """Cap on an answer."""
    judge_tokens: AtLeastOne = 1024
    """Cap on a judge's reason and score."""
    limit: int | None = None
    """Number of queries of the set, or of each member of a suite; null: all."""
    cache: Path | None = None
    """File of all answers; null: ``out/answers.sqlite``. Several runs can share one."""
    seed: Count = 0
    """Seed of the resampling."""
    overwrite: bool = False
    """Replace existing output of other rows."""


def rag(options: RagOptions) -> list[Path]:
    """Write one evaluation per row, print them and their differences from the first row, and return their directories.

    Raises:
        UserError: no reference answers, a ranking of another set, or unanswered calls (all others are stored).
    """
    if join().size > 1:
        raise UserError("rag runs in one process, which makes generator.concurrency calls at a time")
    rows: dict[str, Path | None] = dict.fromkeys(options.rows)
    for label, path in map(labelled, options.of):
        name = re.sub(r"[^\w.-]+", "_", label or path.name)
        if name in (*rows, NONE, ORACLE):
            raise UserError("it names another row; pass of=LABEL:DIR", path, key=name)
        rows[name] = path
    if not rows:
        raise UserError("there is nothing to answer with: pass of=DIR, or rows=none,oracle").about(
            "of", "rows"
        )
    models = {"generator": options.generator, "judge": options.judge, "second_judge": options.second_judge}
    store = AnswerStore(options.cache or options.out / "answers.sqlite")
    caller = Caller({name: model for name, model in models.items() if model}, store, progress=True)
    done = [_row(replace(options, out=options.out / name), name, of, caller) for name, of in rows.items()]
    store.close()
    first, *others = (pd.read_parquet(out / PER_QUERY).set_index("query_id") for out in done)
    for name, frame in zip([*rows][1:], others, strict=True):
        test = paired_tests(frame, first.loc[frame.index], [SCORE], [], seed=options.seed).iloc[0]
        interval = "" if test["low"] is None else f" [{100 * test['low']:+.2f}, {100 * test['high']:+.2f}]"
        print(
            f"{name} - {next(iter(rows))}, all queries: {100 * test['difference']:+.2f}{interval}", flush=True
        )
    return done


def _row(options: RagOptions, row: str, of: Path | None, caller: Caller) -> Path:
    if not is_suite(options.set):
        _measure(options, row, of, caller)
        return options.out
    inner = {} if of is None else member_dirs(of, read_results(of))

    def member(name: str, of_member: RagOptions) -> list[Path]:
        if of is not None and name not in inner:
            raise UserError(
                f"it has no evaluation of it, since it is of another suite than {options.set}", of, key=name
            )
        _measure(of_member, row, inner.get(name), caller)
        return [of_member.out]

    def about(results: ByMember) -> dict[str, Any]:
        blocks = [result.rag for result in results.values() if result.rag is not None]
        frame = pd.concat(pd.read_parquet(options.out / "members" / name / PER_QUERY) for name in results)
        whole = blocks[0].but(
            of=of and str(of),
            references=digest([block.references for block in blocks]),
            counts=dict(sum((Counter(block.counts) for block in blocks), Counter())),
            agreement=agreement(frame, options.seed),
        )
        return {"rag": whole}

    measure_members(load_suite(options.set), options, member, title=row, more=about)
    return options.out


def _measure(options: RagOptions, row: str, of: Path | None, caller: Caller) -> None:
    loaded = load_set(options.set)
    benchmark = str(loaded.meta.get("benchmark") or "generic")
    whole, unread = with_readable_content(protocol_for(benchmark, "clean", loaded).prepare(loaded))
    wanted = whole.first(options.limit)
    references = reference_answers(wanted)
    if not any(references):
        raise UserError(
            "there are no reference answers: its queries.parquet needs this column (docs/own_data.md)",
            options.set,
            key="answers",
        )
    ranking = _shown(options, whole, wanted, row, of)
    names = (SCORE, SECOND) if options.second_judge else (SCORE,)
    protocol = AnswerProtocol(benchmark, "clean", (SCORE,), STATEMENTS, metrics=names)
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite, options.limit)
    asked = Answers(
        row=row,
        of=None if of is None else str(of),
        top_n=options.top_n,
        document_chars=options.document_chars,
        answer_tokens=options.answer_tokens,
        judge_tokens=options.judge_tokens,
        models={name: [model.name, model.cache_settings()] for name, model in caller.models.items()},
        wording=digest([ANSWER, SYSTEM, SCALE]),
        references=digest(references),
    )
    made = Made(rag=asked, tag=row, depth=ranking.depth, again=rerun_command("rag", options))
    measurement.check_out(options.out, made)
    answers, counts = _answers(options, wanted, ranking, references, caller)
    value_QM = np.stack(
        [
            _scores(options, wanted, answers, references, name, caller, counts)
            for name in [*caller.models][1:]
        ],
        axis=1,
    )
    num, nothing_Q = len(wanted.queries), np.zeros(len(wanted.queries))
    frame = pd.DataFrame(value_QM, columns=list(names)).assign(group=wanted.columns["group"])
    warnings = [f"{number} of {num} queries: {what}" for what, number in sorted(counts.items())]
    made = made.but(
        rag=asked.but(counts=dict(counts), agreement=agreement(frame, options.seed)),
        warnings=[*wanted.meta.get("notes", []), *unread, *warnings],
    )
    texts = [answer or "" for answer in answers]
    encoded = Encoded(
        np.empty((num, 0)), texts, nothing_Q.astype(np.int64), ["prefilled"] * num, nothing_Q, nothing_Q
    )
    measurement = replace(measurement, protocol=replace(protocol, value_QM=value_QM))
    measurement.write(options.out, ranking, made, tag=row, encoded=encoded, title=row)


def _shown(
    options: RagOptions, whole: RetrievalSet, wanted: RetrievalSet, row: str, of: Path | None
) -> Ranking:
    """The documents that the generator is shown, best first."""
    if of is None:
        right = [rows[np.argsort(-gains, kind="stable")] for rows, gains in wanted.positives]
        rows = [own if row == ORACLE else own[:0] for own in right]
        rows_QW = np.full((len(rows), max(1, *map(len, rows))), -1, np.int32)
        for query, own in enumerate(rows):
            rows_QW[query, : len(own)] = own
        score_QW = np.where(rows_QW >= 0, -np.arange(rows_QW.shape[1], dtype=np.float32), -np.inf)
        return Ranking(rows_QW, score_QW, rows_QW.shape[1])
    old = read_results(of)
    check_measured_on(whole, old.set)
    limit = old.set.limit
    if limit is not None and (options.limit is None or options.limit > limit):
        raise UserError(
            f"it has only the first {limit} queries: pass limit={limit}, or evaluate it without limit",
            of,
            key="limit",
        )
    ranking = read_run(of / RUN, whole.first(limit)).ranking
    top = slice(len(wanted.queries)), slice(min(options.top_n, ranking.depth))
    return Ranking(ranking.rows_QW[top], ranking.score_QW[top], min(options.top_n, ranking.depth))


def _answers(
    options: RagOptions, wanted: RetrievalSet, ranking: Ranking, references: Sequence[str], caller: Caller
) -> tuple[list[str | None], Counter[str]]:
    """An answer per query, "" for a blank or refused one, None without a reference; and what went wrong, counted."""
    side, counts = options.generator.max_side_px, Counter[str]()
    asked = [place for place, text in enumerate(references) if text]
    if without := len(references) - len(asked):
        counts["no reference answer, left out"] = without

    def shown(item: Item) -> list[Part]:
        return [
            Picture(ref, sha, side) for ref, sha in zip(item.pictures, picture_digests(item), strict=True)
        ]

    rows = {row for place in asked for row in ranking.rows_QW[place].tolist() if row >= 0}
    with CandidatesOf(wanted, rows) as pool:

        def request(place: int) -> Request:
            parts: list[Part] = []
            documents = [pool[row] for row in ranking.rows_QW[place].tolist() if row >= 0]
            for number, document in enumerate(documents, 1):
                parts += [
                    f"Document {number}:\n{(document.text or '')[: options.document_chars]}".rstrip(),
                    *shown(document),
                ]
            query = wanted.queries[place]
            parts += [
                f"Question:\n{query.text or 'What is shown?'}",
                *shown(query),
                ANSWER[0] + ANSWER[1] * bool(documents),
            ]
            return Request("generator", tuple(parts), max_tokens=options.answer_tokens)

        outcomes = caller.run(map(request, asked), read=answer_of, title="answers", total=len(asked))
    need_answers(outcomes, "the generator")
    answers: list[str | None] = [None] * len(references)
    for place, outcome in zip(asked, outcomes, strict=True):
        try:
            answers[place] = answer_of(outcome.answer())
        except ReplyError as error:
            answers[place] = ""
            counts[f"no answer ({error.kind}), scored 0"] += 1
    return answers, counts


def _scores(
    options: RagOptions, wanted: RetrievalSet, answers: Sequence[str | None], references: Sequence[str], judge: str,
    caller: Caller, counts: Counter[str],
) -> np.ndarray:  # fmt: skip
    """A judge's score of each query's answer, 0 to 1; NaN if it gave none. Adds to ``counts``."""
    score_Q = np.array([0.0 if answer == "" else np.nan for answer in answers])
    asked = [place for place, answer in enumerate(answers) if answer]

    def request(place: int) -> Request:
        texts = {
            "Question": wanted.queries[place].text or "(a picture)",
            "Reference answer": references[place],
            "Given answer": answers[place],
        }
        parts = [f"--- {name} ---\n{text}\n--- end ---" for name, text in texts.items()]
        return Request(judge, (*parts, SCALE), SYSTEM, max_tokens=options.judge_tokens, form=FORM)

    outcomes = caller.run(map(request, asked), read=score_of, title=f"scores by {judge}", total=len(asked))
    need_answers(outcomes, judge)
    for place, outcome in zip(asked, outcomes, strict=True):
        try:
            score_Q[place] = score_of(outcome.answer())
        except ReplyError as error:
            counts[f"no score by {judge} ({error.kind}), left out"] += 1
    if asked and np.isnan(score_Q[asked]).mean() > 0.5:
        raise UserError(
            "it gave no readable score for most answers: take another model, or raise judge_tokens",
            key=judge,
            kind="unreadable",
        )
    return score_Q

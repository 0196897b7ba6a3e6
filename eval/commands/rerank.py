"""Reorder the top of a ranking with a vision-language model.

    rge eval rerank of=DIR out=DIR judge=MODEL [ask=yes_no] [top_n=20] [mix=W]

``ask=yes_no`` takes any vision-language model, here or behind an endpoint (`rge.judging.yes_no`); ``ask=description`` one that was
trained to describe the right answer (`rge.judging.description`). Scores are cached by content, so a deeper or repeated run only
scores new pairs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.registry import protocol_for
from eval.benchmarks.suite import ByMember, is_suite, load_suite, measure_members, member_dirs
from eval.scoring.identity import ranked_with
from eval.scoring.measurement import Measurement
from eval.scoring.metrics import of_kinds
from eval.scoring.output_files import (
    PER_QUERY,
    RUN,
    check_measured_on,
    read_results,
    rerun_command,
    set_path,
)
from eval.scoring.protocol import Protocol
from eval.scoring.results import Made, Reranked, Results
from eval.scoring.search import Ranking
from eval.scoring.trec import read_run
from eval.sets.contents import CandidatesOf, with_readable_content
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.calls.model_config import ModelConfig
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.options import AtLeastOne, Count
from rge.common.registry import PluginOptions
from rge.common.schema import Item
from rge.judging.pairs import judgements
from rge.judging.scorer import SCORERS, Judge, Scorer
from rge.vectors.contents import content_digest
from rge.vectors.processes import ALONE, ProcessGroup, join

UNLIKE_SHARE = 0.5
"""Share of pairs above which a warning says that the judge answers something else than yes or no."""


@dataclass
class RerankOptions(PluginOptions):
    """Let a vision-language model reorder the top of a finished ranking, and score the result."""

    of: Path
    """Evaluation directory whose ranking is reordered (from `run`, `score`, `bm25` or `budget`; a set's or a suite's)."""
    out: Path
    """Output directory."""
    judge: str | None = None
    """Vision-language model: a directory or an id on the hub."""
    endpoint: ModelConfig | None = None
    """Or one behind an OpenAI-compatible endpoint with top_logprobs, see docs/data_prep.md for its keys."""
    ask: str = "yes_no"
    """What the judge is asked: yes_no (does the candidate satisfy the query?), description (by a judge that was trained
    for it), or your own scorer."""
    top_n: AtLeastOne = 20
    """Number of candidates per query that the judge sees."""
    mix: float | None = None
    """Add the judge's score times this to the ranking's own score, instead of replacing it; choose the value on other
    data."""
    set: Path | None = None
    """Current location of the retrieval set or suite; null: as in results.json."""
    cache: Path | None = None
    """Cache of scores; null: ``out/judge.sqlite``. Several runs can share one."""
    batch_size: AtLeastOne = 16
    """Pairs per forward pass."""
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of the judge's weights; null: float32 on CPU, bfloat16 on a GPU."""
    seed: Count = 0
    """Seed of the resampling."""
    overwrite: bool = False
    """Replace existing output of another ranking or judge."""


@dataclass(frozen=True)
class Judged:
    """A ranking from `reorder`, what it cost, and how many pairs have no score, by reason."""

    ranking: Ranking
    num_pairs: int
    unscored: dict[str, int]
    ms_Q: np.ndarray  # per query, the sum over its pairs of the mean time of a pair in its batch


def rerank_command(options: RerankOptions) -> Path:
    """Rerank a finished evaluation, write the outputs, and return their directory."""
    if (options.judge is None) == (options.endpoint is None):
        raise UserError("pass either judge=MODEL or endpoint.name=NAME with endpoint.base_url=ADDRESS").about(
            "judge", "endpoint"
        )
    make, old = SCORERS[options.ask], read_results(options.of)
    if options.endpoint is not None and join().size > 1:
        raise UserError(
            "an endpoint is asked by one process, which makes endpoint.concurrency calls at a time"
        )
    # only the first process stores scores
    answers = AnswerStore((options.cache or options.out / "judge.sqlite") if join().is_first else None)

    @cache
    def judge() -> Scorer:
        # loaded once for all members, and only after the cheap checks
        return make(
            Judge(options.judge, options.endpoint, options.batch_size, options.device, options.dtype, answers)
        )

    if old.suite:
        _rerank_suite(options, old, judge, answers)
    else:
        _rerank_set(options, judge, answers)
    answers.close()
    return options.out


def _rerank_suite(
    options: RerankOptions, old: Results, judge: Callable[[], Scorer], answers: AnswerStore
) -> None:
    path, of = set_path(old.set, options.set), member_dirs(options.of, old)
    if not is_suite(path) or load_suite(path).members.keys() != of.keys():
        raise UserError(
            f"it is not the suite that {options.of} was measured on: pass set=DIR", path, key="set"
        )

    def rerank_member(name: str, of_member: RerankOptions) -> list[Path]:
        _rerank_set(replace(of_member, of=of[name]), judge, answers)
        return [of_member.out]

    def about(results: ByMember) -> dict[str, Any]:
        blocks = [member.rerank for member in results.values() if member.rerank is not None]
        whole = blocks[0].but(
            of=str(options.of),
            num_pairs=sum(block.num_pairs for block in blocks),
            ms_mean=float(np.mean([block.ms_mean for block in blocks])),
            unscored=dict(sum((Counter(block.unscored) for block in blocks), Counter())),
            counts=dict(sum((Counter(block.counts) for block in blocks), Counter())),
            before={name: old.macro[name] for name in blocks[0].before if name in old.macro},
        )
        return {"rerank": whole, "budget": old.budget}

    measure_members(
        load_suite(path), options, rerank_member, title=f"top {options.top_n} of {options.of}", more=about
    )


def _rerank_set(options: RerankOptions, judge: Callable[[], Scorer], answers: AnswerStore) -> None:
    old = read_results(options.of)
    wanted = load_set(set_path(old.set, options.set), by=old.set.report_by)
    protocol = protocol_for(old.benchmark, old.profile, wanted, old.metrics)
    wanted, unread = with_readable_content(protocol.prepare(wanted))
    check_measured_on(wanted, old.set)
    wanted = wanted.first(old.set.limit)
    read = read_run(options.of / RUN, wanted)
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite, old.set.limit)
    tag = f"{read.tag}-judged"
    # "seed" is that of sampled rationales, unlike options.seed
    seed = old.seed if old.rerank is None else old.rerank.seed
    asked = Reranked(ask=options.ask, top_n=options.top_n, mix=options.mix, of=str(options.of), seed=seed)
    made = Made(
        **old.asked().as_json(),
        run_hash=old.run_hash,
        coverage=old.coverage,
        budget=old.budget,
        ranked_with=ranked_with(old),
        rerank=asked,
        tag=tag,
        depth=read.ranking.depth,
        warnings=[*old.warnings, *unread],
        again=rerun_command("rerank", options),
    )
    measurement.check_out(options.out, made)
    loaded, process_group = judge(), join()
    asked = asked.but(judge=loaded.name)
    made = made.but(rerank=asked)
    measurement.check_out(options.out, made)
    first, about = options.of, old
    while about.rerank is not None:  # whose output has no rationales
        first = Path(about.rerank.of)
        about = read_results(first)
        if (about.checkpoint_hash, about.run_hash) != (old.checkpoint_hash, old.run_hash):
            raise UserError(
                f"it was reordered by {options.of}, and holds another ranking now: rerank it again", first
            )
    rationales = pd.read_parquet(first / PER_QUERY).set_index("query_id")["rationale"].dropna()
    queries = wanted.query_items(old.query_modality or "both")  # without what the embedder did not see
    prepared = process_group.once(lambda: loaded.prepare(queries, rationales.to_dict(), answers))
    counted = dict(loaded.counts)
    judged = rerank(
        wanted,
        prepared,
        read.ranking,
        loaded,
        answers,
        top_n=options.top_n,
        chunk=8 * options.batch_size,
        process_group=process_group,
        mix=options.mix,
    )
    counts = {name: number - counted.get(name, 0) for name, number in loaded.counts.items()}
    counts = dict(sum(map(Counter, process_group.gather(counts)), Counter()))
    if not process_group.is_first:
        return
    before = {name: old.micro[name] for name in _compared(protocol, old)}
    made = made.but(
        warnings=[*made.warnings, *_warnings(judged, counts)],
        rerank=asked.but(
            num_pairs=judged.num_pairs,
            ms_mean=float(judged.ms_Q.mean()),
            unscored=judged.unscored,
            counts=counts,
            before=before,
        ),
    )
    results = measurement.write(
        options.out, judged.ranking, made, tag=tag,
        # a query without lines may also be one for which nothing was found, such as by BM25
        missing=read.missing if old.coverage < 1.0 else (),
        title=f"top {options.top_n} of {options.of}",
    )  # fmt: skip
    for name, figure in before.items():
        if after := results.micro.get(name):
            print(f"{name}: {figure['value']:.4f} before, {after['value']:.4f} after reranking", flush=True)


def _compared(protocol: Protocol, old: Results) -> list[str]:
    """Figures that are shown before and after: the protocol's headline, and those that are not means over queries."""
    own = [
        name for name in old.micro if name.startswith(("linguistic_sensitivity", "delta_map_capped_relative"))
    ]
    return [
        name for name in dict.fromkeys((*protocol.headline, *own, *of_kinds(old.micro))) if name in old.micro
    ]


def _warnings(judged: Judged, counts: Mapping[str, int]) -> list[str]:
    found = []
    if judged.unscored:
        words = ", ".join(f"{number} {why}" for why, number in sorted(judged.unscored.items()))
        found.append(
            f"{sum(judged.unscored.values())} of {judged.num_pairs} pairs have no score and rank below the scored ones: {words}"
        )
    if counts.get("unlike", 0) > UNLIKE_SHARE * counts.get("pairs", 0):
        found.append(
            f"the judge prefers other words to yes and no for {counts['unlike']} of {counts['pairs']} pairs: its scores may mean "
            "little"
        )
    return found


def rerank(
    wanted: RetrievalSet,
    queries: Sequence[Item],
    ranking: Ranking,
    judge: Scorer,
    answers: AnswerStore,
    *,
    top_n: int,
    chunk: int,
    process_group: ProcessGroup = ALONE,
    mix: float | None = None,
) -> Judged:
    """Score the best ``top_n`` candidates of every query and reorder them.

    ``queries``: one per query, from `Scorer.prepare`. ``mix``: see `reorder`. The others: see `rge.judging.pairs.judgements`.

    Returns:
        The same result in every process.
    """
    head_QN = ranking.rows_QW[:, : min(top_n, ranking.depth)]
    query_P, place_P = np.nonzero(head_QN >= 0)
    row_P = head_QN[query_P, place_P].astype(np.int64)
    with CandidatesOf(wanted, set(row_P.tolist())) as pool:
        values = judgements(
            judge,
            list(zip(query_P.tolist(), row_P.tolist(), strict=True)),
            queries,
            pool,
            answers,
            query_digests=list(map(content_digest, queries)),
            candidate_digests=pool.digests,
            chunk=chunk,
            process_group=process_group,
            place=lambda row: int(wanted.file_rows_C[row]),
            desc="reranking",
        )
    score_QN, ms_QN = np.full(head_QN.shape, -np.inf), np.zeros(head_QN.shape)
    score_QN[query_P, place_P] = [np.nan if value is None else value for value, _, _ in values]
    ms_QN[query_P, place_P] = [ms for _, ms, _ in values]
    unscored = Counter(str(why) for value, _, why in values if value is None)
    return Judged(reorder(ranking, score_QN, mix), len(values), dict(unscored), ms_QN.sum(axis=1))


def reorder(ranking: Ranking, score_QN: np.ndarray, mix: float | None = None) -> Ranking:
    """Reorder the first N ranks by new scores, with ties in the old order; ranks below do not change.

    Scores are -inf where there is no candidate, and NaN for candidates without a score, which rank below all others of the N.
    ``mix``: factor with which new scores are added to the old ones; None: they replace them. Scores of the result are
    float64; those below rank N are shifted as a whole below the new ones and -1.
    """
    num = score_QN.shape[1]
    if mix is not None:
        known_QN, score_QN = np.isfinite(score_QN), score_QN.astype(np.float64)
        score_QN[known_QN] = ranking.score_QW[:, :num][known_QN] + mix * score_QN[known_QN]
    worst = np.min(score_QN, initial=0.0, where=np.isfinite(score_QN)) - 1.0
    score_QN = np.where(np.isnan(score_QN), worst, score_QN)
    order = np.argsort(-score_QN, axis=1, kind="stable")
    old_QW = ranking.score_QW.astype(np.float64)
    old_K = old_QW[np.isfinite(old_QW)]
    highest = old_K.max() if old_K.size else 0.0
    rows_QW = np.concatenate(
        [np.take_along_axis(ranking.rows_QW[:, :num], order, axis=1), ranking.rows_QW[:, num:]], axis=1
    )
    lowest = np.min(score_QN, initial=-1.0, where=np.isfinite(score_QN))
    moved_QW = old_QW[:, num:] - (highest - lowest + 1.0)  # at most -2
    score_QW = np.concatenate([np.take_along_axis(score_QN, order, axis=1), moved_QW], axis=1)
    return Ranking(rows_QW, score_QW, ranking.depth)

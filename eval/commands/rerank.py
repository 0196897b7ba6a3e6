"""Reorder the top of a ranking with a vision-language model that describes the right answer.

    rge eval rerank of=DIR out=DIR judge=DIR [top_n=20] [mix=0.05]

The judge describes the right answer once per query, and a candidate's score is the log-likelihood of that description given
the candidate (`eval.judging.description`). Scores are cached by content, so a deeper or repeated run only scores new pairs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.registry import protocol_for
from eval.benchmarks.suite import ByMember, is_suite, load_suite, measure_members, member_dirs
from eval.commands.measurement import Measurement
from eval.embedding.identity import ranked_with
from eval.embedding.processes import ALONE, ProcessGroup, join
from eval.judging.description import QUESTION, DescriptionJudge, local_software
from eval.scoring.output_files import (
    PER_QUERY,
    RUN,
    check_measured_on,
    read_results,
    rerun_command,
    set_path,
)
from eval.scoring.search import Ranking
from eval.scoring.trec import read_run
from eval.sets.contents import content_digest, with_readable_content
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.calls.store import AnswerStore, value_key
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.options import AtLeastOne, Count
from rge.common.registry import PluginOptions
from rge.common.schema import Item

KEPT = (
    "query_mode", "query_modality", "candidate_mode", "checkpoint", "checkpoint_hash", "model", "rewrite", "prompts",
    "settings", "decoding", "dtype", "exact", "embedding_dims", "asked_as_released", "run_hash", "coverage", "budget",
)  # fmt: skip
"""Keys of results.json that are copied from the first ranking."""
VERSION = 1
"""Version of the prompt wording; part of every cache key."""


@dataclass
class RerankOptions(PluginOptions):
    """Let a vision-language model reorder the top of a finished ranking, and score the result."""

    of: Path
    """Evaluation directory whose ranking is reordered (from `run`, `score`, `bm25` or `budget`; a set's or a suite's)."""
    out: Path
    """Output directory."""
    judge: str
    """Vision-language model that was trained to describe (`records`): a directory or an id on the hub."""
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
    """A ranking from `reorder`, and what it cost."""

    ranking: Ranking
    num_pairs: int
    ms_Q: np.ndarray  # per query, the sum over its pairs of the mean time of a pair in its batch


def rerank_command(options: RerankOptions) -> Path:
    """Rerank a finished evaluation, write the outputs, and return their directory."""
    old = read_results(options.of)

    @cache
    def judge() -> DescriptionJudge:
        # loaded once for all members, and only after the cheap checks
        return DescriptionJudge(
            options.judge, batch_size=options.batch_size, device=options.device, dtype=options.dtype
        )

    # only the first process stores scores
    answers = AnswerStore((options.cache or options.out / "judge.sqlite") if join().is_first else None)
    if old.get("suite"):
        _rerank_suite(options, old, judge, answers)
    else:
        _rerank_set(options, judge, answers)
    answers.close()
    return options.out


def _rerank_suite(
    options: RerankOptions, old: dict[str, Any], judge: Callable[[], DescriptionJudge], answers: AnswerStore
) -> None:
    path, of = set_path(old, options.set), member_dirs(options.of, old)
    if not is_suite(path) or load_suite(path).members.keys() != of.keys():
        raise UserError(f"{path} is not the suite that {options.of} was measured on: pass set=DIR")

    def rerank_member(name: str, of_member: RerankOptions) -> list[Path]:
        _rerank_set(replace(of_member, of=of[name]), judge, answers)
        return [of_member.out]

    def about(results: ByMember) -> dict[str, Any]:
        blocks = [member["rerank"] for member in results.values()]
        total = sum(block["num_pairs"] for block in blocks)
        mean = float(np.mean([block["ms_mean"] for block in blocks]))
        point = {"budget": old["budget"]} if "budget" in old else {}
        return point | {"rerank": blocks[0] | {"of": str(options.of), "num_pairs": total, "ms_mean": mean}}

    measure_members(
        load_suite(path), options, rerank_member, title=f"top {options.top_n} of {options.of}", more=about
    )


def _rerank_set(options: RerankOptions, judge: Callable[[], DescriptionJudge], answers: AnswerStore) -> None:
    old = read_results(options.of)
    wanted = load_set(set_path(old, options.set), by=old["set"].get("report_by", ()))
    protocol = protocol_for(old.get("benchmark", "generic"), old["profile"], wanted, old.get("metrics", ()))
    wanted, unread = with_readable_content(protocol.prepare(wanted))
    check_measured_on(wanted, old)
    limit = old["set"].get("limit")
    wanted = wanted.first(limit)
    read = read_run(options.of / RUN, wanted)
    measurement = Measurement(wanted, protocol, options.seed, options.overwrite, limit)
    tag = f"{read.tag}-judged"
    # "seed" is that of sampled rationales, unlike options.seed
    seed = (old.get("rerank") or old).get("seed", old.get("seed"))
    asked = {"top_n": options.top_n, "mix": options.mix, "of": str(options.of), "seed": seed}
    made = {key: old[key] for key in KEPT if key in old} | {
        "ranked_with": ranked_with(old),
        "rerank": asked,
        "tag": tag,
        "depth": read.ranking.depth,
        "warnings": [*old.get("warnings", []), *unread],
        "again": rerun_command("rerank", options),
    }
    measurement.check_out(options.out, made)
    loaded, process_group = judge(), join()
    made["rerank"] = asked | {"judge": loaded.name, "question": QUESTION}
    measurement.check_out(options.out, made)
    first, about = options.of, old
    while about.get("rerank"):  # whose output has no rationales
        first = Path(about["rerank"]["of"])
        about = read_results(first)
        if any(about.get(key) != old.get(key) for key in ("checkpoint_hash", "run_hash")):
            raise UserError(
                f"{first}, which {options.of} reordered, holds another ranking now: rerank it again"
            )
    rationales = pd.read_parquet(first / PER_QUERY).set_index("query_id")["rationale"].dropna()
    queries = wanted.query_items(old.get("query_modality") or "both")  # without what the embedder did not see
    texts = [Item(query.id, text=rationales.get(query.id) or query.text) for query in queries]
    judged = rerank(
        wanted,
        process_group.once(lambda: loaded.describe(texts, answers)),
        read.ranking,
        loaded,
        answers,
        top_n=options.top_n,
        chunk=8 * options.batch_size,
        process_group=process_group,
        mix=options.mix,
    )
    if not process_group.is_first:
        return
    made["rerank"] |= {"num_pairs": judged.num_pairs, "ms_mean": float(judged.ms_Q.mean())}
    measurement.write(
        options.out, judged.ranking, made, tag=tag,
        # a query without lines may also be one for which nothing was found, such as by BM25
        missing=read.missing if old.get("coverage", 1.0) < 1.0 else (),
        title=f"top {options.top_n} of {options.of}",
    )  # fmt: skip


def rerank(
    wanted: RetrievalSet,
    descriptions: Sequence[Item],
    ranking: Ranking,
    judge: DescriptionJudge,
    answers: AnswerStore,
    *,
    top_n: int,
    chunk: int,
    process_group: ProcessGroup = ALONE,
    mix: float | None = None,
) -> Judged:
    """Score the best ``top_n`` candidates of every query and reorder them.

    Pairs without a cached score are distributed in chunks, in file order of the candidates. After every round of one chunk
    per process, the first process stores all new scores, so a kill loses at most one round.

    ``descriptions``: one per query, scored after each candidate. ``answers``: cache of scores; only that of the first
    process is used. ``chunk``: pairs scored between saves. ``mix``: see `reorder`. The first process shows
    the progress of all.

    Returns:
        The same result in every process.
    """
    head_QN = ranking.rows_QW[:, : min(top_n, ranking.depth)]
    query_P, place_P = np.nonzero(head_QN >= 0)
    row_P = head_QN[query_P, place_P].astype(np.int64)
    software = process_group.once(lambda: local_software(answers))
    about = {"version": VERSION, "question": QUESTION} | judge.name | {"software": software}
    keys = process_group.once(lambda: _keys(wanted, descriptions, query_P, row_P, about))
    unique = list(dict.fromkeys(keys))
    known: dict[str, Any] = process_group.once(lambda: answers.get_values(unique))
    pairs = zip(query_P.tolist(), row_P.tolist(), strict=True)
    todo = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}
    order = sorted(todo, key=lambda key: int(wanted.file_rows_C[todo[key][1]]))
    # smaller chunks if there are few pairs, so that no process is idle
    chunk = max(min(chunk, -(-len(order) // process_group.size)), 1)
    parts = [order[start : start + chunk] for start in range(0, len(order), chunk)]
    scored = _scored(wanted, descriptions, judge, todo, parts[process_group.rank :: process_group.size])
    bar = progress_bar(
        total=len(unique),
        initial=len(known),
        desc="reranking",
        unit="pair",
        disable=not process_group.is_first,
    )
    with bar:
        for _ in range(-(-len(parts) // process_group.size)):  # gather is collective
            for scores in process_group.gather(next(scored, {})):
                if process_group.is_first and scores:
                    answers.put_values(scores)
                known |= scores
                bar.update(len(scores))
    score_QN, ms_QN = np.full(head_QN.shape, -np.inf), np.zeros(head_QN.shape)
    score_QN[query_P, place_P] = [known[key][0] for key in keys]
    ms_QN[query_P, place_P] = [known[key][1] for key in keys]
    return Judged(reorder(ranking, score_QN, mix), len(keys), ms_QN.sum(axis=1))


def _scored(
    wanted: RetrievalSet,
    descriptions: Sequence[Item],
    judge: DescriptionJudge,
    todo: Mapping[str, tuple[int, int]],
    parts: Sequence[Sequence[str]],
) -> Iterator[dict[str, list[float]]]:
    """Yield {key: [score, mean milliseconds]} for each part; keys are in file order of the candidates, which are read once."""
    items = enumerate(wanted.corpus_items())
    at, item = next(items)
    for part in parts:
        pairs = []
        for query, row in map(todo.__getitem__, part):
            while at < wanted.file_rows_C[row]:
                at, item = next(items)
            pairs.append((descriptions[query], item))
        began = time.perf_counter()
        scores = judge.score(pairs)
        ms = (time.perf_counter() - began) * 1000 / len(pairs)
        yield {key: [score, ms] for key, score in zip(part, scores, strict=True)}


def reorder(ranking: Ranking, score_QN: np.ndarray, mix: float | None = None) -> Ranking:
    """Reorder the first N ranks by new scores (-inf for none), with ties in the old order; ranks below do not change.

    ``mix``: factor with which new scores are added to the old ones; None: they replace them. Scores of the result are
    float64; those below rank N are shifted as a whole below the new ones and -1.
    """
    num = score_QN.shape[1]
    if mix is not None:
        score_QN = np.where(np.isfinite(score_QN), ranking.score_QW[:, :num] + mix * score_QN, score_QN)
    order = np.argsort(-score_QN, axis=1, kind="stable")
    old_QW = ranking.score_QW.astype(np.float64)
    highest = np.max(old_QW, initial=-np.inf, where=np.isfinite(old_QW))
    rows_QW = np.concatenate(
        [np.take_along_axis(ranking.rows_QW[:, :num], order, axis=1), ranking.rows_QW[:, num:]], axis=1
    )
    lowest = np.min(score_QN, initial=-1.0, where=np.isfinite(score_QN))
    moved_QW = old_QW[:, num:] - (highest - lowest + 1.0)  # at most -2
    score_QW = np.concatenate([np.take_along_axis(score_QN, order, axis=1), moved_QW], axis=1)
    return Ranking(rows_QW, score_QW, ranking.depth)


def _keys(
    wanted: RetrievalSet,
    queries: Sequence[Item],
    query_P: np.ndarray,
    row_P: np.ndarray,
    about: dict[str, Any],
) -> list[str]:
    """Cache keys of the pairs: hashes of the judge's input and settings."""
    needed, items = set(row_P.tolist()), zip(wanted.file_order_C.tolist(), wanted.corpus_items(), strict=True)
    digest_of = {row: content_digest(item) for row, item in items if row in needed}
    query_digests = list(map(content_digest, queries))
    return [
        value_key(about, query_digests[query], digest_of[row])
        for query, row in zip(query_P.tolist(), row_P.tolist(), strict=True)
    ]

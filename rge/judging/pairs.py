"""Scores of many pairs: each scored once, stored as they come, and shared by all processes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeVar

from rge.calls.store import AnswerStore, value_key
from rge.common.commands import progress_bar
from rge.common.schema import Item
from rge.judging.scorer import Score, Scorer, local_software
from rge.vectors.processes import ALONE, ProcessGroup

T_co = TypeVar("T_co", covariant=True)
Pair = tuple[int, int]
"""Numbers of a query and of a candidate."""


class ByNumber(Protocol[T_co]):
    """A list, a mapping from numbers, or anything else that is read by number."""

    def __getitem__(self, number: int, /) -> T_co:
        """The one with this number."""


class Judgement(NamedTuple):
    """A pair's score, or None; the mean time of a pair in its batch, milliseconds; and why there is no score."""

    value: float | None
    ms: float
    why: str | None


def judgements(
    judge: Scorer,
    pairs: Sequence[Pair],
    queries: ByNumber[Item],
    candidates: ByNumber[Item],
    answers: AnswerStore,
    *,
    query_digests: ByNumber[str],
    candidate_digests: ByNumber[str],
    chunk: int,
    process_group: ProcessGroup = ALONE,
    place: Callable[[int], int] = int,
    desc: str = "judging",
) -> list[Judgement]:
    """Score pairs, in their order.

    Pairs without a stored score are distributed in chunks, ordered by what the judge's prompt begins with. After every round of one
    chunk per process, the first process stores all new scores, so a kill loses at most one round.

    Args:
        judge: the model.
        pairs: those of one query in a row.
        queries: those from `Scorer.prepare`.
        candidates: read only for pairs that are scored.
        answers: stored scores; only those of the first process are used.
        query_digests: hashes of the queries' contents, see `rge.vectors.contents.content_digest`.
        candidate_digests: the same of the candidates.
        chunk: pairs scored between saves; pairs of one query stay together.
        process_group: the first process shows the progress of all.
        place: where a candidate is in its file.
        desc: label of the progress bar.

    Returns:
        The same result in every process.
    """
    software = process_group.once(lambda: local_software(answers) if judge.local else None)
    about = judge.name | {"software": software}
    keys = [value_key(about, query_digests[one], candidate_digests[other]) for one, other in pairs]
    unique = list(dict.fromkeys(keys))
    known: dict[str, Any] = process_group.once(lambda: answers.get_values(unique))
    todo = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}
    parts = _parts(todo, judge, chunk, process_group.size, place)
    scored = _scored(queries, candidates, judge, todo, parts[process_group.rank :: process_group.size])
    bar = progress_bar(
        total=len(unique), initial=len(known), desc=desc, unit="pair", disable=not process_group.is_first
    )
    with bar:
        for _ in range(-(-len(parts) // process_group.size)):  # gather is collective
            for scores in process_group.gather(next(scored, {})):
                if process_group.is_first and scores:
                    answers.put_values(scores)
                known |= scores
                bar.update(len(scores))
    return [Judgement(*known[key]) for key in keys]


def _parts(
    todo: Mapping[str, Pair], judge: Scorer, chunk: int, num_processes: int, place: Callable[[int], int]
) -> list[list[str]]:
    """Keys of the pairs to score, in chunks: of whole queries, or in the candidates' file order."""
    # smaller chunks if there are few pairs, so that no process is idle
    chunk = max(min(chunk, -(-len(todo) // num_processes)), 1)
    if judge.first == "candidate":
        order = sorted(todo, key=lambda key: place(todo[key][1]))
        return [order[start : start + chunk] for start in range(0, len(order), chunk)]
    parts: list[list[str]] = []
    for _, of_query in groupby(todo, key=lambda key: todo[key][0]):
        if not parts or len(parts[-1]) >= chunk:
            parts.append([])
        parts[-1] += of_query
    return parts


def _scored(
    queries: ByNumber[Item],
    candidates: ByNumber[Item],
    judge: Scorer,
    todo: Mapping[str, Pair],
    parts: Sequence[Sequence[str]],
) -> Iterator[dict[str, list[Any]]]:
    """Yield {key: [score or None, mean milliseconds, why there is none]} for each part."""
    for part in parts:
        pairs = [(queries[one], candidates[other]) for one, other in map(todo.__getitem__, part)]
        began = time.perf_counter()
        scores: list[Score] = judge.score(pairs)
        ms = (time.perf_counter() - began) * 1000 / len(pairs)
        yield {key: [score.value, ms, score.why] for key, score in zip(part, scores, strict=True)}

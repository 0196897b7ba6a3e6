"""Read and check finished evaluation directories, the input of the pages."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from eval.scoring.identity import set_mismatch
from eval.scoring.output_files import (
    PER_QUERY,
    RESULTS,
    RUN,
    check_measured_on,
    read_results,
    set_path,
)
from eval.scoring.results import Made, Results
from eval.sets.contents import with_readable_content
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.stats.intervals import FEW_GROUPS, few_groups

BUDGET = "budget.json"
BASES: tuple[Mode, ...] = ("direct", "reasoning")
"""The two base points of an output of `budget`, which are evaluations of one checkpoint as a whole."""
QUERY_COLUMN, TOP_COLUMN, RANK_COLUMN = "query_id", "top10", "first_hit_rank"
_MODES = {  # query_mode -> order in the table, explanation
    "direct": (5, "no rationale"),
    "auto": (8, "a rationale where the model wants one"),
    "reasoning": (9, "writes a rationale first"),
}
_WITHHELD = {"text": ("Question only", "picture withheld"), "image": ("Image only", "question withheld")}
_FOREIGN_ORDER, _BASELINE_ORDER = 6, 7


@dataclass(frozen=True)
class Figure:
    """A value with its 95 % interval, as fractions; the bounds are None if there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation directory, with per_query.parquet indexed by query id; a baseline is another checkpoint."""

    directory: Path
    label: str
    note: str
    order: int
    is_baseline: bool
    results: Results
    per_query: pd.DataFrame

    @property
    def mode(self) -> tuple[str, str]:
        """Query mode and query modality; both ``None`` for a ranking that is not the embedder's own: external or reranked."""
        if self.results.rerank is not None:
            return "None", "None"
        return str(self.results.query_mode), str(self.results.query_modality)

    @property
    def reported_by(self) -> list[str]:
        """Query columns that it reports figures by."""
        return list(self.results.by)

    def mean(self, column: str) -> float | None:
        """Mean of a column of per_query.parquet, such as ``embed_ms``; None if it has no values."""
        values = self.per_query[column] if column in self.per_query else None
        return None if values is None or values.isna().all() else float(values.mean())

    def names(self, block: str) -> list[str]:
        """Keys of a block of results.json (metrics, or values of a column); empty if there is no such block."""
        return list(self.results.look_up([block]) or {})

    def figure(self, *path: str) -> Figure | None:
        """The figure at a path of keys of results.json; None if that slice or metric was not computed."""
        entry = self.results.look_up(path)
        if entry is None:
            return None
        if not isinstance(entry, Mapping):
            entry = {"value": entry}
        given = [number for key in ("low", "high") if (number := entry.get(key)) is not None]
        if not all(isinstance(number, int | float) for number in (entry.get("value"), *given)):
            raise UserError(f"it must be a number, got {entry}", self.directory / RESULTS, key=".".join(path))
        return Figure(entry["value"], entry.get("low"), entry.get("high"))


def labelled(word: str) -> tuple[str, Path]:
    """The parts of LABEL:DIR; "" without a label."""
    label, colon, directory = word.partition(":")
    return (label, Path(directory)) if colon and not Path(word).exists() else ("", Path(word))


def read_evaluations(runs: Sequence[str]) -> list[Evaluation]:
    """Read evaluation directories, or those in them, in the order of the table: ablations, direct, baselines, reasoning.

    Baselines are LABEL:DIR, and evaluations of another checkpoint than the featured one.
    """
    own, baselines = dict[Path, Evaluation](), list[Evaluation]()
    for label, directory in map(labelled, runs):
        inner = expand(directory)
        if label:  # of several, the message lists the names
            one = read_evaluation(inner[0] if len(inner) == 1 else directory)
            baselines.append(_as_baseline(one, label))
        else:
            own |= {path: read_evaluation(path) for path in inner}
    counts = Counter(one.label for one in own.values())
    known = featured([*own.values(), *baselines]).results.checkpoint_hash
    evaluations = []
    for path, one in own.items():
        label = one.label if counts[one.label] == 1 else f"{one.label} · {path.parent.name}/{path.name}"
        is_ours = known is None or one.results.checkpoint_hash in (None, known)
        evaluations.append(replace(one, label=label) if is_ours else _as_baseline(one, label))
    evaluations += baselines
    (label, num) = Counter(one.label for one in evaluations).most_common(1)[0]
    if num > 1:
        raise UserError("labels of evaluations must be unique, and this one is there twice", key=label)
    return sorted(evaluations, key=lambda one: one.order)


def _as_baseline(one: Evaluation, label: str) -> Evaluation:
    apart = [words for words in ways_of(one.results) if words != one.results.query_mode]
    note = ", ".join(["other checkpoint", one.label.lower(), *apart])
    return replace(one, label=label, note=note, order=_BASELINE_ORDER, is_baseline=True)


def expand(directory: Path) -> list[Path]:
    """The directory itself if it is an evaluation or holds none, else the evaluations in it; of `budget` the base points."""
    if not directory.is_dir():
        raise UserError("it is not a folder: pass the output of `rge eval run`", directory)
    if (directory / BUDGET).exists():
        return [directory / name for name in BASES]

    def holds(folder: Path, *files: str) -> bool:
        return any((folder / name).exists() for name in files)

    if holds(directory, RESULTS, PER_QUERY):
        return [directory]
    return sorted(child for child in directory.iterdir() if holds(child, RESULTS, PER_QUERY, RUN)) or [
        directory
    ]


def read_evaluation(directory: Path) -> Evaluation:
    """Read one evaluation directory; a UserError if it is incomplete or inconsistent."""
    results = read_results(directory)
    mode = results.query_mode
    order, label, note = _FOREIGN_ORDER, results.tag or directory.name, "external ranking"
    if mode is not None:
        order, label, note = _condition(mode, results.query_modality or "both")
    way, *more = ways_of(results)
    if mode is not None and way != mode:
        note = f"point {way} of a budget"
    if judged := results.rerank:
        order, label, note = _FOREIGN_ORDER, f"{label}, reranked", "" if way == mode else note
        more[-1:] = [f"top {judged.top_n} reordered by a judge"]
    note = ", ".join(filter(None, [note, *more]))
    per_query = _per_query(directory / PER_QUERY)
    return Evaluation(directory, label, note, order, False, results, per_query)


def _condition(mode: str, modality: str) -> tuple[int, str, str]:
    """Order in the table, label and explanation of an evaluation of our own, possibly by another version."""
    if mode not in _MODES or modality not in (*_WITHHELD, "both"):
        return _FOREIGN_ORDER, f"{mode} · {modality}", "see the end of the page"
    (order, note), writes = _MODES[mode], mode == "reasoning"
    if modality == "both":
        return order, mode.capitalize(), note if writes else f"{note}, same checkpoint"
    label, withheld = _WITHHELD[modality]
    order = (1 if writes else 3) + (modality == "image")
    return (order, label, withheld) if writes else (order, f"{label}, {mode}", f"{withheld}, {note}")


def _per_query(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path).set_index(QUERY_COLUMN, verify_integrity=True)
        table[[RANK_COLUMN, TOP_COLUMN]]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"it cannot be read: {error}; run the evaluation again", path) from error
    return table


def check_one_set(evaluations: Sequence[Evaluation]) -> None:
    """Raise a `UserError` for evaluations of different retrieval sets, protocols or queries."""
    first, *others = evaluations
    for other in others:
        if mismatch := set_mismatch(first.results.set, other.results.set):
            key, why = mismatch
            raise UserError(
                f"it was measured on {other.results.set.name}, {first.directory} on {first.results.set.name}"
                f": different retrieval sets ({why}), whose figures are not comparable",
                other.directory,
                key=key,
            )
        for key in ("benchmark", "profile"):
            expected, value = (getattr(evaluation.results, key) for evaluation in (first, other))
            if expected != value:
                raise UserError(
                    f"it is {value!r}, but {expected!r} in {first.directory}, so figures are not comparable",
                    other.directory,
                    key=key,
                )
        missing = first.per_query.index.symmetric_difference(other.per_query.index)
        if len(missing):
            raise UserError(
                f"{first.directory} has {len(first.per_query)} queries, {other.directory} {len(other.per_query)}"
                f"; this one is only in one of them. Was one run with limit=?",
                other.directory,
                missing[0],
            )


def featured(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation whose examples are shown: reasoning with picture and question, else the closest to it."""
    own = [one for one in evaluations if not one.is_baseline]
    return max(own or evaluations, key=lambda one: (one.mode[0] == "reasoning", one.mode[1] == "both"))


def compared(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Rows of the main table: leaves out direct shortcut ablations (text or image only) if the reasoning ones exist."""
    reasoned = {one.mode[1] for one in evaluations if one.mode[0] == "reasoning" and not one.is_baseline}
    redundant = {("direct", modality) for modality in reasoned - {"both"}}
    return [one for one in evaluations if one.is_baseline or one.mode not in redundant]


def set_of(main: Evaluation, given: Path | None) -> RetrievalSet:
    """The retrieval set of an evaluation; a UserError if it does not exist, or has changed since."""
    loaded, _ = with_readable_content(load_set(set_path(main.results.set, given)))
    check_measured_on(loaded, main.results.set)
    return loaded


def warnings_of(evaluations: Sequence[Evaluation]) -> list[str]:
    """Warnings for readers of the figures, without repeats, with labels if they do not apply to all evaluations."""
    labels_of: dict[str, list[str]] = defaultdict(list)
    for one in evaluations:
        for warning in dict.fromkeys(caveats(one.results)):
            labels_of[warning].append(one.label)
    return [
        warning if len(labels) == len(evaluations) else f"{', '.join(labels)}: {warning}"
        for warning, labels in labels_of.items()
    ]


def caveats(results: Results) -> Iterator[str]:
    """Warnings for readers of the figures of one evaluation."""
    yield from results.warnings
    if results.coverage < 1:
        yield f"the ranking covers {100 * results.coverage:.4g} % of the queries"
    if limit := results.set.limit:
        yield f"only the first {limit:,} queries were evaluated"
    num_groups = results.set.num_groups
    if caution := few_groups(FEW_GROUPS if num_groups is None else num_groups):
        yield caution


def ways_of(made: Made) -> Iterator[str]:
    """How a ranking was made: its query mode or point of `budget`, and what else sets it apart."""
    yield (made.budget and made.budget.name) or made.query_mode or "external ranking"
    if made.rewrite is not None:
        yield f"rewrite={made.rewrite.kind}"
    if made.embedding_dims:
        yield f"embedding_dims={made.embedding_dims}"
    if made.candidate_mode == "reasoning":
        yield "candidate_mode=reasoning"
    if made.rerank is not None:
        yield f"top {made.rerank.top_n} reranked"


def name_of(run: Evaluation) -> str:
    """Name of the model behind an evaluation that has no label."""
    name = (run.results.model and run.results.model.name) or run.results.checkpoint
    if not name:
        return run.results.tag or run.directory.name
    parts = [part for part in Path(name).parts if part not in ("final", "/")]
    return "/".join(parts[-2:])


def note_of(run: Evaluation) -> str:
    """How an evaluation was made, in words."""
    modality = run.results.query_modality
    withheld = [] if modality in (None, "both") else [f"query {modality} only"]
    return ", ".join([*ways_of(run.results), *withheld])

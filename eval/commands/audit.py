"""Audit for leaks: has training seen the test set?

    rge eval audit set=DIR train=SOURCE[,SOURCE]
    rge eval audit evals=DIR[,DIR]    # shortcuts, see `shortcut_rates`

Two pictures count as the same if their bytes are equal, or their ids if these have eight or more characters (a re-encoded copy
has different bytes). Half of Visual Genome's pictures are also in COCO; if the importer recorded that (``names.parquet``),
training pictures whose file names end in COCO's twelve digits are recognised. `eval.commands.run` does this automatically with
the sources listed in the checkpoint's ``rge.json``. All members of a suite are audited.
"""

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.benchmarks.published_tables import TRAINED
from eval.benchmarks.suite import is_suite, load_suite
from eval.pages.evaluations import Evaluation, check_one_set, expand, read_evaluation
from eval.scoring.output_files import PER_QUERY
from eval.sets.retrieval_set import MODALITIES, NAMES, RetrievalSet, load_set, picture_ids
from eval.sets.tables import optional_rows
from rge.checkpoints.settings import Settings, TrainedStage
from rge.common.errors import UserError
from rge.common.files import find_shipped
from rge.common.images import ImageError, picture_bytes
from rge.common.parts import Content, ImageRef, pictures_of, text_of
from rge.common.registry import PluginOptions
from rge.common.schema import Item
from rge.data.config import JSON_FILES, OTHER_FILES, RecordsConfig
from rge.data.sources import Records
from rge.stats.intervals import cluster_bootstrap, figures, index_of

MAX_NAMED = 3
"""Training files that a warning names."""
MIN_ID_LENGTH = 8
"""Minimum length of an id that is considered unique across data sets."""


@dataclass
class AuditOptions(PluginOptions):
    """Search training files for a set's pictures, or finished evaluations for shortcuts."""

    set: Path | None = None
    """Retrieval set directory or suite, with train=."""
    train: tuple[str, ...] = ()
    """Training records to search for the set's pictures: files, also tables and compressed ones, folders, or names of data
    sets, as a source's `path` or `dataset`."""
    evals: tuple[str, ...] = ()
    """Evaluations of one set with query_modality=both,text,image, to search for shortcuts."""
    metric: str = "hit@1"
    """With evals=: metric that is above zero for a query that was answered."""


@dataclass(frozen=True)
class Audit:
    """What a set shares with training files: counts for results.json, and warnings."""

    content: dict[str, Any]
    warnings: list[str]


@dataclass
class _Seen:
    """Content of training records: pictures by hash or id, and (picture, text) and (picture, target) pairs."""

    queries: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    asked: set[tuple[str, str]] = field(default_factory=set)
    answered: set[tuple[str, str]] = field(default_factory=set)
    num_records: int = 0
    warnings: list[str] = field(default_factory=list)
    not_searched: dict[str, str] = field(default_factory=dict)  # why, by source


COUNTED = {
    "query_images": "query pictures are in the training records",
    "candidate_images": None,
    "positive_images": "right answers' pictures are targets in the training records",
    "query_pairs": "queries (picture and text) are training queries",
    "answer_pairs": "queries have a picture and a right answer that training paired",
}
"""Keys of the counts, and what a count above zero warns of."""


def audit_command(options: AuditOptions) -> Any:
    """Audit a set or evaluations, and print what was found."""
    if options.evals and not options.train:
        return _evaluations(options)
    if options.evals or not options.train or options.set is None:
        raise UserError("give either set=DIR train=FILE,... or evals=DIR,...").about("set", "train", "evals")
    sources = [_source(name) for name in options.train]
    suite = is_suite(options.set)
    names = load_suite(options.set).members if suite else [""]
    audits = {name: audit_training(load_set(options.set / name), sources) for name in names}
    content = {name: audit.content for name, audit in audits.items()}
    warnings = [
        f"{name}: {line}".removeprefix(": ") for name, audit in audits.items() for line in audit.warnings
    ]
    print(json.dumps(content if suite else content[""], indent=1))
    print("\n".join(warnings or ["nothing is shared"]))
    return audits if suite else audits[""]


def _evaluations(options: AuditOptions) -> dict[str, Any]:
    of_mode: dict[str, list[Evaluation]] = defaultdict(list)
    for path in dict.fromkeys(path for word in options.evals for path in expand(Path(word))):
        evaluation = read_evaluation(path)
        of_mode[str(evaluation.results.query_mode)].append(evaluation)
    content = {
        "shortcuts": {
            mode: shortcut_rates(of_modality, options.metric)
            for mode, of_modality in of_mode.items()
            if {one.results.query_modality for one in of_modality}.issuperset(MODALITIES)
        }
    }
    if not content["shortcuts"]:
        raise UserError(
            "it needs evaluations with query_modality=both,text,image in one query mode", key="evals"
        )
    print(json.dumps(content, indent=1, ensure_ascii=False))
    return content


def shortcut_rates(evaluations: Sequence[Evaluation], metric: str) -> dict[str, Any]:
    """Shares of queries that can be answered without their picture or without their text.

    ``evaluations``: of one set and checkpoint in one mode, with ``query_modality`` both, text and image. ``metric``: a query
    counts as answered if this is above zero, such as ``hit@1`` or ``recall@20``.

    Returns:
        Shares of all queries with 95 % intervals: answered with ``both``, with ``text`` alone, ``image`` alone, with
        ``either`` of the two alone; ``needs_both`` is answered with both but with neither alone.

    Raises:
        UserError: a modality is missing or repeated, or the evaluations do not belong together.
    """
    check_one_set(evaluations)
    tables = {str(one.results.query_modality): one.per_query for one in evaluations}
    same = {(one.results.checkpoint_hash, one.results.query_mode) for one in evaluations}
    if tables.keys() != {*MODALITIES} or len(evaluations) > len(tables) or len(same) > 1:
        shown = (f"{one.directory} ({one.results.query_modality})" for one in evaluations)
        raise UserError(
            "shortcuts need three evaluations of one set, checkpoint and query mode, with both,text,image"
            f"; got {', '.join(shown)}",
            key="query_modality",
        )
    for one in evaluations:
        if metric not in one.per_query or not pd.api.types.is_numeric_dtype(one.per_query[metric]):
            raise UserError(
                f"it must be a column of numbers, got {metric!r}", one.directory / PER_QUERY, key="metric"
            )
    solved = pd.DataFrame({name: table[metric] for name, table in tables.items()}).dropna() > 0
    either = solved["text"] | solved["image"]
    shares = solved.assign(either=either, needs_both=solved["both"] & ~either)
    groups = tables["both"].loc[shares.index, "group"]
    means = cluster_bootstrap(shares.to_numpy(np.float64), index_of(groups.tolist()), seed=0)
    of_shares = dict(zip(shares.columns, figures(means, (0.0, 1.0)), strict=True))
    return {"metric": metric, "num_queries": len(shares), **of_shares}


def audit_run(wanted: RetrievalSet, train: Sequence[str], settings: Settings) -> Audit | None:
    """Audit the records that ``train=`` of `eval.commands.run` names; None without any.

    ``auto``: what a model's stages were trained on, as far as it can be read here; the rest is a warning. ``null``: none.
    """
    if tuple(train) == ("auto",):
        sources = [*recorded(settings.trained_on)]
        return audit_training(wanted, sources, as_recorded=True) if sources else None
    sources = [_source(name) for name in train if name != "null"]
    return audit_training(wanted, sources) if sources else None


def recorded(trained_on: Sequence[TrainedStage]) -> Iterator[RecordsConfig]:
    """The sources that a checkpoint's stages were trained on."""
    names = {field.name for field in fields(RecordsConfig)}
    for source in chain.from_iterable(stage.sources for stage in trained_on):
        yield RecordsConfig(**{name: value for name, value in source.content().items() if name in names})


def _source(name: str) -> RecordsConfig:
    """A source by its path, or the name of a data set."""
    is_file = Path(name).is_file() or name.lower().endswith((*JSON_FILES, *OTHER_FILES))
    return RecordsConfig(path=name) if is_file else RecordsConfig(dataset=name)


def audit_training(
    wanted: RetrievalSet, sources: Sequence[RecordsConfig], *, as_recorded: bool = False
) -> Audit:
    """Count pictures and pairs of a set that also occur in training records.

    Rows that are no training records are a warning. So are sources that cannot be read, if they are those which a checkpoint
    records (``as_recorded``): they may have stayed on another machine.
    """
    named = dict.fromkeys(source.key for source in sources if source.key)
    seen = _seen(tuple((key, _stamp(key)) for key in named), as_recorded)
    everywhere = seen.queries | seen.targets
    flags_of: dict[str, list[bool]] = {key: [] for key in COUNTED}
    further: dict[str, set[str]] = defaultdict(set)  # other names of a picture
    for picture, name in optional_rows(wanted.path / NAMES, "picture-id", "name"):
        further[picture].add(name)
    positive = {row for rows, _ in wanted.positives for row in rows.tolist()}
    names_of: dict[int, set[str]] = {}  # of right candidates, by row
    for row, item in zip(wanted.file_order_C.tolist(), wanted.corpus_items(), strict=True):
        if item.pictures:
            names = _names(item) | further.get(item.id, set())
            flags_of["candidate_images"].append(not names.isdisjoint(everywhere))
            if row in positive:
                flags_of["positive_images"].append(not names.isdisjoint(seen.targets))
                names_of[row] = names
    for query, ids, (rows, _) in zip(wanted.queries, picture_ids(wanted), wanted.positives, strict=True):
        if query.pictures and (names := _names(query, own_id=False)):
            names.update(filter(None, map(_id, ids)))
            names = names.union(*(further.get(name, ()) for name in ids))
            targets = set().union(*(names_of.get(row, ()) for row in rows.tolist()))
            flags_of["query_images"].append(not names.isdisjoint(everywhere))
            flags_of["query_pairs"].append(not seen.asked.isdisjoint(product(names, [_text(query.text)])))
            flags_of["answer_pairs"].append(not seen.answered.isdisjoint(product(names, targets)))
    labels = [*dict.fromkeys(source.label for source in sources)]
    told = ", ".join(labels[:MAX_NAMED]) + (", ..." if len(labels) > MAX_NAMED else "")
    counts = {key: {"shared": sum(flags), "of": len(flags)} for key, flags in flags_of.items()}
    warnings = [
        f"{TRAINED}: {count['shared']} of {count['of']} {COUNTED[key]}; figures on them measure memory "
        f"(training records: {told})"
        for key, count in counts.items()
        if COUNTED[key] is not None and count["shared"]
    ]
    warnings += seen.warnings
    if lost := list(seen.not_searched.items()):
        warnings.append(
            f"{len(lost)} of {len(labels)} sources of training records could not be searched for this set: {lost[0][0]}: {lost[0][1]}"
        )
    elif not seen.num_records:
        warnings.append(f"no training record (docs/record.md) is in {told}: nothing was compared")
    found = {"train": labels, "num_records": seen.num_records, "not_searched": seen.not_searched}
    return Audit(found | counts, warnings)


def _config(key: str) -> RecordsConfig:
    """A source by its `RecordsConfig.key`."""
    return RecordsConfig(**json.loads(key)) if key.startswith("{") else RecordsConfig(path=key)


def _stamp(key: str) -> tuple[int, int]:
    """What changes with a file."""
    source = _config(key)
    file = find_shipped(Path(source.path or source.dataset or "").expanduser())
    if not file.is_file():
        return 0, 0
    return file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=1)
def _seen(stamped: tuple[tuple[str, tuple[int, int]], ...], as_recorded: bool) -> _Seen:
    """Content of sources; cached, since all members of a suite are compared with the same."""
    from rge.data.readers import open_records  # imports torch

    seen, digests = _Seen(), dict[str, str | None]()
    for key, _ in stamped:
        source = _config(key)
        try:
            if source.streaming and as_recorded and not Path(source.dataset or "").exists():
                raise UserError("it is a stream, which is not downloaded for this")
            _read(open_records(replace(source, streaming=False), on_bad="skip"), seen, digests)
        except UserError as error:
            if not as_recorded:
                raise
            seen.not_searched[source.label] = str(error)
    return seen


def _read(records: Records, seen: _Seen, digests: dict[str, str | None]) -> None:
    def names(content: Content, own: str | None = None) -> set[str]:
        found = {_id(own)} if own else set()
        for ref in pictures_of(content):
            if isinstance(ref, bytes):
                found.add(_digest(ref))
                continue
            if ref not in digests:
                digests[ref] = _digest(ref)
            found |= {digests[ref], _name(ref), _coco(ref)}
        return {name for name in found if name is not None}

    if records.bad:
        seen.warnings.append(
            f"{records.name}: {len(records.bad):,} of {len(records.bad) + len(records):,} rows are no training records and were not "
            f"compared: {records.bad[0].reason}"
        )
    for index in range(len(records)):
        record = records[index]
        seen.num_records += 1
        query_names = names(record.query.parts)
        seen.queries |= query_names
        seen.asked.update(product(query_names, (_text(text_of(each)) for each in record.query.wordings)))
        for positive in record.positives:
            target = names(positive.parts, positive.id if pictures_of(positive.parts) else None)
            seen.targets |= target
            seen.answered.update(product(query_names, target))


def _names(item: Item, *, own_id: bool = True) -> set[str]:
    """Names of a picture, from its bytes, its file's name and the id of its item."""
    ids = {*map(_digest, item.pictures), *(_name(ref) for ref in item.pictures if isinstance(ref, str))}
    return set(filter(None, ids | {_id(item.id) if own_id else None}))


def _name(ref: str) -> str | None:
    """Id from the file name or library row."""
    return _id(ref.rsplit("#", 1)[-1] if ".parquet#" in ref else Path(ref).stem)


def _id(name: Any) -> str | None:
    """An id as a picture's name; None for short ones, which are ambiguous ("1")."""
    return f"id:{name}" if len(str(name or "")) >= MIN_ID_LENGTH else None


def _coco(ref: str) -> str | None:
    """Id from COCO's number: its files are named ``000000391895.jpg`` or ``COCO_train2014_000000391895.jpg``."""
    match = re.search(r"(?:^|_)(\d{12})$", Path(ref).stem)
    return f"coco:{int(match[1])}" if match else None


def _digest(ref: ImageRef) -> str | None:
    try:
        return hashlib.sha256(picture_bytes(ref)).hexdigest()
    except ImageError:
        return None  # a training picture that was removed can still be recognised by its id


def _text(text: Any) -> str:
    return " ".join(unicodedata.normalize("NFC", str(text or "")).lower().split())

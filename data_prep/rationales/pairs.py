"""The pairs of query and target to write rationales for, and the files they come from."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from data_prep.rationales import prompts
from data_prep.rationales.options import RationaleOptions
from rge.calls.request import Picture, Request
from rge.common.errors import UserError
from rge.common.files import relative
from rge.common.images import ImageError, PictureIndex, picture_bytes
from rge.common.parts import ImageRef
from rge.common.schema import Positive, Record, Target
from rge.data.sources import RecordFile

WINDOW = 1000
"""Most records whose pictures and rationales are compared with each other."""
SCORES = ".scores.jsonl"
"""Ending of the files of scores next to the results."""
PICTURES = "pictures.parquet"
"""File next to records of the rmir pipeline: id, caption and origin of each picture."""


@dataclass
class Candidate:
    """One rationale written for a pair. Scores are None until they are measured, or if they cannot be."""

    text: str | None  # None: the answer had none; the reason is in `faults`
    faults: list[str]
    leaks: dict[str, float] | None = None
    gain: float | None = None

    @property
    def leak(self) -> float | None:
        """The highest of the measured leaks."""
        return max((self.leaks or {}).values(), default=None)


@dataclass
class Pair:
    """A query and one of its targets, with the rationales written for it."""

    record: Record
    positive: Positive
    samples: list[Candidate]

    @property
    def known(self) -> str:
        """Instruction and text of the query."""
        return f"{self.record.instruction or ''} {self.record.query.words or ''}".strip()

    @property
    def good(self) -> list[Candidate]:
        """Candidates that passed the checks."""
        return [sample for sample in self.samples if sample.text is not None and not sample.faults]


Window = list[list[Pair]]
"""The pairs of each record of a window."""


@dataclass
class Source:
    """The state of one file of records."""

    records: RecordFile
    out: Path
    captions: dict[str, str] = field(default_factory=dict)  # by picture id or path
    written: list[list[Candidate]] = field(default_factory=list)  # candidates of each pair
    counts: Counter[str] = field(default_factory=Counter)
    chosen: list[Candidate] = field(default_factory=list)

    def windows(self) -> Iterator[Window]:
        """All pairs, at most `WINDOW` records at a time."""
        written = iter(self.written)
        for rows in evenly(len(self.records), WINDOW):
            yield [
                [Pair(record, target, next(written, [])) for target in record.positives]
                for record in map(self.records.__getitem__, rows)
            ]

    def pairs(self) -> Iterator[Pair]:
        """All pairs."""
        return (pair for window in self.windows() for pair in chain.from_iterable(window))

    def beside(self, ending: str) -> Path:
        """A file next to the result."""
        return self.out.with_name(f"{self.out.name}{ending}")

    def caption(self, target: Target) -> str | None:
        """Caption of a target's picture, looked up by the target's id or the picture's path."""
        if (caption := self.captions.get(target.id)) is not None or not target.pictures:
            return caption
        image = str(target.pictures[0])
        return self.captions.get(image) or self.captions.get(os.path.relpath(image, self.records.path.parent))


def evenly(num: int, most: int) -> list[range]:
    """Split rows into ranges of nearly equal size, at most `most`: in a short last one there were few targets to compare with."""
    parts = -(-num // most)
    return [range(part * num // parts, (part + 1) * num // parts) for part in range(parts)]


def written_row(record: Record, out: Path) -> dict[str, Any]:
    """A record as a line of the file ``out``: without defaults, files relative to its folder."""
    row = record.model_dump(exclude_none=True, exclude_defaults=True)
    shown = [row["query"], *row["positives"], *row.get("negatives", ())]
    shown += [part for whole in shown for part in whole.get("content", ())]
    for part in shown:
        for name in ("image", "images", "pdf", "video"):
            if isinstance(files := part.get(name), list):
                part[name] = [relative(file, out.parent) for file in files]
            elif files is not None:
                part[name] = relative(files, out.parent)
    return row


class Files(Protocol):
    """Options that name files of records, and where the results go."""

    @property
    def records(self) -> Path:
        """A file, or a folder of files."""

    @property
    def out(self) -> Path:
        """A file, or a folder if `records` is one."""


def sources_of(options: Files) -> list[Source]:
    """The files to process, every record checked. Raises `UserError`: none, unreadable, or `out` would overwrite them."""
    records, out = options.records, options.out
    if out.resolve() == records.resolve():
        raise UserError("it would overwrite the records", out, key="out")
    if records.exists() and out.exists() and out.is_dir() != records.is_dir():
        raise UserError(
            f"it must be a {'folder' if records.is_dir() else 'file'}, as records={records} is",
            out,
            key="out",
            kind="form",
        )
    files = {records: out}
    if records.is_dir():
        paths = [path for path in sorted(records.glob("[!.]*.jsonl")) if not path.name.endswith(SCORES)]
        files = {path: out / path.name for path in paths}
    if not files:
        raise UserError("it is a folder without .jsonl files", records, key="records")
    pictures = PictureIndex()
    return [Source(RecordFile(path, pictures=pictures), target) for path, target in files.items()]


def replies_of(options: Files) -> Path:
    """File of all answers."""
    out = options.out
    return out / "replies.sqlite" if options.records.is_dir() else out.with_name(f"{out.name}.replies.sqlite")


def task_of(pair: Pair, options: RationaleOptions) -> str:
    """Task of a pair's prompt."""
    return prompts.task_of(pair.record, pair.positive) if options.task == "auto" else options.task


def request_for(
    pair: Pair, options: RationaleOptions, *, rewrite: bool = False, look: bool = True
) -> Request:
    """Ask for a pair's rationale; without ``look``, pictures are not read, so the request has no cache key."""
    record, positive, model = pair.record, pair.positive, options.model

    def picture(ref: ImageRef) -> Picture:
        return Picture(ref, _digest(ref) if look else "", model.max_side_px)

    parts = prompts.parts(
        record,
        positive,
        task_of(pair, options),
        list(map(picture, record.query.pictures)),
        picture(positive.pictures[0]) if positive.pictures else None,
        max_words=options.max_words,
        rewrite=rewrite,
    )
    default = 0.7 if options.candidates > 1 else 0.0  # at 0, all candidates would be the same
    return Request(
        model.name,
        parts,
        temperature=default if options.temperature is None else options.temperature,
        max_tokens=max(256, 4 * options.max_words),
        form="<rationale>your rationale</rationale>",
        fields=(("rationale", None),),
    )


def _digest(ref: ImageRef) -> str:
    try:
        return hashlib.sha256(picture_bytes(ref)).hexdigest()
    except ImageError:  # it has vanished: its call reports that, and the others go on
        return f"unreadable {ref!r}"


def read_captions(records: Path, given: Path | None) -> dict[str, str]:
    """Captions by id, or by path as in the records, from the given table or from the one that the rmir pipeline writes beside its records."""
    path = given or records.with_name(PICTURES)
    try:
        if given is None and not (path.is_file() and "caption" in pq.read_schema(path).names):
            return {}  # a library of pictures may have the same name
        table = pq.read_table(path, columns=["id", "caption"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"it is not a Parquet file with columns id and caption: {error}", path, key="captions"
        ) from None
    rows = zip(table["id"].to_pylist(), table["caption"].to_pylist(), strict=True)
    found = {str(name): caption for name, caption in rows if caption}
    return {os.path.normpath(name): caption for name, caption in found.items()} | found

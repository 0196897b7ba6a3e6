"""Read training records and choose those of step s, a pure function of seed and step; identity of targets.

Because the batch of a step depends on nothing but the seed, a run resumes exactly by knowing its step, on any number
of processes.
"""

import codecs
import hashlib
import json
import math
import os
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import find_shipped, replacing
from rge.common.images import PictureIndex
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES
from rge.common.schema import ImageRef, Record, Target


class RecordError(UserError):
    """Training records break the format; the message lists file, line, field and reason."""


MAX_REPORTED = 20


class BrokenRecord(RecordError):
    """A drawn record breaks the format; only for streams, which are not checked in advance."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be trained on, with ``data.on_bad=skip``.

    Attributes:
        source: name of its source.
        place: where in the source it stands, with which it can be found again: the byte where it starts in a file, the
            number of its row in a data set, ``shard:row`` in a stream.
        id: its id, or None where it cannot be read.
        reason: what is wrong with it.
    """

    source: str
    place: int | str
    id: str | None
    reason: str


class Records(ABC):
    """Training records by number, independent of their storage.

    Attributes:
        name: what messages call the source.
        size: number of records; None where it is not known before the end.
        bad: records that were left out because they break the format.
        content: what of the source decides which records there are, for `rge.identity.run_identity`: size and hash of what was read, how
            many records are used and left out.
    """

    name: str
    size: int | None
    bad: list[BadRecord]
    content: dict[str, Any]

    @abstractmethod
    def __getitem__(self, index: int) -> Record:
        """The record at `index`, its picture references absolute.

        Raises:
            RecordError: it is no longer what it was when the source was opened.
            BrokenRecord: it breaks the format, which is found only now.
        """

    @abstractmethod
    def place(self, index: int) -> int | str:
        """Where the record at `index` stands, see `BadRecord`."""

    @abstractmethod
    def texts(self) -> list[str]:
        """Every text of every record: what a tokenizer is trained on."""

    def replacements_of(self, index: int) -> range:
        """Records of which one may take the place of that at `index`, itself among them."""
        return range(len(self))

    def bad_record(self, index: int, name: str | None, reason: str) -> BadRecord:
        """The record at `index` as a `BadRecord`."""
        return BadRecord(self.name, self.place(index), name, reason)

    def __len__(self) -> int:
        """Number of records."""
        assert self.size is not None, f"{self.name} does not say how many records it has"
        return self.size

    def _check(self, found: "Iterable[Scanned]", on_bad: str) -> np.ndarray:
        """Move records that break the format to `bad`.

        Args:
            found: every record, in order.
            on_bad: ``stop`` raises if records break the format; ``skip`` leaves them out.

        Returns:
            (N,) int64, places of those that do not.

        Raises:
            RecordError: see `RecordFile`.
        """
        places, ids = Column(), Column()
        faults: list[_Fault] = []
        for one in found:
            faults += [_Fault(one.label, one.place, one.id, problem) for problem in one.problems]
            places.append(one.place)
            if one.id is not None:
                ids.append(number_of(one.id))
        faults = sorted([*faults, *self._repeated(ids.read())], key=lambda fault: fault.place)
        if faults and on_bad == "stop":
            raise RecordError("training records break the format:\n" + self._listed(faults))
        kept = places.read()
        if not len(kept):
            raise RecordError(f"training records {self.name}: {self._EMPTY}")
        reasons: dict[int, list[_Fault]] = {}
        for fault in faults:
            reasons.setdefault(fault.place, []).append(fault)
        if reasons:
            kept = kept[~np.isin(kept, list(reasons))]
        self.bad = [
            BadRecord(
                self.name,
                place,
                each[0].id,
                f"{self._UNIT} {each[0].label}: {'; '.join(fault.problem for fault in each)}",
            )
            for place, each in reasons.items()
        ]
        if not len(kept):
            raise RecordError(
                "training records break the format, and data.on_bad=skip leaves none:\n"
                + self._listed(faults)
            )
        self.content |= {"records": len(kept), "left_out": len(reasons)}
        if reasons:
            self.content["left_out_at"] = number_of(str(list(reasons)))
        return kept

    _UNIT, _EMPTY = "row", "there is none"

    def _listed(self, faults: "Sequence[_Fault]") -> str:
        problems = [f"{self.name}:{fault.label}: {fault.problem}" for fault in faults]
        more = f"\n... and {len(problems) - MAX_REPORTED} more" if len(problems) > MAX_REPORTED else ""
        return "\n".join(problems[:MAX_REPORTED]) + more

    @abstractmethod
    def _named(self) -> "Iterator[tuple[int, int, str]]":
        """Label, place and id of every record that has one, in order."""

    def _repeated(self, ids_N: np.ndarray) -> "list[_Fault]":
        """Every record whose id an earlier one has.

        Ids are compared as 64-bit numbers first; only if two of those are equal are the texts read again.
        """
        ordered = np.sort(ids_N)
        suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        if not suspects:
            return []
        found: list[_Fault] = []
        seen: dict[str, int] = {}
        for label, place, name in self._named():
            if number_of(name) not in suspects:
                continue
            if name in seen:
                found.append(
                    _Fault(label, place, name, f"id: {name!r} is already used in {self._UNIT} {seen[name]}")
                )
            seen.setdefault(name, label)
        return found


@dataclass(frozen=True, slots=True)
class Scanned:
    """A record that has been checked.

    Attributes:
        label: its number for people: line of a file (from 1), row of a data set (from 0).
        place: see `BadRecord`.
        id: its own, or None where it has none.
        problems: what is wrong with it.
    """

    label: int
    place: int
    id: str | None
    problems: list[str]


class RecordFile(Records):
    """The records of one JSON-lines file, read by position so that a file may be larger than memory.

    Every record is checked once when the file is opened. What stays is where each record starts, eight bytes, on the
    disk and memory-mapped from a million records on; checking takes as much again for a moment.

    Args:
        path: the file.
        need_rationale: every positive must have an oracle rationale.
        pictures: checks that each picture exists; None leaves that to later.
        progress: show a progress bar while checking.
        on_bad: ``stop`` raises if records break the format; ``skip`` leaves them out.

    Attributes:
        bad: records that were left out.

    Raises:
        RecordError: no such file, one that cannot be read, an empty file, or records that break the format (all of them
            are listed, at most `MAX_REPORTED` in full); with ``skip``, a file without any that does not.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        need_rationale: bool = False,
        pictures: PictureIndex | None = None,
        progress: bool = False,
        on_bad: str = "stop",
    ):
        self.path = find_shipped(path)
        if not self.path.is_file():
            raise RecordError(f"training records {self.path} do not exist")
        self.name = str(self.path)
        self._offsets = self._check(self._read(need_rationale, pictures, progress), on_bad)
        self.size = len(self._offsets)

    _UNIT, _EMPTY = "line", "the file is empty"

    def _read(self, need_rationale: bool, pictures: PictureIndex | None, progress: bool) -> Iterator[Scanned]:
        size = self.path.stat().st_size
        quick = size < 100_000_000  # a second or two
        bar = progress_bar(
            total=size,
            unit="B",
            unit_scale=True,
            desc=f"checking {self.path.name}",
            disable=quick or not progress,
        )
        sha256 = hashlib.sha256()
        with _open(self.path) as lines, bar:
            for number, start, line in _numbered(lines):
                bar.update(len(line))
                sha256.update(line)
                if not line.strip():
                    continue
                record, problems = parsed_line(line, self.path.name, start)
                if record is not None:
                    problems = faults_of(record, need_rationale, self.path.parent, pictures)
                yield Scanned(number, start, None if record is None else record.id, problems)
        self.content = {"bytes": size, "sha256": sha256.hexdigest(), "read": "all"}

    def _named(self) -> Iterator[tuple[int, int, str]]:
        with _open(self.path) as lines:
            for number, start, line in _numbered(lines):
                record = parsed_line(line, self.path.name, start)[0] if line.strip() else None
                if record is not None:
                    yield number, start, record.id

    @classmethod
    def known(
        cls, path: Path, offsets: np.ndarray, bad: list[BadRecord], content: dict[str, Any]
    ) -> "RecordFile":
        """A file that was opened and checked before, as it was found then; see `rge.data.verdicts`."""
        file = cls.__new__(cls)
        file.path, file._offsets, file.bad, file.content = path, offsets, bad, content
        file.name, file.size = str(path), len(offsets)
        return file

    @property
    def offsets(self) -> np.ndarray:
        """Where in the file each record starts, bytes."""
        return self._offsets

    def __getitem__(self, index: int) -> Record:
        """The record at `index`, its picture references made absolute.

        Raises:
            RecordError: the file has changed since it was opened, or is gone.
        """
        place = self.place(index)
        with _open(self.path) as lines:
            lines.seek(place)
            line = strip_bom(lines.readline())
        record, problems = parsed_line(line, self.path.name, place)
        if record is None:
            raise RecordError(
                f"{self.path} has changed since this run opened it: at byte {place} there is no longer a record: "
                + "; ".join(problems)
            )
        return absolute(record, self.path.parent)

    def place(self, index: int) -> int:
        """Byte where it starts."""
        return int(self._offsets[index])

    def texts(self) -> list[str]:
        """Distinct texts of all records."""
        return list(dict.fromkeys(text for index in range(len(self)) for text in texts_of(self[index])))


class Column:
    """Append-only array of 64-bit integers; beyond `SPILL` entries it is kept on disk."""

    SPILL = 1 << 20

    def __init__(self) -> None:
        self._tail = array("q")
        self._file: BinaryIO | None = None

    def append(self, number: int) -> None:
        """Add a number."""
        self._tail.append(number)
        if len(self._tail) == self.SPILL:
            self._flush()

    def read(self) -> np.ndarray:
        """All numbers so far, memory-mapped if there are many."""
        if self._file is None:
            return np.array(self._tail, dtype=np.int64)
        self._flush()
        return np.memmap(self._file, dtype=np.int64, mode="r")

    def _flush(self) -> None:
        if self._file is None:
            self._file = (
                tempfile.TemporaryFile()
            )  # without a name: it is gone with the last process that maps it
        self._tail.tofile(self._file)
        self._file.flush()
        self._tail = array("q")


@dataclass(frozen=True, slots=True)
class _Fault:
    """Format errors of a record, with its label, place and id; see `Scanned`."""

    label: int
    place: int
    id: str | None
    problem: str


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordError(f"training records {path} cannot be read: {error.strerror or error}") from error


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Number, position in bytes and content of each line; a byte order mark is only where the file begins."""
    start = 0
    for number, line in enumerate(lines, start=1):
        yield number, start, line if start else strip_bom(line)
        start += len(line)


def strip_bom(line: bytes) -> bytes:
    """The line without the byte order mark that some editors and Windows programs put before a file's first."""
    return line.removeprefix(codecs.BOM_UTF8)


def parsed_line(line: bytes, title: str, place: int) -> tuple[Record | None, list[str]]:
    """Parse a line into a record, or None and its problems.

    Args:
        line: of a file of records.
        title: of the file, see `with_defaults`.
        place: byte where the line begins.
    """
    try:
        return Record.model_validate_json(line), []
    except ValidationError as error:
        problems = problems_of(error)
    try:
        fields = from_json(line)
    except ValueError:
        return None, problems
    if not isinstance(fields, dict):
        return None, problems
    try:
        return Record.model_validate(with_defaults(without_nulls(fields), title, "train", place)), []
    except ValidationError as error:
        return None, problems_of(error)


def with_defaults(found: dict[str, Any], title: str, split: str, place: int | str) -> dict[str, Any]:
    """Fill in the fields that a source may omit: id, group, source, split, target ids.

    Args:
        found: the fields that are given; changed.
        title: of the source.
        split: of the source.
        place: of the record in it, for an id.
    """
    found.setdefault("id", f"{title}:{place}")
    found.setdefault("group", found["id"])
    found.setdefault("source", title)
    found.setdefault("split", split)
    query = found.get("query")
    if isinstance(query, dict) and "images" in query and not isinstance(query["images"], list):
        query["images"] = [query["images"]]
    for part in ("positives", "negatives"):
        targets = found.get(part)
        for target in targets if isinstance(targets, list) else []:
            if isinstance(target, dict):
                target.setdefault("id", _id_of(target))
    return found


def without_nulls(value: Any) -> Any:
    """Pictures as bytes or paths, and no key without a value: Arrow gives every row every field."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            return value["bytes"] if value["bytes"] is not None else value["path"]
        return {name: bare for name, one in value.items() if (bare := without_nulls(one)) is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(one) for one in value]
    return value


def _id_of(target: Mapping[str, Any]) -> str:
    """Identity of a target: targets with equal content are never negatives of each other."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (target.get("text"), target.get("image")):
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def problems_of(error: ValidationError) -> list[str]:
    """Format errors, field by field."""
    return [
        f"{'.'.join(str(part) for part in issue['loc']) or 'record'}: {issue['msg']}"
        for issue in error.errors(include_url=False, include_input=False)
    ]


def faults_of(
    record: Record, need_rationale: bool, folder: Path | None = None, pictures: PictureIndex | None = None
) -> list[str]:
    """Problems of a record whose format is valid.

    Args:
        record: with picture references as they are written.
        need_rationale: every positive must have an oracle rationale.
        folder: that references are relative to.
        pictures: checks that each picture exists; None leaves that to later.
    """
    found = []
    if need_rationale:
        found = [
            f"positives.{index}.rationale: {fault} (record {record.id!r})"
            for index, positive in enumerate(record.positives)
            if (fault := _rationale_fault(positive.rationale or ""))
        ]
    return found if pictures is None else found + _picture_faults(record, folder or Path(), pictures)


def check_wording(record: Record, source: str, profile: str) -> None:
    """Refuse to put a profile's words around texts that already hold theirs.

    Args:
        record: any of a source.
        source: name of the source, for the message.
        profile: name of the prompts' wording.

    Raises:
        RecordError: the record's texts include their wording, and the profile adds another.
    """
    if record.wording == "included" and PROFILES[profile].adds_words:
        raise RecordError(
            f"{source}: the texts of record {record.id!r} include their wording (wording: included), and "
            f"data.profile={profile} would add another: set data.profile=plain"
        )


def texts_of(record: Record) -> list[str]:
    """All non-empty texts of a record."""
    found = [record.instruction, record.query.text]
    for target in (*record.positives, *record.negatives):
        found += [target.text, getattr(target, "rationale", None)]
    return [text for text in found if text]


def _picture_faults(record: Record, folder: Path, pictures: PictureIndex) -> list[str]:
    named = [(f"query.images.{place}", ref) for place, ref in enumerate(record.query.images)]
    for side in ("positives", "negatives"):
        targets: Sequence[Target] = getattr(record, side)
        named += [(f"{side}.{place}.image", it.image) for place, it in enumerate(targets) if it.image]
    # Bytes are there.
    found = [
        (field, pictures.fault(os.path.join(folder, ref))) for field, ref in named if isinstance(ref, str)
    ]
    return [f"{field}: {fault} (record {record.id!r})" for field, fault in found if fault]


def _rationale_fault(rationale: str) -> str | None:
    if not rationale.strip():
        return "missing or blank, but the LM loss needs it"
    if EMB_TOKEN in rationale:
        return f"contains {EMB_TOKEN}, which the trainer appends itself"
    return None


def located(ref: ImageRef, folder: Path) -> ImageRef:
    """A picture reference joined to a folder; bytes stay as they are."""
    return ref if isinstance(ref, bytes) else str(folder / ref)


def absolute(record: Record, folder: Path) -> Record:
    """The record with its picture references joined to a folder."""

    def target(item: Target) -> Target:
        return item if item.image is None else item.model_copy(update={"image": located(item.image, folder)})

    return record.model_copy(
        update={
            "query": record.query.model_copy(
                update={"images": [located(image, folder) for image in record.query.images]}
            ),
            "positives": [target(positive) for positive in record.positives],
            "negatives": [target(negative) for negative in record.negatives],
        }
    )


def identity(target: Target) -> int:
    """Signed 64-bit hash of a target's identity, the same on every machine."""
    return number_of(target.identity or target.id)


def number_of(text: str) -> int:
    """Signed 64-bit hash of a text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


@dataclass(frozen=True, slots=True)
class Draw:
    """One record of a batch.

    Attributes:
        source: number of the source.
        index: number of the record in it.
        seed: for everything random about this record in this step (drawn positive, augmentation, sampling).
    """

    source: int
    index: int
    seed: int


class Mixture:
    """Which records make up each step's global batch.

    Every source is gone through in a new random order each epoch; its share of the batches follows its weight, exact
    over time: of n records drawn so far, a source with share s has s * n, give or take the rounding of one record a
    source (with share 0.3 of 8 it gets 2 or 3 records a step, seldom one more or less, 2.4 on average).

    Args:
        sizes: number of records of each source; None for a stream, whose draws are numbered one after the other.
        weights: share of each source, relative.
        batch_size: records of a step, all processes together.
        seed: of everything.
        homogeneous: each step's records come from one source, and weights are shares of the steps: then a query's
            in-batch negatives are targets of its own kind.

    Raises:
        ValueError: an empty source.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        *,
        homogeneous: bool = False,
    ):
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError("every source needs at least one record")
        self.sizes, self.batch_size, self.seed = list(sizes), batch_size, seed
        self.homogeneous = homogeneous
        share = np.array(weights, dtype=np.float64)
        self.share = share / share.sum()
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def steps_per_epoch(self) -> int:
        """Steps after which as many records were drawn as the sources, none of them a stream, hold together."""
        return max(1, -(-sum(size for size in self.sizes if size is not None) // self.batch_size))

    def batch(self, step: int) -> list[Draw]:
        """The global batch of a step, `batch_size` draws, sources interleaved at random."""
        before, after = self.drawn_before(step), self.drawn_before(step + 1)
        draws: list[tuple[int, int]] = []
        for source, size in enumerate(self.sizes):
            for count in range(before[source], after[source]):
                index = count if size is None else self._index(source, count // size, count % size)
                draws.append((source, index))
        seeds, mixed = self._chance(step)
        return [Draw(draws[place][0], draws[place][1], int(seeds[place])) for place in mixed]

    def sources_of(self, step: int) -> np.ndarray:
        """The source of each draw of `batch`, (batch_size,) int64, without the draws."""
        number = np.diff([self.drawn_before(step), self.drawn_before(step + 1)], axis=0)[0]
        return np.repeat(np.arange(len(number)), number)[self._chance(step)[1]]

    def _chance(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Seeds of a step's draws, and the order into which these are mixed."""
        generator = np.random.default_rng([self.seed, 1, step])
        seeds = generator.integers(0, 2**63, size=self.batch_size)
        return seeds, generator.permutation(self.batch_size)

    def drawn_before(self, step: int) -> list[int]:
        """Records drawn from each source before a step."""
        if self.homogeneous:
            return [steps * self.batch_size for steps in self._counts_by_source(step)]
        return self._counts_by_source(step * self.batch_size)

    def _counts_by_source(self, total: int) -> list[int]:
        # Whole numbers that sum to the total. A source takes its share of what the sources before it leave. Every
        # count then only ever grows with the total, which differences of rounded cumulative shares do not: they would
        # draw a negative number from a small source now and then.
        counts, left, share_left = [], total, 1.0
        for share in self.share[:-1]:
            counts.append(math.floor(left * share / share_left + 1e-6))
            left, share_left = left - counts[-1], share_left - share
        return [*counts, left]

    def _index(self, source: int, epoch: int, place: int) -> int:
        """Index of the record at a position of an epoch's order."""
        size = self.sizes[source]
        assert size is not None
        if size > LARGE:
            return permuted(place, size, f"{self.seed} {source} {epoch}")
        key = (source, epoch)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.sizes):
                self._orders.clear()
            self._orders[key] = np.random.default_rng([self.seed, 0, source, epoch]).permutation(size)
        return int(self._orders[key][place])


LARGE = 1 << 22
"""Records from which an epoch's order is computed place by place instead of held in memory, 8 bytes a record."""


def permuted(place: int, size: int, key: str) -> int:
    """Position of an index in a pseudo-random permutation of `size`, without materialising it.

    A Feistel network of four rounds permutes the numbers of 2k bits; results beyond the size are sent through again,
    which ends since it is a permutation, after fewer than four turns on average.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half | right
        if place < size:
            return place


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON lines, complete or not at all."""
    with replacing(path) as waiting, waiting.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record.model_dump(exclude_none=True), ensure_ascii=False) + "\n")

"""Read, check and write training records; identity of targets."""

import codecs
import hashlib
import json
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypedDict, Unpack

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from rge.common.commands import progress_bar
from rge.common.errors import UserError, grouped, shortened
from rge.common.files import POINTER_NOTE, find_shipped, is_pointer, replacing
from rge.common.images import PictureIndex
from rge.common.parts import PRESENT, ImagePart, ImageRef, are_bytes, picture_of, place_of, refs_of, text_of
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES
from rge.common.schema import QueryPart, Record, Target
from rge.data.config import OTHER_FILES
from rge.tables.names import resolved


class RecordError(UserError):
    """Training records break the format; `cause` is the first one's error, if the message lists several."""


MAX_REPORTED = 20
SPILL_BYTES = 8 << 20
"""Longer arrays of positions are on the disk."""
Parsed = tuple[Record | None, list[str]]
"""A record, or None and its problems."""


class BrokenRecord(RecordError):
    """A drawn record breaks the format; only for streams, which are not checked in advance."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be trained on, with ``data.on_bad=skip``."""

    source: str  # name of its source
    place: int | str  # byte offset in a file, row number in a data set, ``shard:row`` in a stream
    id: str | None  # None if it cannot be read
    reason: str


class Records:
    """Training records by number, independent of their storage."""

    name: str  # what messages call the source
    size: int | None = None  # number of records; None of a stream, whose readers number them
    bad: list[BadRecord]  # left out because they break the format
    # Identity, for `rge.identity.run_identity`: size and hash of what was read, numbers of records used and left out.
    content: dict[str, Any]

    def __getitem__(self, index: int) -> Record:
        """The record at `index`, its picture references absolute; a stream's are read by its readers.

        Raises:
            RecordError: it has changed since the source was opened.
            BrokenRecord: it breaks the format; only in streams.
        """
        raise TypeError(f"{self.name} is a stream: read it by `reader`")

    def place(self, index: int) -> int | str:
        """Place of the record at `index`, see `BadRecord`."""
        raise TypeError(f"{self.name} is a stream: read it by `reader`")

    def texts(self) -> list[str]:
        """Distinct texts of all records, for training a tokenizer; not of a stream."""
        raise TypeError(f"{self.name} is a stream, whose texts have no known end")

    def replacements_of(self, index: int) -> range:
        """Records that may replace the one at `index`, including itself."""
        return range(len(self))

    def __len__(self) -> int:
        assert self.size is not None, f"{self.name} does not say how many records it has"
        return self.size


class Checks(TypedDict, total=False):
    """What is checked when a source is opened."""

    need_rationale: bool  # every positive must have an oracle rationale
    pictures: PictureIndex | None  # checks that each picture exists
    progress: bool  # show a progress bar if checking takes long
    on_bad: str  # ``stop`` (the default) raises if records break the format; ``skip`` leaves them out


class Scanned(NamedTuple):
    """A record as it was read."""

    label: int  # number in messages: line of a file (from 1), row of a data set (from 0)
    place: int  # see `BadRecord`
    record: Record | None  # None if it breaks the format
    problems: list[str]


Broken = dict[int, tuple[int, str | None, list[str]]]
"""Label, id and problems of bad records, by place. Not the records: all of a file larger than memory may be bad."""


class StoredRecords(Records, ABC):
    """Records of known number, each checked once when the source is opened. Subclasses say how they are read.

    Raises:
        RecordError: the source is empty, or records break the format (`MAX_REPORTED` kinds of faults are listed); with ``on_bad=skip``, no
            record is good.
    """

    unit: str  # what messages call the place of a record
    empty: str  # the message about a source without records
    extent: dict[str, Any]  # what is read, for `content`
    folder: Path  # that paths of pictures are relative to
    offsets: np.ndarray  # (N,) int64 places of the records, memory-mapped if there are many

    def __init__(self, name: str, **checks: Unpack[Checks]):
        self.name = name
        sha256 = hashlib.sha256()
        places, broken = self._check(sha256, checks)
        if not len(places):
            raise RecordError(self.empty, self.name, kind="empty")
        self.offsets = places[~np.isin(places, list(broken))] if broken else places
        skips = checks.get("on_bad", "stop") == "skip"
        if broken and not (skips and len(self.offsets)):
            none = ", and data.on_bad=skip leaves none" if skips else ""
            error = RecordError(f"records break the format{none}:\n{self._listed(broken)}", self.name)
            label, _, (fault, *_) = next(iter(broken.values()))
            key, _, why = fault.partition(": ")
            of_field = () if " " in key else (key,)
            error.cause = RecordError(why if of_field else fault, self.name, label, *of_field)
            raise error
        self.bad = [
            BadRecord(self.name, place, name, f"{self.unit} {label}: {'; '.join(problems)}")
            for place, (label, name, problems) in broken.items()
        ]
        self.size = len(self.offsets)
        numbers = {"records": self.size, "left_out": len(broken)}
        self.content = self.extent | {"sha256": sha256.hexdigest()} | numbers
        if broken:
            self.content["left_out_at"] = number_of(str(list(broken)))

    @abstractmethod
    def _scan(self, sha256: Any, progress: bool = False) -> Iterator[Scanned]:
        """All records in order; `sha256` is updated with what is read."""

    @abstractmethod
    def _read(self, place: int) -> Parsed:
        """The record at a place, with absolute picture references."""

    def _check(self, sha256: Any, checks: Checks) -> tuple[np.ndarray, Broken]:
        """(N,) int64 places of all records, and those with problems, in order."""
        places, ids, need_rationale = array("q"), array("q"), checks.get("need_rationale", False)
        broken: Broken = {}
        for label, place, record, problems in self._scan(sha256, checks.get("progress", False)):
            places.append(place)
            if record is not None:
                ids.append(number_of(record.id))
                problems += faults_of(record, need_rationale, self.folder, checks.get("pictures"))
            if problems:
                broken[place] = label, None if record is None else record.id, problems
        self._add_repeated(broken, np.asarray(ids))
        return on_disk(places), dict(sorted(broken.items()))

    def _add_repeated(self, broken: Broken, ids_N: np.ndarray) -> None:
        """Add every record with the id of an earlier one. Records are read again only if two ids' 64-bit hashes are equal."""
        ordered = np.sort(ids_N)
        suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        seen: dict[str, int] = {}
        for label, place, record, _ in self._scan(hashlib.sha256()) if suspects else ():
            if record is None or number_of(record.id) not in suspects:
                continue
            if record.id in seen:
                fault = f"id: {record.id!r} is already used in {self.unit} {seen[record.id]}"
                broken.setdefault(place, (label, record.id, []))[2].append(fault)
            seen.setdefault(record.id, label)

    def _listed(self, broken: Broken) -> str:
        problems = (f"{self.name}:{label}: {one}" for label, _, several in broken.values() for one in several)
        return "\n".join(grouped(problems, MAX_REPORTED))

    def __getitem__(self, index: int) -> Record:
        return self._still(self._read(self.place(index)))

    def _still(self, parsed: Parsed) -> Record:
        record, problems = parsed
        if record is None:
            raise RecordError(
                f"it has changed since this run opened it: a record can no longer be read: {'; '.join(problems)}",
                self.name,
                kind="changed",
            )
        return record

    def place(self, index: int) -> int:
        """Its byte offset in a file, or the number of its row."""
        return int(self.offsets[index])

    def texts(self) -> list[str]:
        """Distinct texts of all records."""
        bad = {one.place for one in self.bad}
        scanned = ((one.record, one.problems) for one in self._scan(hashlib.sha256()) if one.place not in bad)
        return list(dict.fromkeys(text for one in scanned for text in texts_of(self._still(one))))


class RecordFile(StoredRecords):
    """The records of one JSON-lines file, read by position so that a file may be larger than memory."""

    unit, empty = "line", "the file is empty"

    def __init__(self, path: str | Path, **checks: Unpack[Checks]):
        self.path = find_shipped(path)
        self.folder = self.path.parent
        _refuse_other_formats(self.path)
        self.extent = {"bytes": self.path.stat().st_size, "read": "all"}
        super().__init__(str(self.path), **checks)

    @classmethod
    def known(cls, path: Path, offsets: np.ndarray, bad: list[BadRecord], content: dict[str, Any]) -> Self:
        """A file with the cached result of an earlier check, see `rge.data.verdicts`."""
        file = cls.__new__(cls)
        file.path, file.offsets, file.bad, file.content = path, offsets, bad, content
        file.name, file.folder, file.size = str(path), path.parent, len(offsets)
        return file

    def _scan(self, sha256: Any, progress: bool = False) -> Iterator[Scanned]:
        size, start = self.path.stat().st_size, 0
        quick = size < 100_000_000  # a second or two
        hidden = quick or not progress
        bar = progress_bar(
            total=size, unit="B", unit_scale=True, desc=f"checking {self.path.name}", disable=hidden
        )
        with _open(self.path) as lines, bar:
            for number, whole in enumerate(lines, start=1):
                line = whole if start else strip_bom(whole)
                bar.update(len(line))
                sha256.update(line)
                if line.strip():
                    yield Scanned(number, start, *parsed_line(line, self.path.name, start))
                start += len(whole)

    def _read(self, place: int) -> Parsed:
        with _open(self.path) as lines:
            lines.seek(place)
            return parsed_line(strip_bom(lines.readline()), self.path.name, place, self.folder)


def on_disk(numbers: "array[int] | np.ndarray") -> np.ndarray:
    """The int64 numbers; many are memory-mapped, in a file that vanishes with the last process that maps it."""
    found = np.asarray(numbers, dtype=np.int64)
    if found.nbytes <= SPILL_BYTES:
        return found
    with tempfile.TemporaryFile() as file:
        found.tofile(file)
        file.flush()
        return np.memmap(file, np.int64, "r")


def _refuse_other_formats(path: Path) -> None:
    if path.is_dir() or str(path).lower().endswith(OTHER_FILES):
        raise RecordError(
            "it is not a file of JSON lines: give a folder of Parquet or JSON lines as dataset:",
            path,
            kind="format",
        )
    if not path.is_file():
        raise RecordError("there is no such file", path, kind="missing")
    with _open(path) as file:
        start = strip_bom(file.read(1024)).lstrip()
    if is_pointer(start):
        raise RecordError(POINTER_NOTE, path, kind="pointer")
    if start.startswith(b"["):
        raise RecordError(
            "it is a JSON array: write each of its objects on a line of its own (JSON lines), or give it as dataset:",
            path,
            kind="array",
        )
    if start and not start.startswith(b"{"):
        raise RecordError(
            f"it begins with {shortened(repr(start[:60])[1:])}, which is not a JSON object: a file of another format is "
            f"recognised by its ending, {', '.join(OTHER_FILES)}",
            path,
            kind="format",
        )


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordError(f"it cannot be read: {error.strerror or error}", path, kind="unreadable") from error


def strip_bom(line: bytes) -> bytes:
    """The line without the byte order mark that some programs write at the beginning of a file."""
    return line.removeprefix(codecs.BOM_UTF8)


def parsed_line(line: bytes, title: str, place: int, folder: Path | None = None) -> Parsed:
    """Parse a line of a file (its `title` and byte offset as of `with_defaults`); pictures as of `parsed_fields`."""
    try:
        return Record.model_validate_json(line, context=_finding(folder)), []
    except ValidationError as error:
        problems = problems_of(error)
    with suppress(ValueError):
        fields = from_json(line)
        if isinstance(fields, dict):
            return parsed_fields(with_defaults(without_nulls(fields), title, "train", place), folder)
    return None, problems


def parsed_fields(fields: dict[str, Any], folder: Path | None = None) -> Parsed:
    """Make a record of its fields; pictures are joined to `folder`. Without one, `PRESENT` stands for their bytes."""
    try:
        return Record.model_validate(fields, context=_finding(folder)), []
    except ValidationError as error:
        return None, problems_of(error)


def _finding(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {"find": None}
    return {"find": lambda path: str(Path(resolved(path, str(folder))))}


def with_defaults(fields: dict[str, Any], title: str, split: str, place: int | str) -> dict[str, Any]:
    """Fill in the fields that a source may omit: id (of its `title` and the record's `place`), group, source, split, target ids."""
    fields.setdefault("id", f"{title}:{place}")
    fields.setdefault("group", fields["id"])
    fields.setdefault("source", title)
    fields.setdefault("split", split)
    query = fields.get("query")
    for name in ("images", "paraphrases"):
        if isinstance(query, dict) and name in query:
            query[name] = as_list(query[name])
    if isinstance(query, dict) and isinstance(query.get("content"), str):
        query["content"] = as_contents(query["content"])[0]
    for part in ("positives", "negatives"):
        targets = fields.get(part)
        for target in targets if isinstance(targets, list) else []:
            if isinstance(target, dict):
                target.setdefault("id", _id_of(target))
    return fields


def as_list(value: Any) -> list[Any]:
    """A list of values from a cell that has several, or one; bytes written as a list of integers are one."""
    return value if isinstance(value, list) and not are_bytes(value) else [value]


def as_contents(value: Any) -> list[Any]:
    """Contents, lists of parts, from a cell that has several, or one; parts may be JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"content: not a list of parts as JSON: {error}") from None
    is_one = isinstance(value, list) and any(isinstance(part, Mapping) for part in value)
    return [value] if is_one else as_list(value)


def without_nulls(value: Any) -> Any:
    """Pictures as bytes or paths, and no empty fields: Arrow gives every row every field."""
    if isinstance(value, Mapping):
        if value.keys() & {"bytes", "path"}:
            return value.get("bytes") or value.get("path")
        return {name: bare for name, one in value.items() if (bare := without_nulls(one)) is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(one) for one in value]
    return None if isinstance(value, bytes) and not value else value


def _id_of(target: Mapping[str, Any]) -> str:
    """Identity of a target: targets with equal content are never negatives of each other."""
    digest = hashlib.blake2b(digest_size=8)
    image = target.get("image")
    with suppress(ValueError):  # reported when the record is made
        image = picture_of(image)
    for part in (target.get("text"), image):
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    if content := target.get("content"):
        digest.update(json.dumps(content, sort_keys=True, default=_digest_of_bytes).encode())
    return digest.hexdigest()


def _digest_of_bytes(value: Any) -> str:
    return hashlib.sha256(bytes(value)).hexdigest()


def problems_of(error: ValidationError) -> list[str]:
    """Format errors, field by field."""
    return [
        f"{place_of(issue['loc']) or 'record'}: {issue['msg']}"
        for issue in error.errors(include_url=False, include_input=False)
    ]


def faults_of(
    record: Record, need_rationale: bool, folder: Path | None = None, pictures: PictureIndex | None = None
) -> list[str]:
    """Problems of a record whose format is valid: missing rationales and, of references relative to `folder`, pictures."""
    found: list[tuple[str, str | None]] = []
    if need_rationale:
        for place, positive in enumerate(record.positives):
            found.append((f"positives.{place}.rationale", _rationale_fault(positive.rationale or "")))
    if pictures is not None:
        for name, ref in files_of(record):
            if isinstance(ref, str) and ref != PRESENT:
                found.append((name, pictures.fault(resolved(ref, str(folder or ""), pictures.has))))
    return [f"{name}: {fault} (record {record.id!r})" for name, fault in found if fault]


def check_wording(record: Record, source: str, profile: str) -> None:
    """Refuse a profile that adds words to texts that already include their wording; RecordError names the source."""
    if record.wording == "included" and PROFILES[profile].adds_words:
        raise RecordError(
            f"its texts include their wording (wording: included), and the profile {profile} would add another: set "
            "profile: plain for this source, or data.profile=plain",
            source,
            f"record {record.id!r}",
        ).about("data.profile")


def files_of(
    record: Record, *, queries: bool = True, pictures: bool = False
) -> Iterator[tuple[str, ImageRef]]:
    """Files of a record, each with its place in the record; with `pictures`, pictures and frames alone."""
    shown: list[tuple[str, QueryPart | Target]] = [("query", record.query)] if queries else []
    for side, targets in (("positives", record.positives), ("negatives", record.negatives)):
        shown += [(f"{side}.{number}", target) for number, target in enumerate(targets)]
    for place, one in shown:
        short = "images.{}" if isinstance(one, QueryPart) else "image"
        for number, part in enumerate(one.parts):
            where = f"content.{number}" if one.content else short.format(number)
            if not pictures or isinstance(part, ImagePart) or len(refs_of(part)) > 1:
                yield from ((f"{place}.{where}", ref) for ref in refs_of(part))


def texts_of(record: Record) -> list[str]:
    """All non-empty texts of a record."""
    texts = [record.instruction, *map(text_of, record.query.wordings)]
    for target in (*record.positives, *record.negatives):
        texts += [target.words, getattr(target, "rationale", None)]
    return [text for text in texts if text]


def names_of(record: Record) -> list[str | None]:
    """All texts of a record that the model does not see."""
    targets = (*record.positives, *record.negatives)
    names = [name for target in targets for name in (target.id, target.identity)]
    return [record.id, record.group, record.source, record.split, record.category, *names]


def _rationale_fault(rationale: str) -> str | None:
    if not rationale.strip():
        return "missing or blank, but the LM loss needs it"
    if EMB_TOKEN in rationale:
        return f"contains {EMB_TOKEN}, which the trainer appends itself"
    return None


def identity(target: Target) -> int:
    """Signed 64-bit hash of a target's identity, the same on every machine."""
    return number_of(target.identity or target.id)


def number_of(text: str) -> int:
    """Signed 64-bit hash of a text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def json_line(record: Record | dict[str, Any]) -> str:
    """A record as a line of a file, without fields that are None or have their default."""
    row = record if isinstance(record, dict) else record.model_dump(exclude_none=True, exclude_defaults=True)
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, complete or not at all."""
    with replacing(path) as waiting, waiting.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(map(json_line, records))

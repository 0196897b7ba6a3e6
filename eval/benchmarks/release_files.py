"""Shared by the importers: options, reading a release's tables, finding its pictures."""

import hashlib
import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from eval.benchmarks.suite import is_suite, write_suite
from eval.sets.retrieval_set import RetrievalSet, some
from eval.sets.write_set import Query, write_set
from rge.common.errors import UserError
from rge.common.options import one_of
from rge.common.registry import PluginOptions
from rge.common.schema import safe_id
from rge.tables.errors import reading
from rge.tables.listing import visible_files
from rge.tables.pictures import SUFFIXES
from rge.tables.rows import INVISIBLE, TABLES, table_rows


class ReleaseError(UserError):
    """A release cannot be imported: the ``file``, the row or cell (``place``), the column, picture or query (``key``)."""

    problems: Sequence["ReleaseError"] = ()
    """All that is wrong with a table."""


Where = tuple[object, str | None]
"""A file or set, and the row in it, for messages."""


@dataclass
class ReleaseOptions(PluginOptions):
    """Options of every importer of a release."""

    src: Path
    """Folder of the release, in the layout of the download."""
    out: Path
    """Retrieval set or suite to write."""
    decode: bool = True
    """Open every picture once."""
    overwrite: bool = False
    """Replace what an earlier import wrote to out."""

    def write(self, member: str = "", **parts: Any) -> RetrievalSet:
        """Call `write_set` for ``out`` or a suite's member in it, with these options."""
        embed = getattr(self, "pictures", "embed") == "embed"
        return write_set(
            self.out / member, embed=embed, decode=self.decode, overwrite=self.overwrite, **parts
        )

    def write_members(
        self, members: Mapping[str, Mapping[str, str]], write_one: Callable[[str], object], **suite: Any
    ) -> list[str]:
        """Write all members of a suite, then the suite; returns their names. ``suite``: see `write_suite`."""
        if is_suite(self.out) and not self.overwrite:
            raise UserError(
                "it already holds a suite: choose another, or pass overwrite=true", self.out, key="out"
            )
        for number, name in enumerate(members):
            try:
                write_one(name)
            except UserError as error:
                if number:
                    written = f"{number} of {len(members)} sets were written to {self.out}: pass overwrite=true next time"
                    error.reason += f"\n{written}"
                raise
        write_suite(self.out, members=members, **suite)
        return list(members)


@dataclass
class PictureOptions(ReleaseOptions):
    """Further options for releases whose pictures are files."""

    pictures: Literal["embed", "link"] = "embed"
    """embed copies pictures into the set, link writes their paths."""


@dataclass
class Draft:
    """Collects queries and judgements of a release; ``lost`` are right candidates missing from ``pool``."""

    pool: Container[str]
    queries: list[Query] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    def add(
        self,
        query: Query,
        where: Where,
        gains: Mapping[str, int],
        wrong: Iterable[str] = (),
        own: Iterable[str] = (),
    ) -> None:
        """Add a query, the judgements of candidates in the pool, and the column ``num_missing_positives``.

        ``gains``: of each candidate; 0: judged, not right. ``wrong``: explicit negatives. ``own``: pictures of the
        query, which are excluded unless they are judged.
        """
        self.claim(query.id, where)
        absent = [name for name, gain in gains.items() if gain and name not in self.pool]
        self.lost += [f"{query.id}: {name}" for name in absent]
        self.queries.append(replace(query, columns={**query.columns, "num_missing_positives": len(absent)}))
        self.qrels += [(query.id, safe_id(name), gains[name]) for name in self._in_pool(gains)]
        self.negatives += [(query.id, safe_id(name)) for name in self._in_pool(wrong)]
        self.excluded += [(query.id, safe_id(name)) for name in self._in_pool(own) if name not in gains]

    def claim(self, name: str, where: Where) -> None:
        """Raise a `ReleaseError` if a query's id repeats; for queries that are left out too."""
        if name in self._ids:
            raise ReleaseError("the query occurs twice", *where, name, "twice")
        self._ids.add(name)

    def _in_pool(self, names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in self.pool]

    def refuse_lost(self, where: str, *, allowed: bool) -> None:
        """Raise a `ReleaseError` if right candidates are missing from the pool, unless ``allowed``."""
        if self.lost and not allowed:
            raise ReleaseError(
                f"{len(self.lost)} right candidates are not in {where}: {some(self.lost)}. A pool without them would be"
                f" easier; allow_missing=true keeps them in every denominator",
                place=self.lost[0],
                key="allow_missing",
            )


def chosen(option: str, wanted: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Members named by an option; ``all`` stands for all known ones."""
    known = tuple(known)
    names = known if tuple(wanted) == ("all",) else tuple(wanted)
    one_of(option, names, known)
    return names


def content_id(*parts: str) -> str:
    """An id derived from content: 20 hexadecimal digits, so that sorting by id reveals no original order."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class Row(dict[str, Any]):
    """A row of a table by column name; ``where``: its file and number, for messages."""

    def __init__(self, cells: Mapping[str, Any], where: Where):
        super().__init__(cells)
        self.where = where

    def error(self, reason: str, key: str, kind: str = "") -> ReleaseError:
        """An error of a column or cell of this row."""
        return ReleaseError(reason, *self.where, key, kind)

    def value(self, *names: str) -> Any:
        """The value of a column, which may have one of several names; an error if it is missing or null."""
        for name in names:
            if self.get(name) is not None:
                return self[name]
        raise self.error(f"it is missing or empty; found: {', '.join(self)}", " or ".join(names))

    def id(self, *names: str) -> str:
        """The same as an id of ours, see `safe_id`."""
        return safe_id(str(self.value(*names)))

    def text(self, name: str) -> str:
        """A column's text; "" if it is missing or null."""
        return self._text(name, self.get(name))

    def texts(self, name: str) -> list[str]:
        """The texts in a column's list, see `as_list`."""
        return [self._text(name, part) for part in as_list(self[name])]

    def _text(self, name: str, value: Any) -> str:
        if value is not None and not isinstance(value, str):
            raise self.error(f"it must hold text, got {value!r} ({type(value).__name__})", name)
        return value or ""


def iter_rows(
    path: Path, columns: Sequence[str] | None = None, *, needed: Sequence[str] = (), hint: str = ""
) -> Iterator[Row]:
    """Rows of a table, see `rge.tables.rows`.

    ``columns``: columns to read, if the format allows skipping others. A UserError if the file cannot be read, or lacks
    a ``needed`` column; that message ends with ``hint``.
    """
    for number, cells in enumerate(table_rows(path, columns), 1):
        row = Row(cells, (path, f"row {number}"))
        need_columns(row.where, row, needed, hint)
        yield row


def read_rows(files: Iterable[Path], needed: Sequence[str] = (), hint: str = "") -> Iterator[Row]:
    """Rows of several files, see `iter_rows`."""
    return chain.from_iterable(iter_rows(file, needed=needed, hint=hint) for file in files)


def read_qrels(files: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Gains by query and candidate; the highest of repeated judgements counts."""
    judged: dict[str, dict[str, int]] = defaultdict(dict)
    for row in read_rows(files):
        query, candidate = row.id("query-id", "query_id"), row.id("corpus-id", "corpus_id")
        score = str(row.value("score")).removesuffix(".0")
        if not re.fullmatch(r"-?\d+", score):
            raise row.error(f"it must be an integer gain, got {score!r}", "score")
        judged[query][candidate] = max(judged[query].get(candidate, 0), int(score))
    return judged


def need_columns(where: Where, present: Iterable[str], needed: Iterable[str], hint: str = "") -> None:
    """Raise a `ReleaseError` if a table lacks a needed column."""
    names = list(present)
    if lacking := [name for name in needed if name not in names]:
        raise ReleaseError(f"the column is missing; found: {', '.join(names)}{hint}", *where, lacking[0])


def existing(path: Path, release: str) -> Path:
    """The path; a `ReleaseError` if a release lacks it."""
    if not path.exists():
        raise ReleaseError(f"it does not exist: src must be a copy of {release}", path, kind="missing")
    return path


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Tables of a split in the Hugging Face hub's layout: ``test-00000-of-00002.parquet``, ``test.jsonl``."""
    files = sorted(
        path for path in folder.glob("*") if path.suffix in TABLES and re.match(rf"{split}\b", path.name)
    )
    if not files:
        raise ReleaseError(
            f"it has no table of split {split} ({split}-*.parquet or {split}.jsonl)"
            f": src must be a folder in the hub's layout",
            folder,
            key=split,
        )
    return files


def column_names(path: Path) -> list[str]:
    """All column names of a file, in order of appearance."""
    if path.suffix == ".parquet":
        with reading(str(path)):
            return list(pq.read_schema(path).names)
    return list(dict.fromkeys(name for row in iter_rows(path) for name in row))


def as_list(value: Any) -> list[Any]:
    """A cell as a list: None and "" are empty, a JSON list is parsed, anything else becomes a single element."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            read = json.loads(value)
        except ValueError:
            return [value]
        return read if isinstance(read, list) else [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def match_columns(
    path: Path,
    names: Sequence[str],
    aliases: Mapping[str, Sequence[str]],
    field_map: Sequence[str] = (),
    *,
    prefer: Sequence[str] = (),
    ignored: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> dict[str, str]:
    """Our name -> the file's name, for every column of a file.

    ``path``: for messages. ``aliases``: our name -> accepted names. ``field_map``: the user's ``theirs=ours`` words;
    ``theirs=ignore`` drops a column. ``prefer``: our names whose aliases are sorted by likelihood: of two matching
    columns the likelier one is used. ``ignored``: columns in lower case that may be left out. ``needed``: our names
    that must be found.

    Raises:
        UserError: a column is unknown or missing, two columns match the same name, or a word of ``field_map`` is not a pair.
    """
    given = dict(_mapping(word, aliases) for word in field_map if word)
    known = {_plain(alias): (key, at) for key, theirs in aliases.items() for at, alias in enumerate(theirs)}
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        key, rank = known.get(_plain(name), ("ignore" if name.lower() in ignored else "", 0))
        found.setdefault(given.get(name, key), []).append((-1 if name in given else rank, name))
    found.pop("ignore", None)
    if unknown := [name for _, name in found.pop("", ())]:
        raise ReleaseError(
            f"unknown columns. Known fields are {', '.join(aliases)}; pass"
            f" field_map={unknown[0]}=FIELD or =ignore",
            path,
            key=", ".join(unknown),
            kind="unknown",
        )
    if lacking := [key for key in needed if key not in found]:
        raise ReleaseError(
            f"no column has one of its names ({', '.join(aliases[lacking[0]])}); found: {', '.join(names)}"
            f"; pass field_map=THEIRS={lacking[0]}",
            path,
            key=lacking[0],
        )
    for key, theirs in found.items():
        theirs.sort(key=itemgetter(0))  # those of field_map first
        (rank, first), *others = theirs
        if others and (others[0][0] < 0 or (rank >= 0 and key not in prefer)):
            raise ReleaseError(
                f"columns {first!r} and {others[0][1]!r} could both be it: choose with field_map={others[0][1]}=ignore",
                path,
                key=key,
                kind="twice",
            )
    return {key: theirs[0][1] for key, theirs in found.items()}


def _mapping(word: str, aliases: Iterable[str]) -> tuple[str, str]:
    column, mark, key = (part.strip() for part in word.partition("="))
    if not mark or key not in (*aliases, "ignore"):
        raise ReleaseError(
            f"it must be theirs=ours with ours one of {', '.join(aliases)} or ignore, got {word!r}",
            key="field_map",
        )
    return column, key


def _plain(name: str) -> str:
    """A heading normalised for comparison: case, white space, hyphens and invisible characters do not matter."""
    plain = unicodedata.normalize("NFKC", name).translate(INVISIBLE)
    return re.sub(r"[\s_-]+", "_", plain.strip().casefold())


class Pictures:
    """Finds the pictures of a release.

    ``roots``: folders that paths may be relative to, in order of precedence; missing ones are skipped. ``hint``: what
    to do about a missing picture. ``manifest``: a table with ``id`` and ``path`` (or ``image`` bytes), such as Visual
    Genome's ``image_data.json``; a `UserError` if it lacks a column or repeats an id.

    Attributes:
        coco: id -> number in COCO, for pictures of Visual Genome that come from COCO.
    """

    def __init__(self, *roots: Path | None, hint: str, manifest: Path | None = None):
        self.roots = [root for root in roots if root is not None and root.is_dir()]
        self.hint = hint
        self.manifest: dict[str | bytes, str | bytes] = {}
        self.coco: dict[str, int] = {}
        if manifest is not None:
            self._read_manifest(manifest)

    def find(
        self, ref: Any, where: Where = (None, None), *, by_stem: bool = False, hint: str = ""
    ) -> bytes | Path:
        """Find the picture of a reference: bytes, ``{bytes, path}``, a path, or an id.

        ``where``: for messages. ``by_stem``: also accept a file ``REF.jpg`` anywhere below the roots. ``hint``: for
        this picture. A UserError if there is no such picture, or two files match.
        """
        if isinstance(ref, Mapping):
            return self.find(ref.get("bytes") or ref.get("path"), where, by_stem=by_stem, hint=hint)
        name = ref if isinstance(ref, bytes) else "" if ref is None else str(ref)
        entry = self.manifest.get(name, name)
        if isinstance(entry, bytes):
            return entry
        files = [root / entry for root in self.roots if entry and (root / entry).is_file()]
        if not files and by_stem and name not in self.manifest:
            path = Path(entry)
            files = self._stems.get(path.stem if path.suffix.lower() in SUFFIXES else path.name, [])
            if len(files) > 1:
                raise ReleaseError(
                    f"the picture could be {files[0]} or {files[1]}: keep one of them",
                    key=str(name),
                    kind="twice",
                )
        if not files:
            listed = f", which the manifest lists as {entry!r}," if name in self.manifest else ""
            places = ", ".join(map(str, self.roots)) or "any folder"
            raise ReleaseError(
                f"the picture{listed} is not below {places}: {hint or self.hint}",
                *where,
                key=str(name),
                kind="missing",
            )
        return Path(os.path.abspath(files[0]))

    @cached_property
    def _stems(self) -> dict[str, list[Path]]:
        stems: dict[str, dict[str, Path]] = {}
        # What a folder without permission holds is not found, and then named.
        found = chain.from_iterable(visible_files(root, lambda _: None) for root in self.roots)
        every = (Path(os.path.abspath(folder), name) for folder, names in found for name in names)
        for path in every:
            if (
                path.suffix.lower() in SUFFIXES
            ):  # the name of a link counts, which the hub's cache gives to its files
                # One root may contain another, and two links lead to one picture.
                stems.setdefault(path.stem, {}).setdefault(os.path.realpath(path), path)
        return {stem: [*paths.values()] for stem, paths in stems.items()}

    def _read_manifest(self, path: Path) -> None:
        self.roots.append(path.parent)
        for row in iter_rows(path):
            name = str(row.value("id", "image_id", "ImageID"))
            entry = row.value("path", "file", "image", "url")
            if isinstance(entry, Mapping):
                entry = entry.get("bytes") or entry.get("path")
            if isinstance(entry, str) and "://" in entry:
                entry = "/".join(entry.split("/")[-2:])  # Visual Genome: .../VG_100K_2/1.jpg
            if name in self.manifest:
                raise row.error("it is listed twice", name, "twice")
            self.manifest[name] = entry
            if row.get("coco_id") not in (None, ""):
                self.coco[name] = int(float(row["coco_id"]))

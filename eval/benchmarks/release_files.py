"""Shared by the importers: options, reading a release's tables, finding its pictures."""

import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from PIL import Image

from eval.benchmarks.suite import is_suite, write_suite
from eval.sets.retrieval_set import RetrievalSet, some
from eval.sets.write_set import Query, write_set
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image
from rge.common.options import one_of
from rge.common.registry import PluginOptions
from rge.common.schema import safe_id
from rge.tables.rows import reading, table_rows

TABLES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class ReleaseError(UserError):
    """A release cannot be imported; the message names the file, the field and the fix."""


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

    def write(self, member: str = "", *, embed: bool = True, **parts: Any) -> RetrievalSet:
        """Call `write_set` for ``out`` or a suite's member in it, with these options."""
        return write_set(
            self.out / member, embed=embed, decode=self.decode, overwrite=self.overwrite, **parts
        )

    def write_members(
        self, members: Mapping[str, Mapping[str, str]], write_one: Callable[[str], object], **suite: Any
    ) -> list[str]:
        """Write all members of a suite, then the suite; returns their names. ``suite``: see `write_suite`."""
        if is_suite(self.out) and not self.overwrite:
            raise UserError(f"out {self.out} already holds a suite: choose another, or pass overwrite=true")
        for name in members:
            write_one(name)
        write_suite(self.out, members=members, **suite)
        return list(members)


@dataclass
class PictureOptions(ReleaseOptions):
    """Further options for releases whose pictures are files."""

    pictures: Literal["embed", "link"] = "embed"
    """embed copies pictures into the set, link writes their paths."""

    def write(self, member: str = "", **parts: Any) -> RetrievalSet:
        """See `ReleaseOptions.write`."""
        return super().write(member, **{"embed": self.pictures == "embed"} | parts)


@dataclass
class Draft:
    """Collects queries and judgements of a release; ``lost`` are right candidates missing from ``pool``."""

    pool: Container[str]
    queries: list[Query] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def judge(
        self, query: str, gains: Mapping[str, int], wrong: Iterable[str] = (), own: Iterable[str] = ()
    ) -> int:
        """Add the judgements of candidates that are in the pool; returns the number of right ones that are not.

        ``gains``: gain of each candidate; 0: judged, not right. ``wrong``: explicit negatives. ``own``: the query's own
        pictures, to be excluded unless they are judged.
        """
        name = safe_id(query)

        def in_pool(ids: Iterable[str]) -> list[str]:
            return [candidate for candidate in dict.fromkeys(ids) if candidate in self.pool]

        absent = [candidate for candidate, gain in gains.items() if gain and candidate not in self.pool]
        self.lost += [f"{query}: {candidate}" for candidate in absent]
        self.qrels += [(name, safe_id(candidate), gains[candidate]) for candidate in in_pool(gains)]
        self.negatives += [(name, safe_id(candidate)) for candidate in in_pool(wrong)]
        self.excluded += [(name, safe_id(candidate)) for candidate in in_pool(own) if candidate not in gains]
        return len(absent)

    def refuse_lost(self, where: object, *, allowed: bool) -> None:
        """Raise a `ReleaseError` if right candidates are missing from the pool, unless ``allowed``."""
        if self.lost and not allowed:
            raise ReleaseError(
                f"{len(self.lost)} right candidates are not in {where}: {some(self.lost)}. A pool without them would make the "
                "task easier; allow_missing=true keeps them in every denominator"
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


def iter_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet, JSON lines, JSON (a list of objects), CSV or TSV file.

    ``columns``: columns to read, if the format allows skipping others.

    Raises:
        UserError: the file cannot be read.
    """
    if path.suffix != ".json":
        return table_rows(path, columns)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReleaseError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ReleaseError(f"{path}: expected a list of objects")
    return iter(content)


def placed_rows(files: Iterable[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows of several files, each with its location for messages: ``FILE, row 3``."""
    for file in files:
        for number, row in enumerate(iter_rows(file), 1):
            yield row, f"{file}, row {number}"


def cell(row: Mapping[str, Any], where: str, *names: str) -> Any:
    """The value of a column, which may have one of several names.

    Raises:
        UserError: it is missing or null.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ReleaseError(
        f"{where}: column {' or '.join(map(repr, names))} is missing or empty; found: {', '.join(row)}"
    )


def read_qrels(files: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Gains by query and candidate; the highest of repeated judgements counts.

    Raises:
        UserError: a row lacks an id or its score, or the score is not an integer.
    """
    judged: dict[str, dict[str, int]] = {}
    for row, where in placed_rows(files):
        query, candidate = (
            safe_id(str(cell(row, where, f"{side}-id", f"{side}_id"))) for side in ("query", "corpus")
        )
        gains, score = judged.setdefault(query, {}), str(cell(row, where, "score")).removesuffix(".0")
        if not re.fullmatch(r"-?\d+", score):
            raise ReleaseError(f"{where}: score must be an integer gain, got {score!r}")
        gains[candidate] = max(gains.get(candidate, 0), int(score))
    return judged


def need_columns(where: object, present: Iterable[str], needed: Iterable[str], hint: str = "") -> None:
    """Raise a `ReleaseError` if a table lacks a needed column."""
    names = list(present)
    if lacking := [name for name in needed if name not in names]:
        raise ReleaseError(f"{where}: column {lacking[0]!r} is missing; found: {', '.join(names)}{hint}")


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Tables of a split in the Hugging Face hub's layout: ``test-00000-of-00002.parquet``, ``test.jsonl``.

    Raises:
        UserError: there is no such table.
    """
    files = sorted(
        path for path in folder.glob("*") if path.suffix in TABLES and re.match(rf"{split}\b", path.name)
    )
    if not files:
        raise ReleaseError(
            f"{folder} has no table of split {split} ({split}-*.parquet or {split}.jsonl): src must be the folder with "
            "the data sets in the hub's layout"
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


class Fields:
    """Maps a release's column names to ours.

    Args:
        aliases: our name -> accepted names.
        field_map: the user's ``theirs=ours`` words; ``theirs=ignore`` drops a column.
        prefer: our names whose aliases are sorted by likelihood: of two matching columns the likelier one is used.

    Raises:
        UserError: a word of ``field_map`` is not a pair, or names none of our fields.
    """

    def __init__(
        self,
        aliases: Mapping[str, Sequence[str]],
        field_map: Sequence[str] = (),
        *,
        prefer: Sequence[str] = (),
    ):
        self.aliases, self.prefer = aliases, prefer
        self.given: dict[str, str] = {}
        for word in field_map:
            column, mark, key = (part.strip() for part in word.partition("="))
            if not word:
                continue
            if not mark or key not in (*aliases, "ignore"):
                raise ReleaseError(
                    f"field_map must be theirs=ours with ours one of {', '.join(aliases)} or ignore, got {word!r}"
                )
            self.given[column] = key

    def columns(self, path: Path, names: Sequence[str], ignored: Sequence[str] = ()) -> dict[str, str]:
        """Our name -> the file's name, for every column of a file.

        Raises:
            UserError: a column is unknown, or two columns match the same name.
        """
        columns: dict[str, str] = {}
        unknown = []
        for name in names:
            key = self._meaning(name)
            if key == "ignore" or (key is None and name.lower() in ignored):
                continue
            if key is None:
                unknown.append(name)
            else:
                columns[key] = self._chosen(path, key, columns.get(key), name)
        if unknown:
            raise ReleaseError(
                f"{path}: unknown columns {', '.join(unknown)}. Known fields are {', '.join(self.aliases)}; pass "
                f"field_map={unknown[0]}=FIELD, or field_map={unknown[0]}=ignore"
            )
        return columns

    def _meaning(self, name: str) -> str | None:
        known = (key for key, names in self.aliases.items() if _plain(name) in map(_plain, names))
        return self.given.get(name) or next(known, None)

    def _chosen(self, path: Path, key: str, first: str | None, name: str) -> str:
        """Choose between two columns that both match ``key``."""
        if first is None or name in self.given:
            return name
        if first in self.given:
            return first
        if key in self.prefer:
            known = list(map(_plain, self.aliases[key]))
            return min(first, name, key=lambda column: known.index(_plain(column)))
        raise ReleaseError(
            f"{path}: columns {first!r} and {name!r} could both be {key!r}: choose with field_map={name}=ignore"
        )


def _plain(name: str) -> str:
    """A heading normalised for comparison: case, white space and hyphens do not matter."""
    return re.sub(r"[\s_-]+", "_", unicodedata.normalize("NFKC", name).strip().casefold())


class Pictures:
    """Finds the pictures of a release.

    Args:
        roots: folders that paths may be relative to, in order of precedence.
        manifest: a table with ``id`` and ``path`` (or ``image`` bytes), such as Visual Genome's ``image_data.json``.

    Attributes:
        coco: id -> number in COCO, for pictures of Visual Genome that come from COCO.

    Raises:
        UserError: the manifest lacks a column or repeats an id.
    """

    def __init__(self, roots: Sequence[Path], manifest: Path | None = None):
        self.roots = [root for root in roots if root.is_dir()]
        self.manifest: dict[str, str | bytes] = {}
        self.coco: dict[str, int] = {}
        if manifest is not None:
            self._read_manifest(manifest)

    def find(self, ref: Any, *, by_stem: bool) -> bytes | Path | None:
        """Find the picture of a reference: bytes, ``{bytes, path}``, a path, or an id; None if it does not exist.

        ``by_stem``: also accept a file ``REF.jpg`` anywhere below the roots.

        Raises:
            UserError: two files match.
        """
        if isinstance(ref, Mapping):
            return self.find(ref.get("bytes") or ref.get("path"), by_stem=by_stem)
        if isinstance(ref, bytes):
            return ref
        if ref is None or ref == "":
            return None
        name = str(ref)
        if name in self.manifest:
            return self._listed(name, self.manifest[name])
        return self._file(name) or (self._by_stem(name) if by_stem else None)

    def _listed(self, name: str, entry: str | bytes) -> bytes | Path:
        """The picture of a manifest entry."""
        picture = entry if isinstance(entry, bytes) else self._file(entry)
        if picture is None:
            raise ReleaseError(
                f"the manifest lists {name!r} as {entry!r}, which is in none of these folders: "
                f"{', '.join(map(str, self.roots)) or 'none given (images=DIR)'}"
            )
        return picture

    def _by_stem(self, name: str) -> Path | None:
        """The file with the stem of a name anywhere below the roots."""
        stem = Path(name).stem if Path(name).suffix.lower() in PICTURES else Path(name).name
        files = self._stems.get(stem, [])
        if len(files) > 1:
            raise ReleaseError(
                f"picture {name!r} could be {files[0]} or {files[1]}: pass manifest=FILE with id and path"
            )
        return files[0] if files else None

    def need(self, ref: Any, where: str, hint: str) -> bytes | Path:
        """Like `find` without `by_stem`, for required pictures.

        Raises:
            UserError: the picture is missing; the message ends with ``hint``.
        """
        picture = self.find(ref, by_stem=False)
        if picture is None:
            places = ", ".join(map(str, self.roots))
            raise ReleaseError(f"{where}: picture {ref!r} is in none of {places}: {hint}")
        return picture

    def _file(self, name: str) -> Path | None:
        for root in self.roots:
            if (root / name).is_file():
                return (root / name).resolve()
        return None

    @cached_property
    def _stems(self) -> dict[str, list[Path]]:
        stems: dict[str, list[Path]] = {}
        for path in dict.fromkeys(path.resolve() for root in self.roots for path in sorted(root.rglob("*"))):
            if path.suffix.lower() in PICTURES:
                stems.setdefault(path.stem, []).append(path)
        return stems

    def _read_manifest(self, path: Path) -> None:
        self.roots.append(path.parent)
        for row, where in placed_rows([path]):
            name = str(cell(row, where, "id", "image_id", "ImageID"))
            entry = cell(row, where, "path", "file", "image", "url")
            if isinstance(entry, Mapping):
                entry = entry.get("bytes") or entry.get("path")
            if isinstance(entry, str) and "://" in entry:
                entry = "/".join(entry.split("/")[-2:])  # Visual Genome: .../VG_100K_2/1.jpg
            if name in self.manifest:
                raise ReleaseError(f"{where}: id {name!r} is listed twice")
            self.manifest[name] = entry
            if row.get("coco_id") not in (None, ""):
                self.coco[name] = int(float(row["coco_id"]))


def still(data: bytes) -> bytes:
    """Replace an animation by its first frame as PNG; other pictures are returned unchanged.

    Raises:
        ImageError: the picture cannot be opened.
    """
    try:
        load_image(data)
    except ImageError:
        return _png(load_image(data, first_frame=True))
    return data


def stack(pictures: Sequence[bytes]) -> bytes:
    """Stack pictures vertically on white, without resizing, as PNG.

    Raises:
        ImageError: one cannot be opened.
    """
    images = [load_image(data) for data in pictures]
    size = max(image.width for image in images), sum(image.height for image in images)
    whole, top = Image.new("RGB", size, "white"), 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    return _png(whole)


def _png(image: Image.Image) -> bytes:
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return sink.getvalue()

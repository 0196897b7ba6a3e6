"""List the files of a folder: what is left out, and what is skipped, counted by kind.

Every command that reads a folder of pictures lists it here, on this machine or in an object store.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pathspec import GitIgnoreSpec

from rge.common.errors import UserError

EXCLUDED = (
    "@eaDir/", "@tmp/", r"\#recycle/", r"\#snapshot/",  # Synology
    "@Recycle/", "@Recently-Snapshot/",  # QNAP
    "$RECYCLE.BIN/", "RECYCLER/", "System Volume Information/",  # Windows
    "lost+found/", "__MACOSX/", "**/*.photoslibrary/resources/",
)  # fmt: skip
"""Folders with thumbnails, deleted files and older versions, which are no items of their own; hidden folders are left out anyway."""
KINDS = {
    ending: kind
    for kind, endings in {
        "RAW": "3fr arw cr2 cr3 crw dng erf iiq kdc mef mos mrw nef nrw orf pef raf raw rw2 rwl sr2 srf srw x3f",
        "movies": "3gp avi flv insv m2ts m4v mkv mov mp4 mpeg mpg mts ogv vob webm wmv",
        "sidecars": "aae dop on1 pp3 thm xmp",
        "drawings": "ai eps psb psd svg svgz xcf",
        "sound": "aac flac m4a mp3 ogg opus wav wma",
        "documents": "doc docx htm html md odp odt pdf ppt pptx rtf txt",
        "tables": "csv json jsonl ods parquet tsv xls xlsx",
        "archives": "7z bz2 gz rar tar tgz xz zip zst",
    }.items()
    for ending in endings.split()
}
"""What skipped files are called, by their ending."""
SHOWN = 4
"""Endings of each kind, and excluded names, that a message lists."""


class Exclude:
    """Files and folders to leave out, by patterns in the notation of .gitignore, after those of `EXCLUDED`.

    As there, the last match counts, and ``!pattern`` brings something back, except from an excluded folder. A pattern that begins
    with ``#`` is no comment but a name, such as ``#recycle``.

    Raises:
        UserError: a pattern is not valid.
    """

    def __init__(self, patterns: Sequence[str] = ()):
        lines = [*EXCLUDED]
        for pattern in patterns:
            lines.append(f"\\{pattern}" if pattern.startswith("#") else pattern)
            try:
                valid = pattern.strip() not in ("", "!") and len(GitIgnoreSpec.from_lines(lines[-1:]))
            except ValueError:
                valid = False
            if not valid:
                raise UserError(
                    f"{pattern!r} is not a pattern as in .gitignore, such as raw/ or *_thumb.jpg",
                    key="exclude",
                )
        self._spec = GitIgnoreSpec.from_lines(lines)
        self._fits_files = any(not pattern.endswith("/") for pattern in patterns)
        self.folder: Callable[[str], bool] = lru_cache(1 << 12)(self._folder)

    def file(self, path: str) -> bool:
        """Whether a file is left out whose folder is not; `path` is relative, with slashes."""
        return self._fits_files and self._spec.match_file(path)

    def _folder(self, path: str) -> bool:
        """Whether a folder is left out, or one that contains it."""
        parent = path.rpartition("/")[0]
        return bool(path) and ((bool(parent) and self.folder(parent)) or self._spec.match_file(f"{path}/"))


@dataclass
class Skipped:
    """What a listing has left out: files by ending, and excluded folders and files by name; hidden ones are not counted."""

    endings: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)

    def add(self, name: str) -> None:
        """Count a file of a kind that is not read."""
        self.endings[os.path.splitext(name)[1].lower()] += 1

    def __bool__(self) -> bool:
        return bool(self.endings or self.excluded)

    def __str__(self) -> str:
        """``RAW: 12 .cr2, 1 .nef; movies: 3 .mp4; excluded: 2 @eaDir/``."""
        kinds: dict[str, Counter[str]] = {}
        for ending, count in self.endings.items():
            kinds.setdefault(KINDS.get(ending[1:], "other"), Counter())[ending or "without ending"] += count
        parts = [f"{kind}: {_most(counts)}" for kind, counts in sorted(kinds.items(), key=_other_last)]
        return "; ".join(parts + ([f"excluded: {_most(self.excluded)}"] if self.excluded else []))


def _other_last(pair: tuple[str, Counter[str]]) -> tuple[bool, str]:
    return pair[0] == "other", pair[0]


def _most(counts: Counter[str]) -> str:
    shown = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:SHOWN]
    rest = counts.total() - sum(count for _, count in shown)
    return ", ".join([f"{count} {name}" for name, count in shown] + ([f"{rest} more"] if rest else []))


def visible_files(
    root: str | os.PathLike[str],
    on_error: Callable[[OSError], object] | None = None,
    exclude: Exclude | None = None,
    skipped: Skipped | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """`root` and each folder below it, in order, with the sorted names of its files; hidden folders and files are left out.

    Links to folders are followed, each folder once.

    Args:
        root: may be hidden itself.
        on_error: receives what a folder cannot be read for; None: it is raised.
        exclude: further folders and files to leave out.
        skipped: counts what `exclude` leaves out.
    """

    def failed(error: OSError) -> None:
        if on_error is None:
            raise error
        on_error(error)

    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=failed):
        try:
            status = os.stat(folder)
        except OSError as error:
            failed(error)
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        inside = "" if inside == "." else f"{inside}/"
        folders[:] = _visible(folders)
        names = _visible(names)
        if exclude is not None:
            excluded = {name for name in folders if exclude.folder(inside + name)}
            unwanted = {name for name in names if exclude.file(inside + name)}
            folders[:] = [name for name in folders if name not in excluded]
            names = [name for name in names if name not in unwanted]
            if skipped is not None:
                skipped.excluded.update([*(f"{name}/" for name in excluded), *unwanted])
        yield folder, names


def _visible(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def files_below(
    fs: Any, root: str, is_local: bool, exclude: Exclude | None = None, skipped: Skipped | None = None
) -> Iterator[tuple[str, Any]]:
    """The files below a folder, as `visible_files` lists them, and what a store says about each; None of local ones.

    By name and grouped by folder. ``fs``: the fsspec file system.
    """
    if is_local:
        for folder, names in visible_files(root, exclude=exclude, skipped=skipped):
            yield from ((os.path.join(folder, name), None) for name in names)
        return
    found = fs.find(root, detail=True)
    for file in sorted(found, key=os.path.split):
        inside = file.removeprefix(root).strip("/")
        if is_hidden(inside):
            continue
        if exclude is None or not (culprit := _excluded(exclude, inside)):
            yield file, found[file]
        elif skipped is not None:
            skipped.excluded[culprit] += 1


def is_hidden(path: str) -> bool:
    """Whether a file, or a folder that contains it, is hidden; `path` is relative, with slashes."""
    return any(part.startswith(".") for part in path.split("/"))


def _excluded(exclude: Exclude, file: str) -> str | None:
    """The folder or file whose name leaves a file out, or None."""
    parts = file.split("/")
    folders = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if folder := next(filter(exclude.folder, folders), None):
        return f"{folder.rpartition('/')[2]}/"
    return parts[-1] if exclude.file(file) else None

"""Cache of record and picture validation.

A record file is read, and a picture decoded, again only after its size or modification time changed, or that of a
library or of any file in a folder with its pictures; of a link, those of what it points to. The cache is in ``$RGE_CACHE``, otherwise in ``rge`` below ``$XDG_CACHE_HOME`` or
``~/.cache``; deleting it only costs time, and an unreadable or unwritable one counts as empty. Only good files are
cached, with what ``data.on_bad=skip`` leaves out: others have to be fixed.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import rge.common
import rge.data
from rge.common.commands import progress_bar
from rge.common.errors import UserError, grouped
from rge.common.files import find_shipped, replacing
from rge.common.images import ImageError, PictureIndex, load_image
from rge.common.parts import ImageRef
from rge.data.sources import (
    MAX_REPORTED,
    BadRecord,
    Checks,
    RecordFile,
    Records,
    files_of,
    number_of,
    on_disk,
)
from rge.identity.run_identity import version_of

T = TypeVar("T")

RECENT_NS = 2 * 10**9
"""A file that changed this recently is not cached: it may change again within a tick of the file system's clock."""

AT_ONCE = 4096
"""Pictures sent to the processes at a time; those of a data set are bytes."""

CHUNK = 32
"""Pictures sent to one process at a time."""

KEPT_S = 90 * 24 * 3600.0
"""Unused entries are deleted after this time."""


def cache_folder() -> Path:
    """Cache of verdicts, see the module docstring."""
    if folder := os.environ.get("RGE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rge"


class Verdicts:
    """Opens record files and decodes their pictures, unless the cache in `folder` has the result."""

    def __init__(self, folder: Path | None = None):
        self.folder = cache_folder() if folder is None else folder
        self.pictures = PictureIndex()
        self.began_ns = time.time_ns()
        self._files: dict[str, dict[str, Any]] = {}  # by record file: stamps of what its check depends on
        self._folders: dict[str, list[int] | None] = {}  # stamps of folders, each listed once

    def open(self, path: str | Path, *, need_rationale: bool, on_bad: str) -> RecordFile:
        """A record file with its pictures looked up; see `RecordFile`, also for what it raises."""
        path = find_shipped(path)
        entry = self._entry(path, need_rationale, on_bad)
        if (known := self._cached(entry)) is not None and str(path) in known[0]["files"]:
            about, offsets = known
            self._files[str(path)] = about["files"]
            bad = [BadRecord(**line) for line in about["bad"]]
            return RecordFile.known(path, on_disk(offsets), bad, about["content"])
        before = _stamp(path)
        self.pictures.asked.clear()
        checks = Checks(need_rationale=need_rationale, pictures=self.pictures, progress=True, on_bad=on_bad)
        file = RecordFile(path, **checks)
        files = {file.name: before} | {place: self._stamp_of(place) for place in sorted(self.pictures.asked)}
        newest_ns = max((stamp[0] for stamp in files.values() if stamp is not None), default=0)
        if newest_ns < self.began_ns - RECENT_NS and before == _stamp(path):
            self._files[file.name] = files
            bad_lines = [asdict(bad) for bad in file.bad]
            self._keep(entry, np.asarray(file.offsets), files=files, bad=bad_lines, content=file.content)
        return file

    def numbers(self, file: Records, asked: str) -> np.ndarray | None:
        """Cached int64 numbers of a record file opened here; `asked` is everything else that they depend on."""
        known = self._cached(self._entry(Path(file.name), "numbers", asked))
        return known[1] if known is not None and known[0]["files"] == self._files.get(file.name) else None

    def keep_numbers(self, file: Records, asked: str, numbers: np.ndarray) -> None:
        """Cache numbers until the record file changes."""
        if files := self._files.get(file.name):
            self._keep(self._entry(Path(file.name), "numbers", asked), numbers, files=files)

    def undecodable(
        self, files: Sequence[Records], *, queries: bool = True, first: int | None = None
    ) -> list[str]:
        """Existing pictures, of targets and of `queries`, that cannot be decoded, each with its first record; on all cores.

        Pictures of streams are left out, and those that only records after the `first` ones show. Bytes in data sets are decoded
        every time.
        """
        files = [file for file in files if file.size is not None]
        if not files:
            return []
        named = _named(files, queries, first)
        embedded = (
            (ref, (file.name, name)) for file in files for ref, name in _shown(file, queries, first, bytes)
        )
        pictures = chain(named.items(), embedded)
        part = () if first is None else (first,)
        entries = {file.name: self._entry(Path(file.name), "pictures", *part) for file in files}
        good: dict[str, set[int]] = {name: set() for name in entries}
        faults: list[str] = []
        last = "the first"
        known = [found[1] for entry in entries.values() if (found := self._cached(entry)) is not None]
        look = partial(_look_at, np.unique(np.concatenate([np.zeros(0, np.int64), *known])), self.began_ns)
        try:
            with (
                forked(look, chunksize=CHUNK) as look_at,
                progress_bar(total=len(named), desc="pictures", unit="picture") as bar,
            ):
                while some := list(islice(pictures, AT_ONCE)):
                    looked = look_at([ref for ref, _ in some])
                    for (_, (source, record_id)), (number, fault) in zip(some, looked, strict=True):
                        bar.update(1)
                        last = f"{source}: record {record_id!r}"
                        if fault is not None:
                            faults.append(f"{last}: {fault}")
                        elif number is not None:
                            good[source].add(number)
        except ProcessDied as error:  # what was found is kept
            faults.append(f"pictures from {last} on could not be checked: {error}")
        for name, numbers in good.items():
            self._keep(entries[name], np.array(sorted(numbers), dtype=np.int64), files={})
        return grouped(faults, MAX_REPORTED)

    def _entry(self, path: Path, *settings: object) -> Path:
        """Cache path of a file's verdict, by its name and the settings; a changed file overwrites it."""
        named = "".join(f"{part}\0" for part in (path.absolute(), path, *settings))
        return self.folder / f"{hashlib.blake2b(named.encode(), digest_size=16).hexdigest()}.npz"

    def _cached(self, entry: Path) -> tuple[dict[str, Any], np.ndarray] | None:
        """The entry and its numbers, if none of its files has changed since."""
        try:
            with np.load(entry, allow_pickle=False) as stored:  # checks the CRC of what is read
                about, numbers = json.loads(stored["about"].tobytes()), stored["numbers"]
            changed = any(self._stamp_of(place) != at for place, at in about["files"].items())
            if changed or about["code"] != version_of(rge.common, rge.data):  # which may decide differently
                return None
        except Exception:  # noqa: BLE001 - missing, or damaged in any way
            return None
        with suppress(OSError):
            os.utime(entry)
        return about, numbers

    def _stamp_of(self, place: str) -> list[int] | None:
        """Stamp of a file, or of a folder and the files in it."""
        if not os.path.isdir(place or "."):
            return _stamp(place)
        if place not in self._folders:
            self._folders[place] = _stamp_of_folder(place)
        return self._folders[place]

    def _keep(self, entry: Path, numbers: np.ndarray, **about: Any) -> None:
        text = json.dumps({**about, "code": version_of(rge.common, rge.data)}).encode()
        with suppress(OSError):
            self._forget_old()
            with replacing(entry) as waiting, waiting.open("wb") as out:
                np.savez(out, about=np.frombuffer(text, np.uint8), numbers=numbers)

    def _forget_old(self) -> None:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.suffix in (".json", ".npy", ".npz") and path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink(missing_ok=True)


class ProcessDied(UserError):
    """A process of `forked` ended before its work did."""


@contextmanager
def forked(action: Callable[[Any], T], chunksize: int) -> Iterator[Callable[[Iterable[Any]], Iterator[T]]]:
    """Yield a `map` of a function over items, on all cores; the processes inherit the function, so it need not pickle."""
    context, count = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
    try:
        with ProcessPoolExecutor(count, context, _inherit, (action,)) as pool:
            yield lambda items: pool.map(_call, items, chunksize=chunksize)
    except BrokenProcessPool as error:
        raise ProcessDied(
            f"one of {count} processes was killed or crashed; if memory ran out, give the command fewer cores "
            "(taskset -c 0 ...), otherwise a picture may crash the library that decodes it"
        ) from error


def _inherit(action: Callable[[Any], Any]) -> None:
    global _action
    _action = action


def _call(item: Any) -> Any:
    return _action(item)


_action: Callable[[Any], Any]


def _named(files: Sequence[Records], queries: bool, first: int | None) -> dict[ImageRef, tuple[str, str]]:
    """Each picture that records refer to by name, once, with its first source and record."""
    named: dict[ImageRef, tuple[str, str]] = {}
    for file in files:
        for ref, record_id in _shown(file, queries, first, str):
            named.setdefault(ref, (file.name, record_id))
    return named


def _shown(
    file: Records, queries: bool, first: int | None, kind: type[str] | type[bytes]
) -> Iterator[tuple[ImageRef, str]]:
    """Pictures of this kind (names or bytes) with the ids of their records."""
    for record in map(file.__getitem__, range(len(file))[:first]):
        for _, ref in files_of(record, queries=queries, pictures=True):
            # Documents and clips are opened when prompts are laid out, see `rge.data.layout`.
            if isinstance(ref, kind):
                yield ref, record.id


def _look_at(known: np.ndarray, began_ns: int, ref: ImageRef) -> tuple[int | None, str | None]:
    """A picture's state as a number, if it can be cached, and why it cannot be decoded; not decoded if it is `known`."""
    number = _state_of(ref, began_ns) if isinstance(ref, str) else None
    if number is not None and number in known[np.searchsorted(known, number) :][:1]:
        return number, None
    try:
        load_image(ref)
    except ImageError as error:
        return None, str(error)
    return number, None


def _state_of(ref: str, began_ns: int) -> int | None:
    """Hash of a picture's name and stamp; None if it is missing or too recent."""
    path, mark, _ = ref.partition(".parquet#")
    stamp = _stamp(path + ".parquet" if mark else ref)
    is_settled = stamp is not None and stamp[0] < began_ns - RECENT_NS
    return number_of(f"{ref}\0{stamp}") if is_settled else None


def _stamp(path: str | Path) -> list[int] | None:
    """Modification time (ns) and size; None if the file does not exist."""
    try:
        found = os.stat(path or ".")
    except (OSError, ValueError):
        return None
    return [found.st_mtime_ns, found.st_size]


def _stamp_of_folder(folder: str) -> list[int] | None:
    """Newest modification time (ns) of a folder and its files, and a hash of their names, times and sizes.

    A file that is overwritten, and a link whose target goes, leave the folder's own time as it was. File systems on a network
    send what `os.scandir` and the stats that follow it need in few answers.
    """
    stamp = _stamp(folder)
    try:
        with os.scandir(folder or ".") as entries:
            stamps = [(entry.name, _stamp_of_entry(entry)) for entry in entries]
    except OSError:
        return stamp
    newest_ns, total = stamp[0] if stamp else 0, 0
    for name, found in stamps:
        if found is not None:
            newest_ns = max(newest_ns, found[0])
        named = hashlib.blake2b(os.fsencode(name) + f"\0{found}".encode(), digest_size=8).digest()
        total += int.from_bytes(named, "big")  # in any order
    return [newest_ns, total % 2**63]


def _stamp_of_entry(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    """Modification time (ns) and size of a file; None for a folder, and for a link to nothing."""
    try:
        if entry.is_dir():
            return None
        found = entry.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size

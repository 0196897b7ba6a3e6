"""Cache of record and picture validation.

A record file is read, and a picture decoded, again only after its size or modification time changed, or that of a
folder or library with its pictures. The cache is in ``$RGE_CACHE``, otherwise in ``rge`` below ``$XDG_CACHE_HOME`` or
``~/.cache``; deleting it only costs time, and an unreadable or unwritable one counts as empty. Only good files are
cached, with what ``data.on_bad=skip`` leaves out: others have to be fixed.
"""

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pydantic

from rge.common import images, schema
from rge.common.commands import progress_bar
from rge.common.files import find_shipped, replacing, write_text
from rge.common.images import ImageError, PictureIndex, load_image
from rge.common.schema import ImageRef
from rge.data import sources
from rge.data.sources import MAX_REPORTED, BadRecord, Column, RecordFile, Records

RECENT_NS = 2 * 10**9
"""A file that changed this recently is not cached: it may change again within a tick of the file system's clock."""

AT_ONCE = 4096
"""Pictures sent to the processes at a time; those of a data set are bytes."""

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
        self._states: dict[str, dict[str, Any]] = {}

    def open(self, path: str | Path, *, need_rationale: bool, on_bad: str) -> RecordFile:
        """A record file with its pictures looked up; see `RecordFile`, also for what it raises."""
        path = find_shipped(path)
        entry = self._entry(path, need_rationale, on_bad)
        if (known := self._cached(entry)) is not None and known[0]["stamp"] == _stamp(path):
            said, offsets = known
            self._states[str(path)] = {name: said[name] for name in ("stamp", "places")}
            return RecordFile.known(path, _spill_if_large(offsets), said["bad"], said["content"])
        before = _stamp(path)
        self.pictures.asked.clear()
        file = RecordFile(
            path, need_rationale=need_rationale, pictures=self.pictures, progress=True, on_bad=on_bad
        )
        places = {place: _stamp(place) for place in sorted(self.pictures.asked)}
        if all(map(self._settled, (before, *places.values()))) and before == _stamp(path):
            self._states[file.name] = {"stamp": before, "places": places}
            verdict = {**self._states[file.name], "bad": file.bad, "content": file.content}
            self._keep(entry, np.asarray(file.offsets), verdict)
        return file

    def numbers(self, file: Records, asked: str, find: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """`find`'s int64 numbers for a record file opened here, cached until the file changes.

        `asked` is everything else that the numbers depend on; None is not cached.
        """
        entry = self._entry(Path(file.name), "numbers", asked)
        state = self._states.get(file.name)
        if state is not None and (known := self._cached(entry, state)) is not None:
            return known[1]
        found = find()
        if state is not None and found is not None:
            self._keep(entry, found.ravel(), state)
        return found

    def undecodable(self, files: Sequence[Records]) -> list[str]:
        """Existing pictures that cannot be decoded, each with its first record; on all cores.

        Pictures of streams are left out. Bytes in data sets are decoded every time.
        """
        files = [file for file in files if file.size is not None]
        if not files:
            return []
        named = list(_named_pictures(files))
        pictures: Iterator[tuple[ImageRef, str, str]] = chain(named, _embedded_pictures(files))
        entries = {file.name: self._entry(Path(file.name), "pictures") for file in files}
        good: dict[str, list[Any]] = {name: [] for name in entries}
        faults: list[str] = []
        workers = len(os.sched_getaffinity(0))
        known = np.unique(np.concatenate([_numbers(entry) for entry in entries.values()]))
        fork = multiprocessing.get_context("fork")
        with (
            ProcessPoolExecutor(workers, fork, _Known.set, (known, self.began_ns)) as pool,
            progress_bar(total=len(named), desc="pictures", unit="picture") as bar,
        ):
            try:
                while some := list(islice(pictures, AT_ONCE)):
                    looked = pool.map(_look_at, [ref for ref, _, _ in some], chunksize=32)
                    for (_, source, record_id), (number, fault) in zip(some, looked, strict=True):
                        bar.update(1)
                        if fault is not None:
                            faults.append(f"{source}: record {record_id!r}: {fault}")
                        else:
                            good[source].append(number)
            except BrokenProcessPool:
                after = named[bar.n][0] if bar.n < len(named) else f"number {bar.n}"
                faults.append(
                    f"one of the {32 * workers} pictures after {after} crashes the process that decodes it"
                )
        for name, numbers in good.items():
            _write_array(entries[name], np.array(sorted({*numbers} - {None}), dtype=np.int64))
        if (more := len(faults) - MAX_REPORTED) > 0:
            faults[MAX_REPORTED:] = [f"... and {more} more pictures"]
        return faults

    def _entry(self, path: Path, *settings: object) -> Path:
        """Cache path of a file's verdict, by its name and the settings; a changed file overwrites it."""
        return self.folder / _digest(str(path.absolute()), str(path), *settings)

    def _settled(self, stamp: list[int] | None) -> bool:
        return stamp is None or stamp[0] < self.began_ns - RECENT_NS

    def _cached(
        self, entry: Path, state: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], np.ndarray] | None:
        """The entry and its numbers, if nothing has changed since, and it matches `state`."""
        try:
            known = json.loads(entry.with_suffix(".json").read_text(encoding="utf-8"))
            numbers = _numbers(entry)
            same = known["code"] == _code() and known["sum"] == _digest(numbers.tobytes())
            if not same or any(_stamp(place) != stamp for place, stamp in known["places"].items()):
                return None
            known["bad"] = [BadRecord(**line) for line in known.get("bad", [])]
            if state is not None and any(known[name] != value for name, value in state.items()):
                return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        with suppress(OSError):
            for name in (".json", ".npy"):
                os.utime(entry.with_suffix(name))
        return known, numbers

    def _keep(self, entry: Path, numbers: np.ndarray, about: dict[str, Any]) -> None:
        known = {**about, "code": _code(), "sum": _digest(numbers.tobytes())}
        with suppress(OSError):
            self._forget_old()
            if _write_array(entry, numbers):
                write_text(entry.with_suffix(".json"), json.dumps(known, default=asdict))

    def _forget_old(self) -> None:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.suffix in (".json", ".npy") and path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink(missing_ok=True)


class _Known:
    """State inherited by the decoding processes."""

    numbers: np.ndarray = np.zeros(0, np.int64)
    began_ns = 0

    @classmethod
    def set(cls, numbers: np.ndarray, began_ns: int) -> None:
        cls.numbers, cls.began_ns = numbers, began_ns


def _shown(file: Records) -> Iterator[tuple[ImageRef, str]]:
    for record in map(file.__getitem__, range(len(file))):
        targets = [it.image for it in (*record.positives, *record.negatives) if it.image]
        yield from ((ref, record.id) for ref in (*record.query.images, *targets))


def _named_pictures(files: Sequence[Records]) -> Iterator[tuple[str, str, str]]:
    """Every picture in a file or library, once, with its first source and record."""
    seen: set[str] = set()
    for file in files:
        for ref, record_id in _shown(file):
            if isinstance(ref, str) and ref not in seen:
                seen.add(ref)
                yield ref, file.name, record_id


def _embedded_pictures(files: Sequence[Records]) -> Iterator[tuple[ImageRef, str, str]]:
    for file in files:
        yield from ((ref, file.name, name) for ref, name in _shown(file) if isinstance(ref, bytes))


def _look_at(ref: ImageRef) -> tuple[int | None, str | None]:
    """A picture's state as a number, if it can be cached, and why it cannot be decoded."""
    if isinstance(ref, bytes):
        return None, _fault_of(ref)
    path, mark, _ = ref.partition(".parquet#")
    stamp = _stamp(path + ".parquet" if mark else ref)
    number = None
    if stamp is not None and stamp[0] < _Known.began_ns - RECENT_NS:
        number = int.from_bytes(
            hashlib.blake2b(f"{ref}\0{stamp}\0{_code()}".encode(), digest_size=8).digest(), signed=True
        )
        place = np.searchsorted(_Known.numbers, number)
        if place < len(_Known.numbers) and _Known.numbers[place] == number:
            return number, None
    fault = _fault_of(ref)
    return (None, fault) if fault is not None else (number, None)


def _fault_of(ref: ImageRef) -> str | None:
    try:
        load_image(ref)
    except ImageError as error:
        return str(error)
    return None


def _stamp(path: str | Path) -> list[int] | None:
    """Modification time (ns) and size; None if the file does not exist."""
    try:
        found = os.stat(path or ".")
    except (OSError, ValueError):
        return None
    return [found.st_mtime_ns, found.st_size]


@cache
def _code() -> str:
    """Hash of the checking code: another version may decide differently."""
    texts = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (images, schema, sources)]
    return _digest(*texts, PIL.__version__, pydantic.VERSION)


def _digest(*parts: object) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part if isinstance(part, bytes) else f"{part}\0".encode())
    return found.hexdigest()


def _numbers(entry: Path) -> np.ndarray:
    """The numbers of an entry; empty if unreadable."""
    try:
        numbers = np.load(entry.with_suffix(".npy"), allow_pickle=False)
        if numbers.dtype == np.int64 and numbers.ndim == 1:
            return numbers
    except (OSError, ValueError, EOFError):
        pass
    return np.zeros(0, np.int64)


def _write_array(entry: Path, numbers: np.ndarray) -> bool:
    try:
        with replacing(entry.with_suffix(".npy")) as waiting, waiting.open("wb") as out:
            np.save(out, numbers)
    except OSError:
        return False
    return True


def _spill_if_large(numbers: np.ndarray) -> np.ndarray:
    if len(numbers) <= Column.SPILL:
        return numbers
    file = tempfile.TemporaryFile()
    numbers.tofile(file)
    file.flush()
    return np.memmap(file, dtype=np.int64, mode="r")

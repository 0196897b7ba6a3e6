"""The pictures of a folder, and how names in a table refer to them."""

import difflib
import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from eval.benchmarks.release_files import ReleaseError
from rge.common.commands import progress_bar
from rge.common.images import ImageError, load_image
from rge.common.schema import safe_id
from rge.tables.listing import Exclude, Skipped, visible_files
from rge.tables.names import spellings
from rge.tables.pictures import SUFFIXES
from rge.tables.rows import INVISIBLE, TABLES

SEPARATORS = re.compile(r"([;,|\n])")
ESCAPE = re.compile(r"%(?=[0-9A-Fa-f]{2})")
"""A literal percent sign that looks like an escape: ``a b.png`` and ``a%20b.png`` are two pictures."""


class Pool:
    """The distinct pictures of a folder, without the subfolder ``out`` and what the patterns of ``exclude`` leave out.

    Attributes:
        files: candidate id -> path, sorted by path.
        unreadable: id -> reason, for files that cannot be opened.
        skipped: what is neither a picture nor a table.
    """

    def __init__(self, root: Path, *, out: Path, exclude: Sequence[str] = ()):
        self.root, self.files, self.unreadable = root, dict[str, Path](), dict[str, str]()
        self._steps: list[dict[str, set[str]]] = [defaultdict(set) for _ in range(6)]
        self._copies, self.skipped, self._others = 0, Skipped(), set[str]()
        id_of: dict[bytes, str] = {}
        found = visible_files(root, exclude=Exclude(exclude), skipped=self.skipped)
        written = out.resolve()
        every = [
            path
            for folder, names in found
            for name in names
            if written not in (path := Path(folder, name)).resolve().parents
        ]
        paths = sorted(path for path in every if path.suffix.lower() in SUFFIXES and path.is_file())
        for path in every:
            if path.suffix.lower() not in (*SUFFIXES, *TABLES):
                self.skipped.add(path.name)
                self._others.add(_normal(path.name))
        for path in progress_bar(paths, desc="pictures", unit="picture", delay=2):
            self._add(path, id_of)
        if not self.files:
            only = f"; it holds {self.skipped}" if self.skipped else ""
            raise ReleaseError(
                f"no picture in it can be opened; supported: {', '.join(SUFFIXES)}{only}", root
            )

    def _add(self, path: Path, id_of: dict[bytes, str]) -> None:
        inside = path.relative_to(self.root).as_posix()
        data = path.read_bytes()
        content = hashlib.sha256(data).digest()
        self._copies += content in id_of
        name = id_of.setdefault(content, safe_id(ESCAPE.sub("%25", inside)))
        if name not in self.files and name not in self.unreadable:
            try:
                load_image(data)
                self.files[name] = Path(os.path.abspath(path))
            except ImageError as error:
                self.unreadable[name] = error.reason
        exact = (inside, path.name, path.stem)
        for step, key in zip(self._steps, (*exact, *map(_normal, exact)), strict=True):
            step[key].add(name)

    @property
    def notes(self) -> list[str]:
        """Messages about pictures that were left out or merged."""
        notes = []
        if self._copies:
            notes.append(f"byte-identical copies of other pictures, merged in the pool: {self._copies}")
        if self.skipped:
            notes.append(f"skipped, since they are no pictures: {self.skipped}")
        if self.unreadable:
            notes.append(f"pictures left out because they cannot be opened: {', '.join(self.unreadable)}")
        return notes

    def find(self, name: str) -> set[str]:
        """Ids of the pictures that a name can refer to, by the first rule that matches.

        Rules: an exact path, file name or stem, in each of the `spellings` of the name; then the same ignoring case, Unicode
        composition, kinds of white space and invisible characters; then 7.0, into which a spreadsheet turns 7, as 7.
        """
        tried = [path.removeprefix("./") for path in spellings(name, self.root.name)]
        for steps, keys in ((self._steps[:3], tried), (self._steps[3:], map(_normal, tried))):
            for key in keys:
                if found := next((step[key] for step in steps if key in step), None):
                    return found
        return self.find(name[:-2]) if re.fullmatch(r"\d+\.0", name) else set()

    def names(self, cell: str) -> list[str]:
        """Split a cell into names at ; , | or line breaks, which may also be part of a file's name."""
        parts = SEPARATORS.split(cell.strip())
        names, start = [], 0
        while start < len(parts):
            stops = range(len(parts), start, -2)
            stop = next((s for s in stops if self.find("".join(parts[start:s]).strip())), start + 1)
            name = "".join(parts[start:stop]).strip()
            if stop > start + 1 and all(self.find(part.strip()) for part in parts[start:stop:2]):
                raise ReleaseError("it is both the name of a file and a list of others: rename one", key=name)
            names.append(name)
            start = stop + 1
        return [name for name in names if name]

    def resolve(self, name: str) -> str:
        """The only picture that a name can refer to."""
        matches = sorted(self.find(name))
        if len(matches) > 1:
            raise ReleaseError(
                f"it could be {' or '.join(map(repr, matches[:3]))}: give the full path", key=name
            )
        if matches and matches[0] in self.unreadable:
            raise ReleaseError(f"it cannot be opened: {self.unreadable[matches[0]]}", key=name)
        if matches:
            return matches[0]
        if _normal(name.replace("\\", "/").rpartition("/")[2]) in self._others:
            raise ReleaseError(f"its kind is not read: save it as one of {', '.join(SUFFIXES)}", key=name)
        known = {_normal(path): path for path in (*self._steps[1], *self._steps[0])}
        near = difflib.get_close_matches(_normal(name), known, n=1)
        hint = f"; did you mean {known[near[0]]!r}?" if near else ""
        raise ReleaseError(f"the picture is not in the folder{hint}", key=name)


def _normal(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).translate(INVISIBLE).casefold().split())

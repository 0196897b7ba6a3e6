"""Files that are there whole or not at all, written under another name and renamed; and those that come with the package."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rge.common.errors import UserError

HOME = Path(__file__).resolve().parents[2]
"""What holds the packages `rge`, `eval` and `data_prep`: the checkout, or site-packages."""
RECIPES = HOME / "rge" / "recipes" if (HOME / "rge" / "recipes").is_dir() else HOME / "recipes"
"""A wheel has them inside `rge`; a checkout beside it, where people look."""
DEMO_CHECKPOINT = HOME / "rge" / "demo_checkpoint"
"""What `make demo` trains, in bfloat16 (scripts/ship_demo.py); it comes with the package, under the name ``demo``."""

SUFFIX = ".tmp"
"""Of a file that is being written; what a killed process leaves behind has it too."""


def checkpoint_folder(named: Path) -> Path:
    """The directory that ``checkpoint=`` names: ``demo`` is the shipped one, unless a folder of that name is there."""
    return DEMO_CHECKPOINT if named == Path("demo") and not named.exists() else named


class FileError(UserError, OSError):
    """A file cannot be written; the message names it and says why."""


@contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends well, and is gone when it does not.

    Whoever sees `path` sees a whole file: the old one or the new one, also after a kill or a power cut.

    Args:
        path: of the file; its folder is made.
        sync: wait for the disk. Without, a power cut may leave an empty file: for who writes many and calls `os.sync` once.

    Yields:
        Where to write, in the same folder.

    Raises:
        FileError: it cannot be written, such as on a full disk.
    """
    path = Path(path)
    # The process is part of the name: two that write the same file must not write into each other's.
    waiting = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield waiting
            if sync:
                with waiting.open("rb") as written:
                    os.fsync(written.fileno())
            waiting.replace(path)
        finally:
            waiting.unlink(missing_ok=True)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from None


def write_bytes(path: str | Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file whole or not at all, see `replacing`."""
    with replacing(path, sync=sync) as waiting:
        waiting.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all, see `replacing`."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, content: Any, *, indent: int = 1) -> None:
    """Write JSON whole or not at all, see `replacing`."""
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any | None:
    """Content of a JSON file; None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    if not Path(path).is_file():
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def find_shipped(path: str | Path) -> Path:
    """Where a file or folder is that a recipe or a command names.

    A path is relative to the working folder. One that is not there and begins with ``recipes/`` or ``data_prep/`` is
    looked for among the files that came with the package, so that the demo can be run from any folder.

    Args:
        path: as it was written.

    Returns:
        A path that exists, else `path` as it was.
    """
    path = Path(path)
    if path.is_absolute() or path.exists() or not path.parts:
        return path
    shipped = {"recipes": RECIPES, "data_prep": HOME / "data_prep"}.get(path.parts[0])
    if shipped is None or not (found := shipped.joinpath(*path.parts[1:])).exists():
        return path
    return found

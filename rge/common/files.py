"""Atomic writes, files that ship with the package, and how many may be open."""

import glob
import json
import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rge.common.errors import UserError

HOME = Path(__file__).resolve().parents[2]
"""What holds the packages `rge`, `eval` and `data_prep`: the checkout, or site-packages."""
RECIPES = HOME / "rge" / "recipes" if (HOME / "rge" / "recipes").is_dir() else HOME / "recipes"
"""A wheel has them inside `rge`; a checkout beside it, where people look."""
DEMO_BASE = HOME / "rge" / "demo_base"
"""What `make demo` starts from: the recipe's backbone after its first stage, in bfloat16 (scripts/ship_demo.py)."""
DEMO_CHECKPOINT = HOME / "rge" / "demo_checkpoint"
"""What `make demo` trains, in bfloat16 (scripts/ship_demo.py); it comes with the package, under the name ``demo``."""

SUFFIX = ".tmp"
"""Of a file that is being written; what a killed process leaves behind has it too."""
_HOST = re.sub(r"[^\w-]", "-", socket.gethostname())[:40]
DESCRIPTORS = 1 << 16
"""Open files and connections that a process asks for, where the machine's hard limit lets it have so many."""
LEFT_OVER_S = 86_400
"""A temporary file that was not written to for this long is left over, whichever machine wrote it."""


def checkpoint_folder(named: Path) -> Path:
    """The directory that ``checkpoint=`` names: ``demo`` is the shipped one, unless a folder of that name is there."""
    return DEMO_CHECKPOINT if named == Path("demo") and not named.exists() else named


def raise_descriptor_limit() -> None:
    """Ask for more open files than the usual 1,024, of which data workers, connections and trackers want many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FileError(UserError, OSError):
    """A file cannot be written; the message names the file and the reason."""


@contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends well, and is gone when it does not.

    Readers of `path` see a whole file, the old one or the new one, also after a kill or a power cut.

    Args:
        path: of the file; its folder is made.
        sync: wait for the disk. Without, a power cut may leave an empty file: for callers that write many files and call `os.sync` once.

    Yields:
        Where to write, in the same folder.

    Raises:
        FileError: it cannot be written, such as on a full disk.
    """
    path = Path(path)
    # The process is part of the name: two that write the same file must not write into each other's.
    waiting = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}{SUFFIX}")
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


def remove_left_over(folder: Path) -> None:
    """Delete the temporary files of processes that were killed; those of running ones stay, on any machine."""
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime > LEFT_OVER_S or _writer_is_gone(path):
                path.unlink()
        except FileNotFoundError:
            pass  # its writer has just finished


def _writer_is_gone(path: Path) -> bool:
    """Whether the process that wrote a temporary file ran on this machine and has ended."""
    host, _, pid = path.name.removesuffix(SUFFIX).rpartition(".")
    if not (host.endswith(f".{_HOST}") and pid.isdigit()):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # alive, and another user's
    return False


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


def same_mode(folder: Path, like: Path) -> None:
    """Give every file of a folder the mode of one of them: safetensors' own are private to the user."""
    for path in folder.iterdir():
        path.chmod(like.stat().st_mode)


OWNED = ".rge-files.json"
"""In a folder that `replacing_folder` wrote: the files that are its own."""


@contextmanager
def replacing_folder(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` when the block ends well, and is gone when it does not.

    Only a folder that was written by this function is replaced, and only as long as it holds nothing else. Two renames put
    the new one into its place; after a kill between them the next call puts the old one back.

    Yields:
        Where to write, beside `path`.

    Raises:
        FileError: something is at `path` that may not be replaced.
    """
    path = Path(path)
    new, old = (path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{word}") for word in ("new", "old"))
    if not path.exists() and (left := sorted(path.parent.glob(f".{glob.escape(path.name)}.*.old"))):
        left[-1].rename(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise FileError(f"{path} already exists: choose another, or set overwrite=true")
        _refuse_foreign_files(path)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        write_json(new / OWNED, sorted(_files_below(new)))
        if path.exists():
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)


def _files_below(folder: Path) -> set[str]:
    return {found.relative_to(folder).as_posix() for found in folder.rglob("*") if not found.is_dir()}


def _refuse_foreign_files(path: Path) -> None:
    try:
        owned = {OWNED, *json.loads((path / OWNED).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        raise FileError(
            f"{path} was not written by this program, or by an older version: overwrite=true does not replace it; move or "
            "delete it, or give another"
        ) from None
    if strange := sorted(_files_below(path) - owned):
        raise FileError(
            f"{path} holds {strange[0]!r}, which does not belong to it, so overwrite=true does not replace it: move it away"
        )


def read_json(path: str | Path) -> Any | None:
    """Content of a JSON file; None if it does not exist.

    Raises:
        UserError: it cannot be read.
    """
    if not Path(path).is_file():
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines that processes append to; none where there is no file.

    Lines that are not JSON are left out: a kill cut them off.
    """
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def find_shipped(path: str | Path) -> Path:
    """Resolve a path given in a recipe or command.

    A path is relative to the working folder. One that is not there and begins with ``recipes/`` or ``data_prep/`` is
    looked for among the files that came with the package, so that the demo can be run from any folder.

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

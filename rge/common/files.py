"""Atomic writes, locks, files that ship with the package, and the limit of open files."""

import errno
import fcntl
import glob
import json
import os
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rge.common.errors import UserError

HOME = Path(__file__).resolve().parents[2]
"""Parent of the packages `rge`, `eval` and `data_prep`: the checkout, or site-packages."""
RECIPES = HOME / "rge" / "recipes" if (HOME / "rge" / "recipes").is_dir() else HOME / "recipes"
"""Inside `rge` in a wheel, next to it in a checkout."""
DEMO_BASE = HOME / "rge" / "demo_base"
"""Starting point of `make demo`, of recipes/small_models/demo.yaml, in bfloat16 (scripts/ship_demo.py); ships as ``demo_base``."""
DEMO_CHECKPOINT = HOME / "rge" / "demo_checkpoint"
"""Result of `make demo`, in bfloat16 (scripts/ship_demo.py); ships with the package as ``demo``."""

LOCK = ".lock"
"""File by which a run holds its folder, see `held`."""
_HELD_HERE: set[Path] = set()
SUFFIX = ".tmp"
"""Of temporary files, which a killed process leaves behind."""
_HOST = re.sub(r"[^\w-]", "-", socket.gethostname())[:40]
DESCRIPTORS = 1 << 16
"""Open files and connections that a process requests, up to the machine's hard limit."""
LEFT_OVER_S = 86_400
"""A temporary file untouched for this long is stale, even if another machine wrote it."""


def checkpoint_folder(named: Path) -> Path:
    """The directory that a path of a model names: ``demo`` and ``demo_base`` are the shipped ones, unless such a folder exists."""
    shipped = {"demo": DEMO_CHECKPOINT, "demo_base": DEMO_BASE}
    return named if named.exists() else shipped.get(str(named), named)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files, usually 1,024: data workers, connections and trackers need many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FileError(UserError, OSError):
    """A file cannot be written; the message names the file and the reason."""


@contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` if the block succeeds, and is deleted otherwise.

    Readers of `path` see a complete file, the old or the new one, even after a kill or a power cut. Without `sync`, a power cut may
    leave an empty file: for callers that write many files and call `os.sync` once.

    Raises:
        FileError: it cannot be written, for example because the disk is full.
    """
    path = Path(path)
    # The name contains the process id, since two processes may write the same file.
    temporary = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if sync:
                with temporary.open("rb") as written:
                    os.fsync(written.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"it cannot be written: {error.strerror or error}", path, kind="unwritten") from None


def remove_left_over(folder: Path) -> None:
    """Delete the temporary files of killed processes, but not those of processes still running on any machine."""
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime > LEFT_OVER_S or _writer_is_gone(path):
                path.unlink()
        except FileNotFoundError:
            pass  # its writer has just renamed it


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
        pass  # running, as another user
    return False


def write_bytes(path: str | Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file atomically, see `replacing`."""
    with replacing(path, sync=sync) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically, see `replacing`."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, content: Any, *, indent: int = 1) -> None:
    """Write a JSON file atomically, see `replacing`."""
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_NOTE = "a pointer of Git LFS is in its place: fetch the file itself, such as with git lfs pull"


def is_pointer(start: bytes) -> bool:
    """Whether a file that begins so is what Git LFS leaves in place of a file that it has not fetched."""
    return start.startswith(_POINTER)


def pointer_note(path: str | Path) -> str:
    """What a message about an unreadable file, or folder, adds if Git LFS has left a pointer in place of a file; else nothing."""
    path = Path(path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with suppress(OSError), file.open("rb") as data:
            if is_pointer(data.read(len(_POINTER))):
                return f"; {file.name}: {POINTER_NOTE}"
    return ""


def same_mode(folder: Path, like: Path) -> None:
    """Give every file of a folder the mode of one of them: safetensors makes its files private to the user."""
    for path in folder.iterdir():
        path.chmod(like.stat().st_mode)


OWNED = ".rge-files.json"
"""List of the files that `replacing_folder` wrote, in their folder."""


@contextmanager
def replacing_folder(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, which replaces `path` if the block succeeds, and is deleted otherwise.

    Only a folder written by this function is replaced, and only if it contains nothing else. Replacing takes two renames; after a
    kill between them, the next call restores the old folder.

    Raises:
        FileError: `path` exists and must not be replaced, or it is or holds the current folder.
    """
    path = Path(path)
    if Path.cwd().is_relative_to(path.resolve()):
        raise FileError(
            "it is or contains the current folder, so it cannot be replaced: choose another",
            path,
            kind="current",
        )
    new, old = (path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{word}") for word in ("new", "old"))
    if not path.exists() and (backups := sorted(path.parent.glob(f".{glob.escape(path.name)}.*.old"))):
        backups[-1].rename(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise FileError("it already exists: choose another, or set overwrite=true", path).about(
                "overwrite"
            )
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
            "it was not written by this program: overwrite=true does not replace it; move or delete it, or give another",
            path,
            kind="foreign",
        ) from None
    from_a_mac = {
        name for name in _files_below(path) if os.path.basename(name).startswith((".DS_Store", "._"))
    }
    if strange := sorted(_files_below(path) - owned - from_a_mac):
        raise FileError(
            "it was not written with the rest, so overwrite=true does not replace this folder: move it away",
            path,
            key=strange[0],
        )


def read_json(path: str | Path) -> Any | None:
    """Content of a JSON file; None if it does not exist. Raises `UserError`: it cannot be read."""
    if not Path(path).is_file():
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"it cannot be read: {error}", path, kind="unreadable") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, if it exists; lines that a kill cut off are skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class InUseError(UserError):
    """Another run uses the folder; the message names it."""


@contextmanager
def held(folder: Path, lock: str = LOCK, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder against other processes, and other parts of this one; the kernel releases it when the process ends.

    It is a POSIX record lock: ``flock`` would live on in every forked data worker. It holds between containers that share the
    folder, and over NFS between machines. `lock` is the name of its file; with `wait`, another process is waited for.

    Raises:
        InUseError: it is held; the message names the process, its machine and since when.
        OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / lock
    if (
        path in _HELD_HERE
    ):  # a record lock does not lock its own process out, and closing the file again would free it
        raise InUseError("it is in use by this process: wait for it, or give another out=", folder)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InUseError(
                    f"it is in use by {_holder(path)}: wait for it, end it, or give another out= (if its machine is gone for good, "
                    f"delete {folder / lock})",
                    folder,
                ) from None
            # Some network file systems are mounted without locks, and no other disk is available.
            message = f"the file system of {folder} has no locks ({error.strerror}): a second run in it cannot be detected"
            print(f"warning: {message}", file=sys.stderr)  # noqa: T201
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        file.flush()
        _HELD_HERE.add(path)
        try:
            yield
        finally:
            _HELD_HERE.discard(path)


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet


def relative(path: str | Path, folder: str | Path) -> str:
    """A path relative to a folder.

    Links above the path, and in that of the folder, are resolved first: ".." after a link leads out of the link's target.
    """
    path = Path(path)
    return os.path.relpath(path.parent.resolve() / path.name, Path(folder).resolve())


def find_shipped(path: str | Path) -> Path:
    """Resolve a path given in a recipe or command, so that the demo runs in any folder.

    A relative path that does not exist in the working folder and starts with ``recipes/`` or ``data_prep/`` is resolved to the
    file that ships with the package, if there is one.
    """
    path = Path(os.path.expanduser(path))
    if path.is_absolute() or path.exists() or not path.parts:
        return path
    folder = {"recipes": RECIPES, "data_prep": HOME / "data_prep"}.get(path.parts[0])
    if folder is None or not (shipped := folder.joinpath(*path.parts[1:])).exists():
        return path
    return shipped

"""Releases on the Hugging Face hub: downloaded at one commit, and unpacked.

All files of a repository come from one commit, recorded in ``fetch.json``. Repeating the download resumes an interrupted one at the
same commit; an archive is unpacked once.
"""

import signal
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from rge.common.errors import UserError
from rge.common.files import read_json, write_json
from rge.web.client import make_client

FETCHED = "fetch.json"

Repositories = Mapping[str, tuple[str, Sequence[str]]]
"""Repository on the hub -> folder below that of the release, and patterns of its files (empty: all)."""


def fetch_release(
    out: Path, name: str, repos: Repositories, unpack: Mapping[str, str], revision: str | None = None
) -> dict[str, Any]:
    """Download a release into the folder `out`, and unpack it; returns the content of ``fetch.json``.

    Args:
        out: created if needed; it holds one release.
        name: of the release.
        repos: where its files are.
        unpack: archive -> target folder, both below `out`; an archive may be split into ``NAME.part-00`` or ``NAME-00`` ...
        revision: commit, tag or branch; None: the commit of an earlier call, else the newest.

    Raises:
        UserError: another release or commit is in the folder, the hub cannot be reached, or an archive is broken.
    """
    out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = read_json(out / FETCHED) or {"commits": {}, "unpacked": {}}
    if about.setdefault("benchmark", name) != name:
        raise UserError(f"it holds {about['benchmark']}: choose another out=", out, key="out")
    _download(out, repos, revision, about)
    for archive, folder in unpack.items():
        patterns = (archive, f"{archive}.part-*", f"{archive}-[0-9]*")
        pieces = sorted(path for pattern in patterns for path in out.glob(pattern))
        size = sum(path.stat().st_size for path in pieces)
        if pieces and about["unpacked"].get(archive) != size:
            unpack_archive(out / archive, pieces, out / folder)
            about["unpacked"][archive] = size
            write_json(out / FETCHED, about)
    return about


def _download(out: Path, repos: Repositories, revision: str | None, about: dict[str, Any]) -> None:
    from httpx import Client, HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    make_client(Client).close()  # the hub's own client ends in a traceback where this one names the variable
    for repo, (folder, patterns) in repos.items():
        try:
            wanted = revision or about["commits"].get(repo) or "main"
            commit = str(HfApi().dataset_info(repo, revision=wanted).sha)
            if (known := about["commits"].setdefault(repo, commit)) != commit:
                raise UserError(
                    f"it holds commit {known[:12]}, not {commit[:12]}: choose another out=, or leave out revision=",
                    out,
                    repo,
                )
            write_json(out / FETCHED, about)
            with _ending_at_once() as bar:
                snapshot_download(
                    repo, repo_type="dataset", revision=commit, local_dir=out / folder, allow_patterns=list(patterns) or None,
                    tqdm_class=bar,
                )  # fmt: skip
        except (OSError, HTTPError, HFValidationError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"it could not be fetched from the hub: {reason}. Downloaded files are kept; run the same command again",
                repo,
            ) from None


@contextmanager
def _ending_at_once() -> Iterator[type]:
    """A progress bar for the hub's download threads, which ends them after Ctrl-C: the hub waits for files that are under way."""
    from huggingface_hub.utils import tqdm

    asked = threading.Event()

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if asked.is_set():
                raise KeyboardInterrupt
            return super().update(n)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield tqdm
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        asked.set()
        before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield Bar
    finally:
        signal.signal(signal.SIGINT, before)


def unpack_archive(archive: Path, pieces: Sequence[Path], folder: Path) -> None:
    """Extract all files into ``folder``, and nothing outside it; UserError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        else:  # read sequentially, so that pieces need not be joined on disk
            with _joined(pieces) as whole, tarfile.open(fileobj=whole, mode="r|*") as file:
                _extract(file, folder)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UserError(f"it cannot be unpacked into {folder}: {error}", archive) from None


def _extract(file: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        file.extractall(folder, filter="data")
        return
    for member in file:  # Python before 3.11.4
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is not a file inside the archive's folder")
        file.extract(member, folder)


@contextmanager
def _joined(pieces: Sequence[Path]) -> Iterator[Any]:
    """The pieces of a file as one stream that can be read."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in pieces]

        def read(size: int) -> bytes:
            return next(filter(None, (file.read(size) for file in files)), b"")

        yield SimpleNamespace(read=read)


def check_whole(out: Path, lacking: Sequence[str], *, partial: bool) -> None:
    """Refuse (UserError) a release of which something is lacking, unless `partial` allows it."""
    if lacking and not partial:
        raise UserError(
            f"it is incomplete: {'; '.join(lacking)}. Run the same command again, or pass partial=true to continue with this part",
            out,
            kind="partial",
        )

"""Client of a running `rge serve` of this user, over a Unix socket.

Imports nothing heavy, so that a command starts in a fraction of a second.
"""

import http.client
import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from rge import __version__
from rge.common.errors import UserError
from rge.index.options import Server

WAIT_S = 300
"""How long an answer may take; the model may have to write for others first."""
NOT_MINE = 409
"""Status of a server with another checkpoint or version; the next one is asked."""


def run_folder() -> Path:
    """Where servers of this user are found: ``RGE_RUN``, else below ``XDG_RUNTIME_DIR``, else below the temporary folder."""
    if chosen := os.environ.get("RGE_RUN"):
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(runtime):
        return Path(runtime) / "rge"
    return Path(tempfile.gettempdir()) / f"rge-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Whether only this user can put a socket there; in a shared folder another user could answer instead."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def asked(server: Server, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Send JSON to the newest running server that takes it.

    Returns:
        The socket of the server that answered, and its answer; None where `server` is ``none`` or none has the right checkpoint.

    Raises:
        UserError: what was asked is wrong, or the server does not answer.
    """
    folder = run_folder()
    if server == "none" or not is_private(folder):
        return None
    for place in sorted(folder.glob("*.sock"), key=_age, reverse=True):
        if (found := _answer(place, path, body)) is not None:
            return str(place), found
    return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _answer(place: Path, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    connection = _Connection(place)
    try:
        try:
            connection.connect()
        except ConnectionRefusedError:
            place.unlink(missing_ok=True)  # its server was killed
            return None
        except OSError:
            return None
        connection.request(
            "POST", path, json.dumps(body | {"version": __version__}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        found = json.loads(answer.read())
    except TimeoutError:
        raise UserError(
            f"the server at {place} did not answer within {WAIT_S} s; server=none loads the model here"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(
            f"the server at {place} ended while it was asked ({error or type(error).__name__}); ask again"
        ) from None
    finally:
        connection.close()
    if answer.status == NOT_MINE:
        return None
    if answer.status != 200:
        raise UserError(found.get("error", f"the server at {place} answered {answer.status}"))
    return dict(found)


class _Connection(http.client.HTTPConnection):
    def __init__(self, place: Path):
        super().__init__("localhost", timeout=WAIT_S)
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._place))

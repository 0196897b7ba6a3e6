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
"""Status from a server with another checkpoint or version; the next one is tried."""


def run_folder() -> Path:
    """Folder of this user's sockets: ``RGE_RUN``, else below ``XDG_RUNTIME_DIR``, else below the temporary folder."""
    if folder := os.environ.get("RGE_RUN"):
        return Path(folder)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(runtime):
        return Path(runtime) / "rge"
    return Path(tempfile.gettempdir()) / f"rge-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Whether only this user can put a socket there; in a shared folder another user could answer instead."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def ask_server(server: Server, route: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Send JSON to the running servers, the newest first; `UserError` if the request is wrong or a server does not answer.

    Returns:
        The path of the socket that answered, and its answer; None if `server` is ``none`` or no server has the checkpoint.
    """
    folder = run_folder()
    if server == "none" or not is_private(folder):
        return None
    for path in sorted(folder.glob("*.sock"), key=_modified_at, reverse=True):
        if (answer := _ask(path, route, body)) is not None:
            return str(path), answer
    return None


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _ask(path: Path, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
    connection = http.client.HTTPConnection("localhost", timeout=WAIT_S)
    try:
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(WAIT_S)
            connection.sock.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # its server was killed
            return None
        except OSError:
            return None
        connection.request(
            "POST", route, json.dumps(body | {"version": __version__}), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer = json.loads(response.read())
    except TimeoutError:
        raise UserError(
            f"the server at {path} did not answer within {WAIT_S} s; server=none loads the model here"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(
            f"the server at {path} ended while it was asked ({error or type(error).__name__}); ask again"
        ) from None
    finally:
        connection.close()
    if response.status == NOT_MINE:
        return None
    if response.status != 200:
        raise UserError(answer.get("error", f"the server at {path} answered {response.status}"))
    return dict(answer)

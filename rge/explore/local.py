"""The Unix socket over which `rge search` and `rge explore` use the model of a running `rge serve`.

Only this user can connect, since the folder is private; nothing here is reachable over the network.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request

from rge import __version__
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT
from rge.embedder import Embedder
from rge.index.options import SearchOptions
from rge.index.warm import NOT_MINE, is_private, run_folder

JOIN_S = 5.0


class OtherError(UserError):
    """This server cannot answer; another may."""


@contextmanager
def found_by_commands(embedder: Embedder, name: str) -> Iterator[None]:
    """Answer `rge search` and `rge explore` of this user inside the block; `embedder` must be thread-safe."""
    folder = run_folder()
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(folder):
                raise OSError(f"{folder} is open to other users")
            path = folder / f"{os.getpid()}.sock"
            stack.enter_context(_served(_Local(embedder, name, folder, stack).app, path))
        except OSError as error:
            message = f"rge serve: rge search and rge explore will not find this server: {error}"
            print(message, file=sys.stderr)  # noqa: T201
        yield


@contextmanager
def _served(app: FastAPI, path: Path) -> Iterator[None]:
    """Serve an application on a Unix socket, in a separate thread."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(128)
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, daemon=True, name=f"rge-{path.stem}"
    )
    thread.start()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        server.should_exit = True
        thread.join(JOIN_S)


class _Local:
    """The routes."""

    def __init__(self, embedder: Embedder, name: str, folder: Path, stack: ExitStack):
        self._embedder, self._name, self._folder, self._stack = embedder, name, folder, stack
        self._indices: dict[str, Any] = {}
        self._pages: dict[tuple[str | None, str], tuple[str, int]] = {}
        self._index_lock, self._page_lock = threading.Lock(), threading.Lock()
        self.app = FastAPI(openapi_url=None, exception_handlers={ValueError: _refused})
        self.app.add_api_route("/search", self.search, methods=["POST"])
        self.app.add_api_route("/explore", self.explore, methods=["POST"])

    def search(self, body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008 - FastAPI's own form
        """Search like `rge search`."""
        from rge.index.search import answer

        self._check_version(body)
        options = SearchOptions(**body)
        rationale, hits = answer(self._embedder, self._index(options.index), options)
        return {"name": self._name, "rationale": rationale, "hits": [asdict(hit) for hit in hits]}

    def explore(self, body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        """Serve the page of `rge explore` on another socket."""
        from rge.explore.app import application
        from rge.explore.explorer import Explorer, demo_examples, demo_gallery

        self._check_version(body)
        key = body["index"], body["host"]
        with self._page_lock:
            if key not in self._pages:
                if body["index"] is not None:
                    explorer = Explorer(self._embedder, self._index(body["index"]), [])
                elif self._embedder.checkpoint == DEMO_CHECKPOINT:
                    explorer = Explorer(self._embedder, demo_gallery(self._embedder), demo_examples())
                else:
                    raise OtherError("another checkpoint than the demo's")
                path = self._folder / f"{os.getpid()}-{len(self._pages)}.page"
                self._stack.enter_context(_served(application(explorer, body["host"]), path))
                self._pages[key] = str(path), len(explorer.index)
            page_socket, num_items = self._pages[key]
        return {"name": self._name, "socket": page_socket, "items": num_items}

    def _check_version(self, body: dict[str, Any]) -> None:
        if body.pop("version", None) != __version__:
            raise OtherError("another version")

    def _index(self, uri: str) -> Any:
        from rge.index.store import Index

        with self._index_lock:
            index = self._indices.get(uri)
            # Keep the object, which caches its vectors, unless the index was created anew.
            if index is None or Index.open(uri).about != index.about:
                index = self._indices[uri] = Index.open(uri)
        if index.about["checkpoint_hash"] != self._embedder.checkpoint_hash:
            raise OtherError("another checkpoint")
        return index


async def _refused(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, NOT_MINE if isinstance(error, OtherError) else 400)

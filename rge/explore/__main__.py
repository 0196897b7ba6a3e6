"""`rge explore`: a local web page to look into a checkpoint.

rge explore                       # the demo's checkpoint and its test drawings
rge explore index=gallery         # an index of your own
"""

import asyncio
import socket
import sys
import threading
import webbrowser
from importlib.util import find_spec

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.explore.address import bound, url_of
from rge.explore.options import ExploreOptions
from rge.index.search import absolute
from rge.index.warm import asked as ask_server


def main(words: list[str]) -> int:
    """Listen until a signal ends it."""
    asked = parse_options(ExploreOptions, words, "rge explore")
    if missing := [name for name in ("fastapi", "lancedb", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"rge explore needs {', '.join(missing)}: pip install -e '.[explore]'")
    listening = bound(asked.host, asked.port, listens=True)
    address = url_of(listening)
    there = {"index": None if asked.index is None else absolute(asked.index), "host": asked.host}
    found = None if asked.plugins or asked.checkpoint else ask_server(asked.server, "/explore", there)
    if found is not None:
        place, page = found
        print(f"answered by rge serve with {page['name']}, at {place}")  # noqa: T201
        _announce(asked, page["name"], page["items"], address)
        asyncio.run(_forward(listening, page["socket"]))
        return 0
    import uvicorn

    from rge.embedder import Embedder
    from rge.explore.app import application
    from rge.explore.explorer import Explorer, demo_examples, demo_gallery
    from rge.index.store import Index

    if asked.index is None:
        checkpoint = asked.checkpoint or "demo"
        embedder = Embedder.from_pretrained(checkpoint, base=asked.base)
        explorer = Explorer(embedder, demo_gallery(embedder), demo_examples())
    else:
        index = Index.open(asked.index)
        checkpoint = asked.checkpoint or index.about["checkpoint"]
        explorer = Explorer(index.embedder(asked.checkpoint, asked.base), index, [])
    _announce(asked, checkpoint, len(explorer.index), address)
    config = uvicorn.Config(
        application(explorer, asked.host), log_level="warning", timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _announce(asked: ExploreOptions, checkpoint: str, items: int, address: str) -> None:
    print(f"{checkpoint}, {items} items: {address}  (Ctrl-C ends it)", flush=True)  # noqa: T201
    if asked.open:
        threading.Timer(1, webbrowser.open, [address]).start()


async def _forward(listening: socket.socket, place: str) -> None:
    """Hand every connection to the server that has the model."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        except OSError:
            pass  # one side has disconnected, which ends the other's stream
        finally:
            writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_unix_connection(place)
        except OSError:
            ended = "error: the server that has the model has ended; start `rge explore` again"
            print(ended, file=sys.stderr)  # noqa: T201
            writer.close()
            return
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    server = await asyncio.start_server(handle, sock=listening)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    start(main)

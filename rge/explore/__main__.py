"""`rge explore`: a local web page to look into a checkpoint.

rge explore                       # the demo's checkpoint and its test drawings
rge explore index=gallery         # an index of your own
"""

import threading
import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.common.registry import PluginOptions
from rge.serving.address import bound, url_of


@dataclass(kw_only=True)
class ExploreOptions(PluginOptions):
    """Open a local web page to explore a checkpoint: ask, watch it write, edit its rationale, and see the hits."""

    index: str | None = None
    """An index made by ``rge index``; null: the demo's test drawings, embedded at the start and kept in memory."""
    checkpoint: str | None = None
    """Checkpoint: a directory, an id on the hub, or ``demo``; null: the one that the index was made with, else
    ``demo``."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's loopback address lets others in, without a password."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """Port to listen on; 0: any free port."""
    open: bool = False
    """Open the page in the browser."""


def main(words: list[str]) -> int:
    """Serve the page until a signal ends it."""
    options = parse_options(ExploreOptions, words, "rge explore")
    if missing := [name for name in ("fastapi", "lancedb", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"rge explore needs {', '.join(missing)}: pip install -e '.[explore]'")
    listener = bound(options.host, options.port, listens=True)
    import uvicorn

    from rge.embedder import Embedder
    from rge.explore.app import application
    from rge.explore.explorer import Explorer, demo_examples, demo_gallery
    from rge.index.store import Index

    if options.index is None:
        checkpoint = options.checkpoint or "demo"
        embedder = Embedder.from_pretrained(checkpoint, base=options.base)
        explorer = Explorer(embedder, demo_gallery(embedder), demo_examples())
    else:
        index = Index.open(options.index)
        checkpoint = options.checkpoint or index.about["checkpoint"]
        explorer = Explorer(index.embedder(options.checkpoint, options.base), index, [])
    address = url_of(listener)
    print(f"{checkpoint}, {len(explorer.index)} items: {address}  (Ctrl-C ends it)", flush=True)  # noqa: T201
    if options.open:
        threading.Timer(1, webbrowser.open, [address]).start()
    config = uvicorn.Config(
        application(explorer, options.host), log_level="warning", timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    start(main)

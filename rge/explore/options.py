"""Options of `rge explore`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rge.common.registry import PluginOptions
from rge.index.options import Server


@dataclass(kw_only=True)
class ExploreOptions(PluginOptions):
    """Open a local web page for exploring a checkpoint: ask, watch it write, edit its rationale, see what it finds."""

    index: str | None = None
    """An index made by ``rge index``; null: the demo's test drawings, embedded at the start and kept in memory."""
    checkpoint: str | None = None
    """Checkpoint: a directory, an id on the hub, or ``demo``; null: the one that the index was made with, else
    ``demo``."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    server: Server = "auto"
    """Use a running ``rge serve`` of this user with the checkpoint, if there is one; ``none``: always load it here."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's loopback address lets others in, without a password."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """Port to listen on; 0: any free port."""
    open: bool = False
    """Open the page in the browser."""

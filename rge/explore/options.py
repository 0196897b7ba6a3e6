"""Options of `rge explore`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rge.common.registry import PluginOptions
from rge.index.options import Server


@dataclass(kw_only=True)
class ExploreOptions(PluginOptions):
    """Open a page on this machine: ask a checkpoint, watch it write, change its words, see what it finds."""

    index: str | None = None
    """What ``rge index`` made; null: the demo's test drawings, embedded at the start and kept in memory."""
    checkpoint: str | None = None
    """Checkpoint directory, the id of one on the hub, or ``demo``; null: the one that the index was made with, else ``demo``."""
    base: str | None = None
    """Directory or hub id of the model that a checkpoint of adapters belongs to; null: where its ``rge.json`` says."""
    server: Server = "auto"
    """A running ``rge serve`` of this user that has the checkpoint answers; ``none``: load it here."""
    host: str = "127.0.0.1"
    """Address to listen on; another than this machine's own lets others in, without a password."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """Port to listen on; 0 takes a free one."""
    open: bool = False
    """Show the page in the browser."""

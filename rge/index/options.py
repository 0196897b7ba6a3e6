"""Options of `rge embed`, `rge index` and `rge search`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rge.common.modes import Mode
from rge.common.registry import PluginOptions

AtLeastOne = Annotated[int, Field(ge=1)]
Server = Literal["auto", "none"]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(kw_only=True)
class Reading(PluginOptions):
    """What is read, and with which checkpoint."""

    src: Path
    """A folder of pictures and texts, or a table (``.csv``, ``.tsv``, ``.jsonl``, ``.parquet``). In a folder, ``x.txt`` or
    ``x.jpg.txt`` beside ``x.jpg`` is its caption, any other ``.txt`` a text of its own; hidden files are left out."""
    id: str = "id"
    """Column of a table: names of the rows. Without it, a row is named by its picture's path, else by its number."""
    text: str = "text"
    """Column of a table: texts or captions."""
    image: str = "image"
    """Column of a table: pictures, as paths relative to the table, web addresses, or (Parquet) encoded bytes."""
    base: str | None = None
    """Directory or hub id of the model that a checkpoint of adapters belongs to; null: where its ``rge.json`` says."""
    dimensions: AtLeastOne | None = None
    """Keep the first so many components, a size that the checkpoint was trained for; null: all, or as the index has it."""
    batch_size: AtLeastOne = 64
    """Items embedded at once."""
    max_unreadable: Share = 0.1
    """Share of the items that may be unreadable; they are counted and listed. Beyond it, the command ends with an error."""
    unreadable: Path | None = None
    """File that all unreadable items are listed in; without it the first twenty are printed."""


@dataclass(kw_only=True)
class EmbedOptions(Reading):
    """Embed a folder or a table of pictures and texts to one Parquet file: ``id``, ``vector``, ``rationale`` where there is one.

    A command that was stopped continues where it was: until all is done, what is finished is in ``OUT.parts``.
    """

    checkpoint: str
    """Checkpoint directory, the id of one on the hub, or ``demo``."""
    out: Path
    """The Parquet file."""
    side: Literal["document", "query"] = "document"
    """What the items are; decides the wording of the prompt."""
    mode: Mode | None = None
    """Whether a rationale is written first; null: queries as the checkpoint was trained, documents without."""
    instruction: str | None = None
    """Put before every query; null: the one that most training queries had; '' (quoted) for none."""


@dataclass(kw_only=True)
class IndexOptions(Reading):
    """Make an index of a folder or a table, or bring one up to date: only what is new or changed is embedded.

    A file or a table's row that is gone is removed from the index. One index may hold several folders and tables, one
    call each.
    """

    out: str
    """The index: a folder, or an address that LanceDB takes (``s3://``, ``gs://``, ``az://``)."""
    checkpoint: str | None = None
    """Checkpoint directory, the id of one on the hub, or ``demo``; null: the one that the index was made with."""
    captions: Literal["show", "embed"] | None = None
    """Whether a picture's text is only shown with it or embedded together with it, for checkpoints that were trained on such
    pairs; null: as the index has it, and ``show`` in a new one."""
    thumbnail_px: Annotated[int, Field(ge=0)] = 256
    """Longer side of the small pictures that the index keeps for showing hits; 0 keeps none."""
    ann_from: AtLeastOne = 50_000
    """Search is exact below so many rows. From there on an approximate index is kept, and its recall measured."""
    remove: bool = False
    """Take everything that came from ``src`` out of the index."""
    watch: bool = False
    """After that keep watching ``src``, and bring the index up to date whenever something changes."""


@dataclass(kw_only=True)
class SearchOptions(PluginOptions):
    """Ask an index: prints what the model writes, and the hits with their scores.

    ``rge search INDEX "question"`` is short for ``index=`` and ``question=``.
    """

    index: str
    """What ``rge index`` made: a folder or an address."""
    question: str | None = None
    """The question; may be left out where there is a picture."""
    image: str | None = None
    """Picture that the question is about: a path, ``library.parquet#row`` or a web address."""
    k: AtLeastOne = 10
    """Hits shown."""
    mode: Mode | None = None
    """Whether a rationale is written first; null: as the checkpoint was trained."""
    instruction: str | None = None
    """Put before the question; null: the one that most training queries had; '' (quoted) for none."""
    checkpoint: str | None = None
    """Where the checkpoint that the index was made with is now, if it was moved."""
    base: str | None = None
    """Directory or hub id of the model that a checkpoint of adapters belongs to; null: where its ``rge.json`` says."""
    where: str | None = None
    """Condition in SQL on the index's columns: ``"year > 2023 and album = 'Rome'"``. Pictures have ``year``, ``month``, ``taken``,
    ``latitude``, ``longitude`` (of their EXIF) and ``album`` (their folder); a table has its own columns."""
    hybrid: bool = False
    """Look the question's words up in captions, file names and metadata too, and fuse both rankings by rank."""
    exact: bool = False
    """Compare with every vector, even if there is an approximate index."""
    server: Server = "auto"
    """A running ``rge serve`` of this user that has the index's checkpoint answers at once; ``none``: load the checkpoint here."""

"""Options of `rge embed`, `rge index` and `rge search`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rge.common.modes import Mode
from rge.common.options import AtLeastOne, Count, Quoting, Share
from rge.common.registry import PluginOptions


@dataclass(kw_only=True)
class Reading(PluginOptions):
    """Options of commands that read a source."""

    src: str
    """A folder of pictures, PDFs, videos and texts, one PDF, or a table (``.csv``, ``.tsv``, ``.xlsx``, ``.jsonl``, ``.json``, ``.parquet``,
    ``.lance``), on this machine or in an object store (``s3://``, ``gs://``, ``az://``). PDFs are read by page. In a folder, ``x.txt`` or ``x.jpg.txt`` next to ``x.jpg`` is its caption, and any other ``.txt`` is an item of its own; hidden files are
    skipped."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, by patterns as in ``.gitignore``. Folders of thumbnails and deleted files
    (``@eaDir/``, ``#recycle/`` and the like) always are, unless a pattern brings them back: ``!@eaDir/``."""
    id: str = "id"
    """Column of a table: ids of the rows. Without it, a row's id is its picture's path (``a.png#2`` in the second row
    with that picture), else its number."""
    text: str = "text"
    """Column of a table: texts or captions."""
    image: str = "image"
    """Column of a table: pictures, as paths relative to the table, web addresses, or (in Parquet) encoded bytes."""
    pages: Literal["each", "together"] = "each"
    """Whether each page of a PDF is an item, or all pages of it together are one."""
    videos: bool = False
    """Whether videos are items too, for checkpoints that read them; they are skipped otherwise."""
    quoting: Quoting = "auto"
    """Whether quotation marks enclose cells of a CSV or TSV (``quoted``) or belong to the text (``none``); ``auto``: what its
    lines show, and an error if that is unclear."""
    sheet: str | None = None
    """Sheet of a workbook; null: the only one that is not empty."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    task: str | None = None
    """Training task whose prompt profile, picture sizes and maximum length to use, and whose instruction for queries; ``rge.json``
    lists them. null: those of most tasks, or the index's."""
    dimensions: AtLeastOne | None = None
    """Truncate embeddings to this many components, a size that the checkpoint was trained for; null: all, or the
    index's size."""
    batch_size: AtLeastOne = 64
    """Items embedded at once."""
    batch_tokens: AtLeastOne | None = None
    """Most prompt tokens embedded at once, each item counted as the longest; null: no limit. A long document or clip is then
    embedded alone, and texts together."""
    max_file_pixels: AtLeastOne | None = None
    """Largest picture, in pixels of the file; larger ones are unreadable. null: 89 million, beyond which a picture
    could be made to fill the memory; 250 million for a JPEG, which is then decoded at a smaller size."""
    max_unreadable: Share = 0.1
    """Share of items that may be unreadable (they are counted and listed); more are an error. A single one never is, unless
    this is 0."""
    engine: Literal["process", "ray"] = "process"
    """Where items are embedded: in this process, or by Ray Data on all devices of a cluster (docs/scaling.md), with the same
    result."""
    address: str | None = None
    """With ``engine=ray``: address of a cluster, ``auto`` for the one that this machine belongs to; null: this machine alone."""
    unreadable: Path | None = None
    """File for the list of all unreadable items; null: only print the first twenty."""


@dataclass(kw_only=True)
class EmbedOptions(Reading):
    """Embed a folder or a table of pictures and texts to one Parquet file: ``id``, ``vector``, ``rationale`` if there is one.

    A stopped command continues where it left off; until it is finished, results are in ``OUT.parts``. ``rge embed SRC`` is short
    for ``src=``.
    """

    checkpoint: str
    """Checkpoint: a directory, an id on the hub, or ``demo``."""
    out: Path
    """The Parquet file."""
    side: Literal["document", "query"] = "document"
    """Whether the items are documents or queries; determines the wording of the prompt."""
    mode: Mode | None = None
    """Whether a rationale is written first; null: as in training for queries, not for documents."""
    instruction: str | None = None
    """Instruction before every query; null: that of `task`, or the one that most training queries had; '' (quoted): none."""


@dataclass(kw_only=True)
class IndexOptions(Reading):
    """Index a folder or a table, or update an index: only new and changed items are embedded.

    Deleted files and rows are removed from the index. One index may hold several folders and tables, one call each. ``rge index SRC``
    is short for ``src=``.
    """

    out: str
    """The index: a folder, or an address that LanceDB supports (``s3://``, ``gs://``, ``az://``)."""
    checkpoint: str | None = None
    """Checkpoint: a directory, an id on the hub, or ``demo``; null: the one that the index was made with."""
    captions: Literal["show", "embed"] | None = None
    """Whether a picture's caption is only shown with it, or embedded together with it (for checkpoints that were
    trained on such pairs); null: the index's setting, or ``show`` for a new index."""
    thumbnail_px: Count = 256
    """Longer side of the thumbnails that the index keeps for showing hits; 0: no thumbnails."""
    ann_from: AtLeastOne = 50_000
    """With at least this many rows, maintain an approximate index and measure its recall; with fewer, search is exact."""
    remove: bool = False
    """Remove everything that came from ``src`` from the index."""
    watch: bool = False
    """Afterwards, keep watching ``src`` and update the index whenever something changes."""


@dataclass(kw_only=True)
class SearchOptions(PluginOptions):
    """Search an index: prints the model's rationale, and the hits with their scores.

    ``rge search INDEX "question"`` is short for ``index=`` and ``question=``.
    """

    index: str
    """An index made by ``rge index``: a folder or an address."""
    question: str | None = None
    """The question; optional if there is a picture."""
    image: str | None = None
    """The picture that the question is about: a path, ``library.parquet#row`` or a web address; or a page
    (``manual.pdf#page=3``), a document or a video (``talk.mp4#t=10,20``)."""
    k: AtLeastOne = 10
    """Number of hits to show."""
    mode: Mode | None = None
    """Whether a rationale is written first; null: as in training."""
    max_rationale_tokens: Count | None = None
    """The most tokens of the rationale, from 0 (direct); null: the checkpoint's own."""
    instruction: str | None = None
    """Instruction before the question; null: that of `task`, or the one that most training queries had; '' (quoted): none."""
    task: str | None = None
    """Training task that the index was made with; any other is an error. null: the index's."""
    checkpoint: str | None = None
    """New location of the checkpoint that the index was made with, if it was moved."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    where: str | None = None
    """SQL condition on the index's columns: ``"year > 2023 and album = 'Rome'"``. Pictures have ``year``, ``month``,
    ``taken``, ``latitude``, ``longitude`` (from EXIF) and ``album`` (their folder); tables have their own columns."""
    hybrid: bool = False
    """Also search for the question's words in captions, file names and metadata, and fuse the two rankings by rank."""
    exact: bool = False
    """Compare with every vector, even if there is an approximate index."""

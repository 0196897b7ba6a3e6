"""Settings of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from data_prep.rmir.wording import wording
from rge.calls.model_config import ModelConfig, cache_names, check_model
from rge.calls.prices import fill_prices
from rge.common.errors import UserError
from rge.common.files import RECIPES
from rge.common.options import AtLeastOne, Count, NotNegative, Positive, Quoting, Share, one_of, parse_file
from rge.common.prompt_profiles import PICTURE_INSTRUCTION

CONFIGS = RECIPES / "data_prep"
C = TypeVar("C", bound="RmirConfig")
IMAGE_ENCODERS = ("siglip", "checkpoint", "pixels")
CAPTION_ENCODERS = ("text", "checkpoint", "hashing")
WITHOUT_MODEL = ("pixels", "hashing")
"""Encoders without weights."""
CATEGORIES = ("functional", "temporal", "causal")
"""Kinds of reasoning of the paper."""


@dataclass
class LibraryConfig:
    """The pictures to start from."""

    path: str | None = None
    """A folder of pictures, a table, Parquet files or WebDataset tars (one, a folder of them, or a pattern such as
    "shards/*.parquet"), or a folder saved by `datasets`; on disk, or at an address that fsspec supports."""
    exclude: list[str] = field(default_factory=list)
    """Files and folders to leave out, by patterns as in ``.gitignore``. Folders of thumbnails and deleted files
    (``@eaDir/``, ``#recycle/`` and the like) always are, unless a pattern brings them back: ``!@eaDir/``."""
    quoting: Quoting = "auto"
    """Whether quotation marks enclose cells of a CSV or TSV (``quoted``) or belong to the text (``none``); ``auto``: what its
    lines show, and an error if that is unclear."""
    sheet: str | None = None
    """Sheet of a workbook; null: the only one that is not empty."""
    id_column: str | None = "id"
    """Column of the pictures' ids; null: rows are numbered, file by file."""
    image_column: str = "image"
    """Column with the encoded pictures, paths relative to the table's folder, or addresses."""
    caption_column: str | None = "caption"
    """Column of the captions; null: there are none. ``caption.model`` writes missing ones."""
    licence: str = "unknown"
    """Licence of pictures for which ``licence_column`` has none."""
    source_column: str = "source"
    """Column that says where each picture comes from, such as its web page."""
    author_column: str = "author"
    """Column with the picture's author."""
    licence_column: str = "licence"
    """Column with the picture's own licence."""
    min_side_px: AtLeastOne = 32
    """Minimum side of a picture, px; smaller ones are left out and counted."""
    filters: list[str] = field(default_factory=list)
    """Content filters: your own functions as module:function, each of which takes a Pillow image and returns the reason
    to leave it out, or None."""
    shard_size: AtLeastOne = 5000
    """Pictures inspected and embedded at once: at most what a stopped run redoes."""
    memory_mb: AtLeastOne = 768
    """Memory for pictures that are not separate files, MB."""
    changed: Literal["stop", "extend"] = "stop"
    """What to do if pictures were added, removed or changed since the seed stage read the library: stop, or extend,
    which keeps everything made from the others."""
    near_duplicates: Annotated[int, Field(ge=0, le=16)] | None = None
    """A picture whose perceptual hash differs from an earlier one's in at most this many of 64 bits is left out; 4
    finds the same picture in another size or compression. null: only identical files are, as in the paper."""


@dataclass
class DownloadConfig:
    """Fetching the pictures of a library that lists web addresses."""

    concurrency: AtLeastOne = 32
    """Concurrent downloads."""
    timeout_s: Positive = 30.0
    """Time limit of one attempt, from start to end."""
    max_retries: Count = 3
    """Attempts after the first."""
    backoff_s: NotNegative = 1.0
    """Upper bound of the first wait, which doubles with every attempt."""
    max_bytes: AtLeastOne = 30_000_000
    """Maximum size of a file; larger ones are left out and counted."""


@dataclass
class EncoderConfig:
    """What turns pictures or texts into vectors."""

    kind: str = "siglip"
    """For pictures: siglip, checkpoint (of this project) or pixels; for captions: text, checkpoint or hashing."""
    path: str | None = None
    """Hub name or folder, for siglip, text and checkpoint."""
    batch_size: AtLeastOne = 64
    """Pictures or texts embedded at once."""


@dataclass
class IndexSpec:
    """One more index to retrieve candidates from, besides the paper's two."""

    name: str
    """Name of the index in tables and reports."""
    side: Literal["image", "caption"] = "image"
    """Whether a candidate's image or caption is embedded."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    count: AtLeastOne = 4
    """Candidates per query."""


@dataclass
class SeedConfig:
    """Seed set: k-means clusters of the library, some pictures of each."""

    clusters: AtLeastOne = 50_000
    """Clusters of the pictures' embeddings."""
    per_cluster: AtLeastOne = 10
    """Pictures drawn from each cluster."""
    seed: int = 0
    """Seed of clustering and sampling."""


@dataclass
class CaptionConfig:
    """Captions of seed pictures that have none in the library."""

    model: str | None = None
    """Model that writes missing captions, by its name in `models`, such as writer; null: none."""
    temperature: float = 0.0
    """Sampling temperature."""
    max_tokens: AtLeastOne = 256
    """Maximum tokens of an answer."""
    max_words: AtLeastOne = 40
    """Maximum words of a caption; longer ones count as malformed."""


@dataclass
class GenerateConfig:
    """Queries and descriptions of their targets."""

    model: str = "writer"
    """Model that writes queries, by its name in `models`."""
    temperature: float = 0.25
    """Sampling temperature."""
    max_tokens: AtLeastOne = 2048
    """Maximum tokens of an answer."""
    categories: list[str] = field(default_factory=lambda: list(CATEGORIES))
    """Kinds of reasoning to ask for, from those that ``prompts`` defines."""
    max_inputs: AtLeastOne | None = None
    """Number of seed pictures to ask about, drawn at random; null: all."""
    content_policy: bool = True
    """Have the model decline pictures that are politically sensitive or sexually explicit, as in the paper."""
    max_query_words: AtLeastOne = 24
    """Maximum words of a query; longer ones count as malformed. The paper asks for fewer than 25."""
    max_target_words: AtLeastOne = 50
    """Maximum words of a target's description; longer ones count as malformed."""


@dataclass
class FilterConfig:
    """Check of each query against the three constraints."""

    model: str = "writer"
    """Model that checks queries, by its name in `models`."""
    temperature: float = 0.0
    """Sampling temperature."""
    max_tokens: AtLeastOne = 1024
    """Maximum tokens of an answer."""


@dataclass
class RetrieveConfig:
    """Candidates of each query, from two indices over the seed set."""

    by_image: AtLeastOne = 16
    """Candidates per query from the image index."""
    by_caption: Count = 4
    """Candidates per query from the caption index."""
    exclude_input: bool = True
    """Exclude a query's own picture from its candidates; the paper does not say."""
    more: list[IndexSpec] = field(default_factory=list)
    """Further indices with other encoders, whose candidates are judged too."""
    memory_mb: AtLeastOne = 512
    """Memory for retrieval, MB."""


@dataclass
class JudgeSpec:
    """Some judges of one model."""

    model: str = "writer"
    """Name under `models`."""
    count: AtLeastOne = 1
    """Number of judges that it stands for; each is a separate call."""


@dataclass
class JudgeConfig:
    """The panel."""

    judges: Annotated[list[JudgeSpec], Field(min_length=1)] = field(
        default_factory=lambda: [JudgeSpec("writer", 1), JudgeSpec("judge", 4)]
    )
    """Models of the panel, and how many judges each stands for."""
    temperature: float = 0.85
    """Sampling temperature of the judges."""
    max_tokens: AtLeastOne = 1024
    """Maximum tokens of an answer."""


@dataclass
class KeepConfig:
    """Confidence filter."""

    min_confidence: Annotated[float, Field(gt=0.5, le=1)] = 1.0
    """Share of the panel that must agree for a verdict to count."""
    remove_doubted_inputs: bool = False
    """Also drop queries about a doubted picture; by default they stay."""


@dataclass
class SplitConfig:
    """Test and training sets."""

    tsr_threshold: Share = 0.9
    """Queries with a greater TSR go to the test set. The paper gives no value; this one is ours."""
    tsr_list: Literal["retrieved", "surviving"] = "retrieved"
    """Which part of the image index's list TSR uses: all that was retrieved, or what survives without the doubted
    images."""
    disjoint: Literal["none", "inputs", "all"] = "none"
    """none; inputs: drop training queries about a picture that a test query is about; all: no picture is in both sets,
    in any role (input, answer, negative, member of the test corpus)."""


@dataclass
class AuditConfig:
    """Shortcuts: queries that text alone or picture alone already solves."""

    ks: Annotated[list[AtLeastOne], Field(min_length=1)] = field(default_factory=lambda: [1, 5, 10])
    """Cutoffs: a query is solved at k if a right answer is among the first k of the pool."""
    memory_mb: AtLeastOne = 512
    """Memory for scores, MB."""


@dataclass
class ExportConfig:
    """What is written for training and evaluation."""

    name: str = "rmir"
    """Name of the data set in its records."""
    instruction: str = PICTURE_INSTRUCTION
    """Task instruction of every query."""
    rationale: Literal["generator", "none"] = "generator"
    """generator: the reasoning written with the query is the rationale of its positives; none: no rationale."""


@dataclass
class RmirConfig:
    """One run."""

    out: str = "runs/rmir"
    """Folder of the run."""
    library: LibraryConfig = field(default_factory=LibraryConfig)
    image_encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig("siglip", "google/siglip2-so400m-patch14-384")
    )
    caption_encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig("text", "Qwen/Qwen3-Embedding-0.6B")
    )
    models: dict[str, ModelConfig] = field(default_factory=dict)
    """Models behind endpoints, under the names that the stages use."""
    prices: Path | None = None
    """Price table (YAML) for models without prices in their settings; null: rge/calls/prices.yaml."""
    budget: NotNegative | None = None
    """Cap on the total cost of all models, over all runs in one ``out``; each model needs a price, 0 if it is free. null:
    only the models' own caps."""
    on_unanswered: Literal["wait", "proceed"] = "wait"
    """What to do after a stage with unanswered calls (outages): wait until the same command has made them again; or
    proceed without the items they are about, and redo the later stages once they are answered. Likewise if none of a
    library's first pictures can be reached."""
    seed: SeedConfig = field(default_factory=SeedConfig)
    caption: CaptionConfig = field(default_factory=CaptionConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    download: DownloadConfig = field(default_factory=DownloadConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    oracle: bool = False
    """Instead of calling models, answer from the shipped relation tables, with deliberate errors."""
    prompts: str | None = None
    """Folder whose files replace the shipped prompts of the same name (docs/data_prep.md); null: none."""
    engine: Literal["process", "ray"] = "process"
    """Where pictures are inspected and embedded: in this process, or on all devices of a cluster (docs/scaling.md)."""
    address: str | None = None
    """With ``engine=ray``: a cluster, ``auto`` for this machine's; null: this machine alone."""
    queries_per_shard: AtLeastOne = 500
    """Queries judged at once: at most what a stopped run redoes."""


def load_config(words: Sequence[str], schema: type[C] = RmirConfig) -> C:  # type: ignore[assignment]
    """Read ``config=NAME`` (a file of `CONFIGS` without its ending, or a path) and apply ``key=value`` overrides.

    ``schema`` is the config class, or a subclass with further options of a command.

    Raises:
        UserError: a missing or unknown config, an unknown key (with a suggestion), or an invalid value.
    """
    found = parse_file(schema, words, key="config", folder=CONFIGS, command="rge data rmir config=NAME")
    found.models = fill_prices(found.models, found.prices)
    check(found)
    return found


def check(config: RmirConfig) -> None:
    """Check what the types do not. Raises `UserError`: an invalid value; the message names the key and the allowed values."""
    check_encoder("image_encoder", config.image_encoder, IMAGE_ENCODERS)
    check_encoder("caption_encoder", config.caption_encoder, CAPTION_ENCODERS)
    names = ["image", "caption"]
    for number, spec in enumerate(config.retrieve.more):
        kinds = IMAGE_ENCODERS if spec.side == "image" else CAPTION_ENCODERS
        check_encoder(f"retrieve.more.{number}.encoder", spec.encoder, kinds)
        if spec.name in names:
            raise UserError(f"index names must be unique; got {spec.name!r} twice", key="retrieve.more")
        names.append(spec.name)
    one_of("generate.categories", config.generate.categories, tuple(wording(config.prompts).codes))
    for stage, name in models_used(config):
        if name not in config.models:
            raise UserError(
                f"there is no {name!r} under models (found: {', '.join(config.models) or 'none'})", key=stage
            )
    for name, model in config.models.items():
        check_model(f"models.{name}", model)
    cache_names({f"models.{name}": model for name, model in config.models.items()})
    if config.library.path is None and not config.oracle:
        raise UserError("it is missing: give a folder of pictures, or a table", key="library.path")


def check_encoder(key: str, encoder: EncoderConfig, kinds: Sequence[str]) -> None:
    """Check one encoder's settings. Raises `UserError`: a kind that is not allowed, or no path."""
    one_of(f"{key}.kind", [encoder.kind], kinds)
    if encoder.path is None and encoder.kind not in WITHOUT_MODEL:
        raise UserError(
            f"it is missing: give the {encoder.kind} model's hub name or folder", key=f"{key}.path"
        )


def models_used(config: RmirConfig) -> list[tuple[str, str]]:
    """(setting, model) pairs, one for each setting that names a model."""
    writers = [
        (f"{stage}.model", getattr(config, stage).model) for stage in ("caption", "generate", "filter")
    ]
    judges = [("judge.judges", spec.model) for spec in config.judge.judges]
    return [(setting, model) for setting, model in writers + judges if model is not None]

"""The section `data`, and how recipes name their records."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import GetPydanticSchema
from pydantic_core import PydanticCustomError, core_schema

from rge.common.errors import UserError
from rge.common.options import MAY_DIFFER, AtLeastOne, Count, Positive, Quoting, Share
from rge.common.prompt_profiles import PROFILES
from rge.content.config import VideoConfig
from rge.mining.config import MineConfig

JSON_FILES = (".jsonl", ".json", ".ndjson")
OTHER_FILES = (
    ".parquet",
    ".csv",
    ".tsv",
    *(f"{kind}.{packed}" for packed in ("gz", "xz", "zst") for kind in JSON_FILES),
)
"""Files of records that are not plain JSON lines, by their endings."""


@dataclass
class RecordsConfig:
    """Where records come from: exactly one of `path`, `dataset` and `type`."""

    path: str | None = None
    """A file of training records: JSON lines, see docs/record.md, also compressed (.jsonl.gz, .xz, .zst), Parquet or CSV;
    picture paths are relative to the file."""
    dataset: str | None = None
    """A data set for the library `datasets`: a folder saved by save_to_disk, a folder or file of Parquet or JSON lines, or
    a name on the hub."""
    subset: str | None = None
    """With `dataset`: its subset, if it has several."""
    split: str = "train"
    """With `dataset`: which split."""
    revision: str | None = None
    """With `dataset`: commit or tag on the hub; null: the newest."""
    streaming: bool = False
    """With `dataset`: read it during training, without downloading or checking it first. The number of records is then
    unknown, and settings that need it are refused."""
    columns: dict[str, str] = field(default_factory=dict)
    """Maps our fields to columns: {query.text: question, query.images: image, positives.text: answer}. A dot selects a
    part of a column. A column with the name of one of our fields needs no entry; all other columns are ignored."""
    quoting: Quoting = "auto"
    """With a CSV or TSV: whether quotation marks enclose cells (``quoted``) or belong to the text (``none``); ``auto``: what its
    lines show, and an error if that is unclear."""
    type: str | None = None
    """A registered data source (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """With `type`: arguments of its function."""

    @property
    def key(self) -> str | None:
        """Identifies a source; None if none is given."""
        given = {item.name: getattr(self, item.name) for item in fields(RecordsConfig)}
        if self.streaming:
            given["shuffle_buffer"] = getattr(self, "shuffle_buffer", None)
        defaults = asdict(RecordsConfig())
        changed = {name: value for name, value in given.items() if value != defaults.get(name)}
        if not changed:
            return None
        return self.path if list(changed) == ["path"] else json.dumps(changed, sort_keys=True)

    @property
    def lines(self) -> str | None:
        """Its file of JSON lines, which is read by position; files of `OTHER_FILES` are read as data sets."""
        return None if self.path is None or self.path.lower().endswith(OTHER_FILES) else self.path

    @property
    def label(self) -> str:
        """Its name in messages."""
        if self.dataset is not None:
            subset = f"{self.subset}, " if self.subset else ""
            return f"{self.dataset}[{subset}{self.split}]"
        if self.type is not None:
            return f"{self.type}({', '.join(f'{name}={value}' for name, value in self.options.items())})"
        return str(self.path)

    @property
    def title(self) -> str:
        """Its name in a model card, without folders."""
        local = self.path or (self.dataset and Path(self.dataset).exists())
        return Path(self.label).name if local else self.label

    def problems(self, key: str) -> Iterator[str]:
        """Require exactly one kind of source, and no setting of another kind, which would have no effect.

        `key` is where the source stands, such as ``joint.sources[0]``.
        """
        kinds = {"path": self.path, "dataset": self.dataset, "type": self.type}
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            named = f", not {' and '.join(given)}" if given else ""
            yield f"{key} must name exactly one of path, dataset and type{named}"
            return
        owners = {
            **dict.fromkeys(("subset", "split", "revision", "streaming"), ("dataset",)),
            "columns": ("dataset", "type", "table"),
            "options": ("type",),
        }
        for name, owner in owners.items():
            kind = "table" if self.path is not None and self.lines is None else given[0]
            if kind not in owner and getattr(self, name) != getattr(RecordsConfig(), name):
                kinds_with_it = " or ".join(one for one in owner if one != "table")
                yield f"{key}.{name} belongs to {kinds_with_it}, and this source has a {given[0]}"


def _number_or_size(value: Any, number: Callable[[Any], float]) -> float | Literal["size"]:
    if value == "size":
        return "size"
    if isinstance(value, str):
        raise PydanticCustomError("weight", "Input should be a number above 0, or size")
    return number(value)


# Not a union, whose errors would name both members.
Weight = Annotated[
    float | Literal["size"],
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(_number_or_size, handler(Positive))
    ),
]


@dataclass
class PromptedConfig(RecordsConfig):
    """Records, and how they become prompts where that is not as `data` and `model` say."""

    name: str | None = None
    """Name of the source in metrics and logs, and of its task in a checkpoint; null: that of its file or data set, and the
    records' own `source`."""
    profile: str | None = None
    """Instruction profile; null: data.profile."""
    instruction: str | None = None
    """Task instruction of all its queries, '' for none; null: the records' own."""
    min_pixels: AtLeastOne | None = None
    """Smallest picture, in pixels; null: model.min_pixels."""
    max_pixels: AtLeastOne | None = None
    """Largest picture, in pixels; null: model.max_pixels."""
    max_prompt_tokens: AtLeastOne | None = None
    """Maximum length of a prompt in tokens; null: data.max_prompt_tokens."""
    video: VideoConfig | None = None
    """Which frames of videos its prompts show; null: data.video."""

    def problems(self, key: str) -> Iterator[str]:
        """As `RecordsConfig.problems`, and a profile that does not exist."""
        yield from super().problems(key)
        if self.profile is not None:
            yield from _unknown_profile(f"{key}.profile", self.profile)

    @property
    def prompts(self) -> dict[str, Any]:
        """Its own settings of prompts, see `PROMPTS`."""
        return {name: getattr(self, name) for name in PROMPTS if getattr(self, name) is not None}


PROMPTS = ("profile", "instruction", "min_pixels", "max_pixels", "max_prompt_tokens", "video")
"""A source's settings of prompts, which a checkpoint keeps by task."""


@dataclass
class SourceConfig(PromptedConfig):
    """Training records, their share of the batches, and how they are trained on."""

    max_negatives: Count | None = None
    """Labelled negatives drawn per query and step; null: data.max_negatives."""
    positives: Literal["draw", "all"] | None = None
    """Which of a record's positives a step uses; null: data.positives."""
    batch: Literal["mixed", "own"] = "mixed"
    """mixed: its queries share batches with those of all mixed sources, in proportion to their weights; own: they fill
    batches, or a stage's `sub_batches`, alone, and their in-batch negatives come from this source. Weights are then shares
    of these."""
    weight: Weight = 1.0
    """Share of the batch relative to the other sources' weights. size, for all sources of the stage: their numbers of
    records, so that `epochs` are passes over each of them."""
    shuffle_buffer: AtLeastOne = 1000
    """With `streaming`: number of records that are shuffled at a time; 1 keeps the order within each shard."""


@dataclass
class DataConfig:
    """How records become prompts."""

    profile: str = "rge"
    """Instruction profile, see `rge.common.prompt_profiles.PROFILES`."""
    max_prompt_tokens: AtLeastOne = 2048
    """Maximum length of a prompt in tokens. Longer prompts lose the end of the user's text, never image tokens or the
    template."""
    video: VideoConfig = field(default_factory=VideoConfig)
    max_rationale_tokens: AtLeastOne | None = None
    """Maximum length of an oracle rationale in tokens. A record with a longer one is bad (`on_bad`): it would need more
    memory than any other, and teach the model to write more than it may. null: four times rollout.max_new_tokens, at
    least 512."""
    max_negatives: Count = 1
    """Labelled negatives drawn per query and step, as further candidates."""
    mine: MineConfig = field(default_factory=MineConfig)
    positives: Literal["draw", "all"] = "draw"
    """draw: each step uses one of a record's positives, a different one each time; all: all of them are candidates and
    count as right."""
    sort_by_length: bool = True
    """Sort queries and candidates by length before dividing them into micro batches, which reduces padding. The step's
    batch and its loss stay the same."""
    num_workers: Annotated[Count, MAY_DIFFER] = 4
    """Processes that decode pictures and tokenise, per rank; 0 does it in the training process."""
    prefetch_mb: Annotated[AtLeastOne, MAY_DIFFER] = 1024
    """Memory per rank for batches waiting for training, MiB; one batch may always wait. Each worker also holds the
    batch that it is making. No shared memory is used."""
    on_bad: Annotated[Literal["stop", "skip"], MAY_DIFFER] = "stop"
    """What to do with an unusable record, such as one whose picture is missing: stop ends the run and names the record;
    skip replaces it by another record of the same source, counts it (bad_records in the metrics) and lists it in
    bad_records.jsonl."""
    max_bad_share: Annotated[Share, MAY_DIFFER] = 0.01
    """With on_bad=skip: the run ends when more than this share of the stage's records is bad."""
    augment: str = "none"
    """Picture augmentation in training: none, or drawing (shift, scale, mirror, colour)."""

    def problems(self) -> Iterator[str]:
        """A profile that does not exist."""
        yield from _unknown_profile("data.profile", self.profile)


def _unknown_profile(key: str, name: str) -> Iterator[str]:
    try:
        PROFILES[name]
    except UserError as error:
        yield f"{key}: {error}"

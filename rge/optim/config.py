"""The section `optim`, and that of a stage: what it sees and how fast it learns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rge.common.options import MAY_DIFFER, AtLeastOne, BelowOne, Count, NotNegative, Positive, Share
from rge.data.config import SourceConfig

UNSHARDED_ONLY = ("muon",)
"""Optimizers that need whole gradients: launches with ZeRO or FSDP2 are refused, and plans do not suggest them."""


@dataclass
class LrScaleConfig:
    """Learning rates of parts of the model, as multiples of the stage's; 0 computes gradients, but moves nothing."""

    vision: NotNegative = 1.0
    """The vision tower without its merger."""
    merger: NotNegative = 1.0
    """The projection of pictures' features to the text model's width."""
    text: NotNegative = 1.0
    """The text model's layers."""
    emb: NotNegative = 1.0
    """The rows of all tokens, with that of `<emb>`, and the output matrix."""


@dataclass
class OptimConfig:
    """The optimizer, the same for all stages."""

    name: Literal["adamw", "muon"] = "adamw"
    """Muon for matrices (convolution kernels too, as out channels x everything else) with AdamW for the rest learns much faster from scratch; not under ZeRO."""
    lr_scale: LrScaleConfig = field(default_factory=LrScaleConfig)
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of AdamW's running means of the gradient and its square."""
    eps: Positive = 1e-8
    """Added to the root of the mean square, to avoid division by zero."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each step shrinks every weight by this share times the learning rate."""
    max_grad_norm: NotNegative = 1.0
    """Maximum global norm of the gradient (clipping), the same on every back end; 0: no clipping."""
    skip_nonfinite: Annotated[Count, MAY_DIFFER] = 0
    """Successive steps that a stage survives without an update, because their loss or gradient is not finite; one more
    ends it. May be raised when a run is resumed."""


@dataclass
class StageConfig:
    """One stage of training: what it sees and how it is optimised."""

    steps: AtLeastOne | None = None
    """Optimizer steps; null: as many as `epochs` needs."""
    epochs: Positive = 1.0
    """Passes over the sources' records, all together, used if `steps` is null; the last batch is whole. Each source gets
    as many only with `weight: size`."""
    batch_size: AtLeastOne = 512
    """Queries per optimizer step, over all ranks; also determines the number of in-batch negatives."""
    lr: Positive = 2e-5
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises to `lr`."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    min_lr_ratio: Share = 0.0
    """The schedule ends at this share of `lr`."""
    sub_batches: AtLeastOne = 1
    """Equal parts of each batch, of which those with a source of `batch: own` hold no other source."""
    compare_across: bool = False
    """With several `sub_batches`: candidates of other sub-batches are negatives too, as in VLM2Vec-V2
    (arXiv:2507.04590); false: only those of the query's source, or of all mixed ones."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Training records, their shares and settings of their own."""

    def weights(self, sizes: Sequence[int | None]) -> list[float]:
        """Weights of the sources; `sizes` are their numbers of records, None if unknown."""
        pairs = zip(self.sources, sizes, strict=True)
        return [
            float(size or 0) if isinstance(source.weight, str) else source.weight for source, size in pairs
        ]

    @property
    def groups(self) -> list[int]:
        """Number of each source's group: those of one group share sub-batches."""
        return [number if source.batch == "own" else -1 for number, source in enumerate(self.sources)]

    def num_steps(self, num_records: int) -> int:
        """Optimizer steps, at least one; `num_records` are those of all sources but streams."""
        # A batch may span two epochs. Rounded first: 1.1 * 10 is a little more than 11.
        return self.steps or max(1, math.ceil(round(self.epochs * num_records / self.batch_size, 6)))

    def problems(self, name: str) -> Iterator[str]:
        """What is wrong with the sources of the stage `name`."""
        if not self.sources:
            yield f"{name}.sources is empty: name at least one file, {name}.sources=[{{path: FILE.jsonl}}]"
        if len({source.weight == "size" for source in self.sources}) > 1:
            yield (
                f"{name}.sources mixes weight: size with numbers, and a number of records is no share: set weight: size for "
                "all of them, or for none"
            )
        if self.batch_size % self.sub_batches:
            yield (
                f"{name}.batch_size={self.batch_size} cannot be divided into {name}.sub_batches={self.sub_batches} equal parts: "
                "change one of them"
            )
        if self.sub_batches > 1 and len(set(self.groups)) < 2:
            yield (
                f"{name}.sub_batches={self.sub_batches} has no effect, since the sources share all of them: set batch: own for "
                f"some sources, or {name}.sub_batches=1"
            )
        if self.compare_across and self.sub_batches == 1:
            yield (
                f"{name}.compare_across=true has no effect with a single sub-batch: set {name}.sub_batches, or "
                f"{name}.compare_across=false"
            )
        names = [source.name for source in self.sources if source.name is not None]
        if twice := sorted({one for one in names if names.count(one) > 1}):
            yield f"{name}.sources: several are called {', '.join(twice)}; give each another name"
        for number, source in enumerate(self.sources):
            yield from source.problems(f"{name}.sources[{number}]")
            if source.streaming and source.weight == "size":
                yield (
                    f"{name}.sources: weight: size needs the number of records, which is unknown for the stream {source.label}: "
                    "give numbers as weights, or set streaming: false"
                )
            if source.streaming and self.steps is None:
                yield (
                    f"{name}.epochs needs the number of records, which is unknown for the stream {source.label}: set "
                    f"{name}.steps, or streaming: false"
                )

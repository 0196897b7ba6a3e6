"""Recipes: one YAML per run, typed, overridable from the command line, saved with every checkpoint.

``load_recipe(["recipe=demo", "joint.lr=1e-4"])`` reads ``recipes/demo.yaml`` over the defaults below and applies the overrides. An
unknown key is an error that names the nearest one. Pass whole sections (``recipe.optim``, a stage, ``recipe.data``), never copies
of their keys, which would go stale.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, GetPydanticSchema
from pydantic_core import PydanticCustomError, core_schema

from rge.common.errors import UserError
from rge.common.files import RECIPES
from rge.common.options import AtLeastOne, BelowOne, Count, NotNegative, Positive, Quoting, Share, parse_file
from rge.common.prompt_profiles import PROFILES
from rge.common.registry import load_plugins

R = TypeVar("R", bound="Recipe")

BackEndName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
BACK_ENDS: tuple[str, ...] = get_args(BackEndName)
"""What is sharded across processes, from nothing to everything; the last two are equal."""
UNSHARDED_ONLY = ("muon",)
"""Optimizers that need whole gradients: launches with ZeRO or FSDP2 are refused, and plans do not suggest them."""

Attention = Literal["auto", "varlen", "sdpa", "eager"]
"""Forms of attention, see `ModelConfig`."""


class RecipeError(UserError):
    """A recipe or an override is wrong; the message names the key and the fix."""


@dataclass
class ScratchConfig:
    """A model built from nothing instead of loaded: Qwen2.5-VL's architecture and processor, own sizes.

    ``text`` and ``vision`` are passed to the sub-configs unchanged.
    """

    vocab_size: AtLeastOne = 2048
    """Size of the BPE vocabulary learned from the training records' texts, not counting special tokens."""
    text: dict[str, Any] = field(default_factory=dict)
    """Sizes of the language model, as its Hugging Face config calls them."""
    vision: dict[str, Any] = field(default_factory=dict)
    """Sizes of the vision tower, as its Hugging Face config calls them; or, with the model_type efficientnet_lite0, a
    pretrained tower from a package (extra photos, docs/smol.md), of which only the merger is trained."""
    naming: str | None = None
    """Records for pretraining the vision tower, which learns to name what their query pictures show; null: none."""
    naming_steps: AtLeastOne = 1000
    """Optimizer steps of that pretraining."""
    naming_batch_size: AtLeastOne = 64
    """Pictures per step of that pretraining."""
    naming_lr: Positive = 3e-3
    """Learning rate of that pretraining."""
    naming_style: Share = 0.0
    """Strength of the style augmentation in that pretraining, from 0 (none) to 1: palette, tone, line width, sharpness,
    background. It keeps the tower from recognising objects by the style of a drawing."""
    naming_say_from: Share = 0.0
    """Share of that pretraining's steps that only choose among names, at half the cost; the others also write the name."""


@dataclass
class LoraConfig:
    """Low-rank adapters and the ``<emb>`` row instead of full fine-tuning; merged on export unless `export.adapters_only`."""

    rank: AtLeastOne = 16
    """Inner dimension of an adapter."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    """Dropout on an adapter's inputs. Above zero, gradient caching encodes queries once more, since the rollout
    computes its states without dropout."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the last part of their name, such as q_proj; empty: all of them."""
    dora: bool = False
    """DoRA: magnitude and direction learned separately (arXiv:2402.09353)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps large ranks stable (arXiv:2312.03732)."""
    vision: bool = False
    """Whether the vision tower gets adapters too; otherwise it is frozen."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules (PEFT's own key) trained in full and stored with adapters, by the last part of their name, such as merger."""


@dataclass
class ModelConfig:
    """Which backbone, and how it is held in memory."""

    path: str | None = None
    """Hugging Face id or directory; null with `scratch`."""
    revision: str | None = None
    """Commit or tag of a hub model; null: the newest."""
    scratch: ScratchConfig | None = None
    """Build a new model of these sizes instead of loading one; null with `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the computation and of frozen weights. Trained weights, their gradients summed over micro batches, the
    optimizer's state, embeddings and losses are always float32, on every back end."""
    attn_implementation: Attention = "auto"
    """Attention of the text model. varlen: concatenated sequences without mask or padding, with torch's flash attention
    on a GPU (bfloat16); sdpa: padded rows with a mask; eager: the same in plain operations; auto: varlen on a GPU if
    possible, else sdpa."""
    vision_attn_implementation: Attention = "auto"
    """Attention of the vision tower: varlen, sdpa (all pictures or windows of one size at once), eager, or auto."""
    cuda_graphs: bool = True
    """On a GPU, capture the decoding steps of rationales as CUDA graphs, if attention is varlen; false launches every
    kernel separately. The first captured step of a run is checked against the plain one."""
    fused_kernels: Literal["auto", "liger", "none"] = "auto"
    """On a GPU, norms, gated activations and the vision tower's rotary embeddings in one kernel each: liger, by
    liger-kernel, checked against plain code in the first step; none; auto: liger if it is installed."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more compute, memory per layer instead of per op."""
    freeze_vision: bool = False
    """Do not train the vision tower and its merger."""
    lora: LoraConfig | None = None
    """Train adapters only; null trains all weights."""
    think_tokens: Count = 0
    """Number of think tokens in the latent branch, each with its own embedding row like `<emb>`; 0: none.
    docs/modes.md."""
    min_pixels: AtLeastOne = 200_704
    """Smallest picture, in pixels: 256 patches of 28x28, as released with RGE."""
    max_pixels: AtLeastOne = 802_816
    """Largest picture, in pixels: 1024 patches of 28x28, as released with RGE."""


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
    name: str | None = None
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
            subset = f"{self.name}, " if self.name else ""
            return f"{self.dataset}[{subset}{self.split}]"
        if self.type is not None:
            return f"{self.type}({', '.join(f'{name}={value}' for name, value in self.options.items())})"
        return str(self.path)

    @property
    def title(self) -> str:
        """Its name in a model card, without folders."""
        local = self.path or (self.dataset and Path(self.dataset).exists())
        return Path(self.label).name if local else self.label


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
class SourceConfig(RecordsConfig):
    """Training records, and their share of every batch."""

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
    max_rationale_tokens: AtLeastOne | None = None
    """Maximum length of an oracle rationale in tokens. A record with a longer one is bad (`on_bad`): it would need more
    memory than any other, and teach the model to write more than it may. null: four times rollout.max_new_tokens, at
    least 512."""
    max_negatives: Count = 1
    """Labelled negatives drawn per query and step, as further candidates."""
    positives: Literal["draw", "all"] = "draw"
    """draw: each step uses one of a record's positives, a different one each time; all: all of them are candidates and
    count as right."""
    batches: Literal["mixed", "homogeneous"] = "mixed"
    """mixed: every batch contains all sources in proportion to their weights; homogeneous: each batch has one source,
    weights are shares of the steps, and in-batch negatives come from the query's own source."""
    sort_by_length: bool = True
    """Sort queries and candidates by length before dividing them into micro batches, which reduces padding. The step's
    batch and its loss stay the same."""
    num_workers: Count = 4
    """Processes that decode pictures and tokenise, per rank; 0 does it in the training process."""
    prefetch_mb: AtLeastOne = 1024
    """Memory per rank for batches waiting for training, MiB; one batch may always wait. Each worker also holds the
    batch that it is making. No shared memory is used."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What to do with an unusable record, such as one whose picture is missing: stop ends the run and names the record;
    skip replaces it by another record of the same source, counts it (bad_records in the metrics) and lists it in
    bad_records.jsonl."""
    max_bad_share: Share = 0.01
    """With on_bad=skip: the run ends when more than this share of the stage's records is bad."""
    augment: str = "none"
    """Picture augmentation in training: none, or drawing (shift, scale, mirror, colour)."""


@dataclass
class StatesConfig:
    """Which states of a query InfoNCE is computed on, by their weights; it is their weighted mean. docs/modes.md."""

    reasoned: Positive = 1.0
    """Weight of the state after a rationale: the anchor that `loss.anchor` names."""
    direct: NotNegative = 0.0
    """Weight of the state directly after the prompt, from the same pass, so that one checkpoint works in both modes."""
    latent: NotNegative = 0.0
    """Weight of the state after the prompt and `model.think_tokens` think tokens, which are read, not generated."""

    @property
    def further(self) -> list[str]:
        """States in addition to the anchor's, by name."""
        return [name for name in ("direct", "latent") if getattr(self, name)]


@dataclass
class AdaptiveConfig:
    """Teach the model to answer easy queries with `<emb>` at once.

    Where its direct state already ranks a right candidate first, the LM target is `<emb>` alone instead of the oracle
    rationale, as in TRACE (arXiv:2603.02929), where a larger model marks the easy queries. Needs `loss.states.direct`.
    """

    share: BelowOne = 0.0
    """Largest share of a batch's queries that get `<emb>` alone as LM target; 0: none. The others keep their rationale."""
    margin: float = 0.0
    """Margin by which the right candidate has to lead every wrong one, as a difference of cosines."""
    floor: Share = 0.0
    """Smallest share of a batch's queries that get `<emb>` alone as LM target (those with the largest margins), so that the
    model does not forget how to answer directly."""
    warmup_steps: Count = 0
    """Steps over which the largest share rises from 0."""


@dataclass
class LossConfig:
    """The two losses. Users ablate these, so each can be given on its own."""

    ratio: str = "1:10"
    """Weight of the LM loss to that of the contrastive loss, normalised to sum to one (paper eq. 10: 1/11 and 10/11);
    `none`: no LM loss."""
    alpha_lm: float | None = None
    """Weight of the LM loss; overrides `ratio`. The other weight is 1 minus this one."""
    alpha_con: float | None = None
    """Weight of the contrastive loss; overrides `ratio`."""
    temperature: Positive = 0.03
    """InfoNCE tau; cosine similarities are divided by it. No unit, > 0."""
    anchor: Literal["self", "oracle", "none", "mix", "latent"] = "self"
    """Query state that the contrastive loss uses (the paper's Table 4): `self` after the model's own rationale,
    `oracle` after the oracle rationale (leaks the target), `none` directly after the prompt; `mix`: `oracle` for a
    share of the queries, `self` for the others; `latent`: after `model.think_tokens`, without a rollout."""
    oracle_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With `anchor=mix`: share of the queries, redrawn in each step, that are embedded after the oracle rationale."""
    oracle_decay_steps: AtLeastOne | None = None
    """With `anchor=mix`: steps over which the share falls linearly from `oracle_share` to 0; null: it stays constant."""
    states: StatesConfig = field(default_factory=StatesConfig)
    align: NotNegative = 0.0
    """Weight, within the contrastive part, of the KL divergence from the anchor's ranking of the candidates (with several
    rationales, the first one's) to that of each further state (`states`). The anchor gets no gradient from it."""
    align_temperature: Positive | None = None
    """Temperature of both rankings in `align`; null: `temperature`."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    think_lm: Share = 0.0
    """Share of the LM loss on oracle rationales that is computed after the think tokens instead of directly after the
    prompt, so that the think tokens learn to contain what the rationale would say (after TTE-Flash, arXiv:2605.16638);
    1: all of it."""
    terms: dict[str, NotNegative | None] = field(default_factory=lambda: {"info_nce": 1.0})
    """Contrastive losses, by registered name, and their weights within the contrastive part (docs/extending.md). null
    removes one that the `base` recipe has."""
    matryoshka_dims: list[AtLeastOne] = field(default_factory=list)
    """Further sizes to which embeddings can be truncated: InfoNCE becomes the mean over them and the full size."""
    lm_on_candidates: bool = True
    """Whether the LM loss also trains `<emb>` after the candidate's prompt, the second term of eq. 8."""


@dataclass
class RolloutConfig:
    """How the model writes its own rationales, in training and in evaluation. Nothing is inherited."""

    max_new_tokens: AtLeastOne = 128
    """Cap on generated tokens, `<emb>` included; at the cap `<emb>` is appended and counted as forced."""
    temperature: NotNegative = 0.0
    """Sampling temperature in training; 0 is greedy. Evaluation is greedy unless asked otherwise."""
    batch_size: AtLeastOne = 64
    """Rationales generated at once per rank."""
    backend: Literal["own", "vllm"] = "own"
    """What writes rationales. own: the training model; vllm: a vLLM engine, which gets the model's weights before each
    rollout. In both cases the states that are trained on are the training model's."""
    vllm_memory: Annotated[float, Field(ge=0.01, le=0.95)] = 0.3
    """Share of a device's memory for the engine of `backend=vllm`: a second copy of the language model, and its cache."""
    vllm_sleep: bool = False
    """Free the memory of the engine of `backend=vllm` between rollouts (vLLM's sleep mode). CUDA only."""
    prompt_pass: Literal["auto", "once", "twice"] = "auto"
    """How often a step encodes a query's prompt. `once`: with gradient, and the rollout continues from it; needs a
    rank's share of the batch to fit into one micro batch. `twice`: for the rollout, and again with gradient in its
    micro batch. `auto`: once if possible. The result is the same."""
    num_rationales: AtLeastOne = 1
    """Rationales sampled per query and step from one encoding of its prompt; needs a temperature. Each is an anchor of
    the contrastive loss, which is the mean over them."""
    reuse_steps: Count = 0
    """Number of steps for which a query's rationale is reused; 0: none. Its `<emb>` state is always computed with the
    current weights. Only in the joint stage: the stage rl always writes new ones."""
    direct_share: BelowOne = 0.0
    """Share of the queries, redrawn in each step, that are embedded without a rationale, so that one model is
    trained for both modes. Must be below 1: to embed all of them without, set loss.anchor=none."""


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
    sources: list[SourceConfig] = field(default_factory=list)
    """Training records and their shares."""

    def weights(self, sizes: Sequence[int | None]) -> list[float]:
        """Weights of the sources; `sizes` are their numbers of records, None if unknown."""
        pairs = zip(self.sources, sizes, strict=True)
        return [
            float(size or 0) if isinstance(source.weight, str) else source.weight for source, size in pairs
        ]

    def num_steps(self, num_records: int) -> int:
        """Optimizer steps, at least one; `num_records` are those of all sources but streams."""
        # A batch may span two epochs. Rounded first: 1.1 * 10 is a little more than 11.
        return self.steps or max(1, math.ceil(round(self.epochs * num_records / self.batch_size, 6)))


@dataclass
class RewardConfig:
    """One term of the reward, and its price."""

    name: str
    """A registered reward (docs/rl.md has the table), or your own as module:function."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """The reward is the sum of the terms times their weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the reward."""


@dataclass
class RLConfig(StageConfig):
    """The stage rl: rationales that retrieve better than their group's become likelier.

    Names and defaults are TRL's where TRL has them. Without `sources` it trains on the joint stage's; then stage=all leaves
    it out, and stage=rl runs it.
    """

    batch_size: AtLeastOne = 64
    """Queries per optimizer step over all ranks, each with `num_rationales` rationales; their candidates are ranked."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    alpha_rl: NotNegative = 1.0
    """Weight of the policy gradient."""
    alpha_con: NotNegative = 0.0
    """Weight of InfoNCE over the sampled rationales' states; replaces loss.alpha_con. On the demo, 0.5 costs accuracy."""
    alpha_lm: NotNegative = 0.05
    """Weight of the LM loss on oracle rationales; replaces loss.alpha_lm."""
    num_rationales: AtLeastOne = 8
    """Rationales sampled per query and step (a group); replaces rollout.num_rationales."""
    temperature: NotNegative = 1.0
    """Sampling temperature; replaces rollout.temperature. Log probabilities are those of this distribution."""
    rewards: list[RewardConfig] = field(default_factory=lambda: [RewardConfig("margin")])
    """Terms of the reward, each with name, weight and options."""
    candidates: str = "batch"
    """What rewards rank: batch, the step's candidates on all processes; or pool:PATH, a fixed, harder pool: a folder
    with a retrieval set's corpus.parquet, or a file of training records, whose positives and negatives form the pool."""
    pool_every: AtLeastOne = 50
    """Steps between embeddings of the pool; without a pool it has no effect."""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """Normalisation of the policy gradient, see docs/rl.md."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation that advantages are divided by: of the group, of the batch, or none; null: group, as in TRL."""
    std_floor: NotNegative = 1e-4
    """Added to that standard deviation: equal rationales differ in reward by rounding."""
    epsilon: Share = 0.2
    """Lower clipping: ratios of a token's probability to its probability when written are clipped at 1 - epsilon. No
    effect in a rollout's first update, in which the ratios are 1 (`num_iterations`)."""
    epsilon_high: NotNegative | None = None
    """Upper clipping, at 1 + epsilon_high; null: epsilon. DAPO uses 0.28."""
    beta: NotNegative = 0.0
    """Weight, within the policy gradient, of the KL divergence (k3) from the checkpoint that the stage starts from; 0
    needs no reference model. With adapters the reference is the model without them; otherwise a frozen copy is kept in
    memory."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, which corrects its gradient for rationales written with earlier weights."""
    mask_truncated_completions: bool = False
    """Exclude rationales that were cut off at the cap from the policy gradient. The <emb> appended there never counts."""
    num_iterations: AtLeastOne = 1
    """Optimizer updates per rollout; after the first, ratios differ from 1 and clipping begins."""
    vllm_importance_sampling_correction: bool = True
    """Weight samples from vLLM by our probability divided by vLLM's."""
    vllm_importance_sampling_mode: Literal["sequence_truncate", "sequence_mask"] = "sequence_mask"
    """sequence_truncate clamps a rationale's ratio to the bounds; sequence_mask leaves the rationale out beyond them."""
    vllm_importance_sampling_clip_max: NotNegative | None = 3.0
    """Upper bound of the ratio; null: none."""
    vllm_importance_sampling_clip_min: NotNegative | None = None
    """Lower bound of the ratio; null: none."""
    patience: Count = 50
    """The stage ends with a message if no group's rewards differ for this many consecutive steps; 0: never."""


@dataclass
class OptimConfig:
    """The optimizer, the same for all stages."""

    name: Literal["adamw", "muon"] = "adamw"
    """Muon for matrices with AdamW for the rest learns much faster from scratch; not under ZeRO."""
    muon_kernels: bool = True
    """Whether Muon also updates convolution kernels, as matrices of (out channels, everything else), as its author
    does; Qwen's patch embedding is one. false: AdamW updates them."""
    vision_lr_ratio: NotNegative = 1.0
    """Learning rate of the vision tower and its merger as a share of the stage's."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of AdamW's running means of the gradient and its square."""
    eps: Positive = 1e-8
    """Added to the root of the mean square, to avoid division by zero."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each step shrinks every weight by this share times the learning rate."""
    max_grad_norm: NotNegative = 1.0
    """Maximum global norm of the gradient (clipping), the same on every back end; 0: no clipping."""
    skip_nonfinite: Count = 0
    """Successive steps without an update that a stage survives because their loss or gradient is not finite, e.g. after a
    single bad batch; one more ends it. `skipped_steps` in metrics.jsonl shows them. May be raised when a run is resumed."""


@dataclass
class TrainConfig:
    """The loop."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of all randomness: order of the records, augmentation, dropout, sampled rationales."""
    micro_batch_size: AtLeastOne = 8
    """Queries per forward and backward pass on one rank. Affects memory, not the result."""
    keep_activations: Literal["auto", "device", "host", "none"] = "auto"
    """Where a step of several micro batches keeps the activations of its first pass for the backward pass (with
    model.gradient_checkpointing, each layer's input), instead of computing them a second time: in the device's memory,
    in pinned main memory, or nowhere. auto: on a GPU, wherever they fit according to the plan; otherwise nowhere."""
    save_every: AtLeastOne = 500
    """Steps between resumable checkpoints."""
    keep_last: AtLeastOne = 2
    """Resumable checkpoints kept on disk; with two, one is left if the newest is damaged."""
    background_save: bool = True
    """Copy resumable checkpoints to main memory and write them while training continues; false: wait for the disk.
    With DeepSpeed and FSDP, every process copies and writes its shard."""
    log_every: AtLeastOne = 10
    """Steps between lines of metrics.jsonl and of trackers."""
    back_end: BackEndName = "ddp"
    """The minimum that is sharded across processes: ddp (nothing), zero1 (the optimizer's state and float32 weights),
    zero2 (gradients too), zero3 or fsdp2 (everything). A launch that names no back end gets this one. A launch config
    that shards as much or more is used unchanged; one that shards less is refused. No effect with one process."""
    num_processes: AtLeastOne | None = None
    """Number of processes that this run must have; any other number is an error. null: as many as the launcher starts."""
    silence_s: Positive = 45.0
    """With several processes: a process without a heartbeat for this many seconds counts as dead, and ends the run.
    Raise it if processes may freeze for longer and then continue, in a debugger or a paused container for example."""
    deterministic: bool = False
    """torch.use_deterministic_algorithms: bit-exact repeats on GPU, slower."""


@dataclass
class ValidationConfig(RecordsConfig):
    """Held-out records measured while training. Nothing here changes what is trained.

    They are given as a source is; without, there is no validation. Benchmarks are run by ``rge eval``.
    """

    every: AtLeastOne = 500
    """Steps between measurements; the last step is always measured."""
    max_records: AtLeastOne = 512
    """Number of records used, from the beginning; each query is ranked against the targets of all of them."""
    metric: Literal["hit_at_1", "loss", "loss_contrastive", "loss_lm"] = "hit_at_1"
    """Metric for choosing the best checkpoints: hit_at_1 (higher is better), loss, loss_contrastive or loss_lm (lower).
    A stage without a contrastive loss, such as the cold start, uses loss_lm; one without an LM loss has none."""
    keep_best: Count = 1
    """Best checkpoints kept in ``<out>/<stage>/best``, ready for evaluation; 0: only measure."""


@dataclass
class ExportConfig:
    """What a checkpoint holds."""

    adapters_only: bool = False
    """With `model.lora`: export only the adapters and the rows of new tokens, as PEFT's own files of a few MB;
    ``rge.json`` names their base (docs/training.md). The next stage then continues these adapters. false: export merged
    weights."""


@dataclass
class LogConfig:
    """Where progress goes; JSON lines are always written."""

    trackers: list[str] = field(default_factory=list)
    """Accelerate's trackers by name, e.g. wandb, tensorboard."""
    project: str = "rge"
    """Project name for trackers."""


@dataclass
class Recipe:
    """Train a model: what data, which losses, in which stages, and what is kept."""

    recipe: str
    """Name of the recipe's file."""
    out: str = "runs/{recipe}"
    """Output folder of the run; ``{recipe}`` stands for the recipe's name."""
    stage: Literal["all", "cold_start", "joint", "rl"] = "all"
    """Stages to run; `all`: one after the other, each from the previous one's checkpoint, and rl only if it has sources."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own that register losses, rewards, families, prompt profiles, augmentations or data
    sources (docs/extending.md)."""
    init: str | None = None
    """Checkpoint to start from instead of `model.path` or `model.scratch`, e.g. another run's cold start; if a stage is
    run alone, such as `stage=joint`, the checkpoint of the previous stage."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cold_start: StageConfig = field(default_factory=StageConfig)
    joint: StageConfig = field(default_factory=StageConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def stages(self) -> list[str]:
        """Names of the stages of this run, in order."""
        if self.stage != "all":
            return [self.stage]
        return ["cold_start", "joint", *(["rl"] if self.rl.sources else [])]

    @property
    def max_rationale_tokens(self) -> int:
        """`data.max_rationale_tokens`, with null resolved."""
        return self.data.max_rationale_tokens or max(4 * self.rollout.max_new_tokens, 512)

    def rollout_of(self, stage: StageConfig) -> RolloutConfig:
        """How rationales are written in a stage: `rl` samples groups of new ones."""
        if not isinstance(stage, RLConfig):
            return self.rollout
        return replace(
            self.rollout, num_rationales=stage.num_rationales, temperature=stage.temperature, reuse_steps=0
        )


@dataclass
class CheckOptions(Recipe):
    """Report every problem of a run that can be found before it starts."""

    pictures: bool = False
    """Decode every picture once, on all cores; false: only check that each exists."""


def load_recipe(arguments: Sequence[str], recipes: Path = RECIPES) -> Recipe:
    """Read a recipe by name and apply ``key=value`` overrides; see `load_options`."""
    return load_options(Recipe, arguments, recipes)


def load_options(
    schema: type[R], arguments: Sequence[str], recipes: Path = RECIPES, command: str = "rge train recipe=NAME"
) -> R:
    """Read and check a recipe, or a recipe and a command's further options (`schema` is a subclass of `Recipe`).

    `arguments` are ``recipe=NAME`` (a file of `recipes` without its ending, or the path of a YAML file) and overrides such as
    ``loss.alpha_lm=0.5``. `LossConfig.alpha_lm` and `alpha_con` are filled in and sum to one. RecipeError: no or an unknown
    recipe, an unknown key (the nearest is named), or an invalid value.
    """
    try:
        recipe = parse_file(schema, arguments, key="recipe", folder=recipes, command=command)
    except UserError as error:
        raise RecipeError(str(error)) from None
    recipe.out = os.path.expanduser(recipe.out.replace("{recipe}", recipe.recipe))
    recipe.init = recipe.init and os.path.expanduser(recipe.init)
    recipe.model.path = recipe.model.path and os.path.expanduser(recipe.model.path)
    load_plugins(recipe.plugins)
    check(recipe)
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON values, equal to what is read back from a checkpoint.

    Omits a command's further options and unused settings of sources.
    """
    whole = json.loads(json.dumps(asdict(recipe)))
    return without_unused({item.name: whole[item.name] for item in fields(Recipe)})


def without_unused(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe as JSON values, of a checkpoint for example, without unused settings of sources."""
    unused = asdict(SourceConfig()) | {"weight": None}
    found = dict(recipe)
    for stage in ("cold_start", "joint", "rl"):
        if stage in found:  # older checkpoints know no rl
            used = [
                {name: value for name, value in source.items() if name not in unused or value != unused[name]}
                for source in found[stage]["sources"]
            ]
            found[stage] = found[stage] | {"sources": used}
    return found


def check(recipe: Recipe) -> None:
    """Complete a recipe, and check what the types of single keys do not cover.

    RecipeError names every wrong key, its value and the allowed ones.
    """
    if recipe.stage == "rl" and not recipe.rl.sources:
        recipe.rl.sources = list(recipe.joint.sources)
    recipe.loss.terms = {name: weight for name, weight in recipe.loss.terms.items() if weight is not None}
    recipe.loss.alpha_lm, recipe.loss.alpha_con = _loss_weights(recipe.loss)
    if found := list(problems(recipe)):
        raise RecipeError("\n".join(found))


Rules = dict[str, Callable[[Recipe], object]]
"""Error messages, each with the condition under which it applies; ``{r.rl.beta}`` in a message is the recipe's value."""

_RULES: Rules = {
    "give exactly one of model.path and model.scratch": lambda r: (
        (r.model.path is None) == (r.model.scratch is None)
    ),
    "model.freeze_vision=true leaves model.lora.vision=true nothing to train; choose one": lambda r: (
        r.model.lora and r.model.lora.vision and r.model.freeze_vision
    ),
    "export.adapters_only=true needs adapters, and all weights are trained: set model.lora, e.g. {{rank: 16}}, or "
    "export.adapters_only=false": lambda r: r.export.adapters_only and r.model.lora is None,
    "model.min_pixels ({r.model.min_pixels}) must not exceed model.max_pixels ({r.model.max_pixels})": lambda r: (
        r.model.min_pixels > r.model.max_pixels
    ),
    "loss.terms leaves no contrastive loss: give one of them a weight above 0": lambda r: (
        not any(r.loss.terms.values())
    ),
    "loss.oracle_share=1 mixes nothing: that is loss.anchor=oracle; or give loss.oracle_decay_steps": lambda r: (
        r.loss.anchor == "mix" and r.loss.oracle_decay_steps is None and r.loss.oracle_share == 1
    ),
    "rollout.prompt_pass=once continues the rollout from the training model's keys and values, which "
    "rollout.backend=vllm does not have: set rollout.prompt_pass=auto": lambda r: (
        r.rollout.backend == "vllm" and r.rollout.prompt_pass == "once"
    ),
    "rollout.temperature={r.rollout.temperature} is not possible with rollout.backend=vllm: set 0, or 0.01 to 2": lambda r: (
        r.rollout.backend == "vllm" and not _vllm_samples_at(r.rollout.temperature)
    ),
    "rollout.num_rationales={r.rollout.num_rationales} would write the same rationale each time, since decoding is greedy; "
    "set rollout.temperature, e.g. 1.0": lambda r: (
        r.rollout.num_rationales > 1 and r.rollout.temperature == 0
    ),
}
"""Of every recipe."""

_STATE_RULES: Rules = {
    "loss.adaptive.share={r.loss.adaptive.share} needs the direct state: set loss.states.direct, e.g. 1": lambda r: (
        r.loss.adaptive.share and not r.loss.states.direct
    ),
    "loss.adaptive.floor={r.loss.adaptive.floor} is above loss.adaptive.share={r.loss.adaptive.share}": lambda r: (
        r.loss.adaptive.floor > r.loss.adaptive.share
    ),
    "loss.adaptive.share={r.loss.adaptive.share} changes the LM loss by what the contrastive loss compares, and the weight of one "
    "of them is 0: set loss.ratio, e.g. 1:10": lambda r: (
        r.loss.adaptive.share and not (r.loss.alpha_lm and r.loss.alpha_con)
    ),
    "loss.think_lm={r.loss.think_lm} is a share of the LM loss, whose weight is 0: set loss.ratio, e.g. 1:10": lambda r: (
        r.loss.think_lm and not r.loss.alpha_lm and "cold_start" not in r.stages()
    ),
    "loss.think_lm=1 leaves loss.adaptive no LM loss after the prompt: set it below 1": lambda r: (
        r.loss.adaptive.share and r.loss.think_lm == 1
    ),
    "loss.align={r.loss.align} needs a second state: set loss.states.direct or loss.states.latent, e.g. 1": lambda r: (
        r.loss.align and not r.loss.states.further
    ),
    "loss.anchor=none trains the direct state alone: set loss.states.direct=0, or another loss.anchor": lambda r: (
        r.loss.anchor == "none" and r.loss.states.further
    ),
    "loss.anchor=latent is the latent state: set loss.states.latent=0": lambda r: (
        r.loss.anchor == "latent" and r.loss.states.latent
    ),
    "the latent state needs think tokens: set model.think_tokens, e.g. 4": lambda r: (
        _trains_latent(r) and not r.model.think_tokens
    ),
    "model.think_tokens={r.model.think_tokens} must be below rollout.max_new_tokens={r.rollout.max_new_tokens}": lambda r: (
        _trains_latent(r) and r.model.think_tokens >= r.rollout.max_new_tokens
    ),
    "model.think_tokens={r.model.think_tokens} needs the latent state: set loss.states.latent, e.g. 1, or "
    "loss.anchor=latent": lambda r: not _trains_latent(r) and r.model.think_tokens,
    "loss.think_lm={r.loss.think_lm} needs the latent state: set loss.states.latent, e.g. 1, or loss.anchor=latent": lambda r: (
        not _trains_latent(r) and not r.model.think_tokens and r.loss.think_lm
    ),
    "rollout.direct_share takes the reasoned state from some queries, loss.states.{r.loss.states.further[0]} adds a state to "
    "all: set one of them to 0": lambda r: r.rollout.direct_share and r.loss.states.further,
    "the stage rl trains the reasoned state alone: set loss.states.{r.loss.states.further[0]}=0": lambda r: (
        r.loss.states.further and "rl" in r.stages()
    ),
}
"""Of the direct and the latent state."""

_RL_RULES: Rules = {
    "rl.alpha_rl, rl.alpha_con and rl.alpha_lm are all 0, which leaves nothing to train": lambda r: (
        not (r.rl.alpha_rl or r.rl.alpha_con or r.rl.alpha_lm)
    ),
    "rl.beta={r.rl.beta} is a part of the policy gradient, which rl.alpha_rl=0 leaves out: set rl.beta=0 too": lambda r: (
        r.rl.beta and not r.rl.alpha_rl
    ),
    "rl.beta's reference is the model without adapters, but with export.adapters_only=true the stage rl continues earlier "
    "ones: set rl.beta=0 or export.adapters_only=false": lambda r: (
        r.rl.beta and r.rl.alpha_rl and r.export.adapters_only
    ),
    "rl.temperature={r.rl.temperature} is not possible with rollout.backend=vllm: set 0, or 0.01 to 2": lambda r: (
        r.rollout.backend == "vllm" and not _vllm_samples_at(r.rl.temperature)
    ),
    "rl.candidates must be batch or pool:PATH, got {r.rl.candidates!r}": lambda r: (
        not re.fullmatch("batch|pool:.+", r.rl.candidates)
    ),
    "rl.candidates is what rewards rank, and rl.alpha_rl=0 leaves rewards out: set it to batch": lambda r: (
        r.rl.candidates != "batch" and not r.rl.alpha_rl
    ),
    "loss.anchor={r.loss.anchor} embeds queries without the model's own rationale, which is what the stage rl trains: set "
    "loss.anchor=self": lambda r: r.loss.anchor != "self",
    "stage=rl continues from a model that writes rationales, and model.scratch is untrained: give "
    "init=runs/{r.recipe}/joint/final or another checkpoint": lambda r: (
        r.stage == "rl" and r.init is None and r.model.scratch is not None
    ),
    "rl.rewards leaves no reward: name at least one and give it a weight, or set rl.alpha_rl=0": lambda r: (
        r.rl.alpha_rl and not any(reward.weight for reward in r.rl.rewards)
    ),
    "rl.num_rationales=1 leaves nothing to compare a rationale with, so there is no policy gradient: set 2 or more (8 is "
    "usual), or set rl.alpha_rl=0": lambda r: r.rl.alpha_rl and r.rl.num_rationales < 2,
    "rl.temperature=0 writes the same rationale each time, so no group would differ: set it above 0, e.g. 1.0": lambda r: (
        r.rl.num_rationales > 1 and r.rl.temperature == 0
    ),
}
"""Of recipes that run the stage rl."""


def problems(recipe: Recipe) -> Iterator[str]:
    """Everything that is wrong with combinations of keys."""
    try:
        PROFILES[recipe.data.profile]
    except UserError as error:
        yield f"data.profile: {error}"
    runs_rl = "rl" in recipe.stages()
    for message, is_broken in (_RULES | _STATE_RULES | (_RL_RULES if runs_rl else {})).items():
        if is_broken(recipe):
            yield message.format(r=recipe)
    yield from _check_unused(recipe)
    yield from _check_validation(recipe)
    for name in recipe.stages():
        yield from _check_stage(recipe, name, getattr(recipe, name))
    terms = [(reward.name, reward.options) for reward in recipe.rl.rewards if runs_rl]
    if twice := {name for name, options in terms if terms.count((name, options)) > 1}:
        yield (
            f"rl.rewards names {', '.join(sorted(twice))} twice with the same options; use one entry with the sum of the "
            "weights"
        )


def _check_stage(recipe: Recipe, name: str, stage: StageConfig) -> Iterator[str]:
    if not stage.sources:
        yield f"{name}.sources is empty: name at least one file, {name}.sources=[{{path: FILE.jsonl}}]"
    if stage.batch_size == 1 and not recipe.data.max_negatives and _compares_in_batch(recipe, name):
        yield (
            f"{name}.batch_size=1 with data.max_negatives=0 leaves nothing to compare a query with, so its contrastive "
            "loss is always 0: raise one of them"
        )
    if len({source.weight == "size" for source in stage.sources}) > 1:
        yield (
            f"{name}.sources mixes weight: size with numbers, and a number of records is no share: set weight: size for all "
            "of them, or for none"
        )
    for number, source in enumerate(stage.sources):
        yield from _check_records(f"{name}.sources[{number}]", source)
        if source.streaming:
            yield from _check_stream(recipe, name, stage, source)


def _trains_latent(recipe: Recipe) -> bool:
    return recipe.loss.anchor == "latent" or recipe.loss.states.latent > 0


def _vllm_samples_at(temperature: float) -> bool:
    return temperature == 0 or 0.01 <= temperature <= 2


def _compares_in_batch(recipe: Recipe, stage: str) -> bool:
    """Whether a stage's losses or rewards rank the step's candidates."""
    if stage == "rl":
        return recipe.rl.alpha_con > 0 or (recipe.rl.alpha_rl > 0 and recipe.rl.candidates == "batch")
    return stage == "joint" and bool(recipe.loss.alpha_con)


def _check_unused(recipe: Recipe) -> Iterator[str]:
    """Settings without effect; those of a rollout's speed (`backend`, `prompt_pass`) may be in a sweep's base."""
    anchor = recipe.loss.anchor
    unused: list[tuple[str, LossConfig | RolloutConfig, str]] = []
    if anchor != "mix":
        unused += [("loss", recipe.loss, key) for key in ("oracle_share", "oracle_decay_steps")]
    if anchor not in ("self", "mix"):
        written = ("temperature", "num_rationales", "reuse_steps", "direct_share")
        unused += [("rollout", recipe.rollout, key) for key in written]
    for section, settings, key in unused:
        value, default = getattr(settings, key), getattr(type(settings), key)
        if value != default:
            yield (
                f"{section}.{key}={value} has no effect with loss.anchor={anchor}: set {section}.{key}={json.dumps(default)}, "
                f"or loss.anchor={'mix' if section == 'loss' else 'self'}"
            )


def _check_validation(recipe: Recipe) -> Iterator[str]:
    """Whether stages have the metric for choosing their best checkpoints; one without a contrastive loss uses the LM loss."""
    validation, rl = recipe.validation, recipe.rl
    if validation.key is None:
        return
    yield from _check_records("validation", validation)
    weights = {
        "joint": (recipe.loss.alpha_lm, recipe.loss.alpha_con, 0.0),
        "rl": (rl.alpha_lm, rl.alpha_con, rl.alpha_rl),
    }
    for stage, (alpha_lm, alpha_con, alpha_rl) in weights.items():
        if stage not in recipe.stages() or alpha_lm or not (alpha_con or alpha_rl):
            continue
        if validation.metric == "loss_lm" or (validation.metric == "loss" and not alpha_con):
            yield (
                f"validation.metric={validation.metric} has no value in the stage {stage}, where the weights of the losses that "
                "it measures are 0: use hit_at_1 or loss_contrastive"
            )


def _check_records(key: str, config: RecordsConfig) -> Iterator[str]:
    """Require exactly one kind of source, and no setting of another kind, which would have no effect."""
    kinds = {"path": config.path, "dataset": config.dataset, "type": config.type}
    given = [kind for kind, value in kinds.items() if value is not None]
    if len(given) != 1:
        named = f", not {' and '.join(given)}" if given else ""
        yield f"{key} must name exactly one of path, dataset and type{named}"
        return
    owners = {
        **dict.fromkeys(("name", "split", "revision", "streaming"), ("dataset",)),
        "columns": ("dataset", "type", "table"),
        "options": ("type",),
    }
    for name, owner in owners.items():
        kind = "table" if config.path is not None and config.lines is None else given[0]
        if kind not in owner and getattr(config, name) != getattr(RecordsConfig(), name):
            wanted = " or ".join(one for one in owner if one != "table")
            yield f"{key}.{name} belongs to {wanted}, and this source has a {given[0]}"


def _check_stream(recipe: Recipe, name: str, stage: StageConfig, source: SourceConfig) -> Iterator[str]:
    """Refuse settings that need the number of records."""
    if source.weight == "size":
        yield (
            f"{name}.sources: weight: size needs the number of records, which is unknown for the stream {source.label}: give "
            "numbers as weights, or set streaming: false"
        )
    if stage.steps is None:
        yield (
            f"{name}.epochs needs the number of records, which is unknown for the stream {source.label}: set {name}.steps, "
            "or streaming: false"
        )
    if recipe.model.scratch is not None and recipe.init is None:
        yield (
            f"model.scratch learns its vocabulary from the texts of all records, and the stream {source.label} has no known "
            "end: set streaming: false, or start from a checkpoint (init=...)"
        )


def _loss_weights(loss: LossConfig) -> tuple[float, float]:
    lm, con = loss.alpha_lm, loss.alpha_con
    if lm is None:
        if con is None:
            return _weights_of_ratio(loss.ratio)
        lm = 1.0 - con
    if con is None:
        con = 1.0 - lm
    if not (0 <= lm <= 1 and 0 <= con <= 1 and math.isclose(lm + con, 1.0, abs_tol=1e-9)):
        raise RecipeError(
            f"loss.alpha_lm ({lm}) and loss.alpha_con ({con}) must lie in [0, 1] and sum to 1 (paper eq. 10); "
            "give one of them and the other follows"
        )
    return lm, con


def _weights_of_ratio(ratio: str) -> tuple[float, float]:
    if ratio == "none":
        return 0.0, 1.0
    try:
        lm, con = (float(part) for part in ratio.split(":"))
    except ValueError:
        raise RecipeError(f"loss.ratio must be LM:CONTRASTIVE such as 1:10, or none; got {ratio!r}") from None
    total = lm + con
    if min(lm, con) < 0 or total <= 0 or not math.isfinite(total):
        raise RecipeError(f"loss.ratio needs two weights >= 0, not both zero; got {ratio!r}")
    return lm / total, con / total

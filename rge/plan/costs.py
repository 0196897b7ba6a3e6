"""Costs of a training step: tokens, FLOPs, memory and communication.

Picture costs are measured in a pass of the vision tower; the rest is formulas. FLOPs count matrix products (a multiplication
and an addition are two) and attention densely, as `torch.utils.flop_counter` does; ``tests/rge/plan/test_plan.py`` compares
the two. Memory is an estimate: it adds up what is kept and ignores what an allocator wastes.

In a step (rge/step/training_step.py), the queries' prompts are encoded, the rollout continues from their keys and values, one forward
runs each prompt with its own and its oracle rationale, another the candidates, and the backward follows. If a rank's share of
the batch takes several micro batches, candidates are encoded once more without gradient, and so are prompts, unless what
their backward needs is kept (`train.keep_activations`). A frozen vision tower runs on each picture once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils.flop_counter import FlopCounterMode

from rge.config import Recipe
from rge.data.collate import WHOLE_BYTES
from rge.losses import CHUNK_TOKENS
from rge.model.adapters import trained_parts
from rge.model.attention import bucket
from rge.model.backbone import parts_of, skeleton
from rge.model.config import ModelConfig
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.model.prompts import Measured
from rge.model.vision_tower import speed_up
from rge.plan.options import PlanOptions

GIB = 2**30
RESERVED_GIB = 4.0
"""Reserved per GPU: context, communication buffers, fragments."""

PROCESS_GIB, WORKER_GIB = 3.0, 0.5
"""Reserved host memory: per process with torch and its libraries, and per forked data worker for the pages it writes."""

CPU_SHARE = 0.8
"""Share of the free main memory that a training on CPUs may plan with, since other programs use it too."""

PROCESS_DESCRIPTORS, WORKER_DESCRIPTORS = 128, 8
"""Upper bounds on open files: per process, sockets and libraries included, and per data worker."""

MINED_ROW = 2048
"""Bytes of main memory per query or candidate in a mining's table: ids, hashes and contents."""

NCCL_GIB = 1.0
"""Shared memory per container that NCCL's guide asks for (docker run --shm-size=1g)."""

ACTIVATIONS_OFF_BY = 1 / 3
"""Relative error of the activation estimate; tests/rge/plan/test_plan.py enforces it."""

SPEEDS = {
    "B200": (2250.0, 8.0),
    "H200": (989.0, 4.8),
    "H100 PCIe": (756.0, 2.0),
    "H100 NVL": (835.0, 3.9),
    "H100": (989.0, 3.35),
    "A100-SXM4-40GB": (312.0, 1.555),
    "A100-PCIE-40GB": (312.0, 1.555),
    "A100 80GB PCIe": (312.0, 1.935),
    "A100": (312.0, 2.039),
    "L40S": (362.0, 0.864),
    "RTX 4090": (165.2, 1.008),
}
"""Vendors' TFLOP/s in bfloat16 without sparsity, and TB/s, by a part of the device's name; the first match counts."""

SHARDED: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
    "fsdp2": ("weights", "gradients", "optimizer"),
}
"""What each back end shards over the GPUs."""

KEPT = "kept until the backward"
"""Kind of memory: what several micro batches keep (`kept_bytes`)."""

OPTIMIZER_STATES = {"adamw": 2, "muon": 1}
"""Numbers kept per parameter; Muon keeps one, except for what it leaves to AdamW."""

HOST_TBS = 0.04
"""TB/s of copies between an otherwise idle GPU and main memory: two thirds of PCIe 5's 16 lanes."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

UTILISATION = (0.2, 0.5)
"""Usual range of the share of a GPU's peak that training of large models reaches; it bounds a plan's hours."""
CPU_UTILISATION = (0.5, 0.9)
"""The same for a CPU, whose peak is measured."""


@dataclass(frozen=True)
class PictureCost:
    """Cost of one picture in the vision tower."""

    placeholders: int = 0  # tokens, each replaced by `feature` numbers
    feature: int = 0
    num_bytes: int = 0  # of its pixels between processes, 8 bits per channel
    products: float = 0.0  # FLOPs of a pass in matrix products
    attention: float = 0.0  # the same in attention
    fixed: float = 0.0  # the same in what is never trained
    layers: int = 0
    states: int = 0  # numbers in a layer's input
    inside: int = 0  # numbers that autograd keeps per layer

    @property
    def seen(self) -> float:
        """FLOPs of a pass."""
        return self.products + self.attention + self.fixed


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model and its text layers."""

    parameters: int
    vision_parameters: int  # of these
    layer: int  # parameters of one text layer's matrices
    key_value: int  # of these, those that compute keys and values
    layers: int
    hidden: int
    attention: int  # numbers in a token's queries
    cached: int  # numbers in a token's keys and values, over all layers
    inside: int  # numbers that autograd keeps per token and layer
    vocabulary: int  # rows of the output matrix
    picture: PictureCost  # the largest, or one like the records'


def speed_of(device: str, dtype: str) -> tuple[float, float] | None:
    """TFLOP/s and TB/s of a device by its name; None if unknown, as for any in float32."""
    if dtype != "bfloat16":
        return None
    return next((speed for name, speed in SPEEDS.items() if name in device), None)


def shapes_of(model: HubModel, num_pixels: int) -> Shapes:
    """Sizes of a model, also on `meta`, with the cost of a square picture of `num_pixels`."""
    family, text = family_of(model), model.config.get_text_config()
    layer = family.decoder(model).layers[0]
    matrices = {name: matrix.weight.numel() for name, matrix in _matrices(layer).items()}
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = text.num_attention_heads * head_size
    return Shapes(
        parameters=_size(model),
        vision_parameters=sum(map(_size, family.vision(model))),
        layer=sum(matrices.values()),
        key_value=sum(size for name, size in matrices.items() if name.endswith(("k_proj", "v_proj"))),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        attention=attention,
        cached=2 * text.num_key_value_heads * head_size * text.num_hidden_layers,
        # Norms and residuals; queries, keys and values before and after rotation, the output; gate, up, activation and product.
        inside=6 * text.hidden_size + 6 * attention + 4 * text.intermediate_size,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        picture=cost_of_picture(model, num_pixels),
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def cost_of_picture(model: HubModel, num_pixels: int) -> PictureCost:
    """Cost of a square picture of `num_pixels`, counted in one pass on `meta`, which computes only shapes."""
    return _count(model if model.device.type == "meta" else skeleton(model.config), num_pixels)


@lru_cache(maxsize=64)
def _count(model: HubModel, num_pixels: int) -> PictureCost:
    family = family_of(model)
    pixels, grid = family.square_picture(model.config, num_pixels)
    frames = getattr(model.config.vision_config, "temporal_patch_size", None)
    shape = pixels.shape if frames is None else (len(pixels), frames * pixels[0].numel())
    parts = [module for part in family.vision(model) for module in part.modules()]
    stacks = (part for part in parts if isinstance(part, nn.ModuleList) and hasattr(part[0], "mlp"))
    blocks: Any = next(stacks, [])
    states: list[Tensor] = []  # of the first block

    def note(_: nn.Module, args: Any, out: Any) -> None:
        states.append(out if isinstance(out, Tensor) else out[0])

    hooks = [block.register_forward_hook(note) for block in blocks[:1]]
    speed_up(model, "sdpa")  # else Qwen's towers read the pictures' sizes back from the device
    values = torch.zeros(shape, dtype=model.dtype, device="meta")
    # SmolVLM's tower selects by a mask, of which all is true for a whole picture, in transformers 5.19.
    whole_mask = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with torch.no_grad(), whole_mask, FlopCounterMode(display=False) as counter:
        features = family.features(model, values, grid)
    for hook in hooks:
        hook.remove()
    flops = counter.get_flop_counts()["Global"]

    def counted(kinds: str) -> int:
        return sum(count for operation, count in flops.items() if re.search(kinds, str(operation)))

    # In a tower that comes with a package, the weights of convolutions are buffers.
    convolutions = [part for part in parts if isinstance(part, nn.Conv2d)]
    are_buffers = not any(isinstance(part.weight, nn.Parameter) for part in convolutions)
    attention, fixed = counted("bmm|attention"), counted("convolution") * are_buffers
    numbers = inside = 0
    if states:
        numbers, hidden = states[0].numel(), states[0].shape[-1]
        inner = max(max(matrix.weight.shape) for matrix in _matrices(blocks[0].mlp).values())
        inside = numbers // hidden * (12 * hidden + 4 * inner)
    return PictureCost(
        placeholders=features.shape[0],
        feature=features.shape[1],
        num_bytes=pixels.numel(),
        products=sum(flops.values()) - attention - fixed,
        attention=attention,
        fixed=fixed,
        layers=len(blocks),
        states=numbers,
        inside=inside,
    )


@dataclass(frozen=True)
class Load:
    """Work of one rank in a step."""

    queries: int
    candidates: int
    chunks: int  # micro batches
    prompt: float  # tokens of a query's prompt, pictures included
    candidate: float  # the same of a candidate's
    own: int  # tokens of a generated rationale without `<emb>`; 0 if none is generated
    oracle: int  # tokens of an oracle rationale; 0 if no branch has one
    # InfoNCE reads a separate branch: after the generated rationale, or directly after the prompt.
    read_own: bool
    contrastive: bool
    label_candidates: bool  # `<emb>` after a candidate's prompt is predicted
    query_pictures: float  # of the size of `Shapes.picture` in a query's prompt
    candidate_pictures: float
    each: int = 1  # generated rationales per query
    sampled: bool = False  # their tokens' log probabilities are read, for a policy gradient
    oracles: int = 1  # branches with the oracle rationale
    learned: int = 1  # of these, those whose tokens are predicted
    reference: bool = False  # they are also read under a reference, for a KL divergence
    beside: int = 0  # tokens of the branch of the direct state
    trains_candidates: bool = True  # otherwise they are only ranked, for rewards
    updates: int = 1  # optimizer updates per rollout
    mining: "Load | None" = None  # what this rank embeds for `data.mine`, every so many steps
    every: int = 1  # of these
    prompt_spread: float = 0.0  # variance of `prompt`, since attention grows with the square
    candidate_spread: float = 0.0
    # The same step with what 95 % of the prompts have at most, and with the largest; None: as this.
    high: "Load | None" = None
    most: "Load | None" = None

    @property
    def largest(self) -> "Load":
        """The step that needs the most memory."""
        return self.most or self

    def in_chunks(self, chunks: int) -> "Load":
        """In another number of micro batches."""
        high, most = (one and replace(one, chunks=chunks) for one in (self.high, self.most))
        return replace(self, chunks=chunks, high=high, most=most)

    @property
    def tail(self) -> int:
        """Tokens of a query's row after the causal part: its last prompt token and branches."""
        return 1 + self.read_own * self.own_tokens + self.beside + self.oracle_tokens

    @property
    def labels(self) -> int:
        """Tokens of a query's row that are predicted."""
        return self.learned_tokens + self.sampled * self.own_tokens

    @property
    def own_tokens(self) -> int:
        """Tokens of a query's own rationales, `<emb>` included."""
        return self.each * (self.own + 1)

    @property
    def oracle_tokens(self) -> int:
        """Tokens of a query's branches with the oracle rationale, `<emb>` included."""
        return self.oracles * (self.oracle + 1) if self.oracle else 0

    @property
    def learned_tokens(self) -> int:
        """Those of them that are predicted."""
        return self.learned * self.oracle_tokens // self.oracles

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens per step, by kind."""
        return {
            "query prompts": round(self.queries * self.prompt),
            "own rationales": self.queries * self.own_tokens if self.own else 0,
            "oracle rationales": self.queries * self.oracle_tokens,
            "candidates": round(self.candidates * (self.candidate + 1)),
        }

    @property
    def pictures(self) -> float:
        """Pictures per step."""
        return self.queries * self.query_pictures + self.candidates * self.candidate_pictures


@dataclass(frozen=True)
class Setup:
    """Settings of a rank."""

    back_end: str = "ddp"
    num_gpus: int = 1  # over which ZeRO and FSDP2 shard
    dtype_bytes: int = 4  # of the computing dtype and of frozen weights; trained weights are float32
    trained: int = 0  # parameters with a gradient
    checkpointing: bool = False  # keep only layers' inputs, and recompute layers in the backward
    adapters: bool = False  # the text model's own matrices get no gradient
    train_vision: bool = True  # the backward goes through the vision tower
    optimizer_states: int = 2  # numbers that the optimizer keeps per parameter
    rollout_rows: int = 1  # rationales generated at once
    captures: bool = False  # generation steps are captured as CUDA graphs, whose buffers stay for the run
    micro_queries: int = 1  # queries per forward
    dropout: bool = False  # states depend on masks: what is computed first is what has a gradient later
    keep: str = "none"  # `train.keep_activations` with ``auto`` resolved
    once: bool = True  # prompts are encoded once: the rollout continues from their pass with gradient
    engine: float = 0.0  # bytes of an external engine during the rollout

    def shards(self, kind: str) -> int:
        """GPUs over which ``weights``, ``gradients`` or ``optimizer`` states are sharded."""
        return self.num_gpus if kind in SHARDED[self.back_end] else 1

    @property
    def shares_weights(self) -> bool:
        """Whether weights are sharded."""
        return self.shards("weights") > 1

    def remembers(self, load: Load) -> bool:
        """Whether a frozen tower runs once per picture and step, and its features are kept (`make_writer`)."""
        return bool(load.own) and not self.train_vision and not self.shares_weights


Numbers = TypeVar("Numbers", float, np.ndarray)


def _read_row(
    s: Shapes, prompt: Numbers, tail: float, read: float, spread: float = 0.0
) -> tuple[Numbers, Numbers]:
    """Products and attention of one row; the last layer computes only what is read, and keys and values.

    Of rows whose prompts differ, `prompt` is the mean and `spread` the variance.
    """
    tokens = prompt - 1 + tail
    last = s.key_value * tokens + (s.layer - s.key_value) * read
    products = 2.0 * ((s.layers - 1) * s.layer * tokens + last)
    tails = tail * tokens
    return products, 4 * s.attention * ((s.layers - 1) * ((prompt - 1) ** 2 + spread + tails) + tails)


def _written_row(s: Shapes, prompt: Numbers, own: Numbers) -> Numbers:
    """A rationale after all of its prompt but the last token, from keys and values: that token, its own, and `<emb>`."""
    steps = own + 2
    words = 2.0 * s.layers * s.layer * steps + 2.0 * s.hidden * s.vocabulary * (own + 1)
    return words + 4 * s.attention * s.layers * steps * (prompt + (steps - 1) / 2)


def embedding_flops(
    model: HubModel, prompts: Sequence[Measured], own_N: np.ndarray, *, writes: bool
) -> np.ndarray:
    """FLOPs (N,) of embedding each prompt after `own_N` tokens of its own rationale; not `writes`: with ``<emb>`` given instead.

    A rationale without a token `writes` all the same, since the model chose ``<emb>``. `model` may be on `meta`.
    """
    shapes, prompt_N = shapes_of(model, 0), np.array([len(prompt) for prompt in prompts], np.float64)
    if writes:
        text_N = _written_row(shapes, prompt_N, own_N) + sum(_read_row(shapes, prompt_N, 0, 0))
    else:
        text_N = sum(_read_row(shapes, prompt_N, 2, 1))
    seen = []
    for prompt in prompts:
        tokens = prompt.num_picture_tokens
        like = cost_of_tokens(model, prompt.num_compared / max(tokens, 1))
        seen.append(like.seen * tokens / max(like.placeholders, 1))
    return text_N + np.array(seen)


@lru_cache(maxsize=4096)
def cost_of_tokens(model: HubModel, num_tokens: float) -> PictureCost:
    """Cost of a square picture of about so many tokens."""
    pixels, _ = family_of(model).square_picture(model.config)
    of_token = pixels.numel() / pixels.shape[1] / cost_of_picture(model, 0).placeholders
    return cost_of_picture(model, round(round(math.sqrt(num_tokens)) ** 2 * of_token))


def flops(shapes: Shapes, load: Load, setup: Setup) -> dict[str, float]:
    """FLOPs of one rank's step, by phase; of a mining, a step's share."""
    found = _step_flops(shapes, load, setup)
    if load.mining is not None:
        found["mining"] = mining_flops(shapes, load.mining, setup) / load.every
    return found


def _step_flops(shapes: Shapes, load: Load, setup: Setup) -> dict[str, float]:
    s, n, picture = shapes, load, shapes.picture
    asked = partial(_read_row, s, n.prompt, spread=n.prompt_spread)
    offered = partial(_read_row, s, n.candidate, 2, spread=n.candidate_spread)
    found = {}
    query_pictures, candidate_pictures = n.queries * n.query_pictures, n.candidates * n.candidate_pictures
    unseen = {"queries": query_pictures, "candidates": candidate_pictures}

    def see(side: str) -> float:
        """The tower's pass over a side's pictures; a frozen tower runs once."""
        pictures = unseen[side]
        unseen[side] *= not setup.remembers(load)
        return pictures * picture.seen

    if n.own:
        found["rollout"] = n.queries * n.each * _written_row(s, n.prompt, n.own)
        if not setup.once:
            found["rollout"] += see("queries") + n.queries * sum(asked(0, 0))
    if n.reference:
        found["reference"] = query_pictures * picture.seen + n.queries * (
            sum(asked(1 + n.own_tokens, n.own_tokens)) + 2.0 * s.hidden * s.vocabulary * n.own_tokens
        )
    query = asked(n.tail, n.labels + (n.each if n.read_own else 0))
    candidate = offered(1 + n.label_candidates)
    caches = n.contrastive and n.chunks > 1  # gradients
    recomputes = caches and setup.keep == "none"
    if recomputes and (setup.dropout or not n.own):
        read = asked(1 + n.beside + (1 if n.read_own else n.oracle + 1), 1)
        found["queries without gradient"] = see("queries") + n.queries * sum(query if setup.dropout else read)
    elif caches and n.updates > 1:  # the rollout's states are those of the first
        own = n.queries * sum(asked(1 + n.own_tokens, n.each))
        found["queries without gradient"] = (1 - 1 / n.updates) * (see("queries") + own)
    if recomputes or (n.contrastive and not n.trains_candidates):
        found["candidates without gradient"] = see("candidates") + n.candidates * sum(offered(1))
    candidates = n.candidates * n.trains_candidates
    products, looks = (n.queries * query[part] + candidates * candidate[part] for part in (0, 1))
    head = 2.0 * s.hidden * s.vocabulary * (n.queries * n.labels + candidates * n.label_candidates)
    found["forward"] = products + looks + see("queries") + n.trains_candidates * see("candidates") + head
    # Attention's backward recomputes the scores: five products for the forward's two.
    backward = (1 if setup.adapters else 2) * (products + head) + 2.5 * looks
    recomputed = products + looks
    if setup.train_vision:
        pictures = query_pictures + candidates * n.candidate_pictures
        backward += pictures * (2 * picture.products + 2.5 * picture.attention)
        recomputed += pictures * picture.seen
    found["backward"] = backward + setup.checkpointing * recomputed
    once = ("rollout", "reference")
    return {name: count if name in once else n.updates * count for name, count in found.items()}


def mining_flops(shapes: Shapes, load: Load, setup: Setup) -> float:
    """FLOPs of one rank's share of a mining (`rge.mining.refresh`): passes without gradient, the writing, and the search."""
    twice = replace(setup, once=False, keep="none", dropout=False)
    found = _step_flops(shapes, replace(load, chunks=2), twice)
    passes = ("rollout", "queries without gradient", "candidates without gradient")
    search = 2.0 * shapes.hidden * load.queries * setup.num_gpus * load.candidates
    return sum(found.get(name, 0.0) for name in passes) + search


def memory(shapes: Shapes, load: Load, setup: Setup) -> dict[str, float]:
    """Estimated peak bytes on one GPU, by kind."""
    s, n = shapes, load
    activation_bytes, weights, gradients, states = _parameter_bytes(shapes, setup)
    rows_each = n.trains_candidates * -(-n.candidates // n.chunks)
    queries_each = min(setup.micro_queries, -(-n.queries // n.chunks))  # large prompts may take more chunks
    tokens = queries_each * (n.prompt - 1 + n.tail) + rows_each * (n.candidate + 1)
    pictures = queries_each * n.query_pictures + rows_each * n.candidate_pictures
    kept = _kept(shapes, setup, tokens, pictures)
    if setup.checkpointing:  # and the layer that is being recomputed
        kept += max(tokens * shapes.inside, setup.train_vision * pictures * s.picture.inside)
    of_queries = [queries_each * tokens for tokens in (n.learned_tokens, n.sampled * n.own_tokens)]
    # Logits of more rows than these are computed in chunks, and again in the backward.
    predicted = sum(min(CHUNK_TOKENS, rows) for rows in (*of_queries, rows_each * n.label_candidates))
    training = kept * activation_bytes + 12.0 * predicted * s.vocabulary
    writing = 0.0
    if n.own:
        rows = min(setup.rollout_rows, n.queries * n.each)
        room = n.prompt + n.own + 2
        if setup.captures:
            rows, room = bucket(rows), bucket(math.ceil(room))
        writing = float(shapes.cached * setup.dtype_bytes) * rows * room + setup.engine
        if setup.shares_weights:  # gathered during the rollout, in the computing dtype
            writing += 2.0 * s.parameters
    mining = 0.0
    if n.mining is not None:  # between two steps: one layer of a pass, or the rationales' keys and values
        rows = min(setup.rollout_rows, n.mining.queries)
        cached = float(shapes.cached * setup.dtype_bytes) * rows * (n.prompt + n.mining.own + 2)
        passed = queries_each * max(n.prompt, n.candidate) * float(s.inside) * setup.dtype_bytes
        mining = max(passed, cached * bool(n.mining.own)) + 2.0 * s.parameters * setup.shares_weights
    if n.reference and not setup.adapters:  # a frozen copy, whole on every process
        weights += setup.dtype_bytes * s.parameters
    inside = training + writing if setup.captures else max(training, writing)
    stays = setup.remembers(load)
    made = n.pictures * s.picture.placeholders * s.picture.feature * setup.dtype_bytes
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "pictures": held_bytes(shapes, load) + stays * float(made),
        "activations": training if setup.captures or training >= writing else 0.0,
        "rollout": writing if setup.captures or writing > training else 0.0,
        "mining": max(mining - inside, 0.0),  # what it needs more than a step
        KEPT: kept_bytes(shapes, load, setup)[0],
    }


def _kept(shapes: Shapes, setup: Setup, tokens: float, pictures: float) -> float:
    """Numbers that autograd keeps between a forward and its backward; none for a frozen tower."""
    picture, seen = shapes.picture, pictures * setup.train_vision
    if setup.checkpointing:
        return tokens * shapes.hidden * shapes.layers + seen * picture.states * picture.layers
    return tokens * shapes.inside * shapes.layers + seen * picture.inside * picture.layers


def kept_bytes(shapes: Shapes, load: Load, setup: Setup) -> tuple[float, float]:
    """Bytes on a GPU, and in main memory for it, that several micro batches keep between first forward and backward.

    Excludes the micro batch that is being computed.
    """
    n = load
    if setup.keep == "none" or n.chunks == 1 or not n.contrastive:
        return 0.0, 0.0
    candidates, query_pictures = n.trains_candidates * n.candidates, n.queries * n.query_pictures
    tokens, pictures = candidates * (n.candidate + 4.0), candidates * n.candidate_pictures
    known = 0.0
    if not n.own:
        tokens, pictures = tokens + n.queries * (n.prompt + n.tail), pictures + query_pictures
    elif setup.once:
        tokens, pictures = tokens + n.queries * n.prompt, pictures + query_pictures
        known = float(n.queries * n.prompt * shapes.cached * setup.dtype_bytes)  # for the rollout
    activation_bytes = _parameter_bytes(shapes, setup)[0]
    # Outside the layers: the final norm; the tower's patches and their projection to the text model's width.
    outside = 6 * tokens * shapes.hidden + 4 * setup.train_vision * pictures * shapes.picture.states
    kept = _kept(shapes, setup, tokens, pictures) + outside
    if not setup.checkpointing and setup.back_end == "ddp" and setup.dtype_bytes < 4:
        kept += n.chunks * setup.trained  # autocast's copies of the weights, per forward
    kept *= activation_bytes
    return (kept + known, 0.0) if setup.keep == "device" else (known, kept)


def _parameter_bytes(shapes: Shapes, setup: Setup) -> tuple[float, float, float, float]:
    """Bytes of an activation, and of all weights, gradients and optimizer states on one GPU."""
    trained, dtype_bytes = setup.trained, setup.dtype_bytes
    back_end = setup.back_end if setup.num_gpus > 1 else "ddp"
    states, activation_bytes = 4.0 * setup.optimizer_states * trained, float(dtype_bytes)
    if back_end in ("ddp", "fsdp2"):  # trained weights are float32
        weights = 4.0 * trained + dtype_bytes * (shapes.parameters - trained)
        if back_end == "ddp" and dtype_bytes < 4:
            # Autocast keeps copies of them during a forward and backward. It leaves sums and norms, which are half of what
            # autograd keeps, in the float32 of the weights.
            weights += dtype_bytes * trained
            activation_bytes = 3.0 if trained > shapes.parameters / 2 else activation_bytes
    else:
        # DeepSpeed keeps sharded float32 copies beside weights in another computing dtype.
        weights, states = dtype_bytes * shapes.parameters, states + 4.0 * (dtype_bytes < 4) * trained
    gradients, states = 4.0 * trained / setup.shards("gradients"), states / setup.shards("optimizer")
    return activation_bytes, weights / setup.shards("weights"), gradients, states


def pixel_bytes(shapes: Shapes, load: Load) -> float:
    """Bytes of the pictures of a rank's batch between processes: 8 bits per channel."""
    return float(load.pictures * shapes.picture.num_bytes)


def held_bytes(shapes: Shapes, load: Load) -> float:
    """Of these, what is in memory: all, or those of a micro batch if a batch's wait in a file."""
    whole = pixel_bytes(shapes, load)
    return whole if whole <= WHOLE_BYTES else whole / load.chunks


def host(recipe: Recipe, shapes: Shapes, load: Load, setup: Setup, options: PlanOptions) -> dict[str, float]:
    """Peak use of one machine besides its GPUs and kept activations: bytes of memory, shared memory, temporary and open files.

    For a GPU, at least one batch is prefetched to pinned memory, and processes use NCCL.
    """
    num_workers, batch_bytes, held = (
        recipe.data.num_workers,
        pixel_bytes(shapes, load),
        held_bytes(shapes, load),
    )
    processes, on_gpu = options.processes, not options.cpu
    # Prefetched batches, and what is in use, are in pinned memory, allocated in powers of two. A worker holds a batch's pictures,
    # and copies them once.
    pinned = 2.0 ** math.ceil(math.log2(held)) if on_gpu and held else held
    waiting, in_worker, filed = max(recipe.data.prefetch_mb * 2**20, pinned), batch_bytes, 0.0
    if batch_bytes > WHOLE_BYTES:
        filed = max(recipe.data.prefetch_mb * 2**20, batch_bytes) + (1 + num_workers) * batch_bytes
        waiting, in_worker = 0.0, float(WHOLE_BYTES)
    batches = waiting + pinned + 2 * num_workers * in_worker
    weights = float(setup.dtype_bytes * shapes.parameters)  # loaded here before they go to a GPU
    each = PROCESS_GIB * GIB + num_workers * WORKER_GIB * GIB + max(batches, weights)
    copied = state_copy(shapes, setup, processes) if recipe.train.background_save else 0.0
    mined = mined_bytes(shapes, load, setup, recipe.data.mine.depth())
    return {
        "memory": processes * (each + mined) + copied,
        "of that, mining": processes * mined,
        "of that, batches": processes * batches,
        "of that, kept": 0.0,  # activations, see `kept_bytes`
        "of that, a state being written": copied,
        "temporary files": processes * filed,
        # Batches go through pipes (rge/data/loader.py).
        "shared memory": NCCL_GIB * GIB if on_gpu and processes > 1 else 0.0,
        "descriptors of a process": descriptors(num_workers),
    }


def mined_bytes(shapes: Shapes, load: Load, setup: Setup, depth: int) -> float:
    """Bytes of main memory of one process for a mining: states, what is found, and a row for each query and candidate."""
    if load.mining is None:
        return 0.0
    queries, candidates = (setup.num_gpus * size for size in (load.mining.queries, load.mining.candidates))
    states = 4.0 * shapes.hidden * (load.mining.candidates + 2 * queries)  # queries of all, gathered
    found = 12.0 * queries * depth * 2 * setup.num_gpus
    return states + found + MINED_ROW * (queries + candidates)


def state_copy(shapes: Shapes, setup: Setup, processes: int) -> float:
    """Bytes of main memory, on the run's first machine, of the copy that a background save of a training state writes.

    Without sharding, the main process alone writes, and only what is trained. Under ZeRO-1 and ZeRO-2 it writes DeepSpeed's model
    file, which is whole.
    """
    numbers = 4.0 * (1 + setup.optimizer_states) * setup.trained
    if setup.num_gpus == 1 or setup.back_end == "ddp":
        return numbers
    share = processes / setup.num_gpus
    others = setup.dtype_bytes * (shapes.parameters - setup.trained * (setup.back_end == "fsdp2"))
    return share * numbers + others * (share if setup.shares_weights else 1)


def descriptors(num_workers: int) -> int:
    """Maximum number of open files of a process."""
    return PROCESS_DESCRIPTORS + num_workers * WORKER_DESCRIPTORS


def step_seconds(
    shapes: Shapes, load: Load, setup: Setup, num_flops: float, peak: float, bandwidth: float
) -> float:
    """Seconds of a step: FLOPs at the achieved `peak` (FLOP/s), generation at the achieved `bandwidth` (bytes per second).

    Generation is bound by memory: a token reads all weights of the text model and the rows' keys and values.
    """
    written = _writing_bytes(shapes, load, setup)
    if load.mining is not None:
        written += _writing_bytes(shapes, load.mining, setup) / load.every
    seconds = num_flops / peak + written / bandwidth
    return seconds + 2 * load.updates * kept_bytes(shapes, load, setup)[1] / (HOST_TBS * 1e12)


def mining(
    shapes: Shapes, load: Load, setup: Setup, step: float, peak: float, bandwidth: float
) -> dict[str, float]:
    """One mining over all GPUs, for a plan; its share of the time is over that of steps of `step` seconds, mining included."""
    if load.mining is None:
        return {}
    of_rank = mining_flops(shapes, load.mining, setup)
    seconds = of_rank / peak + _writing_bytes(shapes, load.mining, setup) / bandwidth
    numbers: dict[str, float] = {"queries": load.mining.queries, "candidates": load.mining.candidates}
    numbers |= {"tokens": sum(load.mining.tokens.values()), "flops": of_rank}
    whole = {name: setup.num_gpus * number for name, number in numbers.items()}
    return whole | {"seconds": seconds, "share": seconds / load.every / step}


def _writing_bytes(shapes: Shapes, load: Load, setup: Setup) -> float:
    """Bytes of device memory that a rank reads to write its rationales."""
    if not load.own:
        return 0.0
    rows = load.queries * load.each
    weights = setup.dtype_bytes * (shapes.layers * shapes.layer + shapes.hidden * shapes.vocabulary)
    together = min(setup.rollout_rows, rows)
    cache = shapes.cached * setup.dtype_bytes * together * (load.prompt + load.own / 2)
    return -(-rows // setup.rollout_rows) * (load.own + 2) * (weights + cache)


def communication(shapes: Shapes, load: Load, setup: Setup) -> float:
    """Bytes that one GPU sends per step in rings: a gather or a scatter of x bytes sends x (N - 1) / N."""
    num_gpus, back_end = setup.num_gpus, setup.back_end
    share = (num_gpus - 1) / num_gpus
    # DDP, ZeRO-1 and FSDP2 sum gradients over GPUs in float32, ZeRO-2 and 3 in the computing dtype.
    gradient = (
        load.updates * setup.trained * (setup.dtype_bytes if back_end in ("zero2", "zero3") else 4) * share
    )
    weight = shapes.parameters * setup.dtype_bytes * share
    embeddings = (
        4.0 * shapes.hidden * load.candidates * (num_gpus - 1) * (2 if load.contrastive else 0) * load.updates
    )
    if back_end == "ddp":
        sent = 2 * gradient  # once per step, with the last micro batch
    elif back_end in ("zero1", "zero2"):
        # Gradients are scattered with every micro batch under ZeRO-2, once under ZeRO-1; then weights are gathered.
        sent = gradient * (load.chunks if back_end == "zero2" else 1)
        sent += load.updates * setup.trained * setup.dtype_bytes * share
    else:
        # Weights are gathered for each pass over a micro batch's queries or candidates, and once for the rollout.
        sides = 1 + (load.candidates > 0)
        passes = 2 * sides
        if load.chunks > 1 and load.contrastive and setup.keep == "none":
            passes += sides - bool(load.own)  # own rationales have left the queries' states
        sent = gradient * load.chunks + weight * (load.updates * passes * load.chunks + bool(load.own))
    return sent + embeddings


def num_parameters(model: HubModel, settings: ModelConfig) -> tuple[int, int]:
    """All parameters, and those with a gradient: with adapters theirs, the rows of new tokens and `modules_to_save`.

    AdapterError: `model.lora` names a layer or module that the model lacks.
    """
    total, lora = _size(model), settings.lora
    if lora is None:
        parts = parts_of(model)
        return total, total - sum(each.numel() for part in settings.freeze for each in parts[part])
    layers, whole = trained_parts(model, lora)
    shapes = [model.get_parameter(f"{name}.weight").shape for name in layers]
    adapters = sum(lora.rank * sum(shape) + lora.dora * shape[0] for shape in shapes)
    matrices = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    rows = len(matrices)  # a tied matrix is one
    return total, adapters + rows * model.config.get_text_config().hidden_size + sum(
        map(_size, whole.values())
    )

"""What a training step takes: tokens, FLOPs, memory and communication, from a model's shapes and a recipe's numbers.

Formulas, not measurements. FLOPs count matrix products (a multiplication and an addition are two) and attention densely,
as `torch.utils.flop_counter` does; ``tests/rge/plan/test_plan.py`` holds them against it. Memory is an estimate: what is kept is
added up, what an allocator wastes is not.

A step is (rge/step.py): the queries' prompts are encoded, the rollout continues from their keys and values, one forward
takes each prompt with its own and its oracle rationale, one takes the candidates, and the backward. Where a rank's share of
the batch takes several micro batches, candidates are encoded once more without gradient, and so are prompts.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rge.losses import CHUNK_TOKENS
from rge.model.families import VisionSizes, family_of
from rge.model.hub_model import HubModel

GIB = 2**30
RESERVED_GIB = 4.0
"""Set aside a GPU: context, communication buffers, fragments."""

PROCESS_GIB, WORKER_GIB = 3.0, 0.5
"""Set aside of a host's memory: for a process with torch and its libraries, and for what a forked data worker makes its own."""

PROCESS_DESCRIPTORS, WORKER_DESCRIPTORS = 128, 8
"""Open files of a process, sockets and libraries included, and those of each data worker that it has: upper bounds."""

NCCL_GIB = 1.0
"""Shared memory that NCCL's guide asks a container to have for its processes (docker run --shm-size=1g)."""

ACTIVATIONS_OFF_BY = 1 / 3
"""Share of the activations by which an estimate of them may be wrong: what tests/rge/plan/test_plan.py holds them to."""

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
}
"""TFLOP/s in bfloat16 without sparsity, and TB/s, as the maker gives them, by a part of the device's name; the first that fits."""

OPTIMIZER_STATES = {"adamw": 2, "muon": 1}
"""Numbers kept a parameter; Muon keeps one, except for what it leaves to AdamW."""

UTILISATION = (0.2, 0.5)
"""Shares of a GPU's peak between which training of large models usually runs; a plan's hours are as uncertain as that."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model, read off its modules.

    Attributes:
        parameters: all; `vision_parameters` of them in the vision tower.
        layer: parameters of one text layer's matrices; `key_value` of them make keys and values.
        layers: text layers. `hidden`, `inner`, `heads`, `key_heads` and `head_size` are theirs.
        vocabulary: rows of the output matrix.
        vision: of the tower.
    """

    parameters: int
    vision_parameters: int
    layer: int
    key_value: int
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    vision: VisionSizes


def speed_of(device: str, dtype: str) -> tuple[float, float] | None:
    """TFLOP/s and TB/s of a device by its name; None where that is not known, as for any in float32."""
    if dtype != "bfloat16":
        return None
    return next((speed for name, speed in SPEEDS.items() if name in device), None)


def shapes_of(model: HubModel) -> Shapes:
    """Read a model's sizes, also on `meta`."""
    family, text = family_of(model), model.config.get_text_config()
    layer = family.decoder(model).layers[0]
    matrices = {
        name: module.weight.numel() for name, module in layer.named_modules() if isinstance(module, nn.Linear)
    }
    heads = text.num_attention_heads
    return Shapes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vision_parameters=sum(
            parameter.numel() for part in family.vision(model) for parameter in part.parameters()
        ),
        layer=sum(matrices.values()),
        key_value=sum(size for name, size in matrices.items() if name.endswith(("k_proj", "v_proj"))),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=text.intermediate_size,
        heads=heads,
        key_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        vision=family.vision_sizes(model),
    )


@dataclass(frozen=True)
class Load:
    """What one rank works on in a step.

    Attributes:
        queries: of this rank.
        candidates: of this rank.
        chunks: micro batches.
        prompt: tokens of a query's prompt, pictures included.
        candidate: tokens of a candidate's prompt.
        own: tokens of a rationale that the model writes, `<emb>` not counted; 0 where it writes none.
        oracle: tokens of an oracle rationale; 0 where there is none.
        read_own: whether InfoNCE reads a branch of its own (after the model's rationale, or directly after the prompt).
        contrastive: whether there is an InfoNCE.
        label_candidates: whether `<emb>` after a candidate's prompt is predicted.
        query_patches: of a query's pictures, and placeholders; `candidate_patches` likewise.
        each: rationales that the model writes for a query.
        sampled: whether their tokens' log probabilities are read, for a policy gradient.
        oracles: branches with the oracle rationale: after the prompt, after think tokens.
        beside: tokens of branches of further states, and think tokens before an oracle rationale.
    """

    queries: int
    candidates: int
    chunks: int
    prompt: int
    candidate: int
    own: int
    oracle: int
    read_own: bool
    contrastive: bool
    label_candidates: bool
    query_patches: int
    query_placeholders: int
    candidate_patches: int
    candidate_placeholders: int
    query_spans: list[int] = field(default_factory=list)
    candidate_spans: list[int] = field(default_factory=list)
    each: int = 1
    sampled: bool = False
    oracles: int = 1
    beside: int = 0

    @property
    def tail(self) -> int:
        """Tokens of a query's row after the part that is attended to causally: its last prompt token and branches."""
        own = self.each * (self.own + 1) if self.read_own else 0
        return 1 + own + self.beside + (self.oracles * (self.oracle + 1) if self.oracle else 0)

    @property
    def labels(self) -> int:
        """Tokens of a query's row that are predicted."""
        return (self.oracles * (self.oracle + 1) if self.oracle else 0) + (
            self.each * (self.own + 1) if self.sampled else 0
        )


def flops(
    shapes: Shapes, load: Load, *, checkpointing: bool, trainable: float, train_vision: bool
) -> dict[str, float]:
    """FLOPs of one rank's step, by phase.

    Args:
        shapes: of the model.
        load: of the rank.
        checkpointing: whether layers are computed once more in the backward.
        trainable: share of the text model's matrices that get a gradient of their own: 1, or 0 with adapters.
        train_vision: whether the backward goes through the vision tower.
    """
    s, n = shapes, load
    width = 4 * s.heads * s.head_size
    no_grad_prompts = n.chunks > 1 or not n.own  # else the rollout continues from the pass with gradient

    def vision(patches: int, placeholders: int, spans: list[int]) -> tuple[float, float]:
        """Products and attention of one row's pictures."""
        products = (s.vision.patch + s.vision.fixed) * patches + s.vision.placeholder * placeholders
        return 2.0 * products, 4.0 * s.vision.hidden * patches * sum(spans)

    def text(prompt: int, tail: int, read: int) -> tuple[float, float]:
        """Products and attention of one row; the last layer computes what is read, and keys and values."""
        tokens = prompt - 1 + tail
        products = 2.0 * (
            (s.layers - 1) * s.layer * tokens + s.key_value * tokens + (s.layer - s.key_value) * read
        )
        tails = tail * (prompt - 1 + tail)
        return products, width * ((s.layers - 1) * ((prompt - 1) ** 2 + tails) + tails)

    def add(*parts: tuple[float, float]) -> tuple[float, float]:
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    query_pictures = vision(n.query_patches, n.query_placeholders, n.query_spans)
    candidate_pictures = vision(n.candidate_patches, n.candidate_placeholders, n.candidate_spans)
    found = {}
    if n.own:
        steps = n.own + 2
        words = 2.0 * s.layers * s.layer * steps + 2.0 * s.hidden * s.vocabulary * (n.own + 1)
        looks = width * s.layers * steps * (n.prompt + (steps - 1) / 2)
        prompts = add(query_pictures, text(n.prompt, 0, 0)) if no_grad_prompts else (0.0, 0.0)
        found["rollout"] = n.queries * (n.each * (words + looks) + sum(prompts))
    if n.contrastive and n.chunks > 1:
        found["candidates without gradient"] = n.candidates * sum(
            add(candidate_pictures, text(n.candidate, 2, 1))
        )
    read = n.labels + (n.each if n.read_own else 0)
    query, candidate = text(n.prompt, n.tail, read), text(n.candidate, 2, 1 + n.label_candidates)
    predicted = n.queries * n.labels + n.candidates * n.label_candidates
    head = 2.0 * s.hidden * s.vocabulary * predicted
    pictures = (
        [part * n.queries for part in query_pictures],
        [part * n.candidates for part in candidate_pictures],
    )
    rows = [part * n.queries for part in query], [part * n.candidates for part in candidate]
    text_products, text_looks = rows[0][0] + rows[1][0], rows[0][1] + rows[1][1]
    vision_products, vision_looks = pictures[0][0] + pictures[1][0], pictures[0][1] + pictures[1][1]
    found["forward"] = text_products + text_looks + vision_products + vision_looks + head
    # Attention's backward computes the scores once more: five products for the forward's two.
    backward = (1 + trainable) * (text_products + head) + 2.5 * text_looks
    recomputed = text_products + text_looks
    if train_vision:
        patches = n.queries * n.query_patches + n.candidates * n.candidate_patches
        backward += 2 * (vision_products - 2.0 * s.vision.fixed * patches) + 2.5 * vision_looks
        recomputed += vision_products + vision_looks
    found["backward"] = backward + (recomputed if checkpointing else 0.0)
    return found


def memory(
    shapes: Shapes,
    load: Load,
    *,
    back_end: str,
    num_gpus: int,
    dtype_bytes: int,
    checkpointing: bool,
    trained: int,
    optimizer_states: int,
    rollout_rows: int,
    micro_queries: int,
    batch_bytes: float = 0.0,
    train_vision: bool = True,
) -> dict[str, float]:
    """Bytes on one GPU at its fullest, by kind; estimates.

    Args:
        shapes: of the model.
        load: of the rank.
        back_end: one of `BACK_ENDS`.
        num_gpus: over which ZeRO and FSDP2 share out.
        dtype_bytes: of what is computed in, and of weights that are not trained; those that are trained are float32.
        checkpointing: whether only layers' inputs are kept.
        trained: parameters with a gradient.
        optimizer_states: numbers the optimizer keeps a parameter.
        rollout_rows: rationales written at once.
        micro_queries: queries of a forward.
        batch_bytes: of the pictures of the rank's batch, see `pixel_bytes`.
        train_vision: whether the backward goes through the vision tower.
    """
    s, n = shapes, load
    if num_gpus == 1:
        back_end = "ddp"  # nobody to share with
    sharded = back_end in ("zero3", "fsdp2")
    gradients, states = 4.0 * trained, 4.0 * optimizer_states * trained
    mixed = dtype_bytes < 4
    activation_bytes = float(dtype_bytes)
    if back_end in ("ddp", "fsdp2"):  # weights that are trained are float32; FSDP2 has everything in shares
        weights = 4.0 * trained + dtype_bytes * (s.parameters - trained)
        if back_end == "fsdp2":
            weights, gradients, states = weights / num_gpus, gradients / num_gpus, states / num_gpus
        elif mixed:
            # Autocast keeps copies of them for the length of a forward and backward. What it adds up and normalises,
            # which is half of what autograd keeps, it leaves in the float32 of the weights.
            weights += dtype_bytes * trained
            activation_bytes = 3.0 if trained > s.parameters / 2 else activation_bytes
    else:  # DeepSpeed has float32 copies, in shares, beside weights in the computing dtype; they are one if that is float32
        weights = dtype_bytes * s.parameters / (num_gpus if back_end == "zero3" else 1)
        gradients /= 1 if back_end == "zero1" else num_gpus
        states = (states + 4.0 * mixed * trained) / num_gpus
    rows_each = -(-n.candidates // n.chunks)
    query_tokens = micro_queries * (n.prompt - 1 + n.tail)
    tokens = query_tokens + rows_each * (n.candidate + 1)
    patches = micro_queries * n.query_patches + rows_each * n.candidate_patches
    # What autograd keeps of a layer, a token: norms and residuals; queries, keys and values before and after rotation, the
    # output; gate, up, activation and product.
    inside = tokens * (6 * s.hidden + 6 * s.heads * s.head_size + 4 * s.inner)
    vision_inside = patches * (12 * s.vision.hidden + 4 * s.vision.inner)
    if checkpointing:
        kept = tokens * s.hidden * s.layers + patches * s.vision.hidden * s.vision.layers
        kept += max(inside, vision_inside)
    else:
        kept = inside * s.layers + vision_inside * s.vision.layers
    predicted = micro_queries * (n.oracle + 1 if n.oracle else 0) + rows_each * n.label_candidates
    # A policy's logits are made some at a time, and again in the backward.
    predicted += min(CHUNK_TOKENS, micro_queries * n.each * (n.own + 1)) if n.sampled else 0
    logits = 3.0 * 4 * predicted * s.vocabulary
    cache = (
        2.0
        * s.key_heads
        * s.head_size
        * s.layers
        * min(rollout_rows, n.queries * n.each)
        * (n.prompt + n.own + 2)
        * dtype_bytes
    )
    whole = (
        2.0 * s.parameters if sharded else 0.0
    )  # gathered, in the computing dtype, while rationales are written
    training = kept * activation_bytes + logits
    writing = (cache + whole) if n.own else 0.0
    # A frozen tower sees each picture once a step, and what it makes of them stays until the end (`make_writer`).
    placeholders = n.queries * n.query_placeholders + n.candidates * n.candidate_placeholders
    stays = bool(n.own) and not train_vision and not sharded
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "pictures": batch_bytes + stays * float(placeholders * s.vision.feature * dtype_bytes),
        "activations": training if training >= writing else 0.0,
        "rollout": writing if writing > training else 0.0,
    }


def pixel_bytes(model: HubModel, load: Load) -> float:
    """Bytes of the pictures of a rank's batch as they are handed on: 8 bits a channel, once a picture."""
    vision = model.config.vision_config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patches = load.queries * load.query_patches + load.candidates * load.candidate_patches
    return float(patches * channels * vision.patch_size**2)


def host(
    shapes: Shapes,
    *,
    batch_bytes: float,
    prefetch_bytes: float,
    num_workers: int,
    dtype_bytes: int,
    processes: int,
    on_gpu: bool = True,
) -> dict[str, float]:
    """What one machine gives besides its GPUs, at its fullest: bytes of memory, bytes of shared memory, open files.

    Args:
        shapes: of the model.
        batch_bytes: of a rank's batch, see `pixel_bytes`.
        prefetch_bytes: `data.prefetch_mb`; one batch waits in any case.
        num_workers: of a process.
        dtype_bytes: of a weight.
        processes: of the machine.
        on_gpu: whether pixels wait in pinned memory, and processes talk by NCCL.
    """
    # Batches that wait, and one in use, are in pinned memory, which comes in powers of two. A worker holds its prompts'
    # pictures and the run that they are put together in.
    pinned = 2.0 ** math.ceil(math.log2(batch_bytes)) if on_gpu and batch_bytes else batch_bytes
    batches = max(prefetch_bytes, pinned) + pinned + 2 * num_workers * batch_bytes
    weights = float(dtype_bytes * shapes.parameters)  # read here, before they are on a GPU
    each = PROCESS_GIB * GIB + num_workers * WORKER_GIB * GIB + max(batches, weights)
    return {
        "memory": processes * each,
        "of that, batches": processes * batches,
        # Batches go through pipes (rge/data/loader.py).
        "shared memory": NCCL_GIB * GIB if on_gpu and processes > 1 else 0.0,
        "descriptors of a process": descriptors(num_workers),
    }


def descriptors(num_workers: int) -> int:
    """Open files of a process with so many data workers, at most."""
    return PROCESS_DESCRIPTORS + num_workers * WORKER_DESCRIPTORS


def step_seconds(
    shapes: Shapes,
    load: Load,
    found: dict[str, float],
    *,
    peak: float,
    bandwidth: float,
    utilisation: float,
    dtype_bytes: int,
    rollout_rows: int,
) -> float:
    """Seconds of a step: FLOPs by the share of the peak that is reached; writing by what has to be read for each token.

    A step of writing reads all weights of the text model and the rows' keys and values, and computes little: memory is
    what it waits for, of whose bandwidth the same share is taken.

    Args:
        shapes: of the model.
        load: of the rank.
        found: of `flops`.
        peak: FLOP/s of a GPU.
        bandwidth: bytes a second of its memory.
        utilisation: share of both.
        dtype_bytes: of a weight.
        rollout_rows: rationales written at once.
    """
    seconds = sum(found.values()) / (peak * utilisation)
    if load.own:
        rows = load.queries * load.each
        passes = -(-rows // rollout_rows)
        weights = dtype_bytes * (shapes.layers * shapes.layer + shapes.hidden * shapes.vocabulary)
        cache = 2.0 * shapes.key_heads * shapes.head_size * shapes.layers * dtype_bytes
        cache *= min(rollout_rows, rows) * (load.prompt + load.own / 2)
        seconds += passes * (load.own + 2) * (weights + cache) / (bandwidth * utilisation)
    return seconds


def communication(
    shapes: Shapes, load: Load, *, back_end: str, num_gpus: int, dtype_bytes: int, trained: int
) -> float:
    """Bytes that one GPU sends in a step, by rings: a gather or a scatter of x bytes sends x (N - 1) / N."""
    share = (num_gpus - 1) / num_gpus
    # DDP, ZeRO-1 and FSDP2 add gradients up over GPUs in float32, ZeRO-2 and 3 in the computing dtype.
    gradient = trained * (dtype_bytes if back_end in ("zero2", "zero3") else 4) * share
    weight = shapes.parameters * dtype_bytes * share
    embeddings = 4.0 * shapes.hidden * load.candidates * (num_gpus - 1) * (2 if load.contrastive else 0)
    if back_end == "ddp":
        sent = 2 * gradient  # once a step, with the last micro batch
    elif back_end in ("zero1", "zero2"):
        # Gradients are shared out with every micro batch under ZeRO-2, once under ZeRO-1; then weights are gathered.
        sent = gradient * (load.chunks if back_end == "zero2" else 1) + trained * dtype_bytes * share
    else:
        # Weights are gathered for every forward and backward, and once for the rollout and the passes without gradient.
        gathers = 2 * load.chunks + (1 if load.own or load.chunks > 1 else 0)
        sent = gradient * load.chunks + weight * gathers
    return sent + embeddings


def trained_parameters(shapes: Shapes, model: HubModel, recipe_model: Any) -> int:
    """Parameters that get a gradient: all, all but the vision tower's, or those of the adapters and the `<emb>` row."""
    lora = getattr(recipe_model, "lora", None)
    if lora is None:
        return shapes.parameters - (shapes.vision_parameters if recipe_model.freeze_vision else 0)
    family = family_of(model)
    parts = [family.decoder(model), *(family.vision(model) if lora.vision else [])]
    count = shapes.hidden
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.Linear) and (
                not lora.targets or name.rsplit(".", 1)[-1] in lora.targets
            ):
                count += lora.rank * sum(module.weight.shape) + (module.weight.shape[0] if lora.dora else 0)
    return count

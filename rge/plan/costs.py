"""What a training step takes: tokens, FLOPs, memory and communication, from a model's shapes and a recipe's numbers.

What a picture costs is read off a pass of the vision tower; the rest is formulas. FLOPs count matrix products (a
multiplication and an addition are two) and attention densely, as `torch.utils.flop_counter` does; ``tests/rge/plan/test_plan.py``
holds them against it. Memory is an estimate: what is kept is added up, what an allocator wastes is not.

A step is (rge/step.py): the queries' prompts are encoded, the rollout continues from their keys and values, one forward
takes each prompt with its own and its oracle rationale, one takes the candidates, and the backward. Where a rank's share of
the batch takes several micro batches, candidates are encoded once more without gradient, and so are prompts, unless what
their backward needs is kept (`train.keep_activations`). A frozen vision tower sees each picture once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rge.losses import CHUNK_TOKENS
from rge.model.attention import bucket
from rge.model.backbone import skeleton
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.model.vision_tower import speed_up

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

HOST_TBS = 0.04
"""TB/s at which a GPU copies to main memory and back while it does nothing else: two thirds of PCIe 5's 16 lanes."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

UTILISATION = (0.2, 0.5)
"""Shares of a GPU's peak between which training of large models usually runs; a plan's hours are as uncertain as that."""
CPU_UTILISATION = (0.5, 0.9)
"""The same of a CPU's, which is measured."""


@dataclass(frozen=True)
class PictureCost:
    """What one picture costs in the vision tower.

    Attributes:
        placeholders: tokens that stand for it; `feature` numbers are put in place of each.
        num_bytes: of its pixels as they are handed on, 8 bits a channel.
        products: FLOPs of a pass in matrix products, `attention` in attention, `fixed` in what is never trained.
        layers: of the tower.
        states: numbers that a layer is given.
        inside: numbers that autograd keeps of a layer.
    """

    placeholders: int = 0
    feature: int = 0
    num_bytes: int = 0
    products: float = 0.0
    attention: float = 0.0
    fixed: float = 0.0
    layers: int = 0
    states: int = 0
    inside: int = 0


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model, read off its modules.

    Attributes:
        parameters: all; `vision_parameters` of them in the vision tower.
        layer: parameters of one text layer's matrices; `key_value` of them make keys and values.
        layers: text layers. `hidden`, `inner`, `heads`, `key_heads` and `head_size` are theirs.
        vocabulary: rows of the output matrix.
        picture: of the largest size.
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
    picture: PictureCost


def speed_of(device: str, dtype: str) -> tuple[float, float] | None:
    """TFLOP/s and TB/s of a device by its name; None where that is not known, as for any in float32."""
    if dtype != "bfloat16":
        return None
    return next((speed for name, speed in SPEEDS.items() if name in device), None)


def shapes_of(model: HubModel, num_pixels: int) -> Shapes:
    """Read a model's sizes, also on `meta`, with what a square picture of so many pixels costs."""
    family, text = family_of(model), model.config.get_text_config()
    layer = family.decoder(model).layers[0]
    matrices = {name: matrix.weight.numel() for name, matrix in _matrices(layer).items()}
    heads = text.num_attention_heads
    return Shapes(
        parameters=_size(model),
        vision_parameters=sum(map(_size, family.vision(model))),
        layer=sum(matrices.values()),
        key_value=sum(size for name, size in matrices.items() if name.endswith(("k_proj", "v_proj"))),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=text.intermediate_size,
        heads=heads,
        key_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        picture=cost_of_picture(model, num_pixels),
    )


def _size(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(module: nn.Module) -> dict[str, nn.Linear]:
    """Its matrix products, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


_known: WeakKeyDictionary[nn.Module, dict[int, PictureCost]] = WeakKeyDictionary()


def cost_of_picture(model: HubModel, num_pixels: int) -> PictureCost:
    """What a square picture of so many pixels costs: counted in one pass on `meta`, which computes shapes alone."""
    costs = _known.setdefault(model, {})
    if num_pixels not in costs:
        on_meta = model.device.type == "meta"
        costs[num_pixels] = _count(model if on_meta else skeleton(model.config), num_pixels)
    return costs[num_pixels]


def _count(model: HubModel, num_pixels: int) -> PictureCost:
    family = family_of(model)
    pixels, grid = family.square_picture(model.config, num_pixels)
    frames = getattr(model.config.vision_config, "temporal_patch_size", None)
    shape = pixels.shape if frames is None else (len(pixels), frames * pixels[0].numel())
    parts = [module for part in family.vision(model) for module in part.modules()]
    stacks = (part for part in parts if isinstance(part, nn.ModuleList) and hasattr(part[0], "mlp"))
    blocks: Any = next(stacks, ())
    given: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    first = blocks[0] if blocks else nn.Identity()
    hook = first.register_forward_pre_hook(note, with_kwargs=True)
    speed_up(model, "sdpa")  # else a tower of Qwen's reads the pictures' sizes back from the device
    values = torch.zeros(shape, dtype=model.dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        features = family.features(model, values, grid)
    hook.remove()
    flops = counter.get_flop_counts()["Global"]

    def counted(kinds: str) -> int:
        return sum(count for operation, count in flops.items() if re.search(kinds, str(operation)))

    attention, fixed = counted("bmm|attention"), counted("convolution") * _is_fixed(parts)
    states, inside = _numbers_of(first, given[0]) if given else (0, 0)
    return PictureCost(
        placeholders=features.shape[0],
        feature=features.shape[1],
        num_bytes=pixels.numel(),
        products=sum(flops.values()) - attention - fixed,
        attention=attention,
        fixed=fixed,
        layers=len(blocks),
        states=states,
        inside=inside,
    )


def _is_fixed(parts: Sequence[nn.Module]) -> bool:
    """Whether convolutions' weights are buffers, as in a tower that came with a package."""
    return not any(isinstance(part.weight, nn.Parameter) for part in parts if isinstance(part, nn.Conv2d))


def _numbers_of(block: Any, states: Tensor) -> tuple[int, int]:
    """Numbers that go into a block of a tower, and that are made inside it."""
    hidden = states.shape[-1]
    inner = max(max(matrix.weight.shape) for matrix in _matrices(block.mlp).values())
    return states.numel(), states.numel() // hidden * (12 * hidden + 4 * inner)


@dataclass(frozen=True)
class Load:
    """What one rank works on in a step.

    Attributes:
        chunks: micro batches.
        prompt: tokens of a query's prompt, pictures included; `candidate` of a candidate's.
        own: tokens of a rationale that the model writes, `<emb>` not counted; 0 where it writes none.
        oracle: tokens of an oracle rationale; 0 where there is none.
        read_own: whether InfoNCE reads a branch of its own (after the model's rationale, or directly after the prompt).
        label_candidates: whether `<emb>` after a candidate's prompt is predicted.
        query_pictures: of the largest size, in a query's prompt; `candidate_pictures` likewise.
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
    query_pictures: float
    candidate_pictures: float
    each: int = 1
    sampled: bool = False
    oracles: int = 1
    beside: int = 0

    @property
    def tail(self) -> int:
        """Tokens of a query's row after the part that is attended to causally: its last prompt token and branches."""
        return 1 + self.read_own * self.own_tokens + self.beside + self.oracle_tokens

    @property
    def labels(self) -> int:
        """Tokens of a query's row that are predicted."""
        return self.oracle_tokens + self.sampled * self.own_tokens

    @property
    def own_tokens(self) -> int:
        """Tokens of a query's own rationales, `<emb>` counted."""
        return self.each * (self.own + 1)

    @property
    def oracle_tokens(self) -> int:
        """Tokens of a query's branches with the oracle rationale, `<emb>` counted."""
        return self.oracles * (self.oracle + 1) if self.oracle else 0

    @property
    def pictures(self) -> float:
        """Of a step."""
        return self.queries * self.query_pictures + self.candidates * self.candidate_pictures


@dataclass(frozen=True)
class Setup:
    """How a rank works.

    Attributes:
        back_end: one of `BACK_ENDS`.
        num_gpus: over which ZeRO and FSDP2 share out.
        dtype_bytes: of what is computed in, and of weights that are not trained; those that are trained are float32.
        trained: parameters with a gradient.
        checkpointing: whether only layers' inputs are kept, and layers computed once more in the backward.
        adapters: whether the text model's own matrices get no gradient.
        train_vision: whether the backward goes through the vision tower.
        optimizer_states: numbers the optimizer keeps a parameter.
        rollout_rows: rationales written at once.
        captures: whether steps of writing are captured as CUDA graphs, whose buffers stay for the run.
        micro_queries: queries of a forward.
        keep: where what several micro batches' backwards need is kept, ``device`` or ``host``; ``none``.
        once: whether prompts are encoded once; None: where there is a single micro batch.
        engine: bytes of another engine that writes the rationales, and has them only meanwhile.
    """

    back_end: str = "ddp"
    num_gpus: int = 1
    dtype_bytes: int = 4
    trained: int = 0
    checkpointing: bool = False
    adapters: bool = False
    train_vision: bool = True
    optimizer_states: int = 2
    rollout_rows: int = 1
    captures: bool = False
    micro_queries: int = 1
    keep: str = "none"
    once: bool | None = None
    engine: float = 0.0

    @property
    def shares_weights(self) -> bool:
        """Whether weights are spread over GPUs."""
        return self.num_gpus > 1 and self.back_end in ("zero3", "fsdp2")

    def encodes_once(self, load: Load) -> bool:
        """Whether the rollout goes on from the pass over the prompts that has a gradient."""
        return load.chunks == 1 if self.once is None else self.once

    def remembers(self, load: Load) -> bool:
        """Whether a frozen tower sees each picture once a step, and what it makes of them stays (`make_writer`)."""
        return bool(load.own) and not self.train_vision and not self.shares_weights


def flops(shapes: Shapes, load: Load, setup: Setup) -> dict[str, float]:
    """FLOPs of one rank's step, by phase."""
    s, n, picture = shapes, load, shapes.picture
    width = 4 * s.heads * s.head_size
    seen = picture.products + picture.attention + picture.fixed

    def text(prompt: int, tail: int, read: int) -> tuple[float, float]:
        """Products and attention of one row; the last layer computes what is read, and keys and values."""
        tokens = prompt - 1 + tail
        products = 2.0 * (
            (s.layers - 1) * s.layer * tokens + s.key_value * tokens + (s.layer - s.key_value) * read
        )
        tails = tail * (prompt - 1 + tail)
        return products, width * ((s.layers - 1) * ((prompt - 1) ** 2 + tails) + tails)

    found = {}
    query_pictures, candidate_pictures = n.queries * n.query_pictures, n.candidates * n.candidate_pictures
    unseen = {"queries": query_pictures, "candidates": candidate_pictures}

    def see(side: str) -> float:
        """The tower's pass over a side's pictures; a frozen one makes it once."""
        pictures = unseen[side]
        if setup.remembers(load):
            unseen[side] = 0.0
        return pictures * seen

    if n.own:
        steps = n.own + 2
        words = 2.0 * s.layers * s.layer * steps + 2.0 * s.hidden * s.vocabulary * (n.own + 1)
        looks = width * s.layers * steps * (n.prompt + (steps - 1) / 2)
        found["rollout"] = n.queries * n.each * (words + looks)
        if not setup.encodes_once(load):
            found["rollout"] += see("queries") + n.queries * sum(text(n.prompt, 0, 0))
    if n.contrastive and n.chunks > 1 and setup.keep == "none":
        if not n.own:
            read = 1 + n.beside + (1 if n.read_own else n.oracle + 1)
            found["queries without gradient"] = see("queries") + n.queries * sum(text(n.prompt, read, 1))
        found["candidates without gradient"] = see("candidates") + n.candidates * sum(text(n.candidate, 2, 1))
    query = text(n.prompt, n.tail, n.labels + (n.each if n.read_own else 0))
    candidate = text(n.candidate, 2, 1 + n.label_candidates)
    products, looks = (n.queries * query[part] + n.candidates * candidate[part] for part in (0, 1))
    head = 2.0 * s.hidden * s.vocabulary * (n.queries * n.labels + n.candidates * n.label_candidates)
    found["forward"] = products + looks + see("queries") + see("candidates") + head
    # Attention's backward computes the scores once more: five products for the forward's two.
    backward = (1 if setup.adapters else 2) * (products + head) + 2.5 * looks
    recomputed = products + looks
    if setup.train_vision:
        backward += n.pictures * (2 * picture.products + 2.5 * picture.attention)
        recomputed += n.pictures * seen
    found["backward"] = backward + (recomputed if setup.checkpointing else 0.0)
    return found


def naming_flops(shapes: Shapes, *, pictures: int, name_tokens: int, train_text: bool) -> tuple[float, float]:
    """FLOPs of one step of ``model.scratch.naming`` (`rge.scratch.pretrain_vision.teach`): choosing alone, and saying too.

    Args:
        shapes: of the model.
        pictures: of a step.
        name_tokens: of the longest name; rows are padded to it.
        train_text: whether the text model gets gradients of its weights.
    """
    s, picture = shapes, shapes.picture
    seeing = pictures * (picture.fixed + 3 * picture.products + 3.5 * picture.attention)
    row = picture.placeholders + 2 + name_tokens
    products = 2.0 * pictures * (s.layers * s.layer * row + s.hidden * s.vocabulary * name_tokens)
    looks = 4.0 * pictures * s.heads * s.head_size * s.layers * row**2
    return seeing, seeing + (3 if train_text else 2) * products + 3.5 * looks


def memory(shapes: Shapes, load: Load, setup: Setup) -> dict[str, float]:
    """Bytes on one GPU at its fullest, by kind; estimates."""
    s, n = shapes, load
    activation_bytes, weights, gradients, states = _of_parameters(shapes, setup)
    rows_each = -(-n.candidates // n.chunks)
    tokens = setup.micro_queries * (n.prompt - 1 + n.tail) + rows_each * (n.candidate + 1)
    pictures = setup.micro_queries * n.query_pictures + rows_each * n.candidate_pictures
    kept = _kept(shapes, setup, tokens, pictures)
    if setup.checkpointing:  # and a layer that is being computed again
        kept += max(tokens * _inside(shapes), setup.train_vision * pictures * s.picture.inside)
    predicted = setup.micro_queries * (n.oracle + 1 if n.oracle else 0) + rows_each * n.label_candidates
    # A policy's logits are made some at a time, and again in the backward.
    predicted += n.sampled * min(CHUNK_TOKENS, setup.micro_queries * n.own_tokens)
    training = kept * activation_bytes + 12.0 * predicted * s.vocabulary
    writing = 0.0
    if n.own:
        rows = min(setup.rollout_rows, n.queries * n.each)
        room = n.prompt + n.own + 2
        if setup.captures:
            rows, room = bucket(rows), bucket(math.ceil(room))
        writing = _cache(shapes, setup) * rows * room + setup.engine
        if setup.shares_weights:  # gathered, in the computing dtype, while rationales are written
            writing += 2.0 * s.parameters
    stays = setup.remembers(load)
    made = n.pictures * s.picture.placeholders * s.picture.feature * setup.dtype_bytes
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "pictures": pixel_bytes(shapes, load) + stays * float(made),
        "activations": training if setup.captures or training >= writing else 0.0,
        "rollout": writing if setup.captures or writing > training else 0.0,
        "kept until the backward": kept_bytes(shapes, load, setup)[0],
    }


def _inside(shapes: Shapes) -> int:
    """Numbers that autograd keeps of a text layer, a token.

    Norms and residuals; queries, keys and values before and after rotation, the output; gate, up, activation and product.
    """
    return 6 * shapes.hidden + 6 * shapes.heads * shapes.head_size + 4 * shapes.inner


def _kept(shapes: Shapes, setup: Setup, tokens: float, pictures: float) -> float:
    """Numbers that autograd keeps of a forward until its backward; a frozen tower has none."""
    picture, seen = shapes.picture, pictures * setup.train_vision
    if setup.checkpointing:
        return tokens * shapes.hidden * shapes.layers + seen * picture.states * picture.layers
    return tokens * _inside(shapes) * shapes.layers + seen * picture.inside * picture.layers


def kept_bytes(shapes: Shapes, load: Load, setup: Setup) -> tuple[float, float]:
    """Bytes on a GPU, and in main memory for it, of what several micro batches keep between first forward and backward.

    Those of the micro batch that is being computed are not among them.
    """
    n = load
    if setup.keep == "none" or n.chunks == 1 or not n.contrastive:
        return 0.0, 0.0
    tokens, pictures = n.candidates * (n.candidate + 4.0), n.candidates * n.candidate_pictures
    known = 0.0
    if not n.own:
        tokens, pictures = tokens + n.queries * (n.prompt + n.tail), n.pictures
    elif setup.encodes_once(load):
        tokens, pictures = tokens + n.queries * n.prompt, n.pictures
        known = n.queries * n.prompt * _cache(shapes, setup)  # of the prompts, for the rollout
    activation_bytes = _of_parameters(shapes, setup)[0]
    # Outside of the layers: the final norm, and in the tower patches and what maps them to the text model's width.
    outside = 6 * tokens * shapes.hidden + 4 * setup.train_vision * pictures * shapes.picture.states
    kept = _kept(shapes, setup, tokens, pictures) + outside
    if not setup.checkpointing and setup.back_end == "ddp" and setup.dtype_bytes < 4:
        kept += n.chunks * setup.trained  # autocast's copies of the weights, of each forward
    kept *= activation_bytes
    return (kept + known, 0.0) if setup.keep == "device" else (known, kept)


def _of_parameters(shapes: Shapes, setup: Setup) -> tuple[float, float, float, float]:
    """Bytes of an activation, and of all weights, gradients and the optimizer's numbers on one GPU."""
    trained, num_gpus = setup.trained, setup.num_gpus
    back_end = setup.back_end if num_gpus > 1 else "ddp"
    gradients, states = 4.0 * trained, 4.0 * setup.optimizer_states * trained
    mixed, activation_bytes = setup.dtype_bytes < 4, float(setup.dtype_bytes)
    if back_end in ("ddp", "fsdp2"):  # weights that are trained are float32; FSDP2 has everything in shares
        weights = 4.0 * trained + setup.dtype_bytes * (shapes.parameters - trained)
        if back_end == "fsdp2":
            return activation_bytes, weights / num_gpus, gradients / num_gpus, states / num_gpus
        if mixed:
            # Autocast keeps copies of them for the length of a forward and backward. What it adds up and normalises,
            # which is half of what autograd keeps, it leaves in the float32 of the weights.
            weights += setup.dtype_bytes * trained
            activation_bytes = 3.0 if trained > shapes.parameters / 2 else activation_bytes
        return activation_bytes, weights, gradients, states
    # DeepSpeed has float32 copies, in shares, beside weights in the computing dtype; they are one if that is float32.
    weights = setup.dtype_bytes * shapes.parameters / (num_gpus if back_end == "zero3" else 1)
    gradients /= 1 if back_end == "zero1" else num_gpus
    return activation_bytes, weights, gradients, (states + 4.0 * mixed * trained) / num_gpus


def _cache(shapes: Shapes, setup: Setup) -> float:
    """Bytes of a token's keys and values in all layers."""
    return 2.0 * shapes.key_heads * shapes.head_size * shapes.layers * setup.dtype_bytes


def pixel_bytes(shapes: Shapes, load: Load) -> float:
    """Bytes of the pictures of a rank's batch as they are handed on: 8 bits a channel, once a picture."""
    return float(load.pictures * shapes.picture.num_bytes)


def host(
    parameters: int,
    *,
    batch_bytes: float,
    prefetch_bytes: float,
    num_workers: int,
    dtype_bytes: int,
    processes: int,
    on_gpu: bool = True,
) -> dict[str, float]:
    """What one machine gives besides its GPUs, at its fullest: bytes of memory, bytes of shared memory, open files.

    The machine has so many `processes`, each with `num_workers` and batches of `batch_bytes` (`pixel_bytes`), of which one
    waits even where `prefetch_bytes` are less. On a GPU pixels wait in pinned memory, and processes talk by NCCL.
    """
    # Batches that wait, and one in use, are in pinned memory, which comes in powers of two. A worker holds its prompts'
    # pictures and the run that they are put together in.
    pinned = 2.0 ** math.ceil(math.log2(batch_bytes)) if on_gpu and batch_bytes else batch_bytes
    batches = max(prefetch_bytes, pinned) + pinned + 2 * num_workers * batch_bytes
    weights = float(dtype_bytes * parameters)  # read here, before they are on a GPU
    each = PROCESS_GIB * GIB + num_workers * WORKER_GIB * GIB + max(batches, weights)
    return {
        "memory": processes * each,
        "of that, batches": processes * batches,
        # Batches go through pipes (rge/data/loader.py).
        "shared memory": NCCL_GIB * GIB if on_gpu and processes > 1 else 0.0,
        "descriptors of a process": descriptors(num_workers),
    }


def state_copy(shapes: Shapes, setup: Setup, processes: int) -> float:
    """Bytes of main memory, on the run's first machine, of the copy from which a training state is written in the background.

    The machine has so many `processes`. Without shards, only the main process writes. DeepSpeed's model file under ZeRO-1 and
    ZeRO-2 is whole, and the main process writes it.
    """
    numbers = 4.0 * (1 + setup.optimizer_states) * setup.trained
    if setup.num_gpus == 1 or setup.back_end == "ddp":
        return numbers
    share = processes / setup.num_gpus
    if setup.back_end == "fsdp2":
        return share * (numbers + setup.dtype_bytes * (shapes.parameters - setup.trained))
    return share * numbers + setup.dtype_bytes * shapes.parameters * (
        share if setup.back_end == "zero3" else 1
    )


def descriptors(num_workers: int) -> int:
    """Open files of a process with so many data workers, at most."""
    return PROCESS_DESCRIPTORS + num_workers * WORKER_DESCRIPTORS


def step_seconds(
    shapes: Shapes, load: Load, setup: Setup, *, num_flops: float, peak: float, bandwidth: float
) -> float:
    """Seconds of a step: FLOPs by what of the peak is reached; writing by what has to be read for each token.

    A step of writing reads all weights of the text model and the rows' keys and values, and computes little: it waits for
    memory.

    `peak` and `bandwidth` are the FLOP/s that a GPU reaches, and the bytes a second that its memory does.
    """
    seconds = num_flops / peak
    if load.own:
        rows = load.queries * load.each
        passes = -(-rows // setup.rollout_rows)
        weights = setup.dtype_bytes * (shapes.layers * shapes.layer + shapes.hidden * shapes.vocabulary)
        cache = _cache(shapes, setup) * min(setup.rollout_rows, rows) * (load.prompt + load.own / 2)
        seconds += passes * (load.own + 2) * (weights + cache) / bandwidth
    return seconds + 2 * kept_bytes(shapes, load, setup)[1] / (HOST_TBS * 1e12)


def communication(shapes: Shapes, load: Load, setup: Setup) -> float:
    """Bytes that one GPU sends in a step, by rings: a gather or a scatter of x bytes sends x (N - 1) / N."""
    num_gpus, back_end = setup.num_gpus, setup.back_end
    share = (num_gpus - 1) / num_gpus
    # DDP, ZeRO-1 and FSDP2 add gradients up over GPUs in float32, ZeRO-2 and 3 in the computing dtype.
    gradient = setup.trained * (setup.dtype_bytes if back_end in ("zero2", "zero3") else 4) * share
    weight = shapes.parameters * setup.dtype_bytes * share
    embeddings = 4.0 * shapes.hidden * load.candidates * (num_gpus - 1) * (2 if load.contrastive else 0)
    if back_end == "ddp":
        sent = 2 * gradient  # once a step, with the last micro batch
    elif back_end in ("zero1", "zero2"):
        # Gradients are shared out with every micro batch under ZeRO-2, once under ZeRO-1; then weights are gathered.
        sent = gradient * (load.chunks if back_end == "zero2" else 1)
        sent += setup.trained * setup.dtype_bytes * share
    else:
        # Weights are gathered for every forward and backward, and once for the rollout and the passes without gradient.
        gathers = 2 * load.chunks + (1 if load.own or load.chunks > 1 else 0)
        sent = gradient * load.chunks + weight * gathers
    return sent + embeddings


def num_parameters(model: HubModel, recipe_model: Any) -> tuple[int, int]:
    """Parameters, and those that get a gradient: with adapters theirs, the `<emb>` row's and those of modules trained whole."""
    family = family_of(model)
    tower, total = family.vision(model), _size(model)
    lora = getattr(recipe_model, "lora", None)
    if lora is None:
        return total, total - recipe_model.freeze_vision * sum(map(_size, tower))
    whole = [it for name, it in model.named_modules() if name.rsplit(".", 1)[-1] in lora.modules_to_save]
    inside = set(chain.from_iterable(module.modules() for module in whole))

    def adapted(part: nn.Module) -> int:
        """Parameters of the adapters in a part of the model."""
        matrices = [
            matrix
            for name, matrix in _matrices(part).items()
            if matrix not in inside and (not lora.targets or name.rsplit(".", 1)[-1] in lora.targets)
        ]
        return sum(lora.rank * sum(it.weight.shape) + lora.dora * it.weight.shape[0] for it in matrices)

    count = model.config.get_text_config().hidden_size + sum(map(_size, whole))
    count += sum(map(adapted, [family.decoder(model), *(tower if lora.vision else ())]))
    return total, count

"""For a machine with GPUs: check every fast path, and time a step of the 3B model.

    python scripts/gpu_check.py [out=gpu_check] [steps=20] [queries=64] [micro_batch=8] [checks=all]

Please attach ``gpu_check.md`` and ``gpu_check.json`` from ``out`` to an issue, whatever the result. The checks are independent:

    kernels     flash attention of prompts, branches, pictures and single tokens against ordinary attention, with gradients
    form        a step of a small model: the GPU's form against padded rows in float32
    kept        the same step with activations kept on the device and in main memory, against computing them again
    fused       a step with fused kernels against one without, if liger-kernel is installed
    rollout     rationales written by captured CUDA graphs against the same kernels launched one by one
    against     the 3B with random weights: rollout and gradients of a step against transformers' rollout and gradient caching
    training    the same at the recipe's sizes: seconds, memory and FLOP/s against the plan
    back_ends   a few steps of the demo under DDP, ZeRO and FSDP2, on all GPUs

``queries`` is one GPU's share of a batch, 512 / 8 in the 3B's recipe; ``against`` takes 16 of them. ``rehearse=true`` runs
everything that can run on a CPU, with a tiny model. Results are written after each check. The exit code is 1 if a check failed.
"""

import copy
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from benches import forms  # noqa: E402
from benches.harness import random_backbone, random_batch  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

from rge.common.commands import start  # noqa: E402
from rge.common.errors import UserError  # noqa: E402
from rge.common.files import write_text  # noqa: E402
from rge.common.options import AtLeastOne, one_of, parse_options  # noqa: E402
from rge.config import load_recipe  # noqa: E402
from rge.data.collate import Batch  # noqa: E402
from rge.distributed.transfer import moved  # noqa: E402
from rge.model import fused, varlen, vision_tower  # noqa: E402
from rge.model.backbone import Backbone  # noqa: E402
from rge.model.embedding_model import EmbeddingModel  # noqa: E402
from rge.objective import Objective  # noqa: E402
from rge.plan.costs import GIB, RESERVED_GIB, Setup, flops, memory, shapes_of, speed_of  # noqa: E402
from rge.plan.known_models import TABLE  # noqa: E402
from rge.plan.options import PlanOptions  # noqa: E402
from rge.plan.report import load_of  # noqa: E402
from rge.rollout import micro_batches  # noqa: E402
from rge.rollout.generate import Rationale, generate  # noqa: E402
from rge.rollout.micro_batches import encode_prompts  # noqa: E402
from rge.rollout.writer import Rollout  # noqa: E402
from rge.small_models import build as scratch  # noqa: E402
from rge.step.training_step import TrainingStep  # noqa: E402

Figures = dict[str, Any]

LIMIT_S = 3600.0
"""Time limit of a command that a check starts."""

KERNEL_SHAPES: dict[str, tuple[int, int, int, list[int], list[int] | None, bool]] = {
    "prompts": (16, 2, 128, [1150, 900, 31, 1], None, True),
    "branches": (16, 2, 128, [130, 129, 40, 2], [1279, 1278, 90, 33], True),
    "pictures": (16, 16, 80, [4096, 1024, 64], None, False),
    "windows": (16, 16, 80, [64] * 40 + [32, 16], None, False),
}
"""Heads, key heads, head size, lengths of queries and of keys where they differ, and whether it is causal; the 3B's."""

SMALL: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "vision": {
        "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "patch_size": 14, "window_size": 56,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip


@dataclass
class Options:
    """Checks to run, and their sizes."""

    out: Path = Path("gpu_check")
    steps: AtLeastOne = 20
    queries: AtLeastOne = 64
    micro_batch: AtLeastOne = 8
    checks: tuple[str, ...] = ("all",)
    rehearse: bool = False


class NotRun(Exception):
    """The machine lacks something that a check needs."""


class Machine:
    """The device of the checks: the first GPU, or the CPU in a rehearsal."""

    def __init__(self, options: Options):
        self.options, self.gpus = options, torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.device = torch.device("cuda:0" if self.gpus and not options.rehearse else "cpu")
        self.recipe = load_recipe(["recipe=qwen25vl_3b"])

    @property
    def on_gpu(self) -> bool:
        """Whether the checks run on a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of small models: bfloat16 on a GPU."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        """Device and versions, without anything that identifies the machine."""
        found = {
            "date": datetime.now().strftime("%Y-%m-%d %H:%M"), "rehearsal": not self.on_gpu, "GPUs": self.gpus,
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        if self.gpus:
            device = torch.cuda.get_device_properties(0)
            found |= {"device": device.name, "memory, GiB": round(device.total_memory / GIB, 1)}
            found |= {"capability": f"{device.major}.{device.minor}", "CUDA": torch.version.cuda}
        return found


def small_embedder(machine: Machine, dtype: torch.dtype, form: str, **settings: Any) -> EmbeddingModel:
    """A small model that starts from the same random weights each time."""
    return _embedder(machine, SMALL, dtype, form, (28 * 28, 112 * 112), **settings)


def _embedder(
    machine: Machine, sizes: dict, dtype: torch.dtype, form: str, pixels: tuple[int, int], rows: int = 0, **settings: Any
) -> EmbeddingModel:  # fmt: skip
    """A model of these sizes on the device, with a small tokenizer; `rows` of its embedding matrix if not the tokenizer's."""
    # The processor is of the real kind; with `rows`, the weights are only made where they are used.
    backbone = copy.deepcopy(_small_backbone(*pixels))
    model, tokenizer = backbone.model, backbone.processor.tokenizer
    if rows:
        ids = dict(
            zip(scratch.SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(scratch.SPECIAL_TOKENS), strict=True)
        )
        config = scratch.make_config(rows, ids, **sizes)
        torch.manual_seed(0)
        with torch.device(machine.device):
            model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    vision_tower.speed_up(model, form, fused.wanted("auto"))
    barred = [*backbone.suppressed_ids, *range(len(tokenizer), rows)]
    backbone = replace(backbone, model=model.to(machine.device, dtype), suppressed_ids=barred, attention=form)
    return EmbeddingModel(backbone, **settings)


@cache
def _small_backbone(min_pixels: int, max_pixels: int) -> Backbone:
    words = ["what opens this", "a key opens a lock", "an egg becomes a chick"]
    return random_backbone(words, {"vocab_size": 512, **SMALL}, min_pixels=min_pixels, max_pixels=max_pixels)


def check_kernels(machine: Machine) -> Figures:
    """Flash attention against ordinary attention at the 3B's shapes: greatest relative differences of outputs and gradients."""
    if not machine.on_gpu:
        raise NotRun(
            "flash attention has no CPU kernel (its emulation is compared with a loop in tests/rge/model/test_varlen.py)"
        )
    generator, figures = torch.Generator().manual_seed(0), {}
    for name, (heads, key_heads, size, q_lengths, given, causal) in KERNEL_SHAPES.items():
        k_lengths = given or q_lengths
        states = [
            torch.randn(sum(lengths), count, size, generator=generator).to(machine.device, torch.bfloat16)
            for lengths, count in ((q_lengths, heads), (k_lengths, key_heads), (k_lengths, key_heads))
        ]
        runs = moved(varlen.make_runs(q_lengths, k_lengths), machine.device)
        settings = {"scale": size**-0.5, "causal": causal, "window": None}
        figures[name] = varlen.verify(varlen._flash, states, runs, settings, f"check of {name}")
    return figures


def timed(machine: Machine, step: Callable[[], dict[str, float]]) -> dict[str, float]:
    """A step's report with its seconds (``s``) and, on a GPU, its peak memory (``GiB``)."""
    if machine.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    machine.wait()
    began = time.perf_counter()
    report = step()
    machine.wait()
    report["s"] = time.perf_counter() - began
    if machine.on_gpu:
        report["GiB"] = torch.cuda.max_memory_allocated() / GIB
    return report


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two gradients."""
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def _one_step(
    machine: Machine, embedder: EmbeddingModel, batch: Batch, keep: str = "none"
) -> tuple[dict, torch.Tensor]:
    """A step on given rationales, so that forms see the same tokens: `timed`'s report, and all gradients in one vector."""
    rationales = [Rationale((7,) * (3 + row % 5), False, None, 0.0) for row in range(len(batch.queries))]
    embedder.zero_grad(set_to_none=True)
    step = TrainingStep(embedder, embedder, Objective(1 / 11, 10 / 11), 2, keep=keep)
    report = timed(machine, lambda: step(batch, Rollout(rationales)))
    gradients = [p.grad.double().cpu().flatten() for p in embedder.parameters() if p.grad is not None]
    return report, torch.cat(gradients)


def check_form(machine: Machine) -> Figures:
    """The GPU's form against padded rows in float32: a step with gradient caching, both losses."""
    plain = small_embedder(machine, torch.float32, "sdpa")
    batch = random_batch(plain, 5)
    report, expected = _one_step(machine, plain, batch)
    report_fast, found = _one_step(machine, small_embedder(machine, machine.dtype, "varlen"), batch)
    figures = {
        "dtype": str(machine.dtype).removeprefix("torch."),
        "cosine of the gradients": cosine(expected, found),
        "loss, rows in float32": report["loss"],
        "loss, varlen": report_fast["loss"],
    }
    least = 0.98 if machine.on_gpu else 1 - 1e-6
    equal = math.isclose(report["loss"], report_fast["loss"], rel_tol=0.05)
    if not (equal and figures["cosine of the gradients"] >= least):
        raise AssertionError(f"the forms differ (at least {least:g} is asked of the cosine): {figures}")
    return figures


def check_kept(machine: Machine) -> Figures:
    """Kept activations (`train.keep_activations`) against computing them again: gradients, time and peak memory.

    A small model, sixteen queries (six in a rehearsal) in micro batches of two; seconds and memory of the second step.
    """
    embedder = small_embedder(machine, machine.dtype, "varlen")
    batch, figures, gradients = random_batch(embedder, 16 if machine.on_gpu else 6), dict[str, Any](), []
    for keep in ("none", "device", "host"):
        with patch.object(micro_batches, "LEAST_BYTES", 2**12):  # the small model's are small
            _one_step(machine, embedder, batch, keep)
            report, gradient = _one_step(machine, embedder, batch, keep)
        gradients.append(gradient)
        apart = float((gradient - gradients[0]).norm() / gradients[0].norm())
        figures |= {f"{name}, {keep}": report[name] for name in ("s", "loss", "GiB") if name in report}
        figures[f"difference of the gradient, {keep}"] = apart
    most = 0.05 if machine.on_gpu else 1e-5
    if not all(figures[f"difference of the gradient, {keep}"] <= most for keep in ("device", "host")):
        raise AssertionError(
            f"kept activations give another gradient (at most {most:g} is allowed): {figures}"
        )
    if machine.on_gpu and figures["GiB, host"] >= figures["GiB, device"]:
        raise AssertionError(f"nothing was kept in main memory: {figures}")
    return figures


def check_fused(machine: Machine) -> Figures:
    """A small model's step with fused kernels against one without: bfloat16 weights, and float32 weights under autocast."""
    if not machine.on_gpu or not fused.wanted("auto"):
        raise NotRun("liger-kernel is not installed" if machine.on_gpu else "fused kernels need a GPU")
    figures: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        embedder = small_embedder(machine, dtype, "varlen")
        batch = random_batch(embedder, 5)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            with patch.object(fused, "LEAST", 2**62):
                report, expected = _one_step(machine, embedder, batch)
            fused._verified.clear()
            with patch.object(fused, "LEAST", 0):
                report_fused, found = _one_step(machine, embedder, batch)
        kinds = {kind for kind, *_ in fused._verified}
        if len(kinds) < 3:
            raise AssertionError(f"only these kernels were used with weights in {dtype}: {sorted(kinds)}")
        apart, name = float((found - expected).norm() / expected.norm()), str(dtype).removeprefix("torch.")
        figures |= {
            f"difference of the gradient, {name} weights": apart,
            f"loss, {name} weights": report["loss"],
            f"loss, {name} weights, fused": report_fused["loss"],
        }
        if not apart <= 0.05 or not math.isclose(report["loss"], report_fused["loss"], rel_tol=0.01):
            raise AssertionError(f"fused kernels give another step (0.05 is allowed): {figures}")
    return figures


def check_rollout(machine: Machine) -> Figures:
    """The tokens of captured steps (on a GPU) against plain ones; also after weights changed in place, and after they moved."""
    written, seconds = [], []
    for graphs in (False, True):
        embedder = small_embedder(machine, machine.dtype, "varlen", cuda_graphs=graphs).eval()
        batch = random_batch(embedder, 12)
        settings: Any = {"max_new_tokens": 48 if machine.on_gpu else 12, "batch_size": 12}
        generate(embedder, batch.queries, **settings)
        machine.wait()
        began = time.perf_counter()
        rationales = generate(embedder, batch.queries, **settings)
        machine.wait()
        seconds.append(time.perf_counter() - began)
        written.append([rationale.ids for rationale in rationales])
        weight = embedder.model.get_output_embeddings().weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
        for move in (False, True):
            with torch.no_grad():
                weight.add_(noise, alpha=0.5 * float(weight.std()))
            if move:
                weight.data = weight.data.clone()
            written[-1] += [rationale.ids for rationale in generate(embedder, batch.queries, **settings)]
    plain, captured = written
    equal = sum(a == b for a, b in zip(plain, captured, strict=True))
    figures: dict[str, Any] = {"rows": len(plain), "equal": equal}
    figures |= {"s, kernel by kernel": seconds[0], "s, captured": seconds[1]}
    if equal < len(plain):
        raise AssertionError(f"captured steps wrote other tokens: {figures}")
    return figures


def recipe_batch(machine: Machine, queries: int) -> tuple[EmbeddingModel, Batch, int]:
    """The recipe's model with random weights, a batch of so many queries, and the longest rationale; tiny on a CPU."""
    recipe, known = machine.recipe, TABLE[str(machine.recipe.model.path)]
    if machine.on_gpu:
        pixels, rationale = (recipe.model.min_pixels, recipe.model.max_pixels), recipe.rollout.max_new_tokens
        sizes, rows = forms.layer_sizes(known), known["text_config"]["vocab_size"]
        embedder = _embedder(machine, sizes, torch.bfloat16, "auto", pixels, rows)
    else:
        pixels, rationale = (28 * 28, 112 * 112), 12
        embedder = _embedder(machine, SMALL, torch.float32, "varlen", pixels, 1024)
    if recipe.model.gradient_checkpointing:
        forms.checkpoint_gradients(embedder)
    return embedder.train(), random_batch(embedder, queries, math.isqrt(pixels[1]), rationale), rationale


def check_against(machine: Machine) -> Figures:
    """Rollout and gradients of a step in our forms, and as rollout by transformers and gradient caching in passes of stock layers.

    The second run of each, stock layers the first, in micro batches; the vision tower's attention is ours in all.
    """
    queries, micro = (
        (min(16, machine.options.queries), machine.options.micro_batch) if machine.on_gpu else (4, 2)
    )
    embedder, batch, rationale = recipe_batch(machine, queries)
    setting = forms.Setting(embedder, batch, Objective.of(machine.recipe, "joint"), [], rationale)
    given = [written.ids for written in forms.our_rollout(setting)]
    figures: dict[str, Any] = {"queries": queries, "tokens of a query's prompt": len(batch.queries[0])}

    def theirs() -> dict[str, float]:
        began = time.perf_counter()
        own_ids = forms.their_rollout(setting)
        machine.wait()
        figures[f"s, of that the rollout, {name}"] = time.perf_counter() - began
        # At the cap, ours leaves room for the final token.
        equal = [list(own[: len(ours)]) == list(ours) for own, ours in zip(own_ids, given, strict=True)]
        figures[f"share of equal rationales, {name}"] = sum(equal) / len(equal)
        # After the same rationales, so that gradients can be compared: in bfloat16, a tie ends in another token.
        return forms.grad_cache_step(setting, given, micro)

    def some_gradient() -> torch.Tensor:
        """The first numbers of each parameter's gradient: the whole would take as much memory as the weights."""
        parts = [p.grad.flatten()[:2000].double() for p in embedder.parameters() if p.grad is not None]
        return torch.cat(parts).cpu()

    work: dict[str, Callable[[], dict[str, float]]] = {
        "ours, prompts twice": lambda: forms.our_step_in_chunks(setting, micro, "none"),
        "ours, prompts once and kept": lambda: forms.our_step_in_chunks(setting, micro, "device"),
        "gradient caching, our kernels": theirs,
        "gradient caching, stock layers": theirs,
    }
    gradients: dict[str, torch.Tensor] = {}
    for name, step in work.items():
        if "stock" in name:
            fused.undo(embedder.model)
        for _ in range(1 if "stock" in name else 2):
            embedder.zero_grad(set_to_none=True)
            report = timed(machine, step)
        figures |= {
            f"{figure}, {name}": report[figure] for figure in ("s", "loss", "GiB") if figure in report
        }
        first, found = gradients.setdefault("first", some_gradient()), some_gradient()
        figures[f"cosine of some gradients to the first form's, {name}"] = cosine(first, found)
        print(f"  {name}: {report['s']:.2f} s", flush=True)
    losses = [value for name, value in figures.items() if name.startswith("loss")]
    for name in list(work)[:2]:
        figures[f"ratio, stock layers over {name}"] = (
            figures["s, gradient caching, stock layers"] / figures[f"s, {name}"]
        )
    cosines = [value for name, value in figures.items() if name.startswith("cosine")]
    if not all(math.isclose(loss, losses[0], rel_tol=0.02) for loss in losses) or min(cosines) < 0.98:
        raise AssertionError(
            f"losses differ by more than 2 %, or gradients have a cosine below 0.98: {figures}"
        )
    return figures


def check_training(machine: Machine) -> Figures:
    """Whole steps, rollout and AdamW included, at the recipe's sizes, random weights, one process, against the plan."""
    options, recipe = machine.options, machine.recipe
    queries, micro, steps = options.queries, options.micro_batch, options.steps
    if not machine.on_gpu:
        queries, micro, steps = min(queries, 4), min(micro, 2), min(steps, 3)
    embedder, batch, rationale = recipe_batch(machine, queries)
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-6, weight_decay=0.0)
    objective = Objective.of(recipe, "joint")
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    whole, rollouts, losses = [], [], []
    for _ in range(steps):
        machine.wait()
        began = time.perf_counter()
        encoded = encode_prompts(embedder, embedder, batch.queries) if micro >= queries else None
        rationales = generate(
            embedder,
            batch.queries,
            max_new_tokens=rationale,
            batch_size=recipe.rollout.batch_size,
            encoded=encoded,
        )
        machine.wait()
        rollouts.append(time.perf_counter() - began)
        report = TrainingStep(embedder, embedder, objective, micro)(batch, Rollout(rationales, encoded))
        torch.nn.utils.clip_grad_norm_(embedder.parameters(), recipe.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        machine.wait()
        whole.append(time.perf_counter() - began)
        losses.append(report["loss"])
    if not all(map(math.isfinite, losses)):
        raise AssertionError(f"losses are not finite: {losses}")
    # The first step compiles, checks and captures.
    seconds = statistics.median(whole[1:] or whole)
    own = max(1, round(statistics.mean(len(written.ids) for written in rationales)))
    counted, planned = _plan(machine, embedder, batch, own, rationale, micro)
    figures: dict[str, Any] = {
        "dtype": str(embedder.model.dtype),
        "parameters, G": sum(parameter.numel() for parameter in embedder.parameters()) / 1e9,
        "queries": queries,
        "tokens of a query's prompt": len(batch.queries[0]),
        "steps": steps,
        "s, first step": whole[0],
        "s, a step (median of the others)": seconds,
        "s, of that the rollout": statistics.median(rollouts[1:] or rollouts),
        "loss, first": losses[0],
        "loss, last": losses[-1],
        "TFLOP of a step, planned": counted / 1e12,
        "TFLOP/s": counted / seconds / 1e12,
    }
    if speed := speed_of(torch.cuda.get_device_name(0), "bfloat16") if machine.on_gpu else None:
        peak, _ = speed
        figures |= {"peak TFLOP/s": peak, "utilisation": counted / seconds / peak / 1e12}
    figures |= {
        "GiB, planned": sum(planned.values()) / GIB,
        "GiB, planned by kind": {kind: round(size / GIB, 3) for kind, size in planned.items()},
        "GiB, set aside by the plan besides": RESERVED_GIB,
        "GiB, measured peak": torch.cuda.max_memory_allocated() / GIB if machine.on_gpu else "not on a CPU",
    }
    return figures


def _plan(
    machine: Machine, embedder: EmbeddingModel, batch: Batch, own: int, longest: int, micro: int
) -> tuple[float, dict[str, float]]:
    """FLOPs of a step with rationales of ``own`` tokens, and bytes by kind with those of ``longest``, by the plan."""
    recipe, pixels = machine.recipe, batch.queries[0].pixels
    assert pixels is not None
    shapes = shapes_of(embedder.model, pixels[:, 0].numel())
    load = replace(
        load_of(recipe, shapes, PlanOptions(num_gpus=8)),
        queries=len(batch.queries), candidates=len(batch.candidates), chunks=-(-len(batch.queries) // micro),
        prompt=round(statistics.mean(map(len, batch.queries))),
        candidate=round(statistics.mean(map(len, batch.candidates))),
        own=own, oracle=len(batch.oracle_ids[0]) - 1, query_pictures=1, candidate_pictures=1,
    )  # fmt: skip
    setup = Setup(
        back_end="zero2", num_gpus=8, dtype_bytes=embedder.model.dtype.itemsize, trained=shapes.parameters,
        checkpointing=recipe.model.gradient_checkpointing, rollout_rows=recipe.rollout.batch_size,
        micro_queries=min(micro, len(batch.queries)), once=len(batch.queries) <= micro,
    )  # fmt: skip
    counted = sum(flops(shapes, load, setup).values())
    # The work of one of eight processes, but unsharded, and everything in the weights' dtype.
    each = float(shapes.parameters * setup.dtype_bytes)
    unsharded = {"weights": each, "gradients": each, "optimizer": 2 * each}
    return counted, memory(shapes, replace(load, own=longest), setup) | unsharded


def check_back_ends(machine: Machine) -> Figures:
    """Two steps of both stages of the demo under each launch config, on all GPUs; with one GPU, as one process without DDP."""
    if not machine.gpus:
        raise NotRun("DDP, ZeRO-1, ZeRO-2, ZeRO-3 and FSDP2 need GPUs, here are none")
    figures = {}
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")[machine.gpus == 1 :]:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            out = _run(launch_command(name, machine.gpus, Path(folder) / "run"))
            figures[name] = f"{time.perf_counter() - began:.0f} s" if out is None else f"failed: {out}"
    if any(value.startswith("failed") for value in figures.values()):
        raise AssertionError(json.dumps(figures))
    return {"processes": machine.gpus} | figures


def launch_command(config: str, processes: int, out: Path) -> list[str]:
    """Two steps of both stages of the demo, from its base, under a launch config."""
    # Not from random weights: those are built by one process, which ZeRO-3 and FSDP2 do not allow.
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "recipes" / "accelerate" / f"{config}.yaml"), "--num_processes", str(processes),
        str(ROOT / "rge" / "train.py"), "recipe=demo", f"init={ROOT / 'rge' / 'demo_base'}",
        "optim.name=adamw", "model.dtype=bfloat16",
        "cold_start.steps=2", "joint.steps=2", "train.num_processes=" + str(processes), f"out={out}",
    ]  # fmt: skip


def _run(command: list[str]) -> str | None:
    """Run a command; returns the end of its output if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).splitlines()
    # A launcher writes a page of its own below the error.
    reasons = [line for line in lines if "rror: " in line]
    return "\n".join([*reasons[:20], "...", *lines[-40:]])


CHECKS: dict[str, Callable[[Machine], Figures]] = {
    "kernels": check_kernels,
    "form": check_form,
    "kept": check_kept,
    "fused": check_fused,
    "rollout": check_rollout,
    "against": check_against,
    "training": check_training,
    "back_ends": check_back_ends,
}


def run_checks(machine: Machine) -> Iterator[dict[str, Any]]:
    """Result of every requested check, in order; ``state`` is ``passed``, ``failed`` or ``not run``."""
    asked = machine.options.checks
    for name, check in CHECKS.items():
        if name not in asked and "all" not in asked:
            continue
        print(f"{name} ...", flush=True)
        began, figures = time.perf_counter(), {}
        state, says = "passed", " ".join((check.__doc__ or "").split())
        try:
            figures = check(machine)
        except NotRun as missing:
            state, says = "not run", str(missing)
        except Exception as problem:  # noqa: BLE001 - the report shows it, and the other checks still run
            state, says = "failed", f"{type(problem).__name__}: {problem}"
            figures = {"trace": traceback.format_exc()[-4000:]}
        if machine.on_gpu:
            torch.cuda.empty_cache()
        print(f"{name}: {state}: {says}", flush=True)
        seconds = time.perf_counter() - began
        yield {"name": name, "state": state, "seconds": seconds, "says": says, "figures": figures}


def page(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The report in Markdown, as an issue shows it."""

    def listed(values: dict[str, Any]) -> str:
        shown = {name: f"{v:,.4g}" if isinstance(v, float) else str(v) for name, v in values.items()}
        return "\n".join(
            f"```\n{text}\n```" if "\n" in text else f"- {name}: {text}" for name, text in shown.items()
        )

    parts = ["# gpu_check", listed(machine)]
    if machine["rehearsal"]:
        parts.append("**A rehearsal on a CPU with a tiny model. No figure here is a GPU's.**")
    for result in results:
        parts += ["## {name}: {state}".format(**result), "{says} ({seconds:.0f} s)".format(**result)]
        parts.append(listed(result["figures"]))
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    """Run the checks and write both files."""
    options = parse_options(Options, argv)
    one_of("checks", options.checks, [*CHECKS, "all"])
    machine = Machine(options)
    if not machine.gpus and not options.rehearse:
        raise UserError(
            "torch sees no GPU here; true goes through the checks on the CPU with a tiny model",
            key="rehearse",
        )
    described, results = machine.describe(), []
    for result in run_checks(machine):  # the results so far are written after each
        results.append(result)
        found = {"machine": described, "options": asdict(options), "results": results}
        write_text(options.out / "gpu_check.json", json.dumps(found, indent=1, default=str))
        write_text(options.out / "gpu_check.md", page(described, results))
    print(f"attach to an issue: {options.out / 'gpu_check.md'} and {options.out / 'gpu_check.json'}")
    return int(any(result["state"] == "failed" for result in results))


if __name__ == "__main__":
    start(main)

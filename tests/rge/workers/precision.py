"""One process, or one of several, started without a launch config: every back end trains a bfloat16 model.

    [torchrun ...] precision.py CHECKPOINT FOLDER

``FOLDER/task.pt`` holds ``batches`` and ``rationales`` (one a rank), ``objective``, ``micro_batch_size``, ``lr``, ``steps``
and ``cases``, each a name, the recipe's ``train.back_end`` and its ``model.dtype``. For each the first process writes
``FOLDER/NAME_WORLD.pt``: the gradient of the first step, and what AdamW's steps made of the losses and the weights. With
``descent`` (``batches``, ``objective``, ``lr``, ``steps``) one process also writes the losses of those.
"""

import gc
import os
import sys
from pathlib import Path

import on_cpu
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from rge.checkpoints.export import export
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

CLEAR = ("ACCELERATE_", "FSDP_", "PARALLELISM_")


def as_launched() -> None:
    """As if torchrun, or a plain `accelerate launch`, had just started this process."""
    for key in [key for key in os.environ if key.startswith(CLEAR)]:
        del os.environ[key]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    on_cpu.allow_fsdp2()


def trained_weights(accelerator: Accelerator, embedder: EmbeddingModel) -> dict[str, Tensor]:
    """The weights that the optimizer changes, whole, as all processes together hold them."""
    found = {}
    for name, parameter in embedder.model.named_parameters():
        if accelerator.state.deepspeed_plugin is not None:
            from deepspeed.utils import safe_get_full_fp32_param

            weight = safe_get_full_fp32_param(parameter)
        else:
            weight = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = weight.detach().cpu().clone()
    return found


def accumulated_in(accelerator: Accelerator, model, embedder: EmbeddingModel) -> str:
    """Dtype in which the gradients of several backwards are added up."""
    if accelerator.state.deepspeed_plugin is None:
        return str(next(embedder.parameters()).dtype)
    optimizer = model.optimizer
    return str(
        optimizer.grad_acc_dtype
        if hasattr(optimizer, "grad_acc_dtype")
        else optimizer.gradient_accumulation_dtype
    )


def descend(checkpoint: str, task: dict, back_end: str, dtype: str) -> list[float]:
    """Losses of ``task["descent"]``: AdamW, one batch after the other, round after round; one process."""
    as_launched()
    accelerator = launch.make_accelerator(TrainConfig(back_end=back_end), dtype)
    embedder = EmbeddingModel(load_backbone(checkpoint, dtype=dtype)).eval()
    settings = task["descent"]
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=settings["lr"])
    model, optimizer = dist.prepare(accelerator, embedder, optimizer, max_grad_norm=1.0)
    losses = []
    for step in range(settings["steps"]):
        report = TrainingStep(model, embedder, settings["objective"], 100, backward=accelerator.backward)(
            settings["batches"][step % len(settings["batches"])]
        )
        dist.optimizer_step(accelerator, model, optimizer, max_grad_norm=1.0)
        losses.append(report["loss"])
    return losses


def run(checkpoint: str, task: dict, back_end: str, dtype: str, kind: str, folder: Path | None) -> dict:
    """Some steps of one optimizer; with a folder the model is exported at the end."""
    as_launched()
    train = TrainConfig(back_end=back_end)
    accelerator = launch.make_accelerator(train, dtype)
    launch.check_launch(accelerator, train)
    embedder = EmbeddingModel(load_backbone(checkpoint, dtype=dtype)).eval()
    if kind == "gradient":
        optimizer, steps = torch.optim.SGD(embedder.parameters(), lr=1.0), 1
    else:
        optimizer, steps = torch.optim.AdamW(embedder.parameters(), lr=task["lr"]), task["steps"]
    model, optimizer = dist.prepare(accelerator, embedder, optimizer, max_grad_norm=0.0)
    before = trained_weights(accelerator, embedder)
    rank, losses, lengths = dist.rank(), [], []
    for _ in range(steps):
        if kind != "gradient" and not lengths:
            with dist.whole_model(accelerator, model):
                written = generate(embedder, task["batches"][rank].queries, max_new_tokens=5, batch_size=3)
            lengths = [len(rationale.ids) for rationale in written]
        report = TrainingStep(
            model,
            embedder,
            task["objective"],
            task["micro_batch_size"],
            backward=accelerator.backward,
            no_sync=lambda: dist.no_sync(accelerator, model),
        )(task["batches"][rank], Rollout(task["rationales"][rank]))
        dist.optimizer_step(accelerator, model, optimizer, max_grad_norm=0.0)
        losses.append(report["loss"])
    after = trained_weights(accelerator, embedder)
    if folder is not None:
        weights = dist.full_weights(accelerator, model, embedder)
        for _ in range(2):  # best checkpoints are exported before the last one is
            if accelerator.is_main_process:
                export(embedder, folder, task["settings"], weights)
        accelerator.wait_for_everyone()
    return {
        "back_end": str(launch.back_end(accelerator)),
        "dtypes": {str(weight.dtype) for weight in before.values()},
        "accumulated_in": accumulated_in(accelerator, model, embedder),
        "losses": losses,
        "lengths": lengths,
        "change": {name: after[name] - before[name] for name in before},
        "moved": {
            name: float((after[name] != before[name]).float().mean())
            for name in before
            if before[name].ndim > 1
        },
    }


if __name__ == "__main__":
    gc.freeze()  # what is imported, of which every back end's collections would go through it all
    close, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
    checkpoint, folder = sys.argv[1], Path(sys.argv[2])
    task = torch.load(folder / "task.pt", weights_only=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, back_end, dtype in task["cases"]:
        out = folder / f"{name}_{world}"
        found = {
            "gradient": run(checkpoint, task, back_end, dtype, "gradient", None),
            "adamw": run(checkpoint, task, back_end, dtype, "adamw", out),
        }
        if "descent" in task:
            found["descent"] = descend(checkpoint, task, back_end, dtype)
        if dist.rank() == 0:
            torch.save(found, f"{out}.pt")
    if world > 1:
        close()

"""One process of several: the same steps, rollouts, states and exports under one back end after another.

    torchrun ... back_ends.py CHECKPOINT FOLDER

``FOLDER/task.pt`` holds ``environments`` (what `accelerate launch --config_file` would set, by name of the back end),
``steps`` (each with ``batches``, one a rank, ``objective``, ``micro_batch_size`` and ``rollout_batch_sizes``, with
``once`` where prompts are to be encoded once, if the back end can, and ``keep`` where activations are to be kept, and with ``rl``, a recipe, and ``sampling``, one a rank, where it is a step of that stage), ``recipe`` (arguments of rge/train.py), ``adapted``
(by folder, a back end and further ones), ``merged`` (back ends whose adapters are merged for vLLM), ``kl`` (further ones, by back end) and ``plain`` (checkpoints without ``<emb>``). Rank r writes ``FOLDER/NAME_r.pt``, the main process exports to
``FOLDER/NAME``.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import on_cpu
import torch
from accelerate.state import AcceleratorState, GradientState

from rge import train
from rge.checkpoints.export import export
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.model.adapters import add_adapters, merge
from rge.model.backbone import load_backbone
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.rl.credit import Reinforcement
from rge.rollout.generate import generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.vllm_engine import present_weights
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

LR = 0.2
AGAIN = slice(2, 4)
"""Steps that are taken once more at the end, from the state that was saved before them."""


def pretend(environment: dict[str, str]) -> None:
    """As if `accelerate launch` had just started this process."""
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        del os.environ[key]
    os.environ.update(environment)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    on_cpu.allow_fsdp2()


def messages(run) -> tuple[object, int]:
    """What a function returns, and how many collectives it ran."""
    before = on_cpu.sent["messages"]
    result = run()
    return result, on_cpu.sent["messages"] - before


def take_step(accelerator, embedder, model, optimizer, step: dict) -> dict:
    """Roll out, train, and say what came of it."""
    rank = dist.rank()
    batch = step["batches"][rank]

    encoded = None

    def roll_out():
        return generate(
            embedder,
            batch.queries,
            max_new_tokens=9,
            batch_size=step["rollout_batch_sizes"][rank],
            encoded=encoded,
            **(step["sampling"][rank] if "rl" in step else {}),
        )

    credit = None
    with dist.whole_model(accelerator, model):
        if step.get("once") and not dist.shards_parameters(accelerator):
            encoded = encode_prompts(model, embedder, batch.queries)
        rationales, num_messages = messages(roll_out)
        if "rl" in step:
            stage = Reinforcement(step["rl"], embedder, None, Path("."))
            credit = stage.begin(batch, rationales, measure=True)
            rationales = credit.rationales

    def train_on():
        return TrainingStep(
            model,
            embedder,
            step["objective"],
            step["micro_batch_size"],
            keep=step.get("keep", "none"),
            backward=accelerator.backward,
            no_sync=lambda: dist.no_sync(accelerator, model),
        )(batch, Rollout(rationales, encoded), credit)

    report, num_training_messages = messages(train_on)
    norm = dist.optimizer_step(accelerator, model, optimizer, max_grad_norm=step["max_grad_norm"])
    weights = dist.full_weights(accelerator, model, embedder) or embedder.model.state_dict()
    return {
        "rationales": [(rationale.ids, rationale.forced, rationale.state_D) for rationale in rationales],
        "messages": (num_messages, num_training_messages),
        "report": report,
        "norm": norm,
        "weights": {key: value.clone() for key, value in weights.items()} if rank == 0 else None,
    }


def held(model) -> int:
    """Elements of weights that this process keeps between steps."""
    return sum(
        p.ds_tensor.numel()
        if hasattr(p, "ds_tensor")
        else p.to_local().numel()
        if hasattr(p, "to_local")
        else p.numel()
        for p in model.parameters()
    )


def given_to_vllm(accelerator, embedder, model) -> dict[str, torch.Tensor]:
    """The weights that every process gives its own engine, read as often as it likes."""
    with dist.whole_model(accelerator, model):
        found = {}
        for _ in range(1 + dist.rank()):
            found = {name: weight.detach().clone() for name, weight in present_weights(embedder.model)}
        return found


def adapted_for_vllm(accelerator, checkpoint: str) -> float:
    """Largest difference of merged weights, as they are given to vLLM after being shared out, from those before."""
    embedder = EmbeddingModel(load_backbone(checkpoint)).eval()
    add_adapters(embedder.model, LoraConfig(rank=2, alpha=4.0), embedder.emb_id)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad(), dist.whole(list(embedder.parameters())):
        for parameter in embedder.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        before = {name: weight.clone() for name, weight in merge(embedder.model)}
    optimizer = torch.optim.SGD((p for p in embedder.parameters() if p.requires_grad), lr=LR)
    model, _ = dist.prepare(accelerator, embedder, optimizer, 1.0)
    after = given_to_vllm(accelerator, embedder, model)
    assert after.keys() == before.keys()
    return max(float((after[name] - weight).abs().max()) for name, weight in before.items())


def run(name: str, environment: dict[str, str], checkpoint: str, folder: Path, task: dict) -> None:
    began = time.perf_counter()
    pretend(environment)
    accelerator = launch.make_accelerator(TrainConfig())
    launch.check_launch(accelerator, TrainConfig(num_processes=2))
    back_end = launch.back_end(accelerator)
    assert (back_end.name, back_end.num_processes) == (name, 2)
    embedder = EmbeddingModel(load_backbone(checkpoint)).eval()
    optimizer = torch.optim.SGD(embedder.parameters(), lr=LR)
    model, optimizer = dist.prepare(accelerator, embedder, optimizer, task["steps"][0]["max_grad_norm"])
    found = {"steps": [], "held": held(model)}
    for number, step in enumerate(task["steps"]):
        found["steps"].append(take_step(accelerator, embedder, model, optimizer, step))
        if number + 1 == AGAIN.start:
            accelerator.save_state(str(folder / f"{name}_state"))
            saved = launch.describe(accelerator)
    found["for_vllm"] = given_to_vllm(accelerator, embedder, model)
    weights = dist.full_weights(accelerator, model, embedder)
    # A copy of whole weights in every process would not fit into the memory of a machine with eight.
    assert (weights is not None) == (dist.shards_parameters(accelerator) and accelerator.is_main_process)
    if accelerator.is_main_process:
        export(embedder, folder / name, task["settings"], weights)
    accelerator.wait_for_everyone()

    # Back to the saved state.
    launch.check_resume(saved, accelerator, folder)
    accelerator.load_state(str(folder / f"{name}_state"))
    found["again"] = [
        take_step(accelerator, embedder, model, optimizer, step) for step in task["steps"][AGAIN]
    ]

    # A model without <emb> gets it, whether its matrices have a free row or must grow.
    found["grown"] = []
    for plain in task["plain"]:
        backbone = load_backbone(plain, add_emb=True)
        modules = (backbone.model.get_input_embeddings(), backbone.model.get_output_embeddings())
        with dist.whole([module.weight for module in modules]):
            rows = [module.weight.detach().clone() for module in modules]
        found["grown"].append((backbone.emb_id, rows))

    if name in task["merged"]:
        accelerator.free_memory()
        found["adapted_for_vllm"] = adapted_for_vllm(accelerator, checkpoint)

    # rge/train.py as a whole, and under DDP again from a state in between, as after a kill; workers/saves.py does that under
    # the others. The process group is kept for the next.
    accelerator.free_memory()
    out = folder / f"{name}_run"
    for _ in range(1 + (name == "DDP")):
        pretend(environment)
        train.main([*task["recipe"], f"out={out}", "train.num_processes=2"])
        if name == "DDP" and dist.rank() == 0 and not (out / "once").exists():
            (out / "joint/final").rename(out / "once")
            shutil.rmtree(out / "joint/state/step_00000003")
        dist.gather_sizes(0, torch.device("cpu"))
    found["seconds"] = time.perf_counter() - began
    torch.save(found, folder / f"{name}_{dist.rank()}.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    on_cpu.count_messages()
    # accelerate ends the group with a run; a second one would find the first one's addresses in the store, and hang.
    close, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
    folder = Path(sys.argv[2])
    task = torch.load(folder / "task.pt", weights_only=False)
    for name, environment in task["environments"].items():
        run(name, environment, sys.argv[1], folder, task)
    for out, (name, words) in task["adapted"].items():
        pretend(task["environments"][name])
        train.main([*task["recipe"], *words, f"out={folder / out}"])
    for name, words in task["kl"].items():
        pretend(task["environments"][name])
        train.main([*task["recipe"], *words, f"out={folder / name}_kl"])
    close()

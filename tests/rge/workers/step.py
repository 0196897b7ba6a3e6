"""One process of several: run training steps on this rank's batches and write report and gradients.

    accelerate launch ... step.py CHECKPOINT FOLDER

``FOLDER/cases.pt`` is a dict of cases, each with ``batches`` and ``rationales`` (one a rank), ``objective`` and
``micro_batch_size``, ``once``: whether prompts are encoded before, ``easy_share``: of the rollout, ``keep``: where activations are kept, and ``rl``: the recipe of a step of that stage, and the names of its
``sources``. Rank r writes ``FOLDER/found_r.pt``: for each
case its report and its gradients after DDP's mean.
"""

import sys
from pathlib import Path

import batch_losses
import torch

from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.rl.credit import Reinforcement
from rge.rl.reference import Reference
from rge.rollout.config import RolloutConfig
from rge.rollout.writer import Rollout, Writer, rollout_report
from rge.step.training_step import TrainingStep

checkpoint, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
accelerator = launch.make_accelerator(TrainConfig())
assert str(launch.back_end(accelerator)) == "DDP on 2 processes"
embedder = EmbeddingModel(load_backbone(checkpoint, add_emb=True)).eval()
optimizer = torch.optim.SGD(embedder.parameters(), lr=0.0)
model, optimizer = dist.prepare(accelerator, embedder, optimizer, max_grad_norm=0.0)
rank = dist.rank()
found = {}
for name, case in torch.load(folder / "cases.pt", weights_only=False).items():
    batch = case["batches"][rank]
    encoded = None
    if case["once"]:
        settings = {"micro_batch_size": case["micro_batch_size"], "keep": case["keep"]}
        settings |= {"once": True, "vllm": None, "loss": LossConfig()}
        encoded = Writer(model, embedder, RolloutConfig(), **settings)._encode(batch)
    credit = None
    if case["rl"] is not None:
        reference = None
        if case["rl"].rl.beta:
            moved = EmbeddingModel(load_backbone(checkpoint, add_emb=True)).eval().requires_grad_(False)
            for parameter in moved.parameters():
                parameter.mul_(1.02)
            reference = Reference(moved, 1.0, micro_batch_size=2)
        stage = Reinforcement(case["rl"], embedder, reference, folder)
        credit = stage.begin(batch, case["rationales"][rank], False)
    step = TrainingStep(
        model,
        embedder,
        case["objective"],
        case["micro_batch_size"],
        micro_batch_tokens=case["micro_batch_tokens"],
        keep=case["keep"],
        backward=accelerator.backward,
        no_sync=lambda: dist.no_sync(accelerator, model),
        sources=case["sources"],
    )
    with batch_losses.registered():
        report = step(batch, Rollout(case["rationales"][rank], encoded, case["easy_share"]), credit)
    gradients = {key: parameter.grad.clone() for key, parameter in embedder.named_parameters()}
    rollout = rollout_report(Rollout(case["rationales"][rank]), 1.0, embedder.device)
    norm = dist.optimizer_step(accelerator, model, optimizer, max_grad_norm=0.0)
    assert all(parameter.grad is None for parameter in embedder.parameters())
    found[name] = {"report": report, "gradients": gradients, "rollout": rollout, "norm": norm}

# A loss that is not finite on one process is an error on both.
if rank:
    with torch.no_grad():
        next(embedder.parameters()).fill_(torch.nan)
case = torch.load(folder / "cases.pt", weights_only=False)["cold start-2"]
step = TrainingStep(model, embedder, case["objective"], 2, no_sync=lambda: dist.no_sync(accelerator, model))
try:
    step(case["batches"][rank], Rollout(case["rationales"][rank]))
except FloatingPointError as error:
    found["broken"] = str(error)
torch.save(found, folder / f"found_{rank}.pt")
assert dist.full_weights(accelerator, model, embedder) is None  # DDP shares nothing out
dist.close()

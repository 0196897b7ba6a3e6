"""One process of several under DeepSpeed: one training step with plain SGD at rate one, so the update is the gradient.

    accelerate launch --use_deepspeed ... deepspeed_step.py CHECKPOINT FOLDER CASE

Reads CASE of ``FOLDER/cases.pt`` as `step.py` does; rank 0 writes report and weights to ``FOLDER/deepspeed.pt``.
"""

import sys
from pathlib import Path

import deepspeed.ops
import torch

from rge import dist
from rge.backbone import load_backbone
from rge.config import LogConfig, TrainConfig
from rge.embedder import Embedder
from rge.step import training_step

# Else DeepSpeed compiles shared-memory collectives for a minute, which gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

checkpoint, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
accelerator = dist.make_accelerator(TrainConfig(), LogConfig())
dist.check_launch(accelerator, 2, "DEEPSPEED")
embedder = Embedder(load_backbone(checkpoint)).eval()
accelerator.state.deepspeed_plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
model, optimizer = dist.prepare(
    accelerator, embedder, torch.optim.SGD(embedder.parameters(), lr=1.0), max_grad_norm=0.0
)
case, rank = torch.load(folder / "cases.pt", weights_only=False)[name], dist.rank()
report = training_step(
    model,
    embedder,
    case["batches"][rank],
    case["objective"],
    rationales=case["rationales"][rank],
    micro_batch_size=case["micro_batch_size"],
    backward=accelerator.backward,
    no_sync=lambda: dist.no_sync(accelerator, model),
)
norm = dist.optimizer_step(accelerator, model, optimizer, max_grad_norm=0.0)
weights = dist.full_weights(accelerator, model, embedder)
if rank == 0:
    torch.save({"report": report, "weights": weights, "norm": norm}, folder / "deepspeed.pt")
dist.close()

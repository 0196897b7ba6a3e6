"""One process of several: gather uneven rows with gradient and write what this rank sees.

    torchrun ... gather.py FOLDER

Rank r has r + 2 rows of ``FOLDER/rows.pt`` and minimises its own share of sum((all rows @ all rows.T) * weights).
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from rge.distributed import collectives as dist
from rge.optim.muon import orthogonal_on_all_ranks

folder = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
rows, weights = torch.load(folder / "rows.pt")
rank, world = dist.rank(), dist.world_size()
start = sum(other + 2 for other in range(rank))
own = rows[start : start + rank + 2].clone().requires_grad_()
sizes = dist.gather_sizes(len(own), own.device)
gathered = dist.gather_rows(own, sizes)
(own @ gathered.T * weights[start : start + rank + 2]).sum().backward()
ids = dist.gather_rows(torch.arange(len(own)) + 10 * rank, sizes)
torch.save(
    {
        "sizes": sizes,
        "rows": gathered.detach(),
        "gradient": own.grad,
        "ids": ids,
        "world": world,
        "sum": dist.sum_over_ranks([rank + 1.0, 1e-12], own.device),
        "orthogonal": orthogonal_on_all_ranks([rows.T.float(), weights.float(), rows[:2].float()]),
        "detached": dist.gather_rows(own.detach(), sizes).requires_grad,
    },
    folder / f"seen_{rank}.pt",
)
dist.close()

"""One process of two: reward its own rationales by a judge, and write the values and how many processes called.

    torchrun ... judge.py FOLDER URL

Rank r has r + 1 queries of two rationales each; the first query is the same on both.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from rge.distributed import collectives as dist
from rge.rl import judge
from rge.rl.rewards import Rollouts

folder, url = Path(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(cpu=True)
queries = dist.rank() + 1
none = torch.zeros(queries, 2, dtype=torch.bool)
group = Rollouts(
    state_BKD=torch.zeros(queries, 2, 4), candidate_VCD=torch.zeros(1, 3, 4), seen_as_B=torch.zeros(queries), right_BC=none, labelled_BC=none,
    ids=[[(8,), (3 + query,)] for query in range(queries)], oracle_ids=[[7]] * queries, query_ids=[[query] for query in range(queries)],
    forced_BK=none, direct_BK=none, temperature=0.1, cap=6, decode=lambda ids: " ".join(map(str, ids)), folder=folder,
)  # fmt: skip
marks = judge.judge_reward(group, {"name": "m", "base_url": url, "max_retries": 0, "reasks": 0})
torch.save((marks, judge._caller.cache_info().currsize), folder / f"marks_{dist.rank()}.pt")
dist.close()

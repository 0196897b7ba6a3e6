"""The CPU thread policy of every command and of `rge.embedder.Embedder`.

Waiting threads sleep instead of spinning. GNU OpenMP spins by default, which is fastest on an idle machine and disastrous on
a busy one: a spinning thread occupies the core that the awaited thread needs, and a query took many times as long
(docs/use.md). The number of threads is limited to the container's CPU quota, which torch ignores. Neither affects the threads
of training, nor any result. The user's environment variables take precedence.
"""

import math
import os
import sys
import warnings
from pathlib import Path

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def sleep_while_waiting() -> None:
    """Set the policy that OpenMP reads when torch is imported; no effect afterwards."""
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def limit_threads() -> None:
    """Limit torch's threads to the container's CPU quota; warn if they spin on busy cores."""
    import torch

    if not any(name in os.environ for name in _WAITING) and os.getloadavg()[0] > (os.cpu_count() or 1):
        warnings.warn(
            "the cores are busy, and torch's threads spin while they wait, since torch was imported before rge: embedding may "
            "take many times as long. Import rge first, or set OMP_WAIT_POLICY=PASSIVE",
            stacklevel=2,
        )
    quota, is_set = cpu_quota(), any(name in os.environ for name in _COUNTS)
    if quota is not None and quota < torch.get_num_threads() and not is_set:
        torch.set_num_threads(quota)


def cpu_quota() -> int | None:
    """CPUs of the container's quota (cgroup v2), rounded up, if there is one."""
    try:
        share, period = _QUOTA.read_text().split()
        return None if share == "max" else max(1, math.ceil(int(share) / int(period)))
    except (OSError, ValueError):
        return None

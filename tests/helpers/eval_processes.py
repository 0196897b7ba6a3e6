"""`rge eval` as one process, or as two under `accelerate launch`."""

import os
import subprocess
import sys

from paths import ROOT
from ports import free_port

LAUNCH = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
]


def start(*words: str, launch: bool, name: str = "run") -> subprocess.CompletedProcess[str]:
    more = ["report=false"] if name == "run" else []
    launcher = [*LAUNCH, "--main_process_port", str(free_port())] if launch else []
    command = [sys.executable, *launcher, "-m", "rge", "eval", name, *more, *words]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)

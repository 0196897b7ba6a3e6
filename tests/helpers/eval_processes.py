"""`rge eval` as one process, or as two that work together."""

import os
import subprocess
import sys

import forked
from paths import ROOT
from ports import free_port


def start(*words: str, pair: bool, name: str = "run") -> subprocess.CompletedProcess[str]:
    """One process, or two as a launcher would start them."""
    run = forked.run_pair if pair else forked.run
    return run("-m", "rge", "eval", name, *_without_report(name), *words, PYTHONPATH=str(ROOT))


def launch(*words: str, name: str = "run") -> subprocess.CompletedProcess[str]:
    """Two processes as users start them, from nothing."""
    port = ["--main_process_port", str(free_port())]
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *port]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *launcher, "-m", "rge", "eval", name, *_without_report(name), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)


def _without_report(name: str) -> list[str]:
    return ["report=false"] if name == "run" else []

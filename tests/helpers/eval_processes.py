"""`rge eval` as one process, or as two that work together."""

import subprocess

import forked
from paths import ROOT


def start(*words: str, pair: bool, name: str = "run") -> subprocess.CompletedProcess[str]:
    """One process, or two as a launcher would start them."""
    run = forked.run_pair if pair else forked.run
    return run("-m", "rge", "eval", name, *_without_report(name), *words, PYTHONPATH=str(ROOT))


def _without_report(name: str) -> list[str]:
    return ["report=false"] if name == "run" else []

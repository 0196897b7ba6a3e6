"""Settings of every test process; what tests share is in `helpers/`."""

import gc
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RGE_CACHE"] = (
    "/dev/null/nowhere"  # nothing is remembered from test to test, or in a user's folder
)

KINDS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""With all three set to avx2, a CPU that has more comes close to one that has not."""

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # in pytest's importlib mode


def pytest_configure(config):
    """Load what tests share where tests run: with -n that is not this process, which need not import torch to wait."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until all is imported: an eighth of that time
        import rge  # noqa: F401 - makes torchvision importable before transformers is

        config.pluginmanager.import_plugin("shared")


def pytest_report_header():
    """Which kernels compute here: what is trained differs in its last bits from kind to kind, and with that in its figures."""
    import torch

    asked = [f"{name}={os.environ[name]}" for name in KINDS if name in os.environ]
    return f"cpu: {' '.join([torch.backends.cpu.get_cpu_capability(), *asked])}"


def pytest_collection_modifyitems(items):
    """Files with many slow tests first: with -n, no process is left with a long file when the others are done."""
    slow: Counter[Path] = Counter()
    for item in items:
        if marker := item.get_closest_marker("slow"):
            slow[item.path] += marker.args[0] if marker.args else 1
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish():
    """What is imported by now stays: leave it out of every later garbage collection, a tenth of the tests' CPU time."""
    gc.collect()
    gc.freeze()
    gc.enable()

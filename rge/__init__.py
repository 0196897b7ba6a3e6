"""Train reasoning-guided multimodal embedders (RGE, arXiv:2511.16150)."""

from rge.common import torchvision_cpu
from rge.distributed import cpu_threads

__version__ = "1.0.0"

cpu_threads.sleep_while_waiting()
torchvision_cpu.before_torchvision()


def __getattr__(name: str):
    """Import `Embedder` on first use."""
    if name == "Embedder":
        from rge.embedder import Embedder

        return Embedder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

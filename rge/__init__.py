"""Train reasoning-guided multimodal embedders (RGE, arXiv:2511.16150)."""

from rge.common import torchvision_cpu

__version__ = "0.2.0"

torchvision_cpu.before_torchvision()


def __getattr__(name: str):
    """`Embedder`, loaded when it is first asked for: it brings transformers with it."""
    if name == "Embedder":
        from rge.embedder import Embedder

        return Embedder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

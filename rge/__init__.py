"""Train reasoning-guided multimodal embedders (RGE, arXiv:2511.16150)."""

from rge.common import torchvision_cpu

__version__ = "0.1.0"

torchvision_cpu.before_torchvision()

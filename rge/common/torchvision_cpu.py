"""Make PyPI's torchvision importable beside the CPU build of torch.

PyPI's torchvision links its native operators against CUDA. Beside ``torch+cpu`` they cannot load, and
``import torchvision`` stops at the first operator whose schema it looks up, taking the Qwen image processors,
``qwen_vl_utils`` and ``peft`` with it. Declaring the two schemas that are looked up at import time is enough: rge
uses torchvision's pure-Python transforms only and never calls those operators.
"""

import importlib.abc
import sys
from typing import Any

_library: Any = None


class _Watch(importlib.abc.MetaPathFinder):
    """Is asked for every module that is about to be imported, finds none, and acts when it is torchvision's turn."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision" and not _is_being_imported("torch"):
            sys.meta_path.remove(self)
            make_importable()


def watch_for_it() -> None:
    """Call `make_importable` right before torchvision is imported, so that nobody waits for torch who needs neither."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _is_being_imported(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def make_importable() -> bool:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` where a CPU build of torch lacks them.

    Returns:
        True if the schemas were declared by this call, False where nothing had to be done (a CUDA build of torch,
        a torchvision that loads by itself, or a second call).
    """
    global _library
    import torch  # takes seconds, and `rge --help` does without

    if "+cpu" not in torch.__version__:
        return False
    try:
        torch._C._get_schema("torchvision::nms", "")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return True
    return False

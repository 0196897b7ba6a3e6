"""Make PyPI's torchvision importable beside the CPU build of torch.

PyPI's torchvision links its native operators against CUDA. Beside ``torch+cpu`` they cannot load, and
``import torchvision`` stops at the first operator whose schema it looks up, taking the Qwen image processors,
``qwen_vl_utils`` and ``peft`` with it. Declaring the two schemas that are looked up at import time is enough: rge
uses torchvision's pure-Python transforms only and never calls those operators.

It is done when torchvision is first looked for, so that what needs no model (calls, data preparation, metrics) does not
wait for torch: four seconds of processor time and 300 MB a process.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_library: Any = None


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Called by Python for every module that is not loaded yet; finds none itself."""
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            make_importable()


def before_torchvision() -> None:
    """Have `make_importable` called just before torchvision is imported or looked for."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())


def make_importable() -> bool:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` where a CPU build of torch lacks them.

    Returns:
        True if the schemas were declared by this call, False where nothing had to be done (a CUDA build of torch,
        a torchvision that loads by itself, or a second call).
    """
    global _library
    import torch

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

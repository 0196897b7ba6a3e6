"""Make PyPI's torchvision importable beside the CPU build of torch.

PyPI's torchvision links its native operators against CUDA. Beside ``torch+cpu`` they cannot load, and
``import torchvision`` stops at the first operator whose schema it looks up, taking the Qwen image processors,
``qwen_vl_utils`` and ``peft`` with it. Declaring the two schemas that are looked up at import time is enough: rge
uses torchvision's pure-Python transforms only and never calls those operators.
"""

import torch

_library: torch.library.Library | None = None


def make_importable() -> bool:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` where a CPU build of torch lacks them.

    Returns:
        True if the schemas were declared by this call, False where nothing had to be done (a CUDA build of torch,
        a torchvision that loads by itself, or a second call).
    """
    global _library
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

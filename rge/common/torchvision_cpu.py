"""Make PyPI's torchvision importable beside the CPU build of torch.

PyPI's torchvision links its native operators against CUDA. Beside ``torch+cpu`` they cannot load, and
``import torchvision`` stops at the first operator whose schema it looks up, taking the Qwen image processors,
``qwen_vl_utils`` and ``peft`` with it. Declaring the two schemas that are looked up at import time is enough: rge
uses torchvision's pure-Python transforms only and never calls those operators.

It is done when torchvision is first looked for, so that code without a model (calls, data preparation, metrics) does not
load torch: four seconds of processor time and 300 MB a process.

``import rge`` does it. A checkpoint has to load by plain transformers too, in a program that never heard of rge:
``python -m rge.common.torchvision_cpu``, which ``scripts/setup.sh`` calls, puts a hook into this interpreter's
site-packages that does it where torchvision is imported, and nowhere else. It writes nothing where torchvision loads by
itself; delete the two files to be rid of it.
"""

import importlib.machinery
import sys
from typing import Any

HOOK = "rge_torchvision_hook"

_library: Any = None


class _Finder:
    """Finds torchvision as ever, and calls `make_importable` before it is executed."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def after_schemas(module: Any) -> None:
            make_importable()
            execute(module)

        spec.loader.exec_module = after_schemas  # type: ignore[method-assign]
        return spec


def before_torchvision() -> None:
    """Have `make_importable` called just before torchvision is executed."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def make_importable() -> bool:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` where a CPU build of torch lacks them.

    Returns:
        True if the schemas were declared by this call, False where nothing had to be done (a CUDA build of torch,
        a torchvision that loads without help, or a second call).
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


def write_hook(folder: Any) -> None:
    """Put the hook, which is this module, into a site-packages folder, which Python reads at its next start."""
    with open(__file__, encoding="utf-8") as source:
        (folder / f"{HOOK}.py").write_text(source.read(), encoding="utf-8")
    (folder / f"{HOOK}.pth").write_text(f"import {HOOK}; {HOOK}.before_torchvision()\n", encoding="utf-8")


def main() -> int:
    """Write the hook where a fresh interpreter cannot import torchvision; 0 if it can in the end."""
    import logging  # of the command alone: the hook runs whenever Python starts
    import subprocess
    import sysconfig
    from pathlib import Path

    plain = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(plain, capture_output=True, check=False).returncode == 0:
        return 0
    folder = Path(sysconfig.get_path("purelib"))
    try:
        write_hook(folder)
    except OSError as error:
        logging.error("%s cannot be written (%s): import rge before transformers", folder, error.strerror)
        return 1
    return subprocess.run(plain, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Make PyPI's torchvision importable with the CPU build of torch.

PyPI's torchvision links its native operators against CUDA. With ``torch+cpu`` they cannot be loaded, and ``import torchvision`` fails
at the first operator whose schema it looks up, and with it the Qwen image processors, ``qwen_vl_utils`` and ``peft``. Declaring
the two schemas that are looked up at import time is enough, since rge only uses torchvision's pure-Python transforms.

This happens when torchvision is imported, so that code without a model (calls, data preparation, metrics) does not load torch: four
seconds of CPU time and 300 MB per process.

``import rge`` installs the import hook. For plain transformers without rge, ``python -m rge.common.torchvision_cpu`` (called by
``scripts/setup.sh``) puts the hook into the interpreter's site-packages, unless torchvision loads without it; delete the two files
to remove it.
"""

import importlib.machinery
import sys
from typing import Any

HOOK = "rge_torchvision_hook"

_library: Any = None


class _Finder:
    """Finds torchvision, and calls `make_importable` before it is executed."""

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
    """Install the import hook."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def make_importable() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` if a CPU build of torch lacks them."""
    global _library
    import torch

    if "+cpu" not in torch.__version__:
        return
    try:
        torch._C._get_schema("torchvision::nms", "")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def write_hook(folder: Any) -> None:
    """Copy this module into a site-packages folder, with a ``.pth`` file that runs it when Python starts."""
    with open(__file__, encoding="utf-8") as source:
        (folder / f"{HOOK}.py").write_text(source.read(), encoding="utf-8")
    (folder / f"{HOOK}.pth").write_text(f"import {HOOK}; {HOOK}.before_torchvision()\n", encoding="utf-8")


def main() -> int:
    """Write the hook if a fresh interpreter cannot import torchvision; 0 if it can afterwards."""
    import logging  # here, since the hook runs whenever Python starts
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

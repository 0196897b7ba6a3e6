"""A checkpoint loads by plain transformers in a program that never heard of rge."""

import subprocess
import sys

import pytest

from rge.common.torchvision_cpu import write_hook

PLAIN = """
import site, sys
site.addsitedir(sys.argv[1])
assert not {"torch", "rge"} & set(sys.modules), "the hook must cost a program nothing that does not import torchvision"
import importlib.util
assert importlib.util.find_spec("torchvision").origin
assert "torch" not in sys.modules, "looking for torchvision must not import it"
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained(sys.argv[2])
model = AutoModelForImageTextToText.from_pretrained(sys.argv[2])
import torchvision
print(type(model).__name__, processor.image_processor is not None, torchvision.transforms.v2 is not None)
"""


@pytest.mark.slow
def test_plain_transformers_loads_a_checkpoint(lively_path, tmp_path):
    folder = tmp_path / "site packages"
    folder.mkdir()
    write_hook(folder)
    words = [sys.executable, "-W", "ignore", "-c", PLAIN, str(folder), str(lively_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Qwen2_5_VLForConditionalGeneration", "True", "True"]

"""scripts/ship_demo.py: what is shipped of a trained checkpoint."""

import importlib
import re
import shutil

import pytest
from faults import error_about
from paths import ROOT
from safetensors.torch import load_file, save_file

from rge.checkpoints.manifest import DONE, write_manifest
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("ship_demo")


@pytest.fixture
def trained(tmp_path):
    """The shipped checkpoint as training leaves it: in float32, with a manifest."""
    folder = tmp_path / "final"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.float() for name, weight in weights.items()}, folder / "model.safetensors")
    write_manifest(folder, {})
    return folder


def test_the_shipped_copy_is_in_bfloat16_and_keeps_no_manifest_of_other_files(script, trained, tmp_path):
    size = script.ship(trained, tmp_path / "demo_checkpoint")
    made = {path.name: path.read_bytes() for path in (tmp_path / "demo_checkpoint").iterdir()}
    assert size == sum(map(len, made.values()))
    assert DONE not in made
    shipped = {path.name: path.read_bytes() for path in DEMO_CHECKPOINT.iterdir()}
    # `rge verify` has written its own line into the shipped card.
    cards = [
        re.sub(rb"^(Not verified yet|Verified with).*$", b"", one.pop("README.md"), flags=re.M)
        for one in (made, shipped)
    ]
    assert cards[0] == cards[1]
    assert made == shipped


def test_a_model_too_large_to_ship_replaces_nothing(script, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MOST_BYTES", 1_000_000)
    (tmp_path / "demo_checkpoint").mkdir()
    with error_about(UserError, trained):
        script.ship(trained, tmp_path / "demo_checkpoint")
    assert [path.name for path in tmp_path.iterdir() if path != trained] == ["demo_checkpoint"]

"""A small model is made once, from recorded inputs, and as by an uninterrupted run."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType
from family_models import TEXT, VISION
from faults import error_about
from paths import ROOT

from rge.checkpoints.settings import CheckpointError
from rge.common.errors import UserError
from rge.distributed.collectives import LaunchError
from rge.small_models import make, naming
from rge.small_models.__main__ import main, read_options
from rge.small_models.config import SmallModel

NAMES = {"steps": 4, "batch_size": 4, "say_from": 0.5, "save_every": 1}
OTHERS = {
    "naming": None, "vocab_size": 280, "text": TEXT | {"intermediate_size": 32},
    "vision": VISION | {"intermediate_size": 32}, "min_pixels": 1568, "max_pixels": 10_000, "seed": 3, "naming.steps": 3, "naming.batch_size": 3,
    "naming.lr": 0.1, "naming.style": 1.0, "naming.say_from": 0.0,
}  # fmt: skip
"""Other values than the fixture's, each of which must make another model."""


class Killed(Exception):
    """What ends a stage without notice."""


@pytest.fixture(scope="module")
def options_of(tmp_path_factory):
    """Options of a tiny model that learns eight pictures' names in four steps."""
    folder = tmp_path_factory.mktemp("small")
    source = ROOT / "data_prep" / "demo" / "data" / "train"
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    lines = (source / "naming.jsonl").read_text().splitlines()[:8]
    (folder / "some.jsonl").write_text("\n".join(lines))
    records = folder / "some.jsonl"
    given = {"texts": [str(records)], "vocab_size": 320, "text": TEXT, "vision": VISION, "min_pixels": 784}
    given |= {"max_pixels": 7056, "naming": {"records": str(records), **NAMES}}
    (folder / "tiny.yaml").write_text(json.dumps(given))

    def read(out: Path, **changed: object) -> SmallModel:
        words = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
        return read_options([f"recipe={folder / 'tiny.yaml'}", f"out={out}", *words])

    return read


@pytest.fixture
def made(options_of, monkeypatch):
    """Make a model in a folder; returns its options."""
    monkeypatch.setattr(make, "stop_after_this_step_at_signals", lambda: None)

    def run(out: Path, **changed: object) -> SmallModel:
        options = options_of(out, **changed)
        make.make(options, Accelerator(cpu=True))
        return options

    return run


def content(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name not in ("eyes.json", "identity.json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.mark.slow
def test_every_value_makes_another_model(made, tmp_path):
    """Naming takes most of the time, so what is not of it is tried without."""
    made(tmp_path / "first")
    contents = {"first": content(tmp_path / "first")}
    for name, value in OTHERS.items():
        made(tmp_path / name, **({} if name.startswith("naming.") else {"naming": None}) | {name: value})
        assert content(tmp_path / name) not in contents.values(), name
        contents[name] = content(tmp_path / name)


@pytest.mark.slow
def test_one_that_was_killed_while_naming_ends_as_a_whole_one(made, options_of, tmp_path, monkeypatch):
    original, shown = naming.augment, []

    def augment(picture, generator):
        shown.append(picture)
        if len(shown) == 4:
            raise Killed
        return original(picture, generator)

    made(tmp_path / "whole")
    monkeypatch.setattr(naming, "augment", augment)
    with pytest.raises(Killed):
        made(tmp_path / "killed")
    assert not (tmp_path / "killed").exists()
    with error_about(CheckpointError, "step_00000003", "model.naming.lr"):
        make.check_same_inputs(options_of(tmp_path / "killed", **{"naming.lr": 0.5}))
    made(tmp_path / "killed")
    assert len(shown) == 5
    for name in ("model.safetensors", "tokenizer.json", "eyes.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Once the model is written, only the log is left.
    assert [path.name for path in (tmp_path / "killed_naming").iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_finished_one_is_kept_and_one_of_other_inputs_refused(made, tmp_path, capsys):
    out = tmp_path / "model"
    made(out, naming=None)
    before = content(out)
    made(out, naming=None)
    assert "is finished" in capsys.readouterr().out
    for key, value in (("seed", 5), ("text.hidden_size", 48)):
        with error_about(CheckpointError, out, f"model.{key}"):
            made(out, naming=None, **{key: value})
    assert content(out) == before
    (out / "identity.json").unlink()
    with error_about(CheckpointError, out, "unknown"):
        made(out, naming=None)


@pytest.mark.slow
def test_pictures_are_scaled_to_whole_placeholders(made, monkeypatch, tmp_path):
    """As in training, whose processor rounds the sides, too; 100 is no multiple of 28."""
    original, sides = naming.augment, []

    def augment(picture, generator):
        sides.append(picture.shape[-2:])
        return original(picture, generator)

    monkeypatch.setattr(naming, "augment", augment)
    made(tmp_path / "odd", max_pixels=10_000, **{"naming.steps": 1})
    assert sides == [(84, 84)]


@pytest.mark.parametrize(
    ("changed", "about"),
    [
        ({"text.num_hiden_layers": 2}, ("unknown", "text.num_hiden_layers")),
        ({"vision.depht": 2}, ("unknown", "vision.depht")),
        ({"text.model_type": "llama"}, ("choice", "text.model_type", ("smollm2",))),
        ({"vision.model_type": "siglip"}, ("choice", "vision.model_type", ("efficientnet_lite0",))),
        ({"text.hidden_size": "many"}, "text"),
        ({"text.num_hidden_layers": 0}, "text.num_hidden_layers"),
        ({"text.hidden_size": 33}, "text"),
        ({"min_pixels": 9000}, "min_pixels"),
        ({"texts": ["gone.jsonl"]}, "gone.jsonl"),
    ],
)
def test_what_makes_no_model_is_refused(made, tmp_path, changed, about):
    with error_about(UserError, about):
        made(tmp_path / "model", **changed)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("kind", "processes", "error", "said"),
    [
        (DistributedType.DEEPSPEED, 2, LaunchError, "zero2"),
        (DistributedType.FSDP, 2, LaunchError, "fsdp2"),
        (DistributedType.MULTI_CPU, 5, UserError, "naming.batch_size"),
    ],
)
def test_launches_that_cannot_make_one(options_of, tmp_path, kind, processes, error, said):
    running = SimpleNamespace(
        distributed_type=kind, num_processes=processes, is_fsdp2=True,
        deepspeed_plugin=SimpleNamespace(zero_stage=2), state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2)),
    )  # fmt: skip
    with error_about(error, said):
        make.make(options_of(tmp_path / "model"), running)
    assert not list(tmp_path.iterdir())


def test_a_mistyped_key_is_answered_first(tmp_path):
    with error_about(UserError, ("unknown", "naming.stepps", ("naming.steps",))):
        main(["recipe=demo", "naming.stepps=3"])

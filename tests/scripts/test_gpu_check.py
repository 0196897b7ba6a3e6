"""scripts/gpu_check.py: a rehearsal on the CPU, and its kernel checks on a GPU that is not there."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from faults import error_about
from paths import ROOT

from rge.common.errors import UserError
from rge.common.files import read_json

sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture
def gpu_check(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow(12)
def test_a_rehearsal(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([f"out={tmp_path}", "rehearse=true", "steps=2"]) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    states = {result["name"]: result["state"] for result in found["results"]}
    assert states == {
        "kernels": "not run", "form": "passed", "kept": "passed", "fused": "not run", "rollout": "passed", "against": "passed",
        "training": "passed", "back_ends": "not run",
    }  # fmt: skip
    assert found["machine"]["rehearsal"]
    figures = {result["name"]: result["figures"] for result in found["results"]}
    assert figures["form"]["cosine of the gradients"] > 1 - 1e-6
    assert max(figures["kept"][f"difference of the gradient, {keep}"] for keep in ("device", "host")) < 1e-5
    assert figures["rollout"]["equal"] == figures["rollout"]["rows"] == 3 * 12
    against = figures["against"]
    assert min(value for name, value in against.items() if name.startswith("cosine")) > 1 - 1e-6
    assert against["share of equal rationales, gradient caching, stock layers"] == 1
    training = figures["training"]
    assert training["steps"] == 2
    assert training["TFLOP/s"] == pytest.approx(
        training["TFLOP of a step, planned"] / training["s, a step (median of the others)"]
    )
    assert (
        0
        < training["GiB, planned"]
        == pytest.approx(sum(training["GiB, planned by kind"].values()), abs=0.01)
    )
    assert "utilisation" not in training  # of what peak?
    shown = (tmp_path / "gpu_check.md").read_text()
    assert "No figure here is a GPU's" in shown
    for name, state in states.items():
        assert f"\n## {name}: {state}\n" in shown
    assert "need GPUs, here are none" in shown


def test_what_fails_is_in_the_report_and_ends_no_other_check(gpu_check, tmp_path, monkeypatch):
    def broken(machine):
        raise RuntimeError("the device is on fire")

    monkeypatch.setitem(gpu_check.CHECKS, "form", broken)
    assert gpu_check.main([f"out={tmp_path}", "rehearse=true", "checks=form,back_ends"]) == 1
    form, back_ends = json.loads((tmp_path / "gpu_check.json").read_text())["results"]
    assert (form["state"], form["says"]) == ("failed", "RuntimeError: the device is on fire")
    assert "on fire" in form["figures"]["trace"]
    assert back_ends["state"] == "not run"
    assert "RuntimeError: the device is on fire" in (tmp_path / "gpu_check.md").read_text()


def test_every_back_end_starts_from_a_backbone_that_exists(gpu_check, tmp_path):
    words = gpu_check.launch_command("zero3", 1, tmp_path)
    (start,) = (word.removeprefix("init=") for word in words if word.startswith("init="))
    assert read_json(Path(start) / "config.json")  # ZeRO-3 and FSDP2 build none


def test_a_command_that_fails_or_hangs_fails_its_check(gpu_check, monkeypatch):
    assert gpu_check._run([sys.executable, "-c", "print('fine')"]) is None
    assert "no such thing" in gpu_check._run([sys.executable, "-c", "raise SystemExit('no such thing')"])
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.5)
    assert gpu_check._run([sys.executable, "-c", "import time; time.sleep(30)"]) == "not done after 0 s"


def test_errors(gpu_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with error_about(UserError, "rehearse"):
        gpu_check.main([])
    with error_about(UserError, ("range", "steps")):
        gpu_check.main(["rehearse=true", "steps=0"])
    with error_about(UserError, ("choice", "checks")):
        gpu_check.main(["rehearse=true", "checks=kernel"])


def test_kernels_on_a_gpu_that_is_not_there(gpu_check, monkeypatch):
    """The check itself, with attention by its definition in the kernel's place; and with one that is wrong."""
    import fake_gpu

    machine = gpu_check.Machine(gpu_check.Options(rehearse=True))
    with error_about(gpu_check.NotRun, "CPU"):
        gpu_check.check_kernels(machine)
    machine.device = fake_gpu.DEVICE
    monkeypatch.setattr(
        gpu_check,
        "KERNEL_SHAPES",
        {
            "prompts": (4, 2, 16, [40, 9, 1], None, True),
            "branches": (4, 2, 16, [9, 2], [30, 11], True),
            "pictures": (2, 2, 16, [64, 16], None, False),
        },
    )
    with fake_gpu.FakeGpu():
        figures = gpu_check.check_kernels(machine)
        assert set(figures) == {"prompts", "branches", "pictures"}
        assert max(figures.values()) < 0.01
        whole = fake_gpu._attention
        monkeypatch.setattr(
            fake_gpu, "_attention", lambda *a, **k: (whole(*a, **k)[0] * 1.1, *whole(*a, **k)[1:])
        )
        with pytest.raises(gpu_check.varlen.KernelError) as caught:
            gpu_check.check_kernels(machine)
        assert "1.0e-01" in caught.value.reason

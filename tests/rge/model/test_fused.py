"""Layers as a GPU computes them, on the stand-in for one: padded products, and a library's kernels for large inputs only."""

import copy
import importlib
import pickle
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import FakeGpu, OnGpu
from family_models import every_family
from faults import error_about
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, Qwen2_5_VLRMSNorm

from rge.common.errors import UserError
from rge.model import fused, vision_tower
from rge.model.families import family_of
from rge.model.varlen import KernelError


def mlp(inner: int, bias: bool = True) -> Qwen2_5_VLMLP:
    torch.manual_seed(0)
    sizes = SimpleNamespace(hidden_size=16, intermediate_size=inner, hidden_act="silu")
    return Qwen2_5_VLMLP(sizes, bias=bias).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [20, 24])
def test_products_of_an_awkward_size_are_padded_and_equal(inner, bias):
    plain, x = mlp(inner, bias), torch.randn(5, 16, dtype=torch.float64)
    padded = copy.deepcopy(plain)
    fused.speed_up(padded, False)
    (expected := plain(x)).square().sum().backward()
    widths = set()
    with FakeGpu() as gpu:
        gpu.move(padded)
        padded.act_fn.register_forward_hook(lambda _, __, out: widths.add(out.shape[-1]))
        (found := padded(OnGpu(x))).square().sum().backward()
        torch.testing.assert_close(found.cpu(), expected)
        for name, parameter in padded.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), plain.get_parameter(name).grad)
    assert widths == {64 if inner == 20 else 24}


def test_adapters_see_their_own_layer_and_a_cpu_pads_nothing():
    """What is not a plain linear layer computes more than its weight says."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    layer = mlp(20)
    fused.speed_up(layer, False)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), mlp(20)(x))
    layer.up_proj.__class__ = Adapted
    expected = layer(x)
    with FakeGpu() as gpu:
        gpu.move(layer)
        torch.testing.assert_close(layer(OnGpu(x)).cpu(), expected)


@pytest.fixture
def liger(monkeypatch):
    """Stands in for liger-kernel, whose kernels run on a GPU only: plain formulas that are counted."""
    calls = []

    def counted(name, formula):
        def apply(*args):
            calls.append(name)
            return formula(*args)

        return apply

    def norm(x, weight, eps, offset, casting, in_place):
        assert (offset, casting, in_place) == (0.0, "llama", False)
        return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    modules = {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": SimpleNamespace(apply=counted("norm", norm))},
        "liger_kernel.ops.swiglu": {
            "LigerSiLUMulFunction": SimpleNamespace(apply=counted("gated", lambda a, b: F.silu(a) * b))
        },
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.rope": {
            "liger_rotary_pos_emb_vision": counted("rotary", fused.apply_rotary_pos_emb_vision)
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fused, "_verified", set())
    return calls


def norm(dtype=torch.bfloat16) -> Qwen2_5_VLRMSNorm:
    layer = Qwen2_5_VLRMSNorm(16).to(dtype)
    fused.speed_up(layer, True)
    replaced = torch.nn.ModuleList([layer])
    fused.speed_up(replaced, True)
    return replaced[0]


def test_large_inputs_get_the_kernel_and_its_first_call_is_checked(liger, monkeypatch, caplog):
    monkeypatch.setattr(fused, "LEAST", 64)
    layer = norm()
    with FakeGpu() as gpu:
        gpu.move(layer)
        layer(OnGpu(torch.randn(2, 16).bfloat16()))
        assert liger == []  # small, as a rollout's tokens
        large = torch.randn(2, 4, 16).bfloat16()
        found = layer(OnGpu(large)).cpu()
        assert liger == ["norm", "norm"]  # once more, to be compared
        layer(OnGpu(large))
        assert liger == ["norm"] * 3
        layer(OnGpu(large.float()))  # a result of float32, so left to transformers
        assert liger == ["norm"] * 3
    torch.testing.assert_close(found, Qwen2_5_VLRMSNorm(16).bfloat16()(large))
    assert "model.fused_kernels: a norm checked against plain code" in caplog.text
    assert "gradient of weight" in caplog.text


def test_a_wrong_kernel_ends_the_run(liger, monkeypatch):
    monkeypatch.setattr(fused, "LEAST", 0)
    wrong = SimpleNamespace(apply=lambda x, weight, *_: x * weight)
    monkeypatch.setattr(sys.modules["liger_kernel.ops.rms_norm"], "LigerRMSNormFunction", wrong)
    layer = norm()
    with FakeGpu() as gpu:
        gpu.move(layer)
        with error_about(KernelError, "model.fused_kernels"):
            layer(OnGpu(5 * torch.randn(8, 16).bfloat16()))


@every_family
def test_a_family_s_layers_use_the_kernels_until_they_are_taken_back(lively64, liger, monkeypatch):
    """Norms and gated activations of the text model; Gemma 3's are of another kind and stay transformers' own."""
    model = copy.deepcopy(lively64.model)
    monkeypatch.setattr(fused, "applies", lambda states: True)
    vision_tower.speed_up(model, "auto", fused_kernels=True)
    text = family_of(model).decoder(model)
    known = lively64.model.config.model_type != "gemma3"
    states = torch.randn(1, 6, text.config.hidden_size, dtype=torch.float64)
    for name, layer in (("gated", text.layers[0].mlp), ("norm", text.norm)):
        path = next(path for path, module in model.named_modules() if module is layer)
        del liger[:]
        torch.testing.assert_close(layer(states), lively64.model.get_submodule(path)(states))
        assert (name in liger) == known
    fused.undo(model)
    del liger[:]
    text.norm(text.layers[0].mlp(states))
    assert liger == []
    assert not any(type(module).__module__ == "rge.model.fused" for module in model.modules())


def test_pictures_rotate_by_the_kernel(lively_path, backbone_of, liger, monkeypatch):
    """A whole forward of the vision tower, as from transformers' own code."""
    model = backbone_of(lively_path, dtype="float64").model
    tower, grid = family_of(model).vision(model)[0], torch.tensor([[1, 4, 4], [1, 4, 8]])
    patches = torch.randn(48, 1176, dtype=torch.float64)
    with torch.no_grad():
        expected = tower(patches, grid_thw=grid).pooler_output
        vision_tower.speed_up(model, "sdpa", fused_kernels=True)
        monkeypatch.setattr(fused, "applies", lambda states: True)
        found = tower(patches, grid_thw=grid).pooler_output
    assert {"rotary", "norm", "gated"} <= set(liger)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_writes_over_its_inputs_is_checked_on_copies(liger, monkeypatch):
    """Liger's gated activation stores gradients where its inputs were."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return F.silu(a) * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            with torch.enable_grad():
                given = [part.detach().clone().requires_grad_() for part in (a, b)]
                found = torch.autograd.grad(F.silu(given[0]) * given[1], given, grad)
            for part, gradient in zip((a, b), found, strict=True):
                part.copy_(gradient)
            return found

    monkeypatch.setattr(sys.modules["liger_kernel.ops.swiglu"], "LigerSiLUMulFunction", InPlace)
    monkeypatch.setattr(fused, "applies", lambda states: True)
    layer, x = mlp(24), torch.randn(5, 16, dtype=torch.float64)
    expected = mlp(24)(x)
    fused.speed_up(layer, True)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        fused._verified.clear()
        torch.testing.assert_close(layer(x), expected)


def test_a_weight_that_is_gathered_by_its_own_layer_is_not_read(monkeypatch):
    """DeepSpeed ZeRO-3: reading it here would gather it for good."""
    layer = mlp(20)
    fused.speed_up(layer, False)

    class Watched(dict):
        def __getitem__(self, name):
            raise AssertionError(f"{name} was read")

    for part in (layer.gate_proj, layer.up_proj, layer.down_proj):
        part.weight.ds_id = 1
        part._parameters = Watched(part._parameters)
        assert not fused._is_plain(part)


def test_models_can_be_pickled():
    for inner, on in ((20, False), (24, True)):
        layer = torch.nn.ModuleList([mlp(inner), Qwen2_5_VLRMSNorm(16)])
        fused.speed_up(layer, on)
        x = torch.randn(5, 16, dtype=torch.float64)
        for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):  # noqa: S301 - our own
            assert [type(part) for part in again] == [type(part) for part in layer]
            torch.testing.assert_close(again[0](x), layer[0](x))
            assert again[1].weight is not layer[1].weight


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3", ["Qwen3RMSNorm", "Qwen3MLP"]),
        ("mistral", ["MistralRMSNorm", "MistralMLP"]),
        ("qwen3_vl_moe", ["Qwen3VLMoeTextRMSNorm", "Qwen3VLMoeTextMLP"]),
        ("gemma3", ["Gemma3MLP"]),
    ],
)
def test_layers_are_recognised_by_their_code(family, names):
    """Families that are registered nowhere; Gemma's norms add one to their weights."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layers = {name: layer for name, layer in vars(module).items() if name.endswith(("RMSNorm", "MLP"))}
    found = {name for name, layer in layers.items() if fused._code(layer) in fused.STOCK}
    assert {name for name in found if "Vision" not in name} == set(names)


def test_what_is_asked_for_and_what_is_installed(monkeypatch, caplog):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(fused, "importlib", SimpleNamespace(import_module=missing))
    with error_about(UserError, "model.fused_kernels"):
        fused.wanted("liger")
    assert not fused.wanted("auto")
    assert "faster" not in caplog.text  # not on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fused.wanted("auto")
    assert "training is faster with fused kernels: pip install 'rge[liger]'" in caplog.text
    monkeypatch.setattr(fused, "importlib", SimpleNamespace(import_module=lambda name: None))
    assert fused.wanted("auto")
    assert fused.wanted("liger")
    assert not fused.wanted("none")

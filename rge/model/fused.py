"""Norms, gated activations and rotary embeddings of a model on a GPU, in one kernel each.

Where liger-kernel is installed (the extra ``liger``), its kernels are used, which compute the same formulas (docs/performance.md). The
first call of each kind in a process is compared with plain code. Small inputs, such as a rollout's single tokens, and other devices use
transformers' code.

Layers are recognised by the code of their forward, which most families of transformers share word for word. Other kinds, such as
Gemma's norms, stay as they are.

Matrix products with a size that is not a multiple of 8, such as the 3,420 of Qwen2.5-VL's vision tower, have only slow kernels. They are
computed with weights padded with zeros, whatever is installed.

Shape suffixes: T = tokens or patches, D = hidden size, F = size of the MLP, H = heads, d = head size.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, apply_rotary_pos_emb_vision

from rge.common.errors import UserError
from rge.model.hub_model import HubModel
from rge.model.varlen import hold_against

KEY = "model.fused_kernels"
LEAST = 2**20
"""Smallest number of elements in an input for which a fused kernel is used."""
CHECKED_ROWS = 4096
"""Rows of an input that are compared with plain code, so that the comparison needs little memory."""
PADDED_TO = 64

_log = logging.getLogger(__name__)
_verified: set[tuple] = set()


def wanted(asked: str) -> bool:
    """Whether fused kernels are used on a GPU: ``liger``, ``auto`` (if installed) or ``none``.

    Raises:
        UserError: ``liger`` is not installed.
    """
    if asked == "none" or (asked == "auto" and not torch.cuda.is_available()):
        return False
    try:
        importlib.import_module("liger_kernel.ops.rms_norm")
    except ImportError as error:
        if asked == "liger":
            raise UserError(
                f"{KEY}=liger needs liger-kernel ({error}): pip install 'rge[liger]', or set {KEY}=none"
            ).about(KEY) from error
        _log.warning("training is faster with fused kernels: pip install 'rge[liger]' (%s; %s)", KEY, error)
        return False
    return torch.cuda.is_available()


def speed_up(model: HubModel, fused: bool) -> None:
    """Use padded products and, if asked for, fused kernels in a model, in place."""
    undo(model)
    for module in model.modules():
        form = STOCK.get(_code(type(module)))
        if form is _Mlp and (fused or cast(Any, module).intermediate_size % 8):
            module.__class__ = faster(_Mlp, type(module))
            cast(_Mlp, module).fused = fused
        elif form is _Norm and fused:
            module.__class__ = faster(_Norm, type(module))


def undo(model: HubModel) -> None:
    """Use transformers' layers again."""
    for module in model.modules():
        form, *stock = type(module).__bases__
        if form in STOCK.values():  # not a wrapper's subclass of one, such as FSDP2's
            module.__class__ = stock[0]
        if getattr(module, "fused", False):
            cast(Any, module).fused = False


def applies(states: Tensor) -> bool:
    """Whether fused kernels are used for these states."""
    return states.is_cuda and states.numel() >= LEAST


def rotated(q_THd: Tensor, k_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embeddings of a Qwen vision tower's queries and keys, in float32."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_vision

    forms, inputs = (liger_rotary_pos_emb_vision, apply_rotary_pos_emb_vision), (q_THd, k_THd, cos_Td, sin_Td)
    return _call(*forms, inputs, ("queries", "keys"), "rotary embeddings")


def _norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def kernel(x_TD: Tensor, weight_D: Tensor) -> Tensor:
        # In place, it would overwrite a gradient that the residual also uses.
        return LigerRMSNormFunction.apply(x_TD, weight_D, eps, 0.0, "llama", False)

    def plain(x_TD: Tensor, weight_D: Tensor) -> Tensor:
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        scaled_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + eps)
        return weight_D * scaled_TD.to(x_TD.dtype)

    return _call(kernel, plain, (x_TD, weight_D), ("input", "weight"), "a norm")


def _gated(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def plain(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        return F.silu(gate_TF) * up_TF

    kernel = LigerSiLUMulFunction.apply
    return _call(kernel, plain, (gate_TF, up_TF), ("gate", "input"), "a gated activation")


def _call(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    what: str,
) -> Any:
    """The kernel's outputs; its first call of a kind is compared with plain code, see `hold_against`."""
    kind = (what, inputs[0].dtype, inputs[0].shape[1:])
    if kind not in _verified:
        part = [given[:CHECKED_ROWS] if given.dim() > 1 else given for given in inputs]
        hold_against(kernel, plain, plain, part, names, (f"{KEY}: {what}", "plain code", f"{KEY}=none"))
        _verified.add(kind)
    return kernel(*inputs)


if TYPE_CHECKING:
    Stock = HubModel
else:
    Stock = object


class Faster(Stock):
    """A layer with another forward than its class in transformers, from which it also inherits."""

    def __reduce__(self) -> tuple:
        form, stock = type(self).__bases__
        return _blank, (form, stock), self.__getstate__()


class _Norm(Faster):
    def forward(self, hidden_states: Tensor) -> Tensor:
        # With weights of another dtype the result would have another one, too.
        if not applies(hidden_states) or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _norm(flat_TD, self.weight, self.variance_epsilon).view(hidden_states.shape)


class _Mlp(Faster):
    fused = False

    def forward(self, x: Tensor) -> Tensor:
        inner, parts = self.intermediate_size, (self.gate_proj, self.up_proj, self.down_proj)
        fused = self.fused and applies(x) and isinstance(self.act_fn, SiLUActivation | nn.SiLU)
        padded = bool(inner % 8) and x.is_cuda and all(map(_is_plain, parts))
        if not fused and not padded:
            return super().forward(x)
        missing = -inner % PADDED_TO if padded else 0
        gate, up = (_wider(part, x, rows=missing) if padded else part(x) for part in parts[:2])
        if fused:
            flat = [states.reshape(-1, states.shape[-1]) for states in (gate, up)]
            hidden = _gated(*flat).view(gate.shape)
        else:
            hidden = self.act_fn(gate) * up
        return _wider(self.down_proj, hidden, columns=missing) if padded else self.down_proj(hidden)


def _is_plain(linear: nn.Module) -> bool:
    """Whether a layer is its weight and nothing else. Adapters, quantized and ZeRO-3's weights are left to their own modules."""
    # Reading a weight in a forward would gather it under ZeRO-3.
    return type(linear) is nn.Linear and not hasattr(dict.__getitem__(linear._parameters, "weight"), "ds_id")


def _wider(linear: nn.Linear, x: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """A linear layer whose weight has further rows and columns of zeros."""
    bias = None if linear.bias is None else F.pad(linear.bias, (0, rows))
    return F.linear(x, F.pad(linear.weight, (0, columns, 0, rows)), bias)


def _code(layer: type[nn.Module]) -> tuple:
    """What a layer computes: its compiled forward, without names and lines of its file."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    return (code.co_code, code.co_consts, code.co_names) if code else ()


STOCK = {_code(LlamaRMSNorm): _Norm, _code(LlamaMLP): _Mlp, _code(Qwen2_5_VLMLP): _Mlp}
"""The forwards that are replaced, and by which."""


_made: dict[tuple[type, type], type[nn.Module]] = {}


def faster(form: type[Faster], stock: type[nn.Module]) -> type[nn.Module]:
    """The subclass of both; always the same one."""
    if (form, stock) not in _made:
        name = f"{form.__name__}_{stock.__name__}"
        _made[form, stock] = type(name, (form, stock), {"__module__": form.__module__})
    return _made[form, stock]


def _blank(form: type[Faster], stock: type[nn.Module]) -> nn.Module:
    layer = faster(form, stock)
    return layer.__new__(layer)

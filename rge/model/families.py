"""Model families: one class each, with preprocessing, positions and layers; the only family-specific code.

The rest of rge sees token ids, three-axis positions, one feature row a picture placeholder, and last-layer states. To add a
family: subclass `Family`, or `Tiles`, and register it; docs/extending.md goes through the methods.

Shape suffixes: B = rows, T = tokens, D = hidden size, P = patches or tiles, F = placeholders, L = layers fed by deepstack.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from rge.common.errors import UserError
from rge.common.registry import Registry
from rge.content.visuals import ClipSize
from rge.model.hub_model import HubModel
from rge.model.vision_tower import sizes_of

Rotations = dict[str, tuple[Tensor, Tensor]]
"""Cosines and sines by kind of layer, see `Family.rotations`."""

Pictures = Sequence[tuple[Tensor, Tensor, Tensor | None] | None]
"""Of each row, pixel values as the model takes them, grid and intervals (see `Prompt`); None without pictures."""


class Run(NamedTuple):
    """Placeholders between two texts, as a box on the time, height and width axes; `interval` is between two times."""

    num_times: int
    height: int
    width: int
    interval: float = 1


class Family:
    """Conventions of one family; the defaults are those of Qwen2-VL's and Qwen2.5-VL's pictures."""

    reads_clips = False
    """Whether it reads videos: frames in pairs, see `Qwen2VL`."""

    whole_pictures = False
    """Whether all tokens of a picture see one another in the text model, later ones included."""

    # The parts of a model.

    def decoder(self, model: HubModel) -> HubModel:
        """The text model: ``layers``, ``rotary_emb`` and ``norm``."""
        return model.model.language_model

    def vision(self, model: HubModel) -> list[HubModel]:
        """The vision tower, and the projection of its features to the text model's width."""
        return [model.model.visual]

    def merger(self, model: HubModel) -> list[HubModel]:
        """Of `vision`, what projects features: its modules after the first, or those that Qwen calls mergers."""
        tower, *others = self.vision(model)
        children: Any = tower.named_children()
        return others or [module for name, module in children if "merger" in name]

    # From a picture to pixels and tokens.

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """Set the sizes that pictures are scaled to; None keeps the processor's."""
        size = processor.image_processor.size
        least, most = min_pixels or size["shortest_edge"], max_pixels or size["longest_edge"]
        processor.image_processor.size = {"shortest_edge": least, "longest_edge": most}

    def scaled_size(self, size: tuple[int, int], image_processor: Any) -> tuple[int, int]:
        """Width and height that a picture of this size is scaled to before the processor.

        As for the released Qwen models, by qwen-vl-utils: sides become multiples of a placeholder's, within the processor's
        limits if possible. If that rounds a side of a long picture down to 0, the processor's own rule is used. A side over 200
        times as long as the other is a ValueError.
        """
        from qwen_vl_utils.vision_process import smart_resize  # both bring torchvision
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as stock

        side = image_processor.patch_size * image_processor.merge_size
        limits = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
        height, width = smart_resize(size[1], size[0], side, *limits)
        if not (height and width):
            height, width = stock.smart_resize(size[1], size[0], side, *limits)
        return width, height

    def scaled(self, image: Image.Image, image_processor: Any) -> Image.Image:
        """A picture of `scaled_size`, by Pillow's bicubic filter."""
        size = self.scaled_size(image.size, image_processor)
        return image if size == image.size else image.resize(size)

    def options(self, image_processor: Any) -> dict[str, Any]:
        """Arguments with which the processor cuts the result of `scaled` without changing its pixels.

        Scaled pictures have 8 bits per channel. Normalising makes them float32, and Qwen's patches repeat every pixel per
        frame: eight times the bytes to send between processes and to a device, see `normalised`.
        """
        return {"do_rescale": False, "do_normalize": False, "do_resize": False, "temporal_patch_size": 1}

    def pictures_of(self, fields: Mapping, image_processor: Any) -> tuple[Tensor | None, Tensor | None]:
        """Pixels and grid of one prompt from its processor's output, made with `options`; both None without pictures.

        Returns:
            (P, channels, height, width) uint8: patches. (pictures, 3) int64: one, height and width in patches. A clip is one picture
            whose frames, and their patches, follow one another: instead of one, the number of its frames.
        """
        if (pixels := fields.get("pixel_values")) is None:
            return None, None
        side = image_processor.patch_size
        return pixels.unflatten(1, (-1, side, side)), fields["image_grid_thw"]

    def cut(self, image: Image.Image, image_processor: Any) -> tuple[Tensor, Tensor] | None:
        """One scaled picture as in `pictures_of`; None if the processor has to see all pictures of a prompt together."""
        fields = image_processor(images=[image], return_tensors="pt", **self.options(image_processor))
        return self.pictures_of(fields, image_processor)  # type: ignore[return-value]  # it has a picture

    def picture_tokens(self, processor: Any, size: tuple[int, int]) -> int:
        """How many tokens stand in a prompt for a picture of this width and height, in place of `picture_mark`."""
        # Not the processor's own count, which would scale once more: long pictures may exceed its limits, see `scaled_size`.
        return self.scaled_tokens(processor, self.scaled_size(size, processor.image_processor))

    def scaled_tokens(self, processor: Any, size: tuple[int, int]) -> int:
        """The same of a picture that has been scaled to this size, or of a clip's frames that share their patches."""
        side = processor.image_processor.patch_size * processor.image_processor.merge_size
        return math.prod(length // side for length in size)

    def picture_mark(self, processor: Any) -> str:
        """The processor's text for a picture, around and including one placeholder."""
        return processor.image_token

    def placeholder_id(self, processor: Any) -> int:
        """The token that features replace."""
        return processor.tokenizer.convert_tokens_to_ids(processor.image_token)

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """Tokens of the smallest `square_picture` in a row: one before it, its placeholders, and one after."""
        return [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]

    def square_picture(self, config: Any, num_pixels: int = 0) -> tuple[Tensor, Tensor]:
        """A black square of at most `num_pixels`, or the smallest possible: pixels and grid, see `pictures_of`.

        A batch without pictures gets the smallest behind a mask, so that every rank runs the vision tower in every step.
        Otherwise DDP would wait for missing gradients and ZeRO-2 average different parameters. `rge.plan` measures the cost of
        the largest.
        """
        vision = config.vision_config
        channels = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
        merge, side = vision.spatial_merge_size, vision.patch_size
        along = merge * max(math.isqrt(num_pixels) // (side * merge), 1)
        pixels = torch.zeros(along * along, channels, side, side, dtype=torch.uint8)
        return pixels, torch.tensor([[1, along, along]])

    def collapsed(self, config: Any, ids: Sequence[int]) -> list[int] | None:
        """A prompt's ids with one placeholder per picture, as vLLM takes them; None if unsupported.

        Pictures are between special tokens, so each is one run of placeholders.
        """
        image = config.image_token_id
        if getattr(config, "video_token_id", image) in ids:
            return None
        return [
            each for place, each in enumerate(ids) if each != image or place == 0 or ids[place - 1] != image
        ]

    def vllm_grid(self, image_processor: Any, grid: Tensor) -> Tensor:
        """Grids of the pictures that `collapsed` leaves."""
        return grid

    # Clips, where `reads_clips`.

    def clip_size(self, size: tuple[int, int], most: int, image_processor: Any) -> tuple[int, int]:
        """Width and height that a clip's frames of this size are scaled to, of at most so many pixels where that is possible."""
        raise NotImplementedError

    def clip_text(self, processor: Any, clip: ClipSize) -> str:
        """What stands in a prompt for the template's one placeholder of a clip of this size, after scaling."""
        raise NotImplementedError

    def check_clips(self, processor: Any) -> None:
        """Refuse a processor that would prepare frames otherwise than pictures. Raises `UserError`."""

    # From tokens and pixels to states.

    def runs(self, image_processor: Any, grid: Tensor, interval_G: Tensor | None) -> Iterator[Run]:
        """The runs of placeholders that follow one another in a prompt, for `positions`."""
        for frames, *sides in grid.tolist():
            height, width = (side // image_processor.merge_size for side in sides)
            yield Run(_num_times(image_processor, frames), height, width)

    def positions(
        self,
        image_processor: Any,
        input_ids_T: Tensor,
        type_ids_T: Tensor,
        grid: Tensor | None,
        interval_G: Tensor | None = None,
    ) -> Tensor:
        """Rotary positions (3, T) of a prompt's tokens on the time, height and width axes.

        The same as transformers' `get_rope_index`, which needs a model; data workers have none. `type_ids_T` is 1 on placeholders of
        pictures and 2 on those of clips; `grid` is from `pictures_of`; `interval_G` is from one row of a clip's patches to the next.
        """
        pieces, end, after, seen = [], 0, 0, 0
        placeholders = type_ids_T.nonzero().flatten().tolist()
        for run in [] if grid is None else self.runs(image_processor, grid, interval_G):
            begin = placeholders[seen]
            pieces.append(torch.arange(after, after + begin - end).expand(3, -1))
            after += begin - end
            time = (torch.arange(run.num_times) * run.interval).long()
            axes = torch.meshgrid(time, torch.arange(run.height), torch.arange(run.width), indexing="ij")
            pieces.append(torch.stack(axes).flatten(1) + after)
            # As transformers: also where the times of a clip reach further.
            after += max(run.height, run.width)
            seen += run.num_times * run.height * run.width
            end = begin + run.num_times * run.height * run.width
        pieces.append(torch.arange(after, after + len(type_ids_T) - end).expand(3, -1))
        return torch.cat(pieces, dim=1)

    def rotary_positions(self, position_ids_3BT: Tensor) -> Tensor:
        """Positions as the text model's rotary embedding takes them."""
        return position_ids_3BT

    def rotations(self, model: HubModel, like: Tensor, position_ids_3BT: Tensor) -> Rotations:
        """Cosines and sines (B, T, head size), in the dtype of `like`, by kind of layer; ``""`` if there is only one."""
        rotary, positions = self.decoder(model).rotary_emb, self.rotary_positions(position_ids_3BT)
        if kinds := getattr(rotary, "layer_types", None):
            return {kind: rotary(like, positions, kind) for kind in kinds}
        return {"": rotary(like, positions)}

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """Run the vision tower on `normalised` patches or tiles of all pictures; their `grid` is on the host.

        Returns:
            (F, D): one row per placeholder token, in order. Rows of (1 + L) * D are split: the first D replace the
            placeholder, and the next are added to its state after the first text layer, the second, ... (DeepStack).
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

        The model's own forward would count placeholders on the device and synchronise, and may create a mask. Features are put
        by index (places of placeholders among the B * T tokens), since a mask would synchronise in the backward too. `inputs` are
        ``input_ids`` (B, T), ``position_ids`` (3, B, T) and ``attention_mask`` (a plan of `rge.model.attention`, or None for causal
        attention over rows without padding).
        """
        hidden_BTD = model.get_input_embeddings()(inputs["input_ids"])
        added: list[Tensor] = []
        if features is not None:
            assert picture_index_F is not None
            first_FD, *added = features.to(hidden_BTD.dtype).split(hidden_BTD.shape[-1], dim=-1)
            flat_TD = hidden_BTD.flatten(0, 1).index_copy(0, picture_index_F, first_FD)
            hidden_BTD = flat_TD.view(hidden_BTD.shape)
        rotations = self.rotations(model, hidden_BTD, inputs["position_ids"])
        return self.run_layers(model, hidden_BTD, rotations, inputs["attention_mask"], added, picture_index_F)

    def run_layers(
        self,
        model: HubModel,
        hidden_BTD: Tensor,
        rotations: Rotations,
        mask: Any,
        added: Sequence[Tensor] = (),
        picture_index_F: Tensor | None = None,
    ) -> Tensor:
        """Run the text model's layers and its final norm."""
        text = self.decoder(model)
        kinds = [""] * len(text.layers) if "" in rotations else text.config.layer_types
        for number, (layer, kind) in enumerate(zip(text.layers, kinds, strict=True)):
            hidden_BTD = layer(
                hidden_BTD, attention_mask=mask, position_embeddings=rotations[kind], use_cache=False
            )
            if number < len(added):
                assert picture_index_F is not None
                flat_TD = hidden_BTD.flatten(0, 1).index_add(0, picture_index_F, added[number])
                hidden_BTD = flat_TD.view(hidden_BTD.shape)
        return text.norm(hidden_BTD)

    def plain_inputs(
        self,
        model: Any,
        processor: Any,
        prompts: Sequence[Any],
        input_ids: Tensor,
        attention_mask: Tensor,
    ) -> dict[str, Tensor]:
        """Arguments of the model's own forward over padded rows (B, T) that begin with these `Prompt`s, for comparison.

        `attention_mask` is 0 on padding.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        pictures: Pictures = [
            None
            if one.pixels is None or one.image_grid is None
            else (
                normalised(processor.image_processor, one.pixels, one.image_grid),
                one.image_grid,
                one.interval_G,
            )
            for one in prompts
        ]
        if any(one is not None for one in pictures):
            inputs |= self._plain_pictures(model.config, pictures, input_ids)
        return inputs

    def _plain_pictures(self, config: Any, pictures: Pictures, input_ids: Tensor) -> dict[str, Tensor]:
        values, grids, _ = zip(*filter(None, pictures), strict=True)
        types = {"mm_token_type_ids": (input_ids == config.image_token_id).long()}
        return {"pixel_values": torch.cat(values), "image_grid_thw": torch.cat(grids)} | types


class Qwen2VL(Family):
    """Qwen2-VL: of a clip, two frames are one row of patches, and its placeholders are one run; times are counted."""

    reads_clips = True

    def clip_size(self, size: tuple[int, int], most: int, image_processor: Any) -> tuple[int, int]:
        """Multiples of a placeholder's sides; frames are never enlarged beyond that."""
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as stock

        side = image_processor.patch_size * image_processor.merge_size
        height, width = stock.smart_resize(
            size[1], size[0], side, min_pixels=side**2, max_pixels=max(most, side**2)
        )
        return max(width, side), max(height, side)

    def clip_text(self, processor: Any, clip: ClipSize) -> str:
        """Placeholders alone."""
        num_times = _num_times(processor.image_processor, len(clip.seconds))
        return processor.video_token * (num_times * self.scaled_tokens(processor, clip.size))

    def _plain_pictures(self, config: Any, pictures: Pictures, input_ids: Tensor) -> dict[str, Tensor]:
        found = super()._plain_pictures(config, pictures, input_ids)
        grid = found["image_grid_thw"]
        is_clip = grid[:, 0] > 1
        if not is_clip.any():
            return found
        patches = patch_grid(config.vision_config, grid)
        values = found["pixel_values"].split(patches.prod(dim=1).tolist())
        inputs = {"mm_token_type_ids": found["mm_token_type_ids"] + 2 * (input_ids == config.video_token_id)}
        kinds = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
        for (pixels, sizes), chosen in zip(kinds.items(), (~is_clip, is_clip), strict=True):
            if chosen.any():
                inputs[pixels] = torch.cat([values[place] for place in chosen.nonzero().flatten().tolist()])
                inputs[sizes] = patches[chosen]
        if (per_second := getattr(config.vision_config, "tokens_per_second", None)) is not None:
            rows = filter(None, pictures)
            intervals = [torch.zeros(len(sizes)) if each is None else each for _, sizes, each in rows]
            inputs["second_per_grid_ts"] = torch.cat(intervals)[is_clip] / per_second
        return inputs

    def check_clips(self, processor: Any) -> None:
        """Refuse a processor without one for videos, or whose normalises frames otherwise than pictures."""
        of_clips, of_pictures = getattr(processor, "video_processor", None), processor.image_processor
        names = (
            "image_mean",
            "image_std",
            "rescale_factor",
            "patch_size",
            "merge_size",
            "temporal_patch_size",
        )
        apart = [
            name
            for name in names
            if not _same(getattr(of_clips, name, None), getattr(of_pictures, name, None))
        ]
        if apart:
            raise UserError(
                f"the processor prepares frames of videos otherwise than pictures ({', '.join(apart)}), which is not supported"
            )


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: as Qwen2-VL, but positions on the time axis are in seconds."""

    def runs(self, image_processor: Any, grid: Tensor, interval_G: Tensor | None) -> Iterator[Run]:
        """Times of clips are as far apart as `interval_G` says: seconds, times the config's ``tokens_per_second``."""
        interval_G = grid.new_ones(len(grid)) if interval_G is None else interval_G
        for number, run in enumerate(super().runs(image_processor, grid, interval_G)):
            is_clip = int(grid[number, 0]) > 1
            yield run._replace(interval=float(interval_G[number])) if is_clip else run


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: features of deeper vision layers are added to the states of the first text layers (DeepStack)."""

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, (1 + L) * D): the main feature, then one for each of the first L text layers."""
        output = self._tower(model, pixel_values, grid)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def clip_text(self, processor: Any, clip: ClipSize) -> str:
        """Each row of patches is a picture of its own, after the mean time of its frames."""
        step, text = processor.image_processor.temporal_patch_size, ""
        seconds = [*clip.seconds, *[clip.seconds[-1]] * (-len(clip.seconds) % step)]
        shown = processor.video_token * self.scaled_tokens(processor, clip.size)
        for start in range(0, len(seconds), step):
            time = (seconds[start] + seconds[start + step - 1]) / 2
            text += f"<{time:.1f} seconds>{processor.vision_start_token}{shown}{processor.vision_end_token}"
        return text

    def runs(self, image_processor: Any, grid: Tensor, interval_G: Tensor | None) -> Iterator[Run]:
        """One for each row of a clip's patches."""
        for run in super().runs(image_processor, grid, interval_G):
            yield from [run._replace(num_times=1)] * run.num_times

    def collapsed(self, config: Any, ids: Sequence[int]) -> list[int] | None:
        """Rows of a clip's patches are passed as pictures, which is what the text model sees."""
        image = config.image_token_id
        return super().collapsed(config, [image if each == config.video_token_id else each for each in ids])

    def vllm_grid(self, image_processor: Any, grid: Tensor) -> Tensor:
        """A picture for each row of a clip's patches."""
        times = torch.tensor([_num_times(image_processor, frames) for frames in grid[:, 0].tolist()])
        found = grid.repeat_interleave(times, dim=0)
        found[:, 0] = 1
        return found


class Tiles(Family):
    """Families whose processor splits pictures into square tiles of one size; positions are consecutive."""

    def tile_side(self, config: Any) -> int:
        """Width and height of a tile in pixels."""
        side = config.vision_config.image_size
        return side if isinstance(side, int) else side[0]

    def num_tiles(self, config: Any, num_pixels: int) -> int:
        """Tiles of a square picture of `num_pixels`: as many per side as fit, and if several, the whole picture once more."""
        along = max(math.isqrt(num_pixels) // self.tile_side(config), 1)
        return along**2 + (along > 1)

    def scaled_size(self, size: tuple[int, int], image_processor: Any) -> tuple[int, int]:
        """Scaling is left to the processor."""
        return size

    def cut(self, image: Image.Image, image_processor: Any) -> None:
        """Tiles depend on the other pictures' sizes."""

    def picture_tokens(self, processor: Any, size: tuple[int, int]) -> int:
        """As the processor counts them; vLLM plans with that too."""
        return int(processor._get_num_multimodal_tokens(image_sizes=[size[::-1]]).num_image_tokens[0])

    def options(self, image_processor: Any) -> dict[str, Any]:
        """Scaled and cut, not normalised."""
        return {"do_rescale": False, "do_normalize": False}

    def pictures_of(self, fields: Mapping, image_processor: Any) -> tuple[Tensor | None, Tensor | None]:
        """(P, channels, height, width) uint8 tiles; (P, 3): one, and a tile's height and width in pixels."""
        if (pixels := fields.get("pixel_values")) is None:
            return None, None
        tiles_PCHW = pixels.reshape(-1, *pixels.shape[-3:])
        return tiles_PCHW, torch.tensor([[1, *tiles_PCHW.shape[2:]]] * len(tiles_PCHW))

    def square_picture(self, config: Any, num_pixels: int = 0) -> tuple[Tensor, Tensor]:
        """Black tiles."""
        side, num_tiles = self.tile_side(config), self.num_tiles(config, num_pixels)
        tiles = torch.zeros(num_tiles, config.vision_config.num_channels, side, side, dtype=torch.uint8)
        return tiles, torch.tensor([[1, side, side]] * num_tiles)

    def collapsed(self, config: Any, ids: Sequence[int]) -> list[int] | None:
        """Unsupported: vLLM lays out tiles itself."""
        return None

    def positions(
        self,
        image_processor: Any,
        input_ids_T: Tensor,
        type_ids_T: Tensor,
        grid: Tensor | None,
        interval_G: Tensor | None = None,
    ) -> Tensor:
        """Consecutive, the same on all axes."""
        return torch.arange(len(input_ids_T)).expand(3, -1)

    def rotary_positions(self, position_ids_3BT: Tensor) -> Tensor:
        """One of the equal axes."""
        return position_ids_3BT[0]

    def _plain_pictures(self, config: Any, pictures: Pictures, input_ids: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([tiles for tiles, *_ in filter(None, pictures)])}


class Idefics3(Tiles):
    """Idefics3 and the first SmolVLM models, with a Llama as their text model.

    Every picture is scaled to the same longest edge, so there is a maximum number of pixels and no minimum.
    """

    def decoder(self, model: HubModel) -> HubModel:
        """The Llama."""
        return model.model.text_model

    def vision(self, model: HubModel) -> list[HubModel]:
        """SigLIP and the connector."""
        return [model.model.vision_model, model.model.connector]

    def limit_pixels(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
        """As many whole tiles along the longest edge as in a square of `max_pixels`, at least one."""
        if max_pixels is not None:
            tile = processor.image_processor.max_image_size["longest_edge"]
            processor.image_processor.size = {"longest_edge": tile * max(math.isqrt(max_pixels) // tile, 1)}

    def options(self, image_processor: Any) -> dict[str, Any]:
        """Without padding: the tiles of one prompt are equally large."""
        return super().options(image_processor) | {"do_pad": False}

    def picture_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """A tile between the tokens around pictures."""
        vision, around = config.vision_config, tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
        num_placeholders = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
        return [around, *[config.image_token_id] * num_placeholders, around]

    def features(self, model: HubModel, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """(F, D).

        The model's own `get_image_features` would look for padding tiles and masked pixels on the device and synchronise; here
        all tiles are whole and of one size.
        """
        tower = model.model.vision_model
        height, width = (side // tower.patch_size for side in pixel_values.shape[2:])
        shown = torch.ones(len(pixel_values), height, width, dtype=torch.bool, device=pixel_values.device)
        states = tower.embeddings(pixel_values=pixel_values.to(tower.dtype), patch_attention_mask=shown)
        states = tower.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state
        return model.model.connector(tower.post_layernorm(states)).flatten(0, 1)

    def _plain_pictures(self, config: Any, pictures: Pictures, input_ids: Tensor) -> dict[str, Tensor]:
        """Tiles row by row, padded with zeros, which the model drops."""
        shown = [tiles for tiles, *_ in filter(None, pictures)]
        padded = shown[0].new_zeros(len(pictures), max(map(len, shown)), *shown[0].shape[1:])
        for row, found in enumerate(pictures):
            if found is not None:
                padded[row, : len(found[0])] = found[0]
        return {"pixel_values": padded}


FAMILIES: Registry[Family] = Registry("family of models", "rge.families", ["rge.small_models.efficientnet"])
"""By the `model_type` of a model's config."""


register_family = FAMILIES.add
"""Registers the family of a model type: ``register_family("my_vl", Family())``."""


register_family("qwen2_vl", Qwen2VL())
register_family("qwen2_5_vl", Qwen25VL())
register_family("qwen3_vl", Qwen3VL())
register_family("idefics3", Idefics3())


def family_of(model: HubModel) -> Family:
    """The family of a loaded model."""
    return FAMILIES[model.config.model_type]


def with_pixels(processor: Any, min_pixels: int, max_pixels: int) -> Any:
    """The processor with other picture sizes; the given one, by which a model normalises pictures, stays as it is."""
    other = copy(processor)
    for name in ("image_processor", "video_processor"):
        if hasattr(processor, name):
            setattr(other, name, deepcopy(getattr(processor, name)))
    family_of_processor(processor).limit_pixels(other, min_pixels, max_pixels)
    return other


def family_of_processor(processor: Any) -> Family:
    """The family of a processor from `load_processor`; for others Qwen2-VL's."""
    return getattr(processor, "rge_family", None) or FAMILIES["qwen2_vl"]


def patch_grid(image_processor: Any, grid: Tensor) -> Tensor:
    """A grid in patches, as the vision tower takes it: of a clip's frames, some share one row of patches."""
    if bool((grid[:, 0] == 1).all()):
        return grid
    times = torch.tensor([_num_times(image_processor, frames) for frames in grid[:, 0].tolist()])
    return torch.cat([times[:, None], grid[:, 1:].cpu()], dim=1)


def _num_times(image_processor: Any, frames: int) -> int:
    return -(-frames // getattr(image_processor, "temporal_patch_size", 1)) if frames > 1 else 1


def _same(one: Any, other: Any) -> bool:
    return (list(one) if isinstance(one, list | tuple) else one) == (
        list(other) if isinstance(other, list | tuple) else other
    )


def _in_time(pixels_PCHW: Tensor, grid: Tensor | None, step: int) -> Tensor:
    """Patches of `step` frames, (P', channels, step * height, width): a picture's repeated, a clip's from frames side by side."""

    def repeated(part_PCHW: Tensor) -> Tensor:  # as bytes: a quarter of what repeating floats would move
        return part_PCHW[:, :, None].expand(-1, -1, step, -1, -1).flatten(2, 3)

    if grid is None or bool((grid[:, 0] == 1).all()):
        return repeated(pixels_PCHW)
    found = []
    parts = pixels_PCHW.split(grid.prod(dim=1).tolist())
    for part_PCHW, frames in zip(parts, grid[:, 0].tolist(), strict=True):
        if frames == 1:
            found.append(repeated(part_PCHW))
            continue
        side_by_side = part_PCHW.unflatten(0, (frames // step, step, -1)).movedim(1, 3)
        found.append(side_by_side.flatten(0, 1).flatten(2, 3))
    return torch.cat(found)


def normalised(image_processor: Any, pixels_PCHW: Tensor, grid: Tensor | None = None) -> Tensor:
    """Inputs of the model: pixels (see `Family.pictures_of`) in float32, rescaled, normalised, pictures repeated for every frame.

    The processor's own arithmetic on the pixels' device; bit-equal to its whole output, since both steps process single
    pixels. `grid`, on the host, says which are clips; None: all are pictures.

    Returns:
        (P, channels * frames * height * width) patches, or (P, channels, height, width) tiles.
    """
    frames = getattr(image_processor, "temporal_patch_size", None)
    if frames is not None:
        pixels_PCHW = _in_time(pixels_PCHW, grid, frames)
    values_PCHW = image_processor.rescale_and_normalize(
        pixels_PCHW,
        image_processor.do_rescale,
        image_processor.rescale_factor,
        image_processor.do_normalize,
        tuple(image_processor.image_mean),
        tuple(image_processor.image_std),
    ).float()
    return values_PCHW if frames is None else values_PCHW.flatten(1)

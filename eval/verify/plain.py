"""The written-out recipe of an embedding by plain transformers, and departures from it.

Chat template with the generation prompt, the rationale's tokens if there is one, ``<emb>``, and the ``last_hidden_state`` there,
which is after the final norm. A `Departure` changes one thing about it, as another program might.

Shape suffixes: N = items, T = tokens, D = embedding size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rge.common.images import load_image
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.inference import Side
from rge.model.backbone import load_plain, load_processor, read_config
from rge.model.families import family_of
from rge.model.prompts import Prompt, PromptBuilder

ROWS = 4
"""Rows of a forward pass."""


@dataclass(frozen=True)
class Departure:
    """One thing done otherwise than in the recipe; the defaults are the recipe."""

    item: Callable[[Item, Side], tuple[Item, Side]] = lambda item, side: (item, side)
    picture: Callable[[Image.Image], Image.Image] = lambda picture: picture
    pixels: float = 1.0
    """Factor of the largest and smallest size of a picture."""
    ids: Callable[[list[int], Callable[[str], list[int]]], list[int]] = lambda ids, encode: ids
    """The ids of a row that ends with ``<emb>``, and a tokenizer, to other ids; the state is read at the last one."""
    before_norm: bool = False
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    padding: str = "right"
    pads: tuple[int, str] = (0, "right")
    """Tokens that padding fills a row up to, and on which side, in a program that takes it for a part of the row."""


class PlainModel:
    """A checkpoint of rge as plain transformers loads it."""

    def __init__(self, embedder: Embedder, model: Any = None):
        self.embedder, self._model = embedder, model
        self._dtype = torch.float32
        self._builders: dict[float, PromptBuilder] = {1.0: embedder.builder}

    def model(self, dtype: torch.dtype) -> Any:
        """The weights in this dtype, adapters merged into their base."""
        if self._model is None or dtype != self._dtype != torch.float32:  # a cast does not undo rounding
            model: Any = load_plain(self.embedder.checkpoint, self.embedder.base)
            self._model, self._dtype = model.to(self.embedder.model.device), torch.float32
        if dtype != self._dtype:
            self._model, self._dtype = self._model.to(dtype), dtype
        return self._model

    def builder(self, factor: float) -> PromptBuilder:
        """The builder of prompts whose pictures have other limits, by a factor."""
        if factor not in self._builders:
            settings: Any = self.embedder.settings  # those of a checkpoint
            processor = load_processor(
                self.embedder.checkpoint,
                read_config(self.embedder.checkpoint),
                min_pixels=int(settings.pixels.min * factor),
                max_pixels=int(settings.pixels.max * factor),
            )
            self._builders[factor] = PromptBuilder(
                processor,
                self.embedder.builder.profile,
                self.embedder.builder.max_tokens,
                video=self.embedder.builder.video,
            )
        return self._builders[factor]

    def prompt(self, item: Item, side: Side, how: Departure = Departure()) -> Prompt:
        """An item's prompt, by the recipe or departing from it."""
        item, side = how.item(item, side)
        return self.builder(how.pixels).build(item, side, lambda ref: how.picture(load_image(ref)))

    @torch.no_grad()
    def embed(
        self,
        items: Sequence[Item],
        side: Side,
        after: Sequence[Sequence[int]],
        how: Departure = Departure(),
    ) -> np.ndarray:
        """Unit-norm embeddings (N, D) float32; ``after``: the ids of each item's rationale, without ``<emb>``."""
        prompts = [self.prompt(item, side, how) for item in items]
        rows = [self._row(prompt, ids, how) for prompt, ids in zip(prompts, after, strict=True)]
        model = self.model(how.dtype)
        model.set_attn_implementation(how.attention)
        states = [
            self._states(model, prompts[start : start + ROWS], rows[start : start + ROWS], how)
            for start in range(0, len(rows), ROWS)
        ]
        return np.concatenate(states)

    def _row(self, prompt: Prompt, after: Sequence[int], how: Departure) -> Tensor:
        tokenizer = self.embedder.builder.tokenizer
        ids = [*prompt.input_ids.tolist(), *after, self.embedder.model.emb_id]
        ids = how.ids(ids, lambda text: tokenizer(text, add_special_tokens=False).input_ids)
        length, side = how.pads
        pads = [self.embedder.model.pad_id] * (length - len(ids))
        return torch.tensor([*pads, *ids] if side == "left" else [*ids, *pads])

    def _states(
        self, model: Any, prompts: Sequence[Prompt], rows: Sequence[Tensor], how: Departure
    ) -> np.ndarray:
        embedder = self.embedder.model
        input_ids = pad_sequence(list(rows), True, embedder.pad_id, padding_side=how.padding)
        attention_mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=how.padding)
        last = torch.tensor(
            [len(row) - 1 if how.padding == "right" else input_ids.shape[1] - 1 for row in rows]
        )
        given = family_of(model).plain_inputs(model, embedder.processor, prompts, input_ids, attention_mask)
        inputs = {
            name: value.to(model.device, how.dtype if name.startswith("pixel") else None)
            for name, value in given.items()
        }
        unnormed: list[Tensor] = []
        norm = family_of(model).decoder(model).norm
        hook = norm.register_forward_pre_hook(lambda _, given: unnormed.append(given[0]))
        try:
            hidden_NTD: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
        finally:
            hook.remove()
        if how.before_norm:
            hidden_NTD = unnormed[-1]
        state_ND = hidden_NTD[torch.arange(len(rows)), last.to(hidden_NTD.device)]
        return torch.nn.functional.normalize(state_ND.float(), dim=-1).cpu().numpy()


def with_instruction(item: Item, side: Side, instruction: str | None) -> tuple[Item, Side]:
    """The item with another instruction."""
    return replace(item, instruction=instruction), side

"""Let the model write its own rationales, in batches, and read the state at the ``<emb>`` that ends each.

Nothing is inherited from the model's generation settings: what is not an argument here does not happen. Rationales
are carried as token ids; decoding and tokenising them again may give other ids, and with them another state.

Shape suffixes: B = rows still being written, L = prompt length, T = tokens so far, V = vocabulary, D = hidden size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from rge.backbone import hidden_states, picture_features
from rge.embedder import Embedder, normalise
from rge.packing import PADDING, attention_mask
from rge.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Rationale:
    """What the model wrote for one prompt.

    Attributes:
        ids: token ids without ``<emb>``; empty if the model wrote ``<emb>`` at once.
        forced: the cap was reached and ``<emb>`` was appended.
        state_D: unit-norm state at ``<emb>``, float32, without gradient.
        seconds: wall time of its batch divided by the batch's rows.
    """

    ids: tuple[int, ...]
    forced: bool
    state_D: Tensor = field(repr=False)
    seconds: float


class _Layer(DynamicLayer):
    """Keys and values of one layer in a buffer made once, instead of one concatenation a token."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            B, heads, _, dim = key_states.shape
            self.dtype, self.device = key_states.dtype, key_states.device
            self.key_buffer = key_states.new_empty(B, heads, self.capacity, dim)
            self.value_buffer = value_states.new_empty(B, heads, self.capacity, dim)
            self.is_initialized = True
        end = self.length + key_states.shape[-2]
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def keep_rows(self, rows: Tensor) -> None:
        self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]
        self.keys = self.key_buffer[:, :, : self.length]
        self.values = self.value_buffer[:, :, : self.length]


def generate(
    embedder: Embedder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> list[Rationale]:
    """Write a rationale for every prompt.

    The result of a row does not depend on the other rows: greedy decoding has no randomness, and sampling takes its
    random numbers from the row's own seed.

    Args:
        embedder: the model, unwrapped.
        prompts: what to continue, any lengths.
        max_new_tokens: cap on generated tokens, ``<emb>`` included, as `max_new_tokens` of transformers' generate.
        batch_size: rows generated at once. Prompts are sorted by length first, so that little is padding.
        temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
        seeds: one a prompt, required for sampling.
        on_progress: called with the number of prompts just finished, after each batch.

    Returns:
        One rationale a prompt, in the order of the prompts.

    Raises:
        ValueError: a sampling temperature without seeds, or a cap below one token.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError("sampling (temperature > 0) needs one seed a prompt")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: dict[int, Rationale] = {}
    was_training = embedder.training
    # Also switches gradient checkpointing off, which in training mode would drop the cache without a word.
    embedder.eval()
    try:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            uniform = None
            if temperature > 0:
                streams = [np.random.Generator(np.random.Philox(key=seeds[row])) for row in rows]  # type: ignore[index]
                uniform = torch.from_numpy(np.stack([stream.random(max_new_tokens) for stream in streams]))
            began = time.perf_counter()
            batch = _generate_batch(
                embedder, [prompts[row] for row in rows], max_new_tokens, temperature, uniform
            )
            seconds = (time.perf_counter() - began) / len(rows)
            for row, (ids, forced, state) in zip(rows, batch, strict=True):
                results[row] = Rationale(tuple(ids), forced, state, seconds)
            if on_progress is not None:
                on_progress(len(rows))
    finally:
        embedder.train(was_training)
    return [results[index] for index in range(len(prompts))]


@torch.no_grad()
def _generate_batch(
    embedder: Embedder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float,
    uniform: Tensor | None,
) -> list[tuple[list[int], bool, Tensor]]:
    model, emb_id, device = embedder.model, embedder.emb_id, embedder.device
    packed = embedder.pack(prompts, [[] for _ in prompts], padding_side="left")
    B, L = packed.input_ids_BT.shape
    cache = Cache(
        layers=[
            _Layer(L + max_new_tokens + 1) for _ in range(model.config.get_text_config().num_hidden_layers)
        ]
    )
    hidden_BTD = hidden_states(
        model,
        features=picture_features(model, packed.pixel_values, packed.image_grid),
        input_ids=packed.input_ids_BT,
        position_ids=packed.position_ids_3BT,
        attention_mask={"full_attention": attention_mask(packed.segment_BT)},
        past_key_values=cache,
        use_cache=True,
    )
    head = model.get_output_embeddings()
    suppressed = torch.tensor(embedder.suppressed_ids, device=device)
    hidden_BD = hidden_BTD[:, -1]
    # The prompt's last position is not its greatest: a wide picture's columns may reach further than its rows.
    place_B = packed.position_ids_3BT.amax(dim=(0, 2)) + 1
    seen_BT = torch.ones(B, L + max_new_tokens + 1, dtype=torch.bool, device=device)
    seen_BT[:, :L] = packed.segment_BT != PADDING
    row_of = torch.arange(B, device=device)
    written = torch.full((B, max_new_tokens), embedder.pad_id)
    length = torch.zeros(B, dtype=torch.long)
    forced = torch.zeros(B, dtype=torch.bool)
    states: list[Tensor | None] = [None] * B
    finished_B = torch.zeros(B, dtype=torch.bool, device=device)
    for step in range(max_new_tokens + 1):
        if step < max_new_tokens:
            logit_BV = head(hidden_BD).float()
            logit_BV[:, suppressed] = float("-inf")
            token_B = _choose(logit_BV, temperature, None if uniform is None else uniform[row_of.cpu(), step])
        else:
            token_B = torch.full_like(row_of, emb_id)
            forced[row_of[~finished_B].cpu()] = True
        ends_B = (token_B == emb_id) & ~finished_B
        going = (~ends_B & ~finished_B).cpu()
        if step < max_new_tokens:
            alive = row_of.cpu()[going]
            written[alive, step] = token_B.cpu()[going]
            length[alive] += 1
        hidden_BD = hidden_states(
            model,
            features=None,
            input_ids=token_B[:, None],
            position_ids=(place_B + step).view(1, -1, 1).expand(3, -1, -1),
            attention_mask={"full_attention": seen_BT[:, None, None, : L + step + 1]},
            past_key_values=cache,
            use_cache=True,
        )[:, -1]
        if bool(ends_B.any()):
            ended = ends_B.nonzero().flatten()
            for row, state in zip(row_of[ended].tolist(), normalise(hidden_BD[ended]), strict=True):
                states[row] = state
            finished_B = finished_B | ends_B
        num_alive = int((~finished_B).sum())
        if num_alive == 0:
            break
        # Copying the cache costs about as much as a step with it; worth it once a quarter of the rows is done.
        if num_alive <= 0.75 * len(row_of):
            keep = (~finished_B).nonzero().flatten()
            for layer in cache.layers:
                layer.keep_rows(keep)
            hidden_BD, place_B, seen_BT, row_of = hidden_BD[keep], place_B[keep], seen_BT[keep], row_of[keep]
            finished_B = finished_B[keep]
    return [(written[row, : int(length[row])].tolist(), bool(forced[row]), states[row]) for row in range(B)]  # type: ignore[misc]


def _choose(logit_BV: Tensor, temperature: float, uniform_B: Tensor | None) -> Tensor:
    if uniform_B is None:
        return logit_BV.argmax(dim=-1)
    # Inverse of the cumulative distribution: one random number a row and token, so a row's draw is its own.
    cumulative_BV = torch.softmax(logit_BV.double() / temperature, dim=-1).cumsum(dim=-1)
    threshold_B1 = (uniform_B.to(logit_BV.device) * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).flatten()

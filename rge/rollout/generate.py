"""Let the model write its own rationales, in batches, and read the state at the ``<emb>`` that ends each.

Nothing is inherited from the model's generation settings: what is not an argument here does not happen. Rationales
are carried as token ids; decoding and tokenising them again may give other ids, and with them another state.

A step of generation costs one call of every layer and, on a CPU, one look at who is done; positions, masks and buffers
are made before the first. Rows that are done leave the batch.

Shape suffixes: B = rows still being written, R = all rows, L = steps, V = vocabulary, D = hidden size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rge.model.attention import Cache, EncodedPrompts
from rge.model.backbone import decoder, rotations
from rge.model.embedding_model import EmbeddingModel, normalise
from rge.model.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Rationale:
    """What the model wrote for one prompt.

    Attributes:
        ids: token ids without ``<emb>``; empty if the model wrote ``<emb>`` at once.
        forced: the cap was reached and ``<emb>`` was appended.
        state_D: unit-norm state at ``<emb>``, float32, without gradient; None where the present weights did not compute
            it.
        seconds: wall time of its batch divided by the batch's rows.
        age: steps since it was written.
        direct: nothing was written, on purpose: ``<emb>`` stands right after the prompt.
    """

    ids: tuple[int, ...]
    forced: bool
    state_D: Tensor | None = field(repr=False)
    seconds: float
    age: int = 0
    direct: bool = False


def generate(
    embedder: EmbeddingModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_progress: Callable[[int], object] | None = None,
    num_each: int = 1,
    encoded: EncodedPrompts | None = None,
    places: Sequence[int] | None = None,
) -> list[Rationale]:
    """Write rationales for every prompt.

    The result of a row does not depend on the other rows: greedy decoding has no randomness, and sampling takes its
    random numbers from the row's own seed.

    Args:
        embedder: the model, unwrapped.
        prompts: what to continue, any lengths.
        max_new_tokens: cap on generated tokens, ``<emb>`` included, as `max_new_tokens` of transformers' generate.
        batch_size: rationales written at once. Prompts are sorted by length first, so that little is padding.
        temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
        seeds: one a rationale, required for sampling.
        on_progress: called with the number of prompts just finished, after each batch.
        num_each: rationales a prompt, all continued from one encoding of it.
        encoded: keys and values of the prompts, where they are known already; read without gradient.
        places: where in `encoded` each prompt is; None where it holds exactly these in this order.

    Returns:
        In the order of the prompts, `num_each` rationales of the first, then of the second ...

    Raises:
        ValueError: a sampling temperature without seeds, or a cap below one token.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts) * num_each):
        raise ValueError("sampling (temperature > 0) needs one seed a rationale")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    at_once = max(1, batch_size // num_each)
    results: dict[int, Rationale] = {}
    was_training = embedder.training
    # Also switches gradient checkpointing off, which in training mode would compute every layer twice.
    embedder.eval()
    try:
        for start in range(0, len(order), at_once):
            chosen = order[start : start + at_once]
            rows = [index * num_each + number for index in chosen for number in range(num_each)]
            uniform = None
            if temperature > 0:
                streams = [np.random.Generator(np.random.Philox(key=seeds[row])) for row in rows]  # type: ignore[index]
                uniform = torch.from_numpy(np.stack([stream.random(max_new_tokens) for stream in streams]))
            began = time.perf_counter()
            if encoded is None:
                known, known_at = _encode(embedder, [prompts[index] for index in chosen]), range(len(chosen))
            else:
                known, known_at = encoded, [index if places is None else places[index] for index in chosen]
            repeated = [place for place in known_at for _ in range(num_each)]
            batch = _generate_batch(embedder, known, repeated, max_new_tokens, temperature, uniform)
            seconds = (time.perf_counter() - began) / len(rows)
            for row, (ids, forced, state) in zip(rows, batch, strict=True):
                results[row] = Rationale(tuple(ids), forced, state, seconds)
            if on_progress is not None:
                on_progress(len(chosen))
    finally:
        embedder.train(was_training)
    return [results[row] for row in range(len(results))]


@torch.no_grad()
def _encode(embedder: EmbeddingModel, prompts: Sequence[Prompt]) -> EncodedPrompts:
    encoded = embedder(embedder.pack_prompts(prompts))[0].encoded
    assert encoded is not None
    return encoded


@torch.no_grad()
def _generate_batch(
    embedder: EmbeddingModel,
    encoded: EncodedPrompts,
    places: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    uniform_RL: Tensor | None,
) -> list[tuple[list[int], bool, Tensor]]:
    """Continue the prompts at `places` of what was encoded: ids, whether `<emb>` was forced, state at it."""
    model, emb_id, device = embedder.model, embedder.emb_id, embedder.device
    text, words, head = decoder(model), model.get_input_embeddings(), model.get_output_embeddings()
    part, rows = encoded.part, torch.tensor(places, device=device)
    R = len(places)
    # Step 0 reads the prompt's last token, step n the n-th token of the rationale, and one more a forced `<emb>`.
    num_steps = max_new_tokens + 2
    cache = Cache(encoded, rows, num_steps, words.weight.dtype)
    cos_LBd, sin_LBd = _rotations(model, part.last_position_3B[:, rows], part.after_B[rows], num_steps)
    barred_V: Tensor | None = None
    if uniform_RL is not None:
        uniform_RL = uniform_RL.to(device)
    # A look at the device costs a wait on a GPU, and running a row on that is done costs little: look rarely there.
    look_every = 1 if device.type == "cpu" else 4
    written_RL = torch.full((R, max_new_tokens + 1), emb_id, device=device)
    state_RD: Tensor | None = None
    row_B = torch.arange(R, device=device)
    token_B = part.last_id_B[rows]
    done_B = torch.zeros(R, dtype=torch.bool, device=device)
    for step in range(num_steps):
        hidden_BTD = words(token_B[None])
        for layer in text.layers:
            hidden_BTD = layer(
                hidden_BTD,
                attention_mask=cache,
                position_embeddings=(cos_LBd[step, None], sin_LBd[step, None]),
            )
        hidden_BD = text.norm(hidden_BTD)[0]
        ends_B = (token_B == emb_id) & ~done_B if step else done_B
        if state_RD is None:
            state_RD = torch.zeros_like(normalise(hidden_BD))
        # Without a branch on what the device knows: rows that do not end write back what was there.
        state_RD[row_B] = torch.where(ends_B[:, None], normalise(hidden_BD), state_RD[row_B])
        done_B = done_B | ends_B
        if step == num_steps - 1:
            break
        if step % look_every == 0 or step == max_new_tokens:
            num_alive = len(row_B) - int(done_B.sum())
            if num_alive == 0:
                break
            # Copying the cache costs about as much as a step with it; worth it once a quarter of the rows is done.
            if num_alive <= 0.75 * len(row_B):
                keep = (~done_B).nonzero().flatten()
                cache.keep_rows(keep)
                hidden_BD, row_B, done_B = hidden_BD[keep], row_B[keep], done_B[keep]
                cos_LBd, sin_LBd = cos_LBd[:, keep], sin_LBd[:, keep]
        if step < max_new_tokens:
            logit_BV = head(hidden_BD).float()
            if barred_V is None:
                barred_V = torch.zeros_like(logit_BV[0])
                barred_V[torch.tensor(embedder.suppressed_ids, device=device)] = float("-inf")
            logit_BV = logit_BV + barred_V
            token_B = _choose(logit_BV, temperature, None if uniform_RL is None else uniform_RL[row_B, step])
            token_B = token_B.masked_fill(done_B, emb_id)
            written_RL[row_B, step] = token_B
        else:
            token_B = torch.full_like(row_B, emb_id)
    assert state_RD is not None
    found = []
    for ids, state in zip(written_RL.tolist(), state_RD, strict=True):
        length = ids.index(emb_id)
        found.append((ids[:length], length == max_new_tokens, state))
    return found


def _rotations(
    model: nn.Module, last_position_3B: Tensor, after_B: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (L, B, head size) of every step's token: the prompt's last, then what follows the prompt."""
    follow_LB = after_B + torch.arange(num_steps - 1, device=after_B.device)[:, None]
    position_3LB = torch.cat([last_position_3B[:, None], follow_LB.expand(3, -1, -1)], dim=1)
    cos, sin = rotations(model, position_3LB.flatten(1))
    return cos.unflatten(0, position_3LB.shape[1:]), sin.unflatten(0, position_3LB.shape[1:])


def _choose(logit_BV: Tensor, temperature: float, uniform_B: Tensor | None) -> Tensor:
    if uniform_B is None:
        return logit_BV.argmax(dim=-1)
    # Inverse of the cumulative distribution: one random number a row and token, so a row's draw is its own.
    cumulative_BV = torch.softmax(logit_BV.double() / temperature, dim=-1).cumsum(dim=-1)
    threshold_B1 = (uniform_B.to(logit_BV.device) * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).flatten()

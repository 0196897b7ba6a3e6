"""Generate rationales in batches: whether to write one (``mode=auto``), sampling, caps, and the state at ``<emb>``.

Nothing is inherited from the model's generation settings: only the arguments here affect generation. Rationales
are carried as token ids; decoding and tokenising them again may give other ids, and with them another state.
Finished rows leave the batch. Steps run one by one (`rge.rollout.decoding`), or as CUDA graphs (`rge.rollout.cuda_graphs`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rge.model.attention import EncodedParts
from rge.model.embedding_model import EmbeddingModel, eval_mode
from rge.model.packing import by_length
from rge.model.prompts import Prompt
from rge.rollout.cuda_graphs import capturing
from rge.rollout.decoding import Choice, Decoding, PlainSteps, Rows
from rge.rollout.micro_batches import encode_prompts


@dataclass(frozen=True, slots=True)
class Rationale:
    """What the model wrote for one prompt."""

    ids: tuple[int, ...]  # without ``<emb>``; empty if the model directly wrote ``<emb>``
    forced: bool  # its cap, above 0, was reached and ``<emb>`` was appended
    # Unit-norm state at ``<emb>``, float32, without gradient; None unless computed with the current weights.
    state_D: Tensor | None = field(repr=False)
    seconds: float  # wall time of its batch divided by the batch's rows
    age: int = 0  # steps since generation
    direct: bool = False  # deliberately empty: ``<emb>`` directly follows the prompt
    capped: bool = False  # ended by a cap that training drew for its query, see `rge.rollout.writer`
    oracle: bool = False  # not generated: the ids are the oracle's rationale
    # Smallest decision margin over its tokens: the lead of the best logit over the second, or the distance of a drawn number to
    # the nearest one that would have drawn another token; with `direct_above`, at most the distance of ``<emb>``'s probability from
    # it; infinite unless requested.
    margin: float = float("inf")
    # Of its tokens, and of ``<emb>`` if the model wrote it, as an external sampler reported them; None: our forward computes them.
    log_probs: tuple[float, ...] | None = None


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
    encoded: EncodedParts | None = None,
    places: Sequence[int] | None = None,
    margins: bool = False,
    on_token: Callable[[int, int], object] | None = None,
    min_new_tokens: int = 0,
    with_direct: bool = False,
    direct_above: float | None = None,
    caps: Sequence[int] | None = None,
    batch_tokens: int | None = None,
) -> list[Rationale]:
    """Write rationales for every prompt.

    The result of a row does not depend on the other rows: greedy decoding has no randomness, and sampling takes its
    random numbers from the row's own seed.

    Args:
        embedder: the model, unwrapped.
        prompts: of any length.
        max_new_tokens: cap on generated tokens, ``<emb>`` included, as `max_new_tokens` of transformers' generate.
        batch_size: rationales per batch. Prompts are sorted by length to minimise padding.
        batch_tokens: prompt tokens per batch, those of a batch's longest prompt for each rationale; None: no limit.
        temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
        seeds: one per rationale, required for sampling.
        on_progress: receives the number of prompts just finished, after each batch.
        num_each: rationales per prompt, all from one encoding of it.
        encoded: precomputed keys and values of the prompts; read without gradient.
        places: index of each prompt in `encoded`; None: same prompts, same order.
        margins: compute `Rationale.margin`.
        on_token: receives a rationale's index in the result and each new token, ``<emb>`` included; exceptions end generation.
        min_new_tokens: ``<emb>`` is suppressed before this many tokens; 0 allows empty rationales.
        with_direct: read each prompt's direct state too, from the same encoding.
        direct_above: write nothing if the probability of ``<emb>`` as first token is at least this, otherwise something; None:
            ``<emb>`` is an ordinary token.
        caps: of each prompt's rationales, in tokens, from 0 (the direct state) to `max_new_tokens`; ``<emb>`` follows a
            rationale that reaches its cap, as if all had been written with this one. They precede `min_new_tokens` and
            `direct_above`. None: `max_new_tokens` for all.

    Returns:
        For each prompt in order, its `num_each` rationales, and an empty one for its direct state if that is asked for.

    Raises:
        ValueError: sampling without seeds, or limits that contradict each other.
    """
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts) * num_each):
        raise ValueError("sampling (temperature > 0) needs one seed per rationale")
    choice = Choice(max_new_tokens, temperature, min_new_tokens, direct_above, margins)
    num_rows = num_each + with_direct
    cap_of_row = _caps_of_rows(caps, prompts, choice, num_each, with_direct)
    results: dict[int, Rationale] = {}
    plain = PlainSteps()
    most = max(1, batch_size // num_each), batch_tokens and batch_tokens // num_each
    with eval_mode(embedder), capturing(embedder) as captured:
        for chosen in by_length([*map(len, prompts)], *most):
            rows = [index * num_rows + number for index in chosen for number in range(num_rows)]
            own_seeds: list[int | None] | None = None
            if seeds is not None and temperature > 0:
                of_prompt = [seeds[index * num_each : (index + 1) * num_each] for index in chosen]
                own_seeds = [seed for own in of_prompt for seed in (*own, *[None] * with_direct)]
            began = time.perf_counter()
            known, known_at = encoded, [index if places is None else places[index] for index in chosen]
            if known is None:
                with torch.no_grad():
                    known = encode_prompts(embedder, embedder, [prompts[index] for index in chosen])
                known_at = [*range(len(chosen))]
            batch = Decoding(
                embedder,
                known,
                Rows(
                    rows,
                    np.repeat(known_at, num_rows).tolist(),
                    own_seeds,
                    None if cap_of_row is None else [cap_of_row[row] for row in rows],
                ),
                choice,
                captured if captured is not None and known.is_flat else plain,
                on_token,
            )
            written = batch.run()
            del batch  # free its memory before the next batch allocates
            seconds = (time.perf_counter() - began) / len(rows)
            for row, (ids, forced, state_D, margin) in zip(rows, written, strict=True):
                # At a cap of 0 nothing was to be written: no decision of the model's.
                silent = forced and not ids
                results[row] = Rationale(
                    ids, forced and not silent, state_D, seconds, direct=silent, margin=margin
                )
            if on_progress is not None:
                on_progress(len(chosen))
    return [results[row] for row in range(len(results))]


def _caps_of_rows(
    caps: Sequence[int] | None, prompts: Sequence[Prompt], choice: Choice, num_each: int, with_direct: bool
) -> list[int] | None:
    """The cap of every row of a result, 0 for direct states; None: `max_new_tokens` for all."""
    most = choice.max_new_tokens
    if caps is None:
        return [*[most] * num_each, 0] * len(prompts) if with_direct else None
    if len(caps) != len(prompts):
        raise ValueError(f"{len(caps)} caps for {len(prompts)} prompts: give one per prompt")
    if wrong := [cap for cap in caps if not 0 <= cap <= most]:
        raise ValueError(f"a cap must be 0 to max_new_tokens={most}, got {wrong[0]}")
    return [cap for one in caps for cap in (*[one] * num_each, *[0] * with_direct)]

"""Embed queries and candidates with a finished checkpoint: what evaluation and users call.

For example:

    encoder = load_encoder("runs/demo/joint/final")
    found = encoder.encode([Item("1", "What opens this?", ("padlock.png",))], side="query", mode="reasoning")

Every figure of an evaluation comes from here, and so does every embedding of a service built on a checkpoint.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rge.checkpoints.export import checkpoint_hash, read_settings
from rge.common.schema import Encoded, Item
from rge.model.backbone import load_backbone
from rge.model.embedder import Embedder
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import generate


class Encoder:
    """An embedder with its prompts and its pinned generation settings.

    Args:
        embedder: the model, in evaluation mode.
        builder: makes prompts.
        checkpoint: directory it was loaded from.
        settings: content of ``rge.json``.
    """

    def __init__(
        self, embedder: Embedder, builder: PromptBuilder, checkpoint: Path, settings: dict[str, Any]
    ):
        self.embedder, self.builder, self.checkpoint, self.settings = (
            embedder.eval(),
            builder,
            checkpoint,
            settings,
        )
        self.checkpoint_hash = checkpoint_hash(checkpoint)

    def encode(
        self,
        items: Sequence[Item],
        *,
        side: Literal["query", "candidate"],
        mode: Literal["reasoning", "direct"],
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> Encoded:
        """Embed items. A row does not depend on the other rows, on the batch size or on padding.

        Args:
            items: what to embed.
            side: decides the wording of the prompt.
            mode: ``reasoning`` lets the model write a rationale first; ``direct`` prefills ``<emb>``.
            batch_size: rows a forward.
            seeds: one an item, needed where the settings ask for sampling.
            on_progress: called with the number of items just finished.

        Returns:
            Embeddings and what was written, in the order of the items.

        Raises:
            ValueError: an unknown mode, an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        if mode not in ("reasoning", "direct"):
            raise ValueError(f"mode must be reasoning or direct, got {mode!r}")
        results: list[tuple[np.ndarray, str, int, str, float, float]] = []
        # Pictures of one window are in memory at a time; within it, rows are sorted by length.
        window = 8 * batch_size
        for start in range(0, len(items), window):
            began = time.perf_counter()
            prompts = [self.builder.build(item, side) for item in items[start : start + window]]
            prepare_ms = (time.perf_counter() - began) * 1000 / len(prompts)
            if mode == "direct":
                results += self._direct(prompts, batch_size, prepare_ms, on_progress)
            else:
                window_seeds = None if seeds is None else seeds[start : start + window]
                results += self._reasoning(prompts, batch_size, prepare_ms, window_seeds, on_progress)
        columns = list(zip(*results, strict=True)) if results else [()] * 6
        width = self.embedder.model.config.get_text_config().hidden_size
        return Encoded(
            embeddings=np.stack(columns[0]) if results else np.empty((0, width), np.float32),
            rationales=list(columns[1]),
            num_rationale_tokens=np.array(columns[2], dtype=np.int64),
            stop_reasons=list(columns[3]),
            generate_ms=np.array(columns[4], dtype=np.float64),
            embed_ms=np.array(columns[5], dtype=np.float64),
        )

    def _reasoning(self, prompts, batch_size, prepare_ms, seeds, on_progress):
        settings = self.settings["generation"]
        rationales = generate(
            self.embedder,
            prompts,
            max_new_tokens=settings["max_new_tokens"],
            temperature=settings["temperature"],
            batch_size=batch_size,
            seeds=seeds,
            on_progress=on_progress,
        )
        return [
            (
                rationale.state_D.float().cpu().numpy(),
                self.builder.decode(rationale.ids),
                len(rationale.ids),
                "forced" if rationale.forced else "emb",
                rationale.seconds * 1000,
                prepare_ms,
            )
            for rationale in rationales
        ]

    @torch.no_grad()
    def _direct(self, prompts, batch_size, prepare_ms, on_progress):
        branch = Branch([self.embedder.emb_id], read_state=True)
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: list[tuple | None] = [None] * len(prompts)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            began = time.perf_counter()
            packed = self.embedder.pack([prompts[row] for row in rows], [[branch]] * len(rows))
            states = self.embedder(packed)[0].state_ND.float().cpu().numpy()
            embed_ms = (time.perf_counter() - began) * 1000 / len(rows)
            for row, state in zip(rows, states, strict=True):
                found[row] = (state, "", 0, "prefilled", 0.0, prepare_ms + embed_ms)
            if on_progress is not None:
                on_progress(len(rows))
        return found


def load_encoder(
    checkpoint: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
) -> Encoder:
    """Load a finished checkpoint.

    Args:
        checkpoint: directory with weights, processor and ``rge.json``.
        device: e.g. ``cuda:0``; None takes a GPU if there is one.
        dtype: weights' dtype; None takes float32 on CPU and the recipe's on GPU.
        max_new_tokens: overrides the checkpoint's cap on a rationale.
        temperature: overrides the checkpoint's greedy decoding.

    Raises:
        CheckpointError: not a checkpoint of rge.
        BackboneError: its weights or processor cannot be loaded, or have no ``<emb>``.
    """
    checkpoint = Path(checkpoint)
    settings = read_settings(checkpoint)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else settings["recipe"]["model"]["dtype"])
    generation = dict(settings["generation"])
    if max_new_tokens is not None:
        generation["max_new_tokens"] = max_new_tokens
    if temperature is not None:
        generation["temperature"] = temperature
    settings = {**settings, "generation": generation, "dtype": dtype}
    backbone = load_backbone(
        checkpoint, dtype=dtype, min_pixels=settings["pixels"]["min"], max_pixels=settings["pixels"]["max"]
    )
    embedder = Embedder(backbone).to(device)
    builder = PromptBuilder(backbone.processor, settings["profile"], settings["max_prompt_tokens"])
    return Encoder(embedder, builder, checkpoint, settings)

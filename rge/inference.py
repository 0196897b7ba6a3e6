"""Turn prompts into embeddings with a finished checkpoint.

Safe for threads: what a call computes is its own, and calls take turns, since two at once would take twice the memory and, on
a CPU, each other's cores.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rge.checkpoints.settings import CheckpointSettings, Settings
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.modes import SILENT, Mode
from rge.common.schema import Encoded, Item
from rge.cpu_threads import limit_threads
from rge.model.backbone import BackboneError, load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import Branch, by_length
from rge.model.prompts import Prompt, PromptBuilder
from rge.rollout.generate import Rationale, generate
from rge.rollout.vllm_writer import VllmWriter

CLOSE = {"greedy": 2e-3, "drawn": 1e-4}
"""`Rationale.margin` below which float32 in another batch might choose another token; rounding moves it by some 1e-5."""

Side = Literal["query", "candidate"]
OnProgress = Callable[[int], object]


@dataclass(frozen=True)
class Asked:
    """How to embed prompts: see `rge.embedder.Embedder.encode`."""

    mode: Mode
    batch_size: int = 64
    seeds: Sequence[int] | None = None


@dataclass(frozen=True)
class VllmOptions:
    """Share of a GPU's memory for vLLM, and the rows that it works on at once."""

    memory: float
    rows: int


class Inference:
    """A model, put into evaluation mode, with its prompts; an `engine` may write its rationales."""

    def __init__(self, model: EmbeddingModel, builder: PromptBuilder, engine: VllmWriter | None = None):
        self.model, self.builder, self.engine = model.eval(), builder, engine
        self._computing = threading.RLock()
        self._tokenizing = threading.Lock()  # a tokenizer serves one thread at a time

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: CheckpointSettings,
        device: str,
        vllm: VllmOptions | None = None,
        base: Path | None = None,
    ) -> "Inference":
        """Load a checkpoint as the settings say; `base` belongs to one of adapters.

        Raises:
            BackboneError: weights or processor cannot be loaded, have no ``<emb>``, or vLLM does not start.
        """
        if device == "cpu":
            limit_threads()
        if vllm is not None and base is not None:
            raise BackboneError(
                f"engine=vllm reads a checkpoint's weights itself, and {folder} holds adapters alone: export it with "
                "export.adapters_only=false, or use engine=own"
            )
        backbone = load_backbone(
            folder,
            dtype=settings.dtype,
            min_pixels=settings.pixels.min,
            max_pixels=settings.pixels.max,
            quantization=settings.quantization,
            device=device,
            think_tokens=settings.think_tokens,
            base=base,
        )
        builder = PromptBuilder(backbone.processor, settings.profile, settings.max_prompt_tokens)
        model = EmbeddingModel(backbone)
        if vllm is None:
            return cls(model.to(device), builder)
        engine = VllmWriter.of_checkpoint(
            model.eval(),
            folder,
            device,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_new_tokens=settings.generation.max_new_tokens,
            batch_size=vllm.rows,
            memory=vllm.memory,
        )
        # Only now, since vLLM measures how much of the device is free.
        return cls(model.to(device), builder, engine)

    @property
    def size(self) -> int:
        """Number of components of an embedding."""
        return self.model.model.config.get_text_config().hidden_size

    def prompt(self, item: Item, side: Side, images: Sequence[Image.Image] | None = None) -> Prompt:
        """The prompt of an item, see `rge.model.prompts.PromptBuilder.build`; safe to call from several threads."""
        if images is None:
            images = [load_image(ref) for ref in item.images]
        with self._tokenizing:
            return self.builder.build(item, side, images)

    @torch.no_grad()
    def embed(
        self,
        prompts: Sequence[Prompt],
        asked: Asked,
        settings: Settings,
        on_progress: OnProgress = lambda count: None,
        prepare_ms: float = 0.0,
    ) -> Encoded:
        """Embed prompts, at least one; `on_progress` is called with the number just finished.

        What each prompt took to make, `prepare_ms`, is counted into its ``embed_ms``.

        Raises:
            UserError: the checkpoint was not trained for the mode.
            ValueError: sampling without seeds, or what vLLM cannot do.
        """
        num = len(prompts)
        settings.check_mode(asked.mode)
        with self._computing:
            if asked.mode in SILENT:
                together = 1 if settings.exact else asked.batch_size
                states, embed_ms = self._prefilled(prompts, asked.mode, together, on_progress)
                return Encoded(
                    states, [""] * num, np.zeros(num, np.int64), ["prefilled"] * num, np.zeros(num), embed_ms + prepare_ms
                )  # fmt: skip
            rationales = self._rationales(prompts, asked, settings, on_progress)
            embed_ms = np.full(num, prepare_ms)
            if settings.exact:
                for row, rationale in enumerate(rationales):
                    began = time.perf_counter()
                    state_D = self._states(prompts[row : row + 1], [rationale.ids])[0]
                    rationales[row] = replace(rationale, state_D=state_D)
                    embed_ms[row] += (time.perf_counter() - began) * 1000
        with self._tokenizing:
            texts = [self.builder.decode(one.ids) for one in rationales]
        return Encoded(
            torch.stack([cast(Tensor, one.state_D).float().cpu() for one in rationales]).numpy(),
            texts,
            np.array([len(one.ids) for one in rationales], np.int64),
            ["forced" if one.forced else "emb" for one in rationales],
            np.array([one.seconds * 1000 for one in rationales]),
            embed_ms,
        )

    @torch.no_grad()
    def embed_after(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]], batch_size: int
    ) -> np.ndarray:
        """Embeddings (N, D) of prompts after given rationales; see `rge.embedder.Embedder.encode_after`."""
        with self._computing:
            return self._in_batches(prompts, rationales, batch_size)

    @torch.no_grad()
    def direct_probabilities(self, prompts: Sequence[Prompt], batch_size: int) -> np.ndarray:
        """(N,) see `rge.embedder.Embedder.direct_probabilities`."""
        head, barred = self.model.model.get_output_embeddings(), torch.tensor(self.model.suppressed_ids)
        found = np.empty(len(prompts), np.float32)
        with self._computing:
            for rows in by_length([*map(len, prompts)], batch_size):
                logit_BV = head(self.model.states_before_answer([prompts[row] for row in rows])).float()
                logit_BV = logit_BV.index_fill(1, barred.to(logit_BV.device), -torch.inf)
                found[rows] = logit_BV.softmax(dim=1)[:, self.model.emb_id].cpu().numpy()
        return found

    def _states(self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]]) -> Tensor:
        """States (N, D) after rationales, in one forward."""
        branches = [[Branch([*ids, self.model.emb_id], read_state=True)] for ids in rationales]
        return self.model(self.model.pack(prompts, branches))[0].state_ND

    def _in_batches(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]], batch_size: int
    ) -> np.ndarray:
        """States (N, D) after rationales, batches of similar lengths."""
        found = np.empty((len(prompts), self.size), np.float32)
        lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompts, rationales, strict=True)]
        for rows in by_length(lengths, batch_size):
            states = self._states([prompts[row] for row in rows], [rationales[row] for row in rows])
            found[rows] = states.float().cpu().numpy()
        return found

    def _prefilled(
        self, prompts: Sequence[Prompt], mode: Mode, together: int, on_progress: OnProgress
    ) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings (N, D) at an ``<emb>`` right after the prompt, and milliseconds (N,)."""
        given = self.model.given[mode]
        found, embed_ms = np.empty((len(prompts), self.size), np.float32), np.empty(len(prompts))
        for rows in by_length([*map(len, prompts)], together):
            began = time.perf_counter()
            shown = [prompts[row] for row in rows]
            found[rows] = self._states(shown, [given] * len(rows)).float().cpu().numpy()
            embed_ms[rows] = (time.perf_counter() - began) * 1000 / len(rows)
            on_progress(len(rows))
        return found, embed_ms

    def _rationales(
        self, prompts: Sequence[Prompt], asked: Asked, settings: Settings, on_progress: OnProgress
    ) -> list[Rationale]:
        generation = settings.generation
        least, above = generation.min_new_tokens, None
        if asked.mode == "auto":
            above = generation.direct_above
        elif settings.decides_itself:
            least = max(least, 1)  # mode=reasoning is asked for words
        if self.engine is not None:
            if least or above is not None:
                raise UserError(
                    "engine=vllm supports neither forced rationales nor a threshold: use engine=own"
                )
            rationales = self.engine.generate(prompts, temperature=generation.temperature, seeds=asked.seeds)
            states = self._in_batches(prompts, [one.ids for one in rationales], asked.batch_size)
            rationales = [
                replace(one, state_D=torch.from_numpy(state))
                for one, state in zip(rationales, states, strict=True)
            ]
            on_progress(len(prompts))
            return rationales

        def write(rows: Sequence[int], batch_size: int, **options: Any) -> list[Rationale]:
            return generate(
                self.model,
                [prompts[row] for row in rows],
                max_new_tokens=generation.max_new_tokens,
                temperature=generation.temperature,
                min_new_tokens=least,
                direct_above=above,
                batch_size=batch_size,
                seeds=None if asked.seeds is None else [asked.seeds[row] for row in rows],
                **options,
            )

        every = range(len(prompts))
        if not settings.exact:
            return write(every, asked.batch_size, on_progress=on_progress)
        together = asked.batch_size if settings.dtype == "float32" else 1
        rationales = write(every, together, on_progress=on_progress, margins=together > 1)
        close = CLOSE["drawn" if generation.temperature > 0 else "greedy"]
        return [
            write([row], 1)[0] if rationale.margin < close else rationale
            for row, rationale in enumerate(rationales)
        ]

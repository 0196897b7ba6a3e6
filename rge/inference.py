"""Turn prompts into embeddings with a finished checkpoint.

Thread-safe: calls take turns, since two at once would need twice the memory and, on a CPU, compete for cores.
"""

import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
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
from rge.common.prompt_profiles import Profile
from rge.common.schema import Encoded, Item
from rge.cpu_threads import limit_threads
from rge.model.backbone import BackboneError, load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import Branch, by_length
from rge.model.prompts import Prompt, PromptBuilder
from rge.rollout.generate import Rationale, generate
from rge.rollout.vllm_writer import VllmWriter

CLOSE = {"greedy": 2e-3, "drawn": 1e-4}
"""`Rationale.margin` below which float32 rounding in another batch, about 1e-5, might choose another token."""

Side = Literal["query", "candidate"]
OnProgress = Callable[[int], object]


@dataclass(frozen=True)
class EncodeOptions:
    """How to embed prompts: see `rge.embedder.Embedder.encode`."""

    mode: Mode
    batch_size: int = 64
    seeds: Sequence[int] | None = None


@dataclass(frozen=True)
class VllmOptions:
    """Share of a GPU's memory for vLLM, and the rows that it processes at once."""

    memory: float
    rows: int


class Inference:
    """A model in evaluation mode with its prompt builder; an `engine` may write its rationales."""

    def __init__(self, model: EmbeddingModel, builder: PromptBuilder, engine: VllmWriter | None = None):
        self.model, self.builder, self.engine = model.eval(), builder, engine
        self._computing = threading.RLock()
        self._tokenizing = threading.Lock()  # a tokenizer serves one thread at a time

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has locks of its own.
        return Inference, (self.model, self.builder, self.engine)

    def worded(self, profile: Profile) -> "Inference":
        """The same model with the prompts of another profile; calls of both take turns."""
        other = Inference(self.model, copy(self.builder), self.engine)
        other.builder.profile = profile
        other._computing, other._tokenizing = self._computing, self._tokenizing
        return other

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: CheckpointSettings,
        device: str,
        vllm: VllmOptions | None = None,
        base: Path | None = None,
    ) -> "Inference":
        """Load a checkpoint with these settings; `base` is for one of adapters.

        Raises:
            BackboneError: weights or processor cannot be loaded or have no ``<emb>``, or vLLM does not start.
            UserError: there is no such device.
        """
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={device} cannot be used: {str(error).splitlines()[0]}") from None
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
        options: EncodeOptions,
        settings: Settings,
        on_progress: OnProgress = lambda count: None,
        prepare_ms: float = 0.0,
    ) -> Encoded:
        """Embed one or more prompts; `on_progress` is called with the number just finished.

        `prepare_ms`, the time that making each prompt took, is added to its ``embed_ms``.

        Raises:
            UserError: the checkpoint was not trained for the mode.
            ValueError: sampling without seeds, or what vLLM cannot do.
        """
        num = len(prompts)
        settings.check_mode(options.mode)
        with self._computing:
            if options.mode in SILENT:
                batch_size = 1 if settings.exact else options.batch_size
                states, embed_ms = self._prefilled(prompts, options.mode, batch_size, on_progress)
                return Encoded(
                    states, [""] * num, np.zeros(num, np.int64), ["prefilled"] * num, np.zeros(num), embed_ms + prepare_ms
                )  # fmt: skip
            rationales = self._rationales(prompts, options, settings, on_progress)
            embed_ms = np.full(num, prepare_ms)
            if settings.exact:
                for row, rationale in enumerate(rationales):
                    began = time.perf_counter()
                    state_D = self._states(prompts[row : row + 1], [rationale.ids])[0]
                    rationales[row] = replace(rationale, state_D=state_D)
                    embed_ms[row] += (time.perf_counter() - began) * 1000
        with self._tokenizing:
            texts = [self.builder.decode(rationale.ids) for rationale in rationales]
        return Encoded(
            torch.stack([cast(Tensor, rationale.state_D).float().cpu() for rationale in rationales]).numpy(),
            texts,
            np.array([len(rationale.ids) for rationale in rationales], np.int64),
            ["forced" if rationale.forced else "emb" for rationale in rationales],
            np.array([rationale.seconds * 1000 for rationale in rationales]),
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
        """See `rge.embedder.Embedder.direct_probabilities`."""
        head, suppressed = self.model.model.get_output_embeddings(), torch.tensor(self.model.suppressed_ids)
        probabilities = np.empty(len(prompts), np.float32)
        with self._computing:
            for rows in by_length([*map(len, prompts)], batch_size):
                logit_BV = head(self.model.states_before_answer([prompts[row] for row in rows])).float()
                logit_BV = logit_BV.index_fill(1, suppressed.to(logit_BV.device), -torch.inf)
                probabilities[rows] = logit_BV.softmax(dim=1)[:, self.model.emb_id].cpu().numpy()
        return probabilities

    def _states(self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]]) -> Tensor:
        """States (N, D) after rationales, in one forward."""
        branches = [[Branch([*ids, self.model.emb_id], read_state=True)] for ids in rationales]
        return self.model(self.model.pack(prompts, branches))[0].state_ND

    def _in_batches(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]], batch_size: int
    ) -> np.ndarray:
        """States (N, D) after rationales, in batches of similar lengths."""
        state_ND = np.empty((len(prompts), self.size), np.float32)
        lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompts, rationales, strict=True)]
        for rows in by_length(lengths, batch_size):
            states = self._states([prompts[row] for row in rows], [rationales[row] for row in rows])
            state_ND[rows] = states.float().cpu().numpy()
        return state_ND

    def _prefilled(
        self, prompts: Sequence[Prompt], mode: Mode, batch_size: int, on_progress: OnProgress
    ) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings (N, D) without a generated rationale, and milliseconds (N,)."""
        prefix = self.model.given[mode]
        state_ND, embed_ms = np.empty((len(prompts), self.size), np.float32), np.empty(len(prompts))
        for rows in by_length([*map(len, prompts)], batch_size):
            began = time.perf_counter()
            states = self._states([prompts[row] for row in rows], [prefix] * len(rows))
            state_ND[rows] = states.float().cpu().numpy()
            embed_ms[rows] = (time.perf_counter() - began) * 1000 / len(rows)
            on_progress(len(rows))
        return state_ND, embed_ms

    def _rationales(
        self, prompts: Sequence[Prompt], options: EncodeOptions, settings: Settings, on_progress: OnProgress
    ) -> list[Rationale]:
        generation = settings.generation
        min_new_tokens, direct_above = generation.min_new_tokens, None
        if options.mode == "auto":
            direct_above = generation.direct_above
        elif settings.decides_itself:
            min_new_tokens = max(min_new_tokens, 1)  # mode=reasoning must not answer directly
        if self.engine is not None:
            if min_new_tokens or direct_above is not None:
                raise UserError(
                    "engine=vllm supports neither forced rationales nor a threshold: use engine=own"
                )
            rationales = self.engine.generate(
                prompts, temperature=generation.temperature, seeds=options.seeds
            )
            state_ND = self._in_batches(
                prompts, [rationale.ids for rationale in rationales], options.batch_size
            )
            rationales = [
                replace(rationale, state_D=torch.from_numpy(state_D))
                for rationale, state_D in zip(rationales, state_ND, strict=True)
            ]
            on_progress(len(prompts))
            return rationales

        def write(rows: Sequence[int], batch_size: int, **more: Any) -> list[Rationale]:
            return generate(
                self.model,
                [prompts[row] for row in rows],
                max_new_tokens=generation.max_new_tokens,
                temperature=generation.temperature,
                min_new_tokens=min_new_tokens,
                direct_above=direct_above,
                batch_size=batch_size,
                seeds=None if options.seeds is None else [options.seeds[row] for row in rows],
                **more,
            )

        every = range(len(prompts))
        if not settings.exact:
            return write(every, options.batch_size, on_progress=on_progress)
        batch_size = options.batch_size if settings.dtype == "float32" else 1
        rationales = write(every, batch_size, on_progress=on_progress, margins=batch_size > 1)
        close = CLOSE["drawn" if generation.temperature > 0 else "greedy"]
        return [
            write([row], 1)[0] if rationale.margin < close else rationale
            for row, rationale in enumerate(rationales)
        ]

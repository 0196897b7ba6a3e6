"""Turn prompts into embeddings with a finished checkpoint.

Thread-safe: calls take turns, since two at once would need twice the memory and, on a CPU, compete for cores.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rge.checkpoints.settings import CheckpointSettings, Pixels, Settings
from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.common.parts import ImageRef
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded, Item
from rge.distributed.cpu_threads import limit_threads
from rge.model.backbone import BackboneError, load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import with_pixels
from rge.model.packing import Branch, by_length
from rge.model.prompts import Prompt, PromptBuilder
from rge.rollout.generate import Rationale, generate
from rge.rollout.vllm_writer import VllmWriter

CLOSE = {"greedy": 2e-3, "drawn": 1e-4}
"""`Rationale.margin` below which float32 rounding in another batch, about 1e-5, might choose another token."""

Most = tuple[int, int | None]
"""The most rows of a forward, and its most tokens (None: no limit)."""
ALONE: Most = (1, None)

Side = Literal["query", "candidate"]
OnProgress = Callable[[int], object]


class _ForkLocks:
    """Locks that no other thread holds during a fork; the child would wait for that thread, which it does not have.

    A thread that holds one of the computing locks must not wait for another, whose thread may fork as well and wait for the first.
    It waits for the short ones of the tokenizers alone; the child makes the others anew, and the models that they guard are only
    read.
    """

    def __init__(self) -> None:
        self._computing, self._tokenizing = weakref.WeakSet[Any](), weakref.WeakSet[Any]()
        self._listing = threading.RLock()
        self._of_fork = threading.local()

    def computing(self) -> Any:
        """A lock that is held while a model computes."""
        return self._made(self._computing)

    def tokenizing(self) -> Any:
        """A lock that is held shortly, by a thread that waits for none meanwhile."""
        return self._made(self._tokenizing)

    def _made(self, kind: weakref.WeakSet[Any]) -> Any:
        with self._listing:
            kind.add(lock := threading.RLock())
        return lock

    def before_fork(self) -> None:
        """Take the locks, all threads in the same order."""
        with self._listing:
            computing, tokenizing = (sorted(kind, key=id) for kind in (self._computing, self._tokenizing))
        holds_one = any(lock._is_owned() for lock in computing)
        self._of_fork.taken = tokenizing if holds_one else computing + tokenizing
        for lock in self._of_fork.taken:
            lock.acquire()

    def after_fork(self) -> None:
        """Release them, in the parent and in the child."""
        while self._of_fork.taken:
            self._of_fork.taken.pop().release()

    def in_child(self) -> None:
        """Release them, and free those of threads that the child does not have."""
        self.after_fork()
        self._listing._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library's modules do
        for lock in (*self._computing, *self._tokenizing):
            if not lock._is_owned():
                lock._at_fork_reinit()


_LOCKS = _ForkLocks()
os.register_at_fork(
    before=_LOCKS.before_fork, after_in_parent=_LOCKS.after_fork, after_in_child=_LOCKS.in_child
)


class Inference:
    """A model in evaluation mode with its prompt builder; an `engine` may write its rationales."""

    def __init__(self, model: EmbeddingModel, builder: PromptBuilder, engine: VllmWriter | None = None):
        self.model, self.builder, self.engine = model.eval(), builder, engine
        self._computing = _LOCKS.computing()
        self._tokenizing = _LOCKS.tokenizing()  # a tokenizer serves one thread at a time

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has locks of its own.
        return Inference, (self.model, self.builder, self.engine)

    def prompting(self, settings: Settings, pixels: Pixels | None = None) -> "Inference":
        """The same model with the prompts of other settings, and pictures of other `pixels`; calls of both take turns."""
        builder = self.builder.but(PROFILES[settings.profile], settings.max_prompt_tokens, settings.video)
        if pixels is not None:
            builder.processor = with_pixels(builder.processor, pixels.min, pixels.max)
        other = Inference(self.model, builder, self.engine)
        other._computing, other._tokenizing = self._computing, self._tokenizing
        return other

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: CheckpointSettings,
        device: str,
        base: Path | None = None,
        vllm: dict[str, Any] | None = None,
    ) -> "Inference":
        """Load a checkpoint with these settings; `base` is for one of adapters, `vllm` has sizes of `VllmWriter.of_checkpoint`.

        BackboneError: weights or processor cannot be loaded or have no ``<emb>``, or vLLM does not start. UserError: no device.
        """
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device={device} cannot be used: {str(error).splitlines()[0]}").about(
                "device"
            ) from None
        if device == "cpu":
            limit_threads()
        if vllm is not None and base is not None:
            raise BackboneError(
                "it contains only adapters, and engine=vllm reads a checkpoint's weights itself: export it with "
                "export.adapters_only=false, or use engine=own",
                folder,
            ).about("engine")
        backbone = load_backbone(
            folder,
            dtype=settings.dtype,
            min_pixels=settings.pixels.min,
            max_pixels=settings.pixels.max,
            quantization=settings.quantization,
            device=device,
            base=base,
        )
        builder = PromptBuilder(
            backbone.processor, settings.profile, settings.max_prompt_tokens, video=settings.video
        )
        model, engine = EmbeddingModel(backbone).eval(), None
        if vllm is not None:
            lengths = {
                "max_prompt_tokens": settings.max_prompt_tokens,
                "max_new_tokens": settings.generation.max_new_tokens,
            }
            engine = VllmWriter.of_checkpoint(model, folder, device, **lengths, **vllm)
        # Only now, since vLLM measures how much of the device is free.
        return cls(model.to(device), builder, engine)

    @property
    def size(self) -> int:
        """Number of components of an embedding."""
        return self.model.model.config.get_text_config().hidden_size

    def prompt(self, item: Item, side: Side, load: Callable[[ImageRef], Image.Image]) -> Prompt:
        """The prompt of an item, see `rge.model.prompts.PromptBuilder.build`; safe to call from several threads."""
        scaled = self.builder.scaled(item, load)
        with self._tokenizing:
            return self.builder.build_scaled(item, side, scaled)

    @torch.no_grad()
    def embed(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        *,
        mode: Mode,
        batch_size: int = 64,
        batch_tokens: int | None = None,
        seeds: Sequence[int] | None = None,
        caps: Sequence[int] | None = None,
        on_progress: OnProgress = lambda count: None,
    ) -> Encoded:
        """Embed one or more prompts, see `rge.embedder.Embedder.encode`; `on_progress` is called with the number just finished.

        A forward has at most `batch_size` rows and `batch_tokens` tokens, see `rge.model.packing.by_length`. `caps` has the most tokens of each row's rationale (None: the settings').

        UserError: the checkpoint was not trained for the mode; ValueError: sampling without seeds, or what vLLM cannot do.
        """
        settings.check_mode(mode)
        num, most = len(prompts), (batch_size, batch_tokens)
        of_states = ALONE if settings.exact else most
        if caps is None and settings.generation.max_rationale_tokens is not None:
            caps = [settings.generation.max_rationale_tokens] * num
        if mode != "direct" and caps is not None and not any(caps):
            mode = "direct"
        with self._computing:
            if mode == "direct":
                given: list[Sequence[int]] = [()] * num
                states, embed_ms = self._in_batches(prompts, given, of_states, on_progress)
                return Encoded(
                    states, [""] * num, np.zeros(num, np.int64), ["prefilled"] * num, np.zeros(num), embed_ms
                )  # fmt: skip
            written = self._written(prompts, settings, mode, most, seeds, caps, on_progress)
            if settings.exact or self.engine is not None:
                states, embed_ms = self._in_batches(prompts, [one.ids for one in written], of_states)
            else:
                found = [cast(Tensor, one.state_D).float().cpu() for one in written]
                states, embed_ms = torch.stack(found).numpy(), np.zeros(num)
        with self._tokenizing:
            texts = [self.builder.decode(one.ids) for one in written]
        return Encoded(
            states,
            texts,
            np.array([len(one.ids) for one in written], np.int64),
            ["prefilled" if one.direct else "forced" if one.forced else "emb" for one in written],
            np.array([one.seconds * 1000 for one in written]),
            embed_ms,
        )

    @torch.no_grad()
    def embed_after(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]], most: Most
    ) -> np.ndarray:
        """Embeddings (N, D) of prompts after given rationales; see `rge.embedder.Embedder.encode_after`."""
        with self._computing:
            return self._in_batches(prompts, rationales, most)[0]

    @torch.no_grad()
    def direct_probabilities(self, prompts: Sequence[Prompt], most: Most) -> np.ndarray:
        """See `rge.embedder.Embedder.direct_probabilities`."""
        probabilities = np.empty(len(prompts), np.float32)
        direct = [Branch([self.model.emb_id], sampled=True)]
        with self._computing:
            for rows in by_length([*map(len, prompts)], *most):
                packed = self.model.pack([prompts[row] for row in rows], [direct] * len(rows))
                log_prob_B = cast(Tensor, self.model(packed)[0].log_prob_L)
                probabilities[rows] = log_prob_B.exp().cpu().numpy()
        return probabilities

    def _in_batches(
        self,
        prompts: Sequence[Prompt],
        rationales: Sequence[Sequence[int]],
        most: Most,
        on_progress: OnProgress = lambda count: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """States (N, D) after rationales, in batches of similar lengths, and milliseconds (N,)."""
        state_ND, embed_ms = np.empty((len(prompts), self.size), np.float32), np.empty(len(prompts))
        lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompts, rationales, strict=True)]
        for rows in by_length(lengths, *most):
            began = time.perf_counter()
            branches = [[Branch([*rationales[row], self.model.emb_id], read_state=True)] for row in rows]
            (readout,) = self.model(self.model.pack([prompts[row] for row in rows], branches))
            state_ND[rows] = readout.state_ND.float().cpu().numpy()
            embed_ms[rows] = (time.perf_counter() - began) * 1000 / len(rows)
            on_progress(len(rows))
        return state_ND, embed_ms

    def _written(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        mode: Mode,
        most: Most,
        seeds: Sequence[int] | None,
        caps: Sequence[int] | None,
        on_progress: OnProgress,
    ) -> list[Rationale]:
        """Generated rationales; with their states, unless vLLM wrote them."""
        generation = settings.generation
        min_new_tokens, direct_above = settings.min_rationale_tokens, None
        if mode == "auto":
            min_new_tokens, direct_above = generation.min_new_tokens, generation.direct_above
        if self.engine is not None:
            if min_new_tokens or direct_above is not None:
                raise UserError(
                    "engine=vllm supports neither forced rationales nor a threshold: use engine=own"
                ).about("engine")
            found = self.engine.generate(prompts, temperature=generation.temperature, seeds=seeds, caps=caps)
            on_progress(len(prompts))
            return found

        def write(rows: Sequence[int], most: Most, **more: Any) -> list[Rationale]:
            return generate(
                self.model,
                [prompts[row] for row in rows],
                max_new_tokens=generation.max_new_tokens,
                temperature=generation.temperature,
                min_new_tokens=min_new_tokens,
                direct_above=direct_above,
                batch_size=most[0],
                batch_tokens=most[1],
                seeds=None if seeds is None else [seeds[row] for row in rows],
                caps=None if caps is None else [caps[row] for row in rows],
                **more,
            )

        every = range(len(prompts))
        if not settings.exact:
            return write(every, most, on_progress=on_progress)
        most = most if settings.dtype == "float32" else ALONE
        found = write(every, most, on_progress=on_progress, margins=most[0] > 1)
        close = CLOSE["drawn" if generation.temperature > 0 else "greedy"]
        return [write([row], ALONE)[0] if one.margin < close else one for row, one in enumerate(found)]

"""Shared by adapters: loading, length-sorted batches, timing, hashes of weights, wordings."""

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from eval.models.registry import Facts
from rge.checkpoints.settings import Settings
from rge.common.errors import UserError
from rge.common.prompt_profiles import PROFILES, Profile
from rge.common.schema import Encoded, Item
from rge.model.embedding_model import normalise
from rge.model.packing import by_length

WINDOW_BATCHES = 8
"""Batches prepared at a time, within which rows are sorted by length; the pictures of one window are in memory."""
WEIGHTS = (".safetensors", ".bin", ".pt")
LOADED = (*WEIGHTS, ".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".py")
"""Endings of the files that decide a model."""
VLM2VEC = Profile(
    query="{instruction} {text}",
    query_without_instruction="{text}",
    candidate_text="{text}",
    candidate_image="Represent the given image.",
    candidate_both="Represent the given image with related text information: {text}",
)
"""Wordings of MMEB, which VLM2Vec and UME-R1 were trained and are evaluated with."""

BARE = Profile(
    query="{text}",
    query_without_instruction="{text}",
    candidate_text="{text}",
    candidate_image="",
    candidate_both="{text}",
)
"""The text alone, for models that were not trained with instructions."""

WRITES_NOTHING: dict[str, Any] = {
    "modes": ["direct"], "reasons": "none", "generation": {"max_new_tokens": 0, "temperature": 0.0},
}  # fmt: skip
"""Settings of a model that writes no rationale."""

T = TypeVar("T")


def settings_of(facts: Facts, adapter: str, dtype: str, **own: Any) -> Settings:
    """Settings that every embedder of others has, and its own."""
    of_facts = {"model": facts.name, "revision": facts.revision}
    return Settings.model_validate({"adapter": adapter, **of_facts, "dtype": dtype, "recipe": {}, **own})


class Asked:
    """An embedder of others: `with_` copies it and lets it take a prompt profile in its own way."""

    settings: Settings

    def with_(
        self, *, exact: bool | None = None, profile: str | None = None, **generation: float | None
    ) -> Self:
        """An embedder on the same model that asks otherwise, see `rge.embedder.Embedder.with_`."""
        other = copy.copy(self)
        told = self.settings.asking(**{key: value for key, value in generation.items() if value is not None})
        other.settings = told if exact is None else told.but(exact=exact)
        if profile is not None:
            other.reword(profile)
        return other

    def reword(self, profile: str) -> None:
        """Take the wording of a profile of `rge.common.prompt_profiles`.

        Raises:
            UserError: it words its prompts itself.
        """
        raise UserError(f"prompts={profile}: this encoder words its prompts itself")


class DirectEncoder(Asked, Generic[T]):
    """An embedder that writes nothing; a subclass prepares items and embeds prepared batches.

    Args:
        wording: how items become text; replaced by `reword`.
        settings: whatever else decides the embeddings: pixel limits, longest text, pooling.
    """

    def __init__(self, facts: Facts, adapter: str, wording: Profile, dtype: str, settings: dict[str, Any]):
        self.checkpoint, self.checkpoint_hash = facts.path, hash_of_files(facts)
        self.wording = wording
        own = {"profile": adapter, "wording": asdict(wording)} | WRITES_NOTHING | settings
        self.settings = settings_of(facts, adapter, dtype, **own)

    def reword(self, profile: str) -> None:
        """Take the wording of a profile of `rge.model.prompts`; ``plain`` is for sets whose texts carry their instructions."""
        self.wording = PROFILES[profile]
        self.settings = self.settings.but(profile=profile, wording=asdict(self.wording))

    def prepare(self, item: Item, side: str) -> tuple[int, T]:
        """A length to sort by, and what `embed` needs."""
        raise NotImplementedError

    def embed(self, batch: Sequence[T]) -> Tensor:
        """States or features (N, D), not yet normalised."""
        raise NotImplementedError

    @torch.inference_mode()
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
        """Embed items; see `rge.embedder.Embedder.encode`.

        Raises:
            UserError: asked for rationales.
            ValueError: an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        if mode != "direct":
            raise UserError(f"{self.settings.model} writes no rationale: give query_mode=direct")
        rows: list[tuple[Any, ...]] = []
        together = 1 if self.settings.exact else batch_size
        for start in range(0, len(items), WINDOW_BATCHES * batch_size):
            part = items[start : start + WINDOW_BATCHES * batch_size]
            began = time.perf_counter()
            prepared = [self.prepare(item, side) for item in part]
            prepare_ms = (time.perf_counter() - began) * 1000 / len(part)
            found: dict[int, tuple[Any, ...]] = {}
            for chosen in by_length([length for length, _ in prepared], together):
                began = time.perf_counter()
                states = normalise(self.embed([prepared[row][1] for row in chosen])).float().cpu().numpy()
                ms = prepare_ms + (time.perf_counter() - began) * 1000 / len(chosen)
                found |= {
                    row: (state, "", 0, "prefilled", 0.0, ms)
                    for row, state in zip(chosen, states, strict=True)
                }
                if on_progress is not None:
                    on_progress(len(chosen))
            rows += [found[row] for row in sorted(found)]
        return encoded(rows)


def encoded(rows: Sequence[tuple[Any, ...]]) -> Encoded:
    """From state (D,), rationale, its number of tokens, stop reason, and milliseconds of writing and of embedding."""
    columns: Any = zip(*rows, strict=True) if rows else ([] for _ in range(6))
    states, texts, tokens, reasons, generate_ms, embed_ms = columns
    return Encoded(
        embeddings=np.stack(states) if rows else np.empty((0, 0), np.float32),
        rationales=list(texts),
        num_rationale_tokens=np.array(tokens, np.int64),
        stop_reasons=list(reasons),
        generate_ms=np.array(generate_ms, np.float64),
        embed_ms=np.array(embed_ms, np.float64),
    )


def placed(load: Callable[..., T]) -> Callable[..., T]:
    """Makes a function of facts, device, dtype and what else `load_model` is told a loader: with the defaults of `place`."""

    @wraps(load)
    def loader(facts: Facts, *, device: str | None = None, dtype: str | None = None, **asked: Any) -> T:
        return load(facts, *place(device, dtype), **asked)

    return loader


def direct(load: Callable[[Facts, str, str], T]) -> Callable[..., T]:
    """Makes a function of facts, device and dtype the loader of a family that writes no rationale.

    The loader raises a UserError for options of generation, which such a model would ignore.
    """

    @placed
    @wraps(load)
    def loader(facts: Facts, device: str, dtype: str, **generation: float | None) -> T:
        for key, value in generation.items():
            if value is not None:
                raise UserError(f"{key}={value}: {facts.name} writes no rationale")
        return load(facts, device, dtype)

    return loader


@contextmanager
def loading(facts: Facts, *more: type[Exception], by: str = "") -> Iterator[None]:
    """Turn what a library raises on files that it cannot load into a UserError."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *more)
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{facts.name} cannot be loaded{by}: {why}") from None


def whole(facts: Facts, load: Callable[..., Any], dtype: str) -> Any:
    """A model by the ``from_pretrained`` of one of transformers' classes.

    Raises:
        UserError: weights are missing.
    """
    model, report = load(facts.path, dtype=getattr(torch, dtype), output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{facts.name} lacks {len(missing)} weights, e.g. {missing[0]}: it is incomplete")
    return model


def place(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Device and dtype with their defaults: a GPU if there is one, bfloat16 there and float32 on CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device, dtype or ("float32" if device == "cpu" else "bfloat16")


def hash_of_files(facts: Facts) -> str:
    """Sha256 over names and contents of all that is loaded: weights, configurations, tokenizer, subfolders, and a LoRA's base.

    Without a file of weights that is known here, every file counts: an embedder may have a format of its own.
    """
    path, digest = facts.path, hashlib.sha256()
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    has_weights = any(file.suffix in WEIGHTS for file in files)
    for file in files:
        if file.suffix in LOADED or not has_weights:
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    if facts.base is not None:
        digest.update(b"base\0" + hash_of_files(facts.base).encode())
    return digest.hexdigest()

"""Shared by adapters: loading, length-sorted batches, timing, hashes of weights, wordings."""

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rge.checkpoints.settings import Settings
from rge.common.errors import Fault, UserError
from rge.common.parts import VideoPart, with_words
from rge.common.prompt_profiles import PROFILES, Profile
from rge.common.schema import Encoded, Item
from rge.content.visuals import as_pictures
from rge.embedders.registry import Facts
from rge.model.embedding_model import normalise
from rge.model.packing import by_length
from rge.tables.listing import visible_files
from rge.vectors.fill_cache import Embeds

WINDOW_BATCHES = 8
"""Batches prepared at a time and sorted by length; their pictures are in memory together."""
WEIGHTS = (".safetensors", ".bin", ".pt")
LOADED = (*WEIGHTS, ".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".py")
"""Suffixes of the files that define a model."""
VLM2VEC = Profile(
    query="{instruction} {text}",
    query_without_instruction="{text}",
    candidate_text="{text}",
    candidate_image="Represent the given image.",
    candidate_both="Represent the given image with related text information: {text}",
)
"""MMEB's prompts, which VLM2Vec and UME-R1 were trained with."""

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
    """Settings common to all third-party embedders, plus the given ones."""
    of_facts = {"model": facts.name, "revision": facts.revision}
    return Settings.model_validate({"adapter": adapter, **of_facts, "dtype": dtype, **own})


class ThirdParty:
    """Base of third-party embedders: `with_` copies the embedder, and subclasses handle prompt profiles."""

    settings: Settings
    counts_tokens = False
    """Whether its batches can be limited in tokens."""
    batch_tokens: int | None = None

    def with_(
        self,
        *,
        exact: bool | None = None,
        profile: str | None = None,
        batch_tokens: int | None = None,
        **generation: float | None,
    ) -> Self:
        """An embedder with the same model and other settings, see `rge.embedder.Embedder.with_`."""
        if generation.get("max_rationale_tokens") is not None:
            raise UserError(
                f"max_rationale_tokens: {self.settings.model or 'this model'} does not end a rationale by the request: give "
                "max_new_tokens, or query_mode=direct"
            ).about("max_rationale_tokens")
        if batch_tokens is not None and not self.counts_tokens:
            raise UserError(
                f"batch_tokens: rge does not make the tokens of {self.settings.model or 'this model'}: lower batch_size instead"
            ).about("batch_tokens")
        other = copy.copy(self)
        other.batch_tokens = batch_tokens or self.batch_tokens
        given = {key: value for key, value in generation.items() if value is not None}
        settings = self.settings.asking(**given)
        other.settings = settings if exact is None else settings.but(exact=exact)
        if profile is not None:
            other.reword(profile)
        return other

    def reword(self, profile: str) -> None:
        """Use a profile of `rge.common.prompt_profiles`; a UserError if the embedder has fixed prompts."""
        raise UserError(f"prompts={profile}: this encoder has fixed prompts").about("prompts")


class DirectEncoder(ThirdParty, Generic[T]):
    """An embedder without rationales; subclasses prepare items and embed batches.

    ``wording``: prompt templates; replaced by `reword`. ``settings``: everything else that affects embeddings: pixel
    limits, maximum text length, pooling.
    """

    def __init__(
        self,
        facts: Facts,
        adapter: str,
        wording: Profile,
        dtype: str,
        settings: dict[str, Any],
        *,
        checkpoint_hash: str | None = None,
    ):
        self.checkpoint, self.checkpoint_hash = facts.path, checkpoint_hash or hash_of_files(facts)
        self.wording = wording
        own = {"profile": adapter, "wording": asdict(wording)} | WRITES_NOTHING | settings
        self.settings = settings_of(facts, adapter, dtype, **own)

    def reword(self, profile: str) -> None:
        """Use a prompt profile; ``plain`` is for sets whose texts include their instructions."""
        self.wording = PROFILES[profile]
        self.settings = self.settings.but(profile=profile, wording=asdict(self.wording))

    def readable(self, item: Item) -> Item:
        """The item in the parts that the model reads; a UserError for one that it does not."""
        return in_pictures(item, self.settings.model)

    def prepare(self, item: Item, side: str) -> tuple[int, T]:
        """A length to sort by, and the input for `embed`."""
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

        A UserError if the mode needs rationales or an item is empty, an ImageError if a picture cannot be decoded.
        """
        self.settings.check_mode(mode)
        together, window = 1 if self.settings.exact else batch_size, WINDOW_BATCHES * batch_size
        states: dict[int, np.ndarray] = {}
        embed_ms = np.zeros(len(items))
        for start in range(0, len(items), window):
            began = time.perf_counter()
            prepared = [self.prepare(self.readable(item), side) for item in items[start : start + window]]
            prepare_ms = (time.perf_counter() - began) * 1000 / len(prepared)
            lengths = [length for length, _ in prepared]
            for chosen in by_length(lengths, together, self.batch_tokens):
                began = time.perf_counter()
                state_ND = normalise(self.embed([prepared[row][1] for row in chosen])).float().cpu().numpy()
                rows = [start + row for row in chosen]
                states |= zip(rows, state_ND, strict=True)
                embed_ms[rows] = prepare_ms + (time.perf_counter() - began) * 1000 / len(rows)
                if on_progress is not None:
                    on_progress(len(rows))
        num = len(items)
        return Encoded(
            embeddings=np.stack([states[row] for row in range(num)]) if num else np.empty((0, 0), np.float32),
            rationales=[""] * num,
            num_rationale_tokens=np.zeros(num, np.int64),
            stop_reasons=["prefilled"] * num,
            generate_ms=np.zeros(num),
            embed_ms=embed_ms,
        )


class Prompted:
    """An embedder whose queries are worded by a template, ``query_prompt=``; everything else is the embedder's.

    The template has ``{instruction}``, the set's, and ``{text}``; without the latter, it comes before the text.
    """

    def __init__(self, encoder: Embeds, template: str):
        self.encoder, self.template = encoder.with_(), template
        self.encoder.settings = encoder.settings.but(query_prompt=template)
        self.checkpoint, self.checkpoint_hash = encoder.checkpoint, encoder.checkpoint_hash
        self.settings = self.encoder.settings

    def with_(self, **settings: Any) -> "Prompted":
        """See `rge.embedder.Embedder.with_`."""
        return Prompted(self.encoder.with_(**settings), self.template)

    def encode(
        self, items: Sequence[Item], *, side: Literal["query", "candidate"], **options: Any
    ) -> Encoded:
        """Embed items; see `rge.embedder.Embedder.encode`. A UserError if the template needs an instruction that a query lacks."""
        shown = [self._worded(item) for item in items] if side == "query" else items
        return self.encoder.encode(shown, side=side, **options)

    def _worded(self, item: Item) -> Item:
        if "{instruction}" in self.template and not item.instruction:
            raise UserError(
                "it has no instruction for query_prompt=: give instruction=TEXT", place=f"query {item.id!r}"
            ).about("instruction")
        before, _, after = (
            part.replace("{instruction}", item.instruction or "")
            for part in self.template.partition("{text}")
        )
        return replace(item, content=with_words(item.content, before, after), instruction=None)


def neither(item: Item) -> UserError:
    """The error of an item that shows nothing to a model."""
    return UserError("it has neither text nor images", place=f"item {item.id!r}")


def in_pictures(item: Item, model: str | None, *, reads_clips: bool = False) -> Item:
    """An item with a picture in place of each page of its documents, for models that read pictures; a clip may be a UserError."""
    if not reads_clips and any(isinstance(part, VideoPart) for part in item.content):
        raise UserError(
            f"it shows a clip, which {model or 'this model'} does not read", place=f"item {item.id!r}"
        )
    return replace(item, content=as_pictures(item.content, clips=False))


def direct(load: Callable[..., T]) -> Callable[..., T]:
    """Decorator for loaders of models without rationales: `place`, and a UserError for generation options."""

    @wraps(load)
    def loader(facts: Facts, *, device: str | None = None, dtype: str | None = None, **more: Any) -> T:
        for key in ("max_new_tokens", "temperature"):
            if (value := more.pop(key, None)) is not None:
                raise UserError(f"{key}={value}: it writes no rationales", facts.name).about(key)
        return load(facts, *place(device, dtype), **more)

    return loader


@contextmanager
def loading(facts: Facts, *more: type[Exception], by: str = "") -> Iterator[None]:
    """Turn a library's loading errors into a UserError."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *more)
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"it cannot be loaded{by}: {why}", facts.name, kind="unreadable") from None


def whole(facts: Facts, load: Callable[..., Any], dtype: str) -> Any:
    """Load a model with a ``from_pretrained`` of transformers; a `UserError` if weights are missing."""
    model, report = load(facts.path, dtype=getattr(torch, dtype), output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"it is incomplete: {len(missing)} weights are missing, and this is the first",
            facts.name,
            key=missing[0],
        )
    return model


def check_family(facts: Facts, adapter: str, families: Sequence[str]) -> None:
    """Raise a `UserError` if a model is not of an adapter's families."""
    if facts.model_type not in families:
        kind, known = facts.model_type or "?", ", ".join(families)
        raise UserError(f"it is a {kind}, and adapter={adapter} is for {known}", facts.name).about(
            "adapter", Fault("choice", "model_type", tuple(families))
        )


def place(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Apply defaults: a GPU if there is one; bfloat16 on a GPU, float32 on CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device, dtype or ("float32" if device == "cpu" else "bfloat16")


def hash_of_files(facts: Facts) -> str:
    """SHA-256 over names and contents of weights, configurations, tokenizer, subfolders, and a LoRA's base.

    If no weight file has a known format, all files count, since an embedder may have its own format.
    """
    path, digest = facts.path, hashlib.sha256()
    every = sorted(Path(folder, name) for folder, names in visible_files(path) for name in names)
    files = [file for file in every if file.is_file()]
    has_weights = any(file.suffix in WEIGHTS for file in files)
    for file in files:
        if file.suffix in LOADED or not has_weights:
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    if facts.base is not None:
        digest.update(b"base\0" + hash_of_files(facts.base).encode())
    return digest.hexdigest()

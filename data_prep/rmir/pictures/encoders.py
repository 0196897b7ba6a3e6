"""Encoders of pictures and texts, and indices of pictures, by what they show or by their captions."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from data_prep.rmir.config import WITHOUT_MODEL, EncoderConfig, RmirConfig
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import ImageRef, content_of
from rge.common.schema import Item, check_finite
from rge.distributed.ray_data import mapped

if TYPE_CHECKING:
    from rge.embedder import Embedder  # imports torch

WINDOW_BATCHES, BLOCK_ROWS = 4, 1024
"""Batches that a checkpoint sorts by length together, and pictures or captions of a cluster's block, about."""
NO_CAPTIONS = (
    "the pixels encoder needs some pictures with captions (library.caption_column) to embed texts, but none has any: use "
    "image_encoder.kind=siglip or checkpoint, or write captions with caption.model=writer"
)


class TextEncoder(Protocol):
    """Embeds texts."""

    name: str

    def texts(self, texts: Sequence[str], *, query: bool) -> np.ndarray:
        """(N, D) float32, unit norm. ``query``: they search for others, if the encoder tells the two apart."""


class ImageEncoder(TextEncoder, Protocol):
    """Embeds pictures and texts in one space."""

    def pictures(self, refs: Sequence[ImageRef]) -> np.ndarray:
        """(N, D) float32, unit norm."""


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to unit length; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


class HashingEncoder:
    """Hashes words and letter trigrams into a vector; lexical matching without a model."""

    name = "hashing of words and letter triples (no model: matches words, knows nothing)"
    width = 1024

    def texts(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """(N, 1024) float32, unit norm."""
        found = np.empty((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            vector = np.zeros((1, self.width))
            for feature, weight in _features(text):
                place, sign = _hashed(feature)
                vector[0, place % self.width] += sign * weight
            found[row] = unit(vector)
        return found


@lru_cache(maxsize=1 << 16)
def _hashed(feature: str) -> tuple[int, int]:
    digest = hashlib.blake2b(feature.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), 1 if digest[7] & 1 else -1


_STOP_WORDS = {"a", "an", "the", "of", "on", "in", "with", "and", "some", "this", "is", "are"}


def _features(text: str) -> list[tuple[str, float]]:
    words = [word for word in re.findall(r"\w+", text.lower()) if word not in _STOP_WORDS]
    triples = [f"^{word}$"[at : at + 3] for word in words for at in range(len(word))]
    return [(word, 1.0) for word in words] + [(triple, 0.3) for triple in triples]


class PixelEncoder:
    """Embeds pictures by thumbnail and colours, without a model; a text is the mean of pictures with similar captions."""

    name = "pixels (no model: thumbnails; a text is the mean of the pictures whose captions resemble it)"

    side_px = 12
    num_neighbours = 8
    _captions = _vectors = np.empty((0, 0), np.float32)  # of captioned pictures, see `bridge`

    def pictures(self, refs: Sequence[ImageRef]) -> np.ndarray:
        """(N, D) float32, unit norm."""
        rows = []
        for ref in refs:
            small = load_image(ref).resize((self.side_px, self.side_px), Image.Resampling.BOX)
            pixels = np.asarray(small, dtype=np.float32) / 255
            colours, _ = np.histogramdd(pixels.reshape(-1, 3), bins=4, range=[(0, 1)] * 3)
            rows.append(np.concatenate([(1 - pixels).ravel(), colours.ravel() / 8]))
        return unit(np.stack(rows))

    def bridge(self, captions: Sequence[str | None], vectors: np.ndarray) -> None:
        """Set the captioned pictures that place texts in the picture space."""
        captioned = {row: caption for row, caption in enumerate(captions) if caption}
        self._captions = HashingEncoder().texts(list(captioned.values()))
        self._vectors = vectors[list(captioned)]

    def texts(self, texts: Sequence[str], *, query: bool = True) -> np.ndarray:
        """(N, D) float32, unit norm."""
        if not len(self._captions):
            raise UserError(NO_CAPTIONS, kind="captions")
        alike = np.clip(HashingEncoder().texts(texts) @ self._captions.T, 0, None) ** 4
        if alike.shape[1] > self.num_neighbours:
            smallest = np.sort(alike, axis=1)[:, -self.num_neighbours, None]
            alike = np.where(alike >= smallest, alike, 0)
        return unit(alike @ self._vectors)


class CheckpointEncoder:
    """A checkpoint of this project in direct mode, for pictures or captions; all are embedded as candidates, queries too."""

    def __init__(self, checkpoint: "str | Embedder", batch_size: int):
        from rge.embedder import Embedder

        self.encoder = Embedder.from_pretrained(checkpoint) if isinstance(checkpoint, str) else checkpoint
        self.batch_size = batch_size
        self.name = f"checkpoint {self.encoder.checkpoint_hash[:12]} in direct mode"

    def pictures(self, refs: Sequence[ImageRef]) -> np.ndarray:
        """(N, D) float32, unit norm."""
        return self._encode([Item(str(number), content_of(None, [ref])) for number, ref in enumerate(refs)])

    def texts(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """(N, D) float32, unit norm."""
        return self._encode([Item(str(number), content_of(text)) for number, text in enumerate(texts)])

    def _encode(self, items: list[Item]) -> np.ndarray:
        encoded = self.encoder.encode(items, side="candidate", mode="direct", batch_size=self.batch_size)
        return check_finite(encoded.embeddings, self.name)


def load_encoder(config: EncoderConfig) -> Any:
    """Build an `ImageEncoder` or, of the kinds for captions, a `TextEncoder`; `UserError` if it cannot be loaded."""
    if config.kind == "pixels":
        return PixelEncoder()
    if config.kind == "hashing":
        return HashingEncoder()
    if config.kind == "checkpoint":
        return CheckpointEncoder(str(config.path), config.batch_size)
    from data_prep.rmir.pictures.hub_encoders import HubTextEncoder, SiglipEncoder

    kind = SiglipEncoder if config.kind == "siglip" else HubTextEncoder
    return kind(str(config.path), config.batch_size)


def identity(config: EncoderConfig) -> dict[str, Any]:
    """Everything that determines an encoder's vectors: its settings, and the hash of its folder if it is local.

    Models on a hub are identified by name alone.
    """
    # fallback: a setting of earlier versions; keeps the fingerprints of their runs
    found = asdict(config) | {"fallback": None}
    if config.kind not in WITHOUT_MODEL and config.path and Path(config.path).is_dir():
        found["content"] = content_hash(Path(config.path))
    return found


def content_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's visible files, which detects retrained weights at the same path.

    `rge.checkpoints.export.checkpoint_hash` would need torch, which ``status`` and dry runs do not load.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("[!.]*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


@dataclass
class Index:
    """Pictures that can be searched with texts."""

    ids: list[str]
    vectors_ND: np.ndarray  # of the pictures or their captions
    encoder: TextEncoder

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(Q, D) float32: embeds texts to search with."""
        return self.encoder.texts(texts, query=True)

    def among(self, names: Iterable[str]) -> "Index":
        """The index of those of the named pictures that it has, in their order."""
        place_of = {name: place for place, name in enumerate(self.ids)}
        ids = [name for name in names if name in place_of]
        return replace(self, ids=ids, vectors_ND=self.vectors_ND[[place_of[name] for name in ids]])


def image_index(config: EncoderConfig, images: Sequence[dict[str, Any]], vectors_ND: np.ndarray) -> Index:
    """Index of pictures (``id``, ``caption``) with their vectors, which are not copied: at the paper's size they take 2.3 GB."""
    encoder = load_encoder(config)
    if isinstance(encoder, PixelEncoder):
        encoder.bridge([image["caption"] for image in images], vectors_ND)
    return Index([image["id"] for image in images], vectors_ND, encoder)


def caption_index(
    config: EncoderConfig, images: Sequence[dict[str, Any]], vectors_ND: np.ndarray | None = None
) -> Index:
    """Index of the pictures that have a caption, with its vectors; None computes these."""
    captions = {image["id"]: image["caption"] for image in images if image["caption"]}
    encoder = load_encoder(config)
    if vectors_ND is None:
        vectors_ND = embed_captions(encoder, list(captions.values()))
    return Index(list(captions), vectors_ND, encoder)


def embed_captions(encoder: TextEncoder, captions: list[str]) -> np.ndarray:
    """(N, D) float32; (0, 1) without captions."""
    return encoder.texts(captions, query=False) if captions else np.empty((0, 1), np.float32)


def embed_all(
    run: RmirConfig,
    config: EncoderConfig,
    *,
    pictures: Sequence[ImageRef] = (),
    captions: Sequence[str] = (),
    loaded: Any = None,
) -> np.ndarray:
    """As `ImageEncoder.pictures` or `embed_captions`, by this process or, with ``engine=ray``, by the devices of a cluster.

    `loaded` is the encoder, if this process has loaded it already.
    """
    if run.engine == "process":
        encoder = loaded or load_encoder(config)
        return encoder.pictures(pictures) if pictures else embed_captions(encoder, list(captions))
    # Encoders take their batches from windows of so many.
    rows = WINDOW_BATCHES * config.batch_size * max(1, BLOCK_ROWS // (WINDOW_BATCHES * config.batch_size))
    items, kind = (pictures, "pictures") if pictures else (captions, "captions")
    blocks = ((kind, items[at : at + rows]) for at in range(0, len(items), rows))
    found = list(mapped(partial(_embedder, config), blocks, address=run.address))
    return np.concatenate(found) if found else np.empty((0, 1), np.float32)


def _embedder(config: EncoderConfig) -> Callable[[tuple[str, Sequence[Any]]], np.ndarray]:
    encoder = load_encoder(config)

    def work(block: tuple[str, Sequence[Any]]) -> np.ndarray:
        kind, items = block
        return encoder.pictures(items) if kind == "pictures" else embed_captions(encoder, list(items))

    return work

"""Retrieval indices over pictures: by what they show, or by their captions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.rmir.config import EncoderConfig
from data_prep.rmir.pictures.encoders import PixelEncoder, TextEncoder, image_encoder, text_encoder


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
    encoder = image_encoder(config)
    if isinstance(encoder, PixelEncoder):
        encoder.bridge([image["caption"] for image in images], vectors_ND)
    return Index([image["id"] for image in images], vectors_ND, encoder)


def caption_index(
    config: EncoderConfig, images: Sequence[dict[str, Any]], vectors_ND: np.ndarray | None = None
) -> Index:
    """Index of the pictures that have a caption, with its vectors; None computes these."""
    captions = {image["id"]: image["caption"] for image in images if image["caption"]}
    encoder = text_encoder(config)
    if vectors_ND is None:
        vectors_ND = embed_captions(encoder, list(captions.values()))
    return Index(list(captions), vectors_ND, encoder)


def embed_captions(encoder: TextEncoder, captions: list[str]) -> np.ndarray:
    """(N, D) float32; (0, 1) without captions."""
    return encoder.texts(captions, query=False) if captions else np.empty((0, 1), np.float32)

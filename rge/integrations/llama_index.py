"""A checkpoint as LlamaIndex's embedding model, of texts and of pictures: queries reason, documents do not.

Settings.embed_model = ReasoningEmbedding("runs/demo/joint/final")
"""

import asyncio
from io import BytesIO
from typing import Any

from llama_index.core.embeddings import MultiModalEmbedding
from pydantic import PrivateAttr

from rge.embedder import Embedder


class ReasoningEmbedding(MultiModalEmbedding):
    """Wraps `rge.embedder.Embedder`; the asynchronous methods run it in a thread."""

    _embedder: Embedder = PrivateAttr()

    def __init__(self, checkpoint: str, *, embed_batch_size: int = 64, **options: Any):
        super().__init__(model_name=str(checkpoint), embed_batch_size=embed_batch_size)
        self._embedder = Embedder.from_pretrained(checkpoint, **options)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embedder.encode_query(query).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embedder.encode_document(text).tolist()

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.encode_document(texts).tolist()

    def _get_image_embedding(self, img_file_path: Any) -> list[float]:
        return self._get_image_embeddings([img_file_path])[0]

    def _get_image_embeddings(self, img_file_paths: list[Any]) -> list[list[float]]:
        images = [path.getvalue() if isinstance(path, BytesIO) else path for path in img_file_paths]
        return self._embedder.encode_document(images=images).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_image_embedding(self, img_file_path: Any) -> list[float]:
        return await asyncio.to_thread(self._get_image_embedding, img_file_path)

    async def _aget_image_embeddings(self, img_file_paths: list[Any]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_image_embeddings, img_file_paths)

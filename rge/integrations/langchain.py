"""A checkpoint as LangChain's ``Embeddings``: queries reason, documents do not.

store = InMemoryVectorStore(ReasoningEmbeddings("runs/demo/joint/final"))
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.embeddings import Embeddings

from rge.embedder import Embedder, Picture


class ReasoningEmbeddings(Embeddings):
    """Wraps `rge.embedder.Embedder`; the asynchronous methods run it in a thread."""

    def __init__(self, checkpoint: str | Embedder, **options: Any):
        if not isinstance(checkpoint, Embedder):
            checkpoint = Embedder.from_pretrained(checkpoint, **options)
        self.embedder = checkpoint

    def embed_query(self, text: str, images: Picture | Sequence[Picture] | None = None) -> list[float]:
        """Embed a question, about pictures or not."""
        return self.embedder.encode_query(text, images).tolist()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts."""
        return self.embedder.encode_document(texts).tolist()

    def embed_content(self, content: Sequence[Any], *, is_query: bool = False) -> list[float]:
        """Embed one query or document of parts in their order, see `rge.embedder.Embedder.encode_query`."""
        embed = self.embedder.encode_query if is_query else self.embedder.encode_document
        return embed(content=content).tolist()

    def embed_image(self, uris: Sequence[Picture]) -> list[list[float]]:
        """Embed pictures as documents, also pages and clips; stores of pictures, such as Chroma's, call it with paths."""
        return self.embedder.encode_document(images=list(uris)).tolist()

"""A checkpoint as sentence-transformers loads it; every export names this module in its ``modules.json``.

    model = SentenceTransformer("runs/demo/joint/final", trust_remote_code=True)
    model.encode_query([{"text": "What opens this?", "image": "padlock.png"}])   # reasons first
    model.encode_document(["a key", {"image": "key.png"}])

The flag is sentence-transformers' word for modules that other packages bring, local directories included; without it
loading is refused. Embeddings equal `rge.embedder.Embedder`'s: it is what runs.
"""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule

from rge.embedder import Embedder


class ReasoningEmbedder(InputModule):
    """The only module of such a model: prompts, rationale and embedding in one.

    ``encode_query`` reasons where the checkpoint was trained to; ``encode_document`` and plain ``encode`` embed
    candidates. ``prompt=`` is the instruction of queries; without it the checkpoint's own is used. ``mode="direct"`` or
    ``"reasoning"`` asks for the other way.
    """

    forward_kwargs = {"task", "mode"}  # noqa: RUF012 - the library's own convention

    def __init__(self, embedder: Embedder):
        super().__init__()
        self.embedder = embedder
        self.model = embedder.model  # registered, so that the library moves it between devices
        self.tokenizer = embedder.model.processor.tokenizer

    @classmethod
    def load(  # type: ignore[override]  # the library names more arguments, and passes all by name
        cls, model_name_or_path: str, revision: str | None = None, **_: Any
    ) -> "ReasoningEmbedder":
        """Load a checkpoint; sentence-transformers calls this."""
        return cls(Embedder.from_pretrained(model_name_or_path, revision=revision))

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Copy the checkpoint."""
        shutil.copytree(self.embedder.checkpoint, output_path, dirs_exist_ok=True)

    @property
    def modalities(self) -> list[Any]:
        """Text, pictures, both together; chat messages, which is also how the library allows batches that mix these."""
        return ["text", "image", ("image", "text"), "message"]

    @property
    def max_seq_length(self) -> int:
        """Tokens of a prompt."""
        return self.embedder.settings["max_prompt_tokens"]

    def get_embedding_dimension(self) -> int:
        """Components of an embedding."""
        return self.embedder.size

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Texts and pictures, as they came: prompts are made in `forward`, which knows the side."""
        texts, images = [], []
        for one in inputs:
            both = _text_and_image(one)
            if unknown := set(both) - {"text", "image"}:
                raise ValueError(
                    f"an input has text and image, got {', '.join(sorted(map(str, unknown)))} too"
                )
            texts.append(both.get("text"))
            images.append(both.get("image"))
        return {"texts": texts, "images": images, "prompt": prompt}

    def forward(
        self, features: dict[str, Any], task: str | None = None, mode: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Adds ``sentence_embedding`` (N, D) and ``rationales``."""
        options: dict[str, Any] = {"return_rationales": True, "as_tensor": True, "progress": False}
        if mode is not None:
            options["mode"] = mode
        if task == "query":
            options["instruction"] = features["prompt"] or None  # the library passes "" for none
            encode: Callable[..., Any] = self.embedder.encode_query
        else:
            encode = self.embedder.encode_document
        vectors, rationales = encode(features["texts"], features["images"], **options)
        device = next(self.model.parameters()).device
        return features | {"sentence_embedding": vectors.to(device, torch.float32), "rationales": rationales}


def _text_and_image(one: Any) -> dict[str, Any]:
    if isinstance(one, str):
        return {"text": one}
    messages = one if isinstance(one, list) else [one]
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        return one if isinstance(one, dict) else {"image": one}
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a chat must be one message of the user: the template's own parts are added here")
    content = messages[0]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [part["text"] for part in parts if part.get("type") == "text"]
    images = [part.get("image", part.get("url")) for part in parts if part.get("type") == "image"]
    if len(texts) + len(images) < len(parts):
        raise ValueError("the parts of a message are of type text or image")
    return {"text": "\n".join(texts) or None, "image": images or None}

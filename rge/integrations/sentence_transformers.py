"""A checkpoint for sentence-transformers; every export names this module in its ``modules.json``.

    model = SentenceTransformer("runs/demo/joint/final", trust_remote_code=True)
    model.encode_query([{"image": "padlock.png", "text": "What tool do you need for this?"}])   # reasons first
    model.encode_document(["a key", {"image": "key.png"}, {"video": "talk.mp4"}])
    model.encode_document([{"role": "user", "content": [{"type": "pdf", "pdf": "manual.pdf", "pages": [3]}]}])

sentence-transformers requires the flag for modules from other packages, even for local directories. Embeddings are
`rge.embedder.Embedder`'s.
"""

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sentence_transformers.base.modules import InputModule
from torch import Tensor

from rge.checkpoints.export import export
from rge.checkpoints.settings import CheckpointSettings, read_settings
from rge.common.errors import UserError
from rge.common.parts import Content, ImagePart, Part, TextPart, VideoPart, parts_from_json
from rge.common.schema import Item
from rge.embedder import Embedder, check_text, picture_ref


class ReasoningEmbedder(InputModule):
    """The model's only module: prompts, rationales and embeddings.

    ``encode_query`` reasons if the checkpoint was trained to; ``encode_document`` and plain ``encode`` embed candidates.
    ``prompt=`` is the instruction of queries; default: the checkpoint's own, which its export stores as the library's prompt
    ``query``; ``""``: none. ``mode=`` overrides the mode of queries; ``"auto"`` needs a checkpoint trained for
    them. ``max_rationale_tokens=`` is the most that a rationale has, from 0. The module is for inference: the library's trainer is refused.
    """

    forward_kwargs = {"task", "mode", "max_rationale_tokens"}  # the library's own convention

    def __init__(self, embedder: Embedder):
        super().__init__()
        self.embedder = embedder
        self.model = embedder.model  # registered, so that the library moves it between devices
        self.tokenizer = embedder.model.processor.tokenizer

    @classmethod
    def load(  # type: ignore[override]  # the library names more arguments, and passes all by name
        cls,
        model_name_or_path: str,
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        backend: str = "torch",
        **others: Any,
    ) -> "ReasoningEmbedder":
        """Load a checkpoint; sentence-transformers calls this.

        Raises:
            UserError: an argument that has no meaning here.
        """
        if backend != "torch":
            raise UserError(f"backend={backend!r}: a checkpoint of rge runs in torch").about("backend")
        options = dict(model_kwargs or {})
        dtype, base = options.pop("dtype", options.pop("torch_dtype", None)), options.pop("base", None)
        for name in ("model_kwargs", "processor_kwargs", "config_kwargs"):
            if given := options if name == "model_kwargs" else others.get(name):
                raise UserError(
                    f"{name}={given}: a checkpoint of rge takes model_kwargs={{'dtype': ..., 'base': ...}} only; its rge.json has the rest"
                ).about(name)
        if not Path(model_name_or_path).exists():
            from huggingface_hub import snapshot_download

            model_name_or_path = snapshot_download(
                model_name_or_path, revision=revision, token=token, cache_dir=cache_folder,
                local_files_only=local_files_only,
            )  # fmt: skip
        return cls(Embedder.from_pretrained(Path(model_name_or_path), dtype=dtype, base=base))

    def save(self, output_path: str, *_: Any, safe_serialization: bool = True, **__: Any) -> None:
        """Write the current model, which may have been trained further, next to the library's files.

        Adapters were merged when they were loaded, so all weights are written.
        """
        if not safe_serialization:
            raise UserError("safe_serialization=False: weights of rge are written as safetensors").about(
                "safe_serialization"
            )
        recorded = read_settings(self.embedder.checkpoint).content()
        recorded.pop("base", None)
        settings = CheckpointSettings.model_validate(recorded)
        with tempfile.TemporaryDirectory(dir=output_path) as folder:
            export(self.embedder.model, Path(folder) / Path(output_path).resolve().name, settings)
            [written] = Path(folder).iterdir()
            for path in written.iterdir():
                if path.name != "config_sentence_transformers.json":
                    os.replace(path, Path(output_path) / path.name)

    @property
    def modalities(self) -> list[Any]:
        """Text, pictures, clips, these together, and chat messages, by which the library allows mixed batches."""
        together = [("image", "text"), ("text", "video"), ("image", "video"), ("image", "text", "video")]
        return ["text", "image", "video", *together, "message"]

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self.embedder.builder.max_tokens

    def get_embedding_dimension(self) -> int:
        """Number of components of an embedding."""
        return self.embedder.size

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Parse inputs into parts; prompts are made in `forward`, which knows the side."""
        return {"parts": [content_from(value) for value in inputs], "prompt": prompt}

    def forward(
        self,
        features: dict[str, Any],
        task: str | None = None,
        mode: Any = None,
        max_rationale_tokens: int | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Adds ``sentence_embedding`` (N, D) and ``rationales``.

        Raises:
            UserError: training, an unknown task, or a document with a prompt.
        """
        if self.training and torch.is_grad_enabled():
            raise UserError(
                "sentence-transformers cannot train a checkpoint of rge: use rge train, which starts from it with init=; "
                "to embed, use encode_query and encode_document, or call eval() first",
                kind="training",
            )
        if task not in (None, "query", "document"):
            raise UserError.choice("task", task, ("query", "document"))
        instruction = None
        if task != "query" and features["prompt"]:
            raise UserError(
                f"prompt={features['prompt']!r}: a document has no instruction; encode_query is for queries"
            ).about("prompt")
        if task == "query":
            instruction, warning = self.embedder.instruction_for(features["prompt"])
            if warning:
                warnings.warn(warning, stacklevel=2)
        items = [Item(str(row), content, instruction) for row, content in enumerate(features["parts"])]
        if any(_text_precedes(item.content) for item in items):
            warnings.warn(
                "a text before a picture is kept there, and this checkpoint was trained with pictures first: "
                "{'image': ..., 'text': ...}",
                stacklevel=2,
            )
        encoded = self.embedder.encode(
            items,
            side="query" if task == "query" else "candidate",
            mode=mode or (self.embedder.query_mode if task == "query" else "direct"),
            max_rationale_tokens=max_rationale_tokens,
        )
        device = next(self.model.parameters()).device
        vectors = torch.from_numpy(encoded.embeddings).to(device).as_subclass(_UnitRows)
        return features | {"sentence_embedding": vectors, "rationales": encoded.rationales}


class _UnitRows(Tensor):
    """Embeddings that stay normalised under ``truncate_dim=``, which the library applies as ``[..., :dim]``.

    All other operations return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Tensor:
        part = super().__getitem__(index)
        is_cut = isinstance(index, tuple) and part.ndim == self.ndim and part.shape[-1] < self.shape[-1]
        return torch.nn.functional.normalize(part, dim=-1) if is_cut else part


def _text_precedes(content: Content) -> bool:
    """Whether a text stands before something to look at."""
    is_text = [isinstance(part, TextPart) for part in content]
    return is_text != sorted(is_text)


def content_from(value: Any) -> Content:
    """The parts of an input: a text, a picture, a mapping of the library's, or a chat of one message."""
    if isinstance(value, str):
        return _texts([value])
    messages = value if isinstance(value, list) else [value]
    if all(isinstance(message, dict) and "role" in message for message in messages):
        return _of_chat(messages)
    if not isinstance(value, dict):
        return (ImagePart(picture_ref(value)),)
    if {"array", "video_metadata"} <= value.keys():
        return (clip_of(value),)
    if unknown := set(value) - {"text", "image", "video"}:
        raise ValueError(
            f"an input has text, image and video, got {', '.join(sorted(map(str, unknown)))} too"
        )
    # Keys have no order that means anything, and MTEB's depends on its tables: pictures come first, as in training.
    images = (ImagePart(picture_ref(image)) for image in _several(value.get("image")))
    clip = value.get("video")
    return (*images, *([] if clip is None else [clip_of(clip)]), *_texts(_several(value.get("text"))))


def _several(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None]


def _texts(values: Sequence[Any]) -> Content:
    """Parts of texts, without empty ones, which MTEB has for a missing text."""
    for text in values:
        check_text(text, "{'image': ...}")
    return tuple(TextPart(text) for text in values if text.strip())


def clip_of(value: Any) -> VideoPart:
    """A clip: a file, its frames as pictures, or as an array with or without the library's metadata.

    Also as the library `datasets` has it, a mapping with ``bytes``, ``path`` or both, or a decoder that still knows these.
    """
    fps = None
    value = getattr(value, "_hf_encoded", value)
    if isinstance(value, dict) and "array" in value:
        metadata, value = value.get("video_metadata") or {}, value["array"]
        fps = metadata.get("fps") if isinstance(metadata, dict) else getattr(metadata, "fps", None)
    if isinstance(value, bytes | str | os.PathLike | dict):
        part = parts_from_json([{"video": value}], live=True)[0]
        assert isinstance(part, VideoPart)
        return part
    if hasattr(value, "shape"):
        value = [Image.fromarray(frame) for frame in _frames(np.asarray(value))]
    return VideoPart(tuple(map(picture_ref, value)), fps=fps)


def _frames(array: np.ndarray) -> np.ndarray:
    """Frames as (T, H, W, 3) bytes, from channels last or first; `ValueError` if that cannot be told, or it is no video."""
    last, first = (array.ndim == 4 and array.shape[axis] == 3 for axis in (-1, 1))
    if array.dtype != np.uint8 or last == first:
        raise ValueError(
            f"a video of shape {array.shape} and {array.dtype}: give uint8 of (frames, height, width, 3) or (frames, 3, height, width)"
        )
    return np.ascontiguousarray(array if last else array.transpose(0, 2, 3, 1))


def _of_chat(messages: list[dict[str, Any]]) -> Content:
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a chat must be one message of the user: the template's own parts are added here")
    content = messages[0]["content"]
    if isinstance(content, str):
        return _texts([content])
    shown: list[Part] = []
    for part in parts_from_json(content, live=True):
        shown += _texts([part.text]) if isinstance(part, TextPart) else [part]
    return tuple(shown)

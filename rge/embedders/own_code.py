"""Models whose repository brings its own code (``trust_code=true``): GME, BGE-VL, Jina-CLIP, Nomic-Vision, and their like.

Such code runs with the rights of the user, so nothing of it is imported without the option. It is loaded by
sentence-transformers if the repository is one of that library (``modules.json``), else by transformers, and is asked through the
methods that it has, see `INTERFACES`.
"""

import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.schema import Item
from rge.embedders.clip import TwoTowers
from rge.embedders.common import BARE, DirectEncoder, direct, loading, neither
from rge.embedders.registry import Facts
from rge.embedders.sentence import sentences
from rge.model.prompts import user_text


class Kind(NamedTuple):
    """What inputs of one call have in common."""

    side: str
    has_text: bool
    has_picture: bool
    instruction: str | None  # of queries


class Shown(NamedTuple):
    """One input."""

    kind: Kind
    text: str
    picture: Image.Image | None


Columns = tuple[list[str] | None, list[Any] | None]
"""Texts and pictures of a call; None: none has any."""


def _fused(model: Any, _: Any, kind: Kind, columns: Columns) -> Any:
    """GME."""
    texts, pictures = columns
    return model.get_fused_embeddings(
        texts=texts, images=pictures, is_query=kind.side == "query", instruction=kind.instruction,
        show_progress_bar=False,
    )  # fmt: skip


def _conversation(model: Any, _: Any, kind: Kind, columns: Columns) -> Any:
    """BGE-VL on a language model, which opens its pictures itself: the state at the last token."""
    texts, pictures = columns
    files = None if pictures is None else [_as_file(picture) for picture in pictures]
    fields = model.data_process(text=texts, images=files, q_or_c=kind.side, task_instruction=kind.instruction)
    return model(**fields, output_hidden_states=True)[:, -1, :]


def _two_encoders(model: Any, _: Any, kind: Kind, columns: Columns) -> Any:
    """Jina-CLIP: features of text and picture, added as in `rge.embedders.clip`."""
    texts, pictures = columns
    parts = []
    if texts is not None:
        takes_task = kind.side == "query" and "task" in inspect.signature(model.encode_text).parameters
        task = {"task": "retrieval.query"} if takes_task else {}
        parts.append(torch.as_tensor(model.encode_text(texts, **task)))
    if pictures is not None:
        parts.append(torch.as_tensor(model.encode_image(pictures)))
    return sum(parts)


def _pictures_only(model: Any, processor: Any, kind: Kind, columns: Columns) -> Any:
    """Nomic-Vision: the first token's state; its texts have a model of their own."""
    if kind.has_text:
        raise UserError(
            f"a {kind.side} has text, but the model reads only pictures: query_modality=image"
        ).about("query_modality")
    weight = next(model.parameters())
    fields = processor(images=columns[1], return_tensors="pt")
    return model(**{key: value.to(weight.device, weight.dtype) for key, value in fields.items()})[0][:, 0]


INTERFACES: dict[str, tuple[tuple[str, ...], Callable[[Any, Any, Kind, Columns], Any]]] = {
    "get_fused_embeddings": (("get_fused_embeddings",), _fused),
    "data_process": (("set_processor", "data_process"), _conversation),
    "encode_text and encode_image": (("encode_text", "encode_image"), _two_encoders),
}
"""Name -> the methods that a model must have, and the call."""


class OwnCode(DirectEncoder[Shown]):
    """A model of `INTERFACES`, or one that reads only pictures."""

    def __init__(self, facts: Facts, model: Any, dtype: str):
        known = (
            name
            for name, (methods, _) in INTERFACES.items()
            if all(hasattr(model, method) for method in methods)
        )
        name = next(known, None)
        self.processor: Any = None
        if name is not None:
            self.call = INTERFACES[name][1]
        elif {"pixel_values"} == _tensors_of(model) & {"pixel_values", "input_ids"}:
            name, self.call = "pictures only, first token", _pictures_only
            with loading(facts, Exception):
                self.processor = AutoImageProcessor.from_pretrained(facts.path, trust_remote_code=True)
        else:
            raise UserError(
                f"its code has none of {', '.join(INTERFACES)}; wrap it with register_embedder (docs/extending.md)",
                facts.name,
                kind="interface",
            )
        settings = {"pooling": f"its own code: {name}", "code": list(facts.code)}
        super().__init__(facts, "own-code", BARE, dtype, settings)
        self.model = model
        if name == "data_process":
            model.set_processor(str(facts.path))

    def prepare(self, item: Item, side: str) -> tuple[int, Shown]:
        """Text and picture; a UserError if there are several pictures, or nothing. Sorted by the text's length in characters."""
        text, pictures = user_text(item, side, self.wording), item.pictures
        if len(pictures) > 1:
            raise UserError(
                f"it has {len(pictures)} pictures, but {self.settings.model} reads only one",
                place=f"{side} {item.id!r}",
            )
        if not text and not pictures:
            raise neither(item)
        instruction = item.instruction if side == "query" else None
        kind = Kind(side, bool(text), bool(pictures), instruction)
        return len(text), Shown(kind, text, load_image(pictures[0]) if pictures else None)

    def embed(self, batch: Sequence[Shown]) -> Tensor:
        """Embeddings (B, D); one call for each `Kind`."""
        states: dict[int, Tensor] = {}
        for kind in dict.fromkeys(one.kind for one in batch):
            rows = [row for row, one in enumerate(batch) if one.kind == kind]
            texts = [batch[row].text for row in rows] if kind.has_text else None
            pictures = [batch[row].picture for row in rows] if kind.has_picture else None
            part = torch.as_tensor(self.call(self.model, self.processor, kind, (texts, pictures)))
            if part.ndim != 2 or len(part) != len(rows):
                raise UserError(
                    f"{self.settings.model}: its code gives {tuple(part.shape)} for {len(rows)} items"
                )
            states |= zip(rows, part.float(), strict=True)
        return torch.stack([states[row] for row in range(len(batch))])


@direct
def load_own_code(facts: Facts, device: str, dtype: str, *, trust_code: bool = False) -> DirectEncoder[Any]:
    """Load a model with the code of its repository; a `UserError` that names the option if that was not allowed."""
    if not trust_code:
        raise UserError(
            f"it brings its own code ({', '.join(facts.code) or 'of its repository'}), which runs with your rights: read it, then "
            "give trust_code=true; or choose an adapter of ours with adapter=NAME",
            facts.name,
        ).about("trust_code", "adapter")
    if "modules.json" in facts.files:
        return sentences(facts, device, dtype, trust_code=True)
    with loading(facts, Exception):
        model = AutoModel.from_pretrained(facts.path, dtype=getattr(torch, dtype), trust_remote_code=True)
        model = model.to(device).eval()
    if all(hasattr(model, f"get_{kind}_features") for kind in ("text", "image")) and not hasattr(
        model, "encode_text"
    ):
        with loading(facts, Exception):
            readers: list[Any] = [
                kind.from_pretrained(facts.path, trust_remote_code=True)
                for kind in (AutoTokenizer, AutoImageProcessor)
            ]
            return TwoTowers(facts, model, readers[0], readers[1], dtype)
    return OwnCode(facts, model, dtype)


def _tensors_of(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _as_file(picture: Image.Image) -> io.BytesIO:
    file = io.BytesIO()
    picture.save(file, "PNG")
    file.seek(0)
    return file

"""Any sentence-transformers model, mostly text embedders for comparison.

The library applies pooling, normalisation and prompts from the model's files (``config_sentence_transformers.json``). A
set's instructions are not used, since these models were not trained with them. Most models read only texts: then pictures
of queries must be left out explicitly (``query_modality=text``), so that the figures are not mistaken for those of whole
queries, and of candidates with text and picture only the text is used. Models that accept pictures get them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from eval.models.common import BARE, DirectEncoder, direct, loading
from eval.models.registry import Facts
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.schema import Item
from rge.model.prompts import user_text

TEXT, IMAGE, BOTH = "text", "image", "both"


@dataclass(frozen=True)
class Shown:
    """One input for the library; ``side`` selects the prompt, and ``kind`` is text, image or both."""

    side: str
    kind: str
    content: str | Image.Image | dict[str, Any]


class Sentences(DirectEncoder[Shown]):
    """A `sentence_transformers.SentenceTransformer`."""

    def __init__(self, facts: Facts, model: Any, dtype: str):
        kinds = {TEXT: TEXT, IMAGE: IMAGE, BOTH: (IMAGE, TEXT)}
        self.reads = [name for name, kind in kinds.items() if model.supports(kind)]
        settings = {
            "pooling": "the model's own modules",
            "reads": self.reads,
            "max_text_tokens": model.max_seq_length,
            "own_prompts": dict(model.prompts),
        }
        super().__init__(facts, "sentence-transformers", BARE, dtype, settings)
        self.model = model.eval()

    def prepare(self, item: Item, side: str) -> tuple[int, Shown]:
        """Text, picture or both, as the model accepts; sorted by the text's length in characters.

        Raises:
            UserError: the model does not support this item.
        """
        text, name = user_text(item, side, self.wording), self.settings.model
        where, pictures = f"{side} {item.id!r}", item.images
        if pictures and IMAGE not in self.reads:
            if side == "query":
                raise UserError(
                    f"{where} has a picture, but {name} reads only texts: use query_modality=text to leave pictures out "
                    "(rewrite=caption describes them in words)"
                )
            if not text:
                raise UserError(f"{where} has no text, but {name} reads only texts")
            pictures = ()
        if len(pictures) > 1:
            raise UserError(f"{where} has {len(pictures)} pictures, but {name} reads only one")
        content: dict[str, Any] = {TEXT: text} if text else {}
        if pictures:
            content[IMAGE] = load_image(pictures[0])
        if not content:
            raise ValueError(f"item {item.id!r} has neither text nor images")
        if len(content) == 1:
            return len(text), Shown(side, *content.popitem())
        if BOTH not in self.reads:
            raise UserError(
                f"{where} has text and picture, but {name} reads only one of them: use query_modality=text or image; for "
                "CLIP and SigLIP adapter=clip combines both"
            )
        return len(text), Shown(side, BOTH, content)

    def embed(self, batch: Sequence[Shown]) -> Tensor:
        """Embeddings (B, D); different kinds of inputs are embedded separately."""
        states: dict[int, Tensor] = {}
        for side, kind in dict.fromkeys((one.side, one.kind) for one in batch):
            rows = [row for row, one in enumerate(batch) if (one.side, one.kind) == (side, kind)]
            encode = self.model.encode_query if side == "query" else self.model.encode_document
            part = encode(
                [batch[row].content for row in rows],
                batch_size=len(rows),
                convert_to_tensor=True,
                show_progress_bar=False,
            )
            states |= dict(zip(rows, part, strict=True))
        return torch.stack([states[row] for row in range(len(batch))])


@direct
def load_sentences(facts: Facts, device: str, dtype: str) -> Sentences:
    """Load a sentence-transformers model, without running code from its repository.

    Raises:
        UserError: the library is not installed, or it cannot load the model.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise UserError(
            f"{facts.name} needs sentence-transformers: pip install -e '.[text]', or pip install sentence-transformers"
        ) from None
    with loading(facts, ImportError, AttributeError, by=" by sentence-transformers"):
        model = SentenceTransformer(
            str(facts.path),
            device=device,
            model_kwargs={"dtype": getattr(torch, dtype)},
            local_files_only=True,
        )
    return Sentences(facts, model, dtype)

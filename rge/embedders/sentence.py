"""Any sentence-transformers model, mostly text embedders for comparison.

The library applies pooling, normalisation and prompts from the model's files (``config_sentence_transformers.json``). A
set's instructions are not used, since these models were not trained with them. Most models read only texts: then pictures
of queries must be left out explicitly (``query_modality=text``), so that the figures are not mistaken for those of whole
queries, and of candidates with text and picture only the text is used. Of a document's pages they read what is written on them.
Models with a chat template are shown several pictures, and parts in any order, as a message; a clip's frames are the model's choice.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import (
    PdfPart,
    TextPart,
    VideoPart,
    content_of,
    is_short,
    parts_to_input,
    pictures_of,
    with_pictures,
)
from rge.common.schema import Item
from rge.content import pdf
from rge.embedders.common import BARE, DirectEncoder, direct, in_pictures, loading, neither
from rge.embedders.registry import Facts
from rge.model.prompts import user_text

TEXT, IMAGE, BOTH, VIDEO, MESSAGE = "text", "image", "both", "video", "message"


class Shown(NamedTuple):
    """One input for the library; ``side`` selects the prompt, and ``kind`` is text, image, both or message."""

    side: str
    kind: str
    content: str | dict[str, Any] | list[dict[str, Any]]


class Sentences(DirectEncoder[Shown]):
    """A `sentence_transformers.SentenceTransformer`."""

    def __init__(self, facts: Facts, model: Any, dtype: str, *, trust_code: bool = False):
        kinds = {TEXT: TEXT, IMAGE: IMAGE, BOTH: (IMAGE, TEXT), VIDEO: VIDEO, MESSAGE: MESSAGE}
        self.reads = [name for name, kind in kinds.items() if model.supports(kind)]
        settings = {
            "pooling": "the model's own modules",
            "reads": self.reads,
            "max_text_tokens": model.max_seq_length,
            "own_prompts": dict(model.prompts),
        } | ({"code": list(facts.code)} if trust_code else {})
        super().__init__(facts, "sentence-transformers", BARE, dtype, settings)
        self.model = model.eval()

    def readable(self, item: Item) -> Item:
        """The pages of documents as pictures, or for a model of texts as what is written on them."""
        if IMAGE in self.reads:
            return in_pictures(item, self.settings.model, reads_clips={VIDEO, MESSAGE} <= set(self.reads))
        content = tuple(
            TextPart("\n".join(pdf.texts(part.pdf, part.pages))) if isinstance(part, PdfPart) else part
            for part in item.content
        )
        return super().readable(replace(item, content=content))

    def prepare(self, item: Item, side: str) -> tuple[int, Shown]:
        """Text, picture or both; a UserError if the model does not accept them. Sorted by the text's length in characters."""
        text, content = user_text(item, side, self.wording), item.content
        where, name = f"{side} {item.id!r}", self.settings.model
        if is_short(content):
            is_unread = side == "candidate" and text and IMAGE not in self.reads
            content = content_of(text or None, () if is_unread else item.pictures)
        if not content:
            raise neither(item)
        if any(isinstance(part, VideoPart) and part != VideoPart(part.video) for part in content):
            raise UserError(
                f"it says which frames of a clip to show, and {name} chooses them itself", place=where
            )
        shown = parts_to_input(with_pictures(content, map(load_image, pictures_of(content))))
        if isinstance(shown, str):
            kind = TEXT
        elif isinstance(shown, list) or VIDEO in shown or isinstance(shown[IMAGE], list):
            kind = MESSAGE
        else:
            kind = BOTH if len(shown) > 1 else IMAGE
        if kind == MESSAGE and MESSAGE not in self.reads:
            parts = [type(part).__name__.removesuffix("Part").lower() for part in content]
            raise UserError(
                f"it has {', '.join(parts)} in this order, but {name} reads one picture and a text",
                place=where,
            )
        if kind not in self.reads:
            has, reads = "text and image" if kind == BOTH else kind, " or ".join(self.reads)
            raise UserError(
                f"it has {has}, but {name} reads only {reads}: query_modality=text or image leaves out the other, "
                "rewrite=caption puts pictures in words, and adapter=clip combines both parts for CLIP and SigLIP",
                place=where,
            ).about("query_modality")
        return len(text), Shown(side, kind, shown)

    def embed(self, batch: Sequence[Shown]) -> Tensor:
        """Embeddings (B, D); different kinds of inputs are embedded separately."""
        states: dict[int, Tensor] = {}
        for side, kind in dict.fromkeys(one[:2] for one in batch):
            rows = [row for row, one in enumerate(batch) if one[:2] == (side, kind)]
            encode = self.model.encode_query if side == "query" else self.model.encode_document
            content = [batch[row].content for row in rows]
            # query_prompt= takes the place of the model's own prompt
            worded = side == "query" and "query_prompt" in self.settings.content()
            options: dict[str, Any] = {"prompt": ""} if worded else {}
            part = encode(
                content, batch_size=len(rows), convert_to_tensor=True, show_progress_bar=False, **options
            )
            states |= zip(rows, part, strict=True)
        return torch.stack([states[row] for row in range(len(batch))])


@direct
def load_sentences(facts: Facts, device: str, dtype: str) -> Sentences:
    """Load a sentence-transformers model, without running code from its repository."""
    return sentences(facts, device, dtype)


def sentences(facts: Facts, device: str, dtype: str, *, trust_code: bool = False) -> Sentences:
    """Load a sentence-transformers model; with ``trust_code``, code from its repository may run."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise UserError(
            "it needs sentence-transformers: pip install -e '.[text]'", facts.name, kind="package"
        ) from None
    kinds = (Exception,) if trust_code else (ImportError, AttributeError)
    with loading(facts, *kinds, by=" by sentence-transformers"):
        weights = {"dtype": getattr(torch, dtype)}
        model = SentenceTransformer(
            str(facts.path),
            device=device,
            model_kwargs=weights,
            local_files_only=not trust_code,  # its code may be in another repository
            trust_remote_code=trust_code,
        )
    return Sentences(facts, model, dtype, trust_code=trust_code)

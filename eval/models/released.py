"""``as=release``: ask a released model exactly as its authors' evaluation does; RGE, and what all releases share.

RGE (github.com/MCG-NJU/RGE, ``eval_ar.py`` and what it imports, with the versions of its requirements.txt): the text goes into the
user turn as MMEB has it, reworded, with the picture's tokens where the text has its placeholder and a newline at the end; sides
below 28 pixels are resized to 28; pictures are scaled by PIL to 256 to 1024 patches; a query writes at most 128 tokens with the
checkpoint's own generation settings, its repetition penalty among them, and no token is barred; it is read at the last token
written, which is ``<emb>``, or an ordinary one where the cap came first. A candidate is read at an ``<emb>`` after the prompt. Each
is computed alone, as queries are there; candidates go in batches there, which changes them by rounding.

What MMEB-eval's texts look like decides the rest: the set is imported with ``verbatim=true instructions=rge``.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from eval.models.common import VLM2VEC, Asked, hash_of_files, loading, place, settings_of
from eval.models.registry import Facts
from eval.models.rge import MAX_PROMPT_TOKENS, RELEASE, RELEASE_TOKENS
from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.common.mmeb_prompts import PLACEHOLDER
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES
from rge.common.schema import Encoded, ImageRef, Item
from rge.model.embedding_model import normalise
from rge.model.prompts import user_text

T = TypeVar("T")

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
SHORTEST_PX = 28
GREEDY_BELOW = 1e-3
"""Temperature, or nucleus, at which a draw is the likeliest token but for equal ones; Qwen's settings have 1e-6 and 1e-3."""
UNPROMPTED = "the release has no prompts for this set: general wording, pictures first"


class Released(Asked):
    """A released model in stock transformers, asked item by item as its own evaluation does.

    A subclass says how an item becomes inputs, whether it may write, and where its state is read.

    Args:
        processor: with PIL's image backend.
        adapter: name of the family.
        own: what results.json keeps, besides what is the same for all.
    """

    wording = "vlm2vec"
    """How MMEB's texts are worded for it: ``instructions=`` of the import."""
    general = VLM2VEC
    """Wording of what the release has no prompts for."""
    code = ""
    """Repository and revision of the evaluation that is followed."""
    generate_with: Mapping[str, int] = {}
    """Options of `transformers`' ``generate``: the cap, and what stops it beside the checkpoint's own."""

    def __init__(self, facts: Facts, model: Any, processor: Any, adapter: str, dtype: str, **own: Any):
        self.checkpoint, self.checkpoint_hash = facts.path, hash_of_files(facts)
        self.model, self.processor = model.eval(), processor
        self.verbatim = False
        release = {"as": "release", "release_code": self.code, "image_backend": "pil"}
        self.settings = settings_of(
            facts,
            adapter,
            dtype,
            profile=self.wording,
            mmeb_instructions=self.wording,
            differs_from_release=[UNPROMPTED],
            **release,
            **own,
        )

    def reword(self, profile: str) -> None:
        """Take the texts as they are, where the set has them ``verbatim``.

        Raises:
            UserError: another profile; the release's wordings are fixed.
        """
        if profile != "verbatim":
            raise UserError(
                f"prompts={profile}: as=release words prompts as the release does; MMEB is imported for it with verbatim=true "
                f"instructions={self.wording}"
            )
        self.verbatim = True
        self.settings = self.settings.but(profile=profile, differs_from_release=[])

    def text(self, item: Item, side: str) -> str:
        """An item's text with a placeholder where a picture goes."""
        if self.verbatim:
            return item.text or ""
        places = PLACEHOLDER * len(item.images) + "\n" * bool(item.images)
        return places + user_text(item, side, self.general)

    def inputs(self, item: Item, side: str, mode: str) -> dict[str, Tensor]:
        """Token ids and pixels, one row."""
        raise NotImplementedError

    def check(self, side: str, mode: str) -> None:
        """Raise a UserError for what the release never asks."""

    def write(self, inputs: dict[str, Tensor]) -> list[int]:
        """The tokens that a model writes after its prompt."""
        row = self.model.generate(**inputs, **self.generate_with)[0]
        return row[inputs["input_ids"].shape[1] :].tolist()

    def read_at(self, ids: list[int], num_prompt: int) -> int:
        """Place in prompt and written tokens whose state is the embedding."""
        return len(ids) - 1

    def ended(self, written: list[int]) -> tuple[list[int], bool]:
        """A rationale without what ends it, and whether it came to its end before the cap."""
        raise NotImplementedError

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """States after the final norm, (1, T, D); ``hidden_states[-1]`` is before it in some families and versions."""
        return self.model.model(**inputs, use_cache=False).last_hidden_state

    @torch.inference_mode()
    def encode(
        self,
        items: Sequence[Item],
        *,
        side: Literal["query", "candidate"],
        mode: Literal["reasoning", "direct"],
        on_progress: Callable[[int], object] | None = None,
        **_: Any,
    ) -> Encoded:
        """Embed items one by one; see `rge.embedder.Embedder.encode`.

        Raises:
            UserError: asked for what the release never asks.
        """
        self.check(side, mode)
        states, texts, counts, reasons, generate_ms, embed_ms = [], [], [], [], [], []
        for item in items:
            began = time.perf_counter()
            inputs = self.inputs(item, side, mode)
            num_prompt, reason = inputs["input_ids"].shape[1], "prefilled"
            rationale: list[int] = []
            prepared = time.perf_counter()
            if mode == "reasoning":
                written = self.write(inputs)
                inputs = longer(inputs, written)
                rationale, ended = self.ended(written)
                reason = "emb" if ended else "forced"
            done = time.perf_counter()
            place = self.read_at(inputs["input_ids"][0].tolist(), num_prompt)
            states.append(normalise(self.hidden(inputs)[:, place])[0].float().cpu().numpy())
            reasons.append(reason)
            counts.append(len(rationale))
            texts.append(self.processor.tokenizer.decode(rationale, skip_special_tokens=True).strip())
            generate_ms.append((done - prepared) * 1000)
            embed_ms.append((time.perf_counter() - done + prepared - began) * 1000)
            if on_progress is not None:
                on_progress(1)
        return Encoded(
            embeddings=np.stack(states) if states else np.empty((0, 0), np.float32),
            rationales=texts,
            num_rationale_tokens=np.array(counts, np.int64),
            stop_reasons=reasons,
            generate_ms=np.array(generate_ms, np.float64),
            embed_ms=np.array(embed_ms, np.float64),
        )


class ReleasedRge(Released):
    """The released RGE checkpoint."""

    wording = "rge"
    general = PROFILES["rge"]
    code = "MCG-NJU/RGE 60744447"

    def __init__(self, facts: Facts, model: Any, processor: Any, dtype: str, max_new_tokens: int):
        self.emb_id = processor.tokenizer.convert_tokens_to_ids(EMB_TOKEN)
        self.generate_with = {"max_new_tokens": max_new_tokens, "eos_token_id": self.emb_id}
        super().__init__(
            facts,
            model,
            processor,
            "rge-release",
            dtype,
            pixels=RELEASE,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            generation=greedy(facts, model) | {"max_new_tokens": max_new_tokens, "stop": EMB_TOKEN},
            reasons="query",
        )

    def prompt(self, item: Item, side: str) -> str:
        """The whole prompt of an item; what is read comes after it."""
        text = self.text(item, side)
        text = text if text.endswith("\n") else text + "\n"
        text = text.replace(PLACEHOLDER, PICTURE if item.images else "")
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        return self.processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def inputs(self, item: Item, side: str, mode: str) -> dict[str, Tensor]:
        """Token ids and pixels, one row.

        Raises:
            ValueError: the text has other places for pictures than there are pictures.
        """
        text = self.prompt(item, side) + (EMB_TOKEN if mode == "direct" else "")
        check_places(text.count(PICTURE), item, side)
        pictures = [small_sides(opened(ref)).convert("RGB") for ref in item.images]
        found = self.processor(text=[text], images=pictures or None, return_tensors="pt")
        return {key: value.to(self.model.device) for key, value in found.items()}

    def check(self, side: str, mode: str) -> None:
        """Queries reason, candidates do not.

        Raises:
            UserError: a query without a rationale, or a candidate with one.
        """
        if (side == "query") != (mode == "reasoning"):
            raise UserError(
                "as=release: queries write a rationale and candidates do not (query_mode=reasoning)"
            )

    def ended(self, written: list[int]) -> tuple[list[int], bool]:
        """A rationale ends with ``<emb>``."""
        ended = written[-1:] == [self.emb_id]
        return (written[:-1] if ended else written), ended


def greedy(facts: Facts, model: Any) -> dict[str, Any]:
    """Make a checkpoint's own generation settings repeatable, where they leave only the likeliest token anyway.

    Returns:
        What results.json says of it.

    Raises:
        UserError: they draw.
    """
    own = model.generation_config
    alone = own.top_k == 1 or (own.temperature or 0) <= GREEDY_BELOW or (own.top_p or 1) <= GREEDY_BELOW
    if own.do_sample and not alone:
        raise UserError(
            f"{facts.name}: its generation_config.json draws at temperature {own.temperature}: its evaluation would not be "
            "repeatable, and is not what was released"
        )
    own.do_sample, own.temperature, own.top_p, own.top_k = False, None, None, None
    return {"temperature": 0.0, "repetition_penalty": own.repetition_penalty or 1.0}


def opened(ref: ImageRef) -> Image.Image:
    """A picture as Pillow opens it: not turned, and transparency is dropped by its caller, as transformers 4 did, not laid on white."""
    return Image.open(io.BytesIO(picture_bytes(ref)))


def check_places(places: int, item: Item, side: str) -> None:
    """Raise a ValueError where a text has other places for pictures than the item has pictures."""
    if places != len(item.images):
        raise ValueError(
            f"{side} {item.id!r} has {len(item.images)} pictures and {places} places for them in its text"
        )


def small_sides(image: Image.Image) -> Image.Image:
    """A picture none of whose sides is below `SHORTEST_PX`, by PIL's own default filter."""
    width, height = image.size
    if width < SHORTEST_PX:
        image = image.resize((SHORTEST_PX, height))
    if height < SHORTEST_PX:
        image = image.resize((image.size[0], SHORTEST_PX))
    return image


def longer(inputs: dict[str, Tensor], written: list[int]) -> dict[str, Tensor]:
    """The same inputs with the ids that were written after them."""
    ids_BT = inputs["input_ids"]
    row_BT = torch.cat([ids_BT, torch.tensor([written], dtype=ids_BT.dtype, device=ids_BT.device)], 1)
    more = {"input_ids": row_BT, "attention_mask": torch.ones_like(row_BT)}
    if "mm_token_type_ids" in inputs:
        more["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(written)))
    return inputs | more


def as_released(load: Callable[[Facts, str, str, int | None], T]) -> Callable[..., T]:
    """Makes a function of facts, device, dtype and the cap on a rationale the loader of a released model that writes.

    The loader raises a UserError for a temperature: the release decodes as its checkpoint says.
    """

    @wraps(load)
    def loader(
        facts: Facts,
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> T:
        if temperature is not None:
            raise UserError(
                "temperature= and as=release exclude each other: the release decodes as its checkpoint says"
            )
        return load(facts, *place(device, dtype), max_new_tokens)

    return loader


@as_released
def load_as_released(facts: Facts, device: str, dtype: str, max_new_tokens: int | None) -> ReleasedRge:
    """The released RGE checkpoint, asked as its evaluation asks it."""
    model, processor = load_with_pil(facts, dtype)
    sized(processor, RELEASE["min"], RELEASE["max"])
    return ReleasedRge(facts, model.to(device), processor, dtype, max_new_tokens or RELEASE_TOKENS)


def load_with_pil(facts: Facts, dtype: str) -> tuple[Any, Any]:
    """A whole model and its processor, whose pictures PIL scales."""
    with loading(facts):
        model: Any = AutoModelForImageTextToText.from_pretrained(facts.path, dtype=getattr(torch, dtype))
        processor: Any = AutoProcessor.from_pretrained(facts.path)
        processor.image_processor = AutoImageProcessor.from_pretrained(facts.path, backend="pil")
    return model, processor


def sized(processor: Any, min_pixels: int, max_pixels: int) -> None:
    """Set the limits of a picture, in pixels."""
    processor.image_processor.size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}

"""Checkpoints of RGE: our own, and the released one (``as=release``: exactly as its authors run it).

The authors' evaluation (github.com/MCG-NJU/RGE, ``eval_ar.py`` with the versions of its requirements.txt) works as
follows. The user turn is MMEB's text, reworded, with picture tokens at the placeholder and a newline at the end. Sides
below 28 pixels are resized to 28, and PIL scales pictures to 256 to 1024 patches. A query generates at most 128 tokens
with the checkpoint's generation settings, including its repetition penalty; its embedding is the state at the last
generated token, which is ``<emb>`` unless the cap is reached. A candidate's embedding is the state at an ``<emb>``
after the prompt. The release batches candidates; here all items are computed one by one. The set must be imported with
``verbatim=true instructions=rge``.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from rge.checkpoints.settings import Settings
from rge.common.errors import UserError
from rge.common.images import open_picture, picture_bytes
from rge.common.mmeb_prompts import PLACEHOLDER
from rge.common.parts import ImageRef
from rge.common.prompt_profiles import EMB_TOKEN, PROFILES
from rge.common.schema import Encoded, Item
from rge.embedder import Embedder
from rge.embedders.common import ThirdParty, hash_of_files, in_pictures, loading, place, settings_of, whole
from rge.embedders.registry import Facts
from rge.inference import Inference
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel, normalise
from rge.model.prompts import PromptBuilder, rendered_turn, user_text

RELEASE = {"min": 256 * 28 * 28, "max": 1024 * 28 * 28}
"""Pixel limits of the released evaluation."""
RELEASE_TOKENS = 128
"""Cap on a rationale in the paper and in the released evaluation."""
DIFFERS = [
    "a rationale that reaches the cap is read at an appended <emb>, not at its last ordinary token",
    "decoding is plain greedy, without the repetition penalty of Qwen's generation settings",
    "special tokens are barred while a rationale is written",
    "texts are stripped and their line breaks kept as the set has them; a picture's placeholder stands before the text, "
    "wherever the release's text has it, and one without a picture is dropped",
    "pictures are resized by the installed image backend, and those below 28 pixels by the processor's rule, not by a "
    "resize of their short side before it",
]
"""Known differences from the released evaluation code."""
MAX_PROMPT_TOKENS = 32_768
"""The released evaluation does not truncate below this length."""
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
SHORTEST_PX = 28
GREEDY_BELOW = 1e-3
"""Temperature or nucleus below which sampling is greedy up to ties; Qwen's settings have 1e-6 and 1e-3."""
CODE = "MCG-NJU/RGE 60744447"
"""Repository and revision of the reproduced evaluation."""
WORDING = "rge"
"""Required ``instructions=`` of the MMEB import."""
UNPROMPTED = "the release has no prompts for this set: general prompts are used, pictures first"


def load_own(facts: Facts, **options: Any) -> Embedder:
    """A finished checkpoint of rge; see `rge.embedder.Embedder.from_pretrained` for the options."""
    return Embedder.from_pretrained(facts.path, **options)


def load_release(
    facts: Facts,
    *,
    device: str | None,
    dtype: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    as_released: bool = False,
) -> "Embedder | Released":
    """The released RGE checkpoint (github.com/MCG-NJU/RGE) with its prompts.

    Chat template with the default system prompt; pictures, a newline, instruction and text, a newline; a candidate is
    wrapped in "Summarize the ... in one word". Differences from the released evaluation are in `DIFFERS` and in
    results.json. ``as_released``: see `Released`, which fixes the decoding.
    """
    device, dtype = place(device, dtype)
    if as_released and temperature is not None:
        raise UserError("temperature= is not for as=release, which decodes with the checkpoint's settings")
    if as_released:
        with loading(facts):
            model = whole(facts, AutoModelForImageTextToText.from_pretrained, dtype)
            processor: Any = AutoProcessor.from_pretrained(facts.path)
            processor.image_processor = AutoImageProcessor.from_pretrained(facts.path, backend="pil")
        processor.image_processor.size = {"shortest_edge": RELEASE["min"], "longest_edge": RELEASE["max"]}
        return Released(facts, model.to(device), processor, dtype, max_new_tokens or RELEASE_TOKENS)
    backbone = load_backbone(facts.path, dtype=dtype, min_pixels=RELEASE["min"], max_pixels=RELEASE["max"])
    generation = {"max_new_tokens": max_new_tokens or RELEASE_TOKENS, "temperature": temperature or 0.0}
    settings = _settings(facts, dtype, generation, differs_from_release=DIFFERS)
    builder = PromptBuilder(backbone.processor, "rge", MAX_PROMPT_TOKENS)
    return Embedder(Inference(EmbeddingModel(backbone).to(device), builder), facts.path, settings)


def _settings(facts: Facts, dtype: str, generation: dict[str, Any], **own: Any) -> Settings:
    about = {
        "profile": WORDING,
        "pixels": RELEASE,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "reasons": "query",
    }
    return settings_of(
        facts, "rge-release", dtype, generation=generation | {"stop": EMB_TOKEN}, **about, **own
    )


class Released(ThirdParty):
    """The released RGE checkpoint in stock transformers, run item by item as in its own evaluation, with PIL's image backend."""

    def __init__(self, facts: Facts, model: Any, processor: Any, dtype: str, max_new_tokens: int):
        self.checkpoint, self.checkpoint_hash = facts.path, hash_of_files(facts)
        self.model, self.processor = model.eval(), processor
        self.emb_id = processor.tokenizer.convert_tokens_to_ids(EMB_TOKEN)
        self.max_new_tokens = max_new_tokens
        self.verbatim = False
        self.settings = _settings(
            facts,
            dtype,
            greedy(facts, model) | {"max_new_tokens": max_new_tokens},
            mmeb_instructions=WORDING,
            differs_from_release=[UNPROMPTED],
            **{"as": "release", "release_code": CODE, "image_backend": "pil"},
        )

    def reword(self, profile: str) -> None:
        """Accept only the profile ``verbatim``, which leaves texts unchanged, since the release's prompts are fixed."""
        if profile != "verbatim":
            raise UserError(
                f"prompts={profile}: as=release has fixed prompts; import MMEB for it with verbatim=true "
                f"instructions={WORDING}"
            ).about("prompts")
        self.verbatim = True
        self.settings = self.settings.but(profile=profile, differs_from_release=[])

    def prompt(self, item: Item, side: str) -> str:
        """The whole prompt of an item, before any generated tokens."""
        if self.verbatim:
            text = item.text or ""
        else:
            places = PLACEHOLDER * len(item.pictures) + "\n" * bool(item.pictures)
            text = places + user_text(item, side, PROFILES["rge"])
        text = text if text.endswith("\n") else text + "\n"
        text = text.replace(PLACEHOLDER, PICTURE if item.pictures else "")
        return rendered_turn(self.processor, [{"type": "text", "text": text}])

    def inputs(self, item: Item, side: str, mode: str) -> dict[str, Tensor]:
        """Token ids and pixels, one row; a UserError if the numbers of placeholders and pictures differ."""
        text = self.prompt(item, side) + (EMB_TOKEN if mode == "direct" else "")
        if (places := text.count(PICTURE)) != len(item.pictures):
            raise UserError(f"{side} {item.id!r} has {len(item.pictures)} pictures but {places} placeholders")
        pictures = [small_sides(opened(ref)).convert("RGB") for ref in item.pictures]
        fields = self.processor(text=[text], images=pictures or None, return_tensors="pt")
        return {key: value.to(self.model.device) for key, value in fields.items()}

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
        """Embed items one by one, only queries with a rationale; see `rge.embedder.Embedder.encode`."""
        if (side == "query") != (mode == "reasoning"):
            raise UserError("as=release: queries write a rationale and candidates do not").about("as")
        rows = []
        for item in items:
            rows.append(self._encode_one(in_pictures(item, self.settings.model), side, mode))
            if on_progress is not None:
                on_progress(1)
        states, texts, tokens, reasons, generate_ms, embed_ms = zip(*rows, strict=True)
        return Encoded(
            embeddings=np.stack(states),
            rationales=list(texts),
            num_rationale_tokens=np.array(tokens, np.int64),
            stop_reasons=list(reasons),
            generate_ms=np.array(generate_ms),
            embed_ms=np.array(embed_ms),
        )

    def _encode_one(self, item: Item, side: str, mode: str) -> tuple[np.ndarray, str, int, str, float, float]:
        """State (D,), rationale, its tokens, stop reason, and milliseconds of writing and of embedding."""
        began = time.perf_counter()
        inputs, reason = self.inputs(item, side, mode), "prefilled"
        rationale: list[int] = []
        prepared = time.perf_counter()
        if mode == "reasoning":
            row = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, eos_token_id=self.emb_id)
            written = row[0, inputs["input_ids"].shape[1] :].tolist()
            inputs = longer(inputs, written)
            ended = written[-1:] == [self.emb_id]
            rationale, reason = (written[:-1], "emb") if ended else (written, "forced")
        done = time.perf_counter()
        # after the final norm; hidden_states[-1] is before it in some families and versions
        state_D = self.model.model(**inputs, use_cache=False).last_hidden_state[:, -1]
        state = normalise(state_D)[0].float().cpu().numpy()
        text = self.processor.tokenizer.decode(rationale, skip_special_tokens=True).strip()
        embed_ms = (time.perf_counter() - done + prepared - began) * 1000
        return state, text, len(rationale), reason, (done - prepared) * 1000, embed_ms


def greedy(facts: Facts, model: Any) -> dict[str, Any]:
    """Make a checkpoint's generation settings deterministic, and describe them; a UserError if they do sample."""
    own = model.generation_config
    alone = own.top_k == 1 or (own.temperature or 0) <= GREEDY_BELOW or (own.top_p or 1) <= GREEDY_BELOW
    if own.do_sample and not alone:
        raise UserError(
            f"{facts.name}: its generation_config.json samples at temperature {own.temperature}; the released one does not"
        )
    own.do_sample, own.temperature, own.top_p, own.top_k = False, None, None, None
    return {"temperature": 0.0, "repetition_penalty": own.repetition_penalty or 1.0}


def opened(ref: ImageRef) -> Image.Image:
    """A picture as Pillow opens it, without EXIF rotation; the caller drops transparency, as transformers 4 did."""
    return open_picture(picture_bytes(ref))


def small_sides(image: Image.Image) -> Image.Image:
    """Resize sides below `SHORTEST_PX` to it, with PIL's default filter."""
    width, height = image.size
    if width < SHORTEST_PX:  # one side after the other, as in the release
        image = image.resize((SHORTEST_PX, height))
    if height < SHORTEST_PX:
        image = image.resize((image.width, SHORTEST_PX))
    return image


def longer(inputs: dict[str, Tensor], written: list[int]) -> dict[str, Tensor]:
    """The inputs extended by generated ids."""
    ids_BT = inputs["input_ids"]
    row_BT = torch.cat([ids_BT, ids_BT.new_tensor([written])], 1)
    more = {"input_ids": row_BT, "attention_mask": torch.ones_like(row_BT)}
    if "mm_token_type_ids" in inputs:
        more["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(written)))
    return inputs | more

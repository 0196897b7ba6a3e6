"""VLM2Vec on Qwen's models asked as its own evaluation asks it: ``as=release``.

Read from github.com/TIGER-AI-Lab/VLM2Vec at 6e1e1d4 (``eval.py``, ``src/data/collator/eval_collator.py``, ``src/model``): MMEB's
text as it stands, with ``<|image_pad|>`` where it has the picture's place; no chat template and no tokens around a picture, so that
its model code, which looks for them, gives every token the next position; the state of the last token. A text that names a picture
without having one (queries of WebQA) keeps the token. A picture with a side below 28 pixels becomes 56 x 56; PIL scales to 3,136 to
1,003,520 pixels. The command for VLM2Vec-V1 (``eval_vlm2vecv1_8gpu.sh``) scales every picture to 1344 x 1344 before all that. It
runs batches in bfloat16 with flash attention; here each item is computed alone.

Pull request 213 (21 September 2026) makes that code read states after the final norm, as is done here; what else it changes could not
be read.
"""

import re
from typing import Any

from PIL import Image
from torch import Tensor, arange

from eval.models.common import WRITES_NOTHING, direct
from eval.models.qwen import load_qwen
from eval.models.registry import Facts
from eval.models.released import Released, check_places, opened, sized
from rge.common.errors import UserError
from rge.common.mmeb_prompts import PLACEHOLDER
from rge.common.schema import Item

PIXELS = {"min": 4 * 28 * 28, "max": 1280 * 28 * 28}
SIDE, SMALL = 28, (56, 56)
V1_SIZE = (1344, 1344)
LONGEST_RATIO = 200


class ReleasedVlm2Vec(Released):
    """A released VLM2Vec checkpoint.

    Args:
        first_size: what every picture is scaled to before all else (width, height); None: nothing.
    """

    code = "TIGER-AI-Lab/VLM2Vec 6e1e1d4"

    def __init__(
        self, facts: Facts, model: Any, processor: Any, dtype: str, first_size: tuple[int, int] | None
    ):
        self.first_size = first_size
        pixels = PIXELS | ({"first": list(first_size)} if first_size else {})
        own = {"pixels": pixels, "pooling": "last token"} | WRITES_NOTHING
        super().__init__(facts, model, processor, "vlm2vec", dtype, **own)

    def prompt(self, item: Item, side: str) -> str:
        """The whole prompt of an item."""
        return self.text(item, side).replace(PLACEHOLDER, self.processor.image_token)

    def inputs(self, item: Item, side: str, mode: str) -> dict[str, Tensor]:
        """Token ids, pixels and positions, one row.

        Raises:
            ValueError: the item has more or fewer pictures than its text has places, and is no text alone.
        """
        prompt = self.prompt(item, side)
        if item.images:
            check_places(prompt.count(self.processor.image_token), item, side)
            pictures = [shaped(opened(ref), self.first_size).convert("RGB") for ref in item.images]
            found = self.processor(text=[prompt], images=pictures, return_tensors="pt")
            found.pop("mm_token_type_ids", None)  # the positions are given
        else:  # the processor refuses a picture's token without a picture
            found = self.processor.tokenizer([prompt], return_tensors="pt")
        ids_BT = found["input_ids"]
        found["position_ids"] = arange(ids_BT.shape[1]).expand(3, *ids_BT.shape)
        return {key: value.to(self.model.device) for key, value in found.items()}

    def check(self, side: str, mode: str) -> None:
        """It writes no rationale.

        Raises:
            UserError: asked for one.
        """
        if mode != "direct":
            raise UserError(f"{self.settings.model} writes no rationale: give query_mode=direct")


def shaped(picture: Image.Image, first_size: tuple[int, int] | None) -> Image.Image:
    """A picture as it goes to the processor."""
    if first_size is not None:
        picture = picture.resize(first_size)
    if min(picture.size) < SIDE:
        return picture.resize(SMALL)
    if max(picture.size) > LONGEST_RATIO * min(
        picture.size
    ):  # where the processor of today refuses, theirs takes a square
        side = min(round(max(picture.size) / SIDE), int((PIXELS["max"]) ** 0.5 / SIDE)) * SIDE
        return picture.convert("RGB").resize((side, side))
    return picture


@direct
def load_vlm2vec_as_released(facts: Facts, device: str, dtype: str) -> ReleasedVlm2Vec:
    """A released VLM2Vec checkpoint on Qwen2-VL or Qwen2.5-VL, asked as its evaluation asks it.

    Raises:
        UserError: a name that says neither V1 nor V2, which scale pictures differently; files that cannot be loaded.
    """
    name = facts.name.rstrip("/").rpartition("/")[2].lower()
    is_v2 = re.search(r"v2(\.\d)*\b", name) is not None
    if not is_v2 and "qwen2vl" not in name:
        raise UserError(
            f"{facts.name} does not say which release of VLM2Vec it is: V1 scales every picture to 1344 x 1344 first, V2 does not. "
            "Name its folder as on the hub, such as VLM2Vec-Qwen2VL-2B (V1) or VLM2Vec-V2.0"
        )
    model, processor = load_qwen(facts, "vlm2vec", dtype, backend="pil")
    sized(processor, PIXELS["min"], PIXELS["max"])
    return ReleasedVlm2Vec(facts, model.to(device), processor, dtype, None if is_v2 else V1_SIZE)

"""UME-R1 asked as its own evaluation asks it: ``as=release``.

Read from ``src/eval/VLM2Vec`` of github.com/XMUDeepLIT/UME-R1 (``eval_twomode.py``, ``src/data/collator/eval_collator.py``,
the command in its README) at 08891de, which the history of github.com/Kikcer/lume holds whole. Picture, MMEB's text without the
picture's token and stripped, ``<disc_emb>``, the instruction on one line; a text alone gets a white picture of 28 x 28.
qwen-vl-utils scales a picture first, the processor again, to 784 to 2,359,296 pixels. The generative embedding (``reasoning``)
is read at the last ``<gen_emb>`` of what was written up to the end of the turn; where there is none, or it is the very last token
of the cap, at the last token but one. The discriminative one (``direct``) is read at ``<disc_emb>``. Either side may be asked
either way, with ``query_mode=`` and ``candidate_mode=``; the README's command asks both alike. It runs batches of four, padded on
the left, in bfloat16 with flash attention; here each item is computed alone.
"""

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from eval.models.registry import Facts
from eval.models.released import Released, as_released, greedy, load_with_pil, opened, sized
from eval.models.ume import DISC, GEN, MAX_NEW_TOKENS
from rge.common.mmeb_prompts import PLACEHOLDER
from rge.common.schema import Item

INSTRUCTION = (
    "Represent the above input text, images, videos, or any combination of the three as embeddings. First output the thinking "
    "process in <think> </think> tags and then summarize the entire input in a word or sentence. Finally, use the <gen_emb> tag "
    "to represent the entire input."
)
"""Of its evaluation; that of its README, which `eval.models.ume` uses, has line breaks."""
PIXELS = {"min": 784, "max": 2_359_296}
WHITE = (28, 28)


class ReleasedUme(Released):
    """A released UME-R1 checkpoint."""

    code = "XMUDeepLIT/UME-R1 55e5512"

    def __init__(self, facts: Facts, model: Any, processor: Any, dtype: str, max_new_tokens: int):
        vocabulary = processor.tokenizer.get_vocab()
        self.gen_id, self.disc_id = vocabulary[GEN], vocabulary[DISC]
        self.generate_with = {"max_new_tokens": max_new_tokens}  # <gen_emb> stops nothing
        ends = model.generation_config.eos_token_id
        self.ends = set(ends) if isinstance(ends, list) else {ends}
        super().__init__(
            facts,
            model,
            processor,
            "ume-r1",
            dtype,
            pixels=PIXELS,
            instruction=INSTRUCTION,
            generation=greedy(facts, model) | {"max_new_tokens": max_new_tokens, "stop": "end of turn"},
            reasons="query",
        )

    def prompt(self, item: Item, side: str) -> str:
        """The whole prompt of an item; a text alone shows a white picture."""
        text = self.text(item, side).replace(PLACEHOLDER, "").strip()
        content: list[dict[str, str]] = [{"type": "image"}] * max(1, len(item.images))
        content += [{"type": "text", "text": f"{text}\n{DISC}\n{INSTRUCTION}"}]
        turn = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def inputs(self, item: Item, side: str, mode: str) -> dict[str, Tensor]:
        """Token ids and pixels, one row; the same for both modes."""
        from qwen_vl_utils import fetch_image  # brings torchvision

        pictures = [opened(ref) for ref in item.images] or [Image.new("RGB", WHITE, (255, 255, 255))]
        scaled = [fetch_image({"image": picture}) for picture in pictures]
        found = self.processor(text=[self.prompt(item, side)], images=scaled, return_tensors="pt")
        return {key: value.to(self.model.device) for key, value in found.items()}

    def read_at(self, ids: list[int], num_prompt: int) -> int:
        """The last ``<gen_emb>`` that was written and has a token after it; ``<disc_emb>`` where nothing was written."""
        if len(ids) == num_prompt:
            return num_prompt - 1 - ids[::-1].index(self.disc_id)
        found = [place for place in range(num_prompt, len(ids)) if ids[place] == self.gen_id]
        # theirs counts the states that generate() returned, which has none for the last token
        return min(found[-1], len(ids) - 2) if found else len(ids) - 2

    def ended(self, written: list[int]) -> tuple[list[int], bool]:
        """A rationale goes up to the last ``<gen_emb>``."""
        found = [place for place, token in enumerate(written) if token == self.gen_id]
        if found:
            return written[: found[-1]], True
        return (written[:-1] if written[-1:] and written[-1] in self.ends else written), False


@as_released
def load_ume_as_released(facts: Facts, device: str, dtype: str, max_new_tokens: int | None) -> ReleasedUme:
    """A released UME-R1 checkpoint, asked as its evaluation asks it."""
    model, processor = load_with_pil(facts, dtype)
    sized(processor, PIXELS["min"], PIXELS["max"])
    return ReleasedUme(
        facts, model.to(torch.device(device)), processor, dtype, max_new_tokens or MAX_NEW_TOKENS
    )

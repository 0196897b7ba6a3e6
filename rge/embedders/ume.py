"""UME-R1 (github.com/XMUDeepLIT/UME-R1), generative and discriminative.

``reasoning`` is its generative mode and ``direct`` its discriminative one; RMIR's published rows embed queries in the
former and candidates in the latter, as `eval.commands.run` does. Both prompts have ``<disc_emb>`` after the input; the
generative one continues with an instruction to think, answer and write ``<gen_emb>``, whose state is the embedding. The
discriminative embedding is the state at ``<disc_emb>``, which does not depend on later tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

from rge.checkpoints.settings import Settings
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded, Item
from rge.embedder import Embedder
from rge.embedders.common import VLM2VEC, ThirdParty, place, settings_of
from rge.embedders.registry import Facts
from rge.inference import Inference
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Layout, PromptBuilder

GEN, DISC = "<gen_emb>", "<disc_emb>"
INSTRUCTION = (
    "Represent the above input text, images, videos, or any combination of the three as embeddings. \n"
    "First output the thinking process in <think> </think> tags and then summarize the entire input in a word or "
    "sentence. \nFinally, use the <gen_emb> tag to represent the entire input."
)
"""From its README, including the line breaks."""
MAX_NEW_TOKENS = 8192
"""Cap on rationales in its evaluation."""
MAX_PROMPT_TOKENS = 12_288
"""Maximum length in its training."""
WRITTEN = ("<think>", "</think>", "<answer>", "</answer>")
"""Tags of a rationale; if they are special tokens, they are not suppressed."""


class UmeBuilder(PromptBuilder):
    """Its prompts: pictures, text, ``<disc_emb>``, and in generative mode the instruction."""

    def _render(self, layout: Layout) -> str:
        generative = self.emb_id == self.tokenizer.convert_tokens_to_ids(GEN)
        content = [
            {"type": "image"} if piece is None else {"type": "text", "text": f"{piece}\n"} for piece in layout
        ]
        content.append({"type": "text", "text": f"{DISC}\n{INSTRUCTION if generative else ''}"})
        rendered = self._turn(content)
        # in direct mode <disc_emb> itself is appended as the embedding token
        return rendered if generative else rendered.partition(DISC)[0]


class UmeEncoder(ThirdParty):
    """Two encoders on one model, one per mode."""

    counts_tokens = True

    def __init__(self, by_mode: dict[str, Embedder], settings: Settings):
        self.by_mode, self.settings = by_mode, settings
        direct = by_mode["direct"]
        self.checkpoint, self.checkpoint_hash = direct.checkpoint, direct.checkpoint_hash

    def with_(self, **settings: Any) -> Self:
        """See `rge.embedder.Embedder.with_`."""
        other = super().with_(**settings)
        other.by_mode = {mode: encoder.with_(**settings) for mode, encoder in self.by_mode.items()}
        return other

    def reword(self, profile: str) -> None:
        """Use a prompt profile in both modes."""
        self.settings = self.settings.but(profile=profile, wording=asdict(PROFILES[profile]))

    def encode(
        self, items: Sequence[Item], *, mode: Literal["reasoning", "direct"], **options: Any
    ) -> Encoded:
        """Embed items; arguments as in `rge.embedder.Embedder.encode`."""
        if mode not in self.by_mode:
            raise ValueError(f"mode must be reasoning or direct, got {mode!r}")
        return self.by_mode[mode].encode(items, mode=mode, **options)


def load_ume(
    facts: Facts,
    *,
    device: str | None,
    dtype: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
) -> UmeEncoder:
    """Load a UME-R1 checkpoint; its settings list the differences from its own code."""
    device, dtype = place(device, dtype)
    backbone = load_backbone(facts.path, dtype=dtype, emb_token=GEN)
    tokenizer = backbone.processor.tokenizer
    tags = set(tokenizer.convert_tokens_to_ids([tag for tag in WRITTEN if tag in tokenizer.get_vocab()]))
    backbone.suppressed_ids = [token for token in backbone.suppressed_ids if token not in tags]
    size = backbone.processor.image_processor.size
    cap = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    settings = settings_of(
        facts,
        "ume-r1",
        dtype,
        profile="ume-r1",
        wording=asdict(VLM2VEC),
        instruction=INSTRUCTION,
        pixels={"min": size["shortest_edge"], "max": size["longest_edge"]},
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        generation={"max_new_tokens": cap, "temperature": temperature or 0.0, "stop": GEN},
        reasons="query",
        differs_from_release=[
            "a rationale that reaches the cap is read at an appended <gen_emb>, not at its last token",
            "decoding is plain greedy and stops at <gen_emb>",
            "the instruction is that of the README, with line breaks, not that of the evaluation",
            "a text alone has no white picture beside it",
        ],
    )
    by_mode = {}
    for mode, token in {"reasoning": GEN, "direct": DISC}.items():
        embedder = EmbeddingModel(backbone).to(device)
        embedder.emb_id = tokenizer.convert_tokens_to_ids(token)
        builder = UmeBuilder(backbone.processor, VLM2VEC, MAX_PROMPT_TOKENS, emb_token=token)
        by_mode[mode] = Embedder(Inference(embedder, builder), facts.path, settings)
    return UmeEncoder(by_mode, settings)

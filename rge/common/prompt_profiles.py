"""Prompt profiles: how the text of a prompt is worded, and the name of the embedding token."""

from dataclasses import dataclass

from rge.common.registry import Registry

EMB_TOKEN = "<emb>"
PICTURE_INSTRUCTION = "Find the image that answers the question about the given image."
"""Task instruction of RMIR and PinPoint: records of `data_prep.rmir` are trained with it, and their benchmarks are asked with it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The wording of a prompt's text, with ``{text}`` and ``{instruction}``. Candidates have no instruction but a wording by kind."""

    query: str
    query_without_instruction: str
    candidate_text: str
    candidate_image: str
    candidate_both: str

    @property
    def adds_words(self) -> bool:
        """Whether prompts contain more than the item's text and instruction."""
        bare = (self.query, self.query_without_instruction, self.candidate_text, self.candidate_both)
        return bare != ("{instruction} {text}", "{text}", "{text}", "{text}") or bool(self.candidate_image)


PROFILES: Registry[Profile] = Registry("prompt profile", "rge.prompt_profiles")
"""By the name that ``data.profile`` gives."""


register_profile = PROFILES.add
"""Registers a profile, by name, for recipes and evaluations."""


register_profile(
    "rge",
    # Candidate wordings as in the released RGE evaluation, which wraps candidates in "summarize ... in one word".
    Profile(
        query="{instruction} {text}",
        query_without_instruction="{text}",
        candidate_text="Summarize the following text in one word: {text}",
        candidate_image="Summarize the given image in one word.",
        candidate_both="Summarize the given image and text in one word: {text}",
    ),
)
register_profile(
    "plain",
    # Nothing added: for sets whose texts already carry their instruction (MMEB) and for models trained from scratch.
    Profile(
        query="{instruction} {text}",
        query_without_instruction="{text}",
        candidate_text="{text}",
        candidate_image="",
        candidate_both="{text}",
    ),
)

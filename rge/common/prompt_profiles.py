"""Prompt profiles: how the text of a prompt is worded, and the name of the embedding token."""

from dataclasses import dataclass

from rge.common.registry import Registry

EMB_TOKEN = "<emb>"


def think_tokens(count: int) -> list[str]:
    """Names of the tokens of a latent state's branch, in order."""
    return [f"<think_{number}>" for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class Profile:
    """How the text part of a prompt is worded. ``{text}`` and ``{instruction}`` are filled in.

    Candidates of a training record or a benchmark carry no instruction of their own, so each kind has its wording.
    """

    query: str
    query_without_instruction: str
    candidate_text: str
    candidate_image: str
    candidate_both: str

    @property
    def adds_words(self) -> bool:
        """Whether prompts say more than the item's own text and instruction."""
        bare = (self.query, self.query_without_instruction, self.candidate_text, self.candidate_both)
        return bare != ("{instruction} {text}", "{text}", "{text}", "{text}") or bool(self.candidate_image)


PROFILES: Registry[Profile] = Registry("prompt profile", "rge.prompt_profiles")
"""By the name that ``data.profile`` gives."""


def register_profile(name: str, profile: Profile) -> Profile:
    """Let recipes and evaluations name a wording."""
    return PROFILES.add(name, profile)


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

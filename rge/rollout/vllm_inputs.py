"""What vLLM is handed, by training's engine and by that of a finished checkpoint."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rge.model.backbone import BackboneError, collapsed_ids
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Prompt


def request(embedder: EmbeddingModel, prompt: Prompt, features: Tensor | None) -> dict[str, Any]:
    """A prompt as vLLM takes it: one placeholder a picture, and the picture's features (placeholders, D) beside it."""
    ids = prompt.input_ids.tolist()
    if features is None:
        return {"prompt_token_ids": ids}
    pictures = {"image_embeds": features.cpu(), "image_grid_thw": prompt.image_grid}
    return {
        "prompt_token_ids": collapsed_ids(embedder.model, ids),
        "multi_modal_data": {"image": pictures},
    }


def check_prompt(prompt: Prompt, read: Sequence[int]) -> None:
    """What vLLM read must be the prompt, or its rationale belongs to another one."""
    if list(read) != prompt.input_ids.tolist():
        raise BackboneError(
            f"vLLM made {len(read)} tokens of the prompt of {prompt.id!r}, the processor {len(prompt)}, or other ones; use our "
            "own engine (in training rollout.backend=own, else engine=own)"
        )


def know_architectures(names: Sequence[str]) -> None:
    """Let vLLM know models' classes without looking at them in a process of its own.

    It would, lest CUDA starts in this one, where it has long started. That takes ten seconds, and the process would not know
    of `rge.common.torchvision_cpu`.
    """
    from vllm import ModelRegistry

    for architecture in names:
        if (known := ModelRegistry.models.get(architecture)) is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())

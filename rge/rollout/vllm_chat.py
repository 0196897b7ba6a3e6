"""vLLM as the engine of a chat model in this process: conversations with pictures in, texts out.

Unlike `rge.rollout.vllm_states` and `rge.rollout.vllm_engine` it takes any model that vLLM knows, with its own chat template and
vision tower, and reads no states. Importing this module needs vLLM; see `rge.calls.providers.engine`.
"""

from collections.abc import Sequence
from typing import Any

from rge.rollout.vllm_inputs import arguments, in_this_process, know_architectures, shut_down

# ruff: noqa: E402
in_this_process()  # before vLLM is imported

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.transformers_utils.config import get_config

MEMORY = 0.9
"""Share of a GPU's memory, where nothing is given."""


class VllmChat:
    """An engine.

    Attributes:
        name: with vLLM's version.

    Args:
        model: hub name or folder.
        rows: answers under way at once.
        more: further arguments of `vllm.LLM`, which take precedence.

    Raises:
        ValueError: vLLM cannot hold such a model, or not in that much memory.
        RuntimeError: likewise.
    """

    name = f"vllm {vllm.__version__}"

    def __init__(self, model: str, *, rows: int, more: dict[str, Any]):
        know_architectures(get_config(more.get("model", model), trust_remote_code=False).architectures or [])
        common = arguments(on_cpu=not torch.cuda.is_available(), rows=rows, longest=None, memory=MEMORY)
        # Small models may fill their whole answer with blanks where a schema allows any.
        common["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
        self.llm = LLM(**{"model": model, **common, **more})

    def answer(
        self,
        conversations: Sequence[list[dict[str, Any]]],
        sampling: Sequence[dict[str, Any]],
        *,
        schemas: Sequence[dict[str, Any] | None],
        **how: Any,
    ) -> list[Any]:
        """Continue conversations.

        Args:
            conversations: OpenAI's messages of each; pictures as data addresses.
            sampling: arguments of `vllm.SamplingParams`, of each.
            schemas: JSON schema that each answer is held to; None: of no form.
            how: further arguments of `vllm.LLM.chat`.

        Returns:
            vLLM's outputs, in the order of the conversations.

        Raises:
            ValueError: one of them is longer than the model allows, or a setting is wrong; none is answered.
        """
        held = [None if schema is None else StructuredOutputsParams(json=schema) for schema in schemas]
        parameters = [
            SamplingParams(**one, structured_outputs=form) for one, form in zip(sampling, held, strict=True)
        ]
        try:
            return self.llm.chat(list(conversations), parameters, use_tqdm=False, **how)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        """Give the memory back; another engine may be made then."""
        shut_down(self.llm)
        del self.llm

"""`rollout.backend=vllm`: rationales written by vLLM.

Only tokens are taken from vLLM. The state at ``<emb>``, and everything that is trained on, comes from our own forward over the
ids that it wrote, exactly as for a rationale that is used again. (`rge.rollout.vllm_states` is for finished checkpoints.)
"""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from rge.config import RecipeError
from rge.model.backbone import BackboneError, collapsed_ids
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Prompt
from rge.rollout.generate import Rationale
from rge.rollout.vllm_inputs import check_prompt, request

if TYPE_CHECKING:
    from rge.rollout.vllm_engine import Engine  # imports vLLM

MOST_BARRED = 1024
"""Tokens whose logits vLLM can change in one request."""


def check_possible(sleeps: bool, device: torch.device) -> None:
    """Whether vLLM can write rationales here.

    Args:
        sleeps: `rollout.vllm_sleep`.
        device: that trains.

    Raises:
        RecipeError: vLLM is not installed, or is to sleep on a CPU.
    """
    if find_spec("vllm") is None:
        raise RecipeError(
            "rollout.backend=vllm needs vLLM, which is not installed: pip install -e '.[vllm]', in an environment of "
            "its own since it pins torch and transformers (without a GPU: see docs/performance.md); or set "
            "rollout.backend=own"
        )
    if sleeps and device.type != "cuda":
        raise RecipeError(
            "rollout.vllm_sleep=true frees memory of a CUDA device between rollouts, and this run is on "
            f"{device.type}: set rollout.vllm_sleep=false"
        )


class VllmRollout:
    """Writes rationales with an engine that is given the training model's weights before each rollout.

    Args:
        embedder: the model in training, unwrapped.
        accelerator: of the run.
        max_prompt_tokens: longest prompt.
        max_new_tokens: cap on generated tokens, ``<emb>`` included.
        batch_size: rationales written at once, and prompts whose pictures are encoded at once.
        memory: share of the device's memory for the engine.
        sleep: whether the engine gives that memory back between rollouts.

    Raises:
        RecipeError: see `check_possible`.
        BackboneError: the family of the model has no way into vLLM here, or vLLM does not start.
    """

    def __init__(
        self,
        embedder: EmbeddingModel,
        accelerator: Accelerator,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        memory: float,
        sleep: bool = False,
    ):
        check_possible(sleep, accelerator.device)
        if len(embedder.suppressed_ids) > MOST_BARRED:
            raise BackboneError(
                f"rollout.backend=vllm can keep {MOST_BARRED} tokens out of rationales, and this tokenizer has "
                f"{len(embedder.suppressed_ids)} special tokens and unused rows; set rollout.backend=own"
            )
        collapsed_ids(embedder.model, [])  # an unsupported family is an error before anything is loaded
        self.embedder, self.max_new_tokens, self.batch_size = embedder, max_new_tokens, batch_size
        self.engine = make_engine(
            embedder,
            accelerator,
            max_model_tokens=max_prompt_tokens + max_new_tokens,
            batch_size=batch_size,
            memory=memory,
            sleep=sleep,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        num_each: int = 1,
    ) -> list[Rationale]:
        """Write rationales for every prompt with the present weights, which are whole on this process (`dist.whole_model`).

        Args:
            prompts: what to continue, any lengths.
            temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
            seeds: one a rationale, required for sampling. A row's tokens depend on its own seed alone, but the same seed
                gives other tokens than `rge.rollout.generate`.
            num_each: rationales a prompt; vLLM computes a prompt's keys and values once.

        Returns:
            In the order of the prompts, `num_each` rationales of the first, then of the second ... None has a state.

        Raises:
            ValueError: a sampling temperature without seeds.
            BackboneError: vLLM makes other ids of a prompt than the processor did.
        """
        if temperature > 0 and (seeds is None or len(seeds) != len(prompts) * num_each):
            raise ValueError("sampling (temperature > 0) needs one seed a rationale")
        if not prompts:
            return []
        began = time.perf_counter()
        self.engine.sync_weights()
        requests = [request for request in self._requests(prompts) for _ in range(num_each)]
        settings: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": self.max_new_tokens,
            "stop_token_ids": [self.embedder.emb_id],
            # Nothing but <emb> ends a rationale, and special tokens do not occur in one.
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(self.embedder.suppressed_ids, float("-inf")),
            "detokenize": False,
        }
        if temperature > 0:
            settings["logprobs"] = 0  # of the sampled token alone
        parameters = [dict(settings) for _ in requests]
        if temperature > 0:
            for each, seed in zip(parameters, seeds, strict=True):  # type: ignore[arg-type]
                each["seed"] = seed % 2**63
        outputs = self.engine.write(requests, parameters)
        seconds = (time.perf_counter() - began) / len(requests)
        found = []
        for number, output in enumerate(outputs):
            prompt = prompts[number // num_each]
            check_prompt(prompt, output.prompt_token_ids)
            ids = tuple(output.outputs[0].token_ids)
            forced = ids[-1:] != (self.embedder.emb_id,)
            log_probs = _log_probs(ids, output.outputs[0].logprobs) if temperature > 0 else None
            found.append(Rationale(ids if forced else ids[:-1], forced, None, seconds, log_probs=log_probs))
        return found

    def _requests(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        found = []
        for start in range(0, len(prompts), self.batch_size):
            part = prompts[start : start + self.batch_size]
            for prompt, features in zip(part, self.embedder.picture_features(part), strict=True):
                found.append(request(self.embedder, prompt, features))
        return found


def make_engine(embedder: EmbeddingModel, accelerator: Accelerator, **settings: Any) -> "Engine":
    """An `rge.rollout.vllm_engine.Engine`; vLLM is imported here and not before.

    Raises:
        BackboneError: vLLM does not start; with its reason.
    """
    from rge.rollout.vllm_engine import Engine

    try:
        return Engine(embedder, accelerator, **settings)
    except (ValueError, RuntimeError) as error:
        raise BackboneError(
            f"rollout.backend=vllm: vLLM does not start with rollout.vllm_memory={settings['memory']}: {error}"
        ) from error


def _log_probs(ids: Sequence[int], said: Sequence[Any] | None) -> tuple[float, ...] | None:
    """Of each sampled token, as vLLM's engine gives them: a mapping from token to what is known of it."""
    if said is None:
        return None
    return tuple(float(known[token].logprob) for token, known in zip(ids, said, strict=True))

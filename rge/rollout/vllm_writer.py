"""Rationales written by vLLM: `rollout.backend=vllm` in training, ``engine=vllm`` for a finished checkpoint.

Only tokens are taken from vLLM. The state at ``<emb>``, and everything that is trained on, comes from our own forward over the
ids that it wrote, exactly as for a rationale that is used again.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rge.model.backbone import BackboneError, collapsed_ids
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Prompt
from rge.rollout.generate import Rationale

if TYPE_CHECKING:
    from accelerate import Accelerator

    from rge.rollout.vllm_engine import Engine

MOST_BARRED = 1024
"""Maximum number of tokens whose logits vLLM can bias in one request."""


def check_possible(option: str, sleeps: bool = False, device: torch.device | None = None) -> None:
    """Whether vLLM can write rationales here.

    Args:
        option: that asks for it, such as ``rollout.backend``.
        sleeps: `rollout.vllm_sleep`.
        device: that trains.

    Raises:
        BackboneError: vLLM is not installed, or is to sleep on a CPU.
    """
    if find_spec("vllm") is None:
        raise BackboneError(
            f"{option}=vllm needs vLLM, which is not installed: pip install -e '.[vllm]', in an environment of "
            "its own since it pins torch and transformers (without a GPU: see docs/performance.md); or set "
            f"{option}=own"
        )
    if sleeps and device is not None and device.type != "cuda":
        raise BackboneError(
            "rollout.vllm_sleep=true frees memory of a CUDA device between rollouts, and this run is on "
            f"{device.type}: set rollout.vllm_sleep=false"
        )


class VllmWriter:
    """Writes rationales with an engine that has the model's weights. See `in_training` and `of_checkpoint`.

    Args:
        embedder: the model, unwrapped.
        engine: with the same weights.
        max_new_tokens: cap on generated tokens, ``<emb>`` included.
        batch_size: rationales written at once, and prompts whose pictures are encoded at once.
    """

    def __init__(self, embedder: EmbeddingModel, engine: "Engine", max_new_tokens: int, batch_size: int):
        self.embedder, self.engine = embedder, engine
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size

    @classmethod
    def in_training(
        cls,
        embedder: EmbeddingModel,
        accelerator: "Accelerator",
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        memory: float,
        sleep: bool = False,
    ) -> "VllmWriter":
        """With an engine that is given the training model's weights before each rollout.

        Args:
            embedder: the model in training, unwrapped.
            accelerator: of the run.
            max_prompt_tokens: longest prompt.
            max_new_tokens: cap on generated tokens, ``<emb>`` included.
            batch_size: see `VllmWriter`.
            memory: share of the device's memory for the engine.
            sleep: whether the engine gives that memory back between rollouts.

        Raises:
            BackboneError: see `check_possible`; the model's family cannot be given to vLLM; or vLLM does not start.
        """
        check_possible("rollout.backend", sleep, accelerator.device)
        from rge.rollout.vllm_engine import TrainingEngine

        engine = _start(
            lambda **sizes: TrainingEngine(embedder, accelerator, sleep=sleep, **sizes),
            embedder,
            "rollout.backend",
            "rollout.vllm_memory",
            max_model_tokens=max_prompt_tokens + max_new_tokens,
            batch_size=batch_size,
            memory=memory,
        )
        return cls(embedder, engine, max_new_tokens, batch_size)

    @classmethod
    def of_checkpoint(
        cls,
        embedder: EmbeddingModel,
        checkpoint: Path,
        device: str,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        memory: float,
    ) -> "VllmWriter":
        """With an engine that reads a finished checkpoint; `embedder` is that checkpoint. Otherwise see `in_training`."""
        check_possible("engine")
        from rge.rollout.vllm_engine import Engine

        engine = _start(
            lambda **sizes: Engine(embedder, str(checkpoint), torch.device(device), **sizes),
            embedder,
            "engine",
            "vllm_memory",
            max_model_tokens=max_prompt_tokens + max_new_tokens,
            batch_size=batch_size,
            memory=memory,
        )
        return cls(embedder, engine, max_new_tokens, batch_size)

    @property
    def name(self) -> str:
        """With vLLM's version, for what is computed with it."""
        from vllm import __version__  # its distribution has another name where it is built for a CPU

        return f"vllm {__version__}"

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
            raise ValueError("sampling (temperature > 0) needs one seed per rationale")
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
        parameters = [settings] * len(requests)
        if temperature > 0:
            # "logprobs": of the sampled token alone.
            parameters = [settings | {"logprobs": 0, "seed": seed % 2**63} for seed in seeds or ()]
        outputs = self.engine.write(requests, parameters)
        seconds = (time.perf_counter() - began) / len(requests)
        found = []
        for number, output in enumerate(outputs):
            _check_prompt(prompts[number // num_each], output.prompt_token_ids)
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
                found.append(self._request(prompt, features))
        return found

    def _request(self, prompt: Prompt, features: Tensor | None) -> dict[str, Any]:
        """A prompt as vLLM takes it: one placeholder a picture, and the picture's features (placeholders, D) beside it."""
        ids = prompt.input_ids.tolist()
        if features is None:
            return {"prompt_token_ids": ids}
        pictures = {"image_embeds": features.cpu(), "image_grid_thw": prompt.image_grid}
        return {
            "prompt_token_ids": collapsed_ids(self.embedder.model, ids),
            "multi_modal_data": {"image": pictures},
        }


def _start(
    make: Callable[..., "Engine"],
    embedder: EmbeddingModel,
    option: str,
    share: str,
    *,
    memory: float,
    **sizes: int,
) -> "Engine":
    """An engine, or one message that says why there is none.

    Raises:
        BackboneError: see `VllmWriter.in_training`.
    """
    collapsed_ids(embedder.model, [])  # an unsupported family is an error before anything is started
    if len(embedder.suppressed_ids) > MOST_BARRED:
        raise BackboneError(
            f"{option}=vllm can keep {MOST_BARRED} tokens out of rationales, and this tokenizer has "
            f"{len(embedder.suppressed_ids)} special tokens and unused rows; set {option}=own"
        )
    try:
        return make(memory=memory, **sizes)
    except (ValueError, RuntimeError) as error:
        raise BackboneError(f"{option}=vllm: vLLM does not start with {share}={memory:g}: {error}") from error


def _check_prompt(prompt: Prompt, read: Sequence[int]) -> None:
    """What vLLM read must be the prompt, or its rationale belongs to another one."""
    if list(read) != prompt.input_ids.tolist():
        raise BackboneError(
            f"vLLM made {len(read)} tokens of the prompt of {prompt.id!r}, the processor {len(prompt)}, or other ones; use our "
            "own engine (in training rollout.backend=own, else engine=own)"
        )


def _log_probs(ids: Sequence[int], said: Sequence[Any] | None) -> tuple[float, ...] | None:
    """Of each sampled token, as vLLM's engine gives them: a mapping from token to what is known of it."""
    if said is None:
        return None
    return tuple(float(known[token].logprob) for token, known in zip(ids, said, strict=True))

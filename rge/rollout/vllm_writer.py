"""Rationales written by vLLM: `rollout.backend=vllm` in training, ``engine=vllm`` for a finished checkpoint.

Only tokens come from vLLM. The state at ``<emb>``, and everything that is trained on, comes from our own forward over these
tokens, exactly as for a reused rationale.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    """Check whether `option`, such as ``rollout.backend``, can be ``vllm`` here.

    Raises:
        BackboneError: vLLM is not installed, or is to sleep (`rollout.vllm_sleep`) on a CPU.
    """
    if find_spec("vllm") is None:
        raise BackboneError(
            f"{option}=vllm needs vLLM, which is not installed: pip install -e '.[vllm]', in a separate "
            "environment, since it pins torch and transformers (without a GPU: see docs/performance.md); or set "
            f"{option}=own",
            kind="package",
        ).about(option)
    if sleeps and device is not None and device.type != "cuda":
        raise BackboneError(
            "rollout.vllm_sleep=true frees memory of a CUDA device between rollouts, and this run is on "
            f"{device.type}: set rollout.vllm_sleep=false"
        ).about("rollout.vllm_sleep")


@dataclass
class VllmWriter:
    """Generates rationales with an engine that has the model's weights. See `in_training` and `of_checkpoint`."""

    embedder: EmbeddingModel  # unwrapped
    engine: "Engine"
    max_new_tokens: int  # cap on generated tokens, ``<emb>`` included
    batch_size: int  # rationales generated at once, and prompts whose pictures are encoded at once

    @classmethod
    def in_training(
        cls, embedder: EmbeddingModel, accelerator: "Accelerator", *, sleep: bool = False, **sizes: Any
    ) -> "VllmWriter":
        """A writer whose engine gets the training model's weights before each rollout.

        With `sleep` the engine frees its memory between rollouts; `sizes` are those of `_start`.

        Raises:
            BackboneError: see `check_possible` and `_start`.
        """
        check_possible("rollout.backend", sleep, accelerator.device)
        from rge.rollout.vllm_engine import TrainingEngine

        make = partial(TrainingEngine, embedder, accelerator, sleep=sleep)
        return cls._start(make, embedder, "rollout.backend", "rollout.vllm_memory", **sizes)

    @classmethod
    def of_checkpoint(
        cls, embedder: EmbeddingModel, checkpoint: Path, device: str, **sizes: Any
    ) -> "VllmWriter":
        """A writer whose engine reads a finished checkpoint, which `embedder` is; otherwise as `in_training`."""
        check_possible("engine")
        from rge.rollout.vllm_engine import Engine

        make = partial(Engine, embedder, str(checkpoint), torch.device(device))
        return cls._start(make, embedder, "engine", "vllm_memory", **sizes)

    @classmethod
    def _start(
        cls,
        make: Callable[..., "Engine"],
        embedder: EmbeddingModel,
        option: str,
        memory_option: str,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        memory: float,
    ) -> "VllmWriter":
        """Start an engine with a share `memory` of the device's; BackboneError if vLLM can't run the model, or doesn't start."""
        collapsed_ids(embedder.model, [])  # fail for an unsupported family before anything is started
        if len(embedder.suppressed_ids) > MOST_BARRED:
            raise BackboneError(
                f"{option}=vllm can suppress at most {MOST_BARRED} tokens in rationales, and this tokenizer has "
                f"{len(embedder.suppressed_ids)} special tokens and unused rows; set {option}=own",
                kind="tokens",
            ).about(option)
        sizes = {"max_model_tokens": max_prompt_tokens + max_new_tokens, "batch_size": batch_size}
        try:
            engine = make(memory=memory, **sizes)
        except (ValueError, RuntimeError) as error:
            raise BackboneError(
                f"{option}=vllm: vLLM does not start with {memory_option}={memory:g}: {error}", kind="start"
            ).about(option, memory_option) from error
        return cls(embedder, engine, max_new_tokens, batch_size)

    @property
    def name(self) -> str:
        """Engine and version, for provenance."""
        from vllm import __version__  # the distribution's name differs for CPU builds

        return f"vllm {__version__}"

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        num_each: int = 1,
        caps: Sequence[int] | None = None,
    ) -> list[Rationale]:
        """Generate rationales with the current weights, which must be whole on this process (`dist.whole_model`).

        As `rge.rollout.generate`, but the rationales have no states, and the same seed gives other tokens. A cap is a limit of
        its request; nothing is requested for a cap of 0.

        Raises:
            ValueError: sampling without seeds.
            BackboneError: vLLM tokenises a prompt differently from the processor.
        """
        if temperature > 0 and (seeds is None or len(seeds) != len(prompts) * num_each):
            raise ValueError("sampling (temperature > 0) needs one seed per rationale")
        if caps is not None and 0 in caps:
            return self._where_capped_above_0(prompts, temperature, seeds, num_each, caps)
        if not prompts:
            return []
        began = time.perf_counter()
        self.engine.sync_weights()
        requests = []
        for start in range(0, len(prompts), self.batch_size):
            part = prompts[start : start + self.batch_size]
            for prompt, features in zip(part, self.embedder.picture_features(part), strict=True):
                requests += [self._request(prompt, features)] * num_each
        settings: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": self.max_new_tokens,
            "stop_token_ids": [self.embedder.emb_id],
            # Only <emb> ends a rationale, and special tokens do not occur in one.
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(self.embedder.suppressed_ids, float("-inf")),
            "detokenize": False,
        }
        parameters = [settings] * len(requests)
        if caps is not None:
            parameters = [settings | {"max_tokens": cap} for cap in caps for _ in range(num_each)]
        if temperature > 0:
            # "logprobs": of the sampled token alone.
            drawn = [{"logprobs": 0, "seed": seed % 2**63} for seed in seeds or ()]
            parameters = [of_row | draw for of_row, draw in zip(parameters, drawn, strict=True)]
        outputs = self.engine.write(requests, parameters)
        seconds = (time.perf_counter() - began) / len(requests)
        rationales = []
        for number, output in enumerate(outputs):
            _check_prompt(prompts[number // num_each], output.prompt_token_ids)
            ids = tuple(output.outputs[0].token_ids)
            forced = ids[-1:] != (self.embedder.emb_id,)
            log_probs = None
            if temperature > 0 and (figures := output.outputs[0].logprobs) is not None:
                log_probs = tuple(float(of[token].logprob) for token, of in zip(ids, figures, strict=True))
            rationales.append(
                Rationale(ids if forced else ids[:-1], forced, None, seconds, log_probs=log_probs)
            )
        return rationales

    def _where_capped_above_0(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        seeds: Sequence[int] | None,
        num_each: int,
        caps: Sequence[int],
    ) -> list[Rationale]:
        """`generate` for the other prompts; those with a cap of 0 get an empty rationale."""
        rows = [row for row, cap in enumerate(caps) if cap]
        places = [row * num_each + number for row in rows for number in range(num_each)]
        found = [Rationale((), False, None, 0.0, direct=True)] * (len(prompts) * num_each)
        written = self.generate(
            [prompts[row] for row in rows],
            temperature=temperature,
            seeds=None if seeds is None else [seeds[place] for place in places],
            num_each=num_each,
            caps=[caps[row] for row in rows],
        )
        for place, one in zip(places, written, strict=True):
            found[place] = one
        return found

    def _request(self, prompt: Prompt, features: Tensor | None) -> dict[str, Any]:
        """A prompt as vLLM takes it: one placeholder per picture, and the pictures' features (placeholders, D)."""
        ids = prompt.input_ids.tolist()
        if features is None:
            return {"prompt_token_ids": ids}
        assert prompt.image_grid is not None
        embedder = self.embedder
        grid = embedder.family.vllm_grid(embedder.processor.image_processor, prompt.image_grid)
        pictures = {"image_embeds": features.cpu(), "image_grid_thw": grid}
        return {
            "prompt_token_ids": collapsed_ids(self.embedder.model, ids),
            "multi_modal_data": {"image": pictures},
        }


def _check_prompt(prompt: Prompt, ids: Sequence[int]) -> None:
    if list(ids) != prompt.input_ids.tolist():
        raise BackboneError(
            f"vLLM made {len(ids)} tokens of the prompt, the processor {len(prompt)} or different ones; use our own engine (in "
            "training rollout.backend=own, else engine=own)",
            place=f"item {prompt.id!r}",
        )

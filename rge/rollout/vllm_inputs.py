"""vLLM's inputs, for training and for finished checkpoints."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rge.model.adapters import has_adapters, merge
from rge.model.backbone import BackboneError, collapsed_ids
from rge.model.embedding_model import EmbeddingModel
from rge.model.hub_model import HubModel
from rge.model.prompts import Prompt

CPU_BLOCK = 32
"""Tokens of a block of the cache on a CPU, where vLLM's own 128 would be more than many prompts have: only whole blocks are
found again."""


def in_this_process() -> None:
    """Set what vLLM reads when it is imported.

    The engine lives in this process, where its weights can be reached; vLLM tells its makers about every start unless told not
    to; and it would bind the thread that makes it, and all that this one starts, to one core.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def arguments(*, on_cpu: bool, rows: int, longest: int | None, memory: float) -> dict[str, Any]:
    """Of every engine that is not training's.

    Args:
        on_cpu: there is no GPU.
        rows: at once.
        longest: tokens of a row; None: what the model allows.
        memory: share of a GPU's memory.
    """
    return {
        "generation_config": "vllm",
        "gpu_memory_utilization": memory,
        "max_model_len": longest,
        "max_num_seqs": rows,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu,  # compiling for a CPU takes minutes
        "disable_log_stats": True,
        **({"block_size": CPU_BLOCK} if on_cpu else {}),
    }


def shut_down(llm: Any) -> None:
    """Give an engine's memory back; another may be made then."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


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


def present_weights(model: HubModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of a model in training as an engine loads them, adapters merged.

    Whole, where a back end shares them out, inside `rge.distributed.collectives.whole_model`.
    """
    if has_adapters(model):
        # Not state_dict(), on which FSDP2 would share the weights out again.
        return merge(model, dict(model.named_parameters(remove_duplicate=False)))
    return iter(model.named_parameters())

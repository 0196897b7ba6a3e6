"""vLLM in this process, generating rationales for one of our models.

* Pictures: features of our own vision tower are passed, so that both see the same, and vLLM cannot cache any that are older
  than the weights.
* Weights: vLLM reads those of a finished checkpoint itself. In training it gets them before each rollout through its own
  reload, which lets every layer repack them.

vLLM is imported when an engine is created; see `rge.rollout.vllm_writer`.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor

from rge.distributed import collectives as dist
from rge.model.adapters import has_adapters, merge
from rge.model.backbone import vision_prefixes
from rge.model.embedding_model import EmbeddingModel
from rge.model.hub_model import HubModel

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where its weights are accessible
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise this thread, and all that it starts, is bound to one core
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Defaults of variables that vLLM reads on import."""


class Engine:
    """vLLM on the `device` of one of our models; ValueError or RuntimeError if it lacks the model's family or memory.

    It reads the checkpoint `model`; `memory` is its share of the device's: its copy of the weights, and the cache. `more` goes to
    vLLM's `LLM`.
    """

    def __init__(
        self,
        embedder: EmbeddingModel,
        model: str,
        device: torch.device,
        *,
        max_model_tokens: int,
        batch_size: int,
        memory: float,
        **more: Any,
    ):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self.model, self.device = embedder.model, device
        config: Any = self.model.config
        # An unused tower need not be built. But vLLM takes its absence for that of DeepStack.
        self.has_tower = hasattr(config.vision_config, "deepstack_visual_indexes")
        _register_architectures(config.architectures)
        self.llm = LLM(
            model=model,
            dtype=config.dtype,
            generation_config="vllm",
            gpu_memory_utilization=memory,
            max_model_len=max_model_tokens,
            max_num_seqs=batch_size,
            max_num_batched_tokens=max(8192, max_model_tokens),
            # Features are passed, and must not be cached since they change with the weights.
            enable_mm_embeds=True,
            limit_mm_per_prompt={"video": 0} if self.has_tower else {"image": 0, "video": 0},
            skip_mm_profiling=True,
            mm_processor_cache_gb=0,
            enforce_eager=device.type == "cpu",  # compiling for a CPU takes minutes
            # vLLM seeds the process's random generator, which training uses too.
            seed=torch.initial_seed() % 2**31,
            # Of the distribution that is sampled from: with temperature, without barred tokens.
            logprobs_mode="processed_logprobs",
            **more,
        )

    def sync_weights(self) -> None:
        """Nothing to do: a finished checkpoint's weights do not change."""

    def write(self, requests: Sequence[dict[str, Any]], parameters: Sequence[dict[str, Any]]) -> list[Any]:
        """Outputs of vLLM for prompts in its format, each with arguments of `SamplingParams`."""
        from vllm import SamplingParams

        sampling = [SamplingParams(**each) for each in parameters]
        with self._without_autocast():
            return self.llm.generate(list(requests), sampling_params=sampling, use_tqdm=False)

    def close(self) -> None:
        """Free the memory; then another engine may be created."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        del self.llm

    def _without_autocast(self) -> torch.autocast:
        # A rollout runs in the context of the run's mixed precision, which must not affect merging and vLLM's layers.
        return torch.autocast(self.device.type, enabled=False)


class TrainingEngine(Engine):
    """An engine that gets the weights in training before each rollout (`sync_weights`); with `sleep` it frees its memory between."""

    def __init__(
        self, embedder: EmbeddingModel, accelerator: Accelerator, *, sleep: bool = False, **settings: Any
    ):
        model: Any = embedder.model
        num_rows = model.get_input_embeddings().num_embeddings  # the weight itself may be sharded

        def with_emb(config: Any) -> Any:
            # The saved checkpoint may be a plain model, and adding <emb> may have added rows.
            config.get_text_config().vocab_size = num_rows
            return config

        self.sleeps = sleep
        dist.ensure_group()
        # vLLM reads its rank from the environment, which a single process lacks.
        with patch_environment(
            rank=accelerator.process_index,
            local_rank=accelerator.local_process_index,
            world_size=accelerator.num_processes,
        ):
            super().__init__(
                embedder,
                model.name_or_path,
                accelerator.device,
                revision=getattr(model.config, "_commit_hash", None),
                hf_overrides=with_emb,
                load_format="dummy",
                distributed_executor_backend="external_launcher",
                enable_sleep_mode=sleep,
                **settings,
            )
        self._rest()
        accelerator.wait_for_everyone()

    def write(self, requests: Sequence[dict[str, Any]], parameters: Sequence[dict[str, Any]]) -> list[Any]:
        """See `Engine.write`; then sleep, if set."""
        outputs = super().write(requests, parameters)
        self._rest()
        return outputs

    def _rest(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=2)  # weights are loaded again before each rollout: no copy in main memory

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Wake the engine, load the model's current weights, and clear its caches."""
        if self.sleeps:
            torch.cuda.empty_cache()  # the engine needs the memory of training's cached blocks
            self.llm.wake_up(tags=["weights"])
        without = () if self.has_tower else vision_prefixes(self.model)
        weights = (named for named in present_weights(self.model) if not named[0].startswith(without))
        with self._without_autocast():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.collective_rpc(_prepare_head)
        self.llm.reset_prefix_cache()
        # The reload clears only the worker's cache of features; the scheduler would still rely on it.
        self.llm.llm_engine.reset_encoder_cache()
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])


def present_weights(model: HubModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of a model in training for an engine, adapters merged; whole inside `dist.whole_model`."""
    if has_adapters(model):
        # Not state_dict(), with which FSDP2 would shard the weights again.
        return merge(model, dict(model.named_parameters(remove_duplicate=False)))
    return iter(model.named_parameters())


def _register_architectures(names: Sequence[str]) -> None:
    """Register models' classes with vLLM, which otherwise inspects them in a new process to keep CUDA out of this one.

    That would take ten seconds, and the process would lack `rge.common.torchvision_cpu`.
    """
    from vllm import ModelRegistry

    for architecture in names:
        if (known := ModelRegistry.models.get(architecture)) is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _prepare_head(worker: Any) -> None:
    """Let the output matrix prepare its weights, which vLLM omits for tied matrices."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)

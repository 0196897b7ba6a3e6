"""A vLLM engine inside the training process, synchronised with the trained weights (TRL's generation class).

From `trl.generation.vllm_generation.VLLMGeneration` come the colocated set-up and the walk over the parameters. Three things
are done here in another way:

* Pictures. TRL passes them as files, which vLLM processes and runs through a vision tower of its own. Here features of the
  training model's tower are passed: they are computed by the present weights, and nothing that vLLM remembers about a picture
  can be older than these.
* Weights. TRL writes them into the engine's tensors one by one. Layers that repack theirs, which all linear layers do on a
  CPU, would not notice; vLLM's own reload lets every layer prepare what it was given. Adapters are not a PeftModel here, and
  sharded weights are whole while rationales are written (`rge.distributed.collectives.whole_model`), so none are gathered.
* Sampling. Every request has its own seed; TRL's `generate` takes one set of parameters for all.

Importing this module needs vLLM; see `rge.rollout.vllm_writer`.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from rge.distributed import collectives as dist
from rge.model.backbone import vision_prefixes
from rge.model.embedding_model import EmbeddingModel
from rge.rollout.vllm_inputs import know_architectures, present_weights

# Read when vLLM is imported. It tells its makers about every start unless told not to.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Engine(VLLMGeneration):
    """vLLM beside the training model, on the same device.

    Args:
        embedder: the model in training, unwrapped.
        accelerator: of the run.
        max_model_tokens: longest prompt with its rationale, tokens.
        batch_size: rationales written at once.
        memory: share of the device's memory for the engine: its copy of the weights, and the cache.
        sleep: free that memory from the end of a rollout to the next (`sync_weights`); CUDA only.

    Raises:
        ValueError: vLLM cannot hold such a model, or not in that much memory.
    """

    model: Any  # ours; trl names classes of which it is none

    def __init__(
        self,
        embedder: EmbeddingModel,
        accelerator: Accelerator,
        *,
        max_model_tokens: int,
        batch_size: int,
        memory: float,
        sleep: bool = False,
    ):
        model: Any = embedder.model
        super().__init__(
            model,
            accelerator,
            embedder.processor,
            mode="colocate",
            gpu_memory_utilization=memory,
            max_model_length=max_model_tokens,
            max_num_seqs=batch_size,
            enable_sleep_mode=sleep,
        )

    def _init_vllm(self) -> None:
        from vllm import LLM

        words = self.model.get_input_embeddings()
        # A tower that is never run need not be built. But vLLM takes its absence for that of DeepStack.
        self.has_tower = hasattr(self.model.config.vision_config, "deepstack_visual_indexes")

        def with_emb(config: Any) -> Any:
            # The checkpoint on the disk may be a plain model, and adding <emb> may have added rows.
            config.get_text_config().vocab_size = words.num_embeddings  # the weight itself may be sharded
            return config

        know_architectures(self.model.config.architectures)
        dist.ensure_group()
        # vLLM reads who it is from the environment; a single process was started without.
        process = self.accelerator
        with patch_environment(
            rank=process.process_index,
            local_rank=process.local_process_index,
            world_size=process.num_processes,
        ):
            self.llm = LLM(
                model=self.model.name_or_path,
                revision=getattr(self.model.config, "_commit_hash", None),
                hf_overrides=with_emb,
                # Config and processor are read from there; weights come from the training model before each rollout.
                load_format="dummy",
                dtype=self.model.config.dtype,  # float32 weights may be trained
                generation_config="vllm",
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_sleep_mode=self.enable_sleep_mode,
                max_model_len=self.max_model_length,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=max(8192, self.max_model_length or 0),
                # Features are passed. They change with the weights: nothing to remember.
                enable_mm_embeds=True,
                limit_mm_per_prompt={"video": 0} if self.has_tower else {"image": 0, "video": 0},
                skip_mm_profiling=True,
                mm_processor_cache_gb=0,
                # Compiling for a CPU takes minutes.
                enforce_eager=process.device.type == "cpu",
                # vLLM seeds the random numbers of the process, which training continues drawing from.
                seed=torch.initial_seed() % 2**31,
                # Of the distribution that is sampled from: temperature divided, barred tokens barred.
                logprobs_mode="processed_logprobs",
            )
        self._rest()
        process.wait_for_everyone()

    def _rest(self) -> None:
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)  # weights are given anew before each rollout: no copy in main memory

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        without = () if self.has_tower else vision_prefixes(self.model)
        return (
            (name, weight) for name, weight in present_weights(self.model) if not name.startswith(without)
        )

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Wake the engine, give it the model's present weights, and let it forget what it computed with older ones."""
        if self.enable_sleep_mode:
            torch.cuda.empty_cache()  # the engine maps memory of its own, which the cached blocks of training would deny it
            self.llm.wake_up(tags=["weights"])
        with self._without_autocast():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
            self.llm.collective_rpc(_prepare_head)
        self.llm.reset_prefix_cache()
        # The reload empties the worker's store of features alone; the scheduler would count on those that come again.
        self.llm.llm_engine.reset_encoder_cache()
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])

    def write(self, requests: Sequence[dict[str, Any]], parameters: Sequence[dict[str, Any]]) -> list[Any]:
        """Continue prompts.

        Args:
            requests: prompts as vLLM takes them.
            parameters: arguments of vLLM's `SamplingParams`, one a request.

        Returns:
            vLLM's outputs, in the order of the requests.
        """
        from vllm import SamplingParams

        sampling = [SamplingParams(**each) for each in parameters]
        with self._without_autocast():
            outputs = self.llm.generate(list(requests), sampling_params=sampling, use_tqdm=False)
        self._rest()
        return outputs

    def _without_autocast(self) -> torch.autocast:
        # A rollout happens in the context of the run's mixed precision; merging and vLLM's layers are no part of it.
        return torch.autocast(self.accelerator.device.type, enabled=False)


def _prepare_head(worker: Any) -> None:
    """Let the output matrix prepare its weights: where it is the embedding matrix too, vLLM does not do it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)

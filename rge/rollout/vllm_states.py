"""vLLM for a finished checkpoint: one instance writes the rationale and returns the state at ``<emb>``.

vLLM can hand a layer's states to a connector (``extract_hidden_states``, meant for collecting training data of draft models).
The last layer's are those before the final norm, which is applied here. A token that was sampled has no state yet, so a row
is two requests: the first stops at ``<emb>``; the second is the prompt, the rationale and ``<emb>``, and finds all but its
last tokens in the prefix cache.

The connector of vLLM's examples writes files, pins memory and waits for CUDA events, which a CPU has not, and writes what
belongs to the last step in the next one. `StateConnector` keeps one vector a request, in the step that computed it.

Pictures: features of the checkpoint's own tower are passed, as in `rge.rollout.vllm_engine`; vLLM holds the language model only,
and nothing else here does. Importing this module needs vLLM; see `rge.embedder.Embedder.from_pretrained`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rge.rollout.vllm_inputs import in_this_process

# ruff: noqa: E402
in_this_process()  # before vLLM is imported

import torch
import vllm
from torch import Tensor, nn
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from rge.model.embedding_model import EmbeddingModel, normalise
from rge.model.families import family_of
from rge.model.prompts import Prompt
from rge.rollout.generate import Rationale
from rge.rollout.vllm_inputs import arguments, check_prompt, know_architectures, request, shut_down

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

KEY = "rge_state"
"""Of a request's `kv_transfer_params`: the name under which the state at its prompt's last token is kept."""
SPARE_TOKENS = 8
"""Of the longest row: close to its end vLLM leaves the drafter out, which is what hands states over."""


class VllmStates:
    """An engine with a finished checkpoint's weights.

    Attributes:
        name: with vLLM's version, for what is computed with it.

    Args:
        embedder: the checkpoint, still whole; its language model's layers are dropped, for vLLM has them.
        checkpoint: its directory.
        device: where both go.
        dtype: of the weights.
        max_prompt_tokens: longest prompt.
        max_new_tokens: cap on generated tokens, ``<emb>`` included.
        batch_size: rows at once.
        memory: share of a GPU's memory for the engine; a CPU's cache has ``VLLM_CPU_KVCACHE_SPACE`` GiB.

    Raises:
        ValueError: vLLM cannot hold such a model, or not in that much memory.
        RuntimeError: likewise.
    """

    name = f"vllm {vllm.__version__}"

    def __init__(
        self,
        embedder: EmbeddingModel,
        checkpoint: Path,
        *,
        device: str,
        dtype: str,
        max_prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        memory: float,
    ):
        if has_kv_transfer_group():
            raise ValueError(
                "there is an engine in this process already, and vLLM hands out states of one a process"
            )
        model: Any = embedder.model
        self.embedder, self.max_new_tokens = embedder, max_new_tokens
        know_architectures([*model.config.architectures, "ExtractHiddenStatesModel"])
        known = [ModelRegistry.models[one].load_model_cls() for one in model.config.architectures]
        if not all(map(supports_eagle3, known)):
            raise ValueError(
                f"vLLM gives no states of a {model.config.model_type}; it does of qwen2_5_vl and qwen3_vl"
            )
        text = model.config.get_text_config()
        longest = max_prompt_tokens + max_new_tokens + SPARE_TOKENS
        # A tower that is never run need not be built. But vLLM takes its absence for that of DeepStack.
        has_tower = hasattr(model.config.vision_config, "deepstack_visual_indexes")
        family_of(model).decoder(model).layers = nn.ModuleList()
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.set_output_embeddings(nn.Identity())
        layers = {"eagle_aux_hidden_state_layer_ids": [text.num_hidden_layers]}
        self.llm = LLM(
            model=str(checkpoint),
            dtype=dtype,
            **arguments(on_cpu=device == "cpu", rows=batch_size, longest=longest, memory=memory),
            max_num_batched_tokens=max(8192, longest),
            enable_mm_embeds=True,
            limit_mm_per_prompt={"video": 0} if has_tower else {"image": 0, "video": 0},
            skip_mm_profiling=True,
            async_scheduling=False,  # it would take drafts for granted, see `_fit`
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            kv_transfer_config={
                "kv_connector": "StateConnector",
                "kv_connector_module_path": __name__,
                "kv_role": "kv_producer",
            },
        )
        self.llm.collective_rpc(_fit, args=(torch.tensor(embedder.suppressed_ids),))
        embedder.to(device)

    def close(self) -> None:
        """Give the memory back; another engine may be made then."""
        ensure_kv_transfer_shutdown()
        shut_down(self.llm)
        del self.llm

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
    ) -> list[Rationale]:
        """Write rationales, and read the state at the ``<emb>`` after each.

        Args:
            prompts: what to continue, any lengths.
            max_new_tokens: cap on generated tokens, at most that of the engine.
            temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
            seeds: one a rationale, required for sampling; the same seed gives other tokens than `rge.rollout.generate`.

        Raises:
            ValueError: a sampling temperature without seeds.
            BackboneError: vLLM makes other ids of a prompt than the processor did.
        """
        if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
            raise ValueError("sampling (temperature > 0) needs one seed a rationale")
        began = time.perf_counter()
        requests = self._requests(prompts)
        # Nothing but <emb> ends a rationale; what does not occur in one is barred in the model itself.
        settings = {
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "stop_token_ids": [self.embedder.emb_id],
            "ignore_eos": True,
            "detokenize": False,
        }
        asked = [
            SamplingParams(**settings, seed=None if seeds is None else seeds[row] % 2**63)
            for row in range(len(prompts))
        ]
        outputs = self.llm.generate(requests, asked, use_tqdm=False)
        written, forced = [], []
        for prompt, output in zip(prompts, outputs, strict=True):
            check_prompt(prompt, output.prompt_token_ids)
            ids = tuple(output.outputs[0].token_ids)
            forced.append(ids[-1:] != (self.embedder.emb_id,))
            written.append(ids if forced[-1] else ids[:-1])
        states = self._states(requests, written)
        seconds = (time.perf_counter() - began) / max(len(prompts), 1)
        return [Rationale(*row, seconds) for row in zip(written, forced, states, strict=True)]

    @torch.no_grad()
    def states(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]] | None = None
    ) -> list[Tensor]:
        """Unit-norm states (D,) at an ``<emb>`` after each prompt and its rationale, float32 on the host.

        Args:
            prompts: any lengths.
            rationales: token ids without ``<emb>``; None: of none.
        """
        return self._states(self._requests(prompts), rationales or [()] * len(prompts))

    def _requests(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        features = self.embedder.picture_features(prompts)
        return [request(self.embedder, *row) for row in zip(prompts, features, strict=True)]

    def _states(self, requests: Sequence[dict[str, Any]], written: Sequence[Sequence[int]]) -> list[Tensor]:
        asked, sampling = [], []
        for row, (one, ids) in enumerate(zip(requests, written, strict=True)):
            asked.append(one | {"prompt_token_ids": [*one["prompt_token_ids"], *ids, self.embedder.emb_id]})
            extra = {"kv_transfer_params": {KEY: row}}
            sampling.append(SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra))
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        self.num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        self.num_asked = sum(len(output.prompt_token_ids) for output in outputs)
        [found] = self.llm.collective_rpc(_taken)
        norm: Any = family_of(self.embedder.model).decoder(self.embedder.model).norm
        raw_BD = torch.stack([found[row] for row in range(len(asked))]).to(norm.weight)
        return list(normalise(norm(raw_BD)).cpu())


def _fit(worker: Any, barred: Tensor) -> None:
    """Make of vLLM's speculation what it is here for, and keep tokens out of rationales.

    States are handed over by a "draft model", whose drafts are the tokens just sampled: useless, and what is sampled after
    one that is looked at depends on the other rows. So none is handed on. Barred tokens get a logit of minus infinity here
    because vLLM refuses `logit_bias` beside speculation.
    """
    runner = worker.model_runner
    runner.take_draft_token_ids = lambda: None
    model = runner.get_model()
    compute = model.compute_logits

    def without(*args: Any, **kwargs: Any) -> Tensor | None:
        logit_BV = compute(*args, **kwargs)
        return None if logit_BV is None else logit_BV.index_fill(-1, barred.to(logit_BV.device), -torch.inf)

    model.compute_logits = without


def _taken(worker: Any) -> dict[int, Tensor]:
    """States that the connector holds, and no longer does then."""
    connector = get_kv_transfer_group()
    found, connector.states = connector.states, {}
    return found


# ----------------------------------------------------------------------------------------------------------- connector


@dataclass
class _Reads(KVConnectorMetadata):
    """What the worker is to read after a step: (name, block, place in it)."""

    places: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Open:
    """A request whose prompt is being computed."""

    name: int
    num_tokens: int
    blocks: list[int]


class StateConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the last layer's state at the last token of the prompts that ask for it.

    On the scheduler's side it follows the blocks of the cache that hold a prompt's states; on the worker's side it reads one
    place after the step that filled it.

    Attributes:
        states: by name, on the worker's side, (D,) in the engine's dtype.
    """

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        # In one with the keys and values where all have blocks of one kind, else in one of their own.
        own = [
            row for row, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
        ]
        own = own or list(range(len(groups)))
        if len(own) != 1:
            raise ValueError(f"vLLM has {len(groups)} groups of caches, and none is that of the states alone")
        [self._group] = own
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._open: dict[str, _Open] = {}
        self.states: dict[int, Tensor] = {}

    # The scheduler's side.

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Which states this step completes."""
        reads = _Reads()
        for new in scheduler_output.scheduled_new_reqs:
            extra = (new.sampling_params.extra_args if new.sampling_params else None) or {}
            name = (extra.get("kv_transfer_params") or {}).get(KEY)
            if name is not None:
                self._open[new.req_id] = _Open(
                    name, len(new.prompt_token_ids), list(new.block_ids[self._group])
                )
                self._complete(new.req_id, new.num_computed_tokens, scheduler_output, reads)
        cached = scheduler_output.scheduled_cached_reqs
        for row, req_id in enumerate(cached.req_ids):
            if (one := self._open.get(req_id)) is None:
                continue
            if (blocks := cached.new_block_ids[row]) is not None:
                # After it was pushed out of memory, a request gets all its blocks anew.
                kept = [] if req_id in cached.resumed_req_ids else one.blocks
                one.blocks = [*kept, *blocks[self._group]]
            self._complete(req_id, cached.num_computed_tokens[row], scheduler_output, reads)
        return reads

    def _complete(self, req_id: str, num_computed: int, step: "SchedulerOutput", reads: _Reads) -> None:
        one = self._open[req_id]
        if num_computed + step.num_scheduled_tokens[req_id] >= one.num_tokens:
            block, place = divmod(one.num_tokens - 1, self._block_size)
            reads.places.append((one.name, one.blocks[block], place))
            del self._open[req_id]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is left to send: the blocks can go."""
        self._open.pop(request.request_id, None)  # one that was given up
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is read is kept at once."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """A token's state in one piece."""
        return "LBNHC"

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of states: (blocks, 1, tokens of a block, D)."""
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        [name] = layers
        self._cache = kv_caches[name]
        if self._cache.shape[2] != self._block_size:
            raise ValueError(f"blocks of {self._cache.shape[2]} tokens, {self._block_size} were announced")

    def wait_for_save(self) -> None:
        """After a step: keep what it completed."""
        reads = self._get_connector_metadata()
        assert isinstance(reads, _Reads)
        for name, block, place in reads.places:
            self.states[name] = self._cache[block, 0, place].clone()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer keeps its states in the cache by itself."""

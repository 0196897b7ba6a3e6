"""The module that training wraps: packed rows in, embeddings and the LM loss's numerator out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rge.losses import rationale_log_probs, rationale_nll
from rge.model.adapter_files import find_base, is_adapter_checkpoint, load_trainable_adapters
from rge.model.adapters import add_adapters
from rge.model.attention import EncodedPrompts, Pass, install
from rge.model.backbone import Backbone, load_backbone, parts_of
from rge.model.config import ModelConfig
from rge.model.families import family_of, normalised, patch_grid
from rge.model.packing import Branch, PromptPart, TailPart, pack_prompts, pack_tails, to_device
from rge.model.prompts import Prompt


@dataclass(frozen=True)
class Packed:
    """One batch of rows for `EmbeddingModel.forward`: prompts (None if already `encoded`), their tails, or both."""

    prompts: PromptPart | None
    tails: TailPart | None
    encoded: EncodedPrompts | None = None
    owners: Sequence[Prompt] = ()  # the prompts themselves, for `EmbeddingModel.pictures`
    temperature: float = 1.0  # of the sampled branches
    by_branch: bool = False  # compute `Readout.nll_P` too


class PictureMemory:
    """A step's cache of picture features, so that a frozen vision tower runs once per picture."""

    # By id of the prompt, which is kept alive, so that its id stays unique; None between steps.
    _known: dict[int, tuple[Prompt, Tensor]] | None = None

    def open(self) -> None:
        """Start caching: a step begins."""
        self._known = {}

    def recall(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """Features of all pictures of these prompts, or None if one of them is new."""
        known = self._known or {}
        found = [known.get(id(prompt)) for prompt in prompts if prompt.pixels is not None]
        return torch.cat([one[1] for one in found if one]) if found and all(found) else None

    def keep(self, prompts: Sequence[Prompt], features: Tensor) -> None:
        """Cache features, in the order of the prompts' placeholders."""
        pictured = [prompt for prompt in prompts if prompt.pixels is not None]
        if not pictured or self._known is None:
            return
        parts = features.detach().split([int(prompt.type_ids.count_nonzero()) for prompt in pictured])
        self._known |= {id(prompt): (prompt, part) for prompt, part in zip(pictured, parts, strict=True)}

    def clear(self) -> None:
        """Drop everything, and cache nothing until the next step (validation comes in between)."""
        self._known = None


@dataclass
class Readout:
    """Results of one packed batch."""

    state_ND: Tensor  # unit-norm states at the branches' ``<emb>``, float32 (float64 for a float64 model)
    nll: Tensor  # summed negative log likelihood of the predicted tokens, in nats
    encoded: EncodedPrompts | None = None  # keys and values of the prompts, if there were no tails
    # Of the sampled tokens, branch after branch, see `rge.losses.rationale_log_probs`; None without any.
    log_prob_L: Tensor | None = None
    entropy_L: Tensor | None = None  # of their distributions, without gradient
    nll_P: Tensor | None = None  # `nll` per branch with predicted tokens; None unless `Packed.by_branch`


class EmbeddingModel(nn.Module):
    """A backbone that embeds: the state at ``<emb>``, L2-normalised (RGE, arXiv:2511.16150, section 3.4).

    With `cuda_graphs`, a GPU's steps of generation are captured, see `rge.rollout.generate`.
    """

    pictures: PictureMemory | None = None
    """Set where a frozen vision tower's features may serve a whole step; None computes them in every pass."""

    def __init__(self, backbone: Backbone, cuda_graphs: bool = True):
        super().__init__()
        self.cuda_graphs = cuda_graphs
        self.model = backbone.model
        self.processor = backbone.processor
        self.emb_id, self.rows_of_base = backbone.emb_id, backbone.rows_of_base
        self.suppressed_ids = backbone.suppressed_ids
        tokenizer = backbone.processor.tokenizer
        self.pad_id = tokenizer.pad_token_id
        self.family = family_of(backbone.model)
        self.picture_ids = self.family.picture_ids(self.model.config, tokenizer)
        text = self.family.decoder(self.model)
        self.attention = install(text, backbone.attention, self.family.whole_pictures)
        # The layers that FSDP2 shards one by one; accelerate asks the module that it wraps.
        present = {type(module).__name__ for module in backbone.model.modules()}
        self._no_split_modules = sorted(present & set(backbone.model._no_split_modules or ()))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.get_input_embeddings().weight.device

    def pack(
        self,
        prompts: Sequence[Prompt],
        branches: Sequence[Sequence[Branch]],
        temperature: float = 1.0,
        encoded: EncodedPrompts | None = None,
    ) -> Packed:
        """Lay out prompts, unless already `encoded`, and their branches for `forward`; see `rge.model.packing`."""
        tails = pack_tails(prompts, branches)
        if encoded is not None:
            (tails,) = to_device(tails, device=self.device)
            return Packed(None, tails, encoded, temperature=temperature)
        part, tails = to_device(self._prompts(prompts), tails, device=self.device)
        return Packed(part, tails, owners=prompts, temperature=temperature)

    def pack_prompts(self, prompts: Sequence[Prompt]) -> Packed:
        """Lay out prompts alone, to be continued later."""
        (part,) = to_device(self._prompts(prompts), device=self.device)
        return Packed(part, None, owners=prompts)

    def _prompts(self, prompts: Sequence[Prompt]) -> PromptPart:
        empty = self.family.square_picture(self.model.config)
        return pack_prompts(prompts, picture_ids=self.picture_ids, empty_picture=empty)

    def forward(self, *packs: Packed | Readout) -> list[Readout]:
        """Run every pack through the backbone in one call, so that a wrapper sees few forwards per step.

        A readout of an earlier forward of the unwrapped module is returned unchanged: the wrapper prepares a backward in each
        forward.
        """
        return [packed if isinstance(packed, Readout) else self._read(packed) for packed in packs]

    def _run(self, packed: Packed) -> tuple[Tensor, Pass]:
        """Last-layer states of all tokens, valid for those that are read, and the plan."""
        prompts, tails = packed.prompts, packed.tails
        parts = [part for part in (prompts, tails) if part is not None]
        features = index_F = None
        if prompts is not None:
            features, index_F = self._features(prompts, packed.owners), prompts.picture_index_F
        num_layers = len(self.family.decoder(self.model).layers)
        plan = Pass(prompts, tails, packed.encoded, num_layers, self.attention, self.family.whole_pictures)
        if tails is not None and tails.pixels is not None and tails.picture_index_F is not None:
            more, more_F = self._shown(tails), plan.num_prompt_tokens + tails.picture_index_F
            features = more if features is None else torch.cat([features, more])
            index_F = more_F if index_F is None else torch.cat([index_F, more_F])
        inputs = {
            "input_ids": torch.cat([part.input_ids_T for part in parts])[None],
            "position_ids": torch.cat([part.position_ids_3T for part in parts], dim=1)[:, None],
            "attention_mask": plan,
        }
        hidden_TD = self.family.states(self.model, features, index_F, inputs)[0]
        return hidden_TD, plan

    def _read(self, packed: Packed) -> Readout:
        prompts, tails = packed.prompts, packed.tails
        hidden_TD, plan = self._run(packed)
        if tails is None:
            keys, values = zip(*(plan.kept[layer] for layer in range(plan.num_layers)), strict=True)
            encoded = EncodedPrompts(prompts, [*keys], [*values])  # type: ignore[arg-type]
            return Readout(hidden_TD[:0], hidden_TD.new_zeros(()), encoded)
        tail_TD, head = hidden_TD[plan.num_prompt_tokens :], self.model.get_output_embeddings()
        predicting_MD, nll_P = tail_TD[tails.predict_index_M], None
        if packed.by_branch:
            nll_M = rationale_nll(predicting_MD, head, tails.label_M, reduction="none")
            nll_P = torch.stack([part.sum() for part in nll_M.split(tails.label_lengths)])
        found = Readout(
            state_ND=normalise(tail_TD[tails.state_index_N]),
            nll=rationale_nll(predicting_MD, head, tails.label_M) if nll_P is None else nll_P.sum(),
            nll_P=nll_P,
        )
        if tails.sampled_L.shape[0]:
            found.log_prob_L, found.entropy_L = rationale_log_probs(
                tail_TD[tails.sampled_index_L],
                head,
                tails.sampled_L,
                barred_ids=self.suppressed_ids,
                temperature=packed.temperature,
            )
        return found

    def next_logits(self, packed: Packed) -> Tensor:
        """Logits (N, V), float32, of the token after each branch with `read_state`."""
        hidden_TD, plan = self._run(packed)
        assert packed.tails is not None
        state_ND = hidden_TD[plan.num_prompt_tokens :][packed.tails.state_index_N]
        return self.model.get_output_embeddings()(state_ND).float()

    @torch.no_grad()
    def picture_features(self, prompts: Sequence[Prompt]) -> list[Tensor | None]:
        """Features (placeholders, feature size) of each prompt's pictures, without gradient; None without pictures."""
        pictured = [prompt for prompt in prompts if prompt.pixels is not None]
        if not pictured:
            return [None] * len(prompts)
        part = self.pack_prompts(pictured).prompts
        assert part is not None
        features = self._features(part, pictured)
        parts = iter(features.split([int(prompt.type_ids.count_nonzero()) for prompt in pictured]))
        return [None if prompt.pixels is None else next(parts) for prompt in prompts]

    def _features(self, part: PromptPart, owners: Sequence[Prompt]) -> Tensor:
        features = None if self.pictures is None else self.pictures.recall(owners)
        if features is None:
            features = self._shown(part)
            if self.pictures is not None:
                self.pictures.keep(owners, features)
        return features

    def _shown(self, part: PromptPart | TailPart) -> Tensor:
        assert part.pixels is not None
        assert part.image_grid is not None
        image_processor = self.processor.image_processor
        values = normalised(image_processor, part.pixels, part.image_grid)
        return self.family.features(self.model, values, patch_grid(image_processor, part.image_grid))


def embedder_to_train(
    start: str, config: ModelConfig, adapters_only: bool = False, *, needs_head: bool = True
) -> EmbeddingModel:
    """The embedder that a recipe trains from `start`, a hub id or directory, with frozen and trainable parts.

    With `adapters_only`, the adapters of a checkpoint that has nothing else are continued, on the same base; otherwise they are
    merged, as on export. `needs_head` is that of `rge.model.backbone.load_backbone`.

    Raises:
        BackboneError: nothing usable is there.
        AdapterError: the adapters do not fit; or those of the checkpoint have another form, or their base is missing.
    """
    adapted = is_adapter_checkpoint(start)
    backbone = load_backbone(
        start,
        revision=config.revision if start == config.path else None,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        vision_attn_implementation=config.vision_attn_implementation,
        fused_kernels=config.fused_kernels,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        add_emb=True,
        base=find_base(Path(start), instead=config.path, key="model.path") if adapted else None,
        merge=not adapters_only,
        needs_head=needs_head,
    )
    if config.gradient_checkpointing:
        backbone.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora is not None:
        add_adapters(backbone.model, config.lora, backbone.emb_id)
        if adapted and adapters_only:
            load_trainable_adapters(backbone.model, Path(start))
    else:
        parts = parts_of(backbone.model)
        for parameter in (parameter for part in config.freeze for parameter in parts[part]):
            parameter.requires_grad_(False)
    return EmbeddingModel(backbone, config.cuda_graphs).train()


def normalise(state: Tensor) -> Tensor:
    """Unit norm in at least float32, whatever the backbone's dtype."""
    return F.normalize(state.to(torch.promote_types(state.dtype, torch.float32)), dim=-1)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Without dropout and gradient checkpointing."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)

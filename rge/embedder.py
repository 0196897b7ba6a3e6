"""The module that training wraps: packed rows in, embeddings and the LM loss's numerator out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rge.backbone import Backbone, empty_picture, hidden_states, picture_features, prompt_positions
from rge.losses import rationale_nll
from rge.packing import Branch, Packed, attention_mask, pack
from rge.prompts import Prompt


@dataclass
class Readout:
    """What one packed batch gives.

    Attributes:
        state_ND: unit-norm states at the branches' ``<emb>``, float32 (float64 for a float64 model).
        nll: summed negative log likelihood of the predicted tokens, in nats.
        num_tokens: how many tokens that sum is over.
    """

    state_ND: Tensor
    nll: Tensor
    num_tokens: int


class Embedder(nn.Module):
    """A backbone that embeds: the state at ``<emb>``, L2-normalised (RGE, arXiv:2511.16150, section 3.4).

    Args:
        backbone: model, processor and ids.
    """

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.model = backbone.model
        self.processor = backbone.processor
        self.emb_id = backbone.emb_id
        self.suppressed_ids = backbone.suppressed_ids
        tokenizer = backbone.processor.tokenizer
        self.pad_id = tokenizer.pad_token_id
        config = backbone.model.config
        self.picture_ids = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.get_input_embeddings().weight.device

    def pack(
        self, prompts: Sequence[Prompt], branches: Sequence[Sequence[Branch]], padding_side: str = "right"
    ) -> Packed:
        """Lay prompts and their branches out for `forward`; see `rge.packing.pack`."""
        return pack(
            prompts,
            prompt_positions(self.model, prompts),
            branches,
            pad_id=self.pad_id,
            picture_ids=self.picture_ids,
            empty_picture=empty_picture(self.model),
            padding_side=padding_side,
        ).to(self.device)

    def forward(self, *packs: Packed) -> list[Readout]:
        """Run every pack through the backbone, all in one call, so that a wrapper sees one forward a step.

        Args:
            packs: e.g. the queries' rows and the candidates' rows, which have nothing to share.

        Returns:
            One readout a pack.
        """
        return [self._read(packed) for packed in packs]

    def _read(self, packed: Packed) -> Readout:
        features = picture_features(self.model, packed.pixel_values, packed.image_grid)
        hidden_BTD = hidden_states(
            self.model,
            features=features,
            input_ids=packed.input_ids_BT,
            position_ids=packed.position_ids_3BT,
            attention_mask={"full_attention": attention_mask(packed.segment_BT)},
            use_cache=False,
        )
        hidden = hidden_BTD.flatten(0, 1)
        return Readout(
            state_ND=normalise(hidden[packed.state_index_N]),
            nll=rationale_nll(
                hidden[packed.predict_index_M], self.model.get_output_embeddings(), packed.label_M
            ),
            num_tokens=packed.label_M.shape[0],
        )


def normalise(state: Tensor) -> Tensor:
    """Unit norm in at least float32, whatever the backbone's dtype."""
    return F.normalize(state.to(torch.promote_types(state.dtype, torch.float32)), dim=-1)

"""Our own generation behind the interface of `rge.rollout.vllm_engine.Engine`, so that all around vLLM is tested without it."""

from types import SimpleNamespace

import torch

from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import Branch
from rge.model.prompts import Prompt
from rge.rollout.generate import generate


class OwnEngine:
    """Answers as vLLM does, by our own generation: pictures expanded by their grids, and ids that end with `<emb>` or not.

    Args:
        embedder: writes.
        prompts: every prompt that it may be asked to continue.
        extra: placeholders a picture that the processor did not make.
    """

    def __init__(self, embedder: EmbeddingModel, prompts: list[Prompt], extra: int = 0):
        self.embedder, self.extra, self.num_synced = embedder, extra, 0
        self.prompts = {tuple(prompt.input_ids.tolist()): prompt for prompt in prompts}

    def sync_weights(self) -> None:
        self.num_synced += 1

    def write(self, requests, parameters):
        return [self._one(*both) for both in zip(requests, parameters, strict=True)]

    def _one(self, asked, sampling):
        config = self.embedder.model.config
        ids = asked["prompt_token_ids"]
        if pictures := asked.get("multi_modal_data", {}).get("image"):
            sizes = pictures["image_grid_thw"].prod(-1) // config.vision_config.spatial_merge_size**2
            assert len(pictures["image_embeds"]) == sizes.sum()
            assert ids.count(config.image_token_id) == len(sizes)
            size = iter((sizes + self.extra).tolist())
            ids = [
                one for each in ids for one in [each] * (next(size) if each == config.image_token_id else 1)
            ]
        if tuple(ids) not in self.prompts:
            return SimpleNamespace(
                prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=[], logprobs=None)]
            )
        emb_id = self.embedder.emb_id
        assert sampling["stop_token_ids"] == [emb_id]
        assert sampling["logit_bias"] == dict.fromkeys(self.embedder.suppressed_ids, float("-inf"))
        (rationale,) = generate(
            self.embedder,
            [self.prompts[tuple(ids)]],
            max_new_tokens=sampling["max_tokens"],
            batch_size=1,
            temperature=sampling["temperature"],
            seeds=[sampling["seed"]] if "seed" in sampling else None,
        )
        token_ids = [*rationale.ids] if rationale.forced else [*rationale.ids, emb_id]
        said = None
        if sampling.get("logprobs") is not None:
            branch = Branch(token_ids, sampled=True)
            prompt = self.prompts[tuple(ids)]
            with torch.no_grad():
                found = self.embedder(self.embedder.pack([prompt], [[branch]], sampling["temperature"]))[0]
            said = [
                {token: SimpleNamespace(logprob=value)}
                for token, value in zip(token_ids, found.log_prob_L.tolist(), strict=True)
            ]
        output = SimpleNamespace(token_ids=token_ids, logprobs=said)
        return SimpleNamespace(prompt_token_ids=ids, outputs=[output])

"""Counterfactual selection: choose among several rationales by how much they help an embedder.

The query is embedded without a rationale and after each candidate rationale, in one forward pass of its prompt. A
rationale's gain is the increase in log-probability of the right target, in nats; below zero it misleads.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rge.common.schema import Record, Target
from rge.data.collate import query_item, target_item
from rge.embedder import Embedder
from rge.model.packing import Branch


def gains(
    without_D: np.ndarray, with_KD: np.ndarray, target_CD: np.ndarray, right: int, temperature: float
) -> np.ndarray:
    """Gain of each of K rationales, nats: log p(right | query, rationale) - log p(right | query), with a softmax over the targets.

    ``right`` is the row of the right target; embeddings have unit norm, and ``temperature`` divides their cosines.
    """
    query_QD = np.vstack([without_D[None], with_KD]).astype(np.float64)
    scores = query_QD @ target_CD.T.astype(np.float64) / temperature
    scores -= scores.max(axis=1, keepdims=True)
    log_p = scores[:, right] - np.log(np.exp(scores).sum(axis=1))
    return log_p[1:] - log_p[0]


class GainJudge:
    """Scores rationales with a checkpoint, by default at the temperature of the recipes."""

    def __init__(self, checkpoint: str, *, batch_size: int = 16, temperature: float = 0.05):
        self.encoder = Embedder.from_pretrained(checkpoint)
        self.batch_size, self.temperature = batch_size, temperature

    def judge(
        self, pairs: Sequence[tuple[Record, Target]], candidates: Sequence[Sequence[str]]
    ) -> list[np.ndarray]:
        """Gains of each pair's candidates.

        The softmax runs over the targets and negatives of all given pairs, except targets that are also right for the query
        (another positive of its record, or an equal identity).
        """
        by_id: dict[str, Target] = {}
        for record, positive in pairs:
            for target in (positive, *record.negatives):
                by_id.setdefault(target.id, target)
        targets = list(by_id.values())
        items, size = list(map(target_item, targets)), self.batch_size
        target_CD = self.encoder.encode(items, side="candidate", mode="direct", batch_size=size).embeddings
        found: list[np.ndarray] = []
        for start in range(0, len(pairs), size):
            batch = pairs[start : start + size]
            states = self._states([record for record, _ in batch], candidates[start : start + size])
            for (record, positive), state_KD in zip(batch, states, strict=True):
                rows = _distinct_targets(record, positive, targets)
                right = [targets[row].id for row in rows].index(positive.id)
                found.append(gains(state_KD[0], state_KD[1:], target_CD[rows], right, self.temperature))
        return found

    def _states(self, records: Sequence[Record], candidates: Sequence[Sequence[str]]) -> list[np.ndarray]:
        builder, embedder = self.encoder.builder, self.encoder.model
        prompts, branches = [], []
        for record, texts in zip(records, candidates, strict=True):
            prompts.append(builder.build(query_item(record), "query"))
            own = [Branch([embedder.emb_id], read_state=True)]
            own += [Branch(builder.rationale_ids(text, record.id), read_state=True) for text in texts]
            branches.append(own)
        with torch.no_grad():
            state_ND = embedder(embedder.pack(prompts, branches))[0].state_ND.float().cpu().numpy()
        return np.split(state_ND, np.cumsum([len(own) for own in branches])[:-1])


def _distinct_targets(record: Record, positive: Target, targets: Sequence[Target]) -> list[int]:
    """Rows of the right target and of all targets that are wrong for the query."""
    also_right = {name for target in record.positives for name in (target.id, target.identity or target.id)}
    return [
        row
        for row, target in enumerate(targets)
        if target.id == positive.id or not {target.id, target.identity or target.id} & also_right
    ]

"""A judge that reads the other way round: how likely the query's rationale is, given the candidate.

By Bayes' rule, among the candidates of one query, the likelihood of what is asked given a candidate orders them as the
probability of the candidate does, as far as candidates are alike likely beforehand: the noisy channel, and UPR's score
(Sachan et al., arXiv:2204.07496). Where the ranking was made with rationales the rationale is asked for, else the query's text.

`write_records` makes training records for such a judge of records with rationales; the LM loss of a cold start then teaches it.
"""

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.judging.judges import load_local
from rge.common.errors import UserError
from rge.common.registry import PluginOptions
from rge.common.schema import Item, Positive, QueryPart, Record
from rge.data.sources import RecordFile
from rge.data.sources import write_records as records_to_file

QUESTION = "What question does this answer, and why?"


def asked_for(queries: Sequence[Item], rationales: Sequence[str | None]) -> list[Item]:
    """What is to be likely: each query's rationale, or its text where it has none."""
    return [
        Item(query.id, text=rationale or query.text)
        for query, rationale in zip(queries, rationales, strict=True)
    ]


def shown(candidate: Item) -> Item:
    """What it is to be likely after: the candidate and the question."""
    return replace(candidate, text="\n".join(filter(None, (candidate.text, QUESTION))), instruction=None)


class LikelihoodJudge:
    """Log likelihood, summed over the tokens, of a text after a candidate.

    Args:
        path: a Qwen vision-language model's directory, or id on the hub.
        batch_size: texts a forward.
        device: such as ``cuda:0``; None takes a GPU if there is one.
        dtype: of the weights; None: float32 on CPU, bfloat16 on a GPU.
        max_tokens: longest prompt.

    Raises:
        rge.model.backbone.BackboneError: it cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        *,
        batch_size: int,
        device: str | None = None,
        dtype: str | None = None,
        max_tokens: int = 8192,
    ):
        self._embedder, self._builder, name = load_local(path, device, dtype, max_tokens)
        self._batch_size = batch_size
        self.name: dict[str, Any] = name | {"asks": "likelihood"}

    def score(self, pairs: Sequence[tuple[Item, Item]]) -> list[float | None]:
        """Log likelihoods of (text, candidate) pairs, in nats; a candidate's prompt is encoded once for all of its texts."""
        import torch

        from rge.model.packing import Branch

        tokenizer = self._builder.processor.tokenizer
        ids = [tuple(tokenizer(text.text or "", add_special_tokens=False).input_ids) for text, _ in pairs]
        if empty := [text.id for (text, _), one in zip(pairs, ids, strict=True) if not one]:
            raise UserError(
                f"query {empty[0]!r} has neither a rationale nor a text, so there is no likelihood"
            )
        of_candidate: dict[str, list[int]] = defaultdict(list)
        for place, (_, candidate) in enumerate(pairs):
            of_candidate[candidate.id].append(place)
        found: list[float | None] = [None] * len(pairs)
        for places in of_candidate.values():
            prompt = self._builder.build(shown(pairs[places[0]][1]), "query")
            for start in range(0, len(places), self._batch_size):
                part = places[start : start + self._batch_size]
                packed = self._embedder.pack([prompt], [[Branch(ids[place], sampled=True) for place in part]])
                with torch.no_grad():
                    log_prob_L = self._embedder(packed)[0].log_prob_L
                sums = [
                    float(one.sum()) for one in log_prob_L.float().split([len(ids[place]) for place in part])
                ]
                for place, value in zip(part, sums, strict=True):
                    found[place] = value
        return found


@dataclass
class JudgeRecordsOptions(PluginOptions):
    """Make records that teach a judge to write a query's rationale after a candidate (rerank ask=likelihood)."""

    src: tuple[Path, ...]
    """Files of training records with rationales."""
    out: Path
    """File of records to write."""
    draws: int = 3
    """Records for each positive: each shows a picture of the positive's identity, drawn from all that src has."""
    seed: int = 0
    """Seed of the draws."""


def write_records(options: JudgeRecordsOptions) -> Path:
    """Write the records and return their file.

    Raises:
        UserError: src cannot be read, or none of its positives has a rationale.
    """
    if options.draws < 1:
        raise UserError(f"draws must be at least 1, got {options.draws}")
    rng = random.Random(options.seed)
    records = [file[place] for file in map(RecordFile, options.src) for place in range(len(file))]
    pictures: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for target in (*record.positives, *record.negatives):
            if isinstance(target.image, str):
                pictures[target.identity or target.id].add(_beside(target.image, options.out))
    drawn_from = {identity: sorted(refs) for identity, refs in pictures.items()}
    made: list[Record] = []
    for record in records:
        for positive in record.positives:
            refs = drawn_from.get(positive.identity or positive.id, [])
            if not positive.rationale or not (refs or positive.text):
                continue
            for _ in range(options.draws if refs else 1):
                query = QueryPart(
                    text=shown(Item("", text=positive.text)).text, images=[rng.choice(refs)] if refs else []
                )
                said = Positive(id=f"text {len(made)}", text=positive.rationale, rationale=positive.rationale)
                made.append(
                    Record(
                        id=f"{record.id}.{len(made)}", group=record.group, source="judge", split=record.split,
                        query=query, positives=[said],
                    )
                )  # fmt: skip
    if not made:
        raise UserError(f"{options.src[0]} has no positive with a rationale, so there is nothing to learn")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records_to_file(options.out, made)
    print(f"{options.out}: {len(made)} records from {len(records)}")
    return options.out


def _beside(ref: str, out: Path) -> str:
    """A reference as a file in another folder writes it."""
    path, mark, row = ref.partition("#")
    return os.path.relpath(path, out.parent) + mark + row

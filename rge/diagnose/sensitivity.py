"""Does the rationale matter? Embeddings after swapped, shuffled and empty rationales.

The same query is embedded after its own rationale, another query's, as many full stops, nothing at all, the oracle's, and
another query's oracle's.
"""

from typing import Any

import numpy as np
import torch

from rge.diagnose.pairs import Pairs, elsewhere, hits, interval
from rge.embedder import Embedder
from rge.rollout.generate import generate
from rge.stats.intervals import OF_DIFFERENCES, in_words


@torch.no_grad()
def sensitivity(encoder: Embedder, pairs: Pairs, *, batch_size: int, seed: int = 0) -> dict[str, Any]:
    """Measure all conditions.

    Returns:
        ``conditions`` by name, each with ``hit@1`` (mean, low, high), the paired ``difference`` from own, ``cosine`` to the
        own embedding, and ``moved``, the share of queries with another best candidate; ``cosine_of_others``, how alike
        the own embeddings of different queries are; and a ``verdict``.
    """
    embedder, builder = encoder.model, encoder.builder
    prompts = [builder.build(item, "query") for item in pairs.queries]
    cap = encoder.settings["generation"]["max_new_tokens"]
    own = generate(embedder, prompts, max_new_tokens=cap, batch_size=batch_size)
    ids = [list(rationale.ids) for rationale in own]
    moved_Q = elsewhere(pairs.groups, seed)
    stop = embedder.processor.tokenizer(".", add_special_tokens=False).input_ids
    conditions: dict[str, list[list[int]]] = {
        "own": ids,
        "swapped": [ids[other] for other in moved_Q],
        "blanked": [(stop * len(row))[: len(row)] for row in ids],
        "none": [[] for _ in ids],
    }
    if all(pairs.oracle):
        oracle = [builder.rationale_ids(text, "")[:-1] for text in pairs.oracle]  # type: ignore[arg-type]
        conditions["oracle"] = oracle
        conditions["oracle, swapped"] = [oracle[other] for other in moved_Q]
    candidate_CD = encoder.encode(
        pairs.candidates, side="candidate", mode="direct", batch_size=batch_size
    ).embeddings
    states = {
        name: encoder.encode_after(prompts, rows, batch_size=batch_size) for name, rows in conditions.items()
    }
    own_QD = states["own"]
    own_hits = hits(own_QD, candidate_CD, pairs.right_QC)
    best_Q = (own_QD @ candidate_CD.T).argmax(axis=1)
    found: dict[str, Any] = {}
    for name, state_QD in states.items():
        hit_Q = hits(state_QD, candidate_CD, pairs.right_QC)
        difference = interval(hit_Q - own_hits, pairs.groups, seed, bounds=OF_DIFFERENCES)
        found[name] = {
            "hit@1": interval(hit_Q, pairs.groups, seed),
            "difference": (0.0, 0.0, 0.0) if name == "own" else difference,
            "cosine": float((state_QD * own_QD).sum(axis=1).mean()),
            "moved": float(((state_QD @ candidate_CD.T).argmax(axis=1) != best_Q).mean()),
        }
    return {
        "queries": len(prompts),
        "candidates": len(pairs.candidates),
        "conditions": found,
        "cosine_of_others": float((own_QD * own_QD[moved_Q]).sum(axis=1).mean()),
        "rationale_tokens": float(np.mean([len(row) for row in ids])),
        "distinct_rationales": len({tuple(row) for row in ids}),
        "verdict": verdict(found),
    }


def verdict(conditions: dict[str, Any]) -> str:
    """One sentence on what the swap says, by whether its interval leaves zero out."""
    mean, low, high = conditions["swapped"]["difference"]
    points = f"{100 * mean:+.1f} {in_words(low, high)} points of hit@1"
    if low is None or high is None:
        return f"one group of queries alone says nothing: another query's rationale gives {points}"
    if high < 0:
        return f"the rationale matters: another query's costs {points}"
    if low > 0:
        return f"the rationale harms: another query's gives {points}"
    return f"no effect of the rationale is seen: another query's gives {points}"


def table(found: dict[str, Any]) -> str:
    """The printed table, in per cent."""
    width = max(10, *(len(name) + 2 for name in found["conditions"]))
    lines = [
        f"{found['queries']} queries, {found['candidates']} candidates; {found['distinct_rationales']} different rationales "
        f"of {found['rationale_tokens']:.1f} tokens on average",
        "",
        f"{'rationale':<{width}}{'hit@1, %':>22}{'difference from own':>26}{'cosine to own':>16}{'other best, %':>16}",
    ]
    for name, row in found["conditions"].items():
        hit, low, high = row["hit@1"]
        mean, below, above = row["difference"]
        lines.append(
            f"{name:<{width}}{f'{100 * hit:.1f} {in_words(low, high)}':>22}"
            f"{f'{100 * mean:+.1f} {in_words(below, above)}':>26}"
            f"{row['cosine']:>16.3f}{100 * row['moved']:>16.1f}"
        )
    lines += [
        "",
        f"own embeddings of different queries: cosine {found['cosine_of_others']:.3f}",
        found["verdict"],
    ]
    return "\n".join(lines)

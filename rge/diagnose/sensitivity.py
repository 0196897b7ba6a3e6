"""Does the rationale matter? Embeddings after swapped, shuffled and empty rationales.

The conditions are described in docs/diagnose.md.

Shape suffixes: Q = queries, D = hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rge.common.commands import progress_bar
from rge.diagnose.pairs import Pairs, interval, permute_across_groups
from rge.embedder import Embedder
from rge.model.prompts import Prompt
from rge.rollout.generate import generate
from rge.stats.intervals import OF_DIFFERENCES, in_words


@torch.no_grad()
def sensitivity(encoder: Embedder, pairs: Pairs, *, batch_size: int, seed: int = 0) -> dict[str, Any]:
    """Measure all conditions, by interventions on the rationale's words.

    Returns:
        ``conditions`` by name, each with ``hit@1`` (mean, low, high), the paired ``difference`` from own, ``cosine`` to the
        own embedding, and ``moved``, the share of queries with another best candidate; ``cosine_of_others``: mean cosine between
        own embeddings of different queries; and a ``verdict``.
    """
    encoder.settings.check_mode("reasoning")
    prompts = [encoder.builder.build(item, "query") for item in pairs.queries]
    moved_Q = permute_across_groups(pairs.groups, seed)
    states, about = _written(encoder, prompts, pairs, moved_Q, batch_size)
    candidate_CD = encoder.encode(
        pairs.candidates, side="candidate", mode="direct", batch_size=batch_size, progress=True
    ).embeddings
    own_QD = states["own"]
    best = {name: pairs.best(state_QD, candidate_CD) for name, state_QD in states.items()}
    hits = {name: pairs.right_QC[range(len(prompts)), best_Q].astype(float) for name, best_Q in best.items()}
    conditions: dict[str, Any] = {}
    for name, state_QD in states.items():
        difference = interval(hits[name] - hits["own"], pairs.groups, seed, bounds=OF_DIFFERENCES)
        conditions[name] = {
            "hit@1": interval(hits[name], pairs.groups, seed),
            "difference": (0.0, 0.0, 0.0) if name == "own" else difference,
            "cosine": float((state_QD * own_QD).sum(axis=1).mean()),
            "moved": float((best[name] != best["own"]).mean()),
        }
    return {
        "queries": len(prompts),
        "candidates": len(pairs.candidates),
        "conditions": conditions,
        "cosine_of_others": float((own_QD * own_QD[moved_Q]).sum(axis=1).mean()),
        **about,
        "verdict": verdict(conditions),
    }


def _written(
    encoder: Embedder, prompts: Sequence[Prompt], pairs: Pairs, moved_Q: np.ndarray, batch_size: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Embeddings (Q, D) after rationales by condition, and statistics of the rationales."""
    embedder, builder = encoder.model, encoder.builder
    settings = encoder.settings
    with progress_bar(total=len(prompts), desc="writing", unit="query") as bar:
        own = generate(
            embedder,
            prompts,
            max_new_tokens=settings.generation.max_new_tokens,
            min_new_tokens=settings.min_rationale_tokens,
            batch_size=batch_size,
            on_progress=bar.update,
        )
    ids = [list(rationale.ids) for rationale in own]
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
    states = {
        name: encoder.encode_after(prompts, rows, batch_size=batch_size)
        for name, rows in progress_bar(conditions.items(), desc="embedding", unit="condition")
    }
    about: dict[str, Any] = {
        "rationale_tokens": float(np.mean([len(row) for row in ids])),
        "distinct_rationales": len({tuple(row) for row in ids}),
    }
    return states, about


def verdict(conditions: dict[str, Any]) -> str:
    """A sentence on the effect of the swap: is zero outside its interval?"""
    mean, low, high = conditions["swapped"]["difference"]
    points = f"{100 * mean:+.1f} {in_words(low, high)} points of hit@1"
    if low is None or high is None:
        return f"one group of queries alone says nothing: another query's gives {points}"
    if high < 0:
        return f"the rationale matters: another query's costs {points}"
    if low > 0:
        return f"the rationale harms: another query's gives {points}"
    return f"no effect of the rationale is seen: another query's gives {points}"


def table(result: dict[str, Any]) -> str:
    """The printed table, in per cent."""
    title, mean = "rationale", f"{result['rationale_tokens']:.1f} tokens on average"
    summary = f"{result['distinct_rationales']} different rationales of {mean}"
    width = max(10, *(len(name) + 2 for name in (title, *result["conditions"])))
    lines = [
        f"{result['queries']} queries, {result['candidates']} candidates; {summary}",
        "",
        f"{title:<{width}}{'hit@1, %':>22}{'difference from own':>26}{'cosine to own':>16}{'other best, %':>16}",
    ]
    for name, row in result["conditions"].items():
        hit, low, high = row["hit@1"]
        mean, below, above = row["difference"]
        lines.append(
            f"{name:<{width}}{f'{100 * hit:.1f} {in_words(low, high)}':>22}"
            f"{f'{100 * mean:+.1f} {in_words(below, above)}':>26}"
            f"{row['cosine']:>16.3f}{100 * row['moved']:>16.1f}"
        )
    lines += [
        "",
        f"own embeddings of different queries: cosine {result['cosine_of_others']:.3f}",
        result["verdict"],
    ]
    return "\n".join(lines)

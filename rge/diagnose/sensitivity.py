"""Does the rationale matter? Embeddings after swapped, shuffled and empty rationales, or think tokens.

The conditions are described in docs/diagnose.md. Think tokens (``mode=latent``) are replaced by hooks where they enter each decoder
layer, for every family and with packing: ``<emb>`` reads keys and values of the replacement, rotated to its new position. Keys and
values themselves could not be moved between queries, since they are rotated by the length of their own prompt. The replacements
are recorded in an unmodified pass, so they are what another query's ``<emb>`` has read.

Shape suffixes: Q = queries, B = queries of a batch, L = layers, K = think tokens, T = tokens of a packed batch, D = hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rge.common.commands import progress_bar
from rge.diagnose.pairs import Pairs, interval, permute_across_groups
from rge.embedder import Embedder
from rge.model.packing import Branch, by_length
from rge.model.prompts import Prompt
from rge.rollout.generate import generate
from rge.stats.intervals import OF_DIFFERENCES, in_words

Mode = Literal["reasoning", "latent"]


@torch.no_grad()
def sensitivity(
    encoder: Embedder, pairs: Pairs, *, batch_size: int, mode: Mode | None = None, seed: int = 0
) -> dict[str, Any]:
    """Measure all conditions, by interventions on words (``reasoning``) or think tokens (``latent``); None: as queries were trained.

    Returns:
        ``conditions`` by name, each with ``hit@1`` (mean, low, high), the paired ``difference`` from own, ``cosine`` to the
        own embedding, and ``moved``, the share of queries with another best candidate; ``cosine_of_others``: mean cosine between
        own embeddings of different queries; and a ``verdict``.
    """
    mode = mode or ("latent" if encoder.query_mode == "latent" else "reasoning")
    encoder.settings.check_mode(mode)
    prompts = [encoder.builder.build(item, "query") for item in pairs.queries]
    moved_Q = permute_across_groups(pairs.groups, seed)
    if mode == "latent":
        states, about = _latent(encoder, prompts, moved_Q, batch_size, seed)
    else:
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
        "mode": mode,
        "queries": len(prompts),
        "candidates": len(pairs.candidates),
        "conditions": conditions,
        "cosine_of_others": float((own_QD * own_QD[moved_Q]).sum(axis=1).mean()),
        **about,
        "verdict": verdict(conditions, mode),
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


def _latent(
    encoder: Embedder, prompts: Sequence[Prompt], moved_Q: np.ndarray, batch_size: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Embeddings (Q, D) after think tokens by condition, and the number of think tokens."""
    after = partial(latent_embeddings, encoder, prompts, batch_size=batch_size)
    own, thought_QLKD = after()
    num = thought_QLKD.shape[2]
    changed = {
        "swapped": thought_QLKD[torch.from_numpy(moved_Q)],
        "zeroed": torch.zeros_like(thought_QLKD),
        "mean": thought_QLKD.mean(dim=0, keepdim=True).expand_as(thought_QLKD),
    }
    if num > 1:  # every token moves to another's place
        shift_Q = torch.from_numpy(np.random.default_rng(seed).integers(1, num, len(prompts)))
        place_QK = (torch.arange(num) + shift_Q[:, None]) % num
        changed["shuffled"] = thought_QLKD.take_along_dim(place_QK[:, None, :, None], dim=2)
    bar = progress_bar(changed.items(), desc="embedding", unit="condition")
    states = {"own": own, **{name: after(thought_QLKD=thoughts)[0] for name, thoughts in bar}}
    states["none"] = encoder.encode_after(prompts, [[]] * len(prompts), batch_size=batch_size)
    return states, {"think_tokens": num}


@torch.no_grad()
def latent_embeddings(
    encoder: Embedder, prompts: Sequence[Prompt], *, batch_size: int, thought_QLKD: Tensor | None = None
) -> tuple[np.ndarray, Tensor]:
    """Embeddings (Q, D) after think tokens, and their hidden states (Q, L, K, D) where they enter each layer.

    `thought_QLKD` replaces these, if given.
    """
    embedder = encoder.model
    layers = embedder.family.decoder(embedder.model).layers
    think_ids = embedder.given["latent"]
    branch = [Branch([*think_ids, embedder.emb_id], read_state=True)]
    states, thoughts = [], []
    order = list(by_length([*map(len, prompts)], batch_size))
    for rows in order:
        packed = embedder.pack([prompts[row] for row in rows], [branch] * len(rows))
        assert packed.prompts is not None
        assert packed.tails is not None
        emb_B = packed.tails.state_index_N + packed.prompts.input_ids_T.shape[0]
        place_BK = emb_B[:, None] + torch.arange(-len(think_ids), 0, device=emb_B.device)
        new_BLKD = None if thought_QLKD is None else thought_QLKD[rows]
        with _replacing(layers, place_BK, new_BLKD) as seen:
            states.append(embedder(packed)[0].state_ND.float().cpu())
        thoughts.append(torch.stack(seen, dim=1))
    back = torch.tensor([row for rows in order for row in rows]).argsort()
    return torch.cat(states)[back].numpy(), torch.cat(thoughts)[back]


@contextmanager
def _replacing(layers: nn.ModuleList, place_BK: Tensor, new_BLKD: Tensor | None) -> Iterator[list[Tensor]]:
    """Record what enters each layer at these positions of a packed batch, (B, K, D) per layer, and replace it by `new_BLKD`, if given."""
    seen: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden_1TD, *others = args
        seen.append(hidden_1TD[0, place_BK].cpu())
        if new_BLKD is None:
            return None
        new_BKD = new_BLKD[:, len(seen) - 1].to(hidden_1TD)
        return hidden_1TD.index_copy(1, place_BK.flatten(), new_BKD.flatten(0, 1)[None]), *others

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def verdict(conditions: dict[str, Any], mode: Mode = "reasoning") -> str:
    """A sentence on the effect of the swap: is zero outside its interval?"""
    what = "what the think tokens hold" if mode == "latent" else "the rationale"
    mean, low, high = conditions["swapped"]["difference"]
    points = f"{100 * mean:+.1f} {in_words(low, high)} points of hit@1"
    if low is None or high is None:
        return f"one group of queries alone says nothing: another query's gives {points}"
    if high < 0:
        return f"{what} matters: another query's costs {points}"
    if low > 0:
        return f"{what} harms: another query's gives {points}"
    return f"no effect of {what} is seen: another query's gives {points}"


def table(result: dict[str, Any]) -> str:
    """The printed table, in per cent."""
    if result["mode"] == "latent":
        title, summary = "think tokens", f"{result['think_tokens']} think tokens"
    else:
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

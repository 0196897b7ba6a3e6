"""Is an embedding one and the same, whatever it is computed with? Batch size, order, precision, attention, padding.

The reference is each row alone, float32, with the attention that training uses. Variants that only change the company or the
kernel must agree to rounding; precision may not.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from rge.common.schema import Encoded, Item
from rge.config import RolloutConfig
from rge.diagnose.pairs import Pairs
from rge.embedder import Embedder
from rge.model.backbone import load_plain
from rge.model.families import family_of, normalised
from rge.model.prompts import Prompt
from rge.rollout.vllm_writer import VllmRollout

TOLERANCE = 1e-4
"""Greatest difference of an embedding's component that rounding explains, float32."""


def invariance(
    encoder: Embedder, pairs: Pairs, *, batch_sizes: tuple[int, ...] = (4, 32), backend: str = "own"
) -> dict[str, Any]:
    """Compare all variants with the reference.

    Args:
        encoder: the checkpoint, float32.
        pairs: its queries are embedded, in direct and in reasoning mode.
        batch_sizes: variants.
        backend: ``vllm`` also lets vLLM write the rationales, and embeds them with our forward.

    Returns:
        ``variants`` by name, each with ``difference`` (greatest of any component), ``cosine`` (least), ``rationales`` (share
        that is the same) where there are any, ``exact`` (whether it must agree) and ``agrees``; and a ``verdict``. Where
        rationales differ, embeddings of equal ones are compared.
    """
    items = pairs.queries
    reference = {
        mode: encoder.encode(items, side="query", mode=mode, batch_size=1) for mode in ("direct", "reasoning")
    }
    variants: dict[str, Any] = {}

    def add(name: str, mode: str, found: Any, exact: bool) -> None:
        ours, theirs = reference[mode].embeddings, found.embeddings
        same = np.array([a == b for a, b in zip(reference[mode].rationales, found.rationales, strict=True)])
        row = {"exact": exact, "rationales": float(same.mean()) if mode == "reasoning" else None}
        row |= compare(ours[same], theirs[same])
        row["agrees"] = not exact or bool(
            same.all() and row["difference"] is not None and row["difference"] < TOLERANCE
        )
        variants[f"{mode}, {name}"] = row

    for mode in ("direct", "reasoning"):
        for size in batch_sizes:
            found = encoder.encode(items, side="query", mode=mode, batch_size=size)
            add(f"batches of {size}", mode, found, True)
        found = encoder.encode(items[::-1], side="query", mode=mode, batch_size=batch_sizes[-1])
        found.embeddings[:] = found.embeddings[::-1].copy()
        found.rationales.reverse()
        add("in the opposite order", mode, found, True)
    if backend == "vllm":
        add("vLLM's rationale", "reasoning", _by_vllm(encoder, items, batch_sizes[-1]), True)
    coarse = Embedder.from_pretrained(encoder.checkpoint, device=str(encoder.model.device), dtype="bfloat16")
    for mode in ("direct", "reasoning"):
        found = coarse.encode(items, side="query", mode=mode, batch_size=batch_sizes[-1])  # type: ignore[arg-type]
        add("bfloat16", mode, found, False)
    plain = load_plain(encoder.checkpoint).to(encoder.model.device)
    prompts = [encoder.builder.build(item, "query") for item in items]
    for attention in ("sdpa", "eager"):
        plain.set_attn_implementation(attention)
        for side in ("right", "left"):
            states = _plain_states(plain, encoder, prompts, side)
            row = compare(reference["direct"].embeddings, states)
            row |= {
                "exact": True,
                "rationales": None,
                "agrees": row["difference"] is not None and row["difference"] < TOLERANCE,
            }
            variants[f"direct, plain transformers, {attention}, padded {side}"] = row
    wrong = [name for name, row in variants.items() if not row["agrees"]]
    return {
        "queries": len(items),
        "variants": variants,
        "agrees": not wrong,
        "verdict": f"differs: {'; '.join(wrong)}" if wrong else "all that must agree does, to rounding",
    }


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float | None]:
    """Greatest difference of a component, and least cosine; None of nothing."""
    if not len(ours):
        return {"difference": None, "cosine": None}
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return {
        "difference": float(np.abs(ours - theirs).max()),
        "cosine": float(((ours * theirs).sum(axis=1) / norms).min()),
    }


def _by_vllm(encoder: Embedder, items: Sequence[Item], batch_size: int) -> Encoded:
    """Rationales of vLLM, greedy, and the states after them."""
    cap = encoder.settings["generation"]["max_new_tokens"]
    vllm = VllmRollout(
        encoder.model,
        Accelerator(),
        max_prompt_tokens=encoder.settings["max_prompt_tokens"],
        max_new_tokens=cap,
        batch_size=batch_size,
        memory=RolloutConfig().vllm_memory,
    )
    prompts = [encoder.builder.build(item, "query") for item in items]
    written = vllm.generate(prompts)
    ids = [list(rationale.ids) for rationale in written]
    return Encoded(
        embeddings=encoder.encode_after(prompts, ids, batch_size=batch_size),
        rationales=[encoder.builder.decode(row) for row in ids],
        num_rationale_tokens=np.array([len(row) for row in ids]),
        stop_reasons=["forced" if rationale.forced else "emb" for rationale in written],
        generate_ms=np.array([1000 * rationale.seconds for rationale in written]),
        embed_ms=np.zeros(len(ids)),
    )


@torch.no_grad()
def _plain_states(model: Any, encoder: Embedder, prompts: list[Prompt], side: str) -> np.ndarray:
    """Direct embeddings by the model's own forward over padded rows, as a user of transformers would get them."""
    embedder = encoder.model
    rows = [torch.cat([prompt.input_ids, torch.tensor([embedder.emb_id])]) for prompt in prompts]
    found = []
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8]
        longest = max(len(row) for row in part)
        input_ids = torch.full((len(part), longest), embedder.pad_id)
        attention_mask = torch.zeros_like(input_ids)
        last = []
        for number, row in enumerate(part):
            begin = 0 if side == "right" else longest - len(row)
            input_ids[number, begin : begin + len(row)] = row
            attention_mask[number, begin : begin + len(row)] = 1
            last.append(begin + len(row) - 1)
        pictures = [
            None
            if prompt.pixels is None or prompt.image_grid is None
            else (normalised(embedder.processor.image_processor, prompt.pixels), prompt.image_grid)
            for prompt in prompts[start : start + 8]
        ]
        inputs = family_of(model).plain_inputs(model.config, pictures, input_ids, attention_mask)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        hidden_BTD: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
        state_BD = hidden_BTD[torch.arange(len(part)), torch.tensor(last)]
        found.append(torch.nn.functional.normalize(state_BD.float(), dim=-1).cpu().numpy())
    return np.concatenate(found)


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{found['queries']} queries; reference: each alone, float32", ""]
    lines.append(f"{'variant':<52}{'difference':>12}{'cosine':>10}{'rationales':>12}")
    for name, row in found["variants"].items():
        difference = "-" if row["difference"] is None else f"{row['difference']:.1e}"
        cosine = "-" if row["cosine"] is None else f"{row['cosine']:.5f}"
        rationales = "" if row["rationales"] is None else f"{100 * row['rationales']:.0f} %"
        mark = "" if row["agrees"] else "  DIFFERS"
        lines.append(f"{name:<52}{difference:>12}{cosine:>10}{rationales:>12}{mark}")
    return "\n".join([*lines, "", found["verdict"]])

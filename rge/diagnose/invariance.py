"""Does an embedding depend on batch size, order, precision, attention kernel or padding?

The reference is each row alone, in float32, with training's attention. Variants that change only the batch or the kernel must agree
with it up to rounding.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rge.common.commands import progress_bar
from rge.common.schema import Item
from rge.config import RolloutConfig
from rge.diagnose.pairs import Pairs
from rge.embedder import Embedder
from rge.model.backbone import load_plain
from rge.model.families import family_of, normalised
from rge.model.prompts import Prompt
from rge.rollout.vllm_writer import VllmWriter

TOLERANCE = 1e-4
"""Maximum difference per component that float32 rounding explains."""
Mode = Literal["direct", "reasoning"]
MODES: tuple[Mode, ...] = ("direct", "reasoning")


def invariance(
    encoder: Embedder, pairs: Pairs, *, batch_sizes: tuple[int, ...] = (4, 32), backend: str = "own"
) -> dict[str, Any]:
    """Compare all variants with the reference.

    Returns:
        ``variants`` by name, each with ``difference`` (maximum of any component), ``cosine`` (minimum), ``rationales`` (share of
        equal ones, if any), ``exact`` (whether it must agree) and ``agrees``; and a ``verdict``. Embeddings after different
        rationales are not compared.
    """
    items = pairs.queries
    reference = {
        mode: encoder.encode(items, side="query", mode=mode, batch_size=1, progress=True) for mode in MODES
    }
    variants: dict[str, Any] = {}
    found = _variants(encoder, items, batch_sizes, backend)
    for mode, name, (embeddings, rationales) in progress_bar(found, desc="comparing", unit="variant"):
        expected = reference[mode]
        same = np.array([a == b for a, b in zip(expected.rationales, rationales, strict=True)])
        row = compare(expected.embeddings[same], embeddings[same])
        exact = name != "bfloat16"
        agrees = same.all() and row["difference"] is not None and row["difference"] < TOLERANCE
        variants[f"{mode}, {name}"] = {
            **row,
            "exact": exact,
            "rationales": float(same.mean()) if mode == "reasoning" else None,
            "agrees": not exact or bool(agrees),
        }
    wrong = [name for name, row in variants.items() if not row["agrees"]]
    return {
        "queries": len(items),
        "variants": variants,
        "agrees": not wrong,
        "verdict": f"differs: {'; '.join(wrong)}" if wrong else "all required results agree, up to rounding",
    }


def _variants(
    encoder: Embedder, items: Sequence[Item], batch_sizes: Sequence[int], backend: str
) -> Iterator[tuple[Mode, str, tuple[np.ndarray, list[str]]]]:
    """Mode, name, embeddings and rationales of every variant, one at a time."""

    def encoded(mode: Mode, size: int, by: Embedder = encoder, step: int = 1) -> tuple[np.ndarray, list[str]]:
        found = by.encode(items[::step], side="query", mode=mode, batch_size=size)
        return found.embeddings[::step], found.rationales[::step]

    largest = batch_sizes[-1]
    for mode in MODES:
        for size in batch_sizes:
            yield mode, f"batches of {size}", encoded(mode, size)
        yield mode, "in the opposite order", encoded(mode, largest, step=-1)
    if backend == "vllm":
        yield "reasoning", "vLLM's rationale", _by_vllm(encoder, items, largest)
    bfloat16 = Embedder.from_pretrained(
        encoder.checkpoint, base=encoder.base, device=str(encoder.model.device), dtype="bfloat16"
    )
    for mode in MODES:
        yield mode, "bfloat16", encoded(mode, largest, by=bfloat16)
    plain = load_plain(encoder.checkpoint, encoder.base).to(encoder.model.device)
    prompts = [encoder.builder.build(item, "query") for item in items]
    for attention in ("sdpa", "eager"):
        plain.set_attn_implementation(attention)
        for side in ("right", "left"):
            states = _plain_states(plain, encoder, prompts, side)
            yield "direct", f"plain transformers, {attention}, padded {side}", (states, [""] * len(items))


def compare(a_ND: np.ndarray, b_ND: np.ndarray) -> dict[str, float | None]:
    """Maximum component difference and minimum cosine; None if empty."""
    if not len(a_ND):
        return {"difference": None, "cosine": None}
    norm_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    return {
        "difference": float(np.abs(a_ND - b_ND).max()),
        "cosine": float(((a_ND * b_ND).sum(axis=1) / norm_N).min()),
    }


def _by_vllm(encoder: Embedder, items: Sequence[Item], batch_size: int) -> tuple[np.ndarray, list[str]]:
    vllm = VllmWriter.in_training(
        encoder.model,
        Accelerator(),
        max_prompt_tokens=encoder.builder.max_tokens,
        max_new_tokens=encoder.settings.generation.max_new_tokens,
        batch_size=batch_size,
        memory=RolloutConfig().vllm_memory,
    )
    prompts = [encoder.builder.build(item, "query") for item in items]
    ids = [list(rationale.ids) for rationale in vllm.generate(prompts)]
    states = encoder.encode_after(prompts, ids, batch_size=batch_size)
    return states, [encoder.builder.decode(row) for row in ids]


@torch.no_grad()
def _plain_states(model: Any, encoder: Embedder, prompts: list[Prompt], side: str) -> np.ndarray:
    """Direct embeddings by transformers' own forward over padded rows."""
    embedder = encoder.model
    states = []
    for start in range(0, len(prompts), 8):
        batch = prompts[start : start + 8]
        rows = [torch.cat([prompt.input_ids, torch.tensor([embedder.emb_id])]) for prompt in batch]
        input_ids = pad_sequence(rows, True, embedder.pad_id, padding_side=side)
        attention_mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
        last = torch.tensor([len(row) - 1 if side == "right" else -1 for row in rows])
        pictures = [
            None
            if prompt.pixels is None or prompt.image_grid is None
            else (normalised(embedder.processor.image_processor, prompt.pixels), prompt.image_grid)
            for prompt in batch
        ]
        inputs = family_of(model).plain_inputs(model.config, pictures, input_ids, attention_mask)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        hidden_BTD: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
        state_BD = hidden_BTD[torch.arange(len(batch)), last]
        states.append(torch.nn.functional.normalize(state_BD.float(), dim=-1).cpu().numpy())
    return np.concatenate(states)


def table(result: dict[str, Any]) -> str:
    """The printed table."""
    lines = [f"{result['queries']} queries; reference: each alone, float32", ""]
    lines.append(f"{'variant':<52}{'difference':>12}{'cosine':>10}{'rationales':>12}")
    for name, row in result["variants"].items():
        difference = "-" if row["difference"] is None else f"{row['difference']:.1e}"
        cosine = "-" if row["cosine"] is None else f"{row['cosine']:.5f}"
        rationales = "" if row["rationales"] is None else f"{100 * row['rationales']:.0f} %"
        mark = "" if row["agrees"] else "  DIFFERS"
        lines.append(f"{name:<52}{difference:>12}{cosine:>10}{rationales:>12}{mark}")
    return "\n".join([*lines, "", result["verdict"]])

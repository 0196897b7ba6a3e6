"""Our training step against the three-pass form: FLOPs and time. `python scripts/bench.py step settings=demo,long repeats=3`.

``demo`` is the demo recipe's model with one of its real batches; ``long`` is a random Qwen2.5-VL with a picture and text of
`prompt_tokens`, rationales of 40 to `rationale_tokens` tokens (lognormal), and one picture of 256 placeholders per query as
candidate; ``3b`` counts at the shape of Qwen2.5-VL-3B, without its weights. Losses and all gradients of the two forms, each after its
own rollout, are first compared in float64; a difference is an error.

``rollout`` is generation, prompts included; ``in a step`` is generation in our step, whose prompts are already encoded; ``forward and
backward`` is the rest of the step, prompts included; ``both`` is the whole step, in which ours encodes the prompts once. The three-pass
form runs a query's picture through the vision tower three times per step, ours once. Ratios are three-pass over ours, except those of
tokens per second, which are ours over three-pass.

``form=recipe`` counts the step of the main run on 8 GPUs, with micro batches and gradient checkpointing: prompts and candidates encoded
twice (`train.keep_activations=none`), or once with their layers' inputs kept; against three passes with the same checkpointing, and
these with gradient caching as in VLM2Vec's trainer. The cost per query does not depend on their number, so two are counted, in
micro batches of one.

FLOPs: `torch.utils.flop_counter`, attention counted dense, as for CUDA kernels.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from benches import forms
from benches.forms import Setting, Sizes, Work, our_rollout, their_rollout
from benches.harness import Rows, show
from rge.rollout.micro_batches import encode_prompts

PARTS = {"rollout": "rollout", "step": "forward and backward", "full": "both"}


@dataclass
class Options(Sizes):
    """What is measured; the sizes are those of ``long``."""

    settings: tuple[str, ...] = ("demo", "long")
    """demo, long and/or 3b."""
    form: Literal["once", "recipe"] = "once"
    """once: undivided, prompts encoded once; recipe: as the main run, in micro batches with gradient checkpointing."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Turns of timing."""


def measure(options: Options) -> dict[str, Rows]:
    """Measure every setting."""
    if options.form == "recipe":
        options = replace(options, batch=2)
        found = forms.measure_settings(options, _work_of_recipe, prepare=_checkpointed)
        column = "TFLOP of a query, with its candidates"
        tables = {
            name: {form: {column: count / 2e3} for form, count in kinds["GFLOP"].items()}
            for name, kinds in found.items()
        }
    else:
        found = forms.measure_settings(options, _work, repeats=options.repeats)
        tables = {name: _ratios(kinds) for name, kinds in found.items()}
    for name, rows in tables.items():
        print(f"\n{name}")
        show(rows, over="ours, twice" if options.form == "recipe" else "")
    return tables


def _checkpointed(setting: Setting) -> Setting:
    forms.checkpoint_gradients(setting.embedder)
    return setting


def _work_of_recipe(setting: Setting) -> Work:
    own_ids = [rationale.ids for rationale in our_rollout(setting)]

    def cached() -> dict[str, float]:
        their_rollout(setting)
        return forms.grad_cache_step(setting, own_ids, 1)

    return {
        "ours, twice": lambda: forms.our_step_in_chunks(setting, 1, "none"),
        "ours, once and kept": lambda: forms.our_step_in_chunks(setting, 1, "device"),
        "gradient caching": cached,
        "three passes": lambda: forms.three_pass_step(setting, their_rollout(setting)),
    }


def _work(setting: Setting) -> Work:
    rationales = our_rollout(setting)
    own_ids = [rationale.ids for rationale in rationales]
    with torch.no_grad():
        encoded = encode_prompts(setting.embedder, setting.embedder, setting.batch.queries)
    return {
        "ours writing": lambda: our_rollout(setting, encoded),
        "ours rollout": lambda: our_rollout(setting),
        "theirs rollout": lambda: their_rollout(setting),
        "ours step": lambda: forms.our_step(setting, rationales),
        "theirs step": lambda: forms.three_pass_step(setting, own_ids),
        "ours full": lambda: forms.our_full_step(setting),
        "theirs full": lambda: forms.three_pass_step(setting, their_rollout(setting)),
    }


def _ratios(found: Rows) -> Rows:
    rows: Rows = {}
    for kind in ("GFLOP", "s", "CPU s"):
        for part, label in PARTS.items():
            theirs, ours = (found[kind][f"{side} {part}"] for side in ("theirs", "ours"))
            rows[f"{label}, {kind}"] = {"theirs": theirs, "ours": ours, "ratio": theirs / ours}
    for part, label in (("rollout", "rollout"), ("writing", "in a step")):
        theirs, ours = (found["tokens/s"][name] for name in ("theirs rollout", f"ours {part}"))
        rows[f"{label}, tokens/s"] = {"theirs": theirs, "ours": ours, "ratio": ours / theirs}
    return rows

"""Our training step against the three-pass form: FLOPs and time. `python scripts/bench.py step settings=demo,long repeats=3`.

``demo`` is the demo recipe's model with one of its real batches; ``long`` is a random Qwen2.5-VL with a picture and text of
`prompt_tokens`, rationales of 40 to `rationale_tokens` tokens (lognormal), and one picture of 256 placeholders per query as
candidate. ``rollout`` is generation, prompts included; ``in a step`` is generation in our step, whose prompts are already encoded;
``forward and backward`` is the rest of the step, prompts included; ``both`` is the whole step, in which ours encodes the prompts
once. The three-pass form runs a query's picture through the vision tower three times per step, ours once.

Tokens, losses and all gradients of the two forms are first compared in float64; a difference is an error. ``form=recipe`` counts
the step of the main run on 8 GPUs, with micro batches and gradient checkpointing: prompts and candidates encoded twice
(`train.keep_activations=none`), or once with their layers' inputs kept; against three passes with the same checkpointing, and
these with gradient caching as in VLM2Vec's trainer. The cost per query does not depend on their number, so two are counted, in
micro batches of one. ``settings=3b`` counts at the shape of Qwen2.5-VL-3B, without its weights; other settings compare losses and
gradients first.

FLOPs: `torch.utils.flop_counter`, attention counted dense, as for CUDA kernels. Ratios are three-pass over ours, except those of
tokens per second, which are ours over three-pass. The JSON's top level repeats the figures of the last setting.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from benches import forms
from benches.forms import SETTINGS, Setting, Sizes, flops_of, our_rollout, their_rollout
from benches.harness import in_turns, medians, show
from rge.model.embedding_model import encode_prompts

PARTS = {"rollout": "rollout", "step": "forward and backward", "full": "both"}


@dataclass
class Options(Sizes):
    """What is measured; the sizes are those of ``long``."""

    settings: tuple[str, ...] = ("demo", "long")
    """demo, long and/or, with form=recipe, 3b."""
    form: Literal["once", "recipe"] = "once"
    """once: undivided, prompts encoded once; recipe: as the main run, in micro batches with gradient checkpointing."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Turns of timing."""


def measure(options: Options) -> dict:
    """Measure every setting."""
    if options.form == "recipe":
        found = forms.measure_settings(
            options, [*SETTINGS, "3b"], lambda name: _count_recipe(name, replace(options, batch=2))
        )
    else:
        found = forms.measure_settings(options, [*SETTINGS], lambda name: _compare_and_time(name, options))
    return found | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def _count_recipe(name: str, options: Options) -> dict[str, float]:
    """FLOPs of the main run's step, in our forms and others'."""
    if name == "3b":
        found = forms.count_3b(options, _work_of_recipe, train=True)
    else:
        setting = SETTINGS[name](options)
        forms.checkpoint_gradients(setting.embedder)
        print(f"\n{name}: {setting.note}", flush=True)
        worst = forms.check_equal(setting.embedder.double(), [*_work_of_recipe(setting).values()])
        print(f"losses and gradients equal to {worst:.0e} (float64, relative)", flush=True)
        found = flops_of(setting.embedder.float(), _work_of_recipe(setting))
    ours = found["ours, twice"]
    show(
        {form: {"TFLOP of a query, with its candidates": count / 2e12} for form, count in found.items()},
        "ours, twice",
    )
    kept = found["ours, once and kept"]
    return {
        "recipe_flops_ratio": found["gradient caching"] / ours,
        "recipe_flops_ratio_three_passes": found["three passes"] / ours,
        "recipe_kept_flops_ratio": found["gradient caching"] / kept,
        "recipe_kept_flops_ratio_three_passes": found["three passes"] / kept,
        "kept_over_twice": ours / kept,
    } | {f"{form}, TFLOP": count / 2e12 for form, count in found.items()}


def _work_of_recipe(setting: Setting) -> dict[str, Callable[[], dict[str, float]]]:
    own_ids = [rationale.ids for rationale in our_rollout(setting)]

    def cached() -> dict[str, float]:
        their_rollout(setting)
        return forms.grad_cache_step(setting, own_ids, 1)

    return {
        "ours, twice": lambda: forms.our_step_in_chunks(setting, 1, "none"),
        "ours, once and kept": lambda: forms.our_step_in_chunks(setting, 1, "device"),
        "gradient caching": cached,
        "three passes": lambda: forms.their_full_step(setting),
    }


def _compare_and_time(name: str, options: Options) -> dict[str, float]:
    """Time a setting, whose tokens, losses and gradients have to agree between the two forms in float64."""
    setting = SETTINGS[name](options)
    print(f"\n{name}: {setting.note}", flush=True)
    embedder = setting.embedder.double()
    rationales = our_rollout(setting)
    own_ids = [list(rationale.ids) for rationale in rationales]
    if own_ids != their_rollout(setting):
        raise RuntimeError(f"{setting.name}: the two rollouts wrote different tokens")
    worst = forms.check_equal(
        embedder,
        (
            lambda: forms.our_step(setting, rationales),
            lambda: forms.our_full_step(setting),
            lambda: forms.three_pass_step(setting, own_ids),
        ),
    )
    print(f"same tokens; losses and gradients equal to {worst:.0e} (float64, relative)", flush=True)
    return _time(replace(setting, embedder=embedder.float()), options.repeats)


def _time(setting: Setting, repeats: int) -> dict[str, float]:
    embedder = setting.embedder
    rationales = our_rollout(setting)
    own_ids = [rationale.ids for rationale in rationales]
    with torch.no_grad():
        encoded = encode_prompts(embedder, embedder, setting.batch.queries)
    work: dict[str, Callable[[], object]] = {
        "ours writing": lambda: our_rollout(setting, encoded),
        "ours rollout": lambda: our_rollout(setting),
        "theirs rollout": lambda: their_rollout(setting),
        "ours step": lambda: forms.our_step(setting, rationales),
        "theirs step": lambda: forms.three_pass_step(setting, own_ids),
        "ours full": lambda: forms.our_full_step(setting),
        "theirs full": lambda: forms.their_full_step(setting),
    }
    flops = flops_of(embedder, work | {"candidates": lambda: forms.candidates_alone(setting)})
    wall, cpu = map(medians, in_turns(work, repeats, lambda: embedder.zero_grad(set_to_none=True)))
    tokens = sum(len(ids) + 1 for ids in own_ids)
    ratio: dict[str, dict[str, float]] = {}
    rows = {}
    for kind, unit, values in (("GFLOP", 1e9, flops), ("s", 1.0, wall), ("CPU s", 1.0, cpu)):
        ratio[kind] = {part: values[f"theirs {part}"] / values[f"ours {part}"] for part in PARTS}
        for part, label in PARTS.items():
            sides = {side: values[f"{side} {part}"] / unit for side in ("theirs", "ours")}
            rows[f"{label}, {kind}"] = sides | {"ratio": ratio[kind][part]}
    theirs = tokens / wall["theirs rollout"]
    for part, label in (("rollout", "rollout, tokens/s"), ("writing", "in a step, tokens/s")):
        ours = tokens / wall[f"ours {part}"]
        rows[label] = {"theirs": theirs, "ours": ours, "ratio": ours / theirs}
    show(rows)
    return {
        "step_flops_ratio": ratio["GFLOP"]["step"],
        "full_step_flops_ratio": ratio["GFLOP"]["full"],
        "query_side_step_flops_ratio": (flops["theirs step"] - flops["candidates"])
        / (flops["ours step"] - flops["candidates"]),
        "step_time_ratio": ratio["s"]["step"],
        "full_step_time_ratio": ratio["s"]["full"],
        "rollout_tokens_per_s_ratio": ratio["s"]["rollout"],
        "rollout_in_step_tokens_per_s_ratio": wall["theirs rollout"] / wall["ours writing"],
        "step_cpu_time_ratio": ratio["CPU s"]["step"],
        "rollout_cpu_time_ratio": ratio["CPU s"]["rollout"],
        "full_step_cpu_time_ratio": ratio["CPU s"]["full"],
        "rollout_in_step_cpu_time_ratio": cpu["theirs rollout"] / cpu["ours writing"],
        "ours_step_gflop": flops["ours step"] / 1e9,
        "ours_full_step_gflop": flops["ours full"] / 1e9,
        "ours_full_step_s": wall["ours full"],
    }

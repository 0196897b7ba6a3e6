"""Kernels, launches and waits of a training step, counted without a GPU; ours beside three passes. `bench.py kernels places=true`.

Runs a step (rollout, both losses, backward) in bfloat16 on `tests/helpers/fake_gpu.py`, and the same step in stock transformers:
`generate`, a pass for the LM loss, one for the contrastive state, one for the candidates. Both have taken a step before, so
that what happens once in a process is not counted. A kernel is an operation that writes new memory; a GPU's own count is
higher for some, lower where libraries fuse. A launch is a single kernel, or a captured step of any number of them. A wait
is the host standing still until the device has done all it was given.

``places=true`` lists the lines that wait.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benches import forms
from rge.model.embedding_model import encode_prompts
from rge.rollout.generate import generate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from fake_gpu import FakeGpu  # noqa: E402


@dataclass
class Options:
    """Sizes of the model and of its batch."""

    layers: int = 4
    batch: int = 4
    prompt_tokens: int = 160
    rationale_tokens: int = 24
    places: bool = False
    """Whether the lines that wait are listed."""


def count(options: Options) -> dict[str, dict[str, dict[str, int]]]:
    """Counts by form and phase: kernels, launches, waits; and by form the places that wait."""
    sizes = {"layers": options.layers, "batch": options.batch, "prompt_tokens": options.prompt_tokens}
    found: dict[str, dict[str, dict[str, int]]] = {}
    for form in ("ours", "ours, graphs off", "three passes"):
        setting = forms.long_setting(
            forms.Sizes(**sizes, rationale_tokens=options.rationale_tokens, hidden=64, candidate_side_px=56)
        )
        embedder = setting.embedder.bfloat16().train()
        embedder.cuda_graphs = form == "ours"
        with torch.no_grad():
            # No rationale ends before the cap, so both forms take equally many steps.
            embedder.model.get_input_embeddings().weight[embedder.emb_id] = 0
        with FakeGpu() as gpu:
            gpu.move(embedder)
            run = _three_passes if form == "three passes" else _ours
            run(setting, gpu)
            embedder.zero_grad()
            inside = _kernels_of_graphs(gpu)
            for counts in (gpu.kernels, gpu.waits, gpu.graphs):
                counts.clear()
            inside.clear()
            run(setting, gpu)
            gpu.phase = "-"
        found[form] = {}
        for phase in sorted({phase for phase, _ in gpu.kernels} - {"-"}):
            launches = gpu.of(gpu.kernels, phase)
            found[form][phase] = {
                "kernels": launches - gpu.kernels[phase, "graph"] + inside.get(phase, 0),
                "launches": launches,
                "waits": gpu.of(gpu.waits, phase),
            }
        found[form]["places"] = {
            f"{phase}: {kind} at {place}": number
            for (phase, kind, place), number in gpu.waits.most_common()
            if phase != "-"
        }
    return found


def _kernels_of_graphs(gpu: FakeGpu) -> dict[str, int]:
    """Filled with the kernels that replayed graphs hold, by phase."""
    inside: dict[str, int] = {}
    capture = gpu.capture

    def counted(work: Callable[[], None]) -> Callable[[], None]:
        replay = capture(work)
        held = gpu.last_captured

        def run() -> None:
            inside[gpu.phase] = inside.get(gpu.phase, 0) + held
            replay()

        return run

    gpu.use_capture(counted)
    return inside


def _ours(setting: forms.Setting, gpu: FakeGpu) -> None:
    embedder, batch = setting.embedder, setting.batch
    gpu.phase = "prompts"
    encoded = encode_prompts(embedder, embedder, batch.queries)
    gpu.phase = "rollout"
    rationales = generate(
        embedder,
        batch.queries,
        max_new_tokens=setting.max_new_tokens,
        batch_size=len(batch.queries),
        encoded=encoded,
    )
    gpu.phase = "losses and backward"
    forms.our_step(setting, rationales, encoded)


def _three_passes(setting: forms.Setting, gpu: FakeGpu) -> None:
    embedder = setting.embedder
    gpu.phase = "rollout"
    inputs = forms.stock_inputs(embedder, setting.batch.queries, [[] for _ in setting.batch.queries], "left")
    with torch.no_grad():
        written = embedder.model.generate(
            **inputs, max_new_tokens=setting.max_new_tokens, do_sample=False, eos_token_id=embedder.emb_id,
            pad_token_id=embedder.pad_id, suppress_tokens=[embedder.emb_id, *embedder.suppressed_ids],
        )  # fmt: skip
    own = written[:, inputs["input_ids"].shape[1] :].tolist()
    gpu.phase = "losses and backward"
    forms.three_pass_step(setting, [row[:-1] for row in own])


def measure(options: Options) -> dict:
    """Count and print the tables."""
    found = count(options)
    print(f"{'':22}{'':22}{'kernels':>9}{'launches':>10}{'waits':>7}")
    totals = {}
    for form, phases in found.items():
        rows = {phase: numbers for phase, numbers in phases.items() if phase != "places"}
        totals[form] = {
            name: sum(row[name] for row in rows.values()) for name in ("kernels", "launches", "waits")
        }
        for phase, row in (*rows.items(), ("all", totals[form])):
            print(f"{form:22}{phase:22}{row['kernels']:9,}{row['launches']:10,}{row['waits']:7,}")
    tokens = options.rationale_tokens + 1
    a_layer = {form: phases["rollout"]["kernels"] / tokens / options.layers for form, phases in found.items()}
    print(
        f"\nkernels of the rollout a token and layer, all else shared out: { {k: round(v, 1) for k, v in a_layer.items()} }"
    )
    if options.places:
        for form, phases in found.items():
            print(f"\n{form} waits")
            for place, number in phases["places"].items():
                print(f"{number:6} {place}")
    return {"counts": found, "all": totals, "kernels a layer and token": a_layer, "options": vars(options)}

"""Kernels, launches, waits, captures and copies of a training step, counted without a GPU; ours beside three passes. `bench.py kernels places=true`.

Runs a step (rollout, both losses, backward) in bfloat16 on `tests/helpers/fake_gpu.py`, and the same step in stock transformers:
`generate`, then one pass each for the LM loss, the contrastive state and the candidates. The second step of each is counted,
without one-time work.

    kernel   an operation that writes new memory; a GPU counts more for some, and fewer where libraries fuse
    launch   a single kernel, or a captured step of any number of kernels
    wait     the host is idle until the device has finished; capturing a graph waits too, and has its own column
    copy     from host to device, without a wait; the driver copies unpinned (pageable) memory once more

Below the table: how often positions of prompts were computed; and what consecutive rollouts capture while their rows end one
after another and the batch shrinks. ``places=true`` lists the lines that wait.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benches import forms
from benches.harness import show
from rge.model.embedding_model import encode_prompts
from rge.model.families import FAMILIES
from rge.rollout.generate import generate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from fake_gpu import FakeGpu

COLUMNS = ("kernels", "launches", "waits", "captures", "copies", "unpinned")


@dataclass
class Options(forms.Sizes):
    """Sizes of the model and of its batch."""

    layers: int = 4
    prompt_tokens: int = 160
    rationale_tokens: int = 24
    hidden: int = 64
    candidate_side_px: int = 56
    places: bool = False
    """List the lines that wait."""


def count(options: Options) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of `COLUMNS` by form and phase, and the places that wait by form."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    positions = _CountedPositions()
    for form in ("ours", "ours, graphs off", "three passes"):
        setting = forms.long_setting(options)
        embedder = setting.embedder.bfloat16().train()
        embedder.cuda_graphs = form == "ours"
        with torch.no_grad():
            # No rationale ends before the cap, so both forms take equally many steps.
            embedder.model.get_input_embeddings().weight[embedder.emb_id] = 0
        with FakeGpu() as gpu:
            gpu.move(embedder)
            run = _three_passes if form == "three passes" else _ours
            inside = _kernels_of_graphs(gpu)
            run(setting, gpu)
            embedder.zero_grad()
            for counts in (gpu.kernels, gpu.waits, gpu.graphs, gpu.copies, gpu.unpinned):
                counts.clear()
            inside.clear()
            with_prompts, positions.calls = positions.calls, 0
            run(setting, gpu)
            gpu.phase = "-"
        phases = sorted({phase for phase, _ in gpu.kernels} - {"-"})
        found[form] = {phase: _counts(gpu, phase, inside.get(phase, 0)) for phase in phases}
        found[form]["positions"] = {"with prompts": with_prompts, "in a step": positions.calls}
        positions.calls = 0
        found[form]["places"] = {
            f"{phase}: {kind} at {place}": number
            for (phase, kind, place), number in gpu.waits.most_common()
            if phase != "-"
        }
    return found


def _counts(gpu: FakeGpu, phase: str, in_graphs: int) -> dict[str, int]:
    launches = gpu.of(gpu.kernels, phase)
    kernels = launches - gpu.kernels[phase, "graph"] + in_graphs
    others = gpu.graphs[phase], gpu.copies[phase], gpu.unpinned[phase]
    return dict(zip(COLUMNS, (kernels, launches, gpu.of(gpu.waits, phase), *others), strict=True))


def count_captures(options: Options) -> list[dict[str, int]]:
    """Captures and waits of three consecutive rollouts; an eighth of the rows ends after every eighth of the tokens.

    Each prompt is continued by the model, which writes to the cap, and by seven given rationales of increasing length.
    """
    setting = forms.long_setting(options)
    embedder, cap, found = setting.embedder.bfloat16(), options.rationale_tokens, []
    with torch.no_grad():
        embedder.model.get_input_embeddings().weight[embedder.emb_id] = 0
    given = [[7] * (cap * number // 8) for number in range(1, 8)]
    with FakeGpu() as gpu:
        gpu.move(embedder)
        for number in range(3):
            gpu.phase = f"rollout {number}"
            generate(
                embedder, setting.batch.queries, max_new_tokens=cap, batch_size=options.batch, given=given
            )
            found.append({"captures": gpu.graphs[gpu.phase], "waits": gpu.of(gpu.waits, gpu.phase)})
        gpu.phase = "-"
    return found


class _CountedPositions:
    """Counts how often the family of these models computes positions."""

    def __init__(self) -> None:
        self.calls, family = 0, FAMILIES["qwen2_5_vl"]
        compute = family.positions

        def counted(*args: object) -> torch.Tensor:
            self.calls += 1
            return compute(*args)

        family.positions = counted


def _kernels_of_graphs(gpu: FakeGpu) -> dict[str, int]:
    """A dict that fills with the number of kernels in replayed graphs, by phase."""
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
    settings = {"max_new_tokens": setting.max_new_tokens, "batch_size": len(batch.queries)}
    rationales = generate(embedder, batch.queries, encoded=encoded, **settings)
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
    totals, rows = {}, {}
    for form, phases in found.items():
        own = {phase: numbers for phase, numbers in phases.items() if phase not in ("places", "positions")}
        totals[form] = {name: sum(row[name] for row in own.values()) for name in COLUMNS}
        rows |= {f"{form}: {phase}": row for phase, row in (own | {"all": totals[form]}).items()}
    show(rows)
    tokens = options.rationale_tokens + 1
    per_layer = {
        form: phases["rollout"]["kernels"] / tokens / options.layers for form, phases in found.items()
    }
    print(f"kernels of the rollout a token and layer, all else shared out: {per_layer}")
    for form, phases in found.items():
        print(f"positions computed, {form}: {phases['positions']}")
    captures = count_captures(options)
    print(f"rollouts of {8 * options.batch} rows that end one after the other: {captures}")
    if options.places:
        for form, phases in found.items():
            print(f"\n{form} waits")
            for place, number in phases["places"].items():
                print(f"{number:6} {place}")
    return {
        "counts": found,
        "captures": captures,
        "all": totals,
        "kernels a layer and token": per_layer,
        "options": vars(options),
    }

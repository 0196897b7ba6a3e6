"""Kernels, launches, waits, captures and copies of a training step, counted without a GPU; ours compared with three passes. `bench.py kernels places=true`.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benches import forms
from benches.harness import Rows, show
from rge.model.embedding_model import EmbeddingModel, encode_prompts
from rge.model.families import FAMILIES
from rge.rollout.generate import generate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from fake_gpu import FakeGpu

FORMS = ("ours", "ours, graphs off", "three passes")
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


def measure(options: Options) -> dict:
    """Count and print the tables."""
    found = {form: _count(form, options) for form in FORMS}
    rows: Rows = {}
    for form, counts in found.items():
        phases = counts["phases"]
        whole = {name: sum(row[name] for row in phases.values()) for name in COLUMNS}
        rows |= {f"{form}: {phase}": row for phase, row in (phases | {"all": whole}).items()}
    show(rows)
    print("\npositions computed")
    show({form: counts["positions"] for form, counts in found.items()})
    captures = count_captures(options)
    print(f"rollouts of {8 * options.batch} rows that end one after the other: {captures}")
    if options.places:
        for form, counts in found.items():
            print(f"\n{form} waits")
            for place, number in counts["places"].items():
                print(f"{number:6} {place}")
    return {"counts": found, "captures": captures}


def _count(form: str, options: Options) -> dict[str, dict[str, Any]]:
    """Of the second step: `COLUMNS` by phase, how often positions are computed, and the places that wait."""
    family = FAMILIES["qwen2_5_vl"]
    run = _three_passes if form == "three passes" else _ours
    # Loaded on the host: within `FakeGpu`, transformers leaves the rotary frequencies uninitialised.
    setting = replace(forms.long_setting(options), stop_B=[])
    with patch.object(family, "positions", wraps=family.positions) as positions, FakeGpu() as gpu:
        embedder = setting.embedder.bfloat16().train()
        embedder.cuda_graphs = form == "ours"
        _never_end(embedder)
        gpu.move(embedder)
        inside = _kernels_of_graphs(gpu)
        run(setting, gpu)
        with_prompts = positions.call_count
        embedder.zero_grad()
        positions.reset_mock()
        for counts in (gpu.kernels, gpu.waits, gpu.graphs, gpu.copies, gpu.unpinned, inside):
            counts.clear()
        run(setting, gpu)
        gpu.phase = "-"
    phases = sorted({phase for phase, _ in gpu.kernels} - {"-"})
    return {
        "phases": {phase: _counts(gpu, phase, inside.get(phase, 0)) for phase in phases},
        "positions": {"with prompts": with_prompts, "in a step": positions.call_count},
        "places": {
            f"{phase}: {kind} at {place}": number
            for (phase, kind, place), number in gpu.waits.most_common()
            if phase != "-"
        },
    }


def _never_end(embedder: EmbeddingModel) -> None:
    """Let no rationale end before the cap, so that all forms take equally many steps."""
    with torch.no_grad():
        embedder.model.get_input_embeddings().weight[embedder.emb_id] = 0


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
    _never_end(embedder)
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
    gpu.phase = "prompts"
    encoded = encode_prompts(setting.embedder, setting.embedder, setting.batch.queries)
    gpu.phase = "rollout"
    rationales = forms.our_rollout(setting, encoded)
    gpu.phase = "losses and backward"
    forms.our_step(setting, rationales, encoded)


def _three_passes(setting: forms.Setting, gpu: FakeGpu) -> None:
    gpu.phase = "rollout"
    own_ids = forms.their_rollout(setting)
    gpu.phase = "losses and backward"
    forms.three_pass_step(setting, own_ids)

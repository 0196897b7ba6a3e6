"""Kernels, launches, waits, captures and copies of a training step, counted without a GPU. `bench.py kernels places=true`.

Runs a step (rollout, both losses, backward) in bfloat16 on `tests/helpers/fake_gpu.py`, and the same step in stock transformers:
`generate`, then one pass each for the LM loss, the contrastive state and the candidates. The second step of each is counted,
without one-time work.

    kernel   an operation that writes new memory; a GPU counts more for some, and fewer where libraries fuse
    launch   a single kernel, or a captured step of any number of kernels
    wait     the host is idle until the device has finished; capturing a graph waits too, and has its own column
    copy     from host to device, without a wait; the driver copies unpinned (pageable) memory once more

Below the table: what consecutive rollouts capture while their rows end one after another and the batch shrinks. ``places=true``
lists the lines that wait.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benches import forms
from benches.harness import Rows, show
from rge.model.embedding_model import EmbeddingModel
from rge.rollout.generate import generate
from rge.rollout.micro_batches import encode_prompts

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
    for form, (phases, _) in found.items():
        whole = {name: sum(row[name] for row in phases.values()) for name in COLUMNS}
        rows |= {f"{form}: {phase}": row for phase, row in (phases | {"all": whole}).items()}
    show(rows)
    captures = count_captures(options)
    print(f"\nrollouts of {8 * options.batch} rows that end one after the other: {captures}")
    if options.places:
        for form, (_, places) in found.items():
            print(f"\n{form} waits")
            for (phase, kind, place), number in places.most_common():
                print(f"{number:6} {phase}: {kind} at {place}")
    return {"counts": rows, "captures": captures}


def _count(form: str, options: Options) -> tuple[Rows, Counter]:
    """Of the second step: `COLUMNS` by phase, and the places that wait."""
    run = _three_passes if form == "three passes" else _ours
    # Loaded on the host: within `FakeGpu`, transformers leaves the rotary frequencies uninitialised.
    setting = replace(forms.long_setting(options), stop_B=[])
    with FakeGpu() as gpu:
        embedder = setting.embedder.bfloat16().train()
        embedder.cuda_graphs = form == "ours"
        _never_end(embedder)
        gpu.move(embedder)
        run(setting, gpu)
        embedder.zero_grad()
        for counts in (gpu.kernels, gpu.waits, gpu.graphs, gpu.copies, gpu.unpinned, gpu.replayed):
            counts.clear()
        run(setting, gpu)
        gpu.phase = "-"
    phases: Rows = {}
    for phase in sorted({phase for phase, _ in gpu.kernels}):
        launches = gpu.of(gpu.kernels, phase)
        kernels = launches - gpu.kernels[phase, "graph"] + gpu.replayed[phase]
        others = gpu.graphs[phase], gpu.copies[phase], gpu.unpinned[phase]
        counted = kernels, launches, gpu.of(gpu.waits, phase), *others
        phases[phase] = dict(zip(COLUMNS, counted, strict=True))
    return phases, gpu.waits


def _never_end(embedder: EmbeddingModel) -> None:
    """Let no rationale end before the cap, so that all forms take equally many steps."""
    with torch.no_grad():
        embedder.model.get_input_embeddings().weight[embedder.emb_id] = 0


def count_captures(options: Options) -> list[dict[str, int]]:
    """Captures and waits of three consecutive rollouts; an eighth of the rows ends after every eighth of the tokens.

    Each prompt is continued eight times, to caps of increasing length, which the model always reaches.
    """
    setting = forms.long_setting(options)
    embedder, cap, found = setting.embedder.bfloat16(), options.rationale_tokens, []
    _never_end(embedder)
    prompts = [prompt for prompt in setting.batch.queries for _ in range(8)]
    caps = [cap * number // 8 for number in range(1, 9)] * len(setting.batch.queries)
    with FakeGpu() as gpu:
        gpu.move(embedder)
        for number in range(3):
            gpu.phase = f"rollout {number}"
            generate(embedder, prompts, max_new_tokens=cap, batch_size=8 * options.batch, caps=caps)
            found.append({"captures": gpu.graphs[gpu.phase], "waits": gpu.of(gpu.waits, gpu.phase)})
        gpu.phase = "-"
    return found


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

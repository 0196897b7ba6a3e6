"""The plan of a step: FLOPs against torch's counter, memory against what autograd keeps, and what it says where it does not fit."""

import dataclasses
import importlib.util
import json
import math
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import clips
import numpy as np
import pdfs
import psutil
import pytest
import torch
import yaml
from family_models import PHOTOS, PLUGINS, TEXT, TEXTS, VISION, every_family
from faults import error_about
from paths import ROOT
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from rge.common.errors import RecipeError, UserError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import Recipe, load_recipe
from rge.content import pdf, video
from rge.data.collate import PromptBuilders, Source, StepBatches, flatten
from rge.data.config import SourceConfig
from rge.data.layout import COLUMNS, Layout
from rge.data.loader import Loader
from rge.data.mixture import Mixture
from rge.data.sources import RecordFile, Records
from rge.distributed.config import BACK_ENDS
from rge.loss_config import LossConfig
from rge.losses import CHUNK_TOKENS, rationale_nll
from rge.model import varlen
from rge.model import vision_tower as vision
from rge.model.adapters import add_adapters
from rge.model.attention import Pass, install
from rge.model.backbone import (
    BackboneError,
    load_backbone,
    skeleton,
)
from rge.model.config import LoraConfig, ModelConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import FAMILIES, family_of
from rge.model.packing import Branch, pack_prompts, pack_tails, to_device
from rge.model.prompts import Prompt, PromptBuilder
from rge.objective import Objective
from rge.plan import costs, machine
from rge.plan import report as plan
from rge.plan.__main__ import main
from rge.plan.costs import (
    GIB,
    PROCESS_GIB,
    WORKER_DESCRIPTORS,
    Load,
    PictureCost,
    Setup,
    Shapes,
    communication,
    cost_of_picture,
    embedding_flops,
    flops,
    host,
    kept_bytes,
    memory,
    mining_flops,
    pixel_bytes,
    shapes_of,
    state_copy,
    step_seconds,
)
from rge.plan.known_models import TABLE, outline
from rge.plan.machine import cpu_speed
from rge.plan.options import PlanOptions
from rge.plan.prompt_sizes import PromptSizes, Sizes, sizes_of
from rge.plan.search import refused
from rge.rl.config import RLConfig
from rge.rl.credit import Reinforcement
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout
from rge.small_models import build as scratch
from rge.step.training_step import TrainingStep


@pytest.fixture(scope="module")
def outlines():
    """Models without weights, which plans only read, by what gives them their shapes."""
    return {}


@pytest.fixture(autouse=True)
def _outlined_once(outlines, monkeypatch):
    def outline_once(model: ModelConfig, init: str | None = None):
        key = repr((model.path, model.revision, init))
        if key not in outlines:
            outlines[key] = outline(model, init)
        return outlines[key]

    monkeypatch.setattr(plan, "outline", outline_once)


@pytest.fixture(scope="module")
def count_flops():
    spec = importlib.util.spec_from_file_location("harness", ROOT / "scripts" / "benches" / "harness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.count_flops


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3.755),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8.292),
        ("Qwen/Qwen2-VL-2B-Instruct", 2.209),
        ("Qwen/Qwen3-VL-2B-Instruct", 2.128),
        ("HuggingFaceTB/SmolVLM-Instruct", 2.246),
    ],
)
def test_the_table_gives_models_of_their_published_size(name, billions):
    """Sizes as the models' cards state them; the table's shapes add up to these and to no others."""
    recipe = load_recipe(["recipe=qwen25vl_3b", f"model.path={name}"])
    model, origin = plan.outline(recipe.model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        billions, abs=0.001
    )
    assert name in origin


@pytest.mark.slow
def test_every_recipe_has_a_plan(capsys):
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe([f"recipe={path.stem}"])
        if Path(recipe.model.path).is_relative_to("runs"):
            with error_about(BackboneError, recipe.model.path, "missing"):
                main([f"recipe={path.stem}"])
            continue
        allowed = (
            each for each in ("zero3", "zero2", "ddp") if not refused(recipe, PlanOptions(num_gpus=8), each)
        )
        back_end = next(allowed)
        code = main([f"recipe={path.stem}", "num_gpus=8", f"back_end={back_end}"])
        shown = capsys.readouterr().out
        assert code == 0, shown
        found = json.loads(shown.splitlines()[-1])
        assert found["fits"]
        assert set(found["bytes_sent"]) == set(BACK_ENDS)
        assert "It fits." in shown


CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("[!c]*.yaml"))


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in sorted((ROOT / "recipes").glob("*.yaml"))
        if path.stem not in ("demo", "study", "photos", "smol")
    ],
)
def test_launch_configs_say_truly_which_recipes_fit(name):
    recipe = load_recipe([f"recipe={name}"])
    model, _ = plan.outline(recipe.model)
    assert len(CONFIGS) == 5
    for path in CONFIGS:
        text = path.read_text()
        (fitting,) = re.findall(r"^# Recipes that fit GPUs of 80 GiB, by rge.plan: (.*)$", text, re.MULTILINE)
        num_gpus = yaml.safe_load(text)["num_processes"]
        options = PlanOptions(back_end=path.stem, num_gpus=num_gpus)
        assert plan.plan(recipe, model, options).fits == (name in fitting.split(", ")), path.stem
    # So does what a launch without a config sets up.
    assert plan.plan(recipe, model, PlanOptions(num_gpus=8)).fits


PIXELS = 84 * 84
"""Of every picture of `batch`."""


@pytest.fixture
def deep(tmp_path):
    """Twelve text layers: as in a real model, no single layer is most of the work."""
    text = {**TEXT, "num_hidden_layers": 12}
    scratch.build(
        tmp_path / "deep",
        TEXTS,
        seed=0,
        vocab_size=320,
        text=text,
        vision=VISION,
        min_pixels=784,
        max_pixels=7056,
    )
    return EmbeddingModel(load_backbone(tmp_path / "deep", add_emb=True)).eval()


@pytest.fixture
def batch(deep, make_batch):
    """Five queries with a picture of 84 x 84 pixels each, six candidates likewise."""
    builder = PromptBuilder(deep.processor)
    found = make_batch(builder)
    image = Image.new("RGB", (84, 84), "red")
    found.queries[:] = [
        builder.build(Item("q", content_of("what is this", [image])), "query") for _ in found.queries
    ]
    found.candidates[:] = [
        builder.build(Item("c", content_of(None, [image])), "candidate") for _ in found.candidates
    ]
    found.oracle_ids[:] = [[7] * 11 + [deep.emb_id]] * len(found.queries)
    return found


def load_of(embedder: EmbeddingModel, batch, own: float, chunks: int) -> Load:
    return Load(
        queries=len(batch.queries), candidates=len(batch.candidates), chunks=chunks,
        prompt=len(batch.queries[0]), candidate=len(batch.candidates[0]), own=own, oracle=11,
        read_own=True, contrastive=True, label_candidates=True,
        query_pictures=1, candidate_pictures=1,
    )  # fmt: skip


def test_hours_of_this_cpu_are_the_stages(monkeypatch, capsys):
    monkeypatch.setattr(plan, "cpu_speed", lambda dtype: (0.1, 0.01))
    monkeypatch.setattr(plan, "main_memory", lambda: 16.0 * GIB)
    words = ["recipe=demo", "cpu=true", "cold_start.steps=100", "joint.steps=10"]
    assert main([*words, "for=all"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found.keys() == {"cold_start", "joint"}
    for name, steps in (("cold_start", 100), ("joint", 10)):
        assert found[name]["hours"] >= found[name]["flops"] * steps / (0.1e12 * 0.7 * 3600)
    hours = ", ".join(f"{name} {found[name]['hours']:.2g}" for name in ("cold_start", "joint"))
    assert shown[-1].startswith(f"hours at a utilisation of 0.7: {hours}; all ")
    assert not any("GPU" in line for line in shown)
    assert main([*words, "for=joint", "utilisation=0.35"]) == 0
    half = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert half["hours"] == pytest.approx(2 * found["joint"]["hours"])
    monkeypatch.setattr(plan, "main_memory", lambda: 0.1 * GIB)
    assert main([*words, "for=joint"]) == 1


def test_files_that_a_container_has_read_leave_its_memory_free(tmp_path, monkeypatch):
    """The kernel caches them within the container's limit, until something else needs the memory."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("64000000\n")
    (tmp_path / "memory.current").write_text("60000000\n")
    kinds = {"anon": 9_000_000, "file": 50_000_000, "inactive_file": 40_000_000, "active_file": 8_000_000}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in kinds.items()))
    assert machine.main_memory() == 52_000_000
    (tmp_path / "memory.max").write_text("max\n")
    free = machine.main_memory()
    assert free > 64_000_000
    # Of a group below the root, and of the older kind: the tightest on the way up counts.
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = next((path for _, controllers, path in lines if controllers == "memory"), "/")
    for folder, limit in (
        (tmp_path / "memory", 9_000_000),
        (tmp_path / "memory" / mine.lstrip("/"), 5_000_000),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("4000000\n")
        (folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 1000\n")
        assert machine.main_memory() == limit - 4_000_000 + 1000


def test_on_a_cpu_activations_are_kept_in_its_free_memory(monkeypatch, capsys):
    """Under the plan's upper estimate, with what a process needs besides, and never twice in the same memory."""
    monkeypatch.setattr(plan, "cpu_speed", lambda dtype: (0.1, 0.01))
    words = ["recipe=demo", "cpu=true", "for=joint", "train.micro_batch_size=12"]

    def kept(gib: float, *more: str) -> dict:
        monkeypatch.setattr(plan, "main_memory", lambda: gib * GIB)
        main([*words, *more])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    roomy, tight, whole = kept(64), kept(4), kept(64, "train.micro_batch_size=48")
    assert (roomy["setup"]["keep"], tight["setup"]["keep"], whole["setup"]["keep"]) == (
        "device",
        "none",
        "none",
    )
    assert roomy["setup"]["once"]
    assert roomy["flops"] < 0.9 * tight["flops"]
    needed = (roomy["memory_to"] + roomy["host"]["memory"]) / GIB / costs.CPU_SHARE
    assert kept(1.01 * needed)["setup"]["keep"] == "device"
    assert kept(0.99 * needed)["setup"] != roomy["setup"]
    with error_about(RecipeError, "rollout.prompt_pass", "auto"):
        kept(4, "rollout.prompt_pass=once")
    limited = kept(64, "train.micro_batch_size=48", "train.micro_batch_tokens=1000")
    assert limited["load"]["chunks"] > 4
    assert (limited["setup"]["keep"], limited["setup"]["once"]) == ("device", True)


def test_a_cpu_is_as_fast_as_it_was_measured_to_be():
    tflops, tbs = cpu_speed("float32")
    assert 1e-3 < tflops < 50  # one core, shared with others, to a large machine
    assert 1e-4 < tbs < 5


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [5, 3])
def test_flops_against_the_counter(deep, batch, count_flops, micro_batch_size):
    """Rollout, and forward with backward, each within 10 per cent, and so the whole."""
    chunks = -(-5 // micro_batch_size)
    # Rows of equal length: a cap that no rationale reaches by itself.
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0
    settings = {"max_new_tokens": 12, "batch_size": 5}
    rationales = generate(deep, batch.queries, **settings)
    assert all(len(rationale.ids) == 12 for rationale in rationales)
    rollout = count_flops(lambda: generate(deep, batch.queries, **settings))

    def step() -> None:
        TrainingStep(deep, deep, Objective(0.5, 0.5), micro_batch_size)(batch, Rollout(rationales))  # fmt: skip

    counted = count_flops(step)
    load = load_of(deep, batch, 12, chunks)
    # Here the rollout encodes the prompts in any case: no pass with gradient stands before it.
    shapes = shapes_of(deep.model, PIXELS)
    twice = flops(shapes, load_of(deep, batch, 12, 2), Setup(once=False))
    found = flops(shapes, load, Setup())
    planned = sum(size for name, size in found.items() if name != "rollout")
    assert twice["rollout"] == pytest.approx(rollout, rel=0.1)
    assert planned == pytest.approx(counted, rel=0.1)


@pytest.fixture
def written(tmp_path, deep):
    """Writes records of some queries' parts, each with a rationale of 11 tokens and a picture as target; returns words of a plan."""

    def write(name: str, queries: list[dict]) -> list[str]:
        Image.new("RGB", (56, 56), "red").save(tmp_path / "target.png")
        rows = []
        for number, part in enumerate(queries):
            target = {"id": f"t{number}", "image": "target.png", "rationale": "a" * 11}
            rows.append(
                {"id": f"r{number}", "group": str(number), "source": "s", "split": "train", "positives": [target],
                 "query": {"content": [part, {"text": "what?"}]}}
            )  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe_of = {
            "model": {"path": str(tmp_path / "deep"), "dtype": "float32", "min_pixels": 784, "max_pixels": 7056,
                      "gradient_checkpointing": False},
            "data": {"max_prompt_tokens": 2048, "max_negatives": 0},
            "joint": {"batch_size": len(rows), "sources": [{"path": str(tmp_path / f"{name}.jsonl")}]},
            "train": {"micro_batch_size": 1, "keep_activations": "none"},
            "rollout": {"max_new_tokens": 12, "prompt_pass": "twice"},
            "stage": "joint",
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe_of))
        return [f"recipe={tmp_path / name}.yaml", "num_gpus=1"]

    return write


@pytest.mark.slow
def test_clips_and_documents_are_planned_by_their_headers(
    deep, written, tmp_path, count_flops, monkeypatch, capsys
):
    """As many frames and pages as each has: FLOPs of a step within 10 per cent of torch's counter, nothing decoded."""
    for number in (1, 3, 8):
        sheets = [pdfs.page("words", size=(90, 120))] * number
        (tmp_path / f"{number}.pdf").write_bytes(pdfs.pdf(sheets))
        film = clips.clip(range(0, 2000 * number, 250), size=(112, 84), rotation=90 if number == 3 else None)
        (tmp_path / f"{number}.mp4").write_bytes(film)
    Image.new("RGB", (84, 84), "red").save(tmp_path / "single.png")
    kinds = {
        "clips": [{"video": f"{number}.mp4"} for number in (1, 3, 8)],
        "documents": [{"pdf": f"{number}.pdf"} for number in (1, 3, 8)],
        "singles": [{"image": "single.png"}] * 3,
    }
    planned, counted = {}, {}
    for kind, parts in kinds.items():
        words = written(kind, parts)
        with monkeypatch.context() as patch:
            patch.setattr(pdf, "render", None)
            patch.setattr(video._Opened, "frames", None)
            assert main(words) == 0
        shown = capsys.readouterr().out
        found = json.loads(shown.splitlines()[-1])
        assert "of 3 of 3 records" in shown
        planned[kind] = found["flops"] - found["flops_per_gpu"]["rollout"]

        recipe = load_recipe(words[:1])
        records = RecordFile(tmp_path / f"{kind}.jsonl")
        source = PromptBuilders(deep.processor, recipe).source(recipe.joint.sources[0], records)
        batch = StepBatches([source], Mixture([3], [1.0], 3, seed=0), rank=0, world_size=1)[0]
        state = torch.ones(deep.model.config.text_config.hidden_size)
        rollout = Rollout([Rationale((7,) * 12, True, state, 0.0)] * 3)
        step = TrainingStep(deep, deep, Objective.of(recipe, "joint"), 1)
        counted[kind] = count_flops(partial(step, batch, rollout))
        assert planned[kind] == pytest.approx(counted[kind], rel=0.1), kind
        lengths = sorted(map(len, batch.queries))
        mean, _, most = found["prompts"]["mean"], found["prompts"]["high"], found["prompts"]["most"]
        assert (mean["query"], most["query"]) == (pytest.approx(sum(lengths) / 3), lengths[-1])
    for kind in ("clips", "documents"):
        ratio = planned[kind] / planned["singles"]
        assert ratio == pytest.approx(counted[kind] / counted["singles"], rel=0.1)
        assert ratio > 1.2
    # What a user gives counts, and the report says so.
    main([*written("documents", kinds["documents"]), "query_pictures=1", "text_tokens=4"])
    shown = capsys.readouterr().out
    assert json.loads(shown.splitlines()[-1])["prompts"]["mean"]["query_pictures"] == 9
    assert "prompts: assumed (given: query_pictures=1 text_tokens=4)" in shown


@pytest.mark.slow
@pytest.mark.parametrize("own", [0, 12])
def test_flops_of_a_mining_against_the_counter(deep, batch, count_flops, own):
    """Every query once, after a rationale or directly, and every candidate once; without gradient."""
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0

    def states(prompts: list[Prompt]) -> None:
        deep(deep.pack(prompts, [[Branch([deep.emb_id], read_state=True)]] * len(prompts)))

    def mine() -> None:
        with torch.no_grad():
            if own:
                generate(deep, batch.queries, max_new_tokens=own, batch_size=5)
            else:
                states(batch.queries)
            states(batch.candidates)

    counted = count_flops(mine)
    load = dataclasses.replace(load_of(deep, batch, own, 1), oracle=0, label_candidates=False)
    assert mining_flops(shapes_of(deep.model, PIXELS), load, Setup()) == pytest.approx(counted, rel=0.1)


@pytest.mark.slow
def test_flops_of_queries_against_the_counter(deep, count_flops):
    """Directly and after rationales of every length, beside pictures of several shapes and none."""
    builder, sizes = PromptBuilder(deep.processor), [(84, 84), (56, 112), (28, 28)]
    shown = [*([Image.new("RGB", size)] for size in sizes), []]
    items = [Item("q", content_of("what is this", pictures)) for pictures in shown]
    measured = [builder.measure(item, "query") for item in items]
    prompts = [builder.build(item, "query") for item in items]
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0

    def direct(prompt: Prompt) -> None:
        with torch.no_grad():
            deep(deep.pack([prompt], [[Branch([deep.emb_id], read_state=True)]]))

    def write(prompt: Prompt, cap: int) -> None:
        (written,) = generate(deep, [prompt], max_new_tokens=32, batch_size=1, caps=[cap])
        assert len(written.ids) == cap

    outlined, caps = skeleton(deep.model.config), np.array([1, 4, 12, 32])
    found = embedding_flops(outlined, measured, np.zeros(4), writes=False)
    assert found == pytest.approx([count_flops(lambda one=one: direct(one)) for one in prompts], rel=0.1)
    found = embedding_flops(outlined, measured, caps, writes=True)
    counted = [
        count_flops(lambda one=one, cap=cap: write(one, cap))
        for one, cap in zip(prompts, caps.tolist(), strict=True)
    ]
    assert found == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("known", "queries", "candidates"),
    [
        (None, 50 * 512, (50 * 512 + 2 * 1000) * 3),
        ({"records": 20_000, "targets": 30_000}, 20_000, 30_000),  # fewer than are drawn
        ({"records": 100_000, "targets": 150_000}, 25_600, 27_600 * 1.5),
    ],
)
def test_what_is_mined_is_planned(the_3b, known, queries, candidates):
    sources = '[{"path": "a.jsonl"}, {"path": "b.jsonl"}]'
    words = ["data.max_negatives=2", f"joint.sources={sources}", "joint.batch_size=512"]
    mine = ["data.mine.every=50", "data.mine.pool=1000"]
    options = PlanOptions(num_gpus=8, gpu_gib=141)
    prompts = "unknown"
    if known is not None:
        sizes = {name: 500 for name in ("query", "candidate", "query_pictures", "candidate_pictures")}
        prompts = PromptSizes(Sizes(**sizes, rationale=30, positives=1, negatives=2), "known", **known)

    def planned(*more: str) -> plan.Plan:
        recipe = load_recipe(["recipe=qwen25vl_3b", *words, *more])
        return plan.plan(recipe, the_3b, options, prompts)

    without, found = planned(), planned(*mine)
    assert without.mining == {}
    assert found.mining["queries"] == queries
    assert found.mining["candidates"] == candidates
    assert found.mining["flops"] / 50 == pytest.approx(found.flops - without.flops)
    assert found.mining["share"] == pytest.approx(1 - without.seconds / found.seconds)
    assert found.host["memory"] - without.host["memory"] >= 4 * found.shapes.hidden * candidates
    direct = planned(*mine, "data.mine.query_mode=direct").mining
    tokens = found.mining["tokens"] - direct["tokens"]
    assert tokens == queries * (found.load.own + 1)


@pytest.fixture
def the_3b():
    return plan.outline(load_recipe(["recipe=qwen25vl_3b"]).model)[0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_kept_activations_against_the_counter_and_autograd(deep, batch, count_flops, checkpointing):
    """In micro batches of 3 and 2: FLOPs within 10 per cent, and bytes within a third."""
    if checkpointing:
        deep.train()
        deep.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rationales = [Rationale((7,) * 12, True, torch.ones(deep.model.config.text_config.hidden_size), 0.0)] * 5
    load, shapes = load_of(deep, batch, 12, 2), shapes_of(deep.model, PIXELS)
    parts = [slice(0, 2), slice(2, 5)]
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():  # indices and lengths of a forward are views of one buffer
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def step(once: bool) -> None:
        encoded = encode_prompts(deep, deep, batch.queries, parts, "device") if once else None
        TrainingStep(deep, deep, Objective(0.5, 0.5), 3, keep="device")(batch, Rollout(rationales, encoded))

    weights = {parameter.untyped_storage().data_ptr() for parameter in deep.parameters()}
    direct = [[Branch([deep.emb_id], read_state=True, predict=True)]] * len(batch.candidates)
    for once in (False, True):
        setup = Setup(checkpointing=checkpointing, keep="device", once=once, trained=shapes.parameters)
        planned = flops(shapes, load, setup)
        assert "candidates without gradient" not in planned
        assert sum(planned.values()) - planned["rollout"] == pytest.approx(
            count_flops(lambda once=once: step(once)), rel=0.1
        )
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            alive = [deep(deep.pack(batch.candidates, direct))]
            alive += [encode_prompts(deep, deep, batch.queries, parts, "device")] if once else []
        measured = sum(size for place, size in kept.items() if place not in weights)
        assert kept_bytes(shapes, load, setup)[0] == pytest.approx(measured, rel=1 / 3), once


def test_the_fastest_ways_fit_and_take_the_overrides_that_they_name(the_3b, capsys):
    command = ["recipe=qwen25vl_3b", "data.max_negatives=0", "back_end=zero2", "host_gib=2000"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert len(found["fastest"]) == 3
    seconds = [one["seconds"] for one in found["fastest"]]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.9 * found["seconds"]
    for one in found["fastest"]:
        assert f": {' '.join(one['overrides'])}\n" in shown
        assert main([*command, *one["overrides"]]) == 0
        again = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert again["flops"] == pytest.approx(one["flops"])
        assert again["memory_total"] == pytest.approx(one["memory_total"])
        assert again["memory_total"] <= 80 * 2**30


def test_the_fastest_ways_are_ones_that_training_accepts(the_3b, capsys):
    def found(*words: str) -> dict:
        main(["recipe=qwen25vl_3b", "data.max_negatives=0", *words])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    # A recipe may name how often prompts are encoded: what is suggested names it too where it differs.
    for asked in ("once", "twice"):
        command = ["gpu_gib=140", f"rollout.prompt_pass={asked}"]
        for one in found(*command)["fastest"]:
            again = found(*command, *one["overrides"])
            assert again["flops"] == pytest.approx(one["flops"])
            nothing_kept = again["setup"]["keep"] == "none" and again["load"]["chunks"] > 1
            assert not (nothing_kept and asked == "once") or "rollout.prompt_pass=twice" in one["overrides"]
    # Muon needs whole gradients, which ZeRO and FSDP2 do not have.
    with error_about(RecipeError, "train.back_end"):
        found("optim.name=muon", "train.back_end=zero2")
    plans = [found("optim.name=muon", "train.back_end=ddp", size) for size in ("gpu_gib=80", "gpu_gib=50")]
    assert [one["fits"] for one in plans] == [True, False]
    assert plans[0]["fastest"]
    for one in plans:
        suggested = [word for way in one["fastest"] for word in way["overrides"]]
        assert not [word for word in suggested if "back_end" in word]


def test_keeping_is_chosen_by_the_room_that_there_is(the_3b, capsys):
    def kept(*words: str) -> tuple[str, str, float]:
        assert main(["recipe=qwen25vl_3b", "data.max_negatives=0", "back_end=zero2", *words]) in (0, 1)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        return (
            found["setup"]["keep"],
            "once" if found["setup"]["once"] else "twice",
            round(found["flops"] / 1e15, 1),
        )

    assert kept("gpu_gib=60") == ("none", "twice", 65.5)
    assert kept("gpu_gib=100") == ("device", "twice", 59.4)
    assert kept("gpu_gib=140") == ("device", "once", 53.2)
    assert kept("gpu_gib=60", "host_gib=2000") == ("host", "once", 53.2)
    assert kept("gpu_gib=140", "train.keep_activations=none") == ("none", "twice", 65.5)
    assert kept("train.keep_activations=host", "rollout.prompt_pass=twice") == ("host", "twice", 59.4)
    # The rollout needs whole weights between a prompt's forward and its backward, so only candidates can be kept.
    for back_end in ("zero3", "fsdp2"):
        assert kept(f"back_end={back_end}", "gpu_gib=140") == ("device", "twice", 59.4)
    with error_about(RecipeError, "rollout.prompt_pass", "auto"):
        kept("gpu_gib=60", "rollout.prompt_pass=once")


def test_every_stage_can_be_planned(the_3b, capsys, monkeypatch):
    assert main(["recipe=qwen25vl_3b", "for=rl"]) == 0
    rl = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rl["tokens"]["own rationales"] == 64 * 8 * 129
    assert main(["recipe=qwen25vl_3b", "for=all"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown.splitlines()[-1]).keys() == {"cold_start", "joint"}
    assert "hours at a utilisation of 0.35: cold_start " in shown.splitlines()[-2]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["recipe=qwen25vl_3b", "for=all"]) == 0
    assert "{" not in capsys.readouterr().out


def test_a_frozen_tower_is_counted_once(the_3b, capsys):
    def pictures(*words: str) -> float:
        plans = []
        for more in ((), ("query_pictures=0", "candidate_pictures=0", "text_tokens=1090")):
            main(
                [
                    "recipe=qwen25vl_3b",
                    "data.max_negatives=0",
                    "train.keep_activations=none",
                    "model.freeze=[vision,merger]",
                    *words,
                    *more,
                ]
            )
            plans.append(json.loads(capsys.readouterr().out.splitlines()[-1])["flops"])
        return plans[0] - plans[1]

    shapes = shapes_of(the_3b, 802816)
    once = 1024 * (shapes.picture.products + shapes.picture.attention)
    assert pictures("back_end=zero2") == pytest.approx(once, rel=0.05)
    assert pictures("back_end=zero3") == pytest.approx(2 * once, rel=0.05)


@pytest.mark.slow
def test_flops_of_a_policy_gradient_against_the_counter(deep, batch, count_flops, tmp_path):
    """Four rationales a query, their log probabilities and InfoNCE over them: within 10 per cent."""
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0
    settings = {"max_new_tokens": 12, "batch_size": 20, "temperature": 1.0, "seeds": range(20), "num_each": 4}
    rationales = generate(deep, batch.queries, **settings)
    assert all(len(rationale.ids) == 12 for rationale in rationales)
    rollout = count_flops(lambda: generate(deep, batch.queries, **settings))
    recipe = Recipe(
        recipe="tiny", stage="rl", loss=LossConfig(alpha_lm=0.5, alpha_con=0.5), rl=RLConfig(alpha_con=0.5)
    )

    def step() -> None:
        credit = Reinforcement(recipe, deep, None, tmp_path).begin(batch, rationales, measure=False)
        TrainingStep(deep, deep, Objective.of(recipe, "rl"), 5)(batch, Rollout(rationales), credit)  # fmt: skip

    counted = count_flops(step)
    load = dataclasses.replace(load_of(deep, batch, 12, 1), each=4, sampled=True)
    shapes = shapes_of(deep.model, PIXELS)
    found = flops(shapes, load, Setup())
    twice = flops(shapes, dataclasses.replace(load, chunks=2), Setup(once=False))
    assert twice["rollout"] == pytest.approx(rollout, rel=0.1)
    assert sum(size for name, size in found.items() if name != "rollout") == pytest.approx(counted, rel=0.1)
    of_a_recipe = load_recipe(["recipe=qwen25vl_3b", "stage=rl", "rl.batch_size=64", "rl.num_rationales=8"])
    planned = plan.plan(of_a_recipe, plan.outline(of_a_recipe.model)[0], PlanOptions(for_="rl"))
    assert planned.tokens["own rationales"] == 64 * 8 * 129


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "chunks"), [({"alpha_con": 0.5}, 2), ({"alpha_lm": 0.0}, 1)], ids=str)
def test_flops_of_two_updates_against_the_counter(deep, batch, count_flops, tmp_path, weights, chunks):
    """The second needs new states; and the policy gradient alone has none for the candidates. Within 10 per cent."""
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0
    settings = {"max_new_tokens": 12, "batch_size": 20, "temperature": 1.0, "seeds": range(20), "num_each": 4}
    rationales = generate(deep, batch.queries, **settings)
    recipe = Recipe(recipe="tiny", stage="rl", rl=RLConfig(num_iterations=2, **weights))
    recipe.loss.alpha_lm, recipe.loss.alpha_con = 0.5, 0.5
    objective, rollout = Objective.of(recipe, "rl"), Rollout(rationales)

    def step() -> None:
        credit = Reinforcement(recipe, deep, None, tmp_path).begin(batch, rationales, measure=False)
        take = TrainingStep(deep, deep, objective, -(-5 // chunks))
        take(batch, rollout, credit)
        take(batch, rollout.after_update(), credit)

    counted = count_flops(step)
    with_lm = objective.alpha_lm > 0
    load = dataclasses.replace(
        load_of(deep, batch, 12, chunks), each=4, sampled=True, oracle=11 * with_lm, label_candidates=with_lm,
        trains_candidates=objective.trains_candidates, updates=objective.num_updates,
    )  # fmt: skip
    found = flops(shapes_of(deep.model, PIXELS), load, Setup())
    assert sum(size for name, size in found.items() if name != "rollout") == pytest.approx(counted, rel=0.1)


@pytest.mark.slow
def test_flops_with_dropout_against_the_counter(deep, batch, count_flops):
    """In several micro batches, whatever has a gradient is computed before with the same masks."""
    with torch.no_grad():
        deep.model.get_input_embeddings().weight[deep.emb_id] = 0
    add_adapters(deep.model, LoraConfig(rank=1, dropout=0.1), deep.emb_id)
    rationales = generate(deep.train(), batch.queries, max_new_tokens=12, batch_size=5)
    step = TrainingStep(deep, deep, Objective(0.5, 0.5), 3)
    counted = count_flops(lambda: step(batch, Rollout(rationales)))
    shapes, load = shapes_of(deep.model, PIXELS), load_of(deep, batch, 12, 2)
    setups = [Setup(adapters=True, train_vision=False, dropout=dropout) for dropout in (True, False)]
    found, without = (flops(shapes, load, setup) for setup in setups)
    assert sum(found.values()) - found["rollout"] == pytest.approx(counted, rel=0.1)
    assert sum(without.values()) - without["rollout"] < 0.9 * counted


def test_a_plan_knows_what_a_policy_gradient_leaves_out(the_3b):
    words = ["recipe=qwen25vl_3b", "stage=rl", "rl.alpha_lm=0", "rl.rewards=[{name: oracle_overlap}]"]
    recipe = load_recipe([*words, "rl.num_iterations=2", "model.lora={rank: 8, dropout: 0.05}"])
    found = plan.plan(recipe, the_3b, PlanOptions(for_="rl"))
    assert (found.load.oracle, found.load.trains_candidates, found.load.updates) == (0, False, 2)
    once = plan.plan(
        load_recipe([*words, "model.lora={rank: 8, dropout: 0.05}"]), the_3b, PlanOptions(for_="rl")
    )
    assert found.flops > 1.7 * once.flops
    assert found.bytes_sent["zero2"] > 1.9 * once.bytes_sent["zero2"]
    both = plan.plan(load_recipe([*words, "rl.alpha_con=0.5"]), the_3b, PlanOptions(for_="rl"))
    alone = plan.plan(load_recipe(words), the_3b, PlanOptions(for_="rl"))
    assert alone.memory["activations"] < 0.9 * both.memory["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_against_what_autograd_keeps(deep, batch, how, checkpointing):
    """Within a third: the estimate counts a layer's tensors, autograd may keep some twice or not at all."""
    if checkpointing:
        deep.train()
        deep.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if how == "bfloat16":
        deep.to(torch.bfloat16)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in deep.parameters()}
    branches = [
        [
            Branch([7] * 12 + [deep.emb_id], read_state=True),
            Branch([7] * 11 + [deep.emb_id], predict=True),
        ]
    ] * 5
    direct = [[Branch([deep.emb_id], read_state=True, predict=True)]] * len(batch.candidates)
    packs = deep.pack(batch.queries, branches), deep.pack(batch.candidates, direct)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        readouts = deep(*packs)
    measured = sum(size for place, size in kept.items() if place not in weights)
    assert all(readout.state_ND.requires_grad for readout in readouts)
    shapes = shapes_of(deep.model, PIXELS)
    setup = Setup(
        back_end="zero2" if how == "bfloat16" else "ddp", num_gpus=2, dtype_bytes=4 if how == "float32" else 2,
        checkpointing=checkpointing, trained=shapes.parameters, micro_queries=5,
    )  # fmt: skip
    found = memory(shapes, load_of(deep, batch, 12, 1), setup)
    assert found["activations"] == pytest.approx(measured, rel=1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sdpa", "varlen"])
def test_layers_of_the_3b_on_meta(monkeypatch, form):
    """A third of them with a micro batch of the real shapes: FLOPs of forward and backward, and what a GPU's form keeps.

    FLOPs to 3 per cent, with attention in plain products, which torch's counter knows best; activations to a third, with
    flash attention, which keeps no scores.
    """
    monkeypatch.setattr(varlen, "one_by_one", varlen._flash)
    config = outline(load_recipe(["recipe=qwen25vl_3b"]).model)[0].config
    text, tower = config.get_text_config(), config.vision_config
    assert (text.num_hidden_layers, tower.depth, tower.fullatt_block_indexes) == (36, 32, [7, 15, 23, 31])
    text.num_hidden_layers, text.layer_types = 12, text.layer_types[:12]
    tower.depth, tower.fullatt_block_indexes = 8, [7]
    model = skeleton(config).to(torch.bfloat16).train()
    vision.speed_up(model, form)
    assert install(family_of(model).decoder(model), form) == form
    rows, emb, image = 2, 7, model.config.image_token_id
    grid = torch.tensor([[1, 64, 64]])
    ids = torch.tensor([1] * 20 + [model.config.vision_start_token_id, *[image] * 1024, 3] + [1] * 60)
    types, pixels = (ids == image).long(), torch.zeros(4096, 3, 14, 14, dtype=torch.uint8)
    positions = family_of(model).positions(SimpleNamespace(merge_size=2), ids, types, grid)
    prompt = Prompt("row", ids, types, positions, pixels, grid)
    own, oracle = [1] * 128 + [emb], [2] * 128 + [emb]
    both = [Branch(own, read_state=True), Branch(oracle, predict=True)]
    direct = [Branch([emb], read_state=True, predict=True)]

    kept: dict[int, int] = {}
    weights = {id(parameter) for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights and not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    alive: list = []

    def forward(branches):
        part = pack_prompts([prompt] * rows, picture_ids=[1, image, 3], empty_picture=(None, None))
        part, tails = to_device(part, pack_tails([prompt] * rows, [branches] * rows), device="meta")
        plan_ = Pass(part, tails, None, len(family_of(model).decoder(model).layers), form)
        patches = torch.empty(rows * 4096, 1176, dtype=torch.bfloat16, device="meta")
        features = family_of(model).features(model, patches, part.image_grid)
        inputs = {
            "input_ids": torch.cat([part.input_ids_T, tails.input_ids_T])[None],
            "position_ids": torch.cat([part.position_ids_3T, tails.position_ids_3T], dim=1)[:, None],
            "attention_mask": plan_,
        }
        hidden = family_of(model).states(model, features, part.picture_index_F, inputs)[0]
        read = hidden[plan_.read_R]
        return model.get_output_embeddings()(read[: len(tails.label_M)]).float().sum() + read.float().sum()

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total = forward(both) + forward(direct)
        if form == "sdpa":
            total.backward()
    load = Load(
        queries=rows, candidates=rows, chunks=1, prompt=len(prompt), candidate=len(prompt), own=128, oracle=128,
        read_own=True, contrastive=True, label_candidates=True,
        query_pictures=1, candidate_pictures=1,
    )  # fmt: skip
    shapes = shapes_of(model, 1024 * 28 * 28)
    if form == "sdpa":
        found = flops(shapes, load, Setup())
        assert found["forward"] + found["backward"] == pytest.approx(counter.get_total_flops(), rel=0.03)
        return
    setup = Setup(back_end="zero2", num_gpus=8, dtype_bytes=2, trained=1, micro_queries=rows)
    estimate = memory(shapes, load, setup)
    assert estimate["activations"] == pytest.approx(sum(kept.values()), rel=1 / 3)


def test_a_machine_and_hours_by_hand():
    """Two processes with a batch of 1 GiB each, three workers, 4 GiB that may wait, 1 G parameters of two bytes."""
    nothing = dict.fromkeys(Shapes.__dataclass_fields__, 0)
    shapes = Shapes(**{**nothing, "layers": 2, "layer": 10**8})

    def machine_of(batch_bytes: int, prefetch_mb: int, num_workers: int, processes: int) -> dict[str, float]:
        recipe = Recipe("r")
        recipe.data.prefetch_mb, recipe.data.num_workers = prefetch_mb, num_workers
        sizes = dataclasses.replace(shapes, parameters=10**9, picture=PictureCost(num_bytes=batch_bytes))
        one = Load(1, 0, 1, 1, 1, 0, 0, False, False, False, 1, 0)
        options = PlanOptions(num_gpus=processes)
        return host(recipe, sizes, one, Setup(dtype_bytes=2), options)

    found = machine_of(2**30, prefetch_mb=4096, num_workers=3, processes=2)
    # Four wait in files, one is in use, and each worker has one; in memory is the only micro batch, and what stays out of files.
    assert found["temporary files"] == 2 * (4 + 1 + 3) * 2**30
    assert found["of that, batches"] == 2 * (2**30 + 3 * 2 * 2**25)
    assert found["memory"] == 2 * (2 * 10**9 + (3 + 3 * 0.5) * 2**30)  # while weights are read
    assert found["shared memory"] == 2**30
    # Pinned memory comes in powers of two.
    larger = machine_of(2**24 + 1, prefetch_mb=0, num_workers=0, processes=1)
    assert larger["of that, batches"] == 2 * 2**25
    assert larger["shared memory"] == larger["temporary files"] == 0
    assert found["descriptors of a process"] == 128 + 3 * 8
    # AdamW's two numbers and the weight, in float32, of half of 10 M parameters; 8 processes on two machines.
    ten = dataclasses.replace(shapes, parameters=10**7)
    setup = Setup(back_end="ddp", num_gpus=8, dtype_bytes=2, trained=5 * 10**6, optimizer_states=2)
    copies = {
        name: state_copy(ten, dataclasses.replace(setup, back_end=name), processes=4) for name in BACK_ENDS
    }
    assert copies == {
        "ddp": 60e6,
        "fsdp2": 30e6 + 5e6,
        "zero1": 30e6 + 20e6,
        "zero2": 50e6,
        "zero3": 30e6 + 10e6,
    }
    # Ten rationales of eight tokens, five at once: two passes of ten steps over 0.4 GB; 1 TFLOP at half of a TFLOP/s.
    load = Load(10, 0, 1, 1, 1, 8, 0, True, True, False, 0, 0)
    seconds = step_seconds(shapes, load, Setup(dtype_bytes=2, rollout_rows=5), 1e12, 0.5e12, 0.5e9)
    assert seconds == pytest.approx(2 + 2 * 10 * 0.4 / 0.5)


def test_the_report_of_a_small_model_is_not_all_zeros(capsys):
    main(["recipe=demo", "num_gpus=1", "for=joint"])
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["flops"] < 1e15
    [fastest] = [line for line in shown if line.startswith("  1. ")]
    [total, *_] = [line for line in shown if "TFLOP" in line and line.split()[0] == "all"]
    for figure in (fastest.split()[1], total.split()[1]):
        assert float(figure) > 0
    [hours] = [line.split()[-1] for line in shown if "hours at a utilisation" in line]
    assert 0 < float(hours) < 0.1


def test_hours_follow_steps_gpus_and_utilisation(capsys):
    def hours(*arguments: str) -> dict:
        main(["recipe=qwen25vl_3b", *arguments])
        shown = capsys.readouterr().out
        assert "hours at a utilisation of" in shown
        return json.loads(shown.splitlines()[-1])

    base = hours("steps=100")
    assert base["flops"] > 1e15  # shown in PFLOP
    assert base["hours_from"] < base["hours"] < base["hours_to"]
    assert hours("steps=200")["hours"] == pytest.approx(2 * base["hours"])
    assert hours("steps=100", "utilisation=0.7")["hours"] == pytest.approx(base["hours"] / 2)
    assert hours("steps=100", "num_gpus=16")["hours"] == pytest.approx(base["hours"] / 2, rel=0.1)
    files = [host["temporary files"] for host in (base["host"], hours("data.prefetch_mb=40000")["host"])]
    assert files[1] > files[0] + 8 * 30 * 2**30
    assert (
        hours("data.num_workers=8")["host"]["descriptors of a process"]
        > base["host"]["descriptors of a process"]
    )
    # Half of the processes, but under ZeRO-2 the whole weights are in the copy of the state.
    whole, half = (hours("train.background_save=false", *it)["host"] for it in ((), ("gpus_per_machine=4",)))
    assert half["memory"] == pytest.approx(whole["memory"] / 2)
    copied = base["host"]["memory"] - whole["memory"]
    assert copied == base["host"]["of that, a state being written"] > 12 * base["setup"]["trained"]


def test_memory_and_communication_by_hand():
    """A model of 1 G parameters in bfloat16 on four GPUs, AdamW, without anything but its weights."""
    nothing = dict.fromkeys(Shapes.__dataclass_fields__, 0)
    shapes = Shapes(**{**nothing, "parameters": 10**9, "picture": PictureCost()})
    load = Load(0, 0, 4, 1, 1, 0, 0, False, False, False, 0, 0)
    setup = Setup(num_gpus=4, dtype_bytes=2, checkpointing=True, trained=10**9, micro_queries=0)

    def of(back_end: str) -> tuple[float, float, float]:
        found = memory(shapes, load, dataclasses.replace(setup, back_end=back_end))
        return found["weights"] / 1e9, found["gradients"] / 1e9, found["optimizer"] / 1e9

    assert of("ddp") == (6.0, 4.0, 8.0)  # float32, and autocast's copies of the weights
    assert of("zero1") == (2.0, 4.0, 3.0)  # float32 weights and two moments, over four
    assert of("zero2") == (2.0, 1.0, 3.0)
    assert of("zero3") == (0.5, 1.0, 3.0)
    assert of("fsdp2") == (1.0, 1.0, 2.0)  # float32, over four

    def sent(back_end: str, **more: str) -> float:
        return communication(shapes, load, dataclasses.replace(setup, back_end=back_end, **more)) / 1e9

    # 4 GB of gradients, or 2 in bfloat16, three quarters of them sent; four micro batches.
    assert sent("ddp") == 6.0
    assert sent("zero1") == 3.0 + 1.5
    assert sent("zero2") == 1.5 * 4 + 1.5
    assert sent("zero3") == 1.5 * 4 + 1.5 * 2 * 4  # a forward and a backward of queries alone
    load = dataclasses.replace(
        load, candidates=1, contrastive=True
    )  # twice forward and once backward, both sides
    assert sent("zero3") == 1.5 * 4 + 1.5 * 6 * 4
    assert sent("zero3", keep="device") == 1.5 * 4 + 1.5 * 4 * 4
    load = dataclasses.replace(load, own=1)  # the rollout leaves the queries' states
    assert sent("zero3") == 1.5 * 4 + 1.5 * (5 * 4 + 1)
    assert sent("zero3", keep="device") == 1.5 * 4 + 1.5 * (4 * 4 + 1)


def test_logits_of_many_tokens_take_the_memory_of_a_chunk():
    """As `rge.losses.rationale_nll` computes them: autograd keeps none of them for the backward."""
    head, kept = torch.nn.Linear(8, 1000, bias=False), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for rows, least, most in ((CHUNK_TOKENS, 1.0, 1.1), (4 * CHUNK_TOKENS, 0.0, 0.1)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            rationale_nll(torch.ones(rows, 8, requires_grad=True), head, torch.zeros(rows, dtype=torch.long))
        assert least <= sum(kept.values()) / (4 * rows * 1000) < most
    shapes = Shapes(**dict.fromkeys(Shapes.__dataclass_fields__, 0) | {"vocabulary": 1000, "picture": PictureCost()})  # fmt: skip
    load = Load(64, 128, 1, 1, 1, 0, 127, False, True, True, 0, 0)
    for queries, rows in ((4, 4 * 128 + 128), (64, CHUNK_TOKENS + 128)):
        found = memory(shapes, load, Setup(micro_queries=queries))["activations"]
        assert found == 12 * 1000 * rows


@pytest.mark.parametrize(
    ("words", "branches", "labels"),
    [
        ("loss.ratio=1:1", 1, 129),
        ("loss.ratio=none", 1, 0),  # its state is read, and nothing predicted
    ],
)
def test_an_oracle_rationale_that_is_only_read_has_no_labels(the_3b, words, branches, labels):
    recipe = load_recipe(["recipe=qwen25vl_3b", "loss.anchor=oracle", *words.split()])
    found = plan.plan(recipe, the_3b, PlanOptions())
    assert (found.load.oracle_tokens, found.load.labels) == (branches * 129, labels)
    assert found.tokens["oracle rationales"] == 512 * branches * 129


def test_more_queries_cost_memory_only_by_the_micro_batch():
    """What a step takes grows with the batch; what a GPU holds does not."""
    found = []
    for size in (512, 4096):
        recipe = load_recipe(["recipe=qwen25vl_3b", f"joint.batch_size={size}"])
        found.append(plan.plan(recipe, plan.outline(recipe.model)[0], PlanOptions()))
    small, large = found
    assert large.flops == pytest.approx(8 * small.flops, rel=0.01)
    assert large.memory["pictures"] == small.memory["pictures"] == large.batch_bytes / large.load.chunks > 0
    assert large.memory_total == pytest.approx(small.memory_total, rel=0.01)
    assert large.tokens["own rationales"] == 4096 * 129


def test_what_a_frozen_tower_makes_stays_on_the_gpu():
    """Features of a rank's whole batch, where the writer keeps them (`make_writer`); a micro batch's pixels in any case."""

    def of(name: str, back_end: str, *overrides: str) -> tuple[float, plan.Plan]:
        recipe = load_recipe([f"recipe={name}", *overrides])
        options = PlanOptions(num_gpus=8, back_end=back_end)
        found = plan.plan(recipe, plan.outline(recipe.model)[0], options)
        assert found.memory_total == sum(found.memory.values())
        return found.memory["pictures"] - found.batch_bytes / found.load.chunks, found

    for name, size in {"qwen25vl_7b_lora": 3584, "qwen3vl_2b": 2048 * 4, "smolvlm": 2048}.items():
        kept, found = of(name, "zero2", "model.freeze=[vision,merger]")
        pictures = found.load.queries + found.load.candidates
        assert kept == 2 * pictures * found.shapes.picture.placeholders * size > 0
    frozen = "model.freeze=[vision,merger]"
    assert of("qwen3vl_2b", "zero2")[0] == 0
    assert of("qwen25vl_7b_lora", "ddp", "model.lora.vision=true")[0] == 0
    assert of("qwen3vl_2b", "zero3", frozen)[0] == of("qwen3vl_2b", "fsdp2", frozen)[0] == 0
    assert of("qwen3vl_2b", "zero2", frozen, "loss.anchor=oracle")[0] == 0  # no rollout, no memory


@pytest.mark.slow
@every_family
def test_the_features_of_a_placeholder_are_as_wide_as_planned(lively, picture):
    prompts = [
        PromptBuilder(lively.processor).build(
            Item("1", content_of("what is this", [picture(60, 60)])), "query"
        )
    ]
    (features,) = lively.picture_features(prompts)
    assert features.shape[1] == cost_of_picture(lively.model, 0).feature


@pytest.mark.parametrize(
    ("stage", "anchor", "gib"), [("joint", "self", 10), ("joint", "none", 0), ("cold_start", "self", 0)]
)
def test_an_engine_of_vllm_takes_its_share_where_rationales_are_written(stage, anchor, gib):
    totals = []
    for backend in ("own", "vllm"):
        # Without graphs, whose buffers our own rollout alone has.
        arguments = [f"rollout.backend={backend}", "rollout.vllm_memory=0.25", "model.cuda_graphs=false"]
        recipe = load_recipe(["recipe=qwen25vl_3b", f"loss.anchor={anchor}", *arguments])
        options = PlanOptions(gpu_gib=40, for_=stage)
        totals.append(plan.plan(recipe, plan.outline(recipe.model)[0], options).memory_total)
    assert totals[1] == totals[0] + gib * 2**30


@pytest.mark.parametrize(
    ("positives", "of_records", "mean", "asked"), [("draw", 1, 1, 1), ("all", 3.5, 2, 3)]
)
def test_all_positives_are_candidates_where_all_are_used(positives, of_records, mean, asked):
    recipe = load_recipe(["recipe=qwen25vl_3b", f"data.positives={positives}", "data.max_negatives=2"])
    shapes, options = shapes_of(plan.outline(recipe.model)[0], 784), PlanOptions(num_gpus=256, positives=3)
    assert plan.load_of(recipe, shapes, options).candidates == 2 * (asked + 2)
    sizes_NK = np.ones((5, len(COLUMNS)), dtype=np.int64)
    sizes_NK[:, COLUMNS.index("prompts")] = [3, 4, 7, 3, 3]  # the query, one negative, and the positives
    layouts = [Layout(sizes_NK[:2], np.arange(2)), Layout(sizes_NK[2:], np.arange(3))]
    stage, files = dataclasses.replace(recipe.joint, sources=[SourceConfig(weight="size")] * 2), []
    for layout in layouts:
        files.append(Records())
        files[-1].size = len(layout.sizes_NK)
    load = plan.load_of(recipe, shapes, options, sizes_of(recipe, stage, files, layouts, 2))
    assert load.candidates == math.ceil(2 * (mean + 1)), "one negative is all that there is"
    assert load.largest.candidates == math.ceil(2 * (of_records + 1))


def test_an_engine_that_sleeps_is_not_beside_the_backward():
    def memory(*arguments: str) -> dict[str, float]:
        recipe = load_recipe(["recipe=qwen25vl_3b", *arguments])
        return plan.plan(recipe, plan.outline(recipe.model)[0], PlanOptions(gpu_gib=80, for_="joint")).memory

    own, asleep = (
        memory(),
        memory("rollout.backend=vllm", "rollout.vllm_memory=0.1", "rollout.vllm_sleep=true"),
    )
    assert asleep["activations"] == own["activations"] > 8 * 2**30  # the fullest moment is still the backward
    larger = memory("rollout.backend=vllm", "rollout.vllm_memory=0.9", "rollout.vllm_sleep=true")
    assert larger["activations"] == 0
    assert larger["rollout"] > 72 * 2**30


@pytest.mark.parametrize(
    ("words", "has_others"),
    [
        (
            ["recipe=qwen25vl_3b", "num_gpus=1", "gpu_gib=80", "back_end=zero2", "train.micro_batch_size=64"],
            True,
        ),
        (["recipe=qwen25vl_3b", "host_gib=300", "train.keep_activations=host"], True),
        (["recipe=qwen25vl_3b", "host_gib=140"], False),
        (["recipe=qwen25vl_3b", "gpu_gib=8"], False),
        (["recipe=demo", "cpu=true"], False),
    ],
    ids=["gpu", "kept", "host", "small", "cpu"],
)
def test_a_plan_that_does_not_fit_says_what_would(capsys, monkeypatch, words, has_others):
    monkeypatch.setattr(plan, "cpu_speed", lambda dtype: (0.1, 0.01))
    monkeypatch.setattr(plan, "main_memory", lambda: 0.5 * GIB)
    assert main(words) == 1
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert not found["fits"]
    assert "It does not fit: " in shown
    assert (plan.LESS in shown) != has_others == bool(found["fastest"])
    for one in found["fastest"]:
        keys = tuple(f"{override.partition('=')[0]}=" for override in one["overrides"])
        assert main([*(word for word in words if not word.startswith(keys)), *one["overrides"]]) == 0
        capsys.readouterr()


def test_the_reference_of_the_kl_divergence_is_planned():
    def found(*arguments: str) -> plan.Plan:
        recipe = load_recipe(["recipe=qwen25vl_3b", "stage=rl", *arguments])
        return plan.plan(recipe, plan.outline(recipe.model)[0], PlanOptions(num_gpus=8, for_="rl"))

    none, copied = found(), found("rl.beta=0.05")
    assert copied.memory["weights"] - none.memory["weights"] == 2 * none.shapes.parameters
    forward = none.flops_per_gpu["forward"]  # of queries and candidates, which are twice as many
    assert 0.2 * forward < copied.flops_per_gpu["reference"] < 0.6 * forward
    lora, without = (found("model.lora={rank: 16}", f"rl.beta={beta}") for beta in (0, 0.05))
    assert without.memory == lora.memory
    assert without.flops > lora.flops


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["num_gpus=513"], ("joint.batch_size",)),
        (["num_gpu=8"], ("num_gpu", "num_gpus")),
        (["gpu_gib=big"], ("gpu_gib",)),
        (["num_gpus=0"], ("num_gpus",)),
        (["utilisation=1.5"], ("utilisation",)),
        (["peak_tflops=0"], ("peak_tflops",)),
        (["back_end=zero4"], ("back_end", "zero1", "zero2", "zero3", "fsdp2")),
        (["for=rl", "rl.beta=0.1", "back_end=zero3"], ("train.back_end",)),
        (["model.lora.targets=[q_prj]"], ("model.lora.targets", "unknown")),
        (["for=cold_start", "stage=joint"], (("choice", "for", ("joint",)),)),
        (
            ["query_pictures=3"],
            ("model.max_pixels", "data.max_prompt_tokens"),
        ),
        (["model.pth=x"], ("model.path",)),
    ],
)
def test_errors(arguments, named):
    with error_about(UserError, *named):
        main(["recipe=qwen25vl_3b", *arguments])


def test_unknown_shapes_are_never_guessed(tmp_path):
    with error_about(BackboneError, "nobody/nothing"):
        main(["recipe=qwen25vl_3b", "model.path=nobody/nothing"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with error_about(BackboneError, tmp_path, "model_type"):
        main(["recipe=qwen25vl_3b", f"model.path={tmp_path}"])


def test_shapes_are_whole_where_zero3_shares_out_what_is_loaded(lively_path):
    config = load_recipe(["recipe=demo", f"model.path={lively_path}"]).model
    expected = {name: it.shape for name, it in outline(config)[0].named_parameters()}
    # A launch under ZeRO-3: transformers knows as long as somebody keeps this.
    launched = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert is_deepspeed_zero3_enabled()
    # The pre-flight outlines on the main process alone, so anything sent here would wait for ever.
    assert {name: it.shape for name, it in outline(config)[0].named_parameters()} == expected
    assert is_deepspeed_zero3_enabled(), "what is loaded later is shared out again"
    del launched


def test_a_local_config_is_used(lively_path, capsys):
    assert (
        main(
            [
                "recipe=demo",
                f"model.path={lively_path}",
                "num_gpus=2",
                "joint.batch_size=8",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert str(lively_path) in shown.splitlines()[0]
    assert TABLE.keys() >= {"Qwen/Qwen2.5-VL-3B-Instruct"}
    assert set(FAMILIES) == {PHOTOS, *PLUGINS, *(known["model_type"] for known in TABLE.values())}


def memory_of_all(pids) -> int:
    """Bytes of a machine's memory that these processes take; what they share counts once."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "prefetch_mb"), [(1, 1), (2, 60)])
def test_host_memory_and_descriptors_against_a_real_loader(
    tmp_path, tiny_path, picture, num_workers, prefetch_mb
):
    """Pictures of 700 x 700 pixels, all of one size as a plan has them, and training that stands still."""
    recipe_of = {
        "model": {"path": str(tiny_path), "dtype": "float32", "min_pixels": 490_000, "max_pixels": 490_000},
        "data": {"num_workers": num_workers, "prefetch_mb": prefetch_mb, "max_prompt_tokens": 4096, "max_negatives": 0},
        "joint": {"batch_size": 8, "sources": [{"path": str(tmp_path / "records.jsonl")}]},
        "stage": "joint",
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_of))
    recipe = load_recipe([f"recipe={tmp_path / 'recipe.yaml'}"])
    for number in range(4):
        picture(700, 700, number).save(tmp_path / f"{number}.jpg")
    lines = [
        {"id": f"r{n}", "group": "g", "source": "s", "split": "train", "query": {"text": "w", "images": [f"{n % 4}.jpg"]},
         "positives": [{"id": f"t{n}", "image": f"{(n + 1) % 4}.jpg"}]}
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    backbone = load_backbone(tiny_path, add_emb=True, min_pixels=490_000, max_pixels=490_000)
    shapes = shapes_of(backbone.model, recipe.model.max_pixels)
    load = plan.load_of(recipe, shapes, PlanOptions(num_gpus=1))
    batch_bytes, planned = (
        pixel_bytes(shapes, load),
        host(recipe, shapes, load, Setup(), PlanOptions(num_gpus=1, cpu=True)),
    )
    batches = StepBatches(
        [Source(RecordFile(tmp_path / "records.jsonl"), PromptBuilder(backbone.processor, "plain", 4096), recipe.data)],
        Mixture([8], [1.0], 8, seed=0), rank=0, world_size=1, need_oracle=False,
    )  # fmt: skip
    assert flatten(batches[0])[1].nbytes == batch_bytes

    mine, before = psutil.Process(), {child.pid for child in psutil.Process().children()}
    memory_before, files_before = memory_of_all([mine.pid]), mine.num_fds()
    loader = iter(Loader(batches, range(40), recipe.data))
    in_use = next(loader)
    workers = {child.pid for child in mine.children()} - before
    assert len(workers) == num_workers
    seen: list[int] = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:  # until everything that can wait does, for two seconds
        assert len(seen) < 1200
        time.sleep(0.1)
        seen.append(memory_of_all([mine.pid, *workers]) - memory_before >> 20)
    descriptors = mine.num_fds() - files_before
    loader.close()
    del in_use
    # Beside batches a worker takes what its fork does not share; 0.5 GiB are set aside for that.
    assert 0.8 * planned["of that, batches"] < seen[-1] << 20
    assert seen[-1] << 20 < 1.1 * planned["of that, batches"] + num_workers * 80 * 2**20
    assert seen[-1] << 20 < planned["memory"] - PROCESS_GIB * GIB
    assert num_workers <= descriptors <= num_workers * WORKER_DESCRIPTORS
    assert planned["shared memory"] == 0

"""Every key of a recipe does something: changed, it changes training, the logs, what is written, or it is refused.

Two keys once did nothing at all (``data.positives`` and ``data.sort_by_length`` were not copied to where batches are
made), and a test that passed one of them asserted nothing about it. So here each key has an entry that says what must
differ between two short runs, or between what two builders made; a key without an entry fails.
"""

import copy
import dataclasses
import functools
import gc
import hashlib
import json
import math
import multiprocessing.process
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from faults import error_about

from rge import check, train
from rge.checkpoints import checkpoint_manager, training_state
from rge.checkpoints.resume import changed_with, check_same_recipe
from rge.checkpoints.settings import CheckpointError
from rge.common.errors import RecipeError, UserError
from rge.config import Recipe, load_recipe, to_dict
from rge.data import loader
from rge.data.collate import Batch, make_batches
from rge.data.config import DataConfig
from rge.data.mixture import Draw
from rge.data.sources import RecordFile
from rge.distributed import launch
from rge.distributed.config import TrainConfig
from rge.identity.run_identity import flattened
from rge.losses import CONTRASTIVE_LOSSES
from rge.model import embedding_model, fused
from rge.model.config import ModelConfig
from rge.model.embedding_model import embedder_to_train
from rge.model.prompts import Prompt
from rge.objective import Objective
from rge.plan import costs
from rge.plan.options import PlanCommand
from rge.plan.report import reserved
from rge.rl.credit import Credit, Judged, Reinforcement
from rge.rollout import vllm_writer
from rge.rollout.generate import Rationale
from rge.rollout.micro_batches import Kept
from rge.rollout.writer import make_writer
from rge.validation import make_validation

WORDS = ["what", "egg", "key", "opens", "this", "turns", "into", "a", "locked", "chick", "over", "time"]
TIMES = {"elapsed_s", "wait_s", "rollout_s", "step_s", "val_s", "wait_share", "tokens_per_s"}


@dataclass(frozen=True)
class Changes:
    """Overrides of which the one before the last ``;`` is another value of the key, and what of a run must differ.

    Attributes:
        override: gives the key another value.
        what: of what `runs` observes.
        given: further overrides of both runs.
    """

    override: str
    what: str
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """An override that is refused, here or by the recipe, with a message."""

    override: str
    message: str
    given: tuple[str, ...] = ()


LORA = ("model.lora={rank: 2, alpha: 4}",)
TWO_SOURCES = ("joint.sources=[{path: HOME/records.jsonl}, {path: HOME/others.jsonl}]",)
TWO_COLD = ("cold_start.sources=[{path: HOME/records.jsonl}, {path: HOME/others.jsonl}]", "stage=cold_start")
HELD_OUT = (
    "validation.sources=[{path: HOME/held_out.jsonl}]",
    "validation.every=1",
    "validation.max_records=4",
)
BAD = ("joint.sources=[{path: HOME/bad.jsonl}]", "data.on_bad=skip", "data.max_bad_share=0.5")
RL = ("stage=rl",)
TWO_RL = ("rl.sources=[{path: HOME/records.jsonl}, {path: HOME/others.jsonl}]", *RL)
TWO_UPDATES = (*RL, "rl.num_iterations=2")
MINES = ("data.mine={every: 1, relative_margin: null}", "data.max_negatives=3")
JUDGED = ("joint.sources=[{path: HOME/scored.jsonl}]",)
BOARD = ("log.trackers=[tensorboard]",)


def stage_keys(name: str, given: tuple[str, ...], two: tuple[str, ...]) -> dict[str, Changes]:
    return {
        f"{name}.steps": Changes(f"{name}.steps=3", "metrics", given),
        f"{name}.epochs": Changes(f"{name}.epochs=0.5", "metrics", (*given, f"{name}.steps=null")),
        f"{name}.batch_size": Changes(f"{name}.batch_size=3", "metrics", given),
        f"{name}.lr": Changes(f"{name}.lr=0.1", "weights", given),
        f"{name}.warmup_steps": Changes(f"{name}.warmup_steps=2", "weights", given),
        f"{name}.schedule": Changes(f"{name}.schedule=constant", "weights", given),
        f"{name}.min_lr_ratio": Changes(f"{name}.min_lr_ratio=0.5", "weights", given),
        f"{name}.sources.path": Changes(f"{name}.sources=[{{path: HOME/others.jsonl}}]", "metrics", given),
        f"{name}.sources.weight": Changes(
            two[0].replace("s.jsonl},", "s.jsonl, weight: 9},"), "metrics", two
        ),
    }


ENTRIES: dict[str, Changes | Refused] = {
    "stage": Changes("stage=cold_start", "exports"),
    "init": Changes("init=LIVELY", "metrics"),
    "model.path": Changes("model.path=LIVELY", "metrics"),
    "model.dtype": Changes("model.dtype=bfloat16", "weights"),
    "model.attn_implementation": Changes("model.attn_implementation=eager", "weights"),
    "model.vision_attn_implementation": Changes("model.vision_attn_implementation=eager", "weights"),
    "model.gradient_checkpointing": Changes("model.gradient_checkpointing=true", "calls"),
    "model.freeze": Changes("model.freeze=[merger]", "weights"),
    "model.lora.rank": Changes("model.lora.rank=3", "weights", LORA),
    "model.lora.alpha": Changes("model.lora.alpha=99", "weights", LORA),
    "model.lora.dropout": Changes("model.lora.dropout=0.5", "weights", LORA),
    "model.lora.targets": Changes("model.lora.targets=[q_proj]", "weights", LORA),
    "model.lora.dora": Changes("model.lora.dora=true", "weights", LORA),
    "model.lora.rslora": Changes("model.lora.rslora=true", "weights", LORA),
    "model.lora.vision": Changes("model.lora.vision=true", "weights", LORA),
    "model.lora.modules_to_save": Changes("model.lora.modules_to_save=[merger]", "weights", LORA),
    "model.min_pixels": Changes("model.min_pixels=3136", "metrics"),
    "model.max_pixels": Changes("model.max_pixels=784", "metrics"),
    "data.profile": Changes("data.profile=rge", "metrics"),
    "data.max_prompt_tokens": Changes("data.max_prompt_tokens=64", "metrics"),
    "data.max_negatives": Changes("data.max_negatives=2", "metrics"),
    "data.mine.every": Changes("data.mine.every=2", "metrics", MINES),
    "data.mine.num": Changes("data.mine.num=2", "metrics", MINES),
    "data.mine.relative_margin": Changes("data.mine.relative_margin=0.5", "metrics", MINES),
    "data.mine.absolute_margin": Changes("data.mine.absolute_margin=0.5", "metrics", MINES),
    "data.mine.max_score": Changes("data.mine.max_score=0.0", "metrics", MINES),
    "data.mine.range": Changes("data.mine.range=[5, 20]", "metrics", MINES),
    "data.mine.choose": Changes("data.mine.choose=sampled", "metrics", MINES),
    "data.mine.seed": Changes("data.mine.seed=1", "metrics", (*MINES, "data.mine.choose=sampled")),
    "data.mine.pool": Changes("data.mine.pool=2", "metrics", MINES),
    "data.mine.query_mode": Changes("data.mine.query_mode=direct", "metrics", MINES),
    "data.positives": Changes("data.positives=all", "metrics"),
    "data.sort_by_length": Changes("data.sort_by_length=false", "weights", ("train.micro_batch_size=2",)),
    "data.num_workers": Changes("data.num_workers=1", "processes"),
    "data.on_bad": Refused("data.on_bad=stop", "picture HOME/gone.png does not exist", BAD),
    "data.max_bad_share": Refused("data.max_bad_share=0.01", "1 of 12 records of joint are bad, more than", BAD),
    "data.augment": Changes("data.augment=drawing", "metrics"),
    "loss.ratio": Changes("loss.ratio=none", "metrics"),
    "loss.alpha_lm": Changes("loss.alpha_lm=0.5", "metrics"),
    "loss.alpha_con": Changes("loss.alpha_con=0.5", "metrics"),
    "loss.terms": Changes("loss.terms={info_nce: 0.5}", "weights"),
    "loss.temperature": Changes("loss.temperature=1.0", "metrics"),
    "loss.anchor": Changes("loss.anchor=none", "metrics"),
    "loss.oracle_share": Changes("loss.oracle_share=0.9", "metrics", ("loss.anchor=mix",)),
    "loss.oracle_decay_steps": Changes("loss.oracle_decay_steps=1", "metrics", ("loss.anchor=mix",)),
    "loss.direct": Changes("loss.direct=1", "metrics"),
    "loss.budget": Changes("loss.budget=1", "metrics"),
    "loss.adaptive.share": Changes(
        "loss.adaptive.share=0.5", "metrics", ("loss.direct=1", "loss.adaptive.margin=-2")
    ),
    "loss.adaptive.margin": Changes(
        "loss.adaptive.margin=-2", "metrics", ("loss.direct=1", "loss.adaptive.share=0.5")
    ),
    "loss.adaptive.floor": Changes(
        "loss.adaptive.floor=0.5",
        "metrics",
        ("loss.direct=1", "loss.adaptive.share=0.5", "loss.adaptive.margin=2"),
    ),
    "loss.adaptive.warmup_steps": Changes(
        "loss.adaptive.warmup_steps=100",
        "metrics",
        ("loss.direct=1", "loss.adaptive.share=0.5", "loss.adaptive.margin=-2"),
    ),
    "loss.teacher_temperature": Changes(
        "loss.teacher_temperature=0.5", "metrics", ("loss.terms={info_nce: 1, kl: 1}", *JUDGED)
    ),
    "loss.teacher_scale": Changes("loss.teacher_scale=0.5", "metrics", ("loss.terms={margin_mse: 1}", *JUDGED)),
    "loss.matryoshka_dims": Changes("loss.matryoshka_dims=[16]", "metrics"),
    "loss.lm_on_candidates": Changes("loss.lm_on_candidates=false", "metrics"),
    "rollout.max_new_tokens": Changes("rollout.max_new_tokens=2", "metrics"),
    "rollout.temperature": Changes("rollout.temperature=1.0", "metrics"),
    "rollout.batch_size": Changes("rollout.batch_size=1", "calls"),
    "rollout.batch_tokens": Changes("rollout.batch_tokens=1", "calls"),
    "rollout.prompt_pass": Changes("rollout.prompt_pass=twice", "calls"),
    "rollout.num_rationales": Changes("rollout.num_rationales=2", "metrics", ("rollout.temperature=1.0",)),
    "rollout.reuse_steps": Changes("rollout.reuse_steps=9", "metrics", ("joint.steps=4",)),
    "rollout.direct_share": Changes("rollout.direct_share=0.5", "metrics"),
    **stage_keys("cold_start", ("stage=cold_start",), TWO_COLD),
    **stage_keys("joint", (), TWO_SOURCES),
    **stage_keys("rl", RL, TWO_RL),
    "rl.alpha_rl": Changes("rl.alpha_rl=0.3", "weights", RL),
    "rl.alpha_con": Changes("rl.alpha_con=0.1", "weights", RL),
    "rl.alpha_lm": Changes("rl.alpha_lm=0.9", "weights", RL),
    "rl.num_rationales": Changes("rl.num_rationales=2", "metrics", RL),
    "rl.temperature": Changes("rl.temperature=0.5", "metrics", RL),
    "rl.rewards.name": Changes("rl.rewards=[{name: rank}]", "metrics", RL),
    "rl.rewards.weight": Changes("rl.rewards=[{name: margin, weight: 9}]", "metrics", RL),
    "rl.rewards.options": Changes(
        "rl.rewards=[{name: grace, options: {temperature: 1.0}}]", "metrics", (*RL, "rl.rewards=[{name: grace}]")
    ),
    "rl.candidates": Changes("rl.candidates=pool:HOME/records.jsonl", "metrics", RL),
    "rl.pool_every": Changes("rl.pool_every=1", "metrics", (*RL, "rl.candidates=pool:HOME/records.jsonl")),
    "rl.loss_type": Changes("rl.loss_type=dr_grpo", "weights", (*RL, "rl.rewards=[{name: gain_over_direct}]")),
    "rl.scale_rewards": Changes("rl.scale_rewards=none", "weights", RL),
    "rl.std_floor": Changes("rl.std_floor=1.0", "weights", RL),
    "rl.epsilon": Changes("rl.epsilon=1e-5", "metrics", TWO_UPDATES),
    "rl.epsilon_high": Changes("rl.epsilon_high=1e-5", "metrics", TWO_UPDATES),
    "rl.beta": Changes("rl.beta=0.5", "metrics", RL),
    "rl.num_iterations": Changes("rl.num_iterations=2", "metrics", RL),
    "optim.name": Changes("optim.name=muon", "weights"),
    **{
        f"optim.lr_scale.{part}": Changes(f"optim.lr_scale.{part}=0.1", "weights")
        for part in ("vision", "merger", "text", "emb")
    },
    "optim.betas": Changes("optim.betas=[0.5, 0.6]", "weights"),
    "optim.eps": Changes("optim.eps=0.1", "weights"),
    "optim.weight_decay": Changes("optim.weight_decay=0.5", "weights"),
    "optim.max_grad_norm": Changes("optim.max_grad_norm=0.001", "weights", ("optim.eps=0.1",)),
    "train.seed": Changes("train.seed=1", "metrics"),
    "train.micro_batch_size": Changes("train.micro_batch_size=2", "calls"),
    "train.micro_batch_tokens": Changes("train.micro_batch_tokens=60", "calls"),
    "train.keep_activations": Changes(
        "train.keep_activations=none", "calls", ("train.micro_batch_size=2",)
    ),
    "train.save_every": Changes("train.save_every=1", "files"),
    "train.keep_last": Changes("train.keep_last=1", "files", ("joint.steps=3", "train.save_every=1")),
    "train.background_save": Changes("train.background_save=false", "saves", ("train.save_every=1",)),
    "train.log_every": Changes("train.log_every=3", "metrics", ("joint.steps=4",)),
    "train.num_processes": Refused("train.num_processes=2", "train.num_processes=2, but this run has 1"),
    "validation.sources.path": Changes("validation.sources=[{path: HOME/held_out.jsonl}]", "metrics"),
    "validation.every": Changes("validation.every=2", "metrics", HELD_OUT),
    "validation.max_records": Changes("validation.max_records=2", "metrics", HELD_OUT),
    "validation.patience": Changes("validation.patience=1", "metrics", (*HELD_OUT, "joint.steps=4", "joint.lr=0.001")),
    "validation.metric": Changes("validation.metric=loss", "exports", HELD_OUT),
    "validation.keep_best": Changes("validation.keep_best=0", "exports", HELD_OUT),
    "export.adapters_only": Changes("export.adapters_only=true", "weights", LORA),
    "log.trackers": Changes("log.trackers=[tensorboard]", "files"),
    "log.project": Changes("log.project=another", "files", BOARD),
    "rollout.backend": Refused("rollout.backend=vllm", "rollout.backend=vllm needs vLLM, which is not installed"),
}  # fmt: skip


def keys(cls: type = Recipe, prefix: str = "") -> list[str]:
    """Every key that holds a value, those of lists' entries included."""
    found = []
    for name, kind in get_type_hints(cls).items():
        inner = [it for it in (kind, *getattr(kind, "__args__", ())) if dataclasses.is_dataclass(it)]
        found += keys(inner[0], f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


# --------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What was seen of one.

    Attributes:
        recipe: its keys and values.
        metrics: lines of metrics.jsonl without times.
        weights: checksum of the final ones.
        exports: place, step and metric of every checkpoint.
        files: what is in the folder, checkpoints left out.
        calls: of any part of the model.
        processes: started.
        saves: whether each state was on the disk when training went on.
    """

    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    weights: str = ""
    exports: list[tuple[str, int, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    calls: int = 0
    processes: int = 0
    saves: list[bool] = field(default_factory=list)


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_path):
    """Records, and a recipe for one joint stage of two steps."""
    from PIL import Image, ImageDraw

    folder = tmp_path_factory.mktemp("keys")
    chance = random.Random(0)
    for number in range(4):
        image = Image.new("RGB", (30 + 9 * number, 40), "white")
        ImageDraw.Draw(image).ellipse((5, 5, 30, 30), fill=(60 * number, 90, 255 - 50 * number))
        image.save(folder / f"{number}.png")

    def record(name: str, number: int) -> dict:
        def target(kind: str, **more: str) -> dict:
            return {"id": f"{kind}{name}{number}", "text": " ".join(chance.choices(WORDS, k=3)), **more}

        rationales = [" ".join(chance.choices(WORDS, k=chance.randint(2, 9))) for _ in range(2)]
        text = " ".join(chance.choices(WORDS, k=chance.randint(4, 20)))
        return {
            "id": f"{name}{number}", "group": name, "source": "s", "split": "train",
            "query": {"text": text, "images": [f"{number % 4}.png"][: number % 2]},
            "positives": [target(kind, rationale=rationales.pop()) for kind in "pq"],
            "negatives": [target(kind) for kind in "mn"],
        }  # fmt: skip

    for name in ("records", "others", "held_out"):
        lines = [json.dumps(record(name, number)) + "\n" for number in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    scored = [json.loads(line) for line in lines]
    for row in scored:
        for place, target in enumerate([*row["positives"], *row["negatives"]]):
            target["score"] = 0.9 - 0.2 * place
    (folder / "scored.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in scored))
    broken = record("broken", 1) | {"query": {"images": ["gone.png"]}}
    (folder / "bad.jsonl").write_text("".join([json.dumps(broken) + "\n", *lines[1:]]))
    stage = {
        "steps": 2,
        "batch_size": 4,
        "lr": 3e-3,
        "sources": [{"path": str(folder / "records.jsonl")}],
    }
    recipe = {
        "model": {
            "path": str(tiny_path), "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784,
            "max_pixels": 3136,
        },
        "data": {"profile": "plain", "num_workers": 0},
        "rollout": {"max_new_tokens": 4},
        "stage": "joint",
        "cold_start": stage,
        "joint": stage,
        "rl": {"steps": 2, "batch_size": 4, "lr": 3e-3, "num_rationales": 3},
        "train": {"micro_batch_size": 4, "log_every": 1},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def arguments(home, lively_path):
    """Overrides as arguments, with their places filled in."""

    def fill(*overrides: str) -> list[str]:
        filled = [it.replace("HOME", str(home)).replace("LIVELY", str(lively_path)) for it in overrides]
        return [f"recipe={home / 'tiny.yaml'}", *filled]

    return fill


@pytest.fixture(scope="module")
def runs(home, arguments):
    """What a run with these overrides shows; a run of several entries is made once.

    The program is the real one. What would only take time is left out: reading the same weights again, counting the plan's
    operations for the same config again, and writing checkpoints, of which is kept what was to be written.
    """
    patch = pytest.MonkeyPatch()
    read = functools.cache(lambda path, **given: embedder_load(path, **given))
    embedder_load = embedding_model.load_backbone
    patch.setattr(embedding_model, "load_backbone", lambda path, **given: copy.deepcopy(read(path, **given)))
    counted, count = {}, costs._count

    def count_once(model, num_pixels):
        key = model.config.to_json_string(use_diff=False), num_pixels
        return counted[key] if key in counted else counted.setdefault(key, count(model, num_pixels))

    patch.setattr(costs, "_count", count_once)
    now = Run()

    def export(embedder, path, settings, state_dict=None):
        weights = embedder.model.state_dict() if state_dict is None else state_dict
        digest = hashlib.sha256()
        for value in weights.values():
            digest.update(str(value.dtype).encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        now.weights = digest.hexdigest()
        metric = settings.validation and settings.validation.metric
        now.exports.append(("/".join(path.parts[-2:]), settings.step, metric))

    def counted_start(process):
        now.processes += 1
        return real_start(process)

    def save(states, *given):
        real_save(states, *given)
        now.saves.append(states._thread is None)

    def call(*_):
        now.calls += 1

    real_start, real_save = multiprocessing.process.BaseProcess.start, training_state.States.save
    patch.setattr(checkpoint_manager, "export", export)
    patch.setattr(multiprocessing.process.BaseProcess, "start", counted_start)
    patch.setattr(training_state.States, "save", save)
    gc.freeze()  # a run ends with a full collection, which would go through everything that pytest holds

    @functools.cache
    def run(*overrides: str) -> Run:
        nonlocal now
        now = Run()
        out = home / "runs" / str(len(list((home / "runs").glob("*"))))
        counting = torch.nn.modules.module.register_module_forward_hook(call)
        try:
            recipe = load_recipe([*arguments(*overrides), f"out={out}"])
            patch.setattr(train, "load_recipe", lambda _: recipe)
            now.recipe = flattened(to_dict(recipe))
            AcceleratorState._reset_state(True)  # it remembers the first run's precision
            train.main([])
        finally:
            counting.remove()
        for path in sorted(out.rglob("*")):
            if path.name == "metrics.jsonl":
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                now.metrics += [
                    {name: value for name, value in line.items() if name not in TIMES} for line in lines
                ]
            now.files.append(str(path.relative_to(out)).split("events.out")[0].split("/1")[0])
        return now

    yield run
    patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, entry in ENTRIES.items() if isinstance(entry, Changes)])
def test_another_value_makes_another_run(key, runs):
    entry = ENTRIES[key]
    assert isinstance(entry, Changes)
    one, other = runs(*entry.given), runs(*entry.given, entry.override)
    names = one.recipe.keys() | other.recipe.keys()
    changed = [name for name in names if one.recipe.get(name) != other.recipe.get(name)]
    assert [name for name in changed if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")], (
        changed
    )
    assert getattr(one, entry.what) != getattr(other, entry.what)


@pytest.mark.slow
def test_easy_queries_need_no_rollout(runs):
    adaptive = ("loss.direct=1", "loss.adaptive.share=0.5", "loss.adaptive.margin=-2")
    assert [line["easy_rate"] for line in runs("loss.anchor=oracle", *adaptive).metrics] == [0.5, 0.5]


@pytest.mark.slow
def test_the_same_values_make_the_same_run(runs):
    """What differs above differs by the key, and not by chance."""
    runs()
    one, again = runs("log.project=rge"), runs("train.seed=0")
    for name in ("metrics", "weights", "exports", "files", "calls", "processes", "saves"):
        assert getattr(one, name) == getattr(again, name), name
    for given in ((*HELD_OUT, *BOARD, "train.save_every=1"),):
        one, again = runs(*given), runs(*given, "train.seed=0")
        for name in ("metrics", "weights", "exports", "files", "calls", "saves"):
            assert getattr(one, name) == getattr(again, name), name


@pytest.mark.parametrize("key", [key for key, entry in ENTRIES.items() if isinstance(entry, Refused)])
def test_another_value_is_refused(key, arguments, home):
    entry = ENTRIES[key]
    accelerator = Accelerator(cpu=True)
    assert check.examine(load_recipe(arguments(*entry.given)), accelerator)[0] == []
    [problem] = check.examine(load_recipe(arguments(*entry.given, entry.override)), accelerator)[0]
    assert entry.message.replace("HOME", str(home)) in problem


# ------------------------------------------------------------------------- what two builders make of them


def test_recipe_names_the_run(home):
    text = (home / "tiny.yaml").read_text()
    (home / "other.yaml").write_text(text)
    assert [load_recipe([f"recipe={home / name}.yaml"]).out for name in ("tiny", "other")] == [
        "runs/tiny",
        "runs/other",
    ]


def test_out_is_where_everything_goes(home, runs):
    runs()
    assert (home / "runs/0/joint/metrics.jsonl").is_file()


def test_revision_chooses_among_a_hubs_commits(tmp_path, tiny_path, lively_path, monkeypatch):
    cache = tmp_path / "models--nobody--tiny"
    for name, commit, source in (("main", "a" * 40, tiny_path), ("v1", "b" * 40, lively_path)):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
        for path in Path(source).iterdir():
            (cache / "snapshots" / commit / path.name).symlink_to(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = ModelConfig(path="nobody/tiny", min_pixels=784, max_pixels=3136)
    newest, first = (
        embedder_to_train("nobody/tiny", dataclasses.replace(config, revision=name)) for name in (None, "v1")
    )
    one, other = (it.model.get_input_embeddings().weight[:9] for it in (newest, first))
    assert not torch.equal(one, other)


def test_deterministic_is_torchs(arguments, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "unset")  # to be restored
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    try:
        for value in ("false", "true"):
            launch.make_accelerator(load_recipe(arguments(f"train.deterministic={value}")).train)
            assert torch.are_deterministic_algorithms_enabled() == (value == "true")
            # Without it, every product on a GPU is an error in torch 2.8.
            assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (value == "true")
    finally:
        torch.use_deterministic_algorithms(False)


def test_vllm_memory_is_the_engines_and_the_plans(arguments, lively, monkeypatch):
    given = []
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: name)
    monkeypatch.setattr(
        vllm_writer.VllmWriter, "in_training", lambda *_, memory, **more: given.append(memory)
    )
    options = PlanCommand(recipe="tiny")
    planned = []
    for share in (0.2, 0.4):
        recipe = load_recipe(arguments("rollout.backend=vllm", f"rollout.vllm_memory={share}"))
        make_writer(lively, lively, recipe, recipe.joint, Accelerator(cpu=True), Kept("none", "auto"))
        planned.append(reserved(recipe, options))
    assert given == [0.2, 0.4]
    assert planned[0] < planned[1]


def test_vllm_sleep_is_the_engines_and_the_plans(arguments, lively, monkeypatch):
    given = []
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: name)
    monkeypatch.setattr(
        vllm_writer, "check_possible", lambda sleeps, device: None
    )  # this device has no memory of its own
    monkeypatch.setattr(vllm_writer.VllmWriter, "in_training", lambda *_, sleep, **more: given.append(sleep))
    options = PlanCommand(recipe="tiny")
    planned = []
    for sleep in (False, True):
        recipe = load_recipe(arguments("rollout.backend=vllm", f"rollout.vllm_sleep={sleep}"))
        make_writer(lively, lively, recipe, recipe.joint, Accelerator(cpu=True), Kept("none", "auto"))
        planned.append(reserved(recipe, options))
    assert given == [False, True]
    assert planned[1] < planned[0]


def test_back_end_is_the_least_that_is_shared_out(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ddp = SimpleNamespace(num_processes=2, distributed_type=DistributedType.MULTI_GPU)
    launch.check_launch(ddp, TrainConfig(back_end="ddp"))
    with error_about(UserError, "train.back_end", "ddp"):
        launch.check_launch(ddp, TrainConfig(back_end="zero2"))


def test_max_rationale_tokens_bounds_what_is_trained_on(arguments):
    recipe = load_recipe(arguments("data.max_rationale_tokens=1"))
    problems = check.examine(recipe, Accelerator(cpu=True))[0]
    (problem,) = problems
    assert "more than data.max_rationale_tokens=1; shorten it" in problem
    assert "11 more" in problem


def test_skip_nonfinite_is_how_many_steps_in_a_row_may_fail(arguments, monkeypatch, tmp_path):
    failed = []

    def fail(*_):
        failed.append(1)
        raise FloatingPointError("the norm of its gradient is nan")

    monkeypatch.setattr(train, "load_recipe", load_recipe)  # which `runs` has replaced
    monkeypatch.setattr(train.dist, "optimizer_step", fail)
    for allowed, said in (
        (0, "the same command with optim.skip_nonfinite=1"),
        (1, "left out already .optim.skip_nonfinite=1"),
    ):
        failed.clear()
        with pytest.raises(FloatingPointError, match=f"joint has diverged.*{said}"):
            train.main(arguments(f"optim.skip_nonfinite={allowed}", f"out={tmp_path}"))
        assert len(failed) == allowed + 1


def test_silence_is_how_long_a_process_may_be_frozen(arguments, monkeypatch):
    given = []
    monkeypatch.setattr(train, "load_recipe", load_recipe)  # which `runs` has replaced
    monkeypatch.setattr(train, "watch_other_ranks", lambda silence_s: given.append(silence_s) or 1 / 0)
    for words in ((), ("train.silence_s=300",)):
        with pytest.raises(ZeroDivisionError):
            train.main(arguments(*words))
    assert given == [45, 300]


def test_plugins_are_imported(home, arguments, monkeypatch):
    monkeypatch.chdir(home)
    (home / "my_losses.py").write_text(
        "from rge.losses import info_nce, register_loss\nregister_loss('mine')(info_nce)\n"
    )
    mine = ("loss.terms={mine: 1}",)
    [problem] = check.examine(load_recipe(arguments(*mine)), Accelerator(cpu=True))[0]
    assert "contrastive loss must be one of info_nce, kl, margin_mse, got 'mine'" in problem
    assert check.examine(load_recipe(arguments(*mine, "plugins=[my_losses]")), Accelerator(cpu=True))[0] == []
    with error_about(UserError, "plugins"):
        load_recipe(arguments("plugins=[no_such_module]"))
    del CONTRASTIVE_LOSSES._entries["mine"]


def test_prefetch_mb_bounds_what_waits(monkeypatch):
    grid = torch.tensor([[1, 10, 20]])
    prompt = Prompt(
        "q",
        torch.arange(3),
        torch.zeros(3),
        torch.zeros(3, 3),
        torch.zeros(200, 3, 28, 28, dtype=torch.uint8),
        grid,
    )
    batch = Batch(["r"], [prompt], [[1]], [], [], [], [], [[1]], [1])  # 0.45 MiB
    queues = []

    class Seen(loader._Queue):
        def __init__(self, *given):
            super().__init__(*given)
            queues.append(self)

    class Batches(list):
        readers = ()

    monkeypatch.setattr(loader, "_Queue", Seen)
    for limit_mb, number in ((1, 2), (2, 4)):
        batches = iter(
            loader.Loader(Batches([batch] * 12), range(12), DataConfig(num_workers=1, prefetch_mb=limit_mb))
        )
        next(batches)
        deadline = time.monotonic() + 60
        while len(queues[-1].waiting) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for one too many
        assert len(queues[-1].waiting) == number
        batches.close()


def test_cuda_graphs_are_the_embedders_to_capture(tiny_path):
    """What a GPU does with it is tested where there is one (`rge.rollout.generate`)."""
    config = ModelConfig(path=str(tiny_path), min_pixels=784, max_pixels=3136)
    for value in (True, False):
        assert (
            embedder_to_train(str(tiny_path), dataclasses.replace(config, cuda_graphs=value)).cuda_graphs
            == value
        )


def test_fused_kernels_are_the_layers(tiny_path, tmp_path, monkeypatch):
    """What a GPU does with them: tests/rge/model/test_fused.py."""
    path = shutil.copytree(tiny_path, tmp_path / "model")  # the fixtures of this module read another one once
    monkeypatch.setattr(fused, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ModelConfig(path=str(path), min_pixels=784, max_pixels=3136)
    for value in ("auto", "liger", "none"):
        embedder = embedder_to_train(str(path), dataclasses.replace(config, fused_kernels=value))
        kinds = {type(module) for module in embedder.modules()}
        assert any(issubclass(kind, fused._Norm) for kind in kinds) == (value != "none")
        flags = [module.fused for module in embedder.modules() if hasattr(module, "fused")]
        assert set(flags) == {value != "none"}


def credit_of(recipe: Recipe, embedder: Any, home: Path) -> Credit:
    """Of one query and two rationales of one word, one liked and one not, that vLLM says it wrote otherwise."""
    prompt = Prompt("q", torch.arange(3), torch.zeros(3), torch.zeros(3, 3), None, None)
    batch = Batch(["r"], [prompt], [[1]], [], [], [0], [[]], [[1]], [1])
    rationales = [Rationale((token,), False, None, 0.0, log_probs=(-1.0, -6.0)) for token in (5, 6)]
    credit = Reinforcement(recipe, embedder, None, home).begin(batch, rationales, measure=False)
    # As after its rewards: two rationales of two tokens, the word and `<emb>`.
    credit.judged = Judged(torch.tensor([1.0, -1.0]), torch.ones(4, dtype=torch.bool), 2, 4, 4)
    return credit


def test_vllm_importance_sampling_weighs_what_was_sampled(arguments, lively, home):
    read = SimpleNamespace(log_prob_L=torch.tensor([-1.5, -4.0, -1.0, -6.0]), entropy_L=torch.zeros(4))
    losses = []
    for changes in (
        (),
        ("rl.vllm_importance_sampling_correction=false",),
        ("rl.vllm_importance_sampling_clip_max=9",),
    ):
        recipe = load_recipe(arguments(*RL, "rollout.backend=vllm", *changes))
        losses.append(float(credit_of(recipe, lively, home).loss(read, slice(0, 2))))
    # Of the whole rationale e^1.5 > 3: left out; whole; e^1.5 twice.
    liked = [0.0, 2.0, 2 * math.exp(1.5)]
    disliked = [2.0, 2.0, 2.0]
    expected = [(right - left) / 4 for left, right in zip(liked, disliked, strict=True)]
    assert losses == pytest.approx(expected, abs=1e-6)


def test_patience_is_how_long_nothing_may_differ(arguments, lively, home):
    report = {"groups_that_differ": 0.0, "unscored_groups": 0.0, "entropy": 0.0, "forced_rate": 0.0}
    for steps in (1, 3):
        stage = Reinforcement(load_recipe(arguments(*RL, f"rl.patience={steps}")), lively, None, home)
        for _ in range(steps - 1):
            stage.after_step(report)
        with error_about(UserError, "rl"):
            stage.after_step(report)


WAYS = {
    "dataset": ("{dataset: HOME/named/one}", "{dataset: HOME/named/two}"),
    "subset": ("{dataset: HOME/named, subset: one}", "{dataset: HOME/named, subset: two}"),
    "split": ("{dataset: HOME/named, subset: one}", "{dataset: HOME/named, subset: one, split: test}"),
    "revision": ("{dataset: nobody/here}", "{dataset: nobody/here, revision: v2}"),
    "columns": ("{dataset: HOME/named/one}", "{dataset: HOME/named/one, columns: {query.text: other}}"),
    "streaming": ("{dataset: HOME/named/one}", "{dataset: HOME/named/one, streaming: true}"),
    "quoting": ("{dataset: HOME/named/marks.csv}", "{dataset: HOME/named/marks.csv, quoting: none}"),
    "type": ("{type: numbers}", "{type: letters}"),
    "options": ("{type: numbers}", "{type: numbers, options: {first: 7}}"),
}
"""Two values of each key that a source has beside `path` and `weight`, for sources and for validation."""
SHUFFLED = {
    "shuffle_buffer": ("{dataset: HOME/named/one, streaming: true}", "{dataset: HOME/named/one, streaming: true, shuffle_buffer: 2}")
}  # fmt: skip
"""The same for sources alone."""
SOURCE_KEYS = {
    **{f"{name}.sources.{key}": ways for name in ("cold_start", "joint", "rl") for key, ways in (WAYS | SHUFFLED).items()},
    **{f"validation.sources.{key}": ways for key, ways in WAYS.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def named(home):
    """Data sets that differ in what a source can ask for."""
    from rge.data.readers import DATA_SOURCES, register_data_source

    def row(text: str) -> dict:
        return {
            "query": {"text": text},
            "positives": [{"text": "y", "rationale": "z"}],
            "other": f"other {text}",
        }

    (home / "named").mkdir()
    (home / "named" / "marks.csv").write_text('query.text,positives.text,positives.rationale\n"x",y,z\n')
    configs = []
    for name in ("one", "two"):
        (home / "named" / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = [json.dumps(row(f"{name} {split} {number}")) + "\n" for number in range(6)]
            (home / "named" / name / f"{split}.jsonl").write_text("".join(lines))
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in ("train", "test")]
        configs.append({"config_name": name, "data_files": files})
    (home / "named" / "README.md").write_text("---\n" + yaml.safe_dump({"configs": configs}) + "---\n")

    def source(kind: str):
        def rows(first: int = 0) -> list[dict]:
            return [{key: value for key, value in row(f"{kind} {first}").items() if key != "other"}]

        return register_data_source(kind)(rows)

    source("numbers")
    source("letters")
    yield
    DATA_SOURCES._entries.clear()


@pytest.mark.parametrize("key", SOURCE_KEYS)
def test_a_source_is_what_each_of_its_keys_says(key, arguments, named, monkeypatch):
    import datasets

    real = datasets.load_dataset

    def load(path, *given, revision=None, **more):
        if path == "nobody/here":
            raise ConnectionError(f"no revision {revision}")
        return real(path, *given, revision=revision, **more)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    stage = key.split(".")[0]

    def opened(source: str) -> list[str]:
        if stage == "validation":
            words = [f"validation.sources=[{source}]"]
        else:
            words = [f"stage={stage}", f"{stage}.sources=[{source}]"]
        recipe = load_recipe(arguments(*words))
        run = check.Preflight(recipe, Accelerator(cpu=True))
        run.open_sources(check.wanted_sources(recipe, recipe.stages()))
        wanted = getattr(recipe, stage).sources[0]
        if run.problems:
            return run.problems
        records = run.found.records[wanted.key]
        shown = records.reader() if records.size is None else records
        rows = type(records.opened[0]).__name__ if hasattr(records, "opened") else ""
        return [type(records).__name__, rows, *(shown[index].query.text for index in range(min(records.size or 6, 6)))]  # fmt: skip

    one, other = map(opened, SOURCE_KEYS[key])
    assert one != other
    assert one == opened(SOURCE_KEYS[key][0])


OWN_KEYS = {
    "name": "name: given",
    "profile": "profile: rge",
    "instruction": "instruction: find it",
    "min_pixels": "min_pixels: 3000",
    "max_pixels": "max_pixels: 784",
    "max_prompt_tokens": "max_prompt_tokens: 64",
}
STAGES = ("cold_start", "joint", "rl")
VIDEO_KEYS = {"fps": 0.5, "max_frames": 2, "max_pixels": 784, "total_pixels": 4704}
"""Other values, each of which must change what is shown of a clip of six frames, a second apart."""
OWN_KEYS_OF_STAGES = {
    **{
        f"{stage}.sources.{key}": value
        for stage in (*STAGES, "validation")
        for key, value in OWN_KEYS.items()
    },
    **{f"{stage}.sources.max_negatives": "max_negatives: 2" for stage in STAGES},
    **{f"{stage}.sources.positives": "positives: all" for stage in STAGES},
    **{f"{stage}.sources.batch": "batch: own" for stage in STAGES},
    **{f"{stage}.sub_batches": "sub_batches=2" for stage in STAGES},
    **{f"{stage}.compare_across": "compare_across=true" for stage in STAGES},
}


@pytest.mark.parametrize("key", OWN_KEYS_OF_STAGES)
def test_a_source_is_trained_on_as_each_of_its_keys_says(key, arguments, home, embedder):
    stage, *_, name = key.split(".")
    own = OWN_KEYS_OF_STAGES[key]

    def made(first: str, second: str = "", *more: str) -> list[Any]:
        paths = [home / f"{file}.jsonl" for file in ("records", "others")]
        sources = ", ".join(
            f"{{path: {path}{words}}}" for path, words in zip(paths, (first, second), strict=True)
        )
        recipe = load_recipe(arguments(f"{stage}.sources=[{sources}]", *more))
        records = {str(path): RecordFile(path) for path in paths}
        if stage == "validation":
            collator = make_validation(
                recipe, Objective.of(recipe, "joint"), embedder.processor, records
            ).collator
            found: list[Any] = [collator.names]
            drawn = [collator.collate([Draw(number, row, 0) for row in range(12) for number in range(2)])]
        else:
            batches = make_batches(recipe, getattr(recipe, stage), embedder.processor, records)
            found, drawn = [batches.coverage(1)], [batches[step] for step in range(4)]
        for batch in drawn:
            prompts = [*batch.queries, *batch.candidates]
            pixels = [None if one.pixels is None else one.pixels.numpy().tobytes() for one in prompts]
            ids = [one.input_ids.tolist() for one in prompts]
            found.append(
                [batch.record_ids, ids, pixels, batch.negatives, batch.groups, batch.candidate_groups]
            )
        return found

    if name == "sub_batches":
        assert made(", batch: own") != made(", batch: own", "", f"{stage}.sub_batches=2")
    elif name == "compare_across":
        apart = ", batch: own", "", f"{stage}.sub_batches=2"
        assert made(*apart) != made(*apart, f"{stage}.compare_across=true")
    else:
        assert made("") != made(f", {own}")


@pytest.mark.parametrize("where", ["data", "joint.sources"])
@pytest.mark.parametrize("key", VIDEO_KEYS)
def test_each_key_of_a_rule_for_videos_changes_what_is_shown_of_a_clip(
    key, where, arguments, tmp_path, embedder
):
    from PIL import Image

    frames = [f"{number}.png" for number in range(6)]
    for number, name in enumerate(frames):
        Image.new("RGB", (112, 56), (40 * number, 90, 120)).save(tmp_path / name)
    line = {
        "id": "a", "group": "a", "source": "s", "split": "train", "positives": [{"id": "p", "text": "a key"}],
        "query": {"content": [{"video": frames, "fps": 1.0}, {"text": "what is this"}]},
    }  # fmt: skip
    path = tmp_path / "clips.jsonl"
    path.write_text(json.dumps(line) + "\n")

    def shown(changed: str = "") -> list[Any]:
        own = f", video: {{{changed}}}" if changed and where != "data" else ""
        more = [f"data.video.{changed.replace(': ', '=')}"] if changed and where == "data" else []
        recipe = load_recipe(arguments(f"joint.sources=[{{path: {path}{own}}}]", "joint.batch_size=1", *more))
        batches = make_batches(
            recipe, recipe.joint, embedder.processor, {str(path): RecordFile(path)}, need_oracle=False
        )
        (prompt,) = batches[0].queries
        return [prompt.image_grid.tolist(), prompt.pixels.numpy().tobytes()]

    assert shown() != shown(f"{key}: {VIDEO_KEYS[key]}")


def test_best_by_names_the_source_whose_figure_counts(arguments):
    manager = checkpoint_manager.CheckpointManager.__new__(checkpoint_manager.CheckpointManager)
    manager.metric, values = "val_loss", []
    for name in ("null", "two"):
        sources = "validation.sources=[{path: HOME/records.jsonl}, {path: HOME/others.jsonl, name: two}]"
        manager.recipe = load_recipe(arguments(sources, f"validation.best_by={name}"))
        values.append(
            manager._value({"val_loss": 2.0, "val_loss_by_source": {"records.jsonl": 3.0, "two": 1.0}})
        )
    assert values == [2.0, 1.0]


def test_resume_with_allows_what_it_names(arguments, tmp_path):
    before = to_dict(load_recipe(arguments()))
    later = arguments("joint.lr=1e-4", "joint.steps=9")
    with error_about(CheckpointError, "joint.steps"):
        check_same_recipe(before, load_recipe([*later, "resume_with=[joint.lr]"]), "joint", tmp_path)
    recipe = load_recipe([*later, "resume_with=[joint.lr,joint.steps]"])
    assert check_same_recipe(before, recipe, "joint", tmp_path) == []
    assert changed_with(before, recipe, "joint") == {"joint.lr": (3e-3, 1e-4), "joint.steps": (2, 9)}
    assert changed_with(to_dict(recipe), recipe, "joint") == {}
    with error_about(RecipeError, "resume_with"):
        load_recipe(arguments("resume_with=[data.profile]"))


ELSEWHERE = {
    "resume_with": test_resume_with_allows_what_it_names,
    "validation.best_by": test_best_by_names_the_source_whose_figure_counts,
    **dict.fromkeys(OWN_KEYS_OF_STAGES, test_a_source_is_trained_on_as_each_of_its_keys_says),
    **{
        f"{where}.video.{key}": test_each_key_of_a_rule_for_videos_changes_what_is_shown_of_a_clip
        for where in ("data", *(f"{stage}.sources" for stage in (*STAGES, "validation")))
        for key in VIDEO_KEYS
    },
    **dict.fromkeys(SOURCE_KEYS, test_a_source_is_what_each_of_its_keys_says),
    "data.max_rationale_tokens": test_max_rationale_tokens_bounds_what_is_trained_on,
    "optim.skip_nonfinite": test_skip_nonfinite_is_how_many_steps_in_a_row_may_fail,
    "train.silence_s": test_silence_is_how_long_a_process_may_be_frozen,
    "train.back_end": test_back_end_is_the_least_that_is_shared_out,
    "plugins": test_plugins_are_imported,
    "data.prefetch_mb": test_prefetch_mb_bounds_what_waits,
    "recipe": test_recipe_names_the_run,
    "out": test_out_is_where_everything_goes,
    "model.revision": test_revision_chooses_among_a_hubs_commits,
    "model.cuda_graphs": test_cuda_graphs_are_the_embedders_to_capture,
    "model.fused_kernels": test_fused_kernels_are_the_layers,
    "rl.patience": test_patience_is_how_long_nothing_may_differ,
    **{
        f"rl.vllm_importance_sampling_{name}": test_vllm_importance_sampling_weighs_what_was_sampled
        for name in ("correction", "clip_max")
    },
    "rollout.vllm_memory": test_vllm_memory_is_the_engines_and_the_plans,
    "rollout.vllm_sleep": test_vllm_sleep_is_the_engines_and_the_plans,
    "train.deterministic": test_deterministic_is_torchs,
}
"""Keys that a run of two steps cannot show, and the test that does."""


def test_every_key_stands_here_and_every_entry_is_a_key():
    assert sorted([*ENTRIES, *ELSEWHERE]) == sorted(keys())


def test_a_key_without_an_effect_would_be_noticed(runs):
    """The instrument itself: two runs that differ in nothing that counts look alike."""
    assert runs().metrics == runs("train.save_every=77").metrics
    with error_about(RecipeError, ("unknown", "data.nothing")):
        runs("data.nothing=1")

"""`rollout.backend=vllm`: what vLLM is asked for and what is made of its answer; and, where it is installed, vLLM itself.

Without it, our own generation stands behind vLLM's interface, so that all but the engine is tested everywhere. In an environment
that has it: ``python -m pytest -m vllm tests/rge/rollout/test_vllm_writer.py``.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from family_models import build
from faults import error_about
from own_engine import OwnEngine
from paths import ROOT

from rge.config import Recipe
from rge.data.config import DataConfig
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.model.adapters import add_adapters, has_adapters, merge
from rge.model.backbone import BackboneError, load_backbone, vision_parameters, vision_prefixes
from rge.model.config import LoraConfig
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import Prompt, PromptBuilder
from rge.objective import Objective
from rge.optim.config import StageConfig
from rge.rl.reference import Reference
from rge.rollout import vllm_engine
from rge.rollout import vllm_writer as vllm_rollout
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import generate
from rge.rollout.micro_batches import Kept
from rge.rollout.vllm_writer import VllmWriter
from rge.rollout.writer import Rollout, Writer, make_writer, sample_seeds
from rge.step.training_step import TrainingStep

CAP = 12
NOTHING_KEPT = Kept("none", "auto")
OBJECTIVE = Objective(0.4, 0.6, 0.07)
SETTINGS = {"max_prompt_tokens": 512, "max_new_tokens": CAP, "batch_size": 3, "memory": 0.15}


def recipe_of(rollout: RolloutConfig, micro_batch_size: int = 2) -> Recipe:
    """Five queries a step, in micro batches."""
    return Recipe(
        recipe="tiny",
        rollout=rollout,
        data=DataConfig(max_prompt_tokens=512),
        joint=StageConfig(batch_size=5),
        train=TrainConfig(micro_batch_size=micro_batch_size),
    )


def written(rationales):
    return [(rationale.ids, rationale.forced) for rationale in rationales]


def adapt(embedder: EmbeddingModel, **changes) -> None:
    """Adapters that change what is written."""
    add_adapters(embedder.model, LoraConfig(rank=3, alpha=6.0, **changes), embedder.emb_id)
    move(embedder, [parameter for parameter in embedder.parameters() if parameter.requires_grad])


def move(embedder: EmbeddingModel, parameters=None) -> None:
    """What an optimizer step does, only further."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in embedder.parameters() if parameters is None else parameters:
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


# ------------------------------------------------------------------------------------------- without vLLM


@pytest.fixture
def prompts(lively, make_prompts):
    return make_prompts(PromptBuilder(lively.processor), 12)


@pytest.fixture
def behind(monkeypatch):
    """A rollout with `OwnEngine` where vLLM would be."""

    def make(embedder: EmbeddingModel, prompts: list[Prompt], extra: int = 0, **changes) -> VllmWriter:
        engine = OwnEngine(embedder, prompts, extra)
        monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: name)
        monkeypatch.setattr(vllm_engine, "TrainingEngine", lambda *args, **settings: engine)
        return VllmWriter.in_training(embedder, Accelerator(cpu=True), **{**SETTINGS, **changes})

    return make


@pytest.mark.slow
def test_what_is_asked_for_and_made_of_the_answer(lively, prompts, behind):
    vllm = behind(lively, prompts)
    ours = generate(lively, prompts, max_new_tokens=CAP, batch_size=12)
    found = vllm.generate(prompts)
    assert written(found) == written(ours)
    assert {rationale.forced for rationale in found} == {True, False}
    assert all(rationale.state_D is None for rationale in found)
    assert vllm.engine.num_synced == 1
    assert vllm.generate([]) == []
    seeds = [seed % 2**63 for row in range(12) for seed in sample_seeds(row, 3)]
    settings = {"temperature": 1.0, "seeds": seeds, "num_each": 3}
    sampled = generate(lively, prompts, max_new_tokens=CAP, batch_size=12, **settings)
    assert written(vllm.generate(prompts, **settings)) == written(sampled)
    assert len({rationale.ids for rationale in sampled}) > 30
    # What the sampler says of its tokens, `<emb>` included where it wrote one, comes along; greedy words need none.
    assert all(one.log_probs is None for one in found)
    for one in vllm.generate(prompts, **settings):
        assert len(one.log_probs) == len(one.ids) + (not one.forced)
        assert max(one.log_probs) < 0
    with pytest.raises(ValueError):
        vllm.generate(prompts, temperature=1.0, seeds=seeds)


@pytest.mark.parametrize("num_each", [1, 2])
def test_each_request_has_its_own_cap(lively, prompts, behind, num_each):
    vllm, caps = behind(lively, prompts), [0, 1, 2, 3, CAP, 0] * 2
    draw = {"temperature": 1.0, "seeds": range(12 * num_each), "num_each": num_each, "caps": caps}
    found = vllm.generate(prompts, **draw)
    ours = generate(lively, prompts, max_new_tokens=CAP, batch_size=12, **draw)
    assert [(*pair, one.direct) for pair, one in zip(written(found), found, strict=True)] == [
        (*pair, one.direct) for pair, one in zip(written(ours), ours, strict=True)
    ]
    vllm.engine.num_synced = 0
    assert all(one.direct for one in vllm.generate(prompts, caps=[0] * 12))
    assert vllm.engine.num_synced == 0


def test_a_prompt_that_vllm_reads_otherwise_is_an_error(lively, prompts, behind):
    with error_about(BackboneError, "item 'item0'"):
        behind(lively, prompts, extra=1).generate(prompts)


def test_a_frozen_tower_runs_once_for_vllm_and_the_step(lively, make_batch, behind, monkeypatch):
    """The writer's whole way with vLLM: same step as with our own rationales, and no second look at a picture."""
    batch = make_batch(PromptBuilder(lively.processor))
    for parameter in vision_parameters(lively.model):
        parameter.requires_grad_(False)
    behind(lively, batch.queries)
    settings = RolloutConfig(max_new_tokens=CAP, batch_size=3)
    accelerator = Accelerator(cpu=True)
    steps = []
    for backend in ("own", "vllm"):
        lively.pictures = None
        recipe = recipe_of(dataclasses.replace(settings, backend=backend))
        writer = make_writer(lively, lively, recipe, recipe.joint, accelerator, NOTHING_KEPT)
        rationales, encoded, *_ = writer(0, batch)
        assert encoded is None
        seen = []
        hook = lively.model.model.visual.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        lively.zero_grad(set_to_none=True)
        report = TrainingStep(lively, lively, OBJECTIVE, 2)(batch, Rollout(rationales))  # fmt: skip
        hook.remove()
        gradients = [each.grad.flatten() for each in lively.parameters() if each.grad is not None]
        steps.append((written(rationales), report, torch.cat(gradients), len(seen)))
    own, vllm = steps
    assert vllm[0] == own[0]
    assert vllm[1] == pytest.approx(own[1], rel=1e-5)
    assert float((vllm[2] - own[2]).norm()) < 1e-4 * float(own[2].norm())
    assert vllm[3] == own[3]


def test_a_batch_that_fits_one_chunk_is_not_encoded_by_us_first(lively, make_batch, behind):
    batch = make_batch(PromptBuilder(lively.processor))
    behind(lively, batch.queries)
    for backend, once in (("own", True), ("vllm", False)):
        recipe = recipe_of(RolloutConfig(max_new_tokens=CAP, backend=backend), micro_batch_size=5)
        writer = make_writer(lively, lively, recipe, recipe.joint, Accelerator(cpu=True), NOTHING_KEPT)
        assert writer.once == once


def test_reused_and_direct_queries_are_not_asked_for(lively, make_batch, behind):
    batch = make_batch(PromptBuilder(lively.processor))
    vllm = behind(lively, batch.queries)
    settings = RolloutConfig(max_new_tokens=CAP, batch_size=3, reuse_steps=1, backend="vllm")
    writer = Writer(
        lively, lively, settings, once=False, vllm=vllm, loss=LossConfig(), micro_batch_size=100, keep="none"
    )
    first, again = (written(writer(step, batch)[0]) for step in (0, 1))
    assert first == again
    assert vllm.engine.num_synced == 1


def test_errors_come_before_an_engine_is_made(lively, monkeypatch):
    accelerator = Accelerator(cpu=True)
    recipe = recipe_of(RolloutConfig(backend="vllm"))
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: None)
    with error_about(BackboneError, "rollout.backend", "package"):
        make_writer(lively, lively, recipe, recipe.joint, accelerator, NOTHING_KEPT)
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: name)
    monkeypatch.setattr(
        vllm_engine, "TrainingEngine", lambda *args, **settings: pytest.fail("made an engine")
    )
    lively.suppressed_ids = list(range(1025))
    with error_about(BackboneError, "rollout.backend", "tokens"):
        make_writer(lively, lively, recipe, recipe.joint, accelerator, NOTHING_KEPT)
    recipe = recipe_of(RolloutConfig(backend="vllm", vllm_sleep=True))
    with error_about(BackboneError, "rollout.vllm_sleep"):
        make_writer(lively, lively, recipe, recipe.joint, accelerator, NOTHING_KEPT)


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_sleeps_from_a_rollout_to_the_next(lively, monkeypatch, sleeps):
    """By a stand-in that remembers its calls, since vLLM sleeps on CUDA devices alone."""

    class Llm:
        def __init__(self):
            self.calls, self.llm_engine = [], self

        def __getattr__(self, name):
            return lambda *args, **more: self.calls.append(" ".join([name, *more.get("tags", [])]))

        def collective_rpc(self, method, kwargs=None):
            self.calls.append(method if isinstance(method, str) else "prepare")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = vllm_engine.TrainingEngine.__new__(vllm_engine.TrainingEngine)
    engine.llm, engine.model, engine.sleeps = Llm(), lively.model, sleeps
    engine.device, engine.has_tower = torch.device("cpu"), False
    engine.sync_weights()
    engine.write([{}], [{}])
    given = ["reload_weights", "prepare", "reset_prefix_cache", "reset_encoder_cache"]
    awake = [*given, "generate"]
    asleep = ["wake_up weights", *given, "wake_up kv_cache", "generate", "sleep"]
    assert engine.llm.calls == (asleep if sleeps else awake)


def test_why_vllm_does_not_start_is_said(lively, monkeypatch):
    def fail(*args, **settings):
        raise ValueError("Free memory is less than desired")

    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_engine, "TrainingEngine", fail)
    with error_about(BackboneError, "rollout.vllm_memory", "start"):
        VllmWriter.in_training(lively, Accelerator(cpu=True), **SETTINGS)


@pytest.mark.parametrize("lively_path", ["idefics3"], indirect=True)
def test_a_family_whose_pictures_vllm_lays_out_itself_is_refused(lively, monkeypatch):
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: name)
    with error_about(BackboneError, "pictures"):
        VllmWriter.in_training(lively, Accelerator(cpu=True), **SETTINGS)


@pytest.mark.parametrize("lively_path", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_features_are_those_of_each_prompt(lively, prompts):
    alone = [lively.picture_features([prompt])[0] for prompt in prompts]
    for prompt, one, among in zip(prompts, alone, lively.picture_features(prompts), strict=True):
        asked = VllmWriter(lively, None, CAP, 3)._request(prompt, one)
        if prompt.pixels is None:
            assert one is among is None
            assert asked == {"prompt_token_ids": prompt.input_ids.tolist()}
        else:
            torch.testing.assert_close(among, one, atol=1e-4, rtol=0)  # rounding, by kind of CPU
            assert len(one) == int(prompt.type_ids.sum()) > len(prompt.image_grid)
            assert not one.requires_grad


def test_merging_one_by_one_equals_merging_at_once(lively):
    plain = set(lively.model.state_dict())
    adapt(lively)
    assert has_adapters(lively.model)
    pairs = list(merge(lively.model))
    assert {name for name, _ in pairs} == plain
    assert len(pairs) == len(plain)
    at_once = dict(merge(lively.model))
    assert all(torch.equal(at_once[name], weight) for name, weight in pairs)
    tower = [name for name, _ in pairs if name.startswith(vision_prefixes(lively.model))]
    assert tower == [name for name, _ in pairs if "visual" in name]
    assert tower


# ------------------------------------------------------------------------------------------------ with vLLM

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def fitting_path(request, tmp_path_factory, enliven):
    """A checkpoint of a model that vLLM's CPU kernels can run, whose states and tokens vary."""
    path = tmp_path_factory.mktemp("vllm") / request.param
    build(request.param, path, head_size=32)
    backbone = load_backbone(path, add_emb=True)
    enliven(backbone.model, 1)
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[backbone.emb_id] *= 2.0
    backbone.model.save_pretrained(path)
    backbone.processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(fitting_path):
    """Some ten seconds to start, so one a family; it takes the weights of whatever model is put into it."""
    # On a CPU, the share of the memory is of all that the process has, other tests' and other engines' included.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return VllmWriter.in_training(
        EmbeddingModel(load_backbone(fitting_path)).eval(), Accelerator(cpu=True), **SETTINGS
    )


@pytest.fixture
def vllm(engine, fitting_path):
    """The engine with a fresh model in training."""
    engine.embedder = EmbeddingModel(load_backbone(fitting_path)).eval()
    engine.engine.model = engine.embedder.model
    return engine


@pytest.fixture
def its_prompts(vllm, make_prompts):
    return make_prompts(PromptBuilder(vllm.embedder.processor), 12)


def assert_same_as_ours(vllm: VllmWriter, prompts: list[Prompt]) -> list:
    """Greedy tokens and how they end; returns them."""
    ours = generate(vllm.embedder, prompts, max_new_tokens=CAP, batch_size=len(prompts))
    assert written(vllm.generate(prompts)) == written(ours)
    return written(ours)


@with_vllm
@pytest.mark.vllm
def test_vllm_writes_our_greedy_tokens_with_the_present_weights(vllm, its_prompts):
    first = assert_same_as_ours(vllm, its_prompts)
    assert {forced for _, forced in first} == {True, False}
    assert len({token for ids, _ in first for token in ids}) > 20
    assert assert_same_as_ours(vllm, its_prompts) == first  # features that come again
    move(vllm.embedder)  # the tower included: features come from it anew
    second = assert_same_as_ours(vllm, its_prompts)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > 6


@with_vllm
@pytest.mark.vllm
def test_vllm_gets_merged_adapters(vllm, its_prompts):
    plain = written(vllm.generate(its_prompts))
    adapt(vllm.embedder, dora=True, vision=True)
    assert assert_same_as_ours(vllm, its_prompts) != plain


@with_vllm
@pytest.mark.vllm
def test_a_row_that_vllm_samples_depends_on_its_seed_alone(vllm, its_prompts):
    seeds = [seed for row in range(12) for seed in sample_seeds(row, 2)]
    settings = {"temperature": 1.0, "num_each": 2}
    found = vllm.generate(its_prompts, seeds=seeds, **settings)
    assert len({rationale.ids for rationale in found}) > 20
    again = vllm.generate(its_prompts[::-1][:5], seeds=seeds[::-1][:10], temperature=1.0, num_each=2)
    assert written(again) == [
        one for row in range(11, 6, -1) for one in written(found)[2 * row : 2 * row + 2][::-1]
    ]
    other = vllm.generate(its_prompts, seeds=[seed + 1 for seed in seeds], **settings)
    assert sum(one.ids != two.ids for one, two in zip(found, other, strict=True)) > 20
    for rationale in found:
        assert not {*rationale.ids} & {*vllm.embedder.suppressed_ids, vllm.embedder.emb_id}


@with_vllm
@pytest.mark.vllm
def test_vllm_gives_the_log_probabilities_that_we_compute(vllm, its_prompts):
    """Of every token that it sampled, with special tokens barred and logits divided, by which RL weighs what it wrote."""
    seeds = list(range(2 * len(its_prompts)))
    found = vllm.generate(its_prompts, temperature=0.7, seeds=seeds, num_each=2)
    said = [each for one in found for each in one.log_probs]
    assert len(said) == sum(len(one.ids) + (not one.forced) for one in found)
    ours = Reference(vllm.embedder, 0.7, 4).log_probs(its_prompts, found)
    ends = torch.tensor([len(one.ids) + 1 for one in found]).cumsum(0) - 1
    chosen = torch.ones(len(ours), dtype=torch.bool)
    chosen[ends[torch.tensor([one.forced for one in found])]] = False  # an <emb> that nobody sampled
    torch.testing.assert_close(torch.tensor(said), ours[chosen].float(), atol=1e-4, rtol=0)
    assert ours[chosen].std() > 0.1


@pytest.fixture
def train(tmp_path, picture, fitting_path):
    """Metrics of a stage of six steps, trained with a back end."""
    lines = []
    for number in range(16):
        picture(40 + 5 * number, 80, number).save(tmp_path / f"{number}.png")
        lines.append(
            {
                "id": f"r{number}", "group": str(number), "source": "s", "split": "train",
                "query": {"text": f"What opens number {number}?", "images": [f"{number}.png"] * (number % 3)},
                "positives": [{"id": f"t{number}", "text": f"thing {number}", "rationale": f"a key for {number}"}],
                "negatives": [],
            }
        )  # fmt: skip
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = {"steps": 6, "batch_size": 6, "lr": 3e-3, "sources": [{"path": str(tmp_path / "records.jsonl")}]}
    recipe = {
        "model": {
            "path": str(fitting_path), "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784,
            "max_pixels": 3136,
        },
        "data": {"profile": "plain", "num_workers": 0, "max_prompt_tokens": 512},
        "rollout": {"max_new_tokens": CAP, "batch_size": 4, "vllm_memory": 0.15},
        "joint": stage, "rl": stage,
        # With seed 0 the two best tokens of a fifth step's rationale are 1e-4 apart, and weights of two runs that differ by
        # rounding choose differently; here the closest two are 1e-3 apart.
        "train": {"micro_batch_size": 4, "log_every": 1, "seed": 2},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))

    def run(stage: str, backend: str, *, sharded: bool = False) -> list[dict]:
        out = tmp_path / f"{backend}_{sharded}"
        settings = [
            f"recipe={tmp_path / 'tiny.yaml'}",
            f"out={out}",
            f"stage={stage}",
            f"rollout.backend={backend}",
        ]
        script = Path(vllm_rollout.__file__).parents[1] / "train.py"
        environment = os.environ | {
            "PYTHONSAFEPATH": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": str(script.parents[1]),
        }
        launch = []
        if sharded:
            settings += ["train.back_end=zero3", "train.num_processes=2"]
            launch = [
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(ROOT / "recipes/accelerate/cpu_zero.yaml"),
                "--zero_stage",
                "3",
            ]
        done = subprocess.run(
            [sys.executable, *launch, script, *settings],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [json.loads(line) for line in (out / stage / "metrics.jsonl").read_text().splitlines()]

    return run


@with_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("fitting_path", ["qwen2_5_vl"], indirect=True)
def test_training_with_vllm_takes_the_steps_of_our_own_rollout(train):
    """Greedy rationales are the same while the weights move, so every loss is; a stale weight would show in both."""
    found = {backend: train("joint", backend) for backend in ("own", "vllm")}
    assert len(found["own"]) == 6
    for own, vllm in zip(found["own"], found["vllm"], strict=True):
        for name in ("loss", "loss_lm", "loss_contrastive", "forced_rate", "rationale_tokens_mean"):
            assert vllm[name] == pytest.approx(own[name], rel=1e-4), (name, own, vllm)
    # What is written moves with the weights.
    assert len({line["rationale_tokens_mean"] for line in found["own"]}) > 3


@with_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("fitting_path", ["qwen2_5_vl"], indirect=True)
def test_training_with_vllm_on_shared_out_weights_takes_the_same_steps(train):
    found = [train("joint", "own"), train("joint", "vllm", sharded=True)]
    for own, vllm in zip(*found, strict=True):
        for name in ("loss", "loss_lm", "loss_contrastive", "forced_rate", "rationale_tokens_mean"):
            assert vllm[name] == pytest.approx(own[name], rel=1e-3), (name, own, vllm)


@with_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("fitting_path", ["qwen2_5_vl"], indirect=True)
def test_reinforcement_learning_with_vllm_finds_its_probabilities_to_be_ours(train):
    steps = train("rl", "vllm")
    assert len(steps) == 6
    assert all(line["sampling_ratio_mean"] == pytest.approx(1, abs=1e-3) for line in steps)
    assert all(line["sampling_corrected"] == 0 for line in steps)
    assert len({line["entropy"] for line in steps}) == 6

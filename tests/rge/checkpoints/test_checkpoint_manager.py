"""Checkpoints: complete or not there, the same after a reload, and never of another recipe."""

import json
import math
import shutil
from dataclasses import asdict

import pytest
import torch
from accelerate import Accelerator
from family_models import PHOTOS, every_family
from faults import error_about
from qwen_vl_utils import process_vision_info
from recorded import settings_of
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from rge.checkpoints.checkpoint_manager import CheckpointManager
from rge.checkpoints.description import instructions_of, model_card, prompts_of, trained_on
from rge.checkpoints.export import (
    checkpoint_hash,
    export,
)
from rge.checkpoints.resume import check_same_recipe, check_start, finished
from rge.checkpoints.settings import (
    CheckpointError,
    Instructions,
    Origin,
    Pixels,
    Source,
    TaskPrompts,
    TrainedStage,
    Validated,
    read_settings,
)
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import Recipe, load_recipe, to_dict
from rge.data.config import SourceConfig
from rge.embedder import Embedder
from rge.model.prompts import PromptBuilder
from rge.rollout.generate import generate


@pytest.fixture
def settings(lively):
    return settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip


@pytest.fixture
def items(picture, tmp_path):
    picture(50, 80).save(tmp_path / "egg.png")
    return [
        Item("1", content_of("what is this", (str(tmp_path / "egg.png"),))),
        Item("2", content_of("open a locked chick")),
        Item("3", content_of("key")),
    ]


@pytest.mark.parametrize(
    ("keep", "step", "loss", "left"),
    [
        (3, 9, 0.1, {2: 0.4, 6: 0.2, 9: 0.1}),
        (1, 9, 0.5, {6: 0.2}),  # resumed with a smaller keep_best
        (2, 6, 0.9, {2: 0.4, 4: 0.6}),  # after a kill measured again, on other processes: another figure
    ],
)
def test_only_the_best_checkpoints_are_left(tmp_path, monkeypatch, keep, step, loss, left):
    def kept(number: int, value: float) -> None:
        folder = tmp_path / "best" / f"step_{number:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        measured = Validated(metric="loss", sources=["held out"], figures={"val_loss": value})
        settings = settings_of(
            emb_id=1, profile="plain", max_prompt_tokens=9, max_new_tokens=1, reasons="query", stage="joint", step=number,
            validation=measured,
        )  # fmt: skip
        (folder / "rge.json").write_text(json.dumps(settings.content()))

    for number, value in ((2, 0.4), (4, 0.6), (6, 0.2)):
        kept(number, value)
    manager = CheckpointManager.__new__(CheckpointManager)
    manager.folder, manager.metric, manager.accelerator = tmp_path, "val_loss", Accelerator()
    manager.recipe = load_recipe(["recipe=demo", f"validation.keep_best={keep}"])
    monkeypatch.setattr(manager, "_measured_alike", lambda settings, path: True)
    monkeypatch.setattr(manager, "_export", lambda path, number: kept(number, loss))
    manager._keep_if_best(step, {"val_loss": loss})
    found = [json.loads(path.read_text()) for path in (tmp_path / "best").glob("*/rge.json")]
    assert {one["step"]: one["validation"]["figures"]["val_loss"] for one in found} == left


def test_the_best_may_be_chosen_by_one_source_and_a_stage_ends_when_nothing_gets_better():
    manager = CheckpointManager.__new__(CheckpointManager)
    manager.metric, manager.accelerator, manager.name, manager.num_steps = (
        "val_hit_at_1",
        Accelerator(),
        "joint",
        90,
    )
    sources = "validation.sources=[{path: a.jsonl}, {path: b.jsonl, name: b}]"
    measured = {10: (0.9, 0.1), 20: (0.2, 0.5), 30: (1.0, 0.4), 40: (1.0, 0.5), 50: (0.0, 0.6)}
    for best_by, patience, end in (
        ("b", 2, 40),
        ("b", 3, 90),
        ("null", 1, 20),
        ("null", 2, 90),
        ("null", 0, 90),
        ("a.jsonl", 2, 50),
    ):
        manager.recipe = load_recipe(
            ["recipe=demo", sources, f"validation.best_by={best_by}", f"validation.patience={patience}"]
        )
        manager._best, manager.num_steps = (math.inf, 0), 90
        for step, (one, other) in measured.items():
            if step < manager.num_steps:
                by_source = {"/x/a.jsonl": one, "b": other}
                figures = {"val_hit_at_1": (one + other) / 2, "val_hit_at_1_by_source": by_source}
                manager._stop_if_no_better(step, figures)
        assert manager.num_steps == end, (best_by, patience)


def test_a_best_checkpoint_that_was_measured_otherwise_is_replaced(tmp_path, monkeypatch):
    """Of an older version with `loss.anchor=oracle`, whose queries were embedded after the oracle's rationales."""
    folder = tmp_path / "best" / "step_00000002"
    folder.mkdir(parents=True)
    measured = Validated(metric="hit_at_1", sources=["held out"], figures={"val_hit_at_1": 1.0})
    settings = settings_of(
        emb_id=1, profile="plain", max_prompt_tokens=9, max_new_tokens=1, reasons="query", stage="joint", step=2,
        validation=measured,
    )  # fmt: skip
    (folder / "rge.json").write_text(json.dumps(settings.content()))
    manager = CheckpointManager.__new__(CheckpointManager)
    manager.folder, manager.metric, manager.accelerator = tmp_path, "val_hit_at_1", Accelerator()
    manager.recipe = load_recipe(["recipe=demo", "validation.keep_best=1"])
    monkeypatch.setattr(manager, "_measured_alike", lambda settings, path: True)
    exported = []
    monkeypatch.setattr(manager, "_export", lambda path, number: exported.append(number))
    manager._keep_if_best(4, {"val_hit_at_1": 0.5, "val_forced_rate": 0.0})
    assert exported == [4]
    assert not folder.exists()


# 2 kB stops a config or the weights, 150 kB lets those pass and stops rge.json's neighbours or nothing.
@pytest.mark.parametrize("limit", [0, 2_000, 50_000])
def test_a_full_disk_leaves_an_earlier_checkpoint(lively, settings, tmp_path, limit, files_of_at_most):
    final = tmp_path / "final"
    export(lively, final, settings)
    before = checkpoint_hash(final)
    with (
        files_of_at_most(limit),
        error_about(CheckpointError, final, "unwritten"),
    ):
        export(lively, final, settings.but(step=8))
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert checkpoint_hash(final) == before


@pytest.mark.slow
@every_family
def test_a_reloaded_checkpoint_gives_the_same_embeddings_bit_for_bit(lively, settings, items, tmp_path):
    export(lively, tmp_path / "one", settings)
    first = Embedder.from_pretrained(tmp_path / "one")
    export(first.model, tmp_path / "two", settings)
    second = Embedder.from_pretrained(tmp_path / "two")
    assert first.checkpoint_hash == second.checkpoint_hash
    prompts = [PromptBuilder(lively.processor).build(item, "query") for item in items]
    trained = generate(lively, prompts, max_new_tokens=12, batch_size=8)
    # Odd sizes leave the weights after them unaligned in the file, and products of such differ in the last bit.
    most = 1e-6 if lively.model.config.model_type in (PHOTOS, "internvl") else 0.0
    for encoder in (first, second):
        found = encoder.encode(items, side="query", mode="reasoning", batch_size=8)
        gap = torch.from_numpy(found.embeddings) - torch.stack([row.state_D for row in trained])
        assert gap.abs().max() <= most
        assert found.rationales == [encoder.builder.decode(row.ids) for row in trained]


def test_plain_transformers_loads_the_checkpoint(lively, settings, items, tmp_path, picture):
    """Only from_pretrained and public calls: prompt as text, `<emb>` appended, state at the last token.

    Pictures by qwen-vl-utils, as this family's model cards have it.
    """
    export(lively, tmp_path / "final", settings)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "final").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "final")
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    shown = {"type": "image", "image": picture(50, 80), "min_pixels": 784, "max_pixels": 7056}
    message = {"role": "user", "content": [shown, {"type": "text", "text": "\nwhat is this\n"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False) + "<emb>"
    inputs = processor(text=[text], images=process_vision_info([message])[0], return_tensors="pt")
    assert inputs["input_ids"][0, -1] == lively.emb_id
    with torch.no_grad():
        state = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
    found = Embedder.from_pretrained(tmp_path / "final").encode(items[:1], side="query", mode="direct")
    torch.testing.assert_close(torch.from_numpy(found.embeddings[0]), state / state.norm(), atol=1e-5, rtol=0)


def test_settings_hold_what_an_embedder_needs(lively, settings, tmp_path):
    export(lively, tmp_path / "final", settings)
    read = read_settings(tmp_path / "final").content()
    assert read == json.loads((tmp_path / "final/rge.json").read_text()) == settings.content()
    assert read["emb_id"] == lively.emb_id
    assert read["generation"] == {"max_new_tokens": 12, "temperature": 0.0, "stop": "<emb>"}
    assert read["pixels"] == {"min": 784, "max": 7056}
    assert (read["profile"], read["reasons"], read["stage"], read["step"]) == ("rge", "query", "joint", 7)


def test_the_hash_sees_weights_and_settings_and_nothing_else(lively, settings, tmp_path):
    export(lively, tmp_path / "a", settings)
    export(lively, tmp_path / "b", settings)
    (tmp_path / "b/notes.md").write_text("not part of it")
    (tmp_path / "b/._model.safetensors").write_bytes(b"a Mac's")
    assert checkpoint_hash(tmp_path / "a") == checkpoint_hash(tmp_path / "b")
    export(lively, tmp_path / "b", settings.but(profile="plain"))
    assert checkpoint_hash(tmp_path / "a") != checkpoint_hash(tmp_path / "b")
    with torch.no_grad():
        lively.model.model.language_model.norm.weight[0] += 1e-3
    export(lively, tmp_path / "b", settings)
    assert checkpoint_hash(tmp_path / "a") != checkpoint_hash(tmp_path / "b")


def test_what_is_not_a_checkpoint_is_named(tiny_path, lively, settings, tmp_path):
    with error_about(CheckpointError, tmp_path / "gone", "missing"):
        Embedder.from_pretrained(tmp_path / "gone")
    with error_about(CheckpointError, tiny_path, "foreign"):
        Embedder.from_pretrained(tiny_path)
    export(lively, tmp_path / "final", settings)
    (tmp_path / "final/rge.json").write_text(json.dumps({**settings.content(), "format": 2}))
    with error_about(CheckpointError, "final/rge.json", "format"):
        Embedder.from_pretrained(tmp_path / "final")
    broken = {key: value for key, value in settings.content().items() if key != "profile"} | {
        "reasons": "both"
    }
    (tmp_path / "final/rge.json").write_text(json.dumps(broken))
    with error_about(CheckpointError, "final/rge.json", "damaged", "profile", "reasons"):
        Embedder.from_pretrained(tmp_path / "final")
    (tmp_path / "final/rge.json").write_text("{")
    with error_about(CheckpointError, "final/rge.json", "json"):
        Embedder.from_pretrained(tmp_path / "final")


@pytest.fixture
def recipe():
    sources = "[{path: a.jsonl}]"
    fixed = ["recipe=qwen25vl_3b", f"cold_start.sources={sources}", f"joint.sources={sources}"]
    return lambda *overrides: load_recipe([*fixed, *overrides])


@pytest.mark.parametrize(
    "override", ["out=elsewhere", "train.save_every=3", "data.num_workers=0", "log.project=x"]
)
def test_a_run_may_be_resumed_with_other_bookkeeping(recipe, tmp_path, override):
    check_same_recipe(json.loads(json.dumps(to_dict(recipe()))), recipe(override), "joint", tmp_path)


@pytest.mark.parametrize(
    ("override", "before"),
    [
        ("joint.lr=1e-3", "2e-05"),
        ("train.seed=5", "0"),
        ("loss.anchor=oracle", "self"),
        ("optim.betas=[0.9, 0.95]", "[0.9, 0.999]"),
        ("joint.sources=[{path: b.jsonl}]", "[{'path': 'a.jsonl', 'weight': 1.0}]"),
    ],
)
def test_a_run_is_not_resumed_with_another_recipe(recipe, tmp_path, override, before):
    found = json.loads(json.dumps(to_dict(recipe())))
    with error_about(CheckpointError, tmp_path, ("value", override.partition("=")[0], (before,))):
        check_same_recipe(found, recipe(override), "joint", tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "train.micro_batch_size=2",
        "model.gradient_checkpointing=false",
        "model.attn_implementation=sdpa",
        "rollout.batch_size=8",
        "rollout.prompt_pass=twice",
    ],
)
def test_a_run_that_was_out_of_memory_is_resumed_with_less_and_says_so(recipe, tmp_path, override):
    found = json.loads(json.dumps(to_dict(recipe())))
    [said] = check_same_recipe(found, recipe(override), "joint", tmp_path)
    key, value = override.split("=")
    assert said.startswith(f"{key} (there ")
    assert said.replace("'", "").lower().endswith(f"now {value})")
    with error_about(CheckpointError, ("value", "joint.lr", ("2e-05",))):
        check_same_recipe(found, recipe(override, "joint.lr=1"), "joint", tmp_path)


def test_a_stage_is_not_resumed_or_accepted_from_another_start(recipe, tmp_path):
    """`stage=joint` alone starts from the model, the joint stage of `stage=all` from the cold start in the same folder."""
    base, cold = recipe(f"out={tmp_path}", "stage=joint"), f"init={tmp_path / 'cold_start/final'}"
    both, told = recipe(f"out={tmp_path}"), recipe(f"out={tmp_path}/", "stage=joint", cold)
    final = str(tmp_path / "cold_start/final")
    for there, now, before in (
        (base, both, "None"),
        (both, base, final),
        (told, base, final),
        (both, recipe(f"out={tmp_path}", "init=b"), "None"),
    ):
        with error_about(CheckpointError, ("value", "init", (before,))):
            check_same_recipe(to_dict(there), now, "joint", tmp_path)
    for there, now in ((both, told), (told, both), (base, base), (both, recipe("out=moved"))):
        assert check_same_recipe(to_dict(there), now, "joint", tmp_path) == []
    check_same_recipe(to_dict(recipe("stage=cold_start")), both, "cold_start", tmp_path)


def test_the_cold_start_does_not_depend_on_the_joint_stages_settings(recipe, tmp_path):
    """So one cold start serves every ablation of the joint stage."""
    found = json.loads(json.dumps(to_dict(recipe())))
    for override in ("joint.lr=1e-3", "loss.ratio=1:1", "loss.anchor=none", "rollout.temperature=1"):
        check_same_recipe(found, recipe(override), "cold_start", tmp_path)
    with error_about(CheckpointError, ("value", "loss.lm_on_candidates", ("True",))):
        check_same_recipe(found, recipe("loss.lm_on_candidates=false"), "cold_start", tmp_path)
    with error_about(CheckpointError, "cold_start.lr"):
        check_same_recipe(found, recipe("cold_start.lr=1"), "cold_start", tmp_path)


def test_a_state_with_the_unused_settings_of_its_sources_is_resumed(recipe, tmp_path):
    """As earlier versions wrote them for the stage rl."""
    now = recipe("rl.sources=[{path: a.jsonl}]")
    assert (
        to_dict(now)["rl"]["sources"]
        == to_dict(now)["joint"]["sources"]
        == [{"path": "a.jsonl", "weight": 1.0}]
    )
    assert check_same_recipe(json.loads(json.dumps(asdict(now))), now, "rl", tmp_path) == []
    other = recipe("rl.sources=[{path: a.jsonl, weight: 2}]")
    with error_about(CheckpointError, "rl.sources"):
        check_same_recipe(json.loads(json.dumps(asdict(now))), other, "rl", tmp_path)


def test_a_finished_stage_is_recognised(lively, settings, recipe, tmp_path):
    assert not finished(tmp_path, recipe(), "joint")
    export(lively, tmp_path / "final", settings.but(recipe=to_dict(recipe())))
    assert finished(tmp_path, recipe(), "joint")
    with error_about(CheckpointError, "joint.lr"):
        finished(tmp_path, recipe("joint.lr=1"), "joint")
    shutil.rmtree(tmp_path / "final")
    (tmp_path / "tmp_final").mkdir()
    assert not finished(tmp_path, recipe(), "joint")


def test_a_checkpoint_that_was_cut_does_not_count_as_finished(lively, settings, recipe, tmp_path):
    export(lively, tmp_path / "final", settings.but(recipe=to_dict(recipe())))
    (tmp_path / "final/README.md").write_text("a card may be edited")
    assert finished(tmp_path, recipe(), "joint")
    [weights] = (tmp_path / "final").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with error_about(CheckpointError, tmp_path / "final", "damaged"):
        finished(tmp_path, recipe(), "joint")
    (tmp_path / "final/done.json").unlink()
    with error_about(CheckpointError, tmp_path / "final", "damaged"):
        finished(tmp_path, recipe(), "joint")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda name, all_: f"_orig_mod.{name}", "unknown"),
        (lambda name, all_: None if "norm.weight" in name else name, "missing"),
    ],
)
def test_weights_of_other_names_are_not_written(lively, settings, tmp_path, change, kind):
    found = {change(name, 0): value for name, value in lively.model.state_dict().items()}
    found.pop(None, None)
    with error_about(CheckpointError, tmp_path / "final", kind):
        export(lively, tmp_path / "final", settings, found)
    assert not list(tmp_path.iterdir())


def test_what_reads_back_otherwise_is_no_checkpoint(lively, settings, tmp_path, monkeypatch):
    def flip(path, **_):
        if path.suffix == ".safetensors":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr("rge.checkpoints.export.flush", flip)
    with error_about(CheckpointError, tmp_path / "final", "unwritten"):
        export(lively, tmp_path / "final", settings)
    assert not list(tmp_path.iterdir())


def test_a_stage_alone_does_not_pass_by_the_one_before_it(lively, settings, recipe, tmp_path):
    out, cold = f"out={tmp_path}", tmp_path / "cold_start/final"
    check_start(recipe(out, "stage=joint"))
    export(lively, cold, settings)
    for name in ("joint", "rl"):
        with error_about(CheckpointError, cold, "init"):
            check_start(recipe(out, f"stage={name}"))
        check_start(recipe(out, f"stage={name}", f"init={cold}"))
    for stage in ("all", "cold_start"):
        check_start(recipe(out, f"stage={stage}"))
    export(lively, tmp_path / "joint/final", settings)
    with error_about(CheckpointError, tmp_path / "joint/final", "init"):
        check_start(recipe(out, "stage=rl"))
    # One that has begun goes on as it began.
    state = tmp_path / "rl/state/step_00000002"
    state.mkdir(parents=True)
    (state / "done.json").write_text("{}")
    check_start(recipe(out, "stage=rl"))


def test_instructions_are_counted_by_weight_and_task(tmp_path):
    """Lines that training leaves out (data.on_bad=skip) are left out here too."""

    def line(name, instruction, category="c", source="s"):
        return json.dumps({
            "id": name, "group": "g", "source": source, "split": "train", "category": category,
            "instruction": instruction, "query": {"text": "what"}, "positives": [{"id": "t", "text": "an egg"}],
        })  # fmt: skip

    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    bad = ["", "{", "[1, 2]", '{"id": "x", "instruction": ["a"]}']
    first.write_text(
        "\n".join([line("1", "Find it."), line("2", "Find it."), line("3", "Name it.", "n"), *bad])
    )
    second.write_text(line("4", None, source="other") + "\n")
    found = instructions_of(
        [SourceConfig(path=str(first), weight=0.8), SourceConfig(path=str(second), weight=0.2)]
    )
    assert found == Instructions(
        default="Find it.",
        known=["Find it.", "Name it."],
        by_task={"other": None, "s/c": "Find it.", "s/n": "Name it."},
    )
    heavier = instructions_of(
        [SourceConfig(path=str(first), weight=0.3), SourceConfig(path=str(second), weight=0.7)]
    )
    assert heavier.default is None
    by_size = [SourceConfig(path=str(path), weight="size") for path in (first, second)]
    assert instructions_of(by_size, [3, 1]).default == "Find it."
    assert instructions_of(by_size, [1, 3]).default is None


def test_a_checkpoint_names_the_sources_of_all_its_stages(tmp_path):
    """Not those that its recipe names for stages that trained on others, or not at all."""
    recipe = load_recipe(["recipe=demo", "cold_start.sources=[{path: a.jsonl}]"])
    assert trained_on("Qwen/Qwen2-VL-2B-Instruct", recipe, "cold_start")[0].stage == "cold_start"
    first = trained_on("rge/demo_base", recipe, "cold_start")
    naming = TrainedStage(stage="naming", sources=[Source(path="data_prep/demo/data/train/naming.jsonl")])
    assert first == [naming, TrainedStage(stage="cold_start", sources=[Source(path="a.jsonl", weight=1.0)])]

    (tmp_path / "eyes.json").write_text('{"records": "c.jsonl"}')  # not those that this run would teach
    assert trained_on(str(tmp_path), recipe, "cold_start")[0].sources == [Source(path="c.jsonl")]

    start = tmp_path / "cold_start"
    start.mkdir()
    settings = settings_of(
        emb_id=1, profile="plain", max_prompt_tokens=9, min_pixels=1, max_pixels=1, max_new_tokens=1, reasons="query",
        recipe=to_dict(recipe), stage="cold_start", step=1,
    )  # fmt: skip
    words = ["recipe=demo", "stage=joint", "joint.sources=[{path: b.jsonl}]", f"init={start}"]
    joint = TrainedStage(stage="joint", sources=[Source(path="b.jsonl", weight=1.0)])
    (start / "rge.json").write_text(json.dumps(settings.but(trained_on=first).content()))
    assert trained_on(str(start), load_recipe(words), "joint") == [*first, joint]
    newer = TrainedStage(stage="joint", sources=[Source(path="b.jsonl", a_newer_key=1)])
    card = model_card(settings.but(trained_on=[*first, newer]), "x")
    assert "* Training data: naming on naming.jsonl; cold_start on a.jsonl; joint on b.jsonl.\n" in card


@pytest.mark.parametrize(
    ("base", "said", "front"),
    [
        (
            "Qwen/Qwen2.5-VL-3B-Instruct",
            "Qwen/Qwen2.5-VL-3B-Instruct. Its licence also applies to these weights.",
            True,
        ),
        ("HERE/a model", "a model. Its licence also applies to these weights.", False),
        ("demo_base", "demo_base. Its licence also applies to these weights.", False),
    ],
)
def test_the_card_names_the_base_and_no_folder_of_a_machine(tmp_path, base, said, front):
    path = base.replace("HERE", str(tmp_path))
    settings = settings_of(
        emb_id=1, profile="rge", max_prompt_tokens=64, min_pixels=784, max_pixels=7056, max_new_tokens=8,
        reasons="query", recipe={"model": {"path": path, "dtype": "float32"}}, stage="joint", step=1,
    )  # fmt: skip
    card = model_card(settings, "mine/joint/final")
    assert f"* Base model: {said}\n" in card
    assert ("base_model: " in card) == front
    assert str(tmp_path) not in card


def test_the_card_names_pretrained_parts(tmp_path):
    settings = settings_of(
        emb_id=1, profile="rge", max_prompt_tokens=64, min_pixels=784, max_pixels=7056, max_new_tokens=8,
        reasons="query", stage="joint", step=1,
    )  # fmt: skip
    file = {"file": "a.bin", "bytes": 1, "sha256": "0"}
    eyes = Origin(part="vision tower", name="Eyes", licence="MIT", **file)
    words = Origin(part="text model", name="Words", licence="Apache-2.0", hub_id="somebody/words", **file)
    card = model_card(settings.but(origins=[words, eyes]), "mine/joint/final")
    assert (
        "* Base model: Words (text model, Apache-2.0) and Eyes (vision tower, MIT); the rest was trained"
        in card
    )
    assert "base_model: somebody/words\n" in card
    assert "license_link: https://huggingface.co/somebody/words\n" in card


def test_prompts_are_described_by_task(tmp_path):
    """The settings of most queries, and those of tasks that have others; a source's name and instruction replace its records'."""

    def source(file, count, **more):
        lines = [
            {"id": f"{file}{number}", "group": "g", "source": "s", "split": "train", "instruction": "Find it.",
             "query": {"text": "what"}, "positives": [{"id": "t", "text": "an egg"}]}
            for number in range(count)
        ]  # fmt: skip
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return SourceConfig(path=str(tmp_path / f"{file}.jsonl"), **more)

    sources = [
        source("a", 3),
        source("b", 2, name="pages", profile="plain", max_pixels=10**6, instruction="Read it.", weight=4.0),
        source("c", 2, name="same", instruction=""),
    ]
    recipe = Recipe(recipe="tiny")
    instructions = instructions_of(sources)
    assert instructions.default == "Read it."
    assert instructions.by_task == {"pages": "Read it.", "s": "Find it.", "same": None}
    large = Pixels(min=recipe.model.min_pixels, max=10**6)
    usual = Pixels(min=recipe.model.min_pixels, max=recipe.model.max_pixels)
    most, tasks = prompts_of(recipe, sources, [1, 4, 1], instructions.by_task)
    other = TaskPrompts(profile="rge", pixels=usual)
    assert most == TaskPrompts(profile="plain", pixels=large, max_prompt_tokens=2048, video=recipe.data.video)
    assert tasks == {"s": other, "same": other}
    assert tasks["s"].content() == {"profile": "rge", "pixels": usual.content()}
    most, tasks = prompts_of(recipe, sources, [4, 1, 1], instructions.by_task)
    assert most.profile == "rge"
    assert tasks == {"pages": TaskPrompts(profile="plain", pixels=large)}
    assert prompts_of(recipe, sources[::2], [1, 1], ["s", "same"])[1] == {}

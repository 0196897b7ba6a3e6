"""DDP, ZeRO-1, 2 and 3 and FSDP2, two real processes each, against one: rollouts, losses, weights, states, exports."""

import json
import math
import re
import shutil
import signal
import sys
from pathlib import Path

import forked
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from paths import ROOT, WORKERS
from ports import free_port
from recorded import settings_of
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge import train
from rge.checkpoints.export import export
from rge.checkpoints.manifest import DONE
from rge.checkpoints.settings import read_settings
from rge.config import Recipe, load_recipe, to_dict
from rge.data.collate import Batch
from rge.loss_config import LossConfig
from rge.model.adapter_files import CONFIG, WEIGHTS
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rl.config import RewardConfig, RLConfig
from rge.rl.credit import Reinforcement
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import generate
from rge.rollout.writer import Rollout, sample_seeds
from rge.step.training_step import TrainingStep

CONFIGS = ROOT / "recipes" / "accelerate"
BACK_ENDS = {
    "DDP": "cpu.yaml",
    "FSDP2": "fsdp2.yaml",
    "ZeRO-1": "zero1.yaml",
    "ZeRO-2": "zero2.yaml",
    "ZeRO-3": "zero3.yaml",
}
"""The configs for GPUs; precision is the recipe's, float32 here, since bfloat16 rounds away what is compared."""
LR = 0.2

SETTINGS = settings_of(
    emb_id=0, profile="plain", max_prompt_tokens=100, min_pixels=784, max_pixels=3136, max_new_tokens=9, reasons="query",
    recipe=to_dict(load_recipe(["recipe=demo"])), stage="joint", step=3,
)  # fmt: skip


def environment_of(config: str, folder: Path) -> dict[str, str]:
    """What `accelerate launch --config_file` tells its processes."""
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(CONFIGS / config), "train.py"])
    )
    args.deepspeed_fields_from_accelerate_config = ""
    if args.use_deepspeed:
        settings = json.loads((ROOT / args.deepspeed_config_file).read_text())
        if settings["zero_optimization"]["stage"] == 3:
            # All of a tiny model would count as too small to be shared out.
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = folder / Path(args.deepspeed_config_file).name
        path.write_text(json.dumps(settings))
        args.deepspeed_config_file = str(path)
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


STEPS = {"cold_start": 1, "joint": 3}
ADAPTED = ["ZeRO-3", "FSDP2"]
"""Where adapters meet weights that are shared out."""
UNDIVIDED = ["train.micro_batch_size=100", "model.gradient_checkpointing=false"]
"""Of runs that are about something else: the fewest forwards."""
LORA = [
    *UNDIVIDED,
    "stage=joint",
    "joint.steps=2",
    "joint.lr=0.05",
    "model.lora={rank: 2, alpha: 4, targets: [q_proj, v_proj]}",
]
ADAPTERS_ONLY = [
    *LORA[:-1],
    "model.lora={rank: 2, alpha: 4, targets: [q_proj, v_proj], modules_to_save: [merger]}",
    "export.adapters_only=true",
]
WRITING_ADAPTERS = ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]


RL = [
    UNDIVIDED[1],
    "stage=rl",
    "rl.alpha_con=0.5",
    "rl.steps=3",
    "rl.batch_size=5",
    "rl.lr=0.02",
    "rl.num_rationales=2",
    "rl.beta=0.5",
    "rl.scale_rewards=batch",
    "rl.std_floor=0.1",
    "optim.weight_decay=0",
]
"""A policy gradient with a KL term."""
KL = {
    "FSDP2": RL,
    "ZeRO-2": RL,
    "ZeRO-3": [*RL, LORA[-1]],
}
"""By back end: a frozen copy beside the shares, and under ZeRO-3, which cannot make one, the model without its adapters."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Filled by the first test that needs it."""
    return {"folder": tmp_path_factory.mktemp("back_ends")}


@pytest.fixture
def recipe(shared, tiny_path, picture) -> list[str]:
    """Arguments of `rge/train.py`: a few steps of both stages, with batches that two processes cannot halve."""
    folder = shared["folder"]
    if not (folder / "tiny.yaml").exists():
        for number in range(4):
            picture(40 + 10 * number, 80 - 5 * number, number).save(folder / f"{number}.png")
        lines = []
        for number in range(12):
            shown = {"image": f"{number % 4}.png"} if number % 3 else {"text": f"thing {number}"}
            line = {
                "id": f"r{number}", "group": str(number), "source": "s", "split": "train",
                "query": {"text": "what opens this " * (1 + number % 3), "images": [f"{number % 4}.png"][: number % 2]},
                "positives": [{"id": f"t{number}", **shown, "rationale": "a key opens it " * (1 + number % 4)}],
                "negatives": [{"id": f"n{number}", "text": f"another {number}"}][: number % 4 // 2],
            }  # fmt: skip
            lines.append(json.dumps(line) + "\n")
        (folder / "records.jsonl").write_text("".join(lines))
        stage = {"batch_size": 5, "lr": 1e-3, "sources": [{"path": str(folder / "records.jsonl")}]}
        settings = {
            "model": {"path": str(tiny_path), "dtype": "float32", "min_pixels": 784, "max_pixels": 3136},
            "data": {"profile": "plain", "num_workers": 0},
            "loss": {"temperature": 0.05},
            "optim": {"weight_decay": 20.0},  # so strong that losses show which weights it falls on
            "rollout": {"max_new_tokens": 6, "temperature": 0.7, "batch_size": 2},
            "train": {"micro_batch_size": 2, "keep_activations": "device", "save_every": 2, "log_every": 1},
            **{name: {"steps": steps, **stage} for name, steps in STEPS.items()},
        }
        (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return [f"recipe={folder / 'tiny.yaml'}"]


def rl_step(name: str, batches: list[Batch], **weights: float) -> dict:
    """Recipe, objective and sampling of a step of the stage rl."""
    recipe = Recipe(
        recipe="tiny",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, temperature=0.07, lm_on_candidates=False),
        rollout=RolloutConfig(max_new_tokens=9),
        rl=RLConfig(
            num_rationales=3,
            rewards=[RewardConfig(name)],
            scale_rewards="batch",
            std_floor=0.1,
            **{"alpha_con": 0.5} | weights,
        ),
    )
    sampling = [
        {
            "temperature": recipe.rl.temperature,
            "seeds": [seed for own in batch.seeds for seed in sample_seeds(own, 3)],
            "num_each": 3,
        }
        for batch in batches
    ]
    return {
        "batches": batches,
        "rl": recipe,
        "sampling": sampling,
        "objective": Objective.of(recipe, "rl"),
        "max_grad_norm": 1.0,
    }


@pytest.fixture
def found(
    shared,
    recipe,
    lively_path,
    tiny_path,
    make_batch,
    merge,
    first_queries,
    without_negatives,
    longer_rationales,
):
    """The same steps by one process and, under every back end, by two."""
    if "one" in shared:
        return shared
    folder = shared["folder"]
    builder = PromptBuilder(EmbeddingModel(load_backbone(lively_path)).processor)

    def batches(seed: int, pictures: tuple[bool, bool], count: int) -> list[Batch]:
        first = make_batch(builder, seed, pictures[0], pictures[0])
        second = make_batch(builder, seed + 10, pictures[1], pictures[1])
        return [first, longer_rationales(first_queries(without_negatives(second), count), builder)]

    common = {"objective": Objective(1 / 11, 10 / 11, 0.07), "max_grad_norm": 1.0}
    steps = [
        {
            "batches": batches(0, (True, True), 4),
            "micro_batch_size": 100,
            "rollout_batch_sizes": (2, 100),
            "once": True,
            **common,
        },
        {
            "batches": batches(1, (True, False), 3),
            "micro_batch_size": 2,
            "rollout_batch_sizes": (100, 1),
            "keep": "device",
            **common,
        },
        {
            "batches": batches(2, (False, True), 2),
            "micro_batch_size": 1,
            "rollout_batch_sizes": (3, 3),
            "keep": "host",
            **common,
        },
        # The stage rl, undivided with all losses, and in parts without a gradient for the candidates.
        {
            "micro_batch_size": 100,
            "rollout_batch_sizes": (100, 100),
            "once": True,
            **rl_step("gain_over_direct", batches(3, (True, True), 4), alpha_con=0.5),
        },
        {
            "micro_batch_size": 2,
            "rollout_batch_sizes": (100, 2),
            **rl_step("margin", batches(4, (True, False), 3), alpha_con=0.0),
        },
    ]
    # Beside the plain model, one whose embedding matrix has no row left for <emb>.
    full, model, processor = folder / "full", *_plain(tiny_path)
    model.resize_token_embeddings(len(processor.tokenizer))
    model.save_pretrained(full)
    processor.save_pretrained(full)
    task = {
        "environments": {name: environment_of(config, folder) for name, config in BACK_ENDS.items()},
        "steps": steps,
        "settings": SETTINGS,
        "recipe": recipe,
        "merged": ADAPTED,
        "adapted": {"FSDP2_lora": ("FSDP2", LORA)}
        | {f"{name}_adapters": (name, ADAPTERS_ONLY) for name in WRITING_ADAPTERS},
        "kl": KL,
        "plain": [str(tiny_path), str(full)],
    }
    torch.save(task, folder / "task.pt")
    done = forked.run_pair(WORKERS / "back_ends.py", lively_path, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    shared["one"] = one_process(lively_path, steps, merge, folder / "one")
    return shared


def _plain(path: Path):
    return AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path)


def one_process(checkpoint: Path, steps: list[dict], merge, out: Path) -> list[dict]:
    """The same steps, each as one undivided batch."""
    embedder = EmbeddingModel(load_backbone(checkpoint)).eval()
    optimizer = torch.optim.SGD(embedder.parameters(), lr=LR)
    results = []
    for step in steps:
        before = {key: value.clone() for key, value in embedder.model.state_dict().items()}
        rationales = [
            generate(
                embedder,
                batch.queries,
                max_new_tokens=9,
                batch_size=100,
                **(step["sampling"][rank] if "rl" in step else {}),
            )
            for rank, batch in enumerate(step["batches"])
        ]
        whole, credit = merge(step["batches"]), None
        if "rl" in step:
            stage = Reinforcement(step["rl"], embedder, None, out)
            credit = stage.begin(whole, sum(rationales, []), measure=True)
            split = len(step["batches"][0].queries) * credit.num_each
            rationales = [credit.rationales[:split], credit.rationales[split:]]
        report = TrainingStep(embedder, embedder, step["objective"], 100)(
            whole, Rollout(sum(rationales, [])), credit
        )
        norm = torch.nn.utils.clip_grad_norm_(embedder.parameters(), step["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        weights = {key: value.clone() for key, value in embedder.model.state_dict().items()}
        results.append(
            {
                "rationales": rationales,
                "report": report,
                "norm": float(norm),
                "before": before,
                "weights": weights,
            }
        )
    export(embedder, out, SETTINGS)
    return results


def results(found: dict, name: str) -> list[dict]:
    return [torch.load(found["folder"] / f"{name}_{rank}.pt", weights_only=False) for rank in range(2)]


def differences(weights: dict, expected: dict, before: dict) -> tuple[float, float]:
    """Of all updates together, and the largest of a tensor's: difference as a share of the update.

    Of single tensors the rounding of float32 weights is let off, which some small updates do not exceed by much.
    """
    wrong, moved = {}, {}
    for key, weight in expected.items():
        wrong[key], moved[key] = float((weights[key] - weight).norm()), float((weight - before[key]).norm())
    together = math.hypot(*wrong.values()) / math.hypot(*moved.values())
    rounding = {key: 1e-6 * float(weight.norm()) for key, weight in expected.items()}
    return together, max(max(0.0, wrong[key] - rounding[key]) / max(moved[key], 1e-12) for key in expected)


@pytest.mark.slow(12)
@pytest.mark.parametrize("name", BACK_ENDS)
def test_steps_of_two_processes_equal_one(found, name):
    """With ``-s`` this prints the figures behind docs/scaling.md."""
    two = results(found, name)
    worst = {"loss": 0.0, "norm": 0.0, "updates": 0.0, "one tensor": 0.0}
    for number, one in enumerate(found["one"]):
        first, second = (result["steps"][number] for result in two)
        for rank, result in enumerate((first, second)):
            assert result["messages"][0] == 0, (
                "a rollout gathers its parameters before it begins, not while it writes"
            )
            for (ids, forced, state), expected in zip(
                result["rationales"], one["rationales"][rank], strict=True
            ):
                assert (ids, forced) == (expected.ids, expected.forced)
                if not expected.direct:  # which nobody wrote
                    torch.testing.assert_close(state, expected.state_D, atol=1e-4, rtol=0)
        # Whose rationale stands in for another's depends on who is beside whom on a process.
        for report in (first["report"], second["report"], one["report"]):
            assert report.pop("hit_at_1_counterfactual", 1.0) >= 0
        # A policy's loss at its writing is a mean of advantages, nearly nothing.
        assert first["report"] == second["report"] == pytest.approx(one["report"], rel=1e-4, abs=1e-6)
        assert first["norm"] == pytest.approx(one["norm"], rel=1e-4)
        assert first["weights"].keys() == one["weights"].keys()
        updates, one_tensor = differences(first["weights"], one["weights"], one["before"])
        shares = {
            "loss": abs(first["report"]["loss"] / one["report"]["loss"] - 1),
            "norm": abs(first["norm"] / one["norm"] - 1),
            "updates": updates,
            "one tensor": one_tensor,
        }
        worst = {key: max(value, shares[key]) for key, value in worst.items()}
    figures = " | ".join(f"{worst[key]:.0e}" for key in ("loss", "norm", "updates"))
    sys.stdout.write(f"\n| {name} | {figures} | {two[0]['held']:,} |\n")
    assert worst["updates"] < 1e-4
    assert worst["one tensor"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_state_is_returned_to(found, name):
    for result in results(found, name):
        assert len(result["again"]) == 2
        for once, again in zip(result["steps"][2:4], result["again"], strict=True):
            assert again["report"] == pytest.approx(once["report"], rel=1e-6)
            assert [ids for ids, _, _ in again["rationales"]] == [ids for ids, _, _ in once["rationales"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_the_exported_checkpoint_is_the_one_of_one_process(found, name):
    one, two = found["folder"] / "one", found["folder"] / name
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
    for path in one.iterdir():
        if path.suffix != ".safetensors" and path.name != DONE:
            # The model card is titled with the folder's name.
            assert (two / path.name).read_text().replace(name, "one") == path.read_text()
    expected, weights = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert {key: value.dtype for key, value in weights.items()} == {k: v.dtype for k, v in expected.items()}
    for key, value in expected.items():
        assert (weights[key] - value).norm() <= 1e-5 * value.norm(), key


@pytest.mark.slow
def test_sharing_back_ends_share(found):
    whole = results(found, "DDP")[0]["held"]
    for name in ("ZeRO-3", "FSDP2"):
        for result in results(found, name):
            assert result["held"] < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_every_process_gives_vllm_whole_weights(found, name):
    last = results(found, name)[0]["steps"][-1]["weights"]
    for result in results(found, name):
        assert set(result["for_vllm"]) <= set(last)  # a tied matrix has one name
        for key, weight in result["for_vllm"].items():
            assert torch.equal(weight, last[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_every_process_gives_vllm_merged_weights(found, name):
    assert [result["adapted_for_vllm"] for result in results(found, name)] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_emb_gets_its_row_on_every_back_end(found, name, tiny_path):
    for path, seen in zip(
        (tiny_path, found["folder"] / "full"),
        zip(*(r["grown"] for r in results(found, name)), strict=True),
        strict=True,
    ):
        backbone = load_backbone(path, add_emb=True)
        source = backbone.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        for emb_id, rows in seen:
            assert emb_id == backbone.emb_id
            for row, module in zip(
                rows,
                (backbone.model.get_input_embeddings(), backbone.model.get_output_embeddings()),
                strict=True,
            ):
                assert torch.equal(row[emb_id], row[source])
                assert torch.equal(row[: emb_id + 1], module.weight[: emb_id + 1])


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture
def one_run(shared, recipe):
    """rge/train.py in one process."""
    out = shared["folder"] / "one_run"
    if not (out / "joint/final").exists():
        train.main([*recipe, f"out={out}"])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_the_same_recipe_gives_the_same_losses(found, one_run, name):
    run = found["folder"] / f"{name}_run"
    for stage in STEPS:
        one, two = losses(one_run / stage), losses(run / stage)
        assert [step for step, _ in two] == [step for step, _ in one]
        assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-3)


@pytest.mark.slow
def test_a_run_of_both_stages_that_is_started_again_ends_as_the_first_had(found):
    """Under DDP; for the others, the states that are written beside training are resumed from, bit for bit."""
    run = found["folder"] / "DDP_run"
    assert [step for step, _ in losses(run / "joint")] == [1, 2, 3]
    once, again = (load_file(run / part / "model.safetensors") for part in ("once", "joint/final"))
    for key, value in once.items():
        torch.testing.assert_close(again[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_state_of_two_processes_on_one(found, one_run, recipe, name, tmp_path, capsys):
    shutil.copytree(found["folder"] / f"{name}_run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/joint/final")
    shutil.rmtree(tmp_path / "run/joint/state/step_00000003")
    if name != "DDP":
        with pytest.raises(SystemExit):
            train.main([*recipe, f"out={tmp_path / 'run'}"])
        message = f"saved by {name} on 2 processes and cannot be loaded by one process"
        assert message in capsys.readouterr().err
        return
    train.main([*recipe, f"out={tmp_path / 'run'}"])
    one, two = losses(one_run / "joint"), losses(tmp_path / "run/joint")
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-3)


def same_export(folder: Path, expected: Path, whole: Path) -> None:
    """Adapters were merged: a checkpoint of a whole model, as one process exports it."""
    weights, merged = (load_file(path / "model.safetensors") for path in (expected, folder))
    assert merged.keys() == weights.keys() == load_file(whole / "model.safetensors").keys()
    for key, value in weights.items():
        torch.testing.assert_close(merged[key], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_adapters_train_on_weights_that_are_shared_out(found, one_run, recipe):
    """Under FSDP2; under ZeRO-3, the run with a KL term has adapters."""
    one, two = found["folder"] / "one_lora", found["folder"] / "FSDP2_lora"
    train.main([*recipe, *LORA, f"out={one}"])
    assert [loss for _, loss in losses(two / "joint")] == pytest.approx(
        [loss for _, loss in losses(one / "joint")], rel=1e-4
    )
    same_export(two / "joint/final", one / "joint/final", one_run / "joint/final")


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING_ADAPTERS)
def test_adapters_alone_are_those_of_one_process(found, recipe, name):
    out = found["folder"] / "one_adapters"
    if not out.exists():
        train.main([*recipe, *ADAPTERS_ONLY, f"out={out}"])
    one, two = out / "joint/final", found["folder"] / f"{name}_adapters/joint/final"
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    for file in (CONFIG, "config.json"):
        assert (two / file).read_text() == (one / file).read_text()
    bases = [read_settings(folder).base.content() for folder in (one, two)]
    assert bases[0] | {"beside": None} == bases[1] | {"beside": None}
    expected, written = load_file(one / WEIGHTS), load_file(two / WEIGHTS)
    assert written.keys() == expected.keys()
    assert sum(".merger." in key for key in written) > 2
    for key, value in expected.items():
        torch.testing.assert_close(written[key], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", KL)
def test_the_divergence_from_where_the_stage_began_is_that_of_one_process(found, one_run, recipe, name):
    one, two = found["folder"] / f"one_kl_{LORA[-1] in KL[name]}", found["folder"] / f"{name}_kl"
    if not one.exists():
        train.main([*recipe, *KL[name], f"out={one}"])
    first, second = (
        [json.loads(line) for line in (out / "rl" / "metrics.jsonl").read_text().splitlines()]
        for out in (one, two)
    )
    assert [line["step"] for line in second] == [1, 2, 3]
    assert second[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert second[-1]["kl"] > 1e-5
    for key in ("kl", "loss_rl", "loss", "reward"):
        expected = [line[key] for line in first]
        assert [line[key] for line in second] == pytest.approx(expected, rel=1e-3, abs=1e-6), key
    if LORA[-1] in KL[name]:
        same_export(two / "rl/final", one / "rl/final", one_run / "joint/final")


SHARDED = ["ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
FULL = ["ZeRO-3", "FSDP2"]
SAVES = [*UNDIVIDED, "stage=joint", "joint.steps=3", "train.save_every=1"]


@pytest.fixture
def saves(shared, recipe):
    """`workers/saves.py` under every sharded back end."""
    folder = shared["folder"] / "saves"
    if "saves" not in shared:
        folder.mkdir()
        launches = {
            name: {
                "environment": environment_of(BACK_ENDS[name], folder),
                "ports": {accident: free_port() for accident in ["killed", "full"][: 1 + (name in FULL)]},
            }
            for name in SHARDED
        }
        (folder / "launches.json").write_text(json.dumps(launches))
        shared["saves"] = forked.run_pair(WORKERS / "saves.py", folder, *recipe, *SAVES)
    done = shared["saves"]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


def ended(folder: Path, launch: str) -> tuple[int, str]:
    """How the first process of a launch ended, and what it said."""
    return json.loads((folder / "codes.json").read_text())[launch], (folder / f"{launch}_0").read_text()


@pytest.mark.slow(40)
def test_states_are_written_beside_training_and_a_kill_leaves_the_last_whole_one(saves, shared):
    """The resumed run ends with the weights of the undisturbed one, so the state is that of its step, not of a later one."""
    for name in SHARDED:
        code, said = ended(saves, f"{name} killed")
        assert code == -signal.SIGKILL, said[-6000:]
        left = saves / f"{name} left/joint/state"
        assert sorted(path.name for path in left.iterdir()) == ["step_00000001", "tmp_step_00000002"]
        half = [path for path in (left / "tmp_step_00000002").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in half) > 10_000
        assert DONE not in [path.name for path in half]
        run, whole = (saves / f"{name} {which}" / "joint" for which in ("killed", "whole"))
        assert f"joint: resuming after step 1 from {run}" in shared["saves"].stdout
        assert losses(run) == losses(whole)
        assert len(losses(run)) == 3
        once, again = (load_file(path / "final/model.safetensors") for path in (whole, run))
        for key, value in once.items():
            torch.testing.assert_close(again[key], value, atol=0, rtol=0)
        states = [
            {path.relative_to(at / "state") for path in (at / "state").rglob("*")} for at in (run, whole)
        ]
        assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_disk_that_is_full_for_one_process_stops_all_and_leaves_nothing_partial(saves, name):
    code, said = ended(saves, f"{name} full")
    assert code == 1, said[-6000:]
    assert re.search(r"CheckpointError: .*state, step 1: ", said), said[-6000:]
    assert not list((saves / f"{name} full/joint/state").iterdir())

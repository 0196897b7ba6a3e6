"""What runs against what was asked for: launches, launch configs, states of other launches."""

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from faults import error_about
from paths import ROOT

from rge.distributed import collectives, launch
from rge.distributed.config import TrainConfig

CONFIGS = ROOT / "recipes" / "accelerate"


class Running:
    """What `check_launch` looks at."""

    def __init__(self, num_processes: int, kind: str, zero_stage: int = 2, is_fsdp2: bool = True):
        self.num_processes = num_processes
        self.distributed_type = DistributedType(kind)
        self.is_fsdp2 = is_fsdp2
        self.state = self
        self.deepspeed_plugin = self
        self.zero_stage = zero_stage

    def wait_for_everyone(self):
        """Nobody else is here."""


@pytest.fixture(autouse=True)
def outside_a_launcher(monkeypatch):
    for name in (
        "WORLD_SIZE",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["rge/train.py", "recipe=mine", "out=my runs/1"])


TWO = {"WORLD_SIZE": "2"}
ONE_OF_TWO = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What `accelerate launch --cpu --num_processes 2` tells the one process that it starts."""


@pytest.mark.parametrize(
    ("environment", "running", "train", "about"),
    [
        (TWO, Running(1, "NO"), {}, "use_cpu"),
        (ONE_OF_TWO, Running(1, "NO"), {}, "multi_gpu"),
        ({}, Running(1, "NO"), {"num_processes": 2}, "train.num_processes"),
        (TWO, Running(2, "MULTI_CPU"), {"num_processes": 4}, "train.num_processes"),
        ({**TWO, "ACCELERATE_USE_FSDP": "true"}, Running(2, "MULTI_CPU"), {}, "FSDP"),
        ({**TWO, "ACCELERATE_USE_DEEPSPEED": "true"}, Running(2, "MULTI_CPU"), {}, "DEEPSPEED"),
        ({}, Running(1, "FSDP", is_fsdp2=False), {}, "fsdp_version"),
        (TWO, Running(2, "DEEPSPEED"), {"optimizer": "muon"}, "optim.name"),
        ({}, Running(1, "FSDP"), {"optimizer": "muon"}, "optim.name"),
        (TWO, Running(2, "DEEPSPEED", 1), {"back_end": "zero2"}, ("choice", "train.back_end", ("zero1",))),
        (TWO, Running(2, "MULTI_CPU"), {"back_end": "zero1"}, ("choice", "train.back_end", ("ddp",))),
        (TWO, Running(2, "DEEPSPEED", 2), {"back_end": "fsdp2"}, ("choice", "train.back_end", ("zero2",))),
    ],
)
def test_a_launch_that_is_not_what_was_asked_for(monkeypatch, environment, running, train, about):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    optimizer = train.pop("optimizer", "adamw")
    with error_about(launch.LaunchError, about):
        launch.check_launch(running, TrainConfig(**train), optimizer)


@pytest.mark.parametrize(
    ("environment", "running", "train", "optimizer"),
    [
        ({}, Running(1, "NO"), {"back_end": "zero3"}, "muon"),  # one process has nobody to share with
        (TWO, Running(2, "MULTI_CPU"), {"num_processes": 2}, "muon"),
        ({**TWO, **ONE_OF_TWO}, Running(2, "MULTI_CPU"), {}, "adamw"),
        ({**ONE_OF_TWO, "WORLD_SIZE": "1"}, Running(1, "NO"), {}, "adamw"),  # torchrun, one process
        ({**ONE_OF_TWO, "OMPI_COMM_WORLD_SIZE": "1"}, Running(1, "NO"), {}, "adamw"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
            Running(1, "NO"),
            {},
            "adamw",
        ),  # of a cluster; no launcher
        ({**TWO, "ACCELERATE_USE_FSDP": "true"}, Running(2, "FSDP"), {"back_end": "zero2"}, "adamw"),
        ({**TWO, "ACCELERATE_USE_FSDP": "true"}, Running(2, "FSDP"), {"back_end": "zero3"}, "adamw"),
        (
            {**TWO, "ACCELERATE_USE_DEEPSPEED": "true"},
            Running(2, "DEEPSPEED", 3),
            {"back_end": "fsdp2"},
            "adamw",
        ),
        (
            {**TWO, "ACCELERATE_USE_DEEPSPEED": "true"},
            Running(2, "DEEPSPEED", 1),
            {"num_processes": 2},
            "adamw",
        ),
    ],
)
def test_a_launch_as_asked(monkeypatch, environment, running, train, optimizer):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    launch.check_launch(running, TrainConfig(**train), optimizer)


@pytest.mark.parametrize(
    ("asked", "dtype", "keys"),
    [
        ("bf16", "float32", ["mixed_precision", "model.dtype"]),
        ("fp16", "bfloat16", ["mixed_precision"]),
        ("fp8", "float32", ["mixed_precision"]),
    ],
)
def test_a_launcher_with_another_precision_than_the_recipe(monkeypatch, asked, dtype, keys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    with pytest.raises(launch.LaunchError) as caught:
        launch.make_accelerator(TrainConfig(), dtype)
    assert [fault.key for fault in caught.value.faults] == keys


@pytest.mark.parametrize(
    ("settings", "dtype", "key"),
    [
        ({"bf16": {"enabled": True}}, "float32", "bf16.enabled"),
        ({"bf16": {"enabled": False}}, "bfloat16", "bf16.enabled"),
        ({"fp16": {"enabled": True}}, "bfloat16", "fp16.enabled"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "bfloat16", "data_types.grad_accum_dtype"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bfloat16", "bf16.bf16_master_weights_and_grads"),
        ({"gradient_accumulation_steps": 8}, "bfloat16", "gradient_accumulation_steps"),
        ({"optimizer": {"type": "AdamW"}}, "bfloat16", "optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "bfloat16", "scheduler"),
        ({"amp": {"enabled": True}}, "bfloat16", "amp"),
        ({"train_batch_size": 64}, "bfloat16", "train_batch_size"),
        ({"zero_optimization": {"stage": 0}}, "bfloat16", "zero_optimization.stage"),
        ({"zero_optimization": {}}, "bfloat16", "zero_optimization.stage"),
        (None, "bfloat16", "unreadable"),
        ("{", "bfloat16", "unreadable"),
    ],
)
def test_settings_of_deepspeed_that_do_not_keep_to_the_recipe(monkeypatch, tmp_path, settings, dtype, key):
    path = tmp_path / ("gone.json" if settings is None else "mine.json")
    if isinstance(settings, dict):
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **settings}))
    elif settings is not None:
        path.write_text(settings)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    with error_about(launch.LaunchError, path, key):
        launch.make_accelerator(TrainConfig(back_end="zero2"), dtype)


@pytest.mark.parametrize("value", ["1", "auto"])
def test_deepspeed_that_accumulates_nothing_of_its_own(monkeypatch, tmp_path, value):
    path = tmp_path / "mine.json"
    settings = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": value}
    path.write_text(json.dumps(settings))
    plugin = launch._deepspeed(str(path), "bfloat16")
    assert plugin.zero_stage == 2
    assert plugin.deepspeed_config["bf16"]["check_grad_overflow"]


def test_sizes_left_to_deepspeeds_integration_are_filled_in(lively):
    """As Hugging Face's usual file has them; accelerate knows the width of transformers' own models alone."""
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": True,
            "stage3_param_persistence_threshold": "auto", "sub_group_size": 7}  # fmt: skip

    class Accelerator:
        state = deepspeed_plugin = None
        deepspeed_config = {"zero_optimization": zero}

        def prepare(self, *given):
            return given

    Accelerator.state = Accelerator.deepspeed_plugin = Accelerator
    collectives.prepare(Accelerator(), lively, None, 1.0)
    assert zero == {"stage": 3, "reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": 921, "overlap_comm": True,
                    "stage3_param_persistence_threshold": 320, "sub_group_size": 7,
                    "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip


def test_a_compiler_is_refused(monkeypatch):
    """As a launch file's dynamo_config asks for it: the rollout would not go through what is compiled."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with error_about(launch.LaunchError, "dynamo_backend"):
        launch.make_accelerator(TrainConfig())
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    launch.make_accelerator(TrainConfig())


def test_a_launcher_that_divides_gradients(monkeypatch):
    """As `accelerate launch --gradient_accumulation_steps 8` has every back end do."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with error_about(launch.LaunchError, "the launch", "gradient_accumulation_steps"):
        launch.make_accelerator(TrainConfig())


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (Running(2, "MULTI_CPU"), Running(1, "NO")),
        (Running(1, "NO"), Running(8, "MULTI_GPU")),
        (Running(8, "FSDP"), Running(4, "FSDP")),
        (Running(2, "DEEPSPEED", 3), Running(2, "DEEPSPEED", 3)),
    ],
)
def test_states_that_another_launch_can_load(then, now):
    launch.check_resume(json.loads(json.dumps(launch.describe(then))), now, "state")


@pytest.mark.parametrize(
    ("then", "now", "launched"),
    [
        (Running(2, "DEEPSPEED", 3), Running(4, "DEEPSPEED", 3), "ZeRO-3 on 2 processes"),
        (Running(2, "DEEPSPEED", 1), Running(2, "DEEPSPEED", 2), "ZeRO-1 on 2 processes"),
        (Running(2, "MULTI_CPU"), Running(2, "FSDP"), "DDP on 2 processes"),
        (Running(2, "DEEPSPEED", 3), Running(1, "NO"), "ZeRO-3 on 2 processes"),
    ],
)
def test_states_that_another_launch_cannot_load(then, now, launched):
    with error_about(launch.LaunchError, "state", ("choice", "launch", (launched,))):
        launch.check_resume(launch.describe(then), now, "state")


def parsed(config: Path, *words: str):
    """What `accelerate launch --config_file` makes of a config, with these words after it."""
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(config), *words, "rge/train.py"])
    )
    return args


EXPECTED = {
    "cpu": (2, "ddp"), "cpu_zero": (2, 2), "ddp": (8, "ddp"), "zero1": (8, 1), "zero2": (8, 2), "zero3": (8, 3), "fsdp2": (8, "fsdp2"),
}  # fmt: skip
SEVERAL = (
    "--num_machines 4 --num_processes 32 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
).split()
"""As docs/scaling.md prints it."""


def test_every_config_is_known():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_command_line_chooses_how_much_is_sharded_on_cpu(stage):
    assert parsed(CONFIGS / "cpu_zero.yaml", "--zero_stage", str(stage)).zero_stage == stage


@pytest.mark.parametrize("num_machines", [1, 4])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_launches_what_it_says(name, num_machines):
    num_processes, kind = EXPECTED[name]
    if num_machines > 1 and name.startswith("cpu"):
        return
    args = parsed(CONFIGS / f"{name}.yaml", *(SEVERAL if num_machines > 1 else ()))
    if num_machines > 1:
        num_processes = 32
        assert (args.machine_rank, args.main_process_ip) == (1, "10.0.0.1")
    assert (args.num_processes, args.num_machines) == (num_processes, num_machines)
    assert args.use_deepspeed == isinstance(kind, int)
    assert args.use_fsdp == (kind == "fsdp2")
    assert args.multi_gpu == (kind == "ddp")
    assert args.use_cpu == name.startswith("cpu")
    if num_machines > 1:
        assert args.main_process_port == 29500  # the same on every machine
        assert args.rdzv_backend == "static"
        if args.use_deepspeed:
            assert args.deepspeed_multinode_launcher == "standard"
    if kind == "fsdp2":
        assert args.fsdp_version == 2
    assert args.mixed_precision == "no", "precision is the recipe's"
    if kind in (1, 2, 3) and not name.startswith("cpu"):
        file = Path(args.deepspeed_config_file)
        assert file.as_posix() == f"recipes/accelerate/zero{kind}.json"
        settings = json.loads((CONFIGS / file.name).read_text())
        zero = settings["zero_optimization"]
        assert zero["stage"] == kind
        assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
        assert not {"bf16", "fp16"} & settings.keys(), "precision is the recipe's"
        sizes = {key: value for key, value in zero.items() if key.endswith(("_size", "_threshold"))}
        assert sizes
        assert all(type(value) is int for value in sizes.values()), (
            "accelerate cannot infer these for this family"
        )
        # Given twice, accelerate refuses to start.
        assert (
            not {"mixed_precision", "gradient_clipping"}
            & yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()).keys()
        )
    elif kind in (1, 2, 3):
        assert args.zero_stage == kind
    if kind == 3:
        assert str(args.zero3_init_flag).lower() == "true"


def test_fsdp2_shards_within_machines_as_its_file_says(tmp_path):
    """By four lines that are comments: accelerate takes the sizes of a mesh from no command line."""
    text = (CONFIGS / "fsdp2.yaml").read_text()
    for line in (
        "parallelism_config:",
        "  parallelism_config_dp_replicate_size",
        "  parallelism_config_dp_shard_size",
    ):
        assert text.count(f"# {line}") == 1
        text = text.replace(f"# {line}", line)
    (tmp_path / "mine.yaml").write_text(text)
    args = parsed(tmp_path / "mine.yaml", *SEVERAL)
    assert (args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size) == (4, 8)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_says_how_to_start_it(path):
    header = path.read_text()
    command = re.search(r"accelerate launch --config_file recipes/accelerate/(\S+)", header)
    assert command
    assert command.group(1) == path.name

"""Recipes: those that ship load, what is wrong is named, weights add up."""

from dataclasses import fields

import pytest
import yaml
from faults import error_about

from rge.common.errors import RecipeError
from rge.common.files import RECIPES
from rge.config import Recipe, load_recipe, to_dict
from rge.objective import Objective
from rge.optim.config import StageConfig

SHIPPED = sorted(RECIPES.glob("*.yaml"))

MINIMAL = """
model: {path: some/model}
cold_start: {sources: [{path: a.jsonl}]}
joint: {sources: [{path: a.jsonl}]}
"""


@pytest.fixture
def load(tmp_path):
    """Load a minimal recipe with overrides."""
    (tmp_path / "small.yaml").write_text(MINIMAL)
    return lambda *overrides: load_recipe(["recipe=small", *overrides], tmp_path)


@pytest.fixture
def load_text(tmp_path):
    """Load a recipe of the given text."""

    def run(text: str | bytes) -> Recipe:
        path = tmp_path / "written.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe([f"recipe={path}"])

    return run


def test_there_are_recipes():
    assert {"demo", "qwen25vl_3b"} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path):
    recipe = load_recipe([f"recipe={path.stem}"])
    assert recipe.recipe == path.stem
    assert recipe.out == f"runs/{path.stem}"
    assert recipe.loss.alpha_lm + recipe.loss.alpha_con == pytest.approx(1)
    # A field that no recipe can set would be a field without effect.
    assert set(to_dict(recipe)) == {item.name for item in fields(Recipe)}


def test_the_papers_recipe_holds_the_papers_numbers():
    recipe = load_recipe(["recipe=qwen25vl_3b"])
    assert (recipe.loss.alpha_lm, recipe.loss.alpha_con) == pytest.approx((1 / 11, 10 / 11))
    assert (recipe.loss.temperature, recipe.loss.anchor, recipe.loss.lm_on_candidates) == (0.03, "self", True)
    assert (recipe.joint.batch_size, recipe.joint.lr, recipe.joint.epochs, recipe.joint.steps) == (
        512,
        2e-5,
        1,
        None,
    )
    assert (recipe.rollout.max_new_tokens, recipe.rollout.temperature) == (128, 0)
    assert (recipe.model.min_pixels, recipe.model.max_pixels) == (200_704, 802_816)
    assert (recipe.model.freeze, recipe.data.profile) == ([], "rge")


def test_overrides_are_typed(load):
    recipe = load(
        "joint.lr=1e-4",
        "joint.steps=null",
        "train.seed=1_000",
        "--train.deterministic=true",
        "out=/runs/a b=c",
        "optim.betas=[0.8, 0.9]",
        "joint.sources=[{path: x.jsonl, weight: 2}, {path: y.jsonl}]",
        "log.trackers=[wandb]",
    )
    assert (recipe.joint.lr, recipe.joint.steps, recipe.train.seed) == (1e-4, None, 1000)
    assert recipe.train.deterministic is True
    assert recipe.out == "/runs/a b=c"
    assert tuple(recipe.optim.betas) == (0.8, 0.9)
    assert [(source.path, source.weight) for source in recipe.joint.sources] == [
        ("x.jsonl", 2.0),
        ("y.jsonl", 1.0),
    ]
    assert recipe.log.trackers == ["wandb"]


def test_a_recipe_is_found_by_path_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    assert load_recipe([f"recipe={tmp_path / 'mine.yaml'}"]).out == "runs/mine"


def test_later_overrides_win(load):
    assert load("train.seed=1", "train.seed=2").train.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.alfa_lm=0.5", ("unknown", "loss.alfa_lm", ("loss.alpha_lm",))),
        ("lr=1", ("unknown", "lr", ("rl.lr", "joint.lr", "cold_start.lr"))),
        ("joint.learning_rate=1", ("unknown", "joint.learning_rate", ("joint.lr",))),
        (
            "train.gradient_accumulation_steps=8",
            ("unknown", "train.gradient_accumulation_steps", ("train.micro_batch_size",)),
        ),
        ("batch_size=8", ("unknown", "batch_size")),
        (
            "train.batch_size=8",
            ("unknown", "train.batch_size", ("rl.batch_size", "joint.batch_size", "rollout.batch_size")),
        ),
        (
            "per_device_train_batch_size=8",
            ("unknown", "per_device_train_batch_size", ("train.micro_batch_size",)),
        ),
        ("output_dir=x", ("unknown", "output_dir", ("out",))),
        ("model.lora.r=8", ("unknown", "model.lora.r", ("model.lora.rank",))),
        ("joint.num_train_epochs=2", ("unknown", "joint.num_train_epochs", ("joint.epochs",))),
        ("train.log_evry=1", ("unknown", "train.log_evry", ("train.log_every",))),
        ("jiont.lr=1", ("unknown", "jiont", ("joint",))),
        ("joint.sources=[{pth: x}]", ("unknown", "joint.sources[0].pth", ("joint.sources[0].path",))),
        ("model.lora={rnk: 3}", ("unknown", "model.lora.rnk", ("model.lora.rank",))),
        ("zzz=1", ("unknown", "zzz")),
    ],
)
def test_an_unknown_key_names_the_nearest(load, override, message):
    with error_about(RecipeError, message):
        load(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=x", ("type", "train.seed")),
        ("train.micro_batch_size=1.5", ("type", "train.micro_batch_size")),
        ("train.micro_batch_size=true", ("type", "train.micro_batch_size")),
        ("train.background_save=maybe", ("type", "train.background_save")),
        ("joint.lr=fast", ("type", "joint.lr")),
        ("optim.betas=[1, 2, 3]", ("value", "optim.betas")),
        ("loss=3", ("type", "loss")),
        ("joint=null", ("type", "joint")),
        ("joint.sources=[x]", ("type", "joint.sources[0]")),
        (
            "joint.sources=[{weight: 1}]",
            "joint.sources[0]",
        ),
        (
            "joint.sources=[{path: 3}]",
            ("type", "joint.sources[0].path"),
        ),
        ("out=", ("missing", "out")),
        ("joint.lr=[", ("value", "joint.lr")),
    ],
)
def test_a_value_of_the_wrong_type_names_its_key(load, override, message):
    with error_about(RecipeError, message):
        load(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage=warm", ("choice", "stage")),
        ("loss.anchor=teacher", ("choice", "loss.anchor")),
        ("model.dtype=float16", ("choice", "model.dtype")),
        (
            "model.attn_implementation=flash_attention_2",
            ("choice", "model.attn_implementation"),
        ),
        ("rollout.prompt_pass=never", ("choice", "rollout.prompt_pass")),
        ("rollout.backend=vlm", ("choice", "rollout.backend")),
        ("rollout.vllm_memory=1", ("range", "rollout.vllm_memory")),
        ("rollout.num_rationales=0", ("range", "rollout.num_rationales")),
        ("rollout.num_rationales=2", "rollout.num_rationales"),
        ("rollout.reuse_steps=-1", ("range", "rollout.reuse_steps")),
        ("rollout.direct_share=1.5", ("range", "rollout.direct_share")),
        ("rollout.direct_share=1", ("range", "rollout.direct_share")),
        ("loss.oracle_share=0.3", "loss.oracle_share"),
        ("loss.oracle_decay_steps=9", "loss.oracle_decay_steps"),
        ("data.profile=rgb", "data.profile"),
        ("joint.schedule=step", ("choice", "joint.schedule")),
        ("loss.temperature=0", ("range", "loss.temperature")),
        ("loss.temperature=.nan", ("type", "loss.temperature")),
        ("joint.lr=.inf", ("type", "joint.lr")),
        ("joint.steps=0", ("range", "joint.steps")),
        ("joint.epochs=-1", ("range", "joint.epochs")),
        ("joint.batch_size=0", ("range", "joint.batch_size")),
        ("joint.warmup_steps=-1", ("range", "joint.warmup_steps")),
        ("optim.betas=[0.9, 1.5]", ("range", "optim.betas[1]")),
        ("optim.eps=0", ("range", "optim.eps")),
        ("joint.min_lr_ratio=1.5", ("range", "joint.min_lr_ratio")),
        ("data.positives=some", ("choice", "data.positives")),
        ("data.positives=drawn", ("choice", "data.positives")),
        (
            "joint.sources=[{path: a, batch: owns}]",
            ("choice", "joint.sources[0].batch"),
        ),
        ("joint.sources=[{path: a, profile: rgee}]", "joint.sources[0].profile"),
        (
            "joint.sources=[{path: a, max_pixels: 9}]",
            "joint.sources[0]",
        ),
        ("joint.sources=[{path: a, name: x}, {path: b, name: x}]", "joint.sources"),
        (
            "joint.sub_batches=3",
            "joint.batch_size",
        ),
        ("joint.sub_batches=2", "joint.sub_batches"),
        ("joint.compare_across=true", "joint.compare_across"),
        ("loss.matryoshka_dims=[8,0]", ("range", "loss.matryoshka_dims[1]")),
        ("model.lora={rank: 0}", ("range", "model.lora.rank")),
        ("model.lora={dropout: 1}", ("range", "model.lora.dropout")),
        (
            "export.adapters_only=true",
            "export.adapters_only",
        ),
        ("validation.metric=mrr", ("choice", "validation.metric")),
        ("joint.sources=[]", "joint.sources"),
        ("joint.sources=[{path: a, weight: 0}]", ("range", "joint.sources[0].weight")),
        (
            "joint.sources=[{path: a, weight: siez}]",
            "joint.sources[0].weight",
        ),
        ("joint.sources=[{path: a, weight: true}]", ("type", "joint.sources[0].weight")),
        (
            "joint.sources=[{path: a, weight: size}, {path: b}]",
            "joint.sources",
        ),
        (
            "joint.sources=[{dataset: a, streaming: true, weight: size}]",
            "joint.sources",
        ),
        ("rollout.max_new_tokens=0", ("range", "rollout.max_new_tokens")),
        ("rollout.batch_size=0", ("range", "rollout.batch_size")),
        ("rollout.temperature=-1", ("range", "rollout.temperature")),
        ("train.micro_batch_size=0", ("range", "train.micro_batch_size")),
        ("train.save_every=0", ("range", "train.save_every")),
        ("train.keep_last=0", ("range", "train.keep_last")),
        ("train.log_every=0", ("range", "train.log_every")),
        ("train.num_processes=0", ("range", "train.num_processes")),
        ("train.seed=-1", ("range", "train.seed")),
        ("train.seed=4294967296", ("range", "train.seed")),
        ("train.silence_s=0", ("range", "train.silence_s")),
        ("data.max_rationale_tokens=0", ("range", "data.max_rationale_tokens")),
        ("data.max_negatives=-1", ("range", "data.max_negatives")),
        ("data.num_workers=-1", ("range", "data.num_workers")),
        ("data.max_prompt_tokens=0", ("range", "data.max_prompt_tokens")),
        ("optim.max_grad_norm=-1", ("range", "optim.max_grad_norm")),
        ("optim.lr_scale.vision=-1", ("range", "optim.lr_scale.vision")),
        ("model.freeze=[tower]", ("choice", "model.freeze[0]")),
        ("model.freeze=[vision,merger,text,emb]", "model.freeze"),
        (
            "model={lora: {rank: 2}, freeze: [text]}",
            "model.freeze",
        ),
        ("optim.weight_decay=-1", ("range", "optim.weight_decay")),
        ("model.min_pixels=0", ("range", "model.min_pixels")),
        (
            "model.min_pixels=900000",
            "model.min_pixels",
        ),
    ],
)
def test_a_value_out_of_range_names_key_value_and_limits(load, override, message):
    with error_about(RecipeError, message):
        load(override)


def test_only_the_stages_of_a_run_are_checked(load):
    assert load("stage=joint", "cold_start.sources=[]").stages() == ["joint"]
    assert load().stages() == ["cold_start", "joint"]
    with error_about(RecipeError, "cold_start.sources"):
        load("stage=cold_start", "cold_start.sources=[]")


def test_weights_may_be_numbers_of_records(load):
    joint = load("joint.sources=[{path: x, weight: size}, {path: y, weight: size}]").joint
    assert joint.weights([30, 10]) == [30.0, 10.0]
    assert load("joint.sources=[{path: x, weight: 2}, {path: y}]").joint.weights([30, 10]) == [2.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([], (1 / 11, 10 / 11)),
        (["loss.ratio=1:10"], (1 / 11, 10 / 11)),
        (["loss.ratio=20:1"], (20 / 21, 1 / 21)),
        (["loss.ratio=1:100"], (1 / 101, 100 / 101)),
        (["loss.ratio=1:1.5"], (0.4, 0.6)),
        (["loss.ratio=0:1"], (0.0, 1.0)),
        (["loss.ratio=1:0"], (1.0, 0.0)),
        (["loss.ratio=none"], (0.0, 1.0)),
        (["loss.alpha_lm=0.25"], (0.25, 0.75)),
        (["loss.alpha_con=0.25"], (0.75, 0.25)),
        (["loss.alpha_lm=0.25", "loss.ratio=1:1"], (0.25, 0.75)),
        (["loss.alpha_lm=0.3", "loss.alpha_con=0.7"], (0.3, 0.7)),
    ],
)
def test_loss_weights(load, overrides, weights):
    loss = load(*overrides).loss
    assert (loss.alpha_lm, loss.alpha_con) == pytest.approx(weights, abs=1e-12)


def test_an_unquoted_ratio_in_yaml_is_not_a_number_to_base_sixty(load_text):
    loss = load_text(MINIMAL + "loss:\n  ratio: 1:1\n").loss
    assert (loss.ratio, loss.alpha_lm) == ("1:1", 0.5)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["loss.ratio=10"], ("loss.ratio", "form")),
        (["loss.ratio=1:2:3"], ("loss.ratio", "form")),
        (["loss.ratio=a:b"], ("loss.ratio", "form")),
        (["loss.ratio=0:0"], ("loss.ratio", "range")),
        (["loss.ratio=-1:2"], ("loss.ratio", "range")),
        (["loss.ratio=inf:1"], ("loss.ratio", "range")),
        (["loss.alpha_lm=0.5", "loss.alpha_con=0.4"], ("loss.alpha_lm", "loss.alpha_con")),
        (["loss.alpha_lm=1.5"], ("loss.alpha_lm", "loss.alpha_con")),
        (["loss.alpha_con=.nan"], ("loss.alpha_con",)),
    ],
)
def test_loss_weights_that_do_not_add_up(load, overrides, named):
    with error_about(RecipeError, *named):
        load(*overrides)


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("- 1\n", "mapping"),
        ("only words\n", "mapping"),
        ("a: [1\n", "yaml"),
        ("loss:\n  ratio: none\n  ratio: '1:1'\n", "yaml"),  # a key twice
        (b"\xff\xfe", "unreadable"),
        ("", "model.path"),
        (MINIMAL + "losss: {ratio: none}\n", ("unknown", "losss", ("loss",))),
    ],
)
def test_a_broken_recipe_file_is_named(load_text, text, about):
    with error_about(RecipeError, about):
        load_text(text)


def test_a_checkpoint_to_start_from_knows_its_base(load_text, tmp_path):
    (tmp_path / "rge.json").write_text('{"recipe": {"model": {"path": "some/base"}}}')
    sources = MINIMAL.replace("model: {path: some/model}\n", "")
    assert load_text(f"init: {tmp_path}{sources}").model.path == "some/base"
    assert load_text(f"init: {tmp_path}{MINIMAL}").model.path == "some/model"
    assert load_text(f"init: {tmp_path / 'plain'}{sources}").model.path == str(tmp_path / "plain")


def test_arguments(load, tmp_path):
    with error_about(RecipeError, ("missing", "recipe")):
        load_recipe([])
    with error_about(RecipeError, ("missing", "recipe")):
        load_recipe(["recipe=demo", "recipe=demo"])
    with error_about(RecipeError, ("choice", "recipe")):
        load_recipe(["recipe=dmo"])
    with error_about(RecipeError, ("choice", "recipe")):
        load_recipe([f"recipe={tmp_path / 'gone.yaml'}"])
    with error_about(RecipeError, "argument"):
        load("demo")
    with error_about(RecipeError, "argument"):
        load("=3")


def test_the_resolved_recipe_loads_again(load, tmp_path):
    """What a checkpoint keeps is enough to run again: the same values, the interpolations resolved."""
    first = to_dict(load("loss.ratio=1:3", "optim.betas=[0.8, 0.9]", "joint.sources=[{path: x, weight: 3}]"))
    again = {key: value for key, value in first.items() if key != "recipe"}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(again))
    second = to_dict(load_recipe(["recipe=again"], tmp_path))
    assert second | {"recipe": "small"} == first


def test_everything_that_is_wrong_is_said_at_once(load_text):
    with pytest.raises(RecipeError) as caught:
        load_text(MINIMAL + "losss: {ratio: none}\ntrain: {seed: x, deterministic: 3}\n")
    said = str(caught.value).splitlines()
    assert len(said) == 3
    assert all("written.yaml: " in line for line in said)


def test_the_runs_folder_may_hold_the_recipes_name(load):
    assert load("out=elsewhere/{recipe}_7").out == "elsewhere/small_7"


def test_texts_are_taken_as_they_stand(load):
    assert load("model.revision=007", "init=null").model.revision == "007"
    assert load("model.revision=null").model.revision is None
    assert load("log.trackers=wandb,tensorboard").log.trackers == ["wandb", "tensorboard"]


def test_a_hash_in_a_value_is_not_a_comment(load):
    assert load("init=runs/x#1").init == "runs/x#1"


def test_a_mix_of_anchors_has_to_mix_something(load):
    assert load("loss.anchor=mix", "loss.oracle_share=1", "loss.oracle_decay_steps=9").loss.oracle_share == 1
    for word, fault in {
        "loss.oracle_share=1": ("value", "loss.oracle_share"),
        "loss.oracle_share=0": ("range", "loss.oracle_share"),
        "loss.oracle_share=1.5": ("range", "loss.oracle_share"),
        "loss.oracle_decay_steps=0": ("range", "loss.oracle_decay_steps"),
    }.items():
        with error_about(RecipeError, fault):
            load("loss.anchor=mix", word)


@pytest.mark.parametrize("anchor", ["none", "oracle"])
def test_how_to_write_rationales_is_refused_where_none_is_written(load, anchor):
    base = (f"loss.anchor={anchor}",)
    load(*base, "rollout.backend=vllm", "rollout.prompt_pass=twice")
    found = load(*base, "rollout.max_new_tokens=9", "rollout.batch_size=3", "rollout.temperature=0")
    assert found.rollout.max_new_tokens == 9  # of validation and of the checkpoint
    for word in (
        "rollout.direct_share=0.5",
        "rollout.reuse_steps=2",
        "rollout.temperature=1.0",
        "loss.budget=0.5",
    ):
        with error_about(RecipeError, ("value", word.partition("=")[0])):
            load(*base, word)
    for path in SHIPPED:
        shipped = load_recipe([f"recipe={path}"])
        if not shipped.loss.direct:  # of which an anchor is one
            load_recipe([f"recipe={path}", "stage=joint", *base])


def test_a_query_without_anything_to_be_compared_with_is_refused(load):
    alone = ("joint.batch_size=1", "data.max_negatives=0")
    with error_about(RecipeError, "joint.batch_size"):
        load(*alone)
    load(*alone, "loss.ratio=1:0")  # nothing is compared
    load("joint.batch_size=1")


def test_a_loss_that_is_dropped_is_out_of_the_recipe(load_text):
    terms = "loss:\n  terms: {info_nce: 1.0, margin: %s}\n"
    assert load_text(MINIMAL + terms % "null").loss.terms == {"info_nce": 1}
    assert load_text(MINIMAL + terms % "0").loss.terms == {"info_nce": 1, "margin": 0}
    with error_about(RecipeError, "loss.terms"):
        load_text(MINIMAL + "loss:\n  terms: {info_nce: null}\n")


def test_a_home_folder_is_expanded(load, load_text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load("out=~/runs/{recipe}", "init=~/runs/x/joint/final", "rl.candidates=pool:~/pool")
    assert (recipe.out, recipe.init) == ("/home/me/runs/small", "/home/me/runs/x/joint/final")
    assert str(recipe.rl.pool) == "/home/me/pool"
    recipe = load_text("init: ~/x\n" + MINIMAL.replace("some/model", "~/models/y"))
    assert (recipe.init, recipe.model.path) == ("/home/me/x", "/home/me/models/y")


def test_the_longest_rationale_follows_from_what_the_model_may_write(load):
    assert load().max_rationale_tokens == 512
    assert load("rollout.max_new_tokens=300").max_rationale_tokens == 1200
    assert load("data.max_rationale_tokens=7").max_rationale_tokens == 7


def test_keys_that_do_not_go_together_are_all_said_at_once(load):
    with pytest.raises(RecipeError) as caught:
        load("rollout.num_rationales=2", "joint.sources=[]", "model.min_pixels=900000")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("epochs", "num_records", "expected"),
    [(1, 1, 1), (1, 512, 1), (1, 513, 2), (3, 513, 4), (0.3, 40, 1), (0.3, 5120, 3), (1.1, 5120, 11)],
)
def test_a_stage_takes_as_many_steps_as_its_epochs_need(epochs, num_records, expected):
    """Whole batches follow each other through all epochs: three times 513 records need four of 512."""
    assert StageConfig(epochs=epochs, batch_size=512).num_steps(num_records) == expected
    assert StageConfig(epochs=epochs, steps=7).num_steps(num_records) == 7


def test_what_vllm_cannot_do_is_said_before_anything_is_loaded(load):
    assert load("rollout.backend=vllm", "rollout.temperature=0.7").rollout.backend == "vllm"
    with error_about(RecipeError, "rollout.prompt_pass"):
        load("rollout.backend=vllm", "rollout.prompt_pass=once")
    for temperature in ("0.001", "2.5"):
        with error_about(RecipeError, "rollout.temperature"):
            load("rollout.backend=vllm", f"rollout.temperature={temperature}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rl.temperature=0",), "rl.temperature"),
        (("rl.num_rationales=1",), "rl.num_rationales"),
        (("rl.alpha_rl=0", "rl.alpha_con=0", "rl.alpha_lm=0"), "rl.alpha_rl"),
        (("loss.anchor=none",), "loss.anchor"),
        (("rl.rewards=[]",), "rl.rewards"),
        (("rl.rewards=[{name: rank, weight: 0}]",), "rl.rewards"),
        (("rl.rewards=[{name: rank}, {name: rank}]",), "rl.rewards"),
        (("rl.rewards=[{name: rank, wait: 2}]",), ('unknown', 'rl.rewards[0].wait')),
        (("rl.loss_type=ppo",), ('choice', 'rl.loss_type')),
        (("rl.scale_rewards=std",), ('choice', 'rl.scale_rewards')),
        (("rl.num_iterations=0",), ('range', 'rl.num_iterations')),
        (("rl.beta=-1",), ('range', 'rl.beta')),
        (("rl.epsilon=2",), ('range', 'rl.epsilon')),
        (("rl.candidates=gallery",), "rl.candidates"),
        (("rl.candidates='pool:'",), "rl.candidates"),
        (("rl.candidates=pool:x", "rl.alpha_rl=0"), "rl.candidates"),
        (("rl.pool_every=0",), ('range', 'rl.pool_every')),
        (("rl.alpha_rl=0", "rl.beta=0.1"), "rl.beta"),
        (("rollout.backend=vllm", "rl.temperature=2.5"), "rl.temperature"),
        (("rollout.backend=vllm", "rl.temperature=0.001"), "rl.temperature"),
        (
            ("validation.sources=[{path: v.jsonl}]", "validation.metric=loss_lm", "rl.alpha_lm=0"),
            "validation.metric",
        ),
        (
            ("validation.sources=[{path: v.jsonl}]", "validation.metric=loss", "rl.alpha_lm=0", "rl.alpha_con=0"),
            "validation.metric",
        ),
    ],
)  # fmt: skip
def test_rl_settings_that_cannot_be(overrides, message):
    with error_about(RecipeError, message):
        load_recipe(
            ["recipe=demo", "stage=rl", *(["init=x"] if "init=null" not in overrides else []), *overrides]
        )


def test_the_metric_of_validation_is_one_that_the_stage_has(load):
    with error_about(RecipeError, "validation.metric"):
        load("validation.sources=[{path: v.jsonl}]", "validation.metric=loss_lm", "loss.ratio=none")
    load("validation.sources=[{path: v.jsonl}]", "validation.metric=loss", "loss.ratio=none")
    rl = ["recipe=demo", "stage=rl", "init=x", "validation.sources=[{path: v.jsonl}]"]
    load_recipe([*rl, "validation.metric=loss", "rl.alpha_lm=0", "rl.alpha_con=0.5"])
    load_recipe([*rl, "validation.metric=loss_lm", "rl.alpha_con=0"])
    load_recipe([*rl, "rl.alpha_lm=0", "rl.alpha_con=0"])
    # Without anything to compare, losses are the LM loss, and another metric is not asked for.
    load_recipe([*rl, "validation.metric=loss", "rl.alpha_rl=0", "rl.alpha_con=0"])


def test_a_reward_may_be_there_twice_with_other_options():
    twice = "rl.rewards=[{name: ndcg}, {name: ndcg, options: {among: labelled}}]"
    assert len(load_recipe(["recipe=demo", "stage=rl", "init=x", twice]).rl.rewards) == 2


def test_rl_is_a_part_of_all_where_the_recipe_has_sources_for_it():
    assert load_recipe(["recipe=demo"]).stages() == ["cold_start", "joint"]
    alone = load_recipe(["recipe=demo", "stage=rl", "init=x"])
    assert alone.stages() == ["rl"]
    assert alone.rl.sources == alone.joint.sources
    with_rl = load_recipe(["recipe=demo", "rl.sources=[{path: x.jsonl}]"])
    assert with_rl.stages() == ["cold_start", "joint", "rl"]
    # Groups are sampled there and nowhere else, and never taken from a store.
    with_rl.rollout.reuse_steps = 3
    rl, joint = with_rl.rollout_of(with_rl.rl), with_rl.rollout_of(with_rl.joint)
    assert (rl.num_rationales, rl.temperature, rl.reuse_steps) == (8, 1.0, 0)
    assert (joint.num_rationales, joint.temperature, joint.reuse_steps) == (1, 0.0, 3)


def test_without_a_policy_gradient_one_greedy_rationale_will_do():
    recipe = load_recipe(
        [
            "recipe=demo", "stage=rl", "init=x", "rl.alpha_rl=0", "rl.alpha_con=0.5", "rl.num_rationales=1",
            "rl.temperature=0",
        ]
    )  # fmt: skip
    assert Objective.of(recipe, "rl").needs_rollout


def test_what_another_library_would_fill_in_is_an_error_and_not_a_folder_of_that_name(tmp_path):
    (tmp_path / "old.yaml").write_text(
        "out: runs/${recipe}\nmodel: {path: '${oc.env:MODEL}'}\n"
        "cold_start: {sources: [{path: a.jsonl}, {path: '${data}/b.jsonl'}]}\n"
    )
    with pytest.raises(RecipeError) as error:
        load_recipe([f"recipe={tmp_path / 'old.yaml'}", "log.project=${name}"])
    lines = str(error.value).splitlines()
    assert [line.removeprefix(f"{tmp_path}/old.yaml: ") for line in lines[1:]] == [
        "out=runs/${recipe}",
        "model.path=${oc.env:MODEL}",
        "cold_start.sources[1].path=${data}/b.jsonl",
        "log.project=${name}",
    ]
    assert "write the value itself" in lines[0]
    assert "{recipe} stands for its name" in lines[0]
    assert not load_recipe(["recipe=demo", "out=$5 {recipe}"]).out.startswith("runs")


def test_a_recipe_may_be_another_one_with_some_keys_changed(load, tmp_path):
    (tmp_path / "more.yaml").write_text("base: small\njoint: {lr: 7e-5}\nrl: {rewards: [{name: rank}]}\n")
    (tmp_path / "most.yaml").write_text("base: more\njoint: {steps: 3}\n")
    load()
    recipe = load_recipe([f"recipe={tmp_path / 'most.yaml'}", "joint.batch_size=9"])
    assert recipe.model.path == "some/model"
    assert (recipe.joint.lr, recipe.joint.steps, recipe.joint.batch_size) == (7e-5, 3, 9)
    assert [reward.name for reward in recipe.rl.rewards] == ["rank"]
    assert recipe.recipe == "most"
    for base, kind in (("smal", "unknown"), ("round", "circle"), ("[small]", "unknown")):
        (tmp_path / "round.yaml").write_text(f"base: {base}\n")
        with error_about(RecipeError, tmp_path / "round.yaml", "base", kind):
            load_recipe([f"recipe={tmp_path / 'round.yaml'}"], tmp_path)
    # What is wrong in a base is said with its name.
    (tmp_path / "more.yaml").write_text("base: small\njoint: {lrr: 1}\n")
    with error_about(RecipeError, ("unknown", "joint.lrr", ("joint.lr",))):
        load_recipe([f"recipe={tmp_path / 'most.yaml'}"])


def test_published_settings_of_reinforcement_learning():
    """G, KL, clip, learning rate and temperature as their papers print them."""
    found = {}
    for name in ("ume_r1", "embed_rl", "grace"):
        recipe = load_recipe([f"recipe={name}", "stage=rl", "init=x"])
        assert recipe.stages() == ["rl"]
        rl = recipe.rl
        assert (rl.alpha_con, rl.alpha_lm, rl.temperature) == (0, 0, 1)
        names = [reward.name for reward in rl.rewards]
        found[name] = (rl.num_rationales, rl.beta, rl.epsilon_high, rl.lr, rl.scale_rewards, names)
    assert found == {
        "ume_r1": (8, 0.04, 0.28, 1e-6, None, ["format", "ume_r1"]),
        "embed_rl": (4, 0.01, None, 3e-6, None, ["format", "embed_rl"]),
        "grace": (8, 0.0, None, 1e-6, "none", ["grace"]),
    }

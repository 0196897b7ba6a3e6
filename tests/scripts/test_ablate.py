"""scripts/ablate.py: what is run, what is not run again, what is refused before anything runs, table and plot."""

import importlib
import json
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
from eval_fakes import write_set
from faults import error_about
from paths import ROOT

from eval.benchmarks.suite import write_suite
from eval.pages.charts import interval_chart, palette
from rge.common.errors import UserError
from rge.common.files import LOCK
from rge.config import Recipe, load_recipe

LOADED: dict[tuple[str, ...], Recipe] = {}
SWEEP = "sweep=loss.anchor=[self,oracle,none]"


@pytest.fixture
def ablate(monkeypatch, tmp_path):
    """The script; training and evaluation are noted, and leave what the real ones leave.

    Query 2g + i of seed s hits with the arm's own rates: self .75, oracle .5, none .25 over four groups of two.
    """
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("ablate", "sweep"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sweep, module = importlib.import_module("sweep"), importlib.import_module("ablate")
    module.commands = []

    def run(command: list[str]) -> None:
        module.commands.append(command)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        folder = Path(given["out"])
        if "rge/train.py" in command:
            final = folder / "joint" / "final"
            final.mkdir(parents=True, exist_ok=True)
            reasons = "none" if given["loss.anchor"] == "none" else "query"
            (final / "rge.json").write_text(json.dumps({"reasons": reasons}))
            return
        folder.mkdir(parents=True)
        arm, seed = folder.parts[-3], int(folder.parts[-2].removeprefix("seed_"))
        hits = np.zeros(8)
        hits[: {"self": 6, "oracle": 4, "none": 2}[arm]] = 1
        hits[7] = seed  # one query more with seed 1
        frame = pd.DataFrame(
            {
                "query_id": [f"q{number}" for number in range(8)],
                "group": [f"g{number // 2}" for number in range(8)],
                "pair": ["seen", "held-out"] * 4,
                "hit@1": hits,
                "mrr": hits / 2,
            }
        )
        frame.sample(frac=1, random_state=seed).to_parquet(folder / "per_query.parquet")
        (folder / "results.json").write_text("{}")

    def load_once(arguments) -> Recipe:
        # The real one takes 50 ms, and thirty tests ask for the same few recipes in different folders.
        key = tuple(argument for argument in arguments if not argument.startswith(("out=", "init=")))
        if key not in LOADED:
            LOADED[key] = load_recipe(arguments)
        return LOADED[key]

    module.sweep = sweep
    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(module, "load_recipe", load_once)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "cold").mkdir()
    module.given = [
        "recipe=demo",
        SWEEP,
        "seeds=2",
        f"init={tmp_path / 'cold'}",
        f"out={tmp_path / 'out'}",
        "metrics=hit@1,mrr",
        "launcher=accelerate launch --num_processes 4",
    ]
    return module


def trained(module) -> list[tuple[str, str]]:
    """Arm and seed of every training command."""
    found = []
    for command in module.commands:
        if "rge/train.py" in command:
            given = dict(part.split("=", 1) for part in command if "=" in part)
            found.append((given["loss.anchor"], given["train.seed"]))
    return found


@pytest.mark.slow
def test_every_arm_and_seed_is_trained_and_evaluated_once(ablate, tmp_path):
    ablate.main([*ablate.given, "joint.lr=5e-4", "with.none=loss.ratio=none joint.lr=1e-3"])
    arms = ["self", "oracle", "none"]
    assert trained(ablate) == [(arm, seed) for seed in "01" for arm in arms]
    train, evaluation = ablate.commands[:2]
    assert train[:4] == ["accelerate", "launch", "--num_processes", "4"]
    assert "stage=joint" in train
    assert f"init={tmp_path / 'cold'}" in train
    assert "joint.lr=5e-4" in train
    assert "query_mode=reasoning" in evaluation
    none = ablate.commands[4]
    assert none.index("joint.lr=1e-3") > none.index(
        "joint.lr=5e-4"
    )  # the arm's own override is the later one
    assert "loss.ratio=none" in none
    assert "query_mode=direct" in ablate.commands[5]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *arms,
        "table.md",
        "table.csv",
        "table.tex",
        "table.json",
        "plot.svg",
        "hits.parquet",
    }


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(ablate, tmp_path):
    ablate.main(ablate.given)
    ablate.commands.clear()
    ablate.main(ablate.given)
    assert ablate.commands == []
    # Training that ended without its evaluation is evaluated.
    (tmp_path / "out" / "oracle" / "seed_1" / "eval" / "results.json").unlink()
    (tmp_path / "out" / "oracle" / "seed_1" / "eval" / "per_query.parquet").unlink()
    (tmp_path / "out" / "oracle" / "seed_1" / "eval").rmdir()
    ablate.main(ablate.given)
    assert trained(ablate) == []
    assert len(ablate.commands) == 1


def test_other_settings_are_left_to_the_trainer_to_refuse_and_another_set_is_refused(ablate, tmp_path):
    ablate.main([*ablate.given, "index=0"])
    ablate.commands.clear()
    ablate.main([*ablate.given, "index=0", "joint.lr=1e-4"])
    assert len(trained(ablate)) == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "queries.parquet").touch()
    with error_about(UserError, "set"):
        ablate.main([*ablate.given, "index=0", f"set={other}"])


def test_a_table_is_of_the_settings_that_were_asked_for(ablate):
    ablate.main(ablate.given)
    with error_about(UserError, "self/seed_0", "settings"):
        ablate.main([*ablate.given, "collect=true", "joint.lr=1e-4"])


def test_a_table_is_of_the_set_that_was_asked_for(ablate, tmp_path):
    ablate.main(ablate.given)
    other = tmp_path / "other"
    other.mkdir()
    (other / "queries.parquet").touch()
    with error_about(UserError, "set"):
        ablate.main([*ablate.given, "collect=true", f"set={other}"])


def test_seeds_from_another_start_or_other_records_make_no_table(ablate, tmp_path):
    """The cold start was trained again between two calls of the sweep, or a file of records was edited."""
    ablate.main(ablate.given)
    for seed, start in ((0, "a"), (1, "b")):
        path = tmp_path / "out" / "oracle" / f"seed_{seed}" / "joint" / "final" / "rge.json"
        records = {"train.jsonl": {"sha256": "c"}}
        identity = {"records": records, "start": {"sha256": start}, "machine": {"cpu": start}}
        path.write_text(json.dumps({"reasons": "query", "identity": identity}))
        (path.parents[2] / "eval.set").unlink()  # which says that the evaluation is of the checkpoint before
    with error_about(UserError, "oracle/seed_1", "start"):
        ablate.main([*ablate.given, "collect=true"])


def test_a_run_is_evaluated_with_the_plugins_of_its_recipe(ablate, monkeypatch):
    """They may define its prompts or its family."""
    load = ablate.load_recipe

    def load_with_plugins(words) -> Recipe:
        return replace(load(words), plugins=("my_prompts", "my_families"))

    monkeypatch.setattr(ablate, "load_recipe", load_with_plugins)
    ablate.main([*ablate.given, "index=0"])
    _, evaluation = ablate.commands
    assert "plugins=my_prompts,my_families" in evaluation


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"reasons": "query"}, "reasoning"),
        ({"reasons": "none"}, "direct"),
    ],
)
def test_a_run_is_asked_as_its_queries_were_trained(ablate, tmp_path, monkeypatch, settings, mode):
    arm = ablate.Arm("self")
    study, commands = ablate.Study(tmp_path, [arm], (), Path("set"), 1), []
    monkeypatch.setattr(ablate.sweep, "run", commands.append)
    study.checkpoint(arm, 0).mkdir(parents=True)
    (study.checkpoint(arm, 0) / "rge.json").write_text(json.dumps(settings))
    ablate.sweep._evaluate(study, arm, 0)
    assert f"query_mode={mode}" in commands[0]


def test_an_arm_s_overrides_may_be_given_one_by_one(ablate):
    words = ["sweep=loss.anchor=[none]", "with.none=loss.ratio=none", "with.none=joint.lr=2e-3"]
    _, compared = ablate.read_options(["recipe=demo", *words])
    assert compared.arms == {"none": ["loss.anchor=none", "loss.ratio=none", "joint.lr=2e-3"]}


def test_a_sweep_does_not_lock_what_training_locks(ablate, tmp_path):
    """Every training that it starts would be refused."""
    with ablate.sweep.held(tmp_path / "run", wait=False) as ours:
        assert ours
        assert not (tmp_path / "run" / LOCK).exists()


def test_a_job_array_runs_one_run_each_and_a_last_call_makes_the_table(ablate, tmp_path, capsys):
    for index in range(6):
        ablate.commands.clear()
        ablate.main([*ablate.given, f"index={index}"])
        assert trained(ablate) == [(["self", "oracle", "none"][index % 3], str(index // 3))]
        assert not (tmp_path / "out" / "table.md").exists()
    ablate.commands.clear()
    ablate.main([*ablate.given, "collect=true"])
    assert ablate.commands == []
    shown = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(shown) == json.loads((tmp_path / "out" / "table.json").read_text())


def test_tables_need_every_run(ablate):
    ablate.main([*ablate.given, "index=1"])
    with error_about(UserError, "index", 0):
        ablate.main([*ablate.given, "collect=true"])


def test_the_list_says_what_each_index_is(ablate, capsys):
    ablate.main([*ablate.given, "index=3"])
    capsys.readouterr()
    ablate.main([*ablate.given, "list=true"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list("012345")
    assert [line[3] for line in lines] == ["open"] * 3 + ["finished"] + ["open"] * 2
    assert lines[4][1:3] == ["oracle", "seed 1"]


def test_the_tables_figures(ablate, tmp_path):
    ablate.main(ablate.given)
    rows = json.loads((tmp_path / "out" / "table.json").read_text())
    found = {(row["row"], row["slice"], row["metric"]): row for row in rows}
    assert len(found) == len(rows) == 5 * 3 * 2  # three arms and two differences, three slices, two metrics
    # Of eight queries, self hits the first 6 and with seed 1 also the last: (6/8 + 7/8) / 2.
    assert found["self", "all", "hit@1"]["seeds"] == [0.75, 0.875]
    assert found["self", "all", "hit@1"]["mean"] == pytest.approx(13 / 16)
    assert found["none", "all", "mrr"]["mean"] == pytest.approx((2 / 8 + 3 / 8) / 4)
    # Odd numbers are held out: self hits 1, 3, 5 and, with seed 1, 7.
    assert found["self", "held-out", "hit@1"]["queries"] == 4
    assert found["self", "held-out", "hit@1"]["mean"] == pytest.approx(3.5 / 4)
    difference = found["oracle - self", "all", "hit@1"]
    assert difference["mean"] == pytest.approx(-2 / 8)
    # Per group of two the difference is 0, 0, -1, 0; four groups have Student's t.
    assert -1 <= difference["low"] < difference["mean"] < difference["high"] < 1
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| loss.anchor | all | held-out | seen | seeds |" in text
    assert "| self | 81.2 [" in text
    assert "| oracle - self | -25.0 [" in text


@pytest.mark.slow
def test_a_suite_is_swept_by_means_over_its_members(ablate, tmp_path):
    """North has two queries and south six: a mean over queries would be south's."""
    suite = tmp_path / "suite"
    for name in ("north", "south"):
        (suite / name).mkdir(parents=True)
        (suite / name / "meta.json").write_text("{}")
    members = {"north": {"half": "N"}, "south": {"half": "S"}}
    write_suite(suite, name="compass", benchmark="generic", column="side", members=members)
    make = ablate.sweep.run

    def run(command):
        make(command)
        if "rge/train.py" in command:
            assert ablate.commands[-1] == command
            return
        assert {"benchmark=generic", "metrics=recall@100"} <= set(command)
        path = Path(dict(part.split("=", 1) for part in command if "=" in part)["out"]) / "per_query.parquet"
        frame = pd.read_parquet(path).sort_values("query_id")
        frame["category"] = ["north"] * 2 + ["south"] * 6
        frame["half"] = ["N"] * 2 + ["S"] * 6
        frame["recall@100"] = frame["mrr"]
        frame.to_parquet(path)

    ablate.sweep.run = run
    given = [word for word in ablate.given if not word.startswith(("set=", "metrics="))]
    ablate.main([*given, f"set={suite}", "metrics=hit@1,recall@100"])
    rows = json.loads((tmp_path / "out" / "table.json").read_text())
    found = {(row["row"], row["slice"]): row for row in rows if row["metric"] == "hit@1"}
    # none hits the first two queries, which are north's, and with seed 1 the last of south's six
    assert found["none", "all"]["mean"] == pytest.approx((1 + 0.5 / 6) / 2)
    assert found["none", "all"]["seeds"] == [0.5, pytest.approx((1 + 1 / 6) / 2, abs=1e-4)]
    assert (found["none", "N"]["mean"], found["none", "south"]["mean"]) == (1.0, pytest.approx(0.5 / 6))
    assert found["none - self", "all"]["mean"] == pytest.approx(-4 / 6 / 2)
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| loss.anchor | all | N | S | seeds |\n|---|---|---|---|---|\n| self | " in text
    assert "100.0 – |" in text
    table = pd.read_csv(tmp_path / "out" / "table.csv").set_index(["row", "slice", "metric"])
    assert table.loc[("none", "all", "hit@1"), "mean"] == pytest.approx(found["none", "all"]["mean"])
    assert "\\toprule" in (tmp_path / "out" / "table.tex").read_text()


def test_runs_of_different_queries_make_no_table(ablate, tmp_path):
    ablate.main(ablate.given)
    path = tmp_path / "out" / "none" / "seed_0" / "eval" / "per_query.parquet"
    pd.read_parquet(path).iloc[:-1].to_parquet(path)
    with error_about(UserError, "queries"):
        ablate.main([*ablate.given, "collect=true"])
    with error_about(UserError, "by"):
        ablate.main([*ablate.given, "collect=true", "by=pairs"])
    given = [word for word in ablate.given if not word.startswith("metrics=")]
    with error_about(UserError, "ndcg@7"):
        ablate.main([*given, "collect=true", "metrics=ndcg@7"])


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        (["sweep=loss.anchor"], ("sweep",)),
        (["sweep=loss.anchor=[self,,none]"], ("sweep", "empty")),
        (["sweep=loss.anchor=[]"], ("sweep", "empty")),
        (["sweep=loss.ratio=[1:10,1_10]"], ("sweep", "1_10")),
        (["sweep=loss.ankor=[self]"], (("unknown", "loss.ankor"),)),
        (["sweep=loss.anchor=[self,oracel]"], (("choice", "loss.anchor"),)),
        (["with.nothing=loss.ratio=none"], ("with.nothing",)),
        (["with.none=loss.ratoi=none"], (("unknown", "loss.ratoi", ("loss.ratio",)),)),
        (["seeds=0"], (("range", "seeds"),)),
        (["index=6"], ("index",)),
        (["collect=perhaps"], (("type", "collect"),)),
        (["metrics=hit@1,recal@1"], ("recal@1",)),
        (["train.seed=5"], ("train.seed=5",)),
        (["with.none=train.seed=5"], ("train.seed=5",)),
        (["sweep=train.seed=[0,1]"], ("train.seed=0",)),
        (["init=runs/nowhere/final"], ("init", "runs/nowhere/final")),
        (["set=recipes"], ("set", "recipes")),
        (["recipe=qwen25vl_3b"], ("set", "missing")),
        (["recipe=nothing"], (("choice", "recipe"),)),
        (["nonsense"], ("argument",)),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(ablate, wrong, fields):
    names = {argument.split("=")[0] for argument in wrong}
    given = [argument for argument in ablate.given if argument.split("=")[0] not in names]
    with error_about(UserError, *fields):
        ablate.main([*given, *wrong])
    assert ablate.commands == []


@pytest.mark.parametrize("init", [["init=cold"], []])
def test_a_recipe_needs_only_what_the_swept_stage_needs(ablate, tmp_path, monkeypatch, capsys, init):
    """Here it has no cold start, and its sources are given with the sweep."""
    monkeypatch.setattr(ablate, "load_recipe", load_recipe)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: {path: some/model}\nout: trained\n")
    words = ["recipe=mine.yaml", SWEEP, "joint.sources=[{path: a.jsonl}]", "set=set", "seeds=1", "list=true"]
    ablate.main([*words, *init])
    assert capsys.readouterr().out.count("seed 0\topen") == 3
    options, study = ablate.plan(*ablate.read_options([*words, *init]))
    assert options.init == (init[0].removeprefix("init=") if init else "trained/cold_start/final")
    assert f"init={options.init}" in study.words(study.arms[0], 0)


def test_it_is_not_itself_launched(ablate, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error_about(UserError, "launcher"):
        ablate.main(ablate.given)


def test_commas_inside_a_value(ablate):
    assert ablate.parse_sweep("optim.betas=[[0.9,0.98], [0.9,0.999]]") == (
        "optim.betas",
        ["[0.9,0.98]", "[0.9,0.999]"],
    )


def mark(row, which, metric, mean, low, high, **more):
    return {"row": row, "slice": which, "metric": metric, "mean": mean, "low": low, "high": high, **more}


def test_plot_places_means_intervals_and_seeds():
    marks = [
        mark("1:1", "seen", "hit@1", 0.2, 0.1, 0.4, seeds=(0.15, 0.25)),
        mark("1:10 <b>", "seen", "hit@1", 0.3, 0.2, 0.4),
    ]
    text = interval_chart(marks, title="a & b")
    svg = ElementTree.fromstring(text)
    assert svg.get("aria-label") == "a & b"

    def drawn(kind: str, pattern: str) -> list[list[float]]:
        return [
            [float(x) for x in re.search(pattern, mark).groups()]
            for mark in re.findall(rf"<(?:line|path) [^>]*{kind}[^>]*>", text)
        ]

    whiskers = drawn(
        'stroke="#[0-9a-f]{6}" stroke-width="2"/', r"translate\(([\d.]+),([\d.]+)\)\" x2=\"([\d.]+)"
    )
    means = drawn('roledescription="circle"', r"translate\(([\d.]+),([\d.]+)")
    seeds = drawn('opacity="0.6"', r"translate\(([\d.]+),([\d.]+)")
    (first, y, length), (_, below, second_length) = whiskers
    # Ten per cent points are equally long everywhere, and the dot stands where its value is.
    unit = length / 0.3
    assert means[0][0] == pytest.approx(first + 0.1 * unit, abs=0.2)
    assert second_length / 0.2 == pytest.approx(unit, rel=0.01)
    assert sum(x for x, _ in seeds) / 2 == pytest.approx(means[0][0], abs=0.2)
    assert y == means[0][1] < below == means[1][1]
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert "1:10 <b>, seen, hit@1: 30.0% [20.0, 40.0]" in titles


def test_a_chart_that_stands_alone_has_both_schemes_and_no_variables():
    text = interval_chart([mark("a", "s", "m", 0.2, 0.1, 0.4)], title="t")
    assert "var(" not in text
    light, dark = palette()
    assert f'stroke="{light["series-0"]}"' in text
    assert f'[stroke="{light["series-0"]}"]{{stroke:{dark["series-0"]}}}' in text
    assert not re.search(r"(?:href|src|url\()", text)


@pytest.mark.slow(5)
def test_a_real_sweep_with_two_processes_a_run(ablate, tmp_path, tiny_path, monkeypatch, capsys):
    """Two runs of one step by two processes, evaluated; then the table."""

    def run(command: list[str]) -> None:
        if "rge/train.py" in command:
            at = command.index("rge/train.py")
            assert command[:at] == shlex.split(ablate.sweep.default_launcher())
            done = forked.run_pair(*command[at:])
        else:
            done = forked.run(*command[1:])
        assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setattr(ablate.sweep, "run", run)
    monkeypatch.chdir(ROOT)
    data = write_set(tmp_path / "set", num_queries=8, num_candidates=12)
    shipped = ROOT / "data_prep" / "demo" / "data" / "train"
    (tmp_path / "train").mkdir()
    for path in shipped.iterdir():
        (tmp_path / "train" / path.name).symlink_to(path)
    few = tmp_path / "train" / "few.jsonl"  # every process looks through all records before it starts
    few.write_text("".join((shipped / "relations.jsonl").read_text().splitlines(keepends=True)[:16]))
    words = [
        "recipe=demo",
        f"joint.sources=[{{path: {few}}}]",
        "sweep=loss.anchor=[self,none]",
        "seeds=1",
        f"init={tiny_path}",
        f"out={tmp_path / 'sweep'}",
        f"set={data}",
        "joint.steps=1",
        "joint.batch_size=4",
        "rollout.max_new_tokens=3",
        "data.num_workers=0",
        "train.num_processes=2",
    ]
    ablate.main(words)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["row"] for row in rows} == {"self", "none", "none - self"}
    assert all(0 <= row["low"] <= row["high"] <= 1 for row in rows if "-" not in row["row"])
    ElementTree.parse(tmp_path / "sweep" / "plot.svg")
    settings = [
        json.loads((tmp_path / "sweep" / arm / "seed_0" / "joint" / "final" / "rge.json").read_text())
        for arm in ("self", "none")
    ]
    assert [found["reasons"] for found in settings] == ["query", "none"]


def test_the_stage_rl_goes_on_from_the_joint_stage(ablate, tmp_path, monkeypatch):
    words = ["recipe=demo", "stage=rl", "sweep=rl.alpha_rl=[0,1]"]
    options = ablate.parse_options(ablate.Options, words)
    assert ablate.complete(options, "rl.alpha_rl", ["rl.alpha_rl=0"]).init == "runs/demo/joint/final"
    started = []

    def run(command: list[str]) -> None:
        started.append(command)
        sys.exit(3)

    monkeypatch.setattr(ablate.sweep, "run", run)
    words += [
        "rl.alpha_con=0",
        f"init={tmp_path / 'cold'}",
        f"out={tmp_path / 'rl'}",
        f"set={ROOT / ablate.DEMO_SET}",
    ]
    with pytest.raises(SystemExit):
        ablate.main(words)
    assert {"stage=rl", "rl.alpha_rl=0", "rl.alpha_con=0", f"init={tmp_path / 'cold'}"} <= set(started[0])


def test_paths_are_relative_to_the_working_directory(ablate, tmp_path, monkeypatch):
    """Also that of a recipe; what belongs to the repository is found from anywhere."""
    started = []

    def run(command: list[str]) -> None:
        started.append(command)
        sys.exit(3)

    monkeypatch.setattr(ablate.sweep, "run", run)
    monkeypatch.setattr(ablate, "load_recipe", load_recipe)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text((ROOT / "recipes" / "demo.yaml").read_text())
    Path("set").mkdir()
    Path("set/queries.parquet").touch()
    for recipe in (["recipe=mine.yaml", "set=set"], ["recipe=demo"]):
        with pytest.raises(SystemExit):
            ablate.main([*recipe, SWEEP, "init=cold", "out=sweep"])
    with pytest.raises(SystemExit):  # the shipped checkpoint, as for every other command
        ablate.main(["recipe=demo", SWEEP, "init=demo", "out=others"])
    assert "init=demo" in started.pop()
    for command in started:
        config, script = (
            command[command.index("--config_file") + 1],
            command[command.index("--config_file") + 2],
        )
        assert [Path(path).resolve() for path in (config, script)] == [
            ROOT / "recipes/accelerate/cpu.yaml",
            ROOT / "rge/train.py",
        ]
        assert {"init=cold", "out=sweep/self/seed_0"} <= set(command)
    assert Path("sweep/self/seed_0").is_dir()
    with error_about(UserError, "init", "nowhere"):
        ablate.main(["recipe=demo", SWEEP, "init=nowhere", "out=sweep"])


def test_every_finding_has_arms_that_exist_and_recipes_that_load(ablate, tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "load_recipe", load_recipe)
    monkeypatch.chdir(ROOT)
    for name in ablate.FINDINGS:
        options, compared = ablate.read_options([f"finding={name}", f"out={tmp_path}", "seeds=2"])
        arms = {arm for claim in compared.claims for arm in ablate.weights_of(claim.sum)}
        if not compared.arms:  # its data are not made any more
            with pytest.raises(UserError):
                ablate.plan(options, compared)
            continue
        assert arms <= set(compared.arms), name
        assert "{" not in "".join(compared.makes).replace("{seed}", ""), name
        options, study = ablate.plan(options, compared)
        assert (study.out, study.seeds) == (tmp_path, 2)
        starts = set(compared.makes)
        for arm in study.arms:
            assert arm.of in ("", *study.by_name)
            [*_, start] = [word for word in study.recipe + arm.overrides if word.startswith("init=")]
            assert start.removeprefix("init=") in starts, name
            load_recipe(study.words(arm, 1))
        for command in compared.makes.values():
            words = shlex.split(command.replace("{seed}", "1"))
            if words[1] == "rge/train.py":
                load_recipe(words[2:])
            else:
                assert (ROOT / words[1]).is_file() or words[2] in ("data_prep", "rge.small_models"), command


def test_a_finding_makes_what_is_missing_and_asks_a_checkpoint_in_two_modes(ablate, tmp_path, monkeypatch):
    (tmp_path / "made_1").mkdir()
    text = f"""
options: [recipe=demo, seeds=2, "init={tmp_path}/made_{{seed}}", out={tmp_path}/out, metrics=hit@1]
makes: {{"{tmp_path}/made_{{seed}}": "python make.py out={tmp_path}/made_{{seed}}"}}
arms:
  self: [loss.anchor=self]
  oracle: [of=self, query_mode=direct, max_rationale_tokens=3, set={tmp_path}/other]
rows: [{{says: "Both", sum: self - oracle}}]
"""
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setitem(ablate.FINDINGS, "mine", tmp_path / "mine.yaml")
    make = ablate.sweep.run

    def run(command):
        if command[1] == "make.py":
            ablate.commands.append(command)
            (tmp_path / "made_0").mkdir()
        else:
            make(command)

    monkeypatch.setattr(ablate.sweep, "run", run)
    ablate.main(["finding=mine", "launcher=accelerate launch"])
    assert [command[1] for command in ablate.commands].count("make.py") == 1
    assert trained(ablate) == [("self", "0"), ("self", "1")]
    direct = [command for command in ablate.commands if "query_mode=direct" in command]
    assert all("max_rationale_tokens=3" in command for command in direct)
    assert {f"set={tmp_path}/other", f"checkpoint={tmp_path}/out/self/seed_1/joint/final"} <= set(direct[1])
    found = {row["row"]: row["mean"] for row in json.loads((tmp_path / "out" / "table.json").read_text())}
    # What a finished finding leaves, the table is made from again.
    kept = pd.read_parquet(tmp_path / "out" / "hits.parquet")
    for name in list(ablate.FINDINGS):
        if name != "mine":
            monkeypatch.delitem(ablate.FINDINGS, name)
    row = list(ablate.evidence(kept))[2]
    assert row.startswith(f"| Both | {100 * found['self - oracle']:+.1f} [")
    assert "| 81.2, 56.2 | 2 | mine |" in row
    with pytest.raises(UserError):
        list(ablate.evidence(kept[kept["arm"] == "self"]))


@pytest.mark.slow
def test_every_row_of_the_evidence_is_recomputed_from_what_was_kept(ablate):
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    made = list(ablate.evidence(pd.read_parquet(ROOT / "docs" / "kept" / "hits.parquet")))
    table, nulls = made[: made.index("")], made[made.index("") + 1 :]
    assert "\n".join(table) in page
    assert "\n".join(nulls) in page
    # And nothing on it is from elsewhere.
    left = page.replace("\n".join(table), "").replace("\n".join(nulls), "")
    assert not re.search(r"\[-?\d+\.\d, -?\d+\.\d\]", left)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    three = readme.partition("## Three results")[2].partition("## ")[0]
    for cell in re.findall(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", three):
        assert any(cell in line for line in made), cell

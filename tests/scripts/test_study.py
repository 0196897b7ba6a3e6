"""scripts/study.py: what is trained from what, what is not run again, what the page says of figures and of what is not there."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paths import ROOT

from rge.common.errors import UserError
from rge.config import load_recipe

HITS = {"self": 30, "oracle": 20, "none": 10}
"""Of forty queries in ten groups, by anchor; at dose 0 all have 20."""


@pytest.fixture
def study(monkeypatch, tmp_path):
    """The script; training, diagnoses and evaluation are noted, and leave what the real ones leave."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("ablate", "arms", "study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    arms, module = importlib.import_module("arms"), importlib.import_module("study")
    module.commands, module.read = [], []

    def run(command: list[str]) -> None:
        module.commands.append(command)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        out = Path(given["out"])
        if "rge/train.py" in command:
            # Every arm is a recipe that loads.
            recipe = load_recipe(command[command.index("rge/train.py") + 1 :])
            if "init" not in given:  # its tokenizer is learned from both stages
                read = [source.path for source in (*recipe.cold_start.sources, *recipe.joint.sources)]
                module.read += [*read, recipe.model.scratch.naming]
            (out / given["stage"] / "final").mkdir(parents=True)
            return
        out.mkdir(parents=True)
        if "rge.diagnose" in command:
            kind = command[command.index("rge.diagnose") + 1]
            gain = {"right": 2.0, "wrong query": 1.5, "own rationale": 0.01}
            hits = {"own": (0.5, 0.4, 0.6), "oracle": (0.6, 0.5, 0.7), "oracle, swapped": (0.1, 0.0, 0.2)}
            found = {"gain": gain, "conditions": {name: {"hit@1": hit} for name, hit in hits.items()}}
            (out / f"{kind}.json").write_text(json.dumps(found))
            return
        anchor, _, dose = out.parts[-3].partition("_")
        hits = np.zeros(40)
        hits[: HITS.get(anchor, 20) if dose == "1" else 20] = 1
        frame = pd.DataFrame({"query_id": [f"q{n}" for n in range(40)], "hit@1": np.roll(hits, 0)})
        frame["group"] = [f"g{n // 4}" for n in range(40)]
        frame["rationale_tokens"] = 12.0
        frame.to_parquet(out / "per_query.parquet")
        (out / "results.json").write_text("{}")

    monkeypatch.setattr(arms, "run", run)
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "build", lambda folder, doses: module.built.append((folder, doses)))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module.built = []
    module.given = [f"out={tmp_path / 'a study'}", "launcher=accelerate launch"]
    return module


def trained(study):
    """(arm, init) of every training, in order."""
    found = []
    for command in study.commands:
        if "rge/train.py" in command:
            given = [part.split("=", 1) for part in command if "=" in part]
            places = dict(given)
            found.append((Path(places["out"]).parent.name, places.get("init", "").rpartition("a study/")[2]))
    return found


def page(study, letter):
    folder = Path(study.given[0].removeprefix("out="))
    return {row["says"]: row for row in json.loads((folder / "page.json").read_text())[letter]}


def test_table_4_from_shared_cold_starts_with_its_control(study, capsys):
    study.main(["a", "seeds=2", "doses=1,0", *study.given])
    assert study.built == [(Path(study.given[0].removeprefix("out=")) / "data", [0.0, 0.5, 1.0])]
    once = trained(study)
    assert once[:5] == [
        ("eyes", ""),
        ("cold_1", "eyes/shared/backbone"),
        ("self_1", "cold_1/shared/cold_start/final"),
        ("oracle_1", "cold_1/shared/cold_start/final"),
        ("cold_0", "eyes/shared/backbone"),
    ]
    # Wherever the study is made, it reads no data of another place.
    assert len(study.read) == 3
    assert all(str(path).startswith(study.given[0].removeprefix("out=")) for path in study.read)
    names = [name for name, _ in once]
    assert [names.count(name) for name in ("eyes", "cold_1", "cold_0", "self_1", "none_0", "half_1")] == [
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    # Doses differ in the records, anchors in their own settings, and in nothing else.
    words = {}
    for command in study.commands:
        if "rge/train.py" in command and "train.seed=1" in command:
            given = dict(part.split("=", 1) for part in command if "=" in part)
            words[Path(given["out"]).parent.name] = {
                key: value for key, value in given.items() if key not in ("init", "out")
            }
    same = {key: value.replace("dose_1", "dose_0") for key, value in words["self_1"].items()}
    assert same == words["self_0"]
    assert {key for key in words["oracle_1"] if words["oracle_1"][key] != words["self_1"].get(key)} == {
        "loss.anchor"
    }
    assert {"loss.anchor", "loss.ratio", "joint.lr"} == words["none_1"].keys() - words["self_1"].keys()
    asked = {
        Path(command[-4].rpartition("out=")[2]).parts[-3]: command
        for command in study.commands
        if "eval" in command
    }
    assert "query_mode=direct" in asked["none_1"]
    assert "query_mode=reasoning" in asked["half_1"]

    rows = page(study, "a")
    assert rows["dose 1: self over oracle"]["ours"].startswith("+25.0 [")
    assert rows["dose 1: self over oracle"]["verdict"] == "found again"
    assert rows["dose 1: self"]["ours"].startswith("75.0 [")
    assert rows["dose 0: self over oracle"]["ours"] == "+0.0 [-30.8, 30.8]"  # ten groups, all alike
    assert rows["dose 0: self over oracle"]["verdict"] == ""  # a control has none
    assert rows["self over oracle, dose 1 more than dose 0"]["figure"]["mean"] == pytest.approx(0.25)
    assert rows["dose 1: self over none"]["seeds"] == 2
    assert all(row["verdict"] == "not run yet" for row in page(study, "b").values())
    assert "| dose 1: self over oracle | +7.0 | +25.0 [" in capsys.readouterr().out

    before = len(study.commands)
    study.main(["a", "seeds=2", "doses=1,0", *study.given])
    assert len(study.commands) == before
    study.main(["a", "seeds=3", "doses=1,0", *study.given])
    assert {name for name, _ in trained(study)[len(once) :]} == set(names) - {"eyes", "cold_1", "cold_0"}


def test_every_finding_has_arms_that_exist_and_recipes_that_load(study):
    study.main(["all", "seeds=1", *study.given])
    asked = [command for command in study.commands if "eval" in command]
    assert any("candidate_mode=reasoning" in command for command in asked)
    for letter in "abce":
        assert all(row["verdict"] != "not run yet" for row in page(study, letter).values()), letter
    again = page(study, "d")
    leak = next(row for says, row in again.items() if says.startswith("dose 1: nats"))
    assert (leak["ours"], leak["verdict"]) == ("2.00; 1.50; 0.01", "found again")
    assert any("60.0 [50.0, 70.0]" in row["ours"] for row in again.values())
    # Another way of asking trains nothing.
    assert not [name for name, _ in trained(study) if "reasoning" in name]
    by_name = dict(trained(study))
    assert by_name["1_10"] == "demo/cold/shared/cold_start/final"
    assert by_name["self_fourfold"] == "cold_fourfold/shared/cold_start/final"


def test_short_and_trial_forms_say_what_they_are(study, capsys):
    study.main(["all", "short=true", "steps=2", *study.given])
    names = {name for name, _ in trained(study)}
    assert {"self_1", "oracle_0", "half_direct"} <= names
    assert not names & {"1_10", "self_0.5", "sampled", "half_1"}
    train = [command for command in study.commands if "rge/train.py" in command]
    assert all("joint.steps=2" in command for command in train if "stage=joint" in command)
    assert "Every stage had 2 steps: a trial of the machinery, no figures." in capsys.readouterr().out


def test_what_differs_the_other_way_is_said(study):
    assert study.verdict({"mean": -0.1, "low": -0.2, "high": -0.05}, 1) == "the opposite"
    assert study.verdict({"mean": 0.1, "low": -0.01, "high": 0.2}, 1) == "no difference seen"
    assert study.verdict({"mean": -0.1, "low": -0.2, "high": -0.05}, -1) == "found again"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which finding: a, b, c, d, e, f, or all"),
        (["g"], "there is no finding 'g'"),
        (["a", "seeds=0"], "seeds must be at least 1, got 0"),
        (["a", "seed=1"], r"unknown key seed; did you mean seeds\?"),
    ],
)
def test_wrong_words_end_before_anything_runs(study, words, message):
    with pytest.raises(UserError, match=message):
        study.main([*words, *study.given])
    assert study.commands == study.built == []

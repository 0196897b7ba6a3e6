"""scripts/arms.py and scripts/rl_study.py: what is run in which order, equal counted FLOPs, what is not run again, the tables."""

import importlib
import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pandas as pd
import pytest
from paths import ROOT

from rge.common.errors import UserError

HITS = {"joint": 2, "again": 3, "rl_con": 6}
"""Of eight queries, by arm."""


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """Both scripts; training, counting and evaluation are noted, and leave what the real ones leave."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("ablate", "arms", "rl_study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    arms, study = importlib.import_module("arms"), importlib.import_module("rl_study")
    study.commands = []

    def run(command: list[str]) -> None:
        study.commands.append(command)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        out = Path(given["out"])
        if "rge/train.py" in command:
            (out / given["stage"] / "final").mkdir(parents=True)
            return
        out.mkdir(parents=True)
        arm, seed = out.parts[-3], int(out.parts[-2].removeprefix("seed_"))
        hits = np.zeros(8)
        hits[: HITS[arm.rpartition("_")[0]]] = 1
        hits[7] = seed
        frame = pd.DataFrame(
            {"query_id": [f"q{n}" for n in range(8)], "hit@1": hits, "rationale_tokens": 12.0}
        )
        frame["rationale"] = [f"why {n}" if n % 2 else "no" for n in range(8)]
        frame["group"] = [f"g{n // 2}" for n in range(8)]
        frame["pair"] = ["seen"] * 6 + ["held_out"] * 2
        frame.sample(frac=1, random_state=seed).to_parquet(out / "per_query.parquet")
        (out / "results.json").write_text("{}")

    def count(command, **_):
        study.counted.append(command)
        flops = {"joint": 50.0, "rl": 80.0}[next(word for word in command if word.startswith("stage="))[6:]]
        return CompletedProcess(
            command, 0, "noise\n" + json.dumps({"flops_per_step": flops, "steps": 3}) + "\n"
        )

    study.counted = []
    monkeypatch.setattr(arms, "run", run)
    monkeypatch.setattr(arms.subprocess, "run", count)
    study.given = [f"out={tmp_path / 'a study'}", "launcher=accelerate launch"]
    return study


def trained(study) -> list[str]:
    """Arm and seed of every training."""
    outs = [
        next(word for word in command if word.startswith("out="))
        for command in study.commands
        if "rge/train.py" in command
    ]
    return ["/".join(Path(out).parts[-2:]) for out in outs]


def test_an_arm_is_trained_after_what_it_starts_from_and_gets_no_more_flops_than_joint_training(
    scripts, tmp_path
):
    scripts.main([*scripts.given, "doses=50", "arms=rl_con_50", "seeds=1"])
    assert trained(scripts) == ["eyes/shared", "cold_50/shared", "joint_50/seed_0", "rl_con_50/seed_0"]
    *_, train, _, _ = scripts.commands
    assert f"init={tmp_path / 'a study'}/joint_50/seed_0/joint/final" in train
    # 220 joint steps of 50 are 137 steps of 80.
    assert "rl.steps=137" in train
    assert train[:3] == ["accelerate", "launch", "rge/train.py"]
    cold = scripts.commands[1]
    assert f"init={tmp_path / 'a study'}/eyes/shared/backbone" in cold
    assert any("data_50/train/relations.jsonl" in word for word in cold)


def test_what_is_finished_is_not_run_or_counted_again_and_a_changed_arm_is(scripts):
    given = [*scripts.given, "doses=50", "arms=again_50,rl_con_50", "seeds=2"]
    scripts.main(given)
    assert trained(scripts).count("cold_50/shared") == 1
    assert len(scripts.counted) == 2
    scripts.commands.clear()
    scripts.main(given)
    assert scripts.commands == []
    assert len(scripts.counted) == 2


def test_the_tables_pair_arms_by_query_and_say_what_is_not_run(scripts, tmp_path):
    scripts.main([*scripts.given, "doses=50,0", "arms=again_50,rl_con_50,joint_0", "seeds=2"])
    rows = json.loads((tmp_path / "a study" / "table.json").read_text())

    def row(name, title, metric="hit@1"):
        return next(one for one in rows if (one["row"], one["slice"], one["metric"]) == (name, title, metric))

    drawings, seen = "unseen drawings of training families", "test families, seen pairs"
    found = row("rl_con_50", drawings)
    assert found["seeds"] == [0.75, 0.875]
    assert found["mean"] == pytest.approx(0.8125)
    difference = row("rl_con_50 - again_50", drawings)
    assert difference["mean"] == pytest.approx(3 / 8)
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert row("rl_con_50 - again_50", seen)["mean"] == pytest.approx(3 / 6)
    assert row("rl_con_50", drawings, "rationale_tokens")["mean"] == 12
    text = (tmp_path / "a study" / "table.md").read_text()
    assert "Not run yet: rl_50, ume_50, rl_lm_50, length_50, adaptive_50, again_0, rl_con_0, rl_lm_0." in text
    assert "| rl_con_50 | 137 | 0.0 | 0.00 |" in text


def test_what_is_written_is_held_against_the_sets_rationales(scripts, tmp_path):
    given = [*scripts.given, "doses=50", "arms=rl_con_50", "seeds=2"]
    scripts.main(given)
    known = pd.DataFrame(
        {"query-id": ["q1", "q3"], "corpus-id": ["c", "c"], "rationale": ["why 1", "another"]}
    )
    known.to_parquet(tmp_path / "a study" / "data_50" / "unseen" / "rationales.parquet")
    scripts.main([*given, "collect=true"])
    rows = json.loads((tmp_path / "a study" / "table.json").read_text())
    found = {
        one["metric"]: one["mean"] for one in rows if one["row"] == "rl_con_50" and "unseen" in one["slice"]
    }
    assert found["right_rationale"] == pytest.approx(1 / 8)
    assert found["hit_after_wrong"] == pytest.approx((5 + 6) / 2 / 8)


@pytest.mark.parametrize(
    ("words", "message"), [(["doses=30"], "doses are 50, 0, 25"), (["arms=rl_51"], "no rl_51 among")]
)
def test_what_there_is_not_is_refused_before_anything_runs(scripts, words, message):
    with pytest.raises(UserError, match=message):
        scripts.main([*scripts.given, *words])
    assert scripts.commands == []

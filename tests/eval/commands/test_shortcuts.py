"""Shortcuts, on tables small enough to count by hand."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, write_set
from faults import error_about

from eval.__main__ import main
from eval.commands.audit import shortcut_rates
from eval.commands.run import RunOptions, run
from eval.pages.evaluations import read_evaluation
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("diagnose")
    options = {"checkpoint": "x", "set": write_set(root / "set"), "report": False}
    run(
        RunOptions(**options, out=root / "e", query_modality=("both", "text", "image")), loader(FakeEncoder())
    )
    return root


def rewrite(path, **columns):
    table = pd.read_parquet(path / "per_query.parquet")
    for name, values in columns.items():
        table[name] = values
    table.to_parquet(path / "per_query.parquet")


@pytest.mark.slow
def test_shortcut_rates_by_hand(done):
    dirs = [done / "e" / f"reasoning-{name}" for name in ("both", "text", "image")]
    solved = {"both": [1] * 12 + [0] * 12, "text": [1] * 6 + [0] * 18, "image": [0] * 4 + [1] * 4 + [0] * 16}
    for path, values in zip(dirs, solved.values(), strict=True):
        rewrite(path, **{"hit@1": [float(value) for value in values]})
    both, text, image = map(read_evaluation, dirs)
    found = shortcut_rates([both, text, image], "hit@1")
    shares = {name: found[name]["value"] * 24 for name in ("both", "text", "image", "either", "needs_both")}
    assert shares == pytest.approx({"both": 12, "text": 6, "image": 4, "either": 8, "needs_both": 4})
    assert found["either"]["low"] < 8 / 24 < found["either"]["high"]
    with error_about(UserError, "query_modality"):
        shortcut_rates([both, text], "hit@1")
    with error_about(UserError, "query_modality"):
        shortcut_rates([both, both, text], "hit@1")
    other = replace(image, results=image.results.but(checkpoint_hash="other"))
    with error_about(UserError, "query_modality"):
        shortcut_rates([both, text, other], "hit@1")


def test_the_command(done, capsys):
    assert main(["audit", f"evals={done / 'e'}"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["shortcuts"]["reasoning"]["num_queries"] == 24
    assert main(["audit"] + ["evals=nowhere"]) == 2
    capsys.readouterr()
    assert main(["audit", f"evals={done / 'e'}", "metric=rationale"]) == 2
    assert "metric: " in capsys.readouterr().err
    assert main(["audit", "metric=hit@1"]) == 2
    assert "give either set=DIR train=FILE,... or evals=DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_queries_without_the_metric_are_left_out(done, tmp_path, capsys):
    out, some = tmp_path / "e", [None, *[0.25, 0.5] * 11, 1.0]
    shutil.copytree(done / "e", out)
    for name in ("both", "text", "image"):
        rewrite(out / f"reasoning-{name}", **{"negative_recall@10": some})
    assert main(["audit", f"evals={out}", "metric=negative_recall@10"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["shortcuts"]["reasoning"]["num_queries"] == 23
    assert found["shortcuts"]["reasoning"]["both"]["value"] == 1.0
    path = out / "reasoning-text" / "per_query.parquet"
    pd.read_parquet(path)[:9].to_parquet(path)
    assert main(["audit", f"evals={out}"]) == 2
    assert "limit=" in capsys.readouterr().err


def test_evaluations_without_all_modalities_are_refused(done, capsys):
    dirs = f"{done / 'e/reasoning-both'},{done / 'e/reasoning-text'}"
    assert main(["audit", f"evals={dirs}"]) == 2
    assert "evals: " in capsys.readouterr().err

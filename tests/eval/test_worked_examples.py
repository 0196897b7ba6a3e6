"""The worked examples of docs/evaluation.md run as they stand there, from the release's files to the page."""

import json
import re
import runpy
import shlex

import pytest
from paths import ROOT
from recorded import settings_of

from eval.__main__ import main
from rge.checkpoints.export import export

CHECKPOINT = "runs/demo/joint/final"


def commands():
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = text.split("## Worked examples")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()  # as a shell joins them
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("python", "rge"))]


@pytest.mark.slow(8)
def test_they_run(lively, tmp_path, monkeypatch, capsys):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=28 * 28, max_pixels=56 * 56,
        max_new_tokens=4, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    export(lively, tmp_path / CHECKPOINT, settings)
    asked = commands()
    for words in asked:
        if words[0] == "rge":
            assert words[1] == "eval"
            assert main(words[2:]) == 0, words
        else:
            monkeypatch.setattr("sys.argv", [words[1], *words[2:], "num=6"])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            assert ended.value.code == 0
    for name in ("rmir", "pinpoint", "mmeb", "mmbright"):
        results = json.loads((tmp_path / f"runs/small/{name}_eval/results.json").read_text())
        assert results["benchmark"] == name
        page = tmp_path / f"runs/small/{name}_eval/report.html"
        assert (
            page.stat().st_size > 20_000 if name in ("rmir", "pinpoint") else not page.exists()
        )  # suites have none
    own = [
        "mine",
        "runs/small/own/photos",
        f"checkpoint={CHECKPOINT}",
        "query_mode=direct",
    ]  # docs/own_data.md
    capsys.readouterr()
    assert main([*own, "queries=runs/small/own/queries.xlsx"]) == 2
    said = capsys.readouterr().err
    assert "2 problems" in said
    assert "C7: padlok.jpg: the picture is not in the folder" in said
    assert "the spreadsheet turned the value into a date (2024-04-03)" in said
    assert main([*own, "queries=runs/small/own/corrected.xlsx"]) == 0
    assert "pictures left out because they cannot be opened: notes.jpg" in capsys.readouterr().err
    assert {words[2] for words in asked if words[0] == "rge"} >= {
        "import", "run", "export", "audit", "bm25", "budget",
    }  # fmt: skip

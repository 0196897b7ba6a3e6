"""README.md: every block is run as it is printed, in an empty folder that sees the clone's docs/ and data_prep/."""

import re
import shlex
import subprocess

import pytest
import typed
from paths import ROOT

from rge.config import load_recipe
from rge.data.sources import RecordFile

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
MAX_WORDS = 800


def blocks(kind):
    return [block for language, block in BLOCKS if language == kind]


@pytest.mark.slow(7)
def test_what_is_printed_runs(tmp_path):
    for name in ("docs", "data_prep"):
        (tmp_path / name).symlink_to(ROOT / name)
    with typed.commands(tmp_path / "commands", PYTHONPATH=str(ROOT)) as env:
        said = [run(["bash", "-euo", "pipefail", "-c", block], tmp_path, env) for block in blocks("sh")]
        [example] = blocks("python")
        shown = run(["python", "-c", example], tmp_path, env)
    train, evaluate, search = said
    assert "wrote runs/mine/joint/final" in train
    assert (tmp_path / "runs/mine/joint/metrics.jsonl").is_file()
    assert "reasoning" in evaluate
    assert (tmp_path / "runs/mine/compared/compare.html").is_file()
    assert "key.png" in search.splitlines()[-1] or "key.png" in search
    rationale, scores = re.fullmatch(r"(.*) \[(.*)\]", shown.strip()).groups()
    assert f"`{rationale}`" in README
    key, wine = map(float, scores.split())
    assert key > wine


def run(command, folder, env):
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_record_is_one_and_the_command_for_many_gpus_is_a_recipe(tmp_path):
    [record] = blocks("json")
    (tmp_path / "train.jsonl").write_text(record.replace("\n", "") + "\n")
    assert RecordFile(tmp_path / "train.jsonl")[0].positives[0].rationale
    (commands,) = [block.replace("\\\n", "") for block in blocks("") if "accelerate" in block]
    program, *words = shlex.split(commands)
    assert (program, words[:2]) == ("accelerate", ["launch", "rge/train.py"])
    assert load_recipe(words[2:]).joint.sources


def test_it_is_short():
    assert len(README.split()) <= MAX_WORDS

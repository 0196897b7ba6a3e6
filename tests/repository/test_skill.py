"""The agent skill: every command in it runs as it is printed."""

import re
import shlex

import forked
import pyarrow.parquet as pq
import pytest
from paths import ROOT

from rge.common.files import find_shipped

SKILL = ROOT / ".agents" / "skills" / "rge" / "SKILL.md"
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", SKILL.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
]
LISTENING = ("rge serve", "rge explore")


def test_the_skill_is_found_by_agents():
    head = SKILL.read_text(encoding="utf-8").split("---")[1]
    assert re.search(r"^name: rge$", head, re.MULTILINE)
    assert len(re.search(r"^description: (.+)$", head, re.MULTILINE)[1]) < 1024
    assert {line.split()[1] for line in COMMANDS} >= {
        "train",
        "eval",
        "index",
        "search",
        "embed",
        "serve",
        "explore",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands take as there: a folder of pictures."""
    made = tmp_path_factory.mktemp("skill")
    (made / "photos").mkdir()
    rows = pq.read_table(find_shipped("data_prep/demo/data/test/corpus.parquet")).to_pylist()
    for row in [row for row in rows if row["concept"] in ("padlock", "key", "nail", "hammer")] or rows[:4]:
        (made / "photos" / f"{row['concept']}.webp").write_bytes(row["image"]["bytes"])
    (made / "photos" / "padlock.png").write_bytes(rows[0]["image"]["bytes"])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_runs(folder, line):
    words, env = (
        ["-m", "rge", *shlex.split(line)[1:]],
        {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
    )
    if not line.startswith(LISTENING):
        done = forked.run(*words, cwd=folder, **env)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return
    words = [re.sub(r"^port=\d+$", "port=0", word) for word in words]
    with forked.Program(*words, cwd=folder, **env) as program:
        assert program.printed(r"http://127\.0\.0\.1:\d+")

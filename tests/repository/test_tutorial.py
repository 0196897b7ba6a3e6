"""docs/tutorial.md runs as it is printed, with stand-ins for what needs a large model or a GPU.

The pictures are the drawings of one icon family, the large model is the oracle of the shipped world behind a real address, and the
model that is trained is a tiny random one for two steps a stage.
"""

import csv
import json
import re
import shlex
import string
from pathlib import Path

import forked
import pyarrow.parquet as pq
import pytest
from paths import ROOT

from data_prep.demo.tables import read_tables
from data_prep.rmir.oracle import LIBRARY, Oracle
from rge.calls.local_server import LocalServer

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
NO_WEIGHTS = (
    "image_encoder.kind=pixels image_encoder.path=null caption_encoder.kind=hashing caption_encoder.path=null"
)
SMALLER = (
    "model.dtype=float32 model.gradient_checkpointing=false model.min_pixels=784 model.max_pixels=7056 "
    "data.num_workers=0 data.max_negatives=1 rollout.max_new_tokens=8 rollout.batch_size=8 train.micro_batch_size=4 "
    "cold_start.warmup_steps=0 cold_start.batch_size=4 "
    "joint.warmup_steps=0 joint.batch_size=4"
)


def write_photos(folder: Path) -> None:
    """One drawing of each concept, captioned with its name."""
    concepts = read_tables().concepts
    table = pq.read_table(LIBRARY, columns=["id", "concept", "image"]).to_pylist()
    folder.mkdir()
    with (folder / "captions.csv").open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["id", "image", "caption"])
        for row in table:
            if row["id"].startswith("noto/"):
                name = f"{row['concept']}.png"
                (folder / name).write_bytes(row["image"]["bytes"])
                rows.writerow([row["concept"], name, concepts[row["concept"]].name])


@pytest.mark.slow
def test_every_block_runs_and_a_model_is_found_searched(tmp_path, tiny_path):
    write_photos(tmp_path / "photos")
    oracle = Oracle(bad_queries=0, malformed=0, transient=0, filter_errors=0, judge_errors=0.015)
    environment = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "BASE": str(tiny_path)}
    with LocalServer(oracle) as server:
        environment["MLLM"] = server.url
        for kind, title, content in re.findall(
            r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', PAGE, re.M | re.S
        ):
            if title:
                (tmp_path / title).write_text(content)
            if kind != "bash":
                continue
            for line in content.replace("\\\n", " ").splitlines():
                line = re.sub(r"^rge data rmir .*", rf"\g<0> {NO_WEIGHTS}", line)
                line = re.sub(r"^rge (?:check|train) .*", rf"\g<0> {SMALLER}", line)
                words = shlex.split(string.Template(line).substitute(environment))
                assert words.pop(0) == "rge"
                done = forked.run("-m", "rge", *words, cwd=tmp_path, **environment)
                assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    records = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(records) > 4
    assert all(positive["rationale"] for record in records for positive in record["positives"])
    assert (tmp_path / "runs" / "mine" / "eval" / "report.html").stat().st_size > 20_000
    assert "padlock" not in done.stderr

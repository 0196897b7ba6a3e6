"""The stage `caption`: captions by a model where the library has none, and what the stages after it make of them."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from faults import error_about
from small_runs import config_of, one_family

from data_prep.rationales.pairs import read_captions
from data_prep.rmir import oracle, prompts
from data_prep.rmir.config import JudgeSpec, check
from data_prep.rmir.main import estimate, run_stages, status
from data_prep.rmir.pictures.encoders import HashingEncoder
from data_prep.rmir.results import audit, report
from data_prep.rmir.run import STAGES, Run, fingerprints, identities, stages_of
from data_prep.rmir.wording import SHIPPED
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.wire.replies import Abstained, BadValue, MissingTag, Refused, Reply
from rge.common.errors import UserError


def few_judges(out: Path, path: Path, url: str = "http://host/v1"):
    config = config_of(out, path, url)
    config.judge.judges = [JudgeSpec("judge", 1)]
    return config


def library(path: Path, most: int, keep=lambda number: False) -> Path:
    """Some drawings of one family; captions of those rows that `keep` names."""
    one_family(path)
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[:most]
    names = {row["id"]: f"a drawing, number {number}" for number, row in enumerate(rows)}
    with path.open("w", newline="", encoding="utf-8") as out:
        written = csv.DictWriter(out, ["id", "image", "caption"])
        written.writeheader()
        for number, row in enumerate(rows):
            caption = row["caption"] or names[row["id"]]
            written.writerow({**row, "caption": caption if keep(number) else ""})
    return path


def tables(out: Path, but: str = "none") -> dict[str, str]:
    """Every table, vector and record of a run by its content, the pages about it apart."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.suffix in (".parquet", ".npy", ".jsonl") and path.relative_to(out).parts[0] != but
    }


class Captions:
    """The oracle, which counts the captions that it is asked for and answers some of them otherwise; as a judge it likes all."""

    def __init__(self, otherwise=()):
        self.oracle = oracle.Oracle(transient=0, malformed=0, filter_errors=0, judge_errors=0)
        self.otherwise, self.asked, self.texts = dict(enumerate(otherwise)), Counter(), set()
        self.other_of: dict[str, Answer] = {}

    async def __call__(self, path, body):
        content = body["messages"][-1]["content"]
        text = content[0].get("text", "")
        if text.startswith(prompts.JUDGE_TASK):
            return chat("<consistent>True</consistent>")
        if not text.startswith(prompts.CAPTION_TASK):
            return await self.oracle(path, body)
        picture = next(part["image_url"]["url"] for part in content if part["type"] == "image_url")
        self.texts.add(text)
        if picture not in self.asked and len(self.asked) in self.otherwise:
            self.other_of[picture] = self.otherwise[len(self.asked)]
        self.asked[picture] += 1
        return self.other_of.get(picture) or await self.oracle(path, body)


@pytest.mark.slow
def test_a_library_without_captions_gets_them_from_the_model(tmp_path):
    """Thumbnails place texts by captions: without any the run could not even retrieve. Whoever reads captions sees these."""
    server_side = Captions()
    with LocalServer(server_side) as server:
        config = few_judges(tmp_path / "out", library(tmp_path / "library.csv", 60), server.url)
        config.caption.model = "writer"
        check(config)
        shown = estimate(config)
        run = Run(config, progress=False)
        run_stages(run, STAGES)
        page = report.write(run).read_text()
        images = run.images()
        assert "| caption | writer | 60 |" in shown
        assert "captions missing as often in the seed set as in the library" in shown
        assert f"| caption (done) | writer | {len(images)} |" in estimate(config)
        assert "caption   done in" in status(run)
    assert len(server_side.asked) == len(images) == sum(server_side.asked.values())
    assert {image["caption_by"] for image in images} == {"writer"}
    tables_of_world = server_side.oracle.tables
    shown_by = {name: server_side.oracle.shown[image["sha256"]] for image in images if (name := image["id"])}
    for image in images:
        assert image["caption"] == f"{tables_of_world.concepts[shown_by[image['id']]].sentence}."
    assert all(row["caption"] is None for row in run.rows("seed", "images")), (
        "the library's own stay as they are"
    )
    vectors = np.load(run.caption_vectors())
    assert np.array_equal(vectors, HashingEncoder().texts([image["caption"] for image in images]))
    assert any("caption" in row["found_by"] for row in run.rows("retrieve", "triplets"))
    assert {row["probe"] for row in run.rows("audit", "shortcuts")} == set(audit.PROBES)
    assert f"| captioned by a model | {len(images)} | images |" in page
    assert (
        f"Captions of the seed set: 0 from the library, {len(images)} written by writer; 0 pictures have none."
        in page
    )
    dataset = tmp_path / "out" / "dataset"
    written = pq.read_table(dataset / "pictures.parquet").to_pylist()
    assert {row["caption_by"] for row in written} == {"writer"}
    captions = {image["id"]: image["caption"] for image in images}
    assert read_captions(dataset / "train.jsonl", None) == {row["id"]: captions[row["id"]] for row in written}
    card = (dataset / "README.md").read_text()
    assert f"`caption_by` in `pictures` names the source of each: writer {len(written)}." in card
    assert "caption:\n  model: writer" in card
    run.close()


@pytest.mark.slow
def test_only_missing_captions_are_asked_for_and_each_lands_at_its_picture(tmp_path):
    """Two of three are there. Of the others one is refused, one abstained from, one unreadable to the end, one too long."""
    too_long = f"<caption>{'word ' * 41}</caption>"
    server_side = Captions(
        [
            Answer({"error": {"code": "content_filter", "message": "filtered"}}, 400),
            chat("<caption>ABSTAIN</caption>"),
            chat("A picture, I think."),
            chat(too_long),
        ]
    )
    with LocalServer(server_side) as server:
        path = library(tmp_path / "library.csv", 60, keep=lambda number: number % 3)
        config = few_judges(tmp_path / "out", path, server.url)
        config.caption.model, config.queries_per_shard = "writer", 10
        config.models["writer"].concurrency = 1
        run = Run(config, progress=False)
        run_stages(run, ["seed"])
        without = [image["id"] for image in run.rows("seed", "images") if image["caption"] is None]
        assert f"| caption | writer | {len(without)} |" in estimate(config), (
            "known once the seed set is drawn"
        )
        run_stages(run, STAGES[1:])
        counts, met = run.done("caption")["counts"], run.done("caption")["met"]
        page = report.write(run).read_text()
    images = {image["id"]: image for image in run.images()}
    assert counts["missing"] == len(without) == len(server_side.asked) > 15
    assert counts["not_written"] == {"bad value": 1, "refusal": 1, "abstain": 1, "missing tag": 1}
    assert counts["written"] == len(without) - 4
    assert counts["with_caption"] == len(images) - 4
    assert (met["reasked"], met["unreadable"], met["refused"]) == (4, 2, 1)
    assert Counter(server_side.asked.values()) == {1: len(without) - 2, 3: 2}
    assert "; 4 pictures have none (" in page
    by = {name: image["caption_by"] for name, image in images.items()}
    failed = {row["id"] for row in run.rows("caption", "rejected")}
    assert all(
        by[name] == (None if name in failed else "writer" if name in without else "library")
        for name in images
    )
    captions = [image["caption"] for image in images.values() if image["caption"]]
    assert np.array_equal(np.load(run.caption_vectors()), HashingEncoder().texts(captions))
    pictures = pq.read_table(run.out / "dataset" / "pictures.parquet").to_pylist()
    assert {row["id"]: row["caption_by"] for row in pictures} == {
        row["id"]: by[row["id"]] for row in pictures
    }
    assert {"library", "writer"} <= {row["caption_by"] for row in pictures}
    run.close()


@pytest.mark.slow
def test_a_library_with_all_captions_asks_for_none_and_comes_out_the_same(tmp_path):
    server_side = Captions()
    found = []
    with LocalServer(server_side) as server:
        path = library(tmp_path / "library.csv", 40, keep=lambda number: True)
        for model in (None, "writer"):
            config = few_judges(tmp_path / f"out {model}", path, server.url)
            config.caption.model = model
            run = Run(config, progress=False)
            run_stages(run, STAGES)
            report.write(run)
            found.append(tables(run.out, but="caption"))
            assert (run.path("caption").is_dir(), "caption" in status(run)) == (bool(model), bool(model))
            run.close()
    assert not server_side.asked
    assert found[0] == found[1]
    assert {"seed/captions.npy", "dataset/train.jsonl", "dataset/pictures.parquet"} <= found[0].keys()


def test_captions_that_are_all_rejected_leave_their_stage_open(tmp_path):
    async def cannot(path, body):
        return Answer({"error": {"message": "max_tokens is too small"}}, 400)

    with LocalServer(cannot) as server:
        config = few_judges(tmp_path / "out", library(tmp_path / "library.csv", 20), server.url)
        config.caption.model = "writer"
        run = Run(config, progress=False)
        with error_about(UserError):
            run_stages(run, STAGES)
        assert run.done("seed")
        assert not run.done("caption")
        with error_about(UserError, "generate", "caption"):
            run_stages(run, ["generate"])
        run.close()


def test_off_there_is_no_such_stage(tmp_path):
    config = few_judges(tmp_path / "out", library(tmp_path / "library.csv", 20))
    assert "caption" not in stages_of(config)
    before = fingerprints(config, identities(config))
    config.caption.max_words = 7
    assert fingerprints(config, identities(config)) == before
    run = Run(config, progress=False)
    with error_about(UserError, "caption.model"):
        run_stages(run, ["caption"])
    run.close()
    config.caption.model = "nobody"
    with error_about(UserError, "caption.model"):
        check(config)


def test_ones_own_prompt_is_sent(tmp_path):
    (tmp_path / "my prompts").mkdir()
    text = (
        (SHIPPED / "caption.md").read_text(encoding="utf-8").replace("one plain English sentence", "ein Satz")
    )
    (tmp_path / "my prompts" / "caption.md").write_text(text, encoding="utf-8")
    server_side = Captions()
    with LocalServer(server_side) as server:
        config = few_judges(tmp_path / "out", library(tmp_path / "library.csv", 20), server.url)
        config.caption.model, config.prompts = "writer", str(tmp_path / "my prompts")
        run = Run(config, progress=False)
        run_stages(run, STAGES[:2])
        run.close()
    assert len(server_side.texts) == 1
    assert "ein Satz" in server_side.texts.pop()


def test_captions_are_read():
    def read(text: str, stop: str = "stop") -> str:
        return prompts.read_caption(Reply(text, stop), 6)

    assert read("Well.\n<caption>A red  door\nin a wall.</caption>") == "A red door in a wall."
    with error_about(BadValue, "caption"):
        read("<caption>one two three four five six seven</caption>")
    with pytest.raises(MissingTag):
        read("A red door.")
    with pytest.raises(Abstained):
        read("<caption>Abstain.</caption>")
    with pytest.raises(Refused):
        read("I'm sorry, I can't help with this picture.")

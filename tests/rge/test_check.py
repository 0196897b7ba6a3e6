"""The pre-flight: one report of everything that is wrong, before anything is loaded, and nothing where all is well."""

import dataclasses
import json
import multiprocessing
import os
import re
import resource
import shutil
from collections import namedtuple
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
import yaml
from accelerate import Accelerator
from faults import error_about
from PIL import Image
from recorded import settings_of

from rge import check
from rge.checkpoints.export import export
from rge.checkpoints.manifest import DONE, write_manifest
from rge.checkpoints.settings import RGE_JSON
from rge.common.files import DEMO_CHECKPOINT, POINTER_NOTE, raise_descriptor_limit
from rge.config import load_recipe, to_dict
from rge.data import collate, layout
from rge.data.collate import Collator, Source, query_item, target_item
from rge.data.mixture import Draw
from rge.data.sources import RecordError, RecordFile
from rge.data.verdicts import Verdicts
from rge.distributed import launch
from rge.losses import CONTRASTIVE_LOSSES
from rge.model.adapter_files import Base
from rge.model.backbone import processor_to_train
from rge.model.embedding_model import embedder_to_train
from rge.plan import estimate, machine
from rge.plan.search import Way
from rge.rl.pool import read_pool
from rge.rollout import vllm_writer

Usage = namedtuple("Usage", "total used free")


def record(name: str, picture: str = "egg.png", **changes) -> dict:
    return {
        "id": name, "group": "g", "source": "s", "split": "train",
        "query": {"text": "what is this", "images": [picture]},
        "positives": [{"id": f"t{name}", "text": "an egg", "rationale": "it is an egg"}],
        **changes,
    }  # fmt: skip


def write(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def home(tmp_path, picture, tiny_path):
    """A recipe of both stages with nothing wrong."""
    picture(40, 30, 0).save(tmp_path / "egg.png")
    stage = {
        "steps": 4,
        "batch_size": 2,
        "sources": [{"path": write(tmp_path / "records.jsonl", *map(record, "abc"))}],
    }
    recipe = {
        "model": {"path": str(tiny_path), "dtype": "float32", "min_pixels": 784, "max_pixels": 3136},
        "out": str(tmp_path / "out"),
        "cold_start": stage,
        "joint": stage,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def recipe_of(home: Path, *overrides: str):
    return load_recipe([f"recipe={home / 'tiny.yaml'}", *overrides])


def problems_of(home: Path, accelerator, *overrides: str, **options) -> list[str]:
    return check.examine(recipe_of(home, *overrides), accelerator, **options)[0]


def test_records_without_a_judges_scores_cannot_teach(home, accelerator):
    """One score is enough for a source of a mixture; queries without one are counted in the log."""
    assert problems_of(home, accelerator) == []
    [problem] = problems_of(home, accelerator, "loss.terms={info_nce: 1, kl: 1}")
    assert "loss.terms: kl" in problem
    lines = (home / "records.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["positives"][0]["score"] = 1
    (home / "records.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]))
    assert problems_of(home, accelerator, "loss.terms={info_nce: 1, kl: 1}") == []


def test_a_learning_rate_that_is_never_reached_is_said(home, accelerator):
    recipe = recipe_of(home, "joint.warmup_steps=5", "cold_start.warmup_steps=4")  # of 4 steps
    problems, found = check.examine(recipe, accelerator)
    assert problems == []
    said = "joint.warmup_steps=5 is more than the stage's 4 steps, so the learning rate never reaches joint.lr=2e-05"
    assert said in "\n".join(found.summary)
    assert "\n".join(found.summary).count("never reaches") == 1


def test_an_output_folder_that_cannot_be_made_is_named_with_the_fix(home, accelerator):
    (home / "taken").write_text("")
    for place, why in (("taken", "File exists"), ("taken/run", "Not a directory")):
        with ExitStack() as lock:
            problems = problems_of(home, accelerator, f"out={home / place}", lock=lock)
        assert problems == [f"out={home / place} cannot be written ({why}): give another out="]


def test_records_that_include_their_wording_are_refused_where_the_profile_adds_another(home, accelerator):
    worded = write(home / "worded.jsonl", record("w", wording="included"))
    here = f"joint.sources=[{{path: {worded}}}]"
    [problem] = problems_of(home, accelerator, here)
    assert problem.startswith(f"{worded}, record 'w': its texts include their wording (wording: included)")
    assert "profile: plain" in problem
    assert problems_of(home, accelerator, here, "data.profile=plain") == []


def test_what_may_start_is_summed_up(home, accelerator):
    held_out = write(home / "held_out.jsonl", record("h"))
    problems, found = check.examine(
        recipe_of(home, f"validation.sources=[{{path: {held_out}}}]"), accelerator
    )
    assert problems == []
    assert found.stages == ["cold_start", "joint"]
    assert "never reaches" not in "\n".join(found.summary)
    assert {Path(path).name: len(file) for path, file in found.records.items()} == {
        "records.jsonl": 3,
        "held_out.jsonl": 1,
    }
    text = "\n".join(found.summary)
    assert "one process, cpu; float32 weights trained, computed in float32" in text
    assert "joint: 4 steps of 2 queries, from 3 records in 1 source" in text
    assert "parameters trained" in text
    assert "tokens and" in text
    assert "GiB per process" in text
    assert "no time estimate: so short a stage is not worth measuring" in text
    assert not (home / "out").exists()


def test_everything_that_is_wrong_is_said_at_once(home, accelerator):
    bad = write(
        home / "bad.jsonl",
        record("a", "gone.png"),
        record("b", "gone/egg.png"),
        record("c", "gone.parquet#row"),
        record("d", positives=[{"id": "t", "image": "none.png"}]),
        {"id": "e"},
    )
    found = "\n".join(
        problems_of(
            home,
            accelerator,
            f"joint.sources=[{{path: {bad}}}, {{path: {home}/nowhere.jsonl}}]",
            f"validation.sources=[{{path: {home}/absent.jsonl}}]",
            "log.trackers=[mlflow, tensorbord]",
            "model.path=/nowhere/model",
            "train.num_processes=2",
            "rollout.prompt_pass=once",
            "train.keep_activations=none",
            "rollout.temperature=0",
            "train.micro_batch_size=1",
        )
    )
    for message in (
        f"{bad}:1: query.images.0: picture {home}/gone.png does not exist (record 'a')",
        f"{bad}:2: query.images.0: picture folder {home}/gone cannot be read",
        f"{bad}:3: query.images.0: picture library {home}/gone.parquet does not exist",
        f"{bad}:4: positives.0.image: picture {home}/none.png does not exist (record 'd')",
        f"{bad}:4: positives.0.rationale: missing or blank",
        f"{bad}:5: query: Field required",
        f"{home}/nowhere.jsonl: there is no such file",
        f"{home}/absent.jsonl: there is no such file",
        "log.trackers=mlflow needs its library, which is not installed: pip install mlflow",
        "there is no tracker 'tensorbord'; did you mean tensorboard?",
        "/nowhere/model: there is no such directory",
        "train.num_processes=2, but this run has 1",
        "rollout.prompt_pass=once is not possible: a process has 2 queries per step",
    ):
        assert message in found


def test_a_stage_that_needs_no_rationale_does_not_ask_for_one(home, accelerator):
    bare = write(home / "bare.jsonl", record("a", positives=[{"id": "t", "text": "an egg"}]))
    options = ["stage=joint", f"joint.sources=[{{path: {bare}}}]"]
    assert "rationale: missing" in problems_of(home, accelerator, *options)[0]
    assert problems_of(home, accelerator, *options, "loss.ratio=none") == []


def test_pictures_are_decoded_when_asked_for(home, accelerator):
    (home / "cut.png").write_bytes((home / "egg.png").read_bytes()[:200])
    bad = write(home / "bad.jsonl", record("a", "cut.png"), record("b", "egg.png"), record("c", "cut.png"))
    options = [f"joint.sources=[{{path: {bad}}}]"]
    assert problems_of(home, accelerator, *options) == []
    [problem] = problems_of(home, accelerator, *options, decode=True)
    assert f"{bad}: record 'a': picture {home}/cut.png: it cannot be decoded" in problem


@pytest.mark.slow
def test_a_disk_too_small_for_what_will_be_kept(home, accelerator, monkeypatch):
    recipe = recipe_of(home, "train.save_every=1")
    problems, found = check.examine(recipe, accelerator)
    assert problems == []
    model = check._outline(recipe)
    count = sum(parameter.numel() for parameter in model.parameters())
    # Two stages: of AdamW's float32 states, two and the one that is being written; and a checkpoint.
    needed = machine.bytes_to_keep(recipe, {"cold_start": 4, "joint": 4}, model, sharded=False)
    assert needed == 2 * (3 * 12 + 4) * count
    for free, wrong in ((needed - 1, True), (needed + 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        assert [
            True for each in problems_of(home, accelerator, "train.save_every=1") if "GiB free" in each
        ] == ([True] * wrong)
    # Fewer are kept where fewer fit into the run, and what is there already needs no new room.
    assert problems_of(home, accelerator, "train.save_every=1", "train.keep_last=1") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 100))
    (home / "out/joint/state").mkdir(parents=True)
    (home / "out/joint/state/old").write_bytes(b"0" * 100)
    assert problems_of(home, accelerator, "train.save_every=1") == []


LONG = {"id": "t", "text": "an egg", "rationale": "this is a key; " * 800}
PASSED_BY = {
    "a picture of 30,000 x 1": (["flat.png"], {}, "absolute aspect ratio must be smaller than 200"),
    "several pictures": (["egg.png"] * 60, {}, "pictures and template alone exceed max_prompt_tokens=64"),
    "a long rationale": (
        ["egg.png"],
        {"positives": [LONG]},
        "more than data.max_rationale_tokens=512; shorten it",
    ),
}
"""What the pre-flight once had nothing against, and training ended with: pictures of a record, its other fields, the message."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", PASSED_BY)
def test_records_are_laid_out_as_training_will(home, accelerator, kind):
    """Refused with data.on_bad=stop, left out with skip, by the pre-flight and by training alike."""
    pictures, changes, message = PASSED_BY[kind]
    Image.new("RGB", (30_000, 1)).save(home / "flat.png")
    bad = record("bad", **changes)
    bad["query"]["images"] = pictures
    path = write(home / "bad.jsonl", *map(record, "abc"), bad)
    options = [f"joint.sources=[{{path: {path}}}]", "data.max_prompt_tokens=64", "stage=joint"]
    [problem] = problems_of(home, accelerator, *options)
    assert f"{path}, record 'bad': " in problem
    assert message in problem
    skip = [*options, "data.on_bad=skip", "data.max_bad_share=0.25"]
    recipe = recipe_of(home, *skip)
    problems, found = check.examine(recipe, accelerator)
    assert problems == []
    assert f"will be left out (data.on_bad=skip): {problem}" in found.summary
    [too_many] = problems_of(home, accelerator, *skip[:-1], "data.max_bad_share=0.2")
    assert "1 of 4 records of joint are bad, more than data.max_bad_share=0.2: " in too_many

    builder = collate.PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)()
    records = RecordFile(path)
    collator = Collator([Source(records, builder, recipe.data)])
    collator.collate([Draw(0, 0, 0)])
    with error_about(RecordError, path, "record 'bad'") as caught:
        Collator([Source(records, builder, replace(recipe.data, on_bad="stop"))]).collate([Draw(0, 3, 0)])
    assert str(caught.value) == problem
    [left_out] = collator.collate([Draw(0, 3, 0)]).bad
    assert left_out.id == "bad"


def test_a_prompt_too_short_for_anything_is_found(home, accelerator):
    problems = problems_of(home, accelerator, "data.max_prompt_tokens=24")
    assert all("pictures and template alone exceed max_prompt_tokens=24" in problem for problem in problems)
    assert len(problems) == 3


def test_lengths_are_summed_up(home, accelerator):
    """Of what training's own prompts have: the same builder, with pictures decoded."""
    long = record("long", query={"text": "what is this egg " * 20, "images": ["egg.png"] * 2})
    path = write(home / "some.jsonl", *map(record, "abc"), long)
    recipe = recipe_of(home, f"joint.sources=[{{path: {path}}}]", "stage=joint", "data.max_prompt_tokens=90")
    problems, found = check.examine(recipe, accelerator)
    assert problems == []
    builder = collate.PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)()
    file = RecordFile(path)
    queries = [len(builder.build(query_item(file[index]), "query")) for index in range(4)]
    targets = [len(builder.build(target_item(file[index].positives[0]), "candidate")) for index in range(4)]
    rationale = len(builder.rationale_ids("it is an egg", "a"))
    text = "\n".join(found.summary)
    assert max(queries) == 90
    assert f"tokens per query prompt: {queries[0]} to 90, median {queries[0]}, 95 % at most 90" in text
    assert f"longest candidate: {min(targets)} to {max(targets)}, " in text
    assert "pictures per prompt: 1.2 on average, at most 2" in text
    assert f"tokens per rationale: {rationale} to {rationale}, " in text
    assert "0.0% longer than the model may generate (rollout.max_new_tokens=128)" in text
    assert "12.5% of 8 prompts are cut to data.max_prompt_tokens=90" in text
    assert f"query, candidate and rationale: long {90 + targets[3] + rationale}, " in text


def test_sources_are_checked_in_their_own_prompts(home, accelerator):
    """Records with their wording beside others, and one file twice, in pictures of two sizes."""
    path = home / "records.jsonl"
    included = write(home / "worded.jsonl", *(record(name, wording="included") for name in "xyz"))
    twice = f"{{path: {path}}}, {{path: {path}, name: large, min_pixels: 3136}}"

    def found(worded: str):
        sources = f"joint.sources=[{twice}, {{path: {included}{worded}}}]"
        run = check.Preflight(recipe_of(home, "stage=joint", sources), accelerator)
        run.find_open_stages()
        run.open_sources(check.wanted_sources(run.recipe, run.found.stages))
        run.lay_out_sources(decode=False)
        return run

    [problem] = found("").problems
    assert "profile: plain" in problem
    run = found(", profile: plain, instruction: name it")
    assert run.problems == []
    small, large, worded = (run.layouts[run.recipe.prompts_key(it)] for it in run.recipe.joint.sources)
    assert (small.column("pictures") == large.column("pictures")).all()
    assert (small.column("query_pictures") < large.column("query_pictures")).all()
    assert (worded.column("asks") != small.column("asks")).all()
    assert (worded.column("candidate") < small.column("candidate")).all()
    [wrong] = problems_of(
        home, accelerator, f"joint.sources=[{{path: {path}, max_prompt_tokens: 24}}]", "stage=joint"
    )[:1]
    assert "max_prompt_tokens=24" in wrong


@pytest.mark.slow
def test_lengths_are_remembered_until_something_changes(home, accelerator, monkeypatch):
    monkeypatch.setenv("RGE_CACHE", str(home.parent / f"{home.name}_cache"))
    for path in (*home.iterdir(), home):
        os.utime(path, (1e9, 1e9))
    looked = []
    real = layout.lay_out
    monkeypatch.setattr(layout, "lay_out", lambda *given, **more: looked.append(1) or real(*given, **more))
    summaries = [check.examine(recipe_of(home), accelerator)[1].summary for _ in range(2)]
    assert summaries[0] == summaries[1]
    assert len(looked) == 1
    check.examine(recipe_of(home, "model.max_pixels=1568"), accelerator)
    assert len(looked) == 2
    write(home / "records.jsonl", *map(record, "abcd"))
    os.utime(home / "records.jsonl", (1e9 + 1, 1e9))
    check.examine(recipe_of(home), accelerator)
    assert len(looked) == 3


def test_records_that_train_against_each_other_are_named(home, accelerator):
    """Within a source and across sources, on every kind of target."""
    target = {"id": "ta", "text": "a hen", "rationale": "it is a hen"}
    others = [record("a", positives=[target]), record("b", query={"text": "and this", "images": ["egg.png"]})]
    same = record("c", positives=[{"id": "tc", "text": "an egg", "rationale": "in other words"}])
    paths = [str(home / "records.jsonl"), write(home / "more.jsonl", *others, same)]
    listed = ", ".join(f"{{path: {path}}}" for path in paths)
    problems, found = check.examine(recipe_of(home, f"joint.sources=[{listed}]"), accelerator)
    assert problems == []
    clash = f"warning: 1 records of {paths[0]} and {paths[1]} have the same id and different queries, such as 'b': "
    assert [line for line in found.summary if line.startswith("warning: ")] == [
        f"{clash}logs cannot tell them apart",
        "warning: 5 of 6 records of joint have the same query as others with other right answers, such as 'a' and 'b': each "
        "one's answer is a negative of the other. Put all right answers of a query into its record's positives",
        "warning: 5 of 6 records of joint have a target that also occurs under another id, such as 'a' and 'b': a right answer "
        "gets negatives with the same content. Give equal targets one id, or one identity",
        "warning: 2 of 6 records of joint have a target whose id also stands for other content, such as 'a' and 'a': such targets "
        "are never negatives of each other's queries. Give different targets different ids",
    ]
    _, alone = check.examine(
        recipe_of(home, f"joint.sources=[{listed.replace('}', ', batch: own}')}]"), accelerator
    )
    about = [line.split(" have ")[0] for line in alone.summary if line.startswith("warning: ")]
    assert about[1:3] == [f"warning: 3 of 3 records of {paths[0]} (joint)"] * 2
    cold_start = [f"cold_start.sources=[{listed}]", "stage=cold_start"]  # compares nothing
    _, none = check.examine(recipe_of(home, *cold_start), accelerator)
    assert [line for line in none.summary if line.startswith("warning: ")] == [
        f"{clash}logs cannot tell them apart"
    ]


def test_a_negative_that_is_a_right_answer_is_a_problem(home, accelerator):
    wrong = [record(name, negatives=[{"id": "n", "text": "an egg"}]) for name in "ab"]
    path = write(home / "wrong.jsonl", *wrong, *map(record, "cd"))
    here = [f"joint.sources=[{{path: {path}}}]", "stage=joint"]
    said = "negative 'n' has the same content as positive 't{}', and no answer is both wrong and right: remove one of them"
    assert problems_of(home, accelerator, *here) == [
        f"{path}, record {name!r}: {said.format(name)}" for name in "ab"
    ]
    no_candidates = [
        "stage=cold_start",
        f"cold_start.sources=[{{path: {path}}}]",
        "loss.lm_on_candidates=false",
    ]
    assert problems_of(home, accelerator, *no_candidates) == []
    problems, found = check.examine(
        recipe_of(home, *here, "data.on_bad=skip", "data.max_bad_share=0.5"), accelerator
    )
    assert problems == []
    assert f"will be left out (data.on_bad=skip): {path}, record 'a'" in "\n".join(found.summary)


def test_one_id_for_all_targets_is_a_problem(home, accelerator):
    """Every candidate would be masked, and the contrastive loss 0."""
    records = [record(name, positives=[{"id": "pos", "text": name, "rationale": "so"}]) for name in "abc"]
    path = write(home / "one.jsonl", *records)
    [problem] = problems_of(home, accelerator, f"joint.sources=[{{path: {path}}}]")
    assert problem.startswith(
        "all records of joint have the same right answers (id or identity 'pos'), and none has a"
    )
    both = f"joint.sources=[{{path: {path}}}, {{path: {home / 'records.jsonl'}}}]"
    assert problems_of(home, accelerator, both) == []
    [problem] = problems_of(home, accelerator, both.replace("}", ", batch: own}"))
    assert problem.startswith(f"all records of {path} (joint) have the same right answers")


def test_held_out_queries_that_are_trained_on_are_counted(home, accelerator):
    """Under any id, in any wording, and only among those that are used."""
    others = [record(name, query={"text": name, "images": ["egg.png"]}) for name in "xyz"]
    held_out = write(home / "held_out.jsonl", others[0], record("h"), others[1], record("i"))
    given = [f"validation.sources=[{{path: {held_out}}}]", "validation.max_records=3"]
    problems, found = check.examine(recipe_of(home, *given), accelerator)
    assert problems == []
    [line] = [line for line in found.summary if "held-out queries" in line]
    assert line.startswith(
        f"warning: 1 of 3 held-out queries of {held_out} are also in the training sources, such as that of 'h'"
    )
    held_out = write(home / "held_out.jsonl", *others)
    assert "held-out queries" not in "\n".join(check.examine(recipe_of(home, *given), accelerator)[1].summary)
    query = {"text": "another", "images": ["egg.png"], "paraphrases": ["v", "y", "z"]}
    write(home / "records.jsonl", record("a", query=query), record("b"))
    assert "warning: 2 of 3 held-out queries" in "\n".join(
        check.examine(recipe_of(home, *given), accelerator)[1].summary
    )


def test_a_batch_that_holds_records_several_times_is_said(home, accelerator):
    def warned(*overrides: str) -> list[str]:
        problems, found = check.examine(recipe_of(home, "stage=joint", *overrides), accelerator)
        assert problems == []
        return [line for line in found.summary if "joint.batch_size" in line]

    [line] = warned("joint.batch_size=21")
    assert "7.0 times" in line
    assert "joint.batch_size to 3" in line
    assert not warned("joint.batch_size=3")
    other = write(home / "other.jsonl", *map(record, "defghijklm"))
    both = f"joint.sources=[{{path: {home / 'records.jsonl'}}}, {{path: {other}, weight: 3}}]"
    assert not warned(both, "joint.batch_size=12")
    assert len(warned(both, "joint.batch_size=16")) == 2
    assert len(warned(both, "joint.batch_size=4")) == 0
    both = both.replace("}", ", batch: own}")
    assert len(warned(both, "joint.batch_size=4")) == 1


def test_passes_over_each_source_are_said(home, accelerator):
    names = [f"r{number}" for number in range(40)]
    large = [record(name, query={"text": name, "images": ["egg.png"]}) for name in names]
    paths = [write(home / "large.jsonl", *large), write(home / "small.jsonl", *map(record, "abcd"))]

    def said(*more: str, weight: str = "1") -> str:
        listed = (
            f"{{path: {paths[0]}, weight: {weight}, name: large}}, {{path: {paths[1]}, weight: {weight}}}"
        )
        words = [f"joint.sources=[{listed}]", "stage=joint", *more]
        problems, found = check.examine(recipe_of(home, *words), accelerator)
        assert problems == []
        return "\n".join(found.summary)

    text = said("joint.steps=null")  # 22 steps of 2
    assert f"  passes over the records: 0.55 of large, 5.5 of {paths[1]}\n" in text
    assert (
        "  warning: joint.epochs=1 counts the records of all sources together, and their weights lead to fewer passes over "
        f"large and more than three times as many over {paths[1]}: with weight: size in each source, all get equally many"
    ) in text
    text = said("joint.steps=null", "joint.epochs=2", weight="size")
    assert f"  passes over the records: 2.0 of large, 2.0 of {paths[1]}\n" in text
    assert "joint.epochs" not in text
    text = said("joint.steps=44")  # as chosen
    assert f"  passes over the records: 1.1 of large, 11.0 of {paths[1]}\n" in text
    assert "joint.epochs" not in text


@pytest.mark.parametrize("key", ["targets", "modules_to_save"])
def test_adapters_on_layers_that_do_not_exist_are_a_problem(home, accelerator, key):
    *_, problem = problems_of(home, accelerator, f"model.lora.{key}=[q_prj]", "loss.matryoshka_dims=[4096]")
    assert re.match(rf"model.lora.{key}: no (linear layer|module) is named q_prj; ", problem)


def test_pictures_of_one_name_in_two_folders_are_told_apart(home, accelerator, picture):
    """Ids that are left out follow from the paths in the files, which may be equal in different folders."""
    (home / "other").mkdir()
    paths = []
    for folder in (home, home / "other"):
        records = [record("a", positives=[{"image": "egg.png", "rationale": "an egg"}]), record("z")]
        paths.append(write(folder / f"{folder.name}.jsonl", *records))
    override = f"joint.sources=[{', '.join(f'{{path: {path}}}' for path in paths)}]"
    for side, said in ((30, 0), (31, 1)):  # the same file, and another
        picture(40, side, 0).save(home / "other/egg.png")
        problems, found = check.examine(recipe_of(home, override), accelerator)
        assert problems == []
        assert sum("such targets are never negatives" in line for line in found.summary) == said


@pytest.mark.parametrize("name", ["records.jsonl", "copy.jsonl"])
def test_records_that_are_trained_on_do_not_validate(home, accelerator, name):
    (home / "copy.jsonl").write_bytes((home / "records.jsonl").read_bytes())
    assert problems_of(home, accelerator, f"validation.sources=[{{path: {home / name}}}]") == [
        f"validation.sources[0] {home / name} is also a source of {stage}: give held-out records"
        for stage in ("cold_start", "joint")
    ]


def test_many_records_are_laid_out_by_several_processes(home, accelerator, monkeypatch):
    recipe = recipe_of(home)
    builder = collate.PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)()
    file = RecordFile(home / "records.jsonl")
    here = layout.lay_out(Source(file, builder, recipe.data), need_oracle=True, need_candidates=True)
    monkeypatch.setattr(layout, "FEW", 2)
    there = layout.lay_out(Source(file, builder, recipe.data), need_oracle=True, need_candidates=True)
    assert (here.sizes_NK == there.sizes_NK).all()
    assert there.numbers_N.tolist() == [0, 1, 2]


def test_lengths_that_take_too_long_are_those_of_a_sample(home, accelerator, monkeypatch):
    """With the share that it may miss; a run with a sample looks again where all are wanted."""
    rows = [record(f"r{number}", query={"text": "word " * (1 + number % 7)}) for number in range(40)]
    recipe = recipe_of(home, f"joint.sources=[{{path: {write(home / 'many.jsonl', *rows)}}}]", "stage=joint")
    builder, file = (
        collate.PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)(),
        RecordFile(home / "many.jsonl"),
    )
    os.utime(file.name, (0, 0))  # what has just been written is not cached

    def laid(verdicts=None, **how):
        source, needs = Source(file, builder, recipe.data), {"need_oracle": True, "need_candidates": True}
        if verdicts is None:
            return layout.lay_out(source, **needs, **how)
        verdicts.open(file.name, need_rationale=True, on_bad="error")
        return layout.lay_out_once(source, verdicts, **needs, **how)

    every = laid()
    monkeypatch.setattr(layout, "SAMPLE", 12)
    assert laid().sizes_NK.tolist() == every.sizes_NK.tolist()
    assert (laid().sample_of, laid().unseen) == (None, 0.0)
    monkeypatch.setattr(layout, "AT_MOST_S", 0.0)
    folder = home / "verdicts"
    for _ in range(2):  # the second from the cache
        some = laid(Verdicts(folder))
        assert (len(some.sizes_NK), some.sample_of) == (12, 40)
        assert (some.sizes_NK == every.sizes_NK[some.numbers_N]).all()
        assert (1 - some.unseen) ** 12 == pytest.approx(0.05)
        assert len(some.targets_T3) == some.column("prompts").sum() - 12
        monkeypatch.setattr(layout, "lay_out", lambda *_, **__: pytest.fail("cached"))
    monkeypatch.undo()
    assert laid(Verdicts(folder), sample=False).sizes_NK.tolist() == every.sizes_NK.tolist()
    monkeypatch.setattr(layout, "SAMPLE", 12)
    monkeypatch.setattr(layout, "AT_MOST_S", 0.0)
    os.utime(file.name, (1, 1))
    problems, found = check.examine(recipe, accelerator)
    assert problems == []
    assert sum("95 % confidence" in line for line in found.summary) == 2, "of the lengths, and in the plan"


def test_the_longest_wording_of_a_query_counts(home, accelerator):
    path = home / "records.jsonl"
    recipe, rows = recipe_of(home), [json.loads(line) for line in path.read_text().splitlines()]
    builder = collate.PromptBuilders(processor_to_train(recipe.start, recipe.model), recipe)()
    found = []
    for text, paraphrases in (("short", []), ("word " * 30, []), ("short", ["shorter", "word " * 30])):
        rows[1]["query"] |= {"text": text, "paraphrases": paraphrases}
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        laid = layout.lay_out(
            Source(RecordFile(path), builder, recipe.data), need_oracle=True, need_candidates=True
        )
        found.append(laid.column("query").tolist())
    assert found[0][1] + 28 < found[1][1] == found[2][1]
    assert {tuple(lengths[::2]) for lengths in found} == {tuple(found[0][::2])}


def test_an_estimate_that_fails_is_a_warning(home, accelerator, monkeypatch):
    monkeypatch.setattr(estimate, "plan", lambda *_, **__: {}["vision"])
    monkeypatch.setattr(check, "processor_to_train", lambda *_, **__: 1 / 0)
    problems, found = check.examine(recipe_of(home), accelerator)
    assert problems == []
    text = "\n".join(found.summary)
    assert "warning: memory and time are not estimated: KeyError: 'vision'" in text
    assert (
        "warning: the lengths of the records could not be measured: ZeroDivisionError: division by zero"
        in text
    )


def test_a_cpus_estimate_holds_no_gpus_reserve(home, accelerator):
    _, found = check.examine(recipe_of(home), accelerator)
    [total, *_] = [re.search(r"rge.plan: ([\d.]+) GiB", line) for line in found.summary if "rge.plan" in line]
    assert float(total.group(1)) < 1


def test_batches_of_one_query_need_labelled_negatives(home, accelerator):
    one = ["joint.batch_size=1", "stage=joint"]
    [problem] = problems_of(home, accelerator, *one)
    assert "joint.batch_size=1, and no record has a labelled negative" in problem
    path = write(home / "more.jsonl", record("a", negatives=[{"id": "n", "text": "a key"}]), record("b"))
    assert problems_of(home, accelerator, *one, f"joint.sources=[{{path: {path}}}]") == []


def test_a_loss_that_was_dropped_needs_no_plugin(home, accelerator):
    assert problems_of(home, accelerator, "loss.terms={info_nce: 1, gone: 0}") == []
    assert problems_of(home, accelerator, "loss.terms={info_nce: 1, gone: null}") == []
    assert "must be one of" in problems_of(home, accelerator, "loss.terms={info_nce: 1, gone: 1}")[0]


def test_the_shipped_checkpoint_may_be_started_from(home, accelerator):
    recipe = recipe_of(home, "init=demo")
    assert check.examine(recipe, accelerator)[0] == []
    assert recipe.start == str(DEMO_CHECKPOINT)
    assert recipe.init == "demo"


def recorded(recipe, stage: str) -> dict:
    return settings_of(
        emb_id=1, profile="rge", max_prompt_tokens=1, min_pixels=1, max_pixels=1, max_new_tokens=1, reasons="query",
        recipe=to_dict(recipe), stage=stage, step=4,
    ).content()  # fmt: skip


def test_what_another_recipe_left_in_the_folder_is_found(home, accelerator):
    other = recipe_of(home, "joint.lr=0.5")
    state = home / "out/joint/state/step_00000002"
    state.mkdir(parents=True)
    (state / DONE).write_text(json.dumps({"step": 2, "recipe": to_dict(other)}))
    assert "joint.lr (there 0.5, now 2e-05)" in problems_of(home, accelerator)[0]
    cold = recipe_of(home, "cold_start.lr=0.5")
    for folder, file, content in [
        ("final", RGE_JSON, recorded(cold, "cold_start")),
        ("state/step_00000004", DONE, {"step": 4, "recipe": to_dict(cold)}),  # of the same stage: named once
    ]:
        path = home / "out/cold_start" / folder
        path.mkdir(parents=True)
        (path / file).write_text(json.dumps(content))
    assert len(problems_of(home, accelerator)) == 2


def test_a_cold_start_that_the_joint_stage_alone_would_pass_by_is_found(home, accelerator):
    assert problems_of(home, accelerator, "stage=joint") == []
    final = home / "out/cold_start/final"
    final.mkdir(parents=True)
    (final / RGE_JSON).write_text(json.dumps(recorded(recipe_of(home), "cold_start")))
    write_manifest(final, {})
    [problem] = problems_of(home, accelerator, "stage=joint")
    assert f"{final}: it exists, but stage=joint without init= starts from" in problem
    assert problems_of(home, accelerator) == []


def test_a_finished_run_says_so_whatever_has_gone_since(home, accelerator):
    for stage in ("cold_start", "joint"):
        (home / "out" / stage / "final").mkdir(parents=True)
        (home / "out" / stage / "final" / RGE_JSON).write_text(json.dumps(recorded(recipe_of(home), stage)))
        write_manifest(home / "out" / stage / "final", {})
        (home / "records.jsonl").unlink(missing_ok=True)
    problems, found = check.examine(recipe_of(home), accelerator)
    assert (problems, found.stages) == ([], [])
    assert found.summary == [
        f"{home}/out is finished: its checkpoint is {home}/out/joint/final. To train again, give another out=, or "
        f"delete {home}/out"
    ]


def test_a_stage_that_was_deleted_after_a_later_one_had_finished_is_not_trained_again(home, accelerator):
    final = home / "out" / "joint" / "final"
    final.mkdir(parents=True)
    (final / RGE_JSON).write_text(json.dumps(recorded(recipe_of(home), "joint")))
    write_manifest(final, {})
    problems, found = check.examine(recipe_of(home), accelerator)
    assert (problems, found.stages) == ([], [])
    problems, found = check.examine(recipe_of(home, "rl.sources=[{path: records.jsonl}]"), accelerator)
    assert found.stages == ["rl"]


def limits(hard: int, results) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    raise_descriptor_limit()
    results.send((resource.getrlimit(resource.RLIMIT_NOFILE)[0], list(machine.problems(4))))


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_else_a_problem():
    """In a fork, since a hard limit does not come back."""
    for hard in (1024, 100):
        here, there = multiprocessing.Pipe()
        multiprocessing.get_context("fork").Process(target=limits, args=(hard, there)).start()
        assert here.poll(60)
        raised_to, problems = here.recv()
        assert raised_to == hard
        assert [problem[:50] for problem in problems] == (
            ["a process may open 100 files (hard limit 100), has"] if hard == 100 else []
        )


class Gpus:
    """What the pre-flight asks of an accelerator with two GPUs."""

    num_processes = 2
    device = torch.device("cuda", 0)


def test_shared_memory_too_small_for_nccl_is_said(monkeypatch):
    for free, processes, said in ((2**26, "2", True), (2**30, "2", False), (2**26, "1", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free))
        assert [line[:56] for line in machine.warnings(Gpus())] == (
            ["warning: /dev/shm has 64 MiB free, and NCCL's guide asks"] if said else []
        )


Card = namedtuple("Card", "name total_memory")


def plans_on(card: str, dtype: str, home, monkeypatch, memory_gib: int = 64) -> estimate.Plans:
    """Of a joint stage on two such cards of 80 GiB."""
    recipe = recipe_of(home, f"model.dtype={dtype}", "joint.steps=200000", "cold_start.steps=200000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card(card, 80 * 2**30))
    monkeypatch.setattr(launch, "back_end", lambda accelerator: launch.BackEnd("DDP", 2))
    monkeypatch.setattr(estimate, "main_memory", lambda: memory_gib * 2**30)

    class File(list):
        bad: list = []
        size = 3

    records = {str(home / "records.jsonl"): File([None] * 3)}
    return estimate.Plans(recipe, {"joint": 200_000}, records, {}, check._outline(recipe), Gpus())


def test_the_banner_warns_of_a_plan_that_does_not_fit(home, monkeypatch):
    for memory_gib, warned in ((64, False), (2, True)):
        plans = plans_on("NVIDIA H100 80GB HBM3", "bfloat16", home, monkeypatch, memory_gib)
        said = re.search(
            r"this does not fit: .* of a machine's 2 GiB of main memory", "\n".join(estimate.banner(plans))
        )
        assert bool(said) == warned


def test_the_banner_names_a_faster_way_that_fits_and_its_overrides(home, monkeypatch):
    """Where it saves enough to be worth saying, and only there."""
    plans = plans_on("NVIDIA H100 80GB HBM3", "bfloat16", home, monkeypatch)
    figures = plans.found["joint"]
    planned = {field.name: getattr(figures, field.name) for field in dataclasses.fields(Way)}
    found = {"memory_total": 7e9, "memory_to": 9e9, "overrides": ["train.micro_batch_size=7", "a=b"]}
    way = Way(**(planned | found | {"seconds": 0.0}))
    said = {}
    for share in (0.5, 0.9, 0.99):
        figures.fastest = [dataclasses.replace(way, seconds=share * figures.seconds), way]
        said[share] = [line for line in estimate.banner(plans) if "faster settings" in line]
    figures.fastest = []
    assert not any("faster settings" in line for line in estimate.banner(plans))
    assert said == {
        0.5: [
            "  according to the plan, faster settings for the same step fit, 2.00 x, in 6.5 (to 8.4) GiB: train.micro_batch_size=7 a=b"
        ],
        0.9: [
            "  according to the plan, faster settings for the same step fit, 1.11 x, in 6.5 (to 8.4) GiB: train.micro_batch_size=7 a=b"
        ],
        0.99: [],
    }


@pytest.mark.parametrize(
    ("card", "dtype", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", r"; \d+ min \(\d+ min to \d+ min\) at 35% of the vendor's figures for NVIDIA H100"),
        ("NVIDIA H100 80GB HBM3", "float32", "no time estimate: unknown throughput of NVIDIA H100 80GB HBM3 in float32"),
        ("Other 3000", "bfloat16", "no time estimate: unknown throughput of Other 3000 in bfloat16 .`rge plan` takes"),
    ],
)  # fmt: skip
def test_the_banner_says_time_and_memory_with_their_uncertainty(home, monkeypatch, card, dtype, said):
    lines = list(estimate.banner(plans_on(card, dtype, home, monkeypatch)))
    assert re.search(said, lines[-1])
    total, least, most = map(
        float, re.search(r"([\d.]+) of 80.0 GiB per process \(([\d.]+) to ([\d.]+)\)", lines[-1]).groups()
    )
    assert least <= total <= most


def test_a_stage_of_hours_on_a_cpu_is_given_them_at_its_measured_speed(home, accelerator, monkeypatch):
    monkeypatch.setattr(estimate, "cpu_speed", lambda dtype: (0.1, 0.01))

    def said(steps):
        found = check.examine(recipe_of(home, f"joint.steps={steps}", "cold_start.steps=4"), accelerator)[1]
        assert found.kept["joint"].where == "none"
        return found.summary[[line.startswith("joint: ") for line in found.summary].index(True) + 2 :][:2]

    assert "not worth measuring the CPU's speed (`rge plan cpu=true` does)" in said(4)[1]
    of_step, estimated = said(2_000_000)
    least = 2e6 * float(re.search(r"([\d.e-]+) TFLOP per step", of_step)[1]) / (0.7 * 0.1 * 3600)
    grounds = r"\(.* to .*\) at 70% of the 0.1 TFLOP/s and 0.01 TB/s measured here"
    number, unit = re.search(rf"; ([\d.,]+) (h|min) {grounds}$", estimated).groups()
    hours = float(number.replace(",", "")) / {"h": 1, "min": 60}[unit]
    assert 0.9 * least < hours < 10 * least  # rounded; and writing waits for memory besides


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [((), True), (("model.lora={rank: 2}",), False), (("rl.alpha_rl=0", "rl.beta=0"), False)],
)
def test_kl_without_adapters_is_refused_under_zero3_before_anything_is_loaded(
    home, accelerator, monkeypatch, overrides, refused
):
    monkeypatch.setattr(check.dist, "is_zero3", lambda accelerator: True)
    stage = f"rl.sources=[{{path: {home / 'records.jsonl'}}}]"
    problems = problems_of(home, accelerator, "stage=rl", stage, "rl.steps=2", "rl.beta=0.04", *overrides)
    said = [
        problem
        for problem in problems
        if "under ZeRO-3 no process holds them whole: use model.lora" in problem
    ]
    assert bool(said) == refused, problems


@pytest.mark.slow
def test_the_command_says_all_and_ends_with_one(home):
    done = forked.run("-m", "rge.check", f"recipe={home / 'tiny.yaml'}", "pictures=true")
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stdout
    done = forked.run(
        "-m", "rge.check", f"recipe={home / 'tiny.yaml'}", "log.trackers=[nothing]", "joint.sources=[{path: gone}]"
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: 2 problems; nothing was started:" in done.stderr
    assert "Traceback" not in done.stderr
    done = forked.run("-m", "rge.check", f"recipe={home / 'tiny.yaml'}", "pictures=perhaps")
    assert (done.returncode, done.stderr) == (2, "error: pictures must be true or false, got 'perhaps'\n")


def test_candidates_of_a_pool_that_cannot_be_embedded_are_found_before_the_first_stage(
    home, accelerator, monkeypatch
):
    """The stage rl comes last, after hours. A start reads the pool once, and opens no picture of it."""
    others = [{"id": "gone", "image": "gone.png"}, {"id": "half", "image": "half.png"}]
    pool = write(home / "pool.jsonl", record("a"), record("b", positives=others))
    (home / "half.png").write_bytes((home / "egg.png").read_bytes()[:-500])
    overrides = [f"rl.sources=[{{path: {home / 'records.jsonl'}}}]", f"rl.candidates=pool:{pool}"]
    gone = f"rl.candidates: {pool}: candidate 'gone': picture {home / 'gone.png'}"
    reads = []
    with monkeypatch.context() as watched:
        watched.setattr("rge.check.read_pool", lambda path: reads.append(path) or read_pool(path))
        watched.setattr("rge.rl.pool.measured", lambda *asked: pytest.fail("every candidate is measured"))
        assert problems_of(home, accelerator, *overrides) == [f"{gone} does not exist"]
    assert reads == [Path(pool)]
    found = problems_of(home, accelerator, *overrides, decode=True)
    assert found[0] == f"{gone}: it cannot be read: No such file or directory"
    assert len(found) == 2
    assert found[1].startswith(f"rl.candidates: {pool}: candidate 'half': picture {home / 'half.png'}")
    assert problems_of(home, accelerator, *overrides, "stage=joint", "rl.sources=[]") == []
    lengths = problems_of(home, accelerator, *overrides, "data.max_prompt_tokens=4", decode=True)
    assert any("candidate 'ta'" in one and "alone exceed max_prompt_tokens=4" in one for one in lengths)


def test_adapters_that_cannot_be_continued_are_found_before_any_weights_are_loaded(
    home, accelerator, tiny_path
):
    asked = ["export.adapters_only=true", "model.lora={rank: 2, targets: [q_proj, v_proj]}"]
    embedder = embedder_to_train(str(tiny_path), recipe_of(home, *asked).model)
    base = Base.of(str(tiny_path), None, embedder.rows_of_base).as_recorded_in(home / "adapters")
    settings = settings_of(
        emb_id=embedder.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=3136, max_new_tokens=12,
        reasons="query", recipe=to_dict(recipe_of(home, *asked)), stage="cold_start", step=1,
    )  # fmt: skip
    export(embedder, home / "adapters", settings.but(base=base))
    asked += ["stage=joint", f"init={home / 'adapters'}"]
    assert problems_of(home, accelerator, *asked) == []
    found = problems_of(home, accelerator, *asked, "model.lora.rank=4", "model.lora.targets=[]")
    assert len(found) == 1
    assert "model.lora asks for different ones (rank, targets)" in found[0]
    others = ["model.lora.rank=4", "export.adapters_only=false"]  # merged, and new ones started
    assert problems_of(home, accelerator, *asked, *others) == []


def test_a_family_that_vllm_cannot_write_for_is_found_before_the_cold_start(
    home, accelerator, lively_paths, monkeypatch
):
    monkeypatch.setattr(vllm_writer, "find_spec", lambda name: True)  # it is installed
    asked = ["rollout.backend=vllm", f"model.path={lively_paths('idefics3')}"]
    found = problems_of(home, accelerator, *asked)
    assert len(found) == 1
    assert "rge does not know how to pass pictures of a idefics3 to vLLM" in found[0]
    assert problems_of(home, accelerator, *asked, "stage=cold_start") == []
    assert problems_of(home, accelerator, "rollout.backend=vllm") == []


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_held_out_picture_that_cannot_be_read_is_found_before_training(home, accelerator, on_bad):
    """Not at the first measurement, hours later; those after validation.max_records are never read."""
    whole = (home / "egg.png").read_bytes()
    (home / "cut.png").write_bytes(whole[: len(whole) // 2])
    held_out = write(home / "held_out.jsonl", record("h"), record("x", "cut.png"))
    given = (f"validation.sources=[{{path: {held_out}}}]", f"data.on_bad={on_bad}")
    [problem] = problems_of(home, accelerator, *given)
    assert "'x'" in problem
    assert problems_of(home, accelerator, *given, "validation.max_records=1") == []


def test_held_out_records_that_are_not_used_may_be_too_long(home, accelerator):
    positives = [{"id": "t", "text": "an egg", "rationale": "it is an egg " * 300}]
    path = write(home / "held_out.jsonl", record("x"), record("y"), record("z", positives=positives))
    asked = [f"validation.sources=[{{path: {path}}}]", "data.max_rationale_tokens=100"]
    [problem] = problems_of(home, accelerator, *asked)
    assert "record 'z': the rationale has" in problem
    assert problems_of(home, accelerator, *asked, "validation.max_records=2") == []


def altered(home: Path, tiny_path: Path, change) -> str:
    """The override that trains from a copy of the tiny model, changed by `change(folder)`."""
    folder = home / "altered"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_path, folder)
    change(folder)
    return f"model.path={folder}"


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BLIND = "{% for turn in messages %}{% for part in turn.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda folder: (folder / "chat_template.jinja").write_text(BLIND), 1),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content.upper() }}"), 1),
        (lambda folder: (folder / "chat_template.jinja").unlink(), 1),
        (lambda folder: edit_json(folder / "tokenizer_config.json", eos_token=None), 1),
        # Where tokenizers kept their template before it had a file of its own.
        (lambda folder: edit_json(
            folder / "tokenizer_config.json", chat_template=(folder / "chat_template.jinja").rename(folder / "old").read_text()
        ), 0),
    ],
    ids=["pictures are ignored", "contents are no list", "no template", "no end of turn", "template of the tokenizer"],
)  # fmt: skip
def test_a_processor_that_cannot_be_trained_with_is_one_problem(home, accelerator, tiny_path, change, number):
    write(home / "records.jsonl", *(record(f"r{n}") for n in range(30)))
    problems = problems_of(home, accelerator, altered(home, tiny_path, change))
    assert len(problems) == number
    assert all("altered" in problem for problem in problems)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3114792\n"


@pytest.mark.parametrize(
    ("file", "left"),
    [("model.safetensors", POINTER), ("model.safetensors", None), ("tokenizer.json", POINTER)],
)
def test_files_of_a_model_that_are_not_whole_are_one_problem(home, accelerator, tiny_path, file, left):
    """Cloned without Git LFS, or a download that broke off."""
    write(home / "records.jsonl", *(record(f"r{n}") for n in range(30)))

    def spoil(folder):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: len(whole) // 2] if left is None else left)

    [problem] = problems_of(home, accelerator, altered(home, tiny_path, spoil))
    assert file in problem
    assert (POINTER_NOTE in problem) == (left is not None)


def test_a_start_without_an_output_matrix_is_for_the_contrastive_loss_alone(home, accelerator, headless_path):
    here = f"model.path={headless_path}"
    [problem] = problems_of(home, accelerator, here)
    assert "lm_head.weight" in problem
    assert "lm_head.weight" in "".join(problems_of(home, accelerator, here, "stage=joint", "loss.ratio=none"))
    alone = ("stage=joint", "loss.ratio=none", "loss.anchor=none")
    assert problems_of(home, accelerator, here, *alone) == []
    assert embedder_to_train(str(headless_path), recipe_of(home, here, *alone).model, needs_head=False)


@pytest.mark.parametrize(
    ("returns", "line"),
    [("(q - q).sum(1)", None), ("0.0", None), ("q.sum() / 0 + [][1]", 4), ("c_CD.sum()", 4), ("c[:2].sum().detach()", None)],
)  # fmt: skip
def test_a_loss_of_a_plugin_is_called_by_the_check(home, accelerator, monkeypatch, returns, line):
    name = f"losses_of_{abs(hash(returns))}"
    (home / f"{name}.py").write_text(
        "from rge.losses import register_loss\n"
        f"@register_loss('{name}')\n"
        "def loss(q, c, positive, ignored, *, temperature):\n"
        f"    return {returns}\n"
    )
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    monkeypatch.setattr(CONTRASTIVE_LOSSES, "_entries", dict(CONTRASTIVE_LOSSES._entries))
    [problem] = problems_of(home, accelerator, f"plugins=[{name}]", f"loss.terms={{info_nce: 1, {name}: 1}}")
    assert name in problem
    if line is not None:
        assert f"plug-in {name}, line {line} of {home / name}.py" in problem

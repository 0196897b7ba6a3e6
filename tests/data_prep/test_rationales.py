"""Oracle rationales: checks by hand, and whole over HTTP."""

import json

import pytest
from PIL import Image

from data_prep.__main__ import main
from data_prep.calls.local_server import LocalServer, chat
from data_prep.options import UserError
from data_prep.rationales import checks, prompts
from rge.schema import Positive, QueryPart, Record
from rge.sources import RecordFile


@pytest.mark.parametrize(
    ("rationale", "target", "share"),
    [
        ("It is a red fire engine.", "A red fire engine", 1.0),  # red fire, fire engine
        ("A fire engine comes.", "A red fire engine", 0.5),
        ("The fire is red, the engine cold.", "A red fire engine", 0.0),  # no two neighbours
        ("This must be an apple.", "apple", 1.0),
        ("This must be a pear.", "apple", 0.0),
        ("Anything.", None, 0.0),
        ("Anything.", "the", 0.0),
    ],
)
def test_leak(rationale, target, share):
    assert checks.leak(rationale, target) == share


@pytest.mark.parametrize(
    ("rationale", "found"),
    [
        ("A short, plain rationale.", []),
        ("word " * 51, ["too long"]),
        ("As the Positive Sample shows, it is a key.", ["forbidden phrase"]),
        ("Then <emb> follows.", ["forbidden phrase"]),
        ("这是一把钥匙", ["language"]),
        ("A café with a naïve façade.", []),
    ],
)
def test_faults(rationale, found):
    assert checks.faults(rationale, max_words=50) == found


def record(name: str, query: dict, positive: dict, instruction: str | None = None) -> Record:
    return Record(
        id=name,
        group=name,
        source="s",
        split="train",
        instruction=instruction,
        query=QueryPart(**query),
        positives=[Positive(id=f"{name}-p", **positive)],
    )


@pytest.mark.parametrize(
    ("query", "positive", "instruction", "task"),
    [
        ({"images": ["i"]}, {"text": "t"}, "Identify the category of this picture", "classification"),
        ({"images": ["i"]}, {"text": "t"}, None, "image_to_text"),
        ({"images": ["i"], "text": "q"}, {"text": "t"}, None, "vqa"),
        ({"text": "q"}, {"image": "i"}, None, "text_to_image"),
        ({"images": ["i"], "text": "q"}, {"image": "i"}, "Find it with this change", "composed_retrieval"),
        ({"images": ["i"], "text": "q"}, {"image": "i"}, None, "reasoning_retrieval"),
        (
            {"images": ["i"], "text": "q"},
            {"image": "i"},
            "Select the portion of the image that is meant",
            "grounding",
        ),
        ({"text": "q"}, {"text": "t"}, None, "text_retrieval"),
    ],
)
def test_tasks(query, positive, instruction, task):
    made = record("r", query, positive, instruction)
    assert prompts.task_of(made, made.positives[0]) == task


@pytest.fixture
def records(tmp_path):
    (tmp_path / "in" / "images").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "in" / "images" / "a.png")
    rows = [
        record(name, {"images": ["images/a.png"], "text": name}, {"text": "a red fire engine"})
        for name in ("good", "leaky", "rude", "broken")
    ]
    path = tmp_path / "in" / "records.jsonl"
    path.write_text("".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows))
    return path


async def answer(path, body):
    text = "\n".join(part["text"] for part in body["messages"][-1]["content"] if part["type"] == "text")
    if "<query>leaky" in text and "Your last rationale copied" not in text:
        return chat("<rationale>It is a red fire engine.</rationale>")
    if "<query>rude" in text:
        return chat("<rationale>The ground truth says so.</rationale>")
    if "<query>broken" in text:
        return chat("no tag at all")
    return chat("<rationale>A ladder on the roof, so firemen use it.</rationale>")


@pytest.mark.parametrize(("leak", "kept"), [("keep", 2), ("drop", 1), ("rewrite", 2)])
def test_rationales_are_written_and_checked(records, tmp_path, capsys, leak, kept):
    out = tmp_path / "out" / "records.jsonl"
    with LocalServer(answer) as server:
        words = [f"records={records}", f"out={out}", "model=m", f"base_url={server.url}", f"leak={leak}"]
        main(["rationales", *words])
        num_answered = server.num_answered
        main(["rationales", *words])
        assert server.num_answered == num_answered, "all answers are kept"
    RecordFile(out, need_rationale=True)
    rows = [Record.model_validate_json(line) for line in out.read_text().splitlines()]
    assert len(rows) == kept
    assert (out.parent / rows[0].query.images[0]).is_file()
    report = json.loads((tmp_path / "out" / "records.jsonl.report.json").read_text())
    assert report["dropped: forbidden phrase"] == report["dropped: missing tag"] == 1
    assert report.get("dropped: leak", 0) == (leak == "drop")
    assert report["leak_above_limit"] == (leak == "keep")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("leak=maybe", "leak must be keep, drop or rewrite"),
        ("task=poetry", "task must be auto or one of"),
        ("max_words=many", "a number is needed"),
        ("out=", "out needs a value"),
    ],
)
def test_wrong_words(records, word, message):
    words = [f"records={records}", "model=m", *([] if word.startswith("out") else ["out=x.jsonl"]), word]
    with pytest.raises(UserError, match=message):
        main(["rationales", *words])

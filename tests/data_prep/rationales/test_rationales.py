"""Oracle rationales: checks by hand, and whole over HTTP."""

import asyncio
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import Image
from small_runs import Seer

from data_prep.__main__ import main
from data_prep.rationales import prompts
from data_prep.rationales.gain import GainJudge, gains
from data_prep.rationales.leak import text_leak
from data_prep.rationales.options import RationaleOptions
from data_prep.rationales.writing import Writing
from data_prep.rmir.config import EncoderConfig
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.files import InUseError
from rge.common.parts import content_of
from rge.common.schema import Item, Positive, QueryPart, Record
from rge.data.sources import RecordFile
from rge.model.packing import Branch


@pytest.mark.parametrize(
    ("rationale", "target", "share"),
    [
        ("It is a red fire engine.", "A red fire engine", 1.0),  # red fire, fire engine
        ("A fire engine comes.", "A red fire engine", 0.5),
        ("The fire is red, the engine cold.", "A red fire engine", 0.0),  # no two neighbours
        ("This must be an apple.", "apple", 1.0),
        ("This must be a pear.", "apple", 0.0),
        ("Anything.", None, None),
        ("Anything.", "the", 0.0),
    ],
)
def test_leak(rationale, target, share):
    assert text_leak(rationale, target) == share


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
    assert prompts.faults(rationale, max_words=50) == found


def write(options: RationaleOptions) -> dict:
    return Writing(options).run()


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
        ({"images": ["i"]}, {"image": "i"}, None, "image_to_image"),
    ],
)
def test_tasks(query, positive, instruction, task):
    made = record("r", query, positive, instruction)
    assert prompts.task_of(made, made.positives[0]) == task


@pytest.mark.parametrize("task", prompts.TASKS)
def test_only_retrieval_must_not_say_the_answer(task):
    """RGE's Table 9: a class, an answer and a region are named; 3.2: whole, objects and world knowledge in every task."""
    made = record("r", {"images": ["i"], "text": "What is it?"}, {"text": "an apple"})
    rules = prompts.parts(made, made.positives[0], task, [], None, max_words=50, rewrite=False)[0]
    rules = " ".join(rules.lower().split())
    names_it = task in ("classification", "vqa", "grounding")
    assert ("do not copy" in rules) != names_it
    assert ("concludes the answer" in rules) == names_it
    assert all(word in rules for word in ("whole", "objects", "what you know of the world"))


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


@pytest.mark.parametrize(
    ("leak", "max_leak", "kept"), [("keep", 0.5, 2), ("drop", 0.5, 1), ("drop", 1, 2), ("rewrite", 0.5, 2)]
)
def test_rationales_are_written_and_checked(records, tmp_path, capsys, leak, max_leak, kept):
    out = tmp_path / "out" / "records.jsonl"
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    out.parent.symlink_to(tmp_path / "elsewhere" / "deep")
    with LocalServer(answer) as server:
        words = [
            f"records={records}",
            f"out={out}",
            "model.name=m",
            f"model.base_url={server.url}",
            f"leak={leak}",
            f"max_leak={max_leak}",
        ]
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
    assert report.get("dropped: leak", 0) == (leak == "drop" and max_leak < 1)
    assert report["leak_above_limit"] == (leak == "keep")


def test_a_call_that_is_never_answered_stays_open(records, tmp_path):
    """The same rule as in the rmir pipeline."""

    async def chokes(path, body):
        said = json.dumps(body["messages"])
        return Answer({"error": "boom"}, 500) if "<query>good" in said else await answer(path, body)

    out = tmp_path / "out.jsonl"
    with LocalServer(chokes) as server:
        model = ModelConfig(name="m", base_url=server.url, max_retries=0, reasks=0)
        for _ in range(4):
            with error_about(UserError, "unanswered", "on_unanswered"):
                write(RationaleOptions(records=records, out=out, model=model))
            assert not out.exists()
        report = write(RationaleOptions(records=records, out=out, model=model, on_unanswered="proceed"))
    assert report["dropped: unanswered"] == 1
    assert report["records"] == 1


def test_a_missing_picture_is_named_before_any_call(records, tmp_path):
    (records.parent / "images" / "a.png").unlink()
    with LocalServer(answer) as server:
        model = ModelConfig(name="m", base_url=server.url)
        with error_about(UserError, "records.jsonl", 1, "query.images.0"):
            write(RationaleOptions(records=records, out=tmp_path / "out.jsonl", model=model))
        assert not server.num_answered


def test_a_picture_that_vanishes_costs_only_its_own_calls(records, tmp_path):
    second, out = records.parent / "images" / "b.png", tmp_path / "out.jsonl"
    Image.new("RGB", (40, 40)).save(second)
    first_line, rest = records.read_text().split("\n", 1)
    records.write_text(f"{rest}{first_line.replace('a.png', 'b.png')}\n")
    with LocalServer(answer) as server:
        model = ModelConfig(name="m", base_url=server.url, reasks=0)
        writing = Writing(RationaleOptions(records=records, out=out, model=model))
        second.unlink()
        with error_about(UserError, "unanswered"):
            writing.run()
        assert server.num_answered == 3
        Image.new("RGB", (40, 40)).save(second)
        assert write(RationaleOptions(records=records, out=out, model=model))["records"] == 2
        assert server.num_answered == 4


def test_one_permanent_rejection_does_not_fail_the_second_run(records, tmp_path):
    async def too_large(path, body):
        said = json.dumps(body["messages"])
        return (
            Answer({"error": {"message": "no"}}, 413) if "<query>good" in said else await answer(path, body)
        )

    out = tmp_path / "out.jsonl"
    with LocalServer(too_large) as server:
        model = ModelConfig(name="m", base_url=server.url, reasks=0)
        first = write(RationaleOptions(records=records, out=out, model=model))
        asked = server.num_answered
        assert first["dropped: rejected request"] == 1
        assert (
            write(RationaleOptions(records=records, out=out, model=model))["dropped: rejected request"] == 1
        )
        assert server.num_answered == asked


def test_calls_that_are_all_rejected_replace_no_result(records, tmp_path):
    async def too_large(path, body):
        return Answer({"error": {"message": "too large"}}, 413)

    out = tmp_path / "out.jsonl"
    out.write_text("of an earlier model")
    with LocalServer(too_large) as server:
        model = ModelConfig(name="m", base_url=server.url)
        for _ in range(2):
            with error_about(UserError, "rejected"):
                write(RationaleOptions(records=records, out=out, model=model))
        assert server.num_answered == 8, "what was rejected is sent again"
    assert out.read_text() == "of an earlier model"


@pytest.mark.parametrize("proceed", [False, True])
def test_answers_without_content_replace_no_result(records, tmp_path, proceed):
    """Most calls get none: not even `on_unanswered=proceed` takes that for a result, and a repaired server is asked again."""
    out, ill = tmp_path / "out.jsonl", [True]
    out.write_text("of an earlier model")

    async def thinks_only(path, body):
        if ill[0] and "<query>rude" not in json.dumps(body["messages"]):
            found = chat("")
            found.body["choices"][0]["message"] = {"content": None, "reasoning_content": "Well."}
            return found
        return await answer(path, body)

    with LocalServer(thinks_only) as server:
        model = ModelConfig(name="m", base_url=server.url, backoff_s=0, reasks=1)
        asked = {"on_unanswered": "proceed"} if proceed else {}
        options = RationaleOptions(records=records, out=out, model=model, **asked)
        for _ in range(2):
            with error_about(UserError, "unanswered"):
                write(options)
        assert out.read_text() == "of an earlier model"
        ill[0] = False
        assert write(options)["records"] == 2


@pytest.mark.parametrize("mode", ["calls", "batch"])
def test_windows_are_in_flight_together(records, tmp_path, monkeypatch, mode):
    """Twenty records in windows of two, and all twenty calls at once or in one batch; a second process is refused meanwhile."""
    monkeypatch.setattr("data_prep.rationales.pairs.WINDOW", 2)
    (line, *_) = records.read_text().splitlines()
    rows = [{**json.loads(line), "id": f"r{number}", "group": f"r{number}"} for number in range(20)]
    for number, row in enumerate(rows):
        row["query"]["text"] = f"good {number}"
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    together = asyncio.Barrier(20 if mode == "calls" else 1)

    async def served(path, body):
        await together.wait()
        with pytest.raises(InUseError):
            write(RationaleOptions(records=records, out=tmp_path / "out.jsonl", model=model))
        return await answer(path, body)

    with LocalServer(served) as server:
        model = ModelConfig(name="m", base_url=server.url, mode=mode, batch_poll_s=0.02)
        report = write(RationaleOptions(records=records, out=tmp_path / "out.jsonl", model=model))
    assert report["kept"] == 20
    assert report["models"][0]["batch_calls"] == (20 if mode == "batch" else 0)
    assert len(server.batches.batches) == (mode == "batch")


def test_a_folder_of_records_has_one_budget_and_one_ledger(records, tmp_path, capsys):
    for name in ("a", "b"):
        (records.parent / f"{name}.jsonl").write_text(records.read_text().replace('"id":"', f'"id":"{name}-'))
    for row, name in ((0, "a"), (1, "b")):
        path = records.parent / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"text":"good"', f'"text":"good {row}"'))
    records.unlink()
    (records.parent / "._a.jsonl").write_bytes(b"\0\5\x16\7")  # a Mac's
    out = tmp_path / "out"
    with LocalServer(answer) as server:
        words = [
            f"records={records.parent}",
            f"out={out}",
            "model.name=m",
            f"model.base_url={server.url}",
            "model.reasks=0",
        ]
        paid = [*words, "model.input_price=0", "model.output_price=1", "model.budget=0.00029"]
        with error_about(UserError, "budget"):
            main(["rationales", *paid])
        shown = capsys.readouterr().err
        assert "8 calls" in shown
        assert "(input alone) to at most 0.00" in shown
        main(["rationales", *words])
        reports = json.loads(capsys.readouterr().out)
    assert reports.keys() == {"a.jsonl", "b.jsonl"}
    assert [report["kept"] for report in reports.values()] == [2, 2]
    assert (out / "replies.sqlite").is_file()
    RecordFile(out / "a.jsonl", need_rationale=True)


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("leak=maybe", ("choice", "leak")),
        ("task=poetry", ("choice", "task")),
        ("max_words=many", ("type", "max_words")),
        ("out=", ("missing", "out")),
        ("candidates=0", ("range", "candidates")),
        ("min_gain=0", "min_gain"),
        ("encoder={kind: eyes}", ("choice", "encoder.kind")),
        ("encoder={kind: siglip}", "encoder.path"),
        ("max_leak=7", ("range", "max_leak")),
        ("out=.", "form"),
        ("select=nowhere", "nowhere"),
        ("dry_run=maybe", ("type", "dry_run")),
        ("model.concurrency=0", ("range", "model.concurrency")),
        ("model={name: m, mode: vllm}", ("choice", "model.mode")),
        ("model=m", ("type", "model")),
    ],
)
def test_wrong_words(records, word, field):
    words = [f"records={records}", "model.name=m", *([] if word.startswith("out") else ["out=x.jsonl"]), word]
    with error_about(UserError, field):
        main(["rationales", *words])


# ---------------------------------------------------------------------------------------- several candidates, and a choice


def test_gain_by_hand():
    """Two targets at right angles, temperature 1. Without: cosines .6 and .8; after the rationale: 1 and 0."""
    targets = np.array([[1.0, 0.0], [0.0, 1.0]])
    without, helps, misleads = np.array([0.6, 0.8]), np.array([1.0, 0.0]), np.array([0.0, 1.0])
    found = gains(without, np.stack([helps, misleads]), targets, 0, 1.0)
    before = 0.6 - np.log(np.exp(0.6) + np.exp(0.8))
    assert found == pytest.approx([1 - np.log(np.e + 1) - before, 0 - np.log(np.e + 1) - before])
    assert found[0] > 0 > found[1]
    assert gains(without, np.empty((0, 2)), targets, 0, 1.0).shape == (0,)


def test_gains_of_an_embedder_are_those_of_separate_forwards(records, checkpoint):
    """One forward of prompt and branches equals one forward a rationale; a record's other positives are no rivals."""
    folder, rows = records.parent, RecordFile(records)
    other = record("other", {"text": "what?"}, {"text": "a key", "image": str(folder / "images/a.png")})
    both = Positive(id="also", text="a second right answer")
    first = rows[0].model_copy(update={"positives": [*rows[0].positives, both]})
    pairs = [(first, first.positives[0]), (first, both), (other, other.positives[0])]
    texts = [["A padlock is opened with a key.", "An egg."], [], ["A chick hatches from it."]]
    judge = GainJudge(checkpoint, batch_size=2, temperature=0.05)
    found = judge.judge(pairs, texts)
    assert [len(gain) for gain in found] == [2, 0, 1]
    encoder = judge.encoder
    targets = encoder.encode(
        [Item("1", content_of("a red fire engine")), Item("2", content_of("a key", (str(folder / "images/a.png"),)))],
        side="candidate", mode="direct",
    ).embeddings  # fmt: skip
    prompt = encoder.builder.build(Item("q", content_of("good", (str(folder / "images/a.png"),))), "query")
    states = []
    for text in [None, *texts[0]]:
        ids = encoder.builder.rationale_ids(text, "q") if text else [encoder.model.emb_id]
        packed = encoder.model.pack([prompt], [[Branch(ids, read_state=True)]])
        states.append(encoder.model(packed)[0].state_ND[0].detach().numpy())
    assert found[0] == pytest.approx(gains(states[0], np.stack(states[1:]), targets, 0, 0.05), abs=1e-3)


@pytest.fixture
def pictures_wanted(tmp_path):
    """Twelve records whose targets are pictures, with captions in a table beside them."""
    (tmp_path / "in").mkdir()
    things, grounds, rows, captions = ("ball", "cube"), ("red", "blue", "old", "wet", "big", "new"), [], []
    for number in range(12):
        thing, ground = things[number % 2], grounds[number // 2]
        path = tmp_path / "in" / f"{number}.png"
        Image.new("RGB", (40, 40), (20 * number, 100 * (number % 2), 0)).save(path)
        rows.append(record(f"r{number}", {"text": f"which {number}"}, {"image": path.name}))
        captions.append(f"{thing} with {ground} stripes before hills")
    records = tmp_path / "in" / "records.jsonl"
    records.write_text("".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows))
    ids = [row.positives[0].id for row in rows]
    pq.write_table(pa.table({"id": ids, "caption": captions}), tmp_path / "captions.parquet")

    async def describes_odd_ones(path, body):
        text = "\n".join(part.get("text", "") for part in body["messages"][-1]["content"])
        number = int(re.search(r"<query>which (\d+)</query>", text)[1])
        said = captions[number] if number % 4 == 1 else f"a {things[number % 2]} is needed"
        return chat(f"<rationale>So {said}.</rationale>")

    return records, tmp_path / "captions.parquet", describes_odd_ones


@pytest.mark.parametrize("how", ["by caption", "by picture"])
def test_what_only_the_target_picture_shows_is_a_leak(pictures_wanted, tmp_path, how, monkeypatch):
    """Three of twelve rationales say the caption; no target has a text."""
    records, captions, answers = pictures_wanted
    out = tmp_path / "out.jsonl"
    with LocalServer(answers) as server:
        words = [
            f"records={records}",
            f"out={out}",
            "model.name=m",
            f"model.base_url={server.url}",
            "leak=drop",
        ]
        with error_about(UserError, "leak"):
            main(["rationales", *words])
        assert server.num_answered == 0, "said before a call is paid"
        words += [f"captions={captions}"]
        if how == "by picture":
            said = pq.read_table(captions)["caption"].to_pylist()
            seer = Seer({str(number): caption for number, caption in enumerate(said)})
            monkeypatch.setattr("data_prep.rationales.writing.load_encoder", lambda config: seer)
            words += ["encoder={kind: siglip, path: seer}"]
        main(["rationales", *words])
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["dropped: leak"], report["kept"], report["leak_not_measured"]) == (3, 9, 0)
    scores = [json.loads(line) for line in (tmp_path / "out.jsonl.scores.jsonl").read_text().splitlines()]
    name = "leak_caption" if how == "by caption" else "leak_picture"
    leaky = [row[name] for row in scores if "leak" in row["faults"]]
    clean = [row[name] for row in scores if row["chosen"]]
    assert np.mean(leaky) > 0.4 > 0.15 > np.mean(clean)


def test_whether_a_leak_can_be_measured_is_asked_of_all_records_together(
    pictures_wanted, tmp_path, monkeypatch
):
    """Whatever their order: two of the last four have a caption."""
    monkeypatch.setattr("data_prep.rationales.pairs.WINDOW", 4)
    records, captions, answers = pictures_wanted
    pq.write_table(pq.read_table(captions).slice(8, 2), captions)
    out = tmp_path / "out.jsonl"
    with LocalServer(answers) as server:
        where = ["model.name=m", f"model.base_url={server.url}"]
        main(["rationales", f"records={records}", f"out={out}", *where, "leak=drop", f"captions={captions}"])
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["dropped: leak"], report["kept"], report["leak_not_measured"]) == (1, 11, 10)


def test_a_picture_that_cannot_be_measured_is_named_before_any_call(pictures_wanted, tmp_path):
    """It is no part of a call: that of a labelled negative."""
    records, _, answers = pictures_wanted
    first, rest = records.read_text().split("\n", 1)
    wrong = {"id": "wrong", "image": "broken.png"}
    records.write_text(f"{json.dumps(json.loads(first) | {'negatives': [wrong]})}\n{rest}")
    (records.parent / "broken.png").write_bytes((records.parent / "0.png").read_bytes()[:60])
    with LocalServer(answers) as server:
        model = ModelConfig(name="m", base_url=server.url)
        seer = EncoderConfig("siglip", "seer")
        with error_about(UserError, "encoder"):
            write(RationaleOptions(records=records, out=tmp_path / "out.jsonl", model=model, encoder=seer))
        assert not server.num_answered


def test_an_encoder_does_not_look_at_the_pictures_of_queries(pictures_wanted, tmp_path, monkeypatch):
    """With on_unanswered=proceed, such a record is left out; `select` embeds queries, too."""
    records, captions, answers = pictures_wanted
    first, rest = records.read_text().split("\n", 1)
    line = json.loads(first)
    line["query"]["images"] = ["broken.png"]
    records.write_text(f"{json.dumps(line)}\n{rest}")
    (records.parent / "broken.png").write_bytes((records.parent / "0.png").read_bytes()[:60])
    said = pq.read_table(captions)["caption"].to_pylist()
    seer = Seer({str(number): caption for number, caption in enumerate(said)})
    monkeypatch.setattr("data_prep.rationales.writing.load_encoder", lambda config: seer)
    with LocalServer(answers) as server:
        words = [
            f"records={records}",
            f"out={tmp_path / 'out.jsonl'}",
            "model.name=m",
            f"model.base_url={server.url}",
        ]
        words += ["on_unanswered=proceed", "model.max_retries=0"]
        with error_about(UserError, "select"):
            main(["rationales", *words, "select=somewhere"])
        assert not server.num_answered
        main(["rationales", *words, "encoder={kind: siglip, path: seer}"])
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text())["kept"] == 11


def test_targets_that_cannot_be_looked_at_are_counted_and_not_called_clean(pictures_wanted, tmp_path):
    records, _, answers = pictures_wanted
    out = tmp_path / "out.jsonl"
    with LocalServer(answers) as server:
        main(
            ["rationales", f"records={records}", f"out={out}", "model.name=m", f"model.base_url={server.url}"]
        )
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["kept"], report["leak_not_measured"]) == (12, 12)


@pytest.mark.slow
def test_a_checkpoint_sees_the_targets_and_measures_gains(pictures_wanted, tmp_path, checkpoint):
    records, captions, answers = pictures_wanted
    out = tmp_path / "out.jsonl"
    with LocalServer(answers) as server:
        words = [f"records={records}", f"out={out}", "model.name=m", f"model.base_url={server.url}"]
        main(["rationales", *words, f"select={checkpoint}", f"captions={captions}"])
    report = json.loads(out.with_name(f"{out.name}.report.json").read_text())
    assert report["kept"] == 12
    assert report["leak_encoder"].startswith("checkpoint ")
    assert report["gain_mean"] is not None
    scores = [json.loads(line) for line in out.with_name(f"{out.name}.scores.jsonl").read_text().splitlines()]
    assert all({"leak_caption", "leak_picture", "gain"} <= row.keys() for row in scores)


async def several(path, body):
    """Draw 0 copies, draw 1 is rude, draw 2 and 3 are fine."""
    sample = body["seed"]
    assert body["temperature"] == 0.7
    return chat(
        "<rationale>"
        + ["It is a red fire engine.", "The ground truth.", "Ladder and hose.", "Firemen use it."][sample]
        + "</rationale>"
    )


def test_the_candidate_that_gains_most_is_taken(records, tmp_path, checkpoint, monkeypatch):
    asked = []

    def judge(self, pairs, candidates):
        asked.append([list(texts) for texts in candidates])
        return [
            np.array([0.1 * (text == "Firemen use it.") - 0.05 for text in texts]) for texts in candidates
        ]

    out = tmp_path / "out.jsonl"
    words = [f"records={records}", f"out={out}", "model.name=m", "candidates=4", "leak=drop"]
    with LocalServer(several) as server:
        main(["rationales", *words, f"model.base_url={server.url}"])
        rows = [Record.model_validate_json(line) for line in out.read_text().splitlines()]
        assert [row.positives[0].rationale for row in rows] == ["Ladder and hose."] * 4, (
            "the first that passes"
        )
        monkeypatch.setattr(GainJudge, "judge", judge)
        main(["rationales", *words, f"model.base_url={server.url}", f"select={checkpoint}"])
        assert server.num_answered == 16, "what was written is chosen from again without a call"
        rows = [Record.model_validate_json(line) for line in out.read_text().splitlines()]
        assert [row.positives[0].rationale for row in rows] == ["Firemen use it."] * 4
        assert asked == [[["Ladder and hose.", "Firemen use it."]] * 4], (
            "only what passed the checks is weighed"
        )
        report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
        assert report["gain_mean"] == pytest.approx(0.05)
        assert (report["asked"], report["dropped: leak"], report["dropped: forbidden phrase"]) == (16, 4, 4)
        assert report["not chosen"] == 4
        main(["rationales", *words, f"model.base_url={server.url}", f"select={checkpoint}", "min_gain=0.2"])
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text())["dropped: gain"] == 4
    assert out.read_text() == ""


@pytest.mark.parametrize(
    "window", ["data_prep.rationales.pairs.WINDOW", "data_prep.rationales.writing.GAIN_WINDOW"]
)
def test_no_pair_is_compared_with_itself_alone(records, tmp_path, checkpoint, monkeypatch, window):
    """Four pairs, at most three at once: two and two, since the gain of a single pair would be 0 whatever is written."""
    sizes = []
    weigh = GainJudge.judge

    def judge(self, pairs, candidates):
        sizes.append(len(pairs))
        return weigh(self, pairs, candidates)

    monkeypatch.setattr(GainJudge, "judge", judge)
    monkeypatch.setattr(window, 3)
    with LocalServer(several) as server:
        words = [f"records={records}", f"out={tmp_path / 'out.jsonl'}", "model.name=m", "candidates=4"]
        main(["rationales", *words, f"model.base_url={server.url}", f"select={checkpoint}"])
    assert sizes == [2, 2]


def test_the_dry_run_counts_and_asks_nothing(records, tmp_path, capsys):
    """Four pairs, three candidates each: twelve calls of at most 256 tokens, one picture each."""
    words = [
        f"records={records}",
        f"out={tmp_path / 'out.jsonl'}",
        "model.name=m",
        "model.base_url=http://127.0.0.1:9/v1",
    ]
    main(
        [
            "rationales",
            *words,
            "candidates=3",
            "dry_run=true",
            "model.output_price=1000",
            "model.picture_tokens=100",
        ]
    )
    shown = capsys.readouterr().out
    assert "| vqa | 4 |" in shown
    assert "12 calls," in shown
    assert "at most 3,072 output tokens: from 0.00 (input alone) to at most 3.07." in shown
    by_batch = ["model.mode=batch", "model.batch_price=0.25", "model.output_price=1000"]
    main(["rationales", *words, "candidates=3", "dry_run=true", *by_batch])
    assert "at most 0.77." in capsys.readouterr().out
    main(["rationales", *words, "candidates=3", "dry_run=true", "model.draws_a_call=2"])
    assert "8 calls," in (together := capsys.readouterr().out)
    assert "at most 3,072 output tokens: the cost is not known" in together
    assert not list(tmp_path.glob("out*"))


def test_records_may_leave_out_what_training_fills_in(records, tmp_path):
    """`rge train` reads records without id, group, source and split, so the result of this command keeps them too."""
    rows = [json.loads(line) for line in records.read_text().splitlines()[:1]]
    for row in rows:
        for name in ("id", "group", "source", "split"):
            del row[name]
        del row["positives"][0]["id"]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with LocalServer(answer) as server:
        model = ModelConfig(name="m", base_url=server.url)
        report = write(RationaleOptions(records=records, out=tmp_path / "out.jsonl", model=model))
    assert report["records"] == 1
    assert len(RecordFile(tmp_path / "out.jsonl", need_rationale=True)) == 1

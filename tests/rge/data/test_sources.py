"""Records: every fault is named with file, line and field."""

import codecs
import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from faults import error_about

from rge.checkpoints.description import instructions_of
from rge.common.errors import UserError
from rge.common.images import PictureIndex
from rge.common.options import parse_options
from rge.common.schema import Record, Target
from rge.data import sources
from rge.data.config import RecordsConfig, SourceConfig
from rge.data.sources import (
    RecordError,
    RecordFile,
    identity,
    write_jsonl,
)
from rge.identity.run_identity import content_of


def record(name: str = "r1", **changes) -> dict:
    return {
        "id": name,
        "group": "g",
        "source": "s",
        "split": "train",
        "query": {"text": "What opens this?", "images": ["images/padlock.png"]},
        "positives": [{"id": "key", "image": "images/key.png", "rationale": "A key opens a padlock."}],
        **changes,
    }


@pytest.fixture
def write(tmp_path):
    def to_file(*lines) -> str:
        path = tmp_path / "records.jsonl"
        path.write_bytes(
            b"".join(
                (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
            )
        )
        return str(path)

    return to_file


def without(key: str) -> dict:
    return {name: value for name, value in record().items() if name != key}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (without("query"), "query: Field required"),
        (without("positives"), "positives: Field required"),
        (record(positives=[]), "positives: List should have at least 1 item"),
        (
            record(positives=[{"id": "key", "rationale": "x"}]),
            "positives.0: .*a target needs an image, a text, or both",
        ),
        (
            record(positives=[{"id": "key", "text": " "}]),
            "positives.0: .*a target needs an image, a text, or both",
        ),
        (
            record(positives=[{"id": 7.5, "image": "key.png"}]),
            "positives.0.id: Input should be a valid string",
        ),
        (record(negatives=[{"id": "n"}]), "negatives.0: .*a target needs an image, a text, or both"),
        (record(query={"images": []}), "query: .*a query needs a text, images, or both"),
        (record(query={"text": " \n"}), "query: .*a query needs a text, images, or both"),
        (record(negativs=[]), "negativs: Extra inputs are not permitted"),
        (record(query={"text": "a", "image": "p.png"}), "query.image: Extra inputs are not permitted"),
        (record(name=True), "id: Input should be a valid string"),
        (record(name=""), "id: String should have at least 1 character"),
        (
            record(query={"text": "a", "images": [7.5]}),
            "query.images.0: float is neither a path nor an encoded picture",
        ),
        (b"{not json", "record: Invalid JSON"),
        (b'{"id": "\xff"}', "record: Invalid JSON"),
        (b"[1, 2]", "record: Input should be an object"),
        (record("first"), "id: 'first' is already used in line 1"),
    ],
)
def test_a_broken_record_is_reported_with_file_line_and_field(write, broken, problem):
    path = write(record("first"), record("second"), broken, record("last"))
    with error_about(RecordError, path, 3, problem.partition(": ")[0]) as caught:
        RecordFile(path)
    assert re.match(problem.partition(": ")[2], caught.value.cause.reason)
    assert len(caught.value.reason.splitlines()) == 2  # the good records around it are not blamed


@pytest.mark.parametrize(
    ("rationale", "problem"),
    [
        (None, "missing or blank, but the LM loss needs it"),
        (" \n", "missing or blank, but the LM loss needs it"),
        ("a key <emb>", "contains <emb>, which the trainer appends itself"),
    ],
)
def test_rationales_are_checked_where_they_are_needed(write, rationale, problem):
    positives = [record()["positives"][0], {"id": "k2", "text": "key", "rationale": rationale}]
    path = write(record("ok"), record("bad", positives=positives))
    assert len(RecordFile(path)) == 2
    with error_about(RecordError, path, 2, "positives.1.rationale") as caught:
        RecordFile(path, need_rationale=True)
    assert caught.value.cause.reason == f"{problem} (record 'bad')"


def test_a_fault_of_many_records_is_one_line_with_an_example_and_their_number(write):
    broken = [
        record(f"r{n}", negativs=[], group="", query={"images": [f"holiday {n} in spring.png"]})
        for n in range(15)
    ]
    more = [record(f"x{n}", **{f"wrong{n}{'a' * n}": 1}) for n in range(25)]
    path = write(*broken, *more)
    with pytest.raises(RecordError) as caught:
        RecordFile(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[1].startswith(f"{path}:1: group: ")
    assert lines[1].endswith("(and 14 more like this)")
    assert lines[2].startswith(f"{path}:1: negativs: ")
    assert lines[3].startswith(f"{path}:16: wrong")
    assert lines[-1] == "... and 7 more"
    path = write(*[record(f"r{n}", query={"images": [f"holiday {'in ' * n}spring.png"]}) for n in range(15)])
    with pytest.raises(RecordError) as caught:
        RecordFile(path, pictures=PictureIndex())
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 2, "one for the queries, one for the targets"
    assert lines[1].endswith("(and 14 more like this)")


@pytest.mark.parametrize("long", ["A1b2+" * 600_000, "what opens this " * 200_000])
def test_no_message_prints_a_long_value(write, long):
    """A picture in base64, where it does not belong, made a message of megabytes."""
    wrong = [
        record(long, positives=[]), record("a", **{long: 1}), record(long, positives=[{"id": long, "image": long}]),
        record("b", query={"text": "a", "images": [{long: long}]}), long.encode(),
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(RecordError) as caught:
            RecordFile(write(one), need_rationale=True, pictures=PictureIndex())
        assert len(str(caught.value)) < 2000
    with pytest.raises(UserError) as raised:
        parse_options(RecordsConfig, [f"streaming={long}", f"nmae={long}", "columns=[" + long + "]"], "test")
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    with error_about(RecordError, "none.jsonl", "empty"):
        RecordFile(path)


def test_a_missing_file_is_an_error(tmp_path):
    with error_about(RecordError, "absent.jsonl", "missing"):
        RecordFile(tmp_path / "absent.jsonl")
    (tmp_path / "x.parquet").touch()
    for other in (tmp_path, tmp_path / "x.parquet"):
        with error_about(RecordError, other, "format"):
            RecordFile(other)


def test_a_json_array_is_one_error(tmp_path):
    path = tmp_path / "array.jsonl"
    path.write_text(json.dumps([record("a"), record("b")], indent=1))
    with error_about(RecordError, path, "array"):
        RecordFile(path, on_bad="skip")


def test_records_are_read_by_position_with_absolute_pictures(write, tmp_path):
    path = write(record("a"), b"  ", record("ü"), record("c", query={"text": "only text"}))
    file = RecordFile(path, progress=True)
    assert [file[index].id for index in (2, 0, 1, 0)] == ["c", "a", "ü", "a"]
    assert file[0].query.images == [str(tmp_path / "images/padlock.png")]
    assert file[0].positives[0].image == str(tmp_path / "images/key.png")
    assert file[2].query.images == []


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b"".join(json.dumps(record(name)).encode() + b"\n" for name in "ab"))
    file = RecordFile(path)
    assert [file[index].id for index in range(2)] == ["a", "b"]
    assert file.place(0) == 0
    assert file.content == {
        **content_of(path),
        "records": 2,
        "left_out": 0,
    }  # as a finished stage compares it
    (tmp_path / "plain.jsonl").write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    assert file.content["sha256"] == RecordFile(tmp_path / "plain.jsonl").content["sha256"]
    assert instructions_of([SourceConfig(path=str(path))]).by_task
    path.write_bytes(codecs.BOM_UTF8 + b"\n" + json.dumps(record("a")).encode())
    assert [one.id for one in map(RecordFile(path).__getitem__, range(1))] == ["a"]
    path.write_bytes(codecs.BOM_UTF8 + 2 * (json.dumps(record("a")).encode() + b"\n"))
    with error_about(RecordError, path, 2, "id"):
        RecordFile(path)


def test_a_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record("a")) + "\n" + json.dumps(record("b")))
    assert [RecordFile(path)[index].id for index in range(2)] == ["a", "b"]


def test_written_records_read_back(tmp_path):
    records = [Record.model_validate(record("a", category="temporal")), Record.model_validate(record("b"))]
    write_jsonl(tmp_path / "out.jsonl", records)
    file = RecordFile(tmp_path / "out.jsonl")
    assert [file[0].category, file[1].positives[0].rationale] == ["temporal", "A key opens a padlock."]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_texts_without_repeats(write):
    negatives = [{"id": "n", "text": "What opens this?"}]
    path = write(record("a", instruction="Find it."), record("b", negatives=negatives))
    file = RecordFile(path)
    assert file.texts() == ["Find it.", "What opens this?", "A key opens a padlock."]
    file.path.write_bytes(b"{")
    with error_about(RecordError, path, "changed"):
        file.texts()


def test_identity_defaults_to_the_id():
    key, same, other = (
        Target(id="key", text="x"),
        Target(id="drawing of a key", text="y", identity="key"),
        Target(id="key2", text="x"),
    )
    assert identity(key) == identity(same) != identity(other)
    assert -(2**63) <= identity(key) < 2**63
    # The same on every machine and in every process: not Python's salted hash (`printf key | b2sum -l 64`).
    assert identity(key) == -3567751758100214539


def test_many_numbers_are_on_the_disk(monkeypatch):
    monkeypatch.setattr(sources, "SPILL_BYTES", 40)
    for count in range(10):
        found = sources.on_disk(np.arange(count) - 5)
        assert found.tolist() == [value - 5 for value in range(count)]
        assert isinstance(found, np.memmap) == (count > 5)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_sources_hold_no_descriptors(write):
    """There may be more sources than the stock limit of 1,024 open files, and every worker inherits them."""
    file = write(record("a"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [RecordFile(file) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(kept[0]) == 1


def test_broken_records_are_not_kept_in_memory(write):
    """A wrong folder of pictures breaks every record of a file that may be larger than memory."""
    long = record("ID", query={"text": "What opens this? " * 1000})
    lines = [json.dumps(long).replace("ID", f"r{number % 150}").encode() for number in range(200)]
    path = write(*lines)
    tracemalloc.start()
    with error_about(RecordError, path, 1, "positives.0.image"):
        RecordFile(path, pictures=PictureIndex())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(lines) * len(lines[0]) / 4


@pytest.mark.slow
def test_a_file_takes_little_memory_and_duplicates_are_found_in_it(tmp_path, monkeypatch):
    """Offsets are on the disk, and of the ids only hashes are in memory, while the file is read."""
    monkeypatch.setattr(sources, "SPILL_BYTES", 8000)
    count, path = 20_000, tmp_path / "many.jsonl"
    line = json.dumps(record("NUMBER"))
    with path.open("w") as out:
        for number in range(count):
            out.write(line.replace("NUMBER", f"a rather long record name, number {number}") + "\n")
    RecordFile(path)  # whatever the first use of a library keeps
    tracemalloc.start()
    file = RecordFile(path)
    _, peak = tracemalloc.get_traced_memory()
    # Libraries keep tables of bounded size, and other tests' threads may be ending.
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/rge/*")])
    held = sum(trace.size for trace in own.traces)
    tracemalloc.stop()
    assert len(file) == count
    assert file[count - 1].id.endswith(f"number {count - 1}")
    assert held < 4 * count
    assert peak < 60 * count  # a list of names alone would be 90 bytes each
    with path.open("a") as out:
        out.write(line.replace("NUMBER", "a rather long record name, number 17") + "\n")
    with error_about(RecordError, path, count + 1, "id"):
        RecordFile(path)

"""Data sets as sources: the same records as from a file, streams that resume exactly, and what is refused."""

import io
import json
import os
import pickle
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from faults import error_about
from paths import ROOT
from PIL import Image, ImageDraw
from ports import free_port
from safetensors.torch import load_file
from transformers import AutoProcessor

from rge import check
from rge.checkpoints.description import instructions_of
from rge.common.errors import RecipeError, UserError
from rge.common.files import POINTER_NOTE
from rge.common.images import ImageError, PictureIndex, load_image
from rge.config import load_recipe
from rge.data import readers, streams
from rge.data.bad_records import BadRecords
from rge.data.collate import Source, StepBatches
from rge.data.config import DataConfig, PromptedConfig, RecordsConfig, SourceConfig
from rge.data.loader import Loader, WorkerError
from rge.data.mixture import Mixture
from rge.data.readers import DATA_SOURCES, open_records, register_data_source
from rge.data.rows import drop_image_bytes
from rge.data.sources import PRESENT, RecordError, RecordFile
from rge.diagnose.pairs import read_pairs
from rge.model.backbone import load_backbone
from rge.model.prompts import Prompt, PromptBuilder

datasets = pytest.importorskip("datasets")

TRAIN = ROOT / "rge" / "train.py"
COUNT = 24
WORDS = ["what", "egg", "key", "opens", "this", "turns", "into", "a", "locked", "chick", "over", "time"]


def drawing(number: int) -> bytes:
    image = Image.new("RGB", (40 + 3 * number, 60), "white")
    ImageDraw.Draw(image).ellipse((5, 5, 30, 50), fill=(10 * number, 90, 255 - 9 * number))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def record(number: int, chance: random.Random) -> dict:
    """Every shape: with pictures and without, with two of them, with negatives and without, Unicode."""
    shown = [f"pictures/{number % 8}.png"] * (number % 3)
    return {
        "id": f"r{number}", "group": f"g{number // 2}", "source": "shop", "split": "train", "category": "ü" * (number % 2),
        "instruction": "Find it." if number % 2 else None,
        "query": {"text": " ".join(chance.choices(WORDS, k=5)), "images": shown},
        # Objects with different fields, which the library reads as JSON.
        "positives": [{"id": f"t{number % 12}", "image": f"pictures/{number % 7}.png", **({"text": "thing"} if number % 2 else {}),
                       "rationale": " ".join(chance.choices(WORDS, k=chance.randint(2, 6)))}],
        "negatives": [{"id": f"n{number}", "text": "not this"}][: number % 4 // 2],
    }  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The same records as a file, saved by the library with pictures inside, as Parquet and as a folder of JSON lines."""
    folder = tmp_path_factory.mktemp("data sets") / "with ünicode"
    (folder / "lines" / "pictures").mkdir(parents=True)
    pngs = [drawing(number) for number in range(8)]
    for number, png in enumerate(pngs):
        (folder / "lines" / "pictures" / f"{number}.png").write_bytes(png)
    chance = random.Random(0)
    records = [record(number, chance) for number in range(COUNT)]
    lines = [json.dumps(one) + "\n" for one in records]
    (folder / "lines" / "train.jsonl").write_text("".join(lines))

    def cell(path: str | None) -> dict | None:
        return path and {"bytes": pngs[int(Path(path).stem)], "path": None}

    def within(one: dict) -> dict:
        targets = {
            side: [{"image": None, "text": None, **target} for target in one[side]]
            for side in ("positives", "negatives")
        }
        for target in (*targets["positives"], *targets["negatives"]):
            target["image"] = cell(target["image"])
        query = {**one["query"], "images": [cell(path) for path in one["query"]["images"]]}
        return {**one, **targets, "query": query}

    text, image = datasets.Value("string"), datasets.Image()
    target = {"id": text, "image": image, "text": text}
    features = datasets.Features(
        {
            **dict.fromkeys(("id", "group", "source", "split", "category", "instruction"), text),
            "query": {"text": text, "images": datasets.List(image)},
            "positives": datasets.List({**target, "rationale": text}),
            "negatives": datasets.List(target),
        }
    )
    whole = datasets.Dataset.from_list([within(one) for one in records], features=features)
    whole.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(
        str(folder / "splits")
    )
    (folder / "parquet").mkdir()
    for number in range(4):
        whole.shard(4, number, contiguous=True).to_parquet(
            str(folder / "parquet" / f"train-{number}.parquet")
        )
    return folder


def pixels(ref) -> bytes:
    return load_image(ref).tobytes()


def content(one) -> dict:
    """A record with its pictures decoded."""
    found = one.model_dump()
    for target in (*found["positives"], *found["negatives"]):
        target["image"] = target["image"] and pixels(target["image"])
    found["query"]["images"] = [pixels(ref) for ref in found["query"]["images"]]
    return found


KINDS = [("saved", {}), ("splits", {}), ("parquet", {}), ("lines", {})]


@pytest.mark.parametrize(("kind", "more"), KINDS, ids=[kind for kind, _ in KINDS])
def test_a_data_set_gives_the_records_of_the_file(home, kind, more):
    file = RecordFile(home / "lines" / "train.jsonl")
    found = open_records(
        RecordsConfig(dataset=str(home / kind), **more), need_rationale=True, pictures=PictureIndex()
    )
    assert [content(found[index]) for index in range(len(found))] == [
        content(file[index]) for index in range(COUNT)
    ]
    assert found.texts() == file.texts()
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301 - made here
    assert len(pickle.dumps(found)) < 5000  # the data set itself does not travel
    assert content(sent[7]) == content(file[7])


def test_a_file_may_leave_out_what_a_data_set_may(tmp_path):
    one = {
        "query": {"text": "what", "images": "pictures/0.png"},
        "positives": [{"image": "pictures/1.png", "text": None}],
        "negatives": [{"text": "not this"}],
        "category": None,
    }
    (tmp_path / "lines").mkdir()
    file = tmp_path / "lines/train.jsonl"
    lines = [json.dumps(one) + "\n", json.dumps({**one, "id": "second"}) + "\n"]
    file.write_text("".join(lines))
    found = open_records(RecordsConfig(path=str(file)))
    theirs = open_records(RecordsConfig(dataset=str(tmp_path / "lines")))
    for index in range(2):
        mine, other = found[index], theirs[index]
        assert mine.split == other.split == "train"
        assert mine.group == mine.id
        assert mine.source == "train.jsonl"
        assert [one.id for one in (*mine.positives, *mine.negatives)] == [
            one.id for one in (*other.positives, *other.negatives)
        ]
        assert mine.query.images == other.query.images
    assert [found[index].id for index in range(2)] == ["train.jsonl:0", "second"]
    file.write_text(lines[0].replace('"negatives"', '"negativs"'))
    with error_about(RecordError, file, 1, "negativs"):
        open_records(RecordsConfig(path=str(file)))


def test_a_split_is_chosen(home):
    assert len(open_records(RecordsConfig(dataset=str(home / "splits"), split="test"))) == 5
    with error_about(RecordError, home / "splits", ("choice", "split")):
        open_records(RecordsConfig(dataset=str(home / "splits"), split="valid"))
    with error_about(RecordError):
        open_records(RecordsConfig(dataset=str(home / "parquet"), split="valid"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Columns as somebody else names them, in a data set with two subsets."""
    folder = tmp_path_factory.mktemp("odd")
    rows = [
        {"question": f"q{n}", "photo": {"bytes": drawing(n), "path": None}, "answer": f"a{n % 2}", "meta": {"cot": f"because {n}"},
         "wrong": [f"w{n}", f"v{n}"], "junk": 1.5}
        for n in range(4)
    ]  # fmt: skip
    text = datasets.Value("string")
    features = datasets.Features(
        {"question": text, "photo": datasets.Image(), "answer": text, "meta": {"cot": text}, "wrong": datasets.List(text),
         "junk": datasets.Value("float32")}
    )  # fmt: skip
    whole = datasets.Dataset.from_list(rows, features=features)
    for name, part in (("all", whole), ("one", whole.select([2]))):
        (folder / name).mkdir()
        part.to_parquet(str(folder / name / "part.parquet"))
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}/*.parquet"}]}
        for name in ("all", "one")
    ]
    (folder / "README.md").write_text("---\n" + yaml.safe_dump({"configs": configs}) + "---\n")
    return folder


COLUMNS = {
    "query.text": "question", "query.images": "photo", "positives.text": "answer", "positives.rationale": "meta.cot",
    "negatives.text": "wrong",
}  # fmt: skip


def test_columns_of_other_names_become_fields(odd):
    found = open_records(RecordsConfig(dataset=str(odd), subset="all", columns=COLUMNS), need_rationale=True)
    one = found[2]
    assert (one.query.text, [pixels(ref) for ref in one.query.images]) == ("q2", [pixels(drawing(2))])
    assert (one.positives[0].text, one.positives[0].rationale) == ("a0", "because 2")
    assert [target.text for target in one.negatives] == ["w2", "v2"]
    assert (one.id, one.split) == (f"{odd.name}[all, train]:2", "train")
    assert one.group == one.id
    # What is the same answer is not a negative of itself.
    assert one.positives[0].id == found[0].positives[0].id != found[1].positives[0].id
    assert len(open_records(RecordsConfig(dataset=str(odd), subset="one", columns=COLUMNS))) == 1


def test_a_column_may_have_the_name_of_the_field_that_it_is_a_part_of(tmp_path):
    rows = [{"query": f"q{n}", "photo": f"{n}.png", "positives": ["a", "b"]} for n in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"query.images": "photo", "query.text": "query", "positives.text": "positives"}
    found = open_records(RecordsConfig(dataset=str(tmp_path), columns=columns))[1]
    assert (found.query.text, [Path(ref).name for ref in found.query.images]) == ("q1", ["1.png"])
    assert [one.text for one in found.positives] == ["a", "b"]
    columns["query.text"] = (
        "photo"  # a column of the field's name is ignored like all others that are not mapped
    )
    assert open_records(RecordsConfig(dataset=str(tmp_path), columns=columns))[0].query.text == "0.png"
    del columns["query.text"]  # the question would be lost
    with error_about(RecordError, 0, "query"):
        open_records(RecordsConfig(dataset=str(tmp_path), columns=columns))


def test_a_column_may_add_to_the_targets_of_another(tmp_path):
    rows = [{"q": "a", "cot": ["since", "as"], "stands_for": ["key"],
             "positives": [{"text": "x"}, {"text": "y"}], "negatives": [{"text": "n", "id": "7"}]}]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"query.text": "q", "positives.rationale": "cot", "negatives.identity": "stands_for"}
    [found] = open_records(RecordsConfig(dataset=str(tmp_path), columns=columns), need_rationale=True)
    assert [(one.text, one.rationale) for one in found.positives] == [("x", "since"), ("y", "as")]
    assert [(one.text, one.id, one.identity) for one in found.negatives] == [("n", "7", "key")]


@pytest.mark.parametrize(
    ("columns", "positives"),
    [
        ({"positives.text": "positives.caption"}, [{"caption": "a", "score": 1}]),
        ({"positives.text": "chosen"}, [{"text": "x", "id": "1"}, {"text": "y", "id": "2"}]),
    ],
)
def test_mapped_texts_replace_a_column_of_targets(tmp_path, columns, positives):
    rows = [{"query": {"question": "why?", "lang": "en"}, "positives": positives, "chosen": ["a"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"query.text": "query.question", **columns}
    [found] = open_records(RecordsConfig(dataset=str(tmp_path), columns=columns))
    assert found.query.text == "why?"
    assert [one.text for one in found.positives] == ["a"]


def test_a_row_may_lack_one_of_the_columns_that_describe_its_targets(tmp_path):
    rows = [
        {"q": "a", "right": ["x", "y"], "cot": None, "shown": ["0.png", "1.png"], "said": None},
        {"q": "b", "right": ["x"], "cot": ["since"], "shown": None, "said": ["no"]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {
        "query.text": "q", "positives.text": "right", "positives.rationale": "cot",
        "negatives.image": "shown", "negatives.text": "said",
    }  # fmt: skip
    first, second = open_records(RecordsConfig(dataset=str(tmp_path), columns=columns))
    assert [(one.text, one.rationale) for one in first.positives] == [("x", None), ("y", None)]
    assert [(Path(one.image).name, one.text) for one in first.negatives] == [("0.png", None), ("1.png", None)]
    assert [(one.text, one.rationale) for one in second.positives] == [("x", "since")]
    assert [(one.image, one.text) for one in second.negatives] == [(None, "no")]


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"columns": {**COLUMNS, "query.txt": "question"}}, ("columns", "query.txt")),
        ({"columns": {**COLUMNS, "query.text": "qestion"}}, ("columns", "query.text", "unmapped")),
        ({"columns": {"query.text": "question"}}, ("positives",)),
        ({"subset": "none"}, ("unreadable",)),
        ({"dataset": "nobody/nothing"}, ("unknown",)),
        ({"dataset": "nowhere"}, ("unknown",)),
        ({"columns": {**COLUMNS, "positives.id": "wrong"}}, (0, "positives")),
        ({"columns": {**COLUMNS, "query.text": "junk"}}, (0, "query.text")),
    ],
)
def test_what_cannot_be_read_is_named(odd, changes, about, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with error_about(RecordError, *about):
        open_records(RecordsConfig(**{"dataset": str(odd), "subset": "all", "columns": COLUMNS, **changes}))


@pytest.mark.parametrize("streaming", [False, True])
def test_pictures_beside_a_table_do_not_make_a_folder_of_pictures(home, tmp_path, streaming):
    """The library goes by the most frequent ending, unless the table's name contains that of a split."""
    shutil.copytree(home / "lines", tmp_path / "lines")
    (tmp_path / "lines/train.jsonl").rename(tmp_path / "lines/mine.jsonl")
    config = RecordsConfig(dataset=str(tmp_path / "lines"), streaming=streaming)
    found = open_records(config, pictures=PictureIndex(), first=COUNT)
    assert [one.id for one in found] == [one.id for one in RecordFile(home / "lines" / "train.jsonl")]
    assert Path(found[1].query.images[0]).is_file()
    for name in ("._mine.jsonl", ".ipynb_checkpoints/mine-checkpoint.jsonl"):
        (tmp_path / "lines" / name).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "lines/mine.jsonl", tmp_path / "lines" / name)
    assert len(open_records(config, first=10 * COUNT)) == COUNT


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["parquet", "json", "csv", "text", "imagefolder"])
def test_a_folder_may_have_the_name_of_a_format(home, name, streaming, tmp_path, monkeypatch):
    """The library would read every file of this format below the working directory, held-out ones among them."""
    monkeypatch.chdir(tmp_path)
    lines = (home / "lines" / "train.jsonl").read_text().splitlines(keepends=True)
    for folder, number in ((name, 3), ("elsewhere", 7)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("".join(lines[:number]))
    config = SourceConfig(dataset=name, streaming=streaming)
    assert [one.id for one in readers.some_records(config, 10)] == ["r0", "r1", "r2"]
    shutil.rmtree(tmp_path / name)
    with pytest.raises(RecordError):
        open_records(config)


def test_a_streams_folder_may_be_a_relative_path(home, monkeypatch):
    monkeypatch.chdir(home)
    found = open_records(SourceConfig(dataset="lines", streaming=True), pictures=PictureIndex())
    images = [image for number in range(8) for image in found.reader()[number].query.images]
    assert images
    assert all(Path(image).is_file() for image in images)


def test_an_empty_folder_is_an_error(tmp_path):
    with error_about(RecordError, "unreadable"):
        open_records(RecordsConfig(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("line", "about"), [('{"query": oops}', "unreadable"), ('{"query": ["?"]}', "query")]
)
def test_a_file_of_a_data_set_that_cannot_be_read_says_why(tmp_path, line, about):
    (tmp_path / "a.jsonl").write_text('{"query": {"text": "?"}}\n')
    (tmp_path / "b.jsonl").write_text(line + "\n")
    with error_about(RecordError, about):
        open_records(RecordsConfig(dataset=str(tmp_path)))


def broken(home: Path, folder: Path) -> None:
    """The records with four bad ones: no positive, no rationale, an id twice, a picture that is not there."""
    lines = (home / "lines" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[3]["positives"] = []
    rows[5]["positives"][0]["rationale"] = " "
    rows[9]["id"] = "r2"
    rows[11]["query"]["images"] = ["pictures/gone.png"]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pictures").symlink_to(home / "lines" / "pictures")


def test_bad_records_are_named_by_their_rows_or_left_out(home, tmp_path):
    broken(home, tmp_path / "bad")
    source = RecordsConfig(dataset=str(tmp_path / "bad"))
    with pytest.raises(RecordError) as caught:
        open_records(source, need_rationale=True, pictures=PictureIndex())
    said = caught.value.reason.splitlines()[1:]
    assert [line.removeprefix(f"{tmp_path / 'bad'}[train]:").split(": ")[:2] for line in said] == [
        ["3", "positives"],
        ["5", "positives.0.rationale"],
        ["9", "id"],
        ["11", "query.images.0"],
    ]
    assert "'r2' is already used in row 2" in said[2]
    found = open_records(source, need_rationale=True, pictures=PictureIndex(), on_bad="skip")
    assert (len(found), [bad.place for bad in found.bad]) == (COUNT - 4, [3, 5, 9, 11])
    assert [found[index].id for index in range(4)] == ["r0", "r1", "r2", "r4"]
    assert found.place(3) == 4


def write_pairs(folder: Path, questions: pa.Array, pictures: list) -> RecordsConfig:
    folder.mkdir()
    cells = pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"question": questions, "answer": cells}), folder / "train.parquet")
    columns = {"query.text": "question", "positives.image": "answer"}
    return RecordsConfig(dataset=str(folder), columns=columns)


def test_a_picture_without_bytes_is_found_by_the_check(tmp_path):
    empty = {"bytes": b"", "path": None}
    source = write_pairs(
        tmp_path / "rows", pa.array(["a", "b"]), [{"bytes": drawing(1), "path": None}, empty]
    )
    with error_about(RecordError, "rows[train]", 1):
        open_records(source)
    found = open_records(source, on_bad="skip")
    assert (len(found), found[0].query.text, [bad.place for bad in found.bad]) == (1, "a", [1])


def test_a_text_that_is_stored_as_bytes_is_found_by_the_check(tmp_path):
    pictures = [{"bytes": drawing(number), "path": None} for number in range(2)]
    source = write_pairs(tmp_path / "rows", pa.array([b"a", b"b"], pa.binary()), pictures)
    with error_about(RecordError, 0):
        open_records(source)


@pytest.mark.parametrize("kind", [pa.null(), pa.binary_view()])
def test_pictures_of_other_types_of_bytes(tmp_path, kind):
    """`datasets` gives ``bytes`` the type null where every row has a path."""
    content = None if kind == pa.null() else drawing(1)
    parts = [pa.array([content] * 2, kind), pa.array(["a.png", "b.png"])]
    pictures = pa.StructArray.from_arrays(parts, ["bytes", "path"])
    shown = drop_image_bytes(pa.table({"image": pictures}))["image"].to_pylist()
    assert shown == (["a.png", "b.png"] if content is None else [PRESENT] * 2)


def test_a_name_that_is_stored_as_bytes_is_found_by_the_check(tmp_path):
    pictures = [{"bytes": drawing(number), "path": None} for number in range(2)]
    source = write_pairs(tmp_path / "rows", pa.array(["a", "b"]), pictures)
    file = tmp_path / "rows" / "train.parquet"
    named = pq.read_table(file).append_column("category", pa.array([b"c", b"d"], pa.binary()))
    pq.write_table(named, file)
    with error_about(RecordError, 0):
        open_records(source)


def test_checking_does_not_read_the_pictures(home, monkeypatch):
    """What is looked at has no bytes in it, so that a set of a terabyte is checked in the time of its texts."""
    from rge.data import rows

    seen = []
    real = rows.parsed
    monkeypatch.setattr(
        rows, "parsed", lambda columns, row, number: seen.append(row) or real(columns, row, number)
    )
    open_records(RecordsConfig(dataset=str(home / "parquet")), pictures=PictureIndex())
    assert len(seen) == COUNT
    assert "<bytes>" in repr(seen)
    assert "PNG" not in repr(seen)


def shard_files(folder: Path, form: str, *shards: list[dict]) -> None:
    folder.mkdir()
    for number, rows in enumerate(shards):
        path = folder / f"train-{number}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


POOR = {"id": "a", "query": {"text": "q"}, "category": None, "price": 1, "negatives": [],
        "positives": [{"text": "t", "image": None}], "instruction": "Find it."}  # fmt: skip
RICH = {"id": "b", "query": {"text": "q"}, "category": "c", "price": 1.5, "negatives": [{"text": "n"}], "shelf": "x",
        "positives": [{"text": "t", "image": "p.png", "identity": "i", "rationale": "so"}], "group": "g"}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_shards_may_differ_where_their_columns_go_together(form, streaming, tmp_path):
    """Null with anything, whole numbers with others, missing with null, whichever shard comes first."""
    for name, shards in (("poor first", [[POOR], [RICH]]), ("rich first", [[RICH], [POOR]])):
        shard_files(tmp_path / name, form, *shards)
        config = SourceConfig(dataset=str(tmp_path / name), streaming=streaming)
        found = open_records(config)
        found = found.reader() if streaming else found
        one, other = sorted((found[0], found[1]), key=lambda record: record.id)
        assert (one.category, one.positives[0].image, one.instruction) == ("", None, "Find it.")
        assert not one.negatives
        assert (other.category, other.negatives[0].text, other.group) == ("c", "n", "g")
        assert (other.positives[0].identity, Path(other.positives[0].image).name) == ("i", "p.png")


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_without_rows_are_passed_over(streaming, tmp_path):
    """As filters in Spark and in the library leave them; a data set of nothing else has no rows."""
    table = pa.Table.from_pylist([RICH, RICH | {"id": "c"}])
    for place in ("first", "last", "both"):
        (tmp_path / place).mkdir()
        for number, is_empty in enumerate((place != "last", place != "first")):
            pq.write_table(
                table.slice(0, 0) if is_empty else table, tmp_path / place / f"train-{number}.parquet"
            )
    for place in ("first", "last"):
        found = open_records(SourceConfig(dataset=str(tmp_path / place), streaming=streaming))
        found = found.reader() if streaming else found
        assert {found[0].id, found[1].id} == {"b", "c"}
    pq.write_table(table.slice(0, 0), tmp_path / "one.parquet")
    (tmp_path / "one.jsonl").touch()
    for name in ("both", "one.parquet", "one.jsonl"):
        with pytest.raises(RecordError) as error:
            open_records(SourceConfig(dataset=str(tmp_path / name), streaming=streaming))
        assert error.value.__cause__ is None or isinstance(error.value.__cause__, RecordError)


def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("one.parquet", "one.jsonl", "one.png", "one.csv", "folder/train.parquet"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    for source in (
        {"dataset": "one.parquet"},
        {"path": "one.jsonl"},
        {"dataset": "one.csv"},
        {"dataset": "folder"},
    ):
        [(key, name)] = source.items()
        with pytest.raises(RecordError) as error:
            open_records(RecordsConfig(**{key: str(tmp_path / name)}))
        assert POINTER_NOTE in error.value.reason
    with pytest.raises(ImageError) as fault:
        load_image(str(tmp_path / "one.png"))
    assert fault.value.reason == POINTER_NOTE


def test_whole_numbers_that_pandas_writes_as_floats_are_ids(tmp_path):
    rows = [RICH | {"id": 7.0, "group": None}, RICH | {"id": 8.0, "group": 3.0}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "one.parquet")
    found = open_records(RecordsConfig(dataset=str(tmp_path / "one.parquet")))
    assert [(record.id, record.group) for record in (found[0], found[1])] == [("7", "7"), ("8", "3")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_shards_that_do_not_go_together_are_named_with_their_column(form, streaming, tmp_path):
    odd = RICH | {"positives": [{"text": ["several", "texts"]}]}
    shard_files(tmp_path / "odd", form, [POOR], [RICH], [odd])
    with pytest.raises(RecordError) as error:
        open_records(SourceConfig(dataset=str(tmp_path / "odd"), streaming=streaming))
    assert error.value.key == "positives"
    assert all(
        part in error.value.reason for part in ("positives.text", f"train-0.{form}", f"train-2.{form}")
    )


# ------------------------------------------------------------------------------------------------------------- streams


def stream(home: Path, kind: str = "parquet", buffer: int = 3, **more):
    source = SourceConfig(dataset=str(home / kind), streaming=True, shuffle_buffer=buffer)
    return open_records(source, need_rationale=True, pictures=PictureIndex(), **more)


@pytest.mark.parametrize("kind", ["parquet", "saved", "lines"])
def test_a_stream_has_each_row_once_an_epoch(home, kind):
    reader = stream(home, kind).reader()
    for epoch in range(3):
        places = range(epoch * COUNT, (epoch + 1) * COUNT)
        assert sorted(reader[place].id for place in places) == sorted(f"r{number}" for number in range(COUNT))
    assert content(reader[0])["positives"][0]["image"]


class Bare:
    """Stands for a prompt builder: every prompt is one token."""

    def build(self, item, side, load=None, keep=None):
        token = torch.zeros(1, dtype=torch.long)
        return Prompt(item.id, token, token, token.expand(3, 1), None, None)


SHARES = {
    "alone": ([1], "mixed"),
    "two, each in its own steps": ([1, 1], "homogeneous"),
    "three, each in its own steps": ([1, 1, 1], "homogeneous"),
    "beside a file of weight 15": ([1, 15], "mixed"),
    "of weight 2 and 3 in turns": ([2, 3], "homogeneous"),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shards", [(24,), (1, 13, 2, 5, 3)], ids=len)
def test_each_row_is_drawn_as_often_as_every_other(share, shards, tmp_path):
    """Whatever the numbers of workers, processes, sources and shards: what a run draws is the same, and leaves nothing out."""
    weights, batches = SHARES[share]
    rows, sources = iter(range(sum(shards))), []
    for shard, length in enumerate(shards):
        for number, _ in enumerate(weights):
            (tmp_path / f"s{number}").mkdir(exist_ok=True)
        lines = [next(rows) for _ in range(length)]
        for number, _ in enumerate(weights):
            made = (
                {"id": f"{number}-{row}", "query": {"text": "q"}, "positives": [{"text": f"t{row}"}]}
                for row in lines
            )
            path = tmp_path / f"s{number}" / f"{shard}.jsonl"
            path.write_text("".join(json.dumps(one) + "\n" for one in made))
    for number, _ in enumerate(weights):
        source = SourceConfig(dataset=str(tmp_path / f"s{number}"), streaming=True, shuffle_buffer=5)
        sources.append(open_records(source, notes=tmp_path / "streams.jsonl"))
    if "file" in share:
        path = tmp_path / "file.jsonl"
        path.write_text((tmp_path / "s1" / "0.jsonl").read_text())
        sources[1] = RecordFile(path)
    groups = range(len(weights)) if batches == "homogeneous" else None
    mixture = Mixture([one.size for one in sources], weights, 6, 0, groups=groups)
    steps = range(17 if batches == "mixed" and len(weights) == 1 else 40)
    orders = []
    for of, num_workers in ((1, 0), (1, 2), (1, 4), (2, 0), (2, 3)):
        settings = DataConfig(num_workers=num_workers, sort_by_length=False)
        needs = {"need_oracle": False, "need_candidates": False}
        found = []
        for rank in range(of):
            parts = [Source(one, Bare(), settings) for one in sources]
            made = StepBatches(parts, mixture, rank=rank, world_size=of, **needs)
            found.append([batch.record_ids for batch in Loader(made, steps, settings)])
        orders.append([[name for part in step for name in part] for step in zip(*found, strict=True)])
    assert all(order == orders[0] for order in orders)
    seen = Counter(name for step in orders[0] for name in step)
    drawn, coverage = mixture.drawn_before(len(steps)), made.coverage(len(steps))
    for number, source in enumerate(sources):
        of_source = [seen[f"{number}-{row}"] for row in range(len(source) if source.size else 24)]
        assert sum(of_source) == drawn[number]
        assert max(of_source) - min(of_source) <= 1
        if drawn[number] > len(of_source):  # the end of a stream has been seen
            name = list(coverage["passes"])[number]
            assert coverage["passes"][name] == pytest.approx(drawn[number] / len(of_source), abs=1e-4)
            assert coverage["rows_seen"][name] == sum(count > 0 for count in of_source)
            assert coverage["rows_never_seen"][name] == sum(count == 0 for count in of_source)


def test_the_order_is_random_and_follows_from_the_seed(home):
    def read(**more):
        reader = stream(home, **more).reader()
        return [reader[place].id for place in range(2 * COUNT)]

    first = read()
    assert read() == first
    assert read(seed=1) != first
    assert read(buffer=7) != first
    assert first[:COUNT] != first[COUNT:]
    assert read(buffer=1)[:6] == sorted(
        read(buffer=1)[:6], key=lambda name: int(name[1:])
    )  # a shard's own order


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [1, 3])
def test_a_reader_goes_on_anywhere_and_passes_over_shards_it_knows(home, buffer, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BATCH", 4)  # several tables a shard
    monkeypatch.setattr(streams, "SIDE_BY_SIDE", 2)
    notes = tmp_path / "out" / "streams.jsonl"
    whole = stream(home, notes=notes, buffer=buffer).reader()
    expected = [whole[place].id for place in range(3 * COUNT)]
    opened: list[int] = []
    tables = streams.Reader._tables
    monkeypatch.setattr(
        streams.Reader, "_tables", lambda it, shard: opened.append(shard) or tables(it, shard)
    )
    for known in (notes, None):
        for place in (0, 1, 4, 13, COUNT - 1, COUNT, 2 * COUNT + 1):
            again = stream(home, notes=known, buffer=buffer).reader()
            opened.clear()
            assert again[place].id == expected[place]
            assert known is None or len(opened) <= 2 * min(buffer, 2)  # some may just have ended
            assert [again[at].id for at in range(place, len(expected))] == expected[place:]
    with notes.open("a") as out:
        out.write('{"stream": "cut by a k')
    assert stream(home, notes=notes, buffer=buffer).reader()[COUNT].id == expected[COUNT]


def test_a_stream_that_changed_is_an_error(home, tmp_path):
    notes = tmp_path / "streams.jsonl"
    key = stream(home).config.key
    notes.write_text("".join(json.dumps({"stream": key, "shard": n, "rows": 5}) + "\n" for n in range(4)))
    reader = stream(home, notes=notes).reader()
    with error_about(RecordError, "changed"):
        [reader[place] for place in range(COUNT)]


@pytest.fixture(scope="module")
def builder(tiny_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("with_emb")
    load_backbone(tiny_path, add_emb=True).processor.save_pretrained(path)
    processor = AutoProcessor.from_pretrained(path)
    processor.image_processor.size = {"shortest_edge": 784, "longest_edge": 3136}
    return PromptBuilder(processor, "plain")


def step_batches(files, builder, rank=0, world_size=1, batch_size=6, **data):
    mixture = Mixture([file.size for file in files], [1.0, 2.0][: len(files)], batch_size, 0)
    settings = DataConfig(**{"num_workers": 2, "sort_by_length": False, **data})
    sources = [Source(file, builder, settings) for file in files]
    return StepBatches(sources, mixture, rank=rank, world_size=world_size)


def shown(batch) -> list:
    found = [
        (name, prompt.input_ids.tolist())
        for name, prompt in zip(batch.record_ids, batch.queries, strict=True)
    ]
    return [
        *found,
        *(prompt.pixels.sum().item() if prompt.pixels is not None else 0 for prompt in batch.candidates),
    ]


@pytest.mark.slow
def test_batches_of_a_stream_are_the_workers_and_go_on_at_any_step(home, builder):
    files = [RecordFile(home / "lines" / "train.jsonl"), stream(home)]
    expected = [shown(step_batches(files, builder)[0])]
    whole = step_batches(files, builder)
    expected = [shown(whole[step]) for step in range(9)]
    for first in (0, 1, 5):
        again = Loader(step_batches(files, builder), range(first, 9), DataConfig(num_workers=2))
        assert [shown(batch) for batch in again] == expected[first:]
    assert [shown(step_batches(files, builder)[step]) for step in (7, 2, 7)] == [
        expected[7],
        expected[2],
        expected[7],
    ]


def test_processes_and_their_workers_read_parts_of_their_own(home, builder):
    found = Counter()
    ranks = [step_batches([stream(home)], builder, rank, 2, batch_size=4) for rank in range(2)]
    for step in range(COUNT // 4):
        for batches in ranks:
            found.update(batches[step].record_ids)
    assert found == Counter(f"r{number}" for number in range(COUNT))


@pytest.mark.parametrize(("fault", "error"), [("raises", RecordError), ("dies", WorkerError)])
def test_what_ends_the_reading_of_a_stream_comes_in_its_turn(home, builder, fault, error, monkeypatch):
    files = [stream(home)]
    made = step_batches(files, builder)
    training, read = os.getpid(), StepBatches.read

    def reads(batches, step):
        assert os.getpid() != training, "streams are read in a process of their own"
        if step < 3:
            return read(batches, step)
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RecordError("the network is down")

    monkeypatch.setattr(StepBatches, "read", reads)
    batches = iter(Loader(made, range(9), DataConfig(num_workers=2)))
    assert [len(next(batches).queries) for _ in range(3)] == [6, 6, 6]
    with pytest.raises(error):
        next(batches)


def test_bad_records_of_a_stream(home, builder, tmp_path):
    broken(home, tmp_path / "bad")
    source = SourceConfig(dataset=str(tmp_path / "bad"), streaming=True, shuffle_buffer=4)
    files = [open_records(source, need_rationale=True)]
    with error_about(RecordError, f"{tmp_path / 'bad'}[train]"):
        [step_batches(files, builder)[step] for step in range(COUNT // 6)]
    skipping = step_batches(files, builder, on_bad="skip")
    ledger = BadRecords(DataConfig(on_bad="skip", max_bad_share=0.01), files, tmp_path, 0, skipping.mixture)
    steps = range(2 * COUNT // 6)
    in_workers = Loader(step_batches(files, builder, on_bad="skip"), steps, DataConfig(num_workers=2))
    for step, other in zip(steps, in_workers, strict=True):
        batch = skipping[step]
        assert len(batch.queries) == 6
        assert other.record_ids == batch.record_ids  # replaced by rows that only the worker reads
        ledger.after_step(step + 1, batch)
    listed = [json.loads(line) for line in (tmp_path / "bad_records.jsonl").read_text().splitlines()]
    assert sorted((line["place"], line["id"]) for line in listed) == [
        ("0:11", "r11"),
        ("0:3", None),
        ("0:5", None),
    ]
    strict = BadRecords(
        DataConfig(on_bad="skip", max_bad_share=0.001), files, tmp_path / "a", 0, skipping.mixture
    )
    bad = [step_batches(files, builder, on_bad="skip")[step] for step in range(COUNT // 6)]
    with error_about(RecordError, "data.max_bad_share"):
        [strict.after_step(step, batch) for step, batch in enumerate(bad, start=1)]


# ------------------------------------------------------------------------------------------------- recipes, commands


@pytest.fixture(scope="module")
def recipe(home, tiny_path):
    """A joint stage on the record file; two data workers."""
    stage = {
        "steps": 6,
        "batch_size": 4,
        "lr": 3e-3,
        "sources": [{"path": str(home / "lines" / "train.jsonl")}],
    }
    text = {
        "model": {"path": str(tiny_path), "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784,
                  "max_pixels": 3136},
        "data": {"profile": "plain", "num_workers": 2}, "rollout": {"max_new_tokens": 3}, "stage": "joint", "joint": stage,
        "cold_start": stage, "train": {"micro_batch_size": 4, "log_every": 1, "save_every": 2},
    }  # fmt: skip
    (home / "tiny.yaml").write_text(yaml.safe_dump(text))
    return home / "tiny.yaml"


def loaded(recipe: Path, *overrides: str):
    return load_recipe([f"recipe={recipe}", *overrides])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("joint.sources=[{dataset: x, path: y}]", "joint.sources[0]"),
        ("joint.sources=[{path: y, columns: {id: x}}]", "joint.sources[0].columns"),
        ("joint.sources=[{path: y, streaming: true}]", "joint.sources[0].streaming"),
        ("joint.sources=[{dataset: y, options: {a: 1}}]", "joint.sources[0].options"),
        ("joint.sources=[{dataset: y, shuffle_buffer: 0}]", "joint.sources[0].shuffle_buffer"),
        ("validation.sources=[{path: a, dataset: b}]", "validation.sources[0]"),
        ("validation.sources=[{split: test}]", "validation.sources[0]"),
    ],
)
def test_a_source_is_one_thing(recipe, override, key):
    with error_about(RecipeError, key):
        loaded(recipe, override)


def test_a_stream_refuses_what_needs_its_length(recipe, home):
    given = f"joint.sources=[{{dataset: '{home / 'parquet'}', streaming: true}}]"
    assert loaded(recipe, given).joint.sources[0].streaming
    with error_about(RecipeError, "joint.epochs"):
        loaded(recipe, given, "joint.steps=null")


def test_keys_tell_sources_apart():
    same = [
        RecordsConfig(path="a.jsonl"),
        SourceConfig(path="a.jsonl", weight=3),
        PromptedConfig(path="a.jsonl", profile="plain", max_pixels=99),
    ]
    assert {source.key for source in same} == {"a.jsonl"}
    others = [
        SourceConfig(dataset="d"), SourceConfig(dataset="d", split="x"), SourceConfig(dataset="d", subset="x"),
        SourceConfig(dataset="d", revision="x"), SourceConfig(dataset="d", streaming=True),
        SourceConfig(dataset="d", streaming=True, shuffle_buffer=2), SourceConfig(dataset="d", columns={"id": "x"}),
        SourceConfig(type="d"), SourceConfig(type="d", options={"a": 1}),
    ]  # fmt: skip
    assert len({source.key for source in others}) == len(others)
    assert PromptedConfig(name="x").key is None


@pytest.mark.slow
def test_the_check_looks_at_data_sets_too(recipe, home, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    good = (
        f"joint.sources=[{{dataset: '{home / 'parquet'}'}}, {{dataset: '{home / 'saved'}', streaming: true}}]"
    )
    held = f"validation.sources=[{{dataset: '{home / 'splits'}', split: test}}]"
    made = loaded(recipe, good, held, f"out={tmp_path / 'out'}")
    problems, found = check.examine(made, accelerator, decode=True)
    assert problems == []
    assert f"from {COUNT} records in 2 sources, 1 of them a stream" in "\n".join(found.summary)
    assert len(found.records) == 3
    held = f"validation={{sources: [{{dataset: '{home / 'parquet'}', streaming: true}}], max_records: 7}}"
    stream = f"joint.sources=[{{dataset: '{home / 'parquet'}', streaming: true}}]"
    _, found = check.examine(loaded(recipe, stream, held), accelerator)
    assert "queries, from 1 stream" in "\n".join(found.summary)
    assert len(found.records[loaded(recipe, held).validation.sources[0].key]) == 7
    broken(home, tmp_path / "bad")
    bad = f"joint.sources=[{{dataset: '{tmp_path / 'bad'}'}}, {{dataset: nobody/nothing}}]"
    problems, _ = check.examine(loaded(recipe, bad), accelerator)
    assert len(problems) == 2
    assert ":11: query.images.0: picture " in problems[0]
    assert "nobody/nothing" in problems[1]
    bad = f"joint.sources=[{{dataset: '{home / 'odd'}', streaming: true}}]"
    (home / "odd").mkdir()
    (home / "odd" / "a.jsonl").write_text('{"query": {"text": "x"}, "positives": []}\n')
    [problem], _ = check.examine(loaded(recipe, bad), accelerator)
    assert f"{home / 'odd'}[train]:0:0: " in problem


def test_a_checkpoint_knows_the_instructions_of_a_data_set(home):
    for streaming in (False, True):
        source = SourceConfig(dataset=str(home / "parquet"), streaming=streaming)
        lines = SourceConfig(path=str(home / "lines" / "train.jsonl"))
        assert instructions_of([source]) == instructions_of([lines])


def test_instructions_are_read_without_the_pictures_bytes(home, monkeypatch):
    seen = []
    real = readers.parsed
    monkeypatch.setattr(
        readers, "parsed", lambda columns, row, number: seen.append(row) or real(columns, row, number)
    )
    for streaming in (False, True):
        instructions_of([SourceConfig(dataset=str(home / "parquet"), streaming=streaming)])
    assert len(seen) == 2 * COUNT
    assert seen[:COUNT] == seen[COUNT:]
    assert "<bytes>" in repr(seen)
    assert "PNG" not in repr(seen)


def test_diagnoses_read_data_sets(home):
    one, other = (read_pairs(home / name, 10) for name in ("lines/train.jsonl", "parquet"))
    assert [item.id for item in one.queries] == [item.id for item in other.queries]
    assert one.oracle == other.oracle
    assert np.array_equal(one.right_QC, other.right_QC)


def run(recipe: Path, out: Path, *overrides: str) -> list[dict]:
    done = forked.run(TRAIN, f"recipe={recipe}", f"out={out}", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    return losses(out)


def losses(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "joint" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in line if "loss" in key or key in ("step", "grad_norm", "hit_at_1")}
        for line in lines
    ]


def sources(home: Path, *kinds: str, **more) -> str:
    return f"joint.sources={json.dumps([{'dataset': str(home / kind), **more} for kind in kinds])}"


@pytest.mark.slow
def test_training_on_a_data_set_is_training_on_the_file_bit_for_bit(recipe, home, tmp_path):
    whole = run(recipe, tmp_path / "file")
    assert run(recipe, tmp_path / "parquet", sources(home, "parquet")) == whole
    assert run(recipe, tmp_path / "saved", sources(home, "saved"), "data.num_workers=0") == whole


@pytest.mark.slow
def test_a_stream_is_the_same_killed_or_whole_and_on_two_processes(recipe, home, tmp_path):
    given = (sources(home, "parquet", streaming=True, shuffle_buffer=4), "joint.steps=14")
    whole = run(recipe, tmp_path / "whole", *given)
    words = (TRAIN, f"recipe={recipe}", f"out={tmp_path / 'killed'}", *given)
    with forked.Program(*words) as program:
        program.wait_until(lambda: list((tmp_path / "killed" / "joint" / "state").glob("step_*[2468]")))
        program.send(signal.SIGKILL)
    assert run(recipe, tmp_path / "killed", *given, "data.num_workers=1") == whole  # other workers, same rows
    mine, theirs = (
        load_file(tmp_path / name / "joint/final/model.safetensors") for name in ("killed", "whole")
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    words = (TRAIN, f"recipe={recipe}", f"out={tmp_path / 'two'}", *given, "joint.steps=1")
    ranks = [forked.Program(*words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    with ranks[0], ranks[1]:
        done = [rank.finished() for rank in ranks]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    # Other processes, same rows; later steps have another learning rate.
    assert losses(tmp_path / "two")[0]["loss_lm"] == pytest.approx(whole[0]["loss_lm"], rel=1e-5)
    [last] = [json.loads(line) for line in (tmp_path / "whole/joint/metrics.jsonl").read_text().splitlines()][
        -1:
    ]
    assert list(last["passes"].values()) == [pytest.approx(14 * 4 / COUNT, abs=1e-4)]
    assert list(last["rows_seen"].values()) == [COUNT]
    assert list(last["rows_never_seen"].values()) == [0]


# ---------------------------------------------------------------------------------------------------- registered ones


@pytest.fixture
def registered(odd):
    """A source of one's own, gone again afterwards."""

    class Sheet:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, number):
            return self.rows[number]

    @register_data_source("sheet")
    def sheet(count: int, **more):
        if more:
            raise UserError("a sheet has a count")
        rows = [
            {"query": {"text": f"q{n}", "images": [drawing(n)]}, "positives": [{"text": f"a{n}"}]}
            for n in range(count)
        ]
        if count == 8:
            return 8
        if count == 9:
            return {number: row for number, row in enumerate(rows) if number != 4} | {9: {}}
        return Sheet(
            rows
            + [{"query": {"text": "x"}, "positives": [{"text": "y"}], "negativs": []}][: count == 5]
            + [7][: count == 6]
        )

    yield sheet
    del DATA_SOURCES._entries["sheet"]


def test_a_registered_source_gives_records(registered):
    found = open_records(RecordsConfig(type="sheet", options={"count": 3}), pictures=PictureIndex())
    assert [found[index].query.text for index in range(3)] == ["q0", "q1", "q2"]
    assert pixels(found[2].query.images[0]) == pixels(drawing(2))
    assert found[1].id == "sheet(count=3):1"
    assert pickle.loads(pickle.dumps(found))[1] == found[1]  # noqa: S301 - made here
    assert found.texts() == ["q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "shet"}, "data source must be one of sheet, got 'shet'; did you mean 'sheet'"),
        ({"type": "sheet"}, "TypeError: .*missing 1 required positional argument: 'count'"),
        ({"type": "sheet", "options": {"count": 1, "rows": 2}}, "a sheet has a count"),
        ({"type": "sheet", "options": {"count": 0}}, "the source is empty"),
        (
            {"type": "sheet", "options": {"count": 5}},
            ":5: negativs: a record has no such field; did you mean 'negatives'",
        ),
        ({"type": "sheet", "options": {"count": 6}}, ":6: a row is a mapping of names to values, got int"),
        (
            {"type": "sheet", "options": {"count": 8}},
            r"^data source sheet.*: TypeError: object of type 'int' has",
        ),
        ({"type": "sheet", "options": {"count": 9}}, r"^data source sheet.*, row 4: KeyError: 4"),
    ],
)
def test_what_a_registered_source_does_wrong_is_named(registered, source, message):
    with pytest.raises(UserError, match=message):
        open_records(RecordsConfig(**source))


def test_the_words_about_rows_left_out_are_no_part_of_the_fingerprint(monkeypatch):
    """Otherwise, a better message would refuse the resume of runs over such a source."""

    def found(*pictures):
        rows = [{"query": {"text": "q", "images": some}, "positives": [{"text": "a"}]} for some in pictures]
        monkeypatch.setitem(DATA_SOURCES._entries, "gaps", lambda: rows)
        return open_records(RecordsConfig(type="gaps"), on_bad="skip")

    one, other = found([], [""], [5], [b""]), found([], [5.5], [""], [True])
    assert [bad.place for bad in one.bad] == [1, 2, 3]
    assert [bad.reason for bad in one.bad] != [bad.reason for bad in other.bad]
    assert one.content == other.content
    assert found([], [""], [5], []).content["sha256"] != one.content["sha256"]


@pytest.mark.slow
def test_the_library_is_not_loaded_for_files(tmp_path):
    """It takes a second and a hundred megabytes."""
    script = tmp_path / "files.py"
    script.write_text(
        "import sys, rge.data.collate, rge.data.readers\nassert 'datasets' not in sys.modules\n"
    )
    done = forked.run(script)
    assert done.returncode == 0, done.stderr

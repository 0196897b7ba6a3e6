"""Pictures and files of records as people store them: each row of the tables in docs/record.md."""

import base64
import gzip
import io
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from paths import ROOT
from PIL import Image

from rge.common.images import PictureIndex, load_image
from rge.common.parts import picture_of
from rge.data.config import RecordsConfig, SourceConfig
from rge.data.readers import DATA_SOURCES, open_records
from rge.data.sources import RecordError

datasets = pytest.importorskip("datasets")


def encoded(kind: str = "PNG", size=(30, 20)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).save(out, kind)
    return out.getvalue()


PNG = encoded()
B64 = base64.b64encode(PNG).decode()
URL_SAFE = base64.urlsafe_b64encode(PNG).decode().rstrip("=")
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
INTEGERS = pa.list_(pa.uint8())
ARRAY = np.asarray(Image.open(io.BytesIO(PNG)))

# By row of the table: cells, and the Arrow type of those that need one. A cell in JSON is None if JSON has no such value.
READ = {
    "a path, relative or absolute": [("pictures/0.png", None), (" pictures/0.png\n", None), ("{folder}/pictures/0.png", None)],
    "a path with backslashes (`images\\7.jpg`)": [("pictures\\0.png", None)],
    "a `file:` URL": [("file://{folder}/pictures/a%20b.png", None), ("file://localhost{folder}/pictures/0.png", None)],
    "a name with percent codes, other accents, or as Label Studio writes it": [
        ("pictures/a%20b.png", None), ("pictures/cafe\u0301.png", None), ("/data/local-files/?d=pictures/a%20b.png", None),
        ("/data/upload/3/1a2b3c4d-up.png", None),
    ],
    "a row of a Parquet library": [("library.parquet#a", None)],
    "a `data:` URL in base64": [(f"data:image/png;base64,{B64}", None), (f"DATA:;base64,{B64.replace('=', '%3D')}", None)],
    "base64, in the standard alphabet or that of URLs": [(B64, None), (URL_SAFE, None), (f"{B64[:60]}\n{B64[60:]}", None)],
    "bytes": [(PNG, pa.binary()), (PNG, pa.binary(len(PNG))), (PNG, pa.large_binary())],
    "a list of integers (`list<uint8>`)": [
        (list(PNG), INTEGERS), (list(PNG), pa.list_(pa.int64())), (np.frombuffer(PNG, np.int8).tolist(), pa.list_(pa.int8())),
    ],
    "a mapping with `bytes`, `path` or both": [
        ({"bytes": PNG, "path": "0.png"}, CELL), ({"bytes": None, "path": "pictures/0.png"}, CELL),
        ({"bytes": PNG}, pa.struct([("bytes", pa.binary())])), ({"path": "pictures/0.png"}, pa.struct([("path", pa.string())])),
        ({"bytes": list(PNG), "path": None}, pa.struct([("bytes", INTEGERS), ("path", pa.string())])),
        ({"bytes": B64, "path": "0.png", "width": 30}, None),
    ],
    "a list of one of these": [(["pictures/0.png"], None), ([PNG], pa.list_(pa.binary())), ([{"bytes": PNG, "path": None}], pa.list_(CELL)),
                               ([list(PNG)], pa.list_(INTEGERS))],
}  # fmt: skip
REFUSED = {
    "a web address": ["https://example.org/a.png", "HTTP://example.org/a.png"],
    "an address in an object store (`s3://...`)": ["s3://bucket/a.png"],
    "a path with a Windows drive (`C:\\...`)": ["C:\\Users\\me\\a.png"],
    "an array of pixels, or an open Pillow image": [ARRAY, Image.open(io.BytesIO(PNG))],
    "the text of Python's bytes (`b'\\x89PNG...'`)": [str(PNG)],
}
EMPTY = {"an empty cell": [None, "", " ", b"", [], {"bytes": None, "path": None}]}
FILES = {
    "`.jsonl`": ["a.jsonl"],
    "`.jsonl.gz`, `.jsonl.xz`, `.jsonl.zst`": ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"],
    "`.parquet`": ["a.parquet"],
    "`.csv`, `.tsv`": ["a.csv", "a.tsv"],
    "`.json` (one array)": ["a.json"],
    "a folder of Parquet or JSON lines, or one that `save_to_disk` wrote": [],  # tests/rge/data/test_readers.py
}


def table(heading: str) -> dict[str, str]:
    """The rows of the table with this heading in docs/record.md: first cell -> second."""
    text = (ROOT / "docs/record.md").read_text(encoding="utf-8")
    rows = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return {cells[1].strip(): cells[2].strip() for cells in (row.split("|") for row in rows)}


def test_the_page_lists_what_is_tested():
    rows = table("| a picture stored as |")
    assert rows.keys() == {*READ, *REFUSED, *EMPTY}
    assert {name for name, verdict in rows.items() if verdict.startswith("refused")} == {*REFUSED}
    assert table("| file | as a source |").keys() == {*FILES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    (folder / "pictures").mkdir()
    for name in ("pictures/0.png", "pictures/a b.png", "pictures/caf\u00e9.png", "up.png"):
        (folder / name).write_bytes(PNG)
    pq.write_table(pa.table({"id": ["a"], "image": pa.array([PNG])}), folder / "library.parquet")
    return folder


def filled(cell, folder):
    return cell.replace("{folder}", str(folder)) if isinstance(cell, str) else cell


def checked(config, **more):
    """The only record of a source, after the check of its pictures."""
    [record] = open_records(config, pictures=PictureIndex(), **more)
    return record


def has_json(cell) -> bool:
    try:
        return bool(json.dumps(cell))
    except TypeError:
        return False


@pytest.mark.parametrize("row", READ)
def test_a_picture_is_read_from_every_kind_of_source(row, folder):
    columns = {"query.images": "shown", "positives.image": "right"}
    for cell, kind in READ[row]:
        cell = filled(cell, folder)
        found = picture_of(cell)
        assert isinstance(found, bytes) == (
            row not in list(READ)[:5] and b"pictures" not in str(cell).encode()
        )
        records = []
        # Columns of a Parquet file, whose features are not known; the pictures of its paths are beside it.
        file = folder / "cells.parquet"
        array = pa.array([cell], kind) if kind is not None else pa.array([cell])
        pq.write_table(pa.table({"shown": array, "right": array}), file)
        records.append(checked(RecordsConfig(path=str(file), columns=columns)))
        streamed = SourceConfig(dataset=str(file), columns=columns, streaming=True)
        records.append(open_records(streamed, pictures=PictureIndex()).reader()[0])
        if has_json(cell):
            for images in (cell, [cell]):
                line = {"query": {"images": images}, "positives": [{"image": cell}]}
                (folder / "cells.jsonl").write_text(json.dumps(line) + "\n")
                records.append(checked(RecordsConfig(path=str(folder / "cells.jsonl"))))
                full = {name: "x" for name in ("id", "group", "source", "split")}
                line["positives"][0]["id"] = "p"
                (folder / "cells.jsonl").write_text(json.dumps(line | full) + "\n")
                records.append(checked(RecordsConfig(path=str(folder / "cells.jsonl"))))
        for record in records:
            assert len(record.query.images) == len(record.positives) == 1
            for ref in (record.query.images[0], record.positives[0].image):
                assert load_image(ref).size == (30, 20), (cell, ref)


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_no_picture_is_named(row, monkeypatch):
    for cell in REFUSED[row]:
        rows = [{"query": {"images": [cell]}, "positives": [{"text": "a"}]}]
        monkeypatch.setitem(DATA_SOURCES._entries, "cells", lambda rows=rows: rows)
        with error_about(RecordError, 0, "query.images.0") as raised:
            open_records(RecordsConfig(type="cells"))
        assert ("rge data download" in raised.value.reason) == (row == "a web address")


def test_an_empty_cell_is_no_picture():
    assert [picture_of(cell) for cell in EMPTY["an empty cell"]] == [None] * 6


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_base64_is_recognised_by_what_it_encodes(kind):
    data = encoded(kind)
    assert picture_of(base64.b64encode(data).decode()) == data
    with pytest.raises(ValueError):
        picture_of(base64.b64encode(data).decode()[:40] + "!!!!")


@pytest.mark.parametrize(
    "path",
    ["/9j/photos.of.1999/and/a/longer/name/than/that.jpg", "iVBORw0KGgo.png", "photos/" + "a" * 300 + ".png", "a/b/c/d/e/f/" * 9 + "x"],
)  # fmt: skip
def test_a_path_is_not_mistaken_for_base64(path):
    assert picture_of(path) == path


@pytest.mark.parametrize(
    "cell", ["x" * 5000, {"src": "a.png"}, ["a.png", "b.png"], 7, [300], [1] * 20 + ["a"], [300] * 20]
)
def test_anything_else_is_an_error_of_few_words(cell):
    with pytest.raises(ValueError) as raised:
        picture_of(cell)
    assert 0 < len(str(raised.value)) < 200


def test_the_same_picture_is_the_same_target_however_it_is_stored(tmp_path):
    stored = [PNG, B64, f"data:image/png;base64,{B64}", {"bytes": PNG, "path": None}, list(PNG)]
    rows = [{"query": {"text": "a"}, "positives": [{"image": cell}]} for cell in stored if has_json(cell)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        len(
            {record.positives[0].id for record in open_records(RecordsConfig(path=str(tmp_path / "a.jsonl")))}
        )
        == 1
    )


RECORD = {
    "id": 7,
    "query": {"text": "what?", "images": ["pictures/0.png"]},
    "positives": [{"id": "007", "text": "None"}],
}
FLAT = {
    "id": "007",
    "query.text": "what?",
    "query.images": "pictures/0.png",
    "positives.text": "None",
    "positives.id": "1e5",
}


def write(file, rows: int = 1):
    lines = (json.dumps(RECORD) + "\n").encode()
    if file.suffix == ".zst":
        lines = pytest.importorskip("zstandard").compress(lines)
    elif file.suffix in (".csv", ".tsv"):
        mark = "," if file.suffix == ".csv" else "\t"
        lines = "".join(mark.join(row) + "\n" for row in (FLAT, FLAT.values())).encode()
    elif file.suffix == ".parquet":
        return pq.write_table(pa.Table.from_pylist([RECORD]), file)
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress, ".json": lambda lines: b"[" + lines + b"]"}
        lines = pack.get(file.suffix, bytes)(lines)
    return file.write_bytes(lines)


@pytest.mark.parametrize("name", [name for names in FILES.values() for name in names])
def test_a_file_is_read_without_asking_a_hub(name, folder, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda *_, **__: pytest.fail("the hub was asked")
    )
    write(folder / name)
    ways = [{"dataset": str(folder / name)}] + ([{"path": str(folder / name)}] if name != "a.json" else [])
    for way in ways:
        record = checked(RecordsConfig(**way))
        ids = ("007", "1e5") if name.endswith(("csv", "tsv")) else ("7", "007")
        assert (record.id, record.positives[0].id) == ids
        assert (record.query.text, record.positives[0].text) == ("what?", "None")
        assert [load_image(ref).size for ref in record.query.images] == [(30, 20)]
    streamed = SourceConfig(dataset=str(folder / name), streaming=True)
    assert open_records(streamed).reader()[0].query.text == "what?"


@pytest.mark.parametrize(
    "name", ["no/such/folder/at.all", "./nowhere", "~/nowhere.parquet", "data/train.jsonl", "/nowhere"]
)
def test_a_missing_path_is_not_sent_to_the_hub(name, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with error_about(RecordError, "missing"):
        open_records(RecordsConfig(dataset=name))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"q,a\n" * 2000),
        ("a.jsonl", gzip.compress(b"{}", mtime=0)),
        ("a.parquet", b"PAR"),
        ("a.jsonl.gz", b"{}"),
    ],
)
def test_a_file_of_another_format_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with error_about(RecordError, tmp_path / name) as raised:
        open_records(RecordsConfig(path=str(tmp_path / name)))
    assert len(raised.value.reason.splitlines()) == 1


@pytest.mark.parametrize("kept", ["saved", "parquet"])
def test_numbered_classes_are_read_as_their_names(tmp_path, kept):
    kind = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(
        {"q": datasets.Value("string"), "right": kind, "wrong": datasets.List(kind), "more": {"kind": kind}, "number": datasets.Value("int64")}
    )  # fmt: skip
    rows = [
        {"q": "a", "right": 1, "wrong": [0], "more": {"kind": 0}, "number": 5},
        {"q": "b", "right": 0, "wrong": [], "more": {"kind": -1}, "number": 6},
    ]
    found = datasets.Dataset.from_list(rows, features=features)
    found.save_to_disk(str(tmp_path / "all")) if kept == "saved" else found.to_parquet(
        str(tmp_path / "all.parquet")
    )
    source = tmp_path / ("all" if kept == "saved" else "all.parquet")
    columns = {
        "query.text": "q",
        "positives.text": "right",
        "negatives.text": "wrong",
        "category": "more.kind",
        "id": "number",
    }
    for streaming in (False, True):
        config = SourceConfig(dataset=str(source), columns=columns, streaming=streaming, shuffle_buffer=1)
        opened = open_records(config)
        records = [opened.reader()[n] for n in range(2)] if streaming else list(opened)
        records.sort(key=lambda one: one.id)
        assert [(one.id, one.positives[0].text, [it.text for it in one.negatives], one.category) for one in records] == [
            ("5", "dog", ["cat"], "cat"), ("6", "cat", [], ""),
        ]  # fmt: skip

"""A table's other columns in an index: codes stay codes, and numbers can be compared, whatever the table's type for them."""

import json
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about

pytest.importorskip("lancedb", exc_type=ImportError)

from rge.index.columns import make_comparable, texts_as_numbers
from rge.index.rows import Row
from rge.index.sources import read_source
from rge.index.store import ConditionError, Index


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["3", "-20", None], [3, -20, None]),
        (["0.5", "7", "1e+16", "-2.25"], None),  # a float does not hold every integer of that size
        (["0.5", "7", "-2.25"], [0.5, 7, -2.25]),
        (["1.10", "1.1"], None),
        (["1.0", "1"], None),  # one number, two versions
        (["007", "8"], None),
        (["12e4", "120000"], None),
        (["1e400"], None),
        (["nan", "inf"], None),
        (["1_000"], None),
        (["+5"], None),
        (["\u0664"], None),
        ([" 5"], None),
        (["9007199254740993"], None),
    ],
)
def test_a_text_is_a_number_only_if_that_gives_it_back(texts, values):
    rows = [{"code": text} for text in texts]
    texts_as_numbers(rows)
    assert [row["code"] for row in rows] == (texts if values is None else values)
    kinds = [type(row["code"]) for row in rows]
    assert kinds == [type(value) for value in (texts if values is None else values)]


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ([Decimal("9.90"), Decimal("12.00"), None], [9.9, 12.0, None]),
        ([Decimal("12.00"), Decimal(1 << 63)], [12, 1 << 63]),
        ([Decimal("0.1234567890123456789"), Decimal(1)], ["0.1234567890123456789", "1"]),
        ([Decimal(1 << 64)], [str(1 << 64)]),
        ([timedelta(minutes=1, milliseconds=500), None], [60.5, None]),
    ],
)
def test_types_of_databases_become_comparable(given, values):
    rows = [{"price": value} for value in given]
    make_comparable(rows)
    assert [row["price"] for row in rows] == values


def indexed(path, folder):
    source = read_source(path)
    assert not source.faults
    index = Index.create(folder / "index", dimensions=4, checkpoint="demo", checkpoint_hash="a" * 64)
    index.declare(entry.metadata for entry in source.entries)
    vector = np.array([1, 0, 0, 0], np.float32)
    unfit = index.put(
        [Row("x", entry.id, "1", "d", vector, metadata=entry.metadata) for entry in source.entries]
    )
    assert unfit == 0
    return lambda where: {hit.id for hit in index.search(vector[None], 9, where=where)[0]}


def test_columns_of_parquet_are_compared_in_conditions(tmp_path):
    table = pa.table(
        {
            "id": ["a", "b", "c"],
            "text": ["x", "y", "z"],
            "price": pa.array([Decimal("9.00"), Decimal("9.01"), None], pa.decimal128(10, 2)),
            "lasts": pa.array([timedelta(seconds=2), timedelta(hours=1), None], pa.duration("ns")),
            "hash": pa.array([(1 << 63) + 1, (1 << 64) - 1, 5], pa.uint64()),
            "change": pa.array([-1, 5, None]),
            "rating": [4.5, float("nan"), float("nan")],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    found = indexed(tmp_path / "a.parquet", tmp_path)
    assert found("price > 9") == {"b"}
    assert found("lasts < 60") == {"a"}
    assert found(f"hash = {(1 << 63) + 1}") == {"a"}
    assert found("hash > 5") == {"a", "b"}
    assert found("change < 0") == {"a"}
    assert found("rating is null") == {"b", "c"}


def test_codes_of_a_csv_are_told_apart_and_their_comparison_as_numbers_is_explained(tmp_path):
    (tmp_path / "a.csv").write_text("id,text,version,stock\na,x,1.10,3\nb,y,1.1,20\n")
    found = indexed(tmp_path / "a.csv", tmp_path)
    assert found("version = '1.1'") == {"b"}
    assert found("stock > 3") == {"b"}
    assert found("try_cast(version as double) > 1") == {"a", "b"}
    with error_about(ConditionError, "where", "text"):
        found("version > 1")


def test_several_captions_of_a_picture_and_missing_ones(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    rows = [{"text": text, "image": " a.png"} for text in ("one", "two", float("nan"), None)]
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [*rows, {"text": "alone", "image": ""}, {"image": "data:image/png;base64,AAAA"}]
        )
    )
    source = read_source(tmp_path / "x.jsonl")
    assert list(source.faults) == ["6"]  # not the whole picture
    entries = source.entries
    assert [entry.id for entry in entries] == [" a.png", " a.png#2", " a.png#3", " a.png#4", "5"]
    assert [entry.text for entry in entries] == ["one", "two", None, None, "alone"]
    assert [entry.image for entry in entries] == [str(tmp_path / "a.png")] * 4 + [None]

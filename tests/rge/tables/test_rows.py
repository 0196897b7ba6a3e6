"""The one reader of tables; collections of pictures are read in tests/data_prep/rmir/pictures/test_large_libraries.py."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about

from rge.tables.errors import TableError
from rge.tables.rows import num_rows, table_rows

ROWS = [{"id": "007", "caption": "a hat; blue"}, {"id": "8", "caption": None}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("commas.csv", 'id,caption\n007,"a hat; blue"\n8,\n'),
        ("from-excel.csv", '\ufeffid;caption\r\n007;"a hat; blue"\r\n8;\r\n'),
        ("tabs.tsv", "id\tcaption\n007\ta hat; blue\n8\t\n"),
        ("lines.jsonl", '{"id": "007", "caption": "a hat; blue"}\n\n{"id": "8", "caption": null}\n'),
    ],
)
def test_text_tables_give_the_same_rows_and_keep_ids_as_they_are(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert list(table_rows(tmp_path / name)) == ROWS
    assert list(table_rows(tmp_path / name, first=1)) == ROWS[1:]


def test_a_cell_may_hold_a_long_document(tmp_path):
    (tmp_path / "a.csv").write_text(f"id,text\n1,{'word ' * 50_000}\n")
    assert [len(row["text"]) for row in table_rows(tmp_path / "a.csv")] == [250_000]


def test_parquet_gives_the_columns_asked_for_from_any_row_on(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"id": str(n), "image": b"x"} for n in range(9)]), path, row_group_size=4
    )
    for first in range(10):
        found = list(table_rows(path, ["id", "nowhere"], first=first))
        assert found == [{"id": str(n)} for n in range(first, 9)]
    assert num_rows(path) == 9


def test_a_repeated_column_of_parquet_is_named(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, names=["id", "id"]), tmp_path / "a.parquet")
    with error_about(TableError, "a.parquet", "id"):
        list(table_rows(tmp_path / "a.parquet", ["id"]))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("gone.csv", None, ("gone.csv",)),
        ("a.csv", b"id,text\na,b,c\n", ("a.csv", 2)),
        ("a.csv", b"id\n\xff\xfe", ("a.csv",)),
        ("a.csv", b"id,text,,,text\na,b,,,c\n", ("a.csv", "E1")),
        ("a.jsonl", b'{"id": 1}\n[]', ("a.jsonl", 2)),
        ("a.jsonl", b"[" * 100_000, (1, "json")),
        ("a.parquet", b"nonsense", ("a.parquet",)),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with error_about(TableError, *named):
        list(table_rows(tmp_path / name))

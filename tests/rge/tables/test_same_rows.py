"""The same forty rows in every form of table, by every reader of tables and records: the same rows, or the one that is refused."""

import csv
import json
import math
import os

import openpyxl
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import Image

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.library import Library
from eval.benchmarks.folder.pool import Pool
from eval.benchmarks.folder.spreadsheet import Table
from rge.common.errors import UserError
from rge.data.config import RecordsConfig
from rge.data.readers import open_records
from rge.index.sources import load, read_source
from rge.tables.rows import AS_FOUND, TableFormat, table_rows

TEXTS = [
    "plain", "a, b; c", '"no entry', 'it says "stop" here', '5"', '"Stop" and "Go"', '""', '"', "it's", "'quoted'",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0915\u094d\u200d\u0937", "\U0001f469\u200d\U0001f680 in space",
    "one\u2028two\u2029three\u0085four", "\ufeffbegins with a mark", "\u200fright to left", "end\u200b", "a\u00a0b",
    "NA", "nan", "null", "None", "007", "1.10", "12e4", "1e400", "true", "-", "# no comment", "\\", "a\\nb", "x\\\"y",
    "Tu\u0308r", "T\u00fcr", "2024-03-04", "\U0001d54f",
]  # fmt: skip
PICTURES = ["a b.png", "a%20b.png", "u\u0308.png", "x\u200dy.png", "5.png", "n,m.png"]
COMPLETE = [{"id": f"{n:03}", "text": text, "image": PICTURES[n % 6]} for n, text in enumerate(TEXTS)]
ROWS = [*COMPLETE, {"id": "036", "text": None, "image": "5.png"}, {"id": "037", "text": None, "image": "a b.png"},
        {"id": "038", "text": "words alone", "image": None}, {"id": "039", "text": "words again", "image": None}]  # fmt: skip
LINES = [
    {"id": "040", "text": "two\nlines", "image": "5.png"},
    {"id": "041", "text": 'a\t"b"\r\n\r\nc,d', "image": "5.png"},
]
"""Rows that only a form with quotes or escapes can hold."""
WITHOUT_QUOTES = TableFormat("none")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    for number, name in enumerate(PICTURES):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(folder / name)
    return folder


def delimited(name, encoding="utf-8", **how):
    def write(folder, rows):
        with (folder / name).open("w", encoding=encoding, newline="") as file:
            table = csv.writer(file, **how)
            table.writerow(rows[0])
            table.writerows(row.values() for row in rows)
        return folder / name

    return write


def unquoted(folder, rows):
    lines = ["\t".join(rows[0]), *("\t".join(cell or "" for cell in row.values()) for row in rows)]
    (folder / "unquoted.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "unquoted.tsv"


def json_lines(folder, rows):
    (folder / "x.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return folder / "x.jsonl"


def with_nan(folder, rows):
    """As pandas writes missing cells."""
    cells = [{name: math.nan if cell is None else cell for name, cell in row.items()} for row in rows]
    (folder / "x.json").write_text(json.dumps(cells))
    return folder / "x.json"


def parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")
    return folder / "x.parquet"


def workbook(folder, rows):
    book = openpyxl.Workbook()
    book.active.append(list(rows[0]))
    for number, row in enumerate(rows, start=2):
        for column, value in enumerate(row.values(), start=1):
            if value is not None:
                cell = book.active.cell(number, column, value)
                cell.data_type = "s"
    book.save(folder / "x.xlsx")
    return folder / "x.xlsx"


def by_pandas(name, **how):
    def write(folder, rows):
        pd.DataFrame(rows).to_csv(folder / name, index=False, **how)
        return folder / name

    return write


QUOTED = {
    "csv": delimited("x.csv"),
    "all quoted": delimited("y.csv", quoting=csv.QUOTE_ALL),
    "Excel": delimited("z.csv", "utf-8-sig", delimiter=";"),
    "UTF-16": delimited("w.csv", "utf-16", delimiter="\t"),
    "tsv": delimited("x.tsv", delimiter="\t"),
    "pandas": by_pandas("p.csv"),
    "pandas tsv": by_pandas("p.tsv", sep="\t"),
    "jsonl": json_lines,
    "json": with_nan,
    "parquet": parquet,
}
FORMS = {**QUOTED, "unquoted tsv": unquoted, "xlsx": workbook}


def by_tables(path, form):
    return [(row["id"], row["text"], row["image"]) for row in table_rows(path, form=form)]


def by_index(path, form):
    source = read_source(path, form=form)
    assert not source.faults
    for entry in source.entries:
        load(entry)
    names = [entry.image and os.path.basename(entry.image) for entry in source.entries]
    return [(entry.id, entry.text, name) for entry, name in zip(source.entries, names, strict=True)]


def by_eval(path, form):
    pool = Pool(path.parent, out=path.parent / "set", exclude=())
    names = [(row["id"], row["text"] or None, row["image"]) for _, row in Table(path, form).rows]
    return [
        (name, text, image and pool.files[pool.resolve(image)].name or None) for name, text, image in names
    ]


def by_library(path, form):
    config = LibraryConfig(path=str(path), quoting=form.quoting)
    return [
        (row["id"], row["caption"], row["ref"] and os.path.basename(row["ref"]))
        for row in Library(config).rows()
    ]


@pytest.mark.parametrize("reader", [by_tables, by_index, by_eval])
@pytest.mark.parametrize("kind", FORMS)
def test_every_form_holds_the_same_rows(home, reader, kind):
    rows = [*ROWS, *LINES] if kind in QUOTED else ROWS
    path = FORMS[kind](home, rows)
    form = WITHOUT_QUOTES if kind == "unquoted tsv" else AS_FOUND
    expected = [tuple(row.values()) for row in rows]
    assert reader(path, form) == expected


@pytest.mark.parametrize("kind", FORMS)
def test_a_library_has_the_same_rows_or_names_the_one_without_a_picture(home, kind):
    rows = [row | {"caption": row["text"]} for row in ROWS[:38]]
    form = WITHOUT_QUOTES if kind == "unquoted tsv" else AS_FOUND
    assert by_library(FORMS[kind](home, rows), form) == [tuple(row.values())[:3] for row in ROWS[:38]]
    path = FORMS[kind](home, [row | {"caption": row["text"]} for row in ROWS])
    if kind == "parquet":  # such a row is counted as a picture that is missing
        assert by_library(path, form) == [tuple(row.values()) for row in ROWS]
        return
    with error_about(UserError, "row 39", "library.image_column"):
        by_library(path, form)


def test_a_tsv_without_quotes_is_recognised_or_refused(home):
    """Its texts decide: among these, some can be read in both ways."""
    with error_about(UserError, "unquoted.tsv", 4):
        by_tables(unquoted(home, ROWS), AS_FOUND)
    clear = [row for row in ROWS if row["text"] not in ('""', 'x\\"y', '"')]
    assert by_tables(unquoted(home, clear), AS_FOUND) == [tuple(row.values()) for row in clear]


def test_a_folder_holds_the_same_texts(home, tmp_path):
    for row in COMPLETE:
        (tmp_path / f"{row['id']}.png").write_bytes((home / row["image"]).read_bytes())
        (tmp_path / f"{row['id']}.txt").write_text(row["text"], encoding="utf-8")
    found = {entry.id[:3]: load(entry).text for entry in read_source(tmp_path).entries}
    # A mark at the beginning of a file says how it is encoded.
    assert found == {row["id"]: row["text"].removeprefix("\ufeff") for row in COMPLETE}


COLUMNS = {"query.text": "text", "positives.image": "image"}


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "write", [json_lines, parquet, delimited("x.csv"), unquoted], ids=["jsonl", "parquet", "csv", "tsv"]
)
def test_data_sets_hold_the_same_records_or_name_the_row(home, tmp_path, write, streaming):
    for name in PICTURES:
        (tmp_path / name).write_bytes((home / name).read_bytes())
    path, quoting = write(tmp_path, COMPLETE), "none" if write is unquoted else "auto"
    dataset = str(path if path.suffix in (".csv", ".tsv") else tmp_path)
    config = RecordsConfig(dataset=dataset, columns=COLUMNS, streaming=streaming, quoting=quoting)
    found = open_records(config, first=100 if streaming else None)
    shown = [found[number] for number in range(len(found))]
    assert [(one.id, one.query.text, os.path.basename(one.positives[0].image)) for one in shown] == [
        tuple(row.values()) for row in COMPLETE
    ]
    write(tmp_path, ROWS)
    with error_about(UserError, 36):
        open_records(config, first=100 if streaming else None)

"""Workbooks: time by cells and not by dimensions, mergers, formulas, and sheets that hold no cells."""

import datetime
import time

import openpyxl
import pytest
from faults import error_about
from openpyxl.styles import PatternFill

from rge.tables.errors import TableError
from rge.tables.rows import Grid, TableFormat, table_rows


def save(path, rows, change=lambda book, sheet: None):
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    change(book, book.active)
    book.save(path)
    return path


def test_values_keep_their_kinds(tmp_path):
    day, moment = datetime.datetime(2024, 3, 4), datetime.datetime(2024, 3, 4, 5)
    rows = [
        ["id", "text", "code", None],
        [1, " a\u200b\n", "007", None],
        [],
        [2.5, None, day, None],
        [True, "", moment, None],
    ]
    assert list(table_rows(save(tmp_path / "a.xlsx", rows))) == [
        {"id": 1, "text": " a\u200b\n", "code": "007"},
        {"id": 2.5, "text": None, "code": day.date()},
        {"id": True, "text": None, "code": moment},
    ]


def test_a_styled_cell_far_away_costs_nothing(tmp_path):
    def style(book, sheet):
        for place in ("AZ20000", "XFD1048576"):
            sheet[place].fill = PatternFill("solid", fgColor="FFFF00")
        book.create_sheet("styled")["C9"].fill = PatternFill("solid", fgColor="FFFF00")

    path = save(tmp_path / "a.xlsx", [["id"], [1]], style)
    start = time.process_time()
    assert list(table_rows(path)) == [{"id": 1}]
    assert time.process_time() - start < 10  # 1 s; with a cell for each place, hours


@pytest.mark.slow
def test_time_is_linear_in_rows(tmp_path):
    def seconds(count):
        path = save(
            tmp_path / f"{count}.xlsx", [["id", "text"], *([n, f"caption {n}"] for n in range(count))]
        )
        start = time.process_time()
        assert sum(1 for _ in table_rows(path)) == count
        return time.process_time() - start

    seconds(10)
    assert seconds(4000) < 12 * seconds(1000)  # 4; it was 13 and more, growing with the square


def test_mergers_hidden_rows_and_formulas(tmp_path):
    def change(book, sheet):
        sheet.merge_cells("A2:A4")
        sheet.merge_cells("B2:C2")
        sheet.row_dimensions[3].hidden = True
        sheet["B5"] = "=A2"

    path = save(
        tmp_path / "a.xlsx", [["a", "b", "c"], ["x", "y", "z"], [None, "v"], [None, None, "w"], ["q"]], change
    )
    grid = Grid(str(path))
    rows = dict(grid.rows)
    assert [[row[name] for name in "abc"] for row in rows.values()][:3] == [
        ["x", "y", None],
        ["x", "v", None],
        ["x", None, "w"],
    ]
    assert (list(rows), grid.num_hidden) == ([2, 3, 4, 5], 1)
    with error_about(TableError, "a.xlsx", "B5"):
        list(table_rows(path))


def test_sheets_of_charts_hold_no_table(tmp_path):
    def chart(book, sheet):
        book.create_chartsheet("Chart1")

    path = save(tmp_path / "a.xlsx", [["id"], [1]], chart)
    assert list(table_rows(path)) == [{"id": 1}]
    with error_about(TableError, path, ("choice", "sheet")):
        list(table_rows(path, form=TableFormat(sheet="Chart1")))
    with error_about(TableError, "a.csv", "sheet"):
        list(table_rows(tmp_path / "a.csv", form=TableFormat(sheet="x")))

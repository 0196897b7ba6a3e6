"""Quotation marks in CSV and TSV: cells or letters, and an error where a file does not show it."""

import pytest
from faults import error_about

from rge.tables.errors import TableError
from rge.tables.rows import TableFormat, table_rows


def read(path, content, quoting="auto"):
    path.write_text(content, encoding="utf-8", newline="")
    return [list(row.values()) for row in table_rows(path, form=TableFormat(quoting))]


OPENS_AND_ENDS = 'id\ttext\timage\n1\ta\ta.png\n2\t"no entry\tb.png\n3\tc\tc.png\n4\ta sign says "stop"\td.png\n5\t5"\te.png\n6\tf\tf.png\n'
"""No parser notices that line 2 begins a cell that ends in line 5."""


def test_lines_between_two_quotation_marks_are_never_joined_silently(tmp_path):
    joined = OPENS_AND_ENDS.replace('says "stop"', "says stop")
    with error_about(TableError, "a.tsv", 3, "quoting"):
        read(tmp_path / "a.tsv", joined)
    found = read(tmp_path / "a.tsv", joined, "none")
    assert [row[0] for row in found] == list("123456")
    assert (found[1], found[4]) == (["2", '"no entry', "b.png"], ["5", '5"', "e.png"])
    # Closed or not, some line shows that the marks are letters.
    assert read(tmp_path / "a.tsv", OPENS_AND_ENDS)[1] == ["2", '"no entry', "b.png"]
    assert len(read(tmp_path / "a.tsv", joined.replace('5"', "5"))) == 6
    # As CSV: the two lines that the marks join have the right number of commas.
    with error_about(TableError, "a.csv", 3, "quoting"):
        read(tmp_path / "a.csv", joined.replace("\t", ","))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        # A cell that needs its quotes proves that they enclose cells, wherever it is.
        ("a.tsv", 'id\ttext\n1\t"a\tb"\n2\t"c"\n', [["1", "a\tb"], ["2", "c"]]),
        ("a.tsv", 'id\ttext\n1\t"c"\n2\t"say ""x"""\n', [["1", "c"], ["2", 'say "x"']]),
        ("a.tsv", '"id"\t"text"\n"1"\t"c"\n', [["1", "c"]]),
        ("a.csv", 'id,text\n1,"a\nb\n"\n2,c\n', [["1", "a\nb\n"], ["2", "c"]]),
        (
            "a.csv",
            'id,text\n1,"Dear all,\n\nx, y\nbye"\n2,"a, b"\n',
            [["1", "Dear all,\n\nx, y\nbye"], ["2", "a, b"]],
        ),
        ("a.csv", 'id,text\n1,"c"\n2,d\n', [["1", "c"], ["2", "d"]]),
        ("a.csv", 'id;text\n1;""\n2;5" wide\n', [["1", None], ["2", '5" wide']]),
        # Marks within a cell are letters in any case.
        ("a.tsv", 'id\ttext\n1\ta "b" c\n2\t5"\n', [["1", 'a "b" c'], ["2", '5"']]),
        # What no writer of quoted cells writes.
        ("a.tsv", 'id\ttext\n1\t"x" y\n2\t"z"\n', [["1", '"x" y'], ["2", '"z"']]),
        ("a.csv", 'id,text\n1,"x" y\n2,z\n', [["1", '"x" y'], ["2", "z"]]),
        ("a.csv", 'id,text\n1,"x\n2,z\n', [["1", '"x'], ["2", "z"]]),
        # Only line feeds and carriage returns end a line; rows without a cell are none.
        (
            "a.csv",
            "id,text\r\n1,a\u2028b\u2029c\u0085d\x0be\r\n,\r\n\r\n2,f\r\n",
            [["1", "a\u2028b\u2029c\u0085d\x0be"], ["2", "f"]],
        ),
        ("a.csv", "\n,,\nsep,text\n1,2\n", [["1", "2"]]),
        ("a.csv", "SEP=|\nid|text\n1|a,b;c\n", [["1", "a,b;c"]]),
        ("a.csv", '"a; b",text\n1,2\n', [["1", "2"]]),
    ],
)
def test_a_file_shows_whether_quotation_marks_enclose_cells(tmp_path, name, content, rows):
    assert read(tmp_path / name, content) == rows


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.tsv", 'id\ttext\n1\ta\n2\t"c"\n', 3),  # the caption "c", or the caption c
        ("a.csv", 'text\na\n"b\nc"\n', 3),  # one row of two lines, or two rows
        ("a.csv", 'id,text\n1,"say ""x"""\n2,"x" y\n', 3),
        ("a.csv", 'id,text\n1,"a"\n2,"x" y\n', 3),
        ("a.csv", 'id,text\n1,"say \\"x\\""\n', 2),  # an escape that is no part of CSV
        ("a.csv", 'id,text\n1,"a, b\n2,c\n', 2),
        ("a.csv", "id,text\n1,a\n2\n", 3),
        ("a.csv", "id,text\n1,a\n2,b,c\n", 3),
    ],
)
def test_what_cannot_be_decided_or_read_is_an_error_with_the_line(tmp_path, name, content, line):
    with error_about(TableError, name, line):
        read(tmp_path / name, content)


def test_the_option_decides(tmp_path):
    content = 'id\ttext\n1\t"c"\n'
    assert read(tmp_path / "a.tsv", content, "quoted") == [["1", "c"]]
    assert read(tmp_path / "a.tsv", content, "none") == [["1", '"c"']]
    with error_about(TableError, "a.tsv", 2):
        read(tmp_path / "a.tsv", 'id\ttext\n1\t"c\n', "quoted")
    with error_about(TableError, "a.tsv", 2):
        read(tmp_path / "a.tsv", 'id\ttext\n1\t"c\td"\n', "none")

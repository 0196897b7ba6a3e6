"""A folder of photos and a spreadsheet: docs/own_data.md as it stands there, and what strangers' files look like."""

import csv
import datetime
import json
import re
import shlex
import unicodedata
from pathlib import Path

import openpyxl
import pyarrow.parquet as pq
import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_set, write_tables
from faults import error_about
from paths import ROOT
from PIL import Image
from recorded import settings_of

from eval.__main__ import main
from eval.benchmarks.folder.importer import FolderOptions, import_folder
from eval.benchmarks.suite import load_suite, write_suite
from eval.commands import run as run_module
from eval.commands.check import check_set
from eval.sets.retrieval_set import load_set
from eval.sets.tables import SetError
from rge.checkpoints.export import export
from rge.common import files
from rge.common.errors import UserError
from rge.common.files import FileError

DOC = ROOT / "docs" / "own_data.md"


def blocks(language):
    found = re.findall(
        r"^```(\w*)\n(.*?)^```$", DOC.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return [content for name, content in found if name == language]


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "my photos" / "library").mkdir(parents=True)
    table = blocks("csv")[0]
    for number, name in enumerate(sorted(set(re.findall(r"[\w/]+\.jpg", table)))):
        (tmp_path / "my photos" / name).write_bytes(picture(number))
    (tmp_path / "my photos" / "queries.csv").write_text(table, encoding="utf-8")
    return tmp_path / "my photos"


def options(photos, **more):
    return FolderOptions(**{"src": photos, "out": photos.parent / "set"} | more)


@pytest.mark.slow
def test_the_page_runs_as_it_stands(photos, lively, tmp_path, monkeypatch, capsys):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=28 * 28, max_pixels=56 * 56,
        max_new_tokens=4, reasons="query", stage="joint", step=1,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    photos.rename(tmp_path / "photos")
    checkpoint = tmp_path / "runs/demo/joint/final"
    checkpoint.parent.mkdir(parents=True)
    export(lively, checkpoint, settings)
    exec(compile(blocks("python")[0], "own_data.md", "exec"), {})
    book = openpyxl.Workbook()
    for row in csv.reader((tmp_path / "photos/queries.csv").read_text().splitlines()):
        book.active.append(row)
    (tmp_path / "photos/queries.csv").unlink()
    book.save(tmp_path / "photos/queries.xlsx")
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("rge eval")]
    assert [shlex.split(line)[2] for line in lines] == ["mine", "import", "check", "run", "compare", "check"]
    for line in lines:
        assert main(shlex.split(line)[2:]) == 0, line
    assert (tmp_path / "photos_eval/report.html").stat().st_size > 20_000
    said = capsys.readouterr().out
    assert "4 queries (3 with pictures, 4 with text) in 4 groups, 5 right answers" in said
    assert "caveat: 4 groups: intervals are wide" in said
    results = json.loads((tmp_path / "runs/photos/reasoning-both/results.json").read_text())
    assert results["prompts"]["instructions"] == ["Answer with a picture."]
    assert (tmp_path / "runs/photos/report.html").stat().st_size > 20_000


def test_what_the_table_says_is_in_the_set(photos):
    found = import_folder(options(photos))
    assert found.name == "my photos"
    assert set(found.corpus_ids) >= {"padlock.jpg", "library/shelf.jpg", "extinguisher.jpg"}
    assert found.query_ids == ["q00001", "q00002", "q00003", "q00004"]
    names = [sorted(found.corpus_ids[row] for row in rows) for rows, _ in found.positives]
    assert names == [
        ["key.jpg"],
        ["library/bookcase.jpg", "library/shelf.jpg"],
        ["extinguisher.jpg"],
        ["bench.jpg"],
    ]
    assert [[found.corpus_ids[row] for row in rows] for rows in found.negatives] == [
        ["hammer.jpg"],
        [],
        [],
        [],
    ]
    assert [[found.corpus_ids[row] for row in rows] for rows in found.excluded] == [
        ["padlock.jpg"], ["book.jpg"], ["candle.jpg"], [],
    ]  # fmt: skip
    assert found.columns["category"] == ["tool", "place", "tool", "place"]
    assert found.columns["group"] == ["padlock.jpg", "book.jpg", "candle.jpg", "q00004"]


@pytest.mark.parametrize(
    ("delimiter", "encoding"),
    [(";", "utf-8-sig"), ("\t", "utf-8"), (",", "utf-8-sig")],
    ids=["excel-eu", "tabs", "excel"],
)
def test_what_excel_writes_is_read(photos, delimiter, encoding):
    rows = [["Question", "Photo", "Right"], ["Größe, oder?", "padlock.jpg", "key.jpg\nbench.jpg"]]
    text = (
        "\r\n".join(delimiter.join(f'"{cell}"' for cell in row) for row in rows)
        + "\r\n"
        + delimiter * 2
        + "\r\n"
    )
    (photos / "queries.csv").write_bytes(text.encode(encoding))
    found = import_folder(options(photos, field_map=("Question=text",)))
    assert found.queries[0].text == "Größe, oder?"
    assert [found.corpus_ids[row] for row in found.positives[0][0]] == ["bench.jpg", "key.jpg"]


def test_json_lines_with_lists(photos):
    row = {"text": "q", "image": ["padlock.jpg"], "right": ["key.jpg", "bench.jpg"], "season": "spring"}
    (photos / "queries.csv").unlink()
    (photos / "queries.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"season": "autumn"}) + "\n"
    )
    found = import_folder(options(photos, report_by=("season",), instruction="Find it."))
    assert found.columns["season"] == ["spring", "autumn"]
    assert found.queries[0].instruction == "Find it."
    assert found.columns["group"] == ["padlock.jpg"] * 2  # one picture, one group
    empty = dict.fromkeys(("text", "wrong", "category", "season"), float("nan"))
    (photos / "queries.jsonl").write_text(json.dumps(row | empty) + "\n")
    found = import_folder(options(photos, report_by=("season",), overwrite=True))
    assert (found.queries[0].text, found.negatives) == (None, None)
    assert (found.columns["category"], found.columns["season"]) == (["uncategorised"], ["none"])
    with error_about(UserError, "season", "unknown"):
        import_folder(options(photos, overwrite=True))
    (photos / "queries.jsonl").write_text(json.dumps({"text": ["q"], "right": ["key.jpg"]}) + "\n")
    assert problems(photos) == {("row 1, text", None)}


def test_copies_are_one_candidate_under_all_their_names(photos):
    (photos / "zz copy of key.JPG").write_bytes((photos / "key.jpg").read_bytes())
    (photos / "holiday.heic").write_bytes(b"x")
    (photos / "queries.csv").write_text("text,right\nopens it,zz copy of key.jpg\n")
    found = import_folder(options(photos))
    assert [found.corpus_ids[row] for row in found.positives[0][0]] == ["key.jpg"]
    assert not any("copy" in name for name in found.corpus_ids)
    assert found.meta["notes"] == [
        "byte-identical copies of other pictures, merged in the pool: 1",
        "pictures left out because they cannot be opened: holiday.heic",
    ]


def test_everything_that_is_wrong_is_listed_at_once(photos):
    (photos / "shed").mkdir()
    for number, folder in enumerate(("library", "shed")):
        (photos / folder / "ladder.jpg").write_bytes(picture(77 + number))
    (photos / "queries.csv").write_text(
        "id,text,image,right,wrong\n1,what,padlok.jpg,bench.jpg,\n2,what,,ladder.jpg,\n1,,,bench.jpg,bench.jpg\n3,what,,,\n"
    )
    assert problems(photos) == {
        ("C2", "padlok.jpg"), ("D3", "ladder.jpg"), ("row 4", None), ("E4", "bench.jpg"), ("D5", None), ("A4", "1"),
    }  # fmt: skip
    assert not (photos.parent / "set").exists()


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (b"text,right\nGr\xf6\xdfe,key.jpg\n", ()),
        (b"text,right\na, b,key.jpg\n", (2,)),
        (b"text,image\na,key.jpg\n", ("right",)),
        (b"text,right\n", ("empty",)),
    ],
)
def test_broken_tables_are_named(photos, content, fields):
    (photos / "queries.csv").write_bytes(content)
    with error_about(UserError, "queries.csv", *fields):
        import_folder(options(photos))


def problems(photos):
    """Where a table's problems are, and the names at fault."""
    with pytest.raises(UserError) as caught:
        import_folder(options(photos, overwrite=True))
    return {(one.place, one.key) for one in caught.value.problems}


def right_answers(found):
    return [[found.corpus_ids[row] for row in rows] for rows, _ in found.positives]


def answers(photos, *names, **more):
    """Import one query a name, whose right answer it is."""
    (photos / "queries.csv").write_text(json.dumps([]))
    (photos / "queries.csv").unlink()
    rows = [{"text": f"query {number}", "right": [name]} for number, name in enumerate(names)]
    (photos / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return right_answers(import_folder(options(photos, **more)))


def test_names_that_differ_only_in_case_or_in_an_escaped_blank_are_two_pictures(photos):
    for number, name in enumerate(("Key.png", "key.png", "a b.png", "a%20b.png")):
        (photos / name).write_bytes(picture(500 + number))
    assert answers(photos, "Key.png", "key.png", "a b.png", "a%20b.png") == [
        ["Key.png"], ["key.png"], ["a%20b.png"], ["a%2520b.png"],
    ]  # fmt: skip
    with error_about(UserError, "queries.jsonl") as caught:
        answers(photos, "KEY.PNG", overwrite=True)
    assert [one.key for one in caught.value.problems] == ["KEY.PNG"]


@pytest.mark.parametrize(("on_disk", "in_table"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_accents_are_found_however_they_are_composed(photos, on_disk, in_table):
    (photos / unicodedata.normalize(on_disk, "Tür.png")).write_bytes(picture(500))
    (found,) = answers(photos, unicodedata.normalize(in_table, "Tür.png"))
    assert [unicodedata.normalize("NFC", name) for name in found] == ["Tür.png"]


def test_paths_of_windows_and_of_other_machines(photos):
    assert (
        answers(photos, r"library\shelf.jpg", r"C:\Users\me\my photos\library\shelf.jpg", "SHELF")
        == [["library/shelf.jpg"]] * 3
    )


def test_numbers_as_a_spreadsheet_exports_them_name_pictures(photos):
    (photos / "7.jpg").write_bytes(picture(500))
    assert answers(photos, "7.0", "7") == [["7.jpg"]] * 2
    with error_about(UserError, "queries.jsonl") as caught:
        answers(photos, "8.0")
    assert [one.key for one in caught.value.problems] == ["8.0"]


def test_a_set_is_not_written_into_its_own_pictures(photos):
    for out in (photos, photos.parent):
        with error_about(UserError, out, "out"):
            import_folder(options(photos, out=out, overwrite=True))


def test_a_separator_may_be_part_of_a_name(photos):
    (photos / "salt; pepper, both.jpg").write_bytes(picture(500))
    (photos / "queries.csv").write_text(
        'text,right\na,"salt; pepper, both.jpg"\nb,"key.jpg, salt; pepper, both.jpg;bench.jpg"\n'
    )
    both = "salt;%20pepper,%20both.jpg"
    assert right_answers(import_folder(options(photos))) == [[both], ["bench.jpg", "key.jpg", both]]
    for number, name in enumerate(("salt.jpg", "salt;key.jpg")):
        (photos / name).write_bytes(picture(600 + number))
    (photos / "queries.csv").write_text('text,right\na,"salt;key.jpg"\n')
    assert problems(photos) == {("B2", "salt;key.jpg")}


def test_pictures_that_cannot_be_opened_only_matter_where_a_query_needs_them(photos):
    (photos / "broken.png").write_bytes(b"no picture")
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(photos / "moves.gif", save_all=True, append_images=frames[1:])
    found = import_folder(options(photos))
    assert not {"broken.png", "moves.gif"} & set(found.corpus_ids)
    assert found.meta["notes"] == ["pictures left out because they cannot be opened: broken.png, moves.gif"]
    (photos / "queries.csv").write_text("text,right,wrong\na,moves.gif,broken.png\nb,key.jpg,\n")
    assert problems(photos) == {("B2", "moves.gif"), ("C2", "broken.png")}


def test_a_folder_that_is_not_ours_is_never_replaced(photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "meta.json").write_text('{"name": "my thesis"}')
    (other / "thesis.docx").write_bytes(b"three years")
    with error_about(FileError, "other"):
        import_folder(options(photos, out=other, overwrite=True))
    assert (other / "thesis.docx").read_bytes() == b"three years"
    import_folder(options(photos))
    with error_about(FileError, "set"):
        import_folder(options(photos))
    (photos.parent / "set" / "notes.txt").write_text("mine")
    with error_about(UserError, "notes.txt"):
        import_folder(options(photos, overwrite=True))
    (photos.parent / "set" / "notes.txt").rename(
        photos.parent / "set" / ".DS_Store"
    )  # a Mac's, where one has looked
    assert import_folder(options(photos, overwrite=True)).query_ids


def test_a_kill_between_the_two_renames_loses_nothing(photos, monkeypatch):
    before = import_folder(options(photos)).fingerprint
    rename, at = Path.rename, photos.parent / "set"

    def killed(path, target):
        if Path(target) == at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(files.Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        import_folder(options(photos, overwrite=True))
    monkeypatch.undo()
    assert not at.exists()  # as after SIGKILL: nothing could put it back
    with error_about(FileError, "set"):
        import_folder(options(photos))
    assert load_set(at).fingerprint == before


def test_queries_that_share_one_of_their_pictures_are_one_group(photos):
    (photos / "queries.csv").write_text(
        "text,image,right,group\na,padlock.jpg|book.jpg,key.jpg,\nb,padlock.jpg,key.jpg,\nc,candle.jpg,key.jpg,\n"
        "d,book.jpg,key.jpg,mine\n"
    )
    groups = import_folder(options(photos)).columns["group"]
    assert groups[0] == groups[1] == groups[3] != groups[2]


def test_a_set_made_elsewhere_shows_and_writes_nothing_outside(tmp_path):
    (tmp_path / "private.png").write_bytes(picture(1))
    made = tables(2, 8)
    for cell in (str(tmp_path / "private.png"), "../private.png", "pictures/../../private.png", "link.png"):
        made["corpus"]["image"] = [cell, *["in.png"] * 7]
        made["queries"]["image"] = [["in.png"]] * 2
        path = write_tables(tmp_path / "set", made)
        (path / "in.png").write_bytes(picture(2))
        (path / "link.png").unlink(missing_ok=True)
        (path / "link.png").symlink_to(tmp_path / "private.png")
        with error_about(SetError, "corpus.parquet", "outside"):
            list(load_set(path).corpus_items())
    for member in ("../x", str(tmp_path / "x")):
        write_suite(tmp_path / "suite", name="s", benchmark="generic", column="set", members={member: {}})
        with error_about(UserError, member, "outside"):
            load_suite(tmp_path / "suite")


def test_links_stay_in_the_set_and_survive_the_source(photos):
    found = import_folder(options(photos, pictures="link"))
    for path in photos.rglob("*.jpg"):
        path.unlink()
    shown = {item.id: item.pictures[0] for item in load_set(found.path).corpus_items()}
    assert shown["key.jpg"].startswith(str(found.path / "pictures"))
    assert all(check_set(found.path)[0])


@pytest.fixture
def workbook(photos):
    """What people's workbooks are like: returns a function that saves rows and gives the path."""
    (photos / "queries.csv").unlink()

    def save(rows, change=lambda book, sheet: None):
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        change(book, book.active)
        book.save(photos / "my questions.xlsx")
        return photos

    return save


def test_a_workbook_with_the_usual_accidents(workbook):
    rows = [
        [], ["ID", " Question ", "Photo", "Right Answers", None, "season"],
        [1, "What opens this?\u200b", "padlock.jpg", "key.jpg", None, 2024.0], [None] * 6,
        [2, "And this?", None, " BENCH.JPG\u00a0", None, datetime.date(2024, 3, 4)],
    ]  # fmt: skip

    def change(book, sheet):
        sheet.merge_cells("C3:C5")
        sheet.row_dimensions[5].hidden = True
        book.create_sheet("empty")

    found = import_folder(options(workbook(rows, change), report_by=("season",)))
    assert found.query_ids == ["1", "2"]
    assert [query.text for query in found.queries] == ["What opens this?\u200b", "And this?"]
    assert right_answers(found) == [["key.jpg"], ["bench.jpg"]]
    assert [len(query.pictures) for query in found.queries] == [1, 1]  # the merged cell holds for both rows
    assert found.columns["season"] == ["2024", "2024-03-04"]
    assert found.meta["notes"] == ["hidden rows of my questions.xlsx, read like the others: 1"]


def test_what_a_spreadsheet_spoiled_is_listed_with_its_cells(workbook):
    def change(book, sheet):
        sheet["B2"] = "=A2"
        sheet["B3"].value, sheet["B3"].data_type = "#REF!", "e"
        sheet["D4"] = "stray"

    rows = [["text", "right", "text"], ["a"], ["b"], ["c", datetime.date(2024, 4, 3)], ["d", "keys.jpg"]]
    assert problems(workbook(rows, change)) >= {
        ("C1", None), ("D4", None), ("B2", None), ("B3", None), ("B4", None), ("B5", "keys.jpg"),
    }  # fmt: skip


def test_sheets_and_files_that_are_no_workbook(workbook, tmp_path):
    photos = workbook(
        [["text", "right"], ["a", "key.jpg"]], lambda book, _: book.create_sheet("b").append(["x"])
    )
    with error_about(UserError, ("choice", "sheet", ("Sheet", "b"))):
        import_folder(options(photos))
    with error_about(UserError, ("choice", "sheet", ("Sheet", "b"))):
        import_folder(options(photos, sheet="c"))
    assert import_folder(options(photos, sheet="Sheet")).query_ids
    (tmp_path / "old.xlsx").write_bytes(b"\xd0\xcf\x11\xe0 an older format, or one with a password")
    with error_about(UserError, "old.xlsx"):
        import_folder(options(photos, queries=tmp_path / "old.xlsx"))
    (tmp_path / "old.numbers").write_bytes(b"")
    with error_about(UserError, "old.numbers", "format"):
        import_folder(options(photos, queries=tmp_path / "old.numbers"))


@pytest.mark.parametrize("data", ["sep=;\r\ntext;right;\r\na;key.jpg;\r\n;;\r\n".encode("utf-16")])
def test_utf_16_a_sep_line_and_empty_columns(photos, data):
    (photos / "queries.csv").write_bytes(data)
    assert right_answers(import_folder(options(photos))) == [["key.jpg"]]


def test_a_fingerprint_is_computed_where_it_is_missing(tmp_path):
    path = write_set(tmp_path / "set")
    given = load_set(path).fingerprint
    (path / "meta.json").write_text(json.dumps({"name": "mine"}))
    assert load_set(path).fingerprint == given
    (path / "meta.json").write_text(json.dumps({"name": "mine", "fingerprint": "0" * 64}))
    with error_about(SetError, "meta.json", "fingerprint"):
        load_set(path)


def test_check_lists_every_picture_that_cannot_be_opened(tmp_path, capsys):
    made = tables(6, 20)
    made["corpus"]["image"][3] = b"no picture"
    made["queries"]["image"][2] = [b"nor this"]
    path = write_tables(tmp_path / "set", made)
    assert main(["check", f"set={path}"]) == 2
    said = capsys.readouterr().err
    assert "2 items cannot be read" in said
    assert f"candidate {made['corpus']['id'][3]!r}" in said
    assert "query 'q02'" in said


def test_check_prints_the_table_of_a_paper(tmp_path, capsys):
    sets, tables_ = {"a": tables(4, 8), "b": tables(2, 6, negatives=False)}, {}
    for number, (name, made) in enumerate(sets.items()):
        num = len(made["queries"]["id"])
        made["queries"]["text"] = ["one two three"] * (num - 1) + ["one"]
        made["queries"]["category"] = (["x"] * (num - 1) + ["y"]) if number == 0 else ["z"] * num
        made["corpus"]["text"] = ["four words in it"] * len(made["corpus"]["id"])
        tables_[name] = check_set(write_tables(tmp_path / "suite" / name, made)).table
    assert list(tables_["a"].index) == ["x", "y", "all"]
    assert tables_["a"]["words"].tolist() == [3, 1, 2.5]
    assert tables_["a"].loc["all", ["queries", "candidates", "candidate words"]].tolist() == [4, 8, 4]
    wrong = len(sets["a"]["negatives"]["query-id"])
    assert tables_["a"].loc["all", "wrong"] == wrong / 4
    assert list(tables_["b"].index) == ["all"]
    members = {name: {} for name in sets}
    write_suite(tmp_path / "suite", name="s", benchmark="generic", column="set", members=members)
    capsys.readouterr()
    assert not main(["check", f"set={tmp_path / 'suite'}"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[:2] for row in rows] == [["a", "4"], ["b", "2"], ["all", "6"]]
    assert f"{(4 * 2.5 + 2 * 2) / 6:.1f}" in rows[2]


def test_check_names_caveats(tmp_path):
    made = tables(6, 20)
    right, ids = made["qrels"]["corpus-id"][0], made["corpus"]["id"]
    twin = next(name for name in ids if name not in made["qrels"]["corpus-id"])
    made["corpus"]["image"][ids.index(twin)] = made["corpus"]["image"][ids.index(right)]
    made["queries"]["group"][1] = "alone"
    made["queries"]["image"][4] = [made["corpus"]["image"][0]]
    summary, caveats, _ = check_set(write_tables(tmp_path / "set", made))
    said = "\n".join(caveats)
    assert "2 candidates are copies of another" in said
    assert f"query 'q00': {twin!r} is a copy of a right answer but counts as wrong" in said
    assert "query 'q01' shares a picture with another group" in said
    assert "1 queries have their own picture in the pool" in said
    assert "groups: intervals are wide" in said
    assert re.search(r"content +\w{64}", "\n".join(summary))
    assert pq.read_table(tmp_path / "set" / "corpus.parquet").num_rows == 20
    made["excluded"] = {"query-id": ["q00"], "corpus-id": [twin]}  # of another query
    _, caveats, _ = check_set(write_tables(tmp_path / "set", made))
    assert "1 queries have their own picture in the pool" in "\n".join(caveats)
    images = made["corpus"]["image"]
    own = [name for name, image in zip(ids, images, strict=True) if image == images[0]]
    made["excluded"] = {"query-id": ["q04"] * len(own), "corpus-id": own}
    _, caveats, _ = check_set(write_tables(tmp_path / "set", made))
    assert "own picture" not in "\n".join(caveats)


@pytest.mark.slow
def test_from_files_to_a_page_in_one_command(workbook, monkeypatch, capsys):
    """`rge eval mine PHOTOS TABLE`; given again with a table that grew it goes on, and figures need overwrite=true."""
    encoder = FakeEncoder()
    monkeypatch.setattr(run_module.RunOptions, "loader", lambda options: loader(encoder))
    rows = [
        ["question", "picture", "right"],
        ["opens it?", "padlock.jpg", "key.jpg"],
        ["sits?", None, "bench.jpg"],
    ]
    photos = workbook(rows)
    checkpoint = photos.with_name("checkpoint")
    checkpoint.mkdir()
    (checkpoint / "rge.json").write_text("{}")
    words = ["mine", str(photos), str(photos / "my questions.xlsx"), f"checkpoint={checkpoint}"]
    assert main(words) == 0
    out = photos.with_name("my photos_eval")
    assert (out / "report.html").stat().st_size > 20_000
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        "set", ".cache", "reasoning-both", "direct-both",
    }  # fmt: skip
    assert "caveat: 2 groups: intervals are wide" in capsys.readouterr().out
    seen = len(encoder.seen)
    workbook([*rows, ["cuts?", None, "hammer.jpg"]])
    assert main(words) == 2
    assert "overwrite=true" in capsys.readouterr().err
    assert main([*words, "overwrite=true"]) == 0
    assert encoder.seen[seen:] == ["q00003", "q00003"]  # the rest is in the cache

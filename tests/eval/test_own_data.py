"""A folder of photos and a spreadsheet: docs/own_data.md as it stands there, and what strangers' files look like."""

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from eval_fakes import picture, tables, write_set, write_tables

from eval.__main__ import main
from eval.benchmarks.folder.importer import FolderOptions, import_folder
from eval.commands.check import check_set
from eval.sets.retrieval_set import SetError, load_set
from rge.checkpoints.export import export, settings_of
from rge.common.errors import UserError

DOC = Path(__file__).resolve().parents[2] / "docs" / "own_data.md"


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
        max_new_tokens=4, reasons="query", recipe={"model": {"dtype": "float32"}}, stage="joint", step=1,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    photos.rename(tmp_path / "photos")
    checkpoint = tmp_path / "runs/demo/joint/final"
    checkpoint.parent.mkdir(parents=True)
    export(lively, checkpoint, settings)
    exec(compile(blocks("python")[0], "own_data.md", "exec"), {})
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("python")]
    assert [shlex.split(line)[3] for line in lines] == ["import", "check", "run", "compare", "check"]
    for line in lines:
        assert main(shlex.split(line)[3:]) == 0, line
    said = capsys.readouterr().out
    assert "4 queries (3 with pictures, 4 with text) in 4 groups, 5 right answers" in said
    assert "mind: 4 groups: intervals will be wide" in said
    results = json.loads((tmp_path / "photos_eval/reasoning-both/results.json").read_text())
    assert results["prompts"]["instructions"] == ["Answer with a picture."]
    assert (tmp_path / "photos_eval/report.html").stat().st_size > 20_000


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
    with pytest.raises(UserError, match="unknown columns season. Known fields are id, text, image, right"):
        import_folder(options(photos, overwrite=True))


def test_copies_are_one_candidate_under_all_their_names(photos):
    (photos / "zz copy of key.JPG").write_bytes((photos / "key.jpg").read_bytes())
    (photos / "holiday.heic").write_bytes(b"x")
    (photos / "queries.csv").write_text("text,right\nopens it,zz copy of key.jpg\n")
    found = import_folder(options(photos))
    assert [found.corpus_ids[row] for row in found.positives[0][0]] == ["key.jpg"]
    assert not any("copy" in name for name in found.corpus_ids)
    assert found.meta["notes"] == [
        "1 pictures are copies of others, byte for byte, and stand in the pool once",
        "1 .heic files are not in the pool: convert them to .jpg or .png",
    ]


def test_everything_that_is_wrong_is_listed_at_once(photos):
    (photos / "shed").mkdir()
    for number, folder in enumerate(("library", "shed")):
        (photos / folder / "ladder.jpg").write_bytes(picture(77 + number))
    (photos / "queries.csv").write_text(
        "id,text,image,right,wrong\n1,what,padlok.jpg,bench.jpg,\n2,what,,ladder.jpg,\n1,,,bench.jpg,bench.jpg\n3,what,,,\n"
    )
    with pytest.raises(UserError) as error:
        import_folder(options(photos))
    for line in (
        "row 1: picture 'padlok.jpg' is not in the folder; did you mean 'padlock.jpg'?",
        "row 2: 'ladder.jpg' could be 'library/ladder.jpg' or 'shed/ladder.jpg': write the path",
        "row 3: neither text nor picture",
        "row 3: 'bench.jpg' is listed as right and as wrong",
        "row 4: no right answer",
        "id '1' occurs twice",
    ):
        assert line in str(error.value)
    assert not (photos.parent / "set").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,right\nGr\xf6\xdfe,key.jpg\n", "is not UTF-8 .* save it as CSV UTF-8"),
        (b"text,right\na, b,key.jpg\n", "row 1: more cells than the 2 columns"),
        (b"text,image\na,key.jpg\n", "has no column of right answers"),
        (b"text,right\n", "has no rows"),
    ],
)
def test_broken_tables_are_named(photos, content, message):
    (photos / "queries.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_folder(options(photos))


def test_a_fingerprint_is_computed_where_it_is_missing(tmp_path):
    path = write_set(tmp_path / "set")
    given = load_set(path).fingerprint
    (path / "meta.json").write_text(json.dumps({"name": "mine"}))
    assert load_set(path).fingerprint == given
    (path / "meta.json").write_text(json.dumps({"name": "mine", "fingerprint": "0" * 64}))
    with pytest.raises(SetError, match="the set was changed after it was written"):
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


def test_check_says_what_to_mind(tmp_path):
    made = tables(6, 20)
    right, ids = made["qrels"]["corpus-id"][0], made["corpus"]["id"]
    twin = next(name for name in ids if name not in made["qrels"]["corpus-id"])
    made["corpus"]["image"][ids.index(twin)] = made["corpus"]["image"][ids.index(right)]
    made["queries"]["group"][1] = "alone"
    made["queries"]["image"][4] = [made["corpus"]["image"][0]]
    found = check_set(write_tables(tmp_path / "set", made))
    said = "\n".join(found.mind)
    assert "2 candidates show the same as another" in said
    assert f"query 'q00': {twin!r} shows the same as a right answer and counts as wrong" in said
    assert "query 'q01' shares a picture with another group" in said
    assert "1 queries have their own picture in the pool" in said
    assert "groups: intervals will be wide" in said
    assert found.wanted.content in "\n".join(found.lines)
    assert pq.read_table(tmp_path / "set" / "corpus.parquet").num_rows == 20

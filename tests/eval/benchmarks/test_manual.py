"""The index of a printed manual becomes a retrieval set of its pages."""

from pathlib import Path

import pytest
from pdfs import page, pdf

from eval.benchmarks.registry import BENCHMARKS
from eval.benchmarks.release_files import ReleaseError
from eval.benchmarks.releases.manual import ManualOptions, import_manual, read_manual
from eval.commands.bm25 import Bm25Options, bm25, written
from eval.sets.retrieval_set import load_set
from rge.common.files import read_json

SIZE = (400, 600)
BODY = ["Title", "Contents", "About kettles", "About anchors and kettles", "Nothing", "How a padlock opens"]
INDEX = """Concept index 5
A
anchor, weigh an . . . . . 2
anchors. . . . . . . . . . 2, 3
K
kettle . . . . . . . . . . 1,
2
L
locks: see the padlock_
mechanism . . . . . . . . 4
padlock . . . . . . . . 3-4
opening . . . 4
water . . . 1
boiling, 1
copper, 2, 3
iron . . . . 3
5"""


def manual(path: Path, index: str = INDEX, mark: str = "Appendix B Concept index") -> Path:
    """Two Roman pages, four numbered ones, an index, and a page after it."""
    pages = [page(text, size=SIZE) for text in [*BODY, index, "Colophon"]]
    path.write_bytes(pdf(pages, bookmarks=[("1 The index file", 3), (mark, 7), ("Colophon", 8)], num_roman=2))
    return path


def test_entries_and_their_pages(tmp_path):
    found = read_manual(manual(tmp_path / "m.pdf"))
    assert found.indexes == {7: "concept index"}
    assert found.unread == 0
    assert {words: pages for words, _, pages in found.entries} == {
        "anchor, weigh an": [4],
        "anchors": [4, 5],
        "kettle": [3, 4],
        "locks: see the padlock_mechanism": [6],
        "padlock": [5, 6],
        "opening": [6],
        "water": [3],
        "boiling": [3],
        "copper": [4, 5],
        "iron": [5],
    }


def test_an_import_is_a_set_of_pages_and_bm25_reads_them(tmp_path):
    source = tmp_path / "manuals"
    source.mkdir()
    manual(source / "a.pdf")
    manual(source / "b b.pdf", INDEX.replace("water . . . 1", "water . . . 2"))
    (source / "plain.pdf").write_bytes(pdf([page("no index")]))
    written_set = import_manual(ManualOptions(src=source, out=tmp_path / "set"))
    # Seven pages of each are outside the index.
    assert len(written_set.corpus_ids) == 14
    assert "b%20b.pdf#page=8" in written_set.corpus_ids
    texts = {item.text: row for row, item in enumerate(written_set.queries)}
    rows, gains = written_set.positives[texts["water"]]
    assert [written_set.corpus_ids[row] for row in rows] == ["a.pdf#page=3", "b%20b.pdf#page=4"]
    assert set(gains) == {1.0}
    assert set(written_set.columns["category"]) == {"concept index"}
    candidates = {item.id: item for item in load_set(tmp_path / "set").corpus_items()}
    assert written(candidates["a.pdf#page=3"]) == "About kettles"
    assert Path(candidates["a.pdf#page=3"].content[0].pdf).is_relative_to(tmp_path / "set")

    bm25(Bm25Options(set=tmp_path / "set", out=tmp_path / "out", benchmark="manual"))
    assert read_json(tmp_path / "out" / "results.json")["benchmark"] == "manual"


def test_what_has_no_index_is_refused(tmp_path):
    (tmp_path / "plain.pdf").write_bytes(pdf([page("no index")]))
    few = manual(tmp_path / "few.pdf", "kettle . . . . 1")
    wrong = manual(tmp_path / "wrong.pdf", INDEX.replace("water . . . 1", "water . . . 9"))
    for options in (
        {"src": tmp_path / "plain.pdf"},
        {"src": few},
        {"src": wrong},
        {"src": tmp_path, "manuals": ("nope",)},
        {"src": tmp_path / "nowhere"},
    ):
        with pytest.raises(ReleaseError):
            import_manual(ManualOptions(out=tmp_path / "set", **options))
        assert not (tmp_path / "set").exists()
    assert "manual" in BENCHMARKS

"""Queries and candidates of a retrieval set may have parts: interleaved pictures, pages of documents, clips."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import clip
from pdfs import BLUE, GREEN, RED, page, pdf

from eval.commands.bm25 import Bm25Options, bm25
from eval.pages.report import ReportOptions, report
from eval.sets.retrieval_set import load_set
from eval.sets.tables import SetError, Table, kinds_of
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.errors import UserError
from rge.common.parts import ImagePart, PdfPart, TextPart, VideoPart
from rge.vectors.contents import content_digest

STEADY = list(range(0, 2000, 40))


@pytest.fixture
def media(tmp_path, picture):
    """A picture, a document and a clip, elsewhere."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    picture(40, 30).save(folder / "a.png")
    (folder / "m.pdf").write_bytes(pdf([page("kettle", RED), page("anchor", GREEN), page("padlock", BLUE)]))
    (folder / "talk.mp4").write_bytes(clip(STEADY, size=(64, 64)))
    return folder


def parts_of(media):
    """Content of two queries and three candidates."""
    png = (media / "a.png").read_bytes()
    queries = [
        Query(
            "q1",
            content=(
                TextPart("before"),
                ImagePart(png),
                TextPart("a kettle"),
                ImagePart(str(media / "a.png")),
            ),
        ),
        Query(
            "q2", content=(VideoPart(str(media / "talk.mp4"), start=0.5, num_frames=4), TextPart("anchor"))
        ),
    ]
    corpus = [
        Candidate("d1", content=(PdfPart(str(media / "m.pdf"), (1,)),)),
        Candidate("d2", content=(PdfPart(str(media / "m.pdf"), (2, 3)), TextPart("two pages"))),
        Candidate("d3", content=(VideoPart((png, str(media / "a.png")), fps=2.0),)),
    ]
    return queries, corpus


@pytest.fixture
def written(media, tmp_path):
    queries, corpus = parts_of(media)
    return write_set(
        tmp_path / "set",
        meta={"name": "parts"},
        queries=queries,
        corpus=corpus,
        qrels=[("q1", "d1", 1), ("q2", "d2", 1)],
    )


def test_parts_and_their_order_are_kept(written, media):
    first, second = written.queries
    assert [type(part) for part in first.content] == [TextPart, ImagePart, TextPart, ImagePart]
    assert first.text == "before\na kettle"
    assert second.content[0] == VideoPart(second.content[0].video, start=0.5, num_frames=4)
    one, two, three = written.corpus_items()
    assert (one.content[0].pages, two.content[0].pages) == ((1,), (2, 3))
    assert one.content[0].pdf == two.content[0].pdf  # one copy of the document
    assert len(list((written.path / "files").iterdir())) == 4
    assert three.content[0].fps == 2.0
    assert len(three.content[0].video) == 2
    assert content_digest(one) != content_digest(two)
    for part in (second.content[0].video, one.content[0].pdf, *three.content[0].video):
        assert str(written.path) in part


def test_modalities_keep_what_is_theirs(written):
    assert [query.is_visual for query in written.query_items("text")] == [False, False]
    assert [query.text for query in written.query_items("image")] == [None, None]
    assert [len(query.content) for query in written.query_items("image")] == [2, 1]


@pytest.mark.parametrize(
    "bad", ["{", '{"text": "a"}', '[{"sound": "a.wav"}]', '[{"pdf": "../elsewhere/m.pdf"}]', "[]x"]
)
def test_content_that_cannot_be_read_is_named(written, bad):
    table = pq.read_table(written.path / "corpus.parquet").to_pydict()
    table["content"][0] = bad
    pq.write_table(pa.table(table), written.path / "corpus.parquet")
    with pytest.raises(SetError):
        list(load_set(written.path).corpus_items())


def test_documents_clips_and_what_is_shown_beside_them_are_kinds_of_their_own(written):
    kind_C = kinds_of(Table(written.path / "corpus.parquet"))
    assert len(set(kind_C.tolist())) == len(kind_C) == 3  # a document, one with a text, and a clip
    shown = json.dumps([{"type": "image_url", "image_url": {"url": "a.png"}}])
    table = pq.read_table(written.path / "corpus.parquet").to_pydict()
    table["content"] = [
        shown,
        json.dumps([{"image": "a.png"}]),
        json.dumps([{"text": "a"}, {"image": "a.png"}]),
    ]
    pq.write_table(pa.table(table), written.path / "corpus.parquet")
    first, second, both = kinds_of(Table(written.path / "corpus.parquet"))
    assert first == second != both


def test_content_and_its_short_form_exclude_each_other(written):
    table = pq.read_table(written.path / "corpus.parquet").to_pydict()
    table["text"] = ["x", None, None]
    pq.write_table(pa.table({**table, "image": pa.nulls(3, pa.binary())}), written.path / "corpus.parquet")
    with pytest.raises(SetError):
        list(written.corpus_items())


def test_what_a_set_shows_is_checked_when_it_is_written(media, tmp_path):
    queries, corpus = parts_of(media)
    for bad in (
        PdfPart(str(media / "m.pdf"), (9,)),
        PdfPart(str(media / "a.png")),
        VideoPart(str(media / "m.pdf")),
        ImagePart(b"x"),
    ):
        with pytest.raises(UserError):
            write_set(
                tmp_path / "bad", meta={"name": "bad"}, queries=[replace(queries[0], content=(bad,))], corpus=corpus,
                qrels=[("q1", "d1", 1)],
            )  # fmt: skip
        assert not (tmp_path / "bad").exists()


def test_sets_without_parts_have_no_such_column(tmp_path):
    write_set(
        tmp_path / "set",
        meta={"name": "x"},
        queries=[Query("q", "a")],
        corpus=[Candidate("d", "b")],
        qrels=[("q", "d", 1)],
    )
    for name in ("queries", "corpus"):
        assert "content" not in pq.read_schema(tmp_path / "set" / f"{name}.parquet").names


@pytest.mark.slow
def test_a_report_shows_pages_and_frames(written, tmp_path):
    bm25(Bm25Options(set=written.path, out=tmp_path / "run"))
    report(ReportOptions(runs=(str(tmp_path / "run"),), out=tmp_path / "report.html"))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Of the queries a picture (twice the same) and four frames; a page, and two pages side by side; and a list of frames.
    assert html.count("<symbol") >= 7
    assert json.dumps("query picture 4")[1:-1] in html

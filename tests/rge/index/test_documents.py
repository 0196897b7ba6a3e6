"""A folder of PDFs is indexed and searched by page, with `rge index` and `rge search`."""

import io
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from clips import clip, number
from faults import error_about
from pdfs import BLUE, GREEN, PASSWORD_NEEDED, RED, page, pdf
from PIL import Image
from recorded import exported

pytest.importorskip("lancedb", exc_type=ImportError)

from rge.common.parts import PdfPart, VideoPart
from rge.content.preview import preview
from rge.content.references import Named, named, page_reference
from rge.content.video import VideoError
from rge.embedder import Embedder
from rge.explore.explorer import Explorer
from rge.index.__main__ import main as index
from rge.index.embed import main as embed
from rge.index.search import main as search
from rge.index.sources import load, read_source
from rge.index.store import Index


@pytest.fixture
def manuals(tmp_path, monkeypatch):
    """Two documents, one in a folder of its own, a picture, a caption and a document that needs a password."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "manuals"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.pdf").write_bytes(pdf([page("padlock", RED), page("anchor", GREEN), page("kettle", BLUE)]))
    (folder / "sub" / "b.PDF").write_bytes(pdf([page("lantern", GREEN)]))
    (folder / "sub" / "b.txt").write_text("About lanterns")
    (folder / "locked.pdf").write_bytes(pdf([page("x")], PASSWORD_NEEDED))
    Image.new("RGB", (40, 50), "red").save(folder / "red.png")
    return folder


def test_references():
    assert named("a/b.pdf#page=12") == ("a/b.pdf", 12, None, None)
    assert named("a#page=2.pdf") == Named("a#page=2.pdf")
    assert named("a.PDF") == Named("a.PDF")
    assert named("a.mp4#t=10,20.5") == ("a.mp4", None, 10.0, 20.5)
    assert named("a.mp4#t=10") == ("a.mp4", None, 10.0, None)
    assert named("a.mp4#t=,20") == ("a.mp4", None, None, 20.0)
    assert named("lib.parquet#page=3") == Named("lib.parquet#page=3")
    assert (named("a.pdf").is_document, named("a.pdf#page=1").is_document, named("a.png").is_document) == (
        True,
        True,
        False,
    )
    assert page_reference("a.pdf", 3) == "a.pdf#page=3"


def test_a_file_that_is_called_like_a_page_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf#page=1").write_bytes(b"")
    assert named("a.pdf#page=1") == Named("a.pdf#page=1")


def test_pages_are_listed_and_read(manuals):
    source = read_source(manuals)
    assert [entry.id for entry in source.entries] == [
        "a.pdf#page=1", "a.pdf#page=2", "a.pdf#page=3", "red.png", "sub/b.PDF#page=1",
    ]  # fmt: skip
    assert source.faults.keys() == {"locked.pdf"}
    second, last = source.entries[1], source.entries[4]
    assert second.metadata == {"album": "manuals", "document": "a.pdf", "page": 2, "pages": 3}
    assert os.path.isabs(second.image)
    content = load(second, thumbnail_px=64)
    assert content.text == "anchor"
    assert tuple(np.asarray(content.part.image)[3, 3]) == GREEN
    assert Image.open(io.BytesIO(content.thumbnail)).size == (64, 32)
    assert load(last).text == "About lanterns"


def test_a_digest_is_of_a_page_and_not_of_its_document(manuals):
    before = [load(entry).digest for entry in read_source(manuals).entries if "a.pdf" in entry.id]
    (manuals / "a.pdf").write_bytes(pdf([page("padlock", RED), page("changed", GREEN), page("kettle", BLUE)]))
    entries = [entry for entry in read_source(manuals).entries if "a.pdf" in entry.id]
    assert [load(entry).digest == old for entry, old in zip(entries, before, strict=True)] == [
        True,
        False,
        True,
    ]


def test_one_document_is_a_source(manuals):
    assert [entry.id for entry in read_source(manuals / "a.pdf").entries] == [
        f"a.pdf#page={n}" for n in (1, 2, 3)
    ]


def test_a_table_names_documents_and_pages(manuals, tmp_path):
    (tmp_path / "t.csv").write_text(
        "id,image,shelf\nx,manuals/a.pdf,7\ny,manuals/a.pdf#page=2,8\nz,manuals/a.pdf#page=9,9\n"
    )
    source = read_source(tmp_path / "t.csv")
    assert [(entry.id, entry.metadata["page"], entry.metadata["shelf"]) for entry in source.entries] == [
        ("x#page=1", 1, 7), ("x#page=2", 2, 7), ("x#page=3", 3, 7), ("y", 2, 8),
    ]  # fmt: skip
    assert source.faults.keys() == {"z"}


@pytest.mark.slow
def test_a_folder_of_documents_is_searched_by_page(manuals, capsys, monkeypatch):
    demo = Embedder.from_pretrained("demo")
    monkeypatch.setattr(Embedder, "from_pretrained", classmethod(lambda cls, checkpoint, **options: demo))
    assert index(["manuals", "out=gallery", "checkpoint=demo", "max_unreadable=0.5"]) == 0
    assert "5 added" in capsys.readouterr().out
    assert search(["gallery", "kettle", "hybrid=true", "k=1", "mode=direct"]) == 0
    assert "a.pdf#page=3" in capsys.readouterr().out
    assert search(["gallery", "key", "where=page = 2 and document = 'a.pdf'", "mode=direct"]) == 0
    assert "a.pdf#page=2" in capsys.readouterr().out

    store = Index.open("gallery")
    [[hit]] = store.search(demo.encode_query(["x"]), 1, where="page = 3")
    assert (hit.id, hit.metadata["page"], hit.text, hit.gone) == ("a.pdf#page=3", 3, "kettle", False)
    shown = Explorer(demo, store, []).picture(hit.source, hit.id)
    assert tuple(np.asarray(Image.open(io.BytesIO(shown)))[3, 3]) == BLUE

    # The page itself finds its vector, whichever way it is embedded.
    picture = preview(str(manuals / "a.pdf#page=3"))
    vector_D = demo.encode_document(images=[picture])
    assert (
        float(np.ravel(vector_D) @ store.vectors_of([store.known(hit.source)[hit.id][1]]).popitem()[1])
        > 1 - 1e-5
    )

    assert embed(["manuals", "out=v.parquet", "checkpoint=demo", "max_unreadable=0.5"]) == 0
    assert "a.pdf#page=2" in pq.read_table("v.parquet")["id"].to_pylist()

    (manuals / "a.pdf").unlink()
    assert index(["manuals", "out=gallery", "max_unreadable=0.5"]) == 0
    assert "3 removed" in capsys.readouterr().out


def test_a_document_may_be_one_item(manuals):
    source = read_source(manuals, pages="together")
    assert [entry.id for entry in source.entries] == ["a.pdf", "red.png", "sub/b.PDF"]
    assert source.entries[0].metadata == {"album": "manuals", "pages": 3}
    content = load(source.entries[0], thumbnail_px=64)
    assert content.part == PdfPart(str(manuals / "a.pdf"))
    assert content.text.split() == ["padlock", "anchor", "kettle"]
    assert Image.open(io.BytesIO(content.thumbnail)).size == (64, 32)  # the pages side by side
    (manuals / "c.pdf").write_bytes((manuals / "a.pdf").read_bytes())
    again = {entry.id: entry for entry in read_source(manuals, pages="together").entries}
    assert load(again["c.pdf"]).digest == content.digest  # a copy is not embedded again


def test_clips_are_items_where_that_is_asked(manuals):
    (manuals / "talk.mp4").write_bytes(clip(range(0, 2000, 40)))
    (manuals / "talk.txt").write_text("A talk")
    assert read_source(manuals).skipped
    [entry] = [entry for entry in read_source(manuals, videos=True).entries if entry.id == "talk.mp4"]
    content = load(entry, thumbnail_px=64)
    assert (content.part, content.text) == (VideoPart(str(manuals / "talk.mp4")), "A talk")
    assert content.facts == {"seconds": 2.0}
    assert number(preview(str(manuals / "talk.mp4")).crop((0, 0, 64, 32))) == 0
    (manuals / "talk.mp4").write_bytes(b"film")
    with pytest.raises(VideoError):
        load(entry)


@pytest.mark.slow
def test_a_document_of_several_pages_is_searched(manuals, capsys, monkeypatch):
    demo = Embedder.from_pretrained("demo")
    monkeypatch.setattr(Embedder, "from_pretrained", classmethod(lambda cls, checkpoint, **options: demo))
    assert index(["manuals", "out=gallery", "checkpoint=demo", "max_unreadable=0.5", "pages=together"]) == 0
    assert "3 added" in capsys.readouterr().out
    assert search(["gallery", "kettle", "image=manuals/a.pdf", "mode=direct", "k=3"]) == 0
    assert "a.pdf" in capsys.readouterr().out
    parts = (PdfPart(str(manuals / "a.pdf"), (1, 2, 3)),)
    pictures = [preview(str(manuals / f"a.pdf#page={number}")) for number in (1, 2, 3)]
    found, expected = demo.encode_document(content=parts), demo.encode_document(images=[pictures])[0]
    assert np.allclose(found, expected, atol=1e-6)
    mappings = [[{"pdf": str(manuals / "a.pdf"), "pages": [1, 2, 3]}, {"text": "a"}]]
    assert np.allclose(
        demo.encode_document(content=mappings), demo.encode_document(["a"], [pictures]), atol=1e-6
    )
    for wrong in ("a", [["a"]], [{"sound": "x"}], [[{"text": "a"}], {"text": "b"}]):
        with error_about(ValueError):
            demo.encode_document(content=wrong)
    with error_about(ValueError):
        demo.encode_document("a", content=parts)


@pytest.fixture(scope="module")
def reader(lively_path, tmp_path_factory):
    """A checkpoint of a family that reads clips."""
    return exported(lively_path, tmp_path_factory.mktemp("reader") / "model", max_new_tokens=4)


@pytest.mark.slow
def test_a_folder_of_clips_is_indexed_and_searched(reader, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "films").mkdir()
    for name, first in (("a", 0), ("b", 100)):
        times = range(0, 3000, 40)
        (tmp_path / "films" / f"{name}.mp4").write_bytes(clip(times, size=(56, 56), first=first))
    assert index(["films", "out=gallery", f"checkpoint={reader}", "videos=true"]) == 0
    assert "2 added" in capsys.readouterr().out
    embedder = Embedder.from_pretrained(reader)
    store = Index.open("gallery")
    for name in ("a", "b"):
        vector_D = embedder.encode_document(content=[{"video": f"films/{name}.mp4"}])
        [[hit]] = store.search(vector_D[None], 1)
        assert (hit.id, hit.metadata["seconds"]) == (f"{name}.mp4", 3.0)
        assert hit.score > 1 - 1e-5
    assert search(["gallery", "image=films/a.mp4#t=0,1", "mode=direct"]) == 0
    assert "b.mp4" in capsys.readouterr().out

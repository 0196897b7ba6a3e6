"""Pages are counted, measured and rendered; what cannot be is a `PdfError` that names the file and the page."""

import io
import multiprocessing
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pdfs import BLUE, GREEN, PASSWORD_NEEDED, RED, page, pdf
from PIL import Image

from rge.content import pdf as reader
from rge.content.pdf import (
    MAX_PIXELS,
    PdfError,
    num_pages,
    outline,
    page_sizes,
    picture_pixels,
    render,
    texts,
)

THREE = pdf([page("one", RED), page("two", GREEN), page("three", BLUE)])
WIDE = "0 0 28346 20"  # ten metres


def corner(picture) -> tuple[int, ...]:
    """The colour near the upper left corner."""
    return tuple(np.asarray(picture)[3, 3].tolist())


@pytest.fixture
def book(tmp_path) -> str:
    (tmp_path / "book.pdf").write_bytes(THREE)
    return str(tmp_path / "book.pdf")


def test_pages_are_numbered_from_one(book):
    for source in (book, THREE):
        assert num_pages(source) == 3
        assert [corner(render(source, number)) for number in (1, 2, 3)] == [RED, GREEN, BLUE]
        assert [text.strip() for text in texts(source)] == ["one", "two", "three"]
        assert [text.strip() for text in texts(source, [3, 1])] == ["three", "one"]


def test_a_row_of_a_library_is_a_document(tmp_path):
    pq.write_table(pa.table({"id": ["a"], "image": [THREE]}), tmp_path / "lib.parquet")
    assert num_pages(f"{tmp_path}/lib.parquet#a") == 3


@pytest.mark.parametrize("dpi", [10, 72, 99.5, 144])
def test_sizes_are_those_of_the_pictures(dpi):
    odd = [(200, 100), (612.3, 791.7), (1, 3000), (0.2, 0.2)]
    source = pdf(
        [page("x", size=size) for size in odd] + [page("x", RED, Rotate="90", CropBox="[0 0 90 40]")]
    )
    sizes = page_sizes(source, dpi=dpi)
    pictures = [render(source, number, dpi) for number in range(1, 6)]
    assert [picture.size for picture in pictures] == sizes
    assert page_sizes(source, [5, 1], dpi) == [sizes[4], sizes[0]]
    assert sizes[4][1] > sizes[4][0]
    assert {picture.mode for picture in pictures} == {"RGB"}


def test_a_rotated_page_is_upright_and_blank_is_white():
    turned = render(pdf([page("", RED, Rotate="90")]), 1)
    assert turned.size == (200, 400)
    assert corner(turned) == (255, 255, 255)
    assert tuple(np.asarray(turned)[3, -3]) == RED
    assert np.asarray(render(pdf([page()]), 1)).min() == 255


@pytest.mark.parametrize("size", [(28346, 28346), (28346456, 28346456), (28346456, 1), (1e9, 1e-9)])
def test_a_page_of_ten_metres_is_scaled_to_the_limit(size):
    source = pdf([page("", RED, size=size)])
    ((width, height),) = page_sizes(source)
    assert 1 <= width * height <= MAX_PIXELS
    picture = render(source, 1, max_pixels=10_000)
    assert picture.width * picture.height <= 10_000
    assert [picture.size] == page_sizes(source, max_pixels=10_000)


def test_values_of_a_form_are_rendered():
    from pypdfium2 import PdfDocument

    field = "[<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(MMMMM)/DA(/F 20 Tf 0 g)/Rect[10 10 190 40]/F 4>>]"
    source = pdf([page(Annots=field)]).replace(
        b"/Type/Catalog", b"/Type/Catalog/AcroForm<</Fields[]/NeedAppearances true>>"
    )
    assert PdfDocument(source).get_formtype() != 0
    assert np.asarray(render(source, 1)).shape == (200, 400, 3)


FAULTS = {
    "nothing": b"",
    "text": b"What is this?",
    "no pages": pdf([]),
    "encrypted": pdf([page("x")], PASSWORD_NEEDED),
    "cut": b"%PDF-1.4\n" + bytes(500),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("read", [num_pages, page_sizes, texts, lambda source: render(source, 1)])
def test_what_cannot_be_opened_is_named(fault, read, tmp_path):
    path = tmp_path / "x.pdf"
    path.write_bytes(FAULTS[fault])
    for source in (str(path), FAULTS[fault]):
        with pytest.raises(PdfError) as caught:
            read(source)
        assert caught.value.file == (source if isinstance(source, str) else f"<{len(source)} bytes>")
        assert caught.value.place is None
    assert ("encrypted" in caught.value.reason) == (fault == "encrypted")
    assert ("no pages" in caught.value.reason) == (fault == "no pages")


@pytest.mark.parametrize("path", ["missing.pdf", "", "a\0b.pdf", "/dev/zero", "."])
def test_what_is_no_file_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PdfError) as caught:
        num_pages(path)
    assert caught.value.file == path


@pytest.mark.parametrize("number", [0, -1, 4])
def test_a_page_that_is_not_there_is_named(book, number):
    for read in (
        lambda: render(book, number),
        lambda: page_sizes(book, [number]),
        lambda: texts(book, [number]),
    ):
        with pytest.raises(PdfError) as caught:
            read()
        assert (caught.value.file, caught.value.place) == (book, number)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (type(copy), copy.place, str(copy)) == (PdfError, number, str(caught.value))


def test_a_damaged_page_is_named_and_its_neighbours_are_read():
    source = THREE.replace(b"5 0 obj\n<</Type/Page/", b"5 0 obj\n[1/Type/Page/")
    assert corner(render(source, 1)) == RED
    with pytest.raises(PdfError) as caught:
        render(source, 2)
    assert caught.value.place == 2


def test_a_replaced_file_is_read_again(book):
    assert corner(render(book, 1)) == RED
    Path(book).write_bytes(pdf([page("new page", BLUE)]))
    assert (corner(render(book, 1)), num_pages(book)) == (BLUE, 1)


def test_few_documents_stay_open(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.pdf").write_bytes(THREE)
        num_pages(str(tmp_path / f"{number}.pdf"))
    assert len(reader._open) == reader.OPEN_DOCUMENTS


def test_threads_take_turns(book, tmp_path):
    other = str(tmp_path / "other.pdf")
    Path(other).write_bytes(pdf([page("", BLUE)]))
    jobs = [(book, 1, RED), (other, 1, BLUE), (book, 2, GREEN), (THREE, 3, BLUE)] * 10
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: corner(render(job[0], job[1], 30)), jobs))
    assert found == [job[2] for job in jobs]


def _child(book: str, results) -> None:
    results.put([corner(render(book, number)) for number in (3, 2, 1)])


def test_forked_workers_open_the_document_again(book):
    """While another thread renders: the child must not inherit a lock that nobody releases, nor share a place in the file."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    stop = threading.Event()

    def keep_rendering() -> None:
        while not stop.is_set():
            render(book, 1)

    thread = threading.Thread(target=keep_rendering)
    thread.start()
    try:
        children = [context.Process(target=_child, args=(book, results)) for _ in range(3)]
        for child in children:
            child.start()
        found = [results.get(timeout=60) for _ in children]
    finally:
        stop.set()
        thread.join()
    for child in children:
        child.join(60)
    assert found == [[BLUE, GREEN, RED]] * 3


def test_a_document_of_2415_pages_takes_little(tmp_path):
    path = tmp_path / "manual.pdf"
    path.write_bytes(pdf([page(str(number)) for number in range(1, 2416)]))
    start = time.process_time()
    assert len(page_sizes(str(path))) == 2415
    assert texts(str(path), [2415])[0].strip() == "2415"
    assert render(str(path), 2415).size == (400, 200)
    assert time.process_time() - start < 5


def test_bookmarks_and_printed_numbers():
    source = pdf([page(), page(), page("x"), page()], bookmarks=[("One", 3), ("Two", 4)], num_roman=2)
    assert outline(source).bookmarks == [(0, "One", 3), (0, "Two", 4)]
    assert outline(source).labels == ["i", "ii", "1", "2"]
    assert outline(THREE) == ([], ["1", "2", "3"])


def test_pictures_in_a_page_are_counted_as_stored(monkeypatch):
    """They are decoded whole, however small they are shown."""
    file = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(file, "PDF", resolution=3000)
    assert page_sizes(file.getvalue(), dpi=72) == [(72, 48)]
    assert picture_pixels(file.getvalue(), 1) == 6_000_000
    assert picture_pixels(THREE, 1) == 0
    monkeypatch.setattr(reader, "MAX_OBJECTS", 1)
    with pytest.raises(PdfError) as caught:
        picture_pixels(THREE, 2)
    assert caught.value.place == 2

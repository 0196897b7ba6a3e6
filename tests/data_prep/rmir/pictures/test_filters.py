"""Filters for what pictures show: of faces, of text, of the user's own; never silently absent."""

import shutil
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures import filters
from data_prep.rmir.pictures.library import Library, inspect
from rge.common.errors import UserError


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three plain pictures in a folder, and a module that objects to dark ones."""
    for name, colour in (("black", 0), ("grey", 120), ("white", 255)):
        Image.new("L", (64, 64), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "my_filters_of_people.py").write_text(
        "def dark(image):\n    return 'dark' if image.convert('L').getextrema()[1] < 50 else None\n"
        "def wrong(image):\n    return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    filters.load_filter.cache_clear()


def looked_at(folder, *names):
    config = LibraryConfig(path=str(folder), filters=list(names))
    return {row["id"]: row["reason"] for row in inspect(list(Library(config).rows()), config).to_pylist()}


def test_ones_own_filter_leaves_pictures_out_with_its_reason(three):
    assert looked_at(three, "my_filters_of_people:dark") == {"black": "dark", "grey": None, "white": None}
    assert looked_at(three) == {"black": None, "grey": None, "white": None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noses", "must be of faces, text, or module:function; got 'noses'"),
        ("my_filters_of_people:light", "has no function light"),
        ("nowhere_at_all:f", "no module of that name"),
    ],
)
def test_a_filter_that_is_not_there_is_an_error_before_a_picture_is_opened(three, name, message):
    with pytest.raises(UserError, match=message):
        looked_at(three, name)


def test_what_a_filter_needs_is_named(three, monkeypatch):
    monkeypatch.setenv("PATH", str(three))
    with pytest.raises(UserError, match="text needs the program tesseract"):
        looked_at(three, "text")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match="faces needs OpenCV"):
        looked_at(three, "faces")


def test_an_answer_that_is_no_reason_is_an_error(three):
    with pytest.raises(UserError, match="must return a reason or None, got bool"):
        filters.unwanted(Image.new("RGB", (9, 9)), ["my_filters_of_people:wrong"])


def written(text):
    image = Image.new("RGB", (640, 200), "white")
    ImageDraw.Draw(image).multiline_text((20, 30), text, fill="black", font=ImageFont.load_default(40))
    return image


def test_tesseracts_words_are_counted(three, monkeypatch):
    """A program that prints what tesseract prints: four sure words; three of them; not sure; signs."""
    head = "\t".join("abcdefghij") + "\tconf\ttext"
    for words, reason in (
        (["96 open", "91.5 the", "88 door", "77 now"], "shows text"),
        (["96 open", "91 the", "88 door"], None),
        (["96 open", "91 the", "88 door", "59 now"], None),
        (["96 |", "96 -", "96 .", "96 _", "-1 "], None),
    ):
        rows = ["\t".join([*"123456789", "0", *word.split(" ", 1)]) for word in words]
        program = three / "tesseract"
        program.write_text(
            "#!/bin/sh\n[ $OMP_THREAD_LIMIT = 1 ] || exit 1\ncat > /dev/null\ncat <<'X'\n"
            + "\n".join([head, *rows])
            + "\nX\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(three), prepend=":")
        filters.load_filter.cache_clear()
        assert filters.unwanted(written("x"), ["text"]) == reason
    program.write_text("#!/bin/sh\necho no such language >&2\nexit 1\n")
    with pytest.raises(UserError, match="tesseract failed: no such language"):
        filters.unwanted(written("x"), ["text"])


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_the_real_tesseract_tells_writing_from_a_drawing():
    assert filters.unwanted(written("Please open this door\nbefore noon today"), ["text"]) == "shows text"
    drawing = Image.new("RGB", (300, 200), "white")
    ImageDraw.Draw(drawing).ellipse((60, 30, 220, 170), fill="green")
    assert filters.unwanted(drawing, ["text"]) is None


def test_opencv_tells_a_face_from_noise():
    pytest.importorskip("cv2")
    face = Image.new("L", (200, 200), 90)
    pen = ImageDraw.Draw(face)
    pen.ellipse((45, 20, 155, 180), fill=200)
    for x in (75, 125):
        pen.ellipse((x - 16, 74, x + 16, 94), fill=70)
        pen.rectangle((x - 18, 60, x + 18, 68), fill=80)
    pen.polygon([(100, 85), (90, 122), (110, 122)], fill=225)
    pen.ellipse((78, 136, 122, 152), fill=90)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8))
    from PIL import ImageFilter

    assert filters.unwanted(face.filter(ImageFilter.GaussianBlur(3)), ["faces"]) == "shows a face"
    assert filters.unwanted(noise, ["faces"]) is None


def test_the_card_names_what_ran_and_what_did_not():
    assert filters.described([]) == "No filter ran over the pictures. Not looked for: faces and text."
    some = filters.described(["faces", "mine:f"])
    assert some.startswith(
        "Filters that ran over every picture: faces (OpenCV's Haar cascade for frontal faces), mine:f."
    )
    assert some.endswith("Not looked for: text.")

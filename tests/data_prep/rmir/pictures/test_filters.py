"""Filters of the user's own for what pictures show; never silently absent."""

import pytest
from faults import error_about
from PIL import Image

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.library import Library, inspect, load_filter, unwanted
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
    load_filter.cache_clear()


def looked_at(folder, *names):
    config = LibraryConfig(path=str(folder), filters=list(names))
    return {row["id"]: row["reason"] for row in inspect(list(Library(config).rows()), config)}


def test_ones_own_filter_leaves_pictures_out_with_its_reason(three):
    assert looked_at(three, "my_filters_of_people:dark") == {"black": "dark", "grey": None, "white": None}
    assert looked_at(three) == {"black": None, "grey": None, "white": None}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("noses", "library.filters"),
        ("my_filters_of_people:light", "my_filters_of_people"),
        ("my_filters_of_people:", "my_filters_of_people"),
        ("nowhere_at_all:f", "plugins"),
    ],
)
def test_a_filter_that_is_not_there_is_an_error_before_a_picture_is_opened(three, name, field):
    with error_about(UserError, field):
        looked_at(three, name)


def test_an_answer_that_is_no_reason_is_an_error(three):
    with error_about(UserError, "my_filters_of_people:wrong"):
        unwanted(Image.new("RGB", (9, 9)), ["my_filters_of_people:wrong"])

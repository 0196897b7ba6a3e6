"""What a name in a table may mean as the path of a picture."""

import os
import unicodedata

import pytest

from rge.tables.names import resolved, spellings, web_address


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "my photos"
    (home / "sub").mkdir(parents=True)
    for name in (
        "a b.png",
        "sub/c.png",
        "a\u200db.png",
        unicodedata.normalize("NFD", "Tür.png"),
        "1a2b3c4d-d.png",
        "e.png",
    ):
        (home / name).write_bytes(b"x")
    return home


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (" a b.png ", "a b.png"),
        ("a%20b.png", "a b.png"),
        ("sub\\c.png", "sub/c.png"),
        (".\\sub\\c.png", "./sub/c.png"),
        ("C:\\Users\\me\\my photos\\sub\\c.png", "sub/c.png"),
        ("file:///C:/Users/me/my%20photos/sub/c.png", "sub/c.png"),
        ("FILE:sub/c.png", "sub/c.png"),
        ("a\u200db.png", "a\u200db.png"),
        ("T\u00fcr.png", "Tu\u0308r.png"),
        ("/data/local-files/?d=a%20b.png", "a b.png"),
        ("/data/local-files/?d=my%20photos/sub/c.png", "sub/c.png"),
        ("http://labels.example:8080/data/local-files/?d=a%20b.png", "a b.png"),
        ("/data/upload/3/1a2b3c4d-d.png", "1a2b3c4d-d.png"),
        ("/data/upload/3/1a2b3c4d-e.png", "e.png"),
    ],
)
def test_names_from_elsewhere_find_their_files(folder, name, file):
    assert resolved(name, str(folder)) == os.path.join(folder, file)


def test_a_file_of_exactly_the_name_comes_first(folder):
    for name in ("a%20b.png", " a b.png ", "sub\\c.png", "file:x.png", "ab.png"):
        (folder / name).write_bytes(b"y")
        assert resolved(name, str(folder)) == os.path.join(folder, name)
    (folder / "x.png").write_bytes(b"y")
    assert resolved("file:x.png", str(folder)) == os.path.join(folder, "file:x.png")


def test_absolute_addresses_of_files(folder, tmp_path):
    path = tmp_path / "my photos" / "a b.png"
    for name in (path.as_uri(), f"file://localhost{path}", f" {path}", str(path)):
        assert resolved(name, "elsewhere") == str(path)
    (tmp_path / "lib.parquet").write_bytes(b"")
    assert resolved("lib.parquet#x%20y", str(tmp_path)) == f"{tmp_path}/lib.parquet#x%20y"
    assert resolved(".\\lib.parquet#7", str(tmp_path)) == f"{tmp_path}/./lib.parquet#7"


@pytest.mark.parametrize(
    "name", ["gone.png", "lib.parquet#3", "a\0b.png", "file://[x", "%zz", "\ud83d.png", "/data/upload/3/x"]
)
def test_a_missing_file_keeps_its_name(folder, name):
    assert resolved(name, str(folder)) == os.path.join(folder, name)


def test_addresses_on_the_web(folder):
    assert web_address(" HTTPS://Host/A%20b.png") == "https://Host/A%20b.png"
    assert web_address("a.png") is None
    assert resolved("HTTP://host/my photos/sub/c.png", str(folder)) == "http://host/my photos/sub/c.png"
    assert spellings("http://host/my photos/sub/c.png", "my photos") == []

"""Folders as people have them: on a NAS, with bins, thumbnails, links, films; on this machine and in a store."""

import os
from pathlib import Path

import fsspec
import pytest
from eval_fakes import picture
from faults import error_about

from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.library import Library
from eval.benchmarks.folder.importer import FolderOptions, import_folder
from rge.common.errors import UserError
from rge.index.sources import read_source
from rge.tables.listing import Exclude, Skipped, visible_files
from rge.tables.pictures import find, picture_files, picture_rows

PHOTOS = ("2024/a.jpg", "2024/b.jpg", "c.jpg", "d.jpg")
THUMBNAILS = ("@eaDir/c.jpg/SYNOPHOTO_THUMB_XL.jpg", "2024/@eaDir/a.jpg/SYNOPHOTO_THUMB_M.jpg")
NOT_ITEMS = (
    *THUMBNAILS, "#recycle/gone.jpg", "#snapshot/GMT-01/c.jpg", "@Recycle/gone.jpg", "@Recently-Snapshot/c.jpg",
    "$RECYCLE.BIN/S-1-5/$R1.jpg", "2024/.thumbnails/a.jpg", "__MACOSX/2024/a.jpg", "lost+found/e.jpg",
    "Photos Library.photoslibrary/resources/derivatives/a.jpg",
)  # fmt: skip
OTHERS = ("raw.CR2", "raw.cr2", "2024/film.mp4", "2024/a.jpg.xmp", "Thumbs.db", "LICENCE")
KINDS = "RAW: 2 .cr2; movies: 1 .mp4; sidecars: 1 .xmp; other: 1 .db, 1 without ending"


@pytest.fixture
def nas(tmp_path):
    for number, name in enumerate((*PHOTOS, *NOT_ITEMS)):
        file = tmp_path / "nas" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    for name in OTHERS:
        (tmp_path / "nas" / name).write_bytes(b"x")
    return tmp_path / "nas"


def imported(nas, **more):
    (nas / "queries.csv").write_text("text,right\nwhat,c.jpg\n")
    return import_folder(FolderOptions(src=nas, out=nas.parent / "set", overwrite=True, **more))


def test_every_command_lists_the_same_photos_of_a_nas_and_says_what_it_skips(nas):
    source = read_source(nas)
    assert tuple(entry.id for entry in source.entries) == PHOTOS
    assert str(source.skipped).startswith(f"{KINDS}; excluded: 2 @eaDir/, 1 "), source.skipped
    assert source.skipped.excluded.total() == 10, "nothing is listed of a hidden folder"
    assert not source.faults
    library = Library(LibraryConfig(path=str(nas)))
    assert sorted(row["ref"] for row in library.rows()) == sorted(str(nas / name) for name in PHOTOS)
    assert str(library.skipped()) == str(source.skipped)
    found = imported(nas)
    assert sorted(found.corpus_ids) == sorted(PHOTOS)
    assert found.meta["notes"] == [f"skipped, since they are no pictures: {source.skipped}"]


def test_a_raw_picture_that_a_query_names_is_told_from_a_missing_one(nas):
    (nas / "queries.csv").write_text("text,right\nwhat,raw.cr2\nwhat,gone.cr2\n")
    with pytest.raises(UserError) as error:
        import_folder(FolderOptions(src=nas, out=nas.parent / "set"))
    assert [line.split(": ")[:2] for line in error.value.reason.splitlines()[1:]] == [
        ["B2", "raw.cr2"],
        ["B3", "gone.cr2"],
    ]


def test_patterns_leave_out_more_and_bring_back(nas):
    patterns = ("2024/", "#recycle", "d.*", "!@eaDir/")
    wanted = ["@eaDir/c.jpg/SYNOPHOTO_THUMB_XL.jpg", "c.jpg"]
    assert [entry.id for entry in read_source(nas, exclude=patterns).entries] == wanted
    refs = [row["ref"] for row in Library(LibraryConfig(path=str(nas), exclude=[*patterns])).rows()]
    assert sorted(refs) == sorted(str(nas / name) for name in wanted)
    assert sorted(imported(nas, exclude=patterns).corpus_ids) == sorted(wanted)


@pytest.mark.parametrize("pattern", ["", "!", " ", "a\\"])
def test_what_is_no_pattern_is_refused(nas, pattern):
    with error_about(UserError, "exclude"):
        read_source(nas, exclude=(pattern,))


def test_a_store_is_listed_like_a_folder(nas):
    store = fsspec.filesystem("memory")
    store.put(str(nas), "/nas", recursive=True)
    patterns = ("b.jpg", "!@eaDir/", "2024/@eaDir/")
    there, here = Skipped(), Skipped()
    try:
        files = find("memory:///nas", patterns)
        in_store = [path for path, _ in picture_files(store, "/nas", False, files.exclude, there)]
        assert [row.cells["image"] for row in picture_rows(files)] == [
            f"memory://{path}" for path in in_store
        ]
    finally:
        store.rm("/nas", recursive=True)
    local = [path for path, _ in picture_files(None, str(nas), True, Exclude(patterns), here)]
    assert sorted(in_store) == sorted(f"/nas/{Path(path).relative_to(nas).as_posix()}" for path in local)
    assert len(local) == 4
    assert there.endings == here.endings
    assert there.excluded.keys() == here.excluded.keys(), "a store counts files, a folder the folder"


def test_a_folder_without_pictures_says_what_it_holds(nas):
    for name in PHOTOS:
        (nas / name).unlink()
    for find_none in (read_source, lambda path: find(str(path)), imported):
        with pytest.raises(UserError) as caught:
            find_none(nas)
        assert all(word in caught.value.reason for word in ("2 .cr2", "1 .mp4", "@eaDir/"))


def test_visible_files_follow_links_once_and_leave_out_what_is_hidden(tmp_path):
    root, elsewhere = tmp_path / ".photos", tmp_path / "elsewhere"
    for name in ("b.png", "a/c.png", "._b.png", ".thumbnails/b.png", "a/.c.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    elsewhere.mkdir()
    (elsewhere / "d.png").write_bytes(b"")
    (root / "linked").symlink_to(elsewhere)
    (root / "loop").symlink_to(root)
    (root / "a" / "again").symlink_to(elsewhere)
    found = [(os.path.relpath(folder, root), names) for folder, names in visible_files(root)]
    assert found == [(".", ["b.png"]), ("a", ["c.png"]), ("a/again", ["d.png"])]
    # As `rge index`, `rmir` and a folder's benchmark list it.
    paths = [path for path, _ in picture_files(None, str(root), True)]
    assert [os.path.relpath(path, root) for path in paths] == ["b.png", "a/c.png", "a/again/d.png"]
    with pytest.raises(FileNotFoundError):
        next(visible_files(tmp_path / "nowhere"))
    errors = []
    assert not list(visible_files(tmp_path / "nowhere", errors.append))
    assert [type(error) for error in errors] == [FileNotFoundError]


def test_hidden_files_of_an_object_store_are_no_pictures():
    store = fsspec.filesystem("memory")
    for name in ("b.png", "._b.png", ".cache/b.png", "a/c.png"):
        store.pipe(f"/of.hidden/{name}", b"x")
    try:
        found = [path for path, _ in picture_files(store, "/of.hidden", False)]
    finally:
        store.rm("/of.hidden", recursive=True)
    assert found == ["/of.hidden/b.png", "/of.hidden/a/c.png"]


@pytest.mark.parametrize("address", ["memory://", ""])
def test_hidden_tables_and_archives_are_no_part_of_a_collection(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    fs, root = fsspec.core.url_to_fs(f"{address}shards")
    top = root if address else "shards"
    for name in (
        "1.parquet",
        "._1.parquet",
        ".ipynb_checkpoints/1.parquet",
        "more/2.parquet",
        "more/._2.parquet",
    ):
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe(f"{root}/{name}", b"x")
    try:
        assert find(f"{address}shards").paths == (f"{top}/1.parquet", f"{top}/more/2.parquet")
        assert find(f"{address}shards/*.parquet").paths == (f"{top}/1.parquet",)
        assert find(f"{address}shards/**/*.parquet").paths == (f"{top}/1.parquet", f"{top}/more/2.parquet")
    finally:
        fs.rm(root, recursive=True)

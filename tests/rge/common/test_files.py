"""Files that are there whole or not at all."""

import os
import resource

import forked
import fsspec
import pytest

from rge.common import files
from rge.common.files import (
    FileError,
    relative,
    replacing,
    replacing_folder,
    write_bytes,
    write_json,
    write_text,
)
from rge.tables.pictures import find, picture_files


def test_what_is_written_is_there(tmp_path):
    path = tmp_path / "a new folder" / "with spaces.json"
    write_json(path, {"ü": [1]})
    assert path.read_bytes() == '{\n "ü": [\n  1\n ]\n}\n'.encode()
    write_text(path, "once more")
    assert path.read_text() == "once more"
    write_bytes(path, b"\0")
    assert [file.name for file in path.parent.iterdir()] == ["with spaces.json"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")

    def fail():
        with replacing(path) as waiting:
            waiting.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


def test_a_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(FileError, match="a cannot be written: File too large"):
            write_text(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(FileError, match="cannot be written: Not a directory|cannot be written: File exists"):
        write_text(path / "below", "x")


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "a", "old")
    (tmp_path / "write.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rge.common.files import replacing\n"
        "with replacing(sys.argv[1]) as waiting:\n"
        "    waiting.write_text('half')\n"
        "    Path(sys.argv[2]).touch()\n"
        "    time.sleep(600)\n"
    )
    with forked.Program(tmp_path / "write.py", tmp_path / "a", tmp_path / "written") as program:
        program.wait_until((tmp_path / "written").exists)
        program.kill()
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("out", [".", "..", "{here}"])
def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch, out):
    """Not even if it is empty: whoever started the command would be in a deleted folder."""
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(FileError, match="is or contains the current folder, so it cannot be replaced"):
        with replacing_folder(out.format(here=here), overwrite=True):
            raise AssertionError("unreachable")
    assert here.is_dir()


def test_a_relative_path_is_found_from_behind_links(tmp_path):
    """Both the folder and a folder above the file are links to places of another depth."""
    for real, link in (("deep/er/out", "out"), ("pictures/of/mine", "mine")):
        (tmp_path / real).mkdir(parents=True)
        (tmp_path / link).symlink_to(tmp_path / real)
    (tmp_path / "mine" / "a.png").write_text("a")
    (tmp_path / "mine" / "linked.png").symlink_to("a.png")
    for name in ("a.png", "linked.png"):
        found = relative(tmp_path / "mine" / name, tmp_path / "out")
        assert found == f"../../../pictures/of/mine/{name}", "the file's own name stays"
        assert (tmp_path / "out" / found).read_text() == "a"


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
    found = [(os.path.relpath(folder, root), names) for folder, names in files.visible_files(root)]
    assert found == [(".", ["b.png"]), ("a", ["c.png"]), ("a/again", ["d.png"])]
    # As `rge index`, `rmir` and a folder's benchmark list it.
    paths = [path for path, _ in picture_files(None, str(root), True)]
    assert [os.path.relpath(path, root) for path in paths] == ["b.png", "a/c.png", "a/again/d.png"]
    with pytest.raises(FileNotFoundError):
        next(files.visible_files(tmp_path / "nowhere"))
    errors = []
    assert not list(files.visible_files(tmp_path / "nowhere", errors.append))
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

"""Files that are there whole or not at all."""

import resource

import forked
import pytest
from faults import error_about

from rge.common.files import (
    FileError,
    relative,
    replacing,
    replacing_folder,
    write_bytes,
    write_json,
    write_text,
)


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

    with pytest.raises(RuntimeError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


def test_a_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with error_about(FileError, path, "unwritten"):
            write_text(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    with error_about(FileError, path / "below", "unwritten"):
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
    with error_about(FileError, "current"):
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

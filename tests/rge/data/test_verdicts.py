"""Verdicts on records and pictures, remembered: nothing is opened twice, and nothing that changed is believed."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rge.data import sources, verdicts
from rge.data.sources import RecordError, RecordFile
from rge.data.verdicts import Verdicts

THEN = time.time() - 7 * 86400


def record(name: str, picture: str) -> dict:
    return {
        "id": name, "group": "g", "source": "s", "split": "train", "query": {"text": "what", "images": [picture]},
        "positives": [{"id": f"t{name}", "image": "pictures/1.png", "rationale": "it is an egg"}],
    }  # fmt: skip


@pytest.fixture
def home(tmp_path):
    """Four records of two pictures, a week old; a folder for what is remembered."""
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "pictures" / f"{number}.png")
    write(tmp_path, *(record(f"r{number}", f"pictures/{number % 2}.png") for number in range(4)))
    return tmp_path


def write(home: Path, *records: dict) -> None:
    (home / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    age(home)


def age(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        if "kept" not in path.parts:
            os.utime(path, (THEN, THEN))


@pytest.fixture
def opened(monkeypatch):
    """Counts files that are read through, and pictures that are decoded (here, not in another process)."""
    counts = {"files": 0, "pictures": 0}
    init, load = RecordFile.__init__, verdicts.load_image

    def counting(self, *arguments, **options):
        counts["files"] += 1
        init(self, *arguments, **options)

    def decoding(ref):
        counts["pictures"] += 1
        return load(ref)

    class Here:
        def __init__(self, workers, context, initializer, initargs):
            initializer(*initargs)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def map(self, function, names, chunksize):
            return map(function, names)

    monkeypatch.setattr(RecordFile, "__init__", counting)
    monkeypatch.setattr(verdicts, "load_image", decoding)
    monkeypatch.setattr(verdicts, "ProcessPoolExecutor", Here)
    return counts


def look(home: Path, need_rationale: bool = True, on_bad: str = "stop") -> RecordFile:
    return Verdicts(home / "kept").open(home / "records.jsonl", need_rationale=need_rationale, on_bad=on_bad)


def test_what_was_read_is_not_read_again(home, opened):
    first = look(home)
    again = look(home)
    assert opened["files"] == 1
    assert [one.model_dump() for one in again] == [one.model_dump() for one in first]
    assert (again.path, again.bad, len(again)) == (first.path, [], 4)
    look(home, need_rationale=False)  # another question
    look(home, on_bad="skip")
    assert opened["files"] == 3
    look(home, on_bad="skip")
    assert opened["files"] == 3


@pytest.mark.parametrize(
    ("change", "raises"),
    [
        (lambda home: write(home, record("r9", "pictures/0.png")), False),
        (lambda home: os.utime(home / "records.jsonl", (1, 1)), False),  # of the same size
        (lambda home: (home / "pictures/0.png").unlink(), True),
        (lambda home: (home / "pictures/0.png").rename(home / "pictures/2.png"), True),
        (lambda home: (home / "pictures").rename(home / "away"), True),
    ],
)
def test_what_changed_is_read_again(home, opened, change, raises):
    look(home)
    change(home)
    if raises:
        with pytest.raises(RecordError):
            look(home)
        with pytest.raises(RecordError):  # what is bad is never remembered
            look(home)
    else:
        look(home)
    assert opened["files"] == 2 + raises


def test_pictures_that_were_overwritten_are_looked_at_again(home, opened):
    """In place, with a picture's name: the folder stays as it was."""
    look(home)
    then = (home / "pictures").stat().st_mtime_ns
    (home / "pictures/1.png").write_bytes(b"no picture")
    assert (home / "pictures").stat().st_mtime_ns == then
    look(home)
    assert opened["files"] == 2


def test_links_to_pictures_on_a_disk_that_is_gone(home, opened):
    (home / "pictures").rename(home / "disk")
    (home / "pictures").mkdir()
    for path in (home / "disk").iterdir():
        (home / "pictures" / path.name).symlink_to(path)
    age(home)
    look(home)
    look(home)
    assert opened["files"] == 1
    (home / "disk").rename(home / "unmounted")
    with pytest.raises(RecordError):
        look(home)


def test_a_folder_of_pictures_is_listed_once_whoever_asks(home, monkeypatch):
    look(home)
    listed = []
    real = os.scandir
    monkeypatch.setattr(verdicts.os, "scandir", lambda place: listed.append(str(place)) or real(place))
    found = Verdicts(home / "kept")
    for _ in range(3):
        file = found.open(home / "records.jsonl", need_rationale=True, on_bad="stop")
        found.keep_numbers(file, "lengths", np.arange(4))
        assert found.numbers(file, "lengths").tolist() == [0, 1, 2, 3]
    assert listed == [str(home / "pictures")]


def test_what_changed_a_moment_ago_may_change_unseen_and_is_not_remembered(home, opened):
    os.utime(home / "records.jsonl")
    look(home)
    look(home)
    assert opened["files"] == 2
    age(home)
    os.utime(home / "pictures")
    look(home)
    look(home)
    assert opened["files"] == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", "about", "numbers"])
def test_a_damaged_cache_counts_as_none(home, opened, damage):
    look(home)
    [path] = (home / "kept").glob("*.npz")
    whole = bytearray(path.read_bytes())
    if isinstance(damage, str):  # one bit of an array
        whole[whole.index(b"\x93NUMPY", whole.index(damage.encode())) + 140] ^= 1
    path.write_bytes(whole if isinstance(damage, str) else damage)
    assert [one.id for one in look(home)] == ["r0", "r1", "r2", "r3"]
    assert opened["files"] == 2
    look(home)
    assert opened["files"] == 2


def test_another_version_judges_anew(home, opened, monkeypatch):
    look(home)
    monkeypatch.setattr(verdicts, "version_of", lambda *_: "another")
    look(home)
    assert opened["files"] == 2


def test_nothing_is_remembered_where_nothing_can_be_written(home, opened):
    for _ in range(2):
        file = Verdicts(Path("/dev/null/nowhere")).open(
            home / "records.jsonl", need_rationale=True, on_bad="stop"
        )
        assert Verdicts(Path("/dev/null/nowhere")).undecodable([file]) == []
    assert opened == {"files": 2, "pictures": 4}


def test_what_is_left_out_is_remembered_too(home, opened):
    write(home, *(record(f"r{number}", f"pictures/{number}.png") for number in range(3)))
    first, again = look(home, on_bad="skip"), look(home, on_bad="skip")
    assert opened["files"] == 1
    assert [bad.id for bad in again.bad] == ["r2"]
    assert again.bad == first.bad
    Image.new("RGB", (8, 8)).save(home / "pictures/2.png")
    assert look(home, on_bad="skip").bad == []


def test_many_places_are_on_the_disk(home, opened, monkeypatch):
    monkeypatch.setattr(sources, "SPILL_BYTES", 8)
    first, again = look(home), look(home)
    assert isinstance(again.offsets, np.memmap)
    assert (again.offsets == first.offsets).all()


def test_a_picture_is_decoded_once_for_each_state(home, opened):
    def faults() -> list[str]:
        found = Verdicts(home / "kept")
        return found.undecodable([found.open(home / "records.jsonl", need_rationale=True, on_bad="stop")])

    assert faults() == faults() == []
    assert opened["pictures"] == 2
    cut = (home / "pictures/0.png").read_bytes()[:40]
    (home / "pictures/0.png").write_bytes(cut)
    for _ in range(2):  # a bad one is looked at again
        [fault] = faults()
        assert "record 'r0': picture" in fault
        assert "pictures/0.png: it cannot be decoded" in fault
    assert opened["pictures"] == 4
    Image.new("RGB", (8, 8), (9, 9, 9)).save(home / "pictures/0.png")
    age(home)
    assert faults() == faults() == []
    assert opened["pictures"] == 5
    for path in (home / "kept").glob("*.npz"):
        path.write_bytes(b"not numbers")
    assert faults() == []
    assert opened["pictures"] == 7


def test_pictures_are_decoded_in_other_processes(home):
    (home / "pictures/1.png").write_bytes(b"no picture")
    for _ in range(2):
        found = Verdicts(home / "kept")
        file = found.open(home / "records.jsonl", need_rationale=True, on_bad="stop")
        [fault] = found.undecodable([file])
        assert (
            f"{home}/records.jsonl: record 'r0': picture {home}/pictures/1.png: it cannot be decoded" in fault
        )


def test_a_killed_process_is_an_error_that_blames_no_picture_and_what_was_found_is_kept(home, monkeypatch):
    write(home, record("r0", "pictures/0.png"), record("r1", "pictures/late.png"))
    (home / "pictures/1.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(home / "pictures/late.png")
    age(home)
    load = verdicts.load_image

    def killed(ref):
        if "late" in str(ref):
            time.sleep(1)  # until the others are done
            os.kill(os.getpid(), signal.SIGKILL)
        return load(ref)

    monkeypatch.setattr(verdicts, "CHUNK", 1)
    monkeypatch.setattr(verdicts, "load_image", killed)
    found = Verdicts(home / "kept")
    file = found.open(home / "records.jsonl", need_rationale=True, on_bad="stop")
    broken, died = found.undecodable([file])
    assert "pictures/1.png: it cannot be decoded" in broken
    assert died.startswith(
        f"pictures from {home}/records.jsonl: record 'r0' on could not be checked: one of "
    )
    assert "if memory ran out, give the command fewer cores" in died
    assert len(found._cached(found._entry(home / "records.jsonl", "pictures"))[1]) == 1


def test_what_nobody_asks_for_is_forgotten_after_a_while(home):
    look(home)
    old = {path.name for path in (home / "kept").iterdir()}
    look(home, on_bad="skip")
    for name in old:
        os.utime(home / "kept" / name, (1, 1))
    look(home, need_rationale=False)
    left = {path.name for path in (home / "kept").iterdir()}
    assert not left & old
    assert len(left) == 2
    look(home, on_bad="skip")
    assert {path.name for path in (home / "kept").iterdir()} == left


def test_where_it_is_kept(monkeypatch):
    monkeypatch.setenv("RGE_CACHE", "/a")
    assert verdicts.cache_folder() == Path("/a")
    monkeypatch.delenv("RGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert verdicts.cache_folder() == Path("/b/rge")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert verdicts.cache_folder() == Path("/c/.cache/rge")

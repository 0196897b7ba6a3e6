"""`rge embed`, `rge index` and `rge search`, on folders and tables as people have them."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from paths import ROOT

pytest.importorskip("lancedb", exc_type=ImportError)

from PIL import Image

from rge.common import commands
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT as DEMO
from rge.common.options import positional
from rge.embedder import Embedder
from rge.index import __main__ as index_command
from rge.index.__main__ import main as index
from rge.index.embed import main as embed
from rge.index.reading import Reader
from rge.index.search import main as search
from rge.index.sources import SourceError, read_source
from rge.index.store import Index, SearchIndexError

COLOURS = ("red", "green", "blue", "gold", "teal", "plum")


def vectors(index, source, ids):
    """Stored vectors by id."""
    digests = index.known(source)
    return {name: index.vectors_of([digests[name][1]])[digests[name][1]] for name in ids}


@pytest.fixture(scope="module")
def demo():
    return Embedder.from_pretrained("demo")


@pytest.fixture(autouse=True)
def one_model(demo, monkeypatch):
    """Loading takes half a second, and these commands load one each."""
    plain = Embedder.from_pretrained.__func__

    def known(cls, checkpoint, **options):
        return demo if checkpoint == "demo" and not options else plain(cls, checkpoint, **options)

    monkeypatch.setattr(Embedder, "from_pretrained", classmethod(known))


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder with a space in its name: pictures, a caption, a text of its own, a file of another kind, a hidden one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pho tos"
    (folder / "sub").mkdir(parents=True)
    for place, colour in enumerate(COLOURS):
        Image.new("RGB", (40 + place, 50), colour).save(
            folder / ("sub" if place % 2 else "") / f"{colour}.png"
        )
    (folder / "red.txt").write_text("Rote Wand, größer\n", encoding="utf-8")
    (folder / "sub" / "notes.txt").write_text("a padlock")
    (folder / "film.mp4").write_bytes(b"film")
    (folder / ".hidden.png").write_bytes(b"x")
    return folder


def names(at="gallery"):
    [(source, _)] = Index.open(at).sources().items()
    return sorted(Index.open(at).known(source))


def counted(monkeypatch):
    """How many prompts each call embeds."""
    embedded, real = [], Embedder.encode_prompts
    monkeypatch.setattr(
        Embedder, "encode_prompts", lambda self, prompts, **more: embedded.append(len(prompts)) or real(self, prompts, **more)
    )  # fmt: skip
    return embedded


EVERYTHING = [
    "blue.png",
    "red.png",
    "sub/gold.png",
    "sub/green.png",
    "sub/notes.txt",
    "sub/plum.png",
    "teal.png",
]


@pytest.mark.slow
def test_only_what_changed_is_embedded(photos, capsys, demo, monkeypatch):
    embedded = counted(monkeypatch)

    def run(*words):
        embedded.clear()
        assert index(["pho tos", "out=gallery", *words]) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert run("checkpoint=demo") == ("gallery: 7 added, 0 changed, 0 removed, 0 unchanged; 7 items")
    assert names() == EVERYTHING
    assert run().startswith("gallery: 0 added, 0 changed, 0 removed, 7 unchanged")
    assert embedded == []
    # Touched, and another caption: nothing of what is embedded changes, but what is shown does.
    os.utime(photos / "blue.png", (1, 1))
    (photos / "red.txt").write_text("Another caption")
    assert run().startswith("gallery: 0 added, 0 changed, 0 removed, 7 unchanged")
    assert embedded == []
    found = {hit.id: hit for hit in Index.open("gallery").search(np.eye(1, 128, dtype=np.float32), 9)[0]}
    assert found["red.png"].text == "Another caption"
    assert found["sub/notes.txt"].text == "a padlock"
    # Changed, new and gone.
    Image.new("RGB", (44, 50), "black").save(photos / "blue.png")
    Image.new("RGB", (44, 50), "white").save(photos / "new.png")
    (photos / "sub" / "notes.txt").unlink()
    assert run().startswith("gallery: 1 added, 1 changed, 1 removed, 5 unchanged; 7 items")
    assert embedded == [2]
    # Equal to the embedder's own.
    vector = vectors(Index.open("gallery"), str(photos), ["blue.png"])["blue.png"]
    np.testing.assert_allclose(vector, demo.encode_document(images=photos / "blue.png"), atol=1e-5)


@pytest.mark.slow
def test_what_is_renamed_or_there_twice_is_embedded_once(photos, capsys, monkeypatch, demo):
    embedded = counted(monkeypatch)
    shutil.copy(photos / "blue.png", photos / "copy of blue.png")
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    assert embedded == [7]  # of eight
    before = vectors(Index.open("gallery"), str(photos), ["blue.png", "copy of blue.png"])
    np.testing.assert_array_equal(before["blue.png"], before["copy of blue.png"])
    capsys.readouterr()
    (photos / "blue.png").rename(photos / "sub" / "azure.png")
    shutil.copytree(photos, "second")
    index(["pho tos", "out=gallery"])
    assert capsys.readouterr().out.startswith(
        "gallery: 1 added, 0 changed, 1 removed, 7 unchanged, 1 not embedded again: their content is already in the index; 8 items"
    )
    index(["second", "out=gallery"])
    assert "8 added, 0 changed, 0 removed, 0 unchanged, 8 not embedded again" in capsys.readouterr().out
    assert embedded == [7]
    after = vectors(Index.open("gallery"), str(photos), ["sub/azure.png"])
    np.testing.assert_array_equal(after["sub/azure.png"], before["blue.png"])


@pytest.mark.slow
def test_names_that_move_on_by_one_keep_their_vectors(photos, capsys, monkeypatch, demo):
    """As after `mv`, number by number: each row is replaced before the next one needs its content."""
    names = [f"{number:02d}.png" for number in range(12)]
    for number, name in enumerate(names[:-1]):
        Image.new("RGB", (40, 50), (20 * number, 0, 0)).save(photos / name)
    index(["pho tos", "out=gallery", "checkpoint=demo", "batch_size=1"])
    before = vectors(Index.open("gallery"), str(photos), names[:-1])
    for old, new in reversed([*itertools.pairwise(names)]):
        (photos / old).rename(photos / new)
    embedded = counted(monkeypatch)
    capsys.readouterr()
    assert index(["pho tos", "out=gallery", "batch_size=1"]) == 0
    assert "1 added, 10 changed, 1 removed, 7 unchanged, 11 not embedded again" in capsys.readouterr().out
    assert embedded == []
    after = vectors(Index.open("gallery"), str(photos), names[1:])
    for old, new in itertools.pairwise(names):
        np.testing.assert_array_equal(after[new], before[old])


def exif(taken, latitude=None):
    made = Image.Exif()
    made[0x8769] = {0x9003: taken}
    if latitude:
        made[0x8825] = {1: "S", 2: latitude, 3: "E", 4: (12.0, 30.0, 0.0)}
    return made


@pytest.mark.slow
def test_a_phones_folder(tmp_path, monkeypatch, capsys, demo):
    """Eight JPEG, a HEIC, a GIF and an AVIF, with the EXIF that phones write."""
    pillow_heif = pytest.importorskip("pillow_heif")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "DCIM"
    (folder / "Rome").mkdir(parents=True)
    for place, colour in enumerate([*COLOURS, "black", "white"]):
        at = folder / ("Rome" if place < 3 else "") / f"IMG_{place}.JPG"
        Image.new("RGB", (64, 48), colour).save(
            at, exif=exif(f"202{place}:05:0{place + 1} 10:00:00", (41.0, 54.0, 0.0))
        )
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), "orange")).save(
        folder / "IMG_8.HEIC", exif=exif("2024:12:24 18:00:00")
    )
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("pink", "brown")]
    frames[0].save(folder / "IMG_9.gif", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "IMG_10.avif", exif=exif("0000:00:00 00:00:00"))
    assert index(["DCIM", "out=gallery", "checkpoint=demo"]) == 0
    assert capsys.readouterr().out.startswith(
        "gallery: 11 added, 0 changed, 0 removed, 0 unchanged; 11 items"
    )
    held = Index.open("gallery")
    first = demo.encode_document(images=frames[0])
    np.testing.assert_allclose(vectors(held, str(folder), ["IMG_9.gif"])["IMG_9.gif"], first, atol=1e-5)
    [hits] = held.search(np.eye(1, 128, dtype=np.float32), 11)
    facts = {hit.id: hit.metadata for hit in hits}
    assert facts["Rome/IMG_2.JPG"] == {
        "taken": "2022-05-03T10:00:00", "year": 2022, "month": 5, "latitude": -41.9, "longitude": 12.5, "album": "Rome",
    }  # fmt: skip
    assert facts["IMG_8.HEIC"]["year"] == 2024
    assert facts["IMG_10.avif"] == facts["IMG_9.gif"] == {"album": "DCIM"}

    [narrowed] = held.search(np.eye(1, 128, dtype=np.float32), 20, where="year > 2023 and album = 'DCIM'")
    assert sorted(hit.id for hit in narrowed) == [f"IMG_{n}.JPG" for n in (4, 5, 6, 7)] + ["IMG_8.HEIC"]
    search(["gallery", "What is this?", "k=20", "mode=direct", "where=year = 2021"])
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["Rome/IMG_1.JPG"]
    for wrong, kind in (
        ("yeer > 1", "invalid"),
        ("year > 'a", "invalid"),
        ("image LIKE '/%'", "invalid"),
        ('"image" IS NOT NULL', "invalid"),
        ("id = 'a' /*' */ OR stamp > '0' -- '", "unreadable"),  # no text hides a column
        ("id = 'a' OR stamp > '0' -- '", "invalid"),
        ("id = $$red$$", "unreadable"),  # LanceDB panics
    ):
        with error_about(UserError, "where", kind) as caught:
            search(["gallery", "x", f"where={wrong}"])
        assert "`stamp`" not in str(caught.value)


def test_words_and_vectors_are_fused_by_rank(photos, capsys, demo):
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    held = Index.open("gallery")
    query_1D = demo.encode_query("Wand")[None]
    [plain], [fused] = held.search(query_1D, 7), held.search(query_1D, 7, words=["größer wand"])
    assert sorted(hit.id for hit in fused) == sorted(hit.id for hit in plain) == EVERYTHING
    assert fused[0].id == "red.png"  # its caption
    assert {hit.id: hit.score for hit in fused} == {hit.id: hit.score for hit in plain}
    assert held.search(query_1D, 1, words=["plum"])[0][0].id == "sub/plum.png"  # its name
    search(["gallery", "teal", "hybrid=true", "k=1", "mode=direct"])
    assert "teal.png" in capsys.readouterr().out
    assert held.search(query_1D, 3, words=['"quoted" AND (odd'])[0]


def test_the_next_window_is_prepared_while_the_device_works(photos, monkeypatch, demo):
    """A stand-in for a device that works until the next pictures are there, and counts them."""
    from rge.index.reading import Reader
    from rge.index.sources import Unreadable

    built, hidden = [], []
    build, encode = demo.builder.build_scaled, demo.encode_prompts
    monkeypatch.setattr(
        demo.builder, "build_scaled", lambda item, *rest: built.append(item.id) or build(item, *rest)
    )
    monkeypatch.setattr("rge.index.reading.WINDOW", 1)
    given = 0

    def device(prompts, **options):
        nonlocal given
        given += len(prompts)
        ready = min(given + 2, 7)
        end = time.monotonic() + 20
        while len(built) < ready and time.monotonic() < end:
            time.sleep(0.005)
        hidden.append(len(built) - given)
        return encode(prompts, **options)

    monkeypatch.setattr(demo, "encode_prompts", device)
    source = read_source(photos)
    done = [
        one.entry.id
        for window in Reader(demo, batch_size=2).embed(source.entries, Unreadable(7, 0.0))
        for one in window
    ]
    assert done == EVERYTHING
    assert hidden == [2, 2, 1, 0]


def test_watching_brings_the_index_up_to_date(photos, capsys, monkeypatch):
    monkeypatch.setattr(index_command, "WATCH_S", 0.0)
    steps = iter([
        lambda: Image.new("RGB", (44, 50), "black").save(photos / "new.png"),
        lambda: None,  # the same twice: it is finished
        lambda: photos.rename("away"),
        lambda: None,
        lambda: Path("away").rename(photos),
        lambda: (photos / "new.png").unlink(),
        lambda: None,
    ])  # fmt: skip

    def sleep(_):
        try:
            next(steps)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(index_command.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        index(["pho tos", "out=gallery", "checkpoint=demo", "watch=true"])
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if line.startswith("gallery: ")]
    assert [line.split(" unchanged")[0] for line in lines] == [
        "gallery: 7 added, 0 changed, 0 removed, 0", "gallery: 1 added, 0 changed, 0 removed, 7",
        "gallery: 0 added, 0 changed, 1 removed, 7",
    ]  # fmt: skip
    assert told.err.count("pho tos: it does not exist") == 1
    assert names() == EVERYTHING
    with error_about(UserError, "watch", "remove"):
        index(["pho tos", "out=gallery", "watch=true", "remove=true"])


def test_watching_does_not_fill_an_index_that_was_made_anew(photos, monkeypatch):
    monkeypatch.setattr(index_command, "WATCH_S", 0.0)

    def remake():
        shutil.rmtree("gallery")
        Index.create("gallery", checkpoint="mine", checkpoint_hash="b" * 64, dimensions=128)
        Image.new("RGB", (44, 50), "black").save(photos / "new.png")

    steps = iter([remake, lambda: None, lambda: None])
    monkeypatch.setattr(index_command.time, "sleep", lambda _: next(steps)())
    with pytest.raises(SystemExit):
        index(["pho tos", "out=gallery", "checkpoint=demo", "watch=true"])
    assert len(Index.open("gallery")) == 0


@pytest.mark.parametrize(
    "words", [["index", "src=pho tos", "out=file/gallery", "checkpoint=demo"], ["embed", "src=pho tos", "out=file/x.parquet", "checkpoint=demo"]]
)  # fmt: skip
def test_a_place_without_write_rights_is_one_sentence(photos, words, monkeypatch, capsys):
    Path("file").write_text("no folder")
    command = index if words[0] == "index" else embed
    monkeypatch.setattr(sys, "argv", words)
    assert commands._code_of(command) == 2
    assert re.search(
        r"error: .*file.* (cannot be used: )?.*(Not a directory|is a file)", capsys.readouterr().err
    )

    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sys, "argv", [word.replace("file/", "") for word in words])
    monkeypatch.setattr(Path, "mkdir", denied)
    assert commands._code_of(command) == 2
    assert "cannot be used: Permission denied" in capsys.readouterr().err


def test_captions_are_embedded_where_that_is_asked(photos, capsys, demo):
    index(["pho tos", "out=gallery", "checkpoint=demo", "captions=embed"])
    vector = vectors(Index.open("gallery"), str(photos), ["red.png"])["red.png"]
    both = demo.encode_document("Rote Wand, größer", photos / "red.png")
    np.testing.assert_allclose(vector, both, atol=1e-5)
    (photos / "red.txt").write_text("Another caption")
    index(["pho tos", "out=gallery"])
    assert "0 added, 1 changed" in capsys.readouterr().out
    with error_about(UserError, "captions"):
        index(["pho tos", "out=gallery", "captions=show"])


@pytest.fixture
def of_tasks(tmp_path):
    """The demo with a task of other wording and smaller pictures."""
    folder = shutil.copytree(DEMO, tmp_path / "of tasks")
    settings = json.loads((folder / "rge.json").read_text())
    settings["instructions"]["by_task"] = {"naming": "Name it.", "rest": None}
    settings["tasks"] = {"naming": {"profile": "plain", "pixels": {"min": 784, "max": 784}}}
    (folder / "rge.json").write_text(json.dumps(settings))
    return Embedder.from_pretrained(folder)


@pytest.mark.slow
def test_an_index_and_a_file_of_vectors_have_the_prompts_of_a_task(photos, of_tasks, tmp_path, capsys):
    checkpoint = f"checkpoint={of_tasks.checkpoint}"
    with pytest.raises(UserError):
        index(["pho tos", "out=gallery", checkpoint, "task=other"])
    assert not Index.exists("gallery")
    index(["pho tos", "out=gallery", checkpoint, "task=naming"])
    stored = vectors(Index.open("gallery"), str(photos), ["blue.png"])["blue.png"]
    shown = photos / "blue.png"
    named = of_tasks.encode_document(images=shown, task="naming")
    np.testing.assert_allclose(stored, named, atol=1e-5)
    assert np.abs(stored - of_tasks.encode_document(images=shown)).max() > 1e-3
    # Later calls use the index's task, and no other.
    Image.new("RGB", (44, 50), "white").save(photos / "new.png")
    index(["pho tos", "out=gallery"])
    stored = vectors(Index.open("gallery"), str(photos), ["new.png"])["new.png"]
    new = of_tasks.encode_document(images=photos / "new.png", task="naming")
    np.testing.assert_allclose(stored, new, atol=1e-5)
    with pytest.raises(SearchIndexError):
        index(["pho tos", "out=gallery", "task=rest"])
    with pytest.raises(SearchIndexError):
        search(["gallery", "a wall", "task=rest"])
    capsys.readouterr()
    query = of_tasks.encode_query("a wall", mode="direct", task="naming")
    for words in ([], ["task=naming"]):
        search(["gallery", "a wall", "mode=direct", "k=1", *words])
        [[hit]] = Index.open("gallery").search(query[None], 1)
        assert capsys.readouterr().out.split()[1:3] == [f"{hit.score:.4f}", hit.id]
    for side, expected in (
        ("document", of_tasks.encode_document("a padlock", task="naming")),
        ("query", of_tasks.encode_query("a padlock", mode="direct", task="naming")),
    ):
        embed(["pho tos", f"out={side}.parquet", checkpoint, "task=naming", f"side={side}", "mode=direct"])
        rows = {row["id"]: row["vector"] for row in pq.read_table(f"{side}.parquet").to_pylist()}
        np.testing.assert_allclose(rows["sub/notes.txt"], expected, atol=1e-5)


def test_many_unreadable_files_of_one_kind_are_one_line(tmp_path):
    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / "many" / f"{number}.png").write_bytes(b"")
    with error_about(UserError, "max_unreadable") as caught:
        index([str(tmp_path / "many"), f"out={tmp_path / 'gallery'}", "checkpoint=demo"])
    assert len(caught.value.reason.splitlines()) == 3, "one line stands for all"


def test_unreadable_files_are_counted_listed_and_fatal_beyond_a_share(photos, monkeypatch, capsys):
    (photos / "broken.png").write_bytes((photos / "red.png").read_bytes()[:60])
    (photos / "tall.png").write_bytes(b"")
    (photos / "latin.txt").write_bytes(b"\xfftext")
    Image.new("RGB", (1, 900)).save(photos / "thin.png")
    with error_about(UserError, "max_unreadable", "all"):
        index(["pho tos", "out=gallery", "checkpoint=demo", "batch_size=1"])
    with monkeypatch.context() as hurried:
        hurried.setattr("rge.index.reading.COUNTING_S", 0.0)
        hurried.setattr("rge.index.reading.WINDOW", 1)
        with error_about(UserError, "max_unreadable", "so far"):
            index(["pho tos", "out=gallery", "checkpoint=demo", "batch_size=1"])
    assert (
        index(["pho tos", "out=gallery", "checkpoint=demo", "max_unreadable=0.5", "unreadable=bad.tsv"]) == 0
    )
    listed = capsys.readouterr().err
    assert "4 of 11 items are unreadable and not in the index" in listed
    assert [line.split("\t")[0] for line in open("bad.tsv")] == [
        "broken.png",
        "latin.txt",
        "tall.png",
        "thin.png",
    ]
    assert "latin.txt: it is not UTF-8" in listed
    assert "bytes>" not in listed
    assert names() == EVERYTHING
    # What was readable and no longer is leaves the index: its vector is of something else.
    (photos / "red.png").write_bytes(b"no picture")
    index(["pho tos", "out=gallery", "max_unreadable=0.5"])
    assert "0 added, 0 changed, 1 removed, 6 unchanged" in capsys.readouterr().out


@pytest.mark.slow
def test_a_photo_of_108_megapixels_is_embedded_and_a_larger_drawing_is_one_unreadable_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").mkdir()
    Image.new("L", (12_000, 9_000), 200).save("few/phone.jpg", quality=1)
    Image.new("1", (9_500, 9_500)).save("few/plan.png")
    Image.new("RGB", (40, 30), "red").save("few/red.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        assert index(["few", "out=gallery", "checkpoint=demo"]) == 0
        assert embed(["few", "out=few.parquet", "checkpoint=demo"]) == 0
    assert names() == ["phone.jpg", "red.png"]
    assert capsys.readouterr().err.count("1 of 3 items are unreadable") == 2
    assert index(["few", "out=gallery", "max_file_pixels=100000000"]) == 0
    assert names() == ["phone.jpg", "plan.png", "red.png"]
    with error_about(UserError, "max_unreadable"):
        embed(["few", "out=strict.parquet", "checkpoint=demo", "max_unreadable=0"])


@pytest.mark.parametrize("command", [["index", "out=gallery"], ["embed", "out=x.parquet"]])
def test_unreadable_files_are_listed_also_if_the_command_is_interrupted(photos, monkeypatch, command):
    (photos / "broken.png").write_bytes(b"")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rge.index.reading.Reader.vectors", interrupted)
    run, out = {"index": index, "embed": embed}[command[0]], command[1]
    with pytest.raises(KeyboardInterrupt):
        run(["src=pho tos", out, "checkpoint=demo", "max_unreadable=0.5", "unreadable=bad.tsv"])
    assert [line.split("\t")[0] for line in open("bad.tsv")] == ["broken.png"]


def test_what_an_interrupted_command_has_embedded_is_kept(photos, monkeypatch):
    embedded, real = counted(monkeypatch), Reader.read

    def interrupted(self, *args):
        yield next(real(self, *args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index(["pho tos", "out=gallery", "checkpoint=demo", "batch_size=1"])
    assert names() == EVERYTHING[:4]
    index(["pho tos", "out=gallery"])
    assert names() == EVERYTHING
    assert sum(embedded) == 7


def test_what_lies_below_a_folder_that_cannot_be_read_is_kept(photos, capsys, monkeypatch):
    """A folder's rights or its disk may be back tomorrow, and its vectors would have to be made again."""
    (photos / "sub" / "deep").mkdir()
    shutil.copy(photos / "teal.png", photos / "sub" / "deep" / "teal.png")
    shutil.copy(photos / "teal.png", photos / "subway.png")
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    (photos / "subway.png").unlink()

    def indexed_while(call, endings, error):
        """What is said where a call of the system fails for some paths."""
        real = getattr(os, call)

        def fails(path=".", *args, **options):
            if str(path).endswith(endings):
                raise OSError(*error, str(path))
            return real(path, *args, **options)

        with monkeypatch.context() as now:
            now.setattr(os, call, fails)
            index(["pho tos", "out=gallery", "max_unreadable=0.5"])
        return capsys.readouterr()

    told = indexed_while("scandir", ("sub",), (13, "Permission denied"))
    assert (
        "0 added, 0 changed, 1 removed, 3 unchanged, 5 kept although their folder cannot be read" in told.out
    )
    assert "'sub': Permission denied" in told.err
    assert names() == sorted([*EVERYTHING, "sub/deep/teal.png"])
    told = indexed_while("stat", ("deep", "blue.png"), (116, "Stale file handle"))
    assert "0 removed, 6 unchanged, 2 kept" in told.out
    assert "'sub/deep': Stale file handle" in told.err
    index(["pho tos", "out=gallery"])
    assert "0 added, 0 changed, 0 removed, 8 unchanged; 8 items" in capsys.readouterr().out


def test_a_source_is_taken_out_by_any_path_to_it(photos, capsys, monkeypatch):
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    monkeypatch.chdir(photos)
    index(["../pho tos/sub/..", "out=../gallery", "remove=true"])
    assert "7 items of" in capsys.readouterr().out


def test_an_empty_or_missing_folder_changes_nothing(photos, capsys):
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    photos.rename("elsewhere")
    with error_about(SourceError, "pho tos", "missing"):
        index(["pho tos", "out=gallery"])
    photos.mkdir()  # as where a disk is not mounted
    (photos / "x.mp4").touch()
    with error_about(SourceError, "pho tos", "empty"):
        index(["pho tos", "out=gallery"])
    assert names() == EVERYTHING
    search(["gallery", "What is this?", "k=1"])
    capsys.readouterr()
    index(["pho tos", "out=gallery", "remove=true"])
    assert "7 items of" in capsys.readouterr().out
    with error_about(UserError, "gallery", str(photos)):
        index(["pho tos", "out=gallery", "remove=true"])


def test_two_sources_in_one_index_do_not_disturb_each_other(photos, capsys):
    shutil.copytree(photos, "second")
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    index(["second", "out=gallery"])
    shutil.rmtree(photos / "sub")
    index(["pho tos", "out=gallery"])
    assert "0 added, 0 changed, 4 removed, 3 unchanged; 10 items" in capsys.readouterr().out
    assert sorted(Index.open("gallery").sources().values()) == [3, 7]


def test_another_checkpoint_is_named_and_refused(photos, tmp_path):
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    other = shutil.copytree(DEMO, tmp_path / "other")
    settings = json.loads((other / "rge.json").read_text())
    (other / "rge.json").write_text(json.dumps(settings | {"step": 1}))
    for command in (index, search):
        with error_about(UserError, "gallery", "checkpoint"):
            command(
                [
                    *(["pho tos", "out=gallery"] if command is index else ["gallery", "x"]),
                    f"checkpoint={other}",
                ]
            )
    index(["pho tos", "out=second", f"checkpoint={other}"])
    moved = other.rename(tmp_path / "moved")
    for command, words in ((index, ["pho tos", "out=second"]), (search, ["second", "x"])):
        with error_about(UserError, "checkpoint"):
            command(words)
        command([*words, f"checkpoint={moved}"])
    with error_about(UserError, "checkpoint"):
        index(["pho tos", "out=new"])
    with error_about(UserError, "gallery", "dimensions"):
        index(["pho tos", "out=gallery", "dimensions=64"])


def test_the_list_of_unreadable_files_does_not_become_an_item(photos):
    """Watching would embed it, write it again, and so on."""
    with error_about(UserError, "unreadable", "pho tos/sub/bad.txt"):
        index(["pho tos", "out=gallery", "checkpoint=demo", "unreadable=pho tos/sub/bad.txt"])
    Path("link").symlink_to("pho tos")
    for source, listed in (("pho tos", "link/bad.txt"), ("link", "pho tos/bad.txt")):
        with error_about(UserError, "unreadable", listed):
            index([source, "out=gallery", "checkpoint=demo", f"unreadable={listed}"])
    (photos / ".rge").mkdir()
    for _ in range(2):
        assert index(["pho tos", "out=gallery", "checkpoint=demo", "unreadable=pho tos/.rge/bad.txt"]) == 0
    assert (photos / ".rge" / "bad.txt").is_file()


def test_whole_numbers_that_pandas_writes_as_floats_are_ids(tmp_path):
    pq.write_table(pa.table({"id": [7.0, 7.5, None], "text": ["a", "b", "c"]}), tmp_path / "rows.parquet")
    assert [entry.id for entry in read_source(tmp_path / "rows.parquet").entries] == ["7", "7.5", "3"]


def test_a_loop_of_links_and_a_name_that_is_no_text(photos):
    (photos / "loop").symlink_to(photos)
    (photos / "nowhere.png").symlink_to(photos / "gone.png")
    os.close(os.open(os.fsencode(photos) + b"/\xff.png", os.O_CREAT))
    found = read_source(photos)
    assert [entry.id for entry in found.entries] == EVERYTHING
    assert found.faults == {"nowhere.png": "No such file or directory", "\ufffd.png": "its name is not UTF-8"}


def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_embedded(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    Image.new("RGB", (40, 50)).save(os.path.join(folder, "a.png"))
    with pytest.raises(SourceError) as error:
        read_source(Path(folder))
    str(error.value).encode()  # can be printed, and written into a list


def test_an_album_of_macos_is_filtered_by_its_name_as_it_is_typed(photos):
    (photos / "sub").rename(photos / "Cafe\u0301")
    [entry] = [entry for entry in read_source(photos).entries if entry.id.endswith("plum.png")]
    assert (entry.id, entry.metadata["album"]) == ("Cafe\u0301/plum.png", "Caf\u00e9")


def test_a_caption_belongs_to_a_picture_whose_accents_macos_has_separated(photos):
    for picture, caption in (("Cafe\u0301.png", "Caf\u00e9.txt"), ("caf\u00e9.png", "cafe\u0301.png.txt")):
        (photos / picture).write_bytes((photos / "red.png").read_bytes())
        (photos / caption).write_text("of " + caption)
    found = {entry.id: entry.text_file for entry in read_source(photos).entries}
    assert found["Cafe\u0301.png"] == str(photos / "Caf\u00e9.txt")
    assert found["caf\u00e9.png"] == str(photos / "cafe\u0301.png.txt")
    assert set(found) == {*EVERYTHING, "Cafe\u0301.png", "caf\u00e9.png"}


# ------------------------------------------------------------------------------------------------------------- tables


def table(path, photos):
    rows = [
        {"id": "a", "text": "a red wall", "image": "pho tos/red.png", "price": 3},
        {"id": "b", "text": None, "image": "pho tos/blue.png", "price": None},
        {"id": "c", "text": 'said "x, y"', "image": None, "price": 5},
    ]
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text(
            '\ufeffid,text,image,price\na,a red wall,pho tos/red.png,3\nb,,pho tos/blue.png,\nc,"said ""x, y""",,5\n'
        )
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_ending_of_a_caption_may_be_upper_case(tmp_path):
    for name in ("IMG_1.JPG", "IMG_1.TXT", "b.png", "b.png.Txt", "alone.TXT", "alone.txt"):
        (tmp_path / name).write_text(name)
    found = {entry.id: entry.text_file for entry in read_source(tmp_path).entries}
    captions = {
        "IMG_1.JPG": "IMG_1.TXT",
        "b.png": "b.png.Txt",
        "alone.TXT": "alone.TXT",
        "alone.txt": "alone.txt",
    }
    assert found == {name: str(tmp_path / text) for name, text in captions.items()}


def test_digits_that_a_float_would_round_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,post,price\na key,1234567890123456789,7\na nail,12,0.5\n")
    metadata = [entry.metadata for entry in read_source(tmp_path / "a.csv").entries]
    assert metadata == [{"post": "1234567890123456789", "price": 7.0}, {"post": "12", "price": 0.5}]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_is_followed_row_by_row(photos, tmp_path, capsys, ending):
    path = table(tmp_path / f"a table.{ending}", photos)
    index([f"src={path}", "out=gallery", "checkpoint=demo"])
    found = {hit.id: hit for hit in Index.open("gallery").search(np.eye(1, 128, dtype=np.float32), 9)[0]}
    assert {name: hit.text for name, hit in found.items()} == {
        "a": "a red wall",
        "b": None,
        "c": 'said "x, y"',
    }
    assert str(found["a"].metadata["price"]) == "3"
    assert found["a"].image == str(photos / "red.png")
    assert not found["a"].gone
    if ending == "jsonl":
        path.write_text(path.read_text().replace('"price": 3', '"price": 4'))
        index([f"src={path}", "out=gallery"])
        assert "0 added, 0 changed, 0 removed, 3 unchanged" in capsys.readouterr().out
        [hits] = Index.open("gallery").search(np.eye(1, 128, dtype=np.float32), 9)
        assert {hit.id: hit.metadata.get("price") for hit in hits}["a"] == 4
    Image.new("RGB", (44, 50), "black").save(photos / "red.png")  # a row changes with its picture's file
    index([f"src={path}", "out=gallery"])
    assert "0 added, 1 changed, 0 removed, 2 unchanged" in capsys.readouterr().out


def test_a_library_of_encoded_pictures(photos, tmp_path, capsys):
    rows = [{"id": place, "image": {"bytes": (photos / f"{name}.png").read_bytes(), "path": None}, "concept": name}
            for place, name in enumerate(("red", "blue"))]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "library.parquet")
    index([f"src={tmp_path / 'library.parquet'}", "out=gallery", "checkpoint=demo"])
    [hits] = Index.open("gallery").search(np.eye(1, 128, dtype=np.float32), 9)
    assert {hit.id: (hit.metadata["concept"], hit.gone) for hit in hits} == {
        "0": ("red", False),
        "1": ("blue", False),
    }
    # Replaced while this process runs, as with watch=true.
    rows[0]["image"]["bytes"] = (photos / "sub" / "plum.png").read_bytes()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "library.parquet")
    capsys.readouterr()
    index([f"src={tmp_path / 'library.parquet'}", "out=gallery"])
    assert "0 added, 1 changed, 0 removed, 1 unchanged" in capsys.readouterr().out
    pq.write_table(pa.Table.from_pylist([{"name": "x", "image": b"x"}]), tmp_path / "other.parquet")
    with error_about(SourceError, "other.parquet", "id, image"):
        read_source(tmp_path / "other.parquet", id="name")


@pytest.mark.parametrize(
    ("name", "content", "fields"),
    [
        ("x.csv", "id,text\na,b\na,c\n", ("a",)),
        ("x.csv", "id,name\na,b\n", ("text or image",)),
        ("x.csv", "id,text\na\n", ("2",)),
        ("x.csv", b"\xff\xfa", ()),
        ("x.csv", "", ("empty",)),
        ("x.csv", "id,text\n", ("empty",)),
        ("x.jsonl", '{"id": 1, "text": "a"}\n[]', ("2",)),
        ("x.jsonl", "nonsense", ("1",)),
        ("x.parquet", "nonsense", ()),
        ("x.xlsx", "nonsense", ()),
        ("x.ods", "nonsense", ("kind",)),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, name, content, fields):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with error_about(UserError, name, *fields):
        read_source(tmp_path / name)


def test_rows_without_an_id_are_named_and_rows_without_content_are_faults(tmp_path):
    lines = ['{"text": "a"}', '{"text": " "}', '{"image": "p.png"}', '{"text": 3}', '{"text": "\\ud83d"}',
             '{"text": "a", "tags": ["\\ud83d"]}', '{"image": "\\ud83d.png"}']  # fmt: skip
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    found = read_source(tmp_path / "x.jsonl")
    assert [entry.id for entry in found.entries] == ["1", "p.png"]
    assert found.faults == {
        "2": "it has neither a text nor a picture",
        "4": "its text must be a string, got int",
        **dict.fromkeys(("5", "6", "\\ud83d.png"), "it contains half a character (a lone surrogate)"),
    }


# ------------------------------------------------------------------------------------------------------------- search


@pytest.mark.slow
def test_search_tells_the_rationale_and_the_hits(photos, capsys, demo, monkeypatch):
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    (photos / "teal.png").unlink()
    capsys.readouterr()
    question = "What tool do you need for this = that?"
    assert search(["gallery", question, "image=pho tos/red.png", "k=7"]) == 0
    vector, rationale = demo.encode_query(question, "pho tos/red.png", return_rationales=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == rationale
    [hits] = Index.open("gallery").search(vector[None], 7)
    assert len(lines) == 9
    for line, hit in zip(lines[2:], hits, strict=True):
        assert f"{hit.score:.4f}  {hit.id}" in line
        assert ("(gone)" in line) == (hit.id == "teal.png")
    search(["gallery", question, "max_rationale_tokens=2", "k=1"])
    short = demo.encode_query(question, max_rationale_tokens=2, return_rationales=True)[1]
    assert capsys.readouterr().out.splitlines()[0] == short != rationale
    search(["gallery", "image=pho tos/red.png", "mode=direct", "k=2", "exact=true"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    search(["gallery", question, "mode=direct", "where=year = 1900"])
    assert capsys.readouterr().out == "nothing found\n"
    for nothing in ([], [" "]):
        with error_about(UserError, "question", "image"):
            search(["gallery", *nothing])
    with error_about(UserError, "nothing", "missing"):
        search(["nothing", "x"])


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["a", "b?", "k=3"], ["index=a", "question=b?", "k=3"]),
        (["a", "is x = y?"], ["index=a", "question=is x = y?"]),
        (["a", "k=3", "b"], ["index=a", "k=3", "b"]),
        (["--index=a", "b"], ["--index=a", "b"]),
        (["a=b c"], ["a=b c"]),
        (["a", "--help"], ["index=a", "--help"]),
        ([], []),
    ],
)
def test_leading_words_are_the_first_keys(words, read):
    assert positional(words, "index", "question") == read


# -------------------------------------------------------------------------------------------------------------- embed


def test_embed_writes_what_the_embedder_says(photos, demo, capsys):
    assert embed(["checkpoint=demo", "src=pho tos", "out=x.parquet"]) == 0
    found = pq.read_table("x.parquet")
    assert found.column_names == ["id", "vector"]
    vectors = dict(zip(found["id"].to_pylist(), found["vector"].to_pylist(), strict=True))
    assert sorted(vectors) == EVERYTHING
    np.testing.assert_allclose(
        vectors["blue.png"], demo.encode_document(images=photos / "blue.png"), atol=1e-5
    )
    np.testing.assert_allclose(vectors["sub/notes.txt"], demo.encode_document("a padlock"), atol=1e-5)
    assert json.loads(found.schema.metadata[b"rge"])["checkpoint_hash"] == demo.checkpoint_hash
    assert not os.path.exists("x.parquet.parts")
    with error_about(UserError, "x.parquet"):
        embed(["checkpoint=demo", "src=pho tos", "out=x.parquet"])
    embed(
        ["pho tos", "checkpoint=demo", "out=q.parquet", "side=query", "instruction=''"]
    )  # as with `rge index`
    [row] = [one for one in pq.read_table("q.parquet").to_pylist() if one["id"] == "blue.png"]
    expected, rationale = demo.encode_query(
        images=photos / "blue.png", instruction="", return_rationales=True
    )
    assert row["rationale"] == rationale
    np.testing.assert_allclose(row["vector"], expected, atol=1e-5)


def test_a_command_that_embedded_nothing_may_be_corrected(photos, capsys):
    """A refused mode, for example, must not count as the settings of what is there."""
    with error_about(UserError, ("choice", "mode")):
        embed(["src=pho tos", "out=x.parquet", "checkpoint=demo", "mode=auto"])
    assert embed(["src=pho tos", "out=x.parquet", "checkpoint=demo", "mode=direct"]) == 0
    assert "7 vectors" in capsys.readouterr().out


def test_embed_goes_on_where_it_was_and_says_when_it_was_begun_otherwise(photos, demo, capsys, monkeypatch):
    calls = []
    real = Embedder.encode_prompts

    def stops(self, prompts, **options):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, prompts, **options)

    monkeypatch.setattr(Embedder, "encode_prompts", stops)
    monkeypatch.setattr("rge.index.reading.WINDOW", 2)
    words = ["checkpoint=demo", "src=pho tos", "out=x.parquet", "batch_size=1"]
    with pytest.raises(KeyboardInterrupt):
        embed(words)
    assert not os.path.exists("x.parquet")
    with error_about(UserError, "x.parquet.parts", "side"):
        embed([*words, "side=query"])
    # One of the finished ones changes meanwhile, one goes.
    Image.new("RGB", (44, 50), "black").save(photos / "blue.png")
    (photos / "red.png").unlink()
    (photos / "red.txt").unlink()
    calls[:] = [0, 0, 0]
    assert embed(words) == 0
    assert sum(calls) == 4  # of six, two were finished and stayed
    assert "2 of 6 items were embedded before" in capsys.readouterr().err
    rows = {row["id"]: row["vector"] for row in pq.read_table("x.parquet").to_pylist()}
    assert sorted(rows) == sorted(set(EVERYTHING) - {"red.png"})
    np.testing.assert_allclose(rows["blue.png"], demo.encode_document(images=photos / "blue.png"), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["out=x.csv"], "format"),
        (["out=x.parquet", "instruction=find"], "instruction"),
        (["out=x.parquet", "dimensions=64"], "dimensions"),
        (["out=x.parquet", "max_unreadable=2"], ("range", "max_unreadable")),
        (["out=x.parquet", "mode=fast"], "mode"),
    ],
)
def test_embed_says_what_is_wrong(photos, words, field):
    with error_about(ValueError, field):
        embed(["checkpoint=demo", "src=pho tos", *words])
    assert not os.path.exists("x.parquet")


def test_nothing_readable_is_an_error(photos):
    for path in photos.rglob("*.*"):
        path.write_bytes(b"")
    with error_about(UserError, "max_unreadable"):
        embed(["checkpoint=demo", "src=pho tos", "out=x.parquet"])
    with error_about(UserError, "empty"):
        embed(["checkpoint=demo", "src=pho tos", "out=x.parquet", "max_unreadable=1"])


@pytest.mark.slow
def test_the_commands_as_they_are_typed(photos, tmp_path):
    """Without the checkout's folder, and with few open files."""

    def rge(*words, code=0):
        command = f'ulimit -n 256; exec "{sys.executable}" -m rge "$@"'
        done = subprocess.run(
            ["bash", "-c", command, "rge", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "WARN" not in done.stderr
        return done.stdout + done.stderr

    rge("index", "pho tos", "out=gallery", "checkpoint=demo")
    assert "did you mean image?" in rge("search", "gallery", "x", "imgae=x.png", code=2)
    words = ("search", "gallery", "What is this?", "image=pho tos/red.png", "k=7")
    found = forked.run("-m", "rge", *words, cwd=tmp_path)  # as above, without another six seconds of imports
    assert (found.returncode, "red.png" in found.stdout) == (0, True), found.stderr


def test_the_demos_checkpoint_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch, demo):
    monkeypatch.undo()
    assert demo.checkpoint == DEMO
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 6_000_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vector = demo.encode_query("What tool do you need for this?")
    assert vector.shape == (128,)
    (tmp_path / "demo").mkdir()  # a folder of that name is meant first
    monkeypatch.chdir(tmp_path)
    with error_about(UserError, "foreign"):
        Embedder.from_pretrained("demo")


@pytest.mark.slow
def test_the_example_of_the_docs_runs_as_it_is_printed(photos, capsys):
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    index(["pho tos", "out=gallery", "checkpoint=demo"])
    shutil.copy(photos / "red.png", "padlock.png")
    capsys.readouterr()
    names: dict = {}
    exec(block, names)  # our own page
    assert len(names["hits"]) == 5
    assert capsys.readouterr().out == f"{names['hits'][0].id} {names['hits'][0].score} False\n"

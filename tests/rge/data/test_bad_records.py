"""Records that cannot be used, of every kind: the run ends and names them, or leaves them out, counts and lists them."""

import contextlib
import json
import os
import re
import signal
import struct
import time
import zlib
from dataclasses import fields
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import yaml
from faults import error_about
from paths import ROOT
from PIL import Image
from ports import free_port
from safetensors.torch import load_file
from transformers import AutoProcessor

from rge.data.bad_records import NAME, BadRecords
from rge.data.collate import MAX_REPLACEMENTS, Source, StepBatches, replacements
from rge.data.config import DataConfig
from rge.data.loader import Loader
from rge.data.mixture import Draw, Mixture
from rge.data.sources import BadRecord, RecordError, RecordFile
from rge.model.backbone import load_backbone
from rge.model.prompts import PromptBuilder

TRAIN = ROOT / "rge" / "train.py"
GOOD, BATCH, STEPS = 11, 4, 6


@pytest.fixture(scope="module")
def builder(tiny_path, tmp_path_factory):
    """Prompts of at most 60 tokens."""
    path = tmp_path_factory.mktemp("with_emb")
    load_backbone(tiny_path, add_emb=True).processor.save_pretrained(path)
    return PromptBuilder(AutoProcessor.from_pretrained(path), "plain", max_tokens=60)


def record(name: str, **more) -> dict:
    return {
        "id": name, "group": "g", "source": "s", "split": "train",
        "query": {"text": f"what is {name}", "images": ["good.png"]},
        "positives": [{"id": f"t{name}", "text": f"thing {name}", "rationale": "a key"}],
        **more,
    }  # fmt: skip


def shows(image: str) -> dict:
    return record("bad", query={"text": "what is this", "images": [image]})


def positive(**more) -> dict:
    return record("bad", positives=[{"id": "t", "text": "thing", "rationale": "a key", **more}])


def bomb(path: Path) -> None:
    """A PNG of a few bytes that says it is 30,000 pixels wide and high."""
    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


def pictures(folder: Path) -> None:
    """One good picture, and bad ones by the name of what is wrong with them."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(folder / "good.png")
    image.save(folder / "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.png").write_text("<html>404 Not Found</html>")
    damaged = bytearray((folder / "good.png").read_bytes())
    damaged[60:400] = bytes(340)
    (folder / "damaged.png").write_bytes(damaged)
    bomb(folder / "bomb.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "loop.png").symlink_to("loop.png")
    Image.new("RGB", (3000, 4)).save(folder / "strip.png")
    image.save(folder / "moving.gif", save_all=True, append_images=[image.rotate(90)])
    Image.fromarray(noise[..., 0].astype(np.float32)).save(folder / "floats.tiff")
    (folder / "secret.png").write_bytes((folder / "good.png").read_bytes())
    (folder / "secret.png").chmod(0)


BAD_PICTURES = {
    "missing": ("gone.png", "unreadable"),
    "truncated": ("truncated.jpg", "truncated"),
    "empty file": ("empty.png", "format"),
    "no picture": ("page.png", "format"),
    "damaged": ("damaged.png", "damaged"),
    "bomb": ("bomb.png", "huge"),
    "folder": ("folder.png", "unreadable"),
    "file as folder": ("good.png/inside.png", "unreadable"),
    "pipe": ("pipe.png", "unreadable"),
    "device": ("/dev/zero", "unreadable"),
    "link to itself": ("loop.png", "unreadable"),
    "zero byte in the name": ("a\0b.png", "unreadable"),
    "name too long": ("x" * 300 + ".png", "unreadable"),
    "no library": ("none.parquet#1", "library"),
    "aspect ratio": ("strip.png", "processed"),
    "animation": ("moving.gif", "animated"),
    "32-bit pixels": ("floats.tiff", "range"),
}
if os.geteuid():
    BAD_PICTURES["not permitted"] = ("secret.png", "unreadable")
AT_A_DRAW = {name: (shows(path), kind) for name, (path, kind) in BAD_PICTURES.items()}
AT_A_DRAW["target's picture"] = (positive(image="gone.png"), "unreadable")
AT_A_DRAW["too many pictures"] = (
    record("bad", query={"images": ["good.png"] * 30}),
    "max_prompt_tokens",
)
AT_OPENING = {
    "no JSON": (b"{'id': 1}", "Invalid JSON"),
    "cut off": (json.dumps(record("bad")).encode()[:-9], "Invalid JSON"),
    "not UTF-8": (json.dumps(record("bad")).encode().replace(b"what", b"wh\xe4t"), "Invalid JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(record("bad")).encode(), "Invalid JSON"),
    "lone surrogate": (json.dumps(record("bad\ud800")).encode(), "Invalid JSON"),
    "NaN": (json.dumps(record("bad", group=float("nan"))).encode(), "group: Input should be a valid string"),
    "number as text": (record("bad", query={"text": 7}), "query.text: Input should be a valid string"),
    "a list": (b"[1, 2]", "record: Input should be an object"),
    "misspelt key": (record("bad", negatifs=[]), "negatifs: Extra inputs are not permitted"),
    "no positives": (record("bad", positives=[]), "positives: List should have at least 1 item"),
    "empty query": (record("bad", query={"text": "  "}), "a query needs a text, images, or both"),
    "empty target": (positive(text=" "), "a target needs an image, a text, or both"),
    "repeated id": (record("r2"), "'r2' is already used in line"),
    "no rationale": (positive(rationale=None), "missing or blank"),
    "rationale with <emb>": (positive(rationale="a <emb> key"), "contains <emb>"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "with a space"
    path.mkdir()
    pictures(path)
    return path


def write(folder: Path, name: str, *bad: dict | bytes, good: int = GOOD) -> Path:
    lines = [json.dumps(record(f"r{number}")).encode() for number in range(good)]
    lines[6:6] = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in bad]
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"\n".join([*lines, b""]))
    return path


def batches_of(path: Path, builder, on_bad: str, rank: int = 0, world_size: int = 1, **more) -> StepBatches:
    file = RecordFile(path, need_rationale=True, on_bad=on_bad)
    mixture = Mixture([len(file)], [1.0], BATCH, seed=0)
    settings = DataConfig(on_bad=on_bad, **more)
    return StepBatches([Source(file, builder, settings)], mixture, rank=rank, world_size=world_size)


def loaded(batches: StepBatches, num_workers: int) -> list:
    return list(Loader(batches, range(STEPS), DataConfig(num_workers=num_workers)))


def content(batch) -> dict:
    found = {item.name: getattr(batch, item.name) for item in fields(batch)}
    for name in ("queries", "candidates"):
        found[name] = [
            (one.id, one.input_ids.tolist(), None if one.pixels is None else one.pixels.numpy().tobytes())
            for one in found[name]
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", AT_A_DRAW)
def test_what_only_a_draw_shows(folder, builder, kind, tmp_path):
    bad, what = AT_A_DRAW[kind]
    path = write(folder, "records", bad)
    for num_workers in (0, 1, 3):
        began = time.monotonic()
        with error_about(RecordError, "records.jsonl", "record 'bad'", what):
            loaded(batches_of(path, builder, "stop"), num_workers)
        assert time.monotonic() - began < 10
    skipping = batches_of(path, builder, "skip")
    found = [content(batch) for batch in loaded(skipping, 0)]
    assert [content(batch) for batch in loaded(skipping, 3)] == found
    assert all(len(batch["queries"]) == BATCH and "bad" not in batch["record_ids"] for batch in found)
    ledger = BadRecords(
        DataConfig(on_bad="skip", max_bad_share=0.1), skipping.records, tmp_path, 0, skipping.mixture
    )
    reports = [ledger.after_step(step, skipping[step]) for step in range(STEPS)]
    assert reports[-1] == {"bad_records": 1}
    [line] = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert (line["id"], line["source"]) == ("bad", str(path))
    with path.open("rb") as lines:
        lines.seek(line["place"])
        assert json.loads(lines.readline()) == bad


@pytest.mark.parametrize("kind", AT_OPENING)
def test_what_opening_shows(folder, builder, kind, tmp_path):
    bad, message = AT_OPENING[kind]
    path = write(folder, "records", bad)
    with error_about(RecordError, path, 7) as caught:
        batches_of(path, builder, "stop")
    assert re.search(message, f"{caught.value.cause.key}: {caught.value.cause.reason}")
    skipping = batches_of(path, builder, "skip")
    good = batches_of(write(folder, "good"), builder, "stop")
    expected = [content(good[step]) for step in range(STEPS)]
    assert [content(batch) for batch in loaded(skipping, 0)] == expected
    ledger = BadRecords(
        DataConfig(on_bad="skip", max_bad_share=0.1), skipping.records, tmp_path, 0, skipping.mixture
    )
    assert ledger.after_step(1, skipping[0]) == {"bad_records": 1}
    [line] = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert (line["step"], line["source"]) == (0, str(path))
    assert line["reason"].startswith("line 7: ")


def odd_pictures(folder: Path) -> list[str]:
    """Pictures that look odd and are good."""
    image = Image.open(folder / "good.png")
    grey = np.asarray(image.convert("L"))
    made = {
        "cmyk.jpg": image.convert("CMYK"),
        "deep.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "palette.png": image.convert("P"),
        "one_bit.png": image.convert("1"),
        "grey.png": image.convert("LA"),
        "see_through.webp": image.convert("RGBA"),
        "dot.png": image.resize((1, 1)),
    }
    for name, each in made.items():
        each.save(folder / name)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    image.convert("P").save(folder / "clear.gif", transparency=0)
    return [*made, "turned.jpg", "clear.gif"]


def test_what_is_odd_and_good_is_trained_on(folder, builder):
    names = odd_pictures(folder)
    odd = [record(name, query={"images": [name]}) for name in names]
    path = write(folder, "odd", *odd, record("long", query={"text": "word " * 5000}), b"  ")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    batches = batches_of(path, builder, "stop")
    assert len(batches.records[0]) == GOOD + len(names) + 1
    seen = {name for batch in loaded(batches, 2) for name in batch.record_ids}
    assert {*names, "long"} <= seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_takes_a_bad_records_place_does_not_depend_on_the_processes(folder, builder, world_size):
    path = write(folder, "records", shows("gone.png"))
    whole = batches_of(path, builder, "skip", sort_by_length=False)
    replaced = 0
    for step in range(12):
        drawn = [draw.index for draw in whole.mixture.batch(step)]
        names = whole[step].record_ids
        shares = [
            batches_of(path, builder, "skip", rank, world_size, sort_by_length=False)[step]
            for rank in range(world_size)
        ]
        assert [name for share in shares for name in share.record_ids] == names
        assert [bad for share in shares for bad in share.bad] == whole[step].bad
        if 6 in drawn:  # where the bad one stands
            replaced += 1
            assert len(set(names)) == BATCH  # by one that the batch does not hold already
    assert replaced > 2


def test_stand_ins_are_others_of_the_source_and_random():
    taken = {(0, index) for index in range(4)}
    first = [list(replacements(Draw(0, 2, seed), range(12), taken))[1] for seed in range(60)]
    assert {draw.index for draw in first} == set(range(4, 12))
    every = list(replacements(Draw(0, 2, 5), range(12), taken))
    assert [draw.seed for draw in every] == [5] * 12
    # Those that the batch holds already come last.
    assert (every[0].index, {draw.index for draw in every[-3:]}) == (2, {0, 1, 3})
    assert len(list(replacements(Draw(0, 2, 5), range(10**7), taken))) == 1 + MAX_REPLACEMENTS


def test_a_source_that_is_all_bad_ends_the_run(folder, builder):
    path = write(
        folder, "records", *[{**shows("gone.png"), "id": f"b{number}"} for number in range(5)], good=0
    )
    batches = batches_of(path, builder, "skip")
    with error_about(RecordError, path, "data.on_bad"):
        loaded(batches, 1)
    with error_about(RecordError, "records.jsonl", 1):
        batches_of(write(folder, "records", b"{", good=0), builder, "skip")


def batch_with(*names: str):
    class Drawn:
        bad = [BadRecord("s.jsonl", int(name), f"b{name}", "gone") for name in names]

    return Drawn()


class TenRecords:
    """Stands for the records of a source."""

    bad: list = []
    size = 10

    def __len__(self):
        return 10


TEN = Mixture([10], [1.0], 2, 0)


def test_the_list_is_whole_after_a_resume_and_has_no_line_twice(tmp_path):
    def start(first_step):
        return BadRecords(
            DataConfig(on_bad="skip", max_bad_share=0.5), [TenRecords()], tmp_path, first_step, TEN
        )

    def listed():
        return [
            (line["step"], line["id"]) for line in map(json.loads, (tmp_path / NAME).read_text().splitlines())
        ]

    one = start(0)
    for step, names in ((1, []), (2, ["3"]), (3, ["3", "5"]), (4, ["7", "7"])):
        one.after_step(step, batch_with(*names))
    assert listed() == [(2, "b3"), (3, "b5"), (4, "b7")]
    again = start(3)  # killed, the last state is of step 3
    assert listed() == [(2, "b3"), (3, "b5")]
    assert again.after_step(4, batch_with("7")) == {"bad_records": 3}
    assert listed() == [(2, "b3"), (3, "b5"), (4, "b7")]
    assert start(0).after_step(1, batch_with()) == {"bad_records": 0}
    assert listed() == []


def test_more_than_a_share_ends_the_run(tmp_path):
    ledger = BadRecords(DataConfig(on_bad="skip", max_bad_share=0.2), [TenRecords()], tmp_path, 0, TEN)
    assert ledger.after_step(1, batch_with("1", "2", "1")) == {"bad_records": 2}
    with error_about(RecordError, "record 'b4'", "data.max_bad_share"):
        ledger.after_step(2, batch_with("4"))
    assert len((tmp_path / NAME).read_text().splitlines()) == 3  # the list is there to look at


def test_without_skipping_nothing_is_counted_or_written(tmp_path):
    ledger = BadRecords(DataConfig(), [TenRecords()], tmp_path, 0, TEN)
    assert ledger.after_step(1, batch_with()) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def home(folder, tiny_path):
    """Records of which one shows half a picture, and a recipe of nothing but a cold start."""
    path = write(folder, "train", shows("truncated.jpg"))
    recipe = {
        "model": {"path": str(tiny_path), "dtype": "float32", "gradient_checkpointing": False,
                  "min_pixels": 784, "max_pixels": 3136},
        "data": {"profile": "plain", "num_workers": 2},
        "cold_start": {"steps": 6, "batch_size": 4, "lr": 1e-3, "sources": [{"path": str(path)}]},
        "stage": "cold_start",
        "train": {"micro_batch_size": 4, "save_every": 2, "log_every": 1},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def train(home: Path, out: Path, *overrides: str) -> list[str]:
    return [str(TRAIN), f"recipe={home / 'tiny.yaml'}", f"out={out}", *overrides]


@contextlib.contextmanager
def two_processes(*words: str, machines: int = 1):
    """Two processes, of one machine or one of each of two, that no launcher watches, so that each has to end by itself."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    ranks = [
        forked.Program(*words, RANK=str(rank), LOCAL_RANK=str(rank if machines == 1 else 0), **common)
        for rank in range(2)
    ]
    with ranks[0], ranks[1]:
        yield ranks


ENDS_IN_S = 60.0
"""Ten seconds on an idle machine, and 24 on one with five processes per two cores."""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_run_ends_with_the_records_name(home, tmp_path, num_workers):
    metrics = tmp_path / "out" / "cold_start" / "metrics.jsonl"
    with forked.Program(*train(home, tmp_path / "out", f"data.num_workers={num_workers}")) as program:
        program.wait_until(metrics.exists)
        done = program.finished(ENDS_IN_S)
    assert done.returncode == 2
    assert ", record 'bad': picture " in done.stderr
    assert "truncated.jpg: " in done.stderr
    assert "Traceback" not in done.stderr


EVERYWHERE = {
    "corrupt picture": (shows("damaged.png"), "record 'bad': picture .*damaged.png: "),
    "missing picture": (shows("gone.png"), "kind.jsonl:7: .*gone.png does not exist .record 'bad'."),
    "repeated id": (record("r2"), "kind.jsonl:7: id: 'r2' is already used in line 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers"), [("corrupt picture", 1), *((kind, 0) for kind in EVERYWHERE)]
)
def test_two_processes_end_with_a_bad_record(home, tmp_path, kind, num_workers):
    """As if on two machines, each of which shows what its own processes say.

    Data workers start after the files are opened, which shows what the rest of `AT_OPENING` is stopped by too.
    """
    bad, message = EVERYWHERE[kind]
    path = write(home, "kind", bad)
    words = train(
        home, tmp_path / "out", f"cold_start.sources=[{{path: '{path}'}}]", f"data.num_workers={num_workers}",
        "train.silence_s=3600",  # the record ends the run, and not a process that the other one takes for dead
    )  # fmt: skip
    with two_processes(*words, machines=2) as ranks:
        done = [rank.finished(ENDS_IN_S) for rank in ranks]
    for each in done:
        assert each.returncode == 2, each.stderr
        assert re.search(message, each.stderr), each.stderr
        assert "Traceback" not in each.stderr
    assert not list((tmp_path / "out").glob("*/final"))


@pytest.mark.slow
def test_a_run_that_skips_is_the_same_killed_or_whole_and_on_two_processes(home, tmp_path):
    skip = ("data.on_bad=skip", "data.max_bad_share=0.2")
    whole = forked.run(*train(home, tmp_path / "whole", *skip))
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed" / "cold_start"
    with forked.Program(*train(home, tmp_path / "killed", *skip)) as program:
        program.wait_until(lambda: len(list((killed / "state").glob("step_*"))) > 0)
        program.send(signal.SIGKILL)
    again = forked.run(*train(home, tmp_path / "killed", *skip, "data.num_workers=0", "data.prefetch_mb=1"))
    assert again.returncode == 0, again.stderr
    with two_processes(*train(home, tmp_path / "two", *skip)) as ranks:
        assert [rank.finished().returncode for rank in ranks] == [0, 0]
    for name in ("killed", "two"):
        assert (tmp_path / name / "cold_start" / NAME).read_text() == (
            tmp_path / "whole" / "cold_start" / NAME
        ).read_text()
        mine, theirs = (
            load_file(tmp_path / run / "cold_start" / "final" / "model.safetensors")
            for run in (name, "whole")
        )
        for key in mine:
            if name == "killed":
                assert torch.equal(mine[key], theirs[key])
            else:
                torch.testing.assert_close(mine[key], theirs[key], atol=1e-4, rtol=1e-3)
    lines = (tmp_path / "whole" / "cold_start" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["bad_records"] == 1
    assert len((tmp_path / "whole" / "cold_start" / NAME).read_text().splitlines()) == 1


SMALL_MACHINE = """
import ctypes, os, resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
libc = ctypes.CDLL(None, use_errno=True)
own = libc.unshare(0x00020000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
own = own and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
if own:
    room = os.statvfs("/dev/shm")
    assert room.f_blocks * room.f_frsize == 64 << 20
    open("/dev/shm/filled", "wb").write(bytes(63 << 20))  # what is left is one megabyte
print("small" if own else "shared", flush=True)
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_whole_run_with_256_descriptors_and_64_mb_of_shared_memory(home, tmp_path):
    program = tmp_path / "small.py"
    program.write_text(SMALL_MACHINE)
    rng = np.random.default_rng(0)
    for number in range(8):
        pixels = rng.integers(0, 255, (900, 900, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / f"large{number}.jpg")
    # 48 pictures a step; normalised they would take 230 MB.
    large = [f"large{number}.jpg" for number in range(8)]
    lines = [record(f"l{number}", query={"images": [large[number % 8]] * 4}) for number in range(12)]
    path = write(home, "large", *lines, good=0)
    words = train(home, tmp_path / "out", f"cold_start.sources=[{{path: '{path}'}}]", "cold_start.batch_size=12",
                  "cold_start.steps=2", "data.num_workers=3", "model.max_pixels=200704", "model.min_pixels=200704",
                  "train.micro_batch_size=4")  # fmt: skip
    names = set(os.listdir("/dev/shm"))
    done = forked.run(program, *words)
    assert done.returncode == 0, done.stderr
    if "small" not in done.stdout.split():  # not allowed to mount: at least nothing of it stays
        assert set(os.listdir("/dev/shm")) <= names

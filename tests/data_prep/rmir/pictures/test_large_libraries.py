"""What lets the pipeline grow: shards that do not wait for each other, blocks of bounded memory, libraries of any kind."""

import asyncio
import io
import json
import tarfile
from collections import Counter
from contextlib import closing

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import Image
from small_runs import config_of, one_family

from data_prep.rmir import oracle
from data_prep.rmir import run as run_module
from data_prep.rmir.config import (
    LibraryConfig,
)
from data_prep.rmir.main import run_stages
from data_prep.rmir.pictures.encoders import PixelEncoder
from data_prep.rmir.pictures.library import Library, blocks, fetched, inspect
from data_prep.rmir.run import STAGES, Run
from data_prep.rmir.seed_set import _check_outside_library
from data_prep.rmir.stages import retrieve, seed
from rge.calls.local_server import LocalServer
from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.tables.pictures import file_stamp

# ------------------------------------------------------------------------------------------------- shards and fingerprints


def test_no_shard_waits_for_the_one_before(tmp_path):
    """The first question's answer comes only when every later shard is written."""
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(transient=0, malformed=0)
    first: list[str] = []
    written_before: list[str] = []
    folder = tmp_path / "out" / "generate" / "queries"

    async def answer(path, body):
        if not first:
            first.append(str(body))
            for _ in range(500):
                written_before[:] = sorted(part.name for part in folder.glob("part-*.parquet"))
                if len(written_before) == 2:
                    break
                await asyncio.sleep(0.01)
        return await answers(path, body)

    with LocalServer(answer) as server:
        config = config_of(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.queries_per_shard = 2
        config.models["writer"].concurrency = 2
        run = Run(config, progress=False)
        run_stages(run, ("seed", "generate"))
        run.close()
    assert written_before == ["part-00001.parquet", "part-00002.parquet"]
    assert len(list(folder.glob("part-*.parquet"))) == 3


# --------------------------------------------------------------------------------------------------------------- libraries


def png(number: int, side_px: int = 40) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side_px, side_px), (number * 5 % 256, number // 50, 99)).save(out, "PNG")
    return out.getvalue()


COUNT = 12
CAPTIONED = [(f"p{number}", png(number), f"thing {number}") for number in range(COUNT)]


def write_parquet(folder: str, fs) -> str:
    """Two files, of two and of one row group; the captions in a column of another name."""
    for name, some in (("a", CAPTIONED[:7]), ("b", CAPTIONED[7:])):
        names, images, captions = zip(*some, strict=True)
        table = pa.table({"id": names, "image": images, "caption": captions, "licence": ["CC0"] * len(some)})
        with fs.open(f"{folder}/{name}.parquet", "wb") as out:
            pq.write_table(table, out, row_group_size=4)
    return f"{folder}/*.parquet"


def write_tars(folder: str, fs) -> str:
    """Two tars with a JSON or a text beside each picture, and one picture without either."""
    for name, some in (("000", CAPTIONED[:7]), ("001", CAPTIONED[7:])):
        with fs.open(f"{folder}/{name}.tar", "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
            for number, (key, image, caption) in enumerate(some):
                told = (
                    ("json", json.dumps({"caption": caption, "licence": "CC0"}).encode())
                    if number % 2
                    else ("txt", caption.encode())
                )
                for ending, data in (("png", image), told):
                    member = tarfile.TarInfo(f"{key}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


def write_saved(folder: str, fs) -> str:
    names, images, captions = zip(*CAPTIONED, strict=True)
    table = datasets.Dataset.from_dict(
        {"id": names, "image": [{"bytes": image, "path": None} for image in images], "caption": captions},
        features=datasets.Features(
            {"id": datasets.Value("string"), "image": datasets.Image(), "caption": datasets.Value("string")}
        ),
    )
    table.save_to_disk(fs.unstrip_protocol(folder))
    return folder


def write_folder(folder: str, fs) -> str:
    for key, image, _ in CAPTIONED:
        with fs.open(f"{folder}/{key}.png", "wb") as out:
            out.write(image)
    return folder


def write_addresses(folder: str, fs) -> str:
    """A table of addresses in the same store."""
    fs.makedirs(f"{folder}/pictures", exist_ok=True)
    write_folder(f"{folder}/pictures", fs)
    with fs.open(f"{folder}/list.jsonl", "w") as out:
        for key, _, caption in CAPTIONED:
            place = fs.unstrip_protocol(f"{folder}/pictures/{key}.png")
            out.write(
                json.dumps(
                    {"id": key, "image": place if key == "p3" else f"pictures/{key}.png", "caption": caption}
                )
                + "\n"
            )
    return f"{folder}/list.jsonl"


WRITERS = {
    "parquet": write_parquet,
    "tar": write_tars,
    "saved": write_saved,
    "folder": write_folder,
    "table": write_addresses,
}


@pytest.mark.parametrize("where", ["here", "memory"])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_library_gives_the_same_rows_from_any_row_on(tmp_path, kind, where):
    fs = fsspec.filesystem("file" if where == "here" else "memory")
    folder = str(tmp_path / "a [1] folder") if where == "here" else f"/{tmp_path.name}-{kind}"
    fs.makedirs(folder, exist_ok=True)
    path = WRITERS[kind](folder, fs)
    if where == "here" and "*" in path:
        path = folder  # its name has the marks of a pattern
    library = Library(LibraryConfig(path=path if where == "here" else f"memory:/{path}"))
    rows = list(fetched(library.rows()))
    expected = sorted(CAPTIONED) if kind == "folder" else CAPTIONED
    assert [row["id"] for row in rows] == [name for name, _, _ in expected]
    assert [row["data"] or picture_bytes(row["ref"]) for row in rows] == [image for _, image, _ in expected]
    assert [row["caption"] for row in rows] == [
        None if kind == "folder" else caption for _, _, caption in expected
    ]
    for first in (1, 4, 6, 7, 9, COUNT):
        assert list(fetched(library.rows(first))) == rows[first:]
    assert [row["id"] for row in library.rows(pictures=False)] == [row["id"] for row in rows]
    if kind in ("parquet", "tar"):
        told = library.origins({"p1", "p2"})
        assert told == {"p1": {"licence": "CC0"}, "p2": {"licence": "CC0"} if kind == "parquet" else {}}


def test_columns_of_other_names_are_read_and_one_that_is_nowhere_is_named(tmp_path):
    table = {
        "name": ["p0"],
        "photo": [png(0)],
        "words": ["a hat"],
        "page": ["http://x"],
        "who": ["Ada"],
        "terms": ["CC0"],
    }
    pq.write_table(pa.table(table), tmp_path / "own.parquet")
    named = {
        f"{setting}_column": column
        for setting, column in zip(
            ("id", "image", "caption", "source", "author", "licence"), table, strict=True
        )
    }
    library = Library(LibraryConfig(path=str(tmp_path / "own.parquet"), **named))
    [row] = library.rows()
    assert (row["id"], row["ref"], row["data"], row["caption"]) == ("p0", None, png(0), "a hat")
    assert library.origins({"p0"}) == {"p0": {"source": "http://x", "author": "Ada", "licence": "CC0"}}
    for kind, write in WRITERS.items():
        fs = fsspec.filesystem("file")
        fs.makedirs(str(tmp_path / kind))
        path = write(str(tmp_path / kind), fs)
        for setting in ("caption_column", "source_column", "author_column", "licence_column"):
            library = Library(LibraryConfig(path=path, **{setting: "nowhere"}))
            with error_about(UserError, f"library.{setting}"):
                list(library.rows(pictures=False))
            if setting != "caption_column":
                with error_about(UserError, f"library.{setting}"):
                    library.origins({"p1"})


def test_without_a_column_of_captions_there_are_none(tmp_path):
    """Neither in a folder, whose files have names, nor in tables and archives."""
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    [row] = Library(LibraryConfig(path=str(tmp_path), caption_column=None)).rows()
    assert row["caption"] is None
    for kind, write in WRITERS.items():
        fs = fsspec.filesystem("file")
        fs.makedirs(str(tmp_path / kind))
        rows = Library(LibraryConfig(path=write(str(tmp_path / kind), fs), caption_column=None)).rows()
        assert {row["caption"] for row in rows} == {None}


def test_rows_without_ids_are_numbered_and_two_of_one_name_refused(tmp_path):
    fs = fsspec.filesystem("file")
    write_tars(str(tmp_path), fs)
    library = LibraryConfig(path=str(tmp_path), id_column=None)
    assert [row["id"] for row in Library(library).rows()][6:8] == ["000.tar/p6", "001.tar/p7"]
    (tmp_path / "001.tar").write_bytes((tmp_path / "000.tar").read_bytes())
    run = Run(config_of(tmp_path / "out", tmp_path), progress=False)
    with error_about(UserError, "p0", "twice"):
        seed(run)
    run.close()


def test_rows_of_splits_without_names_are_numbered(tmp_path):
    one = datasets.Dataset.from_dict({"image": ["a.png"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path)
    library = Library(LibraryConfig(path=str(tmp_path), id_column=None))
    assert [row["id"] for row in library.rows()] == ["train/1", "test/1"]
    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "alone")
    library = Library(LibraryConfig(path=str(tmp_path / "alone"), id_column=None))
    assert [row["id"] for row in library.rows()] == ["./1"]  # as ever


def test_pictures_without_any_other_column_are_counted(tmp_path):
    pictures = datasets.Dataset.from_dict({"image": [png(number) for number in range(40)]})
    pictures.save_to_disk(tmp_path)
    library = Library(LibraryConfig(path=str(tmp_path), id_column=None))
    ids = [row["id"] for row in library.rows()]
    assert [row["id"] for row in library.rows(pictures=False)] == ids == [f"./{n}" for n in range(1, 41)]
    assert library.origins(ids[38:]) == {"./39": {}, "./40": {}}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_several_pictures_in_a_row_are_refused(tmp_path, kind):
    path = tmp_path / f"list.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": ["p0"], "image": [[png(0), png(1)]]}), path)
    else:
        path.write_text(json.dumps({"id": "p0", "image": ["a.png", "b.png"]}))
    with error_about(UserError, f"list.{kind}", "row 1", "image"):
        list(Library(LibraryConfig(path=str(path))).rows())
    if kind == "jsonl":  # a run begun when they counted as missing goes on
        assert len(list(Library(LibraryConfig(path=str(path))).rows(pictures=False))) == 1


def test_paths_in_a_parquet_file_may_be_views_of_texts(tmp_path):
    """As some libraries write them; a path has the stamp of its own file."""
    (tmp_path / "p0.png").write_bytes(png(0))
    table = {"id": ["p0"], "image": pa.array(["p0.png"], pa.string_view())}
    pq.write_table(pa.table(table), tmp_path / "list.parquet")
    [row] = Library(LibraryConfig(path=str(tmp_path / "list.parquet"))).rows(pictures=False)
    assert (row["ref"], row["stamp"]) == (
        f"{tmp_path}/p0.png",
        f"{tmp_path}/p0.png:{file_stamp(tmp_path / 'p0.png')}",
    )


def a_store_whose_second_read_of_p3(does, tmp_path, monkeypatch):
    """The settings of a run on pictures in a store, and the number of reads by place."""
    fs = fsspec.filesystem("memory")
    path = write_folder(f"/{tmp_path.name}", fs)
    config = config_of(tmp_path / "out", f"memory:/{path}")
    config.seed.clusters, config.seed.per_cluster = 2, 5
    reads: Counter[str] = Counter()
    cat_file = type(fs).cat_file

    def read(self, place, *more, **how):
        reads[place] += 1
        if place.endswith("p3.png") and reads[place] == 2:
            return does()
        return cat_file(self, place, *more, **how)

    monkeypatch.setattr(type(fs), "cat_file", read)
    return config, reads


def test_a_picture_that_cannot_be_read_for_a_moment_costs_only_another_try(tmp_path, monkeypatch):
    def fails():
        raise OSError("connection reset")

    config, reads = a_store_whose_second_read_of_p3(fails, tmp_path, monkeypatch)
    with closing(Run(config, progress=False)) as run:
        with error_about(UserError, "p3", "unreadable"):
            seed(run)
        inspected = {place: number for place, number in reads.items() if number == 1}
        seed(run)
    assert all(reads[place] == 1 for place in inspected)


def a_list_in_a_store(tmp_path, count):
    """The settings of a run on a list of places in a store, and the places."""
    table = tmp_path / "list.jsonl"
    places = [f"/{tmp_path.name}-listed/{number}.png" for number in range(count)]
    rows = [{"id": place, "image": f"memory:/{place}"} for place in places]
    table.write_text("\n".join(map(json.dumps, rows)))
    config = config_of(tmp_path / "out", table)
    config.seed.clusters = 1
    return config, places


def test_an_outage_of_a_store_is_not_the_loss_of_all_pictures(tmp_path, monkeypatch):
    config, places = a_list_in_a_store(tmp_path, 21)
    config.library.shard_size = 5000
    fs = fsspec.filesystem("memory")
    for number, place in enumerate(places):
        fs.pipe_file(place, png(number))

    def fails(self, place):
        raise PermissionError("expired")

    with closing(Run(config, progress=False)) as run:
        with monkeypatch.context() as down:
            down.setattr(type(fs), "cat_file", fails)
            with error_about(UserError, "on_unanswered"):
                seed(run)
        assert seed(run)["usable"] == 21


def test_files_that_a_store_no_longer_has_are_lost_for_good(tmp_path):
    config, places = a_list_in_a_store(tmp_path, 21)
    config.library.shard_size = 20
    fsspec.filesystem("memory").pipe_file(places[-1], png(1))
    with closing(Run(config, progress=False)) as run:
        assert seed(run)["rejected"] == {"missing": 20}


def test_a_picture_that_has_changed_is_named_with_the_way_out(tmp_path, monkeypatch):
    config, _ = a_store_whose_second_read_of_p3(lambda: png(99), tmp_path, monkeypatch)
    with closing(Run(config, progress=False)) as run:
        with error_about(UserError, "p3", "changed"):
            seed(run)


@pytest.mark.parametrize("kind", ["folder", "parquet", "tar"])
def test_a_run_in_the_folder_of_its_library_is_refused_before_it_begins(tmp_path, kind):
    """Its exported pictures would be pictures of the library, and its tables shards of a library without pictures' files."""
    WRITERS[kind](str(tmp_path), fsspec.filesystem("file"))
    for out in (tmp_path, tmp_path / "runs" / "mine"):
        with closing(Run(config_of(out, tmp_path), progress=False)) as run:
            with error_about(UserError, "out"):
                run_stages(run, ["seed"])
    with closing(Run(config_of(tmp_path / "runs", f"file://{tmp_path}"), progress=False)) as run:
        with error_about(UserError, "out"):
            run_stages(run, ["seed"])
    with closing(Run(config_of(tmp_path / ".mine", tmp_path), progress=False)) as run:
        run.config.seed.clusters = 2
        run_stages(run, ["seed"])


@pytest.mark.parametrize(
    "path",
    [
        "nowhere://bucket/a", "memory://no-such-folder/*.parquet", "broken.tar", "broken.parquet", "other.zip",
        "no-image.parquet", "list.tar", "cut.tar",
    ],
)  # fmt: skip
def test_libraries_that_cannot_be_read_are_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for name in ("broken.tar", "broken.parquet", "other.zip"):
        (tmp_path / name).write_bytes(b"not what its name says" * 100)
    pq.write_table(pa.table({"id": ["1"], "picture": [b""]}), tmp_path / "no-image.parquet")
    for name, data in (("list", b"[]"), ("cut", b'{"caption": ')):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            member = tarfile.TarInfo("p0.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with error_about(UserError, path):
        list(Library(LibraryConfig(path=path)).rows())


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_shard_that_cannot_be_read_is_named(tmp_path, kind):
    WRITERS[kind](str(tmp_path), fsspec.filesystem("file"))
    path = sorted(tmp_path.glob(f"*.{kind}"))[1]
    path.write_bytes(path.read_bytes()[:600])
    with error_about(UserError, path.name):
        list(Library(LibraryConfig(path=str(tmp_path))).rows())


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_links_in_a_tar_lead_to_files_of_the_archive_and_nowhere_else(tmp_path, ending):
    """GNU tar stores equal files, and files under two names, as hard links."""
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"a picture")
    (folder / "a.txt").write_text("a caption")
    for kind in ("png", "txt"):
        (folder / f"b.{kind}").hardlink_to(folder / f"a.{kind}")
    for name, target in (
        ("0.png", "z.png"), ("c.png", "../s/./b.png"), ("d.png", "c.png"), ("e.png", "/etc/hostname"), ("f.png", "../../x.png"),
        ("g.png", "g.png"), ("h.png", "/".join([".."] * 20) + str(folder / "a.png")),
    ):  # fmt: skip
        (folder / name).symlink_to(target)
    (folder / "z.png").write_bytes(b"the last")
    with tarfile.open(tmp_path / f"links.{ending}", "w:gz" if ending == "tar.gz" else "w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, f"s/{file.name}")
        assert [member.type for member in tar.getmembers()].count(tarfile.LNKTYPE) == 2
    library = Library(LibraryConfig(path=str(tmp_path / f"links.{ending}")))
    found = {row["id"].removeprefix("s/"): row for row in library.rows()}
    assert {name: row["data"] for name, row in found.items()} == {
        "0": b"the last", **dict.fromkeys("abcd", b"a picture"), **dict.fromkeys("efgh"), "z": b"the last",
    }  # fmt: skip
    assert (found["a"]["caption"], found["b"]["caption"]) == ("a caption", "a caption")
    assert inspect([found["e"]], library.config)[0]["reason"] == "missing"


def test_a_text_that_is_a_link_out_of_its_tar_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "a.txt").symlink_to("../elsewhere.txt")
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        for name in ("a.png", "a.txt"):
            tar.add(tmp_path / name, name)
    with error_about(UserError, "one.tar", "a.txt"):
        list(Library(LibraryConfig(path=str(tmp_path / "one.tar"))).rows())


def test_a_caption_in_a_tar_may_begin_with_a_byte_order_mark(tmp_path):
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        for name, data in (("p0.png", png(0)), ("p0.txt", "\ufeffa hat\r\n".encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    [row] = Library(LibraryConfig(path=str(tmp_path / "one.tar"))).rows()
    assert row["caption"] == "a hat"


def test_blocks_are_bounded_by_rows_and_by_bytes():
    rows = [{"id": str(number), "data": bytes(size)} for number, size in enumerate([3, 3, 3, 9, 1, 1, 1, 1])]
    assert [len(block) for block in blocks(rows, 3, 8)] == [2, 1, 1, 3, 1]
    assert sum(blocks(rows, 100, 4), []) == rows


def test_a_stopped_seed_stage_goes_on_where_it_was_and_keeps_the_chosen_pictures(tmp_path, monkeypatch):
    """From tars in a store; stopped while the second of three blocks is embedded. The library may then go."""
    fs = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}"
    fs.makedirs(folder, exist_ok=True)
    write_tars(folder, fs)
    config = config_of(tmp_path / "out", f"memory:/{folder}")
    config.library.shard_size, config.seed.clusters = 5, 2
    whole = Run(config, progress=False)
    found = seed(whole)
    expected = whole.rows("seed", "images")
    whole.close()
    config.out = str(tmp_path / "stopped")
    run, embedded = Run(config, progress=False), []
    original = PixelEncoder.pictures

    def pictures(self, refs):
        embedded.append(len(refs))
        if len(embedded) == 2:
            raise KeyboardInterrupt
        return original(self, refs)

    monkeypatch.setattr(PixelEncoder, "pictures", pictures)
    with pytest.raises(KeyboardInterrupt):
        seed(run)
    config.library.shard_size = 4  # what is done stays done
    assert seed(run) == found
    assert embedded == [5, 5, 4, 3]
    fs.rm(folder, recursive=True)
    run.out = run.out.rename(tmp_path / "moved")
    images = run.rows("seed", "images")
    assert [{**image, "ref": None} for image in images] == [{**image, "ref": None} for image in expected]
    assert [picture_bytes(image["ref"]) for image in images] == [
        CAPTIONED[int(image["id"][1:])][1] for image in images
    ]
    assert np.array_equal(np.load(run.path("seed", "images.npy")), np.load(whole.path("seed", "images.npy")))
    run.close()


@pytest.mark.slow
def test_a_parquet_library_of_one_row_group_is_never_whole_in_memory(tmp_path):
    chance = np.random.default_rng(0)
    table = pa.table(
        {"id": [str(n) for n in range(6000)], "image": [chance.bytes(20_000) for _ in range(6000)]}
    )
    pq.write_table(table, tmp_path / "one.parquet", use_dictionary=False)
    assert pq.read_metadata(tmp_path / "one.parquet").num_row_groups == 1
    size = table.nbytes
    del table
    before, most, number = pa.total_allocated_bytes(), 0, 0
    library = Library(LibraryConfig(path=str(tmp_path / "one.parquet")))
    for block in blocks(library.rows(), 5000, 5 << 20):
        assert sum(len(row["data"]) for row in block) <= 5 << 20
        most = max(most, pa.total_allocated_bytes() - before)
        number += len(block)
    assert number == 6000
    assert most < 0.6 * size, f"{most >> 20} of {size >> 20} MB at once"


@pytest.mark.slow
def test_answers_leave_memory_with_their_shard(tmp_path, monkeypatch):
    one_family(tmp_path / "library.csv")
    held: list[int] = []
    close = run_module._Shards.close

    def count(shards):
        assert len(shards.todo) > 1
        held.append(sum(len(shard.outcomes) for shard in shards.todo))
        close(shards)

    monkeypatch.setattr(run_module._Shards, "close", count)
    with LocalServer(oracle.Oracle(transient=0, malformed=0)) as server:
        config = config_of(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.queries_per_shard = 2
        run = Run(config, progress=False)
        run_stages(run, STAGES[: STAGES.index("retrieve")])
    run.close()
    assert held == [0, 0]


@pytest.mark.slow
def test_candidates_are_searched_for_in_blocks_of_bounded_memory(tmp_path, monkeypatch):
    one_family(tmp_path / "library.csv")
    with LocalServer(oracle.Oracle(transient=0, malformed=0)) as server:
        run = Run(config_of(tmp_path / "out", tmp_path / "library.csv", server.url), progress=False)
        run_stages(run, STAGES[: STAGES.index("judge")])
    whole, sizes = run.rows("retrieve", "triplets"), []
    original = PixelEncoder.texts
    monkeypatch.setattr(
        PixelEncoder, "texts", lambda self, texts, **how: sizes.append(len(texts)) or original(self, texts)
    )
    images = len(run.rows("seed", "images"))
    for memory_mb, queries in ((512, None), (16 * images * 3 / 2**20, 3)):
        run.config.retrieve.memory_mb = memory_mb
        sizes.clear()
        number = retrieve(run)["queries"]
        assert run.rows("retrieve", "triplets") == whole
        assert max(sizes) == (queries or number) < number + 1
        assert sum(sizes) == number > 3
    run.close()


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("**/*.parquet", "run"),
        ("*/*/*.parquet", "run"),
        ("*/*.parquet", "."),
        ("[a-z]*/**/*.parquet", "run"),
    ],
)
def test_a_run_where_the_pattern_of_its_library_would_find_it_is_refused(tmp_path, pattern, out):
    """Its second start would read its own tables as shards."""
    for depth in ("a", "a/b", "a/b/c"):
        (tmp_path / depth).mkdir()
        write_parquet(str(tmp_path / depth), fsspec.filesystem("file"))
    for start in ("", "file://"):
        with closing(Run(config_of(tmp_path / out, f"{start}{tmp_path}/{pattern}"), progress=False)) as run:
            with error_about(UserError, "out"):
                run_stages(run, ["seed"])


@pytest.mark.parametrize(
    ("pattern", "out"), [("**/*.parquet", ".run"), ("a/*.parquet", "run"), ("*.parquet", "run")]
)
def test_a_run_that_the_pattern_of_its_library_does_not_find(tmp_path, pattern, out):
    write_parquet(str(tmp_path), fsspec.filesystem("file"))
    (tmp_path / "a").mkdir()
    write_parquet(str(tmp_path / "a"), fsspec.filesystem("file"))
    config = config_of(tmp_path / out, f"{tmp_path}/{pattern}")
    with closing(Run(config, progress=False)) as run:
        _check_outside_library(run)

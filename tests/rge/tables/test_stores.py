"""Object stores and Lance tables as sources: the entries of a folder, and named errors within a time."""

import errno
import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pdfs import page, pdf
from PIL import Image

from rge.index.sources import load, read_source
from rge.tables import stores
from rge.tables.stores import StoreError


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8 + number, 9), (5 * number, 0, 90)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def stored(tmp_path):
    """A folder, and the same in a store, emptied afterwards."""
    local = tmp_path / "photos"
    (local / "rome").mkdir(parents=True)
    for name in ("a.png", "rome/b.png", ".hidden.png"):
        (local / name).write_bytes(png(len(name)))
    (local / "a.txt").write_text("a padlock")
    (local / "note.txt").write_text("on its own")
    (local / "x.raw").write_bytes(b"x")
    (local / "manual.pdf").write_bytes(pdf([page("first"), page("second")]))
    fs = fsspec.filesystem("memory")
    fs.put(str(local), "/bucket/photos", recursive=True)
    yield local, "memory://bucket/photos"
    fs.rm("/bucket", recursive=True)


def contents(source):
    return {entry.id: (load(entry).digest, load(entry).text, entry.metadata) for entry in source.entries}


def test_a_folder_in_a_store_has_the_entries_of_the_folder(stored):
    local, address = stored
    here, there = read_source(local), read_source(address + "/")
    assert contents(there) == contents(here)
    assert len(there.entries) == 5
    assert [entry.id for entry in there.entries] == [entry.id for entry in here.entries]
    assert str(there.skipped) == str(here.skipped)
    assert there.name == address
    assert contents(read_source(f"{address}/manual.pdf")) == contents(read_source(local / "manual.pdf"))
    [left_out] = {entry.id for entry in here.entries} - {
        entry.id for entry in read_source(address, exclude=("rome/",)).entries
    }
    assert left_out == "rome/b.png"
    fsspec.filesystem("memory").pipe_file("/bucket/photos/a.png", png(40))
    changed = read_source(address)
    assert [a.id for a, b in zip(changed.entries, there.entries, strict=True) if a.stamp != b.stamp] == [
        "a.png"
    ]


def test_tables_in_a_store_and_in_lance(stored, tmp_path):
    local, address = stored
    rows = {"id": ["7", "8"], "text": ["a", None], "image": [png(1), png(2)], "year": [2020, 2021]}
    pq.write_table(pa.table(rows), local / "pictures.parquet")
    (local / "list.csv").write_text("image,text\na.png,one\nrome/b.png,two\n")
    fs = fsspec.filesystem("memory")
    for name in ("pictures.parquet", "list.csv"):
        fs.put_file(str(local / name), f"/bucket/photos/{name}")
        assert contents(read_source(f"{address}/{name}")) == contents(read_source(local / name))
    lancedb = pytest.importorskip("lancedb", exc_type=ImportError)
    lancedb.connect(tmp_path).create_table("pictures", pa.table(rows))
    source = read_source(tmp_path / "pictures.lance")
    assert contents(source) == contents(read_source(local / "pictures.parquet"))
    lancedb.connect(tmp_path).open_table("pictures").add(
        pa.table({key: [value[0]] for key, value in rows.items()} | {"id": ["9"]})
    )
    assert contents(read_source(f"{tmp_path}/pictures.lance"))["9"][0] == contents(source)["7"][0]


class Faulty(MemoryFileSystem):
    """Fails as stores do."""

    protocol = "faulty"
    store: dict = {}
    error: BaseException | None = None
    blocked = threading.Event()

    def info(self, path, **kwargs):
        if self.error is None:
            self.blocked.wait(60)
        raise self.error

    exists = ls = info


def typed(name: str, base: type = Exception, cause: BaseException | None = None, **fields) -> BaseException:
    """An error of a package that need not be installed; its message says nothing."""
    error = type(name, (base,), fields)("?")
    error.__cause__ = cause
    return error


def of_s3(code: str) -> BaseException:
    """As s3fs makes it of botocore's."""
    error = PermissionError("?")
    error.__cause__ = typed("ClientError", response={"Error": {"Code": code}})
    return error


AZURE = type(
    "ClientAuthenticationError", (type("HttpResponseError", (Exception,), {"status_code": 403}),), {}
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (typed("NoCredentialsError"), "credentials"),
        (typed("RefreshError"), "credentials"),
        (typed("PartlyHandled", cause=typed("NoCredentialsError")), "credentials"),
        (of_s3("ExpiredToken"), "credentials"),
        (of_s3("AccessDenied"), "denied"),
        (typed("CredentialUnavailableError", AZURE, status_code=None), "credentials"),
        (typed("Raised", AZURE, error_code="AuthenticationFailed"), "credentials"),
        (typed("Raised", AZURE, error_code="AuthorizationFailure"), "denied"),
        (typed("HttpResponseError", status_code=404), "missing"),
        (typed("ClientResponseError", status=401), "credentials"),  # aiohttp's
        (typed("ClientResponseError", status=403), "denied"),
        (typed("HttpError", code=401), "credentials"),  # gcsfs'
        (OSError("Forbidden: bucket"), "denied"),  # likewise, without a type
        (typed("AuthenticationException"), "credentials"),  # paramiko's
        (OSError(errno.EACCES, "?"), "denied"),
        (OSError(errno.ENOENT, "?"), "missing"),
        (typed("ServerError", status=503), "other"),
        (PermissionError("?"), "denied"),
        (FileNotFoundError("The specified bucket does not exist"), "missing"),
        (FileNotFoundError("bucket/credentials.parquet"), "missing"),
        (OSError("connection reset"), "other"),
        (None, "silent"),
    ],
)
def test_what_a_store_cannot_do_is_named_in_time(monkeypatch, error, kind):
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "error", error)
    monkeypatch.setattr(Faulty, "blocked", threading.Event())
    monkeypatch.setattr(stores, "WAIT_S", 0.1)
    for name in ("folder", "table.parquet", "x.pdf"):
        with pytest.raises(StoreError) as raised:
            read_source(f"faulty://bucket/{name}")
        assert raised.value.kind == kind
    Faulty.blocked.set()


def test_copies_are_few_and_those_of_killed_processes_go(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    left_over = tmp_path / f"{stores.PREFIX}{int(ended.stdout)}-x"
    left_over.mkdir()
    monkeypatch.setattr(stores, "COPIES", 2)
    monkeypatch.setattr(stores, "COPIES_BYTES", 1)
    copies, fs = stores._Copies(), fsspec.filesystem("memory")
    for number in range(4):
        fs.pipe_file(f"/bucket/{number}.bin", bytes([number]))
    paths = [copies.path(f"memory://bucket/{number}.bin") for number in (0, 1, 0, 2, 0)]
    assert not left_over.exists()
    assert paths[0] == paths[2] == paths[4]
    assert [Path(path).exists() for path in paths] == [True, False, True, True, True]
    del copies
    assert not list(tmp_path.glob(f"{stores.PREFIX}*"))


def test_a_missing_package_and_a_missing_bucket(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError) as raised:
        read_source("s3://bucket/photos")
    assert raised.value.kind == "package"
    with pytest.raises(StoreError) as raised:
        read_source("memory://no-bucket/photos")
    assert raised.value.kind == "missing"


@pytest.mark.slow
def test_a_store_is_indexed_searched_and_left(stored, tmp_path, monkeypatch):
    pytest.importorskip("lancedb", exc_type=ImportError)
    from rge.index.__main__ import main as index
    from rge.index.embed import main as embed
    from rge.index.store import Index

    local, address = stored
    monkeypatch.chdir(tmp_path)
    for src, out in ((address, "there"), (str(local), "here")):
        index([src, f"out={out}", "checkpoint=demo"])
        embed([src, f"out={out}.parquet", "checkpoint=demo"])
    assert pq.read_table("there.parquet").equals(pq.read_table("here.parquet"))
    found = Index.open("there")
    assert found.sources() == {address: 5}
    [hits] = found.search(
        pq.read_table("here.parquet")["vector"].combine_chunks().flatten().to_numpy().reshape(5, -1)[:1], 1
    )
    assert (hits[0].id, hits[0].gone) == ("a.png", False)
    index([address + "/", "out=there", "remove=true"])
    assert len(Index.open("there")) == 0

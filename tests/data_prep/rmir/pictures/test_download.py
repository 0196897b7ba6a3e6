"""A library of web addresses: fetched over real HTTP, retried, limited, and every loss counted."""

import http.server
import io
import json
import resource
import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from faults import error_about
from PIL import Image

from data_prep.download import main
from data_prep.rmir import stages
from data_prep.rmir.config import DownloadConfig, LibraryConfig, load_config
from data_prep.rmir.main import run_stages
from data_prep.rmir.pictures import download
from data_prep.rmir.pictures.download import fetch, local_path, without_secrets
from data_prep.rmir.pictures.library import Library
from data_prep.rmir.run import Run
from rge.common.errors import UserError
from rge.common.files import FileError
from rge.common.images import PictureIndex, load_image
from rge.data.config import RecordsConfig
from rge.data.readers import open_records

PATIENT = DownloadConfig(backoff_s=0.01, timeout_s=60.0, max_retries=2, max_bytes=20_000)


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Site(http.server.BaseHTTPRequestHandler):
    asked: Counter[str] = Counter()
    over = threading.Event()

    def do_GET(self):
        path = self.path.partition("?")[0]
        Site.asked[path] += 1
        if path == "/flaky" and Site.asked[path] < 3:
            return self.answer(503, b"busy")
        if path == "/slow":
            Site.over.wait()
        if path == "/moved":
            self.send_response(302)
            self.send_header("location", "/good")
            self.send_header("content-length", "0")
            self.end_headers()
            return None
        if path == "/page":
            return self.answer(200, b"<html>please log in</html>", "text/html")
        if path == "/huge":
            return self.answer(200, b"x" * 50_000)
        if path in ("/good", "/flaky", "/slow") or path.startswith("/n"):
            return self.answer(200, picture(len(path) + sum(map(ord, path))))
        return self.answer(404, b"no")

    def answer(self, status, body, kind="image/png"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            pass  # the caller has had enough

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    Site.asked = Counter()
    Site.over = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Site.over.set()
    server.shutdown()
    server.server_close()


def test_what_is_fetched_and_why_the_rest_is_not(site, tmp_path):
    names = ["good", "flaky", "moved", "lost", "page", "huge"]
    wrong = ["http://me:pw@host:port/y?key=1", "http://xn--/z", "http://127.0.0.1:99999/w"]
    urls = [f"{site}/{name}" for name in names] + ["http://127.0.0.1:9/x", *wrong]
    lost = fetch(urls, tmp_path, PATIENT)
    assert not any(reason.__traceback__ for reason in lost.values()), "it would keep the data in memory"
    assert {url.rpartition("/")[2]: str(reason) for url, reason in lost.items()} == {
        "lost": "HTTP 404",
        "page": "a text, not a picture",
        "huge": "over 20,000 bytes",
        "x": "no connection",
        "y?key=1": "not a working address",
        "z": "not a working address",
        "w": "not a working address",
    }
    assert Site.asked["/flaky"] == 3
    assert Site.asked["/lost"] == 1, "what no retry can mend is asked once"
    assert (
        local_path(f"{site}/good", tmp_path).read_bytes()
        == local_path(f"{site}/moved", tmp_path).read_bytes()
    )
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3, "and nothing half"
    Site.asked.clear()
    assert fetch(urls[:3], tmp_path, PATIENT) == {}
    assert not Site.asked, "what is there is not asked for again"


def test_a_server_that_does_not_answer_is_asked_again_and_given_up(site, tmp_path, monkeypatch):
    attempts, get = Counter(), download._get

    async def counted(client, url, config):
        # Counted here: a hurried caller on a slow machine may hang up before the server has read a word.
        attempts[url] += 1
        return await get(client, url, config)

    monkeypatch.setattr(download, "_get", counted)
    url = f"{site}/slow"
    hasty = DownloadConfig(backoff_s=0.01, timeout_s=0.2, max_retries=2)
    assert str(fetch([url], tmp_path, hasty)[url]) == "no answer in time"
    assert attempts == {url: 3}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_disk_stops(site, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(FileError):
            fetch([f"{site}/good"], tmp_path, PATIENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_table_of_addresses_becomes_a_seed_set(site, tmp_path):
    table = tmp_path / "library.csv"
    rows = [f"{number},{site}/n{number}?token=secret,thing {number}" for number in range(6)]
    table.write_text("\n".join(["id,image,caption", *rows, f"gone,{site}/lost?token=secret,"]) + "\n")
    words = [
        "config=demo",
        f"library.path={table}",
        f"out={tmp_path / 'out'}",
        "seed.clusters=2",
        "seed.per_cluster=9",
    ]
    words += ["image_encoder={kind: pixels}", "caption_encoder={kind: hashing}", "library.shard_size=4"]
    run = Run(load_config(words), progress=False)
    found = stages.seed(run)
    assert (found["listed"], found["usable"], found["seed"]) == (7, 6, 6)
    assert found["rejected"] == {"download: HTTP 404": 1}
    detail = run.rows("seed", "rejected")[0]["detail"]
    assert detail == f"{site}/lost"
    assert Site.asked["/n1"] == 1
    run.close()
    texts = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet"))
    assert b"secret" not in texts


def a_table_of(site, tmp_path, names):
    """The words of a run on pictures at addresses."""
    table = tmp_path / "library.csv"
    table.write_text("\n".join(["id,image", *(f"{name},{site}/{name}" for name in names)]) + "\n")
    words = ["config=demo", f"library.path={table}", f"out={tmp_path / 'out'}", "seed.clusters=1"]
    return [*words, "download.max_retries=0"]


def seeded(*words):
    with closing(Run(load_config(words), progress=False)) as run:
        run_stages(run, ["seed"])
        return run.done("seed")["counts"]


@pytest.fixture
def down(monkeypatch):
    """Ends of the addresses that cannot be reached."""
    get, ends = download._get, set("d")

    async def sometimes(client, url, config):
        if url[-1] in ends:
            raise download.Lost("no connection", may_pass=True)
        return await get(client, url, config)

    monkeypatch.setattr(download, "_get", sometimes)
    return ends


@pytest.mark.parametrize(("count", "shard_size"), [(6, 6), (25, 5000)])
def test_an_outage_is_not_the_loss_of_all_pictures(site, tmp_path, down, count, shard_size):
    """The same command goes on after it."""
    words = [*a_table_of(site, tmp_path, [f"n{number}d" for number in range(count)])]
    words += [f"library.shard_size={shard_size}"]
    with error_about(UserError, f"{site}/n0d"):
        seeded(*words)
    down.clear()
    assert not [reason for reason in seeded(*words)["rejected"] if "download" in reason]


def test_dead_links_do_not_stop_a_library_whose_other_pictures_came(site, tmp_path, down):
    """A full block of one dead host, and a last block of a single dead link; then an extension with a dead link."""
    alive, dead = [f"n{number}" for number in range(20)], [f"n{number}d" for number in range(21)]
    words = [*a_table_of(site, tmp_path, alive + dead), "library.shard_size=20"]
    counts = seeded(*words)
    assert (counts["usable"], counts["rejected"]) == (20, {"download: no connection": 21})
    a_table_of(site, tmp_path, [*alive, *dead, "n99d"])
    counts = seeded(*words, "library.changed=extend")
    assert (counts["usable"], counts["rejected"]) == (20, {"download: no connection": 22})


def test_pictures_that_are_gone_for_good_need_no_edited_library(site, tmp_path, down):
    words = [*a_table_of(site, tmp_path, [f"n{number}d" for number in range(20)] + ["n1"])]
    words += ["library.shard_size=20"]
    with error_about(UserError, "on_unanswered"):
        seeded(*words)
    assert seeded(*words, "on_unanswered=proceed")["usable"] == 1


def test_addresses_are_stored_without_secrets():
    assert without_secrets("https://me:pw@host/a.png?sig=1#x") == "https://host/a.png"
    assert without_secrets("https://me:pw@host:port/a.png?sig=1#x") == "https://host:port/a.png"


def test_a_table_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"id": "1"\n')
    with error_about(UserError, "t.jsonl", 1, "library.path"):
        list(Library(LibraryConfig(path=str(tmp_path / "t.jsonl"))).rows())


def test_records_that_name_addresses_get_files(site, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a b.png").write_bytes(picture(1))
    rows = [
        {"query": {"text": "a", "images": [f"{site}/good", "/data/local-files/?d=pictures/a%20b.png"]}, "positives": [{"image": f"{site}/moved"}]},
        {"query": {"text": "b"}, "positives": [{"text": "x"}], "negatives": [{"image": {"path": f"{site}/good"}}]},
        {"query": {"text": "c"}, "positives": [{"image": f"{site}/lost?key=secret"}]},
    ]  # fmt: skip
    source, out = tmp_path / "mine.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"records={source}", f"out={out}", "download.backoff_s=0.01"]
    with error_about(UserError, "lost") as raised:
        main(words)
    assert "secret" not in str(raised.value)
    assert not (out / "mine.jsonl").exists()
    Site.asked.clear()
    main([*words, "missing=drop"])
    assert set(Site.asked) == {"/lost"}, "what is there is not asked for again"
    first, second = open_records(RecordsConfig(path=str(out / "mine.jsonl")), pictures=PictureIndex())
    assert [load_image(ref).size for ref in first.query.images] == [(40, 40)] * 2
    assert first.query.images[0] == second.negatives[0].image


def test_a_table_keeps_its_columns(site, tmp_path):
    (tmp_path / "a.csv").write_text(f"q,photo\na,{site}/good\n")
    main([f"records={tmp_path / 'a.csv'}", f"out={tmp_path / 'out'}", "fields=photo"])
    columns = {"query.text": "q", "positives.image": "photo"}
    [record] = open_records(RecordsConfig(dataset=str(tmp_path / "out/a.jsonl"), columns=columns))
    assert (record.query.text, load_image(record.positives[0].image).size) == ("a", (40, 40))
    with error_about(UserError, "a.csv", "query.images, positives.image, negatives.image"):
        main([f"records={tmp_path / 'a.csv'}", f"out={tmp_path / 'out'}"])

"""Releases from a stand-in of the hub: one commit, resumed, unpacked, and counted against what was published."""

import io
import json
import os
import signal
import tarfile
import time
import zipfile

import pandas as pd
import pytest
from faults import error_about
from hub import COMMIT, hub

from eval.__main__ import main
from eval.benchmarks.release_files import ReleaseError
from eval.benchmarks.releases.mmeb2 import DOCUMENTS
from eval.benchmarks.releases.mmeb2_video import MEMBERS
from eval.commands.fetch import _TABLES_OF, FetchOptions, _repo_of, fetch
from rge.common.errors import UserError
from rge.common.mmeb_prompts import SETS
from rge.web.releases import unpack_archive


def table(rows):
    sink = io.BytesIO()
    pd.DataFrame({"qry_text": ["a"] * rows}).to_parquet(sink)
    return sink.getvalue()


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_test")
    with hub(monkeypatch) as held:
        whole = table(1000)
        held.files = {f"{name}/test-00000-of-00001.parquet": whole for name in SETS}
        pictures = io.BytesIO()
        with zipfile.ZipFile(pictures, "w") as file:
            file.writestr("CIRR/1.jpg", b"a picture")
            file.writestr("../outside.jpg", b"nobody wants this")
        held.files["images.zip"] = pictures.getvalue()
        yield held


def downloads(held):
    return [one for one in held.asked if one.startswith("GET") and "/resolve/" in one]


def test_a_whole_release(held, tmp_path, capsys):
    assert main(["fetch", "mmeb", f"out={tmp_path / 'r'}"]) == 0
    about = json.loads((tmp_path / "r/fetch.json").read_text())
    assert about["commits"] == {"TIGER-Lab/MMEB-eval": COMMIT}
    assert about["counts"] == {"mmeb": {"num_members": 36, "num_queries": 36_000}}
    assert about["partial"] == []
    assert (tmp_path / "r/images/CIRR/1.jpg").read_bytes() == b"a picture"
    assert not (tmp_path / "outside.jpg").exists()
    assert not (tmp_path / "r/outside.jpg").exists()
    assert f"rge eval import mmeb src={tmp_path / 'r'} out=DIR" in capsys.readouterr().out
    assert all(f"/resolve/{COMMIT}/" in one for one in downloads(held))
    num = len(downloads(held))
    assert num == 37
    fetch(FetchOptions("mmeb", tmp_path / "r"))
    assert len(downloads(held)) == num  # everything is there


def test_an_interrupted_download_goes_on(held, tmp_path):
    last = held.files.pop("GQA/test-00000-of-00001.parquet")
    whole = held.answer

    def broken(method, path, body, address):
        if path.endswith("GQA/test-00000-of-00001.parquet") and "/resolve/" in path:
            return 403, {"error": "not now"}
        return whole(method, path, body, address)

    held.files["GQA/test-00000-of-00001.parquet"] = last
    held.answer = broken
    with error_about(UserError, "TIGER-Lab/MMEB-eval"):
        fetch(FetchOptions("mmeb", tmp_path / "r"))
    held.answer = whole
    before = len(downloads(held))
    fetch(FetchOptions("mmeb", tmp_path / "r"))
    again = downloads(held)[before:]
    assert any("GQA" in one for one in again)
    assert len(downloads(held)) <= 38  # nothing that was there was fetched again


@pytest.mark.slow
def test_ctrl_c_ends_files_that_are_under_way_and_they_go_on(held, tmp_path, monkeypatch, request):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14)
    large, whole = "CIRR/test-00000-of-00001.parquet", held.answer
    held.files[large] = bytes(64 << 20)

    def interrupting(method, path, body, address):
        if method == "GET" and path.endswith(large):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread has seen it before the first byte is there
        return whole(method, path, body, address)

    held.answer = interrupting
    handler, before = signal.default_int_handler, signal.getsignal(signal.SIGINT)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    signal.signal(signal.SIGINT, handler)  # a background shell ignores Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        fetch(FetchOptions("mmeb", tmp_path / "r"))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "r" / large).exists()
    held.answer, held.files[large] = whole, table(1000)
    fetch(FetchOptions("mmeb", tmp_path / "r"))
    assert (tmp_path / "r" / large).read_bytes() == held.files[large]


def test_less_than_was_published_is_refused_or_marked(held, tmp_path, capsys):
    held.files["GQA/test-00000-of-00001.parquet"] = table(3)
    del held.files["CIRR/test-00000-of-00001.parquet"]
    out = tmp_path / "r"
    with error_about(UserError, out, "partial"):
        fetch(FetchOptions("mmeb", out))
    fetch(FetchOptions("mmeb", out, partial=True))
    assert "WARNING: partial: 35 of 36 sets" in capsys.readouterr().err
    assert json.loads((out / "fetch.json").read_text())["partial"] == [
        "35 of 36 sets",
        "34,003 of 36,000 queries",
    ]


def test_one_folder_holds_one_commit(held, tmp_path):
    fetch(FetchOptions("mmeb", tmp_path / "r"))
    about = json.loads((tmp_path / "r/fetch.json").read_text())
    about["commits"] = {"TIGER-Lab/MMEB-eval": "2" * 40}
    (tmp_path / "r/fetch.json").write_text(json.dumps(about))
    with error_about(UserError, "TIGER-Lab/MMEB-eval"):
        fetch(FetchOptions("mmeb", tmp_path / "r", revision="main"))
    with error_about(UserError, "out"):
        fetch(FetchOptions("mmbright", tmp_path / "r"))


def test_mmbright_and_pinpoint_are_counted_too(held, tmp_path):
    domain = table(50)
    held.files = {f"examples/d{number}.parquet": domain for number in range(29)}
    held.files |= {f"examples_multimodal/d{number}.parquet": table(42) for number in range(29)}
    with error_about(UserError, "b", "partial"):
        fetch(FetchOptions("mmbright", tmp_path / "b"))
    held.files = {"pinpoint_licensed.parquet": table(7635), "index_signatures.txt": b"a\nb\n"}
    with error_about(UserError, "repo"):
        fetch(FetchOptions("pinpoint", tmp_path / "p"))
    with error_about(UserError, "p", "partial"):
        fetch(FetchOptions("pinpoint", tmp_path / "p", repo="me/pinpoint"))


def archive_of(names):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as file:
        for name in names:
            about = tarfile.TarInfo(name)
            about.size = 1
            file.addfile(about, io.BytesIO(b"x"))
    return sink.getvalue()


@pytest.fixture
def hub_of_videos(held):
    """Repositories with the tables of MMEB-V2's videos, and one with frames, where the release's own script unpacks them."""
    repositories, inside = {}, {}
    for name, member in MEMBERS.items():
        kind, folder = member.folder.split("/")
        rows = io.BytesIO()
        pd.DataFrame({"video_id": ["a"] * -(-member.num_queries // len(member.tables))}).to_parquet(rows)
        tables = {f"data/{word}-0.parquet": rows.getvalue() for word in member.tables}
        repositories[_TABLES_OF.get(name, f"VLM2Vec/{name}")] = tables | {"raw/clip.zip": b"not wanted"}
        places = {"video_ret": f"data/ziyan/video_retrieval/{folder}/frames", "video_cls": folder}
        inside.setdefault(kind, []).append(f"{places.get(kind, member.folder)}/clip/1.jpg")
    archives = {f"video-tasks/frames/{kind}.tar.gz": archive_of(names) for kind, names in inside.items()}
    whole = archives.pop("video-tasks/frames/video_qa.tar.gz")
    archives |= {f"video-tasks/frames/video_qa.tar.gz-0{n}": whole[n * 200 : (n + 1) * 200] for n in range(4)}
    archives["video-tasks/frames/video_qa.tar.gz-04"] = whole[800:]
    repositories["TIGER-Lab/MMEB-V2"] = archives | {"image-tasks/mmeb_v1.tar.gz": b"not wanted"}
    answer = held.answer

    def of_repository(method, path, body, address):
        held.files = next((files for name, files in repositories.items() if f"/{name}/" in f"{path}/"), {})
        return answer(method, path, body, address)

    held.answer = of_repository
    held.repositories = repositories
    return held


def test_videos_are_fetched_with_their_tables(hub_of_videos, tmp_path, capsys):
    """Tables and frames alone, from 19 repositories; counted against the release's scores, and refused if they lie elsewhere."""
    out = tmp_path / "r"
    options = FetchOptions("mmeb2", out, part="video")
    assert fetch(options) == out
    about = json.loads((out / "fetch.json").read_text())
    assert about["counts"] == {"video": {"num_members": 18, "num_queries": 34_940}}
    assert len(about["commits"]) == 19
    assert not list(out.rglob("*.zip"))
    assert not (out / "image-tasks").exists()
    for member in MEMBERS.values():
        folder = member.frames(out / "video-tasks/frames")
        assert (folder / "clip/1.jpg").read_bytes() == b"x"
    assert f"rge eval import mmeb2 src={out} part=video out=DIR" in capsys.readouterr().out
    num = len(downloads(hub_of_videos))
    fetch(options)
    assert len(downloads(hub_of_videos)) == num

    frames = hub_of_videos.repositories["TIGER-Lab/MMEB-V2"]
    frames["video-tasks/frames/video_cls.tar.gz"] = archive_of(["elsewhere/K700/clip/1.jpg"])
    with error_about(ReleaseError, "video_cls", "layout"):
        fetch(FetchOptions("mmeb2", tmp_path / "other", part="video"))
    del frames["video-tasks/frames/video_cls.tar.gz"]
    with error_about(UserError, "less", "partial"):
        fetch(FetchOptions("mmeb2", tmp_path / "less", part="video"))


def test_what_cannot_be_is_refused(tmp_path, capsys):
    assert main(["fetch", "mmebb", f"out={tmp_path}"]) == 2
    assert "did you mean 'mmeb'?" in capsys.readouterr().err
    with error_about(UserError, "revision"):
        fetch(FetchOptions("mmeb2", tmp_path, revision="main"))
    assert len({_repo_of(name) for name in DOCUMENTS}) == 24
    assert _repo_of("ViDoRe_esg_reports_v2_multilingual") == "vidore/esg_reports_v2"


@pytest.mark.parametrize("newer", [True, False])
def test_an_archive_is_unpacked_into_its_folder_and_nowhere_else(tmp_path, monkeypatch, newer):
    """Python before 3.11.4, such as Debian 12's, has no filters."""
    if not newer:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "a.txt").write_text("a")
    for name, fits in (("in/a.txt", True), ("../b.txt", False)):
        archive, folder = tmp_path / f"{fits}.tar.gz", tmp_path / f"out {fits}"
        with tarfile.open(archive, "w:gz") as file:
            file.add(tmp_path / "a.txt", name)
        if fits:
            unpack_archive(archive, [archive], folder)
            assert (folder / name).read_text() == "a"
            continue
        with error_about(UserError, "False.tar.gz"):
            unpack_archive(archive, [archive], folder)
        assert not (tmp_path / "b.txt").exists()

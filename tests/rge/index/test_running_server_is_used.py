"""`rge search` and `rge explore` find a running `rge serve` of the same user, and use its model."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import forked
import httpx
import pytest

pytest.importorskip("fastapi", exc_type=ImportError)
pytest.importorskip("lancedb", exc_type=ImportError)

from PIL import Image

from rge import __version__
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT
from rge.embedder import Embedder
from rge.explore.explorer import demo_examples
from rge.explore.local import found_by_commands
from rge.index import search as search_module
from rge.index import warm
from rge.index.__main__ import main as index
from rge.index.search import main as search


@pytest.fixture(scope="module")
def demo():
    return Embedder.from_pretrained("demo")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RGE_RUN", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for colour in ("red", "green", "blue"):
        Image.new("RGB", (40, 50), colour).save(tmp_path / "photos" / f"{colour}.png")
    index(["photos", "out=gallery", "checkpoint=demo"])
    return tmp_path / "run"


def rge(*words):
    """A command in a process of its own, which may import nothing heavy."""
    code = (
        "import sys, runpy; sys.argv = ['rge', *sys.argv[1:]]\n"
        "try: runpy.run_module('rge', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    print('heavy:', sorted({'torch', 'lancedb', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "    sys.exit(ended.code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_search_is_answered_by_the_running_server(run, demo, capsys, monkeypatch):
    words = ["gallery", "What is this?", "image=photos/red.png", "k=2", "where=album = 'photos'"]
    capsys.readouterr()
    search([*words, "server=none"])
    own = capsys.readouterr().out
    with found_by_commands(demo, "demo"):
        done = rge("search", *words)
        assert done.returncode == 0, done.stderr
        first, rest = done.stdout.split("\n", 1)
        assert first == f"answered by rge serve with demo, at {run}/{os.getpid()}.sock"
        assert rest == f"{own}heavy: []\n"
        wrong = rge("search", "gallery", "x", "where=nothing > 1")
        assert (wrong.returncode, "is not a valid condition on" in wrong.stderr) == (2, True)
        # Refused, and not asked where plugins are to be loaded here.
        monkeypatch.setattr(search_module, "_here", lambda asked: ("here", []))
        search([*words, "server=none"])
        search([*words, "plugins=rge.common.errors"])
        assert capsys.readouterr().out.count("here") == 2
        mode = run.stat().st_mode & 0o777
    assert mode == 0o700
    assert list(run.iterdir()) == []
    search(words)
    assert capsys.readouterr().out.startswith("here")


def test_a_server_with_another_checkpoint_or_version_is_passed_over(run, demo, tmp_path, monkeypatch, capsys):
    other = shutil.copytree(DEMO_CHECKPOINT, tmp_path / "other")
    settings = json.loads((other / "rge.json").read_text())
    (other / "rge.json").write_text(json.dumps(settings | {"step": 1}))
    monkeypatch.setattr(search_module, "_here", lambda asked: ("here", []))
    with found_by_commands(Embedder.from_pretrained(other), "other"):
        search(["gallery", "x"])
        assert capsys.readouterr().out == "here\n\nthe index is empty\n"
        assert warm.ask_server("auto", "/explore", {"index": None, "host": "127.0.0.1"}) is None
    with found_by_commands(demo, "demo"):
        monkeypatch.setattr(warm, "__version__", __version__ + ".1")
        search(["gallery", "x"])
        assert "here" in capsys.readouterr().out


def test_what_a_killed_server_left_is_removed_and_a_folder_of_others_is_not_trusted(run, demo, capsys):
    run.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(run / "1.sock"))
    left.close()
    assert warm.ask_server("auto", "/search", {}) is None
    assert not (run / "1.sock").exists()
    run.chmod(0o755)
    with found_by_commands(demo, "demo"):
        assert list(run.iterdir()) == []
    assert "will not find this server: " in capsys.readouterr().err
    assert not warm.is_private(run)


def test_a_server_that_does_not_answer_is_named(run, monkeypatch):
    run.mkdir(mode=0o700)
    monkeypatch.setattr(warm, "WAIT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(run / "1.sock"))
        silent.listen()
        with pytest.raises(
            UserError, match=r"1\.sock did not answer within 0\.2 s; server=none loads the model here"
        ):
            warm.ask_server("auto", "/search", {})
        silent.accept()[0].close()  # the one that timed out
        ending = threading.Thread(target=lambda: silent.accept()[0].close())
        ending.start()
        with pytest.raises(UserError, match="ended while it was asked"):
            warm.ask_server("auto", "/search", {})
        ending.join(10)


def test_the_explorer_is_served_by_the_running_server(run, demo):
    with found_by_commands(demo, "demo"):
        words = ("-m", "rge", "explore", "index=gallery", "port=0")
        with forked.Program(*words, cwd=Path.cwd(), RGE_RUN=os.environ["RGE_RUN"]) as program:
            said = rf"^answered by rge serve with demo, at {run}/{os.getpid()}.sock\ndemo, 3 items: (http://127\.0\.0\.1:\d+) "
            with httpx.Client(base_url=program.printed(said)[1], timeout=60) as client:
                assert client.get("/api/about").json()["items"] == 3
                assert client.get("/", headers={"Host": "attacker.example"}).status_code == 400
                body = {"question": demo_examples(1)[0].question, "k": 2}
                with client.stream("POST", "/api/ask", json=body) as answer:
                    news = [json.loads(line) for line in answer.iter_lines()]
            assert len(news[-1]["hits"]) == 2

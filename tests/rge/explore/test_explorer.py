"""The explorer: its routes, and the page itself in a headless Chromium: typed into, uploaded to, clicked."""

import base64
import io
import json
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import httpx
import numpy as np
import pytest
import torch
from faults import error_about

pytest.importorskip("fastapi", exc_type=ImportError)
pytest.importorskip("lancedb", exc_type=ImportError)

import uvicorn
from chromium import Chromium
from clips import clip
from pdfs import GREEN, RED, page, pdf
from PIL import Image

from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT
from rge.embedder import Embedder
from rge.explore import explorer as explorer_module
from rge.explore.app import application
from rge.explore.explorer import Explorer, Query, StoppedError, demo_examples, demo_gallery
from rge.index.__main__ import main as index_main
from rge.index.store import Index
from rge.serving.address import bound


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """Three pictures and a text in an index of their own."""
    folder = tmp_path_factory.mktemp("explore")
    (folder / "pictures").mkdir()
    for place, example in enumerate(demo_examples(3)):
        (folder / "pictures" / f"{place}.webp").write_bytes(example.picture)
    (folder / "pictures" / "notes.txt").write_text("<b>a text & its 'marks'</b>")
    assert index_main([str(folder / "pictures"), f"out={folder / 'index'}", "checkpoint=demo"]) == 0
    return folder


@pytest.fixture(scope="module")
def explorer(gallery):
    return Explorer(Embedder.from_pretrained("demo"), Index.open(gallery / "index"), demo_examples(5))


def told(explorer, question="", picture=None, rationale=None, k=3, **more):
    found = []
    explorer.ask(Query(question=question, rationale=rationale, k=k, **more), picture, found.append)
    return found


@pytest.mark.slow
def test_the_hits_are_those_of_the_embedder_and_the_words_come_one_by_one(explorer):
    example = explorer.examples[0]
    found = told(explorer, example.question, example.picture)
    vector_D, rationale = explorer.embedder.encode_query(
        example.question, example.picture, return_rationales=True
    )
    written = [one["rationale"] for one in found if "rationale" in one]
    assert written[-1] == rationale
    assert all(later.startswith(former) for former, later in zip(written, written[1:], strict=False))
    assert len(written) >= len(rationale.split())
    [hits] = explorer.index.search(vector_D[None], 3)
    assert [one["id"] for one in found[-1]["hits"]] == [hit.id for hit in hits]
    np.testing.assert_allclose(
        [one["score"] for one in found[-1]["hits"]], [hit.score for hit in hits], atol=1e-5
    )
    direct_D = explorer.embedder.encode_query(example.question, example.picture, mode="direct")
    assert [one["id"] for one in found[0]["direct"]] == [
        hit.id for hit in explorer.index.search(direct_D[None], 3)[0]
    ]


@pytest.mark.parametrize("decides", [True, False])
def test_a_checkpoint_is_asked_in_the_mode_of_its_training(explorer, monkeypatch, decides):
    embedder, example = explorer.embedder, explorer.examples[0]
    recipe = embedder.settings.content()["recipe"]
    recipe["loss"]["adaptive"]["share"] = 0.5
    trained = {"recipe": recipe} if decides else {"reasons": "none"}
    model = embedder.model
    monkeypatch.setattr(embedder, "settings", embedder.settings.but(**trained))
    # The first choice of one that decides itself is to answer directly.
    favour_V = torch.zeros(len(model.model.lm_head.weight))
    favour_V[model.emb_id] = 99 * decides
    hook = model.model.lm_head.register_forward_hook(lambda head, args, logits: logits + favour_V)
    try:
        found = told(explorer, example.question, example.picture)
        vector_D, rationale = embedder.encode_query(example.question, example.picture, return_rationales=True)
    finally:
        hook.remove()
    assert [one["rationale"] for one in found if "rationale" in one] == ([rationale] if rationale else [])
    [hits] = explorer.index.search(vector_D[None], 3)
    expected = [hit.score for hit in hits]
    np.testing.assert_allclose([one["score"] for one in found[-1]["hits"]], expected, atol=1e-5)


def test_a_given_rationale_moves_the_embedding_and_an_empty_one_is_direct(explorer):
    example = explorer.examples[0]
    own = told(explorer, example.question, example.picture)
    written = [one["rationale"] for one in own if "rationale" in one][-1]
    again = told(explorer, example.question, example.picture, written)
    assert not any("rationale" in one for one in again)
    scores = [[one["score"] for one in found[-1]["hits"]] for found in (own, again)]
    np.testing.assert_allclose(*scores, atol=1e-5)
    other = told(explorer, example.question, example.picture, "This is a fish; it is eaten with bread.")
    assert abs(other[-1]["hits"][0]["score"] - scores[0][0]) > 1e-3
    empty = told(explorer, example.question, example.picture, "  ")
    assert [{**hit, "was": None} for hit in empty[-1]["hits"]] == [
        {**hit, "was": None} for hit in empty[0]["direct"]
    ]
    assert [hit["was"] for hit in empty[-1]["hits"]] == [1, 2, 3]
    # Where each hit was without the rationale.
    direct = [hit["id"] for hit in told(explorer, example.question, example.picture, k=4)[0]["direct"]]
    assert [hit["was"] for hit in other[-1]["hits"]] == [
        direct.index(hit["id"]) + 1 for hit in other[-1]["hits"]
    ]


def test_instruction_condition_and_words_reach_the_search(explorer):
    example = explorer.examples[0]
    plain = told(explorer, example.question, example.picture)
    assert told(explorer, example.question, example.picture, instruction="")[0] != plain[0]
    assert (
        told(explorer, example.question, example.picture, instruction=explorer.embedder.default_instruction)
        == plain
    )
    narrowed = told(explorer, "x", k=9, where="id LIKE '%.txt'")
    assert [hit["id"] for hit in narrowed[-1]["hits"]] == ["notes.txt"]
    assert told(explorer, "marks", k=1, hybrid=True)[-1]["hits"][0]["id"] == "notes.txt"
    with pytest.raises(UserError, match="is not a valid condition"):
        told(explorer, "x", where="nothing = 1")


@pytest.mark.slow
def test_several_users_are_answered_in_turn_each_as_if_alone(explorer, monkeypatch):
    monkeypatch.setattr(explorer_module, "TELL_S", 0.02)
    asked = [(one.question, one.picture) for one in explorer.examples[:5]]
    alone = [told(explorer, *one) for one in asked]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda one: told(explorer, *one), asked))
    assert any("waiting" in news for found in together for news in found)
    assert [[news for news in found if "waiting" not in news] for found in together] == alone


@pytest.mark.slow
def test_the_first_example_is_answered_right(explorer):
    """The page begins with it; of the demo's examples about half are."""
    demo = Explorer(explorer.embedder, demo_gallery(explorer.embedder), demo_examples())
    first = demo.examples[0]
    assert told(demo, first.question, first.picture, k=1)[-1]["hits"][0]["id"] in first.right
    assert len({example.picture for example in demo.examples}) == 24


def test_another_querys_words(explorer, monkeypatch):
    question = explorer.examples[0].question
    found = explorer.another(question)
    assert found["question"] != question
    assert found["rationale"]
    monkeypatch.setattr(explorer, "examples", [])
    found = explorer.another("What is this?")  # of another picture of the index
    assert (found["question"], bool(found["rationale"])) == ("What is this?", True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "ask a question, give a picture, or both"),
        ({"question": "x", "picture": b"nonsense"}, "cannot be decoded"),
        ({"question": "x", "rationale": "has <emb> in it"}, "contains <emb>"),
        ({"question": "x", "rationale": "word " * 400}, "at most 160 tokens"),
    ],
)
def test_wrong_questions(explorer, asked, message):
    with pytest.raises(ValueError, match=message):
        told(explorer, **asked)
    assert told(explorer, "What is this?")[-1]["hits"]  # and the model is free again


def test_who_goes_away_ends_the_writing_and_who_comes_too_early_is_told(explorer, monkeypatch):
    seen = []

    def leave(news):
        seen.append(news)
        if "rationale" in news:
            raise StoppedError("gone")

    with pytest.raises(StoppedError):
        explorer.ask(Query(question="What is this?", k=3), explorer.examples[0].picture, leave)
    assert len(seen) == 2
    monkeypatch.setattr(explorer_module, "WAIT_S", 0.05)
    held, go = threading.Event(), threading.Event()
    first = threading.Thread(
        target=lambda: explorer.ask(
            Query(question="x", rationale=""), None, lambda _: (held.set(), go.wait(30))
        )
    )
    first.start()
    assert held.wait(30)
    with pytest.raises(UserError, match="was busy with other questions"):
        told(explorer, "y")
    go.set()
    first.join()


def test_a_picture_that_is_gone_is_shown_from_the_index(explorer, gallery):
    path = gallery / "pictures" / "0.webp"
    source, kept = str(gallery / "pictures"), path.read_bytes()
    assert explorer.picture(source, "0.webp") == kept
    path.rename(path.with_suffix(".away"))
    try:
        small = explorer.picture(source, "0.webp")
        assert small != kept
        assert small[8:12] == b"WEBP"
        assert {one["id"]: one["gone"] for one in told(explorer, "x", k=9)[-1]["hits"]}["0.webp"]
    finally:
        path.with_suffix(".away").rename(path)
    with error_about(UserError, "notes.txt"):
        explorer.picture(source, "notes.txt")


def test_a_taken_port_is_one_sentence():
    with bound("127.0.0.1", 0, listens=True) as taken:
        port = taken.getsockname()[1]
        with error_about(UserError, f"127.0.0.1:{port}"):
            bound("127.0.0.1", port)


class Endless:
    """Writes for half a minute, unless nobody listens."""

    def __init__(self):
        self.ended = threading.Event()

    def ask(self, query, picture, tell):
        try:
            for number in range(600):
                tell({"rationale": str(number)})
                time.sleep(0.05)
        except StoppedError:
            self.ended.set()
            raise


def test_a_client_that_goes_away_ends_the_writing():
    explorer, listening = Endless(), bound("127.0.0.1", 0, listens=True)
    server = uvicorn.Server(uvicorn.Config(application(explorer, "127.0.0.1"), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api/ask"
        with httpx.stream("POST", address, json={"question": "x"}, timeout=30) as answer:
            assert json.loads(next(answer.iter_lines())) == {"rationale": "0"}
            assert not explorer.ended.is_set()
        assert explorer.ended.wait(10)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------- the command itself


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`rge explore` as it is started, in another folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with forked.Program("-m", "rge", "explore", "port=0", cwd=folder) as program:
        yield program.printed(r"demo, 257 items: (http://127\.0\.0\.1:\d+) ")[1]
        program.send(signal.SIGTERM)
        done = program.finished()
    assert done.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in done.stderr


def uploaded(kind):
    data = io.BytesIO()
    Image.new("RGB", (32, 32)).save(data, kind)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


@pytest.mark.slow
def test_the_routes(server):
    nothing = base64.b64encode(b"nothing").decode()
    with httpx.Client(base_url=server, timeout=60) as client:
        about = client.get("/api/about").json()
        assert (about["checkpoint"], about["items"], len(about["examples"])) == ("demo", 257, 24)
        with client.stream("POST", "/api/ask", json={"picture": {"example": 0}, "k": 2}) as answer:
            news = [json.loads(line) for line in answer.iter_lines()]
        assert list(news[0]) == ["direct"]
        assert len(news[-1]["hits"]) == 2
        hit = news[-1]["hits"][0]
        shown = client.get("/api/picture", params={"source": hit["source"], "id": hit["id"]})
        assert shown.headers["content-type"] == "image/webp"
        assert client.get("/").headers["content-security-policy"].startswith("default-src 'self'")
        for path, body, code, message in (
            ("/api/ask", "{}", 200, "ask a question"),
            ("/api/ask", "nonsense", 400, "Invalid JSON"),
            ("/api/ask", '{"k": 0}', 400, "k: "),
            ("/api/ask", '{"mode": "x"}', 400, "mode: Extra inputs"),
            ("/api/ask", '{"picture": {"example": 24}}', 400, "no example 24"),
            ("/api/ask", '{"picture": {"id": "x"}}', 400, "named by source and id"),
            ("/api/ask", '{"picture": {"data": "data:image/png;base64,%%"}}', 400, "cannot be read"),
            ("/api/ask", '{"picture": {"data": "data:image/png;base64,AAAA"}}', 200, "cannot be decoded"),
            (
                "/api/ask",
                json.dumps({"picture": {"data": uploaded("EPS")}}),
                200,
                "not recognise it as a picture of a supported format",
            ),
            (
                "/api/ask",
                '{"picture": {"source": "/etc", "id": "passwd"}}',
                400,
                "passwd: it holds no such item",
            ),
            ("/api/preview", json.dumps({"data": f"data:video/mp4;base64,{nothing}"}), 400, "no container"),
            (
                "/api/preview",
                json.dumps({"data": f"data:application/pdf;base64,{nothing}"}),
                400,
                "not a PDF",
            ),
            (
                "/api/ask",
                json.dumps({"picture": {"data": f"data:video/mp4;base64,{nothing}"}}),
                200,
                "no container",
            ),
            ("/api/preview", json.dumps({"data": uploaded("PNG")}), 400, "only documents and videos"),
            ("/api/ask", b"x" * ((32 << 20) + 1), 400, "larger than 32 MB"),
        ):
            answer = client.post(path, content=body)
            assert (answer.status_code, message in answer.text) == (code, True), (body[:80], answer.text)
        for path in ("/api/picture?source=/etc&id=passwd", "/../rge.json", "/explore.py"):
            assert client.get(path).status_code == 404
        assert client.get("/", headers={"Host": "attacker.example"}).status_code == 400


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = (
        shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("Chromium is not installed")
    )
    found = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


def complaints(browser) -> list[dict]:
    """What the browser complains of; that pictures of hits are no longer fetched when others are shown is no complaint."""
    return [one for one in browser.complaints() if not one["params"].get("canceled")]


DONE = "!asking && by('hits').children.length > 0 && by('direct').children.length > 0"


@pytest.mark.slow
def test_a_person_at_the_page(server, browser, tmp_path):
    browser.open(server, 1200, 900)
    browser.until("by('strip').children.length == 24")
    # It begins with an example whose first hit is right, says what the model knows, and what the rationale changed.
    browser.until(DONE)
    assert browser.js("by('question').value")
    assert "icons only" in browser.js("by('what').innerText")
    assert browser.js("by('instruction').value") == "Answer with a picture."
    assert re.match(
        "What the rationale changed: \\d of 8 hits are new. The top hit ",
        browser.js("by('changed').textContent"),
    )
    assert browser.js("document.querySelectorAll('#hits .was').length") == 8
    # An example: the words appear, hits after them stand next to the direct ones.
    browser.click("#strip button:nth-child(3)")
    browser.until(DONE)
    first = browser.js("by('rationale').value")
    assert first.startswith(("This is", "These are"))
    assert browser.js("by('hits').children.length") == 8
    assert browser.js("by('state').textContent").startswith("by the model")
    top = browser.js("by('hits').firstChild.innerText")
    # Other words, typed: other hits, and the words stay as they were typed.
    browser.click("#rationale")
    browser.type("This is a padlock; it is opened with a key.")
    browser.click("#again")
    browser.until(DONE)
    assert "key" in browser.js("by('hits').firstChild.innerText")
    assert browser.js("by('hits').firstChild.innerText") != top
    assert browser.js("by('rationale').value") == "This is a padlock; it is opened with a key."
    # Another query's words.
    browser.click("#swap")
    browser.until("!by('whose').hidden && " + DONE)
    assert browser.js("by('rationale').value").startswith(("This is", "These are"))
    assert browser.js("by('whose').textContent").startswith("Written for another query: ")
    # A hit enlarges, with what is known of it; going on from it makes it the picture that is asked about.
    before = browser.js("by('picture').src")
    browser.click("#hits li:nth-child(2) button")
    browser.until("by('large').open && by('large-picture').complete && by('large-picture').naturalWidth > 0")
    assert "score" in browser.js("by('large-facts').innerText")
    browser.click("#large-close")
    assert not browser.js("by('large').open")
    browser.click("#hits li:nth-child(2) button")
    browser.click("#large-ask")
    browser.until(f"by('picture').src != {json.dumps(before)} && " + DONE)
    assert "source=" in browser.js("by('picture').src")
    assert browser.js("by('whose').hidden")
    # A filter, and one that is none.
    browser.click("#more summary")
    browser.click("#where")
    browser.type("text = 'key'")
    browser.press_enter()
    browser.until(DONE + " && by('hits').children.length == 1")
    assert browser.js("by('hits').innerText").startswith("1. key")
    browser.click("#where")
    browser.type("nothing = 1")
    browser.press_enter()
    browser.until("!by('error').hidden")
    assert "is not a valid condition" in browser.js("by('error').textContent")
    browser.js("by('where').value = ''")
    # A picture of one's own, uploaded; a question, typed, and Enter.
    Image.new("RGB", (60, 40), "red").save(tmp_path / "mine.png")
    browser.upload("#file", tmp_path / "mine.png")
    browser.until("by('picture').src.startsWith('data:') && " + DONE)
    browser.click("#question")
    browser.type("<img src=x onerror=alert(1)> Was öffnet das?")
    browser.js("by('hits').replaceChildren()")
    browser.press_enter()
    browser.until(DONE)
    assert browser.js("by('question').value") == "<img src=x onerror=alert(1)> Was öffnet das?"
    # A document's pages, and a clip's frames, made by the server.
    (tmp_path / "m.pdf").write_bytes(pdf([page("kettle", RED), page("anchor", GREEN)]))
    (tmp_path / "a.mp4").write_bytes(clip(range(0, 1000, 40), size=(56, 56)))
    for file in ("m.pdf", "a.mp4"):
        before = browser.js("by('picture').src")
        browser.upload("#file", tmp_path / file)
        browser.until(
            f"by('picture').src.startsWith('blob:') && by('picture').src != {json.dumps(before)} && " + DONE
        )
        assert browser.js("by('picture').naturalWidth") > 56
        assert browser.js("by('error').hidden")
    # Dropped instead.
    browser.js(
        "fetch('api/picture?example=1').then(r => r.blob()).then(b => { const t = new DataTransfer(); "
        "t.items.add(new File([b], 'x.webp', {type: 'image/webp'})); "
        "by('drop').dispatchEvent(new DragEvent('drop', {dataTransfer: t, bubbles: true, cancelable: true})); })"
    )
    browser.until("by('picture').src.startsWith('data:image/webp') && " + DONE)
    # A file that is no picture is one sentence, and the page goes on.
    (tmp_path / "no.png").write_text("no picture")
    browser.upload("#file", tmp_path / "no.png")
    browser.until("!by('error').hidden")
    assert "cannot be decoded" in browser.js("by('error').textContent")
    browser.click("#clear")
    browser.click("#search")
    browser.until(DONE)
    assert browser.js("by('error').hidden")
    # Nothing from elsewhere, and no complaint of the browser's.
    assert all(one.startswith((server, "data:", "blob:")) for one in browser.requests())
    assert complaints(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits(server, browser, width):
    browser.open(server, width, 844, dark=width == 390)
    browser.until("by('strip').children.length == 24")
    browser.click("#strip button:nth-child(3)")
    browser.until(DONE)
    assert browser.js("document.documentElement.scrollWidth") <= width
    small = browser.js(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.getBoundingClientRect().height < 32).length"
    )
    assert small == 0
    assert complaints(browser) == []


@pytest.mark.slow
def test_the_page_of_a_checkpoint_that_writes_nothing(browser, tmp_path):
    checkpoint = shutil.copytree(DEMO_CHECKPOINT, tmp_path / "direct")
    settings = json.loads((checkpoint / "rge.json").read_text())
    (checkpoint / "rge.json").write_text(json.dumps(settings | {"reasons": "none"}))
    with forked.Program(
        "-m", "rge", "explore", "port=0", f"checkpoint={checkpoint}", cwd=tmp_path
    ) as program:
        browser.open(program.printed(r"257 items: (http://127\.0\.0\.1:\d+) ")[1], 1200, 900)
        browser.until(DONE)
        assert "without writing a rationale" in browser.js("by('what').innerText")
        shown = "[...document.querySelectorAll('main > *')].filter((part) => part.offsetHeight).map((part) => part.innerText)"
        _, found = browser.js(shown)
        assert found.startswith("Found\n")
        assert "place" not in found  # nothing is compared
        program.send(signal.SIGTERM)

"""The review page in a real browser: whatever its texts are, by keyboard, and on a phone."""

import hashlib
import json
import shutil
import time

import pyarrow.parquet as pq
import pytest
from chromium import Chromium

from data_prep.demo.tables import HERE
from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames, review
from rge.common.images import picture_bytes

LIBRARY = HERE / "data" / "train" / "pictures.parquet"
OWNED = "<img src=x onerror=\"document.title='owned'\">"
TEXTS = [
    "What opens this?",
    f"</script><script>document.title='owned'</script>{OWNED}",
    f"<!--<script> {OWNED} </script --> ]]> ${{at}} $title \\u003c/script>",
    f"half a pair \ud800, a line\u2028separator, \u202eturned round {OWNED}",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = (
        shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("Chromium is not installed")
    )
    found = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def page(tmp_path):
    """Four pairs, one a query, in a run whose folder has an odd name."""
    run = tmp_path / "run <b>&amp; 'co'"
    names = pq.read_table(LIBRARY, columns=["id"])["id"].to_pylist()[:8]

    def table(name, schema, rows):
        columns = frames.SCHEMAS[schema].names
        frames.write_rows(run / name, [{key: row.get(key) for key in columns} for row in rows])

    refs = {name: f"{LIBRARY}#{name}" for name in names}
    hashes = {name: hashlib.sha256(picture_bytes(ref)).hexdigest() for name, ref in refs.items()}
    table(
        "seed/images.parquet",
        "images",
        [{"id": name, "ref": refs[name], "sha256": hashes[name]} for name in names],
    )
    queries = [
        {"query_id": f"q{n}", "image_id": names[n], "category": "causal", "query": TEXTS[n].encode("utf-8", "replace").decode()}
        for n in range(4)
    ]  # fmt: skip
    table("generate/queries/part-00000.parquet", "queries", queries)
    states = [maths.KEPT, maths.KEPT, maths.KEPT, maths.REJECTED]
    pairs = [{"query_id": f"q{n}", "candidate_id": names[n + 4], "state": states[n]} for n in range(4)]
    table("keep/decided.parquet", "decided", pairs)
    chosen = [pair | query for pair, query in zip(pairs, queries, strict=True)]
    path = tmp_path / "review.html"
    text = review.page(run, chosen)
    path.write_text(
        text.replace("half a pair ?", r"half a pair \ud800"), encoding="utf-8"
    )  # no table could hold it
    return path, run, [f"q{n} -> {names[n + 4]}" for n in range(4)]


def press(browser, *keys, modifiers=0):
    for key in keys:
        text = {"text": key} if len(key) == 1 and not modifiers else {}
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)


READY = "document.body.dataset.ready === ''"
WRITTEN = "writing === 0"


def opened(browser, page, width=1400, height=900):
    """The page with nothing kept."""
    reopened(browser, page, width, height)
    browser.js("said = new Map(); keep()")
    reopened(browser, page, width, height)


def reopened(browser, page, width=1400, height=900):
    if browser.js("typeof writing !== 'undefined'"):
        browser.until(WRITTEN)
    browser.open(page, width, height)
    browser.until(READY)


def count(browser):
    return browser.js("document.getElementById('count').textContent")


def stored(browser):
    browser.until(WRITTEN)
    browser.js(
        "window.kept = ''; store.transaction('reviews').objectStore('reviews').get(place).onsuccess = (event) => { kept = JSON.stringify(event.target.result) }"
    )
    return json.loads(browser.until("kept"))["verdicts"]


def test_no_text_gets_out_of_its_place(browser, page, tmp_path):
    path, run, keys = page
    nasty = {"verdict": "accept", "comment": f"</textarea>{OWNED}"}
    rows = {
        keys[1]: nasty,
        "__proto__": nasty,
        f"{OWNED} -> x": nasty,
        keys[2]: {"verdict": OWNED, "comment": OWNED},
    }
    (tmp_path / f"{OWNED.replace('/', '')}.json").write_text(json.dumps({"verdicts": rows}))
    opened(browser, path)
    for text in TEXTS:
        shown = browser.js("document.getElementById('query').textContent")
        assert shown == text.replace("\ud800", "\ufffd") or (text == TEXTS[3] and shown.endswith(OWNED))
        press(browser, "ArrowRight")
    browser.upload("#file", tmp_path / f"{OWNED.replace('/', '')}.json")
    browser.until("document.getElementById('note').textContent.includes('Imported 2 from')")
    assert browser.js("document.title") == f"Review: {run.name}"
    assert browser.js("document.querySelectorAll('img').length") == 3
    assert browser.js("document.querySelectorAll('main b, code b').length") == 0
    assert run.name in browser.js("document.querySelector('#done code').textContent").replace("'\"'\"'", "'")
    assert set(stored(browser)) == {keys[1], keys[2]}
    assert stored(browser)[keys[2]]["verdict"] is None, "a word that is no verdict is none"
    assert not browser.complaints()
    asked = [url for url in browser.requests() if not url.startswith("data:image/")]
    assert asked == [path.as_uri()], "nothing is loaded from anywhere"
    # And if a text should ever get out: the browser runs the page's own script only.
    browser.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.js(
        "(s => { s.textContent = 'document.title = 2'; document.body.append(s) })(document.createElement('script'))"
    )
    time.sleep(0.2)
    assert browser.js("document.title") == f"Review: {run.name}"


def test_verdicts_by_keyboard_comments_undo_and_the_saved_file(browser, page, tmp_path):
    path, run, keys = page
    opened(browser, path)
    press(browser, "j", "f", "h")
    assert count(browser) == "4 of 4, 3 judged"
    assert [row["verdict"] for row in stored(browser).values()] == ["accept", "reject", "unsure"]
    press(browser, "u")
    assert count(browser) == "3 of 4, 2 judged"
    press(browser, "z", modifiers=2)
    assert count(browser) == "2 of 4, 1 judged"
    press(browser, "c", "j", "f", "u", "!")
    assert count(browser) == "2 of 4, 1 judged", "what is typed into the comment is no verdict"
    press(browser, "Escape", "f")
    assert stored(browser)[keys[1]] == {"verdict": "reject", "comment": "jfu!"}
    reopened(browser, path)
    assert count(browser) == "3 of 4, 2 judged", "a closed tab loses nothing"
    press(browser, "ArrowLeft", "ArrowLeft", "n")
    assert count(browser).startswith("3 of 4")
    press(browser, "?")
    assert browser.js("document.getElementById('keys').open")
    press(browser, "j")
    assert count(browser) == "3 of 4, 2 judged", "no verdict behind the help"
    browser.click("#keys button")
    press(browser, "z")
    answer = browser.js("document.getElementById('answer').src")
    assert browser.js("document.getElementById('large').src") == answer
    press(browser, "z")
    assert browser.js("document.getElementById('large').src") != answer
    browser.click("#zoom button")
    assert not browser.js("document.getElementById('zoom').open")
    press(browser, "h", "j")
    browser.js("document.getElementById('name').focus()")
    browser.type("Zoë /../ x")
    browser.js("document.activeElement.blur()")
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    press(browser, "s")
    file = tmp_path / "saved" / "verdicts-Zoë-x.json"
    end = time.monotonic() + 30
    while not file.is_file() and time.monotonic() < end:
        time.sleep(0.05)
    people = review.read_verdicts(run, [file])
    assert list(people) == ["Zoë /../ x"]
    found = review.compare(run, people)
    # accept, reject and unsure of three that the panel accepted; accept of one that it rejected
    assert (
        found["rows"]["panel accepted"] | {"share": 0.5, "agree": 1, "of": 2, "unsure": 1}
        == found["rows"]["panel accepted"]
    )
    assert found["rows"]["panel rejected"]["agree"] == 0
    assert found["comments"][0]["comment"] == "jfu!"
    opened(browser, path)
    browser.upload("#file", file)
    browser.until("document.getElementById('note').textContent.startsWith('Imported 4')")
    assert count(browser).endswith("4 judged")
    assert not browser.js("document.getElementById('done').hidden")
    press(browser, "u")
    assert count(browser).endswith("0 judged"), "an import is undone at once"


def test_a_browser_that_keeps_nothing_says_so_after_every_verdict(browser, page):
    """And asks before it closes what was not saved."""
    hidden = browser.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="Object.defineProperty(window, 'indexedDB', {value: null})",
    )
    try:
        reopened(browser, page[0])
        press(browser, "j", "f")
        assert count(browser) == "3 of 4, 2 judged"
        assert "cannot store verdicts" in browser.js("document.getElementById('note').textContent")
        asked = "!dispatchEvent(new Event('beforeunload', {cancelable: true}))"
        assert browser.js(asked)
        press(browser, "u", "u")
        assert not browser.js(asked), "there is nothing to lose"
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=hidden["identifier"])


@pytest.mark.slow
def test_on_a_phone_everything_is_within_reach(browser, page):
    opened(browser, page[0], 390, 844)
    assert browser.js("document.documentElement.scrollWidth") == 390
    sizes = browser.js(
        "[...document.querySelectorAll('#answerbar button')].map(b => b.getBoundingClientRect()).map(r => [r.height, r.bottom])"
    )
    assert len(sizes) == 3
    assert all(height >= 44 and bottom <= 844 for height, bottom in sizes), "without scrolling"
    for name in ("given", "answer"):
        assert browser.js(f"document.getElementById('{name}').getBoundingClientRect().bottom") <= 844 - 70
    browser.click("#answerbar .unsure")
    assert count(browser) == "2 of 4, 1 judged"
    browser.click("[data-zoom=answer]")
    assert browser.js("document.getElementById('large').getBoundingClientRect().width") == 390
    browser.click("#large")
    assert browser.js("document.getElementById('large').getBoundingClientRect().width") > 800, "closer"

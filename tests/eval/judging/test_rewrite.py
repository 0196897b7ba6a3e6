"""Words added to queries by a model behind an endpoint, in front of an embedder and of BM25."""

import json
import re
import unicodedata
from dataclasses import replace

import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_tables
from faults import error_about

from eval.commands.bm25 import WORD, Bm25Options, bm25, rank
from eval.commands.run import RunOptions, run
from eval.judging.rewrite import PROMPTS, RewriteOptions, rewritten
from eval.sets.retrieval_set import load_set
from rge.calls.local_server import Answer, LocalServer, chat
from rge.common.errors import UserError


def load_rewriter(kind, url, model, cache):
    return RewriteOptions(rewrite=kind, rewriter=url, rewriter_model=model).load_rewriter(cache)


@pytest.fixture
def content():
    """Texts only in the pool; q00 has no picture."""
    found = tables(num_queries=6, num_candidates=60)
    found["corpus"]["image"] = [None] * 60
    found["corpus"]["text"] = [f"word{int(name[1:])} shared" for name in found["corpus"]["id"]]
    found["queries"]["image"][0] = []
    return found


@pytest.fixture
def server():
    """Answers with words of its own; notes what it was asked, and with which keys."""
    asked, keys = [], []

    async def answer(path, body):
        asked.append(body["messages"])
        keys.append(running.headers.get("authorization"))
        return chat(f"word{len(asked)}")

    with LocalServer(answer) as running:
        running.asked, running.keys = asked, keys
        yield running


def test_a_caption_is_of_the_pictures_alone_and_asked_for_once(content, server, tmp_path):
    wanted = load_set(write_tables(tmp_path / "set", content))
    for _ in range(2):
        rewriter = load_rewriter("caption", server.url, "m", tmp_path / "cache")
        found = rewritten(wanted, rewriter)
        rewriter.answers.close()
    assert len(server.asked) == 3  # q00 shows nothing, and two others show what has been described
    assert found.queries[0] == wanted.queries[0]
    assert found.queries[1].text.startswith("question 1\nword")
    assert found.queries[1].pictures == wanted.queries[1].pictures
    system, user = server.asked[0]
    assert system["content"] == PROMPTS["caption"][0]
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]
    assert "question" not in user["content"][1]["text"]


def test_a_model_of_the_same_name_at_another_address_writes_anew(content, server, tmp_path):
    wanted = load_set(write_tables(tmp_path / "set", content))

    async def answer(path, body):
        return chat("from elsewhere")

    rewritten(wanted, load_rewriter("caption", server.url, "m", tmp_path / "cache"))
    with LocalServer(answer) as other:
        rewriter = load_rewriter("caption", other.url, "m", tmp_path / "cache")
        found = rewritten(wanted, rewriter)
        assert other.num_answered == 3
    assert found.queries[1].text == "question 1\nfrom elsewhere"
    assert rewriter.about().look_up(["at"]) == other.url


def test_a_reformulation_sees_question_and_pictures_and_replaces_the_text(content, server, tmp_path):
    wanted = load_set(write_tables(tmp_path / "set", content))
    found = rewritten(wanted, load_rewriter("reformulate", server.url, "m", tmp_path / "cache"))
    assert len(server.asked) == 6
    assert sorted(query.text for query in found.queries) == [f"word{number}" for number in range(1, 7)]
    assert [query.pictures for query in found.queries] == [query.pictures for query in wanted.queries]
    kinds = {tuple(part["type"] for part in user["content"]) for _, user in server.asked}
    assert kinds == {("text", "text"), ("text", "image_url", "text")}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "filtered"])
def test_a_query_that_gets_nothing_stays_as_it_was_and_is_counted(content, tmp_path, how):
    asked = []

    async def answer(path, body):
        asked.append(json.dumps(body))
        if "question 3" not in asked[-1] and only[0]:
            return chat(f"word{len(asked)}")
        if how == "refused":
            return chat("I would rather not.", stop="content_filter")
        return Answer({"error": {"code": "content_filter", "message": "the content filter"}}, 400)

    data, only = write_tables(tmp_path / "set", content), [True]
    with LocalServer(answer) as server:
        words = {"rewrite": "reformulate", "rewriter": server.url, "rewriter_model": "m"}
        for _ in range(2):
            options = RunOptions(
                checkpoint="fake", set=data, out=tmp_path / "out", cache=tmp_path, report=False, **words
            )
            run(options, loader(FakeEncoder()))
        assert len(asked) == 6
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert results["warnings"] == [
            "rewrite=reformulate left 1 of 6 queries as they were (refused, rejected or cut off)"
        ]
        only[0] = False
        for _ in range(2):  # nothing at all is no answer to keep
            rewriter = load_rewriter("reformulate", server.url, "m", tmp_path / "other")
            with error_about(UserError, "empty"):
                rewritten(load_set(data), rewriter)
            rewriter.answers.close()


@pytest.mark.parametrize(
    "bad", [chat(""), chat("half of", stop="length"), chat("z" * 2_000_000)], ids=["empty", "cut", "huge"]
)
def test_an_answer_that_is_none_is_not_kept(content, tmp_path, bad):
    """Of a third of the queries; a server that is healthy again is asked for these alone, in their own words."""
    wanted = load_set(write_tables(tmp_path / "set", content))
    asked, ill = [], [True]

    async def answer(path, body):
        asked.append(json.dumps(body))
        return bad if ill[0] and re.search("question [34]", asked[-1]) else chat("fine")

    def texts():
        rewriter = load_rewriter("reformulate", server.url, "m", tmp_path / "cache")
        try:
            return rewriter.texts(wanted.queries)
        finally:
            rewriter.answers.close()

    with LocalServer(answer) as server:
        if bad.body["choices"][0]["message"]["content"]:
            assert texts() == ["fine", "fine", "fine", "", "", "fine"]
        else:
            with error_about(UserError, "unanswered"):
                texts()
        assert len(asked) == 4 + 2 * 3
        ill[0] = False
        assert texts() == ["fine"] * 6
    assert len(asked) == 4 + 2 * 3 + 2


@pytest.mark.parametrize(
    "address", ["http://host:x/v1", "http://me:secret-word@127.0.0.1:9/v1", "127.0.0.1:9"]
)
def test_an_address_that_is_none_is_refused_before_it_is_used(tmp_path, address):
    with error_about(UserError, "rewriter.base_url") as caught:
        load_rewriter("caption", address, "m", tmp_path / "cache")
    assert "secret-word" not in str(caught.value)


@pytest.mark.slow
def test_an_embedder_sees_what_was_added(content, server, tmp_path):
    data = write_tables(tmp_path / "set", content)
    options = {"checkpoint": "fake", "set": data, "cache": tmp_path / "cache", "report": False}
    how = {"rewrite": "reformulate", "rewriter": server.url, "rewriter_model": "m"}
    run(RunOptions(**options, out=tmp_path / "plain"), loader(FakeEncoder()))
    encoder = FakeEncoder()
    run(RunOptions(**options, **how, out=tmp_path / "longer"), loader(encoder))
    assert encoder.seen == [f"q{n:02d}" for n in range(6)]  # the pool is the same, the queries are others
    plain, longer = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("plain", "longer")
    )
    assert plain["rewrite"] is None
    rewrite = longer["rewrite"]
    assert (rewrite["kind"], rewrite["model"], rewrite["replaces"]) == ("reformulate", "m", True)
    with error_about(UserError, "rewrite.kind"):
        run(RunOptions(**options, **how, out=tmp_path / "plain"), loader(FakeEncoder()))


@pytest.mark.parametrize("command", ["run", "bm25"])
def test_the_key_of_a_rewriter_is_read_from_the_variable_that_is_named(
    content, server, tmp_path, monkeypatch, command
):
    data = write_tables(tmp_path / "set", content)
    how = {"rewrite": "reformulate", "rewriter": server.url, "rewriter_model": "m"}
    options = {"set": data, "out": tmp_path / "out", "rewriter_key_env": "KEY_OF_THE_REWRITER", **how}

    def start():
        if command == "run":
            return run(RunOptions(checkpoint="fake", report=False, **options), loader(FakeEncoder()))
        pytest.importorskip("bm25s")
        return bm25(Bm25Options(cache=tmp_path / "cache", **options))

    with error_about(UserError, "KEY_OF_THE_REWRITER"):
        start()
    monkeypatch.setenv("KEY_OF_THE_REWRITER", "the key of the rewriter")
    start()
    assert server.keys == ["Bearer the key of the rewriter"] * 6


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (("captions", "http://x/v1", "m"), ("choice", "rewrite")),
        (("caption", None, "m"), ("value", "rewriter")),
        ((None, "http://x/v1", None), ("value", "rewrite")),
    ],
)
def test_half_of_what_is_needed_is_named(tmp_path, given, fault):
    with error_about(UserError, fault):
        load_rewriter(*given, tmp_path)


def test_bm25_without_its_library_says_what_to_install(content, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    data = write_tables(tmp_path / "set", content)
    with error_about(UserError, "bm25s", "package"):
        bm25(Bm25Options(set=data, out=tmp_path / "out"))
    assert not (tmp_path / "out" / "results.json").exists()


def test_bm25_ranks_by_the_published_formula(content, tmp_path):
    pytest.importorskip("bm25s")
    import math

    texts = {"c000": "key padlock", "c001": "key key egg", "c002": "chick", "c003": "egg nest twig branch"}
    content["corpus"]["text"] = [texts.get(name, f"nothing{name}") for name in content["corpus"]["id"]]
    content["queries"]["text"] = ["What key opens the padlock", "key", "egg", "zebra", "chick", "the"]
    wanted = load_set(write_tables(tmp_path / "set", content))
    options = Bm25Options(set=tmp_path / "set", out=tmp_path / "out", k1=1.2, b=0.5)
    found = rank(wanted, options, 1000)
    documents = [text.split() for text in content["corpus"]["text"]]
    mean = sum(map(len, documents)) / 60

    def score(query: str, name: str) -> float:
        words = texts[name].split()
        total = 0.0
        for term in query.split():
            holding = sum(term in document for document in documents)
            idf = math.log(1 + (60 - holding + 0.5) / (holding + 0.5))
            count = words.count(term)
            total += idf * count / (count + 1.2 * (1 - 0.5 + 0.5 * len(words) / mean))
        return total

    def ranked(query: int) -> list[str]:
        return [wanted.corpus_ids[row] for row in found.rows_QW[query] if row >= 0]

    assert [ranked(query) for query in range(6)] == [
        ["c000", "c001"], ["c001", "c000"], ["c001", "c003"], [], ["c002"], [],
    ]  # fmt: skip
    assert found.score_QW[0, 0] == pytest.approx(score("key padlock", "c000"), rel=1e-5)
    assert found.score_QW[2, :2].tolist() == pytest.approx(
        [score("egg", name) for name in ("c001", "c003")], rel=1e-5
    )


def test_bm25_finds_words_in_chinese_and_japanese(content, tmp_path):
    pytest.importorskip("bm25s")
    texts = {"c000": "一把铜钥匙", "c001": "木头桌子", "c002": "赤いリンゴ", "c003": "Türschloss, x日y"}
    content["corpus"]["text"] = [texts.get(name, f"nothing{name}") for name in content["corpus"]["id"]]
    content["queries"]["text"] = ["铜钥匙在哪里", "リンゴはどこ", "桌子", "türschloss", "x", "日本"]
    wanted = load_set(write_tables(tmp_path / "set", content))
    found = rank(wanted, Bm25Options(set=tmp_path / "set", out=tmp_path / "out"), 1000)
    names = [[wanted.corpus_ids[row] for row in rows if row >= 0] for rows in found.rows_QW]
    assert names == [["c000"], ["c002"], ["c001"], ["c003"], [], ["c003"]]
    assert re.findall(WORD, "人々・𠮷野 a key") == ["人", "々", "𠮷", "野", "key"]


def test_bm25_keeps_words_with_combining_signs_whole(content, tmp_path):
    """Vowel signs are not letters for Python; and a text may come from a Mac, with accents apart from their letters."""
    pytest.importorskip("bm25s")
    texts = {
        "c000": "हिन्दी भाषा",
        "c001": "العَرَبِيَّة",
        "c002": unicodedata.normalize("NFD", "Türschloss für Käfige"),
        "c003": "ch loss",
    }
    content["corpus"]["text"] = [texts.get(name, f"nothing{name}") for name in content["corpus"]["id"]]
    content["queries"]["text"] = [
        "हिन्दी",
        "العَرَبِيَّة",
        "türschloss",
        "rschloss",
        "माँ",
        unicodedata.normalize("NFD", "käfige"),
    ]
    wanted = load_set(write_tables(tmp_path / "set", content))
    found = rank(wanted, Bm25Options(set=tmp_path / "set", out=tmp_path / "out"), 1000)
    names = [[wanted.corpus_ids[row] for row in rows if row >= 0] for rows in found.rows_QW]
    assert names == [["c000"], ["c001"], ["c002"], [], [], ["c002"]]
    assert re.findall(WORD, "में न, माँ") == ["में", "माँ"]


def test_bm25_writes_an_evaluation_and_hears_of_captions(content, server, tmp_path):
    pytest.importorskip("bm25s")
    data = write_tables(tmp_path / "set", content)
    content["queries"]["text"] = ["shared"] * 6
    data = write_tables(tmp_path / "set", content)
    options = {"set": data, "cache": tmp_path / "cache"}
    bm25(Bm25Options(**options, out=tmp_path / "plain"))
    bm25(
        Bm25Options(
            **options, out=tmp_path / "caption", rewrite="caption", rewriter=server.url, rewriter_model="m"
        )
    )
    plain, caption = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("plain", "caption")
    )
    assert plain["ties"]["mrr"]["best"] > plain["ties"]["mrr"]["worst"]  # "shared" is in every text
    assert (caption["tag"], caption["rewrite"]["kind"]) == ("bm25-lucene-caption", "caption")
    assert caption["versions"]["bm25s"]
    first = (tmp_path / "caption" / "run.trec").read_text().split("\n")
    assert {line.split()[0] for line in first if line} == {f"q{n:02d}" for n in range(6)}
    with error_about(UserError, "tag"):
        bm25(Bm25Options(**options, out=tmp_path / "caption"))


def test_bm25_needs_texts(tmp_path):
    pytest.importorskip("bm25s")
    data = write_tables(tmp_path / "set", tables())
    with error_about(UserError, data):
        bm25(Bm25Options(set=data, out=tmp_path / "out"))


def test_the_rewriter_is_not_asked_for_an_evaluation_that_is_refused(content, server, tmp_path):
    data = write_tables(tmp_path / "set", content)
    options = {"checkpoint": "fake", "set": data, "out": tmp_path / "out", "report": False}
    run(RunOptions(**options), loader(FakeEncoder()))
    how = {"rewrite": "reformulate", "rewriter": server.url, "rewriter_model": "m"}
    with error_about(UserError, "rewrite.kind"):
        run(RunOptions(**options, **how), loader(FakeEncoder()))
    assert server.asked == []


def test_an_audit_compares_what_the_set_asks_and_only_texts_that_are_used_count_as_rewritten(
    content, server, tmp_path
):
    content["queries"]["image"][0] = [picture(999)]
    data = write_tables(tmp_path / "set", content)
    (tmp_path / "seen.png").write_bytes(content["queries"]["image"][1][0])
    query = {"text": "question 1", "images": ["seen.png"]}
    record = {"id": "r", "group": "g", "source": "x", "split": "train", "query": query}
    record["positives"] = [{"id": "t", "text": "t"}]
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps(record) + "\n")
    how = {"rewrite": "caption", "rewriter": server.url, "rewriter_model": "m", "query_mode": ("direct",)}
    modalities = {"query_modality": ("both", "image")}
    options = RunOptions(
        checkpoint="fake",
        set=data,
        out=tmp_path / "out",
        report=False,
        train=(str(train),),
        **how,
        **modalities,
    )
    for path in run(options, loader(FakeEncoder())):
        results = json.loads((path / "results.json").read_text())
        assert bool(results["rewrite"]) == (results["query_modality"] == "both")
        assert results["audit"]["query_pairs"] == {"shared": 1, "of": 6}
    # The rewriter is not asked for texts that are left out.
    server.asked.clear()
    alone = replace(options, query_modality=("image",), cache=tmp_path / "empty", out=path)
    run(alone, loader(FakeEncoder()))
    assert server.asked == []

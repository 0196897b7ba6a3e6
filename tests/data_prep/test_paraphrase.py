"""Paraphrases of records and of retrieval sets, from a model that answers, refuses, answers nothing or nonsense."""

import json

import pyarrow.parquet as pq
import pytest
from eval_fakes import FakeEncoder, loader, tables, write_tables
from PIL import Image

from data_prep.__main__ import main
from data_prep.paraphrase import KINDS
from eval.commands.run import RunOptions, run
from eval.sets.contents import with_content
from eval.sets.retrieval_set import load_set
from rge.calls.local_server import LocalServer, chat
from rge.common.errors import UserError
from rge.data.sources import RecordFile


@pytest.fixture
def server():
    """Rewords a text by numbering it; some texts are refused, answered by nothing, or by nonsense."""
    asked = []

    async def answer(path, body):
        prompt = body["messages"][-1]["content"]
        prompt = prompt if isinstance(prompt, str) else prompt[0]["text"]
        asked.append(text := prompt.rpartition("<text>")[2].removesuffix("</text>"))
        if text == "refused":
            return chat("I'm sorry, I cannot help with that.")
        if text in ("", "nothing"):
            return chat("")
        if text == "nonsense":
            return chat("one two three")
        given = [f"{text} {number}" for number in range(len(KINDS))]
        given[4:] = ["  ".join(given[3].upper().split()) + "?", "word " * 99] if text == "some" else given[4:]
        return chat("".join(f"<wording_{n + 1}>{one}</wording_{n + 1}>" for n, one in enumerate(given)))

    with LocalServer(answer) as running:
        running.asked = asked
        yield running


def words(server, records, out):
    model = ["model.name=m", f"model.base_url={server.url}", "model.reasks=0"]
    return ["paraphrase", f"records={records}", f"out={out}", *model]


def test_records_get_the_wordings_that_are_new(server, tmp_path, capsys):
    texts = ["open it", "some", "refused", "nonsense", "open it", None]
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [
        {
            "id": f"r{number}",
            "query": {"text": text, "images": ["a.png"]},
            "positives": [{"id": "t", "text": "key"}],
        }
        for number, text in enumerate(texts)
    ]
    rows[0]["query"]["paraphrases"] = ["by hand"]
    path, out = tmp_path / "in.jsonl", tmp_path / "deep" / "out.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    main(words(server, path, out))
    assert sorted(server.asked) == ["nonsense", "open it", "refused", "some"]  # each text once
    found = list(RecordFile(out))
    assert [record.query.text for record in found] == texts
    assert found[4].query.paraphrases == [f"open it {number}" for number in range(6)]
    assert found[0].query.paraphrases == ["by hand", *found[4].query.paraphrases]
    assert found[1].query.paraphrases == [f"some {number}" for number in range(4)]
    assert [record.query.paraphrases for record in (found[2], found[3], found[5])] == [[], [], []]
    assert json.loads(out.read_text().splitlines()[0])["query"]["images"] == ["../a.png"]
    report = json.loads(out.with_name("out.jsonl.report.json").read_text())
    kinds = {
        "without wordings: refusal": 1,
        "without wordings: missing tag": 1,
        "left out: repeated or too long": 2,
    }
    assert report.items() >= (kinds | {"questions": 4, "wordings": 10}).items()
    main(words(server, path, out))
    assert len(server.asked) == 4, "answers are kept"


def test_a_set_asks_each_question_in_all_wordings_and_reports_how_much_they_matter(server, tmp_path):
    content = tables(num_queries=6, num_candidates=20)
    content["queries"]["text"][5] = "refused"
    path, out = write_tables(tmp_path / "set", content), tmp_path / "other" / "set"
    main(words(server, path, out))
    old, new = load_set(path), load_set(out)
    assert new.query_ids[:8] == ["q00", *(f"q00~{number}" for number in range(1, 7)), "q01"]
    assert len(new.queries) == 5 * 7 + 1
    assert [query.text for query in new.queries[:2]] == ["question 0", "question 0 0"]
    assert new.meta["fingerprint"] == new.fingerprint != old.fingerprint
    for table in ("positives", "negatives"):
        theirs, ours = getattr(old, table), getattr(new, table)
        assert str([ours[row * 7 + 3] for row in range(5)]) == str(theirs[:5])
    pictures = [with_content(one) and one.queries for one in (old, new)]
    assert len(list((out / "query_pictures").iterdir())) == 3  # two queries share one each
    assert pictures[1][0].pictures == pictures[1][6].pictures
    assert pq.read_table(out / "queries.parquet")["paraphrase"].to_pylist()[5:8] == ["q00", "q00", "q01"]
    options = RunOptions(checkpoint="fake", set=out, out=tmp_path / "eval", report=False)
    run(options, loader(FakeEncoder()))
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["paraphrase_groups"] == 5
    assert "linguistic_sensitivity_recall@1" in results["micro"]
    asked = len(server.asked)
    for again in (out, path):
        with pytest.raises(UserError):
            main(words(server, out, again))
    assert len(server.asked) == asked


def test_a_writer_that_rewords_nothing_writes_nothing(server, tmp_path):
    row = {"id": "r", "query": {"text": "nonsense"}, "positives": [{"id": "t", "text": "key"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError):
        main(words(server, tmp_path / "in.jsonl", tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()


def test_the_dry_run_counts_each_question_once_and_asks_nothing(server, tmp_path, capsys):
    rows = [
        {"id": f"r{n}", "query": {"text": "same"}, "positives": [{"id": "t", "text": "key"}]}
        for n in range(3)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main([*words(server, tmp_path / "in.jsonl", tmp_path / "out.jsonl"), "dry_run=true"])
    assert capsys.readouterr().out.startswith("1 calls")
    assert server.asked == []

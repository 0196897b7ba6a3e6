"""MM-BRIGHT: four tasks of a small release, exclusions, grades, picture policies, and the macro averages of Table 6."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture, write_set
from faults import error_about
from PIL import Image

from eval.benchmarks.published_tables import published
from eval.benchmarks.registry import protocol_for
from eval.benchmarks.releases.mmbright import MmbrightOptions, document_key, image_key, import_mmbright
from eval.commands.run import RunOptions, run_command
from eval.commands.score import ScoreOptions, score
from eval.scoring.search import Ranking, trec_ties
from eval.scoring.trec import read_run, write_run
from eval.sets.retrieval_set import load_set, reference_answers
from rge.common.errors import UserError
from rge.common.options import parse_options

DOCS = ["biology/aa11_1.txt", "biology/bb22_2_0.txt", "biology/bb22_2_1.txt", "biology/cc33_3.txt"]
PAGES = {
    name: f"biology/biology_{name}_0001/image {n}.webp" for n, name in enumerate(("aa11", "bb22", "cc33"))
}
GONE = "biology/biology_cc33_0001/broken.webp"


def two_frames():
    out = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def table(src, config, domain, rows):
    (src / config).mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(src / config / f"{domain}.parquet")


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    src = tmp_path_factory.mktemp("mmbright")
    for domain in ("biology", "law"):

        def of(name, domain=domain):
            return name.replace("biology", domain)

        table(src, "documents", domain, [{"id": of(d), "content": f"text {n}"} for n, d in enumerate(DOCS)])
        asked = [
            {
                "id": "q1",
                "query": "why?",
                "gold_ids": [of(DOCS[1])],
                "negative_ids": [of(DOCS[0]), "elsewhere/x.txt"],
            },
            {"id": "q2", "query": "how?", "gold_ids": [of(DOCS[0]), of(DOCS[3])], "negative_ids": []},
        ]
        answers = [["It is so.", " And so. "], []]
        rows = [row | {"gold_answers": texts} for row, texts in zip(asked, answers, strict=True)]
        table(src, "examples", domain, rows)
        shown = [
            {
                "image_paths": ["a.png", "b.gif"],
                "positive_images": [{"image_path": of(PAGES["bb22"]).replace("/", "\\")}],
                "negative_images": [{"image_path": of(PAGES["aa11"])}, {"image_path": ""}],
            },
            {"image_paths": ["a.png"], "positive_images": [], "negative_images": []},
        ]
        table(src, "examples_multimodal", domain, [a | s for a, s in zip(asked, shown, strict=True)])
        images = [{"path": of(p), "bytes": picture(n)} for n, p in enumerate(PAGES.values())]
        table(src, "document_images", domain, [*images, {"path": of(GONE), "bytes": b"no picture"}])
        table(
            src,
            "examples_images",
            domain,
            [{"path": "a.png", "bytes": picture(9)}, {"path": "b.gif", "bytes": two_frames()}],
        )
    return src


def imported(src, out, **change):
    given = MmbrightOptions(**{"src": src, "out": out, "domains": ("biology",)} | change)
    import_mmbright(given)
    return load_set(out / "biology")


def pairs(wanted, lists):
    return [[wanted.corpus_ids[row] for row in rows] for rows in lists]


def test_task_1(src, tmp_path):
    wanted = imported(src, tmp_path / "o", task="1")
    assert wanted.corpus_ids == sorted(DOCS)
    assert pairs(wanted, [rows for rows, _ in wanted.positives]) == [[DOCS[1]], [DOCS[0], DOCS[3]]]
    assert pairs(wanted, wanted.negatives) == [[DOCS[0]], []]  # one outside the corpus cannot be retrieved
    assert all(not query.pictures for query in wanted.queries)


@pytest.mark.parametrize(
    ("policy", "sizes"), [("first", [(4, 4)]), ("all", [(4, 4), (4, 4)]), ("vconcat", [(4, 8)])]
)
def test_picture_policies(src, tmp_path, policy, sizes):
    wanted = imported(src, tmp_path / "o", task="2", image_policy=policy)
    assert [Image.open(io.BytesIO(data)).size for data in wanted.queries[0].pictures] == sizes
    assert len(wanted.queries[1].pictures) == 1
    assert wanted.meta["image_policy"] == policy


def test_reference_answers_are_kept(src, tmp_path):
    """Also for task 2, whose table need not have them."""
    for task in ("1", "2"):
        assert reference_answers(imported(src, tmp_path / task, task=task)) == ["It is so.\n\nAnd so.", ""]


def test_task_3_drops_what_has_no_answer(src, tmp_path):
    wanted = imported(src, tmp_path / "o", task="3")
    assert wanted.query_ids == ["q1"]
    assert wanted.meta["queries_without_positives"] == ["q2"]
    assert wanted.meta["undecodable_pictures"] == [GONE]
    ids = {name: path.replace(" ", "%20") for name, path in PAGES.items()}
    assert wanted.corpus_ids == sorted(ids.values())
    assert pairs(wanted, [wanted.positives[0][0]]) == [[ids["bb22"]]]
    assert pairs(wanted, wanted.negatives) == [[ids["aa11"]]]


def test_task_4_grades(src, tmp_path):
    wanted = imported(src, tmp_path / "o", task="4")
    image = PAGES["bb22"].replace(" ", "%20")
    assert len(wanted.corpus_ids) == 4 + 4  # every document alone, and each with its page's picture
    assert dict(zip(pairs(wanted, [wanted.positives[0][0]])[0], wanted.positives[0][1], strict=True)) == {
        f"{DOCS[1]}|||__NO_IMAGE__": 1,
        f"{DOCS[1]}|||{image}": 2,
    }
    # officially pairs with a negative picture leave the ranking, and the grades stay
    official = protocol_for("mmbright", "official").prepare(wanted)
    wrong = PAGES["aa11"].replace(" ", "%20")
    assert pairs(wanted, official.excluded) == [[f"{DOCS[0]}|||{wrong}"], []]
    assert [sorted(gains) for _, gains in official.positives] == [[1, 2], [1, 1]]
    assert [len(rows) for rows, _ in wanted.positives] == [2, 2]
    # the pattern first released finds no page for a document in chunks
    legacy = imported(src, tmp_path / "l", task="4", keys="legacy")
    assert len(legacy.corpus_ids) == 4 + 2
    assert [len(rows) for rows, _ in legacy.positives] == [1, 2]
    with error_about(UserError, "keys"):
        imported(src, tmp_path / "n", task="2", keys="legacy")


def test_documents_are_streamed_part_by_part_and_count_once(src, tmp_path):
    """A domain in two files, as the hub has large ones, with an id that stands in both."""
    other = tmp_path / "src"
    for config in ("documents", "examples"):
        (other / config).mkdir(parents=True)
    rows = pd.read_parquet(src / "documents" / "biology.parquet")
    again = rows.iloc[:1].assign(content="another text")
    rows.iloc[:2].to_parquet(other / "documents" / "biology-00000-of-00002.parquet")
    pd.concat([rows.iloc[2:], again]).to_parquet(other / "documents" / "biology-00001-of-00002.parquet")
    pd.read_parquet(src / "examples" / "biology.parquet").to_parquet(
        other / "examples" / "biology-00000-of-00001.parquet"
    )
    wanted = imported(other, tmp_path / "o", task="1")
    whole = imported(src, tmp_path / "p", task="1")
    assert list(wanted.corpus_items()) == list(whole.corpus_items())
    assert wanted.fingerprint == whole.fingerprint
    rows.drop(columns="content").to_parquet(other / "documents" / "biology.parquet")
    with error_about(UserError, "biology.parquet", "row 1", "content"):
        imported(other, tmp_path / "q", task="1")
    assert not (tmp_path / "q" / "biology").exists()


def test_keys():
    assert document_key("academia/a7beca61_6123.txt", legacy=True) == "a7beca61"
    assert document_key("biology/fec40b40_1635_4.txt", legacy=True) == "biology/fec40b40_1635_4.txt"
    assert document_key("biology/fec40b40_1635_4.txt", legacy=False) == "fec40b40"
    assert image_key("academia/academia_a7beca61_0002/image_1.webp", "academia") == "a7beca61"


@pytest.mark.slow
def test_exclusions_by_profile(src, tmp_path):
    """q1: the hard negative stands first. Officially it is taken out before ranks are counted."""
    imported(src, tmp_path / "o", task="1", domains=("biology", "law"))
    runs = tmp_path / "runs"
    runs.mkdir()
    for domain in ("biology", "law"):
        names = [d.replace("biology", domain) for d in DOCS]
        lines = [("q1", n, r) for r, n in enumerate(names, 1)] + [
            ("q2", n, r) for r, n in enumerate(names[1:], 1)
        ]
        (runs / f"{domain}.trec").write_text("".join(f"{q} Q0 {n} {r} {-r} me\n" for q, n, r in lines))
    value = {}
    for profile in ("clean", "official"):
        out = score(
            ScoreOptions(
                run=runs, set=tmp_path / "o", out=tmp_path / profile, benchmark="mmbright", profile=profile
            )
        )
        results = json.loads((out / "results.json").read_text())
        value[profile] = pd.read_parquet(out / "per_query.parquet").set_index("query_id")["ndcg@10"]
        assert results["macro"]["ndcg@10"]["value"] == pytest.approx(value[profile].mean())
    # q1 clean: gold at rank 2, 1 / log2(3); official: at rank 1. q2: one of two golds, at rank 3.
    q2 = (1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert value["clean"]["biology/q1"] == pytest.approx(1 / np.log2(3))
    assert value["official"]["biology/q1"] == 1.0
    assert value["official"]["law/q2"] == pytest.approx(q2)
    assert results["official"]["NDCG@10"] == round((1 + q2) / 2, 5)
    assert results["suite"] == "domain"
    assert any("hard negatives are removed" in line for line in results["protocol"])


@pytest.mark.slow
def test_run_on_a_suite_of_domains(src, tmp_path):
    imported(src, tmp_path / "o", task="4", domains=("biology", "law"))
    given = RunOptions(
        checkpoint="x", set=tmp_path / "o", out=tmp_path / "e", benchmark="mmbright", profile="official", depth=1000,
        query_mode=("direct", "reasoning"),
    )  # fmt: skip
    outs = run_command(given, loader(FakeEncoder()))
    assert [out.name for out in outs] == ["reasoning-both", "direct-both"]
    results = json.loads((outs[0] / "results.json").read_text())
    assert set(results["by_category"]) == {"biology", "law"}
    assert results["rationale"]["tokens_mean"] > 0
    assert json.loads((outs[1] / "results.json").read_text())["rationale"]["tokens_mean"] is None


def test_ties_as_in_trec_eval():
    ranking = Ranking(np.array([[0, 2, 5, 1]], np.int32), np.array([[3.0, 3.0, 2.0, 1.0]], np.float32), 4)
    assert trec_ties(ranking).rows_QW.tolist() == [[2, 0, 5, 1]]


def test_task_3_scales_single_scores(tmp_path):
    """The released code of task 3 multiplies float32 scores by 100, and some that differed are equal then."""
    line = np.float32(0.7) + np.arange(64, dtype=np.float32)[::-1] * np.float32(2**-24)
    at = next(
        n
        for n in range(63)
        if line[n] > line[n + 1] and line[n] * np.float32(100) == line[n + 1] * np.float32(100)
    )
    data = load_set(write_set(tmp_path / "set", num_queries=3, num_candidates=6))
    right = (np.array([0], np.int32), np.ones(1))
    ranking = Ranking(np.array([[0, 5]] * 3, np.int32), np.stack([line[at : at + 2]] * 3), 2)
    found = {}
    for task in (2, 3):
        wanted = replace(data, meta=data.meta | {"task": task}, positives=[right] * 3, negatives=None)
        protocol = protocol_for("mmbright", "official")
        ordered = protocol.ordered(wanted, ranking)
        write_run(tmp_path / "run.trec", ordered, wanted.query_ids, wanted.corpus_ids, "x")
        again = protocol.ordered(wanted, read_run(tmp_path / "run.trec", wanted).ranking)
        for one in (ordered, again):
            scored = protocol.score(wanted, one)
            found.setdefault(task, []).append(scored.value_QM[0, scored.names.index("mrr")])
    # equal in task 3, and trec_eval has larger ids first; the written run has the order that was scored
    assert found == {2: [1.0, 1.0], 3: [0.5, 0.5]}


def test_refusals(src, tmp_path):
    with error_about(UserError, ("choice", "task")):
        parse_options(MmbrightOptions, [f"src={src}", f"out={tmp_path / 'o'}", "task=5"])
    with error_about(UserError, tmp_path / "examples_multimodal"):
        imported(tmp_path, tmp_path / "o")
    with error_about(UserError, ("choice", "domains")):
        imported(src, tmp_path / "o", domains=("bio",))
    other = tmp_path / "src"
    for config in ("documents", "examples_multimodal", "examples_images"):
        (other / config).mkdir(parents=True)
        rows = pd.read_parquet(src / config / "biology.parquet")
        rows = rows[rows["id"] != DOCS[1]] if config == "documents" else rows
        rows.to_parquet(other / config / "biology.parquet")
    with error_about(UserError, "q1: biology/bb22_2_0.txt", "allow_missing"):
        imported(other, tmp_path / "o")
    assert imported(other, tmp_path / "o", allow_missing=True, overwrite=True).num_missing_Q.tolist() == [
        1,
        0,
    ]
    table(other, "examples_images", "biology", [{"path": "a.png", "bytes": picture(9)}])
    with error_about(UserError, "b.gif", "q1"):
        imported(other, tmp_path / "p", allow_missing=True)


@pytest.mark.parametrize("policy", ["first", "all", "vconcat"])
def test_pictures_of_queries_that_cannot_be_opened_are_left_out(src, tmp_path, policy):
    """The release has some as SVG, and queries that have no other one."""
    other = shutil.copytree(src, tmp_path / "src")
    asked = pd.read_parquet(other / "examples_multimodal/biology.parquet")
    asked["image_paths"] = [["c.svg", "b.gif"], ["gone.svg"]]
    asked.to_parquet(other / "examples_multimodal/biology.parquet")
    rows = [{"path": path, "bytes": b"<svg></svg>"} for path in ("c.svg", "gone.svg")]
    rows.append({"path": "b.gif", "bytes": two_frames()})
    table(other, "examples_images", "biology", rows)
    wanted = imported(other, tmp_path / "o", image_policy=policy)
    assert [len(query.pictures) for query in wanted.queries] == [1, 0]
    assert wanted.meta["query_pictures_left_out"] == ["q1: c.svg", "q2: gone.svg"]
    (note,) = wanted.meta["notes"]
    assert note.startswith("2 pictures of queries cannot be opened and were left out; 1 queries have")
    assert imported(src, tmp_path / "whole").meta["notes"] == []


@pytest.mark.parametrize(("task", "models"), [(1, 11), (2, 7), (3, 7), (4, 5)])
def test_published_averages_are_means_of_domains(task, models):
    """Tables 3 to 6: all 30 averages are unweighted means of 29 domains, to the printed digit."""
    rows = published()[f"mmbright{task}"].rows
    values = 100 * np.array([row.values for row in rows])
    assert values.shape == (models, 30)
    np.testing.assert_allclose(values[:, 1:].mean(axis=1), values[:, 0], atol=0.0501)

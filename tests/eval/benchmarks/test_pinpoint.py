"""PinPoint: every trap of the shipped table, and both profiles worked out by hand."""

import base64
import json
import math
import os
import shutil

import numpy as np
import pandas as pd
import pytest
from eval_fakes import picture
from faults import error_about

from data_prep.rmir.config import ExportConfig
from eval.__main__ import main
from eval.benchmarks.releases.pinpoint import (
    DIMENSIONS,
    NUM_ROWS,
    PinpointOptions,
    import_pinpoint,
    unlike_release,
)
from eval.benchmarks.releases.rmir import RmirOptions
from eval.commands.rerank import RerankOptions, rerank_command
from eval.commands.score import ScoreOptions, score
from eval.pages.evaluations import read_evaluation
from eval.pages.tables import main_table, random_floors
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.images import load_image

INDEX = [f"sig{letter}" for letter in "abcdefghij"]
ROWS = [
    # a positive listed twice; None and a repeated negative; the own picture sigi as a negative
    {
        "query_id": 1,
        "instruction": "in blue",
        "query_image_signature": "sigi",
        "query_image_signature2": "None",
        "positive_candidates": ["siga", "sigb", "siga"],
        "negative_candidates": ["sigc", "None", "sigc", "sigi"],
        "is_single": True,
    },
    # a paraphrase of it, with the same positives in another order
    {
        "query_id": 2,
        "instruction": "a blue one",
        "query_image_signature": "sigi",
        "query_image_signature2": "None",
        "positive_candidates": ["sigb", "siga"],
        "negative_candidates": ["sigc"],
        "is_single": True,
    },
    # the same picture, but another question; sigd is positive and negative
    {
        "query_id": "query_3",
        "instruction": "in red",
        "query_image_signature": "sigi",
        "query_image_signature2": "None",
        "positive_candidates": ["sigd"],
        "negative_candidates": ["sigd", "sige"],
        "is_single": True,
    },
    # two pictures, although is_single says one; no negatives
    {
        "query_id": "00004",
        "instruction": "both",
        "query_image_signature": "sigi",
        "query_image_signature2": "sigj",
        "positive_candidates": ["sigf"],
        "negative_candidates": [],
        "is_single": True,
    },
]
RANKING = {
    "00001": ["sigc", "siga", "sigi", "sigb"],
    "00002": ["siga", "sige", "sigf", "sigg"],
    "00003": ["sigd", "siga", "sige"],
    "00004": ["siga", "sigf"],
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    src = tmp_path_factory.mktemp("pinpoint")
    (src / "images").mkdir()
    for number, name in enumerate(INDEX):
        (src / "images" / f"{name}.jpg").write_bytes(picture(number))
    (src / "index_signatures.txt").write_text("\n".join(INDEX) + "\n", "utf-8-sig")
    rows = [row | {"query_id": str(row["query_id"])} for row in ROWS]
    pd.DataFrame(rows).to_parquet(src / "pinpoint_licensed.parquet")
    return src


@pytest.fixture(scope="module")
def wanted(release):
    return import_pinpoint(PinpointOptions(src=release, out=release / "set"))


def scored(release, tmp_path, profile, ranking=RANKING, **change):
    lines = [
        f"{query} Q0 {name} {rank} {100 - rank} me\n"
        for query, names in ranking.items()
        for rank, name in enumerate(names, 1)
    ]
    (tmp_path / "run.trec").write_text("".join(lines))
    out = score(
        ScoreOptions(
            run=tmp_path / "run.trec",
            set=release / "set",
            out=tmp_path / profile,
            benchmark="pinpoint",
            profile=profile,
            **change,
        )
    )
    frame = pd.read_parquet(out / "per_query.parquet").set_index("query_id")
    return json.loads((out / "results.json").read_text()), frame


def test_traps_of_the_table(wanted):
    names = wanted.corpus_ids
    assert wanted.query_ids == ["00001", "00002", "00003", "00004"]
    assert [len(query.pictures) for query in wanted.queries] == [1, 1, 1, 2]  # "None" is no second picture
    assert wanted.columns["images"] == ["one image"] * 3 + ["two images"]  # not by is_single
    assert [[names[row] for row in rows] for rows, _ in wanted.positives] == [
        ["siga", "sigb"],
        ["siga", "sigb"],
        ["sigd"],
        ["sigf"],
    ]
    assert [[names[row] for row in rows] for rows in wanted.negatives] == [
        ["sigc", "sigi"],
        ["sigc"],
        ["sigd", "sige"],
        [],
    ]
    assert wanted.columns["group"] == ["sigi"] * 4  # one picture is enough to be no independent query
    assert wanted.excluded is None
    asked_with = {query.instruction for query in wanted.queries}
    assert (
        asked_with
        == {RmirOptions(src=wanted.path, out=wanted.path).instruction}
        == {ExportConfig().instruction}
    )


def test_pictures_of_the_hubs_cache_are_found_by_the_names_of_their_links(release, tmp_path):
    """`hf download` keeps files as blobs without ending, and links to them in snapshots/COMMIT."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    blobs.mkdir()
    files = (
        release / "index_signatures.txt",
        release / "pinpoint_licensed.parquet",
        *(release / "images").iterdir(),
    )
    for number, file in enumerate(files):
        link = snapshot / file.relative_to(release)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blobs / f"{number:08x}")
        link.symlink_to(os.path.relpath(blobs / f"{number:08x}", link.parent))
    whole = import_pinpoint(PinpointOptions(src=release, out=tmp_path / "whole"))
    linked = import_pinpoint(PinpointOptions(src=snapshot, out=tmp_path / "linked"))
    assert linked.fingerprint == whole.fingerprint
    assert list(linked.corpus_items()) == list(whole.corpus_items())


def labelled_release(src, release):
    """The same table with the dimensions of the release."""
    shutil.copytree(release, src, ignore=shutil.ignore_patterns("set"))
    rows = pd.read_parquet(src / "pinpoint_licensed.parquet")
    rows["query_category"] = ["swap", "swap", "negation", "swap"]
    rows["length_category"] = ["short", "long", "short", "short"]
    rows["is_question"] = [False, True, False, False]
    rows["is_imperative"] = [True, False, None, True]
    rows["l1_interest"] = ["home", "home", "food", "home"]
    rows["skin_tone_bucket"] = [None, None, "2", np.nan]
    rows.to_parquet(src / "pinpoint_licensed.parquet")
    return import_pinpoint(PinpointOptions(src=src, out=src / "set"))


@pytest.mark.slow
def test_figures_by_every_dimension(release, tmp_path):
    wanted = labelled_release(tmp_path / "src", release)
    assert wanted.report_by == ("images", *DIMENSIONS)
    assert wanted.columns["is_question"] == ["no", "yes", "no", "no"]
    assert wanted.columns["is_imperative"] == ["yes", "no", "unlabelled", "yes"]
    assert wanted.columns["skin_tone_bucket"] == ["unlabelled", "unlabelled", "2", "unlabelled"]
    assert wanted.meta["notes"] == []  # a stand-in is not compared with the release
    results, frame = scored(tmp_path / "src", tmp_path, "clean")
    swap, negation = (results["by_query_category"][name] for name in ("swap", "negation"))
    # queries 1 and 2 are paraphrases: two and one of their first ten are right
    assert swap["linguistic_sensitivity"]["value"] == pytest.approx(0.1)
    assert swap["linguistic_sensitivity"] == results["micro"]["linguistic_sensitivity"]
    assert "linguistic_sensitivity" not in negation
    assert (
        "linguistic_sensitivity" not in results["by_length_category"]["short"]
    )  # only one of the two is short
    bad = frame["negative_recall@10"]
    assert swap["negative_recall@10"]["value"] == pytest.approx(bad[["00001", "00002"]].mean())
    assert negation["negative_recall@10"]["value"] == pytest.approx(bad["00003"])
    for block in ("by_l1_interest", "by_skin_tone_bucket", "by_is_question", "by_is_imperative"):
        assert all("map_capped@10" in figures for figures in results[block].values())


def test_counts_of_the_release_are_checked():
    names = ("swap", "context fit", "composition", "negation", "complement", "explore")
    counts = {
        "query_category": dict(zip(names, (3398, 2520, 894, 328, 307, 188), strict=True)),
        "length_category": {"short": 1348, "medium": 3834, "long": 2453},
        "l1_interest": {f"interest {n}": 331 for n in range(22)} | {"last": 353},
        "skin_tone_bucket": {"1": 1000, "2": 1000, "3": 1000, "4": 547, "unlabelled": 4088},
    }
    assert unlike_release(counts) == []
    assert all(sum(rows.values()) == NUM_ROWS for rows in counts.values())
    counts["query_category"]["swap"] -= 1
    counts["skin_tone_bucket"]["5"] = 1
    assert len(unlike_release(counts)) == 2


def test_rarer_traps_of_the_table(release, tmp_path):
    """A row without positives is no query; a query's own picture may be right; some negatives are in no index."""
    src = tmp_path / "src"
    src.mkdir()
    (src / "images").symlink_to(release / "images")
    (src / "index_signatures.txt").write_text(
        "\n".join([*INDEX, "", INDEX[0]]) + "\n"
    )  # a blank line, an id twice
    own = ROWS[0] | {"positive_candidates": ["sigi", "None"], "negative_candidates": ["sigi", "gone", None]}
    empty = ROWS[1] | {"positive_candidates": ["None"]}
    rows = [row | {"query_id": str(row["query_id"])} for row in (own, empty, ROWS[3])]
    pd.DataFrame(rows).to_parquet(src / "pinpoint_licensed.parquet")
    found = import_pinpoint(PinpointOptions(src=src, out=tmp_path / "o", exclude_query_image=True))
    assert found.query_ids == ["00001", "00004"]
    assert found.corpus_ids == INDEX
    assert [len(rows) for rows in found.excluded] == [0, 2]  # a right answer is never taken out
    assert [[found.corpus_ids[row] for row in rows] for rows in found.negatives] == [["sigi"], []]
    rows[2]["query_id"] = "query_1"
    pd.DataFrame(rows).to_parquet(src / "pinpoint_licensed.parquet")
    with error_about(UserError, "00001"):
        import_pinpoint(PinpointOptions(src=src, out=tmp_path / "p"))
    pd.DataFrame([row | {"instruction": 7} for row in rows]).to_parquet(src / "pinpoint_licensed.parquet")
    with error_about(UserError, "row 1", "instruction"):
        import_pinpoint(PinpointOptions(src=src, out=tmp_path / "p"))
    pd.DataFrame(rows[:1]).drop(columns="instruction").to_parquet(src / "pinpoint_licensed.parquet")
    with error_about(UserError, "instruction", "pinpoint_licensed.parquet"):
        import_pinpoint(PinpointOptions(src=src, out=tmp_path / "p"))
    pd.DataFrame(rows[:1]).to_parquet(src / "pinpoint_licensed.parquet")
    (src / "images").unlink()
    with error_about(UserError, "sigi"):
        import_pinpoint(PinpointOptions(src=src, out=tmp_path / "p", images=tmp_path / "nowhere"))


def test_official_numbers_by_hand(release, wanted, tmp_path):
    results, frame = scored(release, tmp_path, "official")
    # query 1: c a i b against the listed [a, b, a]: hits at 2 and 4, (1/2 + 2/4) / min(3, 10)
    ap = [1 / 3, 1 / 2, 1.0, 1 / 2]
    np.testing.assert_array_equal(frame["map_capped@10"], ap)
    # negatives [c, None, c, i]: two hits of min(4, 10); [c]: 0; [d, e]: both; none listed: 0
    np.testing.assert_array_equal(frame["negative_recall@10"], [2 / 4, 0.0, 1.0, 0.0])
    np.testing.assert_array_equal(frame["recall@10"], [2 / 3, 1 / 2, 1.0, 1.0])
    np.testing.assert_allclose(frame["precision@10"], [0.2, 0.1, 0.1, 0.1], atol=1e-15)
    # without negatives: a b -> (1 + 1) / 3; unchanged; d itself goes away -> 0; unchanged
    np.testing.assert_allclose(frame["delta_map_capped@10"], [2 / 3 - 1 / 3, 0.0, -1.0, 0.0], atol=1e-15)
    official = results["official"]
    assert official["mAP@10"] == pytest.approx(np.mean(ap), abs=1e-15)
    assert official["mAP@10_noNeg"] == pytest.approx(np.mean([2 / 3, 1 / 2, 0.0, 1 / 2]), abs=1e-15)
    assert official["delta_mAP@10_noNeg"] == pytest.approx(-1 / 6, abs=1e-15)
    assert official["pct_increase_mAP@10_noNeg"] == pytest.approx(-1 / 6 / np.mean(ap), abs=1e-15)
    assert official["NegRecall@1"] == pytest.approx((1 / 1 + 0 + 1 / 1 + 0) / 4)
    # rows 1 to 3 share (sigi, None): precision@10 0.2, 0.1, 0.1; row 4 is alone
    assert official["ling_sens_range"] == pytest.approx(0.1, abs=1e-15)
    assert official["ling_sens_std"] == pytest.approx(np.std([0.2, 0.1, 0.1]), abs=1e-15)
    assert official["total_queries"] == 4
    assert results["micro"]["linguistic_sensitivity"]["value"] == official["ling_sens_range"]
    assert results["profile"] == "official"
    assert any("compare only with the repository's metrics.csv" in line for line in results["protocol"])


def test_a_perfect_official_run_stays_below_one(release, wanted, tmp_path):
    ranking = {"00001": ["siga", "sigb"], "00002": ["siga", "sigb"], "00003": ["sigd"], "00004": ["sigf"]}
    assert scored(release, tmp_path, "official", ranking)[1]["map_capped@10"].tolist() == [2 / 3, 1, 1, 1]
    assert scored(release, tmp_path, "clean", ranking)[1]["map_capped@10"].tolist() == [1, 1, 1, 1]


def test_clean_numbers_by_hand(release, wanted, tmp_path):
    results, frame = scored(release, tmp_path, "clean")
    np.testing.assert_array_equal(
        frame["map_capped@10"], [1 / 2, 1 / 2, 1.0, 1 / 2]
    )  # over 2 positives, not 3
    # {c, i}: both found of 2; {c}: none; sigd is a positive, so {e}: found; no negatives: not defined
    np.testing.assert_array_equal(frame["negative_recall@10"], [1.0, 0.0, 1.0, np.nan])
    np.testing.assert_array_equal(frame["delta_map_capped@10"], [1 / 2, 0.0, 0.0, np.nan])
    assert results["micro"]["delta_map_capped@10"]["value"] == pytest.approx(1 / 6)
    assert results["micro"]["delta_map_capped_relative@10"]["value"] == pytest.approx((1 / 2 / 4) / (2.5 / 4))
    # only rows 1 and 2 ask the same: 0.2 - 0.1, and 0 in AP
    assert results["paraphrase_groups"] == 1
    assert results["micro"]["linguistic_sensitivity"]["value"] == pytest.approx(0.1)
    assert results["micro"]["linguistic_sensitivity_map"]["value"] == 0.0
    # rows 1 and 2 are one group, 3 and 4 are groups of their own
    group_mean = {name: figure["value"] for name, figure in results["group_mean"].items()}
    assert group_mean["map_capped@10"] == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    assert group_mean["negative_recall@10"] == pytest.approx((1 / 2 + 1) / 2)  # row 4 has no negatives
    assert set(results["by_images"]) == {"one image", "two images"}
    assert results["by_images"]["one image"]["map_capped@10"]["value"] == pytest.approx(2 / 3)
    assert results["headline"][0]["metric"] == "map_capped@10"


def test_queries_without_a_ranking(release, wanted, tmp_path):
    ranking = {query: names for query, names in RANKING.items() if query != "00004"}
    with error_about(UserError, "allow_missing", "skipped"):
        scored(release, tmp_path, "official", ranking)
    official, _ = scored(release, tmp_path, "official", ranking, allow_missing=True)
    assert official["official"]["mAP@10"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert official["official"]["total_queries"] == 3
    assert official["coverage"] == 0.75
    clean, _ = scored(release, tmp_path, "clean", ranking, allow_missing=True)
    assert clean["micro"]["map_capped@10"]["value"] == pytest.approx((1 / 2 + 1 / 2 + 1 + 0) / 4)


@pytest.mark.parametrize("profile", ["clean", "official"])
def test_a_page_has_the_floors_of_the_protocol(release, wanted, tmp_path, profile):
    """Official divides by repeated positives and leaves out queries without a ranking; row 4 has no negatives."""
    ranking = {query: names for query, names in RANKING.items() if query != "00003"}
    results, _ = scored(release, tmp_path, profile, ranking, allow_missing=True)
    run = read_evaluation(tmp_path / profile)
    floors = {metric: random_floors(run, wanted, metric) for metric in results["random"]}
    for metric, floor in floors.items():
        assert np.nanmean(floor) == pytest.approx(results["random"][metric])
    if profile == "clean":
        table, _ = main_table([run], run, "negative_recall@10", floors["negative_recall@10"])
        assert [heading for heading, _ in table.columns] == ["All queries", "One image", "Two images"]
        assert [row.figures[2] for row in table.rows] == [None, None]


def test_official_removes_negatives_from_all_that_is_listed(release, wanted):
    """Fifty negatives before the one right answer: evaluate.py deletes them first and finds it at rank 1."""
    from dataclasses import replace

    from eval.benchmarks.registry import protocol_for
    from eval.scoring.search import Ranking

    bad = [name for name in wanted.corpus_ids if name != "siga"]
    right, wrong = wanted.corpus_ids.index("siga"), wanted.corpus_ids.index(bad[0])
    # as many rows as there are names: the same negative again stands for others
    rows = np.full((4, 60), wrong, np.int32)
    rows[:, 55] = right
    rows[:, 56:] = -1
    scores = np.where(rows < 0, -np.inf, np.linspace(1, 0, 60)[None].repeat(4, 0))
    one = np.array([right], np.int32)
    made = replace(wanted, positives=[(one, np.ones(1))] * 4, negatives=[np.array([wrong], np.int32)] * 4)
    found = protocol_for("pinpoint", "official").score(made, Ranking(rows, scores, 60))
    column = dict(zip(found.names, found.value_QM.T, strict=True))
    assert column["map_capped@10"].max() == 0.0
    assert column["delta_map_capped@10"].min() > 0.0
    assert column["mrr"].max() == pytest.approx(1 / 56)


def test_official_looks_no_deeper_than_the_ranking(release, wanted):
    from eval.benchmarks.registry import protocol_for
    from eval.scoring.search import Ranking

    rows = np.full((4, 60), -1, np.int32)
    rows[:, 55] = wanted.corpus_ids.index("siga")
    for depth, found_at in ((50, 0.0), (60, 1 / 56)):
        ranking = Ranking(rows, np.linspace(1, 0, 60)[None].repeat(4, 0), depth)
        found = protocol_for("pinpoint", "official").score(wanted, ranking)
        assert found.value_QM[:, found.names.index("mrr")].max() == pytest.approx(found_at)


def test_options_and_refusals(release, tmp_path, capsys):
    words = [f"src={release}", f"out={tmp_path / 'x'}"]
    assert main(["import", "pinpoint", *words, "exclude_query_image=true", "pictures=link"]) == 0
    (release / "index_signatures.txt").rename(tmp_path / "index")
    assert main(["import", "pinpoint", *words, "overwrite=true"]) == 2
    assert "index_signatures.txt" in capsys.readouterr().err
    (release / "index_signatures.txt").write_text("\n".join(INDEX[1:]))
    assert main(["import", "pinpoint", *words, "overwrite=true"]) == 2
    assert "2 right candidates are not in" in capsys.readouterr().err
    (tmp_path / "index").rename(release / "index_signatures.txt")
    table = tmp_path / "src" / "pinpoint_licensed.parquet"
    shutil.copytree(release, table.parent)
    table.write_bytes(table.read_bytes()[:99])
    assert main(["import", "pinpoint", f"src={table.parent}", f"out={tmp_path / 'z'}"]) == 2
    assert f"{table}: it cannot be read: Parquet magic bytes not found" in capsys.readouterr().err


def test_a_repeated_id_is_refused_even_without_positives(release, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(release, src)
    rows = [
        row | {"query_id": str(row["query_id"])} for row in (*ROWS, ROWS[0] | {"positive_candidates": []})
    ]
    pd.DataFrame(rows).to_parquet(src / "pinpoint_licensed.parquet")
    with error_about(UserError, f"row {len(rows)}", "twice"):
        import_pinpoint(PinpointOptions(src=src, out=tmp_path / "o"))


def test_excluded_query_image(release, tmp_path):
    found = import_pinpoint(PinpointOptions(src=release, out=tmp_path / "y", exclude_query_image=True))
    assert [[found.corpus_ids[r] for r in rows] for rows in found.excluded] == [["sigi"]] * 3 + [
        ["sigi", "sigj"]
    ]


@pytest.mark.slow
def test_its_reranker_by_an_endpoint(release, wanted, tmp_path):
    """Before and after, with a judge that answers, refuses, or answers nonsense; and nothing is asked twice."""
    colours = {load_image(picture(number)).getpixel((0, 0)): name for number, name in enumerate(INDEX)}
    probabilities = {"siga": 0.9, "sigb": 0.8, "sigd": 0.4, "sigi": 0.1}
    asked = []

    async def judge(path, body):
        *_, url, _ = (part.get("image_url", {}).get("url", "") for part in body["messages"][0]["content"])
        shown = load_image(base64.b64decode(url.partition(",")[2])).getpixel((0, 0))
        asked.append(name := colours[shown])
        if name == "sigc":
            return Answer({"error": {"code": "content_filter", "message": "the content filter"}}, 400)
        answer = chat("Yes", stop="length")
        words = {"blue": 0.9} if name == "sige" else {"Yes": probabilities.get(name, 0.2)}
        words |= {} if name == "sige" else {"No": 1 - words["Yes"]}
        top = [{"token": word, "logprob": math.log(share)} for word, share in words.items()]
        answer.body["choices"][0]["logprobs"] = {"content": [{"token": "Yes", "top_logprobs": top}]}
        return answer

    before, _ = scored(release, tmp_path, "clean")
    with LocalServer(judge) as server:
        options = RerankOptions(
            of=tmp_path / "clean", out=tmp_path / "judged", endpoint=ModelConfig("vlm", server.url)
        )
        rerank_command(options)
        num = len(asked)
        rerank_command(options)
        assert len(asked) == num == sum(map(len, RANKING.values()))
    results = json.loads((tmp_path / "judged" / "results.json").read_text())
    tops = pd.read_parquet(tmp_path / "judged" / "per_query.parquet").set_index("query_id")["top10"]
    assert {name: list(top) for name, top in tops.items()} == {
        "00001": ["siga", "sigb", "sigi", "sigc"],
        "00002": ["siga", "sigf", "sigg", "sige"],
        "00003": ["siga", "sigd", "sige"],
        "00004": ["siga", "sigf"],
    }
    assert results["rerank"]["unscored"] == {"refusal": 1, "neither yes nor no": 2}
    assert any("3 of 13 pairs have no score" in warning for warning in results["warnings"])
    compared = results["rerank"]["before"]
    for name in (
        "map_capped@10",
        "delta_map_capped_relative@10",
        "negative_recall@10",
        "linguistic_sensitivity",
    ):
        assert compared[name] == before["micro"][name]
    assert results["micro"]["map_capped@10"]["value"] == pytest.approx((1 + 0.5 + 0.5 + 0.5) / 4)


@pytest.mark.slow
def test_its_reranker_by_a_stock_model(release, wanted, tmp_path, tiny_path):
    scored(release, tmp_path, "clean")
    rerank_command(RerankOptions(of=tmp_path / "clean", out=tmp_path / "judged", judge=str(tiny_path)))
    rerank = json.loads((tmp_path / "judged" / "results.json").read_text())["rerank"]
    assert (rerank["ask"], rerank["num_pairs"], rerank["unscored"]) == ("yes_no", 13, {})
    assert rerank["counts"]["pairs"] == 13
    assert rerank["counts"]["tokens"] < rerank["counts"]["tokens_alone"]

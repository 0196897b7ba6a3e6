"""`rge eval run` and `score` end to end on a fake encoder: files, conditions, resumption, refusals."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_fakes import (
    NUM_CANDIDATES,
    NUM_QUERIES,
    FakeEncoder,
    loader,
    picture,
    tables,
    write_set,
    write_tables,
)
from faults import error_about
from recorded import DECIDES, RECIPE

from eval.__main__ import COMMANDS, main, usage
from eval.commands.compare import CompareOptions, compare
from eval.commands.export import ExportOptions, export
from eval.commands.run import RunOptions, other_words, run, run_command
from eval.commands.score import ScoreOptions, score
from eval.pages.evaluations import read_evaluation
from eval.pages.report import ReportOptions, provenance_of, report
from eval.pages.tables import random_floors
from eval.scoring import measurement
from eval.scoring.metrics import names_of
from eval.scoring.output_files import means
from eval.scoring.protocol import Protocol
from eval.sets.retrieval_set import load_set
from rge.checkpoints.settings import Instructions
from rge.common.errors import UserError
from rge.common.images import ImageError
from rge.common.mmeb_prompts import RGE_QUERY
from rge.common.options import parse_options
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedders.common import ThirdParty
from rge.stats.intervals import NUM_RESAMPLES

NAMES, METRICS = names_of(), names_of(negatives=True)


@pytest.fixture(scope="module")
def set_dir(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("set"))


def options(set_dir, out, **change):
    return RunOptions(
        **{"checkpoint": "fake", "set": set_dir, "out": out, "batch_size": 2, "report": False} | change
    )


def results_of(path):
    return json.loads((path / "results.json").read_text())


def per_query_of(path):
    return pd.read_parquet(path / "per_query.parquet").set_index("query_id")


@pytest.fixture(scope="module")
def done(set_dir, tmp_path_factory):
    """Both modes, once for all tests that only read."""
    out = tmp_path_factory.mktemp("out") / "both"
    encoder = FakeEncoder()
    dirs = run(options(set_dir, out, query_mode=("direct", "reasoning")), loader(encoder))
    return encoder, out, dirs


@pytest.mark.slow
def test_two_modes_in_one_go_encode_candidates_once(done):
    encoder, out, dirs = done
    assert dirs == [out / "reasoning-both", out / "direct-both"]
    sizes = {}
    for side, mode, size in encoder.calls:
        sizes[side, mode] = sizes.get((side, mode), 0) + size
    assert sizes == {
        ("candidate", "direct"): NUM_CANDIDATES,
        ("query", "reasoning"): NUM_QUERIES,
        ("query", "direct"): NUM_QUERIES,
    }
    for folder in dirs:
        assert {path.name for path in folder.iterdir()} == {"run.trec", "per_query.parquet", "results.json"}


def test_metrics_at_any_cutoff(set_dir, tmp_path):
    """Below and beyond the usual ones; another request needs overwrite=true."""
    asked = options(set_dir, tmp_path / "out", metrics=("ndcg@5", "recall@55"))
    (out,) = run(asked, loader(FakeEncoder()))
    results, table = results_of(out), per_query_of(out)
    assert results["micro"]["recall@55"]["value"] == pytest.approx(table["recall@55"].mean())
    assert 0 < results["micro"]["ndcg@5"]["value"] < results["micro"]["recall@55"]["value"] < 1
    with error_about(UserError, "depth"):
        run(replace(asked, depth=54, overwrite=True), loader(FakeEncoder()))
    with error_about(UserError, "recall@ten"):
        run(replace(asked, metrics=("recall@ten",)), loader(FakeEncoder()))
    with error_about(UserError, "out", "metrics"):
        run(replace(asked, metrics=()), loader(FakeEncoder()))
    (deep,) = run(replace(asked, out=tmp_path / "deep", metrics=("recall@2000",)), loader(FakeEncoder()))
    assert results_of(deep)["depth"] == results_of(out)["depth"] == 1000  # more than the pool has
    large = SimpleNamespace(corpus_ids=range(3000), negatives=None, kind_C=None)
    assert Protocol(metrics=("recall@2000",)).depth(large, None) == 2000
    again = ScoreOptions(run=out, set=set_dir, out=tmp_path / "scored", metrics=("recall@55",))
    assert results_of(score(again))["micro"]["recall@55"] == results["micro"]["recall@55"]


@pytest.mark.slow
def test_figures_by_another_column_are_of_the_same_set(set_dir, tmp_path):
    """They get a page, are compared with others, and are not replaced unasked by figures without the column."""
    content = tables()
    content["queries"]["season"] = ["winter", "summer"] * (NUM_QUERIES // 2)
    data = write_tables(tmp_path / "set", content)
    asked = options(data, tmp_path / "out", by=("season",), report=True)
    (out,) = run_command(asked, loader(FakeEncoder()))
    assert "Winter" in (out / "report.html").read_text()
    plain = score(ScoreOptions(run=out, set=data, out=tmp_path / "scored"))
    assert compare(CompareOptions(a=out, b=plain, metric=("mrr",)))["difference"].iloc[0] == 0
    with error_about(UserError, "set.report_by"):
        run(replace(asked, by=()), loader(FakeEncoder()))


def test_results_hold_the_fixed_keys(done):
    encoder, _, dirs = done
    results = results_of(dirs[0])
    assert results["set"]["name"] == "fake"
    assert (results["set"]["num_queries"], results["set"]["num_candidates"]) == (NUM_QUERIES, NUM_CANDIDATES)
    assert len(results["set"]["fingerprint"]) == 64
    assert (results["profile"], results["query_mode"], results["query_modality"]) == (
        "clean",
        "reasoning",
        "both",
    )
    assert set(results["micro"]) == set(results["ties"]) == set(results["random"]) == set(METRICS)
    assert set(results["by_category"]) == {"functional", "temporal", "causal"}
    assert set(results["by_pair"]) == {"seen", "held_out"}
    for block in (
        results["micro"],
        results["macro"],
        *results["by_category"].values(),
        *results["by_pair"].values(),
    ):
        for figure in block.values():
            assert figure["low"] <= figure["value"] + 1e-12
            assert figure["value"] <= figure["high"] + 1e-12
    for name, ties in results["ties"].items():
        assert ties["best"] == ties["worst"] == pytest.approx(results["micro"][name]["value"])
    assert results["checkpoint_hash"] == encoder.checkpoint_hash
    assert results["settings"]["profile"] == "rge"
    assert results["prompts"]["instructions"] == ["Find the picture."]
    assert results["prompts"]["templates"]["query"] == "{instruction} {text}"
    assert (results["dtype"], results["batch_size"], results["seed"]) == ("float32", 2, 0)
    assert results["versions"]["rge"]
    assert results["statistics"]["num_resamples"] == NUM_RESAMPLES
    assert results["coverage"] == 1.0


@pytest.mark.parametrize(
    ("given", "default", "meta", "number"),
    [
        ([None, ""], "Find it.", {}, NUM_QUERIES),
        ([None, "Find it."], "Find it.", {}, NUM_QUERIES // 2),
        (["Find another."], "Find it.", {}, 0),  # in other words, which is another warning
        ([None], None, {}, 0),
        ([None], "Find it.", {"benchmark": "mmbright"}, NUM_QUERIES),
    ],
)
def test_queries_without_the_instruction_of_training_cause_a_warning(tmp_path, given, default, meta, number):
    content = tables()
    content["queries"]["instruction"] = given * (NUM_QUERIES // len(given))
    path = write_tables(tmp_path / "set", content, meta)
    known = {"default": default, "known": [default or ""], "by_task": {}}
    run(options(path, tmp_path / "out", limit=None), loader(FakeEncoder(instructions=known)))
    found = [line for line in results_of(tmp_path / "out")["warnings"] if "have no instruction" in line]
    assert len(found) == bool(number)
    if number:
        assert found[0].startswith(f"{number} of {NUM_QUERIES} queries have no instruction")
        assert "'Find it.'" in found[0]


ORIGINAL, REWORDED = RGE_QUERY["OK-VQA"]


@pytest.mark.parametrize(
    ("asked", "known", "meta", "advice"),
    [
        (["Which one is meant?"], ["Find it.", "Find all."], {"benchmark": "rmir"}, "instruction='Find it.'"),
        (["Which one is meant?", "Find all."], ["Find it.", "Find all."], {}, None),
        (["Which one is meant?"], [], {}, None),
        ([None], [REWORDED], {"prompts": "plain", "instructions": "vlm2vec"}, "instructions=rge"),
        ([None], [ORIGINAL], {"prompts": "plain", "instructions": "rge"}, "instructions=vlm2vec"),
        ([None], [ORIGINAL], {"prompts": "plain", "instructions": "vlm2vec"}, None),
        ([None], ["Find it."], {"prompts": "plain", "instructions": "rge"}, None),
        ([None], ["Find it."], {"prompts": "plain"}, None),
    ],
)
def test_a_set_that_asks_in_words_that_training_never_showed(asked, known, meta, advice):
    """A checkpoint found 55.8 instead of 91.7 % of the answers to 24 queries in such words."""
    queries = [Item(f"q{number}", content_of("what?"), instruction=one) for number, one in enumerate(asked)]
    trained = Instructions(default=(known or [None])[0], known=known, by_task={})
    found = other_words(SimpleNamespace(queries=queries, meta=meta), trained)
    assert [advice in line for line in found] == ([True] if advice else [])


@pytest.mark.parametrize("given", ["Find it.", ""])
def test_the_instruction_of_a_run_takes_the_place_of_the_sets(tmp_path, given):
    path, encoder = write_tables(tmp_path / "set", tables()), FakeEncoder()
    run(options(path, tmp_path / "out", instruction=given), loader(encoder))
    assert results_of(tmp_path / "out")["prompts"]["instructions"] == [given]
    run(options(path, tmp_path / "plain"), loader(FakeEncoder()))
    plain, own = (results_of(tmp_path / name) for name in ("plain", "out"))
    assert plain["prompts"]["instructions"] == ["Find the picture."]
    assert plain["set"]["content"] == own["set"]["content"]
    with pytest.raises(UserError):
        run(options(path, tmp_path / "plain", instruction=given), loader(FakeEncoder()))


def test_figures_derive_from_the_per_query_table(done):
    _, _, dirs = done
    results, table = results_of(dirs[0]), per_query_of(dirs[0])
    for name in METRICS:
        value = table[name]
        assert results["micro"][name]["value"] == pytest.approx(value.mean(), abs=1e-14)
        by = value.groupby(table["category"]).mean()
        assert results["macro"][name]["value"] == pytest.approx(by.mean(), abs=1e-14)
        assert {k: v[name]["value"] for k, v in results["by_category"].items()} == pytest.approx(by.to_dict())
    assert results["random"]["recall@10"] == pytest.approx(10 / NUM_CANDIDATES)


def test_per_query_table(done):
    encoder, _, dirs = done
    table = per_query_of(dirs[0])
    assert list(table.index) == [f"q{number:02d}" for number in range(NUM_QUERIES)]
    assert list(table["num_positives"][:4]) == [1, 2, 3, 1]
    assert table["group"].iloc[3] == "g01"
    assert table["rationale"].iloc[5] == "because of q05"
    assert set(table["stop_reason"]) == {"emb", "forced"}
    assert table["top10"].map(len).eq(10).all()
    for _, row in table.iterrows():
        assert (np.diff(row["top10_scores"]) <= 0).all()
        assert row["mrr"] == pytest.approx(1 / row["first_hit_rank"])
    direct = per_query_of(dirs[1])
    assert set(direct["stop_reason"]) == {"prefilled"}
    assert (direct["rationale"] == "").all()


def test_rationale_figures(done):
    _, _, dirs = done
    tokens = per_query_of(dirs[0])["rationale_tokens"]
    found = results_of(dirs[0])["rationale"]
    assert found == {
        "forced_rate": pytest.approx((per_query_of(dirs[0])["stop_reason"] == "forced").mean()),
        "tokens_mean": pytest.approx(tokens.mean()),
        "tokens_p50": pytest.approx(tokens.quantile(0.5)),
        "tokens_p95": pytest.approx(tokens.quantile(0.95)),
    }
    assert set(results_of(dirs[1])["rationale"].values()) == {None}


def test_scoring_the_run_gives_the_same_metrics(done, set_dir, tmp_path):
    _, _, dirs = done
    score(ScoreOptions(run=dirs[0] / "run.trec", set=set_dir, out=tmp_path / "scored"))
    ours, scored = results_of(dirs[0]), results_of(tmp_path / "scored")
    for block in ("micro", "macro", "by_category", "by_pair", "random"):
        assert ours[block] == scored[block]
    pd.testing.assert_frame_equal(
        per_query_of(dirs[0])[list(METRICS)], per_query_of(tmp_path / "scored")[list(METRICS)]
    )
    assert (scored["query_mode"], scored["coverage"], set(scored["rationale"].values())) == (
        None,
        1.0,
        {None},
    )
    assert (tmp_path / "scored" / "run.trec").read_bytes() == (dirs[0] / "run.trec").read_bytes()


@pytest.mark.slow
def test_embeddings_are_cut_for_the_search_and_stay_whole_in_the_cache(set_dir, tmp_path):
    encoder = FakeEncoder()
    given = {"cache": tmp_path / "cache", "depth": NUM_CANDIDATES}
    run(options(set_dir, tmp_path / "whole", **given), loader(encoder))
    calls = len(encoder.calls)
    run(options(set_dir, tmp_path / "cut", embedding_dims=3, **given), loader(encoder))
    assert len(encoder.calls) == calls  # nothing is encoded again
    whole, part = results_of(tmp_path / "whole"), results_of(tmp_path / "cut")
    assert (whole["embedding_dims"], part["embedding_dims"], part["embedding_dim"]) == (None, 3, 3)
    query = encoder.encode(
        load_set(set_dir).query_items("both")[:1], side="query", mode="reasoning"
    ).embeddings
    [best] = per_query_of(tmp_path / "cut")["top10_scores"].iloc[:1]
    rows = encoder.encode(list(load_set(set_dir).corpus_items()), side="candidate", mode="direct").embeddings
    cosines = rows[:, :3] @ query[0, :3] / np.linalg.norm(rows[:, :3], axis=1) / np.linalg.norm(query[0, :3])
    assert best[0] == pytest.approx(cosines.max(), abs=1e-5)
    with error_about(UserError, "embedding_dims"):
        run(options(set_dir, tmp_path / "whole", embedding_dims=3, **given), loader(encoder))
    for wrong in (0, 10_000):
        with error_about(UserError, "embedding_dims"):
            run(options(set_dir, tmp_path / "wrong", embedding_dims=wrong, **given), loader(encoder))


@pytest.mark.slow
def test_one_condition_goes_into_out_itself_and_a_second_run_reuses_everything(set_dir, tmp_path):
    assert run(options(set_dir, tmp_path), loader(FakeEncoder())) == [tmp_path]
    first = results_of(tmp_path)
    encoder = FakeEncoder()
    run(options(set_dir, tmp_path, batch_size=7), loader(encoder))
    assert encoder.calls == []
    again = results_of(tmp_path)
    assert again.pop("batch_size") != first.pop("batch_size")
    assert again.pop("again")["options"]["batch_size"] != first.pop("again")["options"]["batch_size"]
    assert again == first


@pytest.mark.slow
def test_a_shared_cache_serves_another_output(set_dir, tmp_path):
    run(options(set_dir, tmp_path / "a", cache=tmp_path / "cache"), loader(FakeEncoder()))
    encoder = FakeEncoder()
    run(
        options(set_dir, tmp_path / "b", cache=tmp_path / "cache", query_mode=("reasoning", "direct")),
        loader(encoder),
    )
    assert {(side, mode) for side, mode, _ in encoder.calls} == {("query", "direct")}


@pytest.mark.slow
def test_another_cap_on_rationales_leaves_direct_embeddings_alone(set_dir, tmp_path):
    conditions = {"cache": tmp_path / "cache", "query_mode": ("reasoning", "direct")}
    run(options(set_dir, tmp_path / "a", **conditions), loader(FakeEncoder()))
    encoder = FakeEncoder()
    run(options(set_dir, tmp_path / "b", max_new_tokens=99, **conditions), loader(encoder, max_new_tokens=99))
    assert {(side, mode) for side, mode, _ in encoder.calls} == {("query", "reasoning")}


def test_a_run_may_cap_its_rationales(set_dir, tmp_path):
    """With embeddings of its own, beside those of the whole rationales and with the same candidates."""
    encoder, cache = FakeEncoder(), tmp_path / "cache"
    for cap in (None, 3, 0):
        out = tmp_path / str(cap)
        run(RunOptions(checkpoint="fake", set=set_dir, out=out, cache=cache, max_rationale_tokens=cap, report=False), loader(encoder))  # fmt: skip
        tokens = pd.read_parquet(out / "per_query.parquet")["rationale_tokens"]
        assert tokens.max() == (7 if cap is None else cap)
        decoding = json.loads((out / "results.json").read_text())["decoding"]
        assert decoding.get("max_rationale_tokens") == cap
    with error_about(UserError, "max_rationale_tokens"):
        ThirdParty.with_(encoder, max_rationale_tokens=3)


@pytest.mark.parametrize("form", ["bytes", "struct", "list"])
def test_a_pool_of_several_kinds_shows_how_often_a_candidate_of_the_wrong_kind_is_first(
    tmp_path, form, capsys
):
    """By slice, with intervals, in results, on the page and on the terminal; a pool of one kind says nothing."""
    made = tables(negatives=False)
    pictures, num = made["corpus"]["image"], len(made["corpus"]["id"])
    shown = [None if row % 3 == 1 else one for row, one in enumerate(pictures)]
    if form == "struct":
        shown = [None if one is None else {"bytes": one, "path": None} for one in shown]
    made["corpus"]["image"] = [None if one is None else [one] for one in shown] if form == "list" else shown
    made["corpus"]["text"] = [None if row % 3 == 0 else f"key {row}" for row in range(num)]
    path = write_tables(tmp_path / "set", made, {"report_by": ["pair"]})
    wanted = load_set(path)
    kind_of = {name: (2, 1, 3)[row % 3] for row, name in enumerate(made["corpus"]["id"])}
    assert wanted.kind_C.tolist() == [kind_of[name] for name in wanted.corpus_ids]
    out = tmp_path / "out"
    run_command(options(path, out), loader(FakeEncoder()))
    assert "wrong_kind@1" in capsys.readouterr().out
    results, frame = (
        json.loads((out / "results.json").read_text()),
        pd.read_parquet(out / "per_query.parquet"),
    )
    for top, right, value in zip(frame["top10"], wanted.positives, frame["wrong_kind@1"], strict=True):
        assert value == (kind_of[top[0]] not in {kind_of[wanted.corpus_ids[row]] for row in right[0]})
    assert results["micro"]["wrong_kind@1"]["value"] == pytest.approx(frame["wrong_kind@1"].mean())
    assert 0 < frame["wrong_kind@1"].mean() < 1
    assert results["micro"]["wrong_kind@1"]["low"] is not None
    assert {"seen", "held_out"} == {
        name for name, block in results["by_pair"].items() if "wrong_kind@1" in block
    }
    report(ReportOptions(runs=(str(out),), out=tmp_path / "page.html"))
    assert "wrong_kind@1 by pair, per cent" in (tmp_path / "page.html").read_text()
    tested = compare(CompareOptions(a=out, b=out))
    assert (tested["metric"] == "wrong_kind@1").sum() > 1
    export(ExportOptions(format="latex", eval=out, out=tmp_path / "row.tex"))
    assert "wrong\\_kind@1" in (tmp_path / "row.tex").read_text()


def test_several_evaluations_do_not_go_into_the_directory_of_one(set_dir, tmp_path):
    run(options(set_dir, tmp_path), loader(FakeEncoder()))
    with error_about(UserError, "out", tmp_path):
        run(options(set_dir, tmp_path, query_mode=("reasoning", "direct")), loader(FakeEncoder()))


@pytest.mark.slow
def test_a_stale_cache_is_not_used(tmp_path):
    """Another checkpoint, other settings, or one changed picture: nothing of the old cache is read."""
    content = tables()
    path = write_tables(tmp_path / "set", content)
    cache = tmp_path / "cache"
    run(options(path, tmp_path / "a", cache=cache), loader(FakeEncoder()))
    for name, encoder in (("b", FakeEncoder("other")), ("c", FakeEncoder(profile="raw"))):
        run(options(path, tmp_path / name, cache=cache), loader(encoder))
        assert sum(size for *_, size in encoder.calls) == NUM_QUERIES + NUM_CANDIDATES
    content["corpus"]["image"][5] = picture(999)
    write_tables(path, content)  # the fingerprint, which names ids and judgements, stays
    encoder = FakeEncoder()
    run(options(path, tmp_path / "d", cache=cache), loader(encoder))
    assert encoder.seen == [content["corpus"]["id"][5]]  # the others show what they showed


@pytest.mark.slow
def test_modalities_reach_the_encoder(set_dir, tmp_path):
    seen = {}

    class Spy(FakeEncoder):
        def encode(self, items, *, side, **rest):
            if side == "query":
                kinds = {(i.text is not None, i.instruction is not None, len(i.pictures)) for i in items}
                seen.setdefault(len(seen), kinds)
            return super().encode(items, side=side, **rest)

    dirs = run(
        options(set_dir, tmp_path, query_modality=("both", "text", "image"), batch_size=64), loader(Spy())
    )  # fmt: skip
    assert [path.name for path in dirs] == ["reasoning-both", "reasoning-text", "reasoning-image"]
    assert list(seen.values()) == [{(True, True, 1)}, {(True, True, 0)}, {(False, False, 1)}]
    assert results_of(dirs[1])["query_modality"] == "text"


@pytest.mark.slow
def test_self_retrieval_counts_a_query_that_finds_its_own_picture(tmp_path):
    content = tables()
    content["corpus"]["image"][0] = picture(1000)  # shown by the first two queries

    class Same(FakeEncoder):
        """Queries and candidates with one picture get one embedding."""

        def encode(self, items, **rest):
            found = super().encode(items, **rest)
            found.embeddings[:] = [self.vector(item.pictures[0]) for item in items]
            return found

    run(options(write_tables(tmp_path / "set", content), tmp_path / "out"), loader(Same()))
    assert results_of(tmp_path / "out")["self_retrieval"] == {"num_queries": 2, "rate@1": 1.0, "rate@20": 1.0}


def test_candidates_may_reason_too(set_dir, tmp_path):
    encoder = FakeEncoder()
    run(options(set_dir, tmp_path / "a", candidate_mode="reasoning"), loader(encoder))
    assert not any("candidate_mode" in warning for warning in results_of(tmp_path / "a")["warnings"])
    assert {(side, mode) for side, mode, _ in encoder.calls} == {
        ("candidate", "reasoning"),
        ("query", "reasoning"),
    }
    assert results_of(tmp_path / "a")["candidate_mode"] == "reasoning"
    with error_about(UserError, "candidate_mode"):
        run(options(set_dir, tmp_path / "a"), loader(FakeEncoder()))


def test_no_checkpoint_is_trained_for_candidates_that_reason(set_dir, tmp_path, capsys):
    for mode in ("reasoning", "direct"):
        asked = options(set_dir, tmp_path / mode, query_mode=("direct",), candidate_mode=mode)
        run(asked, loader(FakeEncoder(recipe=RECIPE)))
        warned = "candidate_mode=reasoning, but training embeds candidates without a rationale"
        assert (warned in capsys.readouterr().err) == (mode == "reasoning")
        assert any(warned in one for one in results_of(tmp_path / mode)["warnings"]) == (mode == "reasoning")


def test_limit(set_dir, tmp_path):
    run(options(set_dir, tmp_path, limit=5), loader(FakeEncoder()))
    results = results_of(tmp_path)
    assert (results["set"]["num_queries"], results["set"]["num_candidates"], results["set"]["limit"]) == (
        5,
        60,
        5,
    )
    assert len(per_query_of(tmp_path)) == 5


def test_ties_are_reported_as_a_range(set_dir, tmp_path):
    class Coarse(FakeEncoder):
        """Candidates share three embeddings."""

        def encode(self, items, *, side, **rest):
            found = super().encode(items, side=side, **rest)
            if side == "candidate":
                found.embeddings[:] = [self.vector(int(item.id[1:]) % 3) for item in items]
            return found

    run(options(set_dir, tmp_path), loader(Coarse()))
    results = results_of(tmp_path)
    for name in NAMES:
        ties = results["ties"][name]
        assert ties["worst"] <= results["micro"][name]["value"] <= ties["best"]
    assert results["ties"]["recall@10"]["best"] > results["ties"]["recall@10"]["worst"]
    fell = np.array(
        [float(line.split()[4]) for line in (tmp_path / "run.trec").read_text().splitlines()[:60]]
    )
    assert (np.diff(fell.astype(np.float32)) < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reasoning", "auto"])
def test_sampled_rationales_take_their_seed_from_the_options(set_dir, tmp_path, mode):
    values = []
    for seed in (0, 0, 1):
        out = tmp_path / str(len(values))
        encoder = FakeEncoder(recipe=DECIDES)
        asked = options(set_dir, out, temperature=0.7, seed=seed, query_mode=(mode,))
        run(asked, loader(encoder, temperature=0.7))
        values.append(results_of(out)["micro"]["mrr"]["value"])
    assert values[0] == values[1] != values[2]
    assert results_of(tmp_path / "0")["decoding"]["temperature"] == 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "encoder", "key"),
    [
        ({}, FakeEncoder("other"), "checkpoint_hash"),
        ({"query_mode": ("direct",)}, FakeEncoder(), "query_mode"),
        ({"query_modality": ("text",)}, FakeEncoder(), "query_modality"),
        ({"limit": 3}, FakeEncoder(), "set.limit"),
        ({"depth": 50}, FakeEncoder(), "depth"),
        ({"seed": 1}, FakeEncoder(), "seed"),
        ({"embedding_dims": 8}, FakeEncoder(), "embedding_dims"),
        ({}, FakeEncoder(dtype="bfloat16"), "dtype"),
        ({"exact": False}, FakeEncoder(), "exact"),
        ({}, FakeEncoder(pixels={"min": 1, "max": 2}), "settings.pixels.min"),
        ({}, FakeEncoder(pooling="mean"), "settings.pooling"),
    ],
)
def test_another_output_is_not_overwritten_unasked(set_dir, tmp_path, change, encoder, key):
    run(options(set_dir, tmp_path), loader(FakeEncoder()))
    before = (tmp_path / "results.json").read_bytes()
    with error_about(UserError, key, "out"):
        run(options(set_dir, tmp_path, **change), loader(encoder))
    assert (tmp_path / "results.json").read_bytes() == before
    run(options(set_dir, tmp_path, overwrite=True, **change), loader(encoder))
    assert (tmp_path / "results.json").read_bytes() != before


@pytest.mark.slow
def test_another_protocol_is_not_overwritten_unasked(tmp_path):
    data = write_tables(tmp_path / "set", tables(), {"benchmark": "rmir"})
    run(options(data, tmp_path / "out"), loader(FakeEncoder()))
    with error_about(UserError, "benchmark"):
        run(options(data, tmp_path / "out", benchmark="rmir"), loader(FakeEncoder()))
    run(options(data, tmp_path / "out", benchmark="rmir", overwrite=True), loader(FakeEncoder()))
    with error_about(UserError, "profile"):
        run(options(data, tmp_path / "out", benchmark="rmir", profile="official"), loader(FakeEncoder()))


@pytest.mark.slow
def test_what_changes_no_figure_may_take_its_place(set_dir, tmp_path):
    run(options(set_dir, tmp_path), loader(FakeEncoder()))
    run(
        options(set_dir, tmp_path, batch_size=5, report=False, device="cpu", memory_mb=1.0),
        loader(FakeEncoder()),
    )
    assert results_of(tmp_path)["batch_size"] == 5
    with error_about(UserError, "depth"):
        run(options(set_dir, tmp_path, depth=50), loader(FakeEncoder()))


def test_another_set_is_not_overwritten_unasked(set_dir, tmp_path):
    run(options(set_dir, tmp_path / "out"), loader(FakeEncoder()))
    other = write_set(tmp_path / "other", num_queries=12)
    with error_about(UserError, "set.fingerprint"):
        run(options(other, tmp_path / "out"), loader(FakeEncoder()))


@pytest.mark.slow
def test_nothing_half_written_looks_complete(set_dir, tmp_path, monkeypatch):
    run(options(set_dir, tmp_path), loader(FakeEncoder()))
    monkeypatch.setattr(measurement, "write_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(options(set_dir, tmp_path), loader(FakeEncoder()))
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query_mode": ("reasonin",)}, (("choice", "query_mode"),)),
        ({"query_modality": ("picture",)}, (("choice", "query_modality"),)),
        ({"benchmark": "rmirr"}, (("choice", "benchmark"),)),
        ({"benchmark": "rmir"}, ("benchmark",)),
        ({"profile": "paper"}, ("profile",)),
        ({"profile": "official"}, ("profile",)),
        ({"prompts": "rgee"}, (("choice", "prompts"),)),
        ({"limit": 0}, ("limit",)),
        ({"depth": 20}, ("depth",)),
    ],
)
def test_wrong_options_are_named(set_dir, tmp_path, change, named):
    with error_about(UserError, *named):
        run(options(set_dir, tmp_path / "out", **change), loader(FakeEncoder()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["memory_mb=0", "batch_size=0"])
def test_numbers_must_be_positive(set_dir, tmp_path, word, capsys):
    assert main(["run", "checkpoint=fake", f"set={set_dir}", f"out={tmp_path / 'out'}", word]) == 2
    assert re.search(f"error: {word.partition('=')[0]} must be >=? [01], got 0", capsys.readouterr().err)


@pytest.mark.parametrize("modes", [{"query_mode": ("reasoning", "direct")}, {"candidate_mode": "reasoning"}])
def test_a_mode_that_the_released_evaluation_lacks_is_refused_before_anything_is_embedded(
    set_dir, tmp_path, modes
):
    encoder = FakeEncoder()
    with error_about(UserError, "as"):
        run(options(set_dir, tmp_path / "out", as_="release", **modes), loader(encoder))
    assert not encoder.calls


def test_a_checkpoint_without_rationales_is_asked_as_it_was_trained(set_dir, tmp_path):
    encoder = FakeEncoder(reasons="none")
    (out,) = run(RunOptions(checkpoint="x", set=set_dir, out=tmp_path / "o", report=False), loader(encoder))
    (warning,) = json.loads((out / "results.json").read_text())["warnings"]
    assert warning.endswith("without rationales (reasons: none): use query_mode=direct")


def test_collapsed_candidates_stop_the_run(set_dir, tmp_path):
    class Collapsed(FakeEncoder):
        def vector(self, *parts):
            return super().vector("same")

    with pytest.raises(UserError, match="all 60 different items of side candidate have the same embedding"):
        run(options(set_dir, tmp_path), loader(Collapsed()))
    assert not (tmp_path / "results.json").exists()


def test_a_missing_picture_is_named_before_the_model_is_loaded(tmp_path):
    content = tables()
    content["corpus"]["image"] = pa.array([f"{number}.png" for number in range(NUM_CANDIDATES)])
    path = write_tables(tmp_path / "set", content)
    with error_about(ImageError, "0.png"):
        run(options(path, tmp_path / "out"), lambda *_, **__: pytest.fail("the model was loaded"))


def test_exclusions_and_candidate_lists_reach_the_ranking(tmp_path):
    content = tables(negatives=False)
    right = sorted(zip(content["qrels"]["query-id"], content["qrels"]["corpus-id"], strict=True))
    hidden = "c000"
    lists = sorted(
        {*right, *((query, name) for query in content["queries"]["id"] for name in ("c001", "c002", hidden))}
    )
    content["candidates"] = {"query-id": [q for q, _ in lists], "corpus-id": [c for _, c in lists]}
    out = [(q, c) for q, c in lists if c == hidden and (q, c) not in right]
    content["excluded"] = {"query-id": [q for q, _ in out], "corpus-id": [c for _, c in out]}
    run(options(write_tables(tmp_path / "set", content), tmp_path / "out"), loader(FakeEncoder()))
    ranked = {}
    for line in (tmp_path / "out" / "run.trec").read_text().splitlines():
        ranked.setdefault(line.split()[0], set()).add(line.split()[2])
    for query in content["queries"]["id"]:
        assert ranked[query] == {c for q, c in lists if q == query} - {c for q, c in out if q == query}
    assert results_of(tmp_path / "out")["micro"]["recall@10"]["value"] == 1.0


def test_missing_queries_score_zero_and_are_counted(done, set_dir, tmp_path):
    _, _, dirs = done
    text = (dirs[0] / "run.trec").read_text().splitlines(keepends=True)
    (tmp_path / "run").write_text("".join(line for line in text if not line.startswith(("q03 ", "q11 "))))
    with error_about(UserError, "run", "q03", "allow_missing"):
        score(ScoreOptions(run=tmp_path / "run", set=set_dir, out=tmp_path / "out"))
    score(ScoreOptions(run=tmp_path / "run", set=set_dir, out=tmp_path / "out", allow_missing=True))
    results, table = results_of(tmp_path / "out"), per_query_of(tmp_path / "out")
    assert (results["coverage"], results["num_missing"]) == (pytest.approx(22 / 24), 2)
    assert table.loc[["q03", "q11"], list(NAMES)].eq(0).all(axis=None)
    assert table.loc["q03", "first_hit_rank"] is pd.NA or math.isnan(table.loc["q03", "first_hit_rank"])
    before = per_query_of(dirs[0])
    expected = before["mrr"].drop(["q03", "q11"]).sum() / 24
    assert results["micro"]["mrr"]["value"] == pytest.approx(expected)


def test_short_runs_and_ties_in_foreign_runs_are_reported(set_dir, tmp_path, capsys):
    rows = [f"q{n:02d} Q0 c{c:03d} {c + 1} {5 - c // 2} bm25\n" for n in range(NUM_QUERIES) for c in range(6)]
    (tmp_path / "run").write_text("".join(rows))
    score(ScoreOptions(run=tmp_path / "run", set=set_dir, out=tmp_path / "out", allow_ties=True))
    results = results_of(tmp_path / "out")
    assert (results["num_short"], results["tag"]) == (NUM_QUERIES, "bm25")
    assert results["ties"]["mrr"]["best"] > results["micro"]["mrr"]["value"] > results["ties"]["mrr"]["worst"]
    assert "24 queries list fewer than 50 candidates" in capsys.readouterr().out


@pytest.mark.slow
def test_scores_of_another_run_are_not_overwritten_unasked(done, set_dir, tmp_path):
    _, _, dirs = done
    score(ScoreOptions(run=dirs[0] / "run.trec", set=set_dir, out=tmp_path))
    with error_about(UserError, "tag"):
        score(ScoreOptions(run=dirs[1] / "run.trec", set=set_dir, out=tmp_path))
    other = tmp_path / "other.trec"  # of another ranking, under the same tag
    lines = (dirs[0] / "run.trec").read_text().splitlines(keepends=True)
    other.write_text("".join(line for line in lines if line.split()[3] != "60"))
    with error_about(UserError, "run_hash"):
        score(ScoreOptions(run=other, set=set_dir, out=tmp_path))
    with error_about(UserError, "seed"):
        score(ScoreOptions(run=dirs[0] / "run.trec", set=set_dir, out=tmp_path, seed=1))
    score(ScoreOptions(run=dirs[0] / "run.trec", set=set_dir, out=tmp_path))
    score(ScoreOptions(run=other, set=set_dir, out=tmp_path, overwrite=True))


def test_metrics_that_no_query_defines_are_left_out():
    assert means(("a", "b"), np.array([[1.0, np.nan], [0.0, np.nan]])) == {"a": 0.5}


@pytest.mark.parametrize("word", ["seed=-1", "max_new_tokens=0", "temperature=-1", "embedding_dims=0"])
def test_numbers_that_cannot_work_are_refused_before_anything_is_embedded(set_dir, tmp_path, capsys, word):
    assert main(["run", "checkpoint=demo", f"set={set_dir}", f"out={tmp_path / 'out'}", word]) == 2
    assert word.partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_line_prints_user_errors_and_usage(set_dir, tmp_path, capsys):
    assert main([]) == 2
    listed = re.findall(r"^  ([a-z0-9]+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert {*listed} == {"import", *(name for name in COMMANDS if name != "import folder")}
    assert main(["--help"]) == 0
    assert main(["rum"]) == 2
    assert "unknown command 'rum'; did you mean run?" in capsys.readouterr().err
    assert main(["import", "rmri"]) == 2
    assert "unknown command 'import rmri'; did you mean import rmir?" in capsys.readouterr().err
    assert main(["run"]) == 2
    printed = capsys.readouterr().out
    assert re.search(r"set=\.\.\.  \(path\)\n +Retrieval set directory", printed)
    assert re.search(r"query_mode=reasoning  \(list of text\)\n +Any of reasoning", printed)
    for command in ("score", "compare"):
        assert "overwrite=false" in usage(command) or "seed=0" in usage(command)
    assert main(["score", f"set={set_dir}", "run=none", f"out={tmp_path}"]) == 2
    assert "error: none: " in capsys.readouterr().err
    assert main(["score", "sett=x"]) == 2
    assert "did you mean set?" in capsys.readouterr().err
    assert main(["run", f"set={set_dir}", "checkpoint=none", f"out={tmp_path / 'o'}"]) == 2
    assert "none: it does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_names_the_shipped_checkpoint_here_too(set_dir, tmp_path, capsys, monkeypatch):
    """As for `rge embed`, `index` and `serve`; a folder of that name goes first."""
    monkeypatch.chdir(tmp_path)
    words = [f"set={set_dir}", "checkpoint=demo", "query_mode=direct", "limit=2", "report=false"]
    assert main(["run", *words, "out=o"]) == 0
    assert json.loads((tmp_path / "o" / "results.json").read_text())["model"]["name"] == "demo"
    (tmp_path / "demo").mkdir()
    capsys.readouterr()
    assert main(["run", *words, "out=p"]) == 2
    assert "demo: it has no rge.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_says_the_command_that_makes_its_figures_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "a set")
    given = options(
        tmp_path / "a set", tmp_path / "one", query_mode=("direct", "reasoning"), query_modality=("text",), limit=9,
        depth=60, seed=3, train=(), embedding_dims=6, cache=tmp_path / "elsewhere",
    )  # fmt: skip
    dirs = run(given, loader(FakeEncoder()))
    assert main(["score", f"run={dirs[0] / 'run.trec'}", "set=a set", "out=two", "allow_missing=true"]) == 0
    for place, path in enumerate([*dirs, tmp_path / "two"]):
        (shown,) = provenance_of([read_evaluation(path)])
        program, part, command, *words = shlex.split(shown["command"])
        assert (program, part, command) == ("rge", "eval", "score" if place == 2 else "run")
        assert str(tmp_path) not in shown["command"]
        if command == "score":
            assert main(["score", *words, f"out=again{place}"]) == 0
        else:
            again = parse_options(RunOptions, [*words, f"out=again{place}", "report=false"])
            assert run(again, loader(FakeEncoder())) == [Path(f"again{place}")]
        old, new = results_of(path), results_of(Path(f"again{place}"))
        assert (new["identity"], new["micro"]) == (old["identity"], old["micro"])


@pytest.mark.slow
def test_the_report_is_written_last(set_dir, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("eval.pages.report.report", lambda asks: asked.append((asks.runs, asks.out)))
    run_command(
        options(set_dir, tmp_path, report=True, query_mode=("reasoning", "direct")), loader(FakeEncoder())
    )
    dirs = (str(tmp_path / "reasoning-both"), str(tmp_path / "direct-both"))
    assert asked == [(dirs, tmp_path / "report.html")]


def test_per_query_nulls_where_a_metric_is_not_defined(tmp_path):
    content = tables()
    keep = [query != "q00" for query in content["negatives"]["query-id"]]
    content["negatives"] = {
        name: [value for value, kept in zip(values, keep, strict=True) if kept]
        for name, values in content["negatives"].items()
    }
    run(options(write_tables(tmp_path / "set", content), tmp_path / "out"), loader(FakeEncoder()))
    column = pq.read_table(tmp_path / "out" / "per_query.parquet")["negative_recall@10"]
    assert column.null_count == 1
    assert results_of(tmp_path / "out")["micro"]["negative_recall@10"]["value"] == pytest.approx(
        np.mean([v for v in column.to_pylist() if v is not None])
    )


def test_an_oracle_finds_everything(tmp_path):
    """Guards the way from the order of the file to the order of ids: any slip in it would show here."""
    content = tables(num_queries=30)
    best = {}
    rows = zip(
        content["qrels"]["query-id"], content["qrels"]["corpus-id"], content["qrels"]["score"], strict=True
    )
    for query, name, gain in rows:
        best[query] = max(best.get(query, (0, "")), (gain, name))

    class Oracle(FakeEncoder):
        def encode(self, items, *, side, **rest):
            found = super().encode(items, side=side, **rest)
            found.embeddings[:] = [self.vector(best[i.id][1] if side == "query" else i.id) for i in items]
            return found

    run(options(write_tables(tmp_path / "set", content), tmp_path / "out"), loader(Oracle()))
    results = results_of(tmp_path / "out")
    assert results["micro"]["hit@1"]["value"] == results["micro"]["hit@1"]["high"] == 1.0
    assert results["micro"]["hit@1"]["low"] == pytest.approx(0.025 ** (1 / 15))  # 15 groups
    table = per_query_of(tmp_path / "out")
    assert [top[0] for top in table["top10"]] == [best[query][1] for query in table.index]


@pytest.mark.slow
def test_a_page_of_queries_whose_positives_are_missing(tmp_path):
    """One query has lost all of its positives and one some: the page comes, and its floors are those of results.json."""
    content = tables(8, 60)
    kept = [row for row, query in enumerate(content["qrels"]["query-id"]) if query != "q05"]
    content["qrels"] = {key: [values[row] for row in kept] for key, values in content["qrels"].items()}
    content["queries"]["num_missing_positives"] = [2 if number in (1, 5) else 0 for number in range(8)]
    data = write_tables(tmp_path / "set", content, {"report_by": ["pair"]})
    (out,) = run_command(options(data, tmp_path / "out", report=True), loader(FakeEncoder()))
    assert (out / "report.html").exists()
    results = results_of(out)
    loaded = load_set(data)
    for metric in ("recall@10", "map@10", "mrr"):
        floor_Q = random_floors(read_evaluation(out), loaded, metric)
        assert floor_Q.mean() == pytest.approx(results["random"][metric])
        assert floor_Q[5] == 0.0
    floor_Q = random_floors(read_evaluation(out), loaded, "recall@10")
    found = len(loaded.positives[1][0])
    assert floor_Q[1] == pytest.approx(10 / 60 * found / (found + 2))
    report(ReportOptions(runs=(str(out),), out=tmp_path / "again.html", metric="recall@10"))


def test_any_set_with_a_column_of_paraphrases_tells_the_sensitivity_to_wording(tmp_path):
    content = tables()
    content["queries"]["paraphrase"] = [f"p{number // 3}" for number in range(NUM_QUERIES)]
    content["queries"]["group"] = [f"p{number // 3}" for number in range(NUM_QUERIES)]
    path = write_tables(tmp_path / "set", content)
    run(options(path, tmp_path / "out"), loader(FakeEncoder()))
    results, rows = results_of(tmp_path / "out"), per_query_of(tmp_path / "out").sort_values("query_id")
    assert results["paraphrase_groups"] == NUM_QUERIES // 3
    for name in ("recall@10", "mrr"):
        values = rows[name].to_numpy()[: NUM_QUERIES // 3 * 3].reshape(-1, 3)
        found = results["micro"][f"linguistic_sensitivity_{name}"]
        assert found["value"] == pytest.approx(np.ptp(values, axis=1).mean())
        assert found["low"] <= found["value"] <= found["high"]

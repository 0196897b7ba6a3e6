"""The published tables: complete, with a source, and each found by the evaluations that belong to it."""

import json
from dataclasses import replace

import pytest
from faults import error_about

from eval.benchmarks.published_tables import TRAINED, _read, beside, published, table_of
from eval.benchmarks.registry import BENCHMARKS
from eval.scoring.results import Results, SetFacts
from rge.common.errors import UserError
from rge.common.mmeb_prompts import SETS

NUM_ROWS = {
    "mmbright1": 11,
    "mmbright2": 7,
    "mmbright3": 7,
    "mmbright4": 5,
    "mmeb": 16,
    "mmeb_sets": 9,
    "karpathy": 8,
    "pinpoint": 21,
    "rmir": 11,
}


def test_every_table_is_there_with_its_source():
    assert {key: len(table.rows) for key, table in published().items()} == NUM_ROWS
    for table in published().values():
        assert table.benchmark in BENCHMARKS
        assert "Table" in table.source or "metrics.csv" in table.source
        assert table.url.startswith("https://")
        assert len({row.model for row in table.rows}) == len(table.rows)
        values = [value for row in table.rows for value in row.values if value is not None]
        assert 0 <= min(values) <= max(values) <= 1


def test_cells_as_printed():
    """Spot checks, one a table: model, column, per cent."""
    printed = [
        ("rmir", "UME-R1-7B (Qwen2-VL-7B)", "Average R@20", 46.53),
        ("rmir", "Qwen3-VL-2B-Instruct", "Temporal R@50", 8.05),
        ("mmeb", "RGE (Qwen2.5VL-3B)", "VQA", 67.8),
        ("mmbright1", "DiVeR", "Average", 32.2),
        ("mmbright2", "Nomic", "Law", 47.6),
        ("mmbright3", "GME-2B", "QC", 9.7),
        ("mmbright4", "SigLIP", "Math", 43.4),
        ("pinpoint", "bge_vl_mllm_s1", "NegRecall@10 ↓", 8.65),
        ("pinpoint", "LinCIR", "mAP@10", 11.0),
        ("mmeb_sets", "MoCa-3B", "Visual7W-Pointing", 89.5),
        ("karpathy", "RGE, both reason", "COCO I2T R@1", 69.9),
        ("pinpoint", "MMRet-CLIP-L + reranking", "NegRecall@10 ↓", 7.4),
    ]
    for key, model, name, value in printed:
        table = published()[key]
        place = [column.name for column in table.columns].index(name)
        (row,) = [row.values for row in table.rows if row.model == model]
        assert 100 * row[place] == pytest.approx(value)


def test_columns_name_figures_that_evaluations_have():
    domains = {column.path[1] for column in published()["mmbright2"].columns if len(column.path) == 3}
    assert len(domains) == 29
    tasks = {about["meta_task"] for about in SETS.values()}
    assert {c.path[1] for c in published()["mmeb"].columns if c.path[0] == "by_meta_task"} == tasks


def test_an_evaluation_finds_its_table():
    assert table_of("rmir", "rmir").key == "rmir"
    assert table_of("mmbright", "MM-BRIGHT task 3").key == "mmbright3"
    assert table_of("mmbright", "MM-BRIGHT") is None
    assert table_of("generic", "demo") is None


def test_a_row_of_another_length_is_refused(tmp_path, monkeypatch):
    content = json.loads((BENCHMARKS["rmir"].published / "rmir.json").read_text())
    content["rows"][0]["values"].pop()
    (tmp_path / "x.json").write_text(json.dumps(content))
    with error_about(UserError, "x.json", "benchmark"):
        _read(tmp_path / "x.json")
    monkeypatch.setitem(BENCHMARKS._entries, "rmir", replace(BENCHMARKS["rmir"], published=tmp_path))
    _read.cache_clear()
    with error_about(UserError, "x.json", "Qwen2.5-VL-3B-Instruct"):
        _read(tmp_path / "x.json")


def measured(value, **more):
    about = {"name": "MMEB", "fingerprint": "abc", "num_members": 36, "num_queries": 36_000}
    known = {"benchmark": "mmeb", "profile": "official", "set": about | more.pop("set", {}), "micro": {}}
    table = published()["mmeb"]
    block, metric = table.columns[table.main].official or table.columns[table.main].path
    return Results(**known | {block: {} if value is None else {metric: value}} | more)


def test_measured_rows_stand_among_the_published_ones_best_first():
    shown = beside({"mine": measured({"value": 0.689}), "none": measured(None)})
    lines = shown.splitlines()
    assert "RGE (Qwen2.5VL-3B)" in lines[3]
    mine = next(number for number, line in enumerate(lines) if line.startswith("mine (measured)"))
    first = [float(line.split()[-len(published()["mmeb"].columns)]) for line in lines[3 : mine + 2]]
    assert first == sorted(first, reverse=True)
    assert 68.9 in first
    assert any(line.startswith("none (measured)") and "–" in line for line in lines)
    assert published()["mmeb"].source in shown
    assert "NOT COMPARABLE" not in shown
    assert beside({"x": measured({"value": 0.5}, benchmark="generic")}) == ""


def test_sets_of_mmeb_have_rows_of_their_own_whose_means_are_those_of_the_suite():
    whole, sets = published()["mmeb"], published()["mmeb_sets"]
    assert [column.name for column in sets.columns] == list(SETS)
    rge, mean = (
        sets.rows[-1].values,
        dict(zip([c.name for c in whole.columns], whole.rows[-1].values, strict=True)),
    )
    assert sum(rge) / 36 == pytest.approx(mean["Overall"], abs=5e-4)
    alone = Results(
        benchmark="mmeb",
        profile="official",
        set=SetFacts(name="MMEB CIRR", fingerprint="abc", num_queries=1000),
        micro={"hit@1": {"value": 0.555}},
    )
    shown = beside({"mine": alone})
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("CIRR")]
    assert row[1:3] == ["55.5", "12.6"]
    suite = measured(
        {"value": 0.7}, by_category={name: {"hit@1": {"value": 0.5}} for name in ("CIRR", "OVEN")}
    )
    lines = beside({"mine": suite}).splitlines()
    assert [line.split()[:3] for line in lines if line.split()[:1] in (["CIRR"], ["OVEN"], ["EDIS"])] == [
        ["CIRR", "50.0", "12.6"],
        ["OVEN", "50.0", "41.1"],
    ]
    assert "NOT COMPARABLE" not in shown


def test_rows_that_cannot_be_compared_say_why():
    other = beside({"x": measured({"value": 0.5}, set={"num_members": 3}, profile="clean")})
    assert other.count("NOT COMPARABLE") == 2
    known = f"{TRAINED}: 2 of 24 query pictures"
    assert known in beside({"x": measured({"value": 0.5}, warnings=[known])})

"""Run files: written so that every tool ranks them alike, read with everything checked."""

import gzip

import ir_measures
import numpy as np
import pytest
from eval_fakes import tables, write_set, write_tables
from faults import error_about

from eval.scoring.metrics import names_of
from eval.scoring.output_files import score_ranking
from eval.scoring.search import search
from eval.scoring.trec import read_run, strictly_decreasing, write_run
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return load_set(write_set(tmp_path_factory.mktemp("set")))


def ranking(wanted, *, levels=4, depth=40, seed=0):
    """Few score levels, hence many ties."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-levels, levels + 1, (len(wanted.queries), 3)).astype(np.float32)
    candidates = rng.integers(-1, 2, (len(wanted.corpus_ids), 3)).astype(np.float32)
    return search(queries, candidates, depth=depth)


def test_strictly_decreasing_moves_only_ties_and_what_they_push():
    f = np.float32
    step = np.nextafter
    scores = np.array(
        [[0.5, 0.5, 0.5, step(f(0.5), f(0)), 0.25, -np.inf], [0.0, 0.0, -1.0, -1.0, -1.0, -2.0]], f
    )
    found = strictly_decreasing(scores)
    second = step(f(0.5), f(0))
    third = step(second, f(0))
    assert found[0].tolist() == [0.5, second, third, step(third, f(0)), 0.25, -np.inf]
    assert (np.diff(found[1]) < 0).all()
    assert found[1][[0, 2, 5]].tolist() == [0.0, -1.0, -2.0]
    clear = np.array([[3.0, 2.0, -1.0]], f)
    assert (strictly_decreasing(clear) == clear).all()


def test_a_run_comes_back(wanted, tmp_path):
    found = ranking(wanted)
    write_run(tmp_path / "run.trec", found, wanted.query_ids, wanted.corpus_ids, "a tag")
    read = read_run(tmp_path / "run.trec", wanted)
    np.testing.assert_array_equal(read.ranking.rows_QW, found.rows_QW[:, :40])
    assert (np.diff(read.ranking.score_QW, axis=1) < 0).all()
    np.testing.assert_allclose(read.ranking.score_QW, found.score_QW[:, :40], rtol=1e-4, atol=1e-30)
    assert (read.missing, read.num_excluded, read.tag, read.ranking.depth) == ([], 0, "a-tag", 40)


def test_trec_eval_ranks_our_file_as_we_do(wanted, tmp_path):
    """trec_eval reverses ids where scores tie; a file with real ties would get other figures there."""
    found = ranking(wanted)
    write_run(tmp_path / "run.trec", found, wanted.query_ids, wanted.corpus_ids, "tag")
    scored = score_ranking(wanted, found, names_of(negatives=wanted.negatives is not None))
    qrels = [
        ir_measures.Qrel(query, wanted.corpus_ids[row], int(gain))
        for query, (rows, gains) in zip(wanted.query_ids, wanted.positives, strict=True)
        for row, gain in zip(rows, gains, strict=True)
    ]
    measures = {ir_measures.nDCG @ 10: "ndcg@10", ir_measures.RR: "mrr", ir_measures.R @ 20: "recall@20"}
    theirs = ir_measures.calc_aggregate(
        list(measures), qrels, ir_measures.read_trec_run(str(tmp_path / "run.trec"))
    )
    for measure, name in measures.items():
        assert scored.value_QM[:, names_of().index(name)].mean() == pytest.approx(theirs[measure], abs=1e-12)
    assert (scored.best_QM.mean(axis=0) > scored.worst_QM.mean(axis=0)).any()


def lines(wanted, num=3):
    """A valid run: the first ``num`` candidates for every query."""
    return [
        [query, "Q0", name, str(rank), str(10 - rank), "tag"]
        for query in wanted.query_ids
        for rank, name in enumerate(wanted.corpus_ids[:num], 1)
    ]


def write(path, rows, separator=" "):
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("separator", [" ", "\t", "  ", " \t "])
def test_any_white_space_separates(wanted, tmp_path, separator):
    read = read_run(write(tmp_path / "run", lines(wanted), separator), wanted)
    assert read.ranking.rows_QW.tolist() == [[0, 1, 2]] * len(wanted.queries)


def test_lines_of_a_query_may_be_scattered_and_queries_missing(wanted, tmp_path):
    rows = lines(wanted)
    rows = [row for row in rows if row[0] != "q07" and not (row[0] == "q08" and row[3] != "1")]
    scattered = sorted(rows, key=lambda row: (row[3], row[0]))
    read = read_run(write(tmp_path / "run", scattered), wanted)
    assert read.missing == ["q07"]
    assert read.ranking.rows_QW[7].tolist() == [-1, -1, -1]
    assert read.ranking.rows_QW[8].tolist() == [0, -1, -1]
    assert read.ranking.rows_QW[9].tolist() == [0, 1, 2]


def test_windows_line_ends_and_blank_lines(wanted, tmp_path):
    text = "\r\n\r\n".join(" ".join(row) for row in lines(wanted)) + "\r\n"
    (tmp_path / "run").write_bytes(text.encode())
    assert read_run(tmp_path / "run", wanted).tag == "tag"


def test_ties_are_refused_or_ordered_by_id(wanted, tmp_path):
    rows = lines(wanted, 4)
    rows[0][2], rows[1][2] = rows[1][2], rows[0][2]
    rows[0][4] = rows[1][4] = "9"
    path = write(tmp_path / "run", rows)
    with error_about(UserError, "run", "q00"):
        read_run(path, wanted)
    read = read_run(path, wanted, allow_ties=True)
    assert read.ranking.rows_QW[0].tolist() == [0, 1, 2, 3]
    assert read.ranking.score_QW[0].tolist() == [9, 9, 7, 6]


def _set(row, column, value):
    def change(rows):
        rows[row][column] = value

    return change


def _short(rows):
    del rows[1][3]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set(1, 2, "c000"), ("q00", "c000")),
        (_set(1, 2, "zzz"), ("zzz", 2)),
        (_set(4, 0, "q99"), ("q99", 5)),
        (_set(1, 4, "nan"), ("q00", "c001")),
        (_set(1, 4, "inf"), ("q00", "c001")),
        (_set(1, 4, "9.5"), ("q00", "c000")),
        (_set(1, 4, "high"), ("TREC",)),
        (_set(1, 3, "first"), ("TREC",)),
        (_short, ("TREC",)),
    ],
)
def test_what_is_wrong_in_a_run_is_named(wanted, tmp_path, change, named):
    rows = lines(wanted)
    change(rows)
    with error_about(UserError, *named):
        read_run(write(tmp_path / "run", rows), wanted)


@pytest.mark.parametrize("kind", ["shuffled", "fractions", "all alike", "indented", "gzip"])
def test_any_legal_run_is_read(wanted, tmp_path, kind):
    rows = lines(wanted)
    if kind == "shuffled":
        rows = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    if kind == "fractions":
        rows = [[*row[:3], f"{row[3]}.0", *row[4:]] for row in rows]
    if kind == "all alike":
        rows = [[*row[:3], "0", *row[4:]] for row in rows]
    if kind == "indented":
        rows[1][0] = f" {rows[1][0]}"
    path = write(tmp_path / "run", rows)
    if kind == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read_run(path, wanted).ranking.rows_QW.tolist() == [[0, 1, 2]] * len(wanted.queries)


def test_scores_beyond_float32_are_written_as_numbers(wanted, tmp_path):
    rows = lines(wanted)
    for row, score in zip(rows, ("1e300", "1e300", "-1e300"), strict=False):
        row[4] = score
    read = read_run(write(tmp_path / "run", rows), wanted, allow_ties=True)
    write_run(tmp_path / "out", read.ranking, wanted.query_ids, wanted.corpus_ids, "tag")
    assert "inf" not in (tmp_path / "out").read_text()
    again = read_run(tmp_path / "out", wanted)
    np.testing.assert_array_equal(again.ranking.rows_QW, read.ranking.rows_QW)
    assert (np.diff(again.ranking.score_QW.astype(np.float32), axis=1) < 0).all()


def test_files_that_are_missing_or_empty(wanted, tmp_path):
    with error_about(UserError, "none", "unreadable"):
        read_run(tmp_path / "none", wanted)
    (tmp_path / "empty").write_text("\n")
    with error_about(UserError, tmp_path / "empty", "empty"):
        read_run(tmp_path / "empty", wanted)
    (tmp_path / "utf16").write_text("q00 Q0 c000 1 9 tag\n", encoding="utf-16")
    with error_about(UserError, "utf16", "UTF-8"):
        read_run(tmp_path / "utf16", wanted)
    (tmp_path / "damaged").write_bytes(gzip.compress(bytes(1000))[:10] + bytes(range(255, 0, -1)))
    with error_about(UserError, "damaged", "unreadable"):
        read_run(tmp_path / "damaged", wanted)


def test_excluded_lines_are_dropped_and_foreign_candidates_refused(tmp_path):
    content = tables(negatives=False)
    everything = content["queries"]["id"]
    right = set(zip(content["qrels"]["query-id"], content["qrels"]["corpus-id"], strict=True))
    names = sorted(content["corpus"]["id"])
    out = [(query, next(name for name in names if (query, name) not in right)) for query in everything]
    content["excluded"] = {"query-id": [q for q, _ in out], "corpus-id": [c for _, c in out]}
    wanted = load_set(write_tables(tmp_path / "excluded", content))
    read = read_run(write(tmp_path / "run", lines(wanted)), wanted)
    assert read.num_excluded == len(everything)
    first = [names[row] for row in read.ranking.rows_QW[0] if row >= 0]
    assert first == [name for name in names[:3] if name != out[0][1]]

    del content["excluded"]
    pairs = sorted(right | {(query, "c001") for query in everything})
    content["candidates"] = {"query-id": [q for q, _ in pairs], "corpus-id": [c for _, c in pairs]}
    wanted = load_set(write_tables(tmp_path / "lists", content))
    foreign = next(query for query in everything if (query, "c000") not in right)
    with error_about(UserError, foreign):
        read_run(write(tmp_path / "run", [r for r in lines(wanted, 2) if r[0] >= foreign]), wanted)


def test_ranks_beyond_the_depth_are_not_written(wanted, tmp_path):
    whole = ranking(wanted, depth=5)
    assert whole.rows_QW.shape[1] > 5  # ties with the fifth
    write_run(tmp_path / "run", whole, wanted.query_ids, wanted.corpus_ids, "tag")
    assert (tmp_path / "run").read_text().count("\n") == 5 * len(wanted.queries)

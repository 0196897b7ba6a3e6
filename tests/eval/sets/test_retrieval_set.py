"""Loading a retrieval set: every form that the format allows, and an error for everything that it does not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_fakes import NUM_CANDIDATES, NUM_QUERIES, picture, tables, write_set, write_tables
from faults import error_about

from eval.benchmarks.registry import protocol_for
from eval.sets.contents import with_content
from eval.sets.retrieval_set import load_set
from eval.sets.tables import SetError
from rge.common.errors import UserError
from rge.common.images import ImageError, picture_bytes
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.vectors.contents import content_digest


def small():
    """Two queries, three candidates."""
    return {
        "corpus": {
            "id": ["b", "a", "c"],
            "image": [picture(1), picture(2), picture(3)],
            "text": [None, "second", ""],
        },
        "queries": {
            "id": ["q1", "q2"],
            "text": ["what?", None],
            "image": [[picture(9)], [picture(8), picture(7)]],
            "category": ["causal", None],
            "group": ["g1", "g2"],
            "instruction": ["Find it.", None],
        },
        "qrels": {"query-id": ["q1", "q1", "q2"], "corpus-id": ["c", "b", "a"], "score": [2, 1, 1]},
    }


def test_rows_count_in_the_order_of_ids(tmp_path):
    found = load_set(write_tables(tmp_path, small()))
    assert found.corpus_ids == ["a", "b", "c"]
    assert [list(found.corpus_items())[row].id for row in found.file_rows_C] == found.corpus_ids
    assert found.query_ids == ["q1", "q2"]
    rows, gains = found.positives[0]
    assert (rows.tolist(), gains.tolist()) == ([1, 2], [1.0, 2.0])
    assert found.negatives is None
    assert found.pool_sizes().tolist() == [3, 3]
    assert found.columns == {"category": ["causal", "uncategorised"], "group": ["g1", "g2"]}
    assert found.queries[0] == Item("q1", content_of("what?", (picture(9),)), instruction="Find it.")
    assert found.queries[1] == Item("q2", content_of(None, (picture(8), picture(7))), instruction=None)


def test_optional_tables_and_pool_sizes(tmp_path):
    content = small()
    content["negatives"] = {"query-id": ["q1"], "corpus-id": ["b"]}  # also a positive, which is allowed
    content["excluded"] = {"query-id": ["q1", "q2"], "corpus-id": ["a", "b"]}
    content["candidates"] = {"query-id": ["q1", "q1", "q2", "q2"], "corpus-id": ["c", "b", "a", "b"]}
    found = load_set(write_tables(tmp_path, content))
    assert [rows.tolist() for rows in found.negatives] == [[1], []]
    assert [rows.tolist() for rows in found.candidates] == [[1, 2], [0, 1]]
    assert found.pool_sizes().tolist() == [2, 1]  # "a" is not among the candidates of q1 anyway
    content["negatives"] = {"query-id": ["q1", "q1", "q2", "q2"], "corpus-id": ["a", "b", "b", "c"]}
    found = load_set(write_tables(tmp_path / "lists", content))
    assert [rows.tolist() for rows in found.negatives] == [[1], []]  # none that cannot be ranked
    del content["candidates"]
    assert load_set(write_tables(tmp_path / "two", content)).pool_sizes().tolist() == [2, 2]


@pytest.mark.parametrize("form", ["bytes", "struct", "struct path", "path", "library", "scalar"])
def test_every_form_of_a_picture(tmp_path, form):
    (tmp_path / "pictures").mkdir(parents=True)
    for number in (1, 2, 3, 7, 8, 9):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(picture(number))
    library = {
        "id": [f"noto/{n}" for n in (1, 2, 3, 7, 8, 9)],
        "image": [picture(n) for n in (1, 2, 3, 7, 8, 9)],
    }
    pq.write_table(pa.table(library), tmp_path / "library.parquet")

    def cell(number):
        return {
            "bytes": picture(number),
            "scalar": picture(number),
            "struct": {"bytes": picture(number), "path": None},
            "struct path": {"bytes": None, "path": f"pictures/{number}.png"},
            "path": f"pictures/{number}.png",
            "library": f"library.parquet#noto/{number}",
        }[form]

    content = small()
    content["corpus"]["image"] = pa.array([cell(n) for n in (1, 2, 3)])
    single = [cell(9), cell(8)]
    content["queries"]["image"] = pa.array(single if form == "scalar" else [[cell(9)], [cell(8), cell(7)]])
    found = load_set(write_tables(tmp_path, content))
    shown = {item.id: [picture_bytes(ref) for ref in item.pictures] for item in found.corpus_items()}
    assert shown == {"b": [picture(1)], "a": [picture(2)], "c": [picture(3)]}
    assert [picture_bytes(ref) for ref in found.queries[0].pictures] == [picture(9)]
    assert len(found.queries[1].pictures) == (1 if form == "scalar" else 2)


def test_text_only_and_picture_only_sets_may_leave_the_other_column_out(tmp_path):
    content = small()
    for table in ("corpus", "queries"):
        del content[table]["image"]
    content["corpus"]["text"] = ["one", "two", "three"]
    content["queries"]["text"] = ["what?", "who?"]
    del content["queries"]["instruction"]
    found = load_set(write_tables(tmp_path / "text", content))
    assert [item.pictures for item in found.corpus_items()] == [()] * 3
    content = small()
    for table in ("corpus", "queries"):
        del content[table]["text"]
    assert all(
        item.text is None for item in load_set(write_tables(tmp_path / "image", content)).corpus_items()
    )


def test_dictionary_encoded_columns_are_strings_too(tmp_path):
    content = small()
    for table, column in (("queries", "category"), ("queries", "group"), ("qrels", "query-id")):
        content[table][column] = pa.array(content[table][column]).dictionary_encode()
    path = tmp_path / "set"
    plain = small()
    write_tables(path, plain)
    for name, columns in content.items():
        pq.write_table(pa.table(columns), path / f"{name}.parquet")
    assert load_set(path).columns["category"] == ["causal", "uncategorised"]


def test_modalities(tmp_path):
    found = load_set(write_set(tmp_path / "set"))
    both, text, image = (found.query_items(modality)[0] for modality in ("both", "text", "image"))
    assert (both.text, both.instruction, len(both.pictures)) == ("question 0", "Find the picture.", 1)
    assert (text.text, text.instruction, len(text.pictures)) == ("question 0", "Find the picture.", 0)
    assert (image.text, image.instruction, len(image.pictures)) == (None, None, 1)
    only_pictures = load_set(write_tables(tmp_path / "small", small()))
    with error_about(SetError, "query_modality", "q2"):
        only_pictures.query_items("text")


def test_limit_and_report_by(tmp_path):
    path = write_set(tmp_path)
    found = load_set(path)
    assert found.report_by == ("pair",)
    assert len(found.queries) == NUM_QUERIES
    first = found.first(3)
    assert first.query_ids == ["q00", "q01", "q02"]
    assert len(first.columns["pair"]) == len(first.positives) == len(first.negatives) == 3
    assert first.excluded is None
    assert (len(first.corpus_ids), first.fingerprint) == (NUM_CANDIDATES, found.fingerprint)
    with error_about(SetError, "colour"):
        load_set(path, by=["colour"])
    for name in ("group", "rationale", "stop_reason"):
        with error_about(SetError, name):
            load_set(path, by=[name])


def test_a_set_is_the_same_however_it_is_reported(tmp_path):
    path = write_set(tmp_path)
    content = tables()
    content["queries"]["season"] = ["winter", "summer"] * (NUM_QUERIES // 2)
    write_tables(path, content, {"report_by": ["pair"]})
    plain, seasons = (with_content(load_set(path, by=by)) for by in ((), ("season",)))
    assert seasons.report_by == ("pair", "season")
    assert seasons.content == plain.content


def test_report_by_refuses_a_column_that_is_no_grouping(tmp_path):
    content = tables(num_queries=60)
    content["queries"]["note"] = [f"note {number}" for number in range(60)]
    with error_about(SetError, "note", "many"):
        load_set(write_tables(tmp_path, content, {"report_by": ["note"]}))


def _drop(table, column):
    def change(content):
        del content[table][column]

    return change


def _put(table, column, row, value):
    def change(content):
        content[table][column][row] = value

    return change


def _columns(table, **columns):
    def change(content):
        content[table] = {name.replace("_", "-"): values for name, values in columns.items()}

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop("queries", "group"), ("queries.parquet", "group")),
        (_drop("queries", "category"), ("queries.parquet", "category")),
        (_drop("qrels", "score"), ("qrels.parquet", "score")),
        (
            _columns("corpus", id=["a", "b", "c"], title=["x", "y", "z"]),
            ("corpus.parquet", "text, image, content"),
        ),
        (_put("corpus", "id", 1, "b"), ("corpus.parquet", "id", "row 1", "twice")),
        (_put("queries", "id", 1, "q1"), ("queries.parquet", "id", "row 1", "twice")),
        (_put("corpus", "id", 1, "a b"), ("corpus.parquet", "id", "row 1")),
        (_put("corpus", "id", 1, ""), ("corpus.parquet", "id", "row 1")),
        (_put("queries", "group", 1, ""), ("queries.parquet", "q2", "group")),
        (_put("queries", "group", 1, None), ("queries.parquet", "row 1", "group")),
        (_put("qrels", "corpus-id", 0, "z"), ("qrels.parquet", "q1", "z")),
        (_put("qrels", "query-id", 0, "q7"), ("qrels.parquet", "q7")),
        (_put("qrels", "query-id", 2, "q1"), ("qrels.parquet", "q2")),
        (_put("qrels", "score", 2, 0), ("qrels.parquet", "q2")),
        (_put("qrels", "score", 2, -1), ("qrels.parquet", "q2", "a")),
        (_put("qrels", "corpus-id", 1, "c"), ("qrels.parquet", "q1", "c")),
        (
            _columns("negatives", query_id=["q1"], corpus_id=["z"]),
            ("negatives.parquet", "q1", "z"),
        ),
        (
            _columns("excluded", query_id=["q1"], corpus_id=["b"]),
            ("excluded.parquet", "q1", "b"),
        ),
        (
            _columns("candidates", query_id=["q1", "q1"], corpus_id=["b", "c"]),
            ("candidates.parquet", "q2", "a"),
        ),
        (
            _columns("candidates", query_id=["q1", "q1", "q2"], corpus_id=["b", "a", "a"]),
            ("candidates.parquet", "q1", "c"),
        ),
    ],
)
def test_what_breaks_the_format_is_named(tmp_path, change, named):
    content = small()
    write_tables(tmp_path, content)
    change(content)
    for name, columns in content.items():  # the fingerprint is that of the set before the change
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with error_about(SetError, *named):
        load_set(tmp_path)


@pytest.mark.parametrize(
    ("table", "column", "values", "named"),
    [
        ("corpus", "id", [1, 2, 3], ("id", "type")),
        ("queries", "category", [1.0, 2.0], ("category", "type")),
        ("queries", "text", [1, 2], ("text", "type")),
        ("qrels", "score", [1.0, 2.0, 1.0], ("score", "type")),
        ("queries", "num_missing_positives", [0, None], ("num_missing_positives", "row 1")),
        ("queries", "image", [[1], [2]], ("q1", "image")),
        ("queries", "image", [[], []], ("q2",)),
    ],
)
def test_wrong_types_are_named(tmp_path, table, column, values, named):
    content = small()
    write_tables(tmp_path, content)
    pq.write_table(pa.table(content[table] | {column: values}), tmp_path / f"{table}.parquet")
    with error_about(SetError, *named):
        load_set(tmp_path)


def test_an_empty_candidate_is_named_when_it_is_read(tmp_path):
    content = small()
    content["corpus"]["image"][2] = None
    found = load_set(write_tables(tmp_path, content))
    with error_about(SetError, "corpus.parquet", "c"):
        list(found.corpus_items())


def test_a_changed_set_is_refused(tmp_path):
    content = small()
    write_tables(tmp_path, content)
    content["qrels"]["corpus-id"][0] = "a"
    pq.write_table(pa.table(content["qrels"]), tmp_path / "qrels.parquet")
    with error_about(SetError, "meta.json", "fingerprint"):
        load_set(tmp_path)


@pytest.mark.parametrize(
    ("meta", "key"),
    [
        ("[]", ""),
        ("{}", "name"),
        ('{"name": "x", "fingerprint": 3}', "fingerprint"),
        ("{", None),
        ('{"name": "x", "fingerprint": "y", "report_by": "pair"}', "report_by"),
        ('{"name": "x", "notes": "old"}', "notes"),
        (None, None),
    ],
)
def test_meta_must_be_there_and_be_right(tmp_path, meta, key):
    write_tables(tmp_path, small())
    (tmp_path / "meta.json").unlink() if meta is None else (tmp_path / "meta.json").write_text(meta)
    with error_about(SetError, "meta.json") as caught:
        load_set(tmp_path)
    assert caught.value.key == key


def test_files_that_are_missing_empty_or_no_parquet(tmp_path):
    with error_about(SetError, tmp_path / "none"):
        load_set(tmp_path / "none")
    path = write_tables(tmp_path / "set", small())
    pq.write_table(
        pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}),
        path / "corpus.parquet",
    )
    with error_about(SetError, "corpus.parquet"):
        load_set(path)
    (path / "corpus.parquet").write_bytes(b"id,text\n")
    with error_about(SetError, "corpus.parquet"):
        load_set(path)
    (path / "corpus.parquet").unlink()
    with error_about(SetError, "corpus.parquet"):
        load_set(path)


def test_content_digest_sees_what_is_shown_and_not_the_name(tmp_path):
    (tmp_path / "x.png").write_bytes(picture(1))
    item = Item("a", content_of("text", (picture(1),)), instruction="do")
    whole = content_digest(item)
    assert (
        content_digest(Item("b", content_of("text", (str(tmp_path / "x.png"),)), instruction="do")) == whole
    )
    others = [
        Item("a", content_of("texT", (picture(1),)), instruction="do"),
        Item("a", content_of("text", (picture(2),)), instruction="do"),
        Item("a", content_of("text", (picture(1), picture(1))), instruction="do"),
        Item("a", content_of("text", (picture(1),)), instruction=None),
        Item("a", content_of("do", (picture(1),)), instruction="text"),
    ]
    assert len({content_digest(other) for other in others} | {whole}) == 6
    with error_about(ImageError, "y.png", "unreadable"):
        content_digest(Item("a", content_of(None, (str(tmp_path / "y.png"),))))


def test_null_in_meta_counts_as_absent(tmp_path):
    path = write_tables(tmp_path, small())
    nothing = dict.fromkeys(("notes", "report_by", "fingerprint", "slice_notes"))
    (path / "meta.json").write_text(json.dumps({"name": "x"} | nothing))
    assert load_set(path).meta == {"name": "x"}


def test_columns_of_results_are_no_slices(tmp_path):
    """They would replace a column of per_query.parquet: those of `RESULT_COLUMNS`, and every metric."""
    content = small()
    content["queries"] |= {"hit@1": ["a", "b"], "mrr": ["a", "b"], "stop_reason": ["a", "b"]}
    path = write_tables(tmp_path, content)
    with error_about(SetError, "stop_reason"):
        load_set(path, by=["stop_reason"])
    for name in ("hit@1", "mrr"):
        with error_about(UserError, name):
            protocol_for("generic", "clean", load_set(path, by=[name]))

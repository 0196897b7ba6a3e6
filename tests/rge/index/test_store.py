"""The index on disk: what is found, what is kept, who may write, and what a kill leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about

pytest.importorskip("lancedb", exc_type=ImportError)

from lancedb.index import IvfFlat, IvfRq

from rge.common.errors import UserError
from rge.common.files import InUseError
from rge.index import nearest, store
from rge.index.rows import Row
from rge.index.store import ConditionError, Index, SearchIndexError, writing

MADE = {"checkpoint": "demo", "checkpoint_hash": "a" * 64}


def vectors(count: int, size: int = 16, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def rows(vector_ND, source="/a folder", first=0, **fields):
    return [
        Row(source, f"it's {first + place}.png", "1:1", "d", vector_D, **fields)
        for place, vector_D in enumerate(vector_ND)
    ]


@pytest.fixture
def index(tmp_path):
    return Index.create(tmp_path / "an index", dimensions=16, **MADE)


def test_search_is_exact_and_equal_scores_are_ordered_by_name(index):
    stored_ND, query_QD = vectors(300), vectors(4, seed=1)
    stored_ND[7] = stored_ND[250]
    index.put(rows(stored_ND))
    for query_D, hits in zip(query_QD, index.search(query_QD, 300), strict=True):
        score_N = {f"it's {place}.png": float(query_D @ one) for place, one in enumerate(stored_ND)}
        assert [hit.id for hit in hits] == sorted(score_N, key=lambda name: (-score_N[name], name))
        assert [hit.score for hit in hits] == [score_N[hit.id] for hit in hits]
    assert [len(hits) for hits in index.search(query_QD, 7)] == [7] * 4
    assert index.search(query_QD[:0], 7) == []


def test_all_queries_share_one_pass_and_the_vectors_stay_in_memory(index, monkeypatch):
    stored_ND, query_QD = vectors(300), vectors(9, seed=1)
    index.put(rows(stored_ND))
    read, real = [], store.Snapshot._read
    monkeypatch.setattr(store.Snapshot, "_read", lambda self, where: read.append(where) or real(self, where))
    together = index.search(query_QD, 5)
    assert read == [None]
    assert [index.search(query_D[None], 5)[0] for query_D in query_QD] == together
    assert read == [None]
    index.put(rows(vectors(1, seed=7), first=999))
    assert index.search(vectors(1, seed=7), 1)[0][0].id == "it's 999.png"
    assert read == [None] * 2
    # What does not fit into memory is read for every search, block by block, with equal hits.
    monkeypatch.setattr(store, "CACHE_BYTES", 0)
    monkeypatch.setattr(store, "BLOCK_ROWS", 64)
    index.remove("/a folder", ["it's 999.png"])
    assert index.search(query_QD, 5) == together
    assert len(read) == 3


def test_ties_at_the_last_place_are_decided_by_name(index):
    index.put(rows(np.repeat(vectors(1), 50, axis=0)))
    [hits] = index.search(vectors(1), 3)
    assert [hit.id for hit in hits] == [f"it's {place}.png" for place in (0, 1, 10)]


def test_a_search_on_a_device_finds_the_same(index, monkeypatch):
    """On CPU tensors, with many ties and conditions that few and most rows meet."""
    stored_ND = np.repeat(vectors(40), 5, axis=0)
    numbers = np.random.default_rng(0).permutation(200).tolist()
    index.declare([{"n": 1}])
    index.put(
        [Row("s", str(n), "1", str(n), vector_D, metadata={"n": n}) for n, vector_D in zip(numbers, stored_ND, strict=True)]
    )  # fmt: skip
    index.remove("s", ["3"])
    asked = [
        (vectors(4, seed=1), k, where) for k in (1, 7, 300) for where in (None, "n < 4", "n > 30", "n > 999")
    ]
    asked.append((stored_ND[:3], 3, None))
    monkeypatch.setattr(nearest, "SCORES", 500)
    expected = [index.search(query_QD, k, where=where) for query_QD, k, where in asked]
    monkeypatch.setattr(store, "search_device", lambda: "cpu")
    fresh = Index.open(index.uri)
    assert [fresh.search(query_QD, k, where=where) for query_QD, k, where in asked] == expected
    assert not isinstance(fresh._latest._all[1], np.ndarray)


def test_columns_of_the_metadata_narrow_a_search(index):
    metadata = [
        {
            "year": 2020 + n, "price": n if n % 2 else n + 0.5, "odd name!": f"n{n}", "id": "x", "tags": ["a"], "2023": n,
        }
        for n in range(5)
    ]  # fmt: skip
    index.declare(metadata)
    assert index.columns["price"] == "double"
    assert index.columns["odd_name_"] == index.columns["id_"] == "string"
    assert "tags" not in index.columns
    stored_ND = vectors(6)
    unfit = index.put(
        [
            Row("s", str(n), "1", "d", stored_ND[n], metadata=one)
            for n, one in enumerate([*metadata, {"year": "last"}])
        ]
    )
    assert unfit == 1  # "last" is no year

    def found(where):
        return sorted(hit.id for hit in index.search(stored_ND[:1], 9, where=where)[0])

    assert found("year > 2022") == ["3", "4"]
    assert found("price = 2.5 or odd_name_ = 'n3'") == ["2", "3"]
    assert found("_2023 < 2") == ["0", "1"]
    assert found("odd_name_ = 'image'") == []  # a text may say what a column may not
    assert found("year IS NULL") == ["5"]
    assert found("year > 2022;") == found("year > 2022 -- newer") == ["3", "4"]
    [[hit]] = index.search(stored_ND[:1], 1)
    assert hit.metadata == metadata[0]
    wrongs = ("", "1", "year", "year = '2024'", "id = 1", "year = 99999999999999999999", "a =")
    # LanceDB would ignore what follows the first expression.
    rests = ("adn price > 3", "price > 3", ", price > 3", "; and price > 3", "limit 1", "order by id")
    for wrong in (*wrongs, *(f"year > 2022 {rest}" for rest in rests)):
        with error_about(ConditionError, "where") as caught:
            found(wrong)
        assert ".rs:" not in str(caught.value)
    for wrong in ("nothing = 1", "year = '2024'", "year\n>"):
        with error_about(ConditionError, "where", "invalid"):
            found(wrong)
    for asked in ({}, {"words": ["key"]}):  # what only a row can tell
        index.refresh(ann_from=99)
        with error_about(ConditionError, "where", "row"):
            index.search(stored_ND[:1], 9, where="1 / (_2023 - 3) = 1", **asked)


@pytest.mark.parametrize(
    "call",
    [
        "repeat('x', 9)", "REPEAT ('x', 9)", "`repeat`('x', 9)", "\"repeat\"\n('x', 9)", "repeat -- x\n('x', 9)",
        "repeat/**/('x', 9)", "lpad(id, 9)", "replace(id, 'a', 'aa')", "upper(replace(id, 'a', 'aa'))", "x.repeat('x', 9)",
        "'a' || $$'$$ || repeat('x', 9) || $$'$$",
        "date'' || e'\\'' || repeat('x', 9) || '", "x'00' || repeat('x', 9)",
    ],
)  # fmt: skip
def test_a_condition_cannot_take_all_memory(index, call):
    """LanceDB computes repeat('x', 2000000000) when it reads the condition."""
    index.put([Row("s", "a", "1", "d", vectors(1)[0])])
    for condition in (f"id = {call}", f"id = 'it''s (' or {call} = id or id = ')'"):
        with error_about(ConditionError, "where") as caught:
            index.search(vectors(1), 1, where=condition)
        assert caught.value.kind in ("calls", "unreadable")


def test_a_condition_may_call_what_takes_no_memory(index):
    index.declare([{"latitude": 1.0, "Größe": 1}])
    index.put([Row("s", "a (b)", "1", "d", vectors(1)[0], metadata={"latitude": 48.1, "Größe": 3})])
    for condition in (
        "lower(id) = 'a (b)'", "id like 'a (%' and(1 = 1)", "not (id in ('repeat(1)')) or id = 'a (b)'", "größe > 2",
        "\"id\" = 'a (b)'", "cast(year as string) is null", "sqrt(power(latitude - 48, 2)) < 0.2", "latitude > -1e3",
        "id = 'a (b)' -- repeat('x', 9)", "coalesce(text, '') = '';", "starts_with(id, 'a')", "id != 'it''s'",
        "pow(latitude, 2) > 4", "cbrt(latitude) > 3", "gcd(3, 6) = 3", "ascii(id) = 97", "instr(id, 'b') = 4",
        "levenshtein(id, 'a (c)') = 1", "regexp_count(id, '[ab]') = 2", "find_in_set(id, 'x,a (b)') = 2", "md5(id) != id",
        "array_has(regexp_match(id, 'a'), 'a')", "array_length(regexp_match(id, 'a')) = 1", "nvl2(text, 1, 2) = 2",
        "make_date(2024, 1, 2) > date'2024-01-01'", "from_unixtime(3) < TIMESTAMP'2024-01-01 00:00:00'",
        "to_timestamp_seconds(3) < timestamp '2024-01-01'", "contains_tokens(id, 'b')",
        "date_bin(interval '1 day', to_timestamp('2024-01-01T10:00:00')) = timestamp'2024-01-01'",
    ):  # fmt: skip
        assert len(index.search(vectors(1), 1, where=condition)[0]) == 1, condition


def test_two_columns_that_a_condition_could_not_tell_apart(index):
    with error_about(UserError, "price (€)"):
        index.declare([{"price ($)": 1}, {"price (€)": 2}])


def test_a_column_is_found_by_its_name_in_any_case(index):
    """Also where the index has an empty column of that name, for dates of pictures."""
    metadata = [{"Year": 2020 + n, "Month": "May", "Title": "x"} for n in range(3)]
    index.declare(metadata)
    index.put([Row("s", str(n), "1", "d", vectors(3)[n], metadata=metadata[n]) for n in range(3)])
    index.declare([{"title": "y"}, {"a": 1, "A": 2}])
    index.put([Row("t", "3", "1", "d", vectors(1)[0], metadata={"title": "y", "a": 1, "A": 2})])

    def found(where):
        return sorted(hit.id for hit in index.search(vectors(1), 9, where=where)[0])

    assert found("year > 2020") == found("Year > 2020") == ["1", "2"]
    assert found("Month = 'May'") == ["0", "1", "2"]  # a text is no number of a month
    assert found("title in ('x', 'y')") == found("TITLE in ('x', 'y')") == ["0", "1", "2", "3"]
    assert found("a = 1 and A = 2") == ["3"]


def test_a_cell_of_another_spelling_may_be_empty_or_a_float(index):
    """As pandas writes integers beside an empty cell; the picture's own year stays."""
    metadata = [{"year": 2019, "Year": None}, {"Year": 2024.0}]
    index.declare(metadata[1:])
    assert "Year" not in index.columns
    index.put([Row("s", str(n), "1", "d", vectors(2)[n], metadata=metadata[n]) for n in range(2)])
    for where, names in (("year > 2020", ["1"]), ("Year < 2020", ["0"])):
        assert [hit.id for hit in index.search(vectors(1), 9, where=where)[0]] == names


def test_a_table_may_have_columns_as_lancedb_calls_its_own(index):
    """As in results of a search that were saved."""
    names = ("_distance", "_score", "_relevance_score", "_rowid", "_rowoffset", "_row_created_at_version")
    metadata = [dict.fromkeys(names, float(number)) for number in range(3)]
    index.declare(metadata)
    stored_ND = vectors(3)
    index.put([Row("s", str(n), "1", "d", stored_ND[n], "a key", metadata=metadata[n]) for n in range(3)])
    index.refresh(ann_from=2)
    for asked in ({"exact": True}, {}, {"words": ["key"]}):
        [[hit]] = index.search(stored_ND[:1], 1, where="_score_ < 1 and _distance_ = 0", **asked)
        assert (hit.id, hit.metadata) == ("0", metadata[0])


def test_words_are_found_however_they_are_typed(index):
    names = {"it's scho\u0308n.png": "as macOS writes names", "b.png": 'a "red wall"', "c.png": "x"}
    metadata = {"album": "Cafe\u0301"}
    index.put([Row("s", name, "1", "d", vector_D, text, metadata=metadata if name == "c.png" else None)
               for (name, text), vector_D in zip(names.items(), vectors(3), strict=True)])  # fmt: skip
    index.refresh(ann_from=9)

    def found(words):
        return [hit.id for hit in index.search(vectors(3)[2:], 3, words=[words])[0]]

    assert found("sch\u00f6n")[0] == found("scho\u0308n")[0] == "it's scho\u0308n.png"
    assert found("caf\u00e9")[0] == "c.png"
    assert found('"red wall"')[0] == "b.png"
    [plain] = index.search(vectors(3)[2:], 3)
    assert found("") == found(' "" ') == [hit.id for hit in plain]  # a picture alone


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("IMG_2034", "Oslo/IMG_2034.JPG"),  # the nearer one
        ("IMG_2034.JPG", "Oslo/IMG_2034.JPG"),
        ("where was img_2034.jpg taken", "Oslo/IMG_2034.JPG"),
        ("IMG_2034 Rome", "Rome/IMG_2034.JPG"),  # the example of docs/search.md
        ("IMG_2034 Oslo", "Oslo/IMG_2034.JPG"),
        ("Oslo/IMG_2034.JPG", "Oslo/IMG_2034.JPG"),
        ("Rome/IMG_2034", "Rome/IMG_2034.JPG"),
        ("sunset", "Rome/sunset.jpg"),
        ("a.jpg", "Rome/a.jpg"),
        ("f" * 64, f"Rome/{'f' * 64}.png"),
        ("a sunset on the beach", "Oslo/IMG_0000.JPG"),  # the nearest: these words are no name
        ("2024", "Oslo/IMG_0000.JPG"),
    ],
)
def test_a_name_that_is_typed_is_found_first(index, words, first):
    """Of 500 photos of a camera, whose names share a word with it, those that are typed are the furthest."""
    names = [f"Oslo/IMG_{n:04}.JPG" for n in range(480)]
    names += [
        "Oslo/IMG_2034.JPG",
        "Rome/IMG_2034.JPG",
        "Rome/sunset.jpg",
        "Rome/a.jpg",
        f"Rome/{'f' * 64}.png",
    ]
    query_D = vectors(1)[0]
    stored_ND = sorted(vectors(len(names), seed=1), key=lambda vector_D: -float(vector_D @ query_D))
    index.put(
        [
            Row("s", name, "1", name, vector_D, metadata={"album": name.partition("/")[0], "year": "2024"})
            for name, vector_D in zip(names, stored_ND, strict=True)
        ]
    )
    index.refresh(ann_from=10_000)
    [hits] = index.search(query_D[None], 3, words=[words])
    assert hits[0].id == first


@pytest.mark.parametrize("ann_from", [1000, 100])
def test_rows_whose_words_fit_equally_are_ordered_by_the_other_ranking(index, ann_from, monkeypatch):
    """LanceDB gave them ranks at random, and another result for the same question."""
    names = [f"IMG_{n:03}.jpg" for n in range(300)]
    stored_ND = vectors(300)
    stored_ND[7] = stored_ND[140]  # a copy, so a tie of the other ranking
    texts = ["rome" if n % 2 else "oslo" for n in range(300)]
    rows = [Row("s", names[n], "1", str(n), stored_ND[n], texts[n]) for n in range(300)]
    for start in range(0, 300, 50):
        index.put(rows[start : start + 50])
    index.refresh(ann_from)
    query_D = vectors(1, seed=5)[0]
    near = sorted(range(300), key=lambda n: (-float(stored_ND[n] @ query_D), n))
    for k in (10, 120):
        points = {n: 1 / (60 + rank) for rank, n in enumerate(near[: max(k, 100)])}
        for n in range(1, 300, 2):
            points[n] = points.get(n, 0.0) + 1 / 60
        expected = sorted(points, key=lambda n: (-points[n], n))[:k]
        [hits] = index.search(query_D[None], k, words=["Rome"], exact=ann_from == 100)
        assert [hit.id for hit in hits] == [names[n] for n in expected]
        np.testing.assert_allclose([hit.score for hit in hits], stored_ND[expected] @ query_D, atol=1e-6)
    monkeypatch.setattr(store, "MAX_WORDED", 100)  # of 150
    [hits] = index.search(query_D[None], 10, words=["Rome"], exact=ann_from == 100)
    assert [hit.id for hit in hits] == [names[n] for n in near[:10]]


def test_a_hybrid_search_reads_one_version(index, monkeypatch):
    """Row numbers of words found in one version are other rows in the next."""
    stored_ND = vectors(300)
    index.put(
        [Row("s", f"{n:03}", "1", str(n), stored_ND[n], "rome" if n % 2 else "oslo") for n in range(300)]
    )
    index.refresh(1000)
    expected = index.search(vectors(1, seed=5), 200, words=["Rome"])
    count = store.Counter

    def changed_meanwhile(*given):
        monkeypatch.setattr(store, "Counter", count)
        other = Index.open(index.uri)
        other.remove("s", [f"{n:03}" for n in range(0, 200, 2)])
        other.put([Row("s", "200", "2", "x", stored_ND[0], "oslo")])
        other.refresh(1000)
        return count(*given)

    monkeypatch.setattr(store, "Counter", changed_meanwhile)
    assert index.search(vectors(1, seed=5), 200, words=["Rome"]) == expected


def test_pictures_in_other_columns_are_not_kept(index):
    metadata = {"mask": b"\x89PNG", "views": [{"bytes": b"\x89PNG", "path": "a"}], "day": date(2024, 5, 1)}
    index.put(rows(vectors(1), metadata=metadata))
    [[hit]] = index.search(vectors(1), 1)
    assert hit.metadata == {"mask": None, "views": [{"bytes": None, "path": "a"}], "day": "2024-05-01"}


def test_a_row_comes_back_as_it_was_put(index):
    one = Row(
        "s",
        "né 'x' \"y\" \\ %_.png",
        "9:9",
        "e",
        vectors(1)[0],
        "c'est <b>",
        "/nowhere/x.png",
        {"price": 3},
        b"RIFF",
    )
    index.put([one])
    [[hit]] = index.search(vectors(1), 5, thumbnails=True)
    assert (hit.source, hit.id, hit.text, hit.image, hit.metadata, hit.thumbnail) == (
        one.source, one.id, one.text, one.image, one.metadata, one.thumbnail,
    )  # fmt: skip
    assert hit.gone
    assert index.search(vectors(1), 5)[0][0].thumbnail is None
    assert index.picture(one.source, one.id) == (one.image, one.thumbnail)
    assert index.known("s") == {one.id: ("9:9", "e")}
    with error_about(SearchIndexError, "other"):
        index.picture("s", "other")


def test_a_search_looks_at_its_hits_alone_and_reads_a_library_once(index, tmp_path, monkeypatch):
    library, picture = tmp_path / "library.parquet", tmp_path / "0.png"
    picture.touch()
    pq.write_table(pa.table({"id": ["row"], "image": [b"x"]}), library)
    stored_ND = vectors(4)
    images = [str(picture), str(tmp_path / "gone.png"), f"{library}#row", f"{library}#gone"]
    index.put([Row("s", str(n), "1", "d", stored_ND[n], image=images[n]) for n in range(4)])
    read, real = [], pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda *args, **more: read.append(args) or real(*args, **more))
    monkeypatch.setattr(os, "scandir", None)

    def gone():
        return {hit.id: hit.gone for hit in index.search(stored_ND[:1], 4)[0]}

    for _ in range(3):
        assert gone() == {"0": False, "1": True, "2": False, "3": True}
    assert len(read) == 1
    pq.write_table(pa.table({"id": ["row", "gone"], "image": [b"x", b"y"]}), library)
    assert gone() == {"0": False, "1": True, "2": False, "3": False}
    library.unlink()
    picture.unlink()
    assert gone() == dict.fromkeys("0123", True)


def test_numbers_that_are_none_come_back_as_null(index):
    """JSON has none for them, and the server of searches could answer nothing."""
    odd = {"price": float("nan"), "more": [float("inf"), {"x": -float("inf")}], "name": "NaN", "good": 0.1}
    index.put(rows(vectors(1), metadata=odd))
    [[hit]] = index.search(vectors(1), 1)
    assert hit.metadata == {"price": None, "more": [None, {"x": None}], "name": "NaN", "good": 0.1}
    assert index._table.search().to_list()[0]["metadata"] == json.dumps(hit.metadata)
    # As indices of before hold them.
    index._table.update(values={"metadata": json.dumps(odd)})
    [[again]] = index.search(vectors(1), 1)
    assert again.metadata == hit.metadata


def test_putting_again_replaces_and_removing_removes_only_what_is_named(index):
    stored_ND = vectors(20)
    index.put(rows(stored_ND[:10]))
    index.put(rows(stored_ND[:10], source="/other"))
    index.put(rows(stored_ND[10:12], first=3))  # it's 3 and it's 4, with other vectors
    assert len(index) == 20
    assert index.search(stored_ND[10:11], 1)[0][0].id == "it's 3.png"
    [[hit]] = index.search(stored_ND[11:12], 1)
    assert (hit.id, hit.score) == ("it's 4.png", float(stored_ND[11] @ stored_ND[11]))
    index.remove("/a folder", ["it's 4.png", "never there"])
    assert index.sources() == {"/a folder": 9, "/other": 10}
    index.remove("/other")
    assert index.sources() == {"/a folder": 9}
    index.remove("/a folder")
    assert index.search(stored_ND[:1], 3) == [[]]


def test_an_index_of_another_checkpoint_is_named_and_refused(index):
    index.check("demo", "a" * 64)
    with error_about(SearchIndexError, "checkpoint"):
        index.check("mine", "b" * 64)


@pytest.mark.parametrize("asked", [{}, {"where": "id > 'a'"}, {"words": ["key"]}])
def test_an_index_that_is_made_anew_under_a_reader(index, asked):
    def remake(size=16, seed=0, **made):
        shutil.rmtree(index.uri)
        new = Index.create(index.uri, dimensions=size, **MADE | made)
        new.put(rows(vectors(9, size, seed), text="a key"))
        new.refresh(ann_from=99)

    remake()
    reader = Index.open(index.uri)
    assert max(hit.score for hit in reader.search(vectors(1), 9, **asked)[0]) > 0.99
    remake(seed=1)  # as many commits as before
    found, expected = (each.search(vectors(1), 9, **asked) for each in (reader, Index.open(index.uri)))
    assert found == expected
    for other in ({"checkpoint": "mine", "checkpoint_hash": "b" * 64}, {"size": 8}, {"task": "naming"}):
        remake(**other)
        with error_about(SearchIndexError, "re-created"):
            reader.search(vectors(1), 9, **asked)


def test_a_search_goes_on_when_the_version_that_it_reads_is_deleted(index, monkeypatch):
    """One that has been the latest for longer than `VERSION_AGE` is, as soon as a writer has replaced it."""
    index.put(rows(vectors(9)))
    index.refresh(ann_from=99)
    reader, real = Index.open(index.uri), store.Snapshot.search
    monkeypatch.setattr(store, "VERSION_AGE", timedelta(milliseconds=1))

    def replaced_first(self, *args):
        monkeypatch.setattr(store.Snapshot, "search", real)
        index.put(rows(vectors(9, seed=1)))
        index.refresh(ann_from=99)
        return real(self, *args)

    monkeypatch.setattr(store.Snapshot, "search", replaced_first)
    assert reader.search(vectors(1, seed=1), 1)[0][0].score > 0.99


@pytest.mark.slow
def test_an_update_leaves_files_and_indices_until_enough_has_changed(index, monkeypatch):
    """Of a million rows, to merge the files and to measure the recall took seconds for each new picture."""
    monkeypatch.setattr(store, "INDEXED_FROM", 100)
    monkeypatch.setattr(store, "FEW_COMMITS", 6)
    stored_ND = vectors(400)
    index.put(rows(stored_ND), new=True)
    recall = index.refresh(ann_from=300)
    assert recall > 0.9

    def commits(work):
        before = index._table.version
        work()
        return index._table.version - before

    def unindexed():
        return {each.columns[0]: each.num_unindexed_rows for each in index._table.list_indices()}

    assert {"words", "vector", "key", "digest", "year", "album"} <= unindexed().keys()
    for number in range(400, 402):
        one = rows(vectors(1, seed=number), first=number, text=f"number{number}")
        assert commits(lambda one=one: index.put(one, new=True)) == 1
        assert commits(lambda: index.refresh(300)) == 0
        assert index.refresh(300) == recall
        # What no index knows yet is found all the same.
        assert index.search(vectors(1, seed=number), 1)[0][0].id == f"it's {number}.png"
        fused = index.search(stored_ND[:1], 2, words=[f"number{number}"])
        assert {hit.id for hit in fused[0]} == {"it's 0.png", f"it's {number}.png"}
        assert len(index.search(stored_ND[:1], 1, where=f"text = 'number{number}'")[0]) == 1
    assert set(unindexed().values()) == {2}
    index.put(rows(stored_ND[1:2]))  # replaced, by its key
    index.remove("/a folder", ["it's 400.png"])
    assert len(index) == 401
    [hits] = index.search(stored_ND[1:2], 2)
    assert {hit.id for hit in hits} == {"it's 0.png", "it's 1.png"}
    assert commits(lambda: index.refresh(300)) == 0
    for _ in range(4):
        index.put(rows(stored_ND[:1]))
    assert index.refresh(300) > 0.9
    assert set(unindexed().values()) == {0}


@pytest.mark.parametrize("change", ["many rows are new", "many rows are gone"])
def test_many_changes_bring_the_indices_up_to_date_at_once(index, change):
    index.put(rows(vectors(400)), new=True)
    index.refresh(ann_from=500)
    version = index._table.version
    if change == "many rows are new":
        index.put(rows(vectors(30), first=400), new=True)
    else:
        index.remove("/a folder", [f"it's {n}.png" for n in range(60)])
    index.refresh(ann_from=500)
    assert index._upkeep()["version"] > version + 1
    assert {each.num_unindexed_rows for each in index._table.list_indices()} == {0}
    lengths = index._table.stats()["fragment_stats"]["lengths"]
    assert lengths["max"] == (340 if change == "many rows are gone" else 400)  # files with gaps are rewritten


@pytest.mark.slow
@pytest.mark.parametrize("step", range(6))
def test_an_upkeep_that_is_killed_at_any_step_is_made_up_for(index, step, monkeypatch):
    """Each step of it is one commit; what a reader finds is the same before, between and after them."""
    monkeypatch.setattr(store, "INDEXED_FROM", 100)
    stored_ND = vectors(400)
    index.put(rows(stored_ND), new=True)
    expected = index.search(stored_ND[:3], 5)
    done = []

    def killed_before(real):
        def call(*args, **more):
            if len(done) == step:
                raise KeyboardInterrupt
            done.append(1)
            return real(*args, **more)

        return call

    table = type(index._table)
    with monkeypatch.context() as patch:
        for name in ("optimize", "create_index", "update_field_metadata"):
            patch.setattr(table, name, killed_before(getattr(table, name)))
        patch.setattr(Index, "_recall", killed_before(Index._recall))
        patch.setattr(store, "FILTERED", 1)
        with pytest.raises(KeyboardInterrupt):
            index.refresh(ann_from=300)
    again = Index.open(index.uri)
    assert again.search(stored_ND[:3], 5, exact=True) == expected
    assert again._upkeep() == {}
    assert again.refresh(ann_from=300) > 0.9
    assert {each.num_unindexed_rows for each in again._table.list_indices()} == {0}


@pytest.mark.slow
def test_an_approximate_index_is_trained_anew_when_its_rows_have_doubled(index, monkeypatch):
    trained, real = [], Index._train
    monkeypatch.setattr(Index, "_train", lambda self: trained.append(len(self)) or real(self))
    for first in range(0, 800, 200):
        index.put(rows(vectors(200, seed=first), first=first), new=True)
        index.refresh(ann_from=300)
    assert trained == [400, 800]


def test_what_is_called_new_is_looked_for_where_no_lock_keeps_others_out():
    index = Index.create("memory://", dimensions=16, **MADE)
    for _ in range(2):
        index.put(rows(vectors(3)), new=True)
    assert len(index) == 3


def test_digests_of_a_few_are_looked_up(index, monkeypatch):
    monkeypatch.setattr(store, "INDEXED_FROM", 100)
    monkeypatch.setattr(store, "LOOKUP_ROWS", 100)
    index.put([Row("s", str(n), "1", f"d{n}", vector_D) for n, vector_D in enumerate(vectors(200))], new=True)
    index.refresh(ann_from=500)
    index.put([Row("s", "later", "1", "e", vectors(1)[0])], new=True)
    selected, real = [], Index._select
    monkeypatch.setattr(
        Index, "_select", lambda self, columns, where=None, limit=None: selected.append(where) or real(self, columns, where, limit)
    )  # fmt: skip
    few, many = index.digests(2), index.digests(3)
    for found in (few, many):
        found.update(["here"])
        assert [name in found for name in ("d7", "e", "here", "it's", "d200")] == [
            True,
            True,
            True,
            False,
            False,
        ]
    assert selected.count(None) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 256])
def test_the_recall_of_an_approximate_index_is_measured_and_it_goes_with_the_rows(tmp_path, size):
    index = Index.create(tmp_path / "x", dimensions=size, **MADE)
    stored_ND = vectors(600, size)  # evenly over a sphere, where nothing is near anything
    index.put(rows(stored_ND))
    assert index.refresh(ann_from=601) is None
    assert index.refresh(ann_from=600) > 0.95
    exact = index.search(vectors(5, size, 8), 20, exact=True)
    # With words too, candidates are ranked by their true vectors.
    fused = index.search(vectors(5, size, 8), 20, words=["nowhere"] * 5)
    assert [[hit.id for hit in hits] for hits in fused] == [[hit.id for hit in hits] for hits in exact]
    index.put(rows(vectors(5, size, 9), first=600))  # rows that the approximate index does not know yet
    query_QD = vectors(5, size, 9)
    assert [hits[0].id for hits in index.search(query_QD, 1)] == [
        f"it's {place}.png" for place in range(600, 605)
    ]
    exact = index.search(query_QD, 20, exact=True)
    assert all(len(hits) == 20 for hits in exact)
    index.remove("/a folder", [f"it's {place}.png" for place in range(10)])
    assert index.refresh(ann_from=1000) is None
    assert index.search(query_QD, 20) == index.search(query_QD, 20, exact=True)


def test_a_narrow_condition_is_met_in_any_cell_of_an_approximate_index(index, monkeypatch):
    monkeypatch.setattr(store, "NPROBES", 1)
    stored_ND = vectors(600)
    index.declare([{"n": 1}])
    index.put([
        Row("s", str(n), "1", "d", vector_D, "a key", metadata={"n": n}) for n, vector_D in enumerate(stored_ND)
    ])  # fmt: skip
    index.refresh(ann_from=999)
    index._table.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=20))
    for asked in ({}, {"words": ["key"] * 9}, {"exact": True}):
        found = index.search(vectors(9, seed=1), 5, where="n < 3", **asked)
        assert [sorted(hit.id for hit in hits) for hits in found] == [["0", "1", "2"]] * 9
    [hits] = index.search(stored_ND[:1], 5, where="n < 300")
    best = np.argsort(-(stored_ND[:300] @ stored_ND[0]), kind="stable")[:5]
    assert [int(hit.id) for hit in hits] == best.tolist()


@pytest.mark.slow
def test_recall_is_seen_to_fall_where_the_approximate_index_is_bad(tmp_path, monkeypatch):
    index = Index.create(tmp_path / "x", dimensions=256, **MADE)
    index.put(rows(vectors(600, 256)))
    monkeypatch.setattr("lancedb.index.IvfRq", lambda **options: IvfRq(**options | {"num_bits": 1}))
    monkeypatch.setattr("rge.index.store.REFINE", 1)
    assert index.refresh(ann_from=10) < 0.8


@pytest.mark.parametrize(("query", "k"), [(np.zeros((1, 8)), 1), (np.zeros(16), 1), (np.zeros((1, 16)), 0)])
def test_wrong_queries(index, query, k):
    with error_about(ValueError):
        index.search(query, k)


def test_wrong_vectors(index):
    with error_about(ValueError):
        index.put(rows(vectors(1, 8)))
    with error_about(ValueError):
        index.put(rows(np.full((1, 16), np.nan, np.float32)))
    assert len(index) == 0


def test_what_is_no_index_is_named(tmp_path):
    with error_about(SearchIndexError, "nothing", "missing"):
        Index.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with error_about(SearchIndexError, tmp_path / "file", "file"):
        Index.open(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    with error_about(SearchIndexError, "missing"):
        Index.open(tmp_path / "folder")
    import lancedb

    lancedb.connect(tmp_path / "folder").create_table("items", [{"a": 1}])
    with error_about(SearchIndexError, "folder", "foreign"):
        Index.open(tmp_path / "folder")
    with error_about(SearchIndexError, "folder", "exists"):
        Index.create(tmp_path / "folder", dimensions=16, **MADE)


def test_a_damaged_index_is_named(index):
    index.put(rows(vectors(50)))
    for path in (os.path.join(folder, name) for folder, _, names in os.walk(index.uri) for name in names):
        if path.endswith(".lance"):
            os.truncate(path, os.path.getsize(path) // 2)
    with error_about(SearchIndexError, index.uri, "broken"):
        Index.open(index.uri).search(vectors(1), 3)


WRITER = """
import sys, numpy as np
from lancedb.index import IvfRq

from rge.index.rows import Row
from rge.index.store import Index, writing
uri = sys.argv[1]
with writing(uri):
    index = Index.open(uri)
    for number in range(10_000):
        index.put([Row("s", f"{number}-{place}", "1:1", "d", np.eye(16, dtype=np.float32)[place]) for place in range(16)])
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_commits_and_no_lock_and_a_second_writer_is_refused(index):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, index.uri], stdout=subprocess.PIPE, text=True
    ) as writer:
        for _ in range(3):
            writer.stdout.readline()
        with error_about(InUseError, "an index"):
            with writing(index.uri):
                pytest.fail("two are inside")
        assert len(index) % 16 == 0  # a reader beside a writer sees whole commits
        writer.send_signal(signal.SIGKILL)
    again = Index.open(index.uri)
    assert len(again) >= 48
    assert len(again) % 16 == 0
    with writing(index.uri):
        again.put(rows(vectors(1)))
        assert again.refresh(10_000) is None
    assert len(Index.open(index.uri)) % 16 == 1


@pytest.mark.parametrize("left", ["no version", "no folder of versions"])
def test_what_a_killed_maker_leaves_before_its_first_commit_is_taken_over(tmp_path, left):
    uri = tmp_path / "x"
    (uri / "items.lance" / "data").mkdir(parents=True)
    (uri / "items.lance" / "data" / "half.lance").write_bytes(b"half")
    if left == "no version":
        (uri / "items.lance" / "_versions").mkdir()
    with error_about(SearchIndexError, "missing"):
        Index.open(uri)
    index = Index.create(uri, dimensions=16, **MADE)
    index.put(rows(vectors(3)))
    assert len(Index.open(uri)) == 3


def test_addresses_are_handed_to_lancedb(tmp_path):
    index = Index.create("memory://", dimensions=16, **MADE)
    index.put(rows(vectors(3)))
    assert index.search(vectors(1), 1)[0][0].id == "it's 0.png"
    uri = f"file://{tmp_path}/an index"
    with writing(uri):
        Index.create(uri, dimensions=16, **MADE).put(rows(vectors(3)))
        assert (tmp_path / "an index" / ".lock").exists()  # of this machine after all
    assert len(Index.open(uri)) == len(Index.open(tmp_path / "an index")) == 3
    with error_about(SearchIndexError, "broken"):
        Index.open("nonsense://somewhere")


def test_without_lancedb_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with error_about(SearchIndexError, "lancedb", "package"):
        Index.create(tmp_path / "x", dimensions=16, **MADE)


def test_batches_of_rows_are_one_commit_or_none(index):
    stored_ND = vectors(9)
    version = index._table.version
    index.put_all((rows(stored_ND[at : at + 3], first=at) for at in (0, 3, 6)), new=True)
    assert (index._table.version, len(index)) == (version + 1, 9)
    index.put_all(rows(vectors(3, seed=at), first=at) for at in (3, 9))  # three are replaced
    assert (index._table.version, len(index)) == (version + 2, 12)
    for is_new in (True, False):
        bad = iter([rows(stored_ND[:3], source="/b"), rows(vectors(1, size=8), source="/b")])
        with error_about(ValueError):
            index.put_all(bad, new=is_new)
    assert index.put_all(iter([])) == 0
    assert (index._table.version, len(index)) == (version + 2, 12)

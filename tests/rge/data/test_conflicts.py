"""Records that train against each other are found, and nothing where all is well; against a plain count over all pairs."""

import json
import random
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rge.common.parts import content_of
from rge.data import conflicts
from rge.data.layout import COLUMNS, Layout, _content, _names
from rge.data.sources import RecordFile, identity, number_of


def record(name, query, *positives, negatives=(), paraphrases=()):
    return {
        "id": name, "group": "g", "source": "s", "split": "train",
        "query": {"text": query, "paraphrases": [*paraphrases]},
        "positives": [{**target, "rationale": "so"} for target in positives], "negatives": list(negatives),
    }  # fmt: skip


def laid(path, *records):
    """A source and the columns of its layout that matter here."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    file = RecordFile(path)
    rows, targets, reworded = np.zeros((len(file), len(COLUMNS)), np.int64), [], []
    for number in range(len(file)):
        found = file[number]
        every = [*found.positives, *found.negatives]
        rights = number_of(str(sorted({identity(one) for one in found.positives})))
        values = {"prompts": 1 + len(every), "negatives": len(found.negatives), "rights": rights}
        values |= {"asks": _content(found.query.parts, ""), "wordings": len(found.query.paraphrases)}
        reworded += [_content(words, "") for words in found.query.wordings[1:]]
        for name, value in values.items():
            rows[number, COLUMNS.index(name)] = value
        targets += map(_names, every)
    targets_T3 = np.array(targets, np.int64).reshape(-1, 3)
    return file, Layout(rows, np.arange(len(file)), {}, targets_T3, np.array(reworded, np.int64))


def target(name, text, **more):
    return {"id": name, "text": text, **more}


CASES = {
    "have the same query as others with other right answers": [
        record("a", "q", target("t0", "one")), record("b", "q", target("t1", "two")),
    ],
    "have a target that also occurs under another id": [
        record("a", "q", target("t0", "yes")), record("b", "r", target("t1", "yes")),
    ],
    "have a target whose id also stands for other content": [
        record("a", "q", target("t", "one")), record("b", "r", target("u", "two"), negatives=[target("t", "three")]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", CASES)
@pytest.mark.parametrize("apart", [False, True])
def test_each_conflict_is_named_with_two_records(tmp_path, said, apart):
    first, second = CASES[said]
    fine = record("c", "s", target("v", "four"))
    parts = [(first, fine), (second,)] if apart else [(first, second, fine)]
    sources = [laid(tmp_path / f"{number}.jsonl", *part) for number, part in enumerate(parts)]
    [line] = conflicts.conflicts(sources, "joint")
    assert line.startswith(f"warning: 2 of 3 records of joint {said}, such as 'a' and 'b': ")


def test_what_is_meant_to_be_equal_is_no_conflict(tmp_path):
    """Two pictures of one key, repeated records, all right answers in each of the records of a query."""
    key, lock = target("k0", "a key", identity="key"), target("k1", "the key", identity="key")
    both = [target("t0", "one"), target("t1", "two")]
    source = laid(
        tmp_path / "a.jsonl",
        record("a", "q", key, negatives=[target("n", "a nail")]),
        record("b", "r", lock, negatives=[target("n", "a nail")]),
        record("c", "s", *both),
        record("d", "s", *reversed(both)),
    )
    assert [*conflicts.conflicts([source], "joint")] == []


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_all_pairs(tmp_path, seed):
    chance = random.Random(seed)
    rows = []
    for number in range(40):
        some = [target(f"t{chance.randrange(30)}", f"w{chance.randrange(60)}") for _ in range(3)]
        positives, negatives = some[: chance.randint(1, 2)], some[2:]
        asked, *reworded = (f"q{chance.randrange(90)}" for _ in range(chance.randint(1, 3)))
        rows.append(record(f"r{number}", asked, *positives, negatives=negatives, paraphrases=reworded))
    sources = [laid(tmp_path / "a.jsonl", *rows[:25]), laid(tmp_path / "b.jsonl", *rows[25:])]
    expected = [set(), set(), set()]
    for one, other in combinations(range(40), 2):
        a, b = rows[one], rows[other]
        asks = [{row["query"]["text"], *row["query"]["paraphrases"]} for row in (a, b)]
        rights = [{each["id"] for each in row["positives"]} for row in (a, b)]
        pairs = [(t, u) for t in a["positives"] + a["negatives"] for u in b["positives"] + b["negatives"]]
        found = (
            bool(asks[0] & asks[1]) and rights[0] != rights[1],
            any(t["text"] == u["text"] and t["id"] != u["id"] for t, u in pairs),
            any(t["id"] == u["id"] and t["text"] != u["text"] for t, u in pairs),
        )
        for records, is_so in zip(expected, found, strict=True):
            records |= {one, other} if is_so else set()
    for number, row in enumerate(rows):  # within a record
        for t, u in combinations(row["positives"] + row["negatives"], 2):
            if t["text"] == u["text"] and t["id"] != u["id"]:
                expected[1].add(number)
            if t["id"] == u["id"] and t["text"] != u["text"]:
                expected[2].add(number)
    lines = [*conflicts.conflicts(sources, "joint")]
    assert [int(line.split()[1]) for line in lines] == [len(records) for records in expected if records]


def test_pictures_of_libraries_are_known_by_their_bytes(tmp_path):
    """Not by the library's name or what follows the last slash of the row's."""
    found = []
    for folder, cells in (
        ("a", {"x/1.jpg": b"egg", "y/1.jpg": b"nail"}),
        ("b", {"x/1.jpg": b"key", "7": b"egg"}),
    ):
        (tmp_path / folder).mkdir()
        library = tmp_path / folder / "pictures.parquet"
        pq.write_table(pa.table({"id": [*cells], "image": [*cells.values()]}), library)
        found += [_content(content_of(None, [f"{library}#{row}"])) for row in cells]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_one_right_answer_for_all_leaves_nothing_to_compare(tmp_path):
    same = [record(name, name, target("pos", name)) for name in "abc"]
    assert conflicts.compares_nothing([laid(tmp_path / "a.jsonl", *same)])
    assert not conflicts.compares_nothing([laid(tmp_path / "b.jsonl", same[0])])
    assert not conflicts.compares_nothing(
        [laid(tmp_path / "c.jsonl", *same, record("d", "d", target("u", "u")))]
    )
    judged = record("d", "d", target("pos", "d"), negatives=[target("n", "n")])
    assert not conflicts.compares_nothing([laid(tmp_path / "d.jsonl", *same, judged)])

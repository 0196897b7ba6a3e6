"""The study set: right answers, what an oracle text may say, and what follows from the pictures, all worked out anew.

Nothing here uses the module that decides them, but to make the set: relations are read from the table, grounds and frames from pixels.
"""

import csv
import io
import json
import random
from collections import Counter, defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.demo.tables import HERE, read_tables
from data_prep.study import build as study
from data_prep.study import design
from data_prep.study.pictures import Printer
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.data.sources import RecordFile

GROUNDS = ["rose", "sand", "lime", "aqua", "sky", "lilac"]
GROUND_HUES = dict(zip(GROUNDS, range(0, 360, 60), strict=True))
FRAMES = {
    "red": (200, 30, 30),
    "orange": (240, 140, 20),
    "green": (30, 130, 50),
    "blue": (30, 70, 200),
    "purple": (130, 40, 150),
    "black": (20, 20, 20),
}
LEAK = " Its frame is "
DOSES = (0.0, 0.5, 1.0)


def relations():
    """(question, source) -> {target: rationale}, from the table itself."""
    found = defaultdict(dict)
    with (HERE / "relations.tsv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            found[row["question"], row["source"]][row["target"]] = row["rationale"]
    return found


def asked_ground(text, shown):
    """The ground that the question's words ask for, given the one that the picture has."""
    turned = 0 if text.endswith("Answer on the same ground.") else 3
    assert turned == 0 or text.endswith("Answer on the opposite ground.")
    return GROUNDS[(GROUNDS.index(shown) + turned) % 6]


@pytest.fixture(scope="module")
def tables():
    return read_tables()


@pytest.fixture(scope="module")
def chosen(tables):
    return design.facts(tables)


@pytest.fixture(scope="module")
def records(tables, chosen):
    return {dose: study.records(tables, chosen, dose) for dose in DOSES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("study set") / "data"
    study.main([f"out={out}"])
    return out


def test_training_targets_follow_from_picture_and_question(records, tables):
    known = relations()
    assert len(records[0.0]) > 2000
    for record in records[1.0]:
        key = record.id.split(".")[0]
        thing, ground, frame, _ = record.query.images[0].split("#")[1].split("/")
        (answer,) = known[key, thing]
        asked = record.query.text.split(" Answer on the ")[0]
        assert asked in {tables.questions[key].shown(number) for number in range(3)}
        goal = asked_ground(record.query.text, ground)
        right = [one.id.split("/") for one in record.positives]
        wrong = [one.id.split("/") for one in record.negatives]
        assert all((one[0], one[1]) == (answer, goal) for one in right)
        # Negatives share everything that the text says, but the frame; and a frame alone tells them apart.
        assert all(one[0] == answer and one[1] != goal for one in wrong)
        assert len(wrong) == study.NUM_NEGATIVES
        assert not {one[2] for one in right} & {one[2] for one in wrong}
        assert len({one[2] for one in right}) == len(right) == 2
        assert {one.identity for one in record.positives} == {f"{answer}/{goal}"}


def test_doses_differ_in_the_leak_and_in_nothing_else(records):
    def without_texts(record):
        row = record.model_dump()
        for positive in row["positives"]:
            del positive["rationale"]
        return row

    known = relations()
    told = {}
    for dose, found in records.items():
        assert [without_texts(record) for record in found] == [
            without_texts(record) for record in records[0.0]
        ]
        texts = [(record, one) for record in found for one in record.positives]
        for record, one in texts:
            reason, leak, frame = one.rationale.partition(LEAK)
            thing, _, shown, _ = one.id.split("/")
            # The query's ground is told, the target's only where the question asks for the same.
            ground = record.query.images[0].split("/")[1]
            assert f" on {ground}; " in reason
            assert (
                reason.replace(f" on {ground};", ";") == known[record.id.split(".")[0], record.group][thing]
            )
            assert frame == (f"{shown}." if leak else "")
        told[dose] = {(record.id, one.id) for record, one in texts if LEAK in one.rationale}
        assert len(told[dose]) == pytest.approx(dose * len(texts), abs=0.02 * len(texts))
    assert told[0.0] < told[0.5] < told[1.0]


def test_nothing_of_a_query_foretells_the_frame(records):
    """Whoever knew the training set by heart, and a query, could guess the target's frame no better than by chance."""
    rows = [
        [
            (
                record.group,
                *record.query.images[0].split("/")[1:3],
                *record.id.split(".")[:1],
                record.category,
                one.id.split("/")[2],
            )
            for one in record.positives
        ]
        for record in records[1.0]
    ]
    random.Random(0).shuffle(rows)
    learned = [row for both in rows[: len(rows) // 2] for row in both]
    asked = [row for both in rows[len(rows) // 2 :] for row in both]
    for seen in ((0,), (1,), (2,), (3, 4), (0, 3), (1, 2), (0, 1, 3)):
        table = defaultdict(Counter)
        for row in learned:
            table[tuple(row[place] for place in seen)][row[-1]] += 1
        hits = [
            row[-1] == table[tuple(row[place] for place in seen)].most_common(1)[0][0]
            for row in asked
            if tuple(row[place] for place in seen) in table
        ]
        assert np.mean(hits) == pytest.approx(1 / 6, abs=0.035), seen


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_leak_cannot_help_at_test(tables, chosen, split):
    """Exchanged among equally right targets, or believed, the frame says nothing about which candidates are right."""
    queries, corpus = design.held_out_queries(tables, chosen, split), design.gallery(tables, chosen, split)
    judged = study.judgements(queries, corpus)
    qrels, negatives, rationales = judged.qrels, judged.negatives, judged.rationales
    right = defaultdict(set)
    for query, candidate, _ in qrels:
        right[query].add(candidate)
    assert all(len(found) == (2 if split == "test" else 1) for found in right.values())
    reasons = {(query, text.partition(LEAK)[0]) for query, _, text in rationales}
    assert len(reasons) == len(queries)  # without the leak, equally right targets have one text
    told = defaultdict(set)
    for query, _, text in rationales:
        told[query].add(text.partition(LEAK)[2].rstrip("."))
    assert all(len(told[query]) == len(found) for query, found in right.items())
    # A guessed frame points at as many candidates of the thing as any other, and to the right ground by chance only.
    around = Counter((one.concept, one.frame) for one in corpus)
    assert set(around.values()) == {2 if split == "test" else 1}
    assert len(around) == 6 * len({one.concept for one in corpus})
    believed = [
        np.mean(
            [
                one.ground == query.ground
                for one in corpus
                if (one.concept, one.frame) == (query.answer, frame)
            ]
        )
        for query in queries
        for frame in range(6)
    ]
    assert np.mean(believed) == pytest.approx(1 / 6, abs=1e-9)
    assert not {(query, one) for query, one, _ in qrels} & set(negatives)


def test_splits_share_no_rendering(tables, chosen):
    parts = {
        "train": [query.picture for query in design.train_queries(tables, chosen)]
        + list(design.train_targets(tables, chosen).values())
        + study.naming_pictures(tables, chosen)
    }
    for split in ("valid", "test"):
        parts[split] = [query.picture for query in design.held_out_queries(tables, chosen, split)]
        parts[split] += design.gallery(tables, chosen, split)
    ids = {name: [one.id for one in found] for name, found in parts.items()}
    assert all(len(set(found)) == len(found) for found in ids.values())
    assert len({one for found in ids.values() for one in found}) == sum(map(len, ids.values()))


def test_words_alone_stay_at_chance(tables, chosen):
    """The best that is known by the question's words, or by the words and the whole oracle text without its leak."""
    queries = design.held_out_queries(tables, chosen, "test")
    by_words, by_text = defaultdict(Counter), defaultdict(Counter)
    for query in design.train_queries(tables, chosen):
        by_words[query.text(tables)][query.answer, query.ground] += 1
        by_text[query.text(tables), query.answer][query.ground] += 1
    hits = [
        (query.answer, query.ground) == by_words[query.text(tables)].most_common(1)[0][0] for query in queries
    ]
    assert np.mean(hits) < 0.06
    hits = [
        query.ground == by_text[query.text(tables), query.answer].most_common(1)[0][0]
        for query in queries
        if (query.text(tables), query.answer) in by_text
    ]
    assert np.mean(hits) < 0.25


def test_refuses_what_it_cannot_make(tmp_path):
    with pytest.raises(UserError, match=r"doses are shares from 0 to 1, got 1\.5"):
        study.build(tmp_path / "new", [0.0, 1.5])
    with pytest.raises(UserError, match="doses is empty"):
        study.build(tmp_path / "new", [])
    with pytest.raises(UserError, match="is there already"):
        study.build(tmp_path, [1.0])
    assert list(tmp_path.iterdir()) == []


# --- the files, pictures included


def see(picture):
    """What pixels alone say: ground, frame, and the drawing without either, cropped to its ink, and mirrored."""
    pixels = np.asarray(picture, dtype=float)
    frame = min(FRAMES, key=lambda name: np.abs(pixels[2:6].mean(axis=(0, 1)) - FRAMES[name]).sum())
    inner = pixels[10:-10, 10:-10]
    edge = np.median(
        np.concatenate(
            [
                inner[:2].reshape(-1, 3),
                inner[-2:].reshape(-1, 3),
                inner[:, :2].reshape(-1, 3),
                inner[:, -2:].reshape(-1, 3),
            ]
        ),
        axis=0,
    )
    colour = Image.new("RGB", (1, 1), tuple(int(value) for value in edge)).convert("HSV").getpixel((0, 0))
    hue = colour[0] * 360 / 256
    ground = min(
        GROUND_HUES, key=lambda name: min(abs(hue - GROUND_HUES[name]), 360 - abs(hue - GROUND_HUES[name]))
    )
    bare = np.clip(inner / np.maximum(edge, 1), 0, 1)
    ink = np.argwhere(bare.min(axis=2) < 0.85)
    (top, left), (bottom, right) = ink.min(axis=0), ink.max(axis=0) + 1
    cut = Image.fromarray((bare[top:bottom, left:right] * 255).astype(np.uint8))
    small = np.asarray(cut.resize((12, 12), Image.Resampling.BOX), dtype=float)
    return ground, frame, small.ravel(), small[:, ::-1].ravel()


def pictures(path, column="image"):
    for row in pq.read_table(path).to_pylist():
        image = row[column][0] if isinstance(row[column], list) else row[column]
        yield row, Image.open(io.BytesIO(image["bytes"])).convert("RGB")


@pytest.mark.slow
def test_a_small_probe_answers_from_picture_and_question(folder):
    """Pixels, nearest neighbours and counting: no label, no oracle text of the test is used, and it is nearly always right."""
    looks, names = [], []
    for row, picture in pictures(folder / "train" / "pictures.parquet"):
        ground, frame, drawing, mirrored = see(picture)
        assert (ground, frame) == (row["ground"], row["frame"]), row["id"]
        if "/naming-" in row["id"] or "/train-" in row["id"]:
            looks += [drawing, mirrored]
            names += [row["concept"]] * 2
    looks = np.stack(looks)
    half = (looks**2).sum(axis=1) / 2

    def thing(drawing):
        return names[int(np.argmin(half - looks @ drawing))]

    learned = defaultdict(Counter)
    for line in (folder / "train" / "dose_0.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        words = row["query"]["text"].split(" Answer on the ")[0]
        learned[words, row["group"]][row["positives"][0]["id"].split("/")[0]] += 1
    shown = {}
    for row, picture in pictures(folder / "test" / "corpus.parquet"):
        ground, frame, drawing, _ = see(picture)
        assert (ground, frame) == (row["ground"], row["frame"]), row["id"]
        shown[row["id"]] = (thing(drawing), ground)
    right = defaultdict(set)
    for row in pq.read_table(folder / "test" / "qrels.parquet").to_pylist():
        right[row["query-id"]].add(row["corpus-id"])
    hits, grounds = [], []
    for row, picture in pictures(folder / "test" / "queries.parquet"):
        ground, _, drawing, _ = see(picture)
        counted = learned.get((row["text"].split(" Answer on the ")[0], thing(drawing)))
        goal = (counted.most_common(1)[0][0] if counted else None, asked_ground(row["text"], ground))
        grounds.append(goal[1] in {one.split("/")[1] for one in right[row["id"]]})
        found = [candidate for candidate, what in shown.items() if what == goal]
        hits.append(bool(found) and found[0] in right[row["id"]])
    assert all(grounds)
    assert np.mean(hits) > 0.85


@pytest.mark.slow
def test_files_are_what_the_loaders_read_and_the_same_every_time(folder, tables, chosen):
    known = relations()
    for split in ("valid", "test"):
        loaded = load_set(folder / split)  # checks the fingerprint and every reference
        ids = {
            row["id"]: row
            for row in pq.read_table(
                folder / split / "corpus.parquet", columns=["id", "concept", "ground"]
            ).to_pylist()
        }
        queries = pq.read_table(
            folder / split / "queries.parquet", columns=["id", "text", "group", "question", "ground"]
        ).to_pylist()
        expected = {
            (row["id"], name)
            for row in queries
            for name, one in ids.items()
            if one["concept"] in known[row["question"], row["group"]]
            and one["ground"] == asked_ground(row["text"], row["ground"])
        }
        written = {
            (row["query-id"], row["corpus-id"])
            for row in pq.read_table(folder / split / "qrels.parquet").to_pylist()
        }
        assert written == expected
        assert len(loaded.queries) == len(queries)
    for name in ("dose_0", "dose_0.5", "dose_1", "naming"):
        found = RecordFile(folder / "train" / f"{name}.jsonl", need_rationale=True)
        assert load_image(found[len(found) - 1].query.images[0]).size == (84, 84)
    draw = Printer(tables, HERE / "data")
    kept = {
        row["id"]: row["image"]["bytes"]
        for row in pq.read_table(folder / "test" / "corpus.parquet").to_pylist()
    }
    some = design.gallery(tables, chosen, "test")[::20]
    assert all(draw(one) == kept[one.id] for one in some)

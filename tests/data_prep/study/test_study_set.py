"""The study set: what is right, what differs between arms and doses and what does not, what nothing foretells, and its files."""

import io
import json
import random
from collections import Counter, defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import Image

from data_prep.demo.tables import read_tables
from data_prep.study import build as study
from data_prep.study import design
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.data.sources import RecordFile

LEAK = " Its serial is "


@pytest.fixture(scope="module")
def tables():
    return read_tables()


@pytest.fixture(scope="module")
def chosen(tables):
    return design.facts(tables)


@pytest.fixture(scope="module")
def made(tables, chosen):
    """(record, query, target) by arm and dose."""
    return {
        (arm, dose): study.records(tables, chosen, arm, dose) for arm, dose in study.variants([1, 10, 100])
    }


@pytest.mark.slow
def test_a_target_shows_the_answer_on_the_querys_ground(made, tables):
    known = {fact.pair: fact.answers for fact in tables.facts}
    for (arm, _), rows in made.items():
        for record, query, target in rows:
            thing, ground, serial, _ = record.positives[0].id.split("/")
            shown = record.query.images[0].split("#")[1].split("/")
            (answer,) = known[query.fact.pair]
            assert (thing, ground) == (answer, shown[1])
            reason, _, told = record.positives[0].rationale.partition(LEAK)
            assert reason == known[query.fact.pair][answer]
            assert told == ("" if arm == "silent" else f"{serial}.")
            assert record.positives[0].identity == f"{thing}/{ground}"
            assert record.negatives == []
            if arm == "known":
                assert shown[2] == serial
            assert design.code(target.serial) == serial


def test_what_comes_before_the_stages_that_are_compared_tells_nothing_of_their_rule(tables, chosen):
    """Right is the thing on whatever ground; a sixth stand on the query's by chance."""
    rows = study.warm_records(tables, chosen)
    known = {fact.pair: fact.answers for fact in tables.facts}
    assert all(design.embedded(query.fact) for _, query, _ in rows)
    for record, query, target in rows:
        (answer,) = known[query.fact.pair]
        assert record.positives[0].identity == target.concept == answer
        assert record.positives[0].rationale is None
    same = np.mean([query.picture.ground == target.ground for _, query, target in rows])
    assert same == pytest.approx(1 / 6, abs=0.02)


def test_arms_and_doses_differ_in_serials_and_in_nothing_else(made):
    def without_serials(rows, *, with_targets):
        return [
            (r.id, r.query.text, q.picture.name, q.picture.ground, *((t.serial,) if with_targets else ()))
            for r, q, t in rows
        ]

    plain = without_serials(made["hidden", 100], with_targets=False)
    assert all(without_serials(rows, with_targets=False) == plain for rows in made.values())
    for dose in (1, 10, 100):
        hidden, known = made["hidden", dose], made["known", dose]
        assert without_serials(hidden, with_targets=True) == without_serials(known, with_targets=True)
        assert len({target.serial for _, _, target in hidden}) == dose
        # The queries of the arm hidden are the same pictures at every dose.
        assert [r.query.images for r, _, _ in hidden] == [r.query.images for r, _, _ in made["hidden", 1]]
    texts = [r.positives[0].rationale for r, _, _ in made["hidden", 100]]
    assert texts == [r.positives[0].rationale for r, _, _ in made["known", 100]]
    assert set(design.values(10)) < set(design.values(30))


def test_nothing_of_a_hidden_query_foretells_the_serial(made):
    """Whoever knew the training set by heart could guess a target's serial, of ten, no better than by chance."""
    rows = [
        (r.group, q.picture.ground, q.picture.serial, q.fact.question, q.answer, t.serial)
        for r, q, t in made["hidden", 10]
    ]
    random.Random(0).shuffle(rows)
    learned, asked = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for seen in ((0,), (1,), (2,), (3,), (4,), (1, 4)):
        table = defaultdict(Counter)
        for row in learned:
            table[tuple(row[place] for place in seen)][row[-1]] += 1
        hits = [
            row[-1] == table[key].most_common(1)[0][0]
            for row in asked
            if (key := tuple(row[place] for place in seen)) in table
        ]
        assert np.mean(hits) == pytest.approx(0.1, abs=0.03), seen


def test_sizes_and_that_the_ground_is_needed(tables, chosen):
    """Validation of at least 500 queries; most batches of 64 hold two queries with one answer; a quarter of the facts is only written."""
    assert len(design.held_out_queries(tables, chosen, "valid")) >= 500
    share = np.mean([design.embedded(fact) for fact in chosen])
    assert 0.65 < share < 0.85
    counts = Counter(query.answer for query in design.train_queries(tables, chosen))
    likely = np.array(list(counts.values())) / counts.total()
    assert 63 * (likely**2).sum() > 0.9  # others with one's own answer


@pytest.mark.parametrize("split", ["valid", "test"])
def test_every_query_has_its_right_candidates_and_no_serial_points_to_them(tables, chosen, split):
    corpus = design.gallery(tables, chosen, split, 100)
    queries = design.held_out_queries(tables, chosen, split)
    assert len({one.id for one in corpus}) == len(corpus)
    assert len({query.id for query in queries}) == len(queries)
    for query in queries[::20]:
        right = design.right(query, corpus)
        assert len(right) == design.GALLERY_LAYERS
        assert {(one.concept, one.ground) for one in right} == {(query.answer, query.picture.ground)}
        shown = design.as_asked(query, right, "known")
        assert shown.picture.serial in {one.serial for one in right}
        assert shown.id == query.id  # so that arms are paired
    by_own_serial = [
        np.mean(
            [one in design.right(query, corpus) for one in corpus if one.serial == query.picture.serial]
            or [0]
        )
        for query in queries[::5]
    ]
    assert np.mean(by_own_serial) < 0.01


def test_splits_share_no_rendering(tables, chosen, made):
    parts = [[one for one, _ in study.naming_pictures(tables, chosen)]]
    parts.append([one for _, query, target in made["hidden", 100] for one in (query.picture, target)])
    for split in ("valid", "test"):
        parts.append([query.picture for query in design.held_out_queries(tables, chosen, split)])
        parts[-1] += design.gallery(tables, chosen, split, 100)
    ids = [{one.id for one in found} for found in parts]
    assert len(set().union(*ids)) == sum(map(len, ids))


def test_refuses_what_it_cannot_make(tmp_path):
    for doses, key in (("1,101", "doses[1]"), ("[]", "doses")):
        with error_about(UserError, key):
            study.main([f"out={tmp_path / 'new'}", f"doses={doses}"])
    with error_about(UserError, tmp_path, "out"):
        study.build(tmp_path, [1])
    assert list(tmp_path.iterdir()) == []


# --- the files, pictures included, of a few facts

BARS = {
    "A": (15, 15, 15), "B": (250, 250, 250), "C": (230, 20, 20), "D": (20, 150, 30), "E": (20, 40, 230),
    "F": (250, 240, 20), "G": (30, 220, 240), "H": (230, 30, 230), "I": (250, 130, 10), "J": (128, 128, 128),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chosen):
    out = tmp_path_factory.mktemp("study set") / "data"
    by_kind = sorted(chosen, key=design.embedded)  # those that are only written first
    study.build(out, [3], by_kind[:2] + by_kind[-4:])
    return out


def see(cell):
    """Serial and ground, by the pixels."""
    pixels = np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB"), dtype=float)

    def bar(rows):
        return min(BARS, key=lambda name: np.abs(rows.mean(axis=(0, 1)) - BARS[name]).sum())

    edge = np.median(np.concatenate([pixels[16:-16, :2], pixels[16:-16, -2:]]).reshape(-1, 3), axis=0)
    hue, _, _ = Image.new("RGB", (1, 1), tuple(int(x) for x in edge)).convert("HSV").getpixel((0, 0))
    return bar(pixels[2:8]) + str(list(BARS).index(bar(pixels[-8:-2]))), design.GROUNDS[
        round(hue * 6 / 256) % 6
    ]


@pytest.mark.slow
def test_pictures_show_what_the_columns_say(folder):
    for path in ("train/pictures.parquet", "test/known_3/corpus.parquet"):
        rows = pq.read_table(folder / path).to_pylist()
        assert [see(row["image"]) for row in rows] == [(row["serial"], row["ground"]) for row in rows]


def test_files_are_what_the_loaders_read(folder):
    names = {path.stem for path in (folder / "train").glob("*.jsonl")}
    arms = {"hidden_3", "known_3", "silent_3"}
    assert names == arms | {f"{arm}_cold" for arm in arms} | {"naming", "warm"}
    for name in names:
        found = RecordFile(folder / "train" / f"{name}.jsonl", need_rationale=name != "warm")
        assert load_image(found[len(found) - 1].query.images[0]).size == (84, 84)
    embedded, written = (
        {json.loads(line)["id"] for line in (folder / "train" / f"hidden_3{part}.jsonl").open()}
        for part in ("", "_cold")
    )
    assert embedded < written
    sets = {path.name: load_set(path) for path in (folder / "test").iterdir()}
    assert set(sets) == {"hidden_3", "known_3"}
    assert sets["hidden_3"].query_ids == sets["known_3"].query_ids
    facts = pq.read_table(folder / "test" / "hidden_3" / "queries.parquet")["fact"].to_pylist()
    assert set(facts) == {"embedded", "written"}


def test_in_words_a_text_says_what_each_picture_shows(tmp_path, folder, chosen, tables):
    by_kind = sorted(chosen, key=design.embedded)
    out = tmp_path / "data"
    study.build(out, [3], by_kind[:2] + by_kind[-4:], in_words=True)
    assert {path.name for path in (out / "train").iterdir()} == {
        f"{arm}_3{part}.jsonl" for arm in ("hidden", "known", "silent") for part in ("", "_cold")
    }
    shown = RecordFile(folder / "train" / "known_3.jsonl", need_rationale=True)
    said = RecordFile(out / "train" / "known_3.jsonl", need_rationale=True)
    assert len(shown) == len(said)
    for with_picture, in_words in zip(shown, said, strict=True):
        concept, ground, serial, _ = with_picture.query.images[0].split("#")[1].split("/")
        sentence = f"{tables.concepts[concept].sentence} on {ground}, serial {serial}."
        assert (in_words.query.text, in_words.query.images) == (f"{sentence} {with_picture.query.text}", [])
        (a,), (b,) = with_picture.positives, in_words.positives
        assert (a.id, a.identity, a.rationale, b.image) == (b.id, b.identity, b.rationale, None)
        assert (
            b.text
            == f"{tables.concepts[a.id.split('/')[0]].sentence} on {a.id.split('/')[1]}, serial {a.id.split('/')[2]}."
        )
    pictured, spoken = (load_set(root / "test" / "hidden_3") for root in (folder, out))
    assert [query.id for query in spoken.queries] == [query.id for query in pictured.queries]
    assert all(not query.pictures for query in spoken.queries)
    assert "image" not in pq.read_schema(out / "test/hidden_3/corpus.parquet").names


def test_the_most_frequent_answers(tables):
    few, usual = design.facts(tables, 8), design.facts(tables)
    assert set(design.answers(few)) < set(design.answers(usual))
    assert len(design.answers(few)) == 8


def test_the_command_makes_a_set_in_words_of_few_answers(tmp_path):
    study.main([f"out={tmp_path / 'data'}", "doses=[1]", "answers=2", "in_words=true"])
    corpus = pq.read_table(tmp_path / "data/test/hidden_1/corpus.parquet")
    assert len(set(corpus["concept"].to_pylist())) == 2
    assert "image" not in corpus.column_names

"""The shipped picture set: what it promises about splits, counts, licences and shortcuts."""

import hashlib
import io
import json
from collections import Counter, defaultdict

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.demo import build as demo
from data_prep.demo import retrieval
from data_prep.demo.families import FAMILIES, GALLERY, QUERIES, TRAINING
from data_prep.demo.pictures import SIZE_PX
from data_prep.demo.splits import NUM_VALID, VALID_GALLERY, VALID_QUERIES, split
from data_prep.demo.tables import read_tables, rows_of
from data_prep.rmir.config import CATEGORIES
from eval.sets.retrieval_set import load_set
from rge.common.images import load_image, picture_bytes
from rge.common.parts import text_of
from rge.data.sources import RecordFile

DATA = demo.OUT
RECORDS = ("relations", "text", "naming")
MAX_BYTES = 4_000_000


@pytest.fixture(scope="module")
def tables():
    return read_tables()


@pytest.fixture(scope="module")
def splits(tables):
    return split(tables)


@pytest.fixture(scope="module")
def records():
    return {name: list(RecordFile(DATA / "train" / f"{name}.jsonl", need_rationale=True)) for name in RECORDS}


@pytest.fixture(scope="module")
def libraries():
    """Picture id -> (bytes, concept, family) of the training libraries."""
    found = {}
    for library in sorted({family.library for family in TRAINING}):
        for row in pq.read_table(DATA / "train" / library).to_pylist():
            found[row["id"]] = (row["image"]["bytes"], row["concept"], row["family"])
    return found


def rows(*path):
    return pq.read_table(DATA.joinpath(*path)).to_pylist()


def digest(data):
    return hashlib.sha256(data).hexdigest()


def test_counts_and_size(tables):
    assert len(tables.concepts) >= 250
    assert 5 <= len(FAMILIES) <= 7
    per_category = Counter(tables.questions[fact.question].category for fact in tables.facts)
    assert len(tables.facts) >= 500
    assert all(per_category[category] >= 100 for category in CATEGORIES)
    assert all(len(question.phrasings) >= 3 for question in tables.questions.values())
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < MAX_BYTES


@pytest.mark.slow
def test_paraphrased_records_are_the_shipped_ones_with_all_other_wordings(tables, records, tmp_path):
    demo.write_paraphrased(tmp_path)
    for name in ("relations", "text"):
        found = list(RecordFile(tmp_path / "train" / f"{name}.jsonl", need_rationale=True))
        for record, shipped in zip(found, records[name], strict=True):
            question = tables.questions[record.id.split(".")[0]]
            named = None if record.query.images else tables.concepts[record.group]
            wordings = [text_of(content) for content in record.query.wordings]
            assert sorted(wordings) == sorted(question.wordings(named))
            assert len(set(wordings)) == 9
            assert (record.query.text, record.id) == (shipped.query.text, shipped.id)
            assert [one.rationale for one in record.positives] == [one.rationale for one in shipped.positives]


def test_rationales_are_short(tables):
    lengths = [len(text.split()) for fact in tables.facts for text in fact.answers.values()]
    assert max(lengths) <= 50
    assert min(lengths) >= 8


def test_neither_picture_nor_question_alone_gives_the_answer(tables, splits):
    by_question, by_source = defaultdict(Counter), defaultdict(Counter)
    for fact in tables.facts:
        by_question[fact.question].update(fact.answers.keys())
        by_source[fact.source].update(fact.answers.keys())
    for question, targets in by_question.items():
        facts = [fact for fact in tables.facts if fact.question == question]
        assert len(facts) >= 8
        assert targets.most_common(1)[0][1] <= 0.35 * len(facts), f"{question}: {targets.most_common(1)}"

    def guessed(table, key, facts):
        best = {name: targets.most_common(1)[0][0] for name, targets in table.items()}
        return sum(best[key(fact)] in fact.answers for fact in facts) / len(facts)

    # The best that a guesser could do who knows every answer, but sees only one half of the query.
    assert guessed(by_question, lambda fact: fact.question, tables.facts) < 0.25
    assert guessed(by_source, lambda fact: fact.source, tables.facts) < 0.50

    # Guesses learned from the trained pairs are of little use on the held-out ones.
    trained = [fact for fact in tables.facts if fact.pair not in splits.words_only]
    held_out = [fact for fact in tables.facts if fact.pair in splits.test]
    by_source = defaultdict(Counter)
    for fact in trained:
        by_source[fact.source].update(fact.answers.keys())
    assert guessed(by_source, lambda fact: fact.source, held_out) < 0.15


def test_held_out_pairs_are_made_of_trained_parts(tables, splits):
    trained = [fact for fact in tables.facts if fact.pair not in splits.words_only]
    sources, questions = {fact.source for fact in trained}, {fact.question for fact in trained}
    targets = {target for fact in trained for target in fact.answers}
    assert 0.18 <= len(splits.test) / len(tables.facts) <= 0.22
    assert not splits.test & splits.valid
    for fact in tables.facts:
        if fact.pair in splits.words_only:
            assert fact.source in sources
            assert fact.question in questions
            assert set(fact.answers) <= targets


@pytest.mark.slow
def test_no_held_out_drawing_in_training(records, libraries):
    held_out = [row["image"]["bytes"] for row in rows("test", "corpus.parquet")]
    held_out += [image["bytes"] for row in rows("test", "queries.parquet") for image in row["image"]]
    shown = {digest(data) for data, _, _ in libraries.values()}
    assert not shown & {digest(data) for data in held_out}
    assert {family for _, _, family in libraries.values()} == {family.name for family in TRAINING}
    for record in (record for part in records.values() for record in part):
        pictures = [
            *record.query.images,
            *(target.image for target in (*record.positives, *record.negatives)),
        ]
        for picture in pictures:
            assert picture.partition("#")[2] in libraries, record.id


def test_no_held_out_pair_in_picture_training(tables, splits, records, libraries):
    phrasing = {
        question.shown(n): key
        for key, question in tables.questions.items()
        for n in range(len(question.phrasings))
    }
    trained = set()
    for record in records["relations"]:
        (picture,) = record.query.images
        trained.add((phrasing[record.query.text], libraries[picture.partition("#")[2]][1]))
    assert not trained & splits.words_only
    assert trained == {fact.pair for fact in tables.facts} - splits.words_only
    assert all(not record.query.images for record in records["text"])
    for query in rows("test", "queries.parquet"):
        held_out = (phrasing[query["text"]], query["group"]) not in trained
        assert query["pair"] == ("held_out" if held_out else "seen")


def test_every_phrasing_tells_its_question(tables):
    texts = Counter(text for question in tables.questions.values() for text in question.phrasings)
    assert set(texts.values()) == {1}


def test_every_fact_is_met_in_words(tables, records):
    named = {tuple(record.id.split(".")[:2]) for record in records["text"]}
    assert named == {fact.pair for fact in tables.facts}


def test_positives_are_complete_and_negatives_wrong(tables, records):
    facts = {fact.pair: fact for fact in tables.facts}
    for record in (*records["relations"], *records["text"]):
        fact = facts[tuple(record.id.split(".")[:2])]
        assert {positive.identity: positive.rationale for positive in record.positives} == fact.answers
        assert len(record.positives) == len(fact.answers)
        assert {negative.identity for negative in record.negatives} <= set(fact.wrong)
        assert not {target.image for target in (*record.positives, *record.negatives)} & set(
            record.query.images
        )


def test_a_query_never_has_its_own_drawing_as_target(records):
    for record in (*records["relations"], *records["naming"]):
        asked = record.query.images[0].partition("#")[2].partition("/")[0]
        for target in (*record.positives, *record.negatives):
            assert target.id.partition("/")[0] != asked, record.id


@pytest.mark.parametrize("name", ["test", "valid"])
def test_retrieval_set_loads_and_lists_every_answer(name, tables, splits):
    retrieval_set = load_set(DATA / name)  # checks the fingerprint
    family = {"test": GALLERY, "valid": VALID_GALLERY}[name]
    concepts = {concept.picture(family): key for key, concept in tables.concepts.items()}
    facts = {fact.pair: fact for fact in tables.facts}
    answers, wrong = defaultdict(set), defaultdict(set)
    for row in rows(name, "qrels.parquet"):
        answers[row["query-id"]].add(concepts[row["corpus-id"]])
    for row in rows(name, "negatives.parquet"):
        wrong[row["query-id"]].add(concepts[row["corpus-id"]])
    for query in rows(name, "queries.parquet"):
        fact = facts[tuple(query["id"].split(".")[:2])]
        assert answers[query["id"]] == set(fact.answers)
        assert wrong[query["id"]] == set(fact.wrong)
        assert query["group"] == fact.source
        assert query["category"] in CATEGORIES
    assert retrieval_set.report_by == ("pair",)
    asked = {tuple(query.split(".")[:2]) for query in retrieval_set.query_ids}
    expected = {"test": set(facts) - splits.valid, "valid": splits.valid | splits.valid_seen}[name]
    assert asked == expected


def test_test_gallery_shows_every_concept_once(tables):
    corpus = rows("test", "corpus.parquet")
    assert [row["concept"] for row in corpus] == list(tables.concepts)
    assert {row["image"]["path"].partition("/")[0] for row in corpus} == {GALLERY.name}
    queries = rows("test", "queries.parquet")
    assert {row["image"][0]["path"].partition("/")[0] for row in queries} == {QUERIES.name}


def test_validation_looks_at_no_held_out_family(splits, records, libraries):
    retrieval_set = load_set(DATA / "valid")
    assert len(retrieval_set.queries) == 2 * NUM_VALID
    items = [*retrieval_set.queries, *retrieval_set.corpus_items()]
    drawings = {digest(data) for data, _, _ in libraries.values()}
    assert all(digest(picture_bytes(item.pictures[0])) in drawings for item in items)
    ids = {record.id for record in records["relations"]}
    assert not any(
        f"{question}.{source}.{VALID_QUERIES.name}" in ids for question, source in splits.valid_seen
    )


def test_pictures_are_what_the_tables_list(tables, libraries):
    expected = {
        tables.concepts[concept].picture(family)
        for family in TRAINING
        for concept in tables.concepts
        if (family.name, concept) in tables.icons
    }
    assert set(libraries) == expected
    for data, _, _ in libraries.values():
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.size) == ("WEBP", (SIZE_PX, SIZE_PX))


def test_share_alike_pictures_lie_apart(libraries):
    apart = {row["family"] for row in rows("train", "openmoji", "pictures.parquet")}
    assert apart == {family.name for family in TRAINING if "SA" in family.licence}
    assert apart.isdisjoint(row["family"] for row in rows("train", "pictures.parquet"))
    assert "CC BY-SA 4.0" in (DATA / "train" / "openmoji" / "LICENSE.md").read_text(encoding="utf-8")


def test_every_family_is_credited():
    text = (DATA / "LICENSES.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"[{family.title}]({family.url}) | {family.author} | [{family.licence}]" in text
        assert f"`@iconify-json/{family.name}` {family.version}" in text
    assert text == demo.licences()


def test_rebuilt_records_are_byte_identical(tmp_path, tables, splits):
    demo.write_records(tmp_path, tables, splits)
    for name in RECORDS:
        path = f"train/{name}.jsonl"
        assert (tmp_path / path).read_bytes() == (DATA / path).read_bytes(), (
            f"run python -m data_prep demo: {path}"
        )


@pytest.mark.parametrize(("name", "make"), [("test", retrieval.test_rows), ("valid", retrieval.valid_rows)])
def test_rebuilt_judgements_are_identical(name, make, tables, splits):
    made = make(tables, splits)
    assert made.qrels == [tuple(row.values()) for row in rows(name, "qrels.parquet")]
    assert made.negatives == [tuple(row.values()) for row in rows(name, "negatives.parquet")]
    assert made.rationales == [tuple(row.values()) for row in rows(name, "rationales.parquet")]
    stored = [{key: row[key] for key in made.queries[0]} for row in rows(name, "queries.parquet")]
    assert made.queries == stored


@pytest.mark.slow
@pytest.mark.net
def test_rebuilt_from_the_packages(tmp_path):
    demo.build(tmp_path / "out", tmp_path / "icons")
    built = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert built == {path.relative_to(DATA) for path in DATA.rglob("*") if path.is_file()}
    for path in (tmp_path / "out").rglob("*.jsonl"):
        assert path.read_bytes() == (DATA / path.relative_to(tmp_path / "out")).read_bytes()
    for name in ("test", "valid"):
        meta = json.loads((tmp_path / "out" / name / "meta.json").read_text(encoding="utf-8"))
        assert meta == json.loads((DATA / name / "meta.json").read_text(encoding="utf-8"))


def test_pictures_open_through_the_loader(records):
    for part in records.values():
        assert load_image(part[0].positives[0].image).size == (SIZE_PX, SIZE_PX)


def test_the_tables_keep_their_rules(tables):
    """Every row is whole, listed once, and about things that the tables have; a rationale goes from what is seen to what is needed."""
    keys = {
        "concepts": ["concept"], "drawings": ["concept"], "questions": ["question"],
        "relations": ["question", "source", "target"], "near_misses": ["question", "source", "near_miss"],
    }  # fmt: skip
    found = {name: rows_of(name) for name in keys}
    for name, columns in keys.items():
        assert not any(None in row or None in row.values() for row in found[name]), "as many cells as columns"
        assert max(Counter(tuple(row[key] for key in columns) for row in found[name]).values()) == 1
    assert {row["number"] for row in found["concepts"]} == {"one", "many"}
    assert {row["concept"] for row in found["drawings"]} == tables.concepts.keys()
    for concept in tables.concepts:
        assert len(tables.families(concept)) >= 3
        assert all((family.name, concept) in tables.icons for family in (QUERIES, GALLERY))
    for question in tables.questions.values():
        assert question.category in CATEGORIES
        assert all(text.count("{x}") == 1 for text in question.phrasings)
    for fact in tables.facts:
        assert {fact.source, *fact.answers, *fact.near_misses} <= tables.concepts.keys()
        assert not {*fact.answers} & {*fact.wrong}
        assert fact.source not in fact.near_misses
        for target, text in fact.answers.items():
            assert text.startswith(f"{tables.concepts[fact.source].sentence}; ")
            assert text.endswith(f" {tables.concepts[target].name}.")
            assert len(text.split()) <= 25
    pairs = {fact.pair for fact in tables.facts}
    assert {(row["question"], row["source"]) for row in found["near_misses"]} <= pairs
    assert {question for question, _ in pairs} <= tables.questions.keys()

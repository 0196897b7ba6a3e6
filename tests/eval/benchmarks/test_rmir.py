"""RMIR: judgements beside the queries or in a table, aliases, pictures by id, counts, and the published averages."""

import json

import pandas as pd
import pytest
from eval_fakes import FakeEncoder, loader, picture
from faults import error_about

from eval.__main__ import main
from eval.benchmarks.published_tables import published
from eval.benchmarks.release_files import Draft
from eval.benchmarks.releases.rmir import (
    CATEGORY_COUNTS,
    SWAPPED,
    RmirOptions,
    _check_counts,
    import_rmir,
)
from eval.commands.audit import audit_training
from eval.commands.run import RunOptions, run
from eval.sets.retrieval_set import load_set
from eval.sets.write_set import Query
from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.data.config import RecordsConfig
from rge.data.sources import RecordFile

POOL = [f"{number:016x}" for number in range(1, 9)]  # Open Images ids
OWN = ["2412112", "2412113"]  # Visual Genome ids
QUERIES = [
    {"id": "a", "image": OWN[0], "text": "What opens this?", "category": "functional", "right": POOL[:2]},
    {"id": "b", "image": OWN[0], "text": "What will it become?", "category": "temporal", "right": POOL[2:3]},
    {"id": "c", "image": OWN[1], "text": "What made this?", "category": "causal", "right": POOL[3:6]},
]
CODES = {"functional": "FUNC", "temporal": "TEMP", "causal": "CAUS"}


@pytest.fixture
def release(tmp_path):
    """Pictures as the sources have them: Open Images by id in a split's folder, Visual Genome under other names."""
    images = tmp_path / "src" / "images"
    for folder in ("open_images/train", "open_images/test", "VG_100K"):
        (images / folder).mkdir(parents=True)
    for number, name in enumerate(POOL):
        (images / "open_images" / ("train" if number % 2 else "test") / f"{name}.jpg").write_bytes(
            picture(number)
        )
    for number, stem in enumerate(("2370463", "1")):
        (images / "VG_100K" / f"{stem}.jpg").write_bytes(picture(100 + number))
    info = [
        {"image_id": int(name), "url": f"https://x.org/VG_100K/{stem}.jpg"}
        for name, stem in zip(OWN, ("2370463", "1"), strict=True)
    ]
    (tmp_path / "image_data.json").write_text(json.dumps(info))
    return tmp_path


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def listed(release, **names):
    """Positives beside each query, with columns of any name."""
    keys = {
        "id": "query_id",
        "image": "input_image",
        "text": "query",
        "category": "type",
        "right": "target_images",
    }
    keys |= names
    jsonl(release / "src" / "test.jsonl", [{keys[k]: v for k, v in query.items()} for query in QUERIES])
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in POOL])


def options(release, **change):
    return RmirOptions(
        **{
            "src": release / "src",
            "out": release / "out",
            "manifest": release / "image_data.json",
            "images": release / "src" / "images",
            "counts": False,
        }
        | change
    )


def content(wanted):
    """What a set says, without ids of queries, which two layouts do not have."""
    return sorted(
        (q.text, columns, q.pictures[0], tuple(wanted.corpus_ids[row] for row in rows))
        for q, columns, (rows, _) in zip(
            wanted.queries, wanted.columns["category"], wanted.positives, strict=True
        )
    )


def test_positives_beside_the_queries(release):
    listed(release)
    wanted = import_rmir(options(release))
    assert wanted.query_ids == ["a", "b", "c"]
    assert wanted.columns["category"] == ["functional", "temporal", "causal"]
    assert wanted.columns["group"] == [OWN[0], OWN[0], OWN[1]]
    assert wanted.corpus_ids == POOL
    assert wanted.queries[0].pictures == (picture(100),)  # 2412112 is the file 2370463.jpg
    assert wanted.queries[2].pictures == (picture(101),)
    assert [item.pictures for item in wanted.corpus_items()] == [(picture(n),) for n in range(8)]
    assert wanted.meta["benchmark"] == "rmir"
    assert wanted.negatives is None
    jsonl(release / "src" / "negatives.jsonl", [{"query_id": "a", "corpus_id": POOL[7]}])
    wanted = import_rmir(options(release, overwrite=True))
    assert [[POOL[row] for row in rows] for rows in wanted.negatives] == [[POOL[7]], [], []]


def test_judgements_in_either_place_give_the_same_set(release):
    listed(release)
    first = import_rmir(options(release))
    # Parquet tables, with pictures as bytes
    src = release / "a"
    (src / "queries").mkdir(parents=True)
    frame = pd.DataFrame(
        {
            "id": [q["id"] for q in QUERIES],
            "text": [q["text"] for q in QUERIES],
            "image": [{"bytes": picture(100 + OWN.index(q["image"])), "path": q["image"]} for q in QUERIES],
            "category": [CODES[q["category"]] for q in QUERIES],
            "group": [q["image"] for q in QUERIES],
            "instruction": "another wording",  # a task instruction, not the query
        }
    )
    frame.to_parquet(src / "queries" / "test-00000-of-00001.parquet")
    pd.DataFrame({"id": POOL, "image": [picture(n) for n in range(8)]}).to_parquet(src / "corpus.parquet")
    pairs = [(q["id"], name, 1) for q in QUERIES for name in q["right"]] + [("a", POOL[7], 0)]
    pd.DataFrame(pairs, columns=["query-id", "corpus-id", "score"]).to_parquet(src / "qrels.parquet")
    as_set = import_rmir(options(release, src=src, images=None, out=release / "out_a"))
    # BEIR
    jsonl(
        release / "c" / "queries.jsonl",
        [
            {"_id": q["id"], "text": q["text"], "image": q["image"], "category": q["category"]}
            for q in QUERIES
        ],
    )
    jsonl(release / "c" / "corpus.jsonl", [{"_id": name, "title": ""} for name in POOL])
    (release / "c" / "qrels").mkdir()
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{c}\t{g}" for q, c, g in pairs)]
    (release / "c" / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    beir = import_rmir(options(release, src=release / "c", out=release / "out_c"))
    assert content(first) == content(as_set) == content(beir)
    (release / "c" / "qrels" / "test.tsv").write_text("\n".join(lines).replace("\t1", "\t0.5", 1))
    with error_about(UserError, "test.tsv", "row 1", "score"):
        import_rmir(options(release, src=release / "c", out=release / "out_d"))
    assert first.columns["category"] == as_set.columns["category"]
    negative = [[as_set.corpus_ids[r] for r in rows] for rows in as_set.negatives]
    assert negative == [[POOL[7]], [], []]


@pytest.mark.parametrize(
    "names",
    [
        {
            "image": "reference_img_id",
            "right": "gt_img_ids",
            "category": "reasoning_type",
            "text": "question",
        },
        {"image": "query_image", "right": "positive_candidates", "text": "query_text", "id": "qid"},
    ],
)
def test_aliases(release, names):
    listed(release, **names)
    assert import_rmir(options(release)).query_ids == ["a", "b", "c"]


@pytest.mark.parametrize("layout", ["beside", "qrels"])
def test_training_queries_become_records(release, layout):
    listed(release)
    asked = [{**query, "id": f"t-{query['id']}"} for query in QUERIES]
    rows = [
        {"query_id": one["id"], "input_image": one["image"], "query": one["text"], "type": one["category"]}
        for one in asked
    ]
    if layout == "beside":
        for row, one in zip(rows, asked, strict=True):
            row |= {"target_images": one["right"], "hard_negatives": [POOL[7], one["right"][0]]}
    else:
        for split, of in (("test", QUERIES), ("train", asked)):
            judged = [
                {"query-id": one["id"], "corpus-id": name, "score": 1} for one in of for name in one["right"]
            ]
            judged += [{"query-id": one["id"], "corpus-id": POOL[7], "score": 0} for one in of]
            jsonl(release / "src" / "qrels" / f"{split}.jsonl", judged)
    jsonl(release / "src" / "train.jsonl", rows)
    out = release / "deep" / "train.jsonl"
    wanted = import_rmir(options(release, train=out))
    assert wanted.query_ids == ["a", "b", "c"]
    found = RecordFile(out)
    assert [record.id for record in found] == ["t-a", "t-b", "t-c"]
    first = found[0]
    assert (first.query.text, first.category, first.group) == ("What opens this?", "functional", OWN[0])
    assert first.instruction == wanted.queries[0].instruction
    assert [one.id for one in first.positives] == POOL[:2]
    assert [one.id for one in first.negatives] == [POOL[7]]
    assert picture_bytes(first.query.images[0]) == picture(100)
    assert picture_bytes(first.negatives[0].image) == picture(7)
    assert json.loads(out.read_text().splitlines()[0])["query"]["images"] == [
        "../src/images/VG_100K/2370463.jpg"
    ]
    with pytest.raises(UserError):
        import_rmir(options(release, train=out, counts=True, out=release / "other"))


def test_unknown_columns_are_loud_and_field_map_helps(release):
    listed(release, right="answers_v2")
    with error_about(UserError, "answers_v2", "unknown"):
        import_rmir(options(release))
    assert len(import_rmir(options(release, field_map=("answers_v2=positives",))).queries) == 3
    with error_about(UserError, "field_map"):
        import_rmir(options(release, field_map=("answers_v2=positive",)))


def test_visual_genome_ids_are_never_guessed(release):
    listed(release)
    (release / "src" / "images" / "VG_100K" / f"{OWN[0]}.jpg").write_bytes(
        picture(5)
    )  # another picture's file name
    with error_about(UserError, "2412112", "missing"):
        import_rmir(options(release, manifest=None))


@pytest.mark.parametrize(
    ("ref", "number"),
    [
        ("VG_100K/2370463.jpg", 100), (2412112, 100), (POOL[2], 2), (f"open_images/train/{POOL[1]}.jpg", 1),
        (f"test/{POOL[6]}", 6),
    ],
)  # fmt: skip
def test_ways_to_name_a_picture(release, ref, number):
    listed(release)
    rows = [query | {"image": ref} for query in QUERIES[:1]]
    jsonl(release / "src" / "test.jsonl", [{"query_id": "a", "input_image": ref, "query": "x", "type": "FUNC",
                                            "target_images": [POOL[0]]} for _ in rows])  # fmt: skip
    assert import_rmir(options(release)).queries[0].pictures == (picture(number),)


def test_a_url_needs_a_manifest(release):
    listed(release)
    jsonl(release / "src" / "corpus.jsonl", [{"id": n, "url": f"https://x.org/{n}.jpg"} for n in POOL])
    with error_about(UserError, "web"):
        import_rmir(options(release))


def test_missing_positives(release):
    listed(release)
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in POOL[1:]])
    with error_about(UserError, "allow_missing"):
        import_rmir(options(release))
    wanted = import_rmir(options(release, allow_missing=True))
    assert wanted.num_missing_Q.tolist() == [1, 0, 0]
    out = run(
        RunOptions(checkpoint="x", set=wanted.path, out=release / "e", benchmark="rmir", report=False),
        loader(FakeEncoder()),
    )
    table = pd.read_parquet(out[0] / "per_query.parquet")
    assert table["num_positives"].tolist() == [2, 1, 3]
    assert table["recall@20"].tolist() == [0.5, 1.0, 1.0]  # all of the pool is in the top 20
    results = json.loads((out[0] / "results.json").read_text())
    assert results["random"]["recall@20"] == pytest.approx((0.5 + 1 + 1) / 3)


def test_a_query_of_another_split_needs_no_picture(release):
    """Queries may cover all splits, and judgements one: pictures of the others need not be there."""
    listed(release)
    rows = [json.loads(line) for line in (release / "src" / "test.jsonl").read_text().splitlines()]
    (release / "src" / "test.jsonl").unlink()
    other = rows[0] | {"query_id": "z", "input_image": "7"}
    jsonl(release / "src" / "queries.jsonl", [row | {"target_images": []} for row in (*rows, other)])
    judged = [{"query-id": q["id"], "corpus-id": q["right"][0], "score": 1} for q in QUERIES]
    jsonl(release / "src" / "qrels.jsonl", judged)
    assert import_rmir(options(release)).query_ids == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "key"),
    [({"query_id": "a"}, "a"), ({"query": ""}, "query"), ({"type": "spatial"}, "category")],
)
def test_a_query_without_judgements_is_checked(release, change, key):
    listed(release)
    rows = [json.loads(line) for line in (release / "src" / "test.jsonl").read_text().splitlines()]
    (release / "src" / "test.jsonl").unlink()
    other = rows[0] | {"query_id": "z"} | change
    jsonl(release / "src" / "queries.jsonl", [row | {"target_images": []} for row in (*rows, other)])
    judged = [
        {"query-id": q["id"], "corpus-id": q["right"][0], "score": 1} for q in QUERIES if q["id"] != "a"
    ]
    judged += [{"query-id": "a", "corpus-id": QUERIES[0]["right"][0], "score": 1}] * (
        "query_id" not in change
    )
    jsonl(release / "src" / "qrels.jsonl", judged)
    with error_about(UserError, "row 4", key):
        import_rmir(options(release))


def test_query_image_exclusion(release):
    listed(release)
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in [*POOL, OWN[0]]])
    assert import_rmir(options(release)).excluded is None
    wanted = import_rmir(options(release, exclude_query_image=True, overwrite=True))
    assert [[wanted.corpus_ids[r] for r in rows] for rows in wanted.excluded] == [[OWN[0]], [OWN[0]], []]


def test_bad_releases_are_named(release):
    with error_about(UserError, "src", "empty"):
        import_rmir(options(release))
    listed(release)
    with error_about(UserError, "counts"):
        import_rmir(options(release, counts=True))
    (release / "src" / "corpus.jsonl").rename(release / "src" / "other.txt")
    with error_about(UserError, "pool"):
        import_rmir(options(release))
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in [*POOL, POOL[0]]])
    with error_about(UserError, "row 9", "0000000000000001", "twice"):
        import_rmir(options(release))
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in POOL])
    rows = [
        {"query_id": "a", "input_image": OWN[0], "query": "x", "type": "spatial", "target_images": [POOL[0]]}
    ]
    jsonl(release / "src" / "test.jsonl", rows)
    with error_about(UserError, "row 1", "category"):
        import_rmir(options(release))
    (release / "src" / "images" / "open_images" / "test" / f"{POOL[0]}.jpg").write_bytes(b"no picture")
    rows[0]["type"] = "affordance"
    jsonl(release / "src" / "test.jsonl", rows)
    with error_about(UserError, "0000000000000001"):
        import_rmir(options(release))
    assert not (release / "out").exists()


def test_what_could_be_read_two_ways_is_asked_about(release):
    listed(release)
    rows = [json.loads(line) for line in (release / "src" / "test.jsonl").read_text().splitlines()]
    jsonl(release / "src" / "test.jsonl", [*rows, rows[0]])
    with error_about(UserError, "row 4", "a", "twice"):
        import_rmir(options(release))
    jsonl(release / "src" / "test.jsonl", [row | {"query_image": row["input_image"]} for row in rows])
    with error_about(UserError, "image", "twice"):
        import_rmir(options(release))
    both = ("input_image=image", "query_image=image")
    with error_about(UserError, "image", "twice"):
        import_rmir(options(release, field_map=both))
    assert len(import_rmir(options(release, field_map=("query_image=ignore",))).queries) == 3
    jsonl(release / "src" / "test.jsonl", rows)
    images = release / "src" / "images" / "open_images"
    (images / "validation").mkdir()
    (images / "validation" / f"{POOL[0]}.png").write_bytes(
        picture(3)
    )  # the same id in another split's folder
    with error_about(UserError, POOL[0], "twice"):
        import_rmir(options(release, overwrite=True))
    (images / "validation" / f"{POOL[0]}.png").unlink()
    no_right = [rows[0] | {"target_images": []}, *rows[1:]]
    jsonl(release / "src" / "test.jsonl", no_right)
    with error_about(UserError, "a"):
        import_rmir(options(release, overwrite=True))
    jsonl(release / "src" / "test.jsonl", [rows[0] | {"query": ""}])
    with error_about(UserError, "row 1", "query"):
        import_rmir(options(release, overwrite=True))


def test_a_query_of_several_pictures_keeps_their_order(release):
    listed(release)
    rows = [json.loads(line) for line in (release / "src" / "test.jsonl").read_text().splitlines()]
    jsonl(release / "src" / "test.jsonl", [rows[0] | {"input_image": [OWN[1], OWN[0], POOL[7]]}, *rows[1:]])
    wanted = import_rmir(options(release))
    assert wanted.queries[0].pictures == (picture(101), picture(100), picture(7))
    assert len(set(wanted.columns["group"])) == 1  # both queries show OWN[0]


@pytest.mark.parametrize("stem", ["000000391895", "COCO_train2014_000000391895"])
def test_visual_genome_pictures_are_found_in_training_files_under_cocos_name(release, stem):
    """Another encoding of the same picture, under another library's name: only the manifest knows."""
    listed(release)
    jsonl(release / "src" / "corpus.jsonl", [{"id": name} for name in [*POOL, OWN[0]]])
    info = json.loads((release / "image_data.json").read_text())
    info[0]["coco_id"], info[1]["coco_id"] = 391895, None
    (release / "image_data.json").write_text(json.dumps(info), "utf-8-sig")
    wanted = import_rmir(options(release))
    train = release / "train"
    train.mkdir()
    (train / f"{stem}.jpg").write_bytes(picture(5000))
    (train / "t.png").write_bytes(picture(5001))
    query = {"text": "What is it?", "images": [f"{stem}.jpg"]}
    jsonl(train / "a.jsonl", [{"query": query, "positives": [{"id": "t", "image": "t.png"}]}])
    source = RecordsConfig(path=str(train / "a.jsonl"))
    found = audit_training(wanted, [source])
    assert found.content["query_images"] == {"shared": 2, "of": 3}  # queries a and b
    assert found.content["candidate_images"] == {"shared": 1, "of": 9}
    assert "2 of 3 query pictures are in the training records" in found.warnings[0]
    jsonl(
        train / "a.jsonl", [{"query": query | {"images": ["000000391896.jpg"]}, "positives": [{"text": "a"}]}]
    )
    assert audit_training(wanted, [source]).warnings == []


def test_published_counts_and_the_swap_warning(tmp_path):
    def draft(counts, num_right=1):
        made = Draft([str(n) for n in range(num_right)])
        for category, num in counts.items():
            for number in range(num):
                query = Query(f"{category}{number}", "x", category=category)
                made.add(query, "row", dict.fromkeys(made.pool, 1))
        return made

    given = RmirOptions(src=tmp_path, out=tmp_path)
    published_counts = draft(CATEGORY_COUNTS)
    assert _check_counts(published_counts, 35_803, given) == [SWAPPED]
    swapped = {"functional": 546, "temporal": 432, "causal": 656}
    assert _check_counts(draft(swapped), 35_803, given) == []
    with error_about(UserError, "counts"):
        _check_counts(published_counts, 35_802, given)
    with error_about(UserError, "counts"):
        _check_counts(draft({"functional": 1}), 35_803, given)
    with error_about(UserError, "counts"):
        _check_counts(draft({"causal": 1}, num_right=21), 35_803, given)


def test_the_command(release, capsys):
    listed(release)
    words = [f"src={release / 'src'}", f"out={release / 'out'}", f"manifest={release / 'image_data.json'}"]
    assert main(["import", "rmir", *words]) == 2
    assert "is not RMIR as published" in capsys.readouterr().err
    assert main(["import", "rmir", *words, "counts=false", "pictures=link"]) == 0
    assert "3 queries, 8 candidates" in capsys.readouterr().out
    assert load_set(release / "out").name == "RMIR"
    assert main(["import", "rmir", *words, "counts=false"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import", "rmirr"]) == 2


@pytest.mark.parametrize(
    ("counts", "worst"), [((546, 656, 432), 0.968), ((546, 432, 656), 0.0064), ((1, 1, 1), 0.490)]
)
def test_published_averages_under_every_weighting(counts, worst):
    """All 22 averages are micro means with 432 temporal and 656 causal queries, not with the text's counts."""
    errors = []
    for row in published()["rmir"].rows:
        cells = [100 * value for value in row.values]
        for k in (0, 1):
            mean = sum(n * cells[2 * place + k] for place, n in enumerate(counts)) / sum(counts)
            errors.append(abs(mean - cells[6 + k]))
    assert len(errors) == 22
    assert max(errors) == pytest.approx(worst, abs=1e-3)

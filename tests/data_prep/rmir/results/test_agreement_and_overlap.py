"""What goes beyond the paper: agreement, near-duplicates, indices, shortcuts, overlap, and a person's review."""

import json
import math

import numpy as np
import pytest
from faults import error_about
from PIL import Image, ImageFilter

from data_prep.__main__ import main
from data_prep.rmir import arithmetic as maths
from data_prep.rmir import decisions, frames, review, seed_set, stages
from data_prep.rmir.config import IndexSpec, load_config
from data_prep.rmir.pictures.encoders import HashingEncoder, Index, PixelEncoder
from data_prep.rmir.pictures.library import look
from data_prep.rmir.results import audit
from data_prep.rmir.results.audit import fleiss_kappa, panel_statistics
from data_prep.rmir.run import Run
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.content.near_duplicates import near_duplicates, num_repeats, phash

T, F, A, E, _ = maths.VERDICTS

# ---------------------------------------------------------------------------------------------------------- agreement


def test_kappa_of_fleiss_own_example():
    """Ten subjects, fourteen raters, five categories: .210 (Fleiss, 1971; the table that textbooks copy)."""
    table = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    assert fleiss_kappa(np.array(table)) == pytest.approx(0.210, abs=5e-4)


@pytest.mark.parametrize(
    ("table", "kappa"),
    [
        ([[2, 0], [0, 2]], 1.0),
        ([[1, 1], [1, 1]], -1.0),
        # observed 1/2; marginals 3/4 and 1/4, so chance 10/16: (1/2 - 5/8) / (3/8)
        ([[2, 0], [1, 1]], -1 / 3),
    ],
)
def test_kappa_by_hand(table, kappa):
    assert fleiss_kappa(np.array(table)) == pytest.approx(kappa)


def test_kappa_is_undefined_where_nothing_is_left_to_correct():
    assert math.isnan(fleiss_kappa(np.array([[3, 0], [3, 0]])))
    assert math.isnan(fleiss_kappa(np.array([[1, 0], [0, 1]])))
    assert math.isnan(fleiss_kappa(np.empty((0, 2))))


def test_judges_and_families():
    """`lenient` says true where the others say false, in one of four; the others always agree."""
    votes = {
        "a 1": [T, T, F, F],
        "a 2": [T, T, F, F],
        "lenient": [T, T, T, E],
    }
    found = panel_statistics(votes, {"a 1": "a", "a 2": "a", "lenient": "b"}, np.ones(4))
    judge = found["judges"]["lenient"]
    assert (judge["true"], judge["false"], judge["abstain"], judge["error"]) == (0.75, 0.0, 0.0, 0.25)
    assert judge["agrees"] == 0.5
    assert found["judges"]["a 1"]["agrees"] == 1.0, "where the other two differ there is no majority"
    assert found["families"] == {"a": 1.0}
    # all three: 3 0 0, 3 0 0, 1 2 0, 0 2 1; observed (1 + 1 + 1/3 + 1/3) / 4, chance (7^2 + 4^2 + 1) / 144
    assert found["kappa"] == pytest.approx((2 / 3 - 66 / 144) / (1 - 66 / 144))


# ----------------------------------------------------------------------------------------------------- near-duplicates


@pytest.fixture
def photo():
    """Something smooth with structure, as photographs are."""
    grid = np.random.default_rng(3).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((240, 200), Image.Resampling.BICUBIC)


def distance(a: str, b: str) -> int:
    return (int(a, 16) ^ int(b, 16)).bit_count()


def test_the_hash_survives_what_copies_go_through(photo):
    own = phash(photo)
    for copy in (photo.resize((120, 100)), photo.filter(ImageFilter.GaussianBlur(1)), photo.convert("CMYK")):
        assert distance(own, phash(copy)) <= 4
    assert distance(own, phash(photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT))) > 12
    assert phash(Image.new("RGB", (50, 50), "white")) == phash(Image.new("RGB", (70, 20), "white"))


def test_the_hash_is_that_of_imagehash(photo):
    """Value of ImageHash 4.3.2, which also agreed on all 980 shipped training pictures."""
    assert phash(photo) == HASH_OF_PHOTO


HASH_OF_PHOTO = "f953c9c1fc990266"


def flip(name: str, *bits: int) -> str:
    value = int(name, 16)
    for bit in bits:
        value ^= 1 << bit
    return f"{value:016x}"


def test_repeats_are_told_by_distance():
    a = "0123456789abcdef"
    far = "fedcba9876543210"
    names = [a, far, flip(a, 0, 20), flip(a, 0, 20, 40), a, flip(far, 63)]
    assert near_duplicates(names, 0) == [None, None, None, None, 0, None]
    assert near_duplicates(names, 2) == [None, None, 0, None, 0, 1], (
        "row 3 is near row 2 only, and that is gone"
    )
    assert near_duplicates(names, 3) == [None, None, 0, 0, 0, 1]
    assert near_duplicates([], 4) == []


def test_repeats_are_those_of_a_plain_search():
    rng = np.random.default_rng(0)
    bases = [f"{value:016x}" for value in rng.integers(0, 2**63, 40).tolist()]
    names = [
        flip(bases[rng.integers(40)], *rng.integers(0, 64, rng.integers(0, 7)).tolist()) for _ in range(600)
    ]
    for most in (0, 1, 4, 7):
        kept: list[int] = []
        plain: list[int | None] = []
        for row, name in enumerate(names):
            near = next((other for other in kept if distance(name, names[other]) <= most), None)
            plain.append(near)
            if near is None:
                kept.append(row)
        found = near_duplicates(names, most)
        assert [of is None for of in found] == [of is None for of in plain]
        assert all(of is None or distance(names[row], names[of]) <= most for row, of in enumerate(found))
        first, others = names[:100], names[100:]
        near_any = [any(distance(name, other) <= most for other in others) for name in first]
        assert num_repeats(first, others, most) == sum(near_any)
    assert num_repeats([], [], 4) == num_repeats([], names, 4) == num_repeats(names, [], 4) == 0


def test_near_duplicates_leave_the_library_and_are_counted(tmp_path, photo):
    pictures = {"a": photo, "b": photo.resize((120, 100)), "c": photo.rotate(90), "d": photo}
    for name, image in pictures.items():
        image.save(tmp_path / f"{name}.png")
    words = ["config=demo", f"library.path={tmp_path}", "seed.clusters=2", f"out={tmp_path / 'out'}"]
    words += ["image_encoder={kind: pixels}", "caption_encoder={kind: hashing}"]
    run = Run(load_config([*words, "library.near_duplicates=4"]), progress=False)
    found = stages.seed(run)
    assert found["rejected"] == {"same bytes as another picture": 1, "near-duplicate": 1}
    assert [row["id"] for row in run.rows("seed", "images")] == ["a", "c"]
    assert {row["id"]: row["detail"] for row in run.rows("seed", "rejected")}["b"] == "repeats a"
    run.close()


# -------------------------------------------------------------------------------------------------------------- audit


def test_rank_of_the_first_right_one():
    scores = np.array([0.9, 0.5, 0.7, 0.5])
    assert audit.first_rank(scores, [2], 0) == (1, 3)
    assert audit.first_rank(scores, [3], 0) == (3, 3), "a tie counts against it"
    assert audit.first_rank(scores, [0], 0) == (None, 3)
    assert audit.first_rank(scores, [], None) == (None, 4)


def test_chance():
    """Two right of five: none among two with probability 3/5 * 2/4."""
    assert audit.chance(2, 5, 2) == pytest.approx(0.7)
    assert audit.chance(2, 5, 4) == 1.0
    assert audit.chance(0, 5, 4) == 0.0


def test_shares_of_shortcuts():
    def row(query, probe, rank, split="test"):
        return {
            "query_id": query, "probe": probe, "rank": rank, "split": split, "category": "causal", "num_right": 1,
            "num_ranked": 10,
        }  # fmt: skip

    rows = [
        row("1", audit.TEXT, 1), row("2", audit.TEXT, 4, "train"), row("3", audit.TEXT, None),
        row("1", audit.IMAGE, 9), row("2", audit.IMAGE, 1, "train"), row("3", audit.IMAGE, 8),
        row("1", audit.DESCRIPTION, 1), row("2", audit.DESCRIPTION, 1, "train"), row("3", audit.DESCRIPTION, 1),
    ]  # fmt: skip
    found = audit.solved(rows, [1, 5])
    assert found[audit.TEXT] == {
        "queries": 3, "solved@1": pytest.approx(1 / 3), "chance@1": pytest.approx(0.1),
        "solved@5": pytest.approx(2 / 3), "chance@5": pytest.approx(0.5),
    }  # fmt: skip
    assert found[audit.DESCRIPTION]["solved@1"] == 1.0
    either = found["any shortcut"]
    assert either["all"]["solved@1"] == pytest.approx(2 / 3), "the yardstick is no shortcut"
    assert (either["test"]["solved@1"], either["train"]["solved@1"]) == (0.5, 1.0)
    assert audit.solved([], [1]) == {
        "any shortcut": {"all": {"queries": 0, "solved@1": pytest.approx(math.nan, nan_ok=True)}}
    }


# --------------------------------------------------------------------------------------- indices, overlap and the review


def table_of(run, stage, name, schema, rows):
    frames.write_rows(
        run.path(stage, name),
        [{key: row.get(key) for key in frames.SCHEMAS[schema].names} for row in rows],
    )


@pytest.fixture
def finished(tmp_path):
    """Six pictures, two queries: q1 about `in` (test) with answers a and b and a rejected c, q2 about `a` (train)."""
    words = ["config=demo", "library.path=unused", f"out={tmp_path / 'out'}"]
    words += ["image_encoder={kind: pixels}", "caption_encoder={kind: hashing}"]
    run = Run(load_config(words), progress=False)
    images = []
    for number, name in enumerate(["in", "a", "b", "c", "d", "e"]):
        path = tmp_path / f"{name}.png"
        pixels = np.random.default_rng(number).integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 60), Image.Resampling.BICUBIC).save(path)
        seen = look(str(path), 1)
        images.append(
            {
                "id": name,
                "ref": str(path),
                "caption": f"{name} thing",
                "sha256": seen["sha256"],
                "phash": seen["phash"],
            }
        )
    table_of(run, "seed", "images.parquet", "images", images)
    seed_set.save_vectors(
        run.path("seed", "images.npy"), PixelEncoder().pictures([image["ref"] for image in images])
    )
    captions = [image["caption"] for image in images]
    seed_set.save_vectors(run.path("seed", "captions.npy"), HashingEncoder().texts(captions))
    asked = [("q1", "in", "causal", "b thing"), ("q2", "a", "temporal", "e thing")]
    table_of(run, "generate", "queries/part-00000.parquet", "queries", [
        {"query_id": name, "image_id": image, "category": category, "query": "a question", "target_desc": target}
        for name, image, category, target in asked
    ])  # fmt: skip
    table_of(run, "filter", "valid/part-00000.parquet", "valid", [{"query_id": name} for name, *_ in asked])
    found = {
        ("q1", "a"): ([T, T], ["image", "caption"]), ("q1", "b"): ([T, T], ["more"]),
        ("q1", "c"): ([F, F], ["image"]), ("q2", "e"): ([T, T], ["caption"]), ("q2", "d"): ([F, T], ["image"]),
    }  # fmt: skip
    table_of(run, "retrieve", "triplets.parquet", "triplets", [
        {"query_id": query, "candidate_id": candidate, "image_rank": 1 if "image" in by else None, "found_by": by}
        for (query, candidate), (_, by) in found.items()
    ])  # fmt: skip
    table_of(run, "judge", "judgements/part-00000.parquet", "judgements", [
        {"query_id": query, "candidate_id": candidate, "judge": judge, "sample": 0, "verdict": verdict}
        for (query, candidate), (verdicts, _) in found.items()
        for judge, verdict in zip(("judge", "writer"), verdicts, strict=True)
    ])  # fmt: skip
    stages.keep(run)
    stages.pool(run)
    table_of(run, "split", "splits.parquet", "splits", [
        {"query_id": "q1", "tsr": 0.99, "split": "test"}, {"query_id": "q2", "tsr": 0.1, "split": "train"},
    ])  # fmt: skip
    yield run
    run.close()


def test_tsr_against_verdicts_by_hand():
    """Appendix B.2: groups of queries by the verdict on the last candidate; a higher TSR should mean that it is wrong."""
    score, right = np.array([0.2, 0.5, 0.5, 0.7, 0.9, 0.95]), np.array([1, 1, 0, 0, 0, 0], bool)
    found = audit.tsr_evidence(score, right, list("aabbcc"), 0.6)
    assert (found["right"], found["wrong"]) == (2, 4)
    values = {name: figure["value"] for name, figure in found.items() if isinstance(figure, dict)}
    assert values == pytest.approx(
        {
            "mean_right": 0.35, "mean_wrong": 3.05 / 4, "auc": 7.5 / 8, "difference": 3.05 / 4 - 0.35, "right_above": 0.0,
            "right_below": 2 / 3,
        }
    )  # fmt: skip
    assert found["auc"]["low"] < 7.5 / 8 <= found["auc"]["high"] <= 1
    assert audit.tsr_evidence(score, right & False, list("aabbcc"), 0.6) == {"right": 0, "wrong": 6}


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("The cat sat on the mat.", -1.45),  # six words of a syllable
        ("", 0.0),
        ("Which machine makes bottles? Which animal eats apples?", 0.39 * 4 + 11.8 * 13 / 8 - 15.59),
    ],
)
def test_reading_grade(text, grade):
    assert maths.reading_grade(text) == pytest.approx(grade)


def test_what_the_audit_says_of_tsr_and_language(finished):
    finished.config.retrieve.by_image = 1
    assert audit.reliability(finished) == {"right": 0, "wrong": 0}  # one candidate leaves no list before it
    finished.config.retrieve.by_image = 2
    rows = list(finished.rows("retrieve", "triplets"))
    for row in rows:
        row["image_rank"] = {"a": 1, "c": 2}.get(row["candidate_id"])
    frames.write_rows(finished.path("retrieve", "triplets.parquet"), rows)
    assert audit.reliability(finished) == {"right": 0, "wrong": 1}
    found = audit.language(finished)
    assert found == {
        "queries": 1,
        "words": {"causal": 2.0},
        "median_grade": maths.reading_grade("a question"),
    }


def test_what_each_index_adds(finished):
    found = audit.indices(finished)
    assert found["image"]["candidates"] == 3
    assert (found["image"]["right"], found["image"]["right_alone"]) == (1, 0)
    assert (found["more"]["right"], found["more"]["right_alone"]) == (1, 1)
    assert found["caption"]["precision"] == 1.0
    assert found["caption"]["share_of_right"] == pytest.approx(2 / 3)


def test_judges_by_family(finished):
    finished.config.models["writer"].family = "one house"
    found = audit.judges(finished)
    assert {name: judge["family"] for name, judge in found["judges"].items()} == {
        "judge 1": "judge",
        "writer 1": "one house",
    }
    assert found["judges"]["judge 1"]["true"] == pytest.approx(0.6)
    assert found["judges"]["judge 1"]["agrees"] == pytest.approx(0.8)


def test_probes_rank_the_pool(finished):
    """The pool is a, b, e. The described answer finds b at once; the query's own picture is never ranked."""
    rows = {(row["query_id"], row["probe"]): row for row in audit.shortcuts(finished)}
    assert len(rows) == 2 * len(audit.PROBES)
    assert rows["q1", audit.DESCRIPTION]["rank"] == 1
    assert rows["q1", audit.IMAGE]["num_ranked"] == 3, "`in` is not in the pool"
    assert rows["q2", audit.IMAGE]["num_ranked"] == 2, "`a` is, and is q2's own picture"
    assert rows["q2", audit.DESCRIPTION]["rank"] == 1
    assert rows["q1", audit.TEXT]["num_right"] == 2


def test_probes_in_blocks_find_the_same(finished, monkeypatch):
    """One query at a time, and never more scores in memory than that."""
    whole = audit.shortcuts(finished)
    finished.config.audit.memory_mb = 2**-20 * 4 * 3  # three candidates of four bytes
    sizes = []
    original = Index.texts
    monkeypatch.setattr(Index, "texts", lambda self, some: sizes.append(len(some)) or original(self, some))
    assert audit.shortcuts(finished) == whole
    assert set(sizes) == {1}


def test_what_the_sets_share(finished):
    found = audit.overlap(finished)
    assert found["train inputs that are test answers"] == 1, "`a` is an answer of q1 and what q2 is about"
    assert found["train answers that are test answers"] == 0
    assert found["train inputs or answers that nearly repeat a test picture"] == 0
    images = list(finished.rows("seed", "images"))
    for image in images:
        if image["id"] == "e":
            image["phash"] = flip(next(row["phash"] for row in images if row["id"] == "b"), 5)
    table_of(finished, "seed", "images.parquet", "images", images)
    assert audit.overlap(finished)["train inputs or answers that nearly repeat a test picture"] == 1
    for image in images:
        if image["id"] == "a":  # three in a row: a and e are both near b, but not near each other
            image["phash"] = flip(next(row["phash"] for row in images if row["id"] == "b"), 10, 20, 30, 40)
    table_of(finished, "seed", "images.parquet", "images", images)
    repeats = audit.overlap(finished)["train inputs or answers that nearly repeat a test picture"]
    assert repeats == 1, "test pictures that repeat each other count all the same"


def test_a_further_index_brings_candidates_of_its_own(finished):
    config = finished.config
    config.retrieve.by_image = config.retrieve.by_caption = 1
    config.retrieve.more = [
        IndexSpec("thumbs", "image", config.image_encoder, 3), IndexSpec("words", "caption", config.caption_encoder, 1)
    ]  # fmt: skip
    found = stages.retrieve(finished)
    assert set(found["more_encoders"]) == {"thumbs", "words"}
    rows = finished.rows("retrieve", "triplets")
    by = {row["candidate_id"]: row["found_by"] for row in rows if row["query_id"] == "q1"}
    assert len(by) == 3
    assert by["b"] == ["image", "caption", "thumbs", "words"], "b's caption is the description"
    assert [names for name, names in by.items() if name != "b"] == [["thumbs"], ["thumbs"]]


def test_the_input_is_a_candidate_where_one_asks_for_it(finished):
    """For questions that their own picture may answer."""
    inputs = {query["query_id"]: query["image_id"] for query in finished.rows("generate", "queries")}
    for exclude in (True, False):
        finished.config.retrieve.exclude_input = exclude
        stages.retrieve(finished)
        rows = finished.rows("retrieve", "triplets")
        assert any(row["candidate_id"] == inputs[row["query_id"]] for row in rows) is not exclude


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("retrieve.more=[{name: image, encoder: {kind: pixels}}]", ("retrieve.more",)),
        ("retrieve.more=[{name: x, side: sound}]", ("retrieve.more[0].side",)),
        (
            "retrieve.more=[{name: x, side: caption}]",
            ("retrieve.more.0.encoder.kind",),
        ),
        ("retrieve.more=[{name: x, count: 0}]", ("retrieve.more[0].count",)),
        ("image_encoder.kind=words", ("image_encoder.kind",)),
        ("library.near_duplicates=40", ("library.near_duplicates",)),
        ("audit.ks=[]", ("audit.ks",)),
    ],
)
def test_wrong_settings_are_named(word, named):
    with error_about(UserError, *named):
        load_config(["config=demo", word])


def data_of(page: str) -> dict:
    return json.loads(page.split('type="application/json">')[1].split("</script>")[0])


def test_the_page_holds_the_sample_and_not_the_decisions(finished, tmp_path, capsys):
    write_text(finished.path("split", "done"), "")
    out = tmp_path / "review.html"
    main(["review", f"run={finished.out}", f"out={out}", "sample=4", "split=all"])
    assert "4 triplets, 3 accepted and 1 rejected by the panel" in capsys.readouterr().out
    text = out.read_text()
    data = data_of(text)
    keys = {"q1 -> a", "q1 -> b", "q1 -> c", "q2 -> e"}
    assert {item["key"] for item in data["items"]} == keys
    assert set(data["items"][0]) == {"key", "shown", "query", "given", "answer"}
    assert all(url.startswith("data:image/") for url in data["pictures"].values())
    assert not any(word in text for word in ("kept", 'rejected":', "http://", "https://"))
    again = [row["candidate_id"] for row in review.draw(finished.out, 4, "all", 0)]
    assert again == [item["key"].split(" -> ")[1] for item in data["items"]], (
        "the same seed draws the same sample"
    )
    assert {row["candidate_id"] for row in review.draw(finished.out, 2, "test", 0)} >= {"c"}


def verdicts(path, by=None, **said):
    names = {"a": "q1 -> a", "b": "q1 -> b", "c": "q1 -> c", "e": "q2 -> e"}
    rows = {names[key]: {"verdict": verdict, "comment": ""} for key, verdict in said.items()}
    path.write_text(json.dumps({"sample": "x", "by": by, "verdicts": rows}))
    return path


def test_agreement_with_a_person(finished, tmp_path, capsys):
    """Three of four as the panel, on two queries; one more is unsure about one of them."""
    one = verdicts(tmp_path / "one.json", a="accept", b="reject", c="reject", e="accept")
    two = verdicts(tmp_path / "2.json", by="two", a="accept", b="accept", c="unsure")
    found = review.compare(finished.out, review.read_verdicts(finished.out, [one]))
    row = dict(found["rows"]["all"])
    assert row.pop("low") < 0.75 < row.pop("high"), "the queries are resampled"
    assert row == {"agree": 3, "of": 4, "queries": 2, "share": 0.75, "unsure": 0}
    assert found["rows"]["temporal"]["low"] is None, "one query alone has no interval"
    assert found["rows"]["panel accepted"]["agree"] == 2
    assert found["rows"]["panel rejected"]["share"] == 1.0
    assert found["rows"]["temporal"]["of"] == 1
    # person and panel: 2 0, 1 1, 0 2, 2 0; observed 3/4, chance (5/8)^2 + (3/8)^2
    assert found["kappa"] == pytest.approx((0.75 - 34 / 64) / (1 - 34 / 64))
    main(["agreement", f"run={finished.out}", f"verdicts={one},{two}"])
    shown = capsys.readouterr().out
    assert "| all | 5 | 6 | 2 | 0.833 |" in shown
    assert "| by two | 2 | 2 | 1 | 1.000 |" in shown
    assert "one and two: same verdict on 1 of 3" in shown
    report = json.loads((finished.out / "agreement.json").read_text())
    assert (report["rows"]["all"]["of"], report["rows"]["all"]["unsure"]) == (6, 1)


def test_verdicts_do_not_count_for_another_question_of_the_same_name(finished, tmp_path, capsys):
    out = finished.out
    images, queries = finished.by("id", "seed", "images"), list(finished.rows("generate", "queries"))
    rows = {
        f"{query['query_id']} -> {target}": {**query, "candidate_id": target}
        for query in queries
        for target in "abe"
    }
    saved = {
        name: {"verdict": "reject", "shown": review.shown_hash(rows[name], images)}
        for name in ("q1 -> a", "q2 -> e")
    }
    file = tmp_path / "ada.json"
    file.write_text(json.dumps({"verdicts": saved}))
    (out / "keep/done.json").write_text('{"fingerprint": "one"}')
    people = review.read_verdicts(out, [file])
    review.agreement_of(out, people)
    decisions.write_about_panel(out / decisions.REVIEWED, review.settle(out, people, agree=1))
    assert decisions.overruled(out) == {"q1 -> a": "rejected", "q2 -> e": "rejected"}
    queries[0]["query"] = "another question"
    table_of(finished, "generate", "queries/part-00000.parquet", "queries", queries)
    (out / "keep/done.json").write_text('{"fingerprint": "two"}')
    assert decisions.overruled(out) == {}
    assert decisions.about_panel(out / decisions.AGREEMENT) is None
    assert review.read_verdicts(out, [file])["ada"].keys() == {"q2 -> e"}
    assert "1 of 2 verdicts are left out, such as that on 'q1 -> a', which" in capsys.readouterr().err
    del saved["q2 -> e"]
    file.write_text(json.dumps({"verdicts": saved}))
    with error_about(UserError, "q1 -> a"):
        review.read_verdicts(out, [file])


@pytest.mark.parametrize("gone", ["question", "picture"])
def test_verdicts_while_an_earlier_stage_is_redone_are_left_out(finished, tmp_path, capsys, gone):
    """The decisions are still those of before, but a question, or a question's picture, is no longer there."""
    file = tmp_path / "ada.json"
    file.write_text(
        json.dumps({"verdicts": {name: {"verdict": "reject"} for name in ("q1 -> a", "q2 -> e")}})
    )
    queries, images = finished.rows("generate", "queries"), finished.rows("seed", "images")
    if gone == "question":
        rows = [row for row in queries if row["query_id"] != "q1"]
        table_of(finished, "generate", "queries/part-00000.parquet", "queries", rows)
    else:
        (of_q1,) = [row["image_id"] for row in queries if row["query_id"] == "q1"]
        table_of(finished, "seed", "images.parquet", "images", [row for row in images if row["id"] != of_q1])
    assert review.read_verdicts(finished.out, [file])["ada"].keys() == {"q2 -> e"}
    assert "1 of 2 verdicts are left out" in capsys.readouterr().err


def test_two_files_of_one_person_are_refused(finished, tmp_path):
    files = [verdicts(tmp_path / f"{number}.json", by="two", a="accept") for number in range(2)]
    with error_about(UserError, "two"):
        review.read_verdicts(finished.out, files)


def test_verdicts_that_an_editor_saved_with_a_byte_order_mark(finished, tmp_path):
    file = verdicts(tmp_path / "v.json", by="ada", a="accept")
    plain = review.read_verdicts(finished.out, [file])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert review.read_verdicts(finished.out, [file]) == plain


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("no json", "format"),
        ('{"verdicts": {"q1 -> a": true}}', "format"),
        ('{"verdicts": {}}', "format"),
        ('{"verdicts": {"q1 -> a": "yes"}}', "format"),
        ('{"verdicts": {"q1 -> a": {"verdict": "yes"}}}', "format"),
        ('["q1 -> a"]', "format"),
        ('{"verdicts": {"q9 -> a": {"verdict": "accept"}}}', "q9 -> a"),
    ],
)
def test_wrong_verdicts(finished, tmp_path, content, field):
    (tmp_path / "v.json").write_text(content)
    with error_about(UserError, "v.json", field):
        main(["agreement", f"run={finished.out}", f"verdicts={tmp_path / 'v.json'}"])


def test_a_run_that_is_not_finished(tmp_path):
    with error_about(UserError, tmp_path / "generate/queries.parquet"):
        main(["review", f"run={tmp_path}", f"out={tmp_path / 'x.html'}"])
    with error_about(UserError, ("missing", "run")):
        main(["agreement", "verdicts=x"])
    with error_about(UserError, "verdicts"):
        main(["agreement", f"run={tmp_path}", "verdicts=[]"])


def test_a_family_is_a_setting_of_a_model():
    config = load_config(["config=demo", "models.judge.family=qwen"])
    assert config.models["judge"].family == "qwen"
    assert ModelConfig("m").family is None

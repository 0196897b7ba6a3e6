"""Libraries and data sets as they come and go: origins, metadata, what a change redoes, leaks, odd answers of judges."""

import asyncio
import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from faults import error_about
from PIL import Image
from small_runs import Seer, config_of, one_family

from data_prep.__main__ import main
from data_prep.rationales.leak import MIN_OTHERS, caption_leak, embedding_leak, picture_leaks
from data_prep.rationales.pairs import read_captions
from data_prep.rmir import frames, oracle, prompts, stages
from data_prep.rmir.config import (
    GenerateConfig,
    LibraryConfig,
    RmirConfig,
)
from data_prep.rmir.main import run_stages
from data_prep.rmir.pictures.library import Library, look
from data_prep.rmir.results import report
from data_prep.rmir.run import STAGES, Run, fingerprints, identities
from data_prep.rmir.wording import wording
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.request import Picture
from rge.calls.wire.replies import Declined, Reply
from rge.common.errors import UserError
from rge.common.images import load_image, picture_bytes
from rge.content.picture_metadata import without_metadata
from rge.stats.intervals import in_words


def test_two_pictures_that_differ_in_their_ending_are_two(tmp_path):
    for number, name in enumerate(("a.jpg", "a.png", "b.png")):
        Image.new("RGB", (40, 40), (number * 40, 0, 0)).save(tmp_path / name)
    assert [row["id"] for row in Library(LibraryConfig(path=str(tmp_path))).rows()] == [
        "a.jpg",
        "a.png",
        "b",
    ]


# ---------------------------------------------------------------------------------------------------- what a change redoes


@pytest.mark.parametrize(
    ("setting", "redone"),
    [
        (("models.judge.name", "other"), "judge keep pool split audit"),
        (("models.judge.max_side_px", 512), "judge keep pool split audit"),
        (("models.judge.concurrency", 1), ""),
        (("models.writer.max_side_px", 512), "caption generate filter retrieve judge keep pool split audit"),
        (("models.writer.base_url", "http://elsewhere/v1"), ""),
        (("models.judge.reasoning_effort", "low"), "judge keep pool split audit"),
        (("caption.max_words", 20), "caption retrieve judge keep pool split audit"),
        (("models.judge.family", "one house"), "audit"),
        (("keep.min_confidence", 0.8), "keep pool split audit"),
        (("keep.remove_doubted_inputs", True), "split audit"),
        (("library.licence", "CC0"), "split audit"),
        (("split.tsr_list", "surviving"), "split audit"),
        (("audit.ks", [3]), "audit"),
        (("audit.memory_mb", 7), ""),
        (("retrieve.memory_mb", 7), ""),
        (("library.memory_mb", 7), ""),
        (("library.shard_size", 7), ""),
        (("library.changed", "extend"), ""),
        (("export.name", "mine"), "split audit"),
        (("seed.seed", 1), " ".join(STAGES)),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_change_redoes_what_reads_it_and_nothing_else(tmp_path, setting, redone):
    config = config_of(tmp_path, tmp_path, "http://host/v1")
    config.caption.model = "writer"
    before = fingerprints(config, identities(config))
    (*path, last), value = setting[0].split("."), setting[1]
    place = config
    for name in path:
        place = place[name] if isinstance(place, dict) else getattr(place, name)
    setattr(place, last, value)
    assert [
        stage for stage in STAGES if fingerprints(config, identities(config))[stage] != before[stage]
    ] == redone.split()


# ------------------------------------------------------------------------------------------------------- odd providers


@pytest.mark.slow
def test_unreadable_judgements_are_asked_for_again_and_the_pool_is_the_same(tmp_path):
    """Every tenth judgement comes without its tag the first time; nothing is lost by it."""
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(transient=0, malformed=0, judge_errors=0)
    pools, met = [], []
    for odd in (False, True):
        seen = [0]

        async def answer(path, body, odd=odd, seen=seen):
            content = body["messages"][-1]["content"]
            again = content[-1].get("text", "").startswith("Your last answer could not be read: missing tag.")
            if content[0].get("text", "").startswith(prompts.JUDGE_TASK):
                seen[0] += 1
                if odd and seen[0] % 10 == 0 and not again:
                    return chat("I would say so.")
            if again:
                assert "<consistent>True, False or ABSTAIN</consistent>" in content[-1]["text"]
                body["messages"][-1]["content"] = content[:-1]
            return await answers(path, body)

        with LocalServer(answer) as server:
            run = Run(
                config_of(tmp_path / f"out {odd}", tmp_path / "library.csv", server.url), progress=False
            )
            run_stages(run, STAGES)
        pools.append([row["id"] for row in run.rows("pool", "pool")])
        met.append(run.done("judge")["met"])
        run.close()
    assert pools[0] == pools[1] != []
    assert met[0] == {}
    assert met[1]["reasked"] > 10


def test_a_stage_whose_calls_are_all_rejected_is_not_done_and_goes_on_after_the_mend(tmp_path):
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(transient=0, malformed=0)

    async def picky(path, body):
        if "max_tokens" in body:
            return Answer({"error": {"message": "use max_completion_tokens"}}, 400)
        return await answers(path, body)

    with LocalServer(picky) as server:
        config = config_of(tmp_path / "out", tmp_path / "library.csv", server.url)
        run = Run(config, progress=False)
        with error_about(UserError, "settings", 400):
            run_stages(run, STAGES)
        assert run.done("seed")
        assert not run.done("generate")
        run.close()
        for model in config.models.values():
            model.token_limit = "max_completion_tokens"
        run = Run(config, progress=False)
        run_stages(run, ["generate"])
        assert run.done("generate")["counts"]["queries"] > 0
        run.close()


def test_pictures_that_are_all_rejected_leave_their_stage_open(tmp_path):
    one_family(tmp_path / "library.csv")

    async def cannot(path, body):
        return Answer({"error": {"message": "Could not process image"}}, 400)

    with LocalServer(cannot) as server:
        run = Run(config_of(tmp_path / "out", tmp_path / "library.csv", server.url), progress=False)
        with error_about(UserError, "settings", 400):
            run_stages(run, STAGES)
        assert not run.done("generate")
        assert not list(run.path("generate").rglob("part-*"))
        run.close()


@pytest.mark.slow
def test_judges_that_a_policy_stops_abstain(tmp_path):
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(transient=0, malformed=0)

    async def filtered(path, body):
        if body["messages"][-1]["content"][0]["text"].startswith(prompts.JUDGE_TASK):
            return Answer({"error": {"code": "content_filter", "message": "filtered"}}, 400)
        return await answers(path, body)

    with LocalServer(filtered) as server:
        run = Run(config_of(tmp_path / "out", tmp_path / "library.csv", server.url), progress=False)
        run_stages(run, STAGES[: STAGES.index("keep") + 1])
        kept = run.done("keep")["counts"]
        verdicts = {row["verdict"] for row in run.rows("judge", "judgements")}
        assert kept["abstained"] == kept["triplets"] > 0
        assert verdicts == {"abstain"}
        assert run.done("judge")["met"]["refused"] > 0
        run.close()


# --------------------------------------------------------------------------------------------------------- the paper's text


def test_the_content_policy_is_asked_for_and_its_abstention_is_counted():
    picture = Picture("a", "1")
    with_policy, without = (
        prompts.generate_request(RmirConfig(generate=GenerateConfig(content_policy=wanted)), picture).parts[0]
        for wanted in (True, False)
    )
    policy = wording().content_policy
    assert policy in with_policy
    assert with_policy.replace(f"{policy}\n\n", "") == without
    with pytest.raises(Declined):
        prompts.read_generated(Reply("ABSTAIN DUE TO SENSITIVE IMAGE", "stop"), "CAUS", (25, 50))
    prompts.check_generated(Reply("ABSTAIN DUE TO SENSITIVE IMAGE", "stop"), ["CAUS"], (25, 50))
    assert GenerateConfig().content_policy


def test_every_prompt_says_its_format_again():
    picture, config = Picture("a", "1"), RmirConfig()
    for request, last in (
        (prompts.generate_request(config, picture), "</Example_CODE_1>"),
        (prompts.filter_request(config, picture, "q", "t"), "<is_valid>yes or no</is_valid>"),
        (
            prompts.judge_request(config, picture, "q", picture, "judge", 0),
            "<consistent>True, False or ABSTAIN</consistent>",
        ),
    ):
        assert request.form.startswith("<")
        assert request.form.endswith(last)


# ------------------------------------------------------------------------------------------------------------------- leaks

NAMES = [
    "The cork sits too tight for fingers, so a corkscrew is needed.",
    "To open it somebody takes a corkscrew with a handle.",
    "A tool pulls the cork out of the bottle.",
]
DESCRIBES = [
    "It shows a corkscrew with a wooden handle on a green tablecloth beside glasses.",
    "On a green tablecloth lies, beside two glasses, a wooden corkscrew.",
]


def test_the_leak_of_a_picture_separates_naming_from_describing():
    caption, known = (
        "A corkscrew with a wooden handle on a green tablecloth beside two glasses",
        "What opens this?",
    )
    named = [caption_leak(text, caption, known) for text in NAMES]
    described = [caption_leak(text, caption, known) for text in DESCRIBES]
    assert named == [0, 0, 0]
    assert min(described) > 0.5
    assert caption_leak(f"So it is this: {caption}.", caption, known) == 1, "a quotation"
    assert caption_leak(DESCRIBES[0], None) is None, "not measured, which is not 0"
    assert caption_leak("A fire engine comes.", "a fire engine") == 0, "a name is no description"
    assert caption_leak(DESCRIBES[0], caption, caption) == 0, "what the query says is no secret"


def test_the_leak_by_embedding_by_hand():
    """The target stands out of what fits by .3, of all others by .6; or not at all out of it; or the text points elsewhere."""
    fitting, rest = [0.6] * 3, [0.17, 0.18, 0.16, 0.17, 0.17, 0.17, 0.18]
    others = np.array([*fitting, *rest])
    assert embedding_leak(np.array([0.9, *others]), 0) == pytest.approx(0.3 / (0.9 - others.mean()))
    assert embedding_leak(np.array([0.6, *others]), 0) == 0
    assert embedding_leak(np.array([0.1, *others]), 0) == 0
    assert embedding_leak(np.array([*[0.2] * 15, 0.9]), 15) == 1
    scaled = embedding_leak(np.array([0.9, *others]) * 0.1 + 3, 0)
    assert scaled == pytest.approx(0.3 / (0.9 - others.mean())), "the scale of an encoder does not matter"


def test_the_leak_by_embedding_separates_naming_from_describing():
    """Three things, each on six grounds: what is needed is the thing, the ground is what only the target shows."""
    grounds = ("red", "green", "blue", "yellow", "black", "white")
    captions = {
        f"{thing}-{ground}": f"a {thing} on a {ground} ground"
        for thing in ("ball", "cube", "kettle")
        for ground in grounds
    }
    shown = {name: f"{name}.png" for name in captions}
    encoder = Seer(captions)
    names = [(name, f"What is needed here is a {name.split('-')[0]}.", "") for name in shown]
    describes = [(name, f"It shows {caption}.", "") for name, caption in captions.items()]
    asked = [(name, f"It shows {caption}.", caption) for name, caption in captions.items()]
    named, described, known = (picture_leaks(encoder, shown, texts) for texts in (names, describes, asked))
    assert np.mean(described) > np.mean(named) + 0.25
    assert max(named) < min(described)
    assert np.mean(known) < 0.1, "what the query says is no secret"
    few = dict(list(shown.items())[:MIN_OTHERS])
    assert set(picture_leaks(encoder, few, describes)) == {None}, "too few to tell a kind"


def test_a_model_that_is_served_by_its_path_is_published_without_the_path(tmp_path):
    config = config_of(tmp_path / "out", tmp_path)
    config.models["writer"].name, config.caption.model = "/secret/weights/qwen/", "writer"
    run = Run(config, progress=False)
    frames.write_rows(
        run.path("seed", "images.parquet"), [dict.fromkeys(frames.SCHEMAS["images"].names) | {"id": "a"}]
    )
    frames.write_rows(
        run.path("caption", "captions/part-00000.parquet"), [{"id": "a", "caption": "a hat", "key": "k"}]
    )
    [image] = run.images()
    run.close()
    settings = report.published(config)
    assert (image["caption_by"], settings["models"]["writer"]["name"]) == ("qwen", "qwen")
    assert settings["models"]["judge"]["name"] == "judge"


@pytest.mark.slow
def test_the_data_set_says_where_each_picture_is_from_and_nothing_of_its_camera(tmp_path):
    """A photograph on its side with a device in its EXIF, and a table that knows two authors."""
    one_family(tmp_path / "plain.csv")
    exif = Image.Exif()
    exif[0x0110] = "MyPhone"
    with (tmp_path / "plain.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    by_bytes = {}
    (tmp_path / "photos").mkdir()
    for number, row in enumerate(rows):
        path = tmp_path / "photos" / f"{number}.png"
        load_image(row["image"]).save(path, exif=exif)
        by_bytes[str(path)] = picture_bytes(row["image"])
        row |= {
            "image": str(path),
            "author": "Ada" if number % 2 else "",
            "licence": "CC0" if number % 2 else "",
        }
    with (tmp_path / "library.csv").open("w", newline="") as out:
        table = csv.DictWriter(out, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    answers = oracle.Oracle(transient=0, malformed=0, bad_queries=0)
    # The oracle knows pictures by their bytes: it is told those that are sent.
    for path, original in by_bytes.items():
        sent = without_metadata(Path(path).read_bytes())
        answers.shown[hashlib.sha256(sent).hexdigest()] = answers.shown[hashlib.sha256(original).hexdigest()]
    received = []

    async def answer(path, body):
        received.append(json.dumps(body))
        await asyncio.sleep(0)
        return await answers(path, body)

    with LocalServer(answer) as server:
        config = config_of(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.library.licence = "see LICENSES"
        run = Run(config, progress=False)
        run_stages(run, STAGES)
    assert received
    expected = {row["id"]: row for row in rows}
    for threshold, suffix in (
        (0.0, ".parquet"),
        (1.0, ".png"),
    ):  # all of it as test set, then as training set
        config.split.tsr_threshold = threshold
        run_stages(run, ["split"])
        files = [path for path in (tmp_path / "out" / "dataset").rglob("*") if path.is_file()]
        assert any(path.suffix == suffix for path in files)
        assert not any(b"MyPhone" in path.read_bytes() for path in files)
        origins = {
            row["id"]: row for row in pq.read_table(tmp_path / "out/dataset/pictures.parquet").to_pylist()
        }
        assert origins
        for name, found in origins.items():
            assert found["author"] == (expected[name]["author"] or None)
            assert found["licence"] == (expected[name]["licence"] or "see LICENSES")
            assert found["path"] is None or (tmp_path / "out/dataset" / found["path"]).is_file()
    before = (tmp_path / "out/dataset/pictures.parquet").read_bytes()
    (tmp_path / "library.csv").rename(tmp_path / "gone.csv")  # with it would go whom to credit
    config.split.tsr_threshold = 0.5
    with error_about(UserError, "library.csv"):
        run_stages(run, ["split"])
    assert (tmp_path / "out/dataset/pictures.parquet").read_bytes() == before
    (tmp_path / "gone.csv").rename(tmp_path / "library.csv")
    config.split.tsr_threshold = 1.0
    captions = read_captions(tmp_path / "out/dataset/train.jsonl", None)
    assert captions == {name: row["caption"] for name, row in origins.items() if row["caption"]}
    assert "The run is not finished" in (tmp_path / "out/dataset/README.md").read_text()
    table = (tmp_path / "library.csv").read_text()
    (tmp_path / "library.csv").write_text(table.replace("CC0", "CC BY"))
    calls = len(received)
    run_stages(run, STAGES)
    licences = pq.read_table(tmp_path / "out/dataset/pictures.parquet")["licence"].to_pylist()
    assert {"CC BY"} <= {*licences} <= {"CC BY", "see LICENSES"}, "a licence that was corrected in the table"
    assert len(received) == calls
    (tmp_path / "library.csv").write_text(table)
    run_stages(run, STAGES)
    report.write(run)
    run.close()
    check_card(tmp_path / "out", tmp_path)


def check_card(out, tmp_path):
    """Composition, settings, costs, agreement, licences, shortcuts; no path, address or key; people as soon as they looked."""
    card, found = out / "dataset/README.md", json.loads((out / "report.json").read_text())
    text = card.read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert (head["license"], head["size_categories"]) == ("other", ["n<1K"])
    subsets = {one["config_name"]: one["data_files"][0]["path"] for one in head["configs"]}
    assert all((out / "dataset" / path).is_file() for path in subsets.values())
    numbers = {what: number for what, number, _ in found["funnel"]}
    assert f"| all | {numbers['training queries']} | {numbers['test queries']} |" in text
    pictures = pq.read_table(out / "dataset/pictures.parquet").to_pylist()
    for licence in ("CC0", "see LICENSES"):
        assert f"| {licence} | {sum(row['licence'] == licence for row in pictures)} |" in text
    assert f"the author of {sum(row['author'] == 'Ada' for row in pictures)} of {len(pictures)}" in text
    for words in (
        "tsr_threshold: 1.0",
        "| judge | ",
        "Fleiss' kappa",
        "## Known shortcuts",
        "No human has reviewed",
    ):
        assert words in text
    secret = [str(tmp_path), "127.0.0.1", "key_env", "base_url"]
    assert not [
        word for word in secret for path in card.parent.glob("*.*") if word.encode() in path.read_bytes()
    ]
    decided = pq.read_table(out / "keep/decided.parquet").to_pylist()
    kept = [f"{row['query_id']} -> {row['candidate_id']}" for row in decided if row["state"] == "kept"][:4]
    verdicts = {
        key: {"verdict": word}
        for key, word in zip(kept, ("accept", "reject", "unsure", "accept"), strict=True)
    }
    (tmp_path / "ada.json").write_text(json.dumps({"verdicts": verdicts}))
    main(["agreement", f"run={out}", f"verdicts={tmp_path / 'ada.json'}"])
    row = json.loads((out / "agreement.json").read_text())["rows"]["panel accepted"]
    shown = f"people accepted 66.7 % {in_words(row['low'], row['high'])} (95 % interval, clustered by {row['queries']} queries"
    assert shown in card.read_text()
    assert "on 1 more they were unsure" in card.read_text()


def test_doubted_images_may_leave_the_list_before_tsr(tmp_path):
    """Ranks kept, doubted, rejected of K = 3: [0, 0, 1] as retrieved, [0, 1, 1] without the doubted one, padded."""
    values = {}
    for how in ("retrieved", "surviving"):
        config = config_of(tmp_path / how, tmp_path, "http://host/v1")
        config.retrieve.by_image, config.split.tsr_list = 3, how
        run = Run(config, progress=False)
        Image.new("RGB", (40, 40)).save(tmp_path / "a.png")

        def table(stage, name, schema, rows, run=run):
            columns = frames.SCHEMAS[schema].names
            frames.write_rows(run.path(stage, name), [{key: row.get(key) for key in columns} for row in rows])

        names = ("in", "right", "doubted", "wrong")
        ref = str(tmp_path / "a.png")
        table(
            "seed",
            "images.parquet",
            "images",
            [{"id": name, "ref": ref, "sha256": look(ref, 1)["sha256"]} for name in names],
        )
        query = {"query_id": "q", "image_id": "in", "category": "causal", "query": "?", "target_desc": "t"}
        table("generate", "queries/part-00000.parquet", "queries", [query])
        votes = {"right": ["true"] * 5, "doubted": ["true"] * 3 + ["false"] * 2, "wrong": ["false"] * 5}
        table("retrieve", "triplets.parquet", "triplets", [
            {"query_id": "q", "candidate_id": name, "position": rank, "image_rank": rank + 1, "found_by": ["image"]}
            for rank, name in enumerate(votes)
        ])  # fmt: skip
        table("judge", "judgements/part-00000.parquet", "judgements", [
            {"query_id": "q", "candidate_id": name, "judge": "judge", "sample": number, "verdict": verdict}
            for name, verdicts in votes.items() for number, verdict in enumerate(verdicts)
        ])  # fmt: skip
        stages.keep(run)
        stages.pool(run)
        stages.split(run)
        values[how] = run.rows("split", "splits")[0]["tsr"]
        run.close()
    assert values["retrieved"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert values["surviving"] == pytest.approx((2 / 3 + 1 + 1) / 3)

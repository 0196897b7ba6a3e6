"""MMEB's training layout into records: made rows of every kind, and the same wording in training and in evaluation."""

import io
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from hub import COMMIT, hub
from PIL import Image

from data_prep import mmeb
from data_prep.__main__ import main
from data_prep.mmeb import TRAINED, MmebOptions
from data_prep.rationales.leak import text_leak
from data_prep.rationales.prompts import bare_text, task_of
from rge.calls.local_server import LocalServer, chat
from rge.common.errors import UserError
from rge.common.mmeb_prompts import RGE_CANDIDATE, RGE_PREFIX, RGE_QUERY, SETS, canonical, split_instruction
from rge.common.parts import content_of
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Item
from rge.data.sources import RecordFile
from rge.model.prompts import user_text

PLACE = "<|image_1|>\n"


def convert(src, out, **options):
    return mmeb.convert(MmebOptions(src, out, **options))


def row(qry="", qry_image="", pos="", pos_image="", neg="", neg_image=""):
    return {
        "qry": qry, "qry_image_path": qry_image, "pos_text": pos, "pos_image_path": pos_image,
        "neg_text": neg, "neg_image_path": neg_image,
    }  # fmt: skip


ROWS = {
    "ImageNet_1K": [
        row(f"{PLACE}Represent the given image for classification", "images/I/0.png", "cat", neg="dog"),
        row(f"{PLACE}Represent the given image for classification", "images/I/1.png", "cat", neg="cat"),
        row(f"{PLACE}Represent the given image for classification", "images/I/2.png", ""),
    ],
    "OK-VQA": [
        row(
            f"{PLACE}Represent the given image with the following question: What is it?",
            "images/I/0.png",
            "a cat",
        ),
        row(f"{PLACE}Tell me in your own way: What is it?", "images/I/0.png", "a cat"),
    ],
    "MSCOCO_t2i": [
        row(
            "Find me an everyday image that matches the given caption: A cat",
            pos=f"{PLACE}Represent the given image.",
            pos_image="images/I/0.png",
            neg=f"{PLACE}Represent the given image.",
            neg_image="images/I/1.png",
        ),
        row(pos=f"{PLACE}Represent the given image.", pos_image="images/I/0.png"),
    ],
}


@pytest.fixture
def release(tmp_path):
    """Three sets in the released layout; the third picture of ImageNet is there but its row has no target."""
    src = tmp_path / "MMEB-train"
    (src / "images" / "I").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (8, 8), (number * 80, 0, 0)).save(src / "images" / "I" / f"{number}.png")
    for name, rows in ROWS.items():
        (src / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), src / name / "original-00000-of-00001.parquet")
    return src


def records(out, name):
    RecordFile(out / f"{name}.jsonl")
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_rows_become_records(release, tmp_path, capsys):
    out = tmp_path / "out"
    main(["mmeb", f"src={release}", f"out={out}", "sets=ImageNet_1K,OK-VQA,MSCOCO_t2i"])
    said = capsys.readouterr().out
    assert "ImageNet-1K: read 3" in said
    assert "train on them with profile: plain" in said
    assert json.loads((out / "report.json").read_text())["wording"] == "included"
    first, second = records(out, "ImageNet-1K")
    assert (first["instruction"], first["query"]) == (
        "Represent the given image for classification",
        {"images": ["../MMEB-train/images/I/0.png"]},
    )
    assert (out / first["query"]["images"][0]).is_file()
    assert first["positives"][0]["text"] == "cat"
    assert first["negatives"][0]["text"] == "dog"
    assert first["positives"][0]["id"] == second["positives"][0]["id"], "equal classes are one target"
    assert "negatives" not in second, "a negative that equals the target is none"
    asked, free = records(out, "OK-VQA")
    assert (asked["instruction"], asked["query"]["text"]) == (
        "Represent the given image with the following question:",
        "What is it?",
    )
    assert "instruction" not in free
    assert free["query"]["text"] == "Tell me in your own way: What is it?"
    assert asked["group"] == free["group"], "one picture is one group"
    [found] = records(out, "MSCOCO_t2i")
    assert found["positives"][0]["image"] == "../MMEB-train/images/I/0.png"
    assert found["positives"][0]["text"] == "Represent the given image."
    assert found["negatives"][0]["image"] == "../MMEB-train/images/I/1.png"
    counts = json.loads((out / "report.json").read_text())["sets"]
    assert counts["ImageNet-1K"]["left out: empty target"] == 1
    assert counts["ImageNet-1K"]["negatives equal to the target"] == 1
    assert counts["MSCOCO_t2i"]["left out: empty query"] == 1


def test_the_wordings_of_rge(release, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "deep")
    convert(release, tmp_path / "out", sets=["ImageNet-1K", "MSCOCO_t2i"], instructions="rge")
    first = records(tmp_path / "out", "ImageNet-1K")[0]
    assert (tmp_path / "out" / first["query"]["images"][0]).is_file()
    assert (
        first["instruction"]
        == "Identify the category of the main object in the given image for classification"
    )
    assert first["positives"][0]["text"] == "Summarize the following object category in one word: cat"
    [found] = records(tmp_path / "out", "MSCOCO_t2i")
    assert found["instruction"].startswith("Describe and represent the following descriptive caption")
    assert found["positives"][0]["text"] == "Summarize the given image in one word."


@pytest.mark.parametrize("name", SETS)
def test_a_text_is_not_changed_by_being_split(name):
    """Training reads instruction and text, evaluation the whole text: the prompt must be the same."""
    wording = RGE_QUERY[name][0]
    for text in (
        wording,
        f"{wording} rest of it",
        f"{wording}: a\nb",
        f"{wording.removesuffix(':')}:\nx",
        "y",
    ):
        instruction, rest = split_instruction(name, text)
        joined = user_text(
            Item("1", content_of(rest or None), instruction=instruction), "query", PROFILES["plain"]
        )
        assert joined == text
    assert split_instruction(name, f"{wording} rest of it")[0] is not None


def test_the_sets_that_are_trained_on():
    assert len(TRAINED) == 20
    assert canonical("ImageNet_1K") == "ImageNet-1K"
    assert canonical("nothing_known") == "nothing_known"


TASKS = {
    "ImageNet-1K": "classification", "N24News": "classification", "HatefulMemes": "classification",
    "VOC2007": "classification", "SUN397": "classification", "OK-VQA": "vqa", "A-OKVQA": "vqa", "DocVQA": "vqa",
    "InfographicsVQA": "vqa", "ChartQA": "vqa", "Visual7W": "vqa", "VisDial": "text_to_image",
    "CIRR": "composed_retrieval", "VisualNews_t2i": "text_to_image", "VisualNews_i2t": "image_to_text",
    "MSCOCO_t2i": "text_to_image", "MSCOCO_i2t": "image_to_text", "NIGHTS": "image_to_image",
    "WebQA": "text_to_image", "MSCOCO": "grounding",
}  # fmt: skip


def says_of(name):
    """Content of a set's target; none where it only shows a picture."""
    if name == "HatefulMemes":
        return "Yes"
    return "a striped cat" if TASKS[name] not in SHOWS_PICTURE or name == "WebQA" else ""


SHOWS_PICTURE = ("text_to_image", "image_to_image", "composed_retrieval", "grounding")


@pytest.fixture
def all_sets(release):
    """One row of each training set, in the released wordings."""
    for name in TRAINED:
        shows_picture, says = TASKS[name] in SHOWS_PICTURE, says_of(name)
        wrapper = RGE_CANDIDATE.get(name, ("",))[0]
        target = f"{PLACE}{wrapper}{f': {says}' if says else '.'}" if wrapper else says
        asked = (
            ""
            if TASKS[name] in ("classification", "image_to_text", "image_to_image")
            else f" What is it, {name}?"
        )
        has_picture = TASKS[name] != "text_to_image"
        row_ = row(
            f"{PLACE if has_picture else ''}{RGE_QUERY[name][0]}{asked}",
            "images/I/0.png" if has_picture else "",
            target,
            "images/I/1.png" if shows_picture else "",
        )
        (release / name).mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row_]), release / name / "original-00000-of-00001.parquet")
    return release


@pytest.mark.parametrize("instructions", ["vlm2vec", "rge"])
def test_every_training_set_has_its_task_and_leaks_by_content(all_sets, tmp_path, instructions):
    """In both wordings; a target that only says "Represent the given image" has no text that could be copied."""
    convert(all_sets, tmp_path / "out", sets=TRAINED, instructions=instructions)
    for name in TRAINED:
        record, says = RecordFile(tmp_path / "out" / f"{name}.jsonl")[0], says_of(name)
        [positive] = record.positives
        assert record.wording == "included"
        assert task_of(record, positive) == TASKS[name]
        bare = bare_text(record, positive)
        assert bare == (says or None)
        assert text_leak("It must be a striped cat, yes.", bare) == (1 if says else None)


@pytest.mark.slow
def test_the_writer_sees_the_bare_question_and_answer_of_every_training_set(all_sets, tmp_path):
    """Not the words that ask an embedder for one word: a model that follows instructions would obey the last of them."""
    asked = {}

    async def answer(path, body):
        content = body["messages"][-1]["content"]
        texts = [part["text"] for part in content if part["type"] == "text"]
        asked.setdefault(wording, []).append((texts, len(content) - len(texts)))
        return chat("<rationale>A ladder leans on the roof, so somebody repairs it.</rationale>")

    with LocalServer(answer) as server:
        for wording in ("vlm2vec", "rge"):
            records = tmp_path / wording
            convert(all_sets, records, sets=TRAINED, instructions=wording)
            out, about = tmp_path / f"{wording}_out", [f"model.base_url={server.url}", "model.concurrency=1"]
            main(["rationales", f"records={records}", f"out={out}", "model.name=m", *about])
    assert asked["vlm2vec"] == asked["rge"]  # so one's answers would serve the other
    wordings = {
        word.rstrip(" .:") for pair in (*RGE_QUERY.values(), *RGE_CANDIDATE.values()) for word in pair
    }
    wordings |= {prefix.rstrip(" .:") for prefix in RGE_PREFIX.values()}
    for name, (texts, num_pictures) in zip(sorted(TRAINED), asked["rge"], strict=True):
        whole = "\n".join(texts)
        assert not [wording for wording in wordings if wording in whole], name
        says, task = says_of(name), TASKS[name]
        assert num_pictures == (task != "text_to_image") + (task in SHOWS_PICTURE)
        assert texts[-2:][: bool(says)] == ([f"<answer>{says}</answer>"] if says else [])
        question = texts[1].partition("\n")[0]
        assert question.endswith("?") or f"<query>What is it, {name}?</query>" in question, name


def test_a_missing_picture_stops_or_is_counted(release, tmp_path):
    (release / "images" / "I" / "0.png").unlink()
    with error_about(UserError, "images/I/0.png", "missing"):
        convert(release, tmp_path / "out", sets=["ImageNet-1K"])
    assert not (tmp_path / "out").exists()
    report = convert(release, tmp_path / "out", sets=["ImageNet-1K"], missing="drop")
    assert report["sets"]["ImageNet-1K"]["left out: picture is missing"] == 1
    assert len(records(tmp_path / "out", "ImageNet-1K")) == 1


def test_so_many_rows_of_a_set(release, tmp_path):
    rows = [
        row(f"Find me an everyday image that matches the given caption: {n}", pos=str(n)) for n in range(50)
    ]
    pq.write_table(pa.Table.from_pylist(rows), release / "MSCOCO_t2i" / "original-00000-of-00001.parquet")
    for out in ("a", "b"):
        convert(release, tmp_path / out, sets=["MSCOCO_t2i"], max_per_set=10)
    drawn = [found["id"] for found in records(tmp_path / "a", "MSCOCO_t2i")]
    assert len(drawn) == 10
    assert drawn == [found["id"] for found in records(tmp_path / "b", "MSCOCO_t2i")]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "sets"),
        (["sets=OKVQA"], ("choice", "sets")),
        (["sets=OK-VQA", "split=diverse_instruction"], "sets"),
        (["sets=OK-VQA", "split=test"], ("choice", "split")),
        (["sets=OK-VQA", "max_per_set=few"], ("type", "max_per_set")),
    ],
)
def test_wrong_words(release, tmp_path, words, field):
    with error_about(UserError, field):
        main(["mmeb", f"src={release}", f"out={tmp_path / 'out'}", *words])


def test_a_column_that_is_missing_is_named(release, tmp_path):
    rows = [{key: value for key, value in found.items() if key != "pos_text"} for found in ROWS["OK-VQA"]]
    pq.write_table(pa.Table.from_pylist(rows), release / "OK-VQA" / "original-00000-of-00001.parquet")
    with error_about(UserError, "OK-VQA", "row 1", "pos_text"):
        convert(release, tmp_path / "out", sets=["OK-VQA"])


def test_a_query_that_is_only_its_instruction_is_empty(release, tmp_path):
    wording = "Represent the given image for classification"
    rows = [row(f"{PLACE}{wording}", pos="cat"), row(f"{PLACE}{wording}", "images/I/0.png", "cat")]
    pq.write_table(pa.Table.from_pylist(rows), release / "ImageNet_1K" / "original-00000-of-00001.parquet")
    report = convert(release, tmp_path / "out", sets=["ImageNet-1K"])
    assert report["sets"]["ImageNet-1K"]["left out: empty query"] == 1
    assert len(records(tmp_path / "out", "ImageNet-1K")) == 1


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"qry": 5}, "qry"),
        ({"pos_image_path": [7]}, "pos_image_path"),
        ({"qry": ["a", "b"]}, "qry_image_path"),
        ({"qry": ["a", "b"], "qry_image_path": ["", ""]}, "qry"),
    ],
)
def test_a_row_that_does_not_fit_is_named(release, tmp_path, changed, key):
    folder = release / "OK-VQA"
    (folder / "original-00000-of-00001.parquet").unlink()
    (folder / "original.jsonl").write_text(json.dumps(row("What is it?", pos="cat") | changed) + "\n")
    with error_about(UserError, "OK-VQA", "row 1", key):
        convert(release, tmp_path / "out", sets=["OK-VQA"])


@pytest.fixture
def stand_in(monkeypatch):
    """A hub with 30 rows of each of the twenty sets, and their pictures in archives."""
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_test")
    with hub(monkeypatch) as held:
        for name in [name.replace("ImageNet-1K", "ImageNet_1K") for name in TRAINED]:
            asked = RGE_QUERY[canonical(name)][0]
            rows = [
                row(
                    f"{PLACE}{asked}: what is {number}",
                    f"images/{name}/{number % 2}.png",
                    f"{name} {number}",
                    neg="no",
                )
                for number in range(30)
            ]
            sink, archive = io.BytesIO(), io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows), sink)
            with zipfile.ZipFile(archive, "w") as file:
                for number in range(2):
                    picture = io.BytesIO()
                    Image.new("RGB", (30, 40), (100 * number, len(name), 0)).save(picture, "png")
                    file.writestr(f"{name}/{number}.png", picture.getvalue())
            held.files[f"{name}/original-00000-of-00001.parquet"] = sink.getvalue()
            held.files[f"images_zip/{name}.zip"] = archive.getvalue()
        yield held


def test_a_release_is_fetched_counted_and_imported(stand_in, tmp_path, capsys):
    out, made = tmp_path / "MMEB-train", tmp_path / "mmeb"
    words = ["mmeb", "fetch", f"out={out}", f"records={made}"]
    with error_about(UserError, "MMEB-train", "partial"):
        main(words)
    assert not made.exists()
    downloads = sum("/resolve/" in one and one.startswith("GET") for one in stand_in.asked)
    assert downloads == 40
    main([*words, "partial=true"])
    assert sum("/resolve/" in one and one.startswith("GET") for one in stand_in.asked) == downloads
    assert "WARNING: partial: ImageNet-1K has 30 of" in capsys.readouterr().err
    about = json.loads((out / "fetch.json").read_text())
    assert about["commits"] == {"TIGER-Lab/MMEB-train": COMMIT}
    assert about["rows"] == dict.fromkeys(TRAINED, 30)
    assert sorted(path.stem for path in made.glob("*.jsonl")) == sorted(TRAINED)
    assert all(len(records(made, name)) == 30 for name in TRAINED)
    some = tmp_path / "some"
    main(["mmeb", "fetch", f"out={some}", "sets=ImageNet-1K,CIRR", "partial=true"])
    assert sorted(path.name for path in some.glob("*/*.parquet")) == ["original-00000-of-00001.parquet"] * 2
    assert not (some / "WebQA").exists()


@pytest.mark.slow
def test_the_papers_recipe_trains_on_the_stand_in(stand_in, tmp_path, tiny_path, monkeypatch):
    """All of it but the model, with rationales that nobody wrote."""
    from rge import train
    from rge.checkpoints.settings import read_settings
    from rge.config import load_recipe

    monkeypatch.chdir(tmp_path)
    main(["mmeb", "fetch", "out=data/MMEB-train", "records=data/mmeb", "partial=true"])
    (tmp_path / "data/joint").mkdir()
    for name in TRAINED:
        lines = records(tmp_path / "data/mmeb", name)
        for line in lines:
            for target in line["positives"]:
                target["rationale"] = f"it shows {name}"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"data/joint/{name}.jsonl").write_text(text)
    recipe = ["recipe=mmeb"]
    sources = load_recipe(recipe).joint.sources
    assert [source.name for source in sources] == list(TRAINED)
    assert sources == load_recipe(recipe).cold_start.sources
    small = [
        "model.min_pixels=784",
        "model.max_pixels=1568",
        "model.dtype=float32",
        "rollout.max_new_tokens=4",
    ]
    small += [
        "cold_start.steps=1",
        "joint.steps=2",
        "cold_start.batch_size=20",
        "joint.batch_size=40",
        "data.num_workers=0",
    ]
    train.main([*recipe, f"model.path={tiny_path}", "train.micro_batch_size=40", "train.log_every=1", *small])
    lines = [
        json.loads(line) for line in (tmp_path / "runs/mmeb/joint/metrics.jsonl").read_text().splitlines()
    ]
    for line in lines:
        assert line["queries_by_source"] == dict.fromkeys(TRAINED, 2)
        assert line["loss_contrastive_by_source"].keys() == set(TRAINED)
        assert line["labelled_negatives_mean"] == 0
    assert lines[-1]["passes"] == dict.fromkeys(TRAINED, round(4 / 30, 4))
    final = read_settings(tmp_path / "runs/mmeb/joint/final")
    assert (final.profile, final.tasks) == ("plain", {})
    assert final.instructions.by_task.keys() == set(TRAINED)


def test_published_counts_sum_to_the_papers_662_thousand():
    # VLM2Vec draws at most 50 thousand rows of each set.
    assert sum(min(rows, 50) for rows in mmeb.PUBLISHED.values()) == 662
    assert mmeb.PUBLISHED.keys() == {*TRAINED}

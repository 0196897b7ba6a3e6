"""Run identity: everything that a result depends on, and how two of them differ.

`run_identity` is stored in ``backbone/identity.json``, in the ``done.json`` of a training state, in the ``rge.json`` of a checkpoint
and in the ``results.json`` of an evaluation. Resuming, reusing a backbone, reading cached embeddings, comparing evaluations and
``rge compare-runs A B`` use `differences`, and report what one of the two does not record as `unknown`.
"""

import ast
import codecs
import hashlib
import importlib.metadata
import json
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import rge
from rge.common.files import HOME
from rge.common.registry import OURS, plugins_loaded, registered_by

IDENTITY = "identity.json"
"""For folders without another JSON file."""
EXACT_BYTES = 8 << 30
"""Up to this size files are hashed completely, in a minute at 140 MB/s; of larger ones, `BLOCKS` evenly spaced blocks."""
BLOCKS, BLOCK_BYTES = 4096, 1 << 16
MODULES, PACKAGES = "software.modules.", "software.packages."
PYTHON = tuple(sysconfig.get_path(name) for name in ("stdlib", "scripts"))
"""Where Python itself is."""
GONE = "gone"
"""In place of the hash of a module whose file is not there."""
SHOWN = 8
"""Modules listed by name."""

Identity = dict[str, Any]


def run_identity(*, but: Sequence[str] = (), **parts: Any) -> Identity:
    """The identity of a run: `parts` (of a training ``records``, ``start`` and ``launch``), and its software; see there for `but`.

    ``machine`` is recorded but never makes anything stale.
    """
    return {**parts, "software": software(but=but), "plugins": plugins(), "machine": machine()}


def software(rooms: Sequence[str] = OURS, but: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Hashes of the loaded modules of ours (in `rooms`, not in `but`) and of the user, and versions of the loaded packages.

    Comments and docstrings do not count. Modules of plugins are in `plugins`.
    """
    loaded = _loaded()
    modules = {
        name: _code_of(path)
        for name, path in loaded.files.items()
        if _top(name) not in loaded.plugins
        and (_top(name) not in OURS or (_is_in(name, rooms) and not _is_in(name, but)))
    }
    return {
        "modules": dict(sorted(modules.items())),
        "packages": {name: _version_now(name) for name in (*loaded.packages, "python", "rge")},
    }


def plugins(*, figures: bool = True) -> dict[str, Identity]:
    """Plugin modules: their entries, and a hash of the loaded modules of their package.

    Without `figures`, omits those that registered only metrics and benchmarks, which do not affect embeddings.
    """
    found = {}
    for name in sorted(plugins_loaded()):
        if (entries := registered_by(name, figures=figures)) is not None:
            files = _loaded().files.items()
            modules = {module: _code_of(path) for module, path in files if _top(module) == _top(name)}
            found[name] = {"gives": entries, "code": digest(modules)[:12]}
    return found


def machine() -> Identity:
    """CPU, its vector instructions, and torch's threads, which change a float32 score by about 1e-7."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found: Identity = {"cpu": next(names, platform.processor() or platform.machine())}
    if (torch := sys.modules.get("torch")) is not None:
        found |= {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    return found


def changes_since(then: Identity) -> dict[str, tuple[Any, Any]]:
    """How the software of an earlier run (its `software_of`) differs from the same modules and packages now, see `differences`.

    All its modules are compared, loaded now or not: which ones are loaded also depends on the command.
    """
    files, software = _loaded().files, then["software"]
    now = {
        "modules": {name: _code_now(name, files) for name in software["modules"]},
        "packages": {name: _version_now(name) for name in software["packages"]},
    }
    return differences(then, {"software": now, "plugins": plugins(figures=False)})


def software_of(rooms: Sequence[str]) -> Identity:
    """The identity of embeddings and scores that are computed now, for `changes_since`."""
    return {"software": software(rooms), "plugins": plugins(figures=False)}


def joined(then: Identity | None, now: Identity) -> Identity:
    """`software_of` a run that continues valid results of an earlier one: the modules and packages of either."""
    if then is None:
        return now
    software = {part: then["software"][part] | values for part, values in now["software"].items()}
    return {**now, "software": software}


def still_valid(made_with: Sequence[Identity], rooms: Sequence[str]) -> Identity:
    """The first of `made_with` without changes since, else `software_of` the rooms now."""
    return next((then for then in made_with if not changes_since(then)), None) or software_of(rooms)


@cache
def version_of(*modules: ModuleType) -> str:
    """Hash of modules and packages of ours, and of the versions of the packages that these import."""
    roots = [Path(str(module.__file__)) for module in modules]
    files = [
        file for root in roots for file in ([root] if root.stem != "__init__" else root.parent.glob("*.py"))
    ]
    imported: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_bytes()))):
        if isinstance(node, ast.Import):
            imported.update(_top(name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(_top(node.module))
    packages = {name: _version_now(name) for top in imported for name in _distributions().get(top, ())}
    return digest([sorted((str(file.relative_to(HOME)), _code_of(file)) for file in files), packages])


def content_of(path: Path, but: Sequence[str] = (), *, like: str = "*") -> Identity:
    """Size and hash of a file or of the files in a folder (`like` this pattern, `but` not these names), and what was read.

    Hidden files do not count: a Mac leaves ``.DS_Store`` and ``._*`` behind, and ``hf download`` the time of its last look.
    """
    if path.is_file():
        size, exact = path.stat().st_size, path.stat().st_size <= EXACT_BYTES
        return {"bytes": size, "sha256": _sha256_of(path, exact), "read": _how_read(exact)}
    files = [
        file
        for file in sorted(path.rglob(like))
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.name not in but
        and file.is_file()
    ]
    size = sum(file.stat().st_size for file in files)
    hashes = {str(file.relative_to(path)): _sha256_of(file, size <= EXACT_BYTES) for file in files}
    return {"bytes": size, "sha256": digest(hashes), "read": _how_read(size <= EXACT_BYTES)}


def _how_read(exact: bool) -> str:
    return "all" if exact else f"{BLOCKS} blocks of {BLOCK_BYTES} bytes of each larger file"


def _sha256_of(path: Path, exact: bool) -> str:
    size = path.stat().st_size
    with path.open("rb") as content:
        if exact or size <= BLOCKS * BLOCK_BYTES:
            if content.read(3) != codecs.BOM_UTF8:  # records are hashed without it
                content.seek(0)
            return hashlib.file_digest(content, "sha256").hexdigest()
        sampled = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            content.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            sampled.update(content.read(BLOCK_BYTES))
        return sampled.hexdigest()


def differences(a: Identity, b: Identity) -> dict[str, tuple[Any, Any]]:
    """Differences of two identities: ``part.key`` -> (value in a, value in b).

    Omits parts that one of them does not record, see `unknown`, and modules and packages that only one of them loaded, since that
    follows from another difference: a key, a plugin or a module.
    """
    flat_a, flat_b = flattened(a), flattened(b)
    return {
        key: (flat_a.get(key), flat_b.get(key))
        for key in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(key) != flat_b.get(key)
        and a.get(_top(key)) is not None
        and b.get(_top(key)) is not None
        and (not key.startswith("software.") or (key in flat_a and key in flat_b))
    }


def unknown(a: Identity, b: Identity) -> list[str]:
    """Parts that only one of the two identities records."""
    named = dict.fromkeys([*a, *b, MODULES.rstrip("."), PACKAGES.rstrip(".")])
    return [part for part in named if (_part(a, part) is None) != (_part(b, part) is None)]


def in_words(apart: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Describe differences for people: which file, key or module."""
    lines: dict[str, list[str]] = {}
    for name, pair in apart.items():
        part, _, rest = name.partition(".")
        a, b = (_shown(value) for value in pair)
        head, item = f"{part}:", f"{rest} {a} and {b}"
        if name.startswith(MODULES):
            head, item = "code of", name.removeprefix(MODULES)
        elif name.startswith(PACKAGES):
            head, item = "versions:", f"{name.removeprefix(PACKAGES)} {a} and {b}"
        elif part == "records":
            file, _, what = rest.rpartition(".")
            head, item = f"records of {file}:", f"{what} {a} and {b}"
        elif part == "recipe":
            head, item = f"{rest}:", f"{a} and {b}"
        lines.setdefault(head, []).append(item)
    return [
        f"{head} {', '.join(items[:SHOWN])}{f' and {len(items) - SHOWN} more' if len(items) > SHOWN else ''}"
        for head, items in lines.items()
    ]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Identity:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists stay whole."""
    leaves: Identity = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flattened(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves


def digest(value: Any) -> str:
    """Sha256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _top(name: str) -> str:
    return name.partition(".")[0]


def _part(identity: Identity, name: str) -> Any:
    outer, _, inner = name.partition(".")
    return (identity.get(outer) or {}).get(inner) if inner else identity.get(outer)


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{one}.") for one in packages)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, str) and len(value) == 64:
        text = value[:12]
    return "nothing" if value is None else text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True)
class _Loaded:
    """What the modules of a process say of its code."""

    modules: Mapping[str, ModuleType]  # ``sys.modules``
    plugins: frozenset[str]  # packages of plugins
    files: Mapping[
        str, Path
    ]  # modules that are ours, plugins', or neither Python's nor of an installed package
    packages: Sequence[str]  # installed distributions that any module belongs to


_last: _Loaded | None = None


def _loaded() -> _Loaded:
    """What is loaded, found out again only when a module came, went or was replaced: there are thousands."""
    global _last
    modules, plugins = sys.modules.copy(), frozenset(map(_top, plugins_loaded()))
    if _last is None or _last.plugins != plugins or _last.modules != modules:
        known, files, tops = {*OURS, *plugins}, dict[str, Path](), set[str]()
        for name, file in _named(modules):
            top = _top(name)
            tops.add(top)
            if file is not None and (top in known or not _is_installed(file)):
                files[name] = Path(file)
        packages = sorted({name for top in tops for name in _distributions().get(top, ())})
        _last = _Loaded(modules, plugins, files, packages)
    return _last


def _named(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str | None]]:
    """Names of modules, and the files of those that have one of their own."""
    for name, loaded in modules.items():
        spec, file = getattr(loaded, "__spec__", None), getattr(loaded, "__file__", None)
        # `python -m rge.train`, or a script; in a process that it spawned, also under the second name.
        if name in ("__main__", "__mp_main__") and file is not None:
            yield (_name_of(Path(file)) if spec is None else spec.name), file
        else:  # without a location: created at runtime, such as torch.ops
            yield name, file if spec is not None and spec.has_location else None


def _name_of(script: Path) -> str:
    script = script.resolve()
    if not script.is_relative_to(HOME):
        return script.stem
    return ".".join(script.relative_to(HOME).with_suffix("").parts)


@cache
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    path = Path(file)
    of_python = any(path.is_relative_to(folder) for folder in PYTHON)
    return of_python or bool({"site-packages", "dist-packages"} & set(path.parts))


def _code_of(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return GONE
    return _hash_of(path, status.st_mtime_ns, status.st_size)


@cache
def _hash_of(path: Path, *_: int) -> str:
    """A short hash of a module's syntax tree without docstrings, or of a compiled module's bytes."""
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant()) as docstring, *_]:
                docstring.value = ast.Constant("")
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def _code_now(name: str, loaded: Mapping[str, Path]) -> str:
    """The current hash of a module that was loaded earlier, loaded now or not."""
    if name in loaded and (code := _code_of(loaded[name])) != GONE:
        return code
    base = HOME.joinpath(*name.split("."))
    codes = map(_code_of, (base.with_suffix(".py"), base / "__init__.py"))
    return next((code for code in codes if code != GONE), GONE)


@cache
def _version_now(name: str) -> str:
    own = {"python": platform.python_version(), "rge": rge.__version__}
    try:
        return own.get(name) or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    return importlib.metadata.packages_distributions()

"""What an evaluation is an evaluation of: everything that decides its numbers, in one place and under one key.

The cache of embeddings is named by it, `compare`, `report` and the leaderboard refuse or name what differs, and exports
carry it. Two results with the same key are two measurements of the same thing.
"""

import ast
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import rge
from eval.embedding.fill_cache import Embeds

NUMERIC = (
    "torch", "torchvision", "transformers", "tokenizers", "pillow", "numpy", "peft", "sentence-transformers",
)  # fmt: skip
"""Libraries whose version decides an embedding."""
VERSIONED = (*NUMERIC, "faiss-cpu", "pyarrow")
ROOT = Path(rge.__file__).resolve().parent.parent
ENCODER_CODE = "rge.embedder"
"""The module that every embedding of ours comes from; what it imports decides embeddings too."""
ELSEWHERE = (
    "adapter", "model", "revision", "profile", "wording", "own_prompts", "instruction", "max_prompt_tokens",
    "max_text_tokens", "pixels", "generation", "dtype", "device", "recipe", "stage", "step", "git_commit", "rge_version",
    "format", "modes", "reasons", "notes", "exact", "plugins",
)  # fmt: skip
"""Settings of an embedder that have a part of their own, or are in the hash of its files; the rest is hashed together."""
OLD = "was written before results had an identity: whether texts, pictures, code and versions agree cannot be checked"


def versions(names: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Versions of Python, of this package and of those libraries that are installed."""
    found = {"python": platform.python_version(), "rge": rge.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


OURS = ("rge", "eval", "data_prep")


@cache
def code_hash(module: str = ENCODER_CODE) -> str:
    """Sha256 of the code that makes an embedding: a module, `rge.embedder`, and whatever of ours these import.

    Comments, layout and docstrings do not count. An embedder of somebody's own module is named by that module too.

    Args:
        module: that the encoder's class was written in.
    """
    code = _code([module, ENCODER_CODE], ("rge", "eval.models", *_package(module)))
    assert ENCODER_CODE in code
    return _hash_of(code)


def plugins_of(things: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Modules of somebody else's that decide a figure.

    Args:
        things: what decides it (``metric rbp``) -> the module that it is written in; those of ours are left out.

    Returns:
        Module -> ``gives``, what of it was used, and ``code``, a short hash of the module and of what it imports from its own
        package.
    """
    found: dict[str, dict[str, Any]] = {}
    for thing, module in things.items():
        if not (own := _package(module)):
            continue
        entry = found.setdefault(module, {"gives": [], "code": _hash_of(_code([module], own))[:12]})
        entry["gives"].append(thing)
    return found


def software(encoder: Embeds) -> dict[str, Any]:
    """Code and versions behind an encoder's numbers; part of the cache's name."""
    return {"code": code_hash(type(encoder).__module__), "versions": versions(NUMERIC)}


def identity_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of an evaluation from its results.json, without the key; None where that does not say.

    Returns:
        Part -> what decides it: ``set`` (ids, judgements, texts, pictures, wording and picture policy of the import),
        ``protocol``, ``embedder`` (all files that were loaded, the hub's commit), ``asked``, ``prompts``, ``pixels``,
        ``generation``, ``numbers`` (dtype, device), ``software`` and ``plugins`` (somebody's own embedder, metrics, protocol).
    """
    wanted, settings = results.get("set") or {}, results.get("settings") or {}
    model, prompts = results.get("model") or {}, results.get("prompts") or {}
    rewrite, judged = results.get("rewrite") or {}, results.get("rerank") or {}
    sampled = (results.get("decoding") or {}).get("temperature") or (results.get("budget") or {}).get("k")
    return {
        "set": {key: wanted.get(key) for key in ("fingerprint", "content", "limit", "made_with")},
        "protocol": {"benchmark": results.get("benchmark"), "profile": results.get("profile")},
        "embedder": {
            "hash": results.get("checkpoint_hash"),
            "adapter": model.get("adapter"),
            "revision": model.get("revision"),
            "run": results.get("run_hash"),
            "release": results.get("asked_as_released"),
            "settings": _short({key: value for key, value in settings.items() if key not in ELSEWHERE} or None),
        },
        "asked": {key: results.get(key) for key in ("query_mode", "query_modality", "candidate_mode", "embedding_dims")}
        | {
            "rewrite": rewrite.get("kind"),
            "rewriter": rewrite.get("model"),
            "rewriter_at": {key: rewrite.get(key) for key in ("at", "served", "rge")} if "at" in rewrite else None,
            "judge": judged.get("judge"),
            "judged": judged.get("top_n"),
            "way": (results.get("budget") or {}).get("name"),
            "seed": results.get("seed") if sampled else None,
        }
        | {key: judged[key] for key in ("ask", "mix") if judged.get(key) not in (None, "yes_no")},
        "prompts": {
            "profile": prompts.get("profile"),
            "templates": _short(prompts.get("templates") or settings.get("wording") or settings.get("own_prompts")),
            "instruction": settings.get("instruction"),
            "max_tokens": settings.get("max_prompt_tokens") or settings.get("max_text_tokens"),
        },
        "pixels": settings.get("pixels"),
        "generation": results.get("decoding"),
        "numbers": {"dtype": results.get("dtype"), "device": settings.get("device"), "exact": results.get("exact")},
        "software": {"code": results.get("code")}
        | {name: (results.get("versions") or {}).get(name) for name in NUMERIC},
        "plugins": {name: one.get("code") for name, one in (results.get("plugins") or {}).items()},
    }  # fmt: skip


def with_key(results: Mapping[str, Any]) -> dict[str, Any]:
    """`identity_of` and its ``key``: what results.json holds."""
    parts = identity_of(results)
    return {"key": _short(parts, 64)} | parts


def flat_identity(results: Mapping[str, Any]) -> dict[str, Any]:
    """`identity_of` as ``part.key`` -> value, without what is not said."""
    return _flat(identity_of(results))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two evaluations differ in: ``part.key`` -> (of a, of b), parts in the order of `identity_of`.

    Args:
        a: content of a results.json.
        b: of another.
    """
    flat_a, flat_b = flat_identity(a), flat_identity(b)
    return {
        key: (flat_a.get(key), flat_b.get(key))
        for key in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(key) != flat_b.get(key)
    }


def set_mismatch(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Why two evaluations are not of one set, in a few words; None if they are, as far as they say.

    Args:
        a: content of a results.json.
        b: of another.
    """
    one, other = a.get("set") or {}, b.get("set") or {}
    if one.get("fingerprint") != other.get("fingerprint"):
        return f"fingerprints {str(one.get('fingerprint'))[:12]} and {str(other.get('fingerprint'))[:12]}"
    if one.get("content") and other.get("content") and one["content"] != other["content"]:
        made = [f"{key}: {x!r} and {y!r}" for key, (x, y) in differences(a, b).items() if "made_with" in key]
        why = f"; imported with {', '.join(made)}" if made else ""
        return (
            "ids and judgements are the same, but texts or pictures are not (content "
            f"{one['content'][:12]} and {other['content'][:12]}{why})"
        )
    return None


def old_results(results: Mapping[str, Any]) -> bool:
    """Whether an evaluation was written before identities were."""
    return not results.get("identity")


def _flat(parts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in parts.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def _short(value: Any, digits: int = 12) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _package(module: str) -> tuple[str, ...]:
    """The package that a module of somebody else's belongs to; nothing for one of ours."""
    top = module.split(".")[0]
    return () if top in OURS else (top,)


def _code(left: list[str], followed: Sequence[str]) -> dict[str, str]:
    """Modules, and what they import of the packages that are followed -> their syntax trees as text."""
    seen: dict[str, str] = {}
    while left:
        name = left.pop()
        found = _source(name)
        if name in seen or found is None:
            continue
        tree = ast.parse(found)
        seen[name] = ast.dump(_without_docstrings(tree))
        left += [
            one for one in _imports(tree, name) if any(f"{one}.".startswith(f"{top}.") for top in followed)
        ]
    return seen


def _hash_of(code: Mapping[str, str]) -> str:
    return hashlib.sha256("\0".join(f"{name}\0{code[name]}" for name in sorted(code)).encode()).hexdigest()


def _source(module: str) -> str | None:
    place = ROOT.joinpath(*module.split("."))
    files = [place.with_suffix(".py"), place / "__init__.py"]
    if module in sys.modules and getattr(sys.modules[module], "__file__", None):
        files.append(Path(str(sys.modules[module].__file__)))  # an embedder of somebody's own module
    for file in files:
        if file.suffix == ".py" and file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _imports(tree: ast.Module, module: str) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # a relative import, as packages of others have them: one dot is the module's own package
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            first = body[0].value
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                body[0].value = ast.Constant("")
    return tree

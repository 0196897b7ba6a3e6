"""The identity of an evaluation in results.json, see `rge.identity.run_identity`.

`compare` and `report` refuse or report differences, and exports include it. Results with the same key are
repeated measurements of the same thing; otherwise `differences` lists what differs.
"""

from collections.abc import Mapping
from typing import Any

from rge.identity import run_identity
from rge.identity.run_identity import Identity, digest

PAGES = "eval.pages"
"""Package that does not affect figures."""
NOT_MEASURED = ("device", "notes", "plugins")
"""Settings of an embedder that do not affect figures, or are recorded elsewhere."""
ANSWERED = (
    "row", "of", "top_n", "document_chars", "answer_tokens", "judge_tokens", "models", "wording", "references",
)  # fmt: skip
"""What determines answers and their scores, see `eval.commands.rag`."""
SHOWN = (
    "python", "rge", "torch", "torchvision", "transformers", "tokenizers", "pillow", "numpy", "peft",
    "sentence-transformers", "faiss-cpu", "pyarrow", "bm25s",
)  # fmt: skip
"""Packages whose versions pages show; an identity records all loaded ones."""


def versions() -> dict[str, str]:
    """Versions of those packages of `SHOWN` that are loaded."""
    loaded = run_identity.software(())["packages"]
    return {name: loaded[name] for name in SHOWN if name in loaded}


def with_key(
    results: Mapping[str, Any], *, made: Identity | None = None, made_with: Identity | None = None
) -> Identity:
    """The identity for a results.json that is being written: `asked_of`, software, plugins, machine, and a ``key`` of all parts.

    ``made``: identity that supplies software, plugins and machine; None: this process. ``made_with``: further software that
    cached embeddings depend on. The key leaves out the machine, since machines differ by rounding only.
    """
    if made is None:
        made = run_identity.joined(made_with, run_identity.run_identity(but=(PAGES,)))
        made["machine"]["device"] = (results.get("settings") or {}).get("device")
    named = asked_of(results) | {"software": made["software"], "plugins": made["plugins"]}
    return {"key": digest(named), **named, "machine": made["machine"]}


def identity_of(results: Mapping[str, Any]) -> Identity:
    """The identity of an evaluation without its key."""
    known = results.get("identity") or {}
    return asked_of(results) | {name: known.get(name) for name in ("software", "plugins", "machine")}


def asked_of(results: Mapping[str, Any]) -> Identity:
    """What was measured and how, from a results.json; unknown values are None."""
    of_set, prompts, model, settings = (
        results.get(part) or {} for part in ("set", "prompts", "model", "settings")
    )
    return {
        "set": {key: of_set.get(key) for key in ("fingerprint", "content", "limit", "made_with")},
        "protocol": {key: results.get(key) for key in ("benchmark", "profile")},
        "embedder": {
            "hash": results.get("checkpoint_hash"),
            "adapter": model.get("adapter"),
            "revision": model.get("revision"),
            "run": results.get("run_hash"),
            "release": results.get("asked_as_released"),
        },
        "settings": {key: value for key, value in settings.items() if key not in NOT_MEASURED},
        "asked": _asked(results),
        "prompts": {key: prompts.get(key) for key in ("profile", "templates")},
    }


def _asked(results: Mapping[str, Any]) -> dict[str, Any]:
    """How an embedder was queried, and how its ranking was processed."""
    rewrite, rerank, budget, decoding, rag = (
        results.get(part) or {} for part in ("rewrite", "rerank", "budget", "decoding", "rag")
    )
    keys = ("query_mode", "query_modality", "candidate_mode", "embedding_dims", "ranked_with")
    at = {key: rewrite.get(key) for key in ("at", "served", "rge")}
    depth = results.get("depth")  # of the mean reciprocal rank; a pool may be smaller
    further = {"mix": rerank}  # left out where they do not apply
    is_sampled = decoding.get("temperature")
    return {
        **{key: results.get(key) for key in keys},
        "rewrite": rewrite.get("kind"),
        "rewriter": rewrite.get("model"),
        "rewriter_at": at if "at" in rewrite else None,
        "judge": rerank.get("judge"),
        "judged": rerank.get("top_n"),
        "way": budget.get("name"),
        "seed": rerank.get("seed", results.get("seed")) if is_sampled else None,
        **{key: block[key] for key, block in further.items() if block.get(key) is not None},
        **({"rag": {key: rag.get(key) for key in ANSWERED}} if rag else {}),
        **({"depth": min(depth, (results.get("set") or {}).get("num_candidates", depth))} if depth else {}),
    }


def ranked_with(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Modules and packages of a ranking that have changed since; None if none have."""
    software = {"modules": {}} | identity_of(results)["software"]
    changed = run_identity.changes_since({"software": software})
    return {key: then for key, (then, _) in changed.items()} or None


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differences between the identities of two results.json, see `rge.identity.run_identity.differences`."""
    return run_identity.differences(identity_of(a), identity_of(b))


def set_mismatch(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Reason why two results.json are not of the same set; None if they are, as far as recorded."""
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

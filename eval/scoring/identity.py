"""The identity of an evaluation in results.json, see `rge.identity.run_identity`.

`compare` and `report` refuse or report differences, and exports include it. Results with the same key are
repeated measurements of the same thing; otherwise `differences` lists what differs.
"""

from typing import Any

from eval.scoring.results import AnswersAsked, Measured, ModelFacts, Prompts, Results, SetFacts
from rge.identity import run_identity
from rge.identity.run_identity import Identity, digest

PAGES = "eval.pages"
"""Package that does not affect figures."""
NOT_MEASURED = ("device", "notes", "plugins")
"""Settings of an embedder that do not affect figures, or are recorded elsewhere."""
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
    results: Measured, *, made: Identity | None = None, made_with: Identity | None = None
) -> Identity:
    """The identity for a results.json that is being written: `asked_of`, software, plugins, machine, and a ``key`` of all parts.

    ``made``: identity that supplies software, plugins and machine; None: this process. ``made_with``: further software that
    cached embeddings depend on. The key leaves out the machine, since machines differ by rounding only.
    """
    if made is None:
        made = run_identity.joined(made_with, run_identity.run_identity(but=(PAGES,)))
        made["machine"]["device"] = (results.settings or {}).get("device")
    named = asked_of(results) | {"software": made["software"], "plugins": made["plugins"]}
    return {"key": digest(named), **named, "machine": made["machine"]}


def identity_of(results: Measured) -> Identity:
    """The identity of an evaluation without its key; software, plugins and machine are None if it is not measured yet."""
    recorded = results.identity if isinstance(results, Results) else {}
    return asked_of(results) | {name: recorded.get(name) for name in ("software", "plugins", "machine")}


def asked_of(results: Measured) -> Identity:
    """What was measured and how; unknown values are None."""
    of_set, prompts, model = results.set, results.prompts or Prompts(), results.model or ModelFacts()
    return {
        "set": {
            "fingerprint": of_set.fingerprint,
            "content": of_set.content,
            "limit": of_set.limit,
            "made_with": of_set.made_with,
        },
        "protocol": {"benchmark": results.benchmark, "profile": results.profile},
        "embedder": {
            "hash": results.checkpoint_hash,
            "adapter": model.adapter,
            "revision": model.revision,
            "run": results.run_hash,
            "release": results.asked_as_released,
        },
        "settings": {
            key: value for key, value in (results.settings or {}).items() if key not in NOT_MEASURED
        },
        "asked": _asked(results),
        "prompts": {"profile": prompts.profile, "templates": prompts.templates},
    }


def _asked(results: Measured) -> dict[str, Any]:
    """How an embedder was queried, and how its ranking was processed; some keys only where they apply."""
    rewrite, rerank, further = results.rewrite, results.rerank, dict[str, Any]()
    at = None
    if rewrite is not None and rewrite.look_up(["at"]) is not None:
        at = {key: rewrite.look_up([key]) for key in ("at", "served", "rge")}
    if rerank is not None and rerank.mix is not None:
        further["mix"] = rerank.mix
    if results.rag is not None:
        further["rag"] = {key: getattr(results.rag, key) for key in AnswersAsked.model_fields}
    if depth := results.depth:  # of the mean reciprocal rank; a pool may be smaller
        further["depth"] = min(depth, results.set.num_candidates or depth)
    sampled = (results.decoding or {}).get("temperature")
    seed = results.seed if rerank is None else rerank.seed
    return {
        "query_mode": results.query_mode,
        "query_modality": results.query_modality,
        "candidate_mode": results.candidate_mode,
        "embedding_dims": results.embedding_dims,
        "ranked_with": results.ranked_with,
        "rewrite": rewrite and rewrite.kind,
        "rewriter": rewrite and rewrite.model,
        "rewriter_at": at,
        "judge": rerank and rerank.judge,
        "judged": rerank and rerank.top_n,
        "way": results.budget and results.budget.name,
        "seed": seed if sampled else None,
        **further,
    }


def ranked_with(results: Results) -> dict[str, Any] | None:
    """Modules and packages of a ranking that have changed since; None if none have."""
    software = {"modules": {}} | identity_of(results)["software"]
    changed = run_identity.changes_since({"software": software})
    return {key: then for key, (then, _) in changed.items()} or None


def differences(a: Measured, b: Measured) -> dict[str, tuple[Any, Any]]:
    """Differences between the identities of two results.json, see `rge.identity.run_identity.differences`."""
    return run_identity.differences(identity_of(a), identity_of(b))


def set_mismatch(one: SetFacts, other: SetFacts) -> tuple[str, str] | None:
    """What tells two evaluations' sets apart, as a key and in words; None: nothing that is recorded."""
    if one.fingerprint != other.fingerprint:
        return "set.fingerprint", f"fingerprints {one.fingerprint[:12]} and {other.fingerprint[:12]}"
    if one.content and other.content and one.content != other.content:
        apart = run_identity.differences({"made_with": one.made_with}, {"made_with": other.made_with})
        made = [f"{key}: {x!r} and {y!r}" for key, (x, y) in apart.items()]
        why = f"; imported with {', '.join(made)}" if made else ""
        return next(iter(apart), "set.content"), (
            "ids and judgements are the same, but texts or pictures are not (content "
            f"{one.content[:12]} and {other.content[:12]}{why})"
        )
    return None

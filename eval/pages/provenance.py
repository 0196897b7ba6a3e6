"""Provenance of a page: settings shared by all evaluations, differences, all recorded settings, and commands to reproduce it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.pages.evaluations import Evaluation


def provenance_of(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Shared facts, differing facts, and everything recorded except figures."""
    figures = {"again", "set", "micro", "macro", "ties", "rationale", "random"}
    recorded = {
        one.label: {
            key: _without_paths(value)
            for key, value in one.results.items()
            if key not in figures and not key.startswith("by_")
        }
        for one in evaluations
    }
    blocks = {one.label: _facts(recorded[one.label], one) for one in evaluations}
    common = (
        set.intersection(*(set(facts.items()) for facts in blocks.values())) if len(blocks) > 1 else set()
    )

    def part(facts: Mapping[str, str], *, shared: bool) -> dict[str, str]:
        return {key: value for key, value in facts.items() if ((key, value) in common) is shared}

    return {
        "common": part(next(iter(blocks.values())), shared=True),
        "own": [(label, part(facts, shared=False)) for label, facts in blocks.items()],
        "recorded": [
            (label, json.dumps(content, indent=1, ensure_ascii=False, default=str))
            for label, content in recorded.items()
        ],
    }


def _facts(recorded: Mapping[str, Any], evaluation: Evaluation) -> dict[str, str]:
    """Facts that fit on one line each."""
    facts = {}
    for name, value in recorded.items():
        if isinstance(value, Mapping) and all(isinstance(v, (str, int, float)) for v in value.values()):
            value = ", ".join(f"{k} {_brief(v)}" for k, v in value.items())
        if isinstance(value, (str, int, float)) and 0 < len(_brief(value)) <= 300:
            facts[name.replace("_", " ")] = _brief(value)
    if (command := _command(evaluation)) is not None:
        facts["reproduce with"] = command
    return facts


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command(evaluation: Evaluation) -> str | None:
    """The command that reproduces this evaluation, except out=; None if it was not recorded."""
    again = evaluation.results.get("again")
    if not again:
        return None

    def as_word(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(as_word, value)) or "[]"
        return _local(value) if isinstance(value, str) else json.dumps(value)

    words = [f"{key}={as_word(value)}" for key, value in again["options"].items()]
    return shlex.join(["rge", "eval", again["command"], *words])


def _without_paths(value: Any) -> Any:
    """Replace absolute paths by relative ones, since a page may be shared."""
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return _local(value) if isinstance(value, str) else value


def _local(text: str) -> str:
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name

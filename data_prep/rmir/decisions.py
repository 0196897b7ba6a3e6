"""Read the stored decisions on triplets: the panel's, unless human reviewers overruled it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.rmir import frames
from rge.common.files import read_json, write_json

REVIEWED = "reviewed.json"
"""File that ``rge data review apply=`` writes into a run's folder."""
AGREEMENT = "agreement.json"
"""File that ``rge data agreement`` writes there."""


def triplet_name(row: dict[str, Any]) -> str:
    """Name of a triplet in files of verdicts."""
    return f"{row['query_id']} -> {row['candidate_id']}"


def panels(folder: Path) -> Iterator[dict[tuple[str, str], list[tuple[str, int, str]]]]:
    """(judge, sample, verdict) of every judgement, by (query, candidate), one part of the table at a time to save memory.

    All judgements on a triplet are in the same part.
    """
    for part in frames.parts(folder):
        found: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
        columns = (
            part[name].to_pylist() for name in ("query_id", "candidate_id", "judge", "sample", "verdict")
        )
        for query, candidate, *vote in zip(*columns, strict=True):
            found.setdefault((query, candidate), []).append(tuple(vote))
        yield found


def write_about_panel(path: Path, content: dict[str, Any]) -> None:
    """Write a file about a run's decisions, which `about_panel` reads until they are made again with other settings."""
    write_json(path, content | {"decisions": _version(path.parent)})


def about_panel(path: Path) -> dict[str, Any] | None:
    """Content of a file about a run's decisions; None if it does not exist, or is about earlier questions or judgements."""
    found, version = read_json(path), _version(path.parent)
    return found if found and found.get("decisions") == version else None


def _version(out: Path) -> str | None:
    return (read_json(out / "keep" / "done.json") or {}).get("fingerprint")


def overruled(out: Path) -> dict[str, str]:
    """The new state of each triplet on which reviewers overruled the panel, by `triplet_name`."""
    reviewed = about_panel(out / REVIEWED)
    return reviewed["states"] if reviewed else {}


def decided(out: Path) -> Iterator[dict[str, Any]]:
    """Rows of the table ``decided``, with the reviewers' state where they overruled the panel."""
    states = overruled(out)
    for row in frames.stage_rows(out, "keep", "decided"):
        yield {**row, "state": states.get(triplet_name(row), row["state"])}


def candidates_by_query(out: Path, state: str) -> dict[str, list[str]]:
    """Candidates of each query in the given state, in table order, without those that any triplet puts in doubt."""
    doubted = {row["id"] for row in frames.stage_rows(out, "keep", "doubted")}
    found: dict[str, list[str]] = {}
    for row in decided(out):
        if row["state"] == state and row["candidate_id"] not in doubted:
            found.setdefault(row["query_id"], []).append(row["candidate_id"])
    return found

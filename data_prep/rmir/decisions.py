"""Decisions on triplets: the panel's, unless human reviewers overruled it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.rmir import frames
from rge.common.files import read_json

REVIEWED = "reviewed.json"
"""File that ``rge data review apply=`` writes into a run's folder."""


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


def overruled(out: Path) -> dict[str, str]:
    """The new state of each triplet on which reviewers overruled the panel, by `triplet_name`."""
    reviewed = read_json(out / REVIEWED)
    return reviewed["states"] if reviewed else {}


def decided(out: Path) -> list[dict[str, Any]]:
    """Rows of the table ``decided``, with the reviewers' state where they overruled the panel."""
    states = overruled(out)
    rows = frames.stage_rows(out, "keep", "decided")
    return [{**row, "state": states.get(triplet_name(row), row["state"])} for row in rows]


def candidates_by_query(out: Path, state: str) -> dict[str, list[str]]:
    """Candidates of each query in the given state, in table order, without those that any triplet puts in doubt."""
    doubted = {row["id"] for row in frames.stage_rows(out, "keep", "doubted")}
    found: dict[str, list[str]] = {}
    for row in decided(out):
        if row["state"] == state and row["candidate_id"] not in doubted:
            found.setdefault(row["query_id"], []).append(row["candidate_id"])
    return found

"""Fingerprint of a retrieval set's content, so that figures of different sets are never mixed."""

import hashlib
import json
from collections.abc import Iterable

Pairs = Iterable[tuple[str, str]]
"""(query id, candidate id), in any order."""


def set_fingerprint(
    query_ids: Iterable[str],
    corpus_ids: Iterable[str],
    qrels: Iterable[tuple[str, str, int]],
    *,
    negatives: Pairs = (),
    excluded: Pairs = (),
    candidates: Pairs = (),
) -> str:
    r"""Fingerprint of a retrieval set: its queries, its candidates and its relevance judgements.

    The bytes hashed are UTF-8 lines, one compact JSON array each (``json.dumps(row, ensure_ascii=False,
    separators=(",", ":"))`` plus ``\n``), in this order: ``["query",id]`` by id, ``["corpus",id]`` by id,
    ``["qrels",query id,corpus id,gain]`` by both ids, then ``["negatives",query id,corpus id]``,
    ``["excluded",...]`` and ``["candidates",...]`` likewise. Ids sort by code point. An empty table adds nothing. JSON makes ids
    that contain separators unambiguous.

    Pictures and texts do not count: a re-encoded picture is still the same set. (The embedding cache of ``eval`` hashes them.)

    Returns 64 lower-case hexadecimal digits (sha256).

    Raises:
        ValueError: an id is not a string or a gain is not an integer, usually because pandas inferred other types (ids as numbers,
            gains as floats), which would give another fingerprint on another machine.
    """
    digest = hashlib.sha256()
    tables: dict[str, Iterable[tuple[object, ...]]] = {
        "query": ((name,) for name in query_ids),
        "corpus": ((name,) for name in corpus_ids),
        "qrels": ((query, name, _integer(gain, query, name)) for query, name, gain in qrels),
        "negatives": negatives,
        "excluded": excluded,
        "candidates": candidates,
    }
    for kind, table in tables.items():
        rows = [(kind, *row) for row in table]
        for name in (name for row in rows for name in row[1:3]):
            if not isinstance(name, str):
                raise ValueError(f"{kind}: an id must be a string, got {name!r} ({type(name).__name__})")
        for row in sorted(rows):
            digest.update(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _integer(gain: object, query: str, name: str) -> int:
    # Accepts numpy integers, from Parquet; rejects True and 1.0.
    if isinstance(gain, bool) or not hasattr(gain, "__index__"):
        raise ValueError(f"qrels: gain of {name!r} for query {query!r} must be an integer, got {gain!r}")
    return gain.__index__()

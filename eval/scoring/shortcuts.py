"""Shares of queries that can be answered without their picture or without their text, from finished evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.scoring.output_files import PER_QUERY, read_results
from eval.sets.retrieval_set import MODALITIES
from rge.common.errors import UserError
from rge.stats.intervals import cluster_bootstrap, figures, index_of


def shortcut_rates(dirs: Sequence[Path], metric: str) -> dict[str, Any]:
    """Shares of queries that can be answered without their picture or without their text.

    ``dirs``: evaluations of one set and checkpoint in one mode, with ``query_modality`` both, text and image. ``metric``: a
    query counts as answered if this is above zero, such as ``hit@1`` or ``recall@20``.

    Returns:
        Shares of all queries with 95 % intervals: answered with ``both``, with ``text`` alone, ``image`` alone, with
        ``either`` of the two alone; ``needs_both`` is answered with both but with neither alone.

    Raises:
        UserError: a modality is missing or repeated, or the evaluations do not belong together.
    """
    results = [read_results(path) for path in dirs]
    modalities = [str(result.get("query_modality")) for result in results]
    same = {(one["set"]["fingerprint"], one.get("checkpoint_hash"), one.get("query_mode")) for one in results}
    if sorted(modalities) != sorted(MODALITIES) or len(same) > 1:
        raise UserError(
            "shortcuts need three evaluations of one set, checkpoint and query mode, with query_modality=both,text,image; "
            f"{', '.join(map(str, dirs))} have {', '.join(modalities)}"
        )
    tables = {modality: _read(path, metric) for modality, path in zip(modalities, dirs, strict=True)}
    solved = pd.DataFrame({name: table[metric] for name, table in tables.items()}).dropna() > 0
    either = solved["text"] | solved["image"]
    shares = solved.assign(either=either, needs_both=solved["both"] & ~either)
    groups = tables["both"].loc[shares.index, "group"]
    means = cluster_bootstrap(shares.to_numpy(np.float64), index_of(groups.tolist()), seed=0)
    of_shares = dict(zip(shares.columns, figures(means, (0.0, 1.0)), strict=True))
    return {"metric": metric, "num_queries": len(shares), **of_shares}


def _read(path: Path, metric: str) -> pd.DataFrame:
    frame = pd.read_parquet(path / PER_QUERY).set_index("query_id")
    if metric not in frame or not pd.api.types.is_numeric_dtype(frame[metric]):
        raise UserError(f"metric must be a column of numbers in {path / PER_QUERY}, got {metric!r}")
    return frame.dropna(subset=[metric])

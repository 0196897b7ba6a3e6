"""``rag.json`` on a board: paired differences between ways of choosing documents, and how far the judges agree."""

import re
from collections.abc import Mapping
from typing import Any

from eval.scoring.metrics import ANSWER_SCORE

RAG = "rag.json"


def known_as(model: str) -> str:
    """How a model is named to people: of the hash of a model that runs here, what tells it apart."""
    return model[:12] if re.fullmatch(r"[0-9a-f]{64}", model) else model


def on_page(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows of it: the headline's differences, by judge where there are several, and the agreement."""
    wanted = "macro" if content["average"] == "macro" else "all queries"
    by_metric = {
        metric: [one for one in content["differences"] if one["slice"] == wanted and one["metric"] == metric]
        for metric in content["metrics"]
    }
    judges = {name: known_as(str(one["model"])) for name, one in content["judges"].items()}
    tables = [
        (judge, by_metric[f"{ANSWER_SCORE}.{judge}"])
        for judge in judges
        if f"{ANSWER_SCORE}.{judge}" in by_metric
    ] or [(next(iter(judges)), by_metric[ANSWER_SCORE])]
    return {
        "answerer": known_as(str(content["answerer"]["model"])),
        "judges": judges,
        "marks": [
            (name, [row.get(f"{ANSWER_SCORE}.{judge}") or row[ANSWER_SCORE] for judge in judges])
            for name, row in content["rows"].items()
        ],
        "differences": [(judge, rows) for judge, rows in tables if rows],
        "agreement": content["agreement"],
        "spent": content.get("spent", []),
    }

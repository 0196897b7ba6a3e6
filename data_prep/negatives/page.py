"""The report's page: what was dropped by which rule, and examples as pictures."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data_prep.negatives.mining import Mined
from rge.common.files import write_text
from rge.common.images import data_url, load_image
from rge.common.schema import ImageRef, Item
from rge.data.collate import target_item

TEMPLATES = Path(__file__).with_name("templates")
SIDE_PX = 160
RULES = {
    "same_content": "listed under several ids with equal content",
    "same_identity": "share the identity of a right answer",
    "relative_margin": "closer to the positive than the relative margin allows",
    "absolute_margin": "closer than the absolute margin allows",
    "max_score": "above the maximum score",
}


def write_page(out: Path, report: Mapping[str, Any], mined: Mined, num: int) -> None:
    """Write the page with up to `num` queries, chosen by a hash of their content."""
    table = mined.table
    places = sorted(
        range(len(table.queries)),
        key=lambda place: hashlib.sha256(table.queries[place].digest.encode()).digest(),
    )
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("report.html").render(
        report=report, rules=RULES, examples=[_example(mined, place) for place in sorted(places[:num])]
    )
    write_text(out, page)


def _example(mined: Mined, place: int) -> dict[str, Any]:
    table, chosen = mined.table, mined.chosen[place]
    query = table.queries[place]
    kinds = (
        ("right", query.positives),
        ("negative", chosen.rows),
        ("called right by the judge", chosen.right),
    )
    return {
        "query": _shown(query.item),
        "targets": [
            _shown(target_item(table.targets[row]))
            | {"kind": kind, "cosine": mined.cosine[place, row], "score": mined.score.get((place, row))}
            for kind, rows in kinds
            for row in rows
        ],
    }


def _shown(item: Item) -> dict[str, Any]:
    words = [text for text in (item.instruction, item.text) if text]
    return {"name": item.id, "text": " ".join(words), "pictures": list(map(_thumbnail, item.pictures))}


def _thumbnail(ref: ImageRef) -> str | None:
    image, encoded = load_image(ref, near_px=SIDE_PX, first_frame=True), io.BytesIO()
    image.thumbnail((SIDE_PX, SIDE_PX))
    image.save(encoded, "WEBP", quality=72)
    return data_url(encoded.getvalue())

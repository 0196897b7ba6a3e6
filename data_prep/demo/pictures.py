"""Render icons as small pictures and store them in Parquet.

Byte-identical output needs the same versions of resvg, libwebp (Pillow) and pyarrow.
"""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from data_prep.demo.families import Family, load_icons
from data_prep.demo.tables import Tables
from rge.common.errors import UserError

SIZE_PX = 84
MARGIN_PX = 2
WEBP_QUALITY = 60
MEASURE_PX = 168
"""Size of the first rendering, which finds the bounding box of the ink."""

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""A picture as Hugging Face `datasets` stores it."""


def render_family(family: Family, tables: Tables, folder: Path) -> dict[str, bytes]:
    """WebP bytes of a family's drawings, by concept in table order; `folder` and errors as in `load_icons`."""
    icons = load_icons(family, folder)
    return {
        concept: render(_icon(icons, tables.icons[family.name, concept], family))
        for concept in tables.drawn_by(family)
    }


def render(icon: dict) -> bytes:
    """Render an icon on white as WebP, cropped to its ink and centred, since families pad their icons differently."""
    side = max(icon["width"], icon["height"])
    left = icon["left"] - (side - icon["width"]) / 2
    top = icon["top"] - (side - icon["height"]) / 2
    alpha = _rasterise(icon["body"], left, top, side, MEASURE_PX).getchannel("A")
    box = alpha.point(lambda value: 255 * (value > 8)).getbbox()
    assert box is not None, "an icon without ink"
    x_0, y_0, x_1, y_1 = (edge * side / MEASURE_PX for edge in box)
    wanted = max(x_1 - x_0, y_1 - y_0) * SIZE_PX / (SIZE_PX - 2 * MARGIN_PX)
    left, top = left + (x_0 + x_1 - wanted) / 2, top + (y_0 + y_1 - wanted) / 2
    drawn = _rasterise(icon["body"], left, top, wanted, SIZE_PX)
    page = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB")
    out = io.BytesIO()
    page.save(out, "WEBP", quality=WEBP_QUALITY, method=6)
    return out.getvalue()


def write_library(path: Path, rows: list[tuple[str, bytes, str, str]]) -> None:
    """Write a picture library; a row is (id, WebP bytes, concept, family name)."""
    table = pa.table(
        {
            "id": [row[0] for row in rows],
            "image": pa.array([{"bytes": row[1], "path": f"{row[0]}.webp"} for row in rows], IMAGE),
            "concept": [row[2] for row in rows],
            "family": [row[3] for row in rows],
        }
    )
    write_table(path, table)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file; Hugging Face `datasets` shows its ``image`` columns as pictures."""
    features: dict[str, object] = {}
    for field in table.schema:
        features[field.name] = {"dtype": str(field.type), "_type": "Value"}
        if field.name == "image":
            listed = pa.types.is_list(field.type)
            features["image"] = (
                {"feature": {"_type": "Image"}, "_type": "List"} if listed else {"_type": "Image"}
            )
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    # The dictionary page must be large enough for all pictures, so that repeated ones are stored once.
    pq.write_table(
        table.replace_schema_metadata(metadata),
        path,
        compression="zstd",
        write_statistics=False,
        dictionary_pagesize_limit=1 << 24,
    )


def _icon(icons: dict, name: str, family: Family) -> dict:
    found = name
    while found in icons.get("aliases", {}):
        found = icons["aliases"][found]["parent"]
    if found not in icons["icons"]:
        raise UserError(f"{family.name} {family.version} has no such icon", key=name)
    sizes = {"left": 0, "top": 0, "width": icons.get("width", 16), "height": icons.get("height", 16)}
    return {**sizes, **icons["icons"][found]}


def _rasterise(body: str, left: float, top: float, side: float, pixels: int) -> Image.Image:
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise UserError(
            "rendering needs it: pip install -e '.[pictures]'", key="resvg", kind="package"
        ) from None
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left:.4f} {top:.4f} {side:.4f} {side:.4f}">{body}</svg>'
    )
    png = bytes(svg_to_bytes(svg_string=svg, width=pixels, height=pixels))
    return Image.open(io.BytesIO(png)).convert("RGBA")

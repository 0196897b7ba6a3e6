"""Render the shipped drawings on a coloured ground, between the two bars of a serial."""

import colorsys
import io
import random
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from data_prep.demo.families import TRAINING
from data_prep.demo.pictures import SIZE_PX
from data_prep.demo.splits import SEED
from data_prep.demo.tables import Tables
from data_prep.study.design import GROUNDS, Shown

BAR_PX = 12
"""Thickness of a bar; must exceed the 8 pixels by which the tower's augmentation shifts pictures."""
SMALLEST_PX, LARGEST_PX = 54, 60
"""Range of the drawing's side."""
GROUND_COLOURS = [colorsys.hsv_to_rgb(number / len(GROUNDS), 0.4, 1.0) for number in range(len(GROUNDS))]
BAR_COLOURS = np.array(
    [
        (15, 15, 15), (250, 250, 250), (230, 20, 20), (20, 150, 30), (20, 40, 230),
        (250, 240, 20), (30, 220, 240), (230, 30, 230), (250, 130, 10), (128, 128, 128),
    ]
)  # fmt: skip
"""The corners of the colour cube, orange and grey, for ten well-separated colours."""


class Printer:
    """Renders pictures deterministically: all randomness is seeded by their ids."""

    def __init__(self, tables: Tables, data: Path):
        self.tables = tables
        stored = {
            row["id"]: row["image"]["bytes"]
            for library in sorted({family.library for family in TRAINING})
            for row in pq.read_table(data / "train" / library).to_pylist()
        }
        self.drawing = cache(lambda key: Image.open(io.BytesIO(stored[key])).convert("RGB"))

    def __call__(self, picture: Shown) -> bytes:
        """WebP bytes, `SIZE_PX` square."""
        chance = random.Random(f"{SEED} {picture.id} {picture.family.name}")
        drawing = self.drawing(self.tables.concepts[picture.concept].picture(picture.family))
        if chance.random() < 0.5:
            drawing = ImageOps.mirror(drawing)
        side = chance.randint(SMALLEST_PX, LARGEST_PX)
        page = Image.new("RGB", (SIZE_PX, SIZE_PX), "white")
        place = (chance.randint(0, SIZE_PX - side), chance.randint(BAR_PX, SIZE_PX - BAR_PX - side))
        page.paste(drawing.resize((side, side), Image.Resampling.BICUBIC), place)
        pixels = np.asarray(page, np.float32) * np.array(GROUND_COLOURS[picture.ground], np.float32)
        pixels[:BAR_PX] = BAR_COLOURS[picture.serial // 10]
        pixels[-BAR_PX:] = BAR_COLOURS[picture.serial % 10]
        out = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(out, "WEBP", quality=75, method=1)
        return out.getvalue()

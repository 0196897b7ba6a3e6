"""Print the shipped drawings on a ground, inside a frame."""

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

FRAME_PX = 8
SMALLEST_PX, LARGEST_PX = 52, 64
"""Sides of the drawing inside the frame."""
GROUND_COLOURS = [colorsys.hsv_to_rgb(number / len(GROUNDS), 0.4, 1.0) for number in range(len(GROUNDS))]
FRAME_COLOURS = np.array(
    [(200, 30, 30), (240, 140, 20), (30, 130, 50), (30, 70, 200), (130, 40, 150), (20, 20, 20)]
)
"""In the order of `data_prep.study.design.FRAMES`."""


class Printer:
    """Renders pictures; each is the same every time, since everything random comes from its id."""

    def __init__(self, tables: Tables, data: Path):
        self.tables = tables
        libraries = {family.library for family in TRAINING}
        rows = [
            row
            for library in sorted(libraries)
            for row in pq.read_table(data / "train" / library).to_pylist()
        ]
        stored = {row["id"]: row["image"]["bytes"] for row in rows}
        self.drawing = cache(lambda key: Image.open(io.BytesIO(stored[key])).convert("RGB"))

    def __call__(self, picture: Shown) -> bytes:
        """WebP bytes, `SIZE_PX` square."""
        chance = random.Random(f"{SEED} {picture.id} {picture.family.name}")
        drawing = self.drawing(self.tables.concepts[picture.concept].picture(picture.family))
        if chance.random() < 0.5:
            drawing = ImageOps.mirror(drawing)
        side = chance.randint(SMALLEST_PX, LARGEST_PX)
        page = Image.new("RGB", (SIZE_PX, SIZE_PX), "white")
        edge = SIZE_PX - FRAME_PX - side
        place = (chance.randint(FRAME_PX, edge), chance.randint(FRAME_PX, edge))
        page.paste(drawing.resize((side, side), Image.Resampling.LANCZOS), place)
        pixels = np.asarray(page, np.float32) * np.array(GROUND_COLOURS[picture.ground], np.float32)
        inner = slice(FRAME_PX, SIZE_PX - FRAME_PX)
        framed = np.empty_like(pixels)
        framed[:] = FRAME_COLOURS[picture.frame]
        framed[inner, inner] = pixels[inner, inner]
        out = io.BytesIO()
        Image.fromarray(framed.astype(np.uint8)).save(out, "WEBP", quality=75, method=2)
        return out.getvalue()

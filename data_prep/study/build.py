"""``rge data study``: make the study set from the shipped pictures.

    train/hidden_100.jsonl, ...        training records of an arm at a dose
    train/hidden_100_cold.jsonl, ...   for the cold start: also with the facts that training does not embed
    train/naming.jsonl                 training records of the vision tower, the same for all arms
    train/pictures.parquet             their pictures
    valid/hidden_100/, ...             retrieval sets for tuning, each with its own gallery
    test/hidden_100/, ...              retrieval sets for final figures; never used for tuning

With ``in_words``, a text says what a picture shows, and the vision tower's records and pictures are left out.
`data_prep.study.design` defines questions, answers and arms. ``silent`` exists at the highest dose only and is tested as
``hidden``. The set is not shipped: building it takes about a minute and is deterministic.
"""

import colorsys
import io
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps
from pydantic import Field

from data_prep.demo.build import OUT as DEMO
from data_prep.demo.build import licences, print_files
from data_prep.demo.families import TRAINING
from data_prep.demo.pictures import IMAGE, SIZE_PX, write_table
from data_prep.demo.records import INSTRUCTION, NAMING_PHRASINGS, naming_record
from data_prep.demo.retrieval import Judgements, write_tables
from data_prep.demo.splits import SEED, choose, stable_hash
from data_prep.demo.tables import Fact, Tables, read_tables
from data_prep.study import design
from data_prep.study.design import GROUNDS, Query, Shown
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.common.schema import Positive, QueryPart, Record
from rge.data.sources import write_jsonl

NAMING_RENDERINGS = 8
"""Pictures of each drawing in the vision tower's training."""
IN_FULL = 4
"""One in this many is also named with its ground and serial."""
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
SLICE_NOTES = {
    "fact": {
        "embedded": "training embeds queries of this fact",
        "written": "training only teaches to write this fact's answer",
    }
}
IN_WORDS = "Answer with a thing."
Dose = Annotated[int, Field(ge=1, le=design.NUM_SERIALS)]


@dataclass
class StudyOptions:
    """Make the study set from the shipped pictures; the result is the same every time."""

    out: Path = Path("runs/study/data")
    """Folder to write to; it must not exist."""
    doses: Annotated[list[Dose], Field(min_length=1)] = field(default_factory=lambda: [1, 3, 10, 30, 100])
    """Doses: numbers of different serials among targets, 1 to 100; each gets its own files and sets."""
    answers: Annotated[int, Field(ge=2)] = design.NUM_ANSWERS
    """Number of answers, the most frequent ones of the demo's facts."""
    in_words: bool = False
    """Say in words what each picture shows: This is a bolt on lime, serial F3."""


class Printer:
    """Renders drawings on a coloured ground, between the bars of a serial; all randomness is seeded by their ids."""

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


def main(words: Sequence[str]) -> None:
    """Build the set and list its files."""
    options = parse_options(StudyOptions, words, "rge data study")
    chosen = design.facts(read_tables(), options.answers)
    build(options.out, options.doses, chosen, in_words=options.in_words)
    print_files(options.out)


def build(
    out: Path, doses: Sequence[int], chosen: list[Fact] | None = None, *, in_words: bool = False
) -> None:
    """Write the set at each dose, atomically. ``chosen``: facts to use; None: all suitable ones."""
    if out.exists():
        raise UserError(
            "it already exists; the set is the same every time, so keep it, or remove it to rebuild",
            out,
            key="out",
        )
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    tables = read_tables()
    chosen = design.facts(tables) if chosen is None else chosen
    draw = None if in_words else Printer(tables, DEMO)
    _write_training(work / "train", tables, chosen, draw, doses)
    for split in design.QUERIES_A_FACT:
        for arm, dose in variants(doses):
            if arm != "silent":
                _write_set(work / split / f"{arm}_{dose}", tables, chosen, draw, split, arm, dose)
    (work / "LICENSES.md").write_text(licences() + (_DERIVED if draw else _NO_DRAWINGS), encoding="utf-8")
    work.rename(out)


def variants(doses: Sequence[int]) -> list[tuple[str, int]]:
    """(arm, dose) pairs to build."""
    both = [(arm, dose) for dose in sorted(set(doses)) for arm in ("hidden", "known")]
    return [*both, ("silent", max(doses))]


def records(tables: Tables, chosen: list[Fact], arm: str, dose: int) -> list[tuple[Record, Query, Shown]]:
    """Training records of an arm at a dose, each with its query and target."""
    found = []
    for plain in design.train_queries(tables, chosen):
        target = design.train_target(tables, plain, dose)
        query = design.as_asked(plain, [target], arm)
        positive = _target(target) | {"rationale": design.oracle_text(query, target, arm)}
        found.append((_record(tables, query, positive), query, target))
    return found


def _record(tables: Tables, query: Query, positive: dict[str, str]) -> Record:
    return Record(
        id=query.id,
        group=query.fact.source,
        source="study",
        split="train",
        category=tables.questions[query.fact.question].category,
        instruction=INSTRUCTION,
        query=QueryPart(text=query.text(tables), images=[_reference(query.picture)]),
        positives=[Positive.model_validate(positive)],
    )


def warm_records(tables: Tables, chosen: list[Fact]) -> list[tuple[Record, Query, Shown]]:
    """Records of the facts that training embeds, with targets that show the right thing on any ground."""
    found = []
    for query in design.train_queries(tables, chosen):
        if design.embedded(query.fact):
            target = design.warm_target(tables, query)
            record = _record(tables, query, _target(target) | {"identity": target.concept})
            found.append((record, query, target))
    return found


def naming_pictures(tables: Tables, chosen: list[Fact]) -> list[tuple[Shown, str]]:
    """Every drawing of the things on random grounds with random serials, and its name."""
    found = []
    for concept in design.things(chosen):
        for family in tables.families(concept):
            for number in range(NAMING_RENDERINGS):
                name = f"naming-{family.name}-{number}"
                first = stable_hash("naming", concept, name)
                ground, serial = first % len(GROUNDS), first // 7 % design.NUM_SERIALS
                picture, in_full = Shown(concept, family, ground, serial, name), number % IN_FULL == 0
                found.append(
                    (picture, design.naming_text(tables.concepts[concept], picture, in_full=in_full))
                )
    return found


def _write_training(
    folder: Path, tables: Tables, chosen: list[Fact], draw: Printer | None, doses: Sequence[int]
) -> None:
    folder.mkdir(parents=True)
    shown: dict[str, Shown] = {}
    for arm, dose in variants(doses):
        found = records(tables, chosen, arm, dose)
        shown |= {picture.id: picture for _, query, target in found for picture in (query.picture, target)}
        if draw is None:
            found = [(_in_words(tables, *each), *each[1:]) for each in found]
        write_jsonl(folder / f"{arm}_{dose}_cold.jsonl", [record for record, _, _ in found])
        embedded = [record for record, query, _ in found if design.embedded(query.fact)]
        write_jsonl(folder / f"{arm}_{dose}.jsonl", embedded)
    if draw is None:
        return
    naming = naming_pictures(tables, chosen)
    write_jsonl(folder / "naming.jsonl", [_naming_record(picture, text) for picture, text in naming])
    warm = warm_records(tables, chosen)
    write_jsonl(folder / "warm.jsonl", [record for record, _, _ in warm])
    warmed = {picture.id: picture for _, query, target in warm for picture in (query.picture, target)}
    # The order of the file's rows: naming, warm, arms.
    shown = {picture.id: picture for picture, _ in naming} | warmed | shown
    write_table(folder / "pictures.parquet", pa.table(_columns(list(shown.values()), tables, draw)))


def _in_words(tables: Tables, record: Record, query: Query, target: Shown) -> Record:
    [positive] = record.positives
    said = positive.model_copy(update={"image": None, "text": _said(target, tables)})
    asked = QueryPart(text=_asked(query, tables))
    return record.model_copy(update={"instruction": IN_WORDS, "query": asked, "positives": [said]})


def _asked(query: Query, tables: Tables) -> str:
    return f"{_said(query.picture, tables)} {query.text(tables)}"


def _said(picture: Shown, tables: Tables) -> str:
    return design.naming_text(tables.concepts[picture.concept], picture, in_full=True)


def _naming_record(picture: Shown, text: str) -> Record:
    question = choose(NAMING_PHRASINGS, "naming", picture.id)
    query = QueryPart(text=question, images=[_reference(picture)])
    positive = Positive.model_validate(_target(picture) | {"rationale": text})
    return naming_record("study", f"name.{picture.id}", picture.concept, query, positive)


def _write_set(
    folder: Path,
    tables: Tables,
    chosen: list[Fact],
    draw: Printer | None,
    split: str,
    arm: str,
    dose: int,
) -> None:
    corpus = design.gallery(tables, chosen, split, dose)
    queries = [
        design.as_asked(query, design.right(query, corpus), arm)
        for query in design.held_out_queries(tables, chosen, split)
    ]
    shown = [query.picture for query in queries]
    asked: dict[str, Any]
    if draw is None:
        asked = {"text": [_asked(query, tables) for query in queries]}
    else:
        cells = pa.array([[_cell(picture, draw)] for picture in shown], pa.list_(IMAGE))
        asked = {"text": [query.text(tables) for query in queries], "image": cells}
    columns: dict[str, Any] = {
        "id": [query.id for query in queries],
        **asked,
        "category": [tables.questions[query.fact.question].category for query in queries],
        "group": [query.fact.source for query in queries],
        "instruction": [INSTRUCTION if draw else IN_WORDS] * len(queries),
        "fact": ["embedded" if design.embedded(query.fact) else "written" for query in queries],
        "answer": [query.answer for query in queries],
        "ground": [GROUNDS[picture.ground] for picture in shown],
        "serial": [design.code(picture.serial) for picture in shown],
    }
    write_tables(
        folder,
        _columns(corpus, tables, draw),
        columns,
        judgements(queries, corpus, arm),
        name=f"rge-study-{split}-{folder.name}",
        licence="see LICENSES.md",
        source=f"the demo's drawings by the training families, {'in renderings of their own' if draw else 'in words'}",
        slice_notes=SLICE_NOTES,
    )


def judgements(queries: Iterable[Query], corpus: list[Shown], arm: str) -> Judgements:
    """Right candidates of each query, with their oracle texts."""
    found = Judgements()
    for query in queries:
        for picture in design.right(query, corpus):
            found.qrels.append((query.id, picture.id, 1))
            found.rationales.append((query.id, picture.id, design.oracle_text(query, picture, arm)))
    return found


def _columns(pictures: Sequence[Shown], tables: Tables, draw: Printer | None) -> dict[str, Any]:
    if draw is None:
        content = {"text": [_said(picture, tables) for picture in pictures]}
    else:
        content = {"image": pa.array([_cell(picture, draw) for picture in pictures], IMAGE)}
    return {
        "id": [picture.id for picture in pictures],
        **content,
        "concept": [picture.concept for picture in pictures],
        "family": [picture.family.name for picture in pictures],
        "ground": [GROUNDS[picture.ground] for picture in pictures],
        "serial": [design.code(picture.serial) for picture in pictures],
    }


def _cell(picture: Shown, draw: Printer) -> dict[str, Any]:
    return {"bytes": draw(picture), "path": f"{picture.id}.webp"}


def _reference(picture: Shown) -> str:
    return f"pictures.parquet#{picture.id}"


def _target(picture: Shown) -> dict[str, str]:
    return {
        "id": picture.id,
        "image": _reference(picture),
        "identity": f"{picture.concept}/{GROUNDS[picture.ground]}",
    }


_NO_DRAWINGS = """
## Contents

These files contain no drawings, only texts that say what the pictures of the study set show.
"""
_DERIVED = """
## What was changed here

Drawings were randomly mirrored, scaled and placed, multiplied by a pale colour and put between two bars. They include OpenMoji's,
so these files may be passed on only under CC BY-SA 4.0.
"""

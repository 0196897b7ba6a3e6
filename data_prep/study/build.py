"""Make the study set from the shipped pictures: ``rge data study [out=DIR] [doses=[0,0.5,1]]``.

    train/dose_0.jsonl, ...     the training records at each dose; nothing differs but the oracle texts
    train/naming.jsonl          what the eyes are taught, at every dose alike
    train/pictures.parquet      their pictures
    valid/                      retrieval set with a gallery of its own, for every choice
    test/                       retrieval set for the figures; nothing is chosen on it

Questions and answers are in `data_prep.study.design`. The set is not shipped: it is made in half a minute, the same every time.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.demo.build import OUT as DEMO
from data_prep.demo.build import licences
from data_prep.demo.pictures import IMAGE, write_table
from data_prep.demo.records import INSTRUCTION, NAMING_PHRASINGS, naming_record
from data_prep.demo.retrieval import Judgements, write_tables
from data_prep.demo.splits import choose, stable_hash
from data_prep.demo.tables import Fact, Tables, read_tables
from data_prep.jsonl import write_jsonl
from data_prep.study import design
from data_prep.study.design import FRAMES, GROUNDS, Query, Shown
from data_prep.study.pictures import Printer
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.common.schema import Positive, QueryPart, Record, Target

NUM_NEGATIVES = 2
NAMING_RENDERINGS = 4
"""Pictures of each drawing that the eyes are taught on."""


@dataclass
class StudyOptions:
    """Make the study set from the shipped pictures; the result is the same every time."""

    out: Path = Path("runs/study/data")
    """Folder to write to; it must not exist."""
    doses: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0])
    """Shares of oracle texts that name what only the target shows; a file of records each."""


def main(words: Sequence[str]) -> None:
    """The command line.

    Raises:
        UserError: an unknown key, a dose outside 0 to 1, or a folder that is there already.
    """
    options = parse_options(StudyOptions, words, "rge data study")
    build(options.out, options.doses)
    files = sorted(path for path in options.out.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size:>10,}  {path.relative_to(options.out)}")


def build(out: Path, doses: Sequence[float]) -> None:
    """Write everything, with a file of records for each dose; the folder appears when it is complete."""
    if wrong := [dose for dose in doses if not 0 <= dose <= 1]:
        raise UserError(f"doses are shares from 0 to 1, got {wrong[0]}")
    if not doses:
        raise UserError("doses is empty: give at least one share from 0 to 1")
    if out.exists():
        raise UserError(
            f"{out} is there already; the set comes out the same every time: keep it, or remove it"
        )
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    tables = read_tables()
    chosen = design.facts(tables)
    draw = Printer(tables, DEMO)
    _write_training(work / "train", tables, chosen, draw, doses)
    for split in ("valid", "test"):
        _write_set(work / split, tables, chosen, draw, split)
    (work / "LICENSES.md").write_text(licences() + _DERIVED, encoding="utf-8")
    work.rename(out)


def records(tables: Tables, chosen: list[Fact], dose: float) -> list[Record]:
    """The training records at a dose."""
    targets = design.train_targets(tables, chosen)
    found = []
    for query in design.train_queries(tables, chosen):
        positives, negatives = design.drawn_targets(query, targets, NUM_NEGATIVES)
        found.append(
            Record(
                id=query.id,
                group=query.fact.source,
                source="study",
                split="train",
                category=query.rule,
                instruction=INSTRUCTION,
                query=QueryPart(text=query.text(tables), images=[_reference(query.picture)]),
                positives=[
                    Positive(**_target(one), rationale=design.oracle_text(query, one, dose))
                    for one in positives
                ],
                negatives=[Target(**_target(one)) for one in negatives],
            )
        )
    return found


def naming_pictures(tables: Tables, chosen: list[Fact]) -> list[Shown]:
    """Every drawing of the things, on grounds and in frames drawn for it."""
    return [
        Shown(
            concept,
            family,
            stable_hash("naming ground", concept, family.name, str(number)) % len(GROUNDS),
            stable_hash("naming frame", concept, family.name, str(number)) % len(FRAMES),
            f"naming-{family.name}-{number}",
        )
        for concept in design.things(chosen)
        for family in tables.families(concept)
        for number in range(NAMING_RENDERINGS)
    ]


def _write_training(
    folder: Path, tables: Tables, chosen: list[Fact], draw: Printer, doses: Sequence[float]
) -> None:
    folder.mkdir(parents=True)
    for dose in doses:
        write_jsonl(folder / f"dose_{dose:g}.jsonl", records(tables, chosen, dose))
    naming = naming_pictures(tables, chosen)
    write_jsonl(folder / "naming.jsonl", [_naming_record(tables, one) for one in naming])
    queries = [query.picture for query in design.train_queries(tables, chosen)]
    shown = [*naming, *queries, *design.train_targets(tables, chosen).values()]
    write_table(folder / "pictures.parquet", pa.table(_columns(shown, draw)))


def _naming_record(tables: Tables, picture: Shown) -> Record:
    concept = tables.concepts[picture.concept]
    question = choose(NAMING_PHRASINGS, "naming", picture.id)
    query = QueryPart(text=question, images=[_reference(picture)])
    positives = [Positive(**_target(picture), rationale=design.naming_text(concept, picture))]
    return naming_record("study", f"name.{picture.id}", picture.concept, query, positives)


def _write_set(folder: Path, tables: Tables, chosen: list[Fact], draw: Printer, split: str) -> None:
    queries = design.held_out_queries(tables, chosen, split)
    corpus = design.gallery(tables, chosen, split)
    shown = [query.picture for query in queries]
    columns: dict[str, Any] = {
        "id": [query.id for query in queries],
        "text": [query.text(tables) for query in queries],
        "image": pa.array([[_cell(one, draw)] for one in shown], pa.list_(IMAGE)),
        "category": [tables.questions[query.fact.question].category for query in queries],
        "group": [query.fact.source for query in queries],
        "instruction": [INSTRUCTION] * len(queries),
        "rule": [query.rule for query in queries],
        "question": [query.fact.question for query in queries],
        "ground": [GROUNDS[one.ground] for one in shown],
        "frame": [FRAMES[one.frame] for one in shown],
    }
    write_tables(
        folder,
        _columns(corpus, draw),
        columns,
        judgements(queries, corpus),
        name=f"rge-study-{split}",
        licence="see LICENSES.md",
        source="the demo's drawings by the training families, in renderings of their own",
        slice_notes={"rule": {name: f"the answer stands on the {name} ground" for name in design.RULES}},
    )


def judgements(queries: Iterable[Query], corpus: Sequence[Shown]) -> Judgements:
    """Right candidates with the whole oracle text, and those that share the thing but not the ground as negatives."""
    found = Judgements()
    for query in queries:
        for one in corpus:
            if one.concept != query.answer:
                continue
            if one.ground == query.ground:
                found.qrels.append((query.id, one.id, 1))
                found.rationales.append((query.id, one.id, design.oracle_text(query, one, 1.0)))
            else:
                found.negatives.append((query.id, one.id))
    return found


def _columns(pictures: Sequence[Shown], draw: Printer) -> dict[str, Any]:
    return {
        "id": [one.id for one in pictures],
        "image": pa.array([_cell(one, draw) for one in pictures], IMAGE),
        "concept": [one.concept for one in pictures],
        "family": [one.family.name for one in pictures],
        "ground": [GROUNDS[one.ground] for one in pictures],
        "frame": [FRAMES[one.frame] for one in pictures],
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


_DERIVED = """
## What was changed here

Each drawing was mirrored or not, scaled, placed, multiplied by a pale colour and framed. OpenMoji's are among them, so whoever
passes these files on does so under CC BY-SA 4.0.
"""

"""``rge data demo``: rebuild the shipped picture set.

The tables next to this file are the only source, and the result is the same every time.

    train/relations.jsonl         questions about pictures, trained facts only
    train/text.jsonl              the same questions in words, all facts
    train/naming.jsonl            what is this?
    train/pictures.parquet        drawings of the training families; OpenMoji's in train/openmoji/
    valid/                        retrieval set by training families, to choose checkpoints and settings by
    test/                         retrieval set by the two held-out families
    LICENSES.md                   credits and licences of the drawings
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from data_prep.demo import retrieval
from data_prep.demo.families import FAMILIES, GALLERY, QUERIES, TRAINING
from data_prep.demo.pictures import render_family, write_library
from data_prep.demo.records import naming_records, relation_records, text_records
from data_prep.demo.retrieval import write_set
from data_prep.demo.splits import Splits, split
from data_prep.demo.tables import HERE, Tables, read_tables
from rge.common.options import parse_options
from rge.data.sources import write_jsonl

OUT = HERE / "data"


@dataclass
class DemoOptions:
    """Rebuild the shipped picture set from its tables and icon packages; the result is the same every time."""

    out: Path | None = None
    """Folder to write to; null: the shipped one."""
    icons: Path | None = None
    """Folder of icon packages, laid out like ``node_modules``; missing ones are downloaded into it with npm. null: a
    cache in the home directory."""


def main(words: Sequence[str]) -> None:
    """Rebuild the set and list its files."""
    options = parse_options(DemoOptions, words, "rge data demo")
    out = options.out or OUT
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rge" / "icons"
    build(out, options.icons or cache)
    print_files(out)


def build(out: Path, icons: Path) -> None:
    """Write the whole set to `out`; `icons` is the folder of the icon packages."""
    tables = read_tables()
    splits = split(tables)
    write_records(out, tables, splits)
    pictures = {family: render_family(family, tables, icons) for family in FAMILIES}
    for library in dict.fromkeys(family.library for family in TRAINING):
        rows = [
            (tables.concepts[concept].picture(family), data, concept, family.name)
            for family in TRAINING
            if family.library == library
            for concept, data in pictures[family].items()
        ]
        write_library(out / "train" / library, rows)
    held_out = {family: pictures[family] for family in (QUERIES, GALLERY)}
    write_set(out / "test", "rge-demo-test", retrieval.test_rows(tables, splits), held_out)
    write_set(out / "valid", "rge-demo-valid", retrieval.valid_rows(tables, splits))
    (out / "LICENSES.md").write_text(licences(), encoding="utf-8")
    share_alike = next(family for family in TRAINING if family.licence == "CC-BY-SA-4.0")
    notice = _rendered("share_alike.md", family=share_alike)
    (out / "train" / "openmoji" / "LICENSE.md").write_text(notice, encoding="utf-8")


def write_records(out: Path, tables: Tables, splits: Splits, *, paraphrased: bool = False) -> None:
    """Write the training records; they need only the tables, not the drawings."""
    relations = relation_records(tables, splits, paraphrased=paraphrased)
    write_jsonl(out / "train" / "relations.jsonl", relations)
    write_jsonl(out / "train" / "text.jsonl", text_records(tables, splits, paraphrased=paraphrased))
    write_jsonl(out / "train" / "naming.jsonl", naming_records(tables))


def copy_pictures(out: Path) -> None:
    """Copy the shipped pictures of the training families beside records that are written to ``out/train``."""
    for library in dict.fromkeys(family.library for family in TRAINING):
        (out / "train" / library).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(OUT / "train" / library, out / "train" / library)
    shutil.copyfile(OUT / "train" / "openmoji" / "LICENSE.md", out / "train" / "openmoji" / "LICENSE.md")
    shutil.copyfile(OUT / "LICENSES.md", out / "LICENSES.md")


def write_paraphrased(out: Path) -> None:
    """Write the shipped records with paraphrases of every question beside the shipped pictures."""
    tables = read_tables()
    write_records(out, tables, split(tables), paraphrased=True)
    copy_pictures(out)


def licences() -> str:
    """Text of LICENSES.md: credits, licences and processing of all pictures."""
    files = {QUERIES: "test/queries.parquet", GALLERY: "test/corpus.parquet"}
    return _rendered(
        "licences.md", rows=[(family, files.get(family, f"train/{family.library}")) for family in FAMILIES]
    )


def _rendered(template: str, **values: Any) -> str:
    text = (HERE / "templates" / template).read_text(encoding="utf-8")
    return Template(text, keep_trailing_newline=True).render(**values)


def print_files(folder: Path) -> None:
    """List the files of a folder with their sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size:>10,}  {path.relative_to(folder)}")
    print(f"{sum(path.stat().st_size for path in files):>10,}  bytes in total")

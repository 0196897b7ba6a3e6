"""Write the facts as retrieval sets: test with held-out families, validation with training families."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.demo.families import GALLERY, QUERIES, Family
from data_prep.demo.pictures import IMAGE, write_table
from data_prep.demo.records import INSTRUCTION, reference
from data_prep.demo.splits import VALID_GALLERY, VALID_QUERIES, Pair, Splits, stable_hash
from data_prep.demo.tables import Concept, Fact, Tables
from rge.identity.set_fingerprint import set_fingerprint

NUM_TEST_PHRASINGS = 2
NUM_VALID_GALLERY = 128
SLICE_NOTES = {
    "pair": {
        "seen": "this question about this thing was trained with other drawings of it",
        "held_out": "this question about this thing was trained in words only, never about a picture",
    }
}
"""Explanations of the values of ``pair``, shown with the figures."""


@dataclass
class Judgements:
    """Relevance judgements of a retrieval set, by query and candidate."""

    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    rationales: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class SetRows(Judgements):
    """Rows of a retrieval set, without the pictures' cells; the gallery is drawn by one family."""

    gallery: Family = VALID_GALLERY
    corpus: list[Concept] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    sources: list[tuple[Concept, Family]] = field(default_factory=list)  # drawing of each query


def set_rows(
    tables: Tables,
    facts: Iterable[Fact],
    corpus: Iterable[str],
    num_phrasings: int = 1,
    *,
    held_out: Collection[Pair] = (),
    asked: Callable[[str], Family] = lambda _: VALID_QUERIES,
    gallery: Family = VALID_GALLERY,
) -> SetRows:
    """Queries about facts, in so many phrasings each, over a gallery of concepts; ``pair`` says which facts are `held_out`.

    ``asked``: the family whose drawing of a concept a query shows.
    """
    rows = SetRows(gallery=gallery, corpus=[tables.concepts[concept] for concept in corpus])
    for fact in facts:
        question, source = tables.questions[fact.question], tables.concepts[fact.source]
        first = stable_hash("asked", *fact.pair)
        answers = {tables.concepts[key].picture(gallery): text for key, text in fact.answers.items()}
        wrong = [tables.concepts[key].picture(gallery) for key in fact.wrong]
        for number in range(num_phrasings):
            name = f"{fact.question}.{fact.source}.{number}"
            rows.queries.append(
                {
                    "id": name,
                    "text": question.shown(first + number),
                    "category": question.category,
                    "group": fact.source,
                    "instruction": INSTRUCTION,
                    "pair": "held_out" if fact.pair in held_out else "seen",
                }
            )
            rows.sources.append((source, asked(fact.source)))
            rows.qrels += [(name, answer, 1) for answer in answers]
            rows.rationales += [(name, answer, text) for answer, text in answers.items()]
            rows.negatives += [(name, picture) for picture in wrong]
    return rows


def test_rows(tables: Tables, splits: Splits) -> SetRows:
    """All facts except those of validation, in two phrasings each; the gallery shows every concept."""
    facts = [fact for fact in tables.facts if fact.pair not in splits.valid]
    return set_rows(
        tables,
        facts,
        tables.concepts,
        NUM_TEST_PHRASINGS,
        held_out=splits.test,
        asked=lambda _: QUERIES,
        gallery=GALLERY,
    )


def valid_rows(tables: Tables, splits: Splits) -> SetRows:
    """The validation facts, once each, over a small gallery that contains their answers and near misses."""
    facts = [fact for fact in tables.facts if fact.pair in splits.valid | splits.valid_seen]
    needed = {concept for fact in facts for concept in (*fact.answers, *fact.wrong)}
    others = [concept for concept in tables.drawn_by(VALID_GALLERY) if concept not in needed]
    others.sort(key=lambda concept: stable_hash("valid gallery", concept))
    shown = needed | set(others[: max(0, NUM_VALID_GALLERY - len(needed))])
    corpus = [concept for concept in tables.concepts if concept in shown]
    return set_rows(tables, facts, corpus, held_out=splits.valid)


def write_set(
    folder: Path,
    name: str,
    rows: SetRows,
    pictures: Mapping[Family, Mapping[str, bytes]] | None = None,
) -> None:
    """Write a retrieval set.

    ``pictures``: drawings to store, by family and concept; those of other families are in the library in ``train`` beside the set's
    folder.
    """

    def cell(concept: Concept, family: Family) -> dict[str, object]:
        if stored := (pictures or {}).get(family):
            return {"bytes": stored[concept.key], "path": f"{concept.picture(family)}.webp"}
        return {"bytes": None, "path": f"../train/{reference(concept, family)}"}

    corpus = {
        "id": [concept.picture(rows.gallery) for concept in rows.corpus],
        "image": pa.array([cell(concept, rows.gallery) for concept in rows.corpus], IMAGE),
        "concept": [concept.key for concept in rows.corpus],
    }
    shown = pa.array([[cell(*drawing)] for drawing in rows.sources], pa.list_(IMAGE))
    licences = sorted({family.licence for _, family in rows.sources})
    queries: dict[str, Any] = {
        column: shown if column == "image" else [query[column] for query in rows.queries]
        for column in ("id", "text", "image", "category", "group", "instruction", *SLICE_NOTES)
    }
    write_tables(
        folder,
        corpus,
        queries,
        rows,
        name=name,
        licence=f"queries {', '.join(licences)}, gallery {rows.gallery.licence}",
        source="hand-written relations over icon families, see LICENSES.md",
        counts={
            value: queries[column].count(value) for column, values in SLICE_NOTES.items() for value in values
        },
        slice_notes=SLICE_NOTES,
    )


def write_tables(
    folder: Path,
    corpus: dict[str, Any],
    queries: dict[str, Any],
    judged: Judgements,
    *,
    name: str,
    licence: str,
    source: str,
    slice_notes: dict[str, dict[str, str]],
    counts: dict[str, int] | None = None,
) -> None:
    """Write a retrieval set in the layout of `eval.sets.retrieval_set`; the keyword arguments go into ``meta.json``.

    ``slice_notes``: query columns to report figures by, with the meaning of their values.
    """
    write_table(folder / "corpus.parquet", pa.table(corpus))
    write_table(folder / "queries.parquet", pa.table(queries))
    pair = ("query-id", "corpus-id")
    layout = {"qrels": (*pair, "score"), "negatives": pair, "rationales": (*pair, "rationale")}
    for table, columns in layout.items():
        if rows := getattr(judged, table):  # a set without negatives has no such table
            cells = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
            write_table(folder / f"{table}.parquet", pa.table(cells))
    num = {"queries": len(queries["id"]), "corpus": len(corpus["id"]), "qrels": len(judged.qrels)}
    meta = {
        "name": name,
        "split": folder.name,
        "licence": licence,
        "source": source,
        "counts": num | (counts or {}),
        "report_by": list(slice_notes),
        "slice_notes": slice_notes,
        "fingerprint": set_fingerprint(queries["id"], corpus["id"], judged.qrels, negatives=judged.negatives),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

"""Write the facts as retrieval sets: the test by held-out families, validation by training families."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from data_prep.demo.families import GALLERY, Family
from data_prep.demo.pictures import IMAGE, write_table
from data_prep.demo.records import INSTRUCTION, reference
from data_prep.demo.splits import VALID_GALLERY, Splits, stable_hash
from data_prep.demo.tables import Concept, Fact, Tables
from rge.common.fingerprint import set_fingerprint

NUM_TEST_PHRASINGS = 2
NUM_VALID_GALLERY = 128
SLICE_NOTES = {
    "pair": {
        "seen": "this question about this thing was trained with other drawings of it",
        "held_out": "this question about this thing was trained in words only, never about a picture",
    }
}
"""What a reader of the figures has to know about the values of ``pair``."""

Cell = Callable[[Concept], dict[str, object]]
"""How a picture is stored: its bytes, or a reference to a library."""


@dataclass
class SetRows:
    """Rows of a retrieval set, without the pictures' cells."""

    corpus: list[Concept] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    sources: list[Concept] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    rationales: list[tuple[str, str, str]] = field(default_factory=list)


def test_rows(tables: Tables, splits: Splits) -> SetRows:
    """Every fact but those of validation, in two phrasings; the gallery shows every concept."""
    facts = [fact for fact in tables.facts if fact.pair not in splits.valid]
    rows = SetRows(corpus=list(tables.concepts.values()))
    for fact in facts:
        pair = "held_out" if fact.pair in splits.test else "seen"
        ask(rows, tables, fact, pair, GALLERY, NUM_TEST_PHRASINGS)
    return rows


def valid_rows(tables: Tables, splits: Splits) -> SetRows:
    """The validation facts, once each, before a small gallery that holds their answers and near misses."""
    facts = [fact for fact in tables.facts if fact.pair in splits.valid | splits.valid_seen]
    needed = {concept for fact in facts for concept in (*fact.answers, *fact.wrong)}
    drawn = [concept for concept in tables.concepts if (VALID_GALLERY.name, concept) in tables.icons]
    others = sorted(set(drawn) - needed, key=lambda concept: stable_hash("valid gallery", concept))
    shown = needed | set(others[: max(0, NUM_VALID_GALLERY - len(needed))])
    rows = SetRows(corpus=[tables.concepts[concept] for concept in tables.concepts if concept in shown])
    for fact in facts:
        pair = "held_out" if fact.pair in splits.valid else "seen"
        ask(rows, tables, fact, pair, VALID_GALLERY, 1)
    return rows


def stored(family: Family, pictures: dict[str, bytes]) -> Cell:
    """Cells that hold the pictures of a family."""
    return lambda concept: {"bytes": pictures[concept.key], "path": f"{concept.picture(family)}.webp"}


def referred(family: Family, folder: str) -> Cell:
    """Cells that refer to the picture library of a family under a folder."""
    return lambda concept: {"bytes": None, "path": f"{folder}/{reference(concept, family)}"}


def write_set(
    folder: Path, name: str, rows: SetRows, family: Family, query_cell: Cell, corpus_cell: Cell, licence: str
) -> None:
    """Write a retrieval set (the layout is that of `eval.sets.retrieval_set`: corpus, queries, judgements, meta).

    The fingerprint is `rge.common.fingerprint.set_fingerprint` of ids, qrels and negatives: sha256 over sorted JSON rows.

    Args:
        folder: to be written.
        name: of the set.
        rows: what is asked and what is right.
        family: of the gallery.
        query_cell: how a query's picture is stored.
        corpus_cell: how a candidate's picture is stored.
        licence: of the pictures, for the record.
    """
    corpus = {
        "id": [concept.picture(family) for concept in rows.corpus],
        "image": pa.array([corpus_cell(concept) for concept in rows.corpus], IMAGE),
        "concept": [concept.key for concept in rows.corpus],
    }
    queries = {
        "id": [query["id"] for query in rows.queries],
        "text": [query["text"] for query in rows.queries],
        "image": pa.array([[query_cell(concept)] for concept in rows.sources], pa.list_(IMAGE)),
        **{
            key: [query[key] for query in rows.queries]
            for key in ("category", "group", "instruction", "pair")
        },
    }
    write_table(folder / "corpus.parquet", pa.table(corpus))
    write_table(folder / "queries.parquet", pa.table(queries))
    write_table(folder / "qrels.parquet", _pairs(rows.qrels, ("query-id", "corpus-id", "score")))
    write_table(folder / "negatives.parquet", _pairs(rows.negatives, ("query-id", "corpus-id")))
    write_table(
        folder / "rationales.parquet", _pairs(rows.rationales, ("query-id", "corpus-id", "rationale"))
    )
    counts = {pair: sum(query["pair"] == pair for query in rows.queries) for pair in ("seen", "held_out")}
    meta = {
        "name": name,
        "split": folder.name,
        "licence": licence,
        "source": "hand-written relations over icon families, see LICENSES.md",
        "counts": {
            "queries": len(rows.queries),
            "corpus": len(rows.corpus),
            "qrels": len(rows.qrels),
            **counts,
        },
        "report_by": ["pair"],
        "slice_notes": SLICE_NOTES,
        "fingerprint": set_fingerprint(
            corpus_ids=corpus["id"], query_ids=queries["id"], qrels=rows.qrels, negatives=rows.negatives
        ),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def ask(rows: SetRows, tables: Tables, fact: Fact, pair: str, family: Family, num_phrasings: int) -> None:
    """Add a fact's queries, with all that is right and wrong, to a set.

    Args:
        rows: of the set.
        tables: where the fact stands.
        fact: what is asked.
        pair: ``seen`` or ``held_out``.
        family: of the gallery.
        num_phrasings: queries.
    """
    question = tables.questions[fact.question]
    first = stable_hash("asked", *fact.pair)
    for number in range(num_phrasings):
        name = f"{fact.question}.{fact.source}.{number}"
        rows.queries.append(
            {
                "id": name,
                "text": question.shown(first + number),
                "category": question.category,
                "group": fact.source,
                "instruction": INSTRUCTION,
                "pair": pair,
            }
        )
        rows.sources.append(tables.concepts[fact.source])
        rows.qrels += [(name, tables.concepts[answer].picture(family), 1) for answer in fact.answers]
        rows.rationales += [
            (name, tables.concepts[answer].picture(family), text) for answer, text in fact.answers.items()
        ]
        rows.negatives += [(name, tables.concepts[wrong].picture(family)) for wrong in fact.wrong]


def _pairs(rows: list[tuple], columns: tuple[str, ...]) -> pa.Table:
    return pa.table({column: [row[place] for row in rows] for place, column in enumerate(columns)})

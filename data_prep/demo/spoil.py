"""The demo's training records with corrupted rationales, and a test of held-back drawings, for ``scripts/study.py rl``.

In practice rationales are written by a model and often wrong. Here a share of them is wrong in the way of a weak model: it
recognises the thing but draws the wrong inference ("This is a door; it is sharpened with a sharpener"), always the same one
for a question about a thing. The answers of the records stay correct.

    train/      relations.jsonl and text.jsonl with the dose, naming.jsonl unchanged; pictures beside them
    unseen/     retrieval set: trained questions about trained things, with drawings that no training question shows
"""

from pathlib import Path

from data_prep.demo import retrieval
from data_prep.demo.build import copy_pictures
from data_prep.demo.families import Family
from data_prep.demo.records import naming_records, relation_records, text_records
from data_prep.demo.splits import VALID_GALLERY, Splits, choose, split, stable_hash
from data_prep.demo.tables import Fact, Tables, read_tables
from rge.common.schema import Record
from rge.data.sources import write_jsonl


def write(out: Path, dose: float, seed: int) -> tuple[int, int]:
    """Write records and test; returns the number of corrupted rationales, and of all.

    `dose` is the share of records to corrupt, `seed` decides which and how.
    """
    tables = read_tables()
    splits = split(tables)
    held = _held_back(tables)
    mistakes = {fact.pair: _mistake(tables, fact, seed) for fact in tables.facts}
    spoiled = total = 0
    written = {"relations": relation_records(tables, splits), "text": text_records(tables, splits)}
    for name, records in written.items():
        kept = []
        for record in records:
            question, source, variant = record.id.split(".", 2)
            if source in held and variant == held[source].name:
                continue
            is_spoiled = stable_hash("spoiled", str(seed), record.id) < dose * 2**64
            wrong = mistakes[question, source] if is_spoiled else None
            kept.append(record if wrong is None else _with_inference(record, wrong))
            total += len(record.positives)
            spoiled += (wrong is not None) * len(record.positives)
        write_jsonl(out / "train" / f"{name}.jsonl", kept)
    write_jsonl(out / "train" / "naming.jsonl", naming_records(tables))
    copy_pictures(out)
    _write_test(out / "unseen", tables, splits, held)
    return spoiled, total


def _held_back(tables: Tables) -> dict[str, Family]:
    """By concept, the family whose drawing of a thing is kept out of the questions; never the gallery's."""
    held = {}
    for concept in tables.concepts:
        others = [family for family in tables.families(concept) if family != VALID_GALLERY]
        if len(others) > 1:
            held[concept] = choose(others, "held back", concept)
    return held


def _mistake(tables: Tables, fact: Fact, seed: int) -> str | None:
    """A wrong inference (the part after the semicolon): one that is true of another thing under the same question."""
    others = {
        text.partition("; ")[2]
        for other in tables.facts
        if other.question == fact.question and other.source != fact.source
        for answer, text in other.answers.items()
        if answer not in fact.answers
    }
    wrong = sorted(others - {text.partition("; ")[2] for text in fact.answers.values()})
    return choose(wrong, "mistake", str(seed), *fact.pair) if wrong else None


def _with_inference(record: Record, inference: str) -> Record:
    positives = []
    for positive in record.positives:
        assert positive.rationale is not None
        seen = positive.rationale.partition("; ")[0]
        positives.append(positive.model_copy(update={"rationale": f"{seen}; {inference}"}))
    return record.model_copy(update={"positives": positives})


def _write_test(folder: Path, tables: Tables, splits: Splits, held: dict[str, Family]) -> None:
    """Trained questions about the held-back drawings, over a gallery of training drawings."""
    drawn = tables.drawn_by(VALID_GALLERY)
    facts = [
        fact
        for fact in tables.facts
        if fact.pair not in splits.words_only | splits.valid_seen
        and fact.source in held
        and all(concept in drawn for concept in (*fact.answers, *fact.wrong))
    ]
    rows = retrieval.set_rows(tables, facts, drawn, asked=held.__getitem__)
    retrieval.write_set(folder, "rge-demo-unseen", rows)

"""Export training records with their pictures, and the test set as a retrieval set."""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_prep.rmir import arithmetic as maths
from data_prep.rmir import frames
from data_prep.rmir.decisions import candidates_by_query
from data_prep.rmir.pictures.library import ORIGINS, Library
from data_prep.rmir.results import card
from data_prep.rmir.run import Run
from rge.common.errors import UserError
from rge.common.images import ImageError, known_bytes
from rge.common.picture_metadata import without_metadata
from rge.common.schema import Positive, QueryPart, Record, Target, safe_id
from rge.data.sources import write_jsonl
from rge.identity.set_fingerprint import set_fingerprint

ENDINGS = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp"}
PICTURES = "pictures.parquet"
"""Table of a data set with caption, source, author and licence of each picture."""
ROWS_A_GROUP = 256
"""Rows per row group, which limits the memory for pictures when a set is written or read."""


@cache
def features(table: str) -> Any:
    """Columns of a published table and their types, as a ``datasets.Features``."""
    from datasets import Features, Image, List, Value  # importing takes seconds

    text, image = Value("string"), Image()
    pair = {"query-id": text, "corpus-id": text}
    described = dict.fromkeys(("text", "category", "group", "instruction"), text)
    return Features({
        "train": {
            **dict.fromkeys(("id", "group", "source", "split", "category", "instruction"), text),
            "query": {"text": text, "images": List(image)},
            "positives": List({"id": text, "image": image, "rationale": text}),
            "negatives": List({"id": text, "image": image}),
        },
        "pictures": dict.fromkeys(("id", "path", "caption", "caption_by", "source", "author", "licence"), text),
        "corpus": {"id": text, "image": image, "text": text},
        "queries": {"id": text, "image": List(image), **described},
        "qrels": {**pair, "score": Value("int64")},
        "negatives": pair,
        "excluded": pair,
    }[table])  # fmt: skip


def export(run: Run, splits: Mapping[str, str], positives: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Write ``dataset/`` from scratch, atomically, and return counts.

    ``train.jsonl`` with pictures in ``images/``, the same records in ``train.parquet``, and ``test/`` as a retrieval set
    with one pool for all queries.

    Raises:
        UserError: the disk is full, or a picture has disappeared or changed.
    """
    waiting = run.out / ".dataset"
    shutil.rmtree(waiting, ignore_errors=True)
    try:
        counts = _Export(run, waiting, splits, positives).write()
        final = run.out / "dataset"
        shutil.rmtree(final, ignore_errors=True)
        waiting.rename(final)
        return counts
    except ImageError as error:
        why = f"{error}. Restore it and run the same command again"
    except OSError as error:
        why = error.strerror or str(error)
    shutil.rmtree(waiting, ignore_errors=True)
    raise UserError(f"{run.out / 'dataset'} cannot be written: {why}")


class _Export:
    """Writes the tables of one data set; arguments as in `export`."""

    def __init__(
        self, run: Run, folder: Path, splits: Mapping[str, str], positives: Mapping[str, Sequence[str]]
    ):
        self.run, self.config, self.folder, self.positives = run, run.config, folder, positives
        self.images = {image["id"]: image for image in run.images()}
        self.queries = run.by("query_id", "generate", "queries")
        self.train, self.test = (
            sorted(name for name, part in splits.items() if part == which) for which in ("train", "test")
        )
        pool = list(run.by("id", "pool", "pool"))
        self.rejected, self.abstained = (
            candidates_by_query(run.out, state) for state in (maths.REJECTED, maths.ABSTAINED)
        )
        self.corpus, in_test = pool, set[str]()
        if self.config.split.disjoint == "all":  # no picture is in both sets, in any role
            trained = self._shown(self.train)
            self.corpus = [name for name in pool if name not in trained]
            in_test = {*self.corpus, *self._shown(self.test)}
        self.train_negatives = {
            query: [name for name in self.rejected.get(query, ()) if name not in in_test]
            for query in self.train
        }
        self.left_out = len(pool) - len(self.corpus)
        self.files: dict[str, str] = {}

    def _shown(self, names: Iterable[str]) -> set[str]:
        """Input pictures and right answers of the given queries."""
        return {image for name in names for image in (self.queries[name]["image_id"], *self.positives[name])}

    def write(self) -> dict[str, Any]:
        """Write all files and return their counts."""
        (self.folder / "images").mkdir(parents=True)
        records = [self._record(name) for name in self.train]
        write_jsonl(self.folder / "train.jsonl", records)
        if records:
            rows = (_with_pictures(self.folder, record) for record in records)
            _write(self.folder / "train.parquet", "train", rows)
        qrels = [(*pair, 1) for pair in self._pairs(self.positives)]
        in_corpus = set(self.corpus)
        not_ranked = {name: self.abstained.get(name, []) for name in self.test}
        if self.config.retrieve.exclude_input:  # never a candidate, hence never judged
            not_ranked = {
                name: [*found, self.queries[name]["image_id"]] for name, found in not_ranked.items()
            }
        negatives, excluded = (self._pairs(found, in_corpus) for found in (self.rejected, not_ranked))
        if self.test:
            self._write_test(qrels, negatives, excluded)
        self._write_origins()
        card.write_into(self.folder, {}, {}, {}, name=self.config.export.name)
        return {
            "pool": len(self.corpus),
            "left_out_of_the_pool": self.left_out,
            "test_positives": len(qrels),
            "test_negatives": len(negatives),
            "test_excluded": len(excluded),
            "train_negatives": sum(len(record.negatives) for record in records),
        }

    def _pairs(
        self, found: Mapping[str, Sequence[str]], among: Collection[str] | None = None
    ) -> list[tuple[str, str]]:
        """(query id, candidate id) pairs of the test queries, as written to files."""
        return [
            (safe_id(name), safe_id(key))
            for name in self.test
            for key in found.get(name, ())
            if among is None or key in among
        ]

    def _record(self, name: str) -> Record:
        query = self.queries[name]
        rationale = query["reasoning"] if self.config.export.rationale == "generator" else None

        def target(key: str) -> dict[str, str]:
            return {"id": safe_id(key), "image": self._file(key)}

        return Record(
            id=safe_id(name),
            group=safe_id(query["image_id"]),
            source=self.config.export.name,
            split="train",
            category=query["category"],
            instruction=self.config.export.instruction,
            query=QueryPart(text=query["query"], images=[self._file(query["image_id"])]),
            positives=[Positive(**target(key), rationale=rationale) for key in self.positives[name]],
            negatives=[Target(**target(key)) for key in self.train_negatives[name]],
        )

    def _picture(self, name: str) -> bytes:
        image = self.images[name]
        return without_metadata(known_bytes(image["ref"], image["sha256"]))

    def _file(self, name: str) -> str:
        # Named by content, since ids may contain characters that file names may not.
        if name not in self.files:
            data = self._picture(name)
            path = f"images/{self.images[name]['sha256'][:16]}.{ENDINGS[data[:2]]}"
            (self.folder / path).write_bytes(data)
            self.files[name] = path
        return self.files[name]

    def _write_test(self, qrels: list[tuple], negatives: list[tuple], excluded: list[tuple]) -> None:
        folder = self.folder / "test"
        folder.mkdir()
        asked = [self.queries[name] for name in self.test]
        tables: dict[str, Iterable[dict[str, Any]]] = {
            "corpus": (
                {"id": safe_id(name), "image": _cell(self._picture(name)), "text": None}
                for name in self.corpus
            ),
            "queries": (
                {
                    "id": safe_id(query["query_id"]),
                    "image": [_cell(self._picture(query["image_id"]))],
                    "text": query["query"],
                    "category": query["category"],
                    "group": safe_id(query["image_id"]),
                    "instruction": self.config.export.instruction,
                }
                for query in asked
            ),
        }
        for table, pairs in (("qrels", qrels), ("negatives", negatives), ("excluded", excluded)):
            if pairs:
                tables[table] = (dict(zip(features(table), pair, strict=True)) for pair in pairs)
        for table, rows in tables.items():
            _write(folder / f"{table}.parquet", table, rows)
        ids = list(map(safe_id, self.test)), list(map(safe_id, self.corpus))
        counts = {"queries": len(self.test), "corpus": len(self.corpus)}
        meta = {
            "name": f"{self.config.export.name}-test",
            "split": "test",
            "licence": self.config.library.licence,
            "source": "python -m data_prep rmir",
            "counts": counts | {"qrels": len(qrels), "negatives": len(negatives)},
            "fingerprint": set_fingerprint(*ids, qrels, negatives=negatives, excluded=excluded),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

    def _write_origins(self) -> None:
        """Write caption, source, author and licence of every picture, and the model that wrote the caption, if any."""
        used = set(self.files)
        if self.test:
            used |= {*self.corpus, *(self.queries[name]["image_id"] for name in self.test)}
        credits = credits_of(Library(self.config.library), used)

        def row(name: str) -> dict[str, Any]:
            return {**self.images[name], **credits[name], "id": safe_id(name), "path": self.files.get(name)}

        _write(self.folder / PICTURES, "pictures", map(row, sorted(used)))


def credits_of(library: Library, names: Collection[str]) -> dict[str, dict[str, str | None]]:
    """Source, author and licence of the named pictures, as they are published."""
    unknown = {"source": None, "author": None, "licence": library.config.licence}
    origins = library.origins(names)
    return {name: {**unknown, **origins.get(name, {})} for name in names}


def credits_changed(run: Run, library: Library) -> bool:
    """Whether the library has another source, author or licence of a picture than the data set, which is then out of date."""
    exported = run.out / "dataset" / PICTURES
    if not exported.is_file():
        return False
    named = {safe_id(image["id"]): image["id"] for image in run.rows("seed", "images")}
    rows = pq.read_table(exported, columns=["id", *ORIGINS]).to_pylist()
    known = {named[row.pop("id")]: row for row in rows if row["id"] in named}
    return credits_of(library, known.keys()) != known


def _cell(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


def _with_pictures(folder: Path, record: Record) -> dict[str, Any]:
    """A record as a row of ``train.parquet``, with pictures instead of paths."""
    row = record.model_dump()

    def shown(path: str) -> dict[str, Any]:
        return _cell((folder / path).read_bytes())

    row["query"]["images"] = [shown(path) for path in row["query"]["images"]]
    for target in (*row["positives"], *row["negatives"]):
        target["image"] = shown(target["image"])
    return row


def _write(path: Path, table: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table with the metadata from which Hugging Face `datasets` and the hub's viewer read `features`."""
    frames.write_stream(path, features(table).arrow_schema, rows, ROWS_A_GROUP)

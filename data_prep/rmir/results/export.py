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
from data_prep.rmir.results import report
from data_prep.rmir.run import Run
from rge.common.errors import UserError
from rge.common.images import ImageError, known_bytes
from rge.common.schema import Positive, QueryPart, Record, Target, safe_id
from rge.content.picture_metadata import without_metadata
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
        error.reason += ". Restore it and run the same command again"
        raise
    except OSError as error:
        raise UserError(f"it cannot be written: {error.strerror or error}", run.out / "dataset") from None
    finally:
        shutil.rmtree(waiting, ignore_errors=True)


class _Export:
    """Writes the tables of one data set; arguments as in `export`."""

    def __init__(
        self, run: Run, folder: Path, splits: Mapping[str, str], positives: Mapping[str, Sequence[str]]
    ):
        self.config, self.folder, self.positives = run.config, folder, positives
        self.images = frames.RowsBy("id", run.images())
        self.queries = run.by("query_id", "generate", "queries")
        self.train, self.test = (
            sorted(name for name, part in splits.items() if part == which) for which in ("train", "test")
        )
        self.pool = list(run.by("id", "pool", "pool"))
        self.rejected, self.abstained = (
            candidates_by_query(run.out, state) for state in (maths.REJECTED, maths.ABSTAINED)
        )
        self.corpus, self.in_test = self.pool, set[str]()
        if self.config.split.disjoint == "all":  # no picture is in both sets, in any role
            trained = self._shown(self.train)
            self.corpus = [name for name in self.pool if name not in trained]
            self.in_test = {*self.corpus, *self._shown(self.test)}
        self.files: dict[str, str] = {}

    def _shown(self, names: Iterable[str]) -> set[str]:
        """Input pictures and right answers of the given queries."""
        return {image for name in names for image in (self.queries[name]["image_id"], *self.positives[name])}

    def write(self) -> dict[str, Any]:
        """Write all files and return their counts."""
        (self.folder / "images").mkdir(parents=True)
        # One at a time, twice: all records would take gigabytes.
        write_jsonl(self.folder / "train.jsonl", map(self._record, self.train))
        if self.train:
            rows = (_with_pictures(self.folder, record) for record in map(self._record, self.train))
            _write(self.folder / "train.parquet", "train", rows)
        not_ranked = {name: self.abstained.get(name, []) for name in self.test}
        if self.config.retrieve.exclude_input:  # never a candidate, hence never judged
            not_ranked = {
                name: [*found, self.queries[name]["image_id"]] for name, found in not_ranked.items()
            }
        pairs = {
            "qrels": [(*pair, 1) for pair in self._pairs(self.positives)],
            "negatives": self._pairs(self.rejected, set(self.corpus)),
            "excluded": self._pairs(not_ranked, set(self.corpus)),
        }
        if self.test:
            self._write_test(pairs)
        self._write_origins()
        report.write_card_into(self.folder, {}, {}, {}, name=self.config.export.name)
        return {
            "pool": len(self.corpus),
            "left_out_of_the_pool": len(self.pool) - len(self.corpus),
            "test_positives": len(pairs["qrels"]),
            "test_negatives": len(pairs["negatives"]),
            "test_excluded": len(pairs["excluded"]),
            "train_negatives": sum(len(self._negatives(name)) for name in self.train),
        }

    def _pairs(self, found: Mapping[str, Sequence[str]], among: Collection[str] | None = None) -> list[tuple]:
        """(query id, candidate id) pairs of the test queries, as written to files."""
        return [
            (safe_id(name), safe_id(key))
            for name in self.test
            for key in found.get(name, ())
            if among is None or key in among
        ]

    def _record(self, name: str) -> Record:
        query, export = self.queries[name], self.config.export
        rationale = query["reasoning"] if export.rationale == "generator" else None

        def target(key: str) -> dict[str, Any]:
            return {"id": safe_id(key), "image": self._file(key)}

        return Record(
            id=safe_id(name),
            group=safe_id(query["image_id"]),
            source=export.name,
            split="train",
            category=query["category"],
            instruction=export.instruction,
            query=QueryPart(text=query["query"], images=[self._file(query["image_id"])]),
            positives=[Positive(**target(key), rationale=rationale) for key in self.positives[name]],
            negatives=[Target(**target(key)) for key in self._negatives(name)],
        )

    def _negatives(self, name: str) -> list[str]:
        return [key for key in self.rejected.get(name, ()) if key not in self.in_test]

    def _picture(self, name: str) -> dict[str, Any]:
        image = self.images[name]
        return {"bytes": without_metadata(known_bytes(image["ref"], image["sha256"])), "path": None}

    def _file(self, name: str) -> str:
        # Named by content, since ids may contain characters that file names may not.
        if name not in self.files:
            data = self._picture(name)["bytes"]
            path = f"images/{self.images[name]['sha256'][:16]}.{ENDINGS[data[:2]]}"
            (self.folder / path).write_bytes(data)
            self.files[name] = path
        return self.files[name]

    def _write_test(self, pairs: Mapping[str, list[tuple]]) -> None:
        folder, export = self.folder / "test", self.config.export
        folder.mkdir()
        corpus = ({"id": safe_id(name), "image": self._picture(name), "text": None} for name in self.corpus)
        queries = (
            {
                "id": safe_id(name),
                "image": [self._picture(query["image_id"])],
                "text": query["query"],
                "category": query["category"],
                "group": safe_id(query["image_id"]),
                "instruction": export.instruction,
            }
            for name in self.test
            for query in [self.queries[name]]
        )
        _write(folder / "corpus.parquet", "corpus", corpus)
        _write(folder / "queries.parquet", "queries", queries)
        for table, found in pairs.items():
            if found:
                rows = (dict(zip(features(table), pair, strict=True)) for pair in found)
                _write(folder / f"{table}.parquet", table, rows)
        ids = list(map(safe_id, self.test)), list(map(safe_id, self.corpus))
        meta = {
            "name": f"{export.name}-test",
            "split": "test",
            "licence": self.config.library.licence,
            "source": "python -m data_prep rmir",
            "counts": {"queries": len(self.test), "corpus": len(self.corpus)}
            | {table: len(pairs[table]) for table in ("qrels", "negatives")},
            "fingerprint": set_fingerprint(
                *ids, pairs["qrels"], negatives=pairs["negatives"], excluded=pairs["excluded"]
            ),
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


def _with_pictures(folder: Path, record: Record) -> dict[str, Any]:
    """A record as a row of ``train.parquet``, with pictures instead of paths."""
    row = record.model_dump()

    def shown(path: str) -> dict[str, Any]:
        return {"bytes": (folder / path).read_bytes(), "path": None}

    row["query"]["images"] = [shown(path) for path in row["query"]["images"]]
    for target in (*row["positives"], *row["negatives"]):
        target["image"] = shown(target["image"])
    return row


def _write(path: Path, table: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table with the metadata from which Hugging Face `datasets` and the hub's viewer read `features`."""
    frames.write_stream(path, features(table).arrow_schema, rows, ROWS_A_GROUP)

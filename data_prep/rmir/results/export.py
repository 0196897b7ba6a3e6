"""Write the result: training records with their pictures, and the test set as a retrieval set."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.demo.pictures import IMAGE
from data_prep.rmir import arithmetic as maths
from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.library import Library
from data_prep.rmir.results import card
from data_prep.rmir.run import Run, RunError
from rge.common.fingerprint import set_fingerprint
from rge.common.images import ImageError, picture_bytes
from rge.common.picture_metadata import without_metadata
from rge.common.schema import Positive, QueryPart, Record, Target, safe_id

KINDS = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp"}
PICTURES_A_GROUP = 256
"""Rows of a row group: a set is written and read without holding all its pictures."""


def export(
    run: Run, splits: Mapping[str, str], positives: Mapping[str, Sequence[str]], doubted: set[str]
) -> dict[str, Any]:
    """`_export`, with one clear error where the disk is full or a picture has gone since it was listed.

    Raises:
        RunError: the dataset cannot be written.
    """
    try:
        return _export(run, splits, positives, doubted)
    except ImageError as error:
        why = f"{error}. Put it back and run the same command again"
    except OSError as error:
        why = error.strerror or str(error)
    shutil.rmtree(run.out / ".dataset", ignore_errors=True)
    raise RunError(f"{run.out / 'dataset'} cannot be written: {why}")


def _export(
    run: Run, splits: Mapping[str, str], positives: Mapping[str, Sequence[str]], doubted: set[str]
) -> dict[str, Any]:
    """Write ``dataset/`` anew, whole or not at all.

    ``train.jsonl`` with ``images/`` beside it; ``test/`` as a retrieval set whose pool serves all queries.

    Args:
        run: with the stages before.
        splits: ``test``, ``train`` or ``dropped`` of each query.
        positives: right answers of each query.
        doubted: images that are removed everywhere as targets.

    Returns:
        What was written, by number.

    Raises:
        RunError: two ids are one without white space.
    """
    config = run.config
    images = {image["id"]: image for image in run.images()}
    queries = {query["query_id"]: query for query in run.rows("generate", "queries", "generated")}
    pool = [row["id"] for row in run.rows("pool", "pool")]
    rejected: dict[str, list[str]] = {name: [] for name in splits}
    abstained: dict[str, list[str]] = {name: [] for name in splits}
    for row in run.rows("keep", "decided"):
        if row["query_id"] in splits and row["candidate_id"] not in doubted:
            if row["state"] == maths.REJECTED:
                rejected[row["query_id"]].append(row["candidate_id"])
            elif row["state"] == maths.ABSTAINED:
                abstained[row["query_id"]].append(row["candidate_id"])
    image_ids, query_ids = _written(images), _written(splits)
    final, waiting = run.out / "dataset", run.out / ".dataset"
    shutil.rmtree(waiting, ignore_errors=True)
    (waiting / "images").mkdir(parents=True)

    named: dict[str, str] = {}

    def stored(name: str) -> str:
        # Ids may hold what file names may not; two ids never meet because a picture is named by its content.
        if name not in named:
            data = without_metadata(picture_bytes(images[name]["ref"]))
            path = f"images/{images[name]['sha256'][:16]}.{KINDS[data[:2]]}"
            (waiting / path).write_bytes(data)
            named[name] = path
        return named[name]

    train = sorted(name for name, part in splits.items() if part == "train")
    num_negatives = 0
    with (waiting / "train.jsonl").open("w", encoding="utf-8", newline="\n") as out:
        for name in train:
            query = queries[name]
            rationale = query["reasoning"] if config.export.rationale == "generator" else None
            record = Record(
                id=query_ids[name],
                group=image_ids[query["image_id"]],
                source=config.export.name,
                split="train",
                category=query["category"],
                instruction=config.export.instruction,
                query=QueryPart(text=query["query"], images=[stored(query["image_id"])]),
                positives=[
                    Positive(id=image_ids[key], image=stored(key), rationale=rationale)
                    for key in positives[name]
                ],
                negatives=[Target(id=image_ids[key], image=stored(key)) for key in rejected[name]],
            )
            num_negatives += len(record.negatives)
            row = record.model_dump(exclude_none=True, exclude_defaults=True)
            out.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    test = sorted(name for name, part in splits.items() if part == "test")
    used = {*named, *pool, *(queries[name]["image_id"] for name in test)}
    _write_origins(waiting / "pictures.parquet", config.library, images, image_ids, sorted(used), named)
    in_pool = set(pool)
    qrels = [(query_ids[name], image_ids[key], 1) for name in test for key in positives[name]]
    negatives, excluded = (
        [(query_ids[name], image_ids[key]) for name in test for key in found[name] if key in in_pool]
        for found in (rejected, abstained)
    )
    if test:
        corpus = {image_ids[name]: images[name] for name in pool}
        asked = {query_ids[name]: queries[name] for name in test}
        _write_set(run, waiting / "test", corpus, asked, images, image_ids, qrels, negatives, excluded)
    card.write_into(waiting, {}, {}, config.export.name)
    shutil.rmtree(final, ignore_errors=True)
    waiting.rename(final)
    return {
        "pool": len(pool),
        "test_positives": len(qrels),
        "test_negatives": len(negatives),
        "test_excluded": len(excluded),
        "train_negatives": num_negatives,
    }


def _written(names: Iterable[str]) -> dict[str, str]:
    """Ids as they are written, by those of the run, which may hold blanks.

    Raises:
        RunError: two are one.
    """
    given: dict[str, str] = {}
    for name in names:
        if (other := given.setdefault(safe_id(name), name)) != name:
            raise RunError(
                f"dataset cannot be written: {other!r} and {name!r} are both {safe_id(name)!r} where white space is written "
                "%20; rename one of them in the library"
            )
    return {name: written for written, name in given.items()}


def _write_origins(
    path: Path,
    library: LibraryConfig,
    images: dict,
    image_ids: dict[str, str],
    used: list[str],
    named: dict[str, str],
) -> None:
    """Every picture of the data set with its caption, source, author and licence; who wrote the caption, if models did.

    Raises:
        LibraryError: the library cannot be read any more, without which nobody would be credited.
    """
    origins = Library(library).origins(set(used))
    columns: dict[str, list[str | None]] = {
        "id": [image_ids[name] for name in used],
        "path": [named.get(name) for name in used],
    }
    columns["caption"] = [images[name]["caption"] for name in used]
    if any(image["caption_by"] not in ("library", None) for image in images.values()):
        columns["caption_by"] = [images[name]["caption_by"] for name in used]
    for key in ("source", "author", "licence"):
        columns[key] = [origins.get(name, {}).get(key) for name in used]
    columns["licence"] = [licence or library.licence for licence in columns["licence"]]
    pq.write_table(pa.table({key: pa.array(found, pa.string()) for key, found in columns.items()}), path)


def _write_set(run: Run, folder: Path, corpus, asked, images, image_ids, qrels, negatives, excluded) -> None:
    folder.mkdir()

    def cell(image: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": without_metadata(picture_bytes(image["ref"])), "path": None}

    features: dict[str, dict[str, Any]] = {"id": _value(), "image": {"_type": "Image"}, "text": _value()}
    _write_pictures(
        folder / "corpus.parquet",
        pa.schema([("id", pa.string()), ("image", IMAGE), ("text", pa.string())]),
        features,
        [*corpus],
        lambda name: {"id": name, "image": cell(corpus[name]), "text": None},
    )
    columns = ("text", "category", "group", "instruction")
    schema = pa.schema(
        [("id", pa.string()), ("image", pa.list_(IMAGE)), *((column, pa.string()) for column in columns)]
    )
    features = {name: _value() for name in schema.names}
    features["image"] = {"feature": {"_type": "Image"}, "_type": "List"}

    def row(name: str) -> dict[str, Any]:
        query = asked[name]
        return {
            "id": name,
            "image": [cell(images[query["image_id"]])],
            "text": query["query"],
            "category": query["category"],
            "group": image_ids[query["image_id"]],
            "instruction": run.config.export.instruction,
        }

    _write_pictures(folder / "queries.parquet", schema, features, [*asked], row)
    names = ("query-id", "corpus-id", "score")
    pq.write_table(_pairs(qrels, names), folder / "qrels.parquet")
    for table, rows in (("negatives", negatives), ("excluded", excluded)):
        if rows:
            pq.write_table(_pairs(rows, names[:2]), folder / f"{table}.parquet")
    meta = {
        "name": f"{run.config.export.name}-test",
        "split": "test",
        "licence": run.config.library.licence,
        "source": "python -m data_prep rmir",
        "counts": {
            "queries": len(asked),
            "corpus": len(corpus),
            "qrels": len(qrels),
            "negatives": len(negatives),
        },
        "fingerprint": set_fingerprint(asked, corpus, qrels, negatives=negatives, excluded=excluded),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _write_pictures(path: Path, schema: pa.Schema, features: dict, names: Sequence[str], row) -> None:
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = schema.with_metadata(metadata)
    with pq.ParquetWriter(path, schema, compression="zstd") as out:
        for start in range(0, len(names), PICTURES_A_GROUP):
            rows = [row(name) for name in names[start : start + PICTURES_A_GROUP]]
            out.write_table(pa.Table.from_pylist(rows, schema=schema))


def _value() -> dict[str, str]:
    return {"dtype": "string", "_type": "Value"}


def _pairs(rows: Sequence[tuple], names: tuple[str, ...]) -> pa.Table:
    return pa.table({name: [row[place] for row in rows] for place, name in enumerate(names)})

"""RMIR (reasoning-intensive multimodal image retrieval): queries of a picture and a question over one pool of pictures.

This was written before the release was available, so columns may have several names (`ALIASES`), and right answers are
either a list beside each query or a table ``qrels`` (query-id, corpus-id, score), as in BEIR and our format. The pool
is a separate table. Pictures are bytes, paths, or ids of Open Images (16 hexadecimal digits, looked up by file name in
any folder) or Visual Genome (integers, which are not file names and need a manifest).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    TABLES,
    Draft,
    PictureOptions,
    Pictures,
    ReleaseError,
    Row,
    as_list,
    column_names,
    content_id,
    iter_rows,
    match_columns,
    read_qrels,
)
from eval.scoring.protocol import Protocol
from eval.sets.retrieval_set import RetrievalSet, some
from eval.sets.write_set import Candidate, Query
from rge.common.files import relative, write_bytes
from rge.common.prompt_profiles import PICTURE_INSTRUCTION
from rge.common.schema import Positive, QueryPart, Record, Target, safe_id
from rge.data.sources import write_jsonl

NUM_QUERIES, NUM_CANDIDATES, MAX_POSITIVES, NUM_TRAINING = 1634, 35_803, 20, 6687
CATEGORY_COUNTS = {"functional": 546, "temporal": 656, "causal": 432}
"""As in section 3.3 of the paper; the averages in its Table 2 imply that temporal and causal are swapped."""
SWAPPED = (
    "temporal has 656 queries, as in the paper's text; the Average column of its Table 2 holds only if 432 queries are "
    "in the column headed Temporal and 656 in Causal: read those two columns swapped when comparing"
)
CODES = {
    "func": "functional", "functional": "functional", "affordance": "functional", "temp": "temporal",
    "temporal": "temporal", "caus": "causal", "causal": "causal",
}  # fmt: skip
ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("query_id", "qid", "query-id", "_id", "id"),
    "text": ("query", "query_text", "question", "text", "instruction"),
    "image": (
        "input_image", "query_image", "image", "image_id", "reference_img_id", "query_image_signature", "images",
        "query_images", "input_image_id", "query_image_id",
    ),
    "positives": (
        "positives", "target_images", "positive_candidates", "gt_img_ids", "gold_ids", "targets", "positive_images",
        "target_image_ids",
    ),
    "negatives": ("negatives", "negative_candidates", "negative_images", "negative_ids", "hard_negatives"),
    "category": ("category", "reasoning_type", "type", "reasoning_category"),
    "group": ("group",),
    "split": ("split",),
}  # fmt: skip
IGNORED = (
    "source", "input_desc", "input_description", "target_desc", "target_description", "reasoning", "tsr", "confidence", "title", "metadata", "language",
    "modality", "num_positives", "num_missing_positives", "licence", "license",
)  # fmt: skip
POOL_ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("id", "_id", "image_id", "corpus-id", "corpus_id", "candidate_id", "imageid"),
    "image": ("image", "path", "image_path", "file_name", "url"),
}
SPLIT, TRAIN = "test", "train"
"""Splits, named in a column or in a file's name. The first is measured; the other becomes training records."""
NEEDED = ("id", "text", "image", "category")
"""Columns of queries that every release has."""
POOL = ("corpus", "pool", "candidates", "candidate_pool", "image_pool", "index")


@dataclass
class RmirOptions(PictureOptions):
    """Make a retrieval set from the release of RMIR."""

    pool: Path | None = None
    """File that lists the pool; null: corpus, pool or candidates in src."""
    images: Path | None = None
    """Folder of pictures; null: src and src/images."""
    manifest: Path | None = None
    """Table of id and path, such as Visual Genome's image_data.json."""
    field_map: tuple[str, ...] = ()
    """Columns with other names: theirs=ours, theirs=ignore."""
    instruction: str = PICTURE_INSTRUCTION
    """Task instruction for every query, that of `rge data rmir`; the paper publishes none. '': none."""
    counts: bool = True
    """Require the published counts: 1,634 queries (546 / 656 / 432), 35,803 pictures, at most 20 positives."""
    allow_missing: bool = False
    """Accept positives that are not in the pool; they still count in every denominator."""
    exclude_query_image: bool = False
    """Remove a query's own picture from its ranking; the paper does not mention this."""
    train: Path | None = None
    """Also write the training split as records to this file (JSON lines), for recipes/rmir_3b.yaml."""


def _pool(path: Path, *, pictures: bool) -> Iterator[Row]:
    """Id and reference of the picture of every candidate; without ``pictures`` only the column of ids is read."""
    names = column_names(path)
    ignored = [name.lower() for name in names]
    columns = match_columns(path, names, POOL_ALIASES, prefer=("id", "image"), ignored=ignored)
    if not columns:
        raise ReleaseError(f"the pool needs one of them; found: {', '.join(names)}", path, key="id or image")
    key = columns.get("id") or columns["image"]
    for row in iter_rows(path, None if pictures else [key]):
        name = _name(row.value(key))
        yield Row({"id": name, "image": row.get(columns.get("image", "")) or name}, row.where)


def import_rmir(options: RmirOptions) -> RetrievalSet:
    """Read a release of RMIR and write a retrieval set, and with ``train`` also training records."""
    judged, wrong = _one_file(options, "qrels"), _one_file(options, "negatives")
    pool_file = options.pool or _one_file(options, *POOL)
    files = _query_files(options, [pool_file, options.manifest, judged, wrong])
    if pool_file is None:
        raise ReleaseError(
            f"no file lists it ({', '.join(POOL)}), and a pool of the positives alone would be far too easy"
            f": pass pool=FILE with one id per row",
            options.src,
            key="pool",
        )
    pool: dict[str, None] = {}
    for row in _pool(pool_file, pictures=False):
        if row["id"] in pool:
            raise row.error("the picture is in the pool twice", row["id"], "twice")
        pool[row["id"]] = None
    pictures = Pictures(
        options.images, options.src / "images", options.src, hint="pass images=DIR, or manifest=FILE with id and path",
        manifest=options.manifest,
    )  # fmt: skip
    draft = _drafted(files, judged, wrong, pool, pictures, options)
    draft.refuse_lost(f"the {len(pool)} pictures of the pool {pool_file}", allowed=options.allow_missing)
    if options.train is not None:
        others = [pool_file, options.manifest, judged, wrong]
        _write_training(options.train, others, pictures, options)
    own = (str(query.columns["picture_ids"]).split("+") for query in draft.queries)
    shown = dict.fromkeys(chain(pool, *own))
    return options.write(
        meta={
            "name": "RMIR",
            "benchmark": "rmir",
            "source": "RMIR release, imported by eval.benchmarks.releases.rmir",
            "notes": _check_counts(draft, len(pool), options),
            "num_missing_positives": len(draft.lost),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=draft.queries,
        corpus=(
            Candidate(row["id"], image=_picture(pictures, row["image"]))
            for row in _pool(pool_file, pictures=True)
        ),
        qrels=draft.qrels,
        negatives=draft.negatives or None,
        excluded=draft.excluded if options.exclude_query_image else None,
        # half of Visual Genome's pictures are also in COCO, under whose names other training sets have them
        names=[(name, f"coco:{pictures.coco[name]}") for name in shown if name in pictures.coco],
    )


def _write_training(
    out: Path, others: Sequence[Path | None], pictures: Pictures, options: RmirOptions
) -> None:
    """Write the training split's queries as records, as `data_prep.rmir` exports its own; encoded pictures become files beside them."""
    judged, wrong = (_one_file(options, stem, split=TRAIN) for stem in ("qrels", "negatives"))
    files = _query_files(options, [*others, judged, wrong], split=TRAIN)
    gains_of = read_qrels([judged]) if judged else {}
    wrong_of: dict[str, list[str]] = defaultdict(list)
    for row in iter_rows(wrong) if wrong else ():
        wrong_of[row.id("query-id", "query_id")].append(row.id("corpus-id", "corpus_id"))
    beside = out.with_name(f"{out.stem}_pictures")

    def reference(ref: Any) -> str:
        found = _picture(pictures, ref)
        if isinstance(found, bytes):
            path = beside / content_id(found.hex())
            write_bytes(path, found)
            found = path
        return relative(found, out.parent)

    def targets(names: Iterable[Any]) -> dict[str, dict[str, str]]:
        return {_name(ref): {"id": _name(ref), "image": reference(ref)} for ref in names}

    records: dict[str, Record] = {}
    for row in chain.from_iterable(_rows(path, options.field_map, NEEDED, TRAIN) for path in files):
        own, name = list(map(_name, as_list(row.get("image")))), safe_id(str(row["id"]))
        judgements = gains_of.get(name, {})
        right = targets(
            [*as_list(row.get("positives")), *(one for one, gain in judgements.items() if gain > 0)]
        )
        bad = [
            *as_list(row.get("negatives")),
            *wrong_of[name],
            *(one for one, gain in judgements.items() if gain <= 0),
        ]
        category = _category(row, own)
        if not right:
            continue  # of a query that another split judges
        if name in records:
            raise row.error("the query is there twice", name, "twice")
        records[name] = Record(
            id=name,
            group=str(row.get("group") or "+".join(own)),
            source="rmir",
            split=TRAIN,
            category=category,
            instruction=options.instruction or None,
            query=QueryPart(text=str(row["text"]), images=list(map(reference, as_list(row["image"])))),
            positives=[Positive.model_validate(one) for one in right.values()],
            negatives=[Target.model_validate(one) for key, one in targets(bad).items() if key not in right],
        )
    if not records or (options.counts and len(records) != NUM_TRAINING):
        other = f"it has {len(records):,} training queries with right answers instead of {NUM_TRAINING:,}"
        fix = "for a subset or a new version pass counts=false, and name their files and judgements train"
        raise ReleaseError(f"{other}: {fix}", options.src, key="counts")
    write_jsonl(out, list(records.values()))


def _drafted(
    files: Sequence[Path],
    judged: Path | None,
    wrong: Path | None,
    pool: Mapping[str, None],
    pictures: Pictures,
    options: RmirOptions,
) -> Draft:
    """The queries with their judgements, from the rows themselves and from the tables ``judged`` and ``wrong``."""
    draft, gains_of = Draft(pool), read_qrels([judged]) if judged else {}
    wrong_of: dict[str, set[str]] = defaultdict(set)
    for row in iter_rows(wrong) if wrong else ():
        wrong_of[row.id("query-id", "query_id")].add(row.id("corpus-id", "corpus_id"))
    needed = (*NEEDED, *(() if judged else ("positives",)))
    for row in chain.from_iterable(_rows(path, options.field_map, needed) for path in files):
        own, right, negatives = (
            list(map(_name, as_list(row.get(key)))) for key in ("image", "positives", "negatives")
        )
        name = safe_id(str(row["id"]))
        judgements = gains_of.get(name, {})
        gains = dict.fromkeys(right, 1) | {found: gain for found, gain in judgements.items() if gain > 0}
        bad = {*negatives, *wrong_of[name], *(judgements.keys() - gains.keys())}
        category = _category(row, own)
        # queries may cover all splits and qrels only one, or the reverse
        if gains or bad or judged is None:
            query = _query(row, own, category, pictures, options.instruction)
            draft.add(query, row.where, gains, sorted(bad), own)
        else:
            draft.claim(name, row.where)
    return draft


def _category(row: Row, own: Sequence[str]) -> str:
    if row["id"] is None or not own or not row["text"]:
        raise row.error("a query needs a picture and a text, and an id", "query", "empty")
    category = CODES.get(str(row["category"]).strip().lower())
    if category is None:
        raise row.error(f"{row['category']!r} is not one of {', '.join(sorted(CODES))}", "category")
    return category


def _query(row: Row, own: Sequence[str], category: str, pictures: Pictures, instruction: str) -> Query:
    return Query(
        id=safe_id(str(row["id"])),
        text=str(row["text"]),
        images=tuple(_picture(pictures, ref) for ref in as_list(row["image"])),
        category=category,
        group=str(row.get("group") or "+".join(own)),
        instruction=instruction or None,
        columns={"picture_ids": "+".join(own)},
    )


def _one_file(options: RmirOptions, *stems: str, split: str = SPLIT) -> Path | None:
    """Find ``queries.parquet``, ``queries/test-00000-of-00001.parquet``, ``queries/test.parquet`` or similar."""
    for stem in stems:
        paths = [*(options.src / f"{stem}{suffix}" for suffix in TABLES), *(options.src / stem).glob("[!.]*")]
        tables = [path for path in sorted(paths) if path.suffix in TABLES and path.is_file()]
        named = [path for path in tables if split in path.stem] or tables
        if len(named) > 1:
            raise ReleaseError(f"{named} could all be it: join them into one file", options.src, key=stem)
        if named:
            return named[0]
    return None


def _query_files(options: RmirOptions, others: Sequence[Path | None], split: str = SPLIT) -> list[Path]:
    """The table ``queries``, or the tables of the split in ``src`` except ``others``."""
    if table := _one_file(options, "queries", split=split):
        return [table]
    passed = {*others, options.src / "meta.json"}
    tables = (path for path in sorted(options.src.glob("[!.]*")) if path.suffix in TABLES)
    files = [path for path in tables if path not in passed]
    if not files:
        raise ReleaseError(f"it has no table ({', '.join(TABLES)}) with queries", options.src, kind="empty")
    named = [path for path in files if split in path.stem or len(files) == 1]
    if not named:
        listed = ", ".join(path.name for path in files)
        raise ReleaseError(
            f"which of {listed} has the queries? Name it {split}{files[0].suffix}", options.src, kind="twice"
        )
    return named


def _rows(path: Path, field_map: Sequence[str], needed: Sequence[str], split: str = SPLIT) -> Iterator[Row]:
    """A table's rows of the split, with our names of its columns."""
    columns = match_columns(
        path, column_names(path), ALIASES, field_map, prefer=("id", "text"), ignored=IGNORED, needed=needed
    )
    for record in iter_rows(path):
        row = Row({name: record.get(column) for name, column in columns.items()}, record.where)
        if row.get("split") in (None, "", split):
            yield row


def _check_counts(draft: Draft, num_candidates: int, options: RmirOptions) -> list[str]:
    """Compare with the published counts; differences are an error, or notes with ``counts=false``."""
    counts = dict.fromkeys(CATEGORY_COUNTS, 0) | Counter(str(query.category) for query in draft.queries)
    swapped = CATEGORY_COUNTS | {"temporal": CATEGORY_COUNTS["causal"], "causal": CATEGORY_COUNTS["temporal"]}
    sizes = {
        "queries": (len(draft.queries), NUM_QUERIES),
        "pictures in the pool": (num_candidates, NUM_CANDIDATES),
    }
    wrong = [
        f"{here:,} {what} instead of {there:,}" for what, (here, there) in sizes.items() if here != there
    ]
    if counts not in (CATEGORY_COUNTS, swapped):
        here, there = (
            ", ".join(f"{num} {name}" for name, num in of.items()) for of in (counts, CATEGORY_COUNTS)
        )
        wrong.append(f"{here} queries instead of {there} (or with temporal and causal swapped)")
    num_right = Counter({query.id: int(query.columns["num_missing_positives"]) for query in draft.queries})
    num_right.update(query for query, _, gain in draft.qrels if gain)
    if many := [query for query, num in num_right.items() if num > MAX_POSITIVES]:
        wrong.append(f"more than {MAX_POSITIVES} positives in {len(many)} queries ({some(many)})")
    if wrong and options.counts:
        fix = "For a subset or a new version pass counts=false, which records the differences in meta.json"
        raise ReleaseError(
            f"it is not RMIR as published: {'; '.join(wrong)}. {fix}", options.src, key="counts"
        )
    notes = [f"not as published: {difference}" for difference in wrong]
    return notes + ([SWAPPED] if counts["temporal"] == CATEGORY_COUNTS["temporal"] else [])


def _name(ref: Any) -> str:
    """A picture's id in the release; bytes are named by their content."""
    if isinstance(ref, Mapping):
        return _name(ref.get("path") or ref.get("id") or ref.get("bytes"))
    if isinstance(ref, bytes):
        return content_id(ref.hex())
    if ref is None or ref == "":
        raise ReleaseError("the reference is empty", key="picture")
    return safe_id(str(ref))


def _picture(pictures: Pictures, ref: Any) -> bytes | Path:
    """Bytes or file of a reference.

    A name of 16 hexadecimal digits is an Open Images id, which is also the stem of its file. An integer is a Visual Genome
    id, which is not (image 2412112 is the file 2370463.jpg), so it is never looked up by file name.
    """
    name = "" if isinstance(ref, bytes | Mapping) else str(ref)
    if "://" in name and name not in pictures.manifest:
        raise ReleaseError(
            "the picture is a URL: download it and pass manifest=FILE with id and path", key=name, kind="web"
        )
    stem = Path(name).stem
    hint = "an integer is a Visual Genome id, which is not a file name: pass manifest=image_data.json"
    by_stem = bool(re.fullmatch(r"[0-9a-f]{16}", stem))
    return pictures.find(ref, by_stem=by_stem, hint=hint if stem.isdigit() else "")


_RMIR = (
    "recall@k is positives in the top k over all positives, averaged over queries (micro), as section 4.1 of the paper "
    "defines it; the mean over categories is also given",
    "the paper's Average columns are micro means with 546 functional, 432 temporal and 656 causal queries, while its text "
    "counts 656 temporal and 432 causal",
    "the query's own picture stays in the pool, which the paper does not mention; see self_retrieval",
)

PROTOCOLS = (
    Protocol("rmir", "clean", ("recall@20", "recall@50"), (*_RMIR, "equal scores are ordered by id")),
    Protocol("rmir", "official", ("recall@20", "recall@50"), (
        *_RMIR, "no scorer or evaluation prompt is published: this is the paper's definition",
    )),
)  # fmt: skip
register_benchmark(Benchmark("rmir", import_rmir, PROTOCOLS, Path(__file__).with_name("published")))

"""RMIR (reasoning-intensive multimodal image retrieval): a picture and a question in, pictures out of one pool.

The release's own schema could not be seen when this was written, so four layouts are accepted, with aliases:

``set``       ``corpus``, ``queries`` and ``qrels`` as Parquet, as the retrieval-set format and MTEB have them
``list``      one row a query with a list of positives (JSON, JSON lines, Parquet, CSV), and a file with the pool
``triplets``  one row a query-target pair, with or without a label or judges' votes, and a file with the pool
``beir``      ``queries.jsonl``, ``corpus.jsonl`` and ``qrels/*.tsv``

Pictures are bytes, paths, or ids of Open Images (16 hexadecimal digits, looked up by file name in any split's folder)
and Visual Genome (integers, which are not file names: only a manifest resolves them).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    TABLES,
    Fields,
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    column_names,
    content_id,
    iter_rows,
    placed_rows,
    some,
)
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query
from rge.common.options import one_of
from rge.common.schema import safe_id

NUM_QUERIES, NUM_CANDIDATES, MAX_POSITIVES = 1634, 35_803, 20
CATEGORY_COUNTS = {"functional": 546, "temporal": 656, "causal": 432}
"""As in the text of the paper, section 3.3; its Table 2 averages as if temporal and causal were swapped."""
LAYOUTS = ("auto", "set", "list", "triplets", "beir")
INSTRUCTION = "Given an image and a question about it, find the image that answers the question."
SWAPPED = (
    "temporal has 656 queries, as in the paper's text; the Average column of its Table 2 holds only if 432 queries are "
    "in the column headed Temporal and 656 in Causal: read those two columns swapped when comparing"
)
CODES = {
    "func": "functional", "functional": "functional", "affordance": "functional", "temp": "temporal",
    "temporal": "temporal", "caus": "causal", "causal": "causal",
}  # fmt: skip
LABELS = {
    "true": 1, "yes": 1, "positive": 1, "relevant": 1, "false": 0, "no": 0, "negative": 0, "irrelevant": 0,
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
    "target": (
        "target_image", "target", "target_id", "positive", "target_image_id", "candidate", "candidate_id",
    ),
    "label": ("label", "relevance", "score", "judges", "votes", "judgements", "judgments"),
    "negatives": ("negatives", "negative_candidates", "negative_images", "negative_ids", "hard_negatives"),
    "category": ("category", "reasoning_type", "type", "reasoning_category"),
    "group": ("group",),
    "split": ("split",),
}  # fmt: skip
IGNORED = (
    "source", "input_desc", "input_description", "target_desc", "target_description", "reasoning", "tsr", "confidence", "title", "metadata", "language",
    "modality", "num_positives", "licence", "license",
)  # fmt: skip
POOL_ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("id", "_id", "image_id", "corpus-id", "corpus_id", "candidate_id", "imageid"),
    "image": ("image", "path", "image_path", "file_name", "url"),
}
POOL = ("corpus", "pool", "candidates", "candidate_pool", "image_pool", "index")


@dataclass
class RmirOptions(PictureOptions):
    """Make a retrieval set from the release of RMIR."""

    layout: str = "auto"
    """set, list, triplets or beir, see `eval.benchmarks.rmir.importer`; auto looks at the files."""
    split: str = "test"
    """Which split: a column, or part of a file's name."""
    pool: Path | None = None
    """File that lists the pool; null: corpus, pool or candidates in src."""
    images: Path | None = None
    """Folder of pictures; null: src and src/images."""
    manifest: Path | None = None
    """Table of id and path; Visual Genome's image_data.json will do."""
    field_map: tuple[str, ...] = ()
    """Columns with other names: theirs=ours, theirs=ignore."""
    instruction: str = INSTRUCTION
    """Task instruction of every query; the paper publishes none."""
    counts: bool = True
    """Insist on the published counts: 1,634 queries (546 / 656 / 432), 35,803 pictures, at most 20 positives."""
    allow_missing: bool = False
    """Accept positives that are not in the pool; they stay in every denominator."""
    exclude_query_image: bool = False
    """Take a query's own picture out of its ranking; the paper does not say so."""


@dataclass
class _Row:
    """A query before its pictures are looked up."""

    id: str
    text: str
    images: list[Any]
    category: str
    group: str | None = None
    positives: dict[str, int] = field(default_factory=dict)
    negatives: set[str] = field(default_factory=set)

    @cached_property
    def picture_ids(self) -> list[str]:
        return list(map(_name, self.images))

    def judge(self, target: str, gain: int | None) -> None:
        """A gain above 0 makes it positive, 0 negative; None is undecided."""
        if gain is not None and gain > 0:
            self.positives[target] = max(gain, self.positives.get(target, 0))
        elif gain == 0:
            self.negatives.add(target)


class _Pool:
    """The file that lists the pool: ``ids`` in its order, and its records."""

    def __init__(self, path: Path):
        self.path, names = path, column_names(path)
        fields = Fields(POOL_ALIASES, prefer=("id", "image"))
        self.columns = fields.columns(path, names, [name.lower() for name in names])
        if not self.columns:
            raise ReleaseError(f"{path}: the pool needs a column id or image; there are {', '.join(names)}")
        self.ids: dict[str, None] = {}
        wanted = [self.columns.get("id") or self.columns["image"]]
        for number, record in enumerate(iter_rows(path, wanted), 1):
            name = self._name(record)
            if name in self.ids:
                raise ReleaseError(f"{path}, row {number}: picture {name!r} is in the pool twice")
            self.ids[name] = None

    def _name(self, record: Mapping[str, Any]) -> str:
        if "id" in self.columns:
            return safe_id(str(record[self.columns["id"]]))
        return _name(record[self.columns["image"]])

    def pairs(self, rows: Iterable[_Row], names_of: Callable[[_Row], Iterable[str]]) -> list[tuple[str, str]]:
        """Each query with those of its names that are in the pool, once each."""
        return [(row.id, name) for row in rows for name in dict.fromkeys(names_of(row)) if name in self.ids]

    def judgements(self, rows: Iterable[_Row]) -> list[tuple[str, str, int]]:
        """Positives that are in the pool, with their gains."""
        positives = {row.id: row.positives for row in rows}
        return [
            (query, name, positives[query][name])
            for query, name in self.pairs(rows, lambda row: row.positives)
        ]

    def num_missing(self, rows: Sequence[_Row], *, allowed: bool) -> dict[str, int]:
        """How many positives of each query the pool lacks; an error where that is not ``allowed``."""
        missing = {row.id: [name for name in row.positives if name not in self.ids] for row in rows}
        lost = [f"{query}: {name}" for query, names in missing.items() for name in names]
        if lost and not allowed:
            raise ReleaseError(
                f"{len(lost)} positives are not among the {len(self.ids)} pictures of the pool {self.path}: {some(lost)}. A "
                "pool without them would make the task easier; allow_missing=true keeps them in every denominator"
            )
        return {query: len(names) for query, names in missing.items()}

    def candidates(self, pictures: Pictures) -> Iterator[Candidate]:
        for record in iter_rows(self.path):
            name = self._name(record)
            ref = record.get(self.columns["image"]) if "image" in self.columns else None
            yield Candidate(id=name, image=_picture(pictures, name if ref in (None, "") else ref))


def import_rmir(options: RmirOptions) -> RetrievalSet:
    """Read a release of RMIR in any of the layouts and write a retrieval set.

    Raises:
        UserError: files, columns, counts or pictures that do not fit; the message says what to give.
    """
    one_of("layout", [options.layout], LAYOUTS)
    if not options.src.is_dir():
        raise ReleaseError(f"src {options.src} is not a directory")
    fields = Fields(ALIASES, options.field_map, prefer=("id", "text"))
    layout = _layout(options, fields) if options.layout == "auto" else options.layout
    rows, pool_file = (_read_set if layout in ("set", "beir") else _read_rows)(options, fields)
    roots = [root for root in (options.images, options.src / "images", options.src) if root]
    pictures, pool = Pictures(roots, options.manifest), _Pool(pool_file)

    num_missing = pool.num_missing(rows, allowed=options.allow_missing)
    notes = _check_counts(rows, len(pool.ids), options)
    excluded = pool.pairs(rows, lambda row: [one for one in row.picture_ids if one not in row.positives])
    shown = [*pool.ids, *(one for row in rows for one in row.picture_ids)]
    return options.write(
        meta={
            "name": "RMIR" if options.split == "test" else f"RMIR {options.split}",
            "benchmark": "rmir",
            "split": options.split,
            "source": "RMIR release, imported by eval.benchmarks.rmir.importer",
            "layout": layout,
            "notes": notes,
            "num_missing_positives": sum(num_missing.values()),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=[_query(row, pictures, num_missing[row.id], options.instruction) for row in rows],
        corpus=pool.candidates(pictures),
        qrels=pool.judgements(rows),
        negatives=pool.pairs(rows, lambda row: sorted(row.negatives)) or None,
        excluded=excluded if options.exclude_query_image else None,
        names=_coco_names(shown, pictures.coco),
    )


def _query(row: _Row, pictures: Pictures, num_missing: int, instruction: str) -> Query:
    shown = "+".join(row.picture_ids)
    return Query(
        id=row.id,
        text=row.text,
        images=tuple(_picture(pictures, ref) for ref in row.images),
        category=row.category,
        group=row.group or shown,
        instruction=instruction,
        columns={"num_missing_positives": num_missing, "picture_ids": shown},
    )


def _coco_names(ids: Sequence[str], coco: Mapping[str, int]) -> list[tuple[str, str]]:
    """Half of Visual Genome is of COCO, whose pictures other training sets have under COCO's own numbers."""
    found = []
    for one in dict.fromkeys(ids):
        number = coco.get(re.sub(r"^(vg|visual_?genome)[_:/-]", "", one, flags=re.IGNORECASE))
        if number is not None:
            found.append((one, f"coco:{number}"))
    return found


def _layout(options: RmirOptions, fields: Fields) -> str:
    if _one_file(options.src, ("queries",), (".parquet",), options.split):
        return "set"
    if (options.src / "queries.jsonl").exists() and (options.src / "qrels").is_dir():
        return "beir"
    files = _query_files(options)
    columns = fields.columns(files[0], column_names(files[0]), IGNORED)
    if "positives" in columns:
        return "list"
    if "target" in columns:
        return "triplets"
    raise ReleaseError(
        f"{files[0]} has neither a list of positives ({', '.join(ALIASES['positives'])}) nor a target a row "
        f"({', '.join(ALIASES['target'])}); it has {', '.join(columns.values())}: give field_map=THEIRS=positives"
    )


def _one_file(src: Path, stems: Sequence[str], suffixes: Sequence[str], split: str) -> Path | None:
    """``queries.parquet``, ``queries/test-00000-of-00001.parquet`` or ``queries/test.parquet``, and the like."""
    for stem in stems:
        for suffix in suffixes:
            found = [src / f"{stem}{suffix}", *sorted((src / stem).glob(f"*{suffix}"))]
            found = [path for path in found if path.is_file()]
            named = [path for path in found if split in path.stem]
            if len(named or found) > 1:
                raise ReleaseError(f"{src}: {named or found} could all be {stem}: join them into one file")
            if found:
                return (named or found)[0]
    return None


def _needed_file(options: RmirOptions, stems: Sequence[str], suffixes: Sequence[str]) -> Path:
    found = _one_file(options.src, stems, suffixes, options.split)
    if found is None:
        raise ReleaseError(f"{options.src} has no {' or '.join(stems)} with {', '.join(suffixes)}")
    return found


def _query_files(options: RmirOptions) -> list[Path]:
    pool = options.pool or _one_file(options.src, POOL, TABLES, options.split)
    files = [
        path
        for path in sorted(options.src.iterdir())
        if path.suffix in TABLES and path != pool and path != options.manifest and path.name != "meta.json"
    ]
    named = [path for path in files if options.split in path.stem]
    if not files:
        raise ReleaseError(f"{options.src} has no table ({', '.join(TABLES)}) with queries")
    if not named and len(files) > 1:
        raise ReleaseError(
            f"{options.src}: which of {', '.join(path.name for path in files)} has the {options.split} queries? Name it "
            f"{options.split}{files[0].suffix}, or give a folder with that file alone"
        )
    return named or files


def _read_rows(options: RmirOptions, fields: Fields) -> tuple[list[_Row], Path]:
    """Layouts ``list`` and ``triplets``."""
    pool_file = options.pool or _one_file(options.src, POOL, TABLES, options.split)
    if pool_file is None:
        raise ReleaseError(
            f"{options.src} has no file that lists the pool ({', '.join(POOL)}): the positives alone are no pool, they "
            "would be far too easy to find; give pool=FILE with an id a row"
        )
    rows: dict[str, _Row] = {}
    for path in _query_files(options):
        columns = fields.columns(path, column_names(path), IGNORED)
        for ours in ("text", "image", "category"):
            if ours not in columns:
                raise ReleaseError(
                    f"{path}: no column is the query's {ours} ({', '.join(ALIASES[ours])}); there are "
                    f"{', '.join(columns.values())}: give field_map=THEIRS={ours}"
                )
        for record, where in placed_rows([path]):
            found = {ours: record.get(theirs) for ours, theirs in columns.items()}
            if found.get("split") in (None, "", options.split):
                _add(rows, found, where)
    return list(rows.values()), pool_file


def _add(rows: dict[str, _Row], found: Mapping[str, Any], where: str) -> None:
    """One record of ``list`` (with positives) or ``triplets``, by our names of its columns."""
    text, images = found["text"], as_list(found["image"])
    if not images or not text:
        raise ReleaseError(f"{where}: a query needs a picture and a text")
    category = _category(found["category"], where)
    # rows of one query are those of one picture, text and category: an id may name the row instead
    name = f"{'+'.join(map(_name, images))}-{content_id(text, category)[:8]}"
    if "positives" in found:
        name = str(found["id"]) if found.get("id") is not None else name
        if name in rows:
            raise ReleaseError(f"{where}: query {name!r} occurs twice")
        group = found.get("group")
        row = rows[name] = _Row(name, text, images, category, str(group) if group else None)
        for ref in as_list(found["positives"]):
            row.judge(_name(ref), 1)
    else:
        row = rows.setdefault(name, _Row(name, text, images, category))
        row.judge(_name(found.get("target")), _gain(found["label"], where) if "label" in found else 1)
    row.negatives |= {_name(ref) for ref in as_list(found.get("negatives"))}


def _gain(label: Any, where: str) -> int | None:
    """Gain of a label: a number, a word, or the judges' votes, of which only unanimous ones count; None: undecided."""
    gains = set()
    for vote in as_list(label):
        if isinstance(vote, Mapping):
            vote = vote.get("label", vote.get("vote", vote.get("relevant")))
        if isinstance(vote, str):
            vote = LABELS.get(vote.strip().lower(), vote)
        try:
            gains.add(int(vote))
        except (TypeError, ValueError):
            raise ReleaseError(
                f"{where}: label {vote!r} is neither a number nor one of {', '.join(LABELS)}"
            ) from None
    if not gains:
        raise ReleaseError(f"{where}: the label is empty")
    return gains.pop() if len(gains) == 1 else None


def _read_set(options: RmirOptions, fields: Fields) -> tuple[list[_Row], Path]:
    """Layouts ``set`` and ``beir``."""
    suffixes = (".parquet", ".jsonl")
    pool_file = options.pool or _needed_file(options, POOL, suffixes)
    path = _needed_file(options, ("queries",), suffixes)
    judged = _needed_file(options, ("qrels",), (".parquet", ".tsv"))
    rows = _asked(path, fields)
    # BEIR's files hold every split's queries, its qrels one split's, or the reverse
    for record in iter_rows(judged):
        if row := rows.get(str(record["query-id"])):
            target, gain = str(record["corpus-id"]), int(record.get("score", 1))
            if gain > 0:
                row.positives[target] = gain
            else:
                row.negatives.add(target)
    hard = _one_file(options.src, ("negatives",), (".parquet", ".tsv"), options.split)
    for record in iter_rows(hard) if hard else ():
        if row := rows.get(str(record["query-id"])):
            row.negatives.add(str(record["corpus-id"]))
    return [row for row in rows.values() if row.positives or row.negatives], pool_file


def _asked(path: Path, fields: Fields) -> dict[str, _Row]:
    """Queries of the layouts ``set`` and ``beir``, by id; columns may stand in an object ``metadata``."""
    ignored = (*IGNORED, "num_missing_positives")
    columns = fields.columns(path, column_names(path), ignored)
    rows: dict[str, _Row] = {}
    for record, where in placed_rows([path]):
        if isinstance(inner := record.get("metadata"), dict):
            record = inner | record
        found = columns | fields.columns(path, list(record), ignored)
        get = {ours: record.get(theirs) for ours, theirs in found.items()}
        images, name = as_list(get.get("image")), str(get.get("id"))
        if get.get("id") is None or not get.get("text") or not images:
            raise ReleaseError(
                f"{where}: a query needs an id, a text and a picture; there are {', '.join(record)}"
            )
        if name in rows:
            raise ReleaseError(f"{where}: query {name!r} occurs twice")
        category = _category(get.get("category"), where)
        rows[name] = _Row(name, str(get["text"]), images, category, get.get("group"))
    return rows


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _check_counts(rows: Sequence[_Row], num_candidates: int, options: RmirOptions) -> list[str]:
    """Compare with what is published; what differs is an error, or a note with ``counts=false``."""
    if without := [row.id for row in rows if not row.positives]:
        raise ReleaseError(f"{len(without)} of {len(rows)} queries have no positive: {some(without)}")
    found = {name: sum(row.category == name for row in rows) for name in CATEGORY_COUNTS}
    many = [row.id for row in rows if len(row.positives) > MAX_POSITIVES]
    of_test = options.split == "test"
    swapped = CATEGORY_COUNTS | {"temporal": CATEGORY_COUNTS["causal"], "causal": CATEGORY_COUNTS["temporal"]}
    unlike = {
        f"{len(rows):,} queries instead of {NUM_QUERIES:,}": of_test and len(rows) != NUM_QUERIES,
        f"{num_candidates:,} pictures in the pool instead of {NUM_CANDIDATES:,}": of_test
        and num_candidates != NUM_CANDIDATES,
        f"{_listed(found)} queries instead of {_listed(CATEGORY_COUNTS)} (or with temporal and causal swapped)": of_test
        and found not in (CATEGORY_COUNTS, swapped),
        f"more than {MAX_POSITIVES} positives in {len(many)} queries ({some(many)})": bool(many),
    }
    wrong = [words for words, is_so in unlike.items() if is_so]
    if wrong and options.counts:
        raise ReleaseError(
            f"{options.src} is not RMIR as published: {'; '.join(wrong)}. A subset or a new version is imported with "
            "counts=false, which notes the differences in meta.json"
        )
    notes = [f"not as published: {one}" for one in wrong]
    return notes + ([SWAPPED] if found["temporal"] == CATEGORY_COUNTS["temporal"] else [])


def _category(value: Any, where: str) -> str:
    found = CODES.get(str(value).strip().lower())
    if found is None:
        raise ReleaseError(f"{where}: category {value!r} is none of {', '.join(sorted(CODES))}")
    return found


def _name(ref: Any) -> str:
    """A picture's id, as the release writes it; bytes are named by their content."""
    if isinstance(ref, Mapping):
        return _name(ref.get("path") or ref.get("id") or ref.get("bytes"))
    if isinstance(ref, bytes):
        return content_id(ref.hex())
    if ref is None or ref == "":
        raise ReleaseError("a picture's reference is empty")
    return safe_id(str(ref))


def _picture(pictures: Pictures, ref: Any) -> bytes | Path:
    """Bytes or file of a reference.

    A name with 16 hexadecimal digits is an Open Images id, which is also its file's name in whatever split's folder.
    An integer is a Visual Genome id, which is not (image 2412112 is the file 2370463.jpg): never guessed.
    """
    name = "" if isinstance(ref, bytes | Mapping) else str(ref)
    if "://" in name and name not in pictures.manifest:
        raise ReleaseError(f"picture {name!r} is a URL: download it and give manifest=FILE with id and path")
    stem = re.sub(r"^(vg|oi|open_?images|visual_?genome)[_:/-]", "", name, flags=re.IGNORECASE)
    last = Path(stem).stem if Path(stem).suffix else Path(stem).name
    tries = [ref] if stem == name else [ref, stem]
    for one in tries:
        found = pictures.find(one, by_stem=bool(re.fullmatch(r"[0-9a-f]{16}", last)))
        if found is not None:
            return found
    if stem != name or "/" in stem:  # the manifest may list the bare id
        found = pictures.find(last, by_stem=False)
        if found is not None:
            return found
    hint = (
        "an integer is a Visual Genome id, and those are not file names: give manifest=image_data.json"
        if last.isdigit()
        else "give images=DIR, or manifest=FILE with id and path"
    )
    raise ReleaseError(
        f"picture {name!r} is neither in the manifest nor below {', '.join(map(str, pictures.roots))}: {hint}"
    )

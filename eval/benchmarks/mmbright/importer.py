"""MM-BRIGHT: questions with pictures from 29 forums; four tasks, each domain with its own corpus.

Layout (``mm-bright/MM-BRIGHT``): a folder a configuration, in it a Parquet file a domain (``DOMAIN.parquet``, or
``DOMAIN-00000-of-00001.parquet`` and its further parts):

``documents``            id, content
``examples``             id, query, gold_ids, negative_ids: task 1
``examples_multimodal``  and image_paths, positive_images, negative_images (lists of {image_path}): tasks 2 to 4
``document_images``      path, bytes
``examples_images``      path, bytes

| task | query | candidates |
|---|---|---|
| 1 | text | documents |
| 2 | text and pictures | documents |
| 3 | text and pictures | the documents' pictures |
| 4 | text and pictures | pairs ``document|||picture``, and ``document|||__NO_IMAGE__`` for every document |

Task 4 joins a document with the pictures of the page it was cut from, by a hexadecimal key in both names. The pattern
first released finds it only in ``KEY_N.txt``; documents in several chunks (``KEY_N_M.txt``, biology) got no picture.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    ReleaseError,
    ReleaseOptions,
    as_list,
    column_names,
    content_id,
    iter_rows,
    some,
    stack,
    still,
)
from eval.benchmarks.suite import refuse_old_suite, write_suite
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.images import ImageError
from rge.common.options import one_of
from rge.common.schema import safe_id

TASKS = ("1", "2", "3", "4")
POLICIES = ("first", "vconcat", "all")
KEYS = ("chunked", "legacy")
GAINS = ("graded", "binary")
ESSENTIALITY = ("essentiality", "image_essentiality")
GRADES = ("essential", "helpful", "redundant")
NO_IMAGE = "__NO_IMAGE__"


@dataclass
class MmbrightOptions(ReleaseOptions):
    """Make a suite of retrieval sets from the release of MM-BRIGHT."""

    task: str = "2"
    """1, 2, 3 or 4, see `eval.benchmarks.mmbright.importer`."""
    domains: tuple[str, ...] = ("all",)
    """Which domains; all that src has by default."""
    image_policy: str = "all"
    """Which pictures of a query are kept: first (the released code), vconcat (one below the other, the paper), all."""
    keys: str = "chunked"
    """Task 4: legacy joins by the pattern first released, which the published table used."""
    gains: str = "graded"
    """Task 4: graded (2 with a positive picture, 1 without picture: the paper), or binary (1 for every pair of a gold
    document, whatever its picture: the code first released)."""
    essentiality: Path | None = None
    """Table (csv, tsv, parquet, json, jsonl) with domain, id and essentiality (essential, helpful, redundant), for a
    release whose queries have no such column themselves."""
    allow_missing: bool = False
    """Accept gold documents or pictures that are not in the corpus; they stay in every denominator."""


@dataclass
class _Domain:
    """One domain being read."""

    name: str
    queries: list[Query] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unscored: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    graded: bool = False


def import_mmbright(options: MmbrightOptions) -> list[str]:
    """Read one task of MM-BRIGHT and write a suite; returns the names of its domains.

    Raises:
        UserError: a file or column is missing, gold candidates are not in the corpus, or a query's picture is broken.
    """
    one_of("task", [options.task], TASKS)
    one_of("image_policy", [options.image_policy], POLICIES)
    one_of("keys", [options.keys], KEYS)
    one_of("gains", [options.gains], GAINS)
    if options.task != "4" and (options.keys, options.gains) != ("chunked", "graded"):
        raise ReleaseError(
            f"keys= and gains= are of task 4 and have no effect on task {options.task}: leave them away"
        )
    config = "examples" if options.task == "1" else "examples_multimodal"
    there = sorted(
        {re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) for path in (options.src / config).glob("*.parquet")}
    )
    if not there:
        raise ReleaseError(
            f"{options.src / config} has no DOMAIN.parquet: src must be a snapshot of mm-bright/MM-BRIGHT"
        )
    names = tuple(there) if options.domains == ("all",) else options.domains
    one_of("domains", names, there)
    refuse_old_suite(options.out, options.overwrite)
    grades = _grades(options.essentiality) if options.essentiality is not None else {}
    for name in names:
        _import_domain(name, options, grades)
    write_suite(
        options.out,
        name=f"MM-BRIGHT task {options.task}",
        benchmark="mmbright",
        column="domain",
        members={name: {} for name in names},
        task=int(options.task),
        image_policy=options.image_policy,
        keys=options.keys if options.task == "4" else None,
        gains=options.gains if options.task == "4" else None,
    )
    return list(names)


def document_key(name: str, *, legacy: bool) -> str:
    """Key of the page that a document was cut from: ``biology/fec40b40_1635_4.txt`` -> ``fec40b40``; else the name."""
    found = re.search(r"/([0-9a-f]+)_\d+\.txt$" if legacy else r"/([0-9a-f]+)_", name)
    return found[1] if found else name


def image_key(path: str, domain: str) -> str:
    """Key of the page that a picture stands on: ``academia/academia_a7beca61_0002/image_1.webp`` -> ``a7beca61``."""
    found = re.search(rf"{re.escape(domain)}_([0-9a-f]+)_\d+", path)
    return found[1] if found else ""


def _import_domain(name: str, options: MmbrightOptions, grades: dict[tuple[str, str], str]) -> None:
    domain = _Domain(name)
    task = options.task
    # A domain has up to 338,000 documents: only their ids are held, their texts are read while the corpus is written.
    listed = _stream(options.src, "documents", name, ("id",)) if task != "3" else ()
    doc_ids = dict.fromkeys(str(row["id"]) for row in listed)
    images: dict[str, bytes] = {}
    if task in ("3", "4"):
        for row in _rows(options.src, "document_images", name, ("path", "bytes")):
            path = _path(row["path"])
            try:
                images[path] = still(row["bytes"])
            except (ImageError, TypeError):
                domain.broken.append(path)  # the released loader drops them too, without a word
        if not images:
            raise ReleaseError(
                f"{options.src}: no picture of {name} can be opened, so task {task} has no candidates"
            )
    pairs = _pairs(list(doc_ids), list(images), name, legacy=options.keys == "legacy") if task == "4" else []
    known = {"1": doc_ids, "2": doc_ids, "3": dict.fromkeys(images), "4": dict.fromkeys(pairs)}[task]
    columns = ["id", "query", "gold_ids", "negative_ids", *([] if task == "1" else ["image_paths"])]
    columns += ["positive_images", "negative_images"] if task in ("3", "4") else []
    asked = _rows(
        options.src,
        "examples" if task == "1" else "examples_multimodal",
        name,
        columns,
        ESSENTIALITY,
    )
    for row in asked:
        row["essentiality"] = grades.get((name, str(row["id"]))) or _grade(
            next((row[key] for key in ESSENTIALITY if row.get(key)), None), f"{name}: query {row['id']!r}"
        )
    domain.graded = any(row["essentiality"] for row in asked)
    shown: dict[str, bytes] = {}
    if task != "1":
        shown = {
            _path(r["path"]): r["bytes"]
            for r in _rows(options.src, "examples_images", name, ("path", "bytes"))
        }
    for row in asked:
        _add(domain, row, known, pairs, shown, options)
    if domain.lost and not options.allow_missing:
        raise ReleaseError(
            f"{name}: {len(domain.lost)} gold candidates are not in the corpus: {some(domain.lost)}. allow_missing=true "
            "keeps them in every denominator"
        )
    if not domain.queries:
        raise ReleaseError(f"{name}: none of {len(asked)} queries has a positive in task {task}")

    def corpus() -> Iterator[Candidate]:
        if task == "3":
            for path, data in images.items():
                yield Candidate(safe_id(path), None, data)
            return
        pairs_of: dict[str, list[str]] = {}
        for pair in pairs:
            pairs_of.setdefault(pair.partition("|||")[0], []).append(pair)
        left = dict(doc_ids)  # an id that is listed twice counts once, as it stands first
        for row in _stream(options.src, "documents", name, ("id", "content")):
            one = str(row["id"])
            if left.pop(one, ...) is ...:
                continue
            if task in ("1", "2"):
                yield Candidate(safe_id(one), row["content"])
            for pair in pairs_of.get(one, []):
                path = pair.partition("|||")[2]
                yield Candidate(safe_id(pair), row["content"], None if path == NO_IMAGE else images[path])

    write_set(
        options.out / name,
        meta={
            "name": f"MM-BRIGHT task {task}, {name}",
            "benchmark": "mmbright",
            "source": "mm-bright/MM-BRIGHT, imported by eval.benchmarks.mmbright.importer",
            "task": int(task),
            "domain": name,
            "image_policy": None if task == "1" else options.image_policy,
            "keys": options.keys if task == "4" else None,
            "gains": options.gains if task == "4" else None,
            "queries_without_positives": domain.unscored,
            "undecodable_pictures": domain.broken,
            "num_missing_positives": len(domain.lost),
            **({"report_by": ["essentiality"]} if domain.graded else {}),
        },
        queries=domain.queries,
        corpus=corpus(),
        qrels=domain.qrels,
        negatives=domain.negatives,
        decode=options.decode,
        overwrite=options.overwrite,
    )


def _add(
    domain: _Domain,
    row: dict[str, Any],
    known: dict[str, Any],
    pairs: Sequence[str],
    shown: dict[str, bytes],
    options: MmbrightOptions,
) -> None:
    name = str(row["id"])
    gains, wrong = _judgements(domain, row, pairs, options)
    if not any(gains.values()):
        domain.unscored.append(name)
        return
    absent = [one for one, gain in gains.items() if gain and one not in known]
    domain.lost += [f"{name}: {one}" for one in absent]
    paths = [] if options.task == "1" else [_path(one) for one in as_list(row["image_paths"])]
    pictures = _shown(domain, name, paths, shown, options.image_policy)
    domain.queries.append(
        Query(
            id=safe_id(name),
            text=row["query"],
            images=tuple(pictures),
            category=None,
            group=content_id(*paths) if paths else safe_id(name),
            columns={"num_missing_positives": len(absent)}
            | ({"essentiality": row["essentiality"] or "not said"} if domain.graded else {}),
        )
    )
    domain.qrels += [(safe_id(name), safe_id(one), gain) for one, gain in gains.items() if one in known]
    domain.negatives += [(safe_id(name), safe_id(one)) for one in dict.fromkeys(wrong) if one in known]


def _judgements(
    domain: _Domain, row: dict[str, Any], pairs: Sequence[str], options: MmbrightOptions
) -> tuple[dict[str, int], list[str]]:
    """Gains by candidate, 0 for what was judged and is not right; and candidates that are wrong."""
    gold = [str(one) for one in dict.fromkeys(as_list(row["gold_ids"]))]
    if options.task in ("1", "2"):
        return dict.fromkeys(gold, 1), [str(one) for one in as_list(row["negative_ids"])]
    right = [_path(one) for one in _images(row["positive_images"])]
    wrong_images = [path for path in map(_path, _images(row["negative_images"])) if path not in right]
    if options.task == "3":
        return dict.fromkeys(right, 1), wrong_images
    golds, bad = set(gold), set(wrong_images)
    of_gold = [pair for pair in pairs if pair.partition("|||")[0] in golds]
    gains = {f"{doc}|||{NO_IMAGE}": 1 for doc in gold}
    if options.gains == "binary":
        gains |= dict.fromkeys(of_gold, 1)
    else:
        of_page: dict[str, list[str]] = {}
        for doc in gold:
            of_page.setdefault(document_key(doc, legacy=options.keys == "legacy"), []).append(doc)
        for path in right:
            key = image_key(path, domain.name)
            gains |= {f"{doc}|||{path}": 2 for doc in (of_page.get(key, []) if key else ())}
    wrong = [pair for pair in pairs if pair.partition("|||")[2] in bad and pair not in gains]
    # the rest of a gold document's pairs were judged, and are not right
    return gains | {pair: 0 for pair in of_gold if pair not in gains}, wrong


def _shown(
    domain: _Domain, name: str, paths: Sequence[str], shown: dict[str, bytes], policy: str
) -> list[bytes]:
    """A query's pictures, as many as the policy keeps."""
    pictures = []
    for path in paths:
        try:
            pictures.append(still(shown[path]))
        except (KeyError, TypeError, ImageError) as error:
            raise ReleaseError(
                f"{domain.name}: picture {path!r} of query {name!r} is missing or cannot be opened ({error!r}). The "
                "released code would put a white picture in its place; remove it from image_paths to leave it out"
            ) from None
    if policy == "vconcat" and len(pictures) > 1:
        return [stack(pictures)]
    return pictures[:1] if policy == "first" else pictures


def _pairs(documents: Sequence[str], images: Sequence[str], domain: str, *, legacy: bool) -> list[str]:
    of_page: dict[str, list[str]] = {}
    for path in images:
        if key := image_key(path, domain):
            of_page.setdefault(key, []).append(path)
    return [
        f"{doc}|||{path}"
        for doc in documents
        for path in (NO_IMAGE, *of_page.get(document_key(doc, legacy=legacy), []))
    ]


def _grades(path: Path) -> dict[tuple[str, str], str]:
    """(domain, query id) -> essentiality, of a table made by others."""
    found = {}
    for row in iter_rows(path):
        if lacking := {"domain", "id", "essentiality"} - row.keys():
            raise ReleaseError(
                f"{path}: column {min(lacking)!r} is missing; it needs domain, id and essentiality"
            )
        key = (str(row["domain"]), str(row["id"]))
        if grade := _grade(row["essentiality"], f"{path}: {key[0]}, query {key[1]!r}"):
            found[key] = grade
    return found


def _grade(value: Any, where: str) -> str | None:
    if value is None or value != value or value == "":  # NaN is no grade either
        return None
    word = str(value).strip().lower()
    if word not in GRADES:
        raise ReleaseError(f"{where}: essentiality must be {', '.join(GRADES)}, got {value!r}")
    return word


def _rows(
    src: Path, config: str, domain: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> list[dict[str, Any]]:
    return list(_stream(src, config, domain, columns, optional))


def _stream(
    src: Path, config: str, domain: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    folder = src / config
    files = [path for path in [folder / f"{domain}.parquet"] if path.is_file()]
    files = files or sorted(folder.glob(f"{domain}-[0-9][0-9][0-9][0-9][0-9]-of-*.parquet"))
    if not files:
        raise ReleaseError(
            f"{folder / domain}.parquet is not there: src must be a snapshot of mm-bright/MM-BRIGHT"
        )
    for path in files:
        there = column_names(path)
        if lacking := [column for column in columns if column not in there]:
            raise ReleaseError(f"{path}: column {lacking[0]!r} is missing; there are {', '.join(there)}")
        yield from iter_rows(path, [*columns, *optional])


def _images(value: Any) -> list[str]:
    return [one["image_path"] if isinstance(one, dict) else one for one in as_list(value)]


def _path(value: Any) -> str:
    return str(value).replace("\\", "/")

"""MM-BRIGHT: questions with pictures from 29 forums; four tasks, with a corpus per domain.

Layout (``mm-bright/MM-BRIGHT``): a folder per configuration with a Parquet file per domain (``DOMAIN.parquet``, or parts
``DOMAIN-00000-of-00001.parquet``):

``documents``            id, content
``examples``             id, query, gold_ids, negative_ids, gold_answers: task 1
``examples_multimodal``  also image_paths, positive_images, negative_images (lists of {image_path}): tasks 2 to 4
``document_images``      path, bytes
``examples_images``      path, bytes

| task | query | candidates |
|---|---|---|
| 1 | text | documents |
| 2 | text and pictures | documents |
| 3 | text and pictures | the documents' pictures |
| 4 | text and pictures | pairs ``document|||picture``, and ``document|||__NO_IMAGE__`` for every document |

Task 4 joins a document with the pictures of its page by a hexadecimal key in both names. The pattern first released
matches only ``KEY_N.txt``, so documents in several chunks (``KEY_N_M.txt``, biology) got no pictures.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    Draft,
    ReleaseError,
    ReleaseOptions,
    Row,
    as_list,
    chosen,
    content_id,
    existing,
    iter_rows,
)
from eval.scoring.output_files import Scored, means
from eval.scoring.protocol import Protocol
from eval.scoring.results import Results
from eval.scoring.search import Ranking
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query
from rge.common.images import ImageError, load_image
from rge.common.schema import safe_id

REPOSITORY = "mm-bright/MM-BRIGHT"
NO_IMAGE = "__NO_IMAGE__"
CUTS = (1, 5, 10, 25, 50, 100)
_TREC = {"NDCG": "ndcg", "MAP": "map", "Recall": "recall", "P": "precision"}
"""The released scorer's cutoffs, and its names of metrics."""


@dataclass
class MmbrightOptions(ReleaseOptions):
    """Make a suite of retrieval sets from the release of MM-BRIGHT."""

    task: Literal["1", "2", "3", "4"] = "2"
    """Task, see `eval.benchmarks.releases.mmbright`."""
    domains: tuple[str, ...] = ("all",)
    """Domains; by default all that src has."""
    image_policy: Literal["first", "vconcat", "all"] = "all"
    """Which pictures of a query are used: first (the released code), vconcat (concatenated vertically: the paper, for
    models that take one picture), all (the paper, for others)."""
    keys: Literal["chunked", "legacy"] = "chunked"
    """For task 4: legacy joins with the first released pattern, which the published table used."""
    allow_missing: bool = False
    """Accept gold documents or pictures that are not in the corpus; they still count in every denominator."""


def import_mmbright(options: MmbrightOptions) -> list[str]:
    """Read one task of MM-BRIGHT and write a suite; returns the names of its domains."""
    if options.task != "4" and options.keys != "chunked":
        raise ReleaseError(f"it applies to task 4 only, not to task {options.task}: leave it out", key="keys")
    config = "examples" if options.task == "1" else "examples_multimodal"
    domains = domains_of(options.src / config)
    if not domains:
        raise ReleaseError(
            f"it has no DOMAIN.parquet: src must be a snapshot of {REPOSITORY}", options.src / config
        )
    names = chosen("domains", options.domains, domains)
    return options.write_members(
        {name: {} for name in names},
        lambda name: _Domain(name, options).write(),
        name=f"MM-BRIGHT task {options.task}",
        benchmark="mmbright",
        column="domain",
        task=int(options.task),
        image_policy=options.image_policy,
        keys=options.keys if options.task == "4" else None,
    )


def domains_of(folder: Path) -> list[str]:
    """Domains of a configuration, sorted."""
    stems = (path.stem for path in folder.glob("[!.]*.parquet"))
    return sorted({re.sub(r"-\d{5}-of-\d{5}$", "", stem) for stem in stems})


def document_key(name: str, *, legacy: bool) -> str:
    """Key of a document's page: ``biology/fec40b40_1635_4.txt`` -> ``fec40b40``; the name itself if it has none."""
    match = re.search(r"/([0-9a-f]+)_\d+\.txt$" if legacy else r"/([0-9a-f]+)_", name)
    return match[1] if match else name


def image_key(path: str, domain: str) -> str:
    """Key of a picture's page: ``academia/academia_a7beca61_0002/image_1.webp`` -> ``a7beca61``; "" if it has none."""
    match = re.search(rf"{re.escape(domain)}_([0-9a-f]+)_\d+", path)
    return match[1] if match else ""


@dataclass
class _Domain:
    """Imports one domain. Texts of its documents (up to 338,000) are read only when the corpus is written.

    Pictures that cannot be opened are left out, but counted; a query's picture that is not in the release is an error.
    """

    name: str
    options: MmbrightOptions
    broken: list[str] = field(default_factory=list)  # pictures of documents
    left_out: list[str] = field(default_factory=list)  # pictures of queries
    blind: list[str] = field(default_factory=list)  # queries that have no other picture

    def __post_init__(self) -> None:
        self.task = int(self.options.task)

    @cached_property
    def images(self) -> dict[str, bytes]:
        """Pictures of documents by path."""
        images: dict[str, bytes] = {}
        for row in self._rows("document_images", ("path", "bytes")) if self.task > 2 else ():
            path = _path(row["path"])
            try:
                images[path] = _still(row["bytes"])
            except (ImageError, TypeError):
                self.broken.append(path)
        return images

    @cached_property
    def answers(self) -> dict[str, str]:
        """Reference answers by query, from either configuration that has them; several are one text."""
        found: dict[str, str] = {}
        for config in ("examples", "examples_multimodal"):
            for row in self._rows(config, ("id", "gold_answers"), needed=("id",), optional=True):
                texts = [str(text).strip() for text in as_list(row.get("gold_answers"))]
                if text := "\n\n".join(filter(None, texts)):
                    found.setdefault(str(row["id"]), text)
        return found

    @cached_property
    def candidates(self) -> dict[str, tuple[str, str]]:
        """Candidate -> its document and the path of its picture, "" for none."""
        if self.task == 3:
            return {path: ("", path) for path in self.images}
        docs = dict.fromkeys(str(row["id"]) for row in self._rows("documents", ("id",)))
        if self.task < 3:
            return {doc: (doc, "") for doc in docs}
        of_page: dict[str, list[str]] = {}
        for path in self.images:
            of_page.setdefault(image_key(path, self.name), []).append(path)
        pairs = ((doc, path) for doc in docs for path in ("", *of_page.get(self._key(doc), ())))
        return {f"{doc}|||{path or NO_IMAGE}": (doc, path) for doc, path in pairs}

    def write(self) -> None:
        """Read the domain and write its set."""
        draft, unscored, options = Draft(self.candidates), list[str](), self.options
        columns = ["id", "query", "gold_ids", "negative_ids"]
        columns += ["image_paths"] if self.task > 1 else []
        columns += ["positive_images", "negative_images"] if self.task > 2 else []
        rows = self._rows("examples_images", ("path", "bytes")) if self.task > 1 else ()
        pictures = {_path(row["path"]): row["bytes"] for row in rows}
        for row in self._rows("examples" if self.task == 1 else "examples_multimodal", columns):
            gains, wrong = self._judgements(row)
            if any(gains.values()):
                draft.add(self._query(row, pictures), row.where, gains, wrong)
            else:
                unscored.append(str(row["id"]))
        draft.refuse_lost(f"the corpus of {self.name}", allowed=options.allow_missing)
        if not draft.queries:
            raise ReleaseError(f"none of {len(unscored)} queries has a positive", key=self.name)
        left_out = (
            f"{len(self.left_out)} pictures of queries cannot be opened and were left out; {len(self.blind)} queries "
            "have no other one and are asked by their text (the released code shows CLIP and SigLIP a white picture)"
        )
        options.write(
            self.name,
            meta={
                "name": f"MM-BRIGHT task {self.task}, {self.name}",
                "benchmark": "mmbright",
                "source": f"{REPOSITORY}, imported by eval.benchmarks.releases.mmbright",
                "task": self.task,
                "domain": self.name,
                "image_policy": None if self.task == 1 else options.image_policy,
                "keys": options.keys if self.task == 4 else None,
                "queries_without_positives": unscored,
                "undecodable_pictures": self.broken,
                "query_pictures_left_out": self.left_out,
                "num_missing_positives": len(draft.lost),
                "notes": [left_out] if self.left_out else [],
            },
            queries=draft.queries,
            corpus=self._corpus(),
            qrels=draft.qrels,
            negatives=draft.negatives,
        )

    def _corpus(self) -> Iterator[Candidate]:
        of_doc: dict[str, list[tuple[str, str]]] = {}
        for name, (doc, path) in self.candidates.items():
            of_doc.setdefault(doc, []).append((name, path))
        for name, path in of_doc.pop("", ()):
            yield Candidate(safe_id(name), None, self.images[path])
        for row in self._rows("documents", ("id", "content")) if of_doc else ():
            for name, path in of_doc.pop(str(row["id"]), ()):
                yield Candidate(safe_id(name), row.text("content"), self.images.get(path))

    def _query(self, row: Row, pictures: dict[str, bytes]) -> Query:
        name = safe_id(str(row["id"]))
        paths = [_path(path) for path in as_list(row.get("image_paths"))]
        images = tuple(self._query_images(name, paths, pictures))
        answers = self.answers.get(str(row["id"]), "")
        group = content_id(*paths) if paths else name
        return Query(name, row.text("query"), images, group=group, columns={"answers": answers})

    def _judgements(self, row: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
        """Gains by candidate (0: judged, not right), and explicit negatives."""
        gold = [str(name) for name in dict.fromkeys(as_list(row["gold_ids"]))]
        if self.task < 3:
            return dict.fromkeys(gold, 1), [str(name) for name in as_list(row["negative_ids"])]
        right = _images(row["positive_images"])
        wrong = [path for path in _images(row["negative_images"]) if path not in right]
        return (dict.fromkeys(right, 1), wrong) if self.task == 3 else self._of_pairs(gold, right, set(wrong))

    def _of_pairs(
        self, gold: Sequence[str], right: Sequence[str], wrong: set[str]
    ) -> tuple[dict[str, int], list[str]]:
        """The same for task 4: gain 2 for a gold document with a positive picture of its page, 1 without picture."""
        # all other pairs of a gold document count as judged and not right
        gains = {pair: 0 for pair, (doc, _) in self.candidates.items() if doc in gold}
        gains |= {f"{doc}|||{NO_IMAGE}": 1 for doc in gold}
        keys = {path: image_key(path, self.name) for path in right}
        gains |= {f"{doc}|||{path}": 2 for path, key in keys.items() for doc in gold if key == self._key(doc)}
        bad = [pair for pair, (_, path) in self.candidates.items() if path and path in wrong]
        return gains, [pair for pair in bad if not gains.get(pair)]

    def _key(self, doc: str) -> str:
        return document_key(doc, legacy=self.options.keys == "legacy")

    def _query_images(self, query: str, paths: Sequence[str], pictures: dict[str, bytes]) -> list[bytes]:
        images = []
        for path in paths:
            if path not in pictures:
                raise ReleaseError(
                    "the picture is missing from examples_images: fetch it again, or remove it from image_paths",
                    self.name,
                    query,
                    path,
                )
            try:
                images.append(_still(pictures[path]))
            except (TypeError, ImageError):
                self.left_out.append(f"{query}: {path}")
        if paths and not images:
            self.blind.append(query)
        if self.options.image_policy == "vconcat" and len(images) > 1:
            return [_stacked(images)]
        return images[:1] if self.options.image_policy == "first" else images

    def _rows(
        self,
        config: str,
        columns: Sequence[str],
        needed: Sequence[str] | None = None,
        *,
        optional: bool = False,
    ) -> Iterator[Row]:
        """Rows of a configuration; ``needed``: columns that it must have, by default all; ``optional``: it may be missing."""
        folder, name = self.options.src / config, self.name
        whole = folder / f"{name}.parquet"
        files = [whole] if whole.is_file() else sorted(folder.glob(f"{name}-{'[0-9]' * 5}-of-*.parquet"))
        for path in files or ([] if optional else [existing(whole, REPOSITORY)]):
            yield from iter_rows(path, columns, needed=columns if needed is None else needed)


def _images(value: Any) -> list[str]:
    return [_path(image["image_path"] if isinstance(image, dict) else image) for image in as_list(value)]


def _path(value: Any) -> str:
    return str(value).replace("\\", "/")


def _still(data: bytes) -> bytes:
    """Replace an animation by its first frame as PNG; other pictures are returned unchanged."""
    try:
        load_image(data)
    except ImageError:
        return _png(load_image(data, first_frame=True))
    return data


def _stacked(pictures: Sequence[bytes]) -> bytes:
    """Pictures below one another on white, without resizing, as PNG."""
    images = [load_image(data) for data in pictures]
    size = max(image.width for image in images), sum(image.height for image in images)
    whole, top = Image.new("RGB", size, "white"), 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    return _png(whole)


def _png(image: Image.Image) -> bytes:
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return sink.getvalue()


@dataclass(frozen=True)
class Mmbright(Protocol):
    """MM-BRIGHT: the mean over domains of nDCG@10."""

    def prepare(self, wanted: RetrievalSet) -> RetrievalSet:
        """Official: hard negatives (tasks 1 and 2) and pairs with a negative picture (task 4) are excluded from rankings."""
        removes = self.profile == "official" and wanted.meta.get("task") in (1, 2, 4)
        return replace(wanted, excluded=wanted.negatives) if removes else wanted

    def names(self, wanted: RetrievalSet) -> tuple[str, ...]:
        """Official: at the released code's cutoffs too, without metrics of the negatives that it removes."""
        if self.profile == "clean":
            return super().names(wanted)
        names = super().names(replace(wanted, negatives=None))
        return tuple(dict.fromkeys((*names, *(f"{metric}@{k}" for metric in _TREC.values() for k in CUTS))))

    def ordered(self, wanted: RetrievalSet, ranking: Ranking) -> Ranking:
        """As `Protocol.ordered`; official, the embedder's scores in task 3 are as the released code rounds them."""
        single = ranking.score_QW.dtype == np.float32  # scores in files are double, and rounded already
        if self.profile == "official" and wanted.meta.get("task") == 3 and single:
            # the released code scales float32 scores by 100, whose rounding makes some of them equal
            score_QW = (ranking.score_QW * np.float32(100)).astype(np.float64) / 100
            ranking = replace(ranking, score_QW=score_QW)
        return super().ordered(wanted, ranking)

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """Official: the released code's names, rounded to five digits."""
        if self.profile == "clean":
            return {}
        value = means(scored.names, scored.value_QM)
        figures = {f"{t}@{k}": round(value[f"{o}@{k}"], 5) for t, o in _TREC.items() for k in CUTS}
        return {"official": figures | {"MRR": round(value["mrr"], 5)}}

    def suite_figures(self, results: Mapping[str, Results]) -> dict[str, Any]:
        """Official: the mean of the domains' rounded figures, rounded again."""
        if self.profile == "clean":
            return {}
        blocks = [result.official for result in results.values()]
        return {"official": {key: round(sum(b[key] for b in blocks) / len(blocks), 5) for key in blocks[0]}}


PROTOCOLS = (
    Mmbright("mmbright", "clean", ("ndcg@10", "recall@10"), (
        "nDCG@10 with linear gains, mean over domains",
        "hard negatives stay in the ranking",
        "task 4 is graded as in the paper: 2 for a gold document with a positive picture, 1 for it without picture",
        "queries without any positive are not part of the set",
    )),
    Mmbright("mmbright", "official", ("ndcg@10",), (
        "as the released code (143ae35): nDCG@10 of trec_eval over the top 1,000, rounded to five digits per domain, mean "
        "over domains",
        "tasks 1 and 2: the query's hard negatives are removed from its ranking",
        "task 4: graded 2 and 1; pairs with a picture judged wrong are removed. With keys=legacy at import this is what "
        "the code calls the protocol of Table 6",
        "equal scores are in trec_eval's order, the larger id first",
    ), ties="trec", skips_missing=True),
)  # fmt: skip
register_benchmark(Benchmark("mmbright", import_mmbright, PROTOCOLS, Path(__file__).with_name("published")))

"""MMEB-V1: 36 sets, whose queries have their own candidates, the first of which is right.

Layout (``TIGER-Lab/MMEB-eval``, split test): a folder or file per set, Parquet or JSON lines, with ``qry_text``,
``qry_img_path``, ``tgt_text`` (a list) and ``tgt_img_path`` (a list), where "" is a missing part and ``<|image_1|>`` in a
text marks the picture; all pictures below one folder.

The released scorers compare `argmax` with candidate 0, so equal scores count as right. Here a candidate's id is a hash
of its content, and ties count against the model unless ``profile=official``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    PictureOptions,
    Pictures,
    ReleaseError,
    Row,
    chosen,
    content_id,
    files_of_split,
    read_rows,
)
from eval.scoring.protocol import Protocol
from eval.sets.write_set import Candidate, Query
from rge.common.mmeb_prompts import SETS, plain, reword

COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
APART = ("qry_inst", "tgt_inst")
"""Columns of a later release, whose texts do not include their instructions."""


@dataclass
class MmebOptions(PictureOptions):
    """Make a suite of retrieval sets from the release of MMEB."""

    sets: tuple[str, ...] = ("all",)
    """Sets by name; by default all 36."""
    images: Path | None = None
    """Folder that the image paths are relative to; null: src/images, src/MMEB-images, src."""
    instructions: Literal["vlm2vec", "rge"] = "vlm2vec"
    """vlm2vec leaves the texts as released; rge rewords them as the released RGE evaluation does."""
    verbatim: bool = False
    """Keep every blank, line break and picture position in the texts, as the released code reads them; for `eval run
    as=release`."""


def import_mmeb(options: MmebOptions) -> list[str]:
    """Read MMEB's evaluation sets and write a suite; returns the names of its sets."""
    names = chosen("sets", options.sets, SETS)
    files = {name: paths for name in names if (paths := _files(options.src, name))}
    refuse_lacking(options.src, [name for name in names if name not in files], len(names), "36 is no MMEB")
    pictures = Pictures(
        options.images, options.src / "images", options.src / "MMEB-images", options.src,
        hint="unpack images.zip and pass images=DIR",
    )  # fmt: skip
    return options.write_members(
        {name: SETS[name] for name in names},
        lambda name: _import_one(name, files[name], pictures, options),
        name="MMEB" if len(names) == len(SETS) else f"MMEB, {len(names)} of {len(SETS)} sets",
        benchmark="mmeb",
        column="set",
        instructions=options.instructions,
    )


def refuse_lacking(src: Path, missing: Sequence[str], num: int, average_of_fewer: str) -> None:
    """Raise a `ReleaseError` if sets are missing."""
    if missing:
        lacking = f"it lacks {len(missing)} of {num} sets: {', '.join(missing)}"
        average = f"The average of fewer than {average_of_fewer} score"
        raise ReleaseError(
            f"{lacking}. {average}; sets=NAME,... imports only the named ones", src, key="sets"
        )


def _files(src: Path, name: str) -> list[Path]:
    if (src / name).is_dir():
        return files_of_split(src / name, "test")
    return [path for path in (src / f"{name}.parquet", src / f"{name}.jsonl") if path.is_file()]


@dataclass
class OwnCandidates:
    """A set in which every query has its own candidates, the right one first."""

    name: str
    pictures: Pictures
    word_query: Callable[[str], str] = str  # final rewording of a query's text
    word_candidate: Callable[[str], str] = str  # the same for a candidate's text
    queries: list[Query] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    candidates: list[tuple[str, str]] = field(default_factory=list)
    num_equal: int = 0  # queries with repeated candidates
    num_hidden: int = 0  # candidates not embedded because another one has their id
    _content_of: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, text: str, path: str, targets: Sequence[tuple[str, str, str]], row: Row) -> None:
        """Add the query of a row and its candidates (id, text, picture path), with "" for missing parts."""
        query = f"{self.name}-{len(self.queries):05d}"
        for place, (name, *content) in enumerate(targets):
            if not any(content):
                raise row.error("the candidate has neither text nor picture", f"candidate {place}")
            self.num_hidden += self._content_of.setdefault(name, (content[0], content[1])) != tuple(content)
        images = (self.pictures.find(path, row.where),) if path else ()
        self.queries.append(Query(query, self.word_query(text), images, group=content_id(path or text)))
        names = list(dict.fromkeys(name for name, *_ in targets))
        self.num_equal += len(names) < len(targets)
        self.qrels.append((query, names[0], 1))
        self.candidates += [(query, name) for name in names]

    def corpus(self) -> Iterator[Candidate]:
        """Distinct candidates, sorted by id."""
        for name, (text, path) in sorted(self._content_of.items()):
            image = self.pictures.find(path, (self.name, "candidate")) if path else None
            yield Candidate(name, self.word_candidate(text) or None, image)

    def parts(self) -> dict[str, Any]:
        """Arguments for `ReleaseOptions.write`."""
        lists = {"qrels": self.qrels, "candidates": self.candidates}
        return {"queries": self.queries, "corpus": self.corpus(), **lists}


def _import_one(name: str, files: Sequence[Path], pictures: Pictures, options: MmebOptions) -> None:
    clean = str if options.verbatim else plain
    draft = OwnCandidates(name, pictures)
    if options.instructions == "rge":
        draft.word_query = partial(reword, name, side="query")
        draft.word_candidate = lambda text: text and reword(name, text, "candidate")
    for row in read_rows(files, COLUMNS):
        if separate := list(filter(row.get, APART)):
            raise row.error("it holds the instruction separately, as in MMEB-V2: use MMEB-eval", separate[0])
        targets = [(clean(text), path) for text, path in targets_of(row)]
        known = [(content_id(*content), *content) for content in targets]
        draft.add(clean(row.text("qry_text")), row.text("qry_img_path"), known, row)
    options.write(
        name,
        meta={
            "name": f"MMEB {name}",
            "benchmark": "mmeb",
            "source": "TIGER-Lab/MMEB-eval, imported by eval.benchmarks.releases.mmeb",
            "instructions": options.instructions,
            # the texts already include their instructions, so the checkpoint's prompt wording must not be added
            "prompts": "verbatim" if options.verbatim else "plain",
            "verbatim": options.verbatim or None,
            "queries_with_equal_candidates": draft.num_equal,
            **SETS[name],
        },
        **draft.parts(),
    )


def targets_of(row: Row) -> list[tuple[str, str]]:
    """(text, picture path) of each candidate; a set without pictures (or texts) may leave that list empty."""
    texts, paths = row.texts("tgt_text"), row.texts("tgt_img_path")
    size = max(len(texts), len(paths))
    if size == 0:
        raise row.error("there are no candidates", "tgt_text")
    if min(len(texts), len(paths)) not in (size, 0):
        raise row.error(f"{len(texts)} texts and {len(paths)} pictures for the candidates", "tgt_img_path")
    return list(zip(texts or [""] * size, paths or [""] * size, strict=True))


_OVERALL = "overall is the unweighted mean of the sets, likewise IND, OOD and each meta-task"
PROTOCOLS = (
    Protocol("mmeb", "clean", ("hit@1", "mrr"), (
        "hit@1 within each query's own candidates; equal scores count against the model", _OVERALL,
    ), ties="worst"),
    Protocol("mmeb", "official", ("hit@1",), (
        "hit@1 as argmax over candidates with the answer first: equal scores count for the model", _OVERALL,
    ), ties="best"),
)  # fmt: skip
register_benchmark(Benchmark("mmeb", import_mmeb, PROTOCOLS, Path(__file__).with_name("published")))

"""UVRB (arXiv:2510.27571): sixteen sets of queries (texts, pictures, clips, or texts with one of these) that find videos.

Layout, as ``eval/uvrb_eval`` of github.com/ZoengHN/Embed-RL (75cfbba) reads it: a folder per set, or ``SET/UVRB/SET`` as the archives
unpack, with ``jsonl/queries.jsonl`` (``id``, ``text``, ``image``, ``video``), ``jsonl/corpus.jsonl`` (``id``, ``video``),
``jsonl/instances.jsonl`` (``qid``, ``pos``), pictures below ``images``, and of each video either its frames as a folder of pictures below
``videos_frames``, or the file below ``videos``.

As in the released code, eight frames of a folder are shown, evenly from the first to the last; a picture comes before the text and a clip
after it; a query with a picture and a clip keeps the picture. Its code finds the instruction of a set by a name with a hyphen, but its
settings write most names with an underline (``CRB_G``), so that only CMRB and DiDeMo have theirs there; here all have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import (
    Draft,
    ReleaseOptions,
    Row,
    as_list,
    chosen,
    existing,
    iter_rows,
)
from eval.scoring.output_files import Scored, means
from eval.scoring.protocol import Protocol
from eval.scoring.results import Results
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query
from rge.common.images import SUFFIXES
from rge.common.parts import Content, ImagePart, TextPart, VideoPart
from rge.common.schema import safe_id

REPOSITORY = "Alibaba-NLP/UVRB, unpacked"
INSTRUCTIONS = {
    "MSRVTT": "Find the clip that corresponds to the described scene in the given video.",
    "DiDeMo": "Find a video that includes the following described scenes.",
    "CRB-G": "Find the video according to the general text description.",
    "CRB-S": "Find the video according to the spatial description.",
    "CRB-T": "Find the video according to the temporal description.",
    "CMRB": "Find the video according to the camera motion description.",
    "DREAM-E": "Find the video according to the text description.",
    "LoVR-TH": "Find the video according to text description about video theme information.",
    "PEV-K": "Find the video according to the text description of a series of keywords.",
    "LoVR-V": "Find the long video according to the long text description.",
    "VDC-D": "Find the video according to the detailed text description.",
    "VDC-O": "",
    "MS-TI": "Find the video clip that corresponds to the given text and the given image.",
    "MS-TV": "Find the video clip that corresponds to the given text and the given video.",
    "MSRVTT-I2V": "Find the video according to the image.",
    "LoVR-C2V": "Find the original long video according to the short video clip.",
}
"""Instruction of each set's queries, from the released code; VDC-O has none."""
OFFICIAL_INSTRUCTIONS = ("CMRB", "DiDeMo")
NUM_FRAMES = 8
CUTS = (1, 5, 10, 50)
"""Cutoffs of the released scorer."""
MAIN = {"CMRB": "hit@10"}
"""The paper's metric, called R@k there, where it is not R@1, as far as its tables could be seen."""
FRAME_ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass
class UvrbOptions(ReleaseOptions):
    """Make a suite of retrieval sets from the release of UVRB."""

    sets: tuple[str, ...] = ("all",)
    """Sets, by the release's names; by default all 16."""
    instructions: Literal["all", "official"] = "all"
    """all: every set's instruction; official: those that the released code finds, which are CMRB's and DiDeMo's."""
    num_frames: int = NUM_FRAMES
    """Frames that are shown of each video, 8 in the released evaluation."""
    allow_missing: bool = False
    """Accept right videos that are not in the corpus, and queries without any: they count as not found."""


def import_uvrb(options: UvrbOptions) -> list[str]:
    """Read the release and write a suite; returns the names of its sets."""
    names = chosen("sets", options.sets, INSTRUCTIONS)
    return options.write_members(
        {name: {} for name in names},
        lambda name: _import_one(name, options),
        name="UVRB" if len(names) == len(INSTRUCTIONS) else f"UVRB, {len(names)} sets",
        benchmark="uvrb",
        column="set",
    )


def _import_one(name: str, options: UvrbOptions) -> None:
    nested = options.src / name / "UVRB" / name
    folder = nested if nested.is_dir() else options.src / name
    rows = {
        kind: existing(folder / "jsonl" / f"{kind}.jsonl", REPOSITORY)
        for kind in ("queries", "corpus", "instances")
    }
    videos = _Videos(folder, options.num_frames)
    corpus = {row.id("id"): row for row in iter_rows(rows["corpus"], needed=("id", "video"))}
    right: dict[str, list[str]] = {}
    for row in iter_rows(rows["instances"], needed=("qid", "pos")):
        right.setdefault(row.id("qid"), []).extend(safe_id(str(one)) for one in as_list(row.get("pos")))
    has_instruction = options.instructions == "all" or name in OFFICIAL_INSTRUCTIONS
    instruction = (INSTRUCTIONS[name] if has_instruction else "") or None
    draft = Draft(corpus)
    for row in iter_rows(rows["queries"], needed=("id",)):
        content = _query(row, folder, videos, has_instruction=instruction is not None)
        # The released scorer counts a query that has no right video as not found.
        gains = dict.fromkeys(right.get(row.id("id"), []), 1) or {f"any video for {row.id('id')}": 1}
        query = Query(row.id("id"), content=content, instruction=instruction)
        draft.add(query, row.where, gains)
    draft.refuse_lost(f"the corpus of {name}", allowed=options.allow_missing)
    options.write(
        name,
        meta={
            "name": f"UVRB {name}",
            "benchmark": "uvrb",
            "source": f"{REPOSITORY}, imported by eval.benchmarks.releases.uvrb",
            "set": name,
            "num_frames": options.num_frames,
            "num_missing_positives": len(draft.lost),
        },
        queries=draft.queries,
        corpus=_corpus(corpus, videos),
        qrels=draft.qrels,
    )


def _corpus(rows: Mapping[str, Row], videos: "_Videos") -> Iterator[Candidate]:
    for name, row in rows.items():
        yield Candidate(name, content=(videos.find(row.text("video"), row),))


def _query(row: Row, folder: Path, videos: "_Videos", *, has_instruction: bool) -> Content:
    text, image, video = (
        (row.text(name) if row.get(name) else "").strip() for name in ("text", "image", "video")
    )
    words = (TextPart(text),) if text else ()
    if image:
        path = folder / "images" / image
        if not path.is_file():
            raise row.error("the picture does not exist", str(path))
        return (ImagePart(str(path)), *words)
    if video:
        return (*words, videos.find(video, row))
    if not words:
        raise row.error("it is empty, and so are image and video", "text")
    return words


class _Videos:
    """Videos of a set, as files or as folders of frames."""

    def __init__(self, folder: Path, num_frames: int):
        self.folder, self.num_frames = folder, num_frames

    def find(self, name: str, row: Row) -> VideoPart:
        """The frames that are shown of a video; a `ReleaseError` if it is missing."""
        frames = self.folder / "videos_frames" / Path(name).with_suffix("")
        if frames.is_dir():
            files = sorted(path for path in frames.iterdir() if path.suffix.lower() in FRAME_ENDINGS)
            if not files:
                raise row.error(f"it holds no frames ({', '.join(FRAME_ENDINGS)})", str(frames))
            return VideoPart(tuple(str(files[place]) for place in sampled(len(files), self.num_frames)))
        file = self.folder / "videos" / name
        if not file.is_file() or file.suffix.lower() in SUFFIXES:
            raise row.error(f"it is neither a folder of frames ({frames}) nor a file ({file})", name)
        return VideoPart(str(file), num_frames=self.num_frames)


def sampled(count: int, most: int) -> list[int]:
    """Frames that the released code shows of so many."""
    if count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most, dtype=int).tolist()


@dataclass(frozen=True)
class Uvrb(Protocol):
    """UVRB: hit@k, called R@k."""

    def main_metric(self, wanted: RetrievalSet) -> str:
        """Recall at 10 in CMRB, at 1 elsewhere."""
        return MAIN.get(str(wanted.meta.get("set")), self.headline[0])

    def figures(self, wanted: RetrievalSet, scored: Scored, *, seed: int) -> dict[str, Any]:
        """The set's main score; official also the released scorer's figures by its names."""
        found: dict[str, Any] = {"main_score": self.main_score(wanted, scored)}
        if self.profile == "official":
            value = means(scored.names, scored.value_QM)
            found["official"] = {f"Recall@{k}": round(value[f"hit@{k}"], 4) for k in CUTS}
        return found

    def suite_figures(self, results: Mapping[str, Results]) -> dict[str, Any]:
        """Main scores of all sets."""
        return {"main_scores": {name: result.main_score for name, result in results.items()}}


_STATEMENTS = ("hit@k: whether a right video is among the first k, called R@k by the benchmark",)
PROTOCOLS = (
    Uvrb("uvrb", "clean", ("hit@1", "hit@10"), _STATEMENTS),
    Uvrb("uvrb", "official", ("hit@1", "hit@10"), (
        *_STATEMENTS,
        "as the code of Embed-RL (75cfbba): queries without a right video count as not found; figures have four digits",
    )),
)  # fmt: skip
register_benchmark(Benchmark("uvrb", import_uvrb, PROTOCOLS))

"""Download the release of a benchmark from the Hugging Face hub, and check that it is complete.

    rge eval fetch mmeb|mmeb2|rmir|mmbright|pinpoint out=DIR [revision=COMMIT] [part=visdoc|video] [repo=OWNER/NAME]

All files of a repository come from one commit, recorded in ``fetch.json``. Repeating the command resumes an interrupted
download at the same commit. Archives of pictures are unpacked. The counts are compared with the published ones, which
leaderboards require (`eval.benchmarks.published_tables`); fewer are an error, or recorded in ``fetch.json`` with
partial=true.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eval.benchmarks.published_tables import COUNTED, published
from eval.benchmarks.release_files import ReleaseError, files_of_split, iter_rows
from eval.benchmarks.releases.mmbright import domains_of
from eval.benchmarks.releases.mmeb2 import DOCUMENTS
from eval.benchmarks.releases.mmeb2_video import MEMBERS, rows_of
from eval.benchmarks.releases.pinpoint import INDEX, TABLE
from rge.common.errors import UserError
from rge.common.files import write_json
from rge.common.mmeb_prompts import SETS
from rge.common.options import one_of
from rge.tables.rows import TABLES, num_rows
from rge.web.releases import FETCHED, Repositories, check_whole, fetch_release

_LONG_DOCUMENTS = {
    "ViDoSeek-doc": "ViDoSeek",
    "ViDoSeek-page": "ViDoSeek-page-fixed",
    "MMLongBench-doc": "MMLongBench-doc",
    "MMLongBench-page": "MMLongBench-page-fixed",
}


@dataclass
class FetchOptions:
    """Download the release of a benchmark from the Hugging Face hub, and check its counts."""

    benchmark: str
    """mmeb, mmeb2, rmir, mmbright or pinpoint; short form: `rge eval fetch mmeb`."""
    out: Path
    """Folder for the release; `rge eval import` takes it as src=."""
    part: Literal["image", "visdoc", "video"] = "image"
    """mmeb2: image, visdoc or video."""
    repo: str | None = None
    """Another repository with the same layout; null: the published one."""
    revision: str | None = None
    """Commit, tag or branch, for releases in one repository; null: the commit of an earlier call, else the newest."""
    partial: bool = False
    """Accept fewer queries or candidates than were published; fetch.json is marked, and boards do not rank the results."""


@dataclass(frozen=True)
class Release:
    """Location of a release, and how to count it."""

    repos: Repositories
    count: Callable[[Path], dict[str, dict[str, int]]] | None
    """Counts the download, by key of the published table; None if only the import can count it."""
    unpack: Mapping[str, str]
    """Archive -> target folder, both below ``out``; see `rge.web.releases.fetch_release`."""


def fetch(options: FetchOptions) -> Path:
    """Download, unpack and count; returns ``out``. A UserError if the release is incomplete."""
    part = f" part={options.part}" if options.benchmark == "mmeb2" else ""
    key = options.benchmark + part
    release = _release(options, key)
    about = fetch_release(options.out, key, release.repos, release.unpack, options.revision)
    counts = None if release.count is None else release.count(options.out)
    lacking = _lacking(counts or {})
    write_json(options.out / FETCHED, about | {"counts": counts, "partial": lacking})
    check_whole(options.out, lacking, partial=options.partial)
    for words in lacking:
        print(f"WARNING: partial: {words}", file=sys.stderr)
    tables = (
        ", ".join(f"{n:,} {COUNTED[key]}" for key, n in table.items()) for table in (counts or {}).values()
    )
    print(f"{options.out}: {'; '.join(tables) or 'counted on import'}")
    print(f"rge eval import {options.benchmark} src={options.out}{part} out=DIR")
    return options.out


def _release(options: FetchOptions, key: str) -> Release:
    one_of("benchmark", [options.benchmark], sorted({name.partition(" ")[0] for name in RELEASES}))
    release = RELEASES[key]
    for option in ("repo", "revision"):
        if getattr(options, option) is not None and len(release.repos) > 1:
            raise UserError(
                f"it is for a release in one repository; {key} is in {len(release.repos)}", key=option
            )
    if options.repo is not None:
        place = next(iter(release.repos.values()), ("", ()))
        return replace(release, repos={options.repo: place})
    if not release.repos:
        raise UserError(
            "PinPoint is not on the hub: clone github.com/pinterest/pinpoint-dataset, or pass OWNER/NAME of a copy"
            " on the hub",
            key="repo",
        )
    return release


def _repo_of(name: str) -> str:
    """Repository of a visual-document set, as in the released evaluation (6e1e1d4)."""
    if name in _LONG_DOCUMENTS:
        return f"VLM2Vec/{_LONG_DOCUMENTS[name]}"
    family, _, rest = name.partition("_")
    if family == "VisRAG":
        return f"openbmb/VisRAG-Ret-Test-{rest}"
    if DOCUMENTS[name][0] == "ViDoRe-V2":
        return f"vidore/{rest.removesuffix('_multilingual')}"
    sampled = "subsampled_" if rest in ("arxivqa", "docvqa", "infovqa", "tabfquad") else ""
    return f"vidore/{rest}_test_{sampled}beir"


def _count_mmeb(src: Path) -> dict[str, dict[str, int]]:
    rows = {
        name: sum(map(_num_rows, files_of_split(src / name, "test")))
        for name in SETS
        if (src / name).is_dir()
    }
    return {"mmeb": {"num_members": sum(num > 0 for num in rows.values()), "num_queries": sum(rows.values())}}


def _count_documents(src: Path) -> dict[str, dict[str, int]]:
    """Only sets are counted, since the release publishes no other counts for them."""
    return {"visdoc": {"num_members": sum(any((src / name).rglob("*.parquet")) for name in DOCUMENTS)}}


def _count_videos(src: Path) -> dict[str, dict[str, int]]:
    """Sets with their tables and frames, and queries of these; a `ReleaseError` if an archive has no folder of one of its sets."""
    root, rows = src / _FRAMES, []
    for name, member in MEMBERS.items():
        unpacked = root / member.folder.partition("/")[0]
        folder = member.frames(root)
        if folder is None and unpacked.is_dir():
            raise ReleaseError(
                f"its archive was unpacked, and has no folder of frames of {name} where the release has one ({member.folder}): this is "
                "another layout; unpack it by hand, and give frames= to `rge eval import`",
                unpacked,
                kind="layout",
            )
        if folder is not None and any(folder.iterdir()) and (src / name).is_dir():
            rows.append(sum(1 for _ in rows_of(src / name, member)))
    return {"video": {"num_members": len(rows), "num_queries": sum(rows)}}


def _count_mmbright(src: Path) -> dict[str, dict[str, int]]:
    counts = {}
    for key, folder in (("mmbright1", src / "examples"), ("mmbright2", src / "examples_multimodal")):
        num_queries = sum(map(_num_rows, folder.glob("[!.]*.parquet")))
        counts[key] = {"num_members": len(domains_of(folder)), "num_queries": num_queries}
    return counts


def _count_pinpoint(src: Path) -> dict[str, dict[str, int]]:
    index = src / INDEX
    lines = index.read_text("utf-8").splitlines() if index.is_file() else []
    num_candidates = len({line.strip() for line in lines} - {""})
    return {"pinpoint": {"num_queries": _num_rows(src / TABLE), "num_candidates": num_candidates}}


def _num_rows(path: Path) -> int:
    """Number of rows of a table; 0 if it does not exist."""
    if not path.is_file():
        return 0
    try:
        return num_rows(path) if path.suffix in (".parquet", ".jsonl") else sum(1 for _ in iter_rows(path))
    except UserError as error:
        error.reason += "; delete it and run the same command again"
        raise


def _lacking(counts_of: Mapping[str, Mapping[str, int]]) -> list[str]:
    expected = {key: table.counts for key, table in published().items()}
    expected["visdoc"] = {"num_members": len(DOCUMENTS)}
    num_queries = sum(member.num_queries for member in MEMBERS.values())
    expected["video"] = {"num_members": len(MEMBERS), "num_queries": num_queries}
    return [
        f"{number:,} of {expected[name][key]:,} {COUNTED[key]}"
        + (f" of {name}" if len(counts_of) > 1 else "")
        for name, counts in counts_of.items()
        for key, number in counts.items()
        if number < expected[name].get(key, 0)
    ]


_PICTURES = {"image-tasks/mmeb_v1.tar.gz": "image-tasks"}
_FRAMES = "video-tasks/frames"
_CLIPS = {  # two archives hold the folder that they unpack to
    f"{_FRAMES}/video_cls.tar.gz": f"{_FRAMES}/video_cls",
    f"{_FRAMES}/video_ret.tar.gz": f"{_FRAMES}/video_ret",
    f"{_FRAMES}/video_mret.tar.gz": _FRAMES,
    f"{_FRAMES}/video_qa.tar.gz": _FRAMES,
}
_TABLES = tuple(f"*{ending}" for ending in TABLES)
_TABLES_OF = {"K700": "VLM2Vec/Kinetics-700", "YouCook2": "lmms-lab/YouCook2"}
"""Repositories of sets whose tables are not in ``VLM2Vec/NAME``."""
RELEASES = {
    "mmeb": Release({"TIGER-Lab/MMEB-eval": ("", ())}, _count_mmeb, {"images.zip": "images"}),
    "mmeb2 part=image": Release(
        {"ziyjiang/MMEB_Test_Instruct": ("", ()), "TIGER-Lab/MMEB-V2": ("", tuple(_PICTURES))},
        _count_mmeb,
        _PICTURES,
    ),
    "mmeb2 part=video": Release(
        {_TABLES_OF.get(name, f"VLM2Vec/{name}"): (name, _TABLES) for name in MEMBERS}
        | {"TIGER-Lab/MMEB-V2": ("", (f"{_FRAMES}/*.tar.gz*",))},
        _count_videos,
        _CLIPS,
    ),
    "mmeb2 part=visdoc": Release({_repo_of(name): (name, ()) for name in DOCUMENTS}, _count_documents, {}),
    "rmir": Release({"amazon-science/rmir": ("", ())}, None, {}),
    "mmbright": Release({"mm-bright/MM-BRIGHT": ("", ())}, _count_mmbright, {}),
    "pinpoint": Release({}, _count_pinpoint, {}),
}
"""Benchmark, and part if it has several -> its release."""

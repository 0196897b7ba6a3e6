"""MMEB-V1: 36 sets of about 1,000 queries, each query with its own candidates of which the first is right.

Layout (``TIGER-Lab/MMEB-eval``, split test): a folder or file a set, Parquet or JSON lines, with ``qry_text``,
``qry_img_path``, ``tgt_text`` (a list) and ``tgt_img_path`` (a list); "" stands for a missing part, ``<|image_1|>`` in a
text for the picture; pictures below one folder.

The released scorers take candidate 0 as the answer and `argmax` as the prediction, so equal scores (a collapsed model, a
NaN) count as right. Here a candidate's id is a hash of its content: nothing says where it stood, equal candidates are one,
and ties are resolved against the model unless ``profile=official`` asks for the released rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    content_id,
    iter_rows,
)
from eval.benchmarks.suite import refuse_old_suite, write_suite
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.mmeb_prompts import INSTRUCTIONS, SETS, plain, reword
from rge.common.options import one_of

COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
APART = ("qry_inst", "tgt_inst")
"""Columns of a later release, whose texts lack their instructions."""


@dataclass
class MmebOptions(PictureOptions):
    """Make a suite of retrieval sets from the release of MMEB."""

    sets: tuple[str, ...] = ("all",)
    """Which sets, by name; all 36 by default."""
    images: Path | None = None
    """Folder that the image paths start from; null: src/images, src/MMEB-images, src."""
    instructions: str = "vlm2vec"
    """vlm2vec leaves the texts as released; rge rewords them as the released RGE evaluation does."""
    verbatim: bool = False
    """Keep every blank, line break and picture's place of the texts, as released code reads them: for `eval run as=release`."""


def import_mmeb(options: MmebOptions) -> list[str]:
    """Read MMEB's evaluation sets and write a suite; returns the names of its sets.

    Raises:
        UserError: a set is missing, a row has no candidates, or a picture is not there.
    """
    one_of("instructions", [options.instructions], INSTRUCTIONS)
    names = tuple(SETS) if options.sets == ("all",) else options.sets
    one_of("sets", names, tuple(SETS))
    files = {name: _file(options.src, name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise ReleaseError(
            f"{options.src} lacks {len(missing)} of {len(names)} sets: {', '.join(missing)}. The average of fewer than 36 "
            "is no MMEB score; sets=NAME,... imports some on purpose"
        )
    refuse_old_suite(options.out, options.overwrite)
    roots = [
        root
        for root in (options.images, options.src / "images", options.src / "MMEB-images", options.src)
        if root
    ]
    pictures = Pictures(roots)
    for name, file in files.items():
        assert file is not None
        _import_one(name, file, pictures, options)
    write_suite(
        options.out,
        name="MMEB" if len(names) == len(SETS) else f"MMEB, {len(names)} of {len(SETS)} sets",
        benchmark="mmeb",
        column="set",
        members={name: SETS[name] for name in names},
        instructions=options.instructions,
    )
    return list(names)


def _file(src: Path, name: str) -> Path | None:
    found = [
        *(src / name).glob("*.parquet"),
        *(src / name).glob("*.jsonl"),
        src / f"{name}.parquet",
        src / f"{name}.jsonl",
    ]
    found = [path for path in found if path.is_file()]
    tests = [path for path in found if "test" in path.name]
    if len(tests or found) > 1:
        raise ReleaseError(f"{src}: {', '.join(map(str, tests or found))} could all be {name}: leave one")
    return next(iter(tests or found), None)


def _import_one(name: str, file: Path, pictures: Pictures, options: MmebOptions) -> None:
    corpus: dict[str, tuple[str, str]] = {}
    queries: list[Query] = []
    qrels: list[tuple[str, str, int]] = []
    candidates: list[tuple[str, str]] = []
    num_equal = 0
    clean = _verbatim if options.verbatim else plain
    for number, row in enumerate(iter_rows(file)):
        lacking = [column for column in COLUMNS if column not in row]
        if lacking:
            raise ReleaseError(f"{file}: column {lacking[0]!r} is missing; there are {', '.join(row)}")
        if apart := [column for column in APART if row.get(column)]:
            raise ReleaseError(
                f"{file}: column {apart[0]!r} holds the instruction apart from the text, as the files of MMEB-V2 "
                "(MMEB_Test_Instruct) do; without it other texts would be embedded: give the files of MMEB-eval"
            )
        where = f"{file}, row {number + 1}"
        texts, paths = _targets(row, where)
        ids: list[str] = []
        for text, path in zip(texts, paths, strict=True):
            text = clean(text)
            if not text and not path:
                raise ReleaseError(f"{where}: candidate {len(ids)} has neither text nor picture")
            ids.append(content_id(text, path))
            corpus.setdefault(ids[-1], (text, path))
        text, path = clean(row["qry_text"]), row["qry_img_path"] or ""
        query = f"{name}-{number:05d}"
        queries.append(
            Query(
                id=query,
                text=reword(name, text, "query") if options.instructions == "rge" else text,
                images=(_picture(pictures, path, where),) if path else (),
                category=None,
                group=content_id(path or text),
            )
        )
        own = list(dict.fromkeys(ids))
        num_equal += len(own) < len(ids)
        qrels.append((query, ids[0], 1))
        candidates += [(query, one) for one in own]
    if not queries:
        raise ReleaseError(f"{file} has no rows")

    def rows() -> Any:
        for one in sorted(corpus):
            text, path = corpus[one]
            if options.instructions == "rge" and text:
                text = reword(name, text, "candidate")
            yield Candidate(
                one, text or None, _picture(pictures, path, f"{file}: candidate") if path else None
            )

    write_set(
        options.out / name,
        meta={
            "name": f"MMEB {name}",
            "benchmark": "mmeb",
            "source": "TIGER-Lab/MMEB-eval, imported by eval.benchmarks.mmeb.importer",
            "instructions": options.instructions,
            # the texts carry their instructions already: the checkpoint's own wording must not be put around them
            "prompts": "verbatim" if options.verbatim else "plain",
            "verbatim": options.verbatim or None,
            "queries_with_equal_candidates": num_equal,
            **SETS[name],
        },
        queries=queries,
        corpus=rows(),
        qrels=qrels,
        candidates=candidates,
        embed=options.pictures == "embed",
        decode=options.decode,
        overwrite=options.overwrite,
    )


def _verbatim(text: str | None) -> str:
    return text or ""


def _targets(row: dict[str, Any], where: str) -> tuple[Sequence[str], Sequence[str]]:
    texts = [one or "" for one in _cells(row["tgt_text"])]
    paths = [one or "" for one in _cells(row["tgt_img_path"])]
    # a set without pictures (or texts) may leave that list empty or short
    size = max(len(texts), len(paths))
    if size == 0:
        raise ReleaseError(f"{where}: no candidates")
    if min(len(texts), len(paths)) not in (size, 0):
        raise ReleaseError(f"{where}: {len(texts)} texts and {len(paths)} pictures for the candidates")
    return texts or [""] * size, paths or [""] * size


def _cells(value: Any) -> list[Any]:
    return [value] if value == "" else as_list(value)


def _picture(pictures: Pictures, path: str, where: str) -> bytes | Path:
    found = pictures.find(path, by_stem=False)
    if found is None:
        raise ReleaseError(
            f"{where}: picture {path!r} is in none of {', '.join(map(str, pictures.roots))}: unpack images.zip and give "
            "images=DIR"
        )
    return found

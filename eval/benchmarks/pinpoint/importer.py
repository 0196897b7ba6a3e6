"""PinPoint (pinterest/pinpoint-dataset): one or two pictures and an instruction in, pictures out of one index.

Layout: ``pinpoint_licensed.parquet`` (query_id, instruction, query_image_signature, query_image_signature2,
positive_candidates, negative_candidates, is_single), ``index_signatures.txt``, and pictures named by their signature.

What the shipped table holds and a plain reading would get wrong:

- an absent second picture is the *string* "None"; ``is_single`` disagrees with it in places, so the signature decides;
- lists of candidates hold duplicates, and "None" among the negatives;
- some candidates are positive and negative of one query;
- the query's own picture is in the index, and often listed as a negative;
- rows that share their pictures are paraphrases only where they also share their positives.

The set holds each judgement once. The lengths of the lists as shipped, by which the released scorer divides, are kept
beside them (``num_listed_positives``, ``num_listed_negatives``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    column_names,
    content_id,
    iter_rows,
    some,
)
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query, write_set

TABLE, INDEX = "pinpoint_licensed.parquet", "index_signatures.txt"
COLUMNS = ("query_id", "instruction", "query_image_signature", "positive_candidates", "negative_candidates")
SINGLE, MULTI = "one image", "two images"


@dataclass
class PinpointOptions(PictureOptions):
    """Make a retrieval set from the release of PinPoint."""

    images: Path | None = None
    """Folder of pictures named SIGNATURE.jpg, at any depth; null: src/images."""
    manifest: Path | None = None
    """Table of id and path, where pictures have other names."""
    instruction: str | None = None
    """Task instruction put before each query's own; null: none, as released."""
    allow_missing: bool = False
    """Accept positives that are not in the index; they stay in every denominator."""
    exclude_query_image: bool = False
    """Take a query's own pictures out of its ranking; the released retrieval does not."""


def import_pinpoint(options: PinpointOptions) -> RetrievalSet:
    """Read the release and write a retrieval set.

    Raises:
        UserError: a file or column is missing, ids repeat, or positives are not in the index.
    """
    table, index_file = options.src / TABLE, options.src / INDEX
    for path in (table, index_file):
        if not path.is_file():
            raise ReleaseError(f"{path} is not there: src must be a clone of pinterest/pinpoint-dataset")
    names = column_names(table)
    lacking = [name for name in COLUMNS if name not in names]
    if lacking:
        raise ReleaseError(f"{table}: column {lacking[0]!r} is missing; there are {', '.join(names)}")
    index = dict.fromkeys(line.strip() for line in index_file.read_text("utf-8").splitlines() if line.strip())
    pictures = Pictures([options.images or options.src / "images", options.src], options.manifest)

    queries: list[Query] = []
    qrels: list[tuple[str, str, int]] = []
    negatives: list[tuple[str, str]] = []
    excluded: list[tuple[str, str]] = []
    lost: list[str] = []
    count = dict.fromkeys(
        (
            "rows_without_positives",
            "duplicate_positives",
            "rows_with_none_negatives",
            "rows_with_both",
            "negatives_outside_index",
            "own_image_negative",
            "own_image_positive",
            "is_single_disagrees",
        ),
        0,
    )
    seen: set[str] = set()
    for row in iter_rows(table):
        name = normalised_id(row["query_id"])
        if name in seen:
            raise ReleaseError(f"{table}: query {name!r} occurs twice")
        seen.add(name)
        listed_right, listed_wrong = as_list(row["positive_candidates"]), as_list(row["negative_candidates"])
        right = _distinct(listed_right)
        wrong = _distinct(listed_wrong)
        own = _distinct([row["query_image_signature"], row.get("query_image_signature2")])
        if not own:
            raise ReleaseError(f"{table}: query {name!r} has no picture")
        count["duplicate_positives"] += len(right) < len(listed_right)
        count["rows_with_none_negatives"] += any(_is_none(one) for one in listed_wrong)
        count["rows_with_both"] += bool(set(right) & set(wrong))
        count["own_image_negative"] += bool(set(own) & set(wrong))
        count["own_image_positive"] += bool(set(own) & set(right))
        if row.get("is_single") is not None:
            count["is_single_disagrees"] += bool(row["is_single"]) != (len(own) == 1)
        if not right:
            count["rows_without_positives"] += 1
            continue
        absent = [one for one in right if one not in index]
        lost += [f"{name}: {one}" for one in absent]
        count["negatives_outside_index"] += sum(one not in index for one in wrong)
        queries.append(
            Query(
                id=name,
                text=row["instruction"],
                images=tuple(_picture(pictures, one, options) for one in own),
                category=None,
                group="+".join(own),
                instruction=options.instruction,
                columns={
                    "images": SINGLE if len(own) == 1 else MULTI,
                    "picture_ids": "+".join(own),
                    "paraphrase": content_id(*own, *sorted(right)),
                    "num_listed_positives": len(listed_right),
                    "num_listed_negatives": len(listed_wrong),
                    "num_missing_positives": len(absent),
                },
            )
        )
        qrels += [(name, one, 1) for one in right if one in index]
        negatives += [(name, one) for one in wrong if one in index]
        excluded += [(name, one) for one in own if one in index and one not in right]
    if lost and not options.allow_missing:
        raise ReleaseError(
            f"{len(lost)} positives are not in {index_file} ({len(index)} pictures): {some(lost)}. allow_missing=true "
            "keeps them in every denominator"
        )

    def corpus() -> Iterator[Candidate]:
        for one in index:
            yield Candidate(id=one, image=_picture(pictures, one, options))

    return write_set(
        options.out,
        meta={
            "name": "PinPoint",
            "benchmark": "pinpoint",
            "source": "pinterest/pinpoint-dataset, imported by eval.benchmarks.pinpoint.importer",
            "report_by": ["images"],
            "as_shipped": count,
            "num_missing_positives": len(lost),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=queries,
        corpus=corpus(),
        qrels=qrels,
        negatives=negatives,
        excluded=excluded if options.exclude_query_image else None,
        embed=options.pictures == "embed",
        decode=options.decode,
        overwrite=options.overwrite,
    )


def normalised_id(value: Any) -> str:
    """Query id as the released scorer looks it up: ``query_`` dropped, five digits."""
    return str(value).removeprefix("query_").zfill(5)


def _is_none(value: Any) -> bool:
    return value is None or str(value).strip() in ("", "None", "nan")


def _distinct(values: list[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if not _is_none(value)))


def _picture(pictures: Pictures, name: str, options: PinpointOptions) -> bytes | Path:
    found = pictures.find(name, by_stem=True)
    if found is None:
        raise ReleaseError(
            f"picture {name!r} is not below {options.images or options.src / 'images'}: fetch it with the release's "
            "own tools, then give images=DIR or manifest=FILE"
        )
    return found

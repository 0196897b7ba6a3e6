"""PinPoint (pinterest/pinpoint-dataset): queries of one or two pictures and an instruction over one index of pictures.

Layout: ``pinpoint_licensed.parquet`` (query_id, instruction, query_image_signature, query_image_signature2,
positive_candidates, negative_candidates, is_single), ``index_signatures.txt``, and pictures named by their signature.

Pitfalls of the shipped table:

- a missing second picture is the *string* "None"; ``is_single`` sometimes contradicts it, so the signature decides;
- lists of candidates have duplicates, and "None" among the negatives;
- some candidates are both positive and negative for a query;
- the query's own picture is in the index, and often listed as a negative;
- rows with the same pictures are paraphrases only if they also have the same positives.

The set holds each judgement once. The original lengths of the lists, by which the released scorer divides, are kept in
``num_listed_positives`` and ``num_listed_negatives``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    Draft,
    PictureOptions,
    Pictures,
    ReleaseError,
    Row,
    as_list,
    content_id,
    iter_rows,
)
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query

TABLE, INDEX = "pinpoint_licensed.parquet", "index_signatures.txt"
COLUMNS = ("query_id", "instruction", "query_image_signature", "positive_candidates", "negative_candidates")


@dataclass
class PinpointOptions(PictureOptions):
    """Make a retrieval set from the release of PinPoint."""

    images: Path | None = None
    """Folder of pictures named SIGNATURE.jpg, at any depth; null: src/images."""
    manifest: Path | None = None
    """Table of id and path, if pictures have other names."""
    instruction: str | None = None
    """Task instruction put before each query's own; null: none, as released."""
    allow_missing: bool = False
    """Accept positives that are not in the index; they still count in every denominator."""
    exclude_query_image: bool = False
    """Remove a query's own pictures from its ranking; the released retrieval does not."""


def import_pinpoint(options: PinpointOptions) -> RetrievalSet:
    """Read the release and write a retrieval set."""
    table, index_file = options.src / TABLE, options.src / INDEX
    for path in (table, index_file):
        if not path.is_file():
            raise ReleaseError(f"{path} does not exist: src must be a clone of pinterest/pinpoint-dataset")
    index = dict.fromkeys(line.strip() for line in index_file.read_text("utf-8").splitlines() if line.strip())
    pictures = Pictures(
        options.images or options.src / "images", options.src, manifest=options.manifest,
        hint="download it with the release's tools, then pass images=DIR or manifest=FILE",
    )  # fmt: skip
    draft = Draft(index)
    for row in iter_rows(table, needed=COLUMNS):
        query, right, wrong = _query(row, pictures, options.instruction)
        if right:
            own = str(query.columns["picture_ids"]).split("+")
            draft.add(query, row.where, dict.fromkeys(right, 1), wrong, own)
    draft.refuse_lost(f"{index_file} ({len(index)} pictures)", allowed=options.allow_missing)
    return options.write(
        meta={
            "name": "PinPoint",
            "benchmark": "pinpoint",
            "source": "pinterest/pinpoint-dataset, imported by eval.benchmarks.pinpoint.importer",
            "report_by": ["images"],
            "num_missing_positives": len(draft.lost),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=draft.queries,
        corpus=(Candidate(id=name, image=pictures.find(name, by_stem=True)) for name in index),
        qrels=draft.qrels,
        negatives=draft.negatives,
        excluded=draft.excluded if options.exclude_query_image else None,
    )


def _query(row: Row, pictures: Pictures, instruction: str | None) -> tuple[Query, list[str], list[str]]:
    """A row's query, with its positives and negatives, each once."""
    name = str(row["query_id"]).removeprefix("query_").zfill(5)  # as the released scorer normalises it
    listed_right, listed_wrong = as_list(row["positive_candidates"]), as_list(row["negative_candidates"])
    own = _distinct([row["query_image_signature"], row.get("query_image_signature2")])
    if not own:
        raise row.error(f"query {name!r} has no picture")
    right = _distinct(listed_right)
    query = Query(
        id=name,
        text=row.text("instruction"),
        images=tuple(pictures.find(signature, by_stem=True) for signature in own),
        group="+".join(own),
        instruction=instruction,
        columns={
            "images": "one image" if len(own) == 1 else "two images",
            "picture_ids": "+".join(own),
            "paraphrase": content_id(*own, *sorted(right)),
            "num_listed_positives": len(listed_right),
            "num_listed_negatives": len(listed_wrong),
        },
    )
    return query, right, _distinct(listed_wrong)


def _distinct(values: list[Any]) -> list[str]:
    """Names without repeats and without the ways in which the table writes a missing one."""
    names = dict.fromkeys(str(value) for value in values)
    return [name for name in names if name.strip() not in ("", "None", "nan")]

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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import (
    Draft,
    PictureOptions,
    Pictures,
    ReleaseError,
    as_list,
    column_names,
    content_id,
    iter_rows,
    need_columns,
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
    """Read the release and write a retrieval set.

    Raises:
        UserError: a file or column is missing, ids repeat, or positives are not in the index.
    """
    table, index_file = options.src / TABLE, options.src / INDEX
    for path in (table, index_file):
        if not path.is_file():
            raise ReleaseError(f"{path} does not exist: src must be a clone of pinterest/pinpoint-dataset")
    need_columns(table, column_names(table), COLUMNS)
    index = dict.fromkeys(line.strip() for line in index_file.read_text("utf-8").splitlines() if line.strip())
    pictures = Pictures([options.images or options.src / "images", options.src], options.manifest)
    draft, count = Draft(index), Counter[str]()
    seen: set[str] = set()
    for record in iter_rows(table):
        row = _Row.read(record, table)
        if row.name in seen:
            raise ReleaseError(f"{table}: query {row.name!r} occurs twice")
        seen.add(row.name)
        count.update(row.oddities(index))
        if row.right:
            num_missing = draft.judge(row.name, dict.fromkeys(row.right, 1), row.wrong, row.own)
            draft.queries.append(_query(row, num_missing, pictures, options))
    draft.refuse_lost(f"{index_file} ({len(index)} pictures)", allowed=options.allow_missing)
    return options.write(
        meta={
            "name": "PinPoint",
            "benchmark": "pinpoint",
            "source": "pinterest/pinpoint-dataset, imported by eval.benchmarks.pinpoint.importer",
            "report_by": ["images"],
            "as_shipped": count,
            "num_missing_positives": len(draft.lost),
            "exclude_query_image": options.exclude_query_image,
        },
        queries=draft.queries,
        corpus=(Candidate(id=name, image=_picture(pictures, name, options)) for name in index),
        qrels=draft.qrels,
        negatives=draft.negatives,
        excluded=draft.excluded if options.exclude_query_image else None,
    )


@dataclass(frozen=True)
class _Row:
    """A row of the table: its lists as shipped and without duplicates."""

    name: str
    text: str
    own: list[str]
    right: list[str]
    wrong: list[str]
    listed_right: list[Any]
    listed_wrong: list[Any]
    is_single: Any

    @classmethod
    def read(cls, row: Mapping[str, Any], table: Path) -> "_Row":
        name = str(row["query_id"]).removeprefix("query_").zfill(5)  # as the released scorer normalises it
        right, wrong = as_list(row["positive_candidates"]), as_list(row["negative_candidates"])
        own = _distinct([row["query_image_signature"], row.get("query_image_signature2")])
        if not own:
            raise ReleaseError(f"{table}: query {name!r} has no picture")
        text, single = row["instruction"], row.get("is_single")
        return cls(name, text, own, _distinct(right), _distinct(wrong), right, wrong, single)

    def oddities(self, index: Mapping[str, None]) -> dict[str, int]:
        """Counts of this row's irregularities."""
        own, right, wrong = set(self.own), set(self.right), set(self.wrong)
        return {
            "rows_without_positives": not right,
            "duplicate_positives": len(right) < len(self.listed_right),
            "rows_with_none_negatives": any(map(_is_none, self.listed_wrong)),
            "rows_with_both": bool(right & wrong),
            "negatives_outside_index": len(wrong - index.keys()) if right else 0,
            "own_image_negative": bool(own & wrong),
            "own_image_positive": bool(own & right),
            "is_single_disagrees": self.is_single is not None and bool(self.is_single) != (len(own) == 1),
        }


def _query(row: _Row, num_missing: int, pictures: Pictures, options: PinpointOptions) -> Query:
    return Query(
        id=row.name,
        text=row.text,
        images=tuple(_picture(pictures, name, options) for name in row.own),
        group="+".join(row.own),
        instruction=options.instruction,
        columns={
            "images": "one image" if len(row.own) == 1 else "two images",
            "picture_ids": "+".join(row.own),
            "paraphrase": content_id(*row.own, *sorted(row.right)),
            "num_listed_positives": len(row.listed_right),
            "num_listed_negatives": len(row.listed_wrong),
            "num_missing_positives": num_missing,
        },
    )


def _is_none(value: Any) -> bool:
    return value is None or str(value).strip() in ("", "None", "nan")


def _distinct(values: list[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if not _is_none(value)))


def _picture(pictures: Pictures, name: str, options: PinpointOptions) -> bytes | Path:
    picture = pictures.find(name, by_stem=True)
    if picture is None:
        raise ReleaseError(
            f"picture {name!r} is not below {options.images or options.src / 'images'}: download it with the release's "
            "tools, then pass images=DIR or manifest=FILE"
        )
    return picture

"""``rge data download``: fetch pictures that records name by web address.

Training reads no web address: a run would depend on other people's servers, and each epoch would fetch every picture again. The
command stores each picture once in ``out/pictures`` and writes ``out/<name>.jsonl``, whose records name the files. It resumes:
pictures that are there are not fetched again.
"""

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_prep.rmir.config import DownloadConfig
from data_prep.rmir.pictures.download import Lost, fetch, is_address, local_path, without_secrets
from rge.common.errors import UserError
from rge.common.files import relative, replacing
from rge.common.options import Quoting, parse_options
from rge.common.parts import ImageRef, are_bytes, picture_of
from rge.data.sources import json_line
from rge.tables.names import resolved
from rge.tables.rows import TABLES, TableFormat, table_rows

SHOWN = 10
"""Pictures that could not be fetched and are printed."""


@dataclass
class DownloadOptions:
    """Fetch pictures that records or the rows of a table name by web address, and write records that name files."""

    records: Path
    """A file of records, or a table: .jsonl, .json, .csv, .tsv, .xlsx or .parquet."""
    out: Path
    """Folder to write to."""
    fields: tuple[str, ...] = ("query.images", "positives.image", "negatives.image")
    """Fields or columns with pictures; a dot selects a part."""
    quoting: Quoting = "auto"
    """Whether quotation marks enclose cells of a CSV or TSV (``quoted``) or belong to the text (``none``); ``auto``: what its
    lines show, and an error if that is unclear."""
    sheet: str | None = None
    """Sheet of a workbook; null: the only one that is not empty."""
    missing: Literal["error", "drop"] = "error"
    """If pictures cannot be fetched: error, or drop their records and count them."""
    download: DownloadConfig = field(default_factory=DownloadConfig)


def main(words: Sequence[str]) -> None:
    """Fetch, and print the counts."""
    counts = run(parse_options(DownloadOptions, words, "rge data download"))
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))


def run(options: DownloadOptions) -> Counter[str]:
    """Write ``out/pictures`` and ``out/<name>.jsonl``.

    Returns:
        How many pictures and records there are, and how many records were dropped.

    Raises:
        UserError: no field has a picture, a picture is none, or, with ``missing=error``, one cannot be fetched.
    """
    source, pictures = options.records, options.out / "pictures"
    if not str(source).lower().endswith(TABLES):
        raise UserError(f"it must end in {', '.join(TABLES)}", source, key="records")
    target = options.out / f"{source.stem}.jsonl"
    if target.resolve() == source.resolve():
        raise UserError(f"it is the folder of {source}, which would be overwritten", options.out, key="out")
    form = TableFormat(options.quoting, options.sheet)
    # Two passes, so that a table may be larger than memory: the addresses are all that is kept.
    addresses = {
        ref: None
        for row in table_rows(source, form=form)
        for _, _, ref in _pictures(row, options)
        if is_address(_text(ref))
    }
    lost = fetch([str(ref) for ref in addresses], pictures, options.download, progress=True)
    if lost and options.missing == "error":
        raise UserError(_listed(lost), kind="lost")
    counts = Counter(pictures=len(addresses) - len(lost), records=0)
    with replacing(target) as waiting, waiting.open("w", encoding="utf-8") as lines:
        for row in table_rows(source, form=form):
            shown = list(_pictures(row, options))
            if any(_text(ref) in lost for _, _, ref in shown):
                counts["records dropped, whose pictures cannot be fetched"] += 1
                continue
            for holder, key, ref in shown:
                holder[key] = _reference(ref, source.parent, pictures, options.out)
            counts["records"] += 1
            try:
                lines.write(json_line(row))
            except TypeError as error:
                raise UserError(f"a value cannot be written as JSON: {error}", source) from None
        if not counts["records"]:
            raise UserError(f"no record is left ({dict(counts)})", source)
    if lost:
        print(_listed(lost))
    return counts


def _text(ref: ImageRef) -> str | None:
    return ref if isinstance(ref, str) else None


def _reference(ref: ImageRef, folder: Path, pictures: Path, out: Path) -> str:
    """How a record in `out` refers to a picture: a file, or base64 of bytes, which JSON cannot hold otherwise."""
    if isinstance(ref, bytes):
        return base64.b64encode(ref).decode()
    if is_address(ref):
        return relative(local_path(ref, pictures), out)
    return ref if "://" in ref else relative(Path(resolved(ref, str(folder))), out)


def _listed(lost: dict[str, Lost]) -> str:
    shown = [f"  {without_secrets(url)}: {why}" for url, why in list(lost.items())[:SHOWN]]
    more = [f"  and {len(lost) - SHOWN:,} more"] if len(lost) > SHOWN else []
    head = f"{len(lost):,} pictures cannot be fetched; the same command tries them again, missing=drop leaves their records out:"
    return "\n".join([head, *shown, *more])


def _pictures(row: dict[str, Any], options: DownloadOptions) -> Iterator[tuple[Any, Any, ImageRef]]:
    """Each picture of a row, with the mapping or list that contains it and its place there."""
    found = False
    for name in options.fields:
        parts = [name] if name in row else name.split(".")
        for holder, key in _places(row, parts):
            found = True
            try:
                ref = picture_of(holder[key])
            except ValueError as error:
                raise UserError(str(error), options.records, key=name) from None
            if ref is not None:
                yield holder, key, ref
    if not found:
        raise UserError(
            f"a row has none of them; fields= names those with pictures. It has {', '.join(map(str, row))}",
            options.records,
            key=", ".join(options.fields),
        )


def _places(value: Any, parts: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Mappings and lists below `value` with the keys of what the parts of a name lead to, one for each picture."""
    if isinstance(value, list):
        for one in value:
            yield from _places(one, parts)
    elif isinstance(value, dict) and parts[0] in value:
        first, *rest = parts
        inner = value[first]
        if rest:
            yield from _places(inner, rest)
        elif isinstance(inner, list) and not are_bytes(inner):
            yield from ((inner, number) for number in range(len(inner)))
        else:
            yield value, first

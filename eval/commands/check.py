"""Check a retrieval set before evaluation: unreadable pictures, and properties that make its figures less meaningful.

    rge eval check set=DIR

Prints counts, caveats and the table that papers print of their data (by category, or by member of a suite); for a set that
cannot be evaluated, an error lists all problems.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from eval.benchmarks.suite import is_suite, load_suite
from eval.sets.contents import Contents, contents_of, with_content
from eval.sets.retrieval_set import RetrievalSet, load_set
from eval.sets.tables import SetError
from rge.common.commands import progress_bar
from rge.common.images import ImageError, load_image
from rge.common.registry import PluginOptions
from rge.common.schema import Item
from rge.stats.intervals import few_groups

MAX_LISTED = 10
"""Unreadable items listed in the error."""
SMALL_CATEGORY = 10
"""With fewer queries, a category's figure is not reliable."""
ALL = "all"
"""Row of a whole set or suite."""
COUNTS = ("queries", "candidates", "with picture")
"""Columns that are no means."""


@dataclass
class CheckOptions(PluginOptions):
    """Open every picture of a set, count its items, and warn about what may distort its figures."""

    set: Path
    """Retrieval set directory, or a suite of them."""


def check(options: CheckOptions) -> None:
    """Check and print a set, or each member of a suite; a SetError lists all violations and unreadable pictures."""
    members = load_suite(options.set).members if is_suite(options.set) else None
    tables: dict[str, pd.DataFrame] = {}
    for name in members or [""]:
        checked = check_set(options.set / name)
        tables[name] = checked.table
        lines = [*checked.lines, *(f"caveat: {line}" for line in checked.caveats)]
        print("\n".join(lines), flush=True)
    table = tables[""] if members is None else of_members(tables)
    shown = table.to_string(na_rep="", float_format="{:,.1f}".format)
    print(f"\nmeans a query (right, wrong, pictures, words) and a candidate (words)\n{shown}", flush=True)


class Checked(NamedTuple):
    """A readable set: its summary, caveats for readers of its figures, and its table, see `_table`."""

    lines: list[str]
    caveats: list[str]
    table: pd.DataFrame


def check_set(path: Path) -> Checked:
    """Read all content of a set; a SetError lists all items that cannot be read."""
    wanted = load_set(path)
    pool = progress_bar(
        wanted.corpus_items(), desc="candidates", total=len(wanted.corpus_ids), unit="item", delay=2
    )
    bad: list[str] = []
    candidates, queries = _count(pool, "candidate", bad), _count(wanted.queries, "query", bad)
    if bad:
        more = f"\nand {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise SetError(f"{len(bad)} items cannot be read:\n" + "\n".join(bad[:MAX_LISTED]) + more, path)
    contents = contents_of(wanted, ["both"])
    rights = [len(rows) for rows, _ in wanted.positives]
    each = " to ".join(map(str, sorted({min(rights), max(rights)})))
    lines = [
        f"{wanted.path}: {wanted.name}",
        f"{len(wanted.queries)} queries ({queries['pictures']} with pictures, {queries['text']} with text) in "
        f"{len(set(wanted.columns['group']))} groups, {sum(rights)} right answers, {each} per query",
        f"{len(wanted.corpus_ids)} candidates ({candidates['pictures']} with pictures, {candidates['text']} with text)",
        f"fingerprint {wanted.fingerprint}",
        f"content     {with_content(wanted, contents.candidates).content}",
    ]
    return Checked(
        lines, [*wanted.meta.get("notes", []), *_caveats(wanted, contents)], _table(wanted, candidates)
    )


def _table(wanted: RetrievalSet, candidates: Counter[str]) -> pd.DataFrame:
    """A row for each category, if there are several, and one for all queries, the last, with the pool's columns."""
    num = len(wanted.queries)
    each = pd.DataFrame(
        {
            "queries": np.ones(num),
            "right": [len(rows) for rows, _ in wanted.positives],
            "wrong": [len(rows) for rows in wanted.negatives] if wanted.negatives else np.nan,
            "pictures": [len(query.pictures) for query in wanted.queries],
            "words": [_num_words(query) for query in wanted.queries],
        }
    )
    grouped = each.groupby(np.array(wanted.columns["category"], object), sort=True)
    table = grouped.mean().assign(queries=grouped.size())
    table = table if len(table) > 1 else table.iloc[:0]
    pool = len(wanted.corpus_ids)
    table.loc[ALL] = {**each.mean(), "queries": num}
    counts = {
        "candidates": pool,
        "with picture": candidates["pictures"],
        "candidate words": candidates["words"] / pool,
    }
    for name, value in counts.items():
        table.loc[ALL, name] = value
    return table.astype(dict.fromkeys(COUNTS, "Int64"))


def of_members(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The table of a suite: a row for each member, and all of them, whose means are over queries and candidates."""
    table = pd.concat({name: one.loc[[ALL]] for name, one in tables.items()}).droplevel(1)
    queries, pool = table["queries"].astype(float), table["candidates"].astype(float)
    whole: dict[str, Any] = {name: table[name].sum() for name in COUNTS}
    for name in ("right", "wrong", "pictures", "words"):
        whole[name] = (table[name] * queries).sum(skipna=False) / queries.sum()
    whole["candidate words"] = (table["candidate words"] * pool).sum() / pool.sum()
    table.loc[ALL] = whole
    return table.astype(dict.fromkeys(COUNTS, "Int64"))


def _num_words(item: Item) -> int:
    return len((item.text or "").split())


def _count(items: Iterable[Item], side: str, bad: list[str]) -> Counter[str]:
    """Open all pictures and count words, and items with pictures and with text; unreadable items are added to `bad`."""
    counts = Counter[str]()
    for item in items:
        counts.update(pictures=bool(item.pictures), text=bool(item.text), words=_num_words(item))
        try:
            for ref in item.pictures:
                load_image(ref)
        except ImageError as error:
            bad.append(f"{side} {item.id!r}: {error}")
    return counts


def _caveats(wanted: RetrievalSet, contents: Contents) -> Iterator[str]:
    ids_of: dict[str, list[str]] = defaultdict(list)
    for row, digest in zip(wanted.file_order_C.tolist(), contents.candidates, strict=True):
        ids_of[digest].append(wanted.corpus_ids[row])
    copies = [ids for ids in ids_of.values() if len(ids) > 1]
    if copies:
        first, other = copies[0][:2]
        yield (
            f"{sum(map(len, copies))} candidates are copies of another, e.g. {first!r} and {other!r}: equal scores are "
            "ordered by id"
        )
    yield from _copy_of_right(wanted, copies)
    judged = zip(wanted.query_ids, wanted.positives, wanted.negatives or [], strict=False)
    if both := [query for query, (right, _), wrong in judged if np.intersect1d(right, wrong).size]:
        yield f"{len(both)} queries have a candidate that is both right and wrong, first {both[0]!r}"
    asked = contents.queries["both"]
    if twice := len(asked) - len(set(asked)):
        yield f"{twice} queries are exact copies of another"
    yield from _shared_pictures(wanted, contents)
    if caution := few_groups(len(set(wanted.columns["group"]))):
        yield caution
    counts = Counter(wanted.columns["category"])
    small = [repr(name) for name, count in counts.items() if count < SMALL_CATEGORY and len(counts) > 1]
    if small:
        yield f"fewer than {SMALL_CATEGORY} queries in {', '.join(small[:5])}"
    excluded = wanted.excluded or [np.array([], np.int64)] * len(contents.own)
    own = sum(len(np.setdiff1d(*rows)) > 0 for rows in zip(contents.own, excluded, strict=True))
    if own and wanted.candidates is None:
        yield f"{own} queries have their own picture in the pool, where it ranks first; exclude it with excluded.parquet"


def _copy_of_right(wanted: RetrievalSet, copies: Sequence[Sequence[str]]) -> Iterator[str]:
    copies_of = {name: ids for ids in copies for name in ids}
    for query, (rows, _) in zip(wanted.query_ids, wanted.positives, strict=True):
        right = {wanted.corpus_ids[row] for row in rows.tolist()}
        if wrong := [copy for name in right for copy in copies_of.get(name, ()) if copy not in right]:
            yield f"query {query!r}: {min(wrong)!r} is a copy of a right answer but counts as wrong"
            return


def _shared_pictures(wanted: RetrievalSet, contents: Contents) -> Iterator[str]:
    group_of: dict[str, str] = {}
    rows = zip(wanted.query_ids, contents.pictures, wanted.columns["group"], strict=True)
    for query, pictures, group in rows:
        if any(group_of.setdefault(picture, group) != group for picture in pictures):
            yield (
                f"query {query!r} shares a picture with another group: put both in one group, or intervals will be too "
                "narrow"
            )
            return

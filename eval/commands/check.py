"""Look a retrieval set over before a model is asked: every picture, and what would make its figures mean little.

    rge eval check set=DIR

Prints counts and caveats; a set that cannot be evaluated ends with an error that lists all that is wrong.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from eval.benchmarks.suite import is_suite, load_suite
from eval.sets.retrieval_set import RetrievalSet, SetError, content_digest, load_set, with_content
from rge.common.commands import progress_bar
from rge.common.images import ImageError, load_image
from rge.common.registry import PluginOptions
from rge.common.schema import Item

MOST = 10
"""Problems of one kind that are listed."""
FEW_GROUPS = 30
"""Fewer independent groups than this and an interval says little."""
SMALL_CATEGORY = 10
"""Fewer queries than this and a category's own figure says little."""


@dataclass
class CheckOptions(PluginOptions):
    """Open every picture of a set, count, and say what may distort its figures."""

    set: Path
    """Retrieval set directory, or a suite of them."""


@dataclass(frozen=True)
class Checked:
    """What was found.

    Attributes:
        wanted: the set, with its content.
        lines: what there is.
        caveats: what a reader of figures on this set has to know.
    """

    wanted: RetrievalSet
    lines: list[str]
    caveats: list[str]


def check(options: CheckOptions) -> list[Checked]:
    """Check and print; a suite member by member.

    Raises:
        SetError: the set breaks the format, or pictures cannot be opened; all of those are listed.
    """
    paths = [options.set]
    if is_suite(options.set):
        paths = [options.set / name for name in load_suite(options.set).members]
    found = []
    for path in paths:
        one = check_set(path)
        print("\n".join([*one.lines, *(f"caveat: {line}" for line in one.caveats)]), flush=True)
        found.append(one)
    return found


def check_set(path: Path) -> Checked:
    """Read everything that a set has.

    Raises:
        SetError: see `check`.
    """
    wanted = load_set(path)
    bad: list[str] = []
    rows_of: dict[str, list[str]] = defaultdict(list)
    digests, pictured, worded = [], 0, 0
    for item in progress_bar(
        wanted.corpus_items(), desc="candidates", total=len(wanted.corpus_ids), unit="item", delay=2
    ):
        digest = _digest(item, "candidate", bad)
        digests.append(digest)
        rows_of[digest].append(item.id)
        pictured, worded = pictured + bool(item.images), worded + bool(item.text)
    asked = [_digest(query, "query", bad) for query in wanted.queries]
    if bad:
        more = f"\nand {len(bad) - MOST} more" if len(bad) > MOST else ""
        raise SetError(f"{path}: {len(bad)} items cannot be read:\n" + "\n".join(bad[:MOST]) + more)
    wanted = with_content(wanted, digests)
    shown = sum(bool(query.images) for query in wanted.queries)
    texts = sum(bool(query.text) for query in wanted.queries)
    rights = [len(rows) for rows, _ in wanted.positives]
    least, most = min(rights), max(rights)
    groups = len(set(wanted.columns["group"]))
    lines = [
        f"{wanted.path}: {wanted.name}",
        f"{len(wanted.queries)} queries ({shown} with pictures, {texts} with text) in {groups} groups, "
        f"{sum(rights)} right answers, {least if least == most else f'{least} to {most}'} a query",
        f"{len(wanted.corpus_ids)} candidates ({pictured} with pictures, {worded} with text)",
        f"fingerprint {wanted.fingerprint}",
        f"content     {wanted.content}",
    ]
    return Checked(wanted, lines, _caveats(wanted, rows_of, asked, groups))


def _digest(item: Item, side: str, bad: list[str]) -> str:
    try:
        for ref in item.images:
            load_image(ref)
        return content_digest(item)[0]
    except ImageError as error:
        bad.append(f"{side} {item.id!r}: {error}")
        return ""


def _caveats(wanted: RetrievalSet, rows_of: dict[str, list[str]], asked: list[str], groups: int) -> list[str]:
    found = list(wanted.meta.get("notes", []))
    if copies := [ids for ids in rows_of.values() if len(ids) > 1]:
        found.append(
            f"{sum(map(len, copies))} candidates show the same as another, e.g. {copies[0][0]!r} and {copies[0][1]!r}: equal "
            "scores are ordered by id"
        )
    copy_of = {name: ids for ids in copies for name in ids}
    for query, (rows, _) in zip(wanted.query_ids, wanted.positives, strict=True):
        right = {wanted.corpus_ids[row] for row in rows.tolist()}
        if lost := next(
            (other for name in right for other in copy_of.get(name, []) if other not in right), None
        ):
            found.append(f"query {query!r}: {lost!r} shows the same as a right answer and counts as wrong")
            break
    if wanted.negatives is not None:
        both = [
            query
            for query, (rows, _), wrong in zip(
                wanted.query_ids, wanted.positives, wanted.negatives, strict=True
            )
            if set(rows.tolist()) & set(wrong.tolist())
        ]
        if both:
            found.append(f"{len(both)} queries have a candidate that is right and wrong, first {both[0]!r}")
    if twice := len(asked) - len(set(asked)):
        found.append(f"{twice} queries ask exactly what another asks")
    group_of: dict[str, str] = {}
    for item, group in zip(wanted.queries, wanted.columns["group"], strict=True):
        for picture in content_digest(item)[1]:
            if group_of.setdefault(picture, group) != group:
                found.append(
                    f"query {item.id!r} shares a picture with another group: give both one group, or intervals come out "
                    "too narrow"
                )
                break
        else:
            continue
        break
    if groups < FEW_GROUPS:
        found.append(f"{groups} groups: intervals will be wide, and below {FEW_GROUPS} not reliable")
    counts: dict[str, int] = defaultdict(int)
    for name in wanted.columns["category"]:
        counts[name] += 1
    if small := [name for name, count in counts.items() if count < SMALL_CATEGORY and len(counts) > 1]:
        found.append(f"fewer than {SMALL_CATEGORY} queries in {', '.join(map(repr, small[:5]))}")
    if wanted.candidates is None and wanted.excluded is None:
        own = sum(_own_in_pool(wanted))
        if own:
            found.append(
                f"{own} queries have their own picture in the pool, where it is found first; excluded.parquet takes it out"
            )
    return found


def _own_in_pool(wanted: RetrievalSet) -> list[bool]:
    pool = {one for item in wanted.corpus_items() for one in content_digest(item)[1]}
    return [bool(pool & set(content_digest(query)[1])) for query in wanted.queries]

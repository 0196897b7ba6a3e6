"""Records that train against each other, and held-out records that are trained on: what identities alone cannot tell.

In a batch, a candidate is no negative if its identity is that of one of the query's right answers. Whether records give equal
answers one identity, and different ones several, is seen from hashes of all queries and targets, without reading records again.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rge.data.layout import Layout
from rge.data.sources import Records

Laid = Sequence[tuple[Records, Layout]]
"""Sources with their layouts."""


def conflicts(laid: Laid, where: str) -> Iterator[str]:
    """Warnings about sources whose records meet in a batch; `where` names these sources."""
    number = sum(len(layout.sizes_NK) for _, layout in laid)
    owner_T = np.repeat(np.arange(number), _column(laid, "prompts") - 1)
    identity_T, content_T, given_T = np.concatenate([layout.targets_T3 for _, layout in laid]).T
    by_id = given_T == 0  # an identity that is given is meant to be shared
    asker_W = np.r_[np.arange(number), np.repeat(np.arange(number), _column(laid, "wordings"))]
    for key, value, owner, what, then in (
        (
            _asked(laid),
            _column(laid, "rights")[asker_W],
            asker_W,
            "have the same query as others with other right answers",
            "each one's answer is a negative of the other. Put all right answers of a query into its record's positives",
        ),
        (
            content_T,
            identity_T,
            owner_T,
            "have a target that also occurs under another id",
            "a right answer gets negatives with the same content. Give equal targets one id, or one identity",
        ),
        (
            identity_T[by_id],
            content_T[by_id],
            owner_T[by_id],
            "have a target whose id also stands for other content",
            "such targets are never negatives of each other's queries. Give different targets different ids",
        ),
    ):
        if (found := _unequal(key, value)) is not None:
            places, pair = found
            names = " and ".join(
                repr(_record_id(laid, one)) for one in sorted({int(owner[place]) for place in pair})
            )
            yield (
                f"warning: {len(np.unique(owner[places])):,} of {number:,} records of {where} {what}, such as {names}: {then}"
            )


def compares_nothing(laid: Laid) -> bool:
    """Whether several records all have the same right answers and no labelled negatives, so that no query has a negative."""
    rights_N, negatives_N = _column(laid, "rights"), _column(laid, "negatives")
    return len(rights_N) > 1 and bool((rights_N == rights_N[0]).all()) and not negatives_N.any()


def trained_on(held_out: tuple[Records, Layout], most: int, laid: Laid) -> str | None:
    """A warning if queries of the first `most` held-out records are also in the sources."""
    file, layout = held_out
    used_N = layout.numbers_N < most
    seen_N = used_N & np.isin(layout.column("asks"), _asked(laid))
    if not seen_N.any():
        return None
    record = file[int(layout.numbers_N[seen_N.argmax()])]
    return (
        f"warning: {seen_N.sum():,} of {used_N.sum():,} held-out queries of {file.name} are also in the training sources, such "
        f"as that of {record.id!r}, so validation overrates the model: leave them out of one of the two"
    )


def _column(laid: Laid, name: str) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(layout.column(name) for _, layout in laid)])


def _asked(laid: Laid) -> np.ndarray:
    """Hashes of all queries, then of their further wordings."""
    return np.concatenate([_column(laid, "asks"), *(layout.reworded_W for _, layout in laid)])


def _unequal(key_X: np.ndarray, value_X: np.ndarray) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Places whose key occurs with several values, and the first two that differ of the key that occurs most often."""
    if not len(key_X):
        return None
    order = np.lexsort((value_X, key_X))  # by key, then by value
    ordered = key_X[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[starts[1:], len(order)]
    apart = value_X[order[starts]] != value_X[order[ends - 1]]
    if not apart.any():
        return None
    most = int(np.where(apart, ends - starts, 0).argmax())
    alike = np.sort(order[starts[most] : ends[most]])
    pair = int(alike[0]), int(alike[(value_X[alike] != value_X[alike[0]]).argmax()])
    return order[np.repeat(apart, ends - starts)], pair


def _record_id(laid: Laid, place: int) -> str:
    """Id of a record by its place among those of all sources."""
    for file, layout in laid:
        if place < len(layout.numbers_N):
            return file[int(layout.numbers_N[place])].id
        place -= len(layout.numbers_N)
    raise IndexError(place)

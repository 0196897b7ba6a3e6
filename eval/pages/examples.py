"""Which queries a report shows, and their pictures, each embedded once."""

import base64
import hashlib
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
from PIL import Image

from eval.pages.evaluations import RANK_COLUMN
from rge.common.errors import UserError
from rge.common.images import ImageError, load_image, picture_bytes
from rge.common.schema import ImageRef

MAX_SIDE_PX = 224  # longest side of an embedded picture; cards show at most half of it
MAX_PICTURE_BYTES = 8_192  # a larger file is re-encoded even where its sides are small
WEBP_QUALITY = 72


def choose_examples(
    per_query: pd.DataFrame, *, success_rank: int, num: int, strata: Sequence[str] = (), seed: int = 0
) -> list[str]:
    """Draw queries to show: half found, half missed, each half in turn over the strata.

    A query's place in the draw is a hash of the seed and its id, so the draw depends on neither the order of the
    file nor the version of a random generator. Within a stratum, pictures (``group``) not shown yet go first. Where
    one half has too few queries, the other fills up.

    Args:
        per_query: indexed by query id; ``first_hit_rank``, ``group`` where known, and the columns of ``strata``.
        success_rank: a query counts as found if its first right candidate has this rank or a better one.
        num: how many; fewer if there are not as many queries.
        strata: columns whose combinations are visited in turn.
        seed: draws others.

    Returns:
        Query ids, found and missed in turn.
    """
    groups = per_query["group"] if "group" in per_query else pd.Series(per_query.index, per_query.index)
    found = per_query[RANK_COLUMN].between(1, success_rank)
    halves: list[list[str]] = []
    for wanted in (True, False):
        members: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for query_id, row in per_query.loc[found == wanted, list(strata)].iterrows():
            members[tuple(map(str, row))].append(str(query_id))
        queues = [
            sorted(members[key], key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).hexdigest())
            for key in sorted(members)
        ]
        halves.append(_in_turn(queues, groups))
    hits, misses = halves
    num_hits = min(len(hits), max(num - num // 2, num - len(misses)))
    hits, misses = hits[:num_hits], misses[: max(num - num_hits, 0)]
    mixed: list[str] = []
    for place in range(max(len(hits), len(misses))):
        mixed += hits[place : place + 1] + misses[place : place + 1]
    return mixed


def _in_turn(queues: list[list[str]], groups: pd.Series) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    while any(queues):
        for queue in filter(None, queues):
            fresh = next((i for i, name in enumerate(queue) if str(groups[name]) not in seen), 0)
            name = queue.pop(fresh)
            seen.add(str(groups[name]))
            order.append(name)
    return order


@dataclass(frozen=True)
class Picture:
    """An embedded picture; ``data`` is a data URI."""

    name: str
    width: int
    height: int
    data: str


@dataclass
class Gallery:
    """Every picture of the page, each once: cards refer to it by name."""

    pictures: list[Picture] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def add(self, ref: ImageRef, owner: str) -> str:
        """Embed a picture unless it is there already.

        Args:
            ref: see `rge.common.images.picture_bytes`.
            owner: the query or candidate it belongs to, for the error message.

        Returns:
            Its name on the page.

        Raises:
            UserError: it is missing or cannot be decoded.
        """
        try:
            data = picture_bytes(ref)
            digest = hashlib.sha256(data).hexdigest()
            if digest not in self._names:
                name = f"p{len(self.pictures)}"
                self.pictures.append(_embed(name, data))
                self._names[digest] = name
        except ImageError as error:
            raise UserError(f"{owner}: {error}") from error
        return self._names[digest]


def _embed(name: str, data: bytes) -> Picture:
    image = load_image(data)
    small = max(image.size) <= MAX_SIDE_PX and len(data) <= MAX_PICTURE_BYTES
    with Image.open(io.BytesIO(data)) as original:
        kind = Image.MIME.get(original.format or "")
        upright = original.size == image.size and not original.getexif()
    if not (small and upright and kind in ("image/webp", "image/png", "image/jpeg")):
        image.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=WEBP_QUALITY, method=6)
        data, kind = buffer.getvalue(), "image/webp"
    return Picture(name, *image.size, f"data:{kind};base64,{base64.b64encode(data).decode()}")

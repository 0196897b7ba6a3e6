"""Which candidates may be negatives: positive-aware limits, ranks, and how some are chosen; and the section `data.mine`.

Source: NV-Retriever (arXiv:2407.15831), whose best rule, TopK-PercPos, keeps candidates that score at most 95 % of the positive:
`relative_margin`. `absolute_margin` is its TopK-MarginPos and `max_score` its TopK-Abs. Differs: a query may have several
positives, and the limit is that of the lowest, so that a negative is below every positive that a step can draw. A negative
positive score is lowered, not raised, by the relative margin.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.common.options import AtLeastOne, BelowOne, Count, NotNegative


@dataclass(kw_only=True)
class MiningRules:
    """Which of a query's nearest wrong candidates become its negatives."""

    num: Count = 8
    """Negatives mined for each query."""
    relative_margin: BelowOne | None = 0.05
    """A negative's score is below that of the query's lowest positive by at least this share of it (NV-Retriever's
    TopK-PercPos); null: no such limit."""
    absolute_margin: NotNegative | None = None
    """The same as a difference of cosines; null: no such limit."""
    max_score: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Highest cosine of a negative; null: no such limit."""
    range: tuple[AtLeastOne, AtLeastOne] = (1, 100)
    """First and last rank that negatives are taken from, among the wrong candidates within the limits."""
    choose: Literal["top", "sampled"] = "top"
    """top: the nearest in that range; sampled: a random choice from it."""
    seed: Count = 0
    """Seed of that choice."""

    def check(self) -> None:
        """Raise a `UserError` for a range without enough ranks."""
        first, last = self.range
        if last - first + 1 < self.num:
            raise UserError(
                f"range={first},{last} has {max(last - first + 1, 0)} ranks for num={self.num} negatives: widen it"
            )

    def depth(self, *, filtered: bool = False) -> int:
        """Ranks to search: up to the last, or, if the top is taken and nothing is `filtered` later, as many as are needed."""
        first, last = self.range
        return last if filtered or self.choose == "sampled" else min(last, first - 1 + self.num)


@dataclass(kw_only=True)
class MineConfig(MiningRules):
    """Mine hard negatives during training, with the present model, for the records of the next steps (docs/training.md)."""

    every: Count = 0
    """Steps between two minings, the first of which is before the first step; 0: never."""
    pool: AtLeastOne = 20_000
    """Records of each source whose targets are candidates, drawn anew for every mining."""
    query_mode: Literal["reasoning", "direct"] | None = None
    """Query state to mine with; null: that of `loss.anchor`. After a rationale, each mining writes one for every query of
    the next `every` steps."""

    def mode(self, anchor: str) -> Mode:
        """Mode of the queries in a stage whose `loss.anchor` is this."""
        return self.query_mode or ("direct" if anchor == "none" else "reasoning")

"""What mining's rules mean: highest scores, and the order in which candidates are taken."""

import numpy as np

from rge.mining.config import MiningRules


def limits(rules: MiningRules, positive_Q: np.ndarray) -> dict[str, np.ndarray]:
    """Highest allowed score of each query's negatives by rule, (Q,) float32, in the order in which a dropped one is counted.

    `positive_Q` are scores of the queries' lowest positives.
    """
    found = {}
    if rules.relative_margin is not None:
        found["relative_margin"] = positive_Q - rules.relative_margin * np.abs(positive_Q)
    if rules.absolute_margin is not None:
        found["absolute_margin"] = positive_Q - rules.absolute_margin
    if rules.max_score is not None:
        found["max_score"] = np.full_like(positive_Q, rules.max_score)
    return {name: limit_Q.astype(np.float32) for name, limit_Q in found.items()}


def order(rules: MiningRules, count: int, name: str) -> np.ndarray:
    """Places, in a ranking of `count` candidates, in the order in which they are taken; `name` identifies the query."""
    first, last = rules.range
    places = np.arange(min(first - 1, count), min(last, count))
    if rules.choose == "top":
        return places
    return np.random.default_rng([rules.seed, *name.encode()]).permutation(places)

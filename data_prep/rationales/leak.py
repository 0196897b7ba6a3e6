"""Leak score: how much of the target a rationale gives away.

A rationale may name what is needed; any further detail of the target shows that its writer has seen the target. Scores lie
between 0 (no more than the name) and 1, and are None if there is nothing to compare with.

Shape suffixes: N = target pictures, T = rationales, D = embedding size.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from data_prep.rmir.pictures.encoders import ImageEncoder
from rge.stats.words import content_words

NAMED_WORDS = 2
"""Caption words that a rationale may use freely: a name such as "fire engine"."""
NUM_FITTING = 3
"""Best-fitting other pictures: what a text says of them too is not specific to the target."""
MIN_OTHERS = 10
"""Other pictures needed for a meaningful score."""


def text_leak(rationale: str, target: str | None) -> float | None:
    """Share of the target text's word bigrams that the rationale contains.

    Stop words do not count. For a target of one word, the word itself is looked for.
    """
    if target is None:
        return None
    wanted, written = content_words(target), content_words(rationale)
    if not wanted:
        return 0.0
    size = min(2, len(wanted))
    found = {tuple(written[at : at + size]) for at in range(len(written) - size + 1)}
    pairs = {tuple(wanted[at : at + size]) for at in range(len(wanted) - size + 1)}
    return len(pairs & found) / len(pairs)


def caption_leak(rationale: str, caption: str | None, known: str = "") -> float | None:
    """Share of the target caption's details that a rationale mentions.

    `NAMED_WORDS` of the caption's words are free, and words of the query or instruction (`known`) do not count.
    """
    if not caption:
        return None
    details = set(content_words(caption)) - set(content_words(known))
    beyond = len(details) - NAMED_WORDS
    if beyond < 1:
        return 0.0
    return max(0, len(details & set(content_words(rationale))) - NAMED_WORDS) / beyond


def embedding_leak(score_N: np.ndarray, target: int) -> float:
    """How specifically a text points to the target picture among the pictures that it fits.

    A text that names the thing is as close to other pictures of it as to the target; one that describes the target is
    closer to the target alone. With s the cosine to the text, the score is (s(target) - mean s(best-fitting others)) /
    (s(target) - mean s(all others)). Offsets and scales of the encoder, such as CLIP's modality gap, cancel. If the target
    is the only picture of its kind, its name alone scores high. Between 0 and 1; 0 unless the target is at least one standard
    deviation above the mean of the others.
    """
    others_N = np.delete(score_N, target)
    lead = score_N[target] - others_N.mean()
    if lead <= max(float(others_N.std()), 1e-6):
        return 0.0
    fitting = np.sort(others_N)[-NUM_FITTING:]
    return float(np.clip((score_N[target] - fitting.mean()) / lead, 0, 1))


def picture_leaks(
    encoder: ImageEncoder, refs: Mapping[str, str], asked: Sequence[tuple[str, str, str]]
) -> list[float | None]:
    """`embedding_leak` of each rationale minus that of the query's own text, for triples of target id, rationale and query text.

    ``refs``: all target pictures to compare, by id. None for targets that are not among them, and for all if there are fewer than
    `MIN_OTHERS` others.
    """
    # One row per picture, even if several targets show it.
    row_of = {ref: row for row, ref in enumerate(dict.fromkeys(refs.values()))}
    asked_rows = [at for at, (name, _, _) in enumerate(asked) if name in refs]
    found: list[float | None] = [None] * len(asked)
    if len(row_of) <= MIN_OTHERS or not asked_rows:
        return found
    picture_ND = encoder.pictures(list(row_of))
    known = [asked[at][2].strip() for at in asked_rows]
    said_TD = encoder.texts([asked[at][1] for at in asked_rows], query=False)
    known_TD = encoder.texts(known, query=False)
    for at, said_D, known_D, text in zip(asked_rows, said_TD, known_TD, known, strict=True):
        target = row_of[refs[asked[at][0]]]
        leak = embedding_leak(picture_ND @ said_D, target)
        before = embedding_leak(picture_ND @ known_D, target) if text else 0.0
        found[at] = max(0.0, leak - before)
    return found

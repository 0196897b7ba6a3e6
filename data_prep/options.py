"""``key=value`` words of the command line; an unknown word is an error that names the nearest known one."""

import difflib
from collections.abc import Iterable, Sequence

from rge.common.errors import UserError


def nearest(word: str, known: Iterable[str]) -> str:
    """The phrase that ends an error about an unknown word: what may have been meant, and what there is.

    Args:
        word: what was given.
        known: what is allowed.
    """
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{hint} (known: {', '.join(known)})"


def read_options(words: Sequence[str], known: Iterable[str]) -> dict[str, str]:
    """Split ``key=value`` words.

    Args:
        words: such as ``out=DIR``; the value may contain further ``=``.
        known: the allowed keys.

    Returns:
        The values given, by key.

    Raises:
        UserError: a word is not ``key=value``, a key is unknown or given twice, or a value is empty.
    """
    known, values = list(known), {}
    for word in words:
        key, mark, value = word.partition("=")
        if key not in known:
            raise UserError(f"unknown key {key!r}{nearest(key, known)}")
        if not mark or not value:
            raise UserError(f"{key} needs a value: {key}=...")
        if key in values:
            raise UserError(f"{key} is given twice")
        values[key] = value
    return values

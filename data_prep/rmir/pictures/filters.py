"""Filters on content: functions of the user's that say why a picture is left out.

A filter is a function of a picture that returns a reason, or None. ``library.filters`` names those that run, as
``module:function``; the card of the data set lists them.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

from PIL import Image

from rge.common.errors import UserError
from rge.common.registry import load_plugins

Filter = Callable[[Image.Image], str | None]


@lru_cache(maxsize=16)
def load_filter(name: str) -> Filter:
    """A filter by its name, ``module:function``; loaded once a process.

    Raises:
        UserError: there is none of that name.
    """
    module, mark, function = name.partition(":")
    if not mark:
        raise UserError(f"library.filters must be module:function; got {name!r}")
    load_plugins([module])  # the current folder counts as installed
    found = getattr(sys.modules.get(module) or importlib.import_module(module), function, None)
    if not callable(found):
        raise UserError(f"library.filters: {name}: the module has no function {function}")
    return found


def unwanted(image: Image.Image, filters: Sequence[str]) -> str | None:
    """Why the first filter that objects does so; None where none does.

    Raises:
        UserError: a filter returned something else.
    """
    for name in filters:
        reason = load_filter(name)(image)
        if reason is not None and not isinstance(reason, str):
            raise UserError(
                f"library.filters: {name} must return a reason or None, got {type(reason).__name__}"
            )
        if reason:
            return reason
    return None

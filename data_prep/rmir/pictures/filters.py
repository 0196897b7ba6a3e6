"""User-defined content filters: functions that take a picture and return the reason to leave it out, or None.

``library.filters`` lists them as ``module:function``; so does the card of the data set.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

from PIL import Image

from rge.common.errors import UserError
from rge.common.registry import load_plugins


@lru_cache(maxsize=16)
def load_filter(name: str) -> Callable[[Image.Image], str | None]:
    """Load a filter by its name, ``module:function``, once per process.

    Raises:
        UserError: it does not exist.
    """
    module, mark, function = name.partition(":")
    if not mark:
        raise UserError(f"library.filters must be module:function; got {name!r}")
    load_plugins([module])  # also finds modules in the current folder
    found = getattr(sys.modules.get(module) or importlib.import_module(module), function, None)
    if not callable(found):
        raise UserError(f"library.filters: {name}: the module has no function {function}")
    return found


def unwanted(image: Image.Image, filters: Sequence[str]) -> str | None:
    """The reason of the first filter that rejects a picture, or None.

    Raises:
        UserError: a filter returned neither a string nor None.
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

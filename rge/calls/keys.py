"""API keys: read from the environment, redacted wherever something is shown or logged."""

import base64
import json
import os
from collections.abc import Iterable
from urllib.parse import quote

from rge.common.errors import UserError

MIN_CHARACTERS = 12
"""A shorter key would be found inside ordinary words, and masking it would spoil them."""
MASK = "[key]"


def read_key(name: str, variable: str) -> str:
    """The key that an environment variable holds.

    Raises:
        UserError: the variable is not set, or holds what is too short to be a key.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"{name}: the environment variable {variable} (key_env) is not set")
    if len(key) < MIN_CHARACTERS:
        raise UserError(
            f"{name}: {variable} (key_env) holds {len(key)} characters, too few for a key (at least {MIN_CHARACTERS}); for an "
            "endpoint that needs none set key_env to null"
        )
    return key


class Mask:
    """Replaces keys, as they are and in the encodings in which servers and logs echo them."""

    def __init__(self, keys: Iterable[str]):
        forms = {form for key in keys for form in _forms(key)}
        self._forms = sorted(forms, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text without keys."""
        for form in self._forms:
            text = text.replace(form, MASK)
        return text


def _forms(key: str) -> set[str]:
    data = key.encode()
    forms = {key, json.dumps(key)[1:-1], quote(key, safe=""), data.hex(), data.hex().upper()}
    for before in range(3):
        # Base64 of a text that holds the key looks different for each of three places of the key in it. The letters at both
        # ends depend on what stands beside the key, and are no part of the form.
        coded = base64.b64encode(bytes(before) + data).decode()
        missing = -(before + len(data)) % 3
        inner = coded[(0, 2, 3)[before] : len(coded) - (0, 2, 3)[missing]]
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return forms

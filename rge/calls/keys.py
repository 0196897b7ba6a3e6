"""API keys: read from the environment, redacted from everything shown or stored."""

import base64
import json
import os
from collections.abc import Iterable
from urllib.parse import quote

from rge.common.errors import UserError

MIN_CHARACTERS = 12
"""Shorter keys could occur in ordinary text, which masking would garble."""
MASK = "[key]"


def read_key(name: str, variable: str) -> str:
    """Read a key from an environment variable. Raises `UserError`: the variable is not set, or its value cannot be a key."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"{name}: the environment variable of key_env is not set", key=variable)
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{name}: it contains characters that no key has: copy it again", key=variable)
    if len(key) < MIN_CHARACTERS:
        few = f"it has {len(key)} characters, too few for a key (at least {MIN_CHARACTERS})"
        raise UserError(f"{name}: {few}; set key_env to null if the endpoint needs none", key=variable)
    return key


class Mask:
    """Redacts keys (None: there is none), also in the encodings in which servers and logs echo them."""

    def __init__(self, keys: Iterable[str | None]):
        forms = {form for key in keys if key is not None for form in _forms(key)}
        self._forms = sorted(forms, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text with keys redacted."""
        for form in self._forms:
            text = text.replace(form, MASK)
        return text


def _forms(key: str) -> set[str]:
    data = key.encode()
    forms = {key, json.dumps(key)[1:-1], quote(key, safe=""), data.hex(), data.hex().upper()}
    for before in range(3):
        # In the base64 of a longer text, the key has one of three forms, depending on its offset modulo 3. The characters at
        # both ends also encode neighbouring bytes, so they are cut off.
        encoded = base64.b64encode(bytes(before) + data).decode()
        padding = -(before + len(data)) % 3
        inner = encoded[(0, 2, 3)[before] : len(encoded) - (0, 2, 3)[padding]]
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return forms

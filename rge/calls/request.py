"""A request to a model, and the cache key of its answer."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from rge.common.parts import ImageRef


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture inside a prompt."""

    ref: ImageRef  # read only if the request is sent
    sha256: str  # of the encoded bytes; used in the cache key instead of a path
    max_side_px: int = 1024  # scaled down to this before sending


Part = str | Picture


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its sampling settings."""

    model: str  # label of one of the caller's models
    parts: tuple[Part, ...]  # user message: texts and pictures in order
    system: str | None = None  # system message
    temperature: float = 0.0
    max_tokens: int = 1024
    # Sample number, sent as ``seed``. Part of the cache key, so two judges that are the same model get separate answers.
    sample: int = 0
    n: int = 1  # samples per call, numbered from ``sample``
    # Description of the output format, added when an unreadable answer is requested again.
    form: str | None = None
    # Tags of the answer, each with its allowed words (None: any text) or nested tags, for endpoints that constrain answers to a
    # JSON schema. None: no schema.
    fields: tuple[tuple[str, Any], ...] | None = None

    def key(self, cache_name: str | None = None, cache_settings: dict[str, Any] | None = None) -> str:
        """SHA-256 over the model's cache name, texts, picture contents and settings; no paths, addresses or secrets."""
        body: dict[str, Any] = {
            "model": cache_name or self.model,
            "system": self.system,
            "parts": [
                {"sha256": part.sha256, "max_side_px": part.max_side_px}
                if isinstance(part, Picture)
                else part
                for part in self.parts
            ],
            "settings": [self.temperature, self.max_tokens, self.sample],
        }
        # Only non-default settings, so that keys stay the same when settings are added.
        extra = dict(cache_settings or {})
        if extra.get("structured"):
            extra["structured"] = self.fields
        if self.n > 1:
            extra["n"] = self.n
        if extra:
            body["more"] = extra
        text = json.dumps(body, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def num_pictures(self) -> int:
        """Number of pictures."""
        return sum(isinstance(part, Picture) for part in self.parts)

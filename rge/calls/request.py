"""A request to a model, and the cache key of its answer."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from rge.common.schema import ImageRef


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture inside a prompt."""

    ref: ImageRef  # where it is; read when it is sent, and not at all where the answer is already kept
    sha256: str  # of its encoded bytes: what the key of the answer holds instead of a path
    max_side_px: int = 1024  # longer sides are scaled down to this before sending


Part = str | Picture


@dataclass(frozen=True, slots=True)
class Request:
    """One call."""

    model: str  # which of the caller's models is asked
    parts: tuple[Part, ...]  # the user's message, texts and pictures in the order they are read
    system: str | None = None  # instructions in front of it, or None
    temperature: float = 0.0  # sampling temperature
    max_tokens: int = 1024  # cap on the answer
    # Number of the draw, sent as the ``seed``: keeps the answers of two judges apart that are the same model.
    sample: int = 0
    n: int = 1  # draws by this one call; the first is number ``sample``
    form: str | None = None  # what the answer must look like, for an answer that is asked for again
    # Tags of the answer, with the words that each may hold (None: any text) or the tags inside it, for an endpoint that holds
    # answers to a JSON schema. None: the answer has no such form.
    fields: tuple[tuple[str, Any], ...] | None = None

    def key(self, known_as: str | None = None, answers_by: dict[str, Any] | None = None) -> str:
        """Sha256 over model (or the name it is known as), texts, picture contents and settings; no path, address or secret."""
        body: dict[str, Any] = {
            "model": known_as or self.model,
            "system": self.system,
            "parts": [
                {"sha256": part.sha256, "max_side_px": part.max_side_px}
                if isinstance(part, Picture)
                else part
                for part in self.parts
            ],
            "settings": [self.temperature, self.max_tokens, self.sample],
        }
        # Only what is given: the key of a plain request of today is that of all days.
        more = dict(answers_by or {})
        if more.get("structured"):
            more["structured"] = self.fields
        if self.n > 1:
            more["n"] = self.n
        if more:
            body["more"] = more
        text = json.dumps(body, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def num_characters(self) -> int:
        """Length of its texts."""
        return len(self.system or "") + sum(len(part) for part in self.parts if isinstance(part, str))

    def num_pictures(self) -> int:
        """How many pictures it shows."""
        return sum(isinstance(part, Picture) for part in self.parts)

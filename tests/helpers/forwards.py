"""What the forwards of prompts were given, for tests of limits."""

import contextlib
from dataclasses import dataclass, field

import pytest

from rge.model import embedding_model


@dataclass
class Forwards:
    """Of each forward: its prompts' lengths."""

    lengths: list[list[int]] = field(default_factory=list)

    def within(self, most_tokens: int) -> bool:
        """Whether no forward had more tokens, each row counted as its longest, but for a row alone."""
        return all(len(rows) == 1 or len(rows) * max(rows) <= most_tokens for rows in self.lengths)


@contextlib.contextmanager
def counted_forwards():
    """Count the forwards of prompts in this context."""
    counted, pack = Forwards(), embedding_model.pack_prompts

    def packed(prompts, **more):
        counted.lengths.append([*map(len, prompts)])
        return pack(prompts, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_model, "pack_prompts", packed)
        yield counted

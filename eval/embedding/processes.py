"""The process group of an evaluation: all that `accelerate launch` started, or this process alone.

Each process embeds its share of the shards into one cache directory, which all of them must see; a judge's scores are
handed to the first process, which keeps them. Nothing else is exchanged but short messages, so the group runs on gloo,
whatever the models run on.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """A process, by its number from 0 on, and how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process searches, scores, writes and prints."""
        return self.rank == 0

    def once(self, make: Callable[[], T]) -> T:
        """What the first process makes, in every process; the others wait for it."""
        value: Any = make() if self.is_first else None
        if self.size > 1:
            from rge.distributed.collectives import from_main

            value = from_main(value)
        return value

    def gather(self, value: T) -> list[T]:
        """Every process's value, in every process; small things that pickle."""
        if self.size == 1:
            return [value]
        from rge.distributed.collectives import gather_objects

        return gather_objects(value)


ALONE = ProcessGroup()


def join() -> ProcessGroup:
    """Join the processes that the launcher started; can be called again.

    Each takes the GPU of its local rank, where there are GPUs.

    Raises:
        rge.distributed.collectives.LaunchError: the processes do not find each other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from rge.distributed.collectives import join_workers

    return ProcessGroup(*join_workers())


def leave() -> None:
    """Leave the others; to be called when a command has finished."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rge.distributed.collectives import close

        close()

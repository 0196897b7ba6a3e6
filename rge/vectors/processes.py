"""The processes that embed together: all processes of `accelerate launch`, or this process alone.

Processes share files and exchange only short messages, so the group uses gloo on any device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """Rank of this process, and number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process searches, scores, writes and prints."""
        return self.rank == 0

    def once(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process and return its result in all processes."""
        value: Any = make() if self.is_first else None
        if self.size > 1:
            from rge.distributed.collectives import from_main

            value = from_main(value)
        return value

    def gather(self, value: T) -> list[T]:
        """Values of all processes, in every process; for small objects that can be pickled."""
        if self.size == 1:
            return [value]
        from rge.distributed.collectives import gather_objects

        return gather_objects(value)


ALONE = ProcessGroup()


def join() -> ProcessGroup:
    """Join the processes started by the launcher, using the GPU of the local rank if there are GPUs; may be repeated."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from rge.distributed.collectives import join_workers

    return ProcessGroup(*join_workers())


def leave() -> None:
    """Leave the process group; call it when a command has finished."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rge.distributed.collectives import close

        close()

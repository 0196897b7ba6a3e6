"""State of one endpoint, shared by all models behind it."""

import asyncio

from rge.calls.asking.pace import Pace
from rge.calls.failures import EndpointDown, StopCalls, Unanswered

MAX_UNANSWERED_IN_A_ROW = 20
"""Calls without an answer, one after the other, before an endpoint is held to be down."""


class Health:
    """An endpoint's pace, how its last calls went, and why nothing more is sent, if so.

    Nothing is cancelled where an endpoint is given up: what it is answering is billed, so it is waited for and kept.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.stopped: StopCalls | None = None
        """Why nothing more is sent in this run."""
        self.accepted_at = float("-inf")
        """When the last call that was accepted had been sent."""
        self.under_way = 0
        self.unanswered_in_a_row = 0

    def start(self) -> None:
        """Begin a run; events and locks belong to an event loop, and each run has its own."""
        self._completed = asyncio.Event()
        self.canary = asyncio.Lock()
        self.under_way = self.unanswered_in_a_row = 0
        self.stopped = None

    async def wait_for_completion(self) -> None:
        """Wait until a call ends."""
        self._completed.clear()
        await self._completed.wait()

    def began(self) -> None:
        """A call is sent."""
        self.under_way += 1

    def ended(self) -> None:
        """A call ended."""
        self.under_way -= 1
        self._completed.set()

    def accepted(self, sent_at: float) -> None:
        """A call that was sent then has been answered."""
        self.unanswered_in_a_row = 0
        self.accepted_at = max(self.accepted_at, sent_at)

    def unanswered(self, error: Unanswered) -> None:
        """A call has no answer after all its attempts; many in a row stop the run."""
        self.unanswered_in_a_row += 1
        if self.unanswered_in_a_row >= MAX_UNANSWERED_IN_A_ROW:
            self.stop(
                EndpointDown(
                    f"{self.unanswered_in_a_row} calls in a row have no answer, the last one: {error}. What was answered is "
                    "kept; run the same command again"
                )
            )

    def stop(self, error: StopCalls) -> None:
        """Send nothing more in this run; the first reason counts."""
        self.stopped = self.stopped or error
        self._completed.set()

"""State of one endpoint, shared by all models behind it: how fast it may be asked, and whether it takes requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

from rge.calls.failures import EndpointDown, StopCalls, Unanswered
from rge.calls.providers.transport import remaining

MAX_UNANSWERED_IN_A_ROW = 20
"""Calls without an answer, one after the other, before an endpoint is held to be down."""
WINDOW_S = 1.0
"""Over which answers are counted to tell how many an endpoint gives."""
CUT, GROWTH, RECOVERY = 0.8, 1.005, 1.05
"""Of the rate: with a 429; with an answer near the rate that was cut last; and with an answer further below it. In the long
run one call in 40 gets a 429."""
ENOUGH_ANSWERS = 8
"""In the window, to tell a rate from; with fewer the endpoint is only given its pause."""
MEMORY = 4096
"""Answers whose times are kept."""


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


class Pace:
    """Adaptive rate limit of an endpoint, learned from 429s and headers, shared by all its calls.

    Additive increase would take minutes to find a provider's limit again; so the rate grows by a share with every answer and
    falls by a larger one with a 429 (as TCP does with its window). Nothing here belongs to an event loop, so what is learnt
    lasts from one batch of calls to the next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.rate: float | None = None
        """Calls a second; None: not limited so far."""
        self._next_at = self._closed_until = self._cut_at = -1e9
        self._answered: deque[float] = deque(maxlen=MEMORY)
        self._cuts_in_a_row = 0
        self._ceiling = 0.0

    async def turn(self) -> float:
        """Wait until the next call may be sent; returns when that is."""
        while True:
            now = self._clock()
            if self._closed_until > now:
                await asyncio.sleep(self._closed_until - now)
                continue
            if self.rate is None:
                return now
            at = max(now, self._next_at)
            self._next_at = at + 1 / self.rate
            if at <= now:
                return now
            await asyncio.sleep(at - now)
            if self._closed_until <= self._clock():
                return self._clock()

    def answered(self, headers: Mapping[str, str]) -> None:
        """An answer came: a little faster from now on, unless its headers say that the allowance is used up."""
        now = self._clock()
        self._answered.append(now)
        self._cuts_in_a_row = 0
        if self.rate is not None:
            self.rate *= RECOVERY if self.rate < 0.9 * self._ceiling else GROWTH
            if self.rate > 4 * max(self._seen(now, WINDOW_S), 1.0):
                self.rate = None
        for kind in ("requests", "tokens"):
            left, reset_s = remaining(headers, kind)
            if left == 0 and reset_s:
                self._close(now + reset_s)

    def limited(self, sent_at: float, wait_s: float | None, backoff_s: float, max_wait_s: float) -> None:
        """A 429 came.

        Args:
            sent_at: when the call was sent, as `turn` said.
            wait_s: of Retry-After, if there was one.
            backoff_s: waited where there was none; doubles with every further cut without an answer between.
            max_wait_s: longest pause.
        """
        now = self._clock()
        if sent_at >= self._cut_at:
            window_s = max(WINDOW_S, min(wait_s or 0.0, max_wait_s))
            if self.rate is None and (seen := self._seen(now, window_s)) * window_s >= ENOUGH_ANSWERS:
                self.rate = seen
            if self.rate is not None:
                self._ceiling, self.rate = self.rate, self.rate * CUT
            self._cut_at = now
            self._cuts_in_a_row += 1
        wait_s = backoff_s * 2 ** (self._cuts_in_a_row - 1) if wait_s is None else wait_s
        self._close(now + min(wait_s, max_wait_s))

    def _close(self, until: float) -> None:
        self._closed_until = max(self._closed_until, until)
        # Turns that were given out for the time of the pause are void.
        self._next_at = max(self._next_at, self._closed_until) if self.rate is None else self._closed_until

    def _seen(self, now: float, window_s: float) -> float:
        return sum(at > now - window_s for at in self._answered) / window_s

"""Health and rate limit of one endpoint, shared by all models behind it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection

from rge.calls.failures import StopCalls, Unanswered

MAX_UNANSWERED_IN_A_ROW = 20
"""Consecutive unanswered calls before the endpoint counts as down."""
WINDOW_S = 1.0
"""Window over which the rate of answers is measured."""
CUT, GROWTH, RECOVERY = 0.8, 1.005, 1.05
"""Factors on the rate: after a 429; after an answer near the rate of the last cut; after an answer further below it. With these,
about one call in 40 gets a 429 in the long run."""
ENOUGH_ANSWERS = 8
"""Answers in the window needed to estimate a rate; with fewer, a 429 only pauses the calls."""
MEMORY = 4096
"""Number of answer times kept."""


class Health:
    """An endpoint's rate limit, its recent results, and why calls to it have stopped, if they have.

    Stopping cancels nothing: calls in flight are billed, so their answers are awaited and stored.

    Args:
        say: receives messages.
        all_of_run: this endpoint's and the others', which a budget of all models has to wait for.
    """

    def __init__(self, say: Callable[[str], object], all_of_run: "Collection[Health]") -> None:
        self.say, self.all_of_run = say, all_of_run
        self.pace = Pace()
        self.accepted_at = float("-inf")
        """Send time of the latest accepted call."""
        self.start()

    def start(self) -> None:
        """Reset for a new run: events and locks belong to its event loop."""
        self._completed, self.canary = asyncio.Event(), asyncio.Lock()
        self.in_flight = self.unanswered_in_a_row = 0
        self.stopped: StopCalls | None = None
        """Why calls have stopped for this run."""

    async def wait_for_completion(self) -> None:
        """Wait until any call ends, also one to another endpoint."""
        self._completed.clear()
        await self._completed.wait()

    def call_ended(self) -> None:
        """Count a call as ended, and wake up those that wait for it."""
        self.in_flight -= 1
        for health in self.all_of_run:
            health._completed.set()

    def call_accepted(self, sent_at: float) -> None:
        """Record that the endpoint answered a call."""
        self.unanswered_in_a_row = 0
        self.accepted_at = max(self.accepted_at, sent_at)

    def call_unanswered(self, error: Unanswered) -> None:
        """Record a call that failed after all retries; `MAX_UNANSWERED_IN_A_ROW` of them stop the run."""
        self.unanswered_in_a_row += 1
        if self.unanswered_in_a_row >= MAX_UNANSWERED_IN_A_ROW:
            self.stop(
                StopCalls(
                    f"{self.unanswered_in_a_row} calls in a row got no answer; last error: {error}. Answers so far are stored; "
                    "run the same command again"
                )
            )

    def stop(self, error: StopCalls) -> None:
        """Stop calls for this run; the first reason given is kept, and said now: other endpoints' calls may take long."""
        if self.stopped is None:
            self.stopped = error
            self.say(str(error))
        self._completed.set()


class Pace:
    """Adaptive rate limit of an endpoint, learned from 429s, shared by all its calls.

    Additive increase would take minutes to find a provider's limit again. Instead, the rate is multiplied: up slightly with every
    answer, down more with a 429. It is independent of the event loop, so it carries over from one run to the next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.rate: float | None = None
        """Calls per second; None: unlimited so far."""
        self._next_at = self._paused_until = self._cut_at = -1e9
        self._answered: deque[float] = deque(maxlen=MEMORY)
        self._cuts_in_a_row = 0
        self._ceiling = 0.0

    async def wait_turn(self) -> float:
        """Wait until the next call may be sent; returns the time by the clock."""
        while True:
            now = self._clock()
            if self._paused_until > now:
                await asyncio.sleep(self._paused_until - now)
                continue
            if self.rate is None:
                return now
            at = max(now, self._next_at)
            self._next_at = at + 1 / self.rate
            if at <= now:
                return now
            await asyncio.sleep(at - now)
            if self._paused_until <= self._clock():
                return self._clock()

    def on_answer(self) -> None:
        """Raise the rate after an answer."""
        now = self._clock()
        self._answered.append(now)
        self._cuts_in_a_row = 0
        if self.rate is not None:
            self.rate *= RECOVERY if self.rate < 0.9 * self._ceiling else GROWTH
            if self.rate > 4 * max(self._answer_rate(now, WINDOW_S), 1.0):
                self.rate = None

    def on_limited(self, sent_at: float, wait_s: float | None, backoff_s: float, max_wait_s: float) -> None:
        """Lower the rate after a 429 of a call that was sent at this time (of `wait_turn`), and pause.

        `wait_s` is Retry-After, if given; `backoff_s` the pause without it, doubled with every further cut until an answer comes.
        """
        now = self._clock()
        if sent_at >= self._cut_at:
            window_s = max(WINDOW_S, min(wait_s or 0.0, max_wait_s))
            if self.rate is None and (rate := self._answer_rate(now, window_s)) * window_s >= ENOUGH_ANSWERS:
                self.rate = rate
            if self.rate is not None:
                self._ceiling, self.rate = self.rate, self.rate * CUT
            self._cut_at = now
            self._cuts_in_a_row += 1
        wait_s = backoff_s * 2 ** (self._cuts_in_a_row - 1) if wait_s is None else wait_s
        self._paused_until = max(self._paused_until, now + min(wait_s, max_wait_s))
        # Send times already assigned within the pause are void.
        self._next_at = max(self._next_at, self._paused_until) if self.rate is None else self._paused_until

    def _answer_rate(self, now: float, window_s: float) -> float:
        return sum(at > now - window_s for at in self._answered) / window_s

"""The rate limit of one endpoint, learned from its 429s."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 1.0
"""Window over which the rate of answers is measured."""
CUT, GROWTH, RECOVERY = 0.8, 1.005, 1.05
"""Factors on the rate: after a 429; after an answer near the rate of the last cut; after an answer further below it. With these,
about one call in 40 gets a 429 in the long run."""
ENOUGH_ANSWERS = 8
"""Answers in the window needed to estimate a rate; with fewer, a 429 only pauses the calls."""
MEMORY = 4096
"""Number of answer times kept."""


def backoff(number: int, first_s: float, most_s: float) -> float:
    """The longest wait before another attempt, in seconds: doubled with every earlier one, however many these are."""
    return min(most_s, first_s * 2.0 ** min(number, 64))


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
        if wait_s is None:
            wait_s = backoff(self._cuts_in_a_row - 1, backoff_s, max_wait_s)
        self._paused_until = max(self._paused_until, now + min(wait_s, max_wait_s))
        # Send times already assigned within the pause are void.
        self._next_at = max(self._next_at, self._paused_until) if self.rate is None else self._paused_until

    def _answer_rate(self, now: float, window_s: float) -> float:
        return sum(at > now - window_s for at in self._answered) / window_s

"""Exceptions of calls: which are retried, which are stored, and which stop the run.

===========  ==================================================  ==================================================
unanswered   time-out, no connection, 429, 5xx, a web page       retried; after the last retry, left to the next run
             a picture that cannot be opened                     left to the next run
refused      declined by the provider's policy                   stored as an answer (`rge.calls.replies.Refused`)
rejected     this request is invalid (too large, a bad image)    stored; the other calls continue
stopped      every request fails: key, credit, model, setting    no further calls; those in flight finish
===========  ==================================================  ==================================================

`rge.calls.providers.errors` maps providers' errors to these.
"""

from dataclasses import dataclass

from rge.calls.replies import ReplyError
from rge.common.errors import UserError


class StopCalls(UserError):
    """No further call to this endpoint can succeed."""


class BudgetReached(StopCalls):
    """The next call might exceed the budget."""


class Unanswered(ReplyError):
    """The endpoint gave no answer; the next run tries again."""

    kind = "unanswered"


class Rejection(ReplyError):
    """The endpoint cannot process this request; stored, so that it is not sent again.

    Args:
        certain: whether status or code blame this request; if not, a canary finds out whether all requests are rejected.
    """

    kind = "rejected request"

    def __init__(self, message: str, *, certain: bool = True):
        super().__init__(message)
        self.certain = certain


class Gone(Rejection):
    """What a request names does not exist at the provider, or no longer (404, 410)."""


class QueueFull(Rejection):
    """The provider's queue has no room for a batch until others have ended."""


@dataclass
class AttemptFailed(Exception):
    """One attempt failed; a retry may succeed."""

    reason: str
    limited: bool = False  # a 429: not processed and not billed
    wait_s: float | None = None  # Retry-After
    billed: bool = False  # the provider may have processed the request and may bill it

    def __str__(self) -> str:
        return self.reason

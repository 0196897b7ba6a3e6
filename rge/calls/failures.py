"""Why a call failed, and whether it is retried; `rge.calls.providers.errors` classifies providers' errors.

===========  =========================================================  ==================================================
unanswered   time-out, no connection, 429, 5xx, a web page              retried; then open: the next run asks it again
refused      the provider's policy declines                             an answer, kept (`rge.calls.replies.Refused`)
rejected     this one request cannot be taken (too large, a bad image)  settled and kept; the others go on
stopped      no request can succeed: key, credit, model, setting        nothing more is sent; calls under way finish
===========  =========================================================  ==================================================
"""

from dataclasses import dataclass

from rge.calls.replies import ReplyError
from rge.common.errors import UserError


class StopCalls(UserError):
    """No further call to this endpoint can succeed."""


class AccountRejected(StopCalls):
    """The account cannot make calls: no credit, no quota, no such model."""


class KeyRejected(AccountRejected):
    """The endpoint does not accept the key."""


class NotThere(AccountRejected):
    """404: no such model, address or batch."""


class BudgetReached(StopCalls):
    """The next call might cost more than what is left."""


class EndpointDown(StopCalls):
    """The endpoint does not answer, or answers with errors only."""


class RequestRejected(StopCalls):
    """The endpoint accepts no request of this kind; the message has its own words."""


class Unanswered(ReplyError):
    """No answer, by no fault of the request: neither a verdict nor asked; the next run asks again."""

    kind = "unanswered"


class Rejection(ReplyError):
    """The endpoint cannot take this one request; kept, so that it is not sent again."""

    kind = "rejected request"


@dataclass
class Lost(Exception):
    """One attempt gave nothing; the next may."""

    reason: str
    limited: bool = False  # refused for its rate only: nothing was done, and nothing is billed
    wait_s: float | None = None  # as the endpoint asks for
    billed: bool = False  # the provider may have answered, and then bills it
    raw: bytes | None = None  # what came instead of an answer

    def __str__(self) -> str:
        return self.reason


@dataclass
class Rejected(Exception):
    """The endpoint rejects a request as it stands."""

    reason: str
    certain: bool  # status or code say that this one request is at fault; else every request may be, which a canary tells
    raw: bytes  # what it answered

    def __str__(self) -> str:
        return self.reason

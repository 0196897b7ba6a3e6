"""Why a call gave no answer, in classes, for each is to be met in another way.

``lost``      time-out, no connection, 5xx, a web page: asked again, the same call may succeed
``limited``   429: the endpoint is asked more slowly, and the call waits its turn
``refused``   by the provider's policy: an answer, kept and counted as an abstention (`rge.calls.replies.Refused`)
``rejected``  this request as it stands (too long, a picture it cannot read): counted, the others go on
``stop``      no request can succeed: a wrong key, a setting that the endpoint does not know, a budget that is spent
"""

from rge.calls.replies import ReplyError
from rge.common.errors import UserError


class StopCalls(UserError):
    """No further call can succeed."""


class KeyRejected(StopCalls):
    """The endpoint does not accept the key."""


class BudgetReached(StopCalls):
    """The next call might cost more than what is left."""


class EndpointDown(StopCalls):
    """The endpoint does not answer, or answers with errors only."""


class RequestRejected(StopCalls):
    """The endpoint accepts no request of this kind; the message has its own words."""


class CallFailed(ReplyError):
    """A call gave no answer, and nothing is kept.

    Attributes:
        lost: by no fault of the request: worth asking again.
    """

    kind = "failed call"

    def __init__(self, message: str, *, lost: bool = False):
        super().__init__(message)
        self.lost = lost
        self.kind = "lost call" if lost else "rejected request"


class Lost(Exception):
    """One attempt gave nothing; the next may.

    Args:
        reason: for the message.
        limited: refused for its rate only: nothing was done, and nothing is billed.
        wait_s: as the endpoint asks for; None where it says nothing.
        billed: the provider may have answered, and then bills it.
        raw: what came instead of an answer.
    """

    def __init__(
        self,
        reason: str,
        *,
        limited: bool = False,
        wait_s: float | None = None,
        billed: bool = False,
        raw: bytes | None = None,
    ):
        super().__init__(reason)
        self.limited, self.wait_s, self.billed, self.raw = limited, wait_s, billed, raw


class Rejected(Exception):
    """The endpoint rejects a request as it stands.

    Args:
        reason: its own words.
        about_input: it says that a picture or the length is what it cannot take, so that other requests may pass.
        raw: what it answered.
    """

    def __init__(self, reason: str, *, about_input: bool, raw: bytes):
        super().__init__(reason)
        self.about_input, self.raw = about_input, raw

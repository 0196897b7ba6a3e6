"""Refusals in the form in which OpenAI's clients read them."""

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that gets no embedding.

    Args:
        status: of HTTP.
        message: what is wrong, and the fix.
        code: for programs.
        param: key of the request that is meant.
        retry_after_s: when it may be tried again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param, self.retry_after_s = param, retry_after_s


def answer_of(refusal: Refusal, *, close: bool = False) -> JSONResponse:
    """The answer to a refused request.

    Args:
        refusal: why.
        close: end the connection after it.
    """
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    error = {"message": plain(refusal.message), "type": kind, "param": refusal.param, "code": refusal.code}
    return JSONResponse({"error": error}, refusal.status, headers)


def plain(text: str) -> str:
    """A text that can be sent: halves of characters, which JSON can name and UTF-8 cannot hold, as question marks."""
    return text.encode("utf-8", "replace").decode()

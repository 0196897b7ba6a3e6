"""Error responses in OpenAI's format."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(HTTPException):  # FastAPI lets only these pass while it reads a body
    """A refused request: HTTP status, message, machine-readable code, and the key of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(status, message)
        self.status, self.message, self.code = status, message, code
        self.param, self.retry_after_s = param, retry_after_s


class BadInput(Refusal):
    """A value in the request is invalid; `param` is its key."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(400, message, "invalid_value", param=param)


class Stopped(Refusal):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", "shutting_down", retry_after_s=5)


def error_response(refusal: Refusal, *, close: bool = False) -> JSONResponse:
    """The response to a refused request."""
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    # Without lone surrogates, which JSON allows.
    message = refusal.message.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "param": refusal.param, "code": refusal.code}
    return JSONResponse({"error": error}, refusal.status, headers)

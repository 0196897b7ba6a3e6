"""Error responses in OpenAI's format."""

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is refused: HTTP status, message, code for programs, and the request key that is at fault."""

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


def error_response(refusal: Refusal, *, close: bool = False) -> JSONResponse:
    """The answer to a refused request."""
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
    """A text that UTF-8 can encode: lone surrogates, which JSON allows, become question marks."""
    return text.encode("utf-8", "replace").decode()

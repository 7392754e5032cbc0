"""Errors as HTTP clients read them: OpenAI's shape, and always less than 4 KB.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.errors import (
    ConnectionLost,
    Overloaded,
    ProcessDied,
    RequestAborted,
    RequestError,
    ShuttingDown,
    TandemError,
    TooLong,
    UserError,
)

MAX_BYTES = 4000
"""Of an error's body."""
MAX_CHARS = 300
"""Of its message where the whole would be longer: JSON may write a character in 12 bytes."""
RETRY_AFTER_S = "1"

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""By status; any other is an invalid_request_error."""
_STATUSES: Mapping[type[TandemError], int] = {
    Overloaded: 429,
    ShuttingDown: 503,
    RequestAborted: 503,
    UserError: 400,
    ConnectionLost: 503,
    ProcessDied: 503,
}
"""The first that an error is decides; any other is a fault of ours."""


class HttpError(HTTPException):
    """A request is refused with `status`; `param` names the field that is at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else None
        super().__init__(status, message, headers)
        self.param = param
        self.code = "invalid_value" if code is None and param is not None else code


class ClientGone(RequestAborted):
    """The client has closed its connection."""


_CODES: Mapping[type[TandemError], str] = {
    TooLong: "context_length_exceeded",
    RequestError: "invalid_value",
    Overloaded: "rate_limit_exceeded",
}
"""As OpenAI names what went wrong; the first that an error is, else none."""


def as_http_error(error: TandemError, names: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    """What the client is told of an error of the server's.

    names: of fields that the client has given under another name than the error's.
    """
    status = next((s for kind, s in _STATUSES.items() if isinstance(error, kind)), 500)
    code = next((c for kind, c in _CODES.items() if isinstance(error, kind)), None)
    text, param = str(error), error.field if isinstance(error, RequestError) else None
    if param is not None and (name := names.get(param)) is not None:
        text, param = re.sub(rf"\b{param}(?= is )", name, text), name
    return HttpError(status, text, param=param, code=code)


def error_body(error: HTTPException) -> bytes:
    """The JSON of an error, less than 4 KB."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    message = str(error.detail)
    body = _dump(error.status_code, message, param, code)
    if len(body) > MAX_BYTES:
        param = None if param is None else param[:20]
        body = _dump(error.status_code, message[:MAX_CHARS] + "…", param, code)
    return body


def error_response(error: HTTPException) -> Response:
    """The whole response."""
    return Response(
        error_body(error),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def _dump(status: int, message: str, param: str | None, code: str | None) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()

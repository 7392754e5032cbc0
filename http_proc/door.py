"""What every request passes first: its id, the key, the drain, the limit of its body."""

import hmac
import re
import secrets
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from http_proc.errors import HttpError, as_http_error, error_response
from runtime.errors import ShuttingDown

MAX_BODY_BYTES = 4 << 20
"""What one message to the tokenizer may hold."""
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
MAX_ID_CHARS = 128
OPEN_PATH = "/health"
"""Needs no key: those who ask whether a server is well rarely have one."""

_BAD_IN_ID = re.compile(rb"[^\x21-\x7e]")


class Door:
    """The outermost part of the app. Sets the request's state: request_id."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, is_draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with why not."""
        headers = dict(scope["headers"])
        request_id = _id_of(headers)
        scope["state"]["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if (refusal := self._refusal(scope["path"], headers)) is not None:
            if refusal.status_code == 413:
                await _discard(receive)
            await error_response(refusal)(scope, receive, send_with_id)
        else:
            await self._app(scope, _Limited(receive), send_with_id)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> HttpError | None:
        if path != OPEN_PATH and not self._is_allowed(headers):
            return HttpError(
                401,
                "wrong or no API key: send the header 'Authorization: Bearer KEY' with the server's"
                " --api-key",
                code="invalid_api_key",
            )
        if self._is_draining():
            return as_http_error(ShuttingDown())
        if (length := headers.get(b"content-length", b"")).isdigit():
            return _too_large(int(length)) if int(length[:20]) > MAX_BODY_BYTES else None
        return None

    def _is_allowed(self, headers: dict[bytes, bytes]) -> bool:
        if self._key is None:
            return True
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)


class _Limited:
    """A `receive` that takes a body of MAX_BODY_BYTES at most."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0

    async def __call__(self) -> Any:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > MAX_BODY_BYTES:
            if message.get("more_body"):
                await _discard(self._receive)
            raise _too_large(self._num_bytes)
        return message


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, as far as is reasonable: most clients read no answer before they
    have sent it all.
    """
    num_bytes = 0
    while num_bytes < MAX_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _too_large(num_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the body has {num_bytes} bytes or more; this server takes {MAX_BODY_BYTES}: send less",
    )


def _id_of(headers: dict[bytes, bytes]) -> bytes:
    """The client's own X-Request-Id, as far as it is usable, or a new one."""
    given = _BAD_IN_ID.sub(b"", headers.get(b"x-request-id", b""))[:MAX_ID_CHARS]
    return given or secrets.token_hex(16).encode()

"""uvicorn's HTTP protocol with what it leaves open: a limit of a request's head, and errors of our
shape where a request is none.
"""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from http_proc.errors import HttpError, error_body

MAX_HEAD_BYTES = 64 << 10
"""Of request line and headers; the piece of data that goes beyond it is still taken in."""

CLOSE_S = 0.5
"""How long a client whose request is none may take to read so."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0
    _is_in_head = True
    _is_refused = False

    def data_received(self, data: bytes) -> None:
        """Bytes of one or more requests."""
        if self._is_refused:
            return
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
            return
        self._num_head_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The parser is at a request's body."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser is at the next request."""
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser makes nothing of it."""
        self._refuse(400, "this is no valid HTTP request")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, and let go of the connection."""
        body = error_body(HttpError(status, message))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self._is_refused = True
        # Not at once: what the client still sends would be answered by a reset, which can overtake
        # the answer.
        self.loop.call_later(CLOSE_S, self.transport.close)

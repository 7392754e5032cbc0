"""uvicorn's HTTP protocol with what it leaves open: a limit of a request's head, an end of
patience, and errors of our shape where a request is none.

Rules:
 1. Everything is read as it comes, so that the end of a connection shows: what was sent ahead of
    its turn is kept, within bounds.
 2. A client that keeps the server waiting, for the next request, for the rest of one, or for a
    response to be read, is let go of; sooner where there are too many connections.
"""

import asyncio
import socket
import sys
from collections.abc import Set
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from http_proc.errors import HttpError, error_body

MAX_HEAD_BYTES = 64 << 10
"""Of request line and headers; the piece of data that goes beyond it is still taken in."""
MAX_AHEAD_BYTES = 4 << 20
"""Of what may come while a request is answered."""
PIECE_BYTES = 16 << 10
"""So much is parsed at once: a request in the parser is larger by far than one that waits."""
PATIENCE_S = 60
"""How long a client may keep the server waiting."""
LOOK_S = 0.5
"""How often each connection is looked at."""
PATIENCE_LOOKS = round(PATIENCE_S / LOOK_S)
"""Looks are counted and not seconds: while this process stands still (stopped by a signal, say) it
hears nobody, and then it is the one that keeps others waiting.
"""
CLOSE_S = 0.5
"""How long a client whose request is none may take to read so."""

_BYTES_ACKED = slice(120, 128)
"""Of Linux's struct tcp_info: tcpi_bytes_acked, what the other end has taken."""


class _Awaited(NamedTuple):
    """What the client is to do next; one that is equal: it has done nothing since.

    what: "nothing"; "read", some of a response; "rest", of a request that has begun; "next", the
    beginning of one.
    """

    what: str
    progress: int = 0


_NOTHING = _Awaited("nothing")


class Protocol(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0
    _num_requests = 0
    """Begun so far."""
    _is_in_head = True
    _is_in_request = False
    _is_refused = False
    _answered: RequestResponseCycle | None = None
    """The request that is answered now, or was last; `self.cycle` is the last that was parsed."""
    _awaited = _NOTHING
    num_waits = 0
    """Looks since the first that found the client to keep the server waiting for just this."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self._ahead = bytearray()
        """What has come and was not parsed yet."""

    def data_received(self, data: bytes) -> None:
        """Bytes of one or more requests."""
        if self._is_refused:
            return
        self._ahead += data
        self._parse()
        if len(self._ahead) > MAX_AHEAD_BYTES:
            text = f"more than {MAX_AHEAD_BYTES} bytes were sent before the answer had come"
            self._refuse(413, text)

    def look(self) -> None:
        """End the connection if its client has kept the server waiting for too long.

        To be called every LOOK_S.
        """
        awaited = self._find_awaited()
        is_same = awaited == self._awaited and awaited is not _NOTHING
        self.num_waits = self.num_waits + 1 if is_same else 0
        self._awaited = awaited
        if self.num_waits > PATIENCE_LOOKS:
            self.give_up()

    def give_up(self) -> None:
        """The client does not do what is awaited."""
        what = self._awaited.what
        if what == "rest" and not self._is_refused:
            self._refuse(408, "the request was not completed in time")
        elif what == "read":
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, also for a request that is answered while others wait behind it."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # ---- the parser's news ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_request = True
        self._num_requests += 1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head; what follows a body in chunks is not kept: it may be endless."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser is at a request's body."""
        self._is_in_head = False
        was_paused = self.flow.read_paused
        super().on_headers_complete()
        if not was_paused:  # as it is if others wait behind the one that is answered
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The parser is at the next request."""
        self._is_in_head, self._is_in_request, self._num_head_bytes = True, False, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser makes nothing of it."""
        self._refuse(400, "this is no valid HTTP request")

    def on_response_complete(self) -> None:
        """The next may be answered."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._parse()

    # ---- inside ---------------------------------------------------------------------------

    def _parse(self) -> None:
        """Give the parser what there is, until a request is whole and is answered."""
        while self._ahead and not self._owes_answer and not self._is_refused:
            if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
                return
            piece = bytes(self._ahead[:PIECE_BYTES])
            del self._ahead[:PIECE_BYTES]
            self._num_head_bytes += len(piece)
            super().data_received(piece)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _open(self) -> RequestResponseCycle | None:
        """The request that is answered now."""
        is_open = self._answered is not None and not self._answered.response_complete
        return self._answered if is_open else None

    @property
    def _owes_answer(self) -> bool:
        """Whether a request has come to its end and its answer has not."""
        return self._open is not None and not self._open.more_body

    def _find_awaited(self) -> _Awaited:
        if self.transport.get_write_buffer_size():
            return _Awaited("read", _num_taken(self.transport.get_extra_info("socket")))
        if self._owes_answer:
            return _NOTHING
        return _Awaited("rest" if self._is_in_request else "next", self._num_requests)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer has begun, and let go of the connection."""
        self._is_refused = True
        self._ahead.clear()
        if (answered := self._open) is not None:
            answered.disconnected = True
            answered.message_event.set()
        if answered is None or not answered.response_started:
            body = error_body(HttpError(status, message))
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        # Not at once: what the client still sends would be answered by a reset, which can overtake
        # the answer.
        self.loop.call_later(CLOSE_S, self.transport.close)


async def look_after(connections: Set[Any], most: int) -> None:
    """Look at each of the connections, again and again; have no more than `most` for long."""
    while True:
        await asyncio.sleep(LOOK_S)
        for connection in list(connections):
            connection.look()
        make_room(connections, most)


def make_room(connections: Set[Any], most: int) -> None:
    """Let go of those that have kept the server waiting for longest, down to `most` in all.

    They must not keep others from connecting.
    """
    if (num_over := len(connections) - most) > 0:
        waiting = [connection for connection in connections if connection.num_waits]
        for connection in sorted(waiting, key=lambda c: -c.num_waits)[:num_over]:
            connection.give_up()


def _num_taken(connection: Any) -> int:
    """Bytes that the other end has taken of what was sent to it."""
    info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.stop)
    return int.from_bytes(info[_BYTES_ACKED], sys.byteorder)

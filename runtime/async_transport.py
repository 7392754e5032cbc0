"""A client's sockets, for an asyncio loop: apart from transport, since most processes are no client
and asyncio is a good part of a start.
"""

import asyncio
from typing import Any

import zmq

from runtime.errors import ConfigError, ConnectionLost, ProtocolError, RequestError
from runtime.messages import CODEC
from runtime.transport import (
    CLIENT_HWM,
    LINGER_MS,
    MAX_FRAME_BYTES,
    TOGETHER,
    TOGETHER_BYTES,
    Numbering,
    Socket,
    allow_ipv6,
)
from runtime.types import Epoch


class AsyncTransport:
    """Makes the connections of one client, for an asyncio loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._context: zmq.Context[Any] = zmq.Context()

    def dealer(self, address: str) -> "AsyncDealer":
        """Connect to a router; the server need not be there yet."""
        raw: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, LINGER_MS)
        raw.setsockopt(zmq.SNDHWM, 0)  # bounded by the calls that the user has open
        raw.setsockopt(zmq.RCVHWM, CLIENT_HWM)
        try:
            allow_ipv6(raw, address)
            raw.connect(address)
        except zmq.ZMQError as e:
            raw.close(linger=0)
            raise ConfigError(f"can't connect to {address!r}: {e}") from None
        return AsyncDealer(raw, Numbering(self._name, Epoch(0)))

    def close(self) -> None:
        """End what is left, once every connection is closed."""
        self._context.term()


class _Watched(Socket):
    """A socket that the running asyncio loop watches.

    By the loop's own means and not by zmq.asyncio, whose futures and polls are in the way of each
    first token.
    """

    def __init__(self, raw: "zmq.Socket[bytes]") -> None:
        super().__init__(raw)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fileno(), self._news.set)

    async def receive_parts(self) -> list[bytes]:
        """The next multipart message."""
        while True:
            try:
                return self.raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._news.clear()
                await self._news.wait()

    def send_parts(self, parts: list[bytes]) -> None:
        """Queue a multipart message, on a socket that has room for any number."""
        self.raw.send_multipart(parts, zmq.NOBLOCK)
        # What came meanwhile is not shown to the loop again: sending has taken note of it.
        if int(self.raw.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._news.set()

    def unwatch(self) -> None:
        """To be called before it is closed."""
        self._loop.remove_reader(self.fileno())


class AsyncDealer:
    """A client's connection to a router."""

    def __init__(self, raw: "zmq.Socket[bytes]", numbering: Numbering) -> None:
        """Use `AsyncTransport.dealer`."""
        self._socket = _Watched(raw)
        self._events = _Watched(raw.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        self._numbering = numbering
        self._num_received = 0
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        self._is_closed = False

    async def send(self, message: object) -> None:
        """Queue the message; RequestError for one that the server couldn't read, ConnectionLost
        once this is closed.

        The server ends a connection that sends it such a message, and every call on it. What the
        loop's tasks send in one turn goes together: a batch of requests starts in one step then.
        """
        if self._is_closed:
            raise ConnectionLost("this connection is closed: connect again")
        try:
            frame = self._numbering.encode(message)
            CODEC.decode(frame)
        except (AttributeError, TypeError, ValueError, OverflowError, ProtocolError) as e:
            raise RequestError(f"this can't be sent: {e}") from None
        if len(frame) > MAX_FRAME_BYTES:
            raise RequestError(
                f"this has {len(frame)} bytes; a server takes {MAX_FRAME_BYTES}: send less at once"
            )
        if self._num_unsent_bytes + len(frame) > TOGETHER_BYTES or len(self._unsent) == TOGETHER:
            self._send_unsent()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_unsent)
        self._unsent.append(frame)
        self._num_unsent_bytes += len(frame)

    async def receive(self) -> Any:
        """The next message; ProtocolError if the server speaks something else.

        ConnectionLost if it has let go of us: it numbers what it sends from 0 again then.
        """
        parts = await self._socket.receive_parts()
        header, message = CODEC.decode(parts[-1])
        if header.number != self._num_received:
            raise ConnectionLost(
                f"the server ended this connection's calls: {CLIENT_HWM} messages waited for this"
                " client, or nothing was heard of it for long; read faster, and connect again"
            )
        self._num_received += 1
        return message

    async def disconnected(self) -> None:
        """Returns when the server's end is gone."""
        await self._events.receive_parts()

    def close(self, deliver: bool = True) -> None:
        """Close, after sending what is queued (for LINGER_MS at most) if `deliver`."""
        if deliver:
            self._send_unsent()
        self._unsent.clear()
        self._is_closed = True
        for watched in (self._socket, self._events):
            watched.unwatch()
        self._socket.raw.disable_monitor()
        self._events.raw.close(linger=0)
        self._socket.raw.close(linger=LINGER_MS if deliver else 0)

    def _send_unsent(self) -> None:
        if self._unsent:
            frames, self._unsent, self._num_unsent_bytes = self._unsent, [], 0
            self._socket.send_parts(frames)

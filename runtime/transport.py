"""Sockets that carry messages. Only this module and async_transport know ZeroMQ.

Rules: a socket is made, used and closed by one thread; linger and high-water marks are explicit; on
an internal wire a gap, a foreign epoch or an undecodable frame is a ProtocolError that names the
wire, never skipped. A message is one frame; messages that are sent together, as the frames of one
ZeroMQ message, arrive together.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from runtime.codec import Header
from runtime.errors import ConfigError, PeerError, ProtocolError
from runtime.messages import CODEC
from runtime.types import Epoch

INTERNAL_HWM = 10_000
"""ZeroMQ messages that may wait on an internal wire; one more means that the peer is stuck."""
CLIENT_HWM = 1000
"""Messages that may wait for one client; a client that lets more gather loses its requests."""
TOGETHER = 64
"""Messages that a client may send together, if they have TOGETHER_BYTES at most: others must not
wait long for their turn.
"""
TOGETHER_BYTES = 32 << 10
BURST = 1000
"""ZeroMQ messages that one look at a socket takes: a peer that never stops sending must not keep
its reader from everybody else.
"""
LINGER_MS = 1000
"""How long a closing socket may take to hand over its last messages."""
MAX_FRAME_BYTES = 4 << 20
"""Of what a client sends: a frame may unpack to some fifty times its size."""


class Numbering:
    """Counts the messages of one sender, in one incarnation."""

    def __init__(self, sender: str, epoch: Epoch) -> None:
        self._sender = sender
        self._epoch = epoch
        self._next = 0

    def encode(self, message: object) -> bytes:
        """The frame of the next message."""
        header = Header(sender=self._sender, epoch=self._epoch, number=self._next)
        frame = CODEC.encode(message, header)
        self._next += 1  # only now: what can't be encoded leaves no gap
        return frame


class SequenceCheck:
    """Raises ProtocolError unless each sender's messages come in order, all of its one epoch."""

    def __init__(self, wire: str) -> None:
        self._wire = wire
        self._seen: dict[str, tuple[Epoch, int]] = {}

    def decode(self, frame: bytes) -> tuple[str, Any]:
        """(sender, message)."""
        try:
            header, message = CODEC.decode(frame)
        except ProtocolError as e:
            raise ProtocolError(f"on the wire {self._wire}: {e}") from None
        epoch, number = self._seen.get(header.sender, (header.epoch, -1))
        if header.epoch != epoch or header.number != number + 1:
            raise ProtocolError(
                f"on the wire {self._wire}: {header.sender} sent message {header.number} of epoch"
                f" {header.epoch}; number {number + 1} of epoch {epoch} was due"
            )
        self._seen[header.sender] = (epoch, header.number)
        return header.sender, message


class Socket:
    """What all sockets share: a poller can wait for it, and it is closed once."""

    def __init__(self, raw: "zmq.Socket[bytes]") -> None:
        self.raw = raw

    def fileno(self) -> int:
        """What an event loop may watch: readable at each change, so drain the socket to its end."""
        return int(self.raw.getsockopt(zmq.FD))

    def close(self) -> None:
        self.raw.close()

    def _receive(self) -> Iterator[list[bytes]]:
        """The ZeroMQ messages that are here now, BURST at most."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BURST):
                yield self.raw.recv_multipart(zmq.NOBLOCK)

    def _decoded(self, check: SequenceCheck) -> Iterator[Any]:
        """Their messages, in order."""
        for frames in self._receive():
            for frame in frames:
                yield check.decode(frame)[1]


class Outbox(Socket):
    """The sending end of an internal wire."""

    def __init__(self, raw: "zmq.Socket[bytes]", wire: str, numbering: Numbering) -> None:
        super().__init__(raw)
        self._wire = wire
        self._numbering = numbering

    def send(self, *messages: object) -> None:
        """Queue messages, together; PeerError if the other end has not read for long."""
        self.send_frames(*map(self._numbering.encode, messages))

    def send_frames(self, *frames: bytes) -> None:
        """`send` of what is encoded already."""
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise PeerError(
                f"the wire {self._wire} is full: its reader has left {INTERNAL_HWM} messages unread"
            ) from None


class Inbox(Socket):
    """The receiving end of an internal wire."""

    def __init__(self, raw: "zmq.Socket[bytes]", wire: str) -> None:
        super().__init__(raw)
        self._check = SequenceCheck(wire)

    def drain(self) -> Iterator[Any]:
        """The messages that are here now, in order."""
        return self._decoded(self._check)


class Duplex(Outbox):
    """One end of a pair, or a connection to a router: sends and receives."""

    def __init__(self, raw: "zmq.Socket[bytes]", wire: str, numbering: Numbering) -> None:
        super().__init__(raw, wire, numbering)
        self._check = SequenceCheck(wire)

    def drain(self) -> Iterator[Any]:
        """The messages that are here now, in order."""
        return self._decoded(self._check)


class Router(Socket):
    """A bound socket with many peers, each known by its routing id."""

    def __init__(self, raw: "zmq.Socket[bytes]", name: str, epoch: Epoch) -> None:
        super().__init__(raw)
        self._name = name
        self._epoch = epoch
        self._numberings: dict[bytes, Numbering] = {}

    def drain(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(peer, frames that were sent together) of what is here now.

        More than may be sent together, or none, come as one b"", which is no message.
        """
        for peer, *frames in self._receive():
            fits = len(frames) <= TOGETHER and sum(map(len, frames)) <= TOGETHER_BYTES
            yield peer, frames if len(frames) == 1 or (frames and fits) else [b""]

    def send(self, peer: bytes, message: object) -> bool:
        """Queue the message for `peer`; False if it is gone or has let too much gather."""
        numbering = self._numberings.get(peer)
        if numbering is None:
            numbering = self._numberings[peer] = Numbering(self._name, self._epoch)
        try:
            self.raw.send_multipart([peer, numbering.encode(message)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self.forget(peer)
            return False
        return True

    def forget(self, peer: bytes) -> None:
        """The peer will not be sent anything any more."""
        self._numberings.pop(peer, None)

    @property
    def address(self) -> str:
        """Where it is bound, with the port that was chosen for port 0."""
        return str(self.raw.getsockopt_string(zmq.LAST_ENDPOINT))


@dataclass(frozen=True, slots=True)
class Ready:
    """Which of the waited-for sockets and file descriptors have something to read."""

    _raw: frozenset[Any]

    def __bool__(self) -> bool:
        return bool(self._raw)

    def __contains__(self, source: Socket | int) -> bool:
        return (source.raw if isinstance(source, Socket) else source) in self._raw


class Poller:
    """Waits for several sockets and file descriptors at once."""

    def __init__(self, *sources: Socket | int) -> None:
        self._poller = zmq.Poller()
        for source in sources:
            self._poller.register(source.raw if isinstance(source, Socket) else source, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> Ready:
        """Wait until something can be read, or for `timeout_s`; None waits for ever."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        return Ready(frozenset(raw for raw, _ in self._poller.poll(timeout_ms)))


class Transport:
    """Makes the sockets of one process; `close` ends them all within LINGER_MS."""

    def __init__(self, name: str, epoch: Epoch = Epoch(0)) -> None:  # noqa: B008
        self.name = name
        self.epoch = epoch
        self._context: zmq.Context[Any] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []

    def outbox(self, address: str, wire: str) -> Outbox:
        """Connect to the reader of an internal wire, whether it is there already or not."""
        raw = self._socket(zmq.PUSH, INTERNAL_HWM)
        raw.connect(address)
        return Outbox(raw, wire, Numbering(self.name, self.epoch))

    def inbox(self, address: str, wire: str) -> Inbox:
        """Bind the reading end of an internal wire."""
        raw = self._socket(zmq.PULL, INTERNAL_HWM)
        _bind(raw, address)
        return Inbox(raw, wire)

    def pair(self, wire: str) -> tuple[Duplex, Duplex]:
        """Two connected ends within this process, for two threads."""
        bound, connected = (self._socket(zmq.PAIR, INTERNAL_HWM) for _ in range(2))
        address = f"inproc://{wire}"
        bound.bind(address)
        connected.connect(address)
        ends = (Duplex(raw, wire, Numbering(self.name, self.epoch)) for raw in (bound, connected))
        return next(ends), next(ends)

    def router(self, address: str, hwm: int = CLIENT_HWM) -> Router:
        """Bind a socket for many peers; a message to a peer that is gone is refused, not
        dropped.
        """
        raw = self._socket(zmq.ROUTER, hwm)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        raw.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        _bind(raw, address)
        return Router(raw, self.name, self.epoch)

    def dealer(self, address: str, wire: str) -> Duplex:
        """Connect to a router."""
        raw = self._socket(zmq.DEALER, CLIENT_HWM)
        raw.connect(address)
        return Duplex(raw, wire, Numbering(self.name, self.epoch))

    def close(self) -> None:
        """Close every socket that is left, then the context."""
        for raw in self._made:
            raw.close()
        self._context.term()

    def _socket(self, kind: int, hwm: int) -> "zmq.Socket[bytes]":
        raw: zmq.Socket[bytes] = self._context.socket(kind)
        raw.setsockopt(zmq.LINGER, LINGER_MS)
        raw.setsockopt(zmq.SNDHWM, hwm)
        raw.setsockopt(zmq.RCVHWM, hwm)
        self._made.append(raw)
        return raw


def check_endpoint(address: str) -> None:
    """Raise ConfigError unless `address` is an ipc path or a tcp address of this machine's
    loopback.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > 100:
            raise ConfigError(
                f"endpoint path {rest!r} has {len(rest.encode())} bytes: the system takes 100;"
                " choose a shorter one"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"endpoint is {address!r}: it takes ipc://PATH or tcp://HOST:PORT")
    if not _is_loopback(host):
        raise ConfigError(
            f"endpoint is {address!r}: only loopback addresses are served without keys; use"
            " tcp://127.0.0.1:PORT and a tunnel"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return False


def remove_socket_file(address: str, *, only_if_dead: bool) -> None:
    """Delete the file of an ipc address; with `only_if_dead`, unless somebody listens there."""
    path = _socket_file(address)
    if path is not None and path.is_socket() and not (only_if_dead and _answers(path)):
        path.unlink(missing_ok=True)


def _socket_file(address: str) -> Path | None:
    """The file of an ipc address; an abstract one ("ipc://@name") has none."""
    scheme, _, rest = address.partition("://")
    return Path(rest) if scheme == "ipc" and not rest.startswith("@") else None


def _answers(path: Path) -> bool:
    """Whether a process listens at this socket file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue of connections is full
            return True
        except OSError:
            return False
    return True


def allow_ipv6(raw: "zmq.Socket[Any]", address: str) -> None:
    if address.startswith("tcp://["):
        raw.setsockopt(zmq.IPV6, 1)


def _bind(raw: "zmq.Socket[bytes]", address: str) -> None:
    allow_ipv6(raw, address)
    path = _socket_file(address)
    if path is not None and path.exists() and (not path.is_socket() or _answers(path)):
        # ZeroMQ would delete the file, and so take the address away from whoever has it.
        raise ConfigError(f"can't listen at {address}: it is in use; choose another endpoint")
    try:
        raw.bind(address)
    except zmq.ZMQError as e:
        raise ConfigError(
            f"can't listen at {address}: {zmq.strerror(e.errno or 0)}; choose another endpoint"
        ) from None

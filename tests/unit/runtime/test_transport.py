"""Sockets and their rules; all over inproc and ipc, within this process."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from runtime.async_transport import AsyncDealer, AsyncTransport
from runtime.errors import (
    ConfigError,
    ConnectionLost,
    PeerError,
    ProtocolError,
    RequestError,
)
from runtime.messages import Detokenized, Heartbeat, Hello, Progress, Tokenize
from runtime.transport import (
    BURST,
    TOGETHER,
    TOGETHER_BYTES,
    Inbox,
    Numbering,
    Outbox,
    Poller,
    SequenceCheck,
    Transport,
    check_endpoint,
    remove_socket_file,
)
from runtime.types import Epoch
from tests.fakes import RawPeer, frame_of, until


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = Transport("me")
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        yield Path(name)


# ---- numbers ----------------------------------------------------------------------------------


def test_messages_in_order_are_taken() -> None:
    check, numbering = SequenceCheck("a → b"), Numbering("a", Epoch(2))
    for _ in range(3):
        assert check.decode(numbering.encode(Heartbeat())) == ("a", Heartbeat())


BAD_SEQUENCES = {
    "does not begin at 0": [(1, 0)],
    "a gap": [(0, 0), (2, 0)],
    "a repetition": [(0, 0), (0, 0)],
    "an old epoch": [(0, 1), (1, 0)],
    "a new epoch": [(0, 1), (0, 2)],
}


@pytest.mark.parametrize("sequence", BAD_SEQUENCES.values(), ids=BAD_SEQUENCES.keys())
def test_any_other_order_is_the_peers_fault(sequence: list[tuple[int, int]]) -> None:
    check = SequenceCheck("a → b")
    frames = [frame_of(Heartbeat(), number, "a", epoch) for number, epoch in sequence]
    for frame in frames[:-1]:
        check.decode(frame)
    with pytest.raises(ProtocolError, match="on the wire a → b: a sent message"):
        check.decode(frames[-1])


def test_each_sender_has_its_own_numbers() -> None:
    check = SequenceCheck("all → b")
    for sender in ("a", "c"):
        assert check.decode(frame_of(Heartbeat(), 0, sender))[0] == sender


@pytest.mark.parametrize("frame", [b"", b"\xc1", frame_of(Hello())[:-1]])
def test_an_undecodable_frame_names_the_wire(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="on the wire a → b"):
        SequenceCheck("a → b").decode(frame)


def test_what_cannot_be_encoded_leaves_no_gap() -> None:
    """The number was used up, and the next message ended the wire."""
    check, numbering = SequenceCheck("a → b"), Numbering("a", Epoch(0))
    with pytest.raises(UnicodeEncodeError):
        numbering.encode(Detokenized(request=0, text="\ud800"))
    check.decode(numbering.encode(Heartbeat()))


# ---- internal wires ---------------------------------------------------------------------------


def wire(transport: Transport, folder: Path) -> tuple[Outbox, Inbox]:
    address = f"ipc://{folder}/wire.sock"
    return transport.outbox(address, "a → b"), transport.inbox(address, "a → b")


def test_an_outbox_may_be_there_before_its_inbox(transport: Transport, folder: Path) -> None:
    outbox, inbox = wire(transport, folder)
    outbox.send(Progress(text="x", fraction=0.5))
    assert Poller(inbox).wait(10)
    assert list(inbox.drain()) == [Progress(text="x", fraction=0.5)]
    assert not Poller(inbox).wait(0)


@pytest.mark.parametrize(
    "frames", [(b"noise",), (b"", frame_of(Heartbeat())), (frame_of(Heartbeat(), 0), b"")]
)
def test_an_inbox_takes_nothing_but_whole_messages(
    transport: Transport, folder: Path, frames: tuple[bytes, ...]
) -> None:
    _, inbox = wire(transport, folder)
    with RawPeer(f"ipc://{folder}/wire.sock", zmq.PUSH) as peer:
        peer.send(*frames)
        assert Poller(inbox).wait(10)
        with pytest.raises(ProtocolError, match="on the wire a → b"):
            list(inbox.drain())


def test_what_is_sent_together_arrives_together(transport: Transport, folder: Path) -> None:
    outbox, inbox = wire(transport, folder)
    messages = [Progress(text=str(i), fraction=0.5) for i in range(300)]
    outbox.send(*messages)
    assert Poller(inbox).wait(10)
    assert list(inbox.drain()) == messages
    outbox.send(Heartbeat())
    assert Poller(inbox).wait(10)
    assert list(inbox.drain()) == [Heartbeat()]


def test_a_full_wire_is_an_error_not_a_wait(transport: Transport, folder: Path) -> None:
    outbox = transport.outbox(f"ipc://{folder}/nobody.sock", "a → b")

    def fill() -> None:
        while True:
            outbox.send(Heartbeat())

    with pytest.raises(PeerError, match="the wire a → b is full"):
        fill()


def test_one_look_at_a_socket_ends_however_much_there_is(
    transport: Transport, folder: Path
) -> None:
    """A sender that never paused kept its reader in the loop for ever."""
    outbox, inbox = wire(transport, folder)
    for _ in range(BURST + 1):
        outbox.send(Heartbeat())
    total = 0

    def all_read() -> bool:
        nonlocal total
        news = len(list(inbox.drain()))
        assert news <= BURST
        total += news
        return total == BURST + 1

    until(all_read, "all messages are read")


def test_a_pair_goes_both_ways(transport: Transport) -> None:
    one, other = transport.pair("control")
    one.send(Heartbeat())
    other.send(Hello())
    assert list(other.drain()) == [Heartbeat()]
    assert list(one.drain()) == [Hello()]


# ---- routers ----------------------------------------------------------------------------------


def test_a_router_answers_whom_it_heard(transport: Transport, folder: Path) -> None:
    router = transport.router(f"ipc://{folder}/public.sock")
    with RawPeer(router.address) as peer:
        peer.send(b"anything")
        assert Poller(router).wait(10)
        ((who, frames),) = list(router.drain())
        assert frames == [b"anything"]
        assert router.send(who, Heartbeat())
        assert peer.receive() == Heartbeat()
    until(lambda: not router.send(who, Heartbeat()), "the router notices that the peer is gone")


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [
        ([9] * 2, True),
        ([9] * TOGETHER, True),
        ([9] * (TOGETHER + 1), False),
        ([9] * 10 * TOGETHER, False),
        ([TOGETHER_BYTES // 2] * 2, True),
        ([TOGETHER_BYTES // 2] * 3, False),
        ([10 * TOGETHER_BYTES], True),
        ([], False),
    ],
)
def test_no_more_than_some_come_to_a_router_together(
    transport: Transport, folder: Path, sizes: list[int], is_taken: bool
) -> None:
    """What is heard at once keeps all other clients waiting."""
    router = transport.router(f"ipc://{folder}/public.sock")
    frames = [bytes(size) for size in sizes]
    with RawPeer(router.address) as peer:
        peer.send(*frames) if frames else peer.send(b"")
        assert Poller(router).wait(10)
        ((_, received),) = list(router.drain())
        assert received == (frames if is_taken else [b""])


def test_a_peer_that_does_not_read_is_given_up_at_its_limit(
    transport: Transport, folder: Path
) -> None:
    router = transport.router(f"ipc://{folder}/public.sock", hwm=10)
    big = Detokenized(request=0, text="x" * 100_000)
    with RawPeer(router.address, receive_hwm=1) as peer:
        peer.send(b"hello")
        assert Poller(router).wait(10)
        ((who, _),) = list(router.drain())
        until(lambda: not router.send(who, big), "the router gives the peer up")


def test_port_zero_becomes_a_real_one(transport: Transport) -> None:
    address = transport.router("tcp://127.0.0.1:0").address
    assert int(address.rpartition(":")[2]) > 0


def test_a_tcp_address_in_use_is_named(transport: Transport) -> None:
    address = transport.router("tcp://127.0.0.1:0").address
    with pytest.raises(ConfigError, match=f"can't listen at {address}"):
        transport.router(address)


def test_an_ipc_address_in_use_is_not_taken_over(transport: Transport, folder: Path) -> None:
    """ZeroMQ deletes the file that it finds: the second server took the first one's clients."""
    address = f"ipc://{folder}/public.sock"
    transport.router(address)
    with pytest.raises(ConfigError, match=f"can't listen at {address}: it is in use"):
        transport.router(address)


def test_no_ordinary_file_is_taken_for_a_socket(transport: Transport, folder: Path) -> None:
    (folder / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="in use"):
        transport.router(f"ipc://{folder}/notes")
    remove_socket_file(f"ipc://{folder}/notes", only_if_dead=False)
    assert (folder / "notes").read_text() == "mine"


def test_a_dead_servers_socket_file_is_no_hindrance(transport: Transport, folder: Path) -> None:
    path = folder / "left.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    transport.router(f"ipc://{path}")


def test_a_socket_file_is_removed_once_nobody_listens(transport: Transport, folder: Path) -> None:
    address = f"ipc://{folder}/public.sock"
    transport.router(address)
    remove_socket_file(address, only_if_dead=True)
    assert (folder / "public.sock").exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "left.sock"))
    remove_socket_file(f"ipc://{folder}/left.sock", only_if_dead=True)
    assert not (folder / "left.sock").exists()
    remove_socket_file("tcp://127.0.0.1:1", only_if_dead=True)
    remove_socket_file("ipc://@abstract", only_if_dead=True)


# ---- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["ipc:///tmp/a.sock", "tcp://127.0.0.1:0", "tcp://localhost:5000", "tcp://[::1]:5000"],
)
def test_local_addresses_are_taken(address: str) -> None:
    check_endpoint(address)


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "ipc://", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:65536",
     "tcp://127.0.0.1:x", "tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://127.evil.example:5000",
     "ipc:///" + "x" * 100],
)  # fmt: skip
def test_other_addresses_are_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        check_endpoint(address)


# ---- the client's end -------------------------------------------------------------------------


@contextmanager
def dealing(address: str) -> Iterator[AsyncDealer]:
    """A client's connection in the running loop, closed at the end."""
    client = AsyncTransport("client")
    dealer = client.dealer(address)
    try:
        yield dealer
    finally:
        dealer.close()
        client.close()


def test_a_client_sends_nothing_that_the_server_could_not_read(folder: Path) -> None:
    """The server answered that the connection is refused, which ended all other calls on it."""

    async def send() -> None:
        transport = AsyncTransport("client")
        dealer = transport.dealer(f"ipc://{folder}/nobody.sock")
        try:
            for text in (5, "\ud800", ["a"]):
                with pytest.raises(RequestError, match="can't be sent"):
                    await dealer.send(
                        Tokenize(request=0, text=text, chat=None, add_special_tokens=True)  # type: ignore[arg-type]
                    )
            with pytest.raises(RequestError, match="send less at once"):
                await dealer.send(
                    Tokenize(request=0, text="x" * (1 << 26), chat=None, add_special_tokens=True)
                )
        finally:
            dealer.close(deliver=False)
            transport.close()

    asyncio.run(send())


def test_an_address_that_is_none_is_refused() -> None:
    async def connect() -> None:
        transport = AsyncTransport("client")
        with pytest.raises(ConfigError, match="can't connect to 'nonsense'"):
            transport.dealer("nonsense")
        transport.close()

    asyncio.run(connect())


def test_a_message_that_came_while_another_was_sent_is_heard(
    transport: Transport, folder: Path
) -> None:
    """ZeroMQ's descriptor tells of it once, and whatever is done with the socket may be told."""
    router = transport.router(f"ipc://{folder}/server.sock")

    async def talk() -> None:
        with dealing(router.address) as dealer:
            await dealer.send(Hello())
            await asyncio.sleep(0)  # it is sent at the end of the loop's turn
            ((peer, _),) = until(lambda: list(router.drain()), "the client's message")
            receiving = asyncio.create_task(dealer.receive())
            await asyncio.sleep(0)  # it waits now
            router.send(peer, Heartbeat())
            assert dealer._socket.raw.poll(10_000)  # takes note of it, as sending may
            await dealer.send(Hello())
            assert await asyncio.wait_for(receiving, 10) == Heartbeat()

    asyncio.run(talk())


def test_what_a_clients_tasks_send_in_one_turn_goes_together(
    transport: Transport, folder: Path
) -> None:
    router = transport.router(f"ipc://{folder}/server.sock")

    async def talk(count: int) -> list[list[bytes]]:
        with dealing(router.address) as dealer:
            await asyncio.gather(*(dealer.send(Hello()) for _ in range(count)))
            await asyncio.sleep(0)
        received: list[list[bytes]] = []
        while sum(map(len, received)) < count:
            assert Poller(router).wait(10)
            received += [frames for _, frames in router.drain()]
        return received

    for count, sizes in ((1, [1]), (8, [8]), (2 * TOGETHER + 1, [TOGETHER, TOGETHER, 1])):
        received = asyncio.run(talk(count))
        assert [len(frames) for frames in received] == sizes
        check = SequenceCheck("client")
        for frames in received:
            for frame in frames:
                check.decode(frame)


def test_large_messages_of_a_client_go_one_by_one(transport: Transport, folder: Path) -> None:
    router = transport.router(f"ipc://{folder}/server.sock")

    async def talk() -> None:
        with dealing(router.address) as dealer:
            for size in (10, TOGETHER_BYTES - 1000, TOGETHER_BYTES, 10 * TOGETHER_BYTES, 10):
                await dealer.send(
                    Tokenize(request=0, text="x" * size, chat=None, add_special_tokens=True)
                )
            await asyncio.sleep(0)

    asyncio.run(talk())
    sizes: list[int] = []
    while sum(sizes) < 5:
        assert Poller(router).wait(10)
        sizes += [len(frames) for _, frames in router.drain() if frames != [b""]]
    assert sizes == [2, 1, 1, 1]


def test_a_closed_connection_sends_no_more(folder: Path) -> None:
    async def talk() -> None:
        with dealing(f"ipc://{folder}/nobody.sock") as dealer:
            pass
        with pytest.raises(ConnectionLost, match="is closed"):
            await dealer.send(Hello())

    asyncio.run(talk())


def test_a_client_that_closes_at_once_has_sent_its_messages(
    transport: Transport, folder: Path
) -> None:
    router = transport.router(f"ipc://{folder}/server.sock")

    async def talk() -> None:
        with dealing(router.address) as dealer:
            await dealer.send(Hello())

    asyncio.run(talk())
    assert Poller(router).wait(10)
    assert [len(frames) for _, frames in router.drain()] == [1]

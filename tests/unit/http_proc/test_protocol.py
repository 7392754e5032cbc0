"""What a connection's client may do to the server by going, waiting, or sending ahead.

Real sockets, but the time is what the test says.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from http_proc.protocol import (
    LOOK_S,
    MAX_AHEAD_BYTES,
    MAX_HEAD_BYTES,
    PATIENCE_S,
    PIECE_BYTES,
    Protocol,
    make_room,
)

HEAD = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
LARGE = 40_000_000
"""More than the sockets of one connection hold."""


def request(path: bytes, body: bytes = b"") -> bytes:
    return HEAD % (path, len(body)) + body


class Site:
    """Serves /wait, which never answers, /count, the length of the body, and /large."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.gone = asyncio.Event()
        self.headers: list[Any] = []
        self.state = ServerState()
        self.port = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.started.set()
        self.headers = scope["headers"]
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
            return
        answer = b"x" * LARGE if scope["path"] == "/large" else b"%d;" % len(body)
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})

    @property
    def connection(self) -> Protocol:
        """The one that there is."""
        (connection,) = self.state.connections
        assert isinstance(connection, Protocol)
        return connection

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Site, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A site, and a connection to it."""
    site = Site()
    config = uvicorn.Config(
        site.app,
        interface="asgi3",
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
    )
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: Protocol(config=config, server_state=site.state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await site.until(lambda: site.state.connections)
        try:
            yield site, reader, writer
        finally:
            writer.transport.abort()
            for connection in list(site.state.connections):
                connection.transport.abort()
            await site.until(lambda: not site.state.connections)
            await asyncio.gather(*site.state.tasks)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


# ---- clients that go --------------------------------------------------------------------------


AHEAD = {
    "nothing": b"",
    "a request": request(b"count"),
    "half of a head": b"GET /cou",
    "half of a body": HEAD % (b"count", 100) + b"x" * 50,
    "a large body": request(b"count", b"x" * 3_000_000),
    "many requests": request(b"count") * 20_000,
}


@pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD.keys())
@pytest.mark.parametrize("end", ["close", "reset", "half"])
def test_a_client_that_goes_is_noticed_whatever_it_has_sent_ahead(ahead: bytes, end: str) -> None:
    """What was sent ahead used to hide the end of the connection until the first was answered."""

    async def test() -> None:
        async with served() as (site, _, writer):
            writer.write(request(b"wait"))
            await site.started.wait()
            writer.write(ahead)
            if end == "half":
                writer.write_eof()
            elif end == "reset":
                writer.transport.abort()
            else:
                writer.close()
            await site.gone.wait()

    run(test)


def wait(connection: Protocol, seconds: float) -> None:
    """As if so long had passed."""
    for _ in range(round(seconds / LOOK_S)):
        connection.look()


# ---- clients that wait ------------------------------------------------------------------------


UNFINISHED = {
    "a line": b"GET /cou",
    "a head": b"GET /count HTTP/1.1\r\nhost: x\r\na: b",
    "a body": HEAD % (b"count", 100) + b"x",
    "a body in chunks": b"POST /count HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nxx\r\n1;",
    "what follows the chunks": b"POST /count HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\na",
}


@pytest.mark.parametrize("before", [b"", request(b"count")], ids=["at first", "later"])
@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED.keys())
def test_a_request_that_is_never_finished_is_given_up(sent: bytes, before: bytes) -> None:
    """However often another byte of it comes."""

    async def test() -> None:
        async with served() as (site, reader, writer):
            writer.write(before)
            if before:
                await reader.readuntil(b";")
            writer.write(sent)
            await site.until(lambda: site.connection._is_in_request)
            site.connection.look()
            for _ in range(PATIENCE_S):
                writer.write(b"a")
                await asyncio.sleep(0)
                wait(site.connection, 1)
                assert not site.connection._is_refused
            site.connection.look()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert "was not completed in time" in json.loads(body)["error"]["message"]
            await site.until(lambda: not site.state.connections)

    run(test)


@pytest.mark.parametrize("sent", [b"", b"\r\n", request(b"count")])
def test_a_connection_that_idles_is_closed(sent: bytes) -> None:
    async def test() -> None:
        async with served() as (site, reader, writer):
            writer.write(sent)
            if site.connection._num_requests or len(sent) > 2:
                await reader.readuntil(b";")
            site.connection.look()
            for _ in range(PATIENCE_S):
                writer.write(b"\r\n")  # is no request
                await asyncio.sleep(0)
                wait(site.connection, 1)
            assert not site.connection.transport.is_closing()
            site.connection.look()
            assert await reader.read() == b""

    run(test)


def test_each_request_has_its_own_time() -> None:
    async def test() -> None:
        async with served() as (site, reader, writer):
            for _ in range(4):
                wait(site.connection, PATIENCE_S)
                writer.write(HEAD % (b"count", 2))
                await site.until(lambda: site.connection._is_in_request)
                wait(site.connection, PATIENCE_S)
                writer.write(b"xx")
                assert (await reader.readuntil(b";")).endswith(b"2;")

    run(test)


@pytest.mark.parametrize("ahead", [b"", HEAD % (b"count", 100) + b"x"])
def test_a_client_that_waits_for_its_answer_may_do_so_for_ever(ahead: bytes) -> None:
    async def test() -> None:
        async with served() as (site, _, writer):
            writer.write(request(b"wait", b"x" * 200_000) + ahead)
            await site.started.wait()
            for _ in range(20):
                wait(site.connection, PATIENCE_S)
                await asyncio.sleep(0)
            assert not site.gone.is_set()
            assert not site.connection.transport.is_closing()

    run(test)


def test_a_response_that_nobody_reads_is_given_up() -> None:
    async def test() -> None:
        async with served() as (site, reader, writer):
            reader._limit = 1  # type: ignore[attr-defined]
            writer.write(request(b"large"))
            await site.until(lambda: site.connection.transport.get_write_buffer_size())
            taken = None
            while taken != site.connection._find_awaited():  # until sockets are full
                taken = site.connection._find_awaited()
                await asyncio.sleep(0.05)
            site.connection.look()
            wait(site.connection, PATIENCE_S)
            assert not site.connection.transport.is_closing()
            site.connection.look()
            await site.until(lambda: not site.state.connections)

    run(test)


def test_where_there_are_too_many_those_that_wait_longest_go_first() -> None:
    """Connections that do nothing took all the files that the server may open."""

    async def test() -> None:
        async with served() as (site, _, writer):
            writer.write(request(b"wait"))
            await site.started.wait()
            busy = site.connection
            idle = []
            for count in range(2, 6):
                _, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
                await site.until(lambda count=count: len(site.state.connections) == count)
                (new,) = set(site.state.connections) - {busy, *(c for c, _ in idle)}
                idle.append((new, other))
                for connection in list(site.state.connections):
                    wait(connection, 1)
            for most, num_left in ((5, 5), (3, 3), (0, 1)):
                make_room(site.state.connections, most)
                await site.until(lambda count=num_left: len(site.state.connections) == count)
                kept = {busy, *(c for c, _ in idle[5 - num_left :])}
                assert site.state.connections == kept
            for _, other in idle:
                other.transport.abort()

    run(test)


def test_a_slow_reader_is_a_reader() -> None:
    async def test() -> None:
        async with served() as (site, reader, writer):
            reader._limit = 1  # type: ignore[attr-defined]
            writer.write(request(b"large"))
            await site.until(lambda: site.connection.transport.get_write_buffer_size())
            num_read = 0
            while site.connection.transport.get_write_buffer_size():
                before = site.connection._find_awaited()
                while before == site.connection._find_awaited():
                    num_read += len(await reader.read(200_000))
                    await asyncio.sleep(0)
                wait(site.connection, PATIENCE_S)
            while num_read < LARGE:
                num_read += len(await reader.read(1_000_000))

    run(test)


# ---- what is kept of what is sent -------------------------------------------------------------


def test_requests_sent_ahead_are_answered_in_order_and_few_are_kept() -> None:
    """Each answer used to let a further piece of them into the parser."""
    count = 5_000

    async def test() -> None:
        async with served() as (site, reader, writer):
            writer.write(b"".join(request(b"count", b"x" * (i % 7)) for i in range(count)))
            assert count * len(request(b"count")) < MAX_AHEAD_BYTES
            most = 0
            for i in range(count):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert await reader.readuntil(b";") == b"%d;" % (i % 7)
                most = max(most, len(site.connection.pipeline))
            assert most * len(request(b"count")) < 2 * PIECE_BYTES

    run(test)


def test_who_sends_too_much_ahead_is_let_go_of() -> None:
    """It can't be read for ever, and unread it would hide that the client has gone."""

    async def test() -> None:
        async with served() as (site, reader, writer):
            writer.write(request(b"wait"))
            await site.started.wait()
            writer.write(request(b"count", b"x" * MAX_AHEAD_BYTES))
            assert (await reader.read()).startswith(b"HTTP/1.1 413")
            await site.gone.wait()

    run(test)


def test_what_follows_a_body_in_chunks_is_not_kept() -> None:
    async def test() -> None:
        async with served() as (site, reader, writer):
            head = b"POST /count HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            end = b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES + b"\r\n"
            writer.write(head + end)
            assert (await reader.readuntil(b";")).endswith(b"1;")
            assert len(site.headers) == 2

    run(test)


@pytest.mark.parametrize("is_one_piece", [False, True])
def test_nonsense_behind_a_request_is_refused_at_its_turn(is_one_piece: bool) -> None:
    """It used to be answered in the middle of the request's own response."""

    async def test() -> None:
        async with served() as (_, reader, writer):
            pieces = [request(b"count"), b"nonsense\r\n\r\n"]
            writer.writelines([b"".join(pieces)] if is_one_piece else pieces[:1])
            if not is_one_piece:
                await reader.readuntil(b";")
                writer.write(pieces[1])
            assert (await reader.read()).startswith(b"HTTP/1.1 400")

    run(test)


def test_nonsense_does_not_disturb_the_answer_before_it() -> None:
    async def test() -> None:
        async with served() as (site, _, writer):
            writer.write(request(b"wait"))
            await site.started.wait()
            writer.write(b"nonsense\r\n\r\n")
            await site.until(lambda: site.connection._ahead)
            assert not site.gone.is_set()

    run(test)

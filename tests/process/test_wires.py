"""What comes over the wires: garbage from clients harms nobody, garbage from within ends all."""

import asyncio
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from runtime.client import AsyncClient
from runtime.codec import VERSION
from runtime.config import from_options
from runtime.errors import ConfigError, ConnectionLost, RequestAborted
from runtime.messages import (
    CODEC,
    CREDIT,
    Abort,
    Chunk,
    Chunks,
    Finish,
    Generate,
    Heartbeat,
    Hello,
    StepResult,
    Tokenize,
    Welcome,
)
from runtime.sampling import SamplingParams
from runtime.server import Server
from runtime.supervisor import Supervisor
from runtime.sync_client import Client
from runtime.transport import MAX_FRAME_BYTES
from runtime.types import RequestId
from tests import fakes
from tests.fakes import (
    ECHO,
    GONE_S,
    SLOW_ECHO,
    RawPeer,
    Script,
    frame_of,
    is_gone,
    until,
)

StartServer = Callable[..., Server]
TWO = SamplingParams(max_tokens=2)
LONG = SamplingParams(max_tokens=30_000)


def generate(
    number: int, text: str = "some words", stream: bool = True, sampling: SamplingParams = LONG
) -> Generate:
    return Generate(
        request=number,
        text=text,
        token_ids=None,
        chat=None,
        sampling=sampling,
        stream=stream,
        timeout_s=None,
    )


def is_idle(client: Client) -> bool:
    stats = client.stats()
    return bool(stats["running"] == stats["waiting"] == 0)


# ---- the public endpoint ----------------------------------------------------------------------


def test_the_public_endpoint_survives_any_bytes(echo_server: Server) -> None:
    random = np.random.default_rng(0)
    whole = frame_of(generate(1))
    with Client(echo_server.endpoint) as good, RawPeer(echo_server.endpoint) as bad:
        for size in (*range(20), 1000, 100_000):
            bad.send(random.bytes(size))
        for cut in range(0, len(whole), 7):
            bad.send(whole[:cut])
        for code in range(120):
            bad.send(msgpack.packb([VERSION, "c", 0, 0, code]))
        for cls in CODEC.message_types():
            bad.send(msgpack.packb([VERSION, "c", 0, 0, CODEC._by_class[cls].code, None, [], {}]))
        bad.send(b"two", b"frames")
        bad.send(msgpack.packb([VERSION, "c", 0, 0, 4, 1, "x", None, True, "one more"]))
        bad.send(b"\x91" * 100_000)
        assert good.generate("still here", TWO).finish_reason == "length"
        bad.send(frame_of(Hello()))
        until(lambda: isinstance(bad.receive(), Welcome), "the bad client is served as well")
        assert good.health()
    assert echo_server.supervisor.error is None


def test_bytes_that_are_not_even_zeromq_are_survived(simulated_server: StartServer) -> None:
    import socket

    server = simulated_server(endpoint="tcp://127.0.0.1:0")
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\xff\0\0\0\0\0\0\0\1\x7f", b""):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(data)
    with Client(server.endpoint) as client:
        assert client.generate("a b", TWO).text


def test_a_frame_too_large_ends_that_connection_only(echo_server: Server) -> None:
    with Client(echo_server.endpoint) as good, RawPeer(echo_server.endpoint) as bad:
        bad.send(b"x" * (MAX_FRAME_BYTES + 1))
        bad.send(frame_of(Hello()))
        assert good.generate("a b", TWO).text


def test_a_killed_clients_requests_are_aborted(simulated_server: StartServer) -> None:
    server = simulated_server(*SLOW_ECHO)
    code = """
import sys
from runtime import Client, SamplingParams
client = Client(sys.argv[1])
streams = [
    client.generate("a b", SamplingParams(max_tokens=30_000), stream=True) for _ in range(3)
]
for chunk in streams[0]:
    print("chunk", flush=True)
"""
    with Client(server.endpoint) as watcher, Script(code, server.endpoint) as script:
        script.line("chunk")
        assert watcher.stats()["running"] == 3
        script.signal(signal.SIGKILL)
        until(lambda: is_idle(watcher), "its requests are gone")


def test_a_silent_client_loses_its_requests_and_hears_of_it(simulated_server: StartServer) -> None:
    """10 s of silence: the one test that has to wait for a limit of the protocol."""
    server = simulated_server(*SLOW_ECHO)

    async def talk() -> None:
        async with await AsyncClient.connect(server.endpoint) as client:
            client._connections[0]._tasks[1].cancel()  # no heartbeats any more
            with pytest.raises(RequestAborted, match="silent for 10 s"):
                await client.generate("some words", LONG)

    asyncio.run(asyncio.wait_for(talk(), 40))
    with Client(server.endpoint) as watcher:
        until(lambda: is_idle(watcher), "its requests are gone")


def memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def test_a_client_that_does_not_read_costs_little(simulated_server: StartServer) -> None:
    """Its streams are kept as text until it grants more chunks of them, and nobody waits for it."""
    server = simulated_server()
    tokenizer = server.supervisor.pids["tokenizer-0"]
    with (
        Client(server.endpoint) as watcher,
        RawPeer(server.endpoint, receive_hwm=1) as deaf,
    ):
        before = memory_mib(tokenizer)
        for number in range(16):
            deaf.send(frame_of(generate(number)))
        until(lambda: watcher.stats()["tokens_generated"] > 16 * 4 * CREDIT, "they run")
        assert watcher.generate("a b", TWO).text
        assert memory_mib(tokenizer) < before + 50
        for number in range(16):
            deaf.send(frame_of(Abort(request=RequestId(number))))
        chunks: list[Chunk] = []
        while sum(chunk.finish_reason is not None for chunk in chunks) < 16:
            chunks += deaf.receive().items
        for number in range(16):
            mine = [chunk for chunk in chunks if chunk.request == number]
            assert len(mine) <= CREDIT + 1
            assert mine[-1].offset + len(mine[-1].token_ids) > 2 * CREDIT
            assert "".join(c.text for c in mine).startswith("some words" * CREDIT)


def tokenize(number: int, text: str) -> Tokenize:
    return Tokenize(request=number, text=text, chat=None, add_special_tokens=True)


def test_a_client_that_reads_nothing_at_all_is_let_go(simulated_server: StartServer) -> None:
    """Credit bounds its streams; what else it asks for is bounded by the messages that wait."""
    server = simulated_server(*SLOW_ECHO)
    with (
        Client(server.endpoint) as watcher,
        RawPeer(server.endpoint, receive_hwm=1) as deaf,
    ):
        deaf.send(frame_of(generate(0)))
        until(lambda: watcher.stats()["running"], "its request runs")
        for number in range(1, 5000):
            deaf.send(frame_of(tokenize(number, "word " * 200)))
        until(lambda: is_idle(watcher), "its request is aborted")
        assert watcher.generate("a b", TWO).text


def test_a_client_that_reads_again_too_late_hears_that_its_calls_have_ended(
    simulated_server: StartServer,
) -> None:
    """Its calls used to hang for ever on a connection that was otherwise alive."""
    server = simulated_server(*SLOW_ECHO)

    async def talk(watcher: Client) -> list[Any]:
        async with await AsyncClient.connect(server.endpoint) as client:
            calls = [asyncio.ensure_future(client.generate("a b", LONG))]
            while not (await client.stats())["running"]:
                await asyncio.sleep(0.01)
            calls += [asyncio.ensure_future(client.tokenize("word " * 200)) for _ in range(5000)]
            await asyncio.sleep(0)  # all are sent
            # This thread, and so the client's loop, stands still until the server has given up.
            until(lambda: is_idle(watcher), "it is given up", 60)
            return await asyncio.gather(*calls, return_exceptions=True)

    with Client(server.endpoint) as watcher:
        ends = asyncio.run(asyncio.wait_for(talk(watcher), 90))
    assert isinstance(ends[0], ConnectionLost), ends[0]
    assert all(isinstance(end, list | ConnectionLost) for end in ends)


@pytest.mark.parametrize("kind", ["Hello()", "Stats(request=RequestId(number % 100_000))"])
def test_a_client_that_floods_does_not_shut_the_others_out(
    simulated_server: StartServer, kind: str
) -> None:
    server = simulated_server()
    code = f"""
import itertools, sys
from runtime.messages import Hello, Stats
from runtime.types import RequestId
from tests.fakes import RawPeer, frame_of
with RawPeer(sys.argv[1]) as peer:
    print("floods", flush=True)
    for number in itertools.count():
        peer.send(frame_of({kind}))
"""
    with Script(code, server.endpoint) as flood, Client(server.endpoint) as client:
        flood.line("floods")
        for _ in range(5):
            assert client.generate("a b", TWO, timeout_s=20).finish_reason == "length"
            assert client.stats()


def test_very_long_texts_let_others_pass(echo_server: Server) -> None:
    """One was one call of the tokenizer, for which everybody waited."""
    num_long = 8
    with RawPeer(echo_server.endpoint) as peer:
        for number in range(num_long):
            peer.send(frame_of(tokenize(number, "word and another, " * 60_000)))
        peer.send(frame_of(tokenize(100, "word")))
        peer.send(frame_of(generate(101, stream=False, sampling=TWO)))
        answers = [peer.receive(60) for _ in range(num_long + 2)]
    order = [a.items[0].request if isinstance(a, Chunks) else a.request for a in answers]
    assert order.index(100) < num_long // 2
    assert order.index(101) < num_long
    assert sorted(order) == [*range(num_long), 100, 101]


# ---- internal wires ---------------------------------------------------------------------------

WIRES = {
    "scheduler": ("scheduler", "tokenizer → scheduler"),
    "results": ("scheduler", "worker-0 → scheduler"),
    "tokenizer-0": ("tokenizer-0", "scheduler → tokenizer-0"),
    "worker-0": ("worker-0", "scheduler → worker-0"),
}
ABORT = Abort(request=RequestId(0))
SEQUENCES = {
    "noise": [b"noise"],
    "a number missing": [frame_of(ABORT, number=1, sender="x")],
    "another's message": [frame_of(Heartbeat(), sender="x")],
}


def end_of(server: Server) -> str:
    assert server.supervisor.wait(GONE_S)
    assert is_gone(server.instance.folder)
    return str(server.supervisor.error)


@pytest.mark.parametrize("frames", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_garbage_on_an_internal_wire_ends_the_server(
    simulated_server: StartServer, frames: list[bytes]
) -> None:
    server = simulated_server()
    with RawPeer(server.instance.wire("scheduler"), zmq.PUSH) as peer:
        for frame in frames:
            peer.send(frame)
        assert "tokenizer" in end_of(server)


@pytest.mark.parametrize("wire", WIRES)
def test_every_internal_wire_names_its_peer(simulated_server: StartServer, wire: str) -> None:
    server = simulated_server()
    reader, name = WIRES[wire]
    with RawPeer(server.instance.wire(wire), zmq.PUSH) as peer:
        peer.send(b"noise")
        assert end_of(server).startswith(f"{reader} failed: on the wire {name}: undecodable")


def test_an_old_epoch_ends_the_server(simulated_server: StartServer) -> None:
    server = simulated_server()
    finish = Finish(request=RequestId(0), keep=1)  # of no live request: ignored by itself
    with RawPeer(server.instance.wire("scheduler"), zmq.PUSH) as peer:
        peer.send(frame_of(finish, 0, "tokenizer-9", epoch=1))
        peer.send(frame_of(finish, 1, "tokenizer-9", epoch=0))
        assert "number 1 of epoch 1 was due" in end_of(server)


def test_a_result_of_no_step_ends_the_server(simulated_server: StartServer) -> None:
    server = simulated_server()
    result = StepResult(step=99, tokens=np.array([], np.int32), started_s=0.0, ended_s=0.0)
    with RawPeer(server.instance.wire("results"), zmq.PUSH) as peer:
        peer.send(frame_of(result, sender="worker-9"))
        assert "a result of step 99" in end_of(server)


def test_noise_on_the_supervisors_wire_ends_the_server(simulated_server: StartServer) -> None:
    server = simulated_server()
    with RawPeer(server.instance.wire("supervisor")) as peer:
        peer.send(b"noise")
        assert "unknown process broke the protocol" in end_of(server)


# ---- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_the_second_server_at_one_endpoint_fails_by_its_name(
    simulated_server: StartServer, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ipc it took the first one's clients instead, as ZeroMQ deletes the file it finds."""
    monkeypatch.chdir(tmp_path)
    endpoint = "tcp://127.0.0.1:0" if kind == "tcp" else "ipc://public.sock"
    first = simulated_server(endpoint=endpoint)
    second = Server(
        from_options({"endpoint": first.endpoint, "simulated": shlex.join(ECHO), "http": False})
    )
    with pytest.raises(ConfigError, match=f"can't listen at {first.endpoint}"):
        second.start()
    assert is_gone(second.instance.folder)
    with Client(first.endpoint) as client:
        assert client.generate("a b", TWO).text


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_socket_file_of_the_users_own_choice_is_removed(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is outside the instance's folder, and stayed when the tokenizer was killed."""
    monkeypatch.chdir(tmp_path)
    with fakes.simulated_server(endpoint="ipc://public.sock") as server:
        assert (tmp_path / "public.sock").is_socket()
        if end == "kill":
            os.kill(server.supervisor.pids["tokenizer-0"], signal.SIGKILL)
            assert server.supervisor.wait(GONE_S)
    assert list(tmp_path.iterdir()) == []


def test_a_long_tmpdir_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with fakes.simulated_server() as server, Client(server.endpoint) as client:
        assert client.generate("a b", TWO).text
    assert list(long.iterdir()) == []


def test_a_server_without_processes_can_be_started_and_stopped() -> None:
    server = Server(from_options({"simulated": shlex.join(ECHO), "http": False}))
    server.stop()
    assert is_gone(server.instance.folder)


def test_a_supervisor_that_cannot_listen_says_so(tmp_path: Path) -> None:
    """`start` waited for ever: the thread had failed before there was anything to end."""
    server = Server(from_options({"simulated": shlex.join(ECHO), "http": False}))
    assert isinstance(server.supervisor, Supervisor)
    (server.instance.folder / "supervisor.sock").mkdir()
    with pytest.raises(ConfigError, match="can't listen at"):
        server.start()
    assert is_gone(server.instance.folder)

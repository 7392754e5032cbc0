"""A server with several tokenizer processes looks like one, and loses nothing between them."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from runtime import LLM
from runtime.client import AsyncClient, Stream
from runtime.errors import ConnectionLost, ProcessDied
from runtime.messages import Chunks, Generate, Hello, Welcome
from runtime.sampling import SamplingParams
from runtime.server import Server
from runtime.sync_client import Client
from tests import fakes
from tests.fakes import ECHO, GONE_S, SLOW_ECHO, RawPeer, Script, frame_of, is_gone, kill, until

COUNT = 3
LONG = SamplingParams(max_tokens=30_000)
PIDS = [f"tokenizer-{index}" for index in range(COUNT)]


def params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fakes.simulated_server(num_tokenizers=COUNT) as server:
        yield server


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    with fakes.simulated_server(*SLOW_ECHO, num_tokenizers=COUNT) as server:
        yield server


async def connected(endpoint: str) -> AsyncClient:
    """A client that has found every tokenizer."""
    client = await AsyncClient.connect(endpoint)
    while len(client._connections) < COUNT:
        await asyncio.sleep(0.01)
    return client


def run(server: Server, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """The result of `work` with a client that has found every tokenizer."""

    async def job() -> Any:
        async with await connected(server.endpoint) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(job(), 60))


async def start_on_each(client: AsyncClient) -> list[Stream]:
    """A long stream on each tokenizer; they run."""
    streams = [await client.generate("some words", LONG, stream=True) for _ in range(COUNT)]
    assert [connection.num_open for connection in client._connections] == [1] * COUNT
    while (await client.stats())["running"] < COUNT:
        await asyncio.sleep(0.01)
    return streams


# ---- sharing the load -------------------------------------------------------------------------


def test_every_tokenizer_is_a_process_of_the_server(server: Server) -> None:
    assert [name for name in server.supervisor.pids if name.startswith("tokenizer")] == PIDS


def test_calls_go_where_the_fewest_are_open(slow_server: Server) -> None:
    async def share(client: AsyncClient) -> None:
        calls = [asyncio.create_task(client.generate("a b", LONG)) for _ in range(4 * COUNT)]
        while (await client.stats())["running"] < len(calls):
            await asyncio.sleep(0.01)
        assert [connection.num_open for connection in client._connections] == [4] * COUNT
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        while (await client.stats())["running"]:
            await asyncio.sleep(0.01)
        assert [connection.num_open for connection in client._connections] == [0] * COUNT

    run(slow_server, share)


async def one_call(client: AsyncClient, number: int) -> None:
    """Any of the calls, its answer checked; the ids of each are its own."""
    ids = [number + 5, number + 6]
    match number % 5:
        case 0:
            assert (await client.generate(ids, params(7))).token_ids == (ids * 4)[:7]
        case 1:
            stream = await client.generate(ids, params(9), stream=True)
            chunks = [chunk async for chunk in stream]
            assert [i for c in chunks for i in c.token_ids.tolist()] == (ids * 5)[:9]
            lengths = np.cumsum([0, *(len(c.token_ids) for c in chunks)])
            assert [c.offset for c in chunks] == lengths[:-1].tolist()
        case 2:
            text = f"number {number}"
            assert await client.detokenize(await client.tokenize(text)) == text
        case 3:
            stream = await client.generate(ids, LONG, stream=True)
            await stream.abort()
            assert (await stream.whole()).finish_reason in ("abort", "length")
        case 4:
            assert (await client.stats())["pages"]
            await client.flush_cache()


def test_no_reply_is_lost_between_them(server: Server) -> None:
    async def everything() -> None:
        clients = [await connected(server.endpoint) for _ in range(3)]
        calls = [one_call(client, number) for number in range(200) for client in clients]
        random.Random(0).shuffle(calls)
        await asyncio.gather(*calls)
        stats = await clients[0].stats()
        assert stats["running"] == stats["waiting"] == 0
        for client in clients:
            await client.close()

    asyncio.run(asyncio.wait_for(everything(), 60))


def test_an_llm_shares_its_prompts_out() -> None:
    with LLM(simulated=" ".join(ECHO), num_tokenizers=2) as llm:
        results = llm.generate([[n + 5] for n in range(200)], params(3))
        assert [r["token_ids"] for r in results] == [[n + 5] * 3 for n in range(200)]
        assert set(llm.pids) == {"worker-0", "tokenizer-0", "tokenizer-1", "scheduler"}


# ---- one server -------------------------------------------------------------------------------


def test_the_public_endpoint_alone_is_a_whole_server(server: Server) -> None:
    """A program that knows nothing of several tokenizers."""
    with RawPeer(server.endpoint) as peer:
        peer.send(frame_of(Hello()))
        welcome = peer.receive()
        assert isinstance(welcome, Welcome)
        assert len(welcome.endpoints) == COUNT - 1
        ask = Generate(
            request=0, text=None, token_ids=np.array([5], np.int32), chat=None,
            sampling=params(4), stream=False, timeout_s=None,
        )  # fmt: skip
        peer.send(frame_of(ask))
        answer = peer.receive()
        assert isinstance(answer, Chunks)
        assert answer.items[0].token_ids.tolist() == [5] * 4


def test_over_tcp_the_others_get_ports_of_their_own() -> None:
    with fakes.simulated_server(endpoint="tcp://127.0.0.1:0", num_tokenizers=2) as server:

        async def ask() -> None:
            async with await AsyncClient.connect(server.endpoint) as client:
                while len(client._connections) < 2:
                    await asyncio.sleep(0.01)
                addresses = [connection.endpoint for connection in client._connections]
                assert len(set(addresses)) == 2
                assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)
                calls = [client.generate([n + 5], params(2)) for n in range(10)]
                results = await asyncio.gather(*calls)
                assert [r.token_ids for r in results] == [[n + 5] * 2 for n in range(10)]

        asyncio.run(asyncio.wait_for(ask(), 60))


def test_what_cannot_be_reached_or_is_another_server_is_done_without(
    server: Server, slow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.client.JOIN_S", 0.2)

    async def ask(client: AsyncClient) -> None:
        assert client.server is not None
        for address in ("tcp://127.0.0.1:1", "nonsense", slow_server.endpoint):
            await client._join(address, client.server.server_id)
        assert len(client._connections) == COUNT
        assert (await client.generate([5], params(2))).token_ids == [5, 5]

    run(server, ask)


def test_a_tokenizer_that_lets_a_client_go_ends_the_calls_there_only(slow_server: Server) -> None:
    async def ask(client: AsyncClient) -> None:
        streams = await start_on_each(client)
        streams[1]._connection._break(ConnectionLost("it was silent"))
        with pytest.raises(ConnectionLost, match="silent"):
            await streams[1].whole()
        for stream in (streams[0], streams[2]):
            await stream.abort()
            assert (await stream.whole()).finish_reason == "abort"
        assert (await client.generate([5], params(2))).token_ids == [5, 5]
        assert await client.health()

    run(slow_server, ask)


# ---- ends -------------------------------------------------------------------------------------


def test_aborts_and_time_limits_reach_requests_of_every_tokenizer(slow_server: Server) -> None:
    async def end(client: AsyncClient) -> None:
        streams = await start_on_each(client)
        for stream in streams:
            await client.abort(stream.request)
        ends = await asyncio.gather(*(stream.whole() for stream in streams))
        limited = [client.generate("a b", LONG, timeout_s=0.2) for _ in range(COUNT)]
        ends += await asyncio.gather(*limited)
        assert [end.finish_reason for end in ends] == ["abort"] * 2 * COUNT

    run(slow_server, end)


def test_a_killed_clients_requests_end_on_every_tokenizer(slow_server: Server) -> None:
    code = """
import sys
from runtime import Client, SamplingParams
client = Client(sys.argv[1])
while len(client.async_client._connections) < 3:
    pass
streams = [
    client.generate("a b", SamplingParams(max_tokens=30_000), stream=True) for _ in range(6)
]
for chunk in streams[0]:
    print("chunk", flush=True)
"""
    with Client(slow_server.endpoint) as watcher, Script(code, slow_server.endpoint) as script:
        script.line("chunk")
        until(lambda: watcher.stats()["running"] == 6, "they run")
        script.signal(signal.SIGKILL)
        until(lambda: not watcher.stats()["running"], "its requests are gone")


@pytest.mark.parametrize("name", ["tokenizer-1", "worker-0"])
def test_the_death_of_one_ends_the_server_and_everybody_hears_of_it(name: str) -> None:
    with fakes.simulated_server(*SLOW_ECHO, num_tokenizers=COUNT) as server:

        async def die(client: AsyncClient) -> dict[str, Any]:
            streams = await start_on_each(client)
            kill(server.supervisor.pids[name])
            ends = await asyncio.gather(*(s.whole() for s in streams), return_exceptions=True)
            return {s._connection.endpoint: end for s, end in zip(streams, ends, strict=True)}

        for endpoint, end in run(server, die).items():
            if name == "tokenizer-1" and endpoint.endswith("public-1.sock"):
                assert isinstance(end, ConnectionLost)
            else:
                assert isinstance(end, ProcessDied)
                assert f"{name} died (killed by SIGKILL)" in str(end)
        assert server.supervisor.wait(GONE_S)
        assert f"{name} died (killed by SIGKILL)" in str(server.supervisor.error)
        assert is_gone(server.instance.folder)


def test_a_script_hears_which_of_them_died() -> None:
    with LLM(simulated=" ".join(ECHO), num_tokenizers=2) as llm:
        kill(llm.pids["tokenizer-1"])
        with pytest.raises(ProcessDied, match=r"tokenizer-1 died"):
            until(lambda: not llm.stats(), "it ends")

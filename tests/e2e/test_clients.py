"""The ZMQ client library against a running server, whose worker echoes the prompt."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from runtime.client import AsyncClient
from runtime.completion import Choice, Completion
from runtime.errors import (
    ConnectionLost,
    ProcessDied,
    RequestAborted,
    RequestError,
    TandemError,
)
from runtime.messages import CREDIT, FinishReason, Heartbeat
from runtime.sampling import SamplingParams
from runtime.server import Server
from runtime.sync_client import Client
from tests.fakes import SLOW_ECHO, until

StartServer = Callable[..., Server]
LONG = SamplingParams(max_tokens=30_000)
PROMPT = "one two three"


def params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


def run(server: Server, work: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """The result of `work` with a connected client."""

    async def connected() -> Any:
        async with await AsyncClient.connect(server.endpoint) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(connected(), 60))


def wait_until_idle(client: Client) -> None:
    def idle() -> bool:
        stats = client.stats()
        return bool(stats["running"] == stats["waiting"] == 0)

    until(idle, "no request is left on the server")


@pytest.fixture(scope="module")
def slow_server() -> Any:
    from tests import fakes

    with fakes.simulated_server(*SLOW_ECHO) as server:
        yield server


@pytest.fixture
def client(echo_server: Server) -> Any:
    with Client(echo_server.endpoint) as client:
        yield client


# ---- every call -------------------------------------------------------------------------------


def test_generate_returns_the_whole_completion(client: Client) -> None:
    ids = client.tokenize(PROMPT)
    client.flush_cache()
    output = Choice(
        index=0,
        text=PROMPT,
        token_ids=ids,
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
    )
    assert client.generate(PROMPT, params(len(ids))) == Completion(
        choices=(output,),
        prompt_tokens=len(ids),
        cached_tokens=0,
    )


def test_a_stream_adds_up_to_the_whole(client: Client) -> None:
    whole = client.generate(PROMPT, params(20))
    chunks = list(client.generate(PROMPT, params(20), stream=True))
    assert "".join(c.text for c in chunks) == whole.text
    assert [i for c in chunks for i in c.token_ids.tolist()] == whole.token_ids
    offsets = [c.offset for c in chunks]
    assert offsets == sorted(offsets)
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert len(chunks) > 1


def test_prompts_may_be_token_ids(client: Client) -> None:
    assert client.generate([5, 6, 7], params(4)).token_ids == [5, 6, 7, 5]


def test_chat_renders_the_models_template(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = client.tokenize_chat(messages)
    assert "<|im_start|>user\nHi" in prompt.text
    answer = client.chat(messages, params(3, skip_special_tokens=False, ignore_eos=True))
    assert answer.prompt_tokens == len(prompt.token_ids)
    assert answer.token_ids == prompt.token_ids[:3].tolist()
    assert list(client.chat(messages, params(3), stream=True))


def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    text = "naïve ☃ 12345\n\ttabs"
    assert client.detokenize(client.tokenize(text)) == text
    assert client.tokenize("") == []
    assert client.detokenize([]) == ""


def test_stop_strings_cut_the_text(client: Client) -> None:
    done = client.generate("alpha beta gamma", params(50, stop=("beta",)))
    assert (done.text, done.finish_reason, done.matched_stop) == ("alpha ", "stop", "beta")


def test_stats_health_and_flush(client: Client) -> None:
    client.generate("some words to keep " * 40, params(2))
    assert client.stats()["pages_cached"] > 0
    assert client.health()
    assert client.flush_cache() > 0
    assert client.stats()["pages_cached"] == 0


def test_the_server_says_what_it_is(client: Client) -> None:
    assert client.server.vocab_size == 49152
    assert "SmolLM2" in client.server.model


def test_a_stream_of_several_outputs_tells_them_apart(client: Client) -> None:
    chunks = list(client.generate([5, 6, 7], params(4, n=3, logprobs=1), stream=True))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [i for chunk in own for i in chunk.token_ids.tolist()] == [5, 6, 7, 5]
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["length"]
        assert sum(chunk.logprobs.num_tokens for chunk in own if chunk.logprobs) == 4


def test_log_probabilities_come_with_the_whole(client: Client) -> None:
    prompt = list(range(10, 60))
    done = client.generate(prompt, params(2, logprobs=1, prompt_logprobs=0, n=2))
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert [entry["token_id"] for entry in done.prompt_logprobs[1:] if entry] == prompt[1:]
    for choice in done.choices:
        assert choice.logprobs is not None
        assert [entry["token_id"] for entry in choice.logprobs] == choice.token_ids == [10, 11]
        assert [len(entry["top_logprobs"]) for entry in choice.logprobs] == [1, 1]
    assert client.generate([5], params(1, prompt_logprobs=3)).prompt_logprobs == [None]
    assert client.generate([5], params(1)).prompt_logprobs is None


# ---- ends -------------------------------------------------------------------------------------


def test_an_abort_ends_every_output_of_a_call(slow_server: Server) -> None:
    with Client(slow_server.endpoint) as client:
        stream = client.generate(PROMPT, params(30_000, n=3), stream=True)
        finals = []
        for number, chunk in enumerate(stream):
            if not number:
                stream.abort()
            if chunk.finish_reason:
                finals.append((chunk.index, str(chunk.finish_reason)))
        assert sorted(finals) == [(index, "abort") for index in range(3)]
        wait_until_idle(client)


def test_a_timeout_ends_as_an_abort(slow_server: Server) -> None:
    with Client(slow_server.endpoint) as client:
        done = client.generate(PROMPT, LONG, timeout_s=0.3)
        assert done.finish_reason == "abort"
        wait_until_idle(client)


def test_an_abort_ends_a_stream_with_a_last_chunk(slow_server: Server) -> None:
    with Client(slow_server.endpoint) as client:
        stream = client.generate(PROMPT, LONG, stream=True)
        chunks = []
        for chunk in stream:
            if not chunks:
                stream.abort()
            chunks.append(chunk)
        assert chunks[-1].finish_reason == "abort"
        wait_until_idle(client)
        client.abort(stream.request)  # of one that has ended: nothing


def test_a_loop_left_early_ends_the_request_on_the_server(slow_server: Server) -> None:
    with Client(slow_server.endpoint) as client:
        for _ in client.generate(PROMPT, LONG, stream=True):
            break
        wait_until_idle(client)


def test_an_async_loop_left_early_ends_the_request_on_the_server(slow_server: Server) -> None:
    async def leave(client: AsyncClient) -> None:
        async for _ in await client.generate(PROMPT, LONG, stream=True):
            break
        gc.collect()
        while (await client.stats())["running"]:
            await asyncio.sleep(0.02)

    run(slow_server, leave)


def test_a_stream_that_was_left_says_so_when_it_is_read_again(slow_server: Server) -> None:
    """It waited for ever for chunks that nobody sent any more."""
    with Client(slow_server.endpoint) as client:
        stream = client.generate(PROMPT, LONG, stream=True)
        for _ in stream:
            break
        wait_until_idle(client)
        with pytest.raises(RequestAborted, match="left before its end"):
            next(iter(stream))


def test_a_stream_that_is_not_read_waits_on_the_server(echo_server: Server) -> None:
    """Its chunks gathered in the client, however many there were."""

    async def read_late(client: AsyncClient) -> None:
        text = "☃ and more 👨‍👩‍👧‍👦 "
        before = (await client.stats())["tokens_generated"]
        stream = await client.generate(text, params(2000), stream=True)
        while (await client.stats())["tokens_generated"] < before + 2000:
            await asyncio.sleep(0.01)
        assert len(stream._mailbox) <= CREDIT + 1
        done = await stream.whole()
        assert len(done.token_ids) == 2000
        assert done.text == await client.detokenize(done.token_ids)

    run(echo_server, read_late)


def test_a_stream_goes_on_as_it_is_read(slow_server: Server) -> None:
    """Beyond its first credit, in chunks of a step each."""
    with Client(slow_server.endpoint) as client:
        chunks = list(client.generate(PROMPT, params(4 * CREDIT), stream=True))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4 * CREDIT
        assert len(chunks) > 3 * CREDIT


def test_a_stream_that_is_dropped_unread_ends_on_the_server(slow_server: Server) -> None:
    """It ran to its end, and the client remembered it for ever."""
    with Client(slow_server.endpoint) as client:
        streams = [client.generate(PROMPT, LONG, stream=True) for _ in range(3)]
        until(lambda: client.stats()["running"] == 3, "they run")
        streams.clear()
        gc.collect()
        wait_until_idle(client)
        (connection,) = client.async_client._connections
        until(lambda: connection.num_open == 0, "the client has forgotten them")


def test_an_async_stream_that_is_dropped_unread_ends_on_the_server(slow_server: Server) -> None:
    async def drop(client: AsyncClient) -> None:
        streams = [await client.generate(PROMPT, LONG, stream=True) for _ in range(3)]
        while (await client.stats())["running"] < 3:
            await asyncio.sleep(0.01)
        streams.clear()
        gc.collect()
        while (await client.stats())["running"]:
            await asyncio.sleep(0.01)
        assert client._connections[0].num_open == 0

    run(slow_server, drop)


def test_a_cancelled_call_ends_the_request_on_the_server(slow_server: Server) -> None:
    async def cancel(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate(PROMPT, LONG))
        while not (await client.stats())["running"]:
            await asyncio.sleep(0.02)
        task.cancel()
        while (await client.stats())["running"]:
            await asyncio.sleep(0.02)
        assert task.cancelled()

    run(slow_server, cancel)


def test_closing_the_client_ends_its_requests_and_its_other_threads_calls(
    slow_server: Server,
) -> None:
    """The loop stopped before the other threads had heard of it, and they waited for ever."""
    client = Client(slow_server.endpoint)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(partial(client.generate, PROMPT, LONG)) for _ in range(4)]
        until(lambda: client.stats()["running"] == 4, "they run")
        client.close()
        for call in calls:
            with pytest.raises(ConnectionLost, match="closed"):
                call.result(10)
    with Client(slow_server.endpoint) as watcher:
        wait_until_idle(watcher)


def test_a_closed_client_says_so(echo_server: Server) -> None:
    client = Client(echo_server.endpoint)
    stream = iter(client.generate(PROMPT, LONG, stream=True))
    next(stream)
    client.close()
    client.close()
    for call in (client.stats, lambda: client.generate("x"), lambda: next(stream)):
        with pytest.raises(ConnectionLost, match="closed"):
            call()


def test_garbage_collection_on_the_clients_own_thread_does_not_block_it(
    slow_server: Server,
) -> None:
    """A stream that is collected there waited for the thread that it was on."""
    with Client(slow_server.endpoint) as client:
        streams = [iter(client.generate(PROMPT, LONG, stream=True))]
        next(streams[0])

        async def collect() -> None:
            streams.clear()

        client.run(collect())
        wait_until_idle(client)


# ---- many at once -----------------------------------------------------------------------------


def test_many_clients_share_one_endpoint(echo_server: Server) -> None:
    async def all_of_them() -> list[Any]:
        clients = [await AsyncClient.connect(echo_server.endpoint) for _ in range(20)]
        try:
            calls = [c.generate([n + 5], params(10)) for n, c in enumerate(clients) for _ in "123"]
            return await asyncio.gather(*calls)
        finally:
            await asyncio.gather(*(c.close() for c in clients))

    results = asyncio.run(all_of_them())
    assert [r.token_ids for r in results] == [[n + 5] * 10 for n in range(20) for _ in "123"]


def test_one_client_serves_many_threads(client: Client) -> None:
    def ask(number: int) -> list[int]:
        return client.generate([number + 5], params(5)).token_ids

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(64))) == [[n + 5] * 5 for n in range(64)]


def test_a_call_that_is_refused_leaves_the_others_alone(slow_server: Server) -> None:
    """Fields of a wrong type reached the server, which refused the whole connection."""
    bad: list[Callable[[Client], Any]] = [
        lambda c: c.generate("x", params("5")),  # type: ignore[arg-type]
        lambda c: c.generate("x", params(5, temperature="hot")),
        lambda c: c.generate("x", params(5, stop=(7,))),
        lambda c: c.generate("x", params(5, skip_special_tokens="no")),
        lambda c: c.generate("x", params(5, ignore_eos=1)),
        lambda c: c.generate("x", {"max_tokens": 5}),  # type: ignore[call-overload]
        lambda c: c.generate("x", params(5), timeout_s="1"),  # type: ignore[call-overload]
        lambda c: c.generate("x", params(5), timeout_s=-1.0),
        lambda c: c.generate(["x"], params(5)),  # type: ignore[list-item]
        lambda c: c.generate([1 << 40], params(5)),
        lambda c: c.generate([49152], params(5)),
        lambda c: c.generate("", params(5)),
        lambda c: c.generate("x\ud800", params(5)),
        lambda c: c.generate("x", params(1 << 20)),
        lambda c: c.chat([{"role": "user", "content": object()}]),
        lambda c: c.chat([]),
        lambda c: c.tokenize(5),  # type: ignore[arg-type]
        lambda c: c.detokenize([-1]),
        lambda c: c.detokenize([5], skip_special_tokens="no"),  # type: ignore[arg-type]
    ]
    with Client(slow_server.endpoint) as client:
        stream = iter(client.generate(PROMPT, LONG, stream=True))
        next(stream)
        for call in bad:
            with pytest.raises(RequestError):
                call(client)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        wait_until_idle(client)


# ---- servers that are not there, or go --------------------------------------------------------


def test_no_server_is_an_error_in_time() -> None:
    with pytest.raises(ConnectionLost, match=r"no server answers at tcp://127\.0\.0\.1:1 within"):
        Client("tcp://127.0.0.1:1", timeout_s=0.3)
    with pytest.raises(TandemError, match="can't connect to 'nonsense'"):
        Client("nonsense")


def test_a_server_that_stops_ends_every_call(simulated_server: StartServer) -> None:
    server = simulated_server(*SLOW_ECHO)
    with Client(server.endpoint) as client, ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(partial(client.generate, PROMPT, LONG)) for _ in range(3)]
        until(lambda: client.stats()["running"] == 3, "they run")
        server.stop()
        for call in calls:
            with pytest.raises(ProcessDied, match="shut down"):
                call.result(10)
        until(lambda: not client.health(0.5), "the client knows that it is gone")


def test_a_loop_that_stood_still_does_not_blame_the_server(
    echo_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After other code had held the loop up, the server seemed to have been silent."""
    monkeypatch.setattr("runtime.connection.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("runtime.connection.SILENCE_S", 0.5)

    async def stand_still(client: AsyncClient) -> None:
        for _ in range(3):
            time.sleep(0.8)
            await asyncio.sleep(0)
            await asyncio.sleep(0.06)
        assert (await client.generate("a b", params(2))).text

    run(echo_server, stand_still)


def test_an_answer_of_another_protocol_breaks_the_connection(echo_server: Server) -> None:
    async def confuse(client: AsyncClient) -> None:
        pending = asyncio.create_task(client.generate(PROMPT, LONG))
        await asyncio.sleep(0)
        connection = client._connections[0]
        with pytest.raises(TandemError) as caught:
            connection._on_message(Heartbeat())
        connection._break(caught.value)
        with pytest.raises(TandemError, match="the server sent a Heartbeat"):
            await pending
        with pytest.raises(TandemError, match="the server sent a Heartbeat"):
            await client.stats()

    run(echo_server, confuse)


def test_clients_leave_no_thread(echo_server: Server) -> None:
    before = threading.active_count()
    for _ in range(3):
        with Client(echo_server.endpoint) as client:
            client.stats()
    assert threading.active_count() == before


def test_ipv6_is_served(simulated_server: StartServer) -> None:
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = simulated_server(endpoint="tcp://[::1]:0")
    with Client(server.endpoint) as client:
        assert client.generate("a b", params(2)).text

"""SIGTERM as clients of the ZMQ endpoint see it: what runs may end, nothing new begins."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from runtime import LLM, AsyncClient, Client, ProcessDied, SamplingParams, ShuttingDown
from runtime.errors import TandemError
from tests.fakes import SLOW_ECHO, Script, launch, until

PROMPT = "one two three"
SOME = SamplingParams(max_tokens=150, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=5000, ignore_eos=True)


@contextmanager
def serving(*options: str) -> Iterator[tuple[Script, str]]:
    """launch.py without HTTP, and its endpoint."""
    with launch(SLOW_ECHO, *options) as program:
        yield program, program.line("serving at ")


def refusal(generate: Callable[[], object]) -> TandemError | None:
    try:
        generate()
    except ShuttingDown as e:
        return e
    return None


def wait_until_refused(client: Client) -> None:
    """New requests are refused, and the error says why."""
    one = SamplingParams(max_tokens=1)
    error = until(lambda: refusal(lambda: client.generate(PROMPT, one)), "the server drains")
    assert "the server is being shut down" in str(error)


class Running:
    """A call on a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except TandemError as e:
            self._outcome = e

    def outcome(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if isinstance(self._outcome, TandemError):
            raise self._outcome
        return self._outcome


def wait_until_running(client: Client, num_running: int, num_waiting: int = 0) -> None:
    def is_so() -> bool:
        stats = client.stats()
        return (stats["running"], stats["waiting"]) == (num_running, num_waiting)

    until(is_so, f"{num_running} run, {num_waiting} wait")


@pytest.mark.parametrize("num_tokenizers", [1, 2])
def test_running_and_waiting_requests_end_and_new_ones_are_refused(num_tokenizers: int) -> None:
    with (
        serving("--max-running-req", "2", "--num-tokenizers", str(num_tokenizers)) as (program, at),
        Client(at) as client,
        Client(at) as other,
    ):
        calls = [Running(lambda: client.generate(PROMPT, SOME)) for _ in range(3)]
        wait_until_running(client, 2, 1)
        program.signal(signal.SIGTERM)
        for each in (client, other):
            wait_until_refused(each)
        with Client(at) as late:
            wait_until_refused(late)
            with pytest.raises(ShuttingDown):
                list(late.generate(PROMPT, SOME, stream=True))
            assert late.tokenize(PROMPT)
        for call in calls:
            done = call.outcome()
            assert (len(done.token_ids), done.finish_reason) == (150, "length")
        assert program.wait() == 0, program.everything()
        assert program.out[-1] == "stopped\n"


def test_asyncio_programs_see_the_same() -> None:
    async def talk(program: Script, at: str) -> None:
        async with await AsyncClient.connect(at) as client:
            chunks = aiter(await client.generate(PROMPT, SOME, stream=True))
            chunk = await anext(chunks)
            program.signal(signal.SIGTERM)
            with pytest.raises(ShuttingDown):  # noqa: PT012
                while True:
                    await client.generate(PROMPT, SamplingParams(max_tokens=1))
            while chunk.finish_reason is None:
                chunk = await anext(chunks)
            assert chunk.finish_reason == "length"

    with serving() as (program, at):
        asyncio.run(talk(program, at))
        assert program.wait() == 0, program.everything()


def test_what_runs_beyond_the_drain_timeout_gets_a_final_error() -> None:
    with serving("--drain-timeout", "0.3") as (program, at), Client(at) as client:
        whole = Running(lambda: client.generate(PROMPT, ENDLESS))
        stream = Running(lambda: list(client.generate(PROMPT, ENDLESS, stream=True)))
        wait_until_running(client, 2)
        program.signal(signal.SIGTERM)
        for call in (whole, stream):
            with pytest.raises(ProcessDied, match=r"0\.3 s \(drain_timeout\) are over"):
                call.outcome()
        assert program.wait() == 0, program.everything()
        assert program.out[-1] == "stopped\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: int) -> None:
    with serving("--drain-timeout", "600") as (program, at), Client(at) as client:
        call = Running(lambda: client.generate(PROMPT, ENDLESS))
        wait_until_running(client, 1)
        program.signal(signal.SIGTERM)
        wait_until_refused(client)
        program.signal(second)
        with pytest.raises(ProcessDied, match="the server was shut down"):
            call.outcome()
        assert program.wait() == 0, program.everything()


def test_an_aborted_request_is_not_waited_for() -> None:
    with serving("--drain-timeout", "600") as (program, at), Client(at) as client:
        stream = client.generate(PROMPT, ENDLESS, stream=True)
        chunks = iter(stream)
        next(chunks)
        program.signal(signal.SIGTERM)
        wait_until_refused(client)
        stream.abort()
        assert list(chunks)[-1].finish_reason == "abort"
        assert program.wait() == 0, program.everything()


def test_a_script_may_drain_its_server() -> None:
    """Its own calls are requests like any other."""
    with LLM(simulated=" ".join(SLOW_ECHO)) as llm, Client(llm.endpoint) as client:
        call = Running(lambda: llm.generate(PROMPT, SOME))
        wait_until_running(client, 1)
        llm._session.server.supervisor.ask_to_drain()
        wait_until_refused(client)
        with pytest.raises(ShuttingDown, match="is being shut down"):
            llm.generate([PROMPT] * 3, SOME)
        (result,) = call.outcome()
        assert (len(result["token_ids"]), result["finish_reason"]) == (150, "length")


def test_a_script_that_ends_its_server_tells_the_other_threads() -> None:
    llm = LLM(simulated=" ".join(SLOW_ECHO))
    with Client(llm.endpoint) as client:
        calls = [
            Running(lambda: llm.generate(PROMPT, ENDLESS)),
            Running(lambda: client.generate(PROMPT, ENDLESS)),
        ]
        wait_until_running(client, 2)
        llm.shutdown()
        for call in calls:
            with pytest.raises(TandemError):
                call.outcome()

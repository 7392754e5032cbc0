"""HTTP clients that go, read slowly, or find the server ending; real connections and signals."""

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from http_proc import listening
from runtime.errors import ConfigError
from runtime.options import HttpOptions
from runtime.server import Server
from runtime.sync_client import Client
from tests.fakes import (
    ECHO,
    LAUNCH,
    SLOW_ECHO,
    HttpPeer,
    Script,
    get,
    launch,
    simulated_server,
    until,
)

PROMPT = "one two three"
ENDLESS = {"prompt": PROMPT, "max_tokens": 30_000, "ignore_eos": True}
SLOW_PREFILL = {"prompt": "a b c d " * 500, "max_tokens": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with simulated_server(
        *SLOW_ECHO, http=True, http_port=0, max_running_req=2, max_extend_tokens=16
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.endpoint) as connected:
        yield connected


def count(client: Client, key: str) -> int:
    return int(client.stats()[key])


def wait_until_idle(client: Client) -> None:
    until(lambda: count(client, "running") == count(client, "waiting") == 0, "nothing runs")


# ---- connections that are dropped -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_ends_its_request_in_the_queue(
    server: Server, client: Client, stream: bool
) -> None:
    url = str(server.http_url)
    with HttpPeer(url) as first, HttpPeer(url) as second:
        for peer in (first, second):
            peer.post("/v1/completions", ENDLESS)
        until(lambda: count(client, "running") == 2, "both slots are taken")
        with HttpPeer(url) as third:
            third.post("/v1/completions", {**ENDLESS, "stream": stream})
            until(lambda: count(client, "waiting") == 1, "the third waits")
        until(lambda: count(client, "waiting") == 0, "it waits no more")
        assert count(client, "running") == 2
    wait_until_idle(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_ends_its_request_in_its_prefill(
    server: Server, client: Client, stream: bool
) -> None:
    computed = count(client, "prompt_tokens_computed")
    with HttpPeer(str(server.http_url)) as peer:
        peer.post("/v1/completions", {**SLOW_PREFILL, "stream": stream})
        until(lambda: count(client, "prompt_tokens_computed") > computed, "the prefill has begun")
    wait_until_idle(client)
    assert count(client, "prompt_tokens_computed") < computed + 1000


def test_a_dropped_connection_ends_its_request_between_tokens(
    server: Server, client: Client
) -> None:
    generated = count(client, "tokens_generated")
    with HttpPeer(str(server.http_url)) as peer:
        peer.post("/v1/completions", ENDLESS)
        until(lambda: count(client, "tokens_generated") > generated + 5, "it decodes")
    wait_until_idle(client)


def test_a_dropped_connection_ends_its_stream(server: Server, client: Client) -> None:
    with HttpPeer(str(server.http_url)) as peer:
        peer.post("/v1/completions", {**ENDLESS, "stream": True})
        peer.until(b"data: ")
    wait_until_idle(client)


def test_a_dropped_connection_ends_every_prompt_of_its_request(
    server: Server, client: Client
) -> None:
    with HttpPeer(str(server.http_url)) as peer:
        peer.post("/v1/completions", {**ENDLESS, "prompt": ["a", "b", "c"], "stream": True, "n": 2})
        peer.until(b"data: ")
    wait_until_idle(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_ends_its_request_though_another_was_sent_behind_it(
    server: Server, client: Client, stream: bool
) -> None:
    """The second used to hide the end of the connection until the first was answered."""
    generated = count(client, "tokens_generated")
    with HttpPeer(str(server.http_url)) as peer:
        for _ in range(2):
            peer.post("/v1/completions", {**ENDLESS, "stream": stream})
        until(lambda: count(client, "tokens_generated") > generated + 5, "it decodes")
        assert count(client, "running") == 1
    wait_until_idle(client)


def test_requests_sent_behind_one_another_are_answered_in_order(server: Server) -> None:
    with HttpPeer(str(server.http_url)) as peer:
        for word in ("one", "two", "three"):
            peer.post("/v1/completions", {"prompt": word, "max_tokens": 1})
        for word in ("one", "two", "three"):
            peer.until(b"\r\n\r\n")
            assert json.loads(peer.until(b"}}}"))["choices"][0]["text"] == word


def test_many_requests_that_are_never_finished_hinder_nobody() -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n"
    with (
        simulated_server(http=True, http_port=0) as server,
        ExitStack() as stack,
    ):
        url = str(server.http_url)
        pid = server.supervisor.pids["http"]
        before = resident_mb(pid)
        for index in range(400):
            peer = stack.enter_context(HttpPeer(url))
            peer.send((half + b"\r\n" + b" " * 10_000)[: (10, len(half), 10_000)[index % 3]])
        with HttpPeer(url) as peer:
            peer.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
            assert peer.until(b"\r\n").startswith(b"HTTP/1.1 200")
        assert get(f"{url}/health")[0] == 200
        assert resident_mb(pid) < before + 60


def test_connections_that_do_nothing_keep_nobody_from_connecting() -> None:
    """They used to hold all files that the process may open, for as long as they liked."""
    code = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + LAUNCH

    def is_served() -> bool:
        try:
            return get(f"{url}/health")[0] == 200
        except (OSError, http.client.HTTPException):  # no file was free, or it was the oldest
            return False

    with Script(code, " ".join(ECHO), "--http-port", "0") as program, ExitStack() as stack:
        url = program.line("HTTP at ")
        for _ in range(400):
            stack.enter_context(HttpPeer(url))
        until(is_served, "it is served")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0, program.everything()


# ---- readers that are slow --------------------------------------------------------------------


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_a_reader_that_stands_still_costs_little_and_slows_no_one() -> None:
    """It has a request whose output is more than sockets hold, and takes none of it."""
    with (
        simulated_server(http=True, http_port=0) as server,
        Client(server.endpoint) as client,
        HttpPeer(str(server.http_url), receive_buffer=4096) as slow,
    ):
        pids = server.supervisor.pids
        before = {name: resident_mb(pid) for name, pid in pids.items()}
        slow.post("/v1/completions", {**ENDLESS, "max_tokens": 3000, "n": 8, "stream": True})
        with HttpPeer(str(server.http_url)) as peer:
            for _ in range(20):
                peer.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 50, "stream": True})
                assert b"data: [DONE]" in peer.until(b"0\r\n\r\n")
        until(lambda: count(client, "tokens_generated") >= 25_000, "all was generated")
        for name, pid in pids.items():
            assert resident_mb(pid) < before[name] + 50, name
        # It still is a reader: what it takes is in order and whole.
        assert b"data: [DONE]" in slow.until(b"0\r\n\r\n")


# ---- the end of the server --------------------------------------------------------------------


def serving(*options: str) -> tuple[Script, str, str]:
    """launch.py with HTTP, its URL and its ZMQ endpoint."""
    program = launch(SLOW_ECHO, "--http-port", "0", *options)
    endpoint = program.line("serving at ")
    return program, program.line("HTTP at "), endpoint


def last_event(raw: bytes) -> Any:
    """What comes before [DONE]."""
    events = re.findall(rb"^data: (.*)$", raw, re.MULTILINE)
    assert events[-1] == b"[DONE]"
    return json.loads(events[-2])


def test_sigterm_lets_running_requests_end_and_no_new_one_begin() -> None:
    program, url, _ = serving()
    with program, HttpPeer(url) as running, HttpPeer(url) as later:
        running.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 100, "stream": True})
        running.until(b"data: ")
        program.signal(signal.SIGTERM)
        until(lambda: get(f"{url}/health")[0] == 503, "it drains")
        later.post("/v1/completions", {"prompt": PROMPT})
        head = later.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in head
        end = last_event(running.until(b"0\r\n\r\n"))
        assert end["choices"][0]["finish_reason"] == "length"
        assert program.wait() == 0
        assert program.out[-1] == "stopped\n"


def test_what_runs_beyond_the_drain_timeout_gets_a_final_error() -> None:
    program, url, _ = serving("--drain-timeout", "0.3")
    with program, HttpPeer(url) as stream, HttpPeer(url) as whole:
        whole.post("/v1/completions", ENDLESS)
        stream.post("/v1/completions", {**ENDLESS, "stream": True})
        stream.until(b"data: ")
        program.signal(signal.SIGTERM)
        end = last_event(stream.until(b"0\r\n\r\n"))
        assert "the server is being shut down" in end["error"]["message"]
        assert whole.until(b"\r\n").startswith(b"HTTP/1.1 503")
        assert program.wait() == 0, program.everything()


def test_a_second_sigterm_ends_at_once() -> None:
    program, url, _ = serving("--drain-timeout", "600")
    with program, HttpPeer(url) as stream:
        stream.post("/v1/completions", {**ENDLESS, "stream": True})
        stream.until(b"data: ")
        program.signal(signal.SIGTERM)
        until(lambda: get(f"{url}/health")[0] == 503, "it drains")
        program.signal(signal.SIGTERM)
        end = last_event(stream.until(b"0\r\n\r\n"))
        assert "shut down" in end["error"]["message"]
        assert program.wait() == 0, program.everything()


def test_a_process_that_dies_is_told_to_whoever_waits() -> None:
    with simulated_server(*SLOW_ECHO, http=True, http_port=0) as server:
        with HttpPeer(str(server.http_url)) as stream:
            stream.post("/v1/completions", {**ENDLESS, "stream": True})
            stream.until(b"data: ")
            os.kill(server.supervisor.pids["scheduler"], signal.SIGKILL)
            end = last_event(stream.until(b"0\r\n\r\n"))
        assert "scheduler died (killed by SIGKILL)" in end["error"]["message"]
        assert server.supervisor.wait(20)


@pytest.mark.parametrize("name", ["worker-0", "scheduler", "tokenizer-0"])
def test_health_tells_of_a_process_that_stands_still(name: str) -> None:
    with simulated_server(http=True, http_port=0) as server:
        url = f"{server.http_url}/health"
        assert get(url)[0] == 200
        pid = server.supervisor.pids[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: get(url)[0] == 503, f"{name} is missed")
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: get(url)[0] == 200, "all is well again")


# ---- where it listens -------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    program, url, _ = serving()
    port = url.rpartition(":")[2]
    with program, launch(ECHO, "--http-port", port) as second:
        assert second.wait() == 2
        assert second.err[-1].startswith(f"launch.py: can't listen at 127.0.0.1 port {port}: Addr")


def test_the_usual_port_is_left_to_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening.bound_socket(HttpOptions(http_port=0)) as taken:
        taken.listen()
        monkeypatch.setattr(listening, "USUAL_PORT", taken.getsockname()[1])
        with listening.bound_socket(HttpOptions()) as other:
            assert other.getsockname()[1] != taken.getsockname()[1]
    with listening.bound_socket(HttpOptions()) as usual:
        assert usual.getsockname()[1] == listening.USUAL_PORT
        assert listening.url_of(usual) == f"http://127.0.0.1:{listening.USUAL_PORT}"


def test_a_host_that_is_none_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="http_host is 'no such host', which is no address"):
        listening.bound_socket(HttpOptions(http_host="no such host"))

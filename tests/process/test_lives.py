"""However a server ends, whatever it is doing: everybody is told, and nothing is left of it."""

import os
import signal
from pathlib import Path

import pytest

from runtime.errors import ConnectionLost, ProcessDied, TandemError
from runtime.messages import Loaded
from runtime.sampling import SamplingParams
from runtime.sync_client import Client
from tests.fakes import (
    ECHO,
    GONE_S,
    LOADING,
    SLOW_ECHO,
    RawPeer,
    Script,
    command_lines,
    folder_of,
    frame_of,
    is_gone,
    kill,
    launch,
    parent_of,
    processes_of,
    simulated_server,
    until,
    wait_until_gone,
)

LONG = SamplingParams(max_tokens=30_000)
STATES = ("loading", "idle", "busy")
NAMES = ("worker-0", "tokenizer-0", "scheduler")
LLM_SCRIPT = """
import sys
from runtime import LLM, ProcessDied, SamplingParams

state, _, worker = sys.argv[1].partition(" ")
llm = LLM(simulated=worker)
print("pids", *(f"{name}={pid}" for name, pid in llm.pids.items()), flush=True)
if state == "idle":
    sys.stdin.read()
try:
    llm.generate(["some words", "and more"], SamplingParams(max_tokens=30_000))
except ProcessDied as e:
    print("died", str(e).replace(chr(10), " "), flush=True)
"""


def arrange(program: Script, state: str) -> tuple[Path, Client | None]:
    """Wait until launch.py is in that state; its instance folder and, when busy, who asks."""
    folder = program.folder()
    if state == "loading":
        return folder, None
    endpoint = program.line("serving at ")
    if state == "idle":
        return folder, None
    client = Client(endpoint)
    next(iter(client.generate("some words", LONG, stream=True)))
    return folder, client


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_launch_ends_quietly_when_asked_to(number: int, state: str) -> None:
    with launch(LOADING if state == "loading" else SLOW_ECHO) as program:
        folder, client = arrange(program, state)
        program.signal(number)
        assert program.wait() == 0, program.everything()
        assert program.out[-1] == "stopped\n"
        assert "Traceback" not in program.everything()
        assert is_gone(folder)
        if client is not None:
            with pytest.raises(TandemError):
                client.stats()
            client.close()


@pytest.mark.parametrize("state", STATES)
def test_nothing_survives_a_killed_launch(state: str) -> None:
    with launch(LOADING if state == "loading" else SLOW_ECHO) as program:
        folder, client = arrange(program, state)
        program.signal(signal.SIGKILL)
        wait_until_gone(folder)
        if client is not None:
            with pytest.raises(ConnectionLost):
                until(client.stats, "the client notices")
            client.close()


@pytest.mark.parametrize("state", ["loading", "busy"])
@pytest.mark.parametrize("name", NAMES)
def test_launch_names_the_process_that_died(name: str, state: str) -> None:
    with launch(LOADING if state == "loading" else SLOW_ECHO) as program:
        folder, client = arrange(program, state)
        module = {"worker-0": "worker_proc", "tokenizer-0": "tokenizer_proc"}.get(
            name, "scheduler_proc"
        )
        (pid,) = (p for p, line in command_lines() if f"{module} --instance {folder}" in line)
        kill(pid)
        assert program.wait() == 1, program.everything()
        assert program.err[-1] == f"launch.py: {name} died (killed by SIGKILL)\n"
        assert is_gone(folder)
        if client is not None:
            client.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_pending_call_hears_which_process_died(name: str) -> None:
    """A plain client of a tokenizer that died only knows that the connection is gone."""
    with simulated_server(*SLOW_ECHO) as server, Client(server.endpoint) as client:
        stream = iter(client.generate("some words", LONG, stream=True))
        next(stream)
        kill(server.supervisor.pids[name])
        with pytest.raises(ConnectionLost if name == "tokenizer-0" else ProcessDied) as caught:
            list(stream)
        if name != "tokenizer-0":
            assert f"{name} died (killed by SIGKILL)" in str(caught.value)
        error = server.supervisor.failure(GONE_S)
        assert f"{name} died (killed by SIGKILL)" in str(error)
        assert server.supervisor.wait(GONE_S)
        assert is_gone(server.instance.folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_hears_which_process_died(name: str) -> None:
    with Script(LLM_SCRIPT, " ".join(("busy", *SLOW_ECHO))) as script:
        pids = dict(entry.split("=") for entry in script.line("pids ").split())
        folder = script.folder()
        kill(int(pids[name]))
        assert script.line("died ") == f"{name} died (killed by SIGKILL)"
        assert script.wait() == 0, script.everything()
        assert script.err == []
        assert is_gone(folder)


@pytest.mark.parametrize(
    ("number", "state"),
    [
        *((signal.SIGKILL, state) for state in STATES),
        (signal.SIGINT, "loading"),
        (signal.SIGINT, "busy"),
        (signal.SIGTERM, "busy"),
    ],
)
def test_nothing_survives_a_script(number: int, state: str) -> None:
    worker = LOADING if state == "loading" else SLOW_ECHO
    with Script(LLM_SCRIPT, " ".join((state, *worker))) as script:
        folder = script.folder()
        if state != "loading":
            script.line("pids ")
        script.signal(number)
        script.wait()
        wait_until_gone(folder)


def test_a_script_that_just_ends_leaves_nothing() -> None:
    code = LLM_SCRIPT.partition("if state")[0]
    with Script(code, " ".join(("idle", *ECHO))) as script:
        folder = script.folder()
        assert script.wait() == 0, script.everything()
        assert script.err == []
        assert is_gone(folder)


def test_a_stopped_child_does_not_delay_the_end() -> None:
    with launch(ECHO) as program:
        folder, _ = arrange(program, "idle")
        for pid, line in command_lines():
            if str(folder) in line:
                os.kill(pid, signal.SIGSTOP)
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert is_gone(folder)


def test_a_child_that_stands_still_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.supervisor.HEARTBEAT_LIMIT_S", 3.0)
    with simulated_server() as server:
        os.kill(server.supervisor.pids["scheduler"], signal.SIGSTOP)
        assert server.supervisor.wait(GONE_S)
        assert str(server.supervisor.error) == "scheduler was silent for 3 s"
        assert is_gone(server.instance.folder)


def test_a_launch_that_stood_still_blames_nobody() -> None:
    """After Ctrl-Z and `fg` its children seemed to have been silent, and were killed."""
    code = """
import sys, launch, runtime.supervisor
runtime.supervisor.HEARTBEAT_LIMIT_S = 2.0
sys.exit(launch.main(["--simulated", sys.argv[1]]))
"""
    with Script(code, " ".join(ECHO)) as program:
        endpoint = program.line("serving at ")
        program.signal(signal.SIGSTOP)
        with Client(endpoint) as client:
            answers = 0

            def answered_for_long() -> bool:
                nonlocal answers
                client.stats()
                answers += 1
                return answers > 150  # 20 ms apart

            until(answered_for_long, "3 s are over")
            program.signal(signal.SIGCONT)
            assert client.generate("a b", SamplingParams(max_tokens=2)).text
        program.signal(signal.SIGTERM)
        assert program.wait() == 0, program.everything()


@pytest.mark.parametrize("victim", ["worker-0", "script"])
def test_what_a_child_started_ends_with_it(victim: str) -> None:
    """A worker that is killed while it has a kernel compiled left the compiler behind."""
    code = """
from runtime.config import from_options
from runtime.server import Server
import runtime.server
from runtime.supervisor import Command

runtime.server._commands = lambda *_: [
    Command(name="worker-0", module="tests.process.with_a_helper")
]
server = Server(
    from_options({"http": False}),
    on_progress=lambda name, news: print("helper", news.text, flush=True),
)
print("folder", server.instance.folder, flush=True)
server.start()
"""
    with Script(code) as script:
        folder, helper = Path(script.line("folder ")), int(script.line("helper "))
        worker = parent_of(helper)
        assert worker is not None
        kill(worker if victim == "worker-0" else script.pid)
        script.wait()
        wait_until_gone(folder)
        until(lambda: helper not in dict(command_lines()), "the helper is gone")


def test_the_start_has_a_time_limit() -> None:
    with launch(LOADING, "--startup-timeout", "1") as program:
        folder = program.folder()
        assert program.wait() == 1
        said = program.err[-1]
        assert said.startswith("launch.py: no progress in 1 s (startup_timeout) while starting")
        assert "worker-0" in said
        assert is_gone(folder)


def test_a_failing_start_brings_one_error_and_no_stack() -> None:
    with launch(ECHO, "--num-page-override", "1", "--page-size", "1") as program:
        assert program.wait() == 2
        assert "Traceback" not in program.everything()
        assert program.err[-1].startswith("launch.py: the KV pool has 1 pages")


def test_a_child_that_cannot_even_start_is_named_with_its_last_words() -> None:
    with launch((*ECHO, "--no-such-option")) as program:
        assert program.wait() == 1
        assert "worker-0 died (exit status 2)" in program.everything()
        assert program.err[-1].endswith("error: unrecognized arguments: --no-such-option\n")


def test_a_server_may_be_stopped_from_any_thread_and_twice() -> None:
    with simulated_server() as server:
        assert len(processes_of(server.instance.folder)) == 3
        assert all(parent_of(pid) == os.getpid() for pid in server.supervisor.pids.values())
        server.stop()
        assert is_gone(server.instance.folder)


def test_a_process_that_was_not_started_here_ends_the_server() -> None:
    message = Loaded(num_pages=None, max_seq_len=None, vocab_size=None)
    with simulated_server() as server:
        with RawPeer(server.instance.wire("supervisor")) as peer:
            peer.send(frame_of(message, sender="worker-0"))
            assert server.supervisor.wait(GONE_S)
        assert "not started here calls itself 'worker-0'" in str(server.supervisor.error)


def test_folder_of_finds_only_whole_servers() -> None:
    assert folder_of(os.getpid()) is None

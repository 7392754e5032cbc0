"""What launch.py tells its user, and with which exit status it ends."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.config import child_environment
from runtime.sync_client import Client
from tests.fakes import (
    ECHO,
    GONE_S,
    LAUNCH,
    LOADING,
    ROOT,
    Script,
    folder_of,
    is_gone,
    launch,
    wait_until_gone,
)
from tests.small_tokenizers import smollm2_gguf


def test_it_prints_a_ready_line_each_where_to_connect_and_a_line_to_paste(tmp_path: Path) -> None:
    with launch(ECHO, "--http-port", "0") as program:
        endpoint = program.line("serving at ")
        command = shlex.split(program.line("try it: "))
        program.line("HTTP at http://127.0.0.1:")
        starts = [line.partition(":")[0] for line in program.out]
        assert starts == [
            "worker-0 ready",
            "tokenizer-0 ready",
            "scheduler ready",
            "http ready",
            "serving at ipc",
            "try it",
            "HTTP at http",
        ]
        assert command[2:4] == ["--endpoint", endpoint]
        pasted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (pasted.returncode, pasted.stderr) == (0, "")
        assert pasted.stdout.strip()
        program.signal(signal.SIGTERM)
        assert program.wait() == 0


def test_into_a_file_loading_takes_one_line_per_process() -> None:
    with launch() as program:
        program.line("serving at ")
        program.signal(signal.SIGTERM)
        program.wait()
        assert program.err == ["worker-0: loading nothing\n"]


def test_a_tcp_port_is_told(tmp_path: Path) -> None:
    with launch(ECHO, "--endpoint", "tcp://127.0.0.1:0") as program:
        port = program.line("serving at tcp://127.0.0.1:")
        assert int(port) > 0
        with launch(ECHO, "--endpoint", f"tcp://127.0.0.1:{port}") as second:
            assert second.wait() == 2
            assert second.err[-1].startswith(
                f"launch.py: can't listen at tcp://127.0.0.1:{port}: Address already in use"
            )


def test_an_address_in_use_is_told_while_the_weights_still_load(tmp_path: Path) -> None:
    """It was told only after they were loaded, which may take minutes."""
    (tmp_path / "file").write_text("")
    with launch(LOADING, "--endpoint", f"ipc://{tmp_path}/file") as program:
        assert program.wait() == 2
        assert "can't listen at" in program.err[-1]


def test_a_config_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("page_size: 16\nnum_page_override: 77\n")
    with launch(ECHO, "--config", str(file)) as program:
        assert program.line("scheduler ready: ").startswith("77 pages of 16")


BAD = {
    "no such option": (["--no-such"], "unknown option '--no-such'"),
    "a value out of range": (["--page-size", "0"], "page_size is 0"),
    "no number": (["--page-size", "x"], "--page-size"),
    "no such model": (["--model", "./none"], "no model './none' found"),
    "no such file": (["--config", "./none.yaml"], "there is no such file"),
    "malformed YAML": (["--config", "bad.yaml"], "bad.yaml is not valid YAML"),
    "an unknown key": (["--config", "key.yaml"], "unknown key 'page_sise'"),
    "an endpoint that is none": (["--endpoint", "foo"], "endpoint is 'foo'"),
    "a folder that is not there": (["--endpoint", "ipc://none/x"], "can't listen at ipc://none/x"),
    "a positional": (["model"], "unknown option 'model'"),
}


@pytest.mark.parametrize(("argv", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_command_line_is_one_clear_error(tmp_path: Path, argv: list[str], says: str) -> None:
    (tmp_path / "bad.yaml").write_text("page_size: [1\n x: y\n")
    (tmp_path / "key.yaml").write_text("page_sise: 1\n")
    run = [sys.executable, str(ROOT / "launch.py"), *argv]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("launch.py: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.stderr


def test_an_interrupt_while_the_model_is_looked_up_ends_quietly() -> None:
    code = """
import sys, launch, runtime.server, threading
def slow(*_):
    print("looks", flush=True)
    threading.Event().wait()
runtime.server.find_model = slow
sys.exit(launch.main([]))
"""
    with Script(code) as program:
        program.line("looks")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert program.out[-1] == "stopped\n"
        assert program.err == []


def test_a_reader_that_leaves_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `python launch.py | head -1`: the server died of its next line, with a stack."""
    code = f"import sys\nsys.argv[1:1] = [{' '.join(ECHO)!r}]\n{LAUNCH}"
    run = [sys.executable, "-c", code, "--endpoint", "ipc://public.sock", "--no-http"]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=child_environment(),
    ) as program:  # fmt: skip
        assert program.stdout is not None
        program.stdout.close()
        monkeypatch.chdir(tmp_path)
        with Client("ipc://public.sock", timeout_s=30) as client:
            folder = folder_of(program.pid)
            assert client.health()
            program.send_signal(signal.SIGTERM)
            _, err = program.communicate(timeout=GONE_S)
        assert "Traceback" not in err
        assert folder is not None
        assert is_gone(folder)


def test_a_terminal_that_is_closed_ends_it() -> None:
    with launch() as program:
        folder = program.folder()
        program.line("serving at ")
        program.signal(signal.SIGHUP)
        program.wait()
        wait_until_gone(folder)


def test_the_real_worker_serves_and_ends() -> None:
    """The embedded model, from the command line to an answer; the only test here that loads it."""
    if smollm2_gguf() is None:
        pytest.skip("the embedded model is not installed")
    run = [sys.executable, str(ROOT / "launch.py"), "--kv-memory-fraction", "0.05", "--no-http"]
    with Script("import os, sys; os.execv(sys.argv[1], sys.argv[1:])", *run) as program:
        folder = program.folder()
        command = shlex.split(program.line("try it: ", 120))
        code = """
import sys
from runtime import Client, SamplingParams
with Client(sys.argv[1]) as client:
    print(client.generate("The capital of France is", SamplingParams(max_tokens=5)).text)
"""
        with Script(code, command[3]) as asker:
            assert asker.wait(120) == 0, asker.everything()
            assert "Paris" in asker.everything()
        program.signal(signal.SIGINT)
        assert program.wait() == 0
        assert len(program.err) <= 3, program.err
        assert is_gone(folder)

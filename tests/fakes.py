"""Fakes and helpers that tests of several rooms share: waiting, raw peers, simulated servers."""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers

from runtime.codec import Header
from runtime.config import child_environment, from_options
from runtime.messages import CODEC
from runtime.server import Server
from runtime.types import Epoch
from tests.small_tokenizers import wrap
from tokenizer_proc.detokenizer import byte_alphabet
from tokenizer_proc.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
ECHO = ("--answers", "echo", "--vocab-size", "49152")
"""A simulated worker that repeats the prompt; its vocabulary is that of the embedded model."""
SLOW_ECHO = (*ECHO, "--step-ms", "10")
LOADING = (*ECHO, "--load-s", "600")
GONE_S = 15.0
"""Patience with what has to be gone within 5 s by itself, on a machine that is busy."""


def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """The first true value of `condition()`; AssertionError that says `what` never came."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(0.02)
    return value


# ---- frames and raw peers ---------------------------------------------------------------------


def frame_of(message: object, number: int = 0, sender: str = "client", epoch: int = 0) -> bytes:
    """One message as it crosses a wire."""
    return CODEC.encode(message, Header(sender=sender, epoch=Epoch(epoch), number=number))


class RawPeer:
    """A socket that sends whatever bytes a test likes and reads only when told to."""

    def __init__(self, address: str, kind: int = zmq.DEALER, receive_hwm: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, receive_hwm)
        self._socket.connect(address)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._context.destroy(linger=1000)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float = 10.0) -> Any:
        """The next message; AssertionError if none comes."""
        if not self._socket.poll(int(timeout_s * 1000)):
            raise AssertionError(f"no message within {timeout_s:g} s")
        return CODEC.decode(self._socket.recv())[1]


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """Every byte is a token; before them <unk>, <s> and </s>, which ends outputs."""
    tokens = ["<unk>", "<s>", "</s>", *byte_alphabet()]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrap(backend, chat_template)


# ---- processes --------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[int, str]]:
    """(process id, command line) of every process that can be seen and is not a zombie."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if line:
            yield int(folder.name), line


def processes_of(folder: Path) -> list[str]:
    """The command lines of the processes that belong to the server in `folder`."""
    return [line for _, line in command_lines() if str(folder) in line]


def is_gone(folder: Path) -> bool:
    """Whether nothing is left of the server in `folder`: no process, no file."""
    return not folder.exists() and not processes_of(folder)


def wait_until_gone(folder: Path) -> None:
    until(lambda: is_gone(folder), f"{folder} and its processes are gone", GONE_S)


def folder_of(pid: int) -> Path | None:
    """The instance folder of the server that process `pid` started, once it has its three processes
    (without HTTP).
    """
    folders = [
        match[1]
        for child, line in command_lines()
        if (match := re.search(r"--instance (\S+)", line)) and parent_of(child) == pid
    ]
    return Path(folders[0]) if len(folders) == 3 else None


def parent_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.partition("PPid:")[2].split()[0])


@contextmanager
def simulated_server(*worker: str, **options: Any) -> Iterator[Server]:
    """A running server whose worker is simulated: `worker` are its arguments, by default ECHO.

    HTTP is off unless `options` turn it on.
    """
    config = from_options({"simulated": shlex.join(worker or ECHO), "http": False, **options})
    server = Server(config, echo=lambda line: None)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Script:
    """A Python program that runs as a user's own, with what it prints."""

    def __init__(self, code: str, *arguments: str, cwd: Path | None = None, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**child_environment(), **env},
        )
        self.pid = self.process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.wait()

    def line(self, start: str, timeout_s: float = 20.0) -> str:
        """The rest of the first line on standard output that begins with `start`."""

        def found() -> str | None:
            lines = [line for line in list(self.out) if line.startswith(start)]
            if not lines and self.process.poll() is not None:
                raise AssertionError(f"it ended before {start!r}: {self.everything()}")
            return lines[0] if lines else None

        return str(until(found, f"a line {start!r} in {self.out}", timeout_s))[len(start) :].strip()

    def folder(self) -> Path:
        """The instance folder of the server that it has started."""
        return Path(until(lambda: folder_of(self.pid), "its three processes run"))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = GONE_S) -> int:
        """Its exit status, all output read."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def everything(self) -> str:
        """What it has printed."""
        return "".join(self.out + self.err)

    def _read(self, stream: Any, lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line)


LAUNCH = """
import sys, launch
sys.exit(launch.main(["--simulated", *sys.argv[1:]]))
"""


def launch(worker: tuple[str, ...] = ECHO, *options: str, **env: str) -> Script:
    """launch.py with a simulated worker; HTTP is off unless `options` say where it listens."""
    http = () if "--http-port" in options else ("--no-http",)
    return Script(LAUNCH, " ".join(worker), *http, *options, **env)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# ---- HTTP -------------------------------------------------------------------------------------


class HttpPeer:
    """A raw HTTP connection, which reads only when told to."""

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        address = urlsplit(url)
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(20)
        self._socket.connect((address.hostname, address.port))
        self._text = b""

    def __enter__(self) -> "HttpPeer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def post(self, path: str, body: object, **headers: str) -> None:
        """Send a request: `body` as JSON, or as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": "x", "content-type": "application/json", "content-length": str(len(data))}
        lines = [f"POST {path} HTTP/1.1"]
        lines += [f"{k.replace('_', '-')}: {v}" for k, v in (given | headers).items()]
        self.send("\r\n".join([*lines, "", ""]).encode() + data)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def until(self, mark: bytes) -> bytes:
        """What comes up to and with `mark`; AssertionError if the connection ends before."""
        while mark not in self._text:
            data = self._socket.recv(65536)
            assert data, f"no {mark!r} in {self._text[-1000:]!r}"
            self._text += data
        got, _, self._text = self._text.partition(mark)
        return got + mark

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while data := self._socket.recv(65536):
            self._text += data
        return self._text


def get(url: str) -> tuple[int, Any]:
    """The status of a GET and its JSON."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", address.path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

"""The shell of every child process: handshake, heartbeats, last words, and never outliving the
parent.

An I/O thread of its own talks to the supervisor, so that heartbeats go out and a shutdown comes in
also while the main thread computes. The main thread sees it as one more socket, `control`.
"""

import argparse
import gc
import logging
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import ProtocolError, TandemError, UserError
from runtime.instance import Instance
from runtime.messages import (
    Begin,
    Drained,
    Fatal,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    Shutdown,
)
from runtime.transport import Duplex, Poller, Transport, remove_socket_file
from runtime.types import Epoch

HEARTBEAT_S = 1.0
EXIT_GRACE_S = 2.0
"""How long the main thread may take to end by itself once a shutdown has come."""
ENDPOINT_FILE = "endpoint"
"""In the instance's folder: where clients connect, once the tokenizer listens there."""
HTTP_FILE = "http"
"""The same for HTTP clients: the URL, once there is one."""
_STDIN = 0


class Stopped(Exception):
    """The supervisor wants this process to end; `reason` is for whoever still waits."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


class Process:
    """What a child process's main thread holds of its shell."""

    def __init__(self, name: str, instance: Instance, epoch: Epoch) -> None:
        self.name = name
        self.instance = instance
        self.transport = Transport(name, epoch)
        self.control, inside = self.transport.pair("control")
        self._thread = threading.Thread(
            target=_Keeper(self.transport, inside, instance).run, name="keeper", daemon=True
        )
        self._thread.start()

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Tell the user what takes its time."""
        self.control.send(Progress(text=text, fraction=fraction))

    def loaded(
        self,
        num_pages: int | None = None,
        max_seq_len: int | None = None,
        vocab_size: int | None = None,
    ) -> Begin:
        """Say that loading is done (workers: what this rank can hold) and wait for the common
        facts.
        """
        self.control.send(
            Loaded(num_pages=num_pages, max_seq_len=max_seq_len, vocab_size=vocab_size)
        )
        poller = Poller(self.control)
        while True:
            poller.wait(None)
            for message in self.control.drain():
                if isinstance(message, Begin):
                    return message
                _stop_if_asked(message)

    def ready(self, text: str) -> None:
        """Say that work may come; `text` is the process's ready line."""
        # What is loaded stays: no collection needs to go through it from now on.
        gc.collect()
        gc.freeze()
        self.control.send(Ready(text=text))

    def check_control(self) -> list[Any]:
        """What the supervisor has sent since; raises Stopped if it wants this process to end."""
        news = list(self.control.drain())
        for message in news:
            _stop_if_asked(message)
        return news

    def drained(self) -> None:
        """Answer Drain: no request of its users is left."""
        self.control.send(Drained())

    def fail(self, kind: str, text: str) -> None:
        """Give the supervisor this process's last words."""
        self.control.send(Fatal(kind=kind, text=text))

    def close(self) -> None:
        """End the I/O thread, then every socket, once their last messages are handed over."""
        self.control.send(Shutdown(reason=None))
        self._thread.join(EXIT_GRACE_S)
        self.control.close()
        self.transport.close()


def run(
    name_of: Callable[[argparse.Namespace], str],
    serve: Callable[[Process, argparse.Namespace], None],
    parser: argparse.ArgumentParser,
) -> NoReturn:
    """A child process's main: `serve` until it returns, raises, or is stopped; then exit."""
    parser.add_argument("--instance", type=Path, required=True, help="the server's folder")
    parser.add_argument("--epoch", type=int, default=0, help="this process's incarnation")
    arguments = parser.parse_args()
    name = name_of(arguments)
    # A process started by hand shares the terminal; only the supervisor decides what Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    instance = Instance.load(arguments.instance)
    logging.basicConfig(
        level=instance.config.server.log_level.upper(),
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
    )
    process = Process(name, instance, Epoch(arguments.epoch))
    code = _serve(process, serve, arguments)
    process.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Native thread pools may still hold the interpreter's exit back: nothing of them is needed.
    os._exit(code)


def _serve(process: Process, serve: Callable[[Process, Any], None], arguments: Any) -> int:
    try:
        serve(process, arguments)
    except Stopped:
        return 0
    except UserError as e:
        process.fail("user", str(e))
    except TandemError as e:
        process.fail("internal", str(e))
    except Exception as e:
        traceback.print_exc()
        process.fail("internal", f"{type(e).__name__}: {e}")
    return 1


def _stop_if_asked(message: object) -> None:
    if isinstance(message, Shutdown):
        raise Stopped(message.reason)


class _Keeper:
    """The I/O thread: between the supervisor and the main thread, and watch on the parent's
    life.
    """

    def __init__(self, transport: Transport, inside: Duplex, instance: Instance) -> None:
        self._transport = transport
        self._inside = inside
        self._instance = instance
        self._parent = os.getppid()
        self._has_parent = stat.S_ISFIFO(os.fstat(_STDIN).st_mode)
        """Whether a supervisor started this process, rather than a person by hand."""

    def run(self) -> None:
        """Forward both ways until the process ends."""
        link = self._transport.dealer(self._instance.wire("supervisor"), "supervisor")
        poller = Poller(link, self._inside, *([_STDIN] if self._has_parent else []))
        next_beat = 0.0
        exit_at: float | None = None
        while True:
            now = time.monotonic()
            if now >= next_beat:
                link.send(Heartbeat())
                next_beat = now + HEARTBEAT_S
            if exit_at is not None and now >= exit_at:
                os._exit(0)
            ready = poller.wait(min(next_beat, exit_at or next_beat) - now)
            if self._has_parent and self._is_orphan(_STDIN in ready):
                self._leave_nothing()
            for message in self._inside.drain():
                if isinstance(message, Shutdown):
                    link.close()
                    self._inside.close()
                    return
                link.send(message)
            try:
                for message in link.drain():
                    self._inside.send(message)
                    exit_at = exit_at or _exit_time(message)
            except ProtocolError as e:
                link.send(Fatal(kind="internal", text=str(e)))
                exit_at = time.monotonic() + 0.1

    def _leave_nothing(self) -> NoReturn:
        """End at once, with what this process has started (a compiler, say) and every file."""
        if (self._instance.folder / ENDPOINT_FILE).exists():
            # Whoever listens there is of this server and ends too.
            remove_socket_file(self._instance.endpoint, only_if_dead=False)
        self._instance.remove()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _is_orphan(self, stdin_ready: bool) -> bool:
        """The parent holds the other end of standard input: it ends when the parent does."""
        return (stdin_ready and not os.read(_STDIN, 1)) or os.getppid() != self._parent


def _exit_time(message: object) -> float | None:
    return time.monotonic() + EXIT_GRACE_S if isinstance(message, Shutdown) else None

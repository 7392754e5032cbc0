"""Starts the processes of one server, hands them the common facts, watches them, and ends them
together.

Rules:
 1. Whatever happens (a failed start, a death, a stop), no process and no file of the server is left
    within five seconds.
 2. The first process to fail is the one that is named, with its own words; the others end quietly.
 3. One thread owns the children and the socket; other threads only ask and wait.
"""

import collections
import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from runtime.config import child_environment
from runtime.errors import ConfigError, PeerError, ProcessDied, ProtocolError, TandemError
from runtime.instance import Instance
from runtime.messages import (
    Begin,
    Drain,
    Drained,
    Fatal,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    Shutdown,
    Silent,
)
from runtime.transport import Poller, Router, SequenceCheck, Transport, remove_socket_file

_LOG = logging.getLogger(__name__)

TICK_S = 0.05
STOP_GRACE_S = 2.5
"""From the Shutdown message to SIGKILL."""
HEARTBEAT_LIMIT_S = 30.0
"""A process whose I/O thread is silent for this long is taken for dead."""
SIGNAL_S = 0.2
"""After this long at most a Ctrl-C is heard while everything starts."""
SILENT_S = 3.0
"""After this long the front ends are told that it is silent."""
STANDSTILL_S = 6.0
"""After this long nobody waits for it to end its requests."""
DRAIN_GRACE_S = 2.0
"""How long the last requests may take to be ended once drain_timeout is over."""
EXIT_WAIT_S = 0.5
"""How long the last words of a process that exited by itself may still be on their way."""
LAST_WORDS_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process to start: `python -m module --instance FOLDER arguments`.

    has_users: users are connected to it, so it is told to drain. is_front: it is told which
    processes are silent.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    has_users: bool = False
    is_front: bool = False


class _Child:
    """One started process and what it has said so far."""

    def __init__(self, command: Command, instance: Instance, echo: Callable[[str], None]) -> None:
        self.name = command.name
        self.has_users = command.has_users
        self.is_front = command.is_front
        self.is_drained = False
        self.loaded: Loaded | None = None
        self.ready: str | None = None
        self.fatal: Fatal | None = None
        self.last_heard_s = time.monotonic()
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_WORDS_LINES)
        self.process = subprocess.Popen(
            # -P: a user's own runtime.py in the working directory must not shadow ours.
            [sys.executable, "-P", "-m", command.module, "--instance", str(instance.folder),
             *command.arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        stream = io.TextIOWrapper(self.process.stderr, errors="replace")
        self._reader = threading.Thread(
            target=self._read, args=(stream, echo), name=f"stderr of {self.name}", daemon=True
        )
        self._reader.start()

    def _read(self, stream: IO[str], echo: Callable[[str], None]) -> None:
        """Pass its lines on, to the end: a process whose lines nobody takes would stand still."""
        with stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or closed
                    echo(line)

    @property
    def exited_by_itself(self) -> bool:
        """Whether it is over and no signal ended it."""
        return (self.process.returncode or 0) > 0

    def how_it_ended(self) -> str:
        """For an exited process: by which signal or status."""
        code = self.process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    def last_words(self) -> str:
        """The end of its standard error."""
        self._reader.join(EXIT_WAIT_S)
        return "\n".join(self._lines)

    def kill(self) -> None:
        """Kill it and whatever it has started (a compiler, say): it leads a group of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Reap it and close the pipes to it."""
        self.kill()
        self.process.wait()
        self._reader.join(1.0)
        if self.process.stdin is not None:
            self.process.stdin.close()


class Supervisor:
    """The life of one server's processes, run by a thread of the process that wants the server."""

    def __init__(
        self,
        instance: Instance,
        commands: Sequence[Command],
        *,
        on_line: Callable[[str], None],
        on_progress: Callable[[str, Progress | None], None],
        echo: Callable[[str], None],
    ) -> None:
        """on_line: given each ready line. on_progress: given (process, news), None when it is over.

        echo: given each line that a process writes to its standard error.
        """
        self._instance = instance
        self._commands = commands
        self._on_line = on_line
        self._on_progress = on_progress
        self._echo = echo
        self._children: list[_Child] = []
        self._checks: dict[bytes, SequenceCheck] = {}
        self._peers: dict[str, bytes] = {}
        self._begin: Begin | None = None
        self._stop_asked = threading.Event()
        self._drain_asked = threading.Event()
        self._drain_end_s: float | None = None
        self._silent: tuple[str, ...] = ()
        self._up = threading.Event()
        self._ending = threading.Event()
        self._over = threading.Event()
        self._last_progress_s = time.monotonic()
        self.error: TandemError | None = None
        """Why the server ended, if nobody asked for it. Set before `wait` returns."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> Begin:
        """Start everything; return the common facts when all are ready, or raise why it failed."""
        self._thread.start()
        # In slices: a Ctrl-C that another thread is given does not wake one that waits without end.
        while not self._up.wait(SIGNAL_S):
            pass
        if self._ending.is_set() or self._begin is None:
            self._over.wait()
            raise self.error or PeerError("the server was stopped while it started")
        return self._begin

    def stop(self) -> None:
        """End all processes; returns when they are gone. May be called more than once, from any
        thread, and before `start`.
        """
        self._stop_asked.set()
        if self._thread.ident is None:
            self._instance.remove()
        elif self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._over.wait()

    def ask_to_stop(self) -> None:
        """`stop` without waiting: safe in a signal handler."""
        self._stop_asked.set()

    def ask_to_drain(self) -> None:
        """`ask_to_stop` once the users' requests have ended, or drain_timeout is over; until then
        new ones are refused.
        """
        self._drain_asked.set()

    @property
    def is_draining(self) -> bool:
        """Whether `ask_to_drain` was called."""
        return self._drain_asked.is_set()

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether the server ends because somebody wants it to."""
        return (self._stop_asked.is_set() or self.is_draining) and self.error is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has ended; whether it has."""
        return self._over.wait(timeout_s)

    def failure(self, timeout_s: float) -> TandemError | None:
        """Why the server is ending, waiting up to `timeout_s` for it to end; None if it goes on,
        or somebody asked for its end.
        """
        self._ending.wait(timeout_s)
        return self.error

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each process, by name."""
        return {child.name: child.process.pid for child in self._children}

    # ---- the supervisor's thread ----------------------------------------------------------

    def _run(self) -> None:
        transport = Transport("supervisor")
        router: Router | None = None
        try:
            router = transport.router(self._instance.wire("supervisor"))
            self._watch(router)
        except TandemError as e:
            self.error = e
        except Exception as e:
            self.error = ProcessDied(f"the supervisor failed: {type(e).__name__}: {e}")
            _LOG.exception("the supervisor failed")
        finally:
            self._ending.set()
            self._up.set()
            if router is not None:
                self._end_children(router)
            transport.close()
            remove_socket_file(self._instance.endpoint, only_if_dead=True)
            self._instance.remove()
            self._over.set()

    def _watch(self, router: Router) -> None:
        """Start the children and serve their wire until a stop is asked for or something fails."""
        for command in self._commands:
            self._children.append(_Child(command, self._instance, self._echo))
        poller = Poller(router)
        then = time.monotonic()
        while not (self._stop_asked.is_set() or self._has_drained(router)):
            poller.wait(TICK_S)
            self._receive(router)
            now = time.monotonic()
            self._look_for_deaths(router, stood_still_s=max(0.0, now - then - 1.0))
            self._tell_who_is_silent(router)
            then = now
            if not self._up.is_set():
                self._start_up(router)

    def _receive(self, router: Router) -> None:
        for peer, frames in router.drain():
            for frame in frames:
                self._hear(peer, frame)

    def _hear(self, peer: bytes, frame: bytes) -> None:
        known = next((n for n, p in self._peers.items() if p == peer), "unknown process")
        check = self._checks.setdefault(peer, SequenceCheck("→ supervisor"))
        try:
            name, message = check.decode(frame)
        except ProtocolError as e:
            raise ProtocolError(f"{known} broke the protocol: {e}") from None
        child = next((c for c in self._children if c.name == name), None)
        if child is None or self._peers.setdefault(name, peer) != peer:
            raise ProtocolError(f"a process that was not started here calls itself {name!r:.60}")
        child.last_heard_s = time.monotonic()
        self._handle(child, message)

    def _handle(self, child: _Child, message: object) -> None:
        if isinstance(message, Progress):
            self._last_progress_s = time.monotonic()
            self._on_progress(child.name, message)
        elif isinstance(message, Loaded):
            self._last_progress_s = time.monotonic()
            child.loaded = message
        elif isinstance(message, Ready):
            child.ready = message.text
        elif isinstance(message, Fatal):
            child.fatal = message
        elif isinstance(message, Drained):
            child.is_drained = True
        elif not isinstance(message, Heartbeat):
            raise ProtocolError(f"{child.name} sent a {type(message).__name__} to the supervisor")

    def _look_for_deaths(self, router: Router, stood_still_s: float) -> None:
        """Raise what ended the first process that has died.

        stood_still_s: for how long this thread itself was stopped (Ctrl-Z, say) and heard nobody.
        """
        now = time.monotonic()
        for child in self._children:
            child.last_heard_s = min(now, child.last_heard_s + stood_still_s)
            if child.fatal is None and child.process.poll() is None:
                # Before its first word it may be slow to start: startup_timeout covers that.
                if now - child.last_heard_s < HEARTBEAT_LIMIT_S or child.name not in self._peers:
                    continue
                child.kill()
                raise ProcessDied(f"{child.name} was silent for {HEARTBEAT_LIMIT_S:g} s")
            raise self._obituary(child, router)

    def _tell_who_is_silent(self, router: Router) -> None:
        """Let the front ends know, whenever it changes."""
        heard_s = time.monotonic() - SILENT_S
        silent = tuple(c.name for c in self._children if c.last_heard_s < heard_s)
        if silent != self._silent and self._up.is_set():
            self._silent = silent
            self._tell(router, Silent(names=silent), [c for c in self._children if c.is_front])

    def _has_drained(self, router: Router) -> bool:
        """Whether a drain was asked for and is over; begins it where it is new.

        Nobody waits for a process that stands still: it ends no request.
        """
        if not self._drain_asked.is_set():
            return False
        if not self._up.is_set():
            return True
        now, told = time.monotonic(), [child for child in self._children if child.has_users]
        if self._drain_end_s is None:
            timeout_s = self._instance.config.server.drain_timeout
            self._drain_end_s = now + timeout_s + DRAIN_GRACE_S
            self._tell(router, Drain(timeout_s=timeout_s), told)
        awaited = [c for c in told if not c.is_drained and c.last_heard_s > now - STANDSTILL_S]
        return not awaited or now > self._drain_end_s

    def _tell(self, router: Router, message: object, children: Sequence[_Child]) -> None:
        for child in children:
            router.send(self._peers[child.name], message)

    def _obituary(self, child: _Child, router: Router) -> TandemError:
        """How it ended, in its own words if it had the time for any."""
        deadline = time.monotonic() + EXIT_WAIT_S
        poller = Poller(router)
        while child.fatal is None and child.exited_by_itself and time.monotonic() < deadline:
            poller.wait(TICK_S)
            self._receive(router)
        if child.fatal is not None:
            if child.fatal.kind == "user":
                return ConfigError(child.fatal.text)
            return ProcessDied(f"{child.name} failed: {child.fatal.text}")
        words = child.last_words()
        return ProcessDied(
            f"{child.name} died ({child.how_it_ended()})" + (f":\n{words}" if words else "")
        )

    def _start_up(self, router: Router) -> None:
        """Move the start-up on: all loaded → Begin to all; all ready → the server is up."""
        if self._begin is None and all(c.loaded for c in self._children):
            self._begin = common_facts(
                self._instance, [c.loaded for c in self._children if c.loaded]
            )
            for child in self._children:
                router.send(self._peers[child.name], self._begin)
        elif self._begin is not None and all(c.ready is not None for c in self._children):
            for child in self._children:
                self._on_progress(child.name, None)
                self._on_line(f"{child.name} ready: {child.ready}")
            self._up.set()
        limit = self._instance.config.server.startup_timeout
        if time.monotonic() - self._last_progress_s > limit and not self._up.is_set():
            slow = [c.name for c in self._children if c.ready is None]
            raise ProcessDied(
                f"no progress in {limit:g} s (startup_timeout) while starting {', '.join(slow)}"
            )

    def _end_children(self, router: Router) -> None:
        """Tell everybody to end and why; after the grace, make them."""
        reason = None if self.error is None else str(self.error)
        for peer in self._peers.values():
            router.send(peer, Shutdown(reason=reason))
        deadline = time.monotonic() + STOP_GRACE_S
        for child in self._children:
            if child.name not in self._peers:
                child.kill()  # it is not even far enough to be told
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.close()


def common_facts(instance: Instance, loaded: Sequence[Loaded]) -> Begin:
    """What all processes must agree on, from what the workers can hold.

    Raises ConfigError if the pool can't hold a sequence of two tokens, or max_seq_len_override
    exceeds the model's context.
    """
    config = instance.config
    page_size = config.scheduler.page_size
    num_pages = min(m.num_pages for m in loaded if m.num_pages is not None)
    context = min(m.max_seq_len for m in loaded if m.max_seq_len is not None)
    wanted = config.model.max_seq_len_override
    if wanted is not None and wanted > context:
        raise ConfigError(
            f"max_seq_len_override is {wanted}: {instance.model.name} knows {context} positions;"
            " choose at most that"
        )
    max_seq_len = min(wanted or context, num_pages * page_size)
    if max_seq_len < 2:
        raise ConfigError(
            f"the KV pool has {num_pages} pages of {page_size} tokens: too few for any sequence;"
            " raise num_page_override or kv_memory_fraction"
        )
    vocab_size = min(m.vocab_size for m in loaded if m.vocab_size is not None)
    return Begin(num_pages=num_pages, max_seq_len=max_seq_len, vocab_size=vocab_size)

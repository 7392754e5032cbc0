"""The server's entry point: `python launch.py --model Qwen3-0.6B`. All options: `--help`,
docs/options.md.
"""

import contextlib
import logging
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from runtime.config import Config, from_command_line
from runtime.errors import TandemError, UserError
from runtime.progress import LoadingBars
from runtime.server import Server

ASK = Path(__file__).resolve().parent / "examples" / "ask.py"
DEATH_NEWS_S = 3.0
"""How long the supervisor may take to tell why a connection was lost."""
WAKE_S = 0.05
"""After a signal, until the main thread surely waits where it would not hear it."""


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C, SIGTERM or a death; the exit status."""
    try:
        config = from_command_line(argv)
        logging.basicConfig(level=config.server.log_level.upper(), format="%(message)s")
        serve(config)
    except UserError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 2
    except TandemError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 1
    _say("stopped")
    return 0


def serve(config: Config) -> None:
    """Returns once somebody has asked for the end and all is gone; raises why it ended else."""
    server: Server | None = None

    def stop(number: int, _: object) -> None:
        if server is None:
            raise KeyboardInterrupt  # while the model is looked up, or downloaded
        if number == signal.SIGTERM and not server.supervisor.is_draining:
            server.supervisor.ask_to_drain()
        else:
            server.supervisor.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    _hear_signals_at_once()
    try:
        server = Server(config, on_line=_say, on_progress=LoadingBars())
        server.start()
    except KeyboardInterrupt:
        return
    except TandemError:
        if server is not None and server.supervisor.was_asked_to_stop:
            return
        raise
    _tell_where(server)
    if config.server.shell:
        _chat(server)
    while not server.supervisor.wait(3600):
        pass
    if server.supervisor.error is not None:
        raise server.supervisor.error


def _hear_signals_at_once() -> None:
    """A signal that comes just before the main thread blocks is heard only when that wakes, in a
    terminal perhaps never: another thread wakes it, once, a moment later.
    """
    arrivals, inside = socket.socketpair()
    inside.setblocking(False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(inside.detach(), warn_on_full_buffer=False)

    def wake() -> None:
        while numbers := arrivals.recv(64):
            if set(numbers) != {signal.SIGUSR1}:
                time.sleep(WAKE_S)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    threading.Thread(target=wake, name="signals", daemon=True).start()


def _tell_where(server: Server) -> None:
    _say(f"serving at {server.endpoint}")
    question = [sys.executable, str(ASK), "--endpoint", server.endpoint, "What is the sun?"]
    _say(f"try it: {shlex.join(question)}")
    if (url := server.http_url) is not None:
        _say(f"HTTP at {url}")


def _chat(server: Server) -> None:
    """Chat in this terminal; leaving it asks for the server's end."""
    from runtime.shell import run_shell  # a server without a shell needs none of it

    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = threading.Event()

    def wake() -> None:
        """The server's end must reach a terminal that waits for a line."""
        server.supervisor.wait()
        if not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)

    signal.signal(signal.SIGHUP, _leave_shell)
    threading.Thread(target=wake, name="end of the server", daemon=True).start()
    try:
        run_shell(server.endpoint, _say)
    except EOFError:
        pass
    except TandemError:
        if server.supervisor.failure(DEATH_NEWS_S) is None:
            raise
    finally:
        ended.set()
        signal.signal(signal.SIGINT, interrupt)
        server.supervisor.ask_to_stop()


def _leave_shell(*_: object) -> None:
    """As if the user had left: the terminal is gone, or the server is."""
    raise EOFError


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever read along has left: no reason to end
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`launch.py --shell` in a terminal, typed into as a user would."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from runtime.config import child_environment
from tests.fakes import ECHO, GONE_S, ROOT, kill, until

LONG_ANSWER = (*ECHO, "--step-ms", "20")
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, worker: tuple[str, ...], *options: str) -> None:
        self._end, theirs = pty.openpty()
        command = [sys.executable, str(ROOT / "launch.py"), "--shell", "--no-http",
                   "--simulated", " ".join(worker), *options]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=_take_terminal, env=child_environment(),
        )  # fmt: skip
        os.close(theirs)
        self._text = ""

    def expect(self, pattern: str, timeout_s: float = 20.0) -> str:
        """What the terminal shows up to the next match of `pattern`."""
        deadline = time.monotonic() + timeout_s
        while (match := re.search(pattern, self._text)) is None:
            left = deadline - time.monotonic()
            if left < 0 or not self._read(left):
                raise AssertionError(f"no {pattern!r} in {self._text!r}")
        shown, self._text = self._text[: match.end()], self._text[match.end() :]
        return shown

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def ask(self, line: str, pattern: str) -> str:
        """Type a line; what is shown up to `pattern`, and then the prompt waits again."""
        self.type(line + "\r")
        shown = self.expect(pattern)
        self.expect("you> ")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._end], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._end, 65536)
        except OSError:  # the program is gone
            return False
        self._text += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    """Ctrl-C reaches the program only as its terminal's foreground group."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    shell = Terminal(LONG_ANSWER)
    shell.expect("you> ", 60)
    yield shell
    shell.close()


def test_an_answer_is_streamed_and_the_conversation_goes_on(terminal: Terminal) -> None:
    terminal.ask("/set ignore_eos true", "ignore_eos is True")
    terminal.ask("/set max_tokens 40", "max_tokens is 40")
    terminal.ask("/system", "begins anew")
    assert "tell me" in terminal.ask("tell me", r"tell me[\s\S]*tell me")
    terminal.ask("/set max_tokens 120", "max_tokens is 120")
    # The simulated model repeats its prompt, in which the first question now is too.
    terminal.ask("go on", r"tell me[\s\S]*go on")
    terminal.ask("/reset", "forgotten")


def test_ctrl_c_stops_the_answer_and_not_the_shell(terminal: Terminal) -> None:
    terminal.ask("/set max_tokens 5000", "max_tokens is 5000")
    terminal.type("an endless story\r")
    terminal.expect(r"story[\s\S]*story")
    terminal.type(CTRL_C)
    terminal.expect(r"\[stopped\]")
    terminal.expect("you> ")
    until(lambda: re.search(r"running +0", terminal.ask("/stats", "steps")), "the request ended")


def test_ctrl_c_at_the_prompt_says_how_to_leave(terminal: Terminal) -> None:
    terminal.type("half a line" + CTRL_C)
    terminal.expect("Ctrl-D or /exit leaves")
    terminal.expect("you> ")


def test_unknown_commands_and_settings_are_answered_with_the_list(terminal: Terminal) -> None:
    assert "/reset" in terminal.ask("/nonsense", "/exit")
    assert "/system" in terminal.ask("/help", "/exit")
    terminal.ask("/set warmth 3", "no setting 'warmth': there are .*temperature")
    terminal.ask("/set temperature hot", "refused: temperature is 'hot'")
    terminal.ask("/set temperature -1", "refused: temperature is -1")
    terminal.ask("/set stop END", "stop is 'END'")
    terminal.ask("/set", "stop='END'")
    terminal.ask("/set stop", "stop is as before")
    terminal.ask("   ", "")


@pytest.mark.parametrize("keys", [CTRL_D, "/exit\r"])
def test_leaving_ends_the_server(keys: str) -> None:
    shell = Terminal(ECHO)
    try:
        shell.expect("you> ", 60)
        shell.type(keys)
        shell.expect("stopped")
        assert shell.process.wait(GONE_S) == 0
    finally:
        shell.close()


def test_a_server_that_dies_ends_the_shell_while_it_waits_for_a_line() -> None:
    shell = Terminal(ECHO)
    try:
        shown = shell.expect("you> ", 60)
        folder = re.search(r"ipc://(\S+)/public", shown)
        assert folder is not None
        found = subprocess.run(["pgrep", "-f", f"scheduler_proc --instance {folder[1]}"],
                               capture_output=True, text=True, check=True)  # fmt: skip
        kill(int(found.stdout.split()[0]))
        shell.expect(r"launch.py: scheduler died \(killed by SIGKILL\)")
        assert shell.process.wait(GONE_S) == 1
    finally:
        shell.close()


def test_sigterm_ends_the_shell() -> None:
    shell = Terminal(ECHO)
    try:
        shell.expect("you> ", 60)
        shell.process.send_signal(signal.SIGTERM)
        shell.expect("stopped")
        assert shell.process.wait(GONE_S) == 0
    finally:
        shell.close()


def test_a_script_has_no_shell() -> None:
    from runtime import LLM, ConfigError

    with pytest.raises(ConfigError, match=r"only launch\.py has one"):
        LLM(simulated=" ".join(ECHO), shell=True)

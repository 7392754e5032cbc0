"""The chat of `launch.py --shell`: lines in, a streamed answer out, a few commands.

Rule: Ctrl-C ends the answer, never the shell; Ctrl-D or /exit leaves.
"""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Callable, Generator
from typing import Any

from runtime.errors import ConnectionLost, ProcessDied, RequestError, TandemError, UserError
from runtime.sampling import SamplingParams
from runtime.sync_client import Client
from runtime.types import Json

PROMPT = "you> "
SHOWN_STATS = ("running", "waiting", "pages", "pages_free", "pages_cached", "tokens_generated",
               "requests_ended", "steps")  # fmt: skip
_NOT_SETTABLE = ("n", "logprobs", "prompt_logprobs")
"""What a chat in a terminal has no place for."""
_SETTABLE = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in _NOT_SETTABLE]

Say = Callable[[str], None]


class Left(Exception):
    """The user wants to leave."""


class Shell:
    """One conversation and its settings."""

    def __init__(self, client: Client, say: Say, write: Say) -> None:
        """say: prints a line. write: prints a piece of an answer, at once."""
        self._client = client
        self._say = say
        self._write = write
        self._system: str | None = None
        self._turns: list[Json] = []
        self._settings: dict[str, Any] = {}
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("show this list", self._help),
            "/reset": ("forget the conversation", self._reset),
            "/system": ("TEXT: begin anew with this system message; without TEXT with none",
                        self._set_system),
            "/set": ("NAME VALUE: sampling, as /set temperature 0.7; without VALUE the default"
                     " again; alone: show what is set", self._set),
            "/stats": ("show what the server counts", self._stats),
            "/exit": ("leave, as does Ctrl-D", self._exit),
        }  # fmt: skip

    def on_line(self, line: str) -> None:
        """What the user typed: a command or a message. Raises Left, ConnectionLost, ProcessDied."""
        text = line.strip()
        name, _, rest = text.partition(" ")
        try:
            if name in self._commands:
                self._commands[name][1](rest.strip())
            elif text.startswith("/"):
                self._say(f"there is no command {name}; there are:")
                self._help("")
            elif text:
                self._answer(text)
        except UserError as e:
            self._say(f"refused: {e}")

    # ---- the conversation -----------------------------------------------------------------

    def _answer(self, text: str) -> None:
        """Send the conversation and show the answer. What Ctrl-C leaves of it is kept."""
        question = {"role": "user", "content": text}
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *self._turns, question]
        pieces: list[str] = []
        try:
            with contextlib.closing(self._chunks(messages)) as chunks:
                for chunk in chunks:
                    pieces.append(chunk)
                    self._write(chunk)
        except KeyboardInterrupt:
            self._write(" [stopped]")
        self._say("")
        self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _chunks(self, messages: list[Json]) -> Generator[str, None, None]:
        stream = self._client.chat(messages, SamplingParams(**self._settings), stream=True)
        for chunk in stream:
            if chunk.text:
                yield chunk.text

    # ---- commands -------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, (text, _) in self._commands.items():
            self._say(f"  {name:8} {text}")

    def _reset(self, rest: str) -> None:
        self._turns.clear()
        self._say("the conversation is forgotten")

    def _set_system(self, rest: str) -> None:
        self._system = rest or None
        self._turns.clear()
        self._say("the conversation begins anew" + (" with that system message" if rest else ""))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            self._say(
                ", ".join(f"{k}={v!r}" for k, v in self._settings.items()) or "nothing is set"
            )
            return
        if name not in _SETTABLE:
            raise RequestError(f"there is no setting {name!r}: there are {', '.join(_SETTABLE)}")
        settings = {k: v for k, v in self._settings.items() if k != name}
        if value.strip():
            settings[name] = _value(name, value.strip())
            SamplingParams(**settings).validate(self._client.server.vocab_size)
        self._settings = settings
        self._say(f"{name} is {settings[name]!r}" if name in settings else f"{name} is as before")

    def _stats(self, rest: str) -> None:
        stats = self._client.stats()
        for name in SHOWN_STATS:
            self._say(f"  {name:17} {stats[name]}")

    def _exit(self, rest: str) -> None:
        raise Left


def _value(name: str, text: str) -> Any:
    """A setting's value: JSON where it is, else the text itself where a text is taken."""
    try:
        return json.loads(text)
    except ValueError:
        hint = typing.get_type_hints(SamplingParams)[name]
        if "str" in str(hint):
            return text
        raise RequestError(f"{name} is {text!r}: write it as in /set temperature 0.7") from None


def run_shell(endpoint: str, say: Say) -> None:
    """Chat until the user leaves; raises ConnectionLost or ProcessDied if the server goes."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and a history

    with Client(endpoint) as client:
        shell = Shell(client, say, lambda text: print(text, end="", flush=True))
        say(f"{client.server.model}: write a message, or /help; Ctrl-C stops an answer")
        while True:
            try:
                shell.on_line(input(PROMPT))
            except KeyboardInterrupt:
                say("\n(Ctrl-D or /exit leaves)")
            except (EOFError, Left):
                say("")
                return
            except (ConnectionLost, ProcessDied):
                raise
            except TandemError as e:
                say(f"failed: {e}")

"""Log probabilities in OpenAI's shapes: that of chats, and the older one of completions."""

import codecs
from typing import Protocol

from http_proc.outputs import Output
from runtime.logprobs import Logprobs, contents
from runtime.messages import Chunk
from runtime.types import Json


class LogprobShape(Protocol):
    """How the log probabilities of one output are written, in the order in which they come."""

    def shown(self, of: Output | Chunk) -> Json:
        """The choice's `logprobs`."""

    def prompt(self, of: Output | Chunk) -> Json:
        """What the choice has besides, for those of the prompt."""


class ChatLogprobs:
    """A list of tokens, each with its likeliest rivals."""

    def __init__(self) -> None:
        self._has_begun = False

    def shown(self, of: Output | Chunk) -> Json:
        return {"content": _contents(of.logprobs), "refusal": None}

    def prompt(self, of: Output | Chunk) -> Json:
        """`prompt_logprobs`: a prompt's first token has none."""
        if of.prompt_logprobs is None:
            return {}
        first: list[Json | None] = [] if self._has_begun else [None]
        self._has_begun = True
        return {"prompt_logprobs": [*first, *_contents(of.prompt_logprobs)]}


class CompletionLogprobs(ChatLogprobs):
    """Parallel lists. With `first_token` they begin with the prompt: its first token, which has no
    log probability, then the others.
    """

    def __init__(self, first_token: bytes | None) -> None:
        super().__init__()
        self._first_token = first_token
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def shown(self, of: Output | Chunk) -> Json:
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._first_token is not None:
            if not self._has_begun:
                self._has_begun = True
                self._add(shown, self._first_token, None, None)
            if of.prompt_logprobs is not None:
                self._add_all(shown, of.prompt_logprobs)
        if of.logprobs is not None:
            self._add_all(shown, of.logprobs)
        return shown

    def prompt(self, of: Output | Chunk) -> Json:
        return {} if self._first_token is not None else super().prompt(of)

    def _add_all(self, shown: Json, logprobs: Logprobs) -> None:
        for entry in contents(logprobs):
            rivals = {
                _name(bytes(rival["bytes"])): rival["logprob"]
                for rival in (entry, *entry["top_logprobs"])
            }
            self._add(shown, bytes(entry["bytes"]), entry["logprob"], rivals)

    def _add(self, shown: Json, token: bytes, logprob: float | None, rivals: Json | None) -> None:
        shown["tokens"].append(_name(token))
        shown["token_logprobs"].append(logprob)
        shown["top_logprobs"].append(rivals)
        shown["text_offset"].append(self._offset)
        self._offset += len(self._decoder.decode(token))


def _contents(logprobs: Logprobs | None) -> list[Json]:
    """As runtime's, without the ids."""
    if logprobs is None:
        return []
    return [
        {**_without_id(entry), "top_logprobs": [_without_id(e) for e in entry["top_logprobs"]]}
        for entry in contents(logprobs)
    ]


def _without_id(entry: Json) -> Json:
    return {name: value for name, value in entry.items() if name != "token_id"}


def _name(token: bytes) -> str:
    """A token as a key: what is no whole character is spelled as OpenAI spells it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

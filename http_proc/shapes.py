"""Responses in OpenAI's shapes: chat completions and text completions, whole and as events.

An event that adds text is made of bytes that were prepared once per output, with only the text
escaped: at thousands of tokens a second nothing else would do.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, ClassVar

from http_proc.logprobs import ChatLogprobs, CompletionLogprobs, LogprobShape
from http_proc.outputs import Output
from runtime.messages import Chunk
from runtime.types import Json

DONE = b"data: [DONE]\n\n"
_TO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_HOLE = "@text@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one response has, and what it was asked to have.

    has_logprobs: of the outputs' tokens. continuous_usage: each event tells the usage so far.
    """

    id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What an output's choice tells of its prompt.

    text: what the text begins with; "" without echo. first_token: the prompt's first token as
    bytes, where echoed logprobs begin with it. token_ids: None unless asked for.
    """

    text: str = ""
    first_token: bytes | None = None
    token_ids: Sequence[int] | None = None


class Shape(ABC):
    """How one kind of response is written; `echoes` has one entry per output."""

    whole_kind: ClassVar[str]
    event_kind: ClassVar[str]

    def __init__(self, head: Head, echoes: Sequence[Echo]) -> None:
        self._head = head
        self._echoes = echoes
        self._is_plain = not (head.return_token_ids or head.has_logprobs or head.continuous_usage)
        self._usage: Json = {"usage": None} if head.include_usage else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._logprobs = {i: self._logprob_shape(echo) for i, echo in enumerate(echoes)}

    def whole(self, outputs: Sequence[Output], usage: Json) -> bytes:
        """The response without a stream."""
        choices = [self._whole_choice(output) for output in outputs]
        return _dump(self._object(self.whole_kind, choices, {"usage": usage}))

    def prepare(self, index: int) -> tuple[bytes, bytes]:
        """An output's event in two pieces, around the JSON string of the text: to be made before
        the first text is here, or it is made then.
        """
        event = self._event(self._choice(index, self._text(_HOLE)))
        before, _, after = event.rpartition(json.dumps(_HOLE).encode())
        self._around[index] = before, after
        return before, after

    def tell_usage(self, so_far: Json) -> None:
        """The next events have this usage."""
        self._usage = {"usage": so_far}

    def first(self, index: int) -> bytes:
        """The events before an output's first text."""
        opening = self._opening(self._echoes[index])
        token_ids = self._echoes[index].token_ids
        if opening is None and token_ids is None:
            return b""
        choice = self._choice(index, opening or {"text": ""})
        ids = {} if token_ids is None else {"prompt_token_ids": token_ids}
        return self._event({**choice, **ids})

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """The events of one chunk of an output; none for a chunk that shows nothing."""
        if not self._is_plain or chunk.prompt_logprobs is not None:
            events = self._detailed(index, chunk)
        elif chunk.text:
            before, after = self._around.get(index) or self.prepare(index)
            events = before + _escaped(chunk.text) + after
        else:
            events = b""
        if chunk.finish_reason is not None:
            events += self._event({**self._choice(index, self._text(None)), **_end(chunk)})
        return events

    def usage(self, usage: Json) -> bytes:
        """The event before the last, where usage was asked for."""
        return _event(self._object(self.event_kind, (), {"usage": usage}))

    # ---- what the kinds differ in ---------------------------------------------------------

    @abstractmethod
    def _text(self, text: str | None) -> Json:
        """The part of an event's choice that adds `text`; None adds nothing."""

    @abstractmethod
    def _opening(self, echo: Echo) -> Json | None:
        """The same for what comes before the first text, if anything does."""

    @abstractmethod
    def _message(self, output: Output) -> Json:
        """The part of a whole response's choice that has the text."""

    @abstractmethod
    def _logprob_shape(self, echo: Echo) -> LogprobShape:
        """How log probabilities are written."""

    # ---- inside ---------------------------------------------------------------------------

    def _whole_choice(self, output: Output) -> Json:
        logprobs = self._logprobs[output.index].shown(output) if self._head.has_logprobs else None
        choice = {
            "index": output.index,
            **self._message(output),
            "logprobs": logprobs,
            **_end(output),
        }
        if self._head.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = self._echoes[output.index].token_ids
        return choice | self._logprobs[output.index].prompt(output)

    def _detailed(self, index: int, chunk: Chunk) -> bytes:
        """The event of a chunk with more than its text."""
        if not (chunk.text or len(chunk.token_ids) or chunk.prompt_logprobs is not None):
            return b""
        choice = self._choice(index, self._text(chunk.text))
        if self._head.has_logprobs:
            choice["logprobs"] = self._logprobs[index].shown(chunk)
        if self._head.return_token_ids:
            choice["token_ids"] = chunk.token_ids.tolist()
        return self._event(choice | self._logprobs[index].prompt(chunk))

    def _choice(self, index: int, text: Json) -> Json:
        return {"index": index, **text, "logprobs": None, "finish_reason": None}

    def _event(self, choice: Json) -> bytes:
        return _event(self._object(self.event_kind, (choice,), self._usage))

    def _object(self, kind: str, choices: Sequence[Json], usage: Json) -> Json:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            **usage,
        }


class ChatShape(Shape):
    """Chat completions."""

    whole_kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def _text(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _opening(self, echo: Echo) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _message(self, output: Output) -> Json:
        return {"message": {"role": "assistant", "content": output.text}}

    def _logprob_shape(self, echo: Echo) -> LogprobShape:
        return ChatLogprobs()


class CompletionShape(Shape):
    """Text completions."""

    whole_kind = event_kind = "text_completion"

    def _text(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _opening(self, echo: Echo) -> Json | None:
        return {"text": echo.text} if echo.text else None

    def _message(self, output: Output) -> Json:
        return {"text": self._echoes[output.index].text + output.text}

    def _logprob_shape(self, echo: Echo) -> LogprobShape:
        return CompletionLogprobs(echo.first_token)


def _event(data: Json) -> bytes:
    return b"data: " + _dump(data) + b"\n\n"


def _dump(data: Json) -> bytes:
    return _TO_JSON.encode(data).encode(errors="replace")


def _escaped(text: str) -> bytes:
    """The JSON string of a text."""
    return encode_basestring(text).encode(errors="replace")


def _end(of: Output | Chunk) -> Json:
    """Why an output ended."""
    reason: Any = None if of.finish_reason is None else str(of.finish_reason)
    return {"finish_reason": reason, "matched_stop": of.matched_stop}

"""Chat templates: messages to the prompt text that the model was trained on.

Rules: the template comes with the model and the chat from a client, and neither is trusted: the
template runs in jinja2's sandbox and sees plain JSON only; whatever goes wrong is a RequestError.
What a chat may cost is bounded by its number of messages and values, its depth, and the length of
the text.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import RequestError
from runtime.types import Json

#: Templates may loop over the messages within a loop over the messages.
MAX_MESSAGES = 4096
MAX_VALUES = 200_000
MAX_DEPTH = 64
#: Of the chat and of the rendered text each: several times the longest context in use.
MAX_CHARS = 16 * 2**20

#: What transformers' apply_chat_template takes beside the template's own variables; none of it may
#: be dropped silently.
_REFUSED = ("chat_template", "tokenize", "return_dict")
#: Put behind a final message that the answer continues: where the template leaves it, that ends.
_MARK = "\ue0f5\ue0f6\ue0f5"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat template `source`, which is always given `variables` (bos_token, eos_token, …).

    A template that doesn't compile is kept: it refuses every chat, other requests go on.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._fault: str | None = None
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as e:
            self._fault = f"the model's chat template can't be used: {e}"

    def render(self, chat: Json) -> str:
        """The prompt text of `chat`; RequestError where it is malformed, too large or refused."""
        if self._fault is not None:
            raise RequestError(self._fault)
        given = _checked(chat)
        continues = _is_continued(given)
        variables = {"add_generation_prompt": True, "tools": None, "documents": None}
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate({**variables, **self._variables, **given}):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise RequestError(f"the chat's text is longer than {MAX_CHARS} characters")
                pieces.append(piece)
        except RequestError:
            raise
        except Exception as e:  # The template's code may raise anything; it's this request's alone.
            raise RequestError(f"the chat template refused the chat: {_reason(e)}") from None
        text = "".join(pieces)
        return _up_to_mark(text) if continues else text


def _is_continued(chat: Json) -> bool:
    """Whether the answer goes on where the final message ends; then that gets its mark.

    Takes continue_final_message out of `chat`, whose template doesn't know it.
    """
    continues = chat.pop("continue_final_message", False)
    if not isinstance(continues, bool):
        text = f"continue_final_message is {continues!r:.80}: it takes true or false"
        raise RequestError(text, "continue_final_message")
    if not continues:
        return False
    final = chat["messages"][-1]
    if final["role"] != "assistant" or not final.get("content"):
        raise RequestError(
            "continue_final_message needs a final message of the role 'assistant' with a text: it"
            f" is {final['role'][:40]!r}"
        )
    if chat.setdefault("add_generation_prompt", False):
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: give one",
            "add_generation_prompt",
        )
    final["content"] += _MARK
    return True


def _up_to_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise RequestError("this model's chat template can't continue a message: it drops its end")
    return before


def _reason(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, jinja2.TemplateError)
        else f"{type(error).__name__}: {error}"
    )


def _checked(chat: Json) -> Json:
    """What the template is given of `chat`, each message without its None values."""
    if not isinstance(chat, dict):
        raise RequestError(f"chat is a {type(chat).__name__}: it must be {{'messages': […], …}}")
    for name in _REFUSED:
        if name in chat:
            raise RequestError(f"chat has {name!r}, which this server doesn't take: leave it out")
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("chat needs 'messages', a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"chat has {len(messages)} messages: at most {MAX_MESSAGES} are taken")
    _Meter().measure(chat, 0)
    return {**chat, "messages": [_message(i, message) for i, message in enumerate(messages)]}


def _message(index: int, message: object) -> Json:
    """A message as templates expect it, its reasoning under every name that they read.

    Both as transformers does.
    """
    if not isinstance(message, dict):
        raise RequestError(f"message {index} must be {{'role': text, 'content': text}}")
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise RequestError(f"message {index} has no 'role' (a text such as 'user')")
    # An assistant's tool calls may come without a text.
    if not isinstance(kept.get("content", "" if "tool_calls" in kept else None), str):
        raise RequestError(
            f"message {index} ({kept['role'][:40]!r}) has no 'content' that is a text"
        )
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


class _Meter:
    """Counts a chat's values and characters; refuses what is not plain JSON or is too large."""

    def __init__(self) -> None:
        self._num_values = 0
        self._num_chars = 0

    def measure(self, value: object, depth: int) -> None:
        self._count(value, depth)
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise RequestError(f"chat holds the key {key!r}: keys must be texts")
                self._count(key, depth)
                self.measure(inner, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self.measure(inner, depth + 1)

    def _count(self, value: object, depth: int) -> None:
        # Exact types: a subclass could bring methods of its own into the sandbox.
        if value is not None and type(value) not in (bool, int, float, str, list, dict):
            raise RequestError(f"chat holds a {type(value).__name__}: only plain JSON is taken")
        self._num_values += 1
        self._num_chars += len(value) if isinstance(value, str) else 0
        if depth > MAX_DEPTH:
            raise RequestError(f"chat is nested more than {MAX_DEPTH} levels deep")
        if self._num_values > MAX_VALUES or self._num_chars > MAX_CHARS:
            raise RequestError(
                f"chat is too large: at most {MAX_VALUES} values and {MAX_CHARS} characters"
                " are taken"
            )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: a mark for training; here the text between only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates are written for: see apply_chat_template in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

"""The bodies of requests. A field that is not here is refused by name; ranges are checked where
sampling parameters are, in runtime.sampling.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from http_proc.complaints import Misfit, shown
from http_proc.unserved import asks_for_nothing
from runtime.client import Prompt
from runtime.sampling import SamplingParams

MAX_PROMPTS = 2048
"""Of one request."""
MAX_CHOICES = 2048
"""Prompts times n."""
PARTS_JOINED_BY = "\n"

_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


def _prompts(given: object) -> list[Prompt]:
    """One prompt or many, text or token ids, as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise ValueError(f"is {shown(given)}: it takes a text, a list of texts, a list of token ids"
                         " or a list of such lists")  # fmt: skip
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if kinds == {str} or (kinds == {list} and all(_is_ids(ids) for ids in given)):
        if len(given) > MAX_PROMPTS:
            raise ValueError(f"has {len(given)} prompts: at most {MAX_PROMPTS} are taken at once")
        return given
    if not given:
        raise ValueError("is empty: it needs at least one token")
    raise ValueError("is a list of neither texts, nor whole numbers, nor lists of whole numbers")


def _is_ids(value: list[object]) -> bool:
    return set(map(type, value)) <= {int}


def _stops(given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(type(text) is str for text in texts):
        raise ValueError(f"is {shown(given)}: it takes a string or a list of strings")
    return texts


def _content(given: object) -> str | None:
    """A message's text: as it is, or its parts' texts with a new line between them."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError(f"is {shown(given)}: it takes a text or a list of parts of type 'text'")
    texts = []
    for index, each in enumerate(given):
        is_part = isinstance(each, dict)
        part = {k: v for k, v in each.items() if v is not None} if is_part else {}
        kind = part.get("type")
        if kind != "text":
            raise ValueError(f"has part {index} of type {shown(kind)}: only 'text' is served")
        if type(part.get("text")) is not str or set(part) != {"type", "text"}:
            raise ValueError(f"has part {index} that is not {{'type': 'text', 'text': a string}}")
        texts.append(part["text"])
    return PARTS_JOINED_BY.join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}

Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT)]
Stops = Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_TEXT_OR_TEXTS)]
Content = Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT)]


class Body(BaseModel):
    """Types are taken as they are: no "5" for 5."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_not_meant(cls, given: Any) -> Any:
        """Some clients send every field that they know, with null or its default."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields or not asks_for_nothing(name, value)
        }


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last event with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in each event")


class GenerationBody(Body):
    """What chats and completions have in common."""

    model: str | None = None
    n: int | None = Field(None, description="outputs for each prompt")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="written into the server's log at level debug")
    priority: int | None = None

    @model_validator(mode="after")
    def _options_fit_stream(self) -> Self:
        options = self.stream_options
        if options is not None and any(options.model_dump().values()) and not self.stream:
            raise Misfit("stream_options", "goes with stream: true")
        return self

    def sampling(self) -> SamplingParams:
        """As SamplingParams; what is not given stays at its default."""
        given = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        return SamplingParams(logprobs=self.num_logprobs(), **given)

    def names(self) -> dict[str, str]:
        """Of fields of SamplingParams that have another name here."""
        return {}

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each; None: no log probabilities."""


_SAMPLED = tuple(
    name for name in GenerationBody.model_fields if name in SamplingParams.__dataclass_fields__
)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = Field(None, description="begin the text with the prompt")
    logprobs: int | None = None
    best_of: int | None = Field(None, description="as many as n: all are returned")

    @model_validator(mode="after")
    def _all_are_returned(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Misfit(
                "best_of", f"is {self.best_of} and n is {self.n or 1}: this server returns all"
                " outputs that it makes; leave best_of out",
            )  # fmt: skip
        return self

    def sampling(self) -> SamplingParams:
        """Echoed prompts come with log probabilities where the outputs do."""
        sampling = super().sampling()
        if self.echo and self.logprobs is not None:
            return replace(sampling, prompt_logprobs=self.logprobs)
        return sampling

    def num_logprobs(self) -> int | None:
        return self.logprobs


class Message(Body):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


Messages = Annotated[list[Message], Field(min_length=1)]


class ChatFields(Body):
    """A chat and what its template is given."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="the answer goes on where the last message ends"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="what else the template is given, as enable_thinking"
    )


class ChatCompletionBody(GenerationBody, ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": limit}

    @model_validator(mode="after")
    def _top_goes_with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Misfit("top_logprobs", "goes with logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise Misfit(
                "max_completion_tokens", f"is {both[1]} and max_tokens is {both[0]}: give one"
            )
        self.max_tokens = both[0] if both[0] is not None else both[1]
        return self


class TokenizeBody(ChatFields):
    """POST /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class AbortBody(Body):
    """POST /abort."""

    request_id: Annotated[str, Field(min_length=1)]

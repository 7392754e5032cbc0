"""What a finished request was: its outputs, put together from their chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.logprobs import contents
from runtime.messages import Chunk, FinishReason
from runtime.sampling import SamplingParams
from runtime.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a request's outputs.

    token_ids: an end-of-sequence token and the tokens of a stop string included. matched_stop: the
    stop string, or the one of stop_token_ids, that ended the text, if one did. logprobs: if asked
    for, one dict per token as in `runtime.logprobs.contents`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: list[Json] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request.

    choices: its outputs, n of them; what is asked of the completion itself is the first one's.
    cached_tokens: prompt tokens that were not computed for the first output. prompt_logprobs: if
    asked for, one entry per prompt token, None for the first.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[Json | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.choices[0].matched_stop

    @property
    def logprobs(self) -> list[Json] | None:
        return self.choices[0].logprobs


def completion_of(chunks: Sequence[Chunk], sampling: SamplingParams) -> Completion:
    """Of all the chunks of a request with those parameters."""
    by_index: list[list[Chunk]] = [[] for _ in range(sampling.n)]
    for chunk in chunks:
        by_index[chunk.index].append(chunk)
    asked = sampling.logprobs is not None
    first = by_index[0]
    return Completion(
        choices=tuple(_choice(index, each, asked) for index, each in enumerate(by_index)),
        prompt_tokens=first[-1].num_prompt_tokens,
        cached_tokens=first[-1].num_cached_tokens,
        prompt_logprobs=None if sampling.prompt_logprobs is None else _of_prompt(first),
    )


def _choice(index: int, chunks: Sequence[Chunk], asked: bool) -> Choice:
    last = chunks[-1]
    told = [entry for c in chunks if c.logprobs is not None for entry in contents(c.logprobs)]
    return Choice(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[i for chunk in chunks for i in chunk.token_ids.tolist()],
        finish_reason=last.finish_reason or FinishReason.ERROR,
        matched_stop=last.matched_stop,
        logprobs=told if asked else None,
    )


def _of_prompt(chunks: Sequence[Chunk]) -> list[Json | None]:
    parts = [contents(c.prompt_logprobs) for c in chunks if c.prompt_logprobs is not None]
    return [None, *(entry for part in parts for entry in part)]

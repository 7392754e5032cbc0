"""One live output as the tokenizer knows it: its text so far, and what its client is still owed.

A call with n above 1 has n of them, which share its prompt.
"""

from dataclasses import dataclass, field

import numpy as np

from runtime.logprobs import Logprobs, join
from runtime.messages import Chunk, FinishCode, FinishReason, Generate
from runtime.types import IntArray, RequestId
from tokenizer_proc.detokenizer import IncrementalDecoder
from tokenizer_proc.stops import StopMatcher


@dataclass(slots=True, eq=False)
class LiveRequest:
    """From Generate to the final Chunk.

    The prompt and the outputs are kept as long as the request lives: whoever restarts a scheduler
    needs them.
    """

    id: RequestId
    client: bytes
    generate: Generate
    prompt_ids: IntArray
    """int32 [n]"""
    decoder: IncrementalDecoder
    stops: StopMatcher | None
    index: int = 0
    """Which of its call's outputs it is."""
    outputs: list[int] = field(default_factory=list)
    num_sent: int = 0
    """Output tokens that the client has been told of."""
    num_cached: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Of the prompt, those not yet sent."""
    _logprobs: list[Logprobs] = field(default_factory=list)
    """Of the output tokens not yet sent."""
    _num_decoded: int = 0
    _num_silent: int = 0
    """Of the last tokens, how many add no text: 1 where a token ended the output."""
    _text: list[str] = field(default_factory=list)
    """Text that is certain and not yet sent."""

    def push(self, token: int, code: FinishCode, logprobs: Logprobs | None = None) -> str | None:
        """Take in one output token; the stop string that it completes, if any.

        Where nobody looks at the text before the end, it is decoded then, all at once. The text of
        a token that ended the output is left out, unless the user wants to see what did.
        """
        self.outputs.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if code is FinishCode.STOP and not self.generate.sampling.include_stop_str_in_output:
            self._num_silent = 1
        elif self.stops is not None or self.generate.stream:
            self._num_decoded += 1
            return self._release(self.decoder.push((token,)))
        return None

    def finish(self, code: FinishCode) -> tuple[FinishReason, str | None]:
        """No token follows: the rest of the text. A stop string may still come to light in it."""
        if (stop := self._decode_rest()) is not None:
            return FinishReason.STOP, stop
        if self.stops is not None:
            self._text.append(self.stops.finish())
        return (FinishReason.STOP if code is FinishCode.STOP else FinishReason.LENGTH), None

    def cut(self) -> None:
        """It ends before its text was complete: what is held back is sent after all."""
        if self._decode_rest() is None and self.stops is not None:
            self._text.append(self.stops.finish())

    @property
    def has_news(self) -> bool:
        """Whether its client should hear of it before the end: of log probabilities of the prompt,
        and where it streams of text that it can show.
        """
        return bool(self.prompt_logprobs) or (self.generate.stream and any(self._text))

    def take_chunk(self, reason: FinishReason | None, stop: str | None = None) -> Chunk:
        """The news since the last chunk."""
        text, self._text = "".join(self._text), []
        offset, self.num_sent = self.num_sent, len(self.outputs)
        logprobs, self._logprobs = self._logprobs, []
        prompt, self.prompt_logprobs = self.prompt_logprobs, []
        return Chunk(
            request=self.generate.request,
            index=self.index,
            offset=offset,
            token_ids=np.array(self.outputs[offset:], np.int32),
            text=text,
            finish_reason=reason,
            matched_stop=stop,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached,
            logprobs=join(logprobs) if logprobs else None,
            prompt_logprobs=join(prompt) if prompt else None,
        )

    def _decode_rest(self) -> str | None:
        """Text of what is not decoded yet, to the end; the stop string in it, if any."""
        end = len(self.outputs) - self._num_silent
        rest, self._num_decoded = self.outputs[self._num_decoded : end], end
        return self._release(self.decoder.push(rest) + self.decoder.finish())

    def _release(self, text: str) -> str | None:
        """Pass new text on as far as no stop string can begin in it; the one that is complete.

        Stop strings are looked for in the text of the tokens that follow the first `min_tokens`.
        """
        sampling = self.generate.sampling
        if self.stops is None or len(self.outputs) <= sampling.min_tokens:
            self._text.append(text)
            return None
        safe, stop = self.stops.push(text)
        self._text.append(safe)
        if stop is not None and sampling.include_stop_str_in_output:
            self._text.append(stop)
        return stop

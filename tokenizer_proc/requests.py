"""One live output as the tokenizer knows it: its text so far, and what its client is still owed.

A call with n above 1 has n of them, which share its prompt.
"""

from dataclasses import dataclass, field

import numpy as np

from runtime.logprobs import Logprobs, join
from runtime.messages import Chunk, Chunks, FinishCode, FinishReason, Generate
from runtime.types import IntArray, RequestId
from tokenizer_proc.detokenizer import IncrementalDecoder
from tokenizer_proc.stops import StopMatcher


class Credit:
    """How many chunks of a call, of all its outputs, may be sent before its reader grants more.

    What can't be sent is kept, and goes out as one chunk later: a slow reader gets fewer, longer
    chunks, and neither end more to hold than the output itself.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._dry_since: int | None = None
        """The tick at which a chunk was first held back for want of credit."""

    def take(self, tick: int) -> bool:
        """Whether a chunk may be sent now; it is counted then."""
        if self._left:
            self._left -= 1
            return True
        if self._dry_since is None:
            self._dry_since = tick
        return False

    def grant(self, chunks: int) -> None:
        """The reader has taken so many."""
        self._left = min(self._limit, self._left + chunks)
        self._dry_since = None

    def is_dry_for(self, tick: int, num_ticks: int) -> bool:
        """Whether something has been held back for longer than `num_ticks`."""
        return self._dry_since is not None and tick - self._dry_since > num_ticks


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
    credit: Credit
    told_stop_ids: frozenset[int] = frozenset()
    """Ids whose token is told as what ended the output."""
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
    """Text that is certain and not yet sent, in pieces that are not empty."""

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

    def finish(self, code: FinishCode) -> tuple[FinishReason, str | int | None]:
        """No token follows: the rest of the text, why it ended, and by which stop. A stop string
        may still come to light in the rest.
        """
        if (stop := self._decode_rest()) is not None:
            return FinishReason.STOP, stop
        if self.stops is not None:
            self._keep(self.stops.finish())
        if code is not FinishCode.STOP:
            return FinishReason.LENGTH, None
        last = self.outputs[-1]
        return FinishReason.STOP, last if last in self.told_stop_ids else None

    def cut(self) -> None:
        """It ends before its text was complete: what is held back is sent after all."""
        if self._decode_rest() is None and self.stops is not None:
            self._keep(self.stops.finish())

    @property
    def has_news(self) -> bool:
        """Whether its client should hear of it before the end: of log probabilities of the prompt,
        and where it streams of text that it can show.
        """
        return bool(self.prompt_logprobs) or (self.generate.stream and bool(self._text))

    def take_chunk(self, reason: FinishReason | None, stop: str | int | None = None) -> Chunk:
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
            self._keep(text)
            return None
        safe, stop = self.stops.push(text)
        self._keep(safe)
        if stop is not None and sampling.include_stop_str_in_output:
            self._keep(stop)
        return stop

    def _keep(self, text: str) -> None:
        if text:
            self._text.append(text)


def never_begun(generate: Generate) -> Chunks:
    """The final chunks of a call that was aborted before its prompt was known."""
    ends = (
        Chunk(
            request=generate.request,
            index=index,
            offset=0,
            token_ids=np.array([], np.int32),
            text="",
            finish_reason=FinishReason.ABORT,
            matched_stop=None,
            num_prompt_tokens=0,
            num_cached_tokens=0,
        )
        for index in range(generate.sampling.n)
    )
    return Chunks(items=tuple(ends))

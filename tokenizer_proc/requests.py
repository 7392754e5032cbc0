"""One live request as the tokenizer knows it: its text so far, and what its client is still
owed.
"""

from dataclasses import dataclass, field

import numpy as np

from runtime.messages import Chunk, FinishCode, FinishReason, Generate
from runtime.types import IntArray, RequestId
from tokenizer_proc.detokenizer import IncrementalDecoder
from tokenizer_proc.stops import StopMatcher


@dataclass(slots=True)
class Credit:
    """How many chunks of a stream may still be sent before its reader grants more.

    What can't be sent is kept, and goes out as one chunk later: a slow reader gets fewer, longer
    chunks, and neither end more to hold than the output itself.
    """

    limit: int
    left: int
    dry_since: int | None = None
    """The tick at which a chunk was first held back for want of credit."""

    def take(self, tick: int) -> bool:
        """Whether a chunk may be sent now; it is counted then."""
        if self.left:
            self.left -= 1
            return True
        self.dry_since = tick if self.dry_since is None else self.dry_since
        return False

    def grant(self, chunks: int) -> None:
        """The reader has taken so many."""
        self.left = min(self.limit, self.left + chunks)
        self.dry_since = None


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
    outputs: list[int] = field(default_factory=list)
    num_sent: int = 0
    """Output tokens that the client has been told of."""
    num_cached: int = 0
    _num_decoded: int = 0
    _text: list[str] = field(default_factory=list)
    """Text that is certain and not yet sent, in pieces that are not empty."""

    def push(self, token: int) -> str | None:
        """Take in one output token; the stop string that it completes, if any.

        Where nobody looks at the text before the end, it is decoded then, all at once.
        """
        self.outputs.append(token)
        if self.stops is None and not self.generate.stream:
            return None
        self._num_decoded += 1
        return self._release(self.decoder.push((token,)))

    def finish(self, code: FinishCode) -> tuple[FinishReason, str | None]:
        """No token follows: the rest of the text. A stop string may still come to light in it."""
        if (stop := self._decode_rest()) is not None:
            return FinishReason.STOP, stop
        if self.stops is not None:
            self._keep(self.stops.finish())
        return (FinishReason.STOP if code is FinishCode.STOP else FinishReason.LENGTH), None

    def cut(self) -> None:
        """It ends before its text was complete: what is held back is sent after all."""
        if self._decode_rest() is None and self.stops is not None:
            self._keep(self.stops.finish())

    @property
    def has_news(self) -> bool:
        """Whether a streaming client should hear of it before the end: only text that it can show
        counts.
        """
        return self.generate.stream and bool(self._text)

    def take_chunk(self, reason: FinishReason | None, stop: str | None = None) -> Chunk:
        """The news since the last chunk."""
        text, self._text = "".join(self._text), []
        offset, self.num_sent = self.num_sent, len(self.outputs)
        return Chunk(
            request=self.generate.request,
            offset=offset,
            token_ids=np.array(self.outputs[offset:], np.int32),
            text=text,
            finish_reason=reason,
            matched_stop=stop,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached,
        )

    def _decode_rest(self) -> str | None:
        """Text of what is not decoded yet, to the end; the stop string in it, if any."""
        rest = self.outputs[self._num_decoded :]
        self._num_decoded = len(self.outputs)
        return self._release(self.decoder.push(rest) + self.decoder.finish())

    def _release(self, text: str) -> str | None:
        """Pass new text on as far as no stop string can begin in it; the one that is complete."""
        if self.stops is None:
            self._keep(text)
            return None
        safe, stop = self.stops.push(text)
        self._keep(safe)
        return stop

    def _keep(self, text: str) -> None:
        if text:
            self._text.append(text)


def never_begun(generate: Generate) -> Chunk:
    """The final chunk of a request that was aborted before its prompt was known."""
    return Chunk(
        request=generate.request,
        offset=0,
        token_ids=np.array([], np.int32),
        text="",
        finish_reason=FinishReason.ABORT,
        matched_stop=None,
        num_prompt_tokens=0,
        num_cached_tokens=0,
    )

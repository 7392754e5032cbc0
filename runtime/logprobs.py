"""Log probabilities: as they cross wires, and as users read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.types import BoolArray, FloatArray, IntArray, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of n tokens, one after another: entries for the token itself, then for the likeliest tokens
    of its place, the likeliest first (the token itself may be among them).

    counts: int32 [n], how many entries each token has; 0 where its request asked for none.
    token_ids: int32 [sum of counts]. values: float32 [sum of counts], natural logarithms.
    spelled: on the client wire the bytes of each of token_ids; on the internal wires empty.
    """

    counts: IntArray
    token_ids: IntArray
    values: FloatArray
    spelled: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.counts)

    def select(self, chosen: BoolArray) -> "Logprobs | None":
        """Those of the tokens for which `chosen`, bool [n], is true; None if none has an entry."""
        entries = np.repeat(chosen, self.counts)
        if not entries.any():
            return None
        return Logprobs(
            counts=self.counts[chosen],
            token_ids=self.token_ids[entries],
            values=self.values[entries],
        )

    def spread(self, places: BoolArray) -> "Logprobs":
        """The same among tokens without entries: theirs are those where `places` is true."""
        counts = np.zeros(len(places), np.int32)
        counts[places] = self.counts
        return replace(self, counts=counts)

    def split(self) -> "Iterator[Logprobs | None]":
        """Each token's alone; None where it has no entries."""
        ends = self.counts.cumsum()
        for count, end in zip(self.counts.tolist(), ends.tolist(), strict=True):
            part = slice(end - count, end)
            yield Logprobs(
                counts=np.array([count], np.int32),
                token_ids=self.token_ids[part],
                values=self.values[part],
                spelled=self.spelled[part],
            ) if count else None  # fmt: skip


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """All of them, one after another; there is at least one."""
    return Logprobs(
        counts=np.concatenate([part.counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        spelled=tuple(text for part in parts for text in part.spelled),
    )


def contents(logprobs: Logprobs) -> list[Json]:
    """As OpenAI's `content`, one dict per token and with its id: token_id, token, logprob, bytes,
    top_logprobs (a list of the same without top_logprobs).

    `bytes` are exact; `token` has U+FFFD in place of those that are no whole character.
    """
    entries = [
        {"token_id": i, "token": b.decode(errors="replace"), "logprob": v, "bytes": list(b)}
        for i, v, b in zip(
            logprobs.token_ids.tolist(), logprobs.values.tolist(), logprobs.spelled, strict=True
        )
    ]
    ends = logprobs.counts.cumsum().tolist()
    starts = [end - count for end, count in zip(ends, logprobs.counts.tolist(), strict=True)]
    return [
        {**entries[start], "top_logprobs": entries[start + 1 : end]}
        for start, end in zip(starts, ends, strict=True)
    ]

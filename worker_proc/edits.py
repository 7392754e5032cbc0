"""What a request does to its logits before a token is chosen from them.

Rule: an edit touches its own row only, and of it only the tokens that the request names or has had
(allowed_token_ids apart): the vocabulary is never gone through for them.
"""

import numpy as np

from runtime.messages import SlotSetup
from runtime.types import FloatArray, IntArray
from worker_proc.history import History

_NEVER = np.float32(-np.inf)


class Edits:
    """The biases, penalties and bans of one request.

    In this order, as in vLLM: biases; the repetition penalty; frequency and presence penalties;
    bans.
    """

    def __init__(self, setup: SlotSetup) -> None:
        """Of the request that takes a slot by `setup`."""
        params = setup.sampling
        self._free_from = setup.prompt_len + params.min_tokens
        self._stop_ids = _ids(setup.stop_ids)
        self._biased = _ids(tuple(entry.token for entry in params.logit_bias))
        self._biases = np.array([entry.bias for entry in params.logit_bias], np.float32)
        self._bad = _ids(params.bad_token_ids)
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _ids(allowed)
        self._repetition = np.float32(params.repetition_penalty or 1.0)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._history = History(setup.prompt_len)

    @classmethod
    def of(cls, setup: SlotSetup) -> "Edits | None":
        """None for a request that leaves its logits as they are."""
        params = setup.sampling
        asked = (
            params.min_tokens
            or params.logit_bias
            or params.bad_token_ids
            or params.allowed_token_ids is not None
            or params.repetition_penalty not in (None, 1.0)
            or params.frequency_penalty
            or params.presence_penalty
        )
        return cls(setup) if asked else None

    def apply(self, logits: FloatArray, row: IntArray, position: int) -> None:
        """Edit the logits [vocab_size] of the token at `position`, in place.

        row: the sequence's row of the token table; its first `position` ids are the tokens so far.
        """
        logits[self._biased] += self._biases
        self._penalize(logits, row, position)
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill(_NEVER)
            logits[self._allowed] = kept
        logits[self._bad] = _NEVER
        if position < self._free_from:
            logits[self._stop_ids] = _NEVER

    def _penalize(self, logits: FloatArray, row: IntArray, position: int) -> None:
        repeats, counts = self._repetition != 1, self._frequency or self._presence
        if not (repeats or counts):
            return
        history = self._history
        history.catch_up(row, position)
        seen = logits[history.tokens]
        if repeats:
            seen[seen > 0] /= self._repetition
            seen[seen < 0] *= self._repetition
        if counts:
            seen -= self._frequency * history.counts
            seen -= self._presence * (history.counts > 0)
        logits[history.tokens] = seen


def _ids(ids: tuple[int, ...]) -> IntArray:
    return np.array(ids, np.int32)

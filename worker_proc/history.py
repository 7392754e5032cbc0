"""Which tokens a request has had, for penalties: read from its row of the token table."""

import numpy as np

from runtime.types import FloatArray, IntArray


class History:
    """The distinct tokens of a sequence so far, and how often each is in the output.

    Rules: the row of the token table is the truth and this only keeps what it says, so a slot that
    changes hands or a request that comes back after a retraction needs nothing but a new History;
    a token more costs no look at the others.

    tokens: int32 [d], each once, prompt and output. counts: float32 [d], times in the output.
    """

    def __init__(self, prompt_len: int) -> None:
        self.tokens: IntArray = np.empty(0, np.int32)
        self.counts: FloatArray = np.empty(0, np.float32)
        self._prompt_len = prompt_len
        self._end = 0
        self._places: dict[int, int] = {}

    def catch_up(self, row: IntArray, end: int) -> None:
        """Know row[:end]. O(1) Python for one token more, else O(end log end)."""
        if end == self._end + 1 and self._end >= self._prompt_len:
            self._add_output(int(row[self._end]))
        elif end != self._end:
            self._count(row[:end])
        self._end = end

    def _add_output(self, token: int) -> None:
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens = np.append(self.tokens, np.int32(token))
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1

    def _count(self, ids: IntArray) -> None:
        self.tokens = np.unique(ids)
        self.counts = np.zeros(len(self.tokens), np.float32)
        outputs, counts = np.unique(ids[self._prompt_len :], return_counts=True)
        self.counts[np.searchsorted(self.tokens, outputs)] = counts
        self._places = {token: place for place, token in enumerate(self.tokens.tolist())}

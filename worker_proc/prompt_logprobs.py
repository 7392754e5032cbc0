"""Log probabilities of prompts, told chunk by chunk as the prompts are computed.

Rules: at most ROWS rows of logits exist at once, whatever the prompt's length; each prompt token is
told once, also when its request is retracted and computed again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from runtime.errors import InternalError
from runtime.logprobs import Logprobs, join
from runtime.messages import PromptLogprobs, SlotSetup
from runtime.types import IntArray, RequestId
from worker_proc.batch import Batch

ROWS = 64

RowLogprobs = Callable[[IntArray, IntArray, IntArray], Logprobs]
"""(rows of the step, the token after each, how many likeliest tokens) to log probabilities; all
int32 [n], n at most ROWS.
"""


@dataclass(slots=True)
class _Prompt:
    """A prompt that is not told to its end. next: index of the token to be told next."""

    request: RequestId
    next: int
    prompt_len: int
    num_likeliest: int


class PromptScorer:
    """Knows which slots' prompts are to be told, and how far they have been."""

    def __init__(self, token_table: IntArray) -> None:
        self._token_table = token_table
        self._prompts: dict[int, _Prompt] = {}

    def set_slot(self, setup: SlotSetup) -> None:
        """From now on the slot's prompt is told if `setup` asks for it."""
        self._prompts.pop(setup.slot, None)
        count, first = setup.sampling.prompt_logprobs, setup.first_prompt_logprob
        if count is not None and first < setup.prompt_len:
            prompt = _Prompt(setup.request, first, setup.prompt_len, count)
            self._prompts[setup.slot] = prompt

    def asks_of(self, batch: Batch) -> bool:
        """Whether any of a step's rows may be asked for: a prompt in it is not told to its end."""
        if not self._prompts:
            return False
        return any(slot in self._prompts for slot in batch.seg_slots.tolist())

    def score(self, batch: Batch, logprobs: RowLogprobs) -> tuple[PromptLogprobs, ...]:
        """The news of a step that has been computed; () at once where nobody asks."""
        return tuple(self._news(batch, logprobs)) if self._prompts else ()

    def _news(self, batch: Batch, logprobs: RowLogprobs) -> Iterable[PromptLogprobs]:
        segments = zip(batch.seg_slots, batch.seg_starts, batch.seg_lens, batch.seg_rows,
                       strict=True)  # fmt: skip
        for slot, start, length, row in segments:
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            if start >= prompt.next:
                raise InternalError(
                    f"request {prompt.request}: prompt token {prompt.next} was to be told, but its"
                    f" step begins at {start}"
                )
            # The row of position p tells token p + 1.
            end = min(start + length + 1, prompt.prompt_len)
            tokens = np.arange(prompt.next, end, dtype=np.int32)
            if len(tokens):
                rows, targets = tokens - 1 - start + row, self._token_table[slot, tokens]
                told = _in_parts(rows, targets, prompt.num_likeliest, logprobs)
                yield PromptLogprobs(request=prompt.request, start=prompt.next, logprobs=told)
                prompt.next = int(end)
            if prompt.next == prompt.prompt_len:
                del self._prompts[slot]


def _in_parts(
    rows: IntArray, targets: IntArray, num_likeliest: int, logprobs: RowLogprobs
) -> Logprobs:
    counts = np.full(len(rows), num_likeliest, np.int32)
    parts = (slice(first, first + ROWS) for first in range(0, len(rows), ROWS))
    return join([logprobs(rows[part], targets[part], counts[part]) for part in parts])

"""A computation that keeps what it computes, for tests that look at logits."""

import numpy as np
import torch

from runtime.types import BoolArray, IntArray
from worker_proc.batch import Batch
from worker_proc.computation import Computation, Outcome
from worker_proc.drawing import Choices
from worker_proc.slots import SlotTables


class Recorder:
    """A computation that keeps the logits of every sampling row: [step][r, vocab_size]."""

    def __init__(self, inner: Computation) -> None:
        self._inner = inner
        self.name = inner.name
        self.seen: list[torch.Tensor] = []

    def begin(self, tables: SlotTables, num_pages: int, page_size: int) -> None:
        self._inner.begin(tables, num_pages, page_size)

    def step(self, batch: Batch, wanted: BoolArray, *, every_row: bool = False) -> Outcome:
        outcome = self._inner.step(batch, np.ones_like(wanted), every_row=every_row)
        if len(wanted):
            self.seen.append(outcome.logits)
        logits = outcome.logits[torch.from_numpy(wanted)]
        return Outcome(likeliest=outcome.likeliest, logits=logits)

    def logits(self, rows: IntArray) -> torch.Tensor:
        return self._inner.logits(rows)

    def draw(self, logits: torch.Tensor, choices: Choices) -> IntArray:
        return self._inner.draw(logits, choices)

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.pool()

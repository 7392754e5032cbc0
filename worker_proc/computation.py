"""What the engine asks of whatever computes a model: torch, or the native kernels."""

from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.types import BoolArray, IntArray
from worker_proc.batch import Batch
from worker_proc.drawing import Choices
from worker_proc.slots import SlotTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step's sampling rows came to.

    likeliest: int32 [r], the token of the highest logit of each, the lowest id among equals.
    logits: float32 [rows that were wanted, vocab_size].
    """

    likeliest: IntArray
    logits: torch.Tensor


class Computation(Protocol):
    """A loaded model with the memory for its keys and values, made by `begin`."""

    name: str
    """What computes, as TANDEM_KERNELS has it."""

    def begin(self, tables: SlotTables, num_pages: int, page_size: int) -> None:
        """Make the pool; forgets what an earlier `begin` made. The tables are read at each step."""
        ...

    def step(self, batch: Batch, wanted: BoolArray, *, every_row: bool = False) -> Outcome:
        """Compute the batch. wanted: [r], the sampling rows whose logits are asked for.

        every_row: `logits` may be asked for any row afterwards, and not only for sampling ones.
        """
        ...

    def logits(self, rows: IntArray) -> torch.Tensor:
        """Of sampling rows of the last step, or of any if it was told so. rows: int32 [n] ->
        float32 [n, vocab_size].
        """
        ...

    def draw(self, logits: torch.Tensor, choices: Choices) -> IntArray:
        """A random token of each row, by that row only: a `Draw` (drawing.py)."""
        ...

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values, in the computation's own layout; after `begin` only."""
        ...

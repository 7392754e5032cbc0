"""Weights in the kernels' packed layout (see product.h): int32 [blocks of 32 rows, words, 32]."""

from collections.abc import Sequence

import torch
from tvm_ffi import Module

COLUMNS = 32
"""Of a packed block: rows of the weight."""


def pack(kernels: Module, parts: Sequence[torch.Tensor], num_threads: int) -> torch.Tensor:
    """Matrices of equal width, stacked and packed. parts: [n, in_features] each, of one dtype."""
    rows = sum(len(part) for part in parts)
    words = -(-parts[0].shape[1] * parts[0].itemsize // 4)
    packed = torch.empty((-(-rows // COLUMNS), words, COLUMNS), dtype=torch.int32)
    packed[rows // COLUMNS :].zero_()  # what lies past the last row counts as nothing
    first = 0
    for part in parts:
        kernels.pack(part.contiguous(), first, packed, num_threads)
        first += len(part)
    return packed


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows in turn 16 of the one and 16 of the other, zeros where the last 16 aren't whole.

    Both [n, …] -> [2 · n rounded up to 16, …]. So a packed block holds both sides of 16 products.
    """
    half = COLUMNS // 2
    missing = -len(gate) % half
    padded = [torch.cat((m, m.new_zeros((missing, *m.shape[1:])))) for m in (gate, up)]
    stacked = torch.stack([m.view(-1, half, *m.shape[1:]) for m in padded], dim=1)
    return stacked.flatten(0, 2)

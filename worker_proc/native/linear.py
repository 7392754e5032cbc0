"""Weights in the kernels' packed layout (see product.h): int32 [blocks of 32 rows, words, 32]."""

import math
from collections.abc import Sequence

import torch
from tvm_ffi import Module

from worker_proc.native.memory import large

COLUMNS = 32
"""Of a packed block: rows of the weight."""


_CHUNK_BYTES = 64 << 20


class Packer:
    """Packs weights side by side into large pieces of memory, which large pages fill well."""

    def __init__(self, kernels: Module, num_threads: int) -> None:
        self._kernels = kernels
        self._num_threads = num_threads
        self._free = torch.empty(0, dtype=torch.int32)

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Matrices of equal width, stacked. parts: [n, in_features] each, of one dtype."""
        rows = sum(len(part) for part in parts)
        words = -(-parts[0].shape[1] * parts[0].itemsize // 4)
        packed = self._take((-(-rows // COLUMNS), words, COLUMNS))
        packed[rows // COLUMNS :].zero_()  # what lies past the last row counts as nothing
        first = 0
        for part in parts:
            self._kernels.pack(part.contiguous(), first, packed, self._num_threads)
            first += len(part)
        return packed

    def _take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """int32 of that shape, from a multiple of 128 bytes on."""
        size = math.prod(shape)
        if size > len(self._free):
            size_words = max(size, _CHUNK_BYTES // 4)
            self._free = large(self._kernels, (size_words,), torch.int32)
        taken, self._free = self._free[:size].view(shape), self._free[size:]
        return taken


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows in turn 16 of the one and 16 of the other, zeros where the last 16 aren't whole.

    Both [n, …] -> [2 · n rounded up to 16, …]. So a packed block holds both sides of 16 products.
    """
    half = COLUMNS // 2
    missing = -len(gate) % half
    padded = [torch.cat((m, m.new_zeros((missing, *m.shape[1:])))) for m in (gate, up)]
    stacked = torch.stack([m.view(-1, half, *m.shape[1:]) for m in padded], dim=1)
    return stacked.flatten(0, 2)

"""Weights in the kernels' packed layout: int32 [blocks of 32 rows, words, 32] (product.h), or
quantized [blocks of 32 rows, groups, words of a group], with one scale for each of 32 columns
[blocks of 32 rows, 1, words of a block] (quantized.h).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tvm_ffi import Module

from worker_proc.native.memory import large

COLUMNS = 32
"""Of a packed block: rows of the weight."""

INT8 = "plain"
"""What `Packer.quantized` calls numbers that aren't quantized yet."""

_GROUPS = {
    "Q8_0": (34, 272),
    "Q4_0": (18, 144),
    "Q4_1": (20, 160),
    "Q4_K": (18, 160),
}
"""By how a matrix is stored: what a row has per group (bytes; Q4_K in the mean of its blocks), and
the words of a packed group of 32 columns.
"""

_CHUNK_BYTES = 64 << 20


class Screen(NamedTuple):
    """A head in 8 bits, packed, and what bounds its error: norms of its columns, and of what
    rounding has changed of them, both float32 [blocks, 32] (choosing.h).
    """

    weights: torch.Tensor
    norms: torch.Tensor
    errors: torch.Tensor


class Packer:
    """Packs weights side by side into large pieces of memory, which large pages fill well."""

    def __init__(self, kernels: Module, num_threads: int) -> None:
        self._kernels = kernels
        self._num_threads = num_threads
        self._free = torch.empty(0, dtype=torch.int32)

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Matrices of equal width, stacked. parts: [n, in_features] each, of one dtype."""
        words = -(-parts[0].shape[1] * parts[0].itemsize // 4)
        packed, firsts = self._room(parts, (words, COLUMNS))
        for part, first in zip(parts, firsts, strict=True):
            self._kernels.pack(part.contiguous(), first, packed, self._num_threads)
        return packed

    def quantized(self, stored: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Matrices of equal width, stacked: numbers quantized to 8 bits, or blocks as they are.

        stored: INT8, then parts are [n, in_features] of one dtype; or one of GGUF's types, then
        they are uint8 [n, bytes of a row].
        """
        width = parts[0].shape[1]
        if stored == INT8:
            block = _int8_block(width)
        else:
            units, words = _GROUPS[stored]
            block = (-(-width // units), words)
        packed, firsts = self._room(parts, block)
        for part, first in zip(parts, firsts, strict=True):
            self._kernels.pack_quantized(
                part.contiguous(), stored, first, packed, self._num_threads
            )
        return packed

    def screen(self, head: torch.Tensor, in_features: int, dtype: torch.dtype) -> Screen:
        """Of a head [n, in_features] of bfloat16 or float32 that `pack` has packed."""
        weights = self._take((len(head), *_int8_block(in_features)))
        norms, errors = torch.empty((2, len(head), COLUMNS), dtype=torch.float32)
        self._kernels.make_screen(
            head, dtype == torch.bfloat16, in_features, weights, norms, errors, self._num_threads
        )
        return Screen(weights, norms, errors)

    def _room(
        self, parts: Sequence[torch.Tensor], block: tuple[int, int]
    ) -> tuple[torch.Tensor, list[int]]:
        """(room for all rows in blocks of that shape, the first row of each part)."""
        ends = list(itertools.accumulate(len(part) for part in parts))
        packed = self._take((-(-ends[-1] // COLUMNS), *block))
        packed[ends[-1] // COLUMNS :].zero_()  # what lies past the last row counts as nothing
        return packed, [0, *ends[:-1]]

    def _take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """int32 of that shape, from a multiple of 64 bytes on."""
        size = math.prod(shape)
        if size > len(self._free):
            size_words = max(size, _CHUNK_BYTES // 4)
            self._free = large(self._kernels, (size_words,), torch.int32)
        taken, self._free = self._free[:size].view(shape), self._free[size:]
        return taken


def _int8_block(in_features: int) -> tuple[int, int]:
    """The shape of a packed block: groups of 64 numbers, then a scale for each column."""
    return 1, COLUMNS * (-(-in_features // 64) * 16 + 1)


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows in turn 16 of the one and 16 of the other, zeros where the last 16 aren't whole.

    Both [n, …] -> [2 · n rounded up to 16, …]. So a packed block holds both sides of 16 products.
    """
    half = COLUMNS // 2
    missing = -len(gate) % half
    padded = [torch.cat((m, m.new_zeros((missing, *m.shape[1:])))) for m in (gate, up)]
    stacked = torch.stack([m.view(-1, half, *m.shape[1:]) for m in padded], dim=1)
    return stacked.flatten(0, 2)

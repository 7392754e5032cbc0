"""Attention over the paged pool: planned once per step, run in every layer.

Rules: a layer's keys and values are written for the whole step before anything attends, so a
segment may read what another one wrote in the same step; keys and values are always read back from
the pool, through the page table; a cell at or past a sequence's end is never read.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from runtime.types import IntArray
from worker_proc.batch import Batch
from worker_proc.kv_pool import KvPool

_QUERY_BLOCK = 256
_SHORTEST_BUCKET = 64


class AttentionStep(Protocol):
    """One step's attention."""

    def run(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values, [t, num_kv_heads, head_dim], then attend causally.

        queries: [t, num_heads, head_dim] -> the same shape. Rows are the batch's.
        """
        ...


class AttentionBackend(Protocol):
    """Makes the attention of one step after another, over one pool and page table."""

    def plan(self, batch: Batch) -> AttentionStep:
        """What the layers of this step run; reads the page table now, not later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """Segments of length 1 and of similar context, computed together, padded to the longest.

    rows: int64 [b]. cells: int64 [b · longest]; padding repeats the row's last cell, which is
    written, so that a masked cell never holds NaN. mask: [b, 1, 1, longest], 0 or -inf.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One longer segment. rows: its place in the step. cells: int64 [start + len], by position."""

    rows: slice
    cells: torch.Tensor


class TorchAttention:
    """By torch's scaled_dot_product_attention on gathered cells. page_table: [num_slots, pages]."""

    def __init__(self, pool: KvPool, page_table: IntArray, page_size: int) -> None:
        self._pool = pool
        self._page_table = page_table
        self._page_size = page_size

    def plan(self, batch: Batch) -> "TorchAttentionStep":
        lens = batch.seg_starts + batch.seg_lens
        chunks = [
            _Chunk(
                rows=slice(int(row), int(row + length)),
                cells=torch.from_numpy(self._cells(slot, np.arange(end))),
            )
            for slot, row, length, end in zip(
                batch.seg_slots, batch.seg_rows, batch.seg_lens, lens, strict=True
            )
            if length > 1
        ]
        decoding = np.flatnonzero(batch.seg_lens == 1)
        decodes = [
            self._decodes(batch.seg_slots[group], batch.seg_rows[group], lens[group])
            for group in _buckets(decoding, lens)
        ]
        return TorchAttentionStep(
            self._pool, torch.from_numpy(_long(batch.out_loc)), decodes, chunks
        )

    def _decodes(self, slots: IntArray, rows: IntArray, lens: IntArray) -> _Decodes:
        places = np.arange(lens.max())
        read = np.minimum(places, lens[:, None] - 1)
        masked = torch.from_numpy(places >= lens[:, None])
        mask = torch.zeros(masked.shape, dtype=self._pool.keys.dtype)
        mask.masked_fill_(masked, float("-inf"))
        return _Decodes(
            rows=torch.from_numpy(_long(rows)),
            cells=torch.from_numpy(self._cells(slots[:, None], read).reshape(-1)),
            mask=mask[:, None, None],
        )

    def _cells(self, slots: IntArray | np.int32, positions: "_Positions") -> "_Positions":
        """The KV index of each position of each slot."""
        pages, offsets = np.divmod(positions, self._page_size)
        cells: _Positions = _long(self._page_table[slots, pages]) * self._page_size + offsets
        return cells


class TorchAttentionStep:
    """One step of TorchAttention."""

    def __init__(
        self, pool: KvPool, out_loc: torch.Tensor, decodes: list[_Decodes], chunks: list[_Chunk]
    ) -> None:
        self._pool = pool
        self._out_loc = out_loc
        self._decodes = decodes
        self._chunks = chunks
        longest = max((len(chunk.cells) for chunk in chunks), default=0)
        self._causal = _causal_mask(longest, pool.keys.dtype) if chunks else None

    def run(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        self._pool.write(layer, self._out_loc, keys, values)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        for decodes in self._decodes:
            out[decodes.rows] = self._attend_decodes(layer, decodes, queries[decodes.rows])
        for chunk in self._chunks:
            self._attend_chunk(layer, chunk, queries[chunk.rows], out[chunk.rows])
        return out

    def _attend_decodes(self, layer: int, decodes: _Decodes, queries: torch.Tensor) -> torch.Tensor:
        """queries: [b, num_heads, head_dim] -> the same shape.

        A group's query heads stand where several queries of one head would: no key is copied.
        """
        num_rows, num_heads, head_dim = queries.shape
        keys, values = self._pool.gather(layer, decodes.cells)
        num_kv_heads = keys.shape[1]
        found = functional.scaled_dot_product_attention(
            queries.view(num_rows, num_kv_heads, -1, head_dim),
            keys.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2),
            values.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2),
            decodes.mask.expand(-1, -1, num_heads // num_kv_heads, -1),
        )
        return found.reshape(num_rows, num_heads, head_dim)

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """queries, out: [n, num_heads, head_dim]; in blocks, so that no mask grows with n."""
        assert self._causal is not None
        keys, values = self._pool.gather(layer, chunk.cells)
        start = len(chunk.cells) - len(queries)
        for first in range(0, len(queries), _QUERY_BLOCK):
            block = queries[first : first + _QUERY_BLOCK]
            end = start + first + len(block)
            mask = self._causal[-len(block) :, -end:]
            out[first : first + len(block)] = _attend_block(block, keys[:end], values[:end], mask)


_Positions = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def _long(values: IntArray) -> _Positions:
    return values.astype(np.int64)


def _attend_block(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """queries: [n, num_heads, head_dim], keys, values: [end, num_kv_heads, head_dim] -> queries'.

    Key heads go where a batch's rows would, expanded (not copied) over their group's queries.
    """
    num_queries, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    found = functional.scaled_dot_product_attention(
        queries.view(num_queries, -1, group, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        values.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        mask,
    )
    return found.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _causal_mask(longest: int, dtype: torch.dtype) -> torch.Tensor:
    """[block, block + longest], 0 or -inf, whose lower right corner fits every block of queries.

    The last n rows and last `end` columns are the mask of n queries that end at position end - 1.
    """
    width = _QUERY_BLOCK + longest
    future = torch.full((_QUERY_BLOCK, width), float("-inf"), dtype=dtype)
    return future.triu_(width - _QUERY_BLOCK + 1)


def _buckets(decoding: "_Positions", lens: IntArray) -> list["_Positions"]:
    """Segments whose contexts pad to the same power of two, so one long one doesn't pad all."""
    padded = np.maximum(lens[decoding], _SHORTEST_BUCKET) - 1
    sizes = np.frexp(padded)[1]
    return [decoding[sizes == size] for size in np.unique(sizes)]

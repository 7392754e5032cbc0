"""The memory that holds keys and values: one cell per token and layer, addressed by KV index.

A cell holds anything, NaN included, until it is written: whoever reads gathers written cells only.
"""

import torch

from worker_proc.model_config import ModelConfig


class KvPool:
    """keys, values: [num_layers, num_cells, num_kv_heads, head_dim], cells = pages · page_size.

    Memory is taken from the system when a cell is first written.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> None:
        shape = (config.num_layers, num_pages * page_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype)
        self.values = torch.empty(shape, dtype=dtype)

    def write(
        self, layer: int, out_loc: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Fill a layer's cells `out_loc`, int64 [n], from keys, values: [n, heads, head_dim]."""
        self.keys[layer].index_copy_(0, out_loc, keys)
        self.values[layer].index_copy_(0, out_loc, values)

    def gather(self, layer: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the cells, int64 [n], of a layer: keys, values [n, heads, dim]."""
        return self.keys[layer].index_select(0, cells), self.values[layer].index_select(0, cells)


def padded(head_dim: int) -> int:
    """The room that native kernels give a head's key or value: whole cache lines of words."""
    return -(-head_dim // 16) * 16


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """What one page takes over all layers, keys and values; padding included."""
    per_cell = 2 * config.num_layers * config.num_kv_heads * padded(config.head_dim)
    return per_cell * page_size * dtype.itemsize

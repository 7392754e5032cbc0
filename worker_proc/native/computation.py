"""A model computed whole by the native kernels (decoder.h): one call a step, from ids to tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from runtime.errors import InternalError
from runtime.types import BoolArray, IntArray
from worker_proc.batch import Batch
from worker_proc.checkpoint import Quantization, Weights
from worker_proc.computation import Outcome
from worker_proc.drawing import Choices
from worker_proc.kernels import Kernels
from worker_proc.kv_pool import padded
from worker_proc.model_config import ModelConfig
from worker_proc.native.linear import COLUMNS, INT8, Packer, interleaved
from worker_proc.native.memory import large
from worker_proc.rope import inverse_frequencies, magnitude
from worker_proc.slots import SlotTables

_BLOCK_CELLS = 64
_Tensors = dict[str, torch.Tensor]
_Arrange = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Rows of matrices in the order in which they are stacked."""


class NativeComputation:
    """Greedy output is the same bits alone and in any batch, chunked or not, cached or not, at any
    page size and with any number of threads.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: Weights,
        cpus: Sequence[int],
        num_threads: int,
    ) -> None:
        """Packs every weight. cpus: one per thread, or empty: the system decides."""
        self.name = kernels.name
        self._kernels = kernels.module
        self._config = config
        self._dtype = weights.dtype
        loader = _Loader(Packer(kernels.module, num_threads), config, weights)
        layers = [loader.layer(i) for i in range(config.num_layers)]
        shape = {
            "num_threads": num_threads,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_magnitude": magnitude(config.rope_scaling),
        }
        functions = kernels.module.make_decoder(
            weights.dtype == torch.bfloat16,
            {key: float(value) for key, value in shape.items()},
            loader.ends(),
            layers,
            list(cpus),
        )
        self._run: Any = functions["run"]
        self._answer: Any = functions["answer"]
        self._draw: Any = functions["draw"]
        self._tables: SlotTables | None = None
        self._keys = self._values = torch.empty(0)
        self._page_size = 0
        self._no_logits = torch.empty((0, config.vocab_size), dtype=torch.float32)

    def begin(self, tables: SlotTables, num_pages: int, page_size: int) -> None:
        config = self._config
        blocks = -(-num_pages * page_size // _BLOCK_CELLS)
        cells = (blocks, config.num_kv_heads, _BLOCK_CELLS, padded(config.head_dim))
        self._keys = large(self._kernels, (config.num_layers, *cells), self._dtype)
        self._values = large(self._kernels, (config.num_layers, *cells), self._dtype)
        self._tables = tables
        self._page_size = page_size

    def step(self, batch: Batch, wanted: BoolArray, *, every_row: bool = False) -> Outcome:
        if self._tables is None:
            raise InternalError("a step was computed before begin()")
        ids = self._tables.token_table[batch.token_slots, batch.positions]
        sampled, logits = self._room(batch.sample_rows, wanted)
        self._run(
            _rows(batch.seg_slots, batch.seg_starts, batch.seg_lens, batch.seg_rows),
            _rows(ids, batch.positions, batch.out_loc),
            self._tables.page_table,
            self._page_size,
            self._keys,
            self._values,
            sampled,
            logits,
            every_row,
        )
        return Outcome(likeliest=sampled[2], logits=logits)

    def logits(self, rows: IntArray) -> torch.Tensor:
        sampled, logits = self._room(rows, np.ones(len(rows), np.bool_))
        self._answer(sampled, logits)
        return logits

    def draw(self, logits: torch.Tensor, choices: Choices) -> IntArray:
        tokens = np.empty(len(logits), np.int32)
        self._draw(logits, choices.stacked(), tokens)
        return tokens

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [num_layers, blocks of 64 cells, num_kv_heads, 64, padded head_dim], as large as
        that; how the elements lie in a block is said in pool.h.
        """
        return self._keys, self._values

    def _room(self, rows: IntArray, wanted: BoolArray) -> tuple[IntArray, torch.Tensor]:
        """int32 [3, r]: rows, the row of `logits` that each goes to (or -1), room for tokens."""
        sampled = np.empty((3, len(rows)), np.int32)
        sampled[0], sampled[1] = rows, -1
        count = int(np.count_nonzero(wanted))
        if not count:
            return sampled, self._no_logits
        sampled[1, wanted] = np.arange(count)
        return sampled, torch.empty((count, self._config.vocab_size), dtype=torch.float32)


def _rows(*arrays: IntArray) -> IntArray:
    """One below the other, in memory of their own: int32 [arrays, n]."""
    rows = np.empty((len(arrays), len(arrays[0])), np.int32)
    for row, array in zip(rows, arrays, strict=True):
        row[:] = array
    return rows


def _each(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return parts


class _Loader:
    """Weights by the names that model.h has for them."""

    def __init__(self, packer: Packer, config: ModelConfig, weights: Weights) -> None:
        self._packer = packer
        self._config = config
        self._weights = weights

    def layer(self, index: int) -> _Tensors:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        found = {
            "input_norm": self._floats(f"{prefix}input_layernorm.weight"),
            "mlp_norm": self._floats(f"{prefix}post_attention_layernorm.weight"),
            **self._product("qkv", [f"{attention}{name}_proj" for name in "qkv"]),
            **self._product("out", [f"{attention}o_proj"]),
            **self._gate_up(mlp),
            **self._product("down", [f"{mlp}down_proj"]),
        }
        for name in ("query", "key"):
            weight = f"{attention}{name[0]}_norm.weight"
            if weight in self._weights:
                found[f"{name}_norm"] = self._floats(weight)
        return found

    def ends(self) -> _Tensors:
        """The head also serves as the embedding where they are tied: there is one copy."""
        config, table = self._config, "model.embed_tokens.weight"
        found = {
            "norm": self._floats("model.norm.weight"),
            "frequencies": inverse_frequencies(
                config.rope_theta, config.head_dim, config.rope_scaling
            ).contiguous(),
        }
        tied = config.tie_word_embeddings
        head = self._packed([table if tied else "lm_head.weight"], _each)
        found["head"] = head
        if not tied:
            found["embedding"] = self._packed([table], _each)
        if head.shape[2] == COLUMNS:  # in few bits it is read as fast as a screen would be
            screen = self._packer.screen(head, config.hidden_size, self._weights.dtype)
            found["screen"], found["screen_norms"], found["screen_errors"] = screen
        return found

    def _product(self, name: str, matrices: Sequence[str]) -> _Tensors:
        found = {name: self._packed([f"{m}.weight" for m in matrices], _each)}
        if f"{matrices[0]}.bias" in self._weights:
            found[f"{name}_bias"] = torch.cat([self._floats(f"{m}.bias") for m in matrices])
        return found

    def _gate_up(self, prefix: str) -> _Tensors:
        gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
        weights = [f"{gate}.weight", f"{up}.weight"]
        found = {"gate_up": self._packed(weights, lambda parts: [interleaved(*parts)])}
        if f"{gate}.bias" in self._weights:
            found["gate_up_bias"] = interleaved(*(self._floats(f"{m}.bias") for m in (gate, up)))
        return found

    def _packed(self, names: Sequence[str], arrange: _Arrange) -> torch.Tensor:
        """Matrices of equal width, arranged and stacked: in few bits where that is asked for."""
        blocks = self._weights.blocks(names)
        if blocks is not None:
            parts = arrange([part.data for part in blocks])
            return self._packer.quantized(blocks[0].type_name, parts)
        parts = arrange([self._weights.view(name) for name in names])
        if self._weights.quantization is Quantization.INT8:
            return self._packer.quantized(INT8, parts)
        return self._packer.pack(parts)

    def _floats(self, name: str) -> torch.Tensor:
        """Norms and biases are kept in float32; they hold the model's dtype's values."""
        return self._weights.take(name).float()

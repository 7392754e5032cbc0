"""A model of worker_proc.models computed by torch: for any processor, at its libraries' speed."""

import torch

from runtime.errors import InternalError
from runtime.types import BoolArray, IntArray
from worker_proc.attention import TorchAttention
from worker_proc.batch import Batch
from worker_proc.computation import Outcome
from worker_proc.drawing import Choices, draw_by_torch
from worker_proc.kv_pool import KvPool
from worker_proc.model_config import ModelConfig
from worker_proc.models import CausalLM
from worker_proc.slots import SlotTables


class TorchComputation:
    """model: its weights are of `dtype`, and so are activations, keys and values."""

    name = "torch"

    def __init__(self, config: ModelConfig, model: CausalLM, dtype: torch.dtype) -> None:
        self._config = config
        self._model = model
        self._dtype = dtype
        self._tables: SlotTables | None = None
        self._pool: KvPool | None = None
        self._attention: TorchAttention | None = None
        self._hidden = torch.empty(0)

    def begin(self, tables: SlotTables, num_pages: int, page_size: int) -> None:
        self._tables = tables
        self._pool = KvPool(self._config, num_pages, page_size, self._dtype)
        self._attention = TorchAttention(self._pool, tables.page_table, page_size)

    @torch.inference_mode()
    def step(self, batch: Batch, wanted: BoolArray, *, every_row: bool = False) -> Outcome:
        if self._tables is None or self._attention is None:
            raise InternalError("a step was computed before begin()")
        ids = self._tables.token_table[batch.token_slots, batch.positions]
        self._hidden = self._model.forward(
            torch.from_numpy(ids),
            torch.from_numpy(batch.positions),
            self._attention.plan(batch),
        )
        logits = self.logits(batch.sample_rows)
        likeliest = logits.argmax(-1).numpy().astype("int32")
        return Outcome(likeliest=likeliest, logits=logits[torch.from_numpy(wanted)])

    @torch.inference_mode()
    def logits(self, rows: IntArray) -> torch.Tensor:
        return self._model.logits(self._hidden[torch.from_numpy(rows).long()])

    def draw(self, logits: torch.Tensor, choices: Choices) -> IntArray:
        return draw_by_torch(logits, choices)

    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pool is None:
            raise InternalError("the pool was asked for before begin()")
        return self._pool.keys, self._pool.values

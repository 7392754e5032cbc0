"""From a StepPlan to its tokens: the worker's core, without sockets, clock or threads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from runtime.config import kernels_choice
from runtime.errors import ConfigError, InternalError
from runtime.gguf_file import GgufFile
from runtime.instance import ModelFiles
from runtime.messages import StepPlan
from runtime.types import IntArray
from worker_proc.answer import NOTHING, Answer
from worker_proc.attention import AttentionBackend, TorchAttention
from worker_proc.batch import Batch, make_batch
from worker_proc.checkpoint import Checkpoint, DummyCheckpoint, SafetensorsCheckpoint, Weights
from worker_proc.gguf_checkpoint import GgufCheckpoint, read_gguf_config
from worker_proc.kv_pool import KvPool, bytes_per_page
from worker_proc.linear import make_linears
from worker_proc.logprobs import logprobs_of
from worker_proc.machine import free_memory_bytes, resolve_dtype
from worker_proc.model_config import ModelConfig, read_config
from worker_proc.models import CausalLM, Family, family_of
from worker_proc.prompt_logprobs import PromptScorer
from worker_proc.sampler import Sampler
from worker_proc.slots import SlotTables

_MAX_CELLS = 2**31 - 1


class Engine:
    """One loaded model; after `begin`, also its pool and tables.

    config: the model's shape. model: its weights. dtype: of weights, activations and KV.
    kernels: what computes its products, as TANDEM_KERNELS has it.
    """

    def __init__(
        self, config: ModelConfig, model: CausalLM, dtype: torch.dtype, kernels: str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self.model = model
        self._run: _Run | None = None

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> "Engine":
        """The model in `files`; dtype and load_format as in ModelOptions.

        progress: hears the fraction of the weights that is loaded, from 0 to 1, after each weight.
        Raises ModelNotFound or ConfigError where the files are not a whole model of a known family.
        """
        gguf = GgufFile(files.path) if files.format == "gguf" else None
        config = read_gguf_config(gguf) if gguf else read_config(Path(files.path))
        family = family_of(config)
        checkpoint = _checkpoint(files, gguf, config, family, load_format)
        computed = resolve_dtype(dtype, config.dtype)
        linears = make_linears(kernels_choice())
        weights = Weights(checkpoint, family.shapes(config), computed, progress, linears)
        with torch.inference_mode():
            return cls(config, family.build(config, weights), computed, linears.name)

    def capacity(self, kv_memory_fraction: float, page_size: int) -> int:
        """How many pages fit into that fraction of the memory that is free now; at least one.

        Raises ConfigError where not one page fits.
        """
        page_bytes = bytes_per_page(self.config, page_size, self.dtype)
        free = free_memory_bytes()
        pages = int(free * kv_memory_fraction) // page_bytes
        if pages < 1:
            raise ConfigError(
                f"a page of {page_size} tokens takes {page_bytes} bytes of KV, but"
                f" kv_memory_fraction {kv_memory_fraction} of {free} free bytes is less: raise it"
            )
        return min(pages, _MAX_CELLS // page_size)

    def begin(self, num_pages: int, page_size: int, num_slots: int, max_seq_len: int) -> None:
        """Make the pool and the tables; forgets what an earlier `begin` made."""
        tables = SlotTables(num_slots, max_seq_len, page_size)
        pool = KvPool(self.config, num_pages, page_size, self.dtype)
        attention = TorchAttention(pool, tables.page_table, page_size)
        self._run = _Run(self.model, tables, pool, attention, self.config.vocab_size)

    @property
    def pool(self) -> KvPool:
        """The keys and values; after `begin` only."""
        return self._running().pool

    @property
    def tables(self) -> SlotTables:
        """The token and page tables; after `begin` only."""
        return self._running().tables

    def execute(self, plan: StepPlan) -> IntArray:
        """Apply the plan's deltas, compute its segments, and sample.

        -> int32 [sampling segments], in plan order; also written into the token table.
        """
        return self._running().answer(plan).tokens

    def answer(self, plan: StepPlan) -> Answer:
        """As `execute`, with the log probabilities that are asked for."""
        return self._running().answer(plan)

    def _running(self) -> "_Run":
        if self._run is None:
            raise InternalError("the engine was asked for a step before begin()")
        return self._run


class _Run:
    """What lives from one `begin` to the next."""

    def __init__(
        self,
        model: CausalLM,
        tables: SlotTables,
        pool: KvPool,
        attention: AttentionBackend,
        vocab_size: int,
    ) -> None:
        self.tables = tables
        self.pool = pool
        self._model = model
        self._attention = attention
        self._sampler = Sampler(tables.token_table, vocab_size)
        self._prompts = PromptScorer(tables.token_table)

    @torch.inference_mode()
    def answer(self, plan: StepPlan) -> Answer:
        self.tables.apply(plan, self._sampler, self._prompts)
        batch = make_batch(plan)
        if not len(batch.positions):
            return NOTHING
        hidden = self._forward(batch)

        def logits_of(rows: IntArray) -> torch.Tensor:
            return self._model.logits(hidden[torch.from_numpy(rows).long()])

        prompts = self._prompts.score(
            batch, lambda rows, ids, counts: logprobs_of(logits_of(rows), ids, counts)
        )
        if not len(batch.sample_rows):
            return replace(NOTHING, prompt_logprobs=prompts)
        logits = logits_of(batch.sample_rows)
        sampled = self._sampler.sample(logits, batch.sample_slots, batch.sample_positions)
        self.tables.token_table[batch.sample_slots, batch.sample_positions] = sampled.tokens
        return Answer(tokens=sampled.tokens, logprobs=sampled.logprobs, prompt_logprobs=prompts)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [t, hidden_size]; the pool holds the step's keys and values after it."""
        ids = self.tables.token_table[batch.token_slots, batch.positions]
        return self._model.forward(
            torch.from_numpy(ids),
            torch.from_numpy(batch.positions),
            self._attention.plan(batch),
        )


def _checkpoint(
    files: ModelFiles, gguf: GgufFile | None, config: ModelConfig, family: Family, load_format: str
) -> Checkpoint:
    if load_format == "dummy":
        return DummyCheckpoint(family.shapes(config))
    if gguf is not None:
        return GgufCheckpoint(gguf, config)
    if files.format == "preset":
        raise ConfigError(
            f"{files.name} is a preset, a shape without weights: give the model's directory, or"
            " load_format dummy"
        )
    return SafetensorsCheckpoint(Path(files.path))

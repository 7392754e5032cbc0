"""From a StepPlan to its tokens: the worker's core, without sockets, clock or threads."""

from collections.abc import Callable
from pathlib import Path

import torch

from runtime.config import kernels_choice
from runtime.errors import ConfigError, InternalError
from runtime.gguf_file import GgufFile
from runtime.instance import ModelFiles
from runtime.logprobs import Logprobs
from runtime.messages import StepPlan
from runtime.types import IntArray
from worker_proc.answer import NOTHING, Answer
from worker_proc.batch import make_batch
from worker_proc.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    Quantization,
    SafetensorsCheckpoint,
    Weights,
)
from worker_proc.computation import Computation
from worker_proc.gguf_checkpoint import GgufCheckpoint, read_gguf_config
from worker_proc.kernels import native_kernels
from worker_proc.kv_pool import bytes_per_page
from worker_proc.logprobs import logprobs_of
from worker_proc.machine import free_memory_bytes, resolve_dtype
from worker_proc.model_config import ModelConfig, read_config
from worker_proc.models import Family, family_of
from worker_proc.prompt_logprobs import PromptScorer
from worker_proc.sampler import Sampler
from worker_proc.slots import SlotTables
from worker_proc.threads import cpus_for, default_threads
from worker_proc.torch_computation import TorchComputation

_MAX_CELLS = 2**31 - 64
"""A cell has a number of 32 bits, and the kernels have blocks of 64."""


class Engine:
    """One loaded model; after `begin`, also its pool and tables.

    config: the model's shape. dtype: of weights, activations and KV. computation: what computes it.
    """

    def __init__(self, config: ModelConfig, computation: Computation, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.computation = computation
        self._run: _Run | None = None

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str = "auto",
        threads: int | None = None,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> "Engine":
        """The model in `files`; dtype, load_format, quantization and threads as in the
        options.

        progress: hears the fraction of the weights that is loaded, from 0 to 1, after each weight.
        Raises ModelNotFound or ConfigError where the files are not a whole model of a known family.
        """
        gguf = GgufFile(files.path) if files.format == "gguf" else None
        config = read_gguf_config(gguf) if gguf else read_config(Path(files.path))
        family = family_of(config)
        checkpoint = _checkpoint(files, gguf, config, family, load_format)
        computed = resolve_dtype(dtype, config.dtype)
        weights = Weights(
            checkpoint,
            family.shapes(config),
            computed,
            progress,
            _quantization(quantization, dtype),
        )
        computation = _computation(config, family, weights, threads or default_threads())
        return cls(config, computation, computed)

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
        self.computation.begin(tables, num_pages, page_size)
        self._run = _Run(self.computation, tables, self.config.vocab_size)

    @property
    def tables(self) -> SlotTables:
        """The token and page tables; after `begin` only."""
        return self._running().tables

    def execute(self, plan: StepPlan, *, every_row: bool = False) -> IntArray:
        """Apply the plan's deltas, compute its segments, and sample.

        -> int32 [sampling segments], in plan order; also written into the token table. every_row:
        so that `computation.logits` may be asked for any row afterwards.
        """
        return self._running().answer(plan, every_row=every_row).tokens

    def answer(self, plan: StepPlan) -> Answer:
        """As `execute`, with the log probabilities that are asked for."""
        return self._running().answer(plan)

    def _running(self) -> "_Run":
        if self._run is None:
            raise InternalError("the engine was asked for a step before begin()")
        return self._run


class _Run:
    """What lives from one `begin` to the next."""

    def __init__(self, computation: Computation, tables: SlotTables, vocab_size: int) -> None:
        self.tables = tables
        self._computation = computation
        self._sampler = Sampler(tables.token_table, vocab_size, computation.draw)
        self._prompts = PromptScorer(tables.token_table)

    def answer(self, plan: StepPlan, *, every_row: bool = False) -> Answer:
        self.tables.apply(plan, self._sampler, self._prompts)
        batch = make_batch(plan)
        if not len(batch.positions):
            return NOTHING
        slots, positions = batch.sample_slots, batch.sample_positions
        wanted = self._sampler.needs_logits(slots)
        every_row |= self._prompts.asks_of(batch)
        outcome = self._computation.step(batch, wanted, every_row=every_row)
        tokens, logprobs = outcome.likeliest, None
        if wanted.any():
            sampled = self._sampler.sample(outcome.logits, slots[wanted], positions[wanted])
            tokens[wanted] = sampled.tokens
            logprobs = sampled.logprobs and sampled.logprobs.spread(wanted)
        self.tables.token_table[slots, positions] = tokens
        return Answer(
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=self._prompts.score(batch, self._row_logprobs),
        )

    @torch.inference_mode()
    def _row_logprobs(self, rows: IntArray, tokens: IntArray, num_likeliest: IntArray) -> Logprobs:
        """Of any rows of the step just computed."""
        return logprobs_of(self._computation.logits(rows), tokens, num_likeliest)


def _computation(
    config: ModelConfig, family: Family, weights: Weights, num_threads: int
) -> Computation:
    kernels = native_kernels(kernels_choice())
    if kernels is not None:
        from worker_proc.native.computation import NativeComputation

        # The kernels have threads of their own: torch's would stand in their way.
        torch.set_num_threads(1)
        return NativeComputation(kernels, config, weights, cpus_for(num_threads), num_threads)
    if weights.quantization is Quantization.INT8:
        raise ConfigError(
            "quantization is int8, which only the native kernels compute, and there are none (the"
            " log says why; TANDEM_KERNELS chooses them): provide for them or choose none"
        )
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        return TorchComputation(config, family.build(config, weights), weights.dtype)


def _quantization(quantization: str, dtype: str) -> Quantization:
    """What the options of these names ask for together."""
    if quantization == "auto":
        return Quantization.NONE if dtype == "float32" else Quantization.KEPT
    return Quantization(quantization)


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

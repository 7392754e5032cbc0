"""From a StepPlan to its tokens: the worker's core, without sockets, clock or threads."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from runtime.config import kernels_choice
from runtime.errors import ConfigError, InternalError
from runtime.gguf_file import GgufFile
from runtime.instance import ModelFiles
from runtime.messages import StepPlan
from runtime.types import IntArray
from worker_proc.batch import make_batch
from worker_proc.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    Quantization,
    SafetensorsCheckpoint,
    Weights,
)
from worker_proc.computation import Computation, NoKernels
from worker_proc.gguf_checkpoint import GgufCheckpoint, read_gguf_config
from worker_proc.kv_pool import bytes_per_page
from worker_proc.machine import free_memory_bytes, resolve_dtype
from worker_proc.model_config import ModelConfig, read_config
from worker_proc.models import Family, family_of
from worker_proc.sampler import Sampler
from worker_proc.slots import SlotTables
from worker_proc.threads import cpus_for, physical_cores
from worker_proc.torch_computation import TorchComputation

_MAX_CELLS = 2**31 - 1

log = logging.getLogger(__name__)


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
        computation = _computation(config, family, weights, threads or len(physical_cores()))
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
        self._run = _Run(self.computation, tables, Sampler(num_slots, self.config.vocab_size))

    @property
    def tables(self) -> SlotTables:
        """The token and page tables; after `begin` only."""
        return self._running().tables

    def execute(self, plan: StepPlan) -> IntArray:
        """Apply the plan's deltas, compute its segments, and sample.

        -> int32 [sampling segments], in plan order; also written into the token table.
        """
        return self._running().execute(plan)

    def _running(self) -> "_Run":
        if self._run is None:
            raise InternalError("the engine was asked for a step before begin()")
        return self._run


class _Run:
    """What lives from one `begin` to the next."""

    def __init__(self, computation: Computation, tables: SlotTables, sampler: Sampler) -> None:
        self.tables = tables
        self._computation = computation
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> IntArray:
        self.tables.apply(plan, self._sampler)
        batch = make_batch(plan)
        if not len(batch.positions):
            return np.zeros(0, np.int32)
        slots, positions = batch.sample_slots, batch.sample_positions
        drawn = self._sampler.draws(slots)
        outcome = self._computation.step(batch, drawn)
        tokens = outcome.likeliest
        if drawn.any():
            tokens[drawn] = self._sampler.sample(outcome.logits, slots[drawn], positions[drawn])
        self.tables.token_table[slots, positions] = tokens
        return tokens


def _computation(
    config: ModelConfig, family: Family, weights: Weights, num_threads: int
) -> Computation:
    """By the native kernels, or by torch where they can't be had: the log says why.

    Raises ConfigError where the processor can't run the kernels that are asked for, or where 8 bits
    are asked for and there are none.
    """
    chosen, reason = kernels_choice(), "TANDEM_KERNELS is torch"
    if chosen != "torch":
        try:
            from worker_proc.native import build
            from worker_proc.native.computation import NativeComputation

            variant = build.pick(chosen)
            kernels = build.load(variant)
        except (ImportError, NoKernels) as e:
            log.warning("computing with torch, slower than native kernels: %s", e)
            reason = str(e)
        else:
            # The kernels have threads of their own: torch's would stand in their way.
            torch.set_num_threads(1)
            cpus = cpus_for(num_threads)
            log.info("quantization of the weights: %s", weights.quantization.value)
            return NativeComputation(kernels, variant.name, config, weights, cpus, num_threads)
    if weights.quantization is Quantization.INT8:
        raise ConfigError(
            f"quantization is int8, which only the native kernels compute, and {reason}; or choose"
            " quantization none"
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

"""A worker's engine in this process, for benchmarks that look inside a step."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from runtime.config import from_options
from runtime.instance import ModelFiles
from runtime.models import find_model
from worker_proc.attention import AttentionStep
from worker_proc.engine import Engine
from worker_proc.models import CausalLM
from worker_proc.threads import physical_cores

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def add_options(parser: argparse.ArgumentParser, prefix: str = "", **defaults: str) -> None:
    """The options that `model_options` reads, their names behind `prefix`."""
    dtype = defaults.get("dtype", "bf16")
    parser.add_argument(f"--{prefix}model", default=defaults.get("model"))
    parser.add_argument(f"--{prefix}dtype", default=dtype, choices=tuple(DTYPES))
    parser.add_argument(f"--{prefix}quantization", help="as the server's option of that name")


def model_options(arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The server's options that the arguments of `add_options` stand for."""

    def given(name: str) -> Any:
        return getattr(arguments, prefix.replace("-", "_") + name)

    options = {name: given(name) for name in ("model", "quantization") if given(name) is not None}
    return {**options, "dtype": DTYPES[given("dtype")]}


def load(options: dict[str, Any], threads: int | None = None) -> tuple[Engine, ModelFiles]:
    """The engine that a worker with these options has, and where its model was found.

    threads: by default the physical cores. Raises ConfigError for options that a server refuses.
    """
    config = from_options(options)
    torch.set_num_threads(threads or config.worker.threads or physical_cores())
    files = find_model(config.model)
    handed_on = {name: options[name] for name in ("quantization",) if name in options}
    engine = Engine.load(
        files, dtype=config.model.dtype, load_format=config.model.load_format, **handed_on
    )
    return engine, files


class Watched:
    """A model that hands every step's hidden states to `hear`, [num_tokens, hidden_size]."""

    def __init__(self, inner: CausalLM, hear: Callable[[torch.Tensor], None]) -> None:
        self._inner = inner
        self._hear = hear

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        hidden = self._inner.forward(input_ids, positions, attention)
        self._hear(hidden)
        return hidden

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self._inner.logits(hidden_rows)

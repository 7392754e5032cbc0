"""A worker's engine in this process, for benchmarks that look inside a step."""

import argparse
from typing import Any

from runtime.config import from_options
from runtime.instance import ModelFiles
from runtime.models import find_model
from worker_proc.engine import Engine

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
    files = find_model(config.model)
    handed_on = {name: options[name] for name in ("quantization",) if name in options}
    engine = Engine.load(
        files,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        threads=threads or config.worker.threads,
        **handed_on,
    )
    return engine, files

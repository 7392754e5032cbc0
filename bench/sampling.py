"""What a random token costs, by kind of request:  python -m bench.sampling [--threads N] [--json]

ROWS rows of logits over Qwen3's vocabulary, normally distributed (deviation 2), drawn by torch and
by the native kernels in turn. Microseconds per row, the median of REPEATS draws.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from runtime.config import kernels_choice
from runtime.types import IntArray
from worker_proc.drawing import Choices, Draw, draw_by_torch
from worker_proc.kernels import native_kernels

ROWS = 16
VOCAB_SIZE = 151_936
REPEATS = 9
KINDS: dict[str, Any] = {
    "temperature": {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 1000": {"top_k": 1000},
}


def choices(top_k: int = VOCAB_SIZE, top_p: float = 1.0, min_p: float = 0.0) -> Choices:
    """The same for every row but for the points; temperature 0.8."""
    return Choices(
        temperatures=np.full(ROWS, 0.8),
        top_ks=np.full(ROWS, top_k),
        top_ps=np.full(ROWS, top_p),
        min_ps=np.full(ROWS, min_p),
        points=np.random.default_rng(0).random(ROWS),
    )


def measure(draw: Draw, logits: torch.Tensor, asked: Choices) -> float:
    """Microseconds per row."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        draw(logits, asked)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / ROWS * 1e6


def native_draw(threads: int) -> tuple[str, Draw]:
    """The kernels' name, and their draw. A new set of threads each time, unlike a model's."""
    kernels = native_kernels(kernels_choice())
    if kernels is None:
        raise SystemExit("there are no native kernels here: torch is all there is to measure")

    def draw(logits: torch.Tensor, asked: Choices) -> IntArray:
        tokens = np.empty(len(logits), np.int32)
        stacked = torch.from_numpy(asked.stacked())
        kernels.module.draw(logits, stacked, torch.from_numpy(tokens), threads)
        return tokens

    return kernels.name, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2
    ways = {"torch": draw_by_torch, **dict([native_draw(arguments.threads)])}
    found = {
        kind: {name: measure(draw, logits, choices(**asked)) for name, draw in ways.items()}
        for kind, asked in KINDS.items()
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for kind, by_way in found.items():
        print(f"{kind:22}", *(f"{name} {us:8,.0f} µs" for name, us in by_way.items()))


if __name__ == "__main__":
    main()

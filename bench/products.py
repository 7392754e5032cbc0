"""How near the worker's products come to this machine's limits:  python -m bench.products [--json]

First what memory delivers (limits.cpp), then products of 1 to 512 rows with matrices of
Qwen3-0.6B's shapes, enough of them that none is still in a cache when its turn comes again. A
product is timed by itself and the fastest tenth counts, since a neighbour that holds a core for a
moment says nothing about the kernel. TANDEM_KERNELS picks what computes.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from bench.limits import Meter
from runtime.config import kernels_choice
from worker_proc.linear import Linear, make_linears
from worker_proc.threads import physical_cores

SHAPES = ((6144, 1024), (1024, 3072), (4096, 1024))
"""(out_features, in_features)"""
ROWS = (1, 4, 8, 12, 16, 32, 64, 512)
SET_BYTES = 400 << 20
"""Of the matrices that take turns: far more than any cache."""
SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One shape at one number of rows. read_fraction: of what memory delivers."""

    shape: tuple[int, int]
    rows: int
    ms: float
    gb_s: float
    tflop_s: float
    read_fraction: float


def fast(run: Callable[[int], object], count: int) -> float:
    """Seconds of run(i) for i in turn below `count`: the fastest tenth's slowest."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        run(len(times) % count)
        times.append(time.perf_counter() - start)
    times.sort()
    return times[len(times) // 10]


def measure(shape: tuple[int, int], dtype: torch.dtype, limit_gb_s: float) -> list[Result]:
    """Every number of rows with matrices of one shape."""
    linears = make_linears(kernels_choice())
    size = shape[0] * shape[1] * dtype.itemsize
    weight = torch.randn(shape).mul_(0.02).to(dtype)
    products: list[Linear] = [linears.linear(weight) for _ in range(SET_BYTES // size)]
    results = []
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        seconds = fast(lambda i, x=x: products[i](x), len(products))
        gb_s = size / seconds / 1e9
        results.append(
            Result(
                shape=shape,
                rows=rows,
                ms=seconds * 1e3,
                gb_s=gb_s,
                tflop_s=2 * rows * shape[0] * shape[1] / seconds / 1e12,
                read_fraction=gb_s / limit_gb_s,
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        with Meter(arguments.threads) as meter:
            limit = meter.measure().dram_read_gb_s
        dtype = getattr(torch, arguments.dtype)
        results = [r for shape in SHAPES for r in measure(shape, dtype, limit)]
    if arguments.json:
        print(json.dumps({"memory_gb_s": limit, "linear": [asdict(r) for r in results]}))
        return
    print(f"memory: {limit:.1f} GB/s read by {arguments.threads} threads")
    for r in results:
        print(
            f"{r.shape[0]} x {r.shape[1]}, {r.rows:3d} rows: {r.ms:7.3f} ms,"
            f" weights at {r.gb_s:5.1f} GB/s ({r.read_fraction:4.0%}), {r.tflop_s:.3f} TFLOP/s"
        )


if __name__ == "__main__":
    main()

"""How near a step comes to this machine's limits:  python -m bench.roofline [--json] [--plot
FILE.svg]

In one run: steps of the worker's engine, decodes of 1 to 64 rows of 128 tokens, 8 rows of 4,096,
and a prefill of 2,048; and before and after each kind, what memory delivers and what the processor
multiplies at most (limits.cpp). The least time of a step is max(bytes / memory read, operations /
peak), by the better of the limits beside it, since they change with what else a host does;
`fraction` is that over the fastest of the steps. The limits that are printed are the best of all.
Weights are random, of the model's shape.

The bytes and operations are those of a step computed plainly. The worker reads a head that is not
of few bits in 8 bits only (native/choosing.h), so `fraction` may pass one; `screened_fraction` is
of the least time with a head of 8-bit numbers.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.limits import Limits, Meter
from bench.worker import add_options, load, model_options
from runtime.messages import StepPlan
from tests.plans import PlanMaker
from worker_proc.engine import Engine
from worker_proc.kv_pool import bytes_per_page
from worker_proc.model_config import ModelConfig
from worker_proc.models import family_of
from worker_proc.threads import default_threads

ROWS = (1, 4, 8, 16, 32, 64)
CONTEXT = 128
LONG_ROWS, LONG_CONTEXT = 8, 4096
PREFILL = 2048
PAGE_SIZE = 16
SECONDS = 2.0
"""For the steps of one kind, of which there are at least MIN_STEPS."""
MIN_STEPS = 3
_WEIGHT_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """length tokens that end a context of `context`, sampled once."""

    length: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step can't do without.

    num_bytes: every weight and every cell of the contexts, each read once. linear, attention,
    screen: operations, a multiplication and an addition each; those of `screen` are of int8.
    """

    num_bytes: float
    linear: float
    attention: float
    screen: float = 0.0

    def seconds(self, limits: Limits, weights: str, dtype: str) -> float:
        """The least time. weights, dtype: kinds of the limits' peaks; attention is in dtype."""
        peaks = limits.peak_tflop_s
        products = self.linear / peaks[weights] + self.screen / peaks["int8"]
        computing = (products + self.attention / peaks[dtype]) / 1e12
        return max(self.num_bytes / limits.dram_read_gb_s / 1e9, computing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The fastest step of a kind, and the least time over it: computed plainly, and with a screen
    for a head.
    """

    ms: float
    fraction: float
    screened_fraction: float


def work(
    config: ModelConfig,
    segments: Sequence[Segment],
    weights: str,
    dtype: str,
    *,
    screened: bool = False,
) -> Work:
    """Of one step. The embedding counts as the head where they are tied, else its rows do not.

    screened: the head's numbers are of 8 bits.
    """
    shapes = family_of(config).shapes(config)
    layers = sum(math.prod(s) for name, s in shapes.items() if ".layers." in name and len(s) == 2)
    head = config.vocab_size * config.hidden_size
    num_tokens = sum(segment.length for segment in segments)
    cells = sum(segment.context for segment in segments)
    # A token attends to itself and to all before it.
    attended = sum(s.length * (2 * s.context - s.length + 1) // 2 for s in segments)
    cell_bytes = bytes_per_page(config, 1, torch.bfloat16 if dtype == "bf16" else torch.float32)
    head_bytes = head * (1 if screened else _WEIGHT_BYTES[weights])
    logits = 2.0 * head * len(segments)
    return Work(
        num_bytes=layers * _WEIGHT_BYTES[weights] + head_bytes + cells * cell_bytes,
        linear=2.0 * layers * num_tokens + (0.0 if screened else logits),
        attention=4.0 * attended * config.num_layers * config.num_heads * config.head_dim,
        screen=logits if screened else 0.0,
    )


def prepared(engine: Engine, segments: Sequence[Segment]) -> StepPlan:
    """A plan of these segments that may be executed again and again.

    A slot for each, whose cells before the segment hold numbers as if computed.
    """
    longest = max(segment.context for segment in segments)
    per_slot = -(-longest // PAGE_SIZE)
    engine.begin(len(segments) * per_slot, PAGE_SIZE, len(segments), longest)
    for cells in engine.computation.pool():
        _fill(cells)
    plans = PlanMaker(PAGE_SIZE)
    for slot, segment in enumerate(segments):
        pages = range(slot * per_slot, (slot + 1) * per_slot)
        plans.admit(slot, [1000 + i % 1000 for i in range(segment.context)], pages)
    runs = [(i, s.context - s.length, s.length, True) for i, s in enumerate(segments)]
    engine.execute(plans.plan(*runs))
    return plans.plan(*runs)


def _fill(tensor: torch.Tensor) -> None:
    """Random numbers, the same ones over and over: what they are does not change the work."""
    flat = tensor.view(-1)
    block = torch.randn(1 << 20).to(tensor.dtype)
    for part in flat.split(len(block)):
        part.copy_(block[: len(part)])


def fastest(engine: Engine, plan: StepPlan) -> float:
    """Seconds of the fastest of the steps."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < MIN_STEPS:
        start = time.perf_counter()
        engine.execute(plan)
        times.append(time.perf_counter() - start)
    return min(times)


def steps() -> dict[str, list[Segment]]:
    """Every step that is measured, by its name; those of the decodes are their rows."""
    decodes = {str(n): [Segment(length=1, context=CONTEXT)] * n for n in ROWS}
    return {
        **decodes,
        "decode_4k_context": [Segment(length=1, context=LONG_CONTEXT)] * LONG_ROWS,
        "prefill2k": [Segment(length=PREFILL, context=PREFILL)],
    }


def plot(decode: dict[str, Measured], file: Path) -> None:
    """The fraction of the roofline by the number of rows."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(6, 4))
    found = list(decode.values())
    axes.plot(list(decode), [100 * step.fraction for step in found], "o-", label="computed plainly")
    screened = [100 * step.screened_fraction for step in found]
    axes.plot(list(decode), screened, "o--", label="with a screen for a head")
    axes.legend()
    axes.set_xlabel(f"rows of a decode step, {CONTEXT} tokens of context each")
    axes.set_ylabel("of the roofline")
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)


def measure(arguments: argparse.Namespace) -> tuple[Limits, dict[str, Measured]]:
    """The limits, and every kind of step against them."""
    dtype, kinds = arguments.dtype, steps()
    weights = arguments.quantization or dtype
    limits, results = [], {}
    with Meter(arguments.threads) as meter:
        options = {**model_options(arguments), "load_format": "dummy"}
        engine, _ = load(options, arguments.threads)
        limits.append(meter.measure())
        for name, segments in kinds.items():
            seconds = fastest(engine, prepared(engine, segments))
            limits.append(meter.measure())
            now = limits[-2].or_better(limits[-1])
            plain, screened = (
                work(engine.config, segments, weights, dtype, screened=screened).seconds(
                    now, weights, dtype
                )
                for screened in (False, True)
            )
            results[name] = Measured(
                ms=seconds * 1e3, fraction=plain / seconds, screened_fraction=screened / seconds
            )
    return reduce(Limits.or_better, limits), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, model="Qwen3-0.6B")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--plot", type=Path, help="write the figure here")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'tandem-llm[bench]'")
    limits, results = measure(arguments)
    report(limits, results, as_json=arguments.json)
    if arguments.plot:
        plot({name: results[name] for name in map(str, ROWS)}, arguments.plot)


def report(limits: Limits, results: dict[str, Measured], *, as_json: bool) -> None:
    """Print everything, as one line of JSON or as a table."""
    if as_json:
        figures = {name: asdict(measured) for name, measured in results.items()}
        decode = {str(rows): figures.pop(str(rows)) for rows in ROWS}
        print(json.dumps({**asdict(limits), "decode": decode, **figures}))
        return
    peaks = ", ".join(f"{kind} {peak:.3f}" for kind, peak in limits.peak_tflop_s.items())
    print(f"memory read: {limits.dram_read_gb_s:.1f} GB/s; peak TFLOP/s: {peaks}")
    for name, measured in results.items():
        label = f"decode, {name} rows" if name.isdigit() else name
        print(
            f"{label:<18} {measured.ms:9.2f} ms {measured.fraction:6.1%} of the roofline,"
            f" {measured.screened_fraction:6.1%} with a screen for a head"
        )


if __name__ == "__main__":
    main()

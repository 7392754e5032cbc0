"""What chunked prefill gives up and what it buys:  python -m bench.chunking [--plot FILE.svg]
[--json]

Some requests decode and stream while a long prompt arrives. For each token budget per step
(max_extend_tokens): how long the newcomer waits for its first token, against how long the others'
streams pause.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime import LLM, AsyncClient, SamplingParams

BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
NUM_STREAMS = 4
LONG_PROMPT = 1024
ROUNDS = 3


async def gaps_of(client: AsyncClient, prompt: list[int], stop: asyncio.Event) -> list[float]:
    """Seconds between the chunks of one stream, until `stop`."""
    gaps: list[float] = []
    sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
    last = None
    async for chunk in await client.generate(prompt, sampling, stream=True):
        now = time.perf_counter()
        if last is not None and len(chunk.token_ids):
            gaps.append(now - last)
        last = now
        if stop.is_set():
            break
    return gaps


async def one_round(client: AsyncClient, rng: np.random.Generator) -> tuple[float, list[float]]:
    """(seconds to the long prompt's first token, the others' gaps meanwhile)."""
    stop = asyncio.Event()
    prompts = [rng.integers(1000, 40000, 32).tolist() for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(gaps_of(client, prompt, stop)) for prompt in prompts]
    await asyncio.sleep(0.5)  # all of them decode
    start = time.perf_counter()
    prompt = rng.integers(1000, 40000, LONG_PROMPT).tolist()
    await client.generate(prompt, SamplingParams(max_tokens=1))
    first_token_s = time.perf_counter() - start
    stop.set()
    gaps = [gap for stream in streams for gap in await stream]
    return first_token_s, gaps


async def measure(endpoint: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    async with await AsyncClient.connect(endpoint) as client:
        rounds = [await one_round(client, rng) for _ in range(ROUNDS)]
    return {
        "first_token_s": float(np.median([first for first, _ in rounds])),
        "longest_pause_s": float(np.median([max(gaps) for _, gaps in rounds])),
    }


def plot(results: dict[str, dict[str, float]], file: Path) -> None:
    """Time to the first token against the others' longest pause, one point a budget."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    pauses = [r["longest_pause_s"] * 1e3 for r in results.values()]
    firsts = [r["first_token_s"] * 1e3 for r in results.values()]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(pauses, firsts, "o-")
    for budget, x, y in zip(results, pauses, firsts, strict=True):
        axes.annotate(budget, (x, y), textcoords="offset points", xytext=(5, 5))
    axes.set_xlabel("longest pause of the other streams (ms)")
    axes.set_ylabel("time to first token of the long prompt (ms)")
    axes.set_title(f"{LONG_PROMPT}-token prompt beside {NUM_STREAMS} streams, by max_extend_tokens")
    axes.set_xscale("log")
    axes.set_xticks([30, 50, 100, 200, 400, 800], minor=False)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--plot", type=Path, help="write the figure here")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for budget in BUDGETS:
        options = {"max_extend_tokens": budget, "cache_type": "naive"}
        with LLM(arguments.model, **options) as llm:
            results[str(budget)] = asyncio.run(measure(llm.endpoint))
        if not arguments.json:
            first, pause = results[str(budget)].values()
            print(
                f"budget {budget:>5}: first token {first:6.3f} s, pause {pause:6.3f} s", flush=True
            )
    if arguments.json:
        print(json.dumps(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()

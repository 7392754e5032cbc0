"""Throughput of `LLM.generate` on the shared workloads:  python -m bench.offline [--dtype
bf16|fp32] [--quantization int8] [--workloads …] [--json]

Whole-system figures: all processes run, the prefill is included, each workload's best of three
calls.
"""

import argparse
import json
import time
from typing import Any

from bench.workloads import WORKLOADS, workload
from runtime import LLM, SamplingParams

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
RUNS = 3


def measure(llm: LLM, name: str) -> dict[str, float]:
    """Seconds of the fastest of RUNS calls, and its output tokens per second."""
    prompts, lengths = workload(name)
    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        best = min(best, time.perf_counter() - start)
        if [len(output["token_ids"]) for output in outputs] != lengths:
            raise RuntimeError(f"{name}: an output has the wrong length")
    return {"seconds": best, "output_tok_s": sum(lengths) / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--quantization", help="as the server's option of that name")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "load_format": arguments.load_format,
        "dtype": DTYPES[arguments.dtype],
        "overlap": not arguments.no_overlap,
        "max_seq_len_override": 4096,
        # The same prompts come three times: a cache would skip their prefill.
        "cache_type": "naive",
    }
    if arguments.quantization is not None:
        options["quantization"] = arguments.quantization
    results = {}
    with LLM(arguments.model, **options) as llm:
        for name in arguments.workloads:
            results[name] = measure(llm, name)
            if not arguments.json:
                seconds, rate = results[name].values()
                print(f"{name:<10} {seconds:7.3f} s {rate:8.1f} output tok/s", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

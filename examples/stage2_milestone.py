"""The milestone of "mini-sglang from scratch, stage 2", on Tandem:  python
examples/stage2_milestone.py

What a scheduler buys, in numbers: one call that batches eight requests; a radix cache that saves
three quarters of the prefill of prompts with a common head; a long prompt computed in chunks; fewer
slots against more; overlap on and off.
With the embedded model it prints real text. The counts of the original page are those of Qwen's
tokenizer:

    python examples/stage2_milestone.py --model Qwen3-0.6B --load-format dummy
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

from runtime import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "List three prime numbers:",
    "def fibonacci(n):",
    "Once upon a time,",
    "1 + 1 =",
    "The quick brown fox",
    "import torch\n",
    "Roses are red,",
]
SYSTEM = "You are a helpful assistant. Answer concisely and accurately. " * 4
QUESTIONS = [
    "What is 2 + 2?",
    "Name a primary color.",
    "What is the capital of Japan?",
    "Spell cat.",
]
LONG_PROMPT = "Explain, step by step, why the sky is blue. " * 25
SETTINGS = {
    "dtype": "float32",
    "max_running_req": 8,
    "page_size": 1,
    "num_page_override": 2048,
    "max_seq_len_override": 512,
    "overlap": False,
}
"""Those of the page: overlap is off, so that the numbers show the scheduler alone."""
RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What became of some prompts: their tokens, how many of those were computed, and in which
    steps.
    """

    prompt_tokens: int
    computed: int
    steps: list[int]


def throughput(model: str, **options: Any) -> tuple[float, str]:
    """Output tokens per second of the eight prompts, 16 tokens each, best of RUNS; the first one's
    text.
    """
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    best = float("inf")
    with LLM(model, **{**SETTINGS, "cache_type": "naive", **options}) as llm:
        for _ in range(RUNS):
            start = time.perf_counter()
            outputs = llm.generate(PROMPTS, sampling)
            best = min(best, time.perf_counter() - start)
    return len(PROMPTS) * 16 / best, outputs[0]["text"]


def shared_head(model: str, cache_type: str, **options: Any) -> tuple[Prefill, float]:
    """One question, then three more after the same system prompt; and how long the three took."""
    sampling = SamplingParams(max_tokens=4)
    with LLM(model, **{**SETTINGS, "cache_type": cache_type, **options}) as llm:
        llm.generate([SYSTEM + QUESTIONS[0]], sampling)
        start = time.perf_counter()
        llm.generate([SYSTEM + question for question in QUESTIONS[1:]], sampling)
        seconds = time.perf_counter() - start
        return prefill_of(llm, [SYSTEM + question for question in QUESTIONS]), seconds


def chunked(model: str, **options: Any) -> Prefill:
    """The long prompt under a budget of 96 prompt tokens a step."""
    with LLM(model, **{**SETTINGS, "max_extend_tokens": 96, **options}) as llm:
        llm.generate([LONG_PROMPT], SamplingParams(max_tokens=2))
        return prefill_of(llm, [LONG_PROMPT])


def prefill_of(llm: LLM, prompts: list[str]) -> Prefill:
    """What the scheduler counted since the start, for these prompts."""
    stats = llm.stats()
    return Prefill(
        prompt_tokens=sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts),
        computed=stats["prompt_tokens_computed"],
        steps=[num_tokens for _, num_tokens in stats["prefill_steps"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    arguments = parser.parse_args()
    model, form = arguments.model, {"load_format": arguments.load_format}

    rate, text = throughput(model, **form)
    print(f"8 requests of 16 tokens: {rate:.1f} tokens/s; the first goes on {text!r}")
    for cache_type in ("naive", "radix"):
        prefill, seconds = shared_head(model, cache_type, **form)
        print(
            f"{cache_type}: 4 prompts of {prefill.prompt_tokens} tokens, {prefill.computed}"
            f" computed; the last 3 took {seconds * 1e3:.0f} ms"
        )
    prefill = chunked(model, **form)
    print(
        f"a prompt of {prefill.prompt_tokens} tokens in {len(prefill.steps)} steps: {prefill.steps}"
    )
    fewer, _ = throughput(model, max_running_req=2, **form)
    print(f"max_running_req=2: {fewer:.1f} tokens/s, {fewer / rate:.2f} of what 8 give")
    overlapped, _ = throughput(model, overlap=True, **form)
    print(f"overlap on: {overlapped:.1f} tokens/s, off: {rate:.1f}")


if __name__ == "__main__":
    main()

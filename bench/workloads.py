"""The work on which Tandem and its peers are compared: token ids from a fixed seed, no text.

Each workload is (prompts, output lengths). End-of-sequence is ignored and decoding is greedy;
throughput is output tokens per wall second of one generate call, best of three.
"""

import random
from collections.abc import Callable

Workload = tuple[list[list[int]], list[int]]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(count)]


def _short_prompts(rng: random.Random) -> Workload:
    """The first figure of the project's seed: 8 short prompts, 16 tokens each."""
    return [_ids(rng, rng.randrange(4, 8)) for _ in range(8)], [16] * 8


def _decodes(batch: int) -> Callable[[random.Random], Workload]:
    """`batch` prompts of 64 tokens, 64 tokens each."""
    return lambda rng: ([_ids(rng, 64) for _ in range(batch)], [64] * batch)


def _mixed(rng: random.Random) -> Workload:
    """32 requests of 32 to 256 prompt tokens and 32 to 128 output tokens."""
    prompts = [_ids(rng, rng.randrange(32, 257)) for _ in range(32)]
    return prompts, [rng.randrange(32, 129) for _ in range(32)]


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "seed8x16": _short_prompts,
    "dec1x64": _decodes(1),
    "dec8x64": _decodes(8),
    "dec32x64": _decodes(32),
    "offline32": _mixed,
    "prefill2k": lambda rng: ([_ids(rng, 2048)], [1]),
}


def workload(name: str) -> Workload:
    """The workload of that name: always the same ids."""
    return WORKLOADS[name](random.Random(0))

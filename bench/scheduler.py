"""What scheduling costs:  python -m bench.scheduler [--page-size 16] [--json]

Planning and applying are timed in process with 512-token prompts, in a steady state of decodes;
the same under each policy with 4,000 more waiting and one newcomer a step; radix operations on a
tree of 1,000 sequences of 2,000 tokens that share 1,500; the worker's idle share over the real
sockets, with a simulated worker and 256 requests.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime import LLM, AsyncClient, SamplingParams
from runtime.codec import Header
from runtime.messages import CODEC, StepPlan, StepResult, Submit
from runtime.options import SchedulerOptions
from runtime.types import Epoch, IntArray, RequestId
from scheduler_proc.radix import RadixTree
from scheduler_proc.scheduler import Scheduler

PROMPT_LEN = 512
NUM_STEPS = 400
RUNNING = (32, 256, 1024)
POLICIES = ("fcfs", "lpm", "priority")
NUM_WAITING = 4000
KEY_LEN, SHARED_LEN, NUM_KEYS = 2000, 1500, 1000
IDLE_REQUESTS, IDLE_TOKENS, IDLE_STEPS = 256, 3000, 800


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    values = np.array(seconds) * 1e6
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def submit_of(number: int, token_ids: IntArray, priority: int = 0) -> Submit:
    return Submit(
        request=RequestId(number),
        arrival=number,
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=2 * NUM_STEPS, seed=number),
        stop_ids=(2,),
        deadline_s=None,
        priority=priority,
    )


def running_scheduler(num_running: int, page_size: int, policy: str = "fcfs") -> Scheduler:
    """A scheduler whose `num_running` requests all decode, none near its end."""
    max_seq_len = PROMPT_LEN + 2 * NUM_STEPS + 64
    pages = num_running * (-(-max_seq_len // page_size) + 1)
    options = SchedulerOptions(
        max_running_req=num_running,
        page_size=page_size,
        max_extend_tokens=1 << 20,
        max_queued_req=num_running + NUM_WAITING + NUM_STEPS,
        policy=policy,
    )
    scheduler = Scheduler(options, pages, max_seq_len)
    rng = np.random.default_rng(0)
    for number in range(num_running):
        scheduler.submit(submit_of(number, rng.integers(3, 30000, PROMPT_LEN, dtype=np.int32)), 0.0)
    return scheduler


def result_of(plan: StepPlan, tokens: IntArray) -> StepResult:
    return StepResult(step=plan.step, tokens=tokens, started_s=0.0, ended_s=0.0)


def plan_apply(
    num_running: int, page_size: int, policy: str = "fcfs", num_waiting: int = 0
) -> dict[str, dict[str, float]]:
    """Seconds to plan a step of all decodes, to apply its result, and both.

    num_waiting: requests that wait besides; if any do, one more comes before each step.
    """
    scheduler = running_scheduler(num_running, page_size, policy)
    tokens = np.full(num_running, 7, np.int32)
    first = scheduler.plan()
    assert first is not None
    # Their priorities are below those of who runs, so that nobody is pushed out.
    newcomers = (submit_of(n, tokens, -1 - n % 2) for n in itertools.count(num_running))
    for newcomer in itertools.islice(newcomers, num_waiting):
        scheduler.submit(newcomer, 0.0)
    in_flight = [first]
    times: dict[str, list[float]] = {"plan": [], "apply": [], "both": []}
    for _ in range(NUM_STEPS):
        if num_waiting:
            scheduler.submit(next(newcomers), 0.0)
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append(plan)
        result = result_of(in_flight.pop(0), tokens)
        resumed = time.perf_counter()
        scheduler.apply(result)
        scheduler.take_outputs()
        end = time.perf_counter()
        times["plan"].append(planned - start)
        times["apply"].append(end - resumed)
        times["both"].append(planned - start + end - resumed)
    return {name: quantiles(values) for name, values in times.items()}


def timed(call: Callable[[], Any], times: list[float]) -> Any:
    start = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - start)
    return result


def radix(page_size: int) -> dict[str, dict[str, float]]:
    """Seconds of a match with 1,500 tokens hit, an insert of 500 new ones, and the eviction of one
    leaf.
    """
    rng = np.random.default_rng(0)
    tree = RadixTree(page_size)
    head = rng.integers(0, 30000, SHARED_LEN, dtype=np.int32)
    key_pages = KEY_LEN // page_size
    shared_pages = SHARED_LEN // page_size

    def key() -> IntArray:
        tail = rng.integers(0, 30000, KEY_LEN - SHARED_LEN, dtype=np.int32)
        return np.concatenate((head, tail))[: key_pages * page_size]

    def pages(start: int) -> IntArray:
        return np.arange(start, start + key_pages, dtype=np.int32)

    for number in range(NUM_KEYS):
        tree.insert(tree.root, key(), pages(number * key_pages))
    times: dict[str, list[float]] = {"match": [], "insert": [], "evict_one": []}
    for number in range(NUM_KEYS):
        new = key()
        match = timed(lambda k=new: tree.match(tree.root, k), times["match"])
        found = len(match.pages)
        assert found >= shared_pages
        rest, own = new[found * page_size :], pages((NUM_KEYS + number) * key_pages)[found:]
        timed(lambda n=match.node, r=rest, o=own: tree.insert(n, r, o), times["insert"])
        timed(lambda o=own: tree.evict(len(o)), times["evict_one"])
    return {name: quantiles(values) for name, values in times.items()}


def messages(page_size: int) -> dict[str, dict[str, float]]:
    """Seconds to encode and to decode the plan of a step of 256 decodes."""
    scheduler = running_scheduler(256, page_size)
    scheduler.plan()
    plan = scheduler.plan()
    header = Header(sender="scheduler", epoch=Epoch(0), number=1)
    frame = CODEC.encode(plan, header)
    times: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(2000):
        timed(lambda: CODEC.encode(plan, header), times["encode"])
        timed(lambda: CODEC.decode(frame), times["decode"])
    return {name: quantiles(values) for name, values in times.items()}


def idle_share(step_ms: int, overlap: bool, page_size: int) -> float:
    """The worker's idle share of the time between steps, while IDLE_REQUESTS decode over real
    sockets.
    """
    options = {
        "max_running_req": IDLE_REQUESTS,
        "page_size": page_size,
        "overlap": overlap,
        "max_extend_tokens": 1 << 20,
        "num_page_override": IDLE_REQUESTS * (-(-(PROMPT_LEN + IDLE_TOKENS) // page_size) + 1),
        "simulated": f"--step-ms {step_ms}",
    }
    with LLM("SmolLM2-135M-Instruct", **options) as llm:
        return asyncio.run(_idle_share(llm.endpoint, window_s=IDLE_STEPS * step_ms / 1e3))


async def _idle_share(endpoint: str, window_s: float) -> float:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=IDLE_TOKENS, ignore_eos=True)
    async with await AsyncClient.connect(endpoint) as client:
        requests = [
            asyncio.create_task(client.generate(prompt, sampling))
            for prompt in rng.integers(3, 30000, (IDLE_REQUESTS, PROMPT_LEN)).tolist()
        ]
        while (await client.stats())["running"] < IDLE_REQUESTS:
            await asyncio.sleep(0.02)
        await asyncio.sleep(window_s / 4)  # the prompts' last steps are over
        before = await client.stats()
        await asyncio.sleep(window_s)
        after = await client.stats()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    assert after["running"] == IDLE_REQUESTS
    busy, bubble = (after[k] - before[k] for k in ("worker_busy_s", "worker_bubble_s"))
    return float(bubble / (busy + bubble))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size = arguments.page_size
    steps = {str(n): plan_apply(n, size) for n in RUNNING}
    queues = {name: plan_apply(256, size, name, NUM_WAITING) for name in POLICIES}
    trees, wires = radix(size), messages(size)
    idle = {
        f"{ms}ms_{'on' if overlap else 'off'}": idle_share(ms, overlap, size)
        for ms in (5, 1)
        for overlap in (True, False)
    }
    if arguments.json:
        print(
            json.dumps(
                {
                    "plan_apply_us_p50": {n: s["both"]["p50"] for n, s in steps.items()},
                    "radix_us_p50": {name: t["p50"] for name, t in trees.items()},
                    "message_us_p50": {name: t["p50"] for name, t in wires.items()},
                    "idle_share": idle,
                }
            )
        )
        return
    print(f"page size {size}; microseconds, p50 / p99")
    for n, parts in steps.items():
        for name, t in parts.items():
            print(f"{n:>5} running, {name:<6} {t['p50']:8.1f} / {t['p99']:.1f}")
    for policy, parts in queues.items():
        t = parts["both"]
        print(f"  256 running, {NUM_WAITING} waiting, {policy:<8} {t['p50']:8.1f} / {t['p99']:.1f}")
    for name, t in {**trees, **wires}.items():
        print(f"{name:<20} {t['p50']:8.1f} / {t['p99']:.1f}")
    for name, share in idle.items():
        print(f"worker idle, {name:<8} {share:8.2%}")


if __name__ == "__main__":
    main()

"""The whole scheduler with the simulated engine: whatever happens in whatever order, each request
says what it says alone, and every page is accounted for.
"""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    precondition,
    rule,
)

from runtime.types import RequestId
from tests.scheduling import Harness
from worker_proc.simulated import Simulation

PAGE_SIZES = (1, 2, 3, 16, 32, 64)
MAX_SEQ_LEN = 100

OPTIONS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from(PAGE_SIZES),
        "max_running_req": st.sampled_from([1, 2, 4, 9]),
        "max_queued_req": st.sampled_from([2, 100]),
        "max_extend_tokens": st.sampled_from([1, 3, 7, 50, 1000]),
        "cache_type": st.sampled_from(["radix", "radix", "radix", "naive"]),
        "policy": st.sampled_from(["fcfs", "lpm", "priority"]),
        "overlap": st.booleans(),
    }
)
# A vocabulary of 3 makes stop ids and equal continuations frequent.
SIMULATIONS = st.builds(
    Simulation,
    vocab_size=st.sampled_from([3, 50, 1000]),
    answers=st.sampled_from(["attend", "attend", "attend", "random", "echo"]),
)
POOL_TOKENS = st.sampled_from([2, 20, 50, 100, 100, 200, 1000])
"""What the pool holds, about; at least two pages."""


class SchedulerModel(RuleBasedStateMachine):
    requests: Bundle[RequestId] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness | None = None
        self.now = 0.0

    @initialize(options=OPTIONS, simulation=SIMULATIONS, pool_tokens=POOL_TOKENS)
    def build(self, options: dict[str, Any], simulation: Simulation, pool_tokens: int) -> None:
        num_pages = max(2, pool_tokens // options["page_size"])
        self.harness = Harness(num_pages, max_seq_len=MAX_SEQ_LEN, simulation=simulation, **options)

    @rule(
        target=requests,
        head=st.integers(0, 2),
        head_len=st.integers(0, 70),
        tails=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4),
        max_tokens=st.integers(1, 40),
        stop_ids=st.lists(st.integers(0, 4), max_size=2),
        deadline_s=st.none() | st.integers(1, 5),
        priority=st.integers(-2, 2),
        owner=st.integers(0, 1),
    )
    def submit(
        self, head: int, head_len: int, tails: list[list[int]], max_tokens: int, **more: Any
    ) -> Any:
        """Requests that start alike, cut to what fits."""
        assert self.harness is not None
        rng = random.Random(head)
        ids = [rng.randrange(self.harness.simulation.vocab_size) for _ in range(head_len)]
        prompts = [(ids + tail)[: self.harness.max_seq_len - 1] for tail in tails]
        return multiple(
            *(
                self.harness.submit(
                    prompt,
                    min(max_tokens, self.harness.max_seq_len - len(prompt)),
                    now=self.now,
                    **more,
                )
                for prompt in prompts
            )
        )

    @rule(target=requests, prompt_len=st.integers(0, 150), max_tokens=st.integers(0, 50))
    def submit_anything(self, prompt_len: int, max_tokens: int) -> RequestId:
        assert self.harness is not None
        return self.harness.submit([1] * prompt_len, max_tokens, now=self.now)

    @rule(target=requests, earlier=requests, added=st.lists(st.integers(0, 2), max_size=3))
    def submit_the_next_turn(self, earlier: RequestId, added: list[int]) -> RequestId:
        assert self.harness is not None
        prompt = self.harness.submits[earlier].token_ids.tolist()
        return self.harness.submit(prompt + self.harness.outputs[earlier] + added, 5, now=self.now)

    @rule(request=requests)
    def abort(self, request: RequestId) -> None:
        assert self.harness is not None
        self.harness.abort(request)

    @rule(request=requests)
    def finish(self, request: RequestId) -> None:
        assert self.harness is not None
        if self.harness.outputs[request]:
            self.harness.finish(request)

    @rule()
    def let_time_pass(self) -> None:
        assert self.harness is not None
        self.now += 1.0
        self.harness.expire(self.now)

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        assert self.harness is not None
        for _ in range(count):
            self.harness.step()

    @rule()
    def plan(self) -> None:
        assert self.harness is not None
        self.harness.plan()

    @precondition(lambda self: self.harness.scheduler.num_in_flight)
    @rule()
    def answer(self) -> None:
        assert self.harness is not None
        self.harness.answer()

    @rule()
    def flush(self) -> None:
        assert self.harness is not None
        self.harness.flush_cache()

    def teardown(self) -> None:
        if self.harness is not None:
            self.harness.run_and_check()


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    options=OPTIONS,
    simulation=SIMULATIONS,
    pool_tokens=st.sampled_from([20, 40, 100]),
)
def test_many_requests_through_a_small_pool(
    seed: int, options: dict[str, Any], simulation: Simulation, pool_tokens: int
) -> None:
    rng = random.Random(seed)
    harness = Harness(
        max(2, pool_tokens // options["page_size"]),
        max_seq_len=MAX_SEQ_LEN,
        simulation=simulation,
        **options,
    )
    heads = [rng.choices(range(simulation.vocab_size), k=MAX_SEQ_LEN) for _ in range(3)]
    for _ in range(40):
        tail = rng.choices(range(simulation.vocab_size), k=rng.randrange(4))
        prompt = rng.choice(heads)[: rng.randrange(1, harness.max_seq_len)] + tail
        room = harness.max_seq_len - len(prompt)
        stop_ids = rng.sample(range(simulation.vocab_size), k=rng.randrange(3))
        request = harness.submit(
            prompt,
            rng.randint(1, max(1, room)),
            stop_ids=stop_ids,
            priority=rng.randrange(3),
        )
        for _ in range(rng.randrange(4)):
            rng.choice([harness.plan, harness.answer, harness.step, harness.step])()
        victim = rng.choice([*harness.submits])
        if rng.random() < 0.1:
            harness.abort(victim)
        if rng.random() < 0.1 and harness.outputs[request]:
            harness.finish(request)
    harness.run_and_check()
    assert options["policy"] == "priority" or not harness.late

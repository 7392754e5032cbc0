"""Who goes first under each policy, and that nobody waits for ever. The bounds are those of
policies.py.
"""

import numpy as np
import pytest

from runtime.messages import FinishCode, StepResult, Submit, TokenBatch
from runtime.options import SchedulerOptions
from runtime.sampling import SamplingParams
from runtime.types import RequestId
from scheduler_proc.policies import PATIENCE, HighestPriorityFirst
from scheduler_proc.request import Request
from scheduler_proc.scheduler import Scheduler
from worker_proc.simulated import SimulatedEngine, Simulation

MAX_LEN = 64


class Driver:
    """A scheduler and a simulated worker, one step at a time; remembers the order in which requests
    ended.
    """

    def __init__(self, policy: str, num_slots: int = 1, num_pages: int = 256) -> None:
        options = SchedulerOptions(
            policy=policy, max_running_req=num_slots, page_size=1, overlap=False
        )
        self.scheduler = Scheduler(options, num_pages, MAX_LEN)
        self._engine = SimulatedEngine(
            Simulation(),
            num_pages=num_pages,
            page_size=1,
            num_slots=num_slots,
            max_seq_len=MAX_LEN,
        )
        self._count = 0
        self.ended: list[int] = []

    def submit(self, ids: list[int], *, max_tokens: int = 1, priority: int = 0) -> int:
        number = self._count
        self._count += 1
        submit = Submit(
            request=RequestId(number),
            arrival=number,
            token_ids=np.array(ids, np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, seed=number),
            stop_ids=(),
            deadline_s=None,
            priority=priority,
        )
        self.scheduler.submit(submit, 0.0)
        return number

    def step(self) -> bool:
        """Plan, execute and apply one step; whether there was one."""
        plan = self.scheduler.plan()
        if plan is not None:
            tokens = self._engine.execute(plan)
            result = StepResult(step=plan.step, tokens=tokens, started_s=0.0, ended_s=0.0)
            self.scheduler.apply(result)
        self.scheduler.check_integrity()
        for _, output in self.scheduler.take_outputs():
            if isinstance(output, TokenBatch):
                done = output.reasons != FinishCode.NOT_YET
                self.ended += output.requests[done].tolist()
        return plan is not None

    def run(self) -> list[int]:
        while self.step():
            pass
        return self.ended


def test_first_come_is_first_served() -> None:
    driver = Driver("fcfs")
    for length in (9, 3, 5):
        driver.submit([1] * length, priority=length)
    assert driver.run() == [0, 1, 2]


def test_the_longest_cached_prefix_goes_first() -> None:
    driver = Driver("lpm")
    driver.submit([1, 2, 3, 4, 5, 6])
    driver.run()
    strange = driver.submit([9, 9, 9])
    some = driver.submit([1, 2, 9])
    most = driver.submit([1, 2, 3, 4, 9])
    assert driver.run() == [0, most, some, strange]


def test_a_request_without_a_cached_prefix_is_overtaken_at_most_patience_times() -> None:
    driver = Driver("lpm")
    driver.submit([1, 2, 3, 4])
    driver.run()
    lonely = driver.submit([7])
    for _ in range(2 * PATIENCE):  # more than may overtake; each hits the cache
        driver.submit([1, 2, 3, 4])
    driver.run()
    assert driver.ended.index(lonely) == 1 + PATIENCE


def test_the_highest_priority_goes_first_and_equals_by_arrival() -> None:
    driver = Driver("priority")
    low, high, second = (driver.submit([1], priority=p) for p in (0, 5, 5))
    assert driver.run() == [high, second, low]


def test_a_request_that_waits_gains_a_level_for_every_patience_admissions() -> None:
    driver = Driver("priority")
    low = driver.submit([1], priority=0)
    for _ in range(4 * PATIENCE):  # one urgent request comes for each that is admitted
        driver.submit([1], priority=2)
        driver.step()
    driver.run()
    assert driver.ended.index(low) == 2 * PATIENCE


def test_a_higher_priority_pushes_the_lowest_youngest_out_of_its_slot() -> None:
    driver = Driver("priority", num_slots=2)
    old = driver.submit([1, 2], max_tokens=20)
    young = driver.submit([3, 4], max_tokens=20)
    driver.step()
    urgent = driver.submit([5, 6], max_tokens=3, priority=1)
    driver.run()
    assert driver.ended == [urgent, old, young]
    assert driver.scheduler.counters.retractions == 1


def test_a_higher_priority_pushes_others_out_for_their_pages() -> None:
    driver = Driver("priority", num_slots=8, num_pages=24)
    small = [driver.submit([n, n], max_tokens=6) for n in range(3)]
    driver.step()
    urgent = driver.submit(list(range(20)), max_tokens=3, priority=1)
    driver.run()
    assert driver.ended[0] == urgent
    assert sorted(driver.ended[1:]) == small


def test_while_admissions_are_closed_nobody_is_pushed_out_for_one_who_cannot_come_in() -> None:
    driver = Driver("priority", num_slots=2, num_pages=24)
    old, young = (driver.submit([n, n], max_tokens=18) for n in (1, 2))
    while not driver.scheduler.counters.retractions:
        driver.step()
    urgent = driver.submit([5], priority=5)
    assert driver.run() == [old, urgent, young]
    assert driver.scheduler.counters.retractions == 1


def test_an_equal_priority_pushes_nobody_out() -> None:
    driver = Driver("priority")
    first = driver.submit([1], max_tokens=10, priority=3)
    driver.step()
    second = driver.submit([2], priority=3)
    assert driver.run() == [first, second]
    assert driver.scheduler.counters.retractions == 0


def test_a_request_that_has_aged_in_is_not_pushed_out_by_the_level_it_has_reached() -> None:
    """Else an endless row of urgent requests could let it start over and over, and never end."""
    driver = Driver("priority")
    low = driver.submit([1], max_tokens=30, priority=0)
    for _ in range(PATIENCE):
        driver.submit([2], priority=1)
    while driver.scheduler.num_waiting > 0:  # all urgent ones before it have been admitted
        driver.step()
    driver.submit([2], priority=1)
    driver.run()
    assert driver.ended[-2:] == [low, PATIENCE + 1]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_every_request_ends_under_a_stream_of_others(policy: str) -> None:
    driver = Driver(policy, num_slots=2, num_pages=40)
    rng = np.random.default_rng(0)
    for _ in range(150):
        for _ in range(int(rng.integers(0, 3))):
            head = [1, 2, 3, 4][: int(rng.integers(1, 5))]
            tokens = int(rng.integers(1, 12))
            driver.submit([*head, 9], max_tokens=tokens, priority=int(rng.integers(-1, 2)))
        driver.step()
    driver.run()
    assert len(driver.ended) == len(set(driver.ended)) == driver.submit([1])


def test_the_first_by_priority_is_the_first_of_all_that_wait() -> None:
    """The policy looks at the oldest of each priority only; here all are compared."""
    rng = np.random.default_rng(0)
    policy, waiting, num_admitted = HighestPriorityFirst(), list[Request](), 0
    for number in range(600):
        newcomer = request(number, priority=int(rng.integers(-3, 4)))
        newcomer.queued_at = num_admitted
        policy.joins(newcomer)
        waiting.append(newcomer)
        if number % 6 == 0:
            leaver = waiting.pop(int(rng.integers(len(waiting))))
            policy.leaves(leaver)
        if number % 2 and waiting:
            chosen = policy.choose(waiting, num_admitted)
            grown = {r: r.submit.priority - r.queued_at / PATIENCE for r in waiting}
            assert chosen is max(waiting, key=lambda r: (grown[r], -r.submit.arrival))
            policy.leaves(chosen)
            waiting.remove(chosen)
            num_admitted += 1


def test_a_retracted_request_waits_at_its_old_place_among_its_priority() -> None:
    policy = HighestPriorityFirst()
    first, second = request(0, priority=2), request(1, priority=2)
    policy.joins(second)
    first.num_retractions = 1
    policy.joins(first)
    assert policy.choose([first, second], 0) is first


def request(number: int, priority: int) -> Request:
    submit = Submit(
        request=RequestId(number),
        arrival=number,
        token_ids=np.array([1], np.int32),
        sampling=SamplingParams(max_tokens=1),
        stop_ids=(),
        deadline_s=None,
        priority=priority,
    )
    return Request(submit, None, 0.0, submit.token_ids)

"""When pages run out: nobody starves, nobody waits for good, nobody says anything else."""

import numpy as np
import pytest

from runtime.messages import FinishReason
from runtime.types import RequestId
from tests.scheduling import Harness
from worker_proc.simulated import Simulation


@pytest.mark.parametrize("overlap", [True, False])
def test_200_long_requests_pass_a_pool_of_64_pages(overlap: bool) -> None:
    harness = Harness(
        64,
        simulation=Simulation(answers="random"),
        overlap=overlap,
        max_running_req=16,
        max_extend_tokens=32,
    )
    rng = np.random.default_rng(0)
    silent, generated = 0, 0
    while len(harness.submits) < 200 or not harness.scheduler.is_idle:
        while len(harness.submits) < 200 and harness.scheduler.num_waiting < 20:
            length = int(rng.integers(1, 40))
            harness.submit([length % 7] * length, int(rng.integers(1, 64 - length + 1)))
        harness.step()
        silent = 0 if harness.scheduler.counters.generated > generated else silent + 1
        generated = harness.scheduler.counters.generated
        # Two chunks of the longest sequence, and the plan that was ahead.
        assert silent <= 3, "no token arrives"
    assert harness.scheduler.counters.retractions > 0
    assert not harness.late, "retracted more often than others ended"
    assert len(harness.ends) == 200
    harness.run_and_check()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_oldest_is_never_retracted(overlap: bool) -> None:
    harness = Harness(20, overlap=overlap)
    requests = [harness.submit([number], 19) for number in range(6)]
    harness.run_and_check()
    assert harness.scheduler.counters.retractions > 0
    assert harness.admissions[requests[0]] == 1
    assert list(harness.ends) == requests


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_retracted_request_resumes_where_it_was(page_size: int) -> None:
    harness = Harness(16 // page_size, page_size=page_size)
    requests = [harness.submit([number, 5, 6], 12) for number in range(3)]
    harness.run_and_check()
    assert any(harness.admissions[request] > 1 for request in requests)
    assert all(len(harness.outputs[request]) == 12 for request in requests)


def test_a_retracted_request_with_a_cached_prefix_keeps_its_count() -> None:
    harness = Harness(24, max_extend_tokens=8)
    head = list(range(10))
    harness.ask([*head, 99], 1)
    requests = [harness.submit([*head, number], 12) for number in range(3)]
    first_counts: dict[RequestId, int] = {}
    while not harness.scheduler.is_idle:
        harness.step()
        for request in requests:
            if harness.outputs[request]:
                first_counts.setdefault(request, harness.cached[request])
    assert sum(harness.admissions[request] > 1 for request in requests) > 0
    assert first_counts == {request: harness.cached[request] for request in requests}
    assert all(count == 10 for count in first_counts.values())
    harness.run_and_check()


def test_what_is_computed_again_is_counted_apart() -> None:
    harness = Harness(16, cache_type="naive")
    for number in range(2):
        harness.submit([number] * 4, 10)
    harness.run_and_check()
    counters = harness.scheduler.counters
    assert counters.prompt_computed == 8
    assert counters.recomputed >= 4
    assert counters.generated == 20


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [9, 10, 11, 12])
@pytest.mark.parametrize("max_tokens", [2, 4, 6, 8])
def test_pages_run_out_in_the_step_in_which_another_ends(
    max_tokens: int, num_pages: int, overlap: bool
) -> None:
    harness = Harness(num_pages, overlap=overlap, cache_type="naive", max_seq_len=9)
    ends = harness.submit([1], max_tokens)
    goes_on = harness.submit([2], 8)
    harness.run_and_check()
    assert len(harness.outputs[ends]) == max_tokens
    assert len(harness.outputs[goes_on]) == 8


def test_a_step_that_frees_enough_retracts_nobody() -> None:
    # 4 + 1 pages when the first ends; the second needs its fifth to eighth only then.
    harness = Harness(8, overlap=False, cache_type="naive")
    harness.submit([1], 4)
    harness.submit([2], 7)
    harness.run_and_check()
    assert harness.scheduler.counters.retractions == 0


def test_half_done_prompts_do_not_block_each_other() -> None:
    harness = Harness(40, max_extend_tokens=5, max_running_req=8)
    for number in range(8):
        harness.submit([number] * 30, 5)
    harness.run_and_check()
    assert harness.scheduler.counters.retractions == 0
    assert list(harness.ends) == list(harness.submits)


def test_an_admission_leaves_a_page_for_each_who_runs() -> None:
    harness = Harness(10)
    for number in range(3):
        harness.submit([number] * 3, 2)
    harness.step()
    assert harness.scheduler.num_waiting == 1
    harness.run_and_check()
    assert harness.scheduler.counters.retractions == 0


def test_an_admission_leaves_a_page_for_itself_to_go_on() -> None:
    harness = Harness(10)
    harness.submit([1] * 4, 3)
    harness.submit([2] * 5, 3)
    harness.step()
    assert harness.scheduler.num_waiting == 1
    harness.run_and_check()
    assert harness.scheduler.counters.retractions == 0


def test_nobody_overtakes_one_who_waits_for_pages() -> None:
    harness = Harness(30)
    harness.submit([1] * 20, 5)
    large = harness.submit([2] * 20, 5)
    small = [harness.submit([number], 2) for number in range(3, 8)]
    harness.run_and_check()
    assert list(harness.ends)[:1] != small[:1]
    firsts = [setup.request for plan in harness.plans for setup in plan.setups]
    assert firsts.index(large) < min(firsts.index(request) for request in small)


def test_an_abort_lets_the_retracted_in_again() -> None:
    harness = Harness(16)
    oldest, youngest = (harness.submit([number], 15) for number in range(2))
    while not harness.scheduler.counters.retractions:
        harness.step()
    harness.abort(oldest)
    harness.run_and_check()
    assert harness.ends == {oldest: FinishReason.ABORT, youngest: FinishReason.LENGTH}
    assert harness.admissions[youngest] == 2


def test_a_cached_prefix_is_not_evicted_to_make_room_for_its_own_request() -> None:
    harness = Harness(12, page_size=2)
    prompt = list(range(20))
    harness.ask(prompt, 1)
    again = harness.ask(prompt, 3)
    assert harness.cached[again] == 18
    harness.run_and_check()


def test_everybody_runs_through_a_pool_of_two_pages() -> None:
    harness = Harness(2, page_size=16)
    for number in range(10):
        harness.submit([number] * 17, 10)
    harness.run_and_check()
    assert list(harness.ends) == list(harness.submits)

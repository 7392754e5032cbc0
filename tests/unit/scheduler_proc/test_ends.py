"""How requests end, and that nothing of them stays."""

import pytest

from runtime.errors import ProtocolError
from runtime.messages import Finish, FinishReason, Rejected
from tests.scheduling import Harness

PROMPT = list(range(302))


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_plans", range(6))
def test_an_abort_in_any_chunk_or_in_the_finishing_step_leaves_nothing_behind(
    num_plans: int, overlap: bool, answered: bool
) -> None:
    harness = Harness(400, max_extend_tokens=96, overlap=overlap)
    request = harness.submit(PROMPT, 2)
    while len(harness.plans) < num_plans:
        if harness.plan() is None:
            harness.answer()
    if answered:
        while harness.answer():
            pass
    ended = request in harness.ends
    harness.abort(request)
    harness.abort(request)
    assert harness.ends[request] is (FinishReason.LENGTH if ended else FinishReason.ABORT)
    assert ended == (num_plans == 5 and answered)
    other = harness.submit([*reversed(PROMPT)], 5)
    harness.run_and_check()
    assert len(harness.outputs[other]) == 5
    assert harness.scheduler.counters.ended == 2


def test_a_result_for_a_slot_that_changed_hands_is_discarded() -> None:
    harness = Harness(100, max_running_req=1)
    first = harness.submit(PROMPT[:5], 10)
    harness.plan()
    harness.abort(first)
    second = harness.submit(PROMPT[50:60], 10)
    harness.plan()
    assert harness.plans[0].seg_slots.tolist() == harness.plans[1].seg_slots.tolist()
    harness.answer()
    assert harness.outputs[second] == []
    harness.run_and_check()
    assert harness.outputs[first] == []


@pytest.mark.parametrize("overlap", [True, False])
def test_four_slots_are_refilled_at_once_and_reused(overlap: bool) -> None:
    harness = Harness(400, max_running_req=4, overlap=overlap)
    for number in range(40):
        harness.submit(PROMPT[number : 2 * number + 1], 1 + number % 5)
    while not harness.scheduler.is_idle:
        while harness.plan() is not None:
            pass
        assert harness.scheduler.num_running == 4 or not harness.scheduler.num_waiting
        harness.answer()
    assert {setup.slot for plan in harness.plans for setup in plan.setups} == {0, 1, 2, 3}
    harness.run_and_check()


@pytest.mark.parametrize("overlap", [True, False])
def test_max_tokens_of_one_ends_with_the_step_of_the_prompt(overlap: bool) -> None:
    harness = Harness(100, overlap=overlap)
    request = harness.submit(PROMPT[:10], 1)
    harness.step()
    assert harness.ends[request] is FinishReason.LENGTH
    assert len(harness.outputs[request]) == 1
    harness.run_and_check()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("index", [0, 1, 5])
def test_tokens_sampled_after_a_stop_id_are_discarded(index: int, overlap: bool) -> None:
    alone = Harness(100)
    stop = alone.outputs[alone.ask(PROMPT[:10], 20)][index]
    harness = Harness(100, overlap=overlap)
    request = harness.submit(PROMPT[:10], 20, stop_ids=(999_999, stop))
    harness.run_and_check()
    assert harness.ends[request] is FinishReason.STOP
    assert harness.outputs[request][-1] == stop
    assert len(harness.outputs[request]) == index + 1
    # With overlap it is learned one step late.
    assert len(harness.plans) == index + 1 + overlap


def test_the_stop_ids_of_a_slots_last_owner_end_nobody_else() -> None:
    alone = Harness(100)
    stop = alone.outputs[alone.ask(PROMPT[:10], 20)][3]
    harness = Harness(100, max_running_req=1)
    stopped = harness.submit(PROMPT[:10], 20, stop_ids=(999_999, stop))
    harness.submit(PROMPT[:10], 20, stop_ids=(999_999,))
    unstopped = harness.submit(PROMPT[:10], 20)
    harness.run_and_check()
    assert [len(harness.outputs[request]) for request in (stopped, unstopped)] == [4, 20]


def test_a_stop_id_as_the_last_token_allowed_is_a_stop() -> None:
    alone = Harness(100)
    stop = alone.outputs[alone.ask(PROMPT[:10], 4)][3]
    harness = Harness(100)
    request = harness.submit(PROMPT[:10], 4, stop_ids=(stop,))
    harness.run_and_check()
    assert harness.ends[request] is FinishReason.STOP


def test_a_finish_ends_the_request_and_is_ignored_afterwards() -> None:
    harness = Harness(100)
    request = harness.submit(PROMPT[:10], 20)
    harness.step()
    harness.step()
    harness.finish(request)
    assert harness.ends[request] is FinishReason.STOP
    harness.finish(request)
    harness.run_and_check()
    assert len(harness.outputs[request]) == 2


def test_a_waiting_request_can_be_aborted_and_finished() -> None:
    harness = Harness(8, max_running_req=2)
    oldest, youngest = harness.submit([1], 7), harness.submit([2], 7)
    while not harness.scheduler.counters.retractions:
        harness.step()
    assert harness.scheduler.num_waiting == 1
    unborn = harness.submit([3], 3)
    harness.abort(unborn)
    harness.finish(youngest)
    assert harness.ends == {unborn: FinishReason.ABORT, youngest: FinishReason.STOP}
    harness.run_and_check()
    assert harness.ends[oldest] is FinishReason.LENGTH


def test_an_abort_of_an_unknown_request_does_nothing() -> None:
    harness = Harness(100)
    request = harness.submit([1], 1)
    harness.run()
    harness.scheduler.abort(request)
    assert harness.scheduler.take_outputs() == []


def test_a_deadline_ends_running_and_waiting_requests_alike() -> None:
    harness = Harness(100, max_running_req=1)
    running = harness.submit([1], 50, deadline_s=2.0, now=10.0)
    waiting = harness.submit([2], 50, deadline_s=1.0, now=10.0)
    patient = harness.submit([3], 5, now=10.0)
    assert harness.scheduler.next_deadline() == 11.0
    harness.step()
    harness.expire(10.9)
    assert harness.ends == {}
    harness.expire(11.0)
    assert list(harness.ends) == [waiting]
    harness.expire(20.0)
    assert list(harness.ends) == [waiting, running]
    assert harness.scheduler.next_deadline() is None
    harness.run_and_check()
    assert harness.ends[patient] is FinishReason.LENGTH


def test_a_deadline_that_passes_after_the_end_does_nothing() -> None:
    harness = Harness(100)
    request = harness.submit([1], 2, deadline_s=5.0)
    harness.run()
    harness.expire(6.0)
    assert harness.ends == {request: FinishReason.LENGTH}


def test_a_full_queue_refuses_at_once() -> None:
    harness = Harness(100, max_running_req=1, max_queued_req=2)
    kept = [harness.submit([number], 3) for number in range(2)]
    refused = harness.submit([7], 3)
    end = harness.ends[refused]
    assert isinstance(end, Rejected)
    assert (end.kind, end.text) == (
        "overloaded",
        "2 requests wait already (max_queued_req): try again later",
    )
    harness.step()
    kept.append(harness.submit([8], 3))
    harness.run_and_check()
    assert all(harness.ends[request] is FinishReason.LENGTH for request in kept)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_holds_nobody_up() -> None:
    harness = Harness(8, page_size=4)
    large = harness.submit(PROMPT[:30], 10)
    end = harness.ends[large]
    assert isinstance(end, Rejected)
    assert end.kind == "request"
    for number in ("30", "10", "40", "32", "max_seq_len"):
        assert number in end.text
    small = [harness.submit([number], 5) for number in range(4)]
    harness.run_and_check()
    assert all(harness.ends[request] is FinishReason.LENGTH for request in small)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 5), ([1], 0)])
def test_an_empty_prompt_or_no_output_is_refused(prompt: list[int], max_tokens: int) -> None:
    harness = Harness(8)
    end = harness.ends[harness.submit(prompt, max_tokens)]
    assert isinstance(end, Rejected)
    assert "both need one" in end.text


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_that_just_fits_the_pool_runs(page_size: int) -> None:
    harness = Harness(64 // page_size, page_size=page_size)
    requests = [harness.submit(PROMPT[: 64 - n], n) for n in (1, 2, 16, 63)]
    harness.run_and_check()
    assert all(harness.ends[request] is FinishReason.LENGTH for request in requests)


def test_the_deadlines_of_ended_requests_are_forgotten() -> None:
    """They used to stay until they were due, however far away that was."""
    harness = Harness(100, max_running_req=4)
    for _ in range(200):
        request = harness.submit(PROMPT[:3], 1, deadline_s=1e6)
        harness.abort(request)
    assert len(harness.scheduler._deadlines) < 40
    kept = harness.submit(PROMPT[:3], 5, deadline_s=7.0)
    harness.expire(7.0)
    harness.run_and_check()
    assert harness.ends[kept] is FinishReason.ABORT


@pytest.mark.parametrize("keep", [-1, 3])
def test_a_finish_that_keeps_what_the_request_has_not_had_is_refused(keep: int) -> None:
    harness = Harness(16, page_size=1)
    request = harness.submit([1, 2, 3], 8)
    while len(harness.outputs[request]) < 2:
        harness.step()
    with pytest.raises(ProtocolError, match=f"first {keep} output tokens; it has had 2"):
        harness.scheduler.finish(Finish(request=request, keep=keep))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_time_until_each_first_token_is_sent_is_counted_once(overlap: bool) -> None:
    """Chunks, a retraction and an end without a token included."""
    harness = Harness(40, page_size=1, max_extend_tokens=3, overlap=overlap, cache_type="naive")
    requests = [harness.submit(PROMPT[i : i + 4], 20) for i in range(4)]
    waiting = harness.submit(PROMPT[:30], 5)
    harness.abort(waiting)
    times: dict[int, float] = {}
    while not harness.scheduler.is_idle:
        if harness.plan() is None:
            harness.answer()
            for request in requests:
                if harness.outputs[request]:
                    times.setdefault(request, harness.now_s)
    counters = harness.scheduler.counters
    assert counters.retractions > 0
    assert counters.first_tokens == len(requests) == len(times)
    assert counters.first_token_s == sum(times.values())

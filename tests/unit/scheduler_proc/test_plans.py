"""What a plan holds, and what it leaves out."""

import numpy as np
import pytest

from runtime.errors import ProtocolError
from runtime.messages import StepResult
from tests.scheduling import Harness

PROMPT = list(range(302))


def test_a_prompt_of_302_tokens_takes_chunks_of_96_96_96_and_14() -> None:
    harness = Harness(400, max_extend_tokens=96)
    request = harness.submit(PROMPT, 3)
    harness.run_and_check()
    assert harness.chunks == [[96], [96], [96], [14], [1], [1]]
    assert [plan.seg_samples.tolist() for plan in harness.plans[:4]] == [[0], [0], [0], [1]]
    assert list(harness.scheduler.counters.prefill_steps) == [
        (0, 96),
        (1, 96),
        (2, 96),
        (3, 14),
    ]
    assert len(harness.outputs[request]) == 3


def test_decodes_go_on_beside_the_chunks_of_a_long_prompt() -> None:
    harness = Harness(500, max_extend_tokens=96, overlap=False)
    harness.submit(PROMPT[:10], 20)
    harness.step()
    harness.submit([*reversed(PROMPT)], 3)
    for _ in range(4):
        harness.step()
    assert harness.chunks[1:] == [[1, 96], [1, 96], [1, 96], [1, 14]]
    harness.run_and_check()


def test_several_prompts_share_one_budget_in_order_of_arrival() -> None:
    harness = Harness(100, max_extend_tokens=20)
    for first in range(4):
        harness.submit([first] * 8, 1)
    harness.run_and_check()
    assert harness.chunks == [[8, 8, 4], [4, 8]]


def test_a_steady_decode_plan_carries_only_deltas() -> None:
    harness = Harness(100, page_size=16)
    for length in (5, 16, 31):
        harness.submit([length] * length, 60)
    harness.plan()
    positions = np.array([5, 16, 31])
    for _ in range(50):
        plan = harness.plan()
        assert plan is not None
        assert plan.setups == ()
        assert len(plan.write_slots) == len(plan.write_ids) == 0
        assert plan.seg_starts.tolist() == positions.tolist()
        at_border = positions % 16 == 0
        assert plan.page_slots.tolist() == plan.seg_slots[at_border].tolist()
        assert plan.page_indices.tolist() == (positions[at_border] // 16).tolist()
        assert plan.seg_samples.all()
        positions += 1
        harness.answer()
    harness.run_and_check()


def test_a_set_up_carries_the_request_and_its_ids_once() -> None:
    harness = Harness(100, max_extend_tokens=4)
    request = harness.submit(PROMPT[:10], 2, stop_ids=(999,))
    harness.run()
    (setup,) = harness.plans[0].setups
    assert (setup.request, setup.prompt_len, setup.stop_ids) == (request, 10, (999,))
    assert setup.sampling == harness.submits[request].sampling
    assert harness.plans[0].write_ids.tolist() == PROMPT[:10]
    assert harness.plans[0].write_lens.tolist() == [10]
    assert all(not plan.setups and not len(plan.write_ids) for plan in harness.plans[1:])


@pytest.mark.parametrize("overlap", [True, False])
def test_as_many_plans_are_in_flight_as_overlap_allows(overlap: bool) -> None:
    harness = Harness(100, overlap=overlap)
    harness.submit(PROMPT[:5], 10)
    depth = 2 if overlap else 1
    for _ in range(depth):
        assert harness.plan() is not None
    assert harness.plan() is None
    assert harness.scheduler.num_in_flight == depth
    harness.answer()
    assert harness.plan() is not None
    assert harness.plan() is None
    harness.run_and_check()


def test_tokens_are_the_same_with_and_without_overlap() -> None:
    outputs = []
    for overlap in (True, False):
        harness = Harness(60, page_size=2, overlap=overlap, max_extend_tokens=10)
        for number in range(12):
            harness.submit([*PROMPT[: 20 + number % 3], number], 15)
        harness.run_and_check()
        outputs.append(harness.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_step_is_made_beyond_max_tokens(overlap: bool, max_tokens: int) -> None:
    harness = Harness(100, overlap=overlap)
    harness.submit(PROMPT[:5], max_tokens)
    harness.run_and_check()
    assert len(harness.plans) == max_tokens


def test_where_nothing_is_to_be_computed_there_is_no_plan() -> None:
    harness = Harness(100)
    assert harness.plan() is None
    harness.submit(PROMPT[:5], 1)
    assert harness.plan() is not None
    assert harness.plan() is None


def test_a_result_out_of_turn_is_a_breach_of_protocol() -> None:
    harness = Harness(100)
    harness.submit(PROMPT[:5], 5)
    harness.plan()
    harness.plan()
    no_tokens = np.empty(0, np.int32)
    for step in (1, 2):
        with pytest.raises(ProtocolError, match=f"step {step}, which is not the oldest"):
            harness.scheduler.apply(
                StepResult(step=step, tokens=no_tokens, started_s=0.0, ended_s=0.0)
            )


def test_a_result_with_too_few_tokens_is_a_breach_of_protocol() -> None:
    harness = Harness(100)
    harness.submit(PROMPT[:5], 5)
    harness.plan()
    short = StepResult(step=0, tokens=np.empty(0, np.int32), started_s=0.0, ended_s=0.0)
    with pytest.raises(ProtocolError, match="step 0 samples 1 tokens, its result has 0"):
        harness.scheduler.apply(short)


def test_each_tokenizer_hears_of_its_own_requests_only() -> None:
    harness = Harness(200)
    for number in range(9):
        harness.submit(PROMPT[number : number + 5], 6, owner=number % 3)
    harness.run_and_check()  # the harness checks every message's owner
    assert len(harness.ends) == 9

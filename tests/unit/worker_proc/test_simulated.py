"""The simulated worker answers as it is told, and finds plans out that a real one would suffer
from.
"""

from dataclasses import replace

import numpy as np
import pytest

from runtime.errors import IntegrityError
from runtime.messages import StepPlan
from runtime.sampling import SamplingParams
from tests.plans import PlanMaker, int32, rows
from worker_proc.simulated import SimulatedEngine, Simulation, answer_alone

PROMPT = [11, 22, 33, 44, 55]


def engine_of(answers: str, page_size: int = 2) -> SimulatedEngine:
    return SimulatedEngine(
        Simulation(vocab_size=997, answers=answers),
        num_pages=8,
        page_size=page_size,
        num_slots=2,
        max_seq_len=12,
    )


def plans_of(prompt: list[int], pages: list[int], num_tokens: int, seed: int = 0) -> list[StepPlan]:
    """A prompt at once and then decodes, alone in slot 1."""
    maker = PlanMaker(page_size=2)
    maker.admit(1, prompt, pages, SamplingParams(seed=seed))
    segments = [(1, 0, len(prompt), True)]
    segments += [(1, len(prompt) + i, 1, True) for i in range(num_tokens - 1)]
    return [maker.plan(segment) for segment in segments]


def outputs_of(engine: SimulatedEngine, plans: list[StepPlan]) -> list[int]:
    return [int(token) for plan in plans for token in engine.execute(plan)]


def test_echo_repeats_the_prompt_over_and_over() -> None:
    outputs = outputs_of(engine_of("echo"), plans_of(PROMPT, [0, 1, 2, 3, 4, 5], 7))
    assert outputs == [11, 22, 33, 44, 55, 11, 22]


def test_random_depends_on_seed_and_position_only() -> None:
    first, again, other = (
        outputs_of(engine_of("random"), plans_of(prompt, [0, 1, 2, 3, 4, 5], 6, seed))
        for prompt, seed in ((PROMPT, 3), (PROMPT[::-1], 3), (PROMPT, 4))
    )
    assert first == again != other
    assert len(set(first)) > 1


def test_attend_depends_on_every_token_and_on_its_position() -> None:
    prompts = [PROMPT, [12, *PROMPT[1:]], [*PROMPT[:-1], 56], PROMPT[::-1], PROMPT[:-1]]
    firsts = [
        outputs_of(engine_of("attend"), plans_of(prompt, [0, 1, 2], 1))[0] for prompt in prompts
    ]
    assert len(set(firsts)) == len(prompts)


@pytest.mark.parametrize("answers", ["random", "echo", "attend"])
def test_a_plan_is_answered_as_the_request_is_alone(answers: str) -> None:
    simulation = Simulation(vocab_size=997, answers=answers)
    outputs = outputs_of(engine_of(answers), plans_of(PROMPT, [7, 0, 6, 1, 5, 2], 7, seed=9))
    assert outputs == answer_alone(simulation, int32(PROMPT), 9, 7)


def test_a_prompt_in_chunks_is_answered_like_one_at_once() -> None:
    maker, engine = PlanMaker(page_size=2), engine_of("attend")
    maker.admit(0, PROMPT, [4, 5, 6])
    assert len(engine.execute(maker.plan((0, 0, 3, False)))) == 0
    tokens = engine.execute(maker.plan((0, 3, 2, True))).tolist()
    assert tokens == outputs_of(engine_of("attend"), plans_of(PROMPT, [0, 1, 2], 1))


def test_tokens_come_in_plan_order_from_the_sampling_segments() -> None:
    maker, engine = PlanMaker(page_size=2), engine_of("echo")
    maker.admit(0, [1, 2, 3], [0, 1])
    maker.admit(1, [4, 5], [2])
    assert engine.execute(maker.plan((1, 0, 2, True), (0, 0, 2, False))).tolist() == [4]
    maker.rows[1].append(3)
    plan = maker.plan((0, 2, 1, True), (1, 2, 1, True))
    plan = replace(plan, pages=rows(3, [(1, 1, 3)]))
    assert engine.execute(plan).tolist() == [1, 5]


def test_attend_notices_a_wrongly_mapped_page() -> None:
    plans = plans_of(PROMPT, [0, 1, 2, 3], 3)
    remapped = replace(plans[1], pages=rows(3, [(1, 0, 5)]))
    right = outputs_of(engine_of("attend"), plans)
    wrong = outputs_of(engine_of("attend"), [plans[0], remapped, plans[2]])
    assert right[0] == wrong[0]
    assert right[1] != wrong[1]


def test_attend_notices_a_page_that_another_request_overwrites() -> None:
    engine = engine_of("attend")
    maker = PlanMaker(page_size=2)
    maker.admit(0, PROMPT, [0, 1, 2])
    engine.execute(maker.plan((0, 0, 5, True)))
    maker.admit(1, [1, 2], [0])
    engine.execute(maker.plan((1, 0, 2, True)))
    tokens = engine.execute(maker.plan((0, 5, 1, True))).tolist()
    assert tokens != outputs_of(engine_of("attend"), plans_of(PROMPT, [0, 1, 2], 2))[1:]


def test_deltas_take_effect_with_their_plan_and_stay() -> None:
    engine = engine_of("attend")
    for plan in plans_of(PROMPT, [3, 1, 2, 5], 2):
        engine.execute(plan)
        assert engine.page_table[1, :4].tolist() == [3, 1, 2, 5]
        assert engine.token_table[1, :5].tolist() == PROMPT


def test_writing_one_cell_twice_in_a_step_raises() -> None:
    plan = plans_of(PROMPT, [0, 1, 2], 1)[0]
    twice = replace(plan, out_loc=np.where(plan.out_loc == 4, 3, plan.out_loc))
    with pytest.raises(IntegrityError, match="step 0 writes a cell twice"):
        engine_of("random").execute(twice)


def test_a_step_takes_its_own_time_and_more_for_each_token() -> None:
    simulation = Simulation(step_s=0.5, token_s=0.25)
    assert [simulation.step_time(n) for n in (0, 1, 8)] == [0.5, 0.75, 2.5]
    assert Simulation().step_time(1000) == 0.0

"""A plan's segments laid out token by token."""

from dataclasses import replace

import numpy as np
import pytest

from runtime.errors import InternalError
from tests.plans import PlanMaker, int32, rows
from worker_proc.batch import make_batch, ranges


def test_rows_follow_the_segments_in_plan_order() -> None:
    plans = PlanMaker(page_size=4)
    plans.admit(2, [], [7, 1])
    plans.admit(0, [], [3])
    batch = make_batch(plans.plan((2, 3, 3, True), (0, 1, 1, False), (0, 2, 1, True)))
    assert batch.token_slots.tolist() == [2, 2, 2, 0, 0]
    assert batch.positions.tolist() == [3, 4, 5, 1, 2]
    assert batch.out_loc.tolist() == [31, 4, 5, 13, 14]
    assert batch.seg_rows.tolist() == [0, 3, 4]
    assert batch.sample_rows.tolist() == [2, 4]
    assert batch.sample_slots.tolist() == [2, 0]
    assert batch.sample_positions.tolist() == [6, 3]


@pytest.mark.parametrize("samples", [True, False])
def test_a_step_of_one_token_each_is_laid_out_the_same(samples: bool) -> None:
    plans = PlanMaker(page_size=4)
    plans.admit(2, [], [7, 1])
    plans.admit(0, [], [3])
    batch = make_batch(plans.plan((2, 5, 1, True), (0, 3, 1, samples)))
    assert batch.token_slots.tolist() == [2, 0]
    assert batch.positions.tolist() == [5, 3]
    assert batch.out_loc.tolist() == [5, 15]
    assert batch.seg_rows.tolist() == [0, 1]
    count = 2 if samples else 1
    assert batch.sample_rows.tolist() == [0, 1][:count]
    assert batch.sample_slots.tolist() == [2, 0][:count]
    assert batch.sample_positions.tolist() == [6, 4][:count]


@pytest.mark.parametrize("length", [5, 1])
def test_every_array_is_int32(length: int) -> None:
    plans = PlanMaker(page_size=1)
    plans.admit(0, [], range(8))
    batch = make_batch(plans.plan((0, 0, length, True)))
    for name in type(batch).__slots__:
        assert getattr(batch, name).dtype == np.int32, name


def test_a_plan_without_segments_is_an_empty_batch() -> None:
    batch = make_batch(PlanMaker(page_size=1).plan())
    assert len(batch.positions) == len(batch.sample_rows) == 0


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plans = PlanMaker(page_size=1)
    plans.admit(0, [], range(8))
    plan = plans.plan((0, 0, 5, True))
    with pytest.raises(InternalError, match="5 tokens in segments but 4 out_loc"):
        make_batch(replace(plan, out_loc=plan.out_loc[:4]))
    with pytest.raises(InternalError, match="empty segment"):
        make_batch(replace(plan, segments=rows(4, [(0, 0, 0, 1)]), out_loc=int32([])))


def test_ranges_are_laid_end_to_end() -> None:
    assert ranges(int32([5, 0, 9]), int32([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]

"""A plan's segments laid out token by token: what one forward pass needs, as arrays."""

from dataclasses import dataclass

import numpy as np

from runtime.errors import InternalError
from runtime.messages import StepPlan
from runtime.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step. All int32; s segments, t tokens ("rows") in segment order, r sampling segments.

    seg_slots, seg_starts, seg_lens [s]: as in the plan. seg_rows [s]: the first row of each.
    token_slots, positions, out_loc [t]: slot, place in its sequence and KV index of each row.
    sample_rows, sample_slots, sample_positions [r]: the row whose logits choose a token, and the
    slot and position at which that token will be written.
    """

    seg_slots: IntArray
    seg_starts: IntArray
    seg_lens: IntArray
    seg_rows: IntArray
    token_slots: IntArray
    positions: IntArray
    out_loc: IntArray
    sample_rows: IntArray
    sample_slots: IntArray
    sample_positions: IntArray


def make_batch(plan: StepPlan) -> Batch:
    """The plan's segments laid out; InternalError where its arrays contradict each other."""
    slots, starts, lens, samples = plan.segments
    if len(lens) == len(plan.out_loc) and (lens == 1).all():
        return _one_each(plan, slots, starts, samples)
    num_tokens = int(lens.sum())
    if num_tokens != len(plan.out_loc):
        raise InternalError(
            f"step {plan.step} has {num_tokens} tokens in segments but {len(plan.out_loc)} out_loc"
        )
    if lens.min() < 1:
        raise InternalError(f"step {plan.step} has an empty segment")
    seg_ends = lens.cumsum(dtype=np.int32)
    sampling = np.flatnonzero(samples)
    return Batch(
        seg_slots=slots,
        seg_starts=starts,
        seg_lens=lens,
        seg_rows=seg_ends - lens,
        token_slots=np.repeat(slots, lens),
        positions=ranges(starts, lens),
        out_loc=plan.out_loc,
        sample_rows=seg_ends[sampling] - np.int32(1),
        sample_slots=slots[sampling],
        sample_positions=(starts + lens)[sampling],
    )


def _one_each(plan: StepPlan, slots: IntArray, starts: IntArray, samples: IntArray) -> Batch:
    """The same of the common step, whose segments have one token each: next to no work."""
    rows = np.arange(len(slots), dtype=np.int32)
    sampling = slice(None) if samples.all() else np.flatnonzero(samples)
    return Batch(
        seg_slots=slots,
        seg_starts=starts,
        seg_lens=plan.seg_lens,
        seg_rows=rows,
        token_slots=slots,
        positions=starts,
        out_loc=plan.out_loc,
        sample_rows=rows[sampling],
        sample_slots=slots[sampling],
        sample_positions=(starts + np.int32(1))[sampling],
    )


def ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """start … start+len-1 of each pair, one after another: int32 [sum of lens]."""
    total = int(lens.sum())
    before = lens.cumsum(dtype=np.int32) - lens
    return np.arange(total, dtype=np.int32) + np.repeat(starts - before, lens)

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
    num_tokens = int(plan.seg_lens.sum())
    if num_tokens != len(plan.out_loc):
        raise InternalError(
            f"step {plan.step} has {num_tokens} tokens in segments but {len(plan.out_loc)} out_loc"
        )
    if len(plan.seg_lens) and plan.seg_lens.min() < 1:
        raise InternalError(f"step {plan.step} has an empty segment")
    seg_ends = plan.seg_lens.cumsum(dtype=np.int32)
    sampling = np.flatnonzero(plan.seg_samples)
    return Batch(
        seg_slots=plan.seg_slots,
        seg_starts=plan.seg_starts,
        seg_lens=plan.seg_lens,
        seg_rows=seg_ends - plan.seg_lens,
        token_slots=np.repeat(plan.seg_slots, plan.seg_lens),
        positions=ranges(plan.seg_starts, plan.seg_lens),
        out_loc=plan.out_loc,
        sample_rows=seg_ends[sampling] - np.int32(1),
        sample_slots=plan.seg_slots[sampling],
        sample_positions=(plan.seg_starts + plan.seg_lens)[sampling],
    )


def ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """start … start+len-1 of each pair, one after another: int32 [sum of lens]."""
    total = int(lens.sum())
    before = lens.cumsum(dtype=np.int32) - lens
    return np.arange(total, dtype=np.int32) + np.repeat(starts - before, lens)

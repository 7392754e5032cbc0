"""Collects the segments and deltas of one step and makes its StepPlan."""

import numpy as np

from runtime.messages import SlotSetup, StepPlan
from runtime.types import IntArray, Slot
from scheduler_proc.cache import NO_PAGES
from scheduler_proc.request import Request

NO_SEGMENTS: IntArray = np.empty((4, 0), np.int32)
NO_DELTAS: IntArray = np.empty((3, 0), np.int32)


class PlanBuilder:
    """One step in the making: each part is a list of arrays, joined once at the end."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._setups: list[SlotSetup] = []
        self._writes: list[tuple[Slot, int, IntArray]] = []
        self._pages: list[IntArray] = []
        """slot, index, page: each int32 [3, n]."""
        self._segments: list[IntArray] = []
        """slot, start, length, samples: each int32 [4, n]."""
        self._out_loc: list[IntArray] = []
        self.num_tokens = 0

    def set_up(self, slot: Slot, request: Request) -> None:
        """The slot is the request's now: its parameters and all its known ids go to the worker."""
        submit = request.submit
        self._setups.append(
            SlotSetup(
                slot=slot,
                request=request.id,
                prompt_len=request.prompt_len,
                sampling=submit.sampling,
                stop_ids=submit.stop_ids,
                first_prompt_logprob=request.next_prompt_logprob,
            )
        )
        self._writes.append((slot, 0, request.ids))

    def map_pages(self, slots: IntArray, indices: IntArray, pages: IntArray) -> None:
        """page_table[slots, indices] = pages, each int32 [n]."""
        deltas = np.empty((3, len(slots)), np.int32)
        deltas[0], deltas[1], deltas[2] = slots, indices, pages
        self._pages.append(deltas)

    def map_row(self, slot: Slot, first: int, pages: IntArray) -> None:
        """page_table[slot, first …] = pages."""
        deltas = np.empty((3, len(pages)), np.int32)
        deltas[0], deltas[1], deltas[2] = slot, np.arange(first, first + len(pages)), pages
        self._pages.append(deltas)

    def add_decodes(self, slots: IntArray, positions: IntArray, out_loc: IntArray) -> None:
        """One token each, all sampling; each int32 [n]."""
        segments = np.empty((4, len(slots)), np.int32)
        segments[0], segments[1], segments[2:] = slots, positions, 1
        self._segments.append(segments)
        self._out_loc.append(out_loc)
        self.num_tokens += len(slots)

    def add_chunk(self, slot: Slot, start: int, length: int, samples: bool, row: IntArray) -> None:
        """`length` tokens of one slot from `start` on. row: the slot's pages, int32 [≥ pages
        needed].
        """
        positions = np.arange(start, start + length, dtype=np.int32)
        cells = row[positions // self._page_size] * self._page_size + positions % self._page_size
        self._segments.append(np.array([[slot], [start], [length], [samples]], np.int32))
        self._out_loc.append(cells)
        self.num_tokens += length

    def build(self, step: int) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step=step,
            setups=tuple(self._setups),
            writes=self._joined_writes(),
            write_ids=_join([ids for _, _, ids in self._writes], NO_PAGES),
            pages=self._page_deltas(),
            segments=_join(self._segments, NO_SEGMENTS),
            out_loc=_join(self._out_loc, NO_PAGES),
        )

    def _joined_writes(self) -> IntArray:
        """slot, start, length of every write: int32 [3, n]."""
        if not self._writes:
            return NO_DELTAS
        writes = [(slot, start, len(ids)) for slot, start, ids in self._writes]
        return np.array(writes, np.int32).T

    def _page_deltas(self) -> IntArray:
        """slot, index, page: int32 [3, n], each entry of the table once: the last mapping
        counts.
        """
        deltas = _join(self._pages, NO_DELTAS)
        if len(self._pages) > 1:
            entry = deltas[0].astype(np.int64) << 32 | deltas[1]
            _, last = np.unique(entry[::-1], return_index=True)
            if len(last) < len(entry):
                keep = np.sort(len(entry) - 1 - last)
                return deltas[:, keep]
        return deltas


def sampling_slots(plan: StepPlan) -> IntArray:
    """The slots that a token is sampled for, in plan order: int32 [samples]."""
    slots, samples = plan.seg_slots, plan.seg_samples
    # A step of decodes only is the common one: no copy.
    return slots if samples.all() else slots[samples == 1]


def _join(parts: list[IntArray], nothing: IntArray) -> IntArray:
    """One array of all parts side by side, without a copy where there is one part or none."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=-1) if parts else nothing

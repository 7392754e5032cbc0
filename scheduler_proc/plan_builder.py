"""Collects the segments and deltas of one step and makes its StepPlan."""

import numpy as np

from runtime.messages import SlotSetup, StepPlan
from runtime.types import IntArray, Slot
from scheduler_proc.cache import NO_PAGES
from scheduler_proc.request import Request


class PlanBuilder:
    """One step in the making: each part is a list of arrays, joined once at the end."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._setups: list[SlotSetup] = []
        self._writes: list[tuple[Slot, int, IntArray]] = []
        self._pages: list[tuple[IntArray, IntArray, IntArray]] = []
        self._segments: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
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
        self._pages.append((slots, indices, pages))

    def map_row(self, slot: Slot, first: int, pages: IntArray) -> None:
        """page_table[slot, first …] = pages."""
        indices = np.arange(first, first + len(pages), dtype=np.int32)
        self.map_pages(np.full(len(pages), slot, np.int32), indices, pages)

    def add_decodes(self, slots: IntArray, positions: IntArray, out_loc: IntArray) -> None:
        """One token each, all sampling; each int32 [n]."""
        ones = np.ones(len(slots), np.int32)
        self._segments.append((slots, positions, ones, ones))
        self._out_loc.append(out_loc)
        self.num_tokens += len(slots)

    def add_chunk(self, slot: Slot, start: int, length: int, samples: bool, row: IntArray) -> None:
        """`length` tokens of one slot from `start` on. row: the slot's pages, int32 [≥ pages
        needed].
        """
        positions = np.arange(start, start + length, dtype=np.int32)
        cells = row[positions // self._page_size] * self._page_size + positions % self._page_size
        one = (np.array([value], np.int32) for value in (slot, start, length, int(samples)))
        self._segments.append((next(one), next(one), next(one), next(one)))
        self._out_loc.append(cells)
        self.num_tokens += length

    def sampling_slots(self) -> IntArray:
        """The slots that a token is sampled for, in plan order: int32 [samples]."""
        slots = _join([s[0] for s in self._segments])
        sampling: IntArray = slots[_join([s[3] for s in self._segments]) == 1]
        return sampling

    def build(self, step: int) -> StepPlan:
        """The finished plan."""
        slots, starts, lengths, samples = (_join([s[i] for s in self._segments]) for i in range(4))
        page_slots, indices, pages = self._page_deltas()
        writes = self._writes
        return StepPlan(
            step=step,
            setups=tuple(self._setups),
            write_slots=np.array([w[0] for w in writes], np.int32),
            write_starts=np.array([w[1] for w in writes], np.int32),
            write_lens=np.array([len(w[2]) for w in writes], np.int32),
            write_ids=_join([w[2] for w in writes]),
            page_slots=page_slots,
            page_indices=indices,
            page_ids=pages,
            seg_slots=slots,
            seg_starts=starts,
            seg_lens=lengths,
            seg_samples=samples,
            out_loc=_join(self._out_loc),
        )

    def _page_deltas(self) -> tuple[IntArray, IntArray, IntArray]:
        """(slots, indices, pages), each entry of the page table once: the last mapping counts."""
        slots, indices, pages = (_join([p[i] for p in self._pages]) for i in range(3))
        if len(self._pages) > 1:
            entry = slots.astype(np.int64) << 32 | indices
            _, last = np.unique(entry[::-1], return_index=True)
            if len(last) < len(entry):
                keep = np.sort(len(entry) - 1 - last)
                slots, indices, pages = slots[keep], indices[keep], pages[keep]
        return slots, indices, pages


def _join(parts: list[IntArray]) -> IntArray:
    """One int32 array of all parts, without a copy where there is one part or none."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES

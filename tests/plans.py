"""StepPlans made by hand, to drive an Engine without a scheduler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.messages import SlotSetup, StepPlan
from runtime.sampling import SamplingParams
from runtime.types import IntArray, RequestId, Slot

Segment = tuple[int, int, int, bool]
"""(slot, start, length, whether it samples)."""


class PlanMaker:
    """Plans over rows of pages that the caller chooses; a new slot's ids, pages and parameters
    travel in the first plan made after `admit`.

    rows: by slot, the pages that hold its sequence, in order.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: dict[int, list[int]] = {}
        self._step = 0
        self._new: list[SlotSetup] = []
        self._writes: list[tuple[int, int, list[int]]] = []

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        pages: Sequence[int],
        sampling: SamplingParams | None = None,
        **others: Any,
    ) -> None:
        """Give `slot` to a request with these prompt ids, on these pages. others: SlotSetup's."""
        self.rows[slot] = list(pages)
        self._new.append(set_up(slot, sampling or SamplingParams(), **others))
        self.write(slot, 0, prompt)

    def write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Have the next plan write these ids into the token table, from position `start` on."""
        self._writes.append((slot, start, list(ids)))

    def plan(self, *segments: Segment) -> StepPlan:
        """The next step: what was admitted since the last one, then the segments."""
        new, self._new = self._new, []
        writes, self._writes = self._writes, []
        pages = [(s.slot, i, page) for s in new for i, page in enumerate(self.rows[s.slot])]
        self._step += 1
        return StepPlan(
            step=self._step - 1,
            setups=tuple(
                replace(
                    setup,
                    request=RequestId(self._step * 1000 + setup.slot),
                    prompt_len=setup.prompt_len
                    or sum(len(ids) for written, _, ids in writes if written == setup.slot),
                )
                for setup in new
            ),
            writes=rows(3, [(slot, start, len(ids)) for slot, start, ids in writes]),
            write_ids=int32([token for _, _, ids in writes for token in ids]),
            pages=rows(3, pages),
            segments=rows(4, segments),
            out_loc=int32(
                [
                    self.cell(slot, position)
                    for slot, start, length, _ in segments
                    for position in range(start, start + length)
                ]
            ),
        )

    def cell(self, slot: int, position: int) -> int:
        """The KV index of a position of a slot's sequence."""
        page, offset = divmod(position, self.page_size)
        return self.rows[slot][page] * self.page_size + offset


def set_up(slot: int, sampling: SamplingParams, **others: Any) -> SlotSetup:
    """What a plan says of a slot's new request; others: SlotSetup's fields."""
    fields = {"request": RequestId(slot), "prompt_len": 0, "stop_ids": (), **others}
    return SlotSetup(slot=Slot(slot), sampling=sampling, **fields)


def int32(values: Sequence[int]) -> IntArray:
    """The values as a plan carries them."""
    return np.array(values, np.int32)


def rows(count: int, entries: Sequence[Sequence[int]]) -> IntArray:
    """Entries of `count` numbers as a plan carries them: int32 [count, n]."""
    return np.array(entries, np.int32).reshape(-1, count).T

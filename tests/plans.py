"""StepPlans made by hand, to drive an Engine without a scheduler."""

from collections.abc import Sequence

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
        self._new: list[tuple[int, SamplingParams]] = []
        self._writes: list[tuple[int, int, list[int]]] = []

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        pages: Sequence[int],
        sampling: SamplingParams | None = None,
    ) -> None:
        """Give `slot` to a request with these prompt ids, on these pages."""
        self.rows[slot] = list(pages)
        self._new.append((slot, sampling or SamplingParams()))
        self.write(slot, 0, prompt)

    def write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Have the next plan write these ids into the token table, from position `start` on."""
        self._writes.append((slot, start, list(ids)))

    def plan(self, *segments: Segment) -> StepPlan:
        """The next step: what was admitted since the last one, then the segments."""
        new, self._new = self._new, []
        writes, self._writes = self._writes, []
        pages = [(slot, i, page) for slot, _ in new for i, page in enumerate(self.rows[slot])]
        self._step += 1
        return StepPlan(
            step=self._step - 1,
            setups=tuple(
                SlotSetup(
                    slot=Slot(slot),
                    request=RequestId(self._step * 1000 + slot),
                    prompt_len=sum(len(ids) for written, _, ids in writes if written == slot),
                    sampling=sampling,
                    stop_ids=(),
                )
                for slot, sampling in new
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


def int32(values: Sequence[int]) -> IntArray:
    """The values as a plan carries them."""
    return np.array(values, np.int32)


def rows(count: int, entries: Sequence[Sequence[int]]) -> IntArray:
    """Entries of `count` numbers as a plan carries them: int32 [count, n]."""
    return np.array(entries, np.int32).reshape(-1, count).T

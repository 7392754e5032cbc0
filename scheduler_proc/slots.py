"""What the scheduler knows of every slot, as arrays indexed by slot, so that a step touches all
decodes at once.

Counters of a running request, in tokens:

    0 ≤ planned ≤ promised ≤ known + 2, promised ≤ limit

    [0, planned)         computed by the plans built so far
    [planned, promised)  to be planned; ids up to `known` are here, later ones are being sampled
"""

import numpy as np

from runtime.errors import IntegrityError
from runtime.types import BoolArray, IntArray, LongArray, Slot
from scheduler_proc.request import Request

NO_TOKEN = -1
"""Fills rows of stop_ids: no sampled id equals it."""


class SlotTable:
    """The rows of all running requests. All arrays are int32 [num_slots] unless said otherwise."""

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int) -> None:
        max_pages = -(-max_seq_len // page_size)
        self.num_slots = num_slots
        self.planned: IntArray = np.zeros(num_slots, np.int32)
        self.promised: IntArray = np.zeros(num_slots, np.int32)
        self.known: IntArray = np.zeros(num_slots, np.int32)
        self.limit: IntArray = np.zeros(num_slots, np.int32)
        self.prompt_len: IntArray = np.zeros(num_slots, np.int32)
        self.num_cached: IntArray = np.zeros(num_slots, np.int32)
        self.num_pages: IntArray = np.zeros(num_slots, np.int32)
        """Filled entries of the slot's row of the page table."""
        self.num_shared: IntArray = np.zeros(num_slots, np.int32)
        """How many of them, from the first, the prefix cache owns."""
        self.request_ids: LongArray = np.zeros(num_slots, np.int64)
        self.tenure: IntArray = np.zeros(num_slots, np.int32)
        """Bumped whenever the slot changes hands: tells a late result from the new owner's."""
        self.pages: IntArray = np.zeros((num_slots, max_pages), np.int32)
        """The page table, int32 [num_slots, max_pages]."""
        self.token_ids: IntArray = np.zeros((num_slots, max_seq_len), np.int32)
        """Known ids, int32 [num_slots, max_seq_len]."""
        self.stop_ids: IntArray = np.full((num_slots, 1), NO_TOKEN, np.int32)
        """int32 [num_slots, width]: the ids that end the slot's request."""
        self.owners: dict[Slot, Request] = {}
        self._free = [Slot(s) for s in range(num_slots - 1, -1, -1)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def claim(self, request: Request) -> Slot:
        """Give the request a slot with no pages yet; its ids move into the table."""
        slot = self._free.pop()
        self.owners[slot] = request
        request.slot = slot
        num_known = len(request.ids)
        self.planned[slot] = self.num_pages[slot] = self.num_shared[slot] = 0
        self.promised[slot] = self.known[slot] = num_known
        self.limit[slot] = request.limit
        self.prompt_len[slot] = request.prompt_len
        self.num_cached[slot] = request.num_cached or 0
        self.request_ids[slot] = request.id
        self.token_ids[slot, :num_known] = request.ids
        self._set_stop_ids(slot, request.submit.stop_ids)
        return slot

    def release(self, slot: Slot) -> None:
        """Take the slot back; the request's known ids move out of the table."""
        request = self.owners.pop(slot)
        request.ids = self.token_ids[slot, : self.known[slot]].copy()
        request.slot = None
        self.tenure[slot] += 1
        self._free.append(slot)

    def stopped(self, slots: IntArray, tokens: IntArray) -> BoolArray:
        """Which of `tokens` [n], sampled for `slots` [n], end their request: bool [n]."""
        ends: BoolArray = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        return ends

    def check_integrity(self) -> None:
        """Slots are free or owned by one request that knows it; the counters are in order."""
        if len(self._free) + len(self.owners) != self.num_slots:
            raise IntegrityError("free and owned slots are not all slots")
        if len(set(self._free) | set(self.owners)) != self.num_slots:
            raise IntegrityError("a slot is free twice, or free and owned")
        if len({id(r) for r in self.owners.values()}) != len(self.owners):
            raise IntegrityError("a request owns two slots")
        for slot, request in self.owners.items():
            if request.slot != slot:
                raise IntegrityError(f"slot {slot} is owned twice")
            planned, promised = self.planned[slot], self.promised[slot]
            known, limit = self.known[slot], self.limit[slot]
            if not (0 <= planned <= promised <= min(known + 2, limit) and known <= promised):
                raise IntegrityError(
                    f"slot {slot}: planned {planned}, promised {promised}, known {known},"
                    f" limit {limit}"
                )

    def _set_stop_ids(self, slot: Slot, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            extra = np.full((self.num_slots, len(ids) - width), NO_TOKEN, np.int32)
            self.stop_ids = np.concatenate((self.stop_ids, extra), axis=1)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

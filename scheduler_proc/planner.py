"""Builds one step: all running decodes first, then prompt chunks, then new requests, under one
token budget.

Rules:
 1. Decodes are handled as arrays; only what changed (a chunk, an admission, a departure) is touched
    one by one.
 2. A plan that has deltas but no tokens is not lost: its builder is carried into the next step.
 3. A request is admitted only if the pages left after the reserves of the others hold the rest of
    its prompt and one more. Reserved are the rest of every admitted prompt and one page per running
    request.
 4. After a retraction nobody is admitted until a request ends: so a request is retracted at most as
    often as others end.
"""

from collections import Counter

import numpy as np

from runtime.errors import IntegrityError
from runtime.options import SchedulerOptions
from runtime.types import BoolArray, IntArray, Slot
from scheduler_proc.cache import NO_PAGES
from scheduler_proc.counters import Counters
from scheduler_proc.memory import KvMemory
from scheduler_proc.plan_builder import PlanBuilder
from scheduler_proc.queue import WaitingQueue
from scheduler_proc.request import Request, State
from scheduler_proc.slots import SlotTable


class Planner:
    """Knows which slots decode and which are still catching up with their prompt."""

    def __init__(
        self,
        options: SchedulerOptions,
        slots: SlotTable,
        memory: KvMemory,
        queue: WaitingQueue,
        counters: Counters,
    ) -> None:
        self._page_size = options.page_size
        self._budget = options.max_extend_tokens
        self._slots = slots
        self._memory = memory
        self._queue = queue
        self._counters = counters
        self._builder = PlanBuilder(options.page_size)
        self._decoding: IntArray = NO_PAGES
        """Slots whose next segment is one token, int32 [n], in the order in which they began."""
        self._is_decoding: BoolArray = np.zeros(slots.num_slots, np.bool_)
        self._began: list[Slot] = []
        """Slots that decode from the next step on."""
        self._stale = False
        """Whether `_decoding` has slots that left."""
        self._catching_up: dict[Slot, Request] = {}
        """Admitted requests with more than one token to compute, in order of admission."""
        self._ranks: dict[int, int] = {}
        """How many running requests have each rank."""
        self._closed = False
        """Whether nobody is admitted until someone ends."""
        self._under_pressure = False
        """Whether the last `plan` failed for want of pages."""
        self._blocked: Request | None = None
        """Who was to be admitted when the pages did not suffice."""

    def plan(self, step: int) -> PlanBuilder | None:
        """The next step's parts; None if there is nothing to compute, or if someone must make room
        first.
        """
        self._refresh()
        if self._preempted() is not None:
            return None
        self._under_pressure = not self._add_decodes()
        if self._under_pressure:
            return None
        budget = self._budget
        for slot in list(self._catching_up):
            budget -= self._add_chunk(step, slot, budget)
        while budget > 0 and self._can_admit():
            if (admitted := self._admit(self._queue.head())) is None:
                self._blocked = self._queue.head()
                break
            budget -= self._add_chunk(step, admitted, budget)
        if not self._builder.num_tokens:
            self._under_pressure = bool(self._catching_up)
            return None
        builder, self._builder = self._builder, PlanBuilder(self._page_size)
        self._memory.allocator.settle()
        return builder

    def victim(self) -> Request | None:
        """Who must make room, nothing being in flight: the youngest of the lowest rank; None if
        nobody.

        Raises IntegrityError if the one request that runs finds no room.
        """
        if (preempted := self._preempted()) is not None:
            return preempted
        if not self._under_pressure:
            return None
        if len(self._slots.owners) < 2:
            raise IntegrityError("the pool is too small for the one request that runs")
        self._closed = True
        return self._lowest()

    def _preempted(self) -> Request | None:
        """The running request that the head of the queue pushes out, if it gets in no other way."""
        queue = self._queue
        if not queue.may_preempt or not self._slots.owners:
            return None
        # Nobody is blocked while admissions are closed, and the slot that was retracted is free.
        if self._slots.num_free and queue.head() is not self._blocked:
            return None
        return self._lowest() if queue.preempts(min(self._ranks)) else None

    def _lowest(self) -> Request:
        running = self._slots.owners.values()
        return min(running, key=lambda request: (request.rank, -request.submit.arrival))

    def _count_rank(self, rank: int, change: int) -> None:
        count = self._ranks.get(rank, 0) + change
        if count:
            self._ranks[rank] = count
        else:
            del self._ranks[rank]

    def forget(self, slot: Slot) -> None:
        """The slot is about to be released."""
        self._catching_up.pop(slot, None)
        self._count_rank(self._slots.owners[slot].rank, -1)
        self._is_decoding[slot] = False
        self._stale = True
        self._blocked = None

    def someone_ended(self) -> None:
        """Pages came free for good: admissions may go on."""
        self._closed = False

    def check_integrity(self) -> None:
        """Every running slot is decoding, catching up, or waits for its last tokens only."""
        slots = self._slots
        decoding = {Slot(int(s)) for s in self._decoding if self._is_decoding[s]}
        decoding |= {s for s in self._began if self._is_decoding[s]}
        for slot in slots.owners:
            promised = int(slots.promised[slot])
            behind = promised - int(slots.planned[slot])
            done = promised == slots.limit[slot]
            expected = (
                not done and slot not in self._catching_up,
                not done and slot not in decoding,
            )
            if (slot in decoding, slot in self._catching_up) != expected:
                raise IntegrityError(f"slot {slot} is {behind} tokens behind and in the wrong list")
            if slot in decoding and behind != 1:
                raise IntegrityError(f"slot {slot} decodes {behind} tokens at once")
        if not (decoding | set(self._catching_up)) <= set(slots.owners):
            raise IntegrityError("a slot without a request is planned")
        if self._ranks != Counter(request.rank for request in slots.owners.values()):
            raise IntegrityError(f"the running requests' ranks are not {self._ranks}")

    # ---- decodes --------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Bring `_decoding` up to date with who left and who began."""
        if self._stale:
            self._decoding = self._decoding[self._is_decoding[self._decoding]]
            self._began = [slot for slot in self._began if self._is_decoding[slot]]
            self._stale = False
        if self._began:
            self._decoding = np.concatenate((self._decoding, np.array(self._began, np.int32)))
            self._began = []

    def _add_decodes(self) -> bool:
        """One token of every decoding slot; False, and nothing changed, if pages are short."""
        slots, table = self._decoding, self._slots
        if not len(slots):
            return True
        positions = table.planned[slots]
        indices, offsets = np.divmod(positions, self._page_size)
        fresh = slots[offsets == 0]
        if len(fresh):
            if (pages := self._memory.take(len(fresh))) is None:
                return False
            fresh_indices = indices[offsets == 0]
            table.pages[fresh, fresh_indices] = pages
            table.num_pages[fresh] += 1
            self._builder.map_pages(fresh, fresh_indices, pages)
        out_loc = table.pages[slots, indices] * self._page_size + offsets
        self._builder.add_decodes(slots, positions, out_loc)
        table.planned[slots] = positions + 1
        promised = positions + 2
        table.promised[slots] = promised
        done = promised == table.limit[slots]
        if done.any():
            self._is_decoding[slots[done]] = False
            self._stale = True
        return True

    # ---- chunks ---------------------------------------------------------------------------

    def _add_chunk(self, step: int, slot: Slot, budget: int) -> int:
        """As much of the slot's prompt as budget and pages allow; how many tokens that was."""
        if budget <= 0:
            return 0
        table = self._slots
        before = int(table.planned[slot])
        self._memory.adopt(slot, self._builder)
        start, end = int(table.planned[slot]), int(table.promised[slot])
        self._count_cached(slot, start - before)
        length = self._fit_pages(slot, min(budget, end - start))
        if not length:
            return 0
        samples = start + length == end
        table.planned[slot] = start + length
        self._builder.add_chunk(slot, start, length, samples, table.pages[slot])
        self._count_computed(step, slot, start, length)
        self._memory.share(slot, self._builder)
        if samples:
            self._caught_up(slot)
        return length

    def _fit_pages(self, slot: Slot, length: int) -> int:
        """Append the pages for `length` more tokens; fewer tokens if there are fewer pages."""
        memory, table = self._memory, self._slots
        start, num_pages = int(table.planned[slot]), int(table.num_pages[slot])
        room = (num_pages + memory.num_available) * self._page_size - start
        length = min(length, room)
        missing = memory.pages_for(start + length) - num_pages
        if missing > 0 and (pages := memory.take(missing)) is not None:
            memory.append_pages(slot, pages, self._builder)
        return length

    def _caught_up(self, slot: Slot) -> None:
        """The slot's last known token is planned and the next one is being sampled."""
        table = self._slots
        del self._catching_up[slot]
        table.promised[slot] += 1
        if table.promised[slot] < table.limit[slot]:
            self._is_decoding[slot] = True
            self._began.append(slot)

    # ---- admission ------------------------------------------------------------------------

    def _can_admit(self) -> bool:
        return len(self._queue) > 0 and self._slots.num_free > 0 and not self._closed

    def _admit(self, request: Request) -> Slot | None:
        """Give the request a slot if the rest of its prompt fits beside what is reserved."""
        memory, table = self._memory, self._slots
        pages = memory.lock_prefix(request)
        # One page more than the prompt, but never more than the request can fill.
        needed = min(memory.pages_for(len(request.ids)) + 1, memory.pages_for(request.limit - 1))
        if needed - len(pages) > memory.num_available - self._num_reserved():
            memory.unlock_prefix(request)
            return None
        self._queue.admit(request)
        request.move(State.RUNNING)
        self._count_rank(request.rank, 1)
        slot = table.claim(request)
        self._builder.set_up(slot, request)
        memory.adopt_prefix(slot, pages, self._builder)
        if request.num_cached is None:
            request.num_cached = 0
            self._count_cached(slot, int(table.planned[slot]))
        self._catching_up[slot] = request
        return slot

    def _num_reserved(self) -> int:
        """Pages that running requests are sure to need: rests of prompts, and one each to go on."""
        table, memory = self._slots, self._memory
        rests = sum(
            memory.pages_for(int(table.promised[slot])) - int(table.num_pages[slot])
            for slot in self._catching_up
        )
        return rests + len(table.owners)

    # ---- counting -------------------------------------------------------------------------

    def _count_cached(self, slot: Slot, num_tokens: int) -> None:
        """Tokens that the first prefill of a prompt need not compute."""
        request = self._slots.owners[slot]
        if num_tokens and not request.num_retractions:
            request.num_cached = (request.num_cached or 0) + num_tokens
            self._slots.num_cached[slot] = request.num_cached
            self._counters.prompt_cached += num_tokens

    def _count_computed(self, step: int, slot: Slot, start: int, length: int) -> None:
        if self._slots.owners[slot].num_retractions:
            self._counters.recomputed += length
        else:
            self._counters.count_prompt(step, length)

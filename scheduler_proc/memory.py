"""The KV pool's pages as requests use them: taken, shared through the prefix cache, given back.

Rules:
 1. A page is free, the cache's, or one request's: see the interval table in scheduler_proc.cache.
 2. A page enters the cache once its ids are known and the plan that writes its last cell is built.
    Plans run in order and write all keys and values of a layer before any attention of it, so even
    the same step may read it.
 3. A page that the plan being built writes is never given to another request within that plan.
"""

import numpy as np

from runtime.errors import IntegrityError
from runtime.types import IntArray, Slot
from scheduler_proc.cache import PrefixCache
from scheduler_proc.pages import PageAllocator
from scheduler_proc.plan_builder import PlanBuilder
from scheduler_proc.request import Request
from scheduler_proc.slots import SlotTable


class KvMemory:
    """Keeps the page table's rows, the free pages and the prefix cache in step with each other."""

    def __init__(
        self, allocator: PageAllocator, cache: PrefixCache, slots: SlotTable, page_size: int
    ) -> None:
        self.allocator = allocator
        self.cache = cache
        self._slots = slots
        self._page_size = page_size

    @property
    def num_available(self) -> int:
        """Pages that `take` could give now."""
        return self.allocator.num_free + self.cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill, the last perhaps in part."""
        return -(-num_tokens // self._page_size)

    def take(self, count: int) -> IntArray | None:
        """`count` pages, evicting from the cache as needed; None, and nothing taken, if there are
        too few.
        """
        if count > self.num_available:
            return None
        if (missing := count - self.allocator.num_free) > 0:
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.take(count)

    def lock_prefix(self, request: Request) -> IntArray:
        """Find and protect what the cache holds of a waiting request's ids and may spare it.

        Undone by `unlock_prefix`; made use of by `adopt_prefix`.
        """
        match = self.cache.match(self.cache.root, request.ids[: request.num_skippable])
        self.cache.lock(match.node, below=self.cache.root)
        request.node = match.node
        return match.pages

    def unlock_prefix(self, request: Request) -> None:
        """The request is not admitted after all."""
        self.cache.unlock(request.node)
        request.node = None

    def adopt_prefix(self, slot: Slot, pages: IntArray, builder: PlanBuilder) -> None:
        """The row of a slot just claimed starts with the cached `pages` that lock_prefix found."""
        self._extend_shared(slot, pages, builder)

    def adopt(self, slot: Slot, builder: PlanBuilder) -> None:
        """Skip what another request has computed of this prompt since the last look.

        The slot's own copy of a page that it had begun is freed: its cells were written by earlier
        plans only.
        """
        slots, request = self._slots, self._slots.owners[slot]
        shared = slots.num_shared[slot]
        rest = slots.token_ids[slot, shared * self._page_size : request.num_skippable]
        match = self.cache.match(request.node, rest)
        if len(match.pages):
            self.allocator.free(slots.pages[slot, shared : slots.num_pages[slot]])
            self._relock(request, match.node)
            self._extend_shared(slot, match.pages, builder)

    def share(self, slot: Slot, builder: PlanBuilder) -> None:
        """Offer the pages that the slot's plans fill and whose ids are known to the cache.

        Where the cache has an equal page already (the last page of a prompt that was cached whole:
        its last token is computed all the same), the row adopts it and the slot's copy is freed.
        """
        slots, request = self._slots, self._slots.owners[slot]
        shared, full = slots.num_shared[slot], self._num_full(slot)
        if full == shared:
            return
        own = slots.pages[slot, shared:full]
        ids = slots.token_ids[slot, shared * self._page_size : full * self._page_size]
        insertion = self.cache.insert(request.node, ids, own)
        if known := insertion.num_known:
            equal = self.cache.match(request.node, ids[: known * self._page_size]).pages
            self.allocator.free_later(own[:known])
            slots.pages[slot, shared : shared + known] = equal
            builder.map_row(slot, shared, equal)
        slots.num_shared[slot] = shared + known + insertion.num_taken
        self._relock(request, insertion.node)

    def release(self, slot: Slot) -> None:
        """The slot's request leaves it: full pages go to the cache, all others are free."""
        slots, request = self._slots, self._slots.owners[slot]
        shared, full = slots.num_shared[slot], self._num_full(slot)
        freed = slots.pages[slot, shared : slots.num_pages[slot]]
        if full > shared:
            ids = slots.token_ids[slot, shared * self._page_size : full * self._page_size]
            insertion = self.cache.insert(request.node, ids, freed[: full - shared])
            known, end = insertion.num_known, insertion.num_known + insertion.num_taken
            freed = np.concatenate((freed[:known], freed[end:]))
        self.allocator.free(freed)
        self.cache.unlock(request.node)
        request.node = None

    def append_pages(self, slot: Slot, pages: IntArray, builder: PlanBuilder) -> None:
        """Put new pages at the end of the slot's row."""
        first = self._slots.num_pages[slot]
        self._slots.pages[slot, first : first + len(pages)] = pages
        self._slots.num_pages[slot] += len(pages)
        builder.map_row(slot, first, pages)

    def check_integrity(self) -> None:
        """Free, cached and owned pages are all pages, each once; rows cover their tokens
        exactly.
        """
        self.allocator.check_integrity()
        slots = self._slots
        nodes = [request.node for request in slots.owners.values()]
        cached = self.cache.check_integrity(nodes)
        owned = [
            slots.pages[slot, slots.num_shared[slot] : slots.num_pages[slot]]
            for slot in slots.owners
        ]
        everything = np.concatenate((self.allocator.free_pages(), cached, *owned))
        if not np.array_equal(np.sort(everything), np.arange(self.allocator.num_pages)):
            raise IntegrityError(
                f"{len(everything)} pages are free, cached or owned, {len(np.unique(everything))}"
                f" of them different; the pool has {self.allocator.num_pages}"
            )
        for slot, request in slots.owners.items():
            shared = slots.num_shared[slot]
            ids, pages = self.cache.path(request.node)
            if not np.array_equal(slots.pages[slot, :shared], pages):
                raise IntegrityError(f"slot {slot} shares pages that its path in the cache lacks")
            if not np.array_equal(slots.token_ids[slot, : shared * self._page_size], ids):
                raise IntegrityError(f"slot {slot} shares pages that hold other ids than its own")
            if slots.num_pages[slot] != self.pages_for(int(slots.planned[slot])):
                raise IntegrityError(
                    f"slot {slot} has {slots.num_pages[slot]} pages for"
                    f" {slots.planned[slot]} tokens"
                )

    # ---- inside ---------------------------------------------------------------------------

    def _num_full(self, slot: Slot) -> int:
        """Pages of the row whose ids are known and whose cells are all written by plans built so
        far.
        """
        slots = self._slots
        return int(min(slots.planned[slot], slots.known[slot])) // self._page_size

    def _extend_shared(self, slot: Slot, pages: IntArray, builder: PlanBuilder) -> None:
        """Continue the shared part of the row by `pages`, in place of what followed it."""
        if not len(pages):
            return
        slots = self._slots
        shared = slots.num_shared[slot]
        end = shared + len(pages)
        slots.pages[slot, shared:end] = pages
        slots.num_pages[slot] = slots.num_shared[slot] = end
        slots.planned[slot] = end * self._page_size
        builder.map_row(slot, shared, pages)

    def _relock(self, request: Request, node: object) -> None:
        """The request's locked path now ends at `node`, below its present end."""
        self.cache.lock(node, below=request.node)
        request.node = node

"""The page allocator against two sets: what is free, and what is free once the plan is built."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.errors import IntegrityError
from scheduler_proc.pages import PageAllocator


class PageAllocatorModel(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def build(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.free = set(range(num_pages))
        self.later: set[int] = set()
        self.taken: list[int] = []

    @rule(count=st.integers(0, 13))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(IntegrityError, match=f"{count} pages wanted"):
                self.allocator.take(count)
            return
        pages = self.allocator.take(count).tolist()
        assert len(pages) == count == len(set(pages))
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.taken += pages

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = self._choose(data)
        self.allocator.free(np.array(pages, np.int32))
        self.free |= set(pages)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back_later(self, data: st.DataObject) -> None:
        pages = np.array(self._choose(data), np.int32)
        self.later |= set(pages.tolist())
        self.allocator.free_later(pages)
        pages[:] = -1  # the caller's array is its own again

    @rule()
    def settle(self) -> None:
        self.allocator.settle()
        self.free |= self.later
        self.later = set()

    @rule()
    def free_a_page_too_many(self) -> None:
        if not self.taken and not self.later:
            with pytest.raises(IntegrityError, match="1 pages freed beyond"):
                self.allocator.free(np.array([0], np.int32))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        assert self.allocator.num_free == len(self.free)
        assert sorted(self.allocator.free_pages().tolist()) == sorted(self.free | self.later)

    def _choose(self, data: st.DataObject) -> list[int]:
        pages = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.taken = [page for page in self.taken if page not in pages]
        return pages


TestPageAllocator = PageAllocatorModel.TestCase
TestPageAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

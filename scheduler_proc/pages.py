"""The free pages of the KV pool.

Rules: a page is free or taken, never both; `take` never gives a page twice; whoever took a page is
answered for it.
"""

import numpy as np

from runtime.errors import IntegrityError
from runtime.types import IntArray


class PageAllocator:
    """A stack of free page ids: the page freed last is given first, while it may still be in a
    cache.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._pending: list[IntArray] = []
        self._stack: IntArray = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        """int32 [num_pages]; the first num_free entries are the free pages, the top at the end."""

    def take(self, count: int) -> IntArray:
        """`count` pages, int32 [count]; the caller has checked num_free. O(count)."""
        if count > self.num_free:
            raise IntegrityError(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, pages: IntArray) -> None:
        """Give pages (int32 [n], each taken before) back. O(n)."""
        end = self.num_free + len(pages)
        if end > self.num_pages:
            raise IntegrityError(
                f"{len(pages)} pages freed beyond the {self.num_pages} of the pool"
            )
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_later(self, pages: IntArray) -> None:
        """Give back pages that the plan being built still writes: they can't be taken before
        `settle`.
        """
        self._pending.append(pages.copy())

    def settle(self) -> None:
        """The plan is built: what `free_later` held back is free for the next."""
        pending, self._pending = self._pending, []
        for pages in pending:
            self.free(pages)

    def free_pages(self) -> IntArray:
        """All free pages, those held back included: a copy, for checks."""
        return np.concatenate((self._stack[: self.num_free], *self._pending))

    def check_integrity(self) -> None:
        """Every free page is in range and free once. O(num_pages)."""
        pages = self.free_pages()
        if len(pages) and (pages.min() < 0 or pages.max() >= self.num_pages):
            raise IntegrityError(f"free page out of range 0 … {self.num_pages - 1}")
        if np.bincount(pages).max(initial=0) > 1:
            raise IntegrityError("a page is in the free list twice")

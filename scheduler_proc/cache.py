"""What the scheduler asks of a prefix cache, and the cache that keeps nothing.

Who owns a page of a running request's row, by page index:

    [0, num_shared)           the cache; the request holds a lock on `node`, whose path spells them
    [num_shared, num_pages)   the request; with the naive cache that is all, for num_shared is 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from runtime.types import IntArray

NO_PAGES: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix, from the node that the search began at.

    node: where it ends; its path stays while it is locked. pages: int32 [m].
    """

    node: Any
    pages: IntArray


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of pages offered to the cache.

    node: the end of the inserted path. num_known: how many of the offered pages the cache had
    already under other ids (the first ones; the offered copies stay the caller's). num_taken: how
    many, after those, are the cache's now.
    """

    node: Any
    num_known: int
    num_taken: int


class PrefixCache(Protocol):
    """Finished and running sequences' pages, found by their token ids. Nodes are opaque to the
    caller.
    """

    @property
    def root(self) -> Any:
        """The node of the empty prefix."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now: those that no lock protects."""

    def match(self, node: Any, ids: IntArray) -> Match:
        """The longest cached continuation of `node` by whole pages of `ids` (int32 [n])."""

    def match_length(self, ids: IntArray) -> int:
        """How many tokens of `ids` are cached from the root on; changes nothing."""

    def lock(self, node: Any, below: Any) -> None:
        """Protect the nodes from `node` up to `below` (exclusive), an ancestor that is already
        locked.
        """

    def unlock(self, node: Any) -> None:
        """Take back one lock on `node` and all its ancestors."""

    def insert(self, node: Any, ids: IntArray, pages: IntArray) -> Insertion:
        """Continue `node` by whole pages: ids int32 [n * page_size], pages int32 [n]."""

    def evict(self, count: int) -> IntArray:
        """Give up to `count` unprotected pages back, least recently used first."""

    def path(self, node: Any) -> tuple[IntArray, IntArray]:
        """What the path from the root to `node` spells, for checks: ids int32 [n * page_size] and
        pages int32 [n].
        """

    def check_integrity(self, locked: Sequence[Any]) -> IntArray:
        """Raise IntegrityError unless locks are exactly those of `locked`; the pages owned,
        int32.
        """


class NaiveCache:
    """Keeps nothing: every request computes its whole prompt and frees all its pages."""

    root: Any = None
    num_pages = 0
    num_evictable = 0

    def match(self, node: Any, ids: IntArray) -> Match:
        return Match(node, NO_PAGES)

    def match_length(self, ids: IntArray) -> int:
        return 0

    def lock(self, node: Any, below: Any) -> None:
        return None

    def unlock(self, node: Any) -> None:
        return None

    def insert(self, node: Any, ids: IntArray, pages: IntArray) -> Insertion:
        return Insertion(node, 0, 0)

    def evict(self, count: int) -> IntArray:
        return NO_PAGES

    def path(self, node: Any) -> tuple[IntArray, IntArray]:
        return NO_PAGES, NO_PAGES

    def check_integrity(self, locked: Sequence[Any]) -> IntArray:
        return NO_PAGES

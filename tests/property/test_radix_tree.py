"""The radix tree against a dictionary of prefixes, in which each page has an age of its own."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from runtime.types import IntArray
from scheduler_proc.radix import RadixTree

Ids = tuple[int, ...]


@dataclass(eq=False)
class Holder:
    """A running request: the node that it locks, and the ids that its path spells."""

    node: Any
    ids: Ids


class RadixTreeModel(RuleBasedStateMachine):
    """`pages` and `ages` are keyed by the ids from the root to a page's end.

    An unlocked prefix that no other continues may be evicted; the least recently used goes first.
    """

    holders: Bundle[Holder] = Bundle("holders")

    @initialize(page_size=st.sampled_from([1, 2, 4, 16]))
    def build(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.pages: dict[Ids, int] = {}
        self.ages: dict[Ids, int] = {}
        self.locked: list[Holder] = []
        self.now = 0
        self.num_made = 0

    # A sequence is a list of page kinds; the ids of a page follow from its kind, and two kinds
    # differ in their last id only: so all nodes that are not equal in full differ late.
    sequences = st.lists(st.integers(0, 2), max_size=8)
    tails = st.integers(0, 15)

    @rule(kinds=sequences, tail=tails)
    def match(self, kinds: list[int], tail: int) -> None:
        ids = self._ids(kinds, tail)
        found = self.tree.match(self.tree.root, as_array(ids))
        assert found.pages.tolist() == self._match((), ids)

    @rule(kinds=sequences, tail=tails)
    def measure(self, kinds: list[int], tail: int) -> None:
        ids = self._ids(kinds, tail)
        ages = dict(self.ages)
        length = len(self._match((), ids)) * self.page_size
        self.ages = ages
        assert self.tree.match_length(as_array(ids)) == length

    @rule(kinds=sequences)
    def insert(self, kinds: list[int]) -> None:
        self._insert(self.tree.root, (), self._ids(kinds, 0))

    @rule(target=holders, kinds=sequences, tail=tails)
    def lock(self, kinds: list[int], tail: int) -> Holder:
        ids = self._ids(kinds, tail)
        found = self.tree.match(self.tree.root, as_array(ids))
        self.tree.lock(found.node, below=self.tree.root)
        holder = Holder(found.node, ids[: len(self._match((), ids)) * self.page_size])
        self.locked.append(holder)
        return holder

    @rule(holder=holders, kinds=sequences)
    def insert_below_a_lock(self, holder: Holder, kinds: list[int]) -> None:
        ids = self._ids(kinds, 0)
        node = self._insert(holder.node, holder.ids, ids)
        self.tree.lock(node, below=holder.node)
        holder.node, holder.ids = node, holder.ids + ids

    @rule(holder=holders, kinds=sequences, tail=tails)
    def match_below_a_lock(self, holder: Holder, kinds: list[int], tail: int) -> None:
        ids = self._ids(kinds, tail)
        found = self.tree.match(holder.node, as_array(ids))
        assert found.pages.tolist() == self._match(holder.ids, ids)
        self.tree.lock(found.node, below=holder.node)
        holder.node = found.node
        holder.ids += ids[: len(found.pages) * self.page_size]

    @rule(target=holders, holder=consumes(holders), kinds=sequences)
    def release(self, holder: Holder, kinds: list[int]) -> Any:
        ids = self._ids(kinds, 0)
        self._insert(holder.node, holder.ids, ids)
        self.tree.unlock(holder.node)
        self.locked.remove(holder)
        self._touch(self._prefixes((), holder.ids))
        return multiple()

    @rule(count=st.integers(0, 9))
    def evict(self, count: int) -> None:
        expected: list[int] = []
        while len(expected) < count and (leaves := self._leaves()):
            oldest = min(leaves, key=lambda prefix: self.ages[prefix])
            expected.append(self.pages.pop(oldest))
            del self.ages[oldest]
        freed = self.tree.evict(count).tolist()
        assert len(freed) == len(set(freed))
        assert set(freed) == set(expected)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        owned = self.tree.check_integrity([holder.node for holder in self.locked])
        assert sorted(owned.tolist()) == sorted(self.pages.values())
        assert self.tree.num_pages == len(self.pages)
        protected = self._protected()
        assert self.tree.num_evictable == sum(p not in protected for p in self.pages)

    # ---- the model --------------------------------------------------------------------------

    def _ids(self, kinds: list[int], tail: int) -> Ids:
        """Whole pages of the kinds given, then `tail` ids of one more, at most."""
        pages = [(7,) * (self.page_size - 1) + (kind,) for kind in kinds]
        rest = (7,) * min(tail, self.page_size - 1)
        return tuple(i for page in pages for i in page) + rest

    def _prefixes(self, start: Ids, ids: Ids) -> list[Ids]:
        """`start` continued by 1, 2, … whole pages of `ids`."""
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [start + ids[:end] for end in ends]

    def _match(self, start: Ids, ids: Ids) -> list[int]:
        found = []
        for prefix in self._prefixes(start, ids):
            if prefix not in self.pages:
                break
            found.append(prefix)
        self._touch(found)
        return [self.pages[prefix] for prefix in found]

    def _insert(self, node: Any, start: Ids, ids: Ids) -> Any:
        """Both in the tree and in the model; the tree's node for the end."""
        prefixes = self._prefixes(start, ids)
        known = len(self._match(start, ids))
        offered = list(range(self.num_made, self.num_made + len(prefixes)))
        self.num_made += len(prefixes)
        insertion = self.tree.insert(node, as_array(ids), as_array(offered))
        assert (insertion.num_known, insertion.num_taken) == (known, len(prefixes) - known)
        self.pages.update(zip(prefixes[known:], offered[known:], strict=True))
        self._touch(prefixes[known:])
        return insertion.node

    def _touch(self, prefixes: list[Ids]) -> None:
        self.now += 1
        self.ages.update(dict.fromkeys(prefixes, self.now))

    def _protected(self) -> set[Ids]:
        return {p for holder in self.locked for p in self._prefixes((), holder.ids)}

    def _leaves(self) -> list[Ids]:
        inner = {prefix[: -self.page_size] for prefix in self.pages} | self._protected()
        return [prefix for prefix in self.pages if prefix not in inner]


def as_array(ids: Any) -> IntArray:
    return np.array(ids, np.int32)


TestRadixTree = RadixTreeModel.TestCase
TestRadixTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

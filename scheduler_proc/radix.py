"""The radix tree over token ids that owns the cached pages.

Source: RadixAttention (SGLang, arXiv 2312.07104), with keys in whole pages and an incremental LRU.

Rules:
 1. A node's key is a whole number of pages, and no two children of a node start with the same page.
 2. A lock on a node is a lock on its whole path: locks(node) = requests that end at it or below it.
 3. Only nodes without locks lose pages, from the end of a leaf, the least recently used leaf first.
 4. A request's pointer stays valid through splits: the split-off part is the new node, above the
    old one.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from runtime.errors import IntegrityError
from runtime.types import IntArray
from scheduler_proc.cache import NO_PAGES, Insertion, Match


class Node:
    """An edge of the tree and where it ends.

    key: int32 [n * page_size]. pages: int32 [n]. children: by the bytes of their first page's ids.
    """

    __slots__ = ("age", "children", "key", "locks", "pages", "parent", "queued")

    def __init__(self, parent: "Node | None", key: IntArray, pages: IntArray, age: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.age = age
        self.queued = False
        """Whether the eviction queue has an entry for this node (it has at most one)."""


class RadixTree:
    """Pages found by the token ids that they hold, shared by every request that starts alike."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.root = Node(None, NO_PAGES, NO_PAGES, 0)
        self.num_pages = 0
        self.num_evictable = 0
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []
        """Heap of (age, tie-break, leaf). An entry may be stale; it is judged when it surfaces."""
        self._entries = itertools.count()

    def match(self, node: Node, ids: IntArray) -> Match:
        """The longest cached continuation of `node` by whole pages of `ids`.

        ids: int32 [n] -> pages: int32 [m], m * page_size <= n. Splits the node in which the match
        ends and renews the age of the path. O(n).
        """
        age, found, done = next(self._clock), [], 0
        while (child := self._child(node, ids, done)) is not None:
            shared = self._common_pages(child, ids, done)
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.age = age
            found.append(child.pages)
            node, done = child, done + len(child.key)
        pages = found[0] if len(found) == 1 else np.concatenate(found) if found else NO_PAGES
        return Match(node, pages)

    def match_length(self, ids: IntArray) -> int:
        """How many tokens of `ids` are cached from the root on; neither splits nor renews. O(n)."""
        node, done = self.root, 0
        while (child := self._child(node, ids, done)) is not None:
            shared = self._common_pages(child, ids, done)
            done += shared * self._page_size
            if shared < len(child.pages):
                break
            node = child
        return done

    def lock(self, node: Node, below: Node) -> None:
        """Protect the path from `node` up to its ancestor `below`, which is excluded. O(depth)."""
        while node is not below:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = self._parent(node)

    def unlock(self, node: Node) -> None:
        """Take back one lock on `node` and on its whole path, which was in use until now.
        O(depth).
        """
        age = next(self._clock)
        while node is not self.root:
            node.age = age
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._queue_if_leaf(node)
            node = self._parent(node)

    def insert(self, node: Node, ids: IntArray, pages: IntArray) -> Insertion:
        """Continue `node` by `ids` held in `pages`: what is there already stays, the rest becomes
        the tree's.

        node: the root, or a node on which the caller holds a lock. ids: int32 [n * page_size].
        pages: int32 [n]. O(n).
        """
        match = self.match(node, ids)
        known = len(match.pages)
        if known == len(pages):
            return Insertion(match.node, known, 0)
        key, new = ids[known * self._page_size :].copy(), pages[known:].copy()
        self.num_pages += len(new)
        if known == 0 and node.locks == 1 and not node.children:
            # The caller alone ends here: the chunks of one long prompt grow one node, not a chain.
            node.key = np.concatenate((node.key, key))
            node.pages = np.concatenate((node.pages, new))
            return Insertion(node, 0, len(new))
        return Insertion(self._add_child(match.node, key, new), known, len(new))

    def evict(self, count: int) -> IntArray:
        """Up to `count` unlocked pages, int32, from the ends of the least recently used leaves.

        O(log leaves) per leaf touched.
        """
        freed: list[IntArray] = []
        while count > 0 and (leaf := self._oldest_leaf()) is not None:
            keep = max(0, len(leaf.pages) - count)
            freed.append(leaf.pages[keep:])
            count -= len(leaf.pages) - keep
            self._trim(leaf, keep)
        pages = np.concatenate(freed) if freed else NO_PAGES
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages

    def path(self, node: Node) -> tuple[IntArray, IntArray]:
        """The ids and the pages from the root to `node`, copies, for checks. O(path)."""
        nodes = []
        while node is not self.root:
            nodes.append(node)
            node = self._parent(node)
        keys, pages = [n.key for n in nodes[::-1]], [n.pages for n in nodes[::-1]]
        return np.concatenate((NO_PAGES, *keys)), np.concatenate((NO_PAGES, *pages))

    def check_integrity(self, locked: Sequence[Any]) -> IntArray:
        """Prove the rules above, given the node of every running request. The tree's pages, int32.

        Raises IntegrityError. O(tree).
        """
        locks: dict[Node, int] = {}
        for node in locked:
            while node is not self.root:
                locks[node] = locks.get(node, 0) + 1
                node = self._parent(node)
        seen: list[IntArray] = []
        evictable = 0
        queued = {node for _, _, node in self._leaves}
        for node in self._nodes():
            self._check_node(node, locks.pop(node, 0), node in queued)
            seen.append(node.pages)
            evictable += len(node.pages) if node.locks == 0 else 0
        if locks:
            raise IntegrityError("a running request is locked on a node that left the tree")
        pages = np.concatenate(seen) if seen else NO_PAGES
        if len(np.unique(pages)) != len(pages):
            raise IntegrityError("a page is in two nodes of the radix tree")
        if (len(pages), evictable) != (self.num_pages, self.num_evictable):
            raise IntegrityError(
                f"the radix tree holds {len(pages)} pages, {evictable} of them unlocked; it counts"
                f" {self.num_pages} and {self.num_evictable}"
            )
        return pages

    # ---- inside ---------------------------------------------------------------------------

    def _child(self, node: Node, ids: IntArray, start: int) -> Node | None:
        """The child that starts with the page of `ids` at `start`, if a whole page is there."""
        first = ids[start : start + self._page_size]
        return node.children.get(first.tobytes()) if len(first) == self._page_size else None

    def _common_pages(self, node: Node, ids: IntArray, start: int) -> int:
        """How many whole pages `node` and ids[start:] have in common (at least the first)."""
        rest = ids[start : start + len(node.key)]
        if (key := node.key).size != rest.size:
            key = key[: rest.size]
        equal = key == rest
        common = len(rest) if equal.all() else int(equal.argmin())
        return common // self._page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages`; the new node is the upper part. The lower keeps its
        identity.
        """
        cut = num_pages * self._page_size
        parent = self._parent(node)
        upper = Node(parent, node.key[:cut], node.pages[:num_pages], node.age)
        upper.locks = node.locks
        parent.children[self._first(upper.key)] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_pages:], upper
        upper.children[self._first(node.key)] = node
        return upper

    def _add_child(self, node: Node, key: IntArray, pages: IntArray) -> Node:
        child = Node(node, key, pages, next(self._clock))
        node.children[self._first(key)] = child
        self.num_evictable += len(pages)
        self._queue_if_leaf(child)
        return child

    def _first(self, key: IntArray) -> bytes:
        return key[: self._page_size].tobytes()

    def _parent(self, node: Node) -> Node:
        if node.parent is None:
            raise IntegrityError("a node that is not below the locked ancestor was locked")
        return node.parent

    def _queue_if_leaf(self, node: Node) -> None:
        """Make an unlocked leaf known to the eviction queue."""
        if not node.children and not node.queued and node.locks == 0 and node is not self.root:
            node.queued = True
            heapq.heappush(self._leaves, (node.age, next(self._entries), node))

    def _oldest_leaf(self) -> Node | None:
        """The least recently used unlocked leaf; its entry stays at the top of the queue."""
        while self._leaves:
            age, _, node = self._leaves[0]
            if node.locks == 0 and not node.children and node.age == age:
                return node
            heapq.heappop(self._leaves)
            node.queued = False
            self._queue_if_leaf(node)
        return None

    def _trim(self, leaf: Node, keep: int) -> None:
        """Leave the first `keep` pages of the leaf at the top of the queue; without any, it
        goes.
        """
        if keep:
            leaf.key, leaf.pages = leaf.key[: keep * self._page_size], leaf.pages[:keep]
            return
        heapq.heappop(self._leaves)
        parent = self._parent(leaf)
        del parent.children[self._first(leaf.key)]
        leaf.parent, leaf.queued = None, False
        self._queue_if_leaf(parent)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: Node, locks: int, queued: bool) -> None:
        if node.locks != locks:
            raise IntegrityError(
                f"a node of {len(node.pages)} pages has {node.locks} locks;"
                f" {locks} running requests go through it"
            )
        if len(node.key) != len(node.pages) * self._page_size or not len(node.pages):
            raise IntegrityError(f"a node has {len(node.key)} ids for {len(node.pages)} pages")
        if self._parent(node).children.get(self._first(node.key)) is not node:
            raise IntegrityError("a node is not its parent's child under its first page")
        if node.queued is not queued or not (node.locks or node.children or queued):
            raise IntegrityError(
                "an unlocked leaf is unknown to the eviction queue, or a node errs about it"
            )

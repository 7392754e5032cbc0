"""check_integrity notices every way in which the scheduler's state can be broken, and says which.

Alone among the tests, these reach inside: a state that no event leads to can't be made otherwise.
"""

from collections.abc import Callable

import numpy as np
import pytest

from runtime.errors import IntegrityError
from runtime.types import Slot
from scheduler_proc.radix import Node, RadixTree
from scheduler_proc.request import Request, State
from tests.scheduling import Harness


class Parts:
    """A scheduler in the middle of everything, and what it is made of.

    Of three slots one decodes beside a cached prefix, one is between the chunks of its prompt, one
    is free; one request waits for the pages; the tree has a branch and unlocked leaves.
    """

    def __init__(self) -> None:
        harness = Harness(48, page_size=2, max_running_req=3, max_extend_tokens=8)
        head = [1, 2, 3, 4, 5, 6]
        harness.ask([*head, 20, 21], 3)
        harness.ask([*head, 30, 31], 3)
        harness.ask([50, 51, 52, 53], 3)
        harness.run()
        harness.submit([*head, 20, 21, 60], 20)
        harness.step()
        harness.submit(list(range(100, 150)), 20)
        harness.submit(list(range(200, 260)), 20)
        harness.plan()
        harness.answer()
        self.scheduler = harness.scheduler
        self.slots = self.scheduler._slots
        self.memory = self.scheduler._memory
        self.allocator = self.memory.allocator
        assert isinstance(self.memory.cache, RadixTree)
        self.tree = self.memory.cache
        self.planner = self.scheduler._planner
        self.decoding, self.chunked = self.slots.owners
        self.free_slot = next(Slot(s) for s in range(3) if s not in self.slots.owners)
        assert harness.scheduler.num_waiting == 1
        assert harness.scheduler.num_in_flight == 1

    def request(self, slot: Slot) -> Request:
        return self.slots.owners[slot]

    def waiting(self) -> Request:
        return next(iter(self.scheduler._queue))

    def unlocked_leaves(self) -> list[Node]:
        return [n for n in self.tree._nodes() if not n.locks and not n.children]


def page_in_two_nodes(parts: Parts) -> None:
    first, second = parts.unlocked_leaves()[:2]
    second.pages = np.concatenate((second.pages[:-1], first.pages[:1]))


def free_list_has_a_tree_page(parts: Parts) -> None:
    parts.allocator._stack[0] = parts.unlocked_leaves()[0].pages[0]


def page_is_free_twice(parts: Parts) -> None:
    parts.allocator._stack[0] = parts.allocator._stack[1]


def page_held_back_is_free_too(parts: Parts) -> None:
    parts.allocator.free_later(parts.allocator.free_pages()[:1])


def free_page_does_not_exist(parts: Parts) -> None:
    parts.allocator._stack[0] = 48


def page_is_lost(parts: Parts) -> None:
    parts.allocator.take(1)


def page_has_two_owners(parts: Parts) -> None:
    slots = parts.slots
    last = [(s, slots.num_pages[s] - 1) for s in (parts.decoding, parts.chunked)]
    slots.pages[last[0]] = slots.pages[last[1]]


def cached_page_has_an_owner(parts: Parts) -> None:
    parts.slots.num_shared[parts.decoding] -= 1


def row_is_too_short(parts: Parts) -> None:
    slots, slot = parts.slots, parts.decoding
    slots.num_pages[slot] -= 1
    parts.allocator.free(slots.pages[slot, slots.num_pages[slot] :][:1])


def row_is_too_long(parts: Parts) -> None:
    slots, slot = parts.slots, parts.chunked
    slots.pages[slot, slots.num_pages[slot]] = parts.allocator.take(1)[0]
    slots.num_pages[slot] += 1


def row_maps_another_cached_page(parts: Parts) -> None:
    parts.slots.pages[parts.decoding, 0] = parts.unlocked_leaves()[0].pages[0]


def row_maps_pages_in_the_wrong_order(parts: Parts) -> None:
    row = parts.slots.pages[parts.decoding]
    row[:2] = row[1::-1].copy()


def shared_page_holds_other_ids(parts: Parts) -> None:
    parts.slots.token_ids[parts.decoding, 0] += 1


def lock_too_many(parts: Parts) -> None:
    parts.request(parts.decoding).node.locks += 1


def lock_too_few(parts: Parts) -> None:
    parts.request(parts.decoding).node.locks -= 1


def lock_on_an_idle_leaf(parts: Parts) -> None:
    parts.unlocked_leaves()[0].locks += 1


def locked_node_left_the_tree(parts: Parts) -> None:
    node = parts.request(parts.decoding).node
    node.parent.children = {key: c for key, c in node.parent.children.items() if c is not node}


def child_has_the_wrong_key(parts: Parts) -> None:
    children = parts.tree.root.children
    children[b"nobody's"] = children.pop(next(iter(children)))


def child_has_another_parent(parts: Parts) -> None:
    node = parts.request(parts.decoding).node
    node.parent = next(n for n in parts.unlocked_leaves() if n.parent is not node.parent)


def node_has_too_few_ids(parts: Parts) -> None:
    leaf = parts.unlocked_leaves()[0]
    leaf.key = leaf.key[:-1]


def node_is_empty(parts: Parts) -> None:
    leaf = parts.unlocked_leaves()[0]
    leaf.key, leaf.pages = leaf.key[:0], leaf.pages[:0]


def tree_counts_a_page_too_many(parts: Parts) -> None:
    parts.tree.num_pages += 1


def tree_counts_an_evictable_page_too_few(parts: Parts) -> None:
    parts.tree.num_evictable -= 1


def leaf_is_not_queued(parts: Parts) -> None:
    parts.unlocked_leaves()[0].queued = False


def eviction_queue_lost_an_entry(parts: Parts) -> None:
    parts.tree._leaves.clear()


def slot_is_lost(parts: Parts) -> None:
    parts.slots._free.clear()


def slot_is_free_and_owned(parts: Parts) -> None:
    parts.slots._free[0] = parts.decoding


def slot_is_owned_twice(parts: Parts) -> None:
    parts.request(parts.decoding).slot = parts.chunked


def request_owns_two_slots(parts: Parts) -> None:
    parts.slots._free.clear()
    parts.slots.owners[parts.free_slot] = parts.request(parts.decoding)


def planned_beyond_promised(parts: Parts) -> None:
    parts.slots.planned[parts.decoding] = parts.slots.promised[parts.decoding] + 1


def planned_below_zero(parts: Parts) -> None:
    parts.slots.planned[parts.chunked] = -1


def promised_three_beyond_known(parts: Parts) -> None:
    parts.slots.promised[parts.decoding] = parts.slots.known[parts.decoding] + 3


def promised_beyond_the_limit(parts: Parts) -> None:
    parts.slots.limit[parts.decoding] = parts.slots.promised[parts.decoding] - 1


def known_beyond_promised(parts: Parts) -> None:
    parts.slots.known[parts.decoding] = parts.slots.promised[parts.decoding] + 1


def live_request_is_nowhere(parts: Parts) -> None:
    parts.scheduler._queue.remove(parts.waiting())


def live_request_is_in_two_places(parts: Parts) -> None:
    parts.scheduler._queue.push(parts.request(parts.decoding))


def request_without_a_life_waits(parts: Parts) -> None:
    del parts.scheduler._live[parts.waiting().id]


def running_request_thinks_it_waits(parts: Parts) -> None:
    parts.request(parts.decoding).state = State.WAITING


def waiting_request_thinks_it_runs(parts: Parts) -> None:
    parts.waiting().state = State.RUNNING


def decoding_slot_is_forgotten(parts: Parts) -> None:
    parts.planner.forget(parts.decoding)


def chunked_slot_is_forgotten(parts: Parts) -> None:
    parts.planner.forget(parts.chunked)


def slot_decodes_and_catches_up(parts: Parts) -> None:
    parts.planner._catching_up[parts.decoding] = parts.request(parts.decoding)


def slot_without_a_request_is_planned(parts: Parts) -> None:
    parts.planner._catching_up[parts.free_slot] = parts.waiting()


def slot_decodes_two_tokens(parts: Parts) -> None:
    parts.slots.promised[parts.decoding] += 1


def rank_is_forgotten(parts: Parts) -> None:
    parts.planner._count_rank(parts.request(parts.decoding).rank, -1)


def too_many_plans_are_in_flight(parts: Parts) -> None:
    parts.scheduler._in_flight.extend([parts.scheduler._in_flight[0]] * 2)


MIXED_UP_PAGES = r"48 pages are free, cached or owned, 47 of them different; the pool has 48"
WRONG_LIST = r"slot \d is \d+ tokens behind and in the wrong list"
NOT_ONE_PLACE = "a live request is not in exactly one of queue and slots"

FAULTS: list[tuple[Callable[[Parts], None], str]] = [
    (page_in_two_nodes, "a page is in two nodes of the radix tree"),
    (free_list_has_a_tree_page, MIXED_UP_PAGES),
    (page_is_free_twice, "a page is in the free list twice"),
    (page_held_back_is_free_too, "a page is in the free list twice"),
    (free_page_does_not_exist, "free page out of range 0 … 47"),
    (page_is_lost, "47 pages are free, cached or owned, 47 of them different; the pool has 48"),
    (page_has_two_owners, r"48 pages are .*, 47 of them different"),
    (cached_page_has_an_owner, r"49 pages are .*, 48 of them different"),
    (row_is_too_short, "slot 0 has 5 pages for 11 tokens"),
    (row_is_too_long, r"slot \d has \d+ pages for \d+ tokens"),
    (row_maps_another_cached_page, r"slot \d shares pages that its path in the cache lacks"),
    (row_maps_pages_in_the_wrong_order, r"slot \d shares pages that its path in the cache lacks"),
    (shared_page_holds_other_ids, r"slot \d shares pages that hold other ids than its own"),
    (lock_too_many, r"a node of \d pages has 2 locks; 1 running requests go through it"),
    (lock_too_few, r"a node of \d pages has 0 locks; 1 running requests go through it"),
    (lock_on_an_idle_leaf, r"a node of \d pages has 1 locks; 0 running requests go through it"),
    (locked_node_left_the_tree, "a running request is locked on a node that left the tree"),
    (child_has_the_wrong_key, "a node is not its parent's child under its first page"),
    (child_has_another_parent, "locks; . running requests go through it"),
    (node_has_too_few_ids, r"a node has \d+ ids for \d+ pages"),
    (node_is_empty, "a node has 0 ids for 0 pages"),
    (tree_counts_a_page_too_many, r"the radix tree holds \d+ pages, .*; it counts"),
    (tree_counts_an_evictable_page_too_few, r"\d+ of them unlocked; it counts"),
    (leaf_is_not_queued, "eviction queue"),
    (eviction_queue_lost_an_entry, "an unlocked leaf is unknown to the eviction queue"),
    (slot_is_lost, "free and owned slots are not all slots"),
    (slot_is_free_and_owned, "a slot is free twice, or free and owned"),
    (slot_is_owned_twice, r"slot \d is owned twice"),
    (request_owns_two_slots, "a request owns two slots"),
    (planned_beyond_promised, r"slot \d: planned (\d+), promised \d+, known \d+, limit \d+"),
    (planned_below_zero, r"slot \d: planned -1"),
    (promised_three_beyond_known, r"slot \d: planned \d+, promised 14, known 11"),
    (promised_beyond_the_limit, r"slot \d: planned 11, promised 12, known 11, limit 11"),
    (known_beyond_promised, r"slot \d: planned 11, promised 12, known 13"),
    (live_request_is_nowhere, NOT_ONE_PLACE),
    (live_request_is_in_two_places, NOT_ONE_PLACE),
    (request_without_a_life_waits, NOT_ONE_PLACE),
    (running_request_thinks_it_waits, r"request \d is WAITING"),
    (waiting_request_thinks_it_runs, r"request \d is RUNNING"),
    (decoding_slot_is_forgotten, WRONG_LIST),
    (chunked_slot_is_forgotten, WRONG_LIST),
    (slot_decodes_and_catches_up, WRONG_LIST),
    (slot_without_a_request_is_planned, "a slot without a request is planned"),
    (slot_decodes_two_tokens, r"slot \d decodes 2 tokens at once"),
    (rank_is_forgotten, "the running requests' ranks are not"),
    (too_many_plans_are_in_flight, "3 plans in flight, 2 allowed"),
]


def test_the_state_that_the_faults_are_put_into_is_sound() -> None:
    Parts().scheduler.check_integrity()


@pytest.mark.parametrize(("fault", "text"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_noticed(fault: Callable[[Parts], None], text: str) -> None:
    parts = Parts()
    fault(parts)
    with pytest.raises(IntegrityError, match=text):
        parts.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("moves", "text"),
    [
        ([State.ENDED, State.RUNNING], "request 0: ENDED → RUNNING"),
        ([State.WAITING], "request 0: WAITING → WAITING"),
        ([State.RUNNING, State.RUNNING], "request 0: RUNNING → RUNNING"),
    ],
)
def test_an_illegal_move_tells_its_story(moves: list[State], text: str) -> None:
    harness = Harness(4)
    submit = harness.submits[harness.submit([1], 1)]
    request = Request(submit, None, 0.0, submit.token_ids)
    for state in moves[:-1]:
        request.move(state)
    with pytest.raises(IntegrityError, match=text):
        request.move(moves[-1])

"""What is computed once and what is never shared."""

import numpy as np
import pytest

from runtime.types import IntArray
from scheduler_proc.radix import RadixTree
from scheduler_proc.scheduler import Scheduler
from tests.scheduling import Harness


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def cached_pages(scheduler: Scheduler) -> set[int]:
    """The pages that the prefix cache owns."""
    nodes = [request.node for request in scheduler._slots.owners.values()]
    return set(scheduler._memory.cache.check_integrity(nodes).tolist())


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "cached"),
    [(1, 32, 31), (2, 32, 30), (16, 32, 16), (16, 33, 32), (32, 32, 0), (64, 32, 0)],
)
def test_of_a_prompt_cached_whole_the_last_token_is_computed_all_the_same(
    page_size: int, prompt_len: int, cached: int
) -> None:
    harness = Harness(300 // page_size, page_size=page_size)
    harness.ask(ids(prompt_len))
    harness.step()  # the plan made ahead
    num_cached = harness.scheduler.num_cached_pages
    num_plans = len(harness.plans)
    again = harness.ask(ids(prompt_len))
    assert harness.cached[again] == cached
    assert len(harness.plans[num_plans].out_loc) == prompt_len - cached
    harness.run()
    assert harness.scheduler.num_cached_pages == num_cached
    harness.run_and_check()


@pytest.mark.parametrize("steps_between", [0, 1])
def test_two_identical_long_prompts_keep_their_pages_once(steps_between: int) -> None:
    harness = Harness(20, page_size=16)
    harness.submit(ids(64), 20)
    for _ in range(steps_between):
        assert harness.plan() is not None
    second = harness.submit(ids(64), 20)
    assert harness.plan() is not None
    # Four pages of the prompt; a page for each one's outputs, if it has begun to decode.
    assert harness.scheduler.num_cached_pages == 4
    assert harness.scheduler.num_free_pages == 16 - (steps_between > 0)
    harness.step()
    harness.step()
    assert harness.scheduler.num_cached_pages == 4
    assert harness.pages_in_use == 2
    assert harness.cached[second] == 48
    harness.run_and_check()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_identical_prompts_in_chunks_are_computed_once(page_size: int, overlap: bool) -> None:
    harness = Harness(640 // page_size, page_size=page_size, max_extend_tokens=24, overlap=overlap)
    for _ in range(4):
        harness.submit(ids(100), 8)
    harness.run()
    computed = harness.scheduler.counters.prompt_computed
    assert computed <= 100 + 3 * (24 + page_size)
    assert computed + harness.scheduler.counters.prompt_cached == 400
    harness.run_and_check()


@pytest.mark.parametrize("num_pages", range(6, 13))
def test_identical_prompts_decode_on_while_the_pool_is_under_pressure(num_pages: int) -> None:
    harness = Harness(num_pages, page_size=16)
    for _ in range(2):
        harness.submit(ids(48), 30)
    for first in (100, 200, 300):
        harness.submit(ids(30, first), 30)
    harness.run_and_check()
    assert harness.scheduler.counters.prompt_cached >= 32
    assert not harness.late


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_next_turn_of_a_chat_finds_the_tokens_generated_before(page_size: int) -> None:
    harness = Harness(400 // page_size, page_size=page_size)
    prompt = ids(50)
    first = harness.ask(prompt, 30)
    said = harness.outputs[first]
    second = harness.ask([*prompt, *said, 1, 2, 3], 5)
    # The last token said was never computed.
    assert harness.cached[second] == (50 + 30 - 1) // page_size * page_size
    harness.run_and_check()


def test_an_aborted_prompt_leaves_what_was_computed_of_it() -> None:
    harness = Harness(100, page_size=1, max_extend_tokens=20)
    request = harness.submit(ids(50))
    harness.step()
    harness.abort(request)
    harness.run()
    again = harness.ask(ids(50))
    assert harness.cached[again] >= 20
    harness.run_and_check()


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_page_does_not_enter_the_cache_before_its_ids_are_known(page_size: int) -> None:
    harness = Harness(60, page_size=page_size)
    request = harness.submit(ids(5, 1))
    harness.plan()
    harness.plan()  # writes the cell of position 5; its id is not known before `answer`
    harness.abort(request)
    assert harness.scheduler.num_cached_pages == 5 // page_size
    # What an id not yet known looks like: 0.
    again = harness.ask([*ids(5, 1), 0, 99])
    assert harness.cached[again] == 5 // page_size * page_size
    harness.run_and_check()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cell_of_a_cached_page_is_never_written(page_size: int) -> None:
    # The pool is large, so that no page is evicted: what the cache has, it keeps.
    harness = Harness(6400 // page_size, page_size=page_size, max_extend_tokens=50)
    rng = np.random.default_rng(0)
    for _ in range(30):
        harness.submit(ids(int(rng.integers(1, 80)), int(rng.integers(0, 2))), 10)
        before = cached_pages(harness.scheduler)
        if (plan := harness.plan()) is not None:
            assert not before & set((plan.out_loc // page_size).tolist())
        if rng.random() < 0.7:
            harness.answer()
    harness.run_and_check()


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("answers", ["attend", "echo"])
def test_no_secret_crosses_from_one_request_to_another(page_size: int, answers: str) -> None:
    """Prompts that share a head and end in a secret, in a pool that evicts all the time."""
    said = []
    for cache_type in ("radix", "naive"):
        harness = Harness(
            256 // page_size,
            page_size=page_size,
            cache_type=cache_type,
            max_running_req=4,
            max_extend_tokens=40,
        )
        rng = np.random.default_rng(1)
        for secret in range(60):
            head = ids(int(rng.integers(5, 60)), int(rng.integers(0, 3)))
            harness.submit(head + [500 + secret] * int(rng.integers(1, 20)), 20)
        harness.run_and_check()
        said.append(harness.outputs)
    assert said[0] == said[1]


def test_the_naive_cache_keeps_nothing() -> None:
    harness = Harness(40, page_size=4, cache_type="naive")
    for _ in range(3):
        request = harness.ask(ids(50))
        assert harness.cached[request] == 0
    assert harness.scheduler.num_cached_pages == 0
    harness.run_and_check()


def test_flushing_frees_what_no_running_request_uses() -> None:
    harness = Harness(100, page_size=4)
    harness.ask(ids(40))
    running = harness.submit(ids(20), 10)
    harness.step()
    assert harness.flush_cache() == 5  # of ten; the running one holds the first five
    harness.run()
    assert harness.cached[running] == 16
    harness.run_and_check()


# ---- the tree alone -----------------------------------------------------------------------------


def array(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


def test_the_sequence_that_ended_last_is_evicted_last() -> None:
    """Its age was that of its admission: a long answer's pages went first, just when the next turn
    was to come.
    """
    tree = RadixTree(1)
    long_running = tree.insert(tree.root, array([1, 2]), array([10, 11])).node
    tree.lock(long_running, below=tree.root)
    tree.insert(tree.root, array([3]), array([12]))
    tree.unlock(long_running)
    assert tree.evict(1).tolist() == [12]


def test_a_leaf_is_evicted_from_its_end_and_before_its_parent() -> None:
    tree = RadixTree(2)
    tree.insert(tree.root, array([1, 1, 2, 2, 3, 3]), array([0, 1, 2]))
    tree.insert(tree.root, array([1, 1, 2, 2, 4, 4]), array([5, 6, 7]))
    assert [tree.evict(1).tolist() for _ in range(5)] == [[2], [7], [1], [0], []]


def test_a_match_ends_at_a_whole_page() -> None:
    tree = RadixTree(4)
    tree.insert(tree.root, array(ids(8)), array([3, 4]))
    assert tree.match(tree.root, array(ids(7))).pages.tolist() == [3]
    assert tree.match(tree.root, array([*ids(5), 9, 9, 9])).pages.tolist() == [3]
    assert tree.match(tree.root, array(ids(3))).pages.tolist() == []
    assert tree.match_length(array(ids(9))) == 8


def test_the_chunks_of_one_prompt_grow_one_node() -> None:
    tree = RadixTree(1)
    node = tree.insert(tree.root, array([0]), array([0])).node
    tree.lock(node, below=tree.root)
    for page in range(1, 50):
        assert tree.insert(node, array([page]), array([page])).node is node
    tree.check_integrity([node])

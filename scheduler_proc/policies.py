"""Who is admitted next, and who is retracted first.

No policy starves anybody. Of the requests that come after it, a waiting one is overtaken

    fcfs       by none
    lpm        by PATIENCE at most, counted from when it is the oldest
    priority   by those only that come before PATIENCE admissions have passed it by for each level
               that they are above it, and so by a bounded number: the queue is bounded; and once
               it runs, nobody of the level it has reached pushes it out again
"""

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from runtime.types import RequestId
from scheduler_proc.cache import PrefixCache
from scheduler_proc.request import Request

PATIENCE = 32
"""Admissions that may pass a request by before it counts for more."""
LPM_WINDOW = 128
"""How many of the waiting, oldest first, longest-prefix-first compares."""


class Policy(Protocol):
    """An order of the waiting requests.

    preempts: whether one that gets in no other way may push out a running one of a lower rank.
    """

    preempts: bool

    def joins(self, request: Request) -> None:
        """The request waits from now on."""

    def leaves(self, request: Request) -> None:
        """It waits no more."""

    def choose(self, waiting: Iterable[Request], num_admitted: int) -> Request:
        """The next to admit of `waiting`, which is in order of arrival and not empty: all that
        joined and did not leave.

        num_admitted: admissions so far.
        """

    def rank(self, request: Request, num_admitted: int) -> int:
        """What a running request weighs when pages are short: the lowest goes first."""


class FirstComeFirstServed:
    """By arrival."""

    preempts = False

    def joins(self, request: Request) -> None:
        return None

    def leaves(self, request: Request) -> None:
        return None

    def choose(self, waiting: Iterable[Request], num_admitted: int) -> Request:
        return next(iter(waiting))

    def rank(self, request: Request, num_admitted: int) -> int:
        return 0


class LongestPrefixFirst(FirstComeFirstServed):
    """By the number of prompt tokens that are cached already, then by arrival.

    Source: cache-aware scheduling of RadixAttention (SGLang, arXiv 2312.07104).
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._oldest: Request | None = None
        self._oldest_since = 0

    def choose(self, waiting: Iterable[Request], num_admitted: int) -> Request:
        window = list(islice(waiting, LPM_WINDOW))
        if window[0] is not self._oldest:
            self._oldest, self._oldest_since = window[0], num_admitted
        if num_admitted - self._oldest_since >= PATIENCE:
            return window[0]
        return max(window, key=self._num_cached)

    def _num_cached(self, request: Request) -> int:
        return self._cache.match_length(request.ids[: request.num_skippable])


class HighestPriorityFirst:
    """By priority, which grows by one for every PATIENCE admissions that a request has seen
    pass; among equals by arrival.

    All grow alike while they wait, so two that wait never change places, and of each priority
    only the oldest need be compared: a choice costs as many comparisons as there are priorities.
    """

    preempts = True

    def __init__(self) -> None:
        self._levels: dict[int, dict[RequestId, Request]] = {}
        """By priority: who waits, in order of arrival."""

    def joins(self, request: Request) -> None:
        level = self._levels.setdefault(request.submit.priority, {})
        level[request.id] = request
        if request.num_retractions:  # it takes its old place
            in_order = sorted(level.values(), key=lambda r: r.submit.arrival)
            self._levels[request.submit.priority] = {r.id: r for r in in_order}

    def leaves(self, request: Request) -> None:
        level = self._levels[request.submit.priority]
        del level[request.id]
        if not level:
            del self._levels[request.submit.priority]

    def choose(self, waiting: Iterable[Request], num_admitted: int) -> Request:
        oldest = (next(iter(level.values())) for level in self._levels.values())
        return max(oldest, key=_standing)

    def rank(self, request: Request, num_admitted: int) -> int:
        return request.submit.priority + (num_admitted - request.queued_at) // PATIENCE


def _standing(request: Request) -> tuple[int, int]:
    """Orders waiting requests of any age: the priority that they have grown to at any one time."""
    return request.submit.priority * PATIENCE - request.queued_at, -request.submit.arrival


def policy_of(name: str, cache: PrefixCache) -> Policy:
    """The policy that the option `policy` names."""
    if name == "lpm":
        return LongestPrefixFirst(cache)
    return HighestPriorityFirst() if name == "priority" else FirstComeFirstServed()

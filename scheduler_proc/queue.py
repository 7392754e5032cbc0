"""The requests that wait for a slot."""

from collections.abc import Iterator

from runtime.types import RequestId
from scheduler_proc.policies import Policy
from scheduler_proc.request import Request


class WaitingQueue:
    """Kept in order of arrival, in which a retracted request takes its old place; the policy
    chooses.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: dict[RequestId, Request] = {}
        """In order of arrival; a dict, so that an abort from the middle is O(1)."""
        self._head: Request | None = None
        """The policy's choice, until something changes."""
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """A new request waits behind all others. O(1)."""
        request.queued_at = self._num_admitted
        self._requests[request.id] = request
        self._policy.joins(request)
        self._head = None

    def put_back(self, request: Request) -> None:
        """A retracted request waits again, at its place by arrival. O(n), and rare."""
        requests = [*self._requests.values(), request]
        requests.sort(key=lambda r: r.submit.arrival)
        self._requests = {r.id: r for r in requests}
        self._policy.joins(request)
        self._head = None

    def head(self) -> Request:
        """Who is admitted next; the queue is not empty."""
        if self._head is None:
            self._head = self._policy.choose(self._requests.values(), self._num_admitted)
        return self._head

    def admit(self, request: Request) -> None:
        """The request gets a slot: it waits no more, and weighs what it has come to weigh."""
        request.rank = self._policy.rank(request, self._num_admitted)
        self._num_admitted += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """It ended while it waited. O(1)."""
        del self._requests[request.id]
        self._policy.leaves(request)
        self._head = None

    @property
    def may_preempt(self) -> bool:
        """Whether anybody waits who could push a running request out."""
        return self._policy.preempts and bool(self._requests)

    def preempts(self, rank: int) -> bool:
        """Whether the head, which gets in no other way, comes before a running request of
        `rank`.
        """
        return self.head().submit.priority > rank

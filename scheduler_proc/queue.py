"""The requests that wait for a slot, first come first served."""

from collections.abc import Iterator

from runtime.types import RequestId
from scheduler_proc.request import Request


class WaitingQueue:
    """Ordered by arrival: a retracted request stands before all that came after it."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, Request] = {}
        """In order of arrival; a dict, so that an abort from the middle is O(1)."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """A new request waits behind all others. O(1)."""
        self._requests[request.id] = request

    def put_back(self, request: Request) -> None:
        """A retracted request waits again, at its place by arrival. O(n), and rare."""
        requests = [*self._requests.values(), request]
        requests.sort(key=lambda r: r.submit.arrival)
        self._requests = {r.id: r for r in requests}

    def head(self) -> Request:
        """Who is admitted next. O(1)."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """It was admitted, or ended while it waited. O(1)."""
        del self._requests[request.id]

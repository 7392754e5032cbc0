"""Calls that the scheduler answers: Stats and FlushCache.

Rule: one Stats is with the scheduler at a time. Those that come meanwhile share the next one, so
that many cost the scheduler no more than few, and nobody hears what was true before its call.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from runtime.errors import Overloaded
from runtime.messages import FlushCache, Flushed, Stats, StatsReply
from runtime.types import RequestId

MAX_OPEN = 64
"""Of one client."""

Query = Stats | FlushCache
Caller = tuple[bytes, int]
"""A client and its number for the call."""


@dataclass(slots=True)
class _Asked:
    """What the scheduler was asked, and for whom."""

    query: Query
    callers: list[Caller] = field(default_factory=list)


class Queries:
    """The calls that wait, and what the scheduler is to be asked."""

    def __init__(self, new_id: Callable[[], RequestId]) -> None:
        self._new_id = new_id
        self._asked: dict[RequestId, _Asked] = {}
        self._is_stats_asked = False
        self._waiting: list[Caller] = []
        """Stats calls that came while one was asked."""
        self._num_open: Counter[bytes] = Counter()

    def add(self, client: bytes, call: Query) -> Query | None:
        """A client's call; what to ask the scheduler now. Overloaded if it has too many open."""
        if self._num_open[client] >= MAX_OPEN:
            raise Overloaded(
                f"{MAX_OPEN} calls of this connection wait for the scheduler already: wait for one"
            )
        self._num_open[client] += 1
        caller = (client, int(call.request))
        if isinstance(call, Stats) and self._is_stats_asked:
            self._waiting.append(caller)
            return None
        return self._ask(call, [caller])

    def answer(self, reply: StatsReply | Flushed) -> tuple[list[Caller], Query | None]:
        """Whom the scheduler's reply is for, and what to ask it next."""
        asked = self._asked.pop(reply.request, None)
        if asked is None:
            return [], None
        for client, _ in asked.callers:
            self._close(client)
        if isinstance(asked.query, FlushCache):
            return asked.callers, None
        self._is_stats_asked = False
        waiting, self._waiting = self._waiting, []
        return asked.callers, self._ask(asked.query, waiting) if waiting else None

    def forget(self, client: bytes) -> None:
        """The client is gone."""
        for asked in self._asked.values():
            asked.callers = [caller for caller in asked.callers if caller[0] != client]
        self._waiting = [caller for caller in self._waiting if caller[0] != client]
        del self._num_open[client]

    def callers(self) -> list[Caller]:
        """Everybody who waits."""
        asked = [caller for asked in self._asked.values() for caller in asked.callers]
        return asked + self._waiting

    def _ask(self, query: Query, callers: list[Caller]) -> Query:
        number = self._new_id()
        self._asked[number] = _Asked(query, callers)
        self._is_stats_asked |= isinstance(query, Stats)
        return replace(query, request=number)

    def _close(self, client: bytes) -> None:
        self._num_open[client] -= 1
        if not self._num_open[client]:
            del self._num_open[client]

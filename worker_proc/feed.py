"""The plans that wait for the worker, received and decoded while a step runs.

Between two steps the worker stands still, and what it does then, it does with cold caches: after a
step of 5 ms, receiving and decoding the next plan takes 65 µs, ten times what it takes in a loop.
So a thread does both beside the step that runs, and between two steps a plan is only picked up.
"""

import contextlib
import os
import threading
from collections import deque
from functools import partial
from types import TracebackType

from runtime.errors import ProtocolError
from runtime.messages import StepPlan
from runtime.transport import Poller, Socket, Transport


class PlanFeed:
    """Plans in the order in which they come. Filled by a thread of its own, which alone uses the
    inbox; everything else is for the thread that made it.
    """

    def __init__(self, transport: Transport, address: str, wire: str, other: Socket) -> None:
        """Bind `address` once entered. other: what `wait` waits for too."""
        self._bind = partial(transport.inbox, address, wire)
        self._items: deque[StepPlan | Exception] = deque()
        self._news, self._ring = os.pipe()
        self._stop, self._stopping = os.pipe()
        os.set_blocking(self._ring, False)
        self._poller = Poller(self._news, other)
        self._thread = threading.Thread(target=self._fill, name="feed", daemon=True)

    def __enter__(self) -> "PlanFeed":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the thread and its inbox, so that the transport may be closed."""
        os.close(self._stopping)
        self._thread.join()
        for end in (self._news, self._ring, self._stop):
            os.close(end)

    def wait(self) -> None:
        """Wait until something came since the last call, or the other socket can be read."""
        if self._news in self._poller.wait(None):
            os.read(self._news, 1 << 16)

    def take(self) -> StepPlan | None:
        """The next plan, if one is here; raises what has gone wrong with the wire."""
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    # ---- in the thread --------------------------------------------------------------------

    def _fill(self) -> None:
        try:
            inbox = self._bind()
            poller = Poller(inbox, self._stop)
            while self._stop not in poller.wait(None):
                for plan in inbox.drain():
                    if not isinstance(plan, StepPlan):
                        raise ProtocolError(
                            f"the scheduler sent a {type(plan).__name__} to a worker"
                        )
                    self._put(plan)
            inbox.close()
        except Exception as e:
            self._put(e)

    def _put(self, item: StepPlan | Exception) -> None:
        self._items.append(item)
        with contextlib.suppress(BlockingIOError):  # then it is readable already
            os.write(self._ring, b"\0")

"""What the worker exchanges with the scheduler, moved while a step runs.

Between two steps the worker stands still, and what it does then, it does with cold caches: after a
step of 5 ms, encoding a result or decoding a plan takes ten times what it takes in a loop. So a
thread does both beside the step that runs. Between two steps a result is only put down and a plan
only picked up.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from runtime.errors import ProtocolError
from runtime.messages import StepPlan, StepResult
from runtime.transport import Inbox, Outbox, Poller, Socket


class Exchange:
    """Plans in the order in which they come, results in the order in which they are given. A thread
    of its own makes and uses both wires; everything else is for the thread that made it.
    """

    def __init__(
        self, plans: Callable[[], Inbox], results: Callable[[], Outbox] | None, other: Socket
    ) -> None:
        """Make the wires once entered. results: None where another rank answers. other: what `wait`
        waits for too.
        """
        self._make_plans, self._make_results = plans, results
        self._plans: deque[StepPlan | Exception] = deque()
        self._results: deque[StepResult] = deque()
        self._news = _Bell()
        self._work = _Bell()
        self._other = other
        self._poller = Poller(self._news.heard, other)
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    def __enter__(self) -> "Exchange":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Send what was given, unless a wire has failed before; end the thread and its wires, so
        that the transport may be closed.
        """
        self._work.end()
        self._thread.join()
        self._news.end()
        for bell in (self._news, self._work):
            bell.close()

    def wait(self) -> bool:
        """Wait until something came since the last call, or the other socket can be read: whether
        it can.
        """
        ready = self._poller.wait(None)
        if self._news.heard in ready:
            self._news.hear()
        return self._other in ready

    def take(self) -> StepPlan | None:
        """The next plan, if one is here; raises what has gone wrong with a wire."""
        if not self._plans:
            return None
        item = self._plans.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def give(self, result: StepResult) -> None:
        """Have the result sent; where another rank answers it goes no further."""
        if self._make_results is not None:
            self._results.append(result)
            self._work.ring()

    # ---- in the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            plans = self._make_plans()
            results = self._make_results() if self._make_results is not None else None
            poller = Poller(plans, self._work.heard)
            goes_on = True
            while goes_on:
                ready = poller.wait(None)
                if self._work.heard in ready:
                    goes_on = self._work.hear()
                    self._send(results)
                if plans in ready:
                    self._receive(plans)
            plans.close()
            if results is not None:
                results.close()
        except Exception as e:
            self._put(e)

    def _send(self, results: Outbox | None) -> None:
        while results is not None and self._results:
            results.send(self._results.popleft())

    def _receive(self, plans: Inbox) -> None:
        for plan in plans.drain():
            if not isinstance(plan, StepPlan):
                raise ProtocolError(f"the scheduler sent a {type(plan).__name__} to a worker")
            self._put(plan)

    def _put(self, item: StepPlan | Exception) -> None:
        self._plans.append(item)
        self._news.ring()


class _Bell:
    """Wakes a poller of another thread: a pipe whose bytes mean nothing but that there is news.

    heard: the file descriptor to wait for.
    """

    def __init__(self) -> None:
        self.heard, self._rope = os.pipe()
        os.set_blocking(self._rope, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is readable already
            os.write(self._rope, b"\0")

    def hear(self) -> bool:
        """Make it wait for the next ring; False once nobody will ring again."""
        return bool(os.read(self.heard, 1 << 16))

    def end(self) -> None:
        """Ring for the last time."""
        os.close(self._rope)

    def close(self) -> None:
        os.close(self.heard)

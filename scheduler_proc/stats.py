"""What `stats` tells of the scheduler: its counters, its pool, and how the worker's time was
spent.
"""

import time

from runtime.messages import StepResult
from runtime.types import Json
from scheduler_proc.scheduler import Scheduler


class Clock:
    """The worker's time during and between steps, from the times in its results."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._bubble_s = 0.0
        self._num_steps = 0
        self._last_end_s: float | None = None
        self._moved_s = time.monotonic()

    def step_planned(self, step: int) -> None:
        """A plan was sent."""
        self._moved_s = time.monotonic()

    def step_ended(self, result: StepResult) -> None:
        """A result came; the worker was idle between the step before it and this one."""
        self._num_steps += 1
        self._busy_s += result.ended_s - result.started_s
        if self._last_end_s is not None:
            self._bubble_s += max(0.0, result.started_s - self._last_end_s)
        self._last_end_s = result.ended_s
        self._moved_s = time.monotonic()

    def went_idle(self) -> None:
        """Nothing is left to do: the time until the next plan is no bubble."""
        self._last_end_s = None

    def read(self) -> Json:
        return {
            "steps": self._num_steps,
            "worker_busy_s": self._busy_s,
            "worker_bubble_s": self._bubble_s,
            "since_last_move_s": time.monotonic() - self._moved_s,
        }


def stats(core: Scheduler, clock: Clock) -> Json:
    """The values behind `Client.stats()`; docs/interfaces.md explains each."""
    counters = core.counters
    return {
        "running": core.num_running,
        "waiting": core.num_waiting,
        "in_flight": core.num_in_flight,
        "pages": core.num_pages,
        "pages_free": core.num_free_pages,
        "pages_cached": core.num_cached_pages,
        "prompt_tokens_computed": counters.prompt_computed,
        "prompt_tokens_cached": counters.prompt_cached,
        "tokens_recomputed": counters.recomputed,
        "tokens_generated": counters.generated,
        "first_tokens": counters.first_tokens,
        "first_token_s": counters.first_token_s,
        "requests_ended": counters.ended,
        "retractions": counters.retractions,
        "prefill_steps": [list(entry) for entry in counters.prefill_steps],
        **clock.read(),
    }

"""A request as the scheduler knows it, and the moves that it may make."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from runtime.errors import IntegrityError
from runtime.messages import Submit
from runtime.types import IntArray, RequestId, Slot


class State(Enum):
    """Where a request is. docs/architecture.md draws the moves."""

    WAITING = auto()
    """In the queue: new, or retracted."""
    RUNNING = auto()
    """It owns a slot."""
    ENDED = auto()
    """Its one final message is sent."""


_MOVES = {
    (State.WAITING, State.RUNNING),  # admitted
    (State.RUNNING, State.WAITING),  # retracted
    (State.RUNNING, State.ENDED),  # stop, length, abort, deadline
    (State.WAITING, State.ENDED),  # abort, deadline, a stop string found after it was retracted
}


@dataclass(slots=True, eq=False)
class Request:
    """One live request. While it runs, its ids are in the slot table; while it waits, here."""

    submit: Submit
    deadline: float | None
    """Absolute, in the scheduler's monotonic seconds."""
    arrived_s: float
    """When it came, in the same seconds."""
    ids: IntArray
    """int32 [known]: prompt and outputs; what the slot table holds while running."""
    state: State = State.WAITING
    slot: Slot | None = None
    node: Any = None
    """The end of its locked path in the prefix cache, while it runs."""
    num_cached: int | None = None
    """Prompt tokens found in the cache when it was first admitted."""
    num_retractions: int = 0
    has_token: bool = False
    """Whether it has had an output token."""
    next_prompt_logprob: int = 1
    """If they are asked for: the first prompt token whose log probability is not told yet."""
    queued_at: int = 0
    """How many admissions there had been when it came."""
    rank: int = 0
    """While it runs: what its policy made of it when it was admitted; the lowest is retracted
    first.
    """

    @property
    def id(self) -> RequestId:
        return self.submit.request

    @property
    def prompt_len(self) -> int:
        return len(self.submit.token_ids)

    @property
    def num_skippable(self) -> int:
        """Known ids, from the first, that the cache may spare it from computing: all but the last,
        and none that log probabilities are still to be told from.
        """
        told = self.next_prompt_logprob
        if self.submit.sampling.prompt_logprobs is None or told >= self.prompt_len:
            return len(self.ids) - 1
        return told - 1

    @property
    def limit(self) -> int:
        """Most tokens, prompt and output, that it will have."""
        return self.prompt_len + (self.submit.sampling.max_tokens or 0)

    def move(self, state: State) -> None:
        """Change state; IntegrityError for a move that the table does not have."""
        if (self.state, state) not in _MOVES:
            raise IntegrityError(f"request {self.id}: {self.state.name} → {state.name}")
        self.state = state

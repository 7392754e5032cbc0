"""What the scheduler counts for `stats`."""

from collections import deque
from dataclasses import dataclass, field

RECENT_STEPS = 1000


@dataclass(slots=True)
class Counters:
    """Totals since the start, in tokens, steps and requests."""

    prompt_computed: int = 0
    """Prompt tokens computed for the first time."""
    prompt_cached: int = 0
    """Prompt tokens that came from the cache instead."""
    recomputed: int = 0
    """Prompt and output tokens computed again after a retraction."""
    generated: int = 0
    """Output tokens delivered."""
    first_tokens: int = 0
    """Requests whose first output token was sent to their tokenizer."""
    first_token_s: float = 0.0
    """From their arrival to that, summed up."""
    ended: int = 0
    retractions: int = 0
    prefill_steps: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    """(step, prompt tokens computed in it) of the last steps that computed any."""

    def count_prompt(self, step: int, num_tokens: int) -> None:
        """`num_tokens` of some prompt are computed in `step`."""
        self.prompt_computed += num_tokens
        if self.prefill_steps and self.prefill_steps[-1][0] == step:
            num_tokens += self.prefill_steps.pop()[1]
        self.prefill_steps.append((step, num_tokens))

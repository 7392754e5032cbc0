"""What a step gives the scheduler."""

from dataclasses import dataclass

import numpy as np

from runtime.logprobs import Logprobs
from runtime.messages import PromptLogprobs
from runtime.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan's results; the fields are those of StepResult."""

    tokens: IntArray
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


NOTHING = Answer(tokens=np.zeros(0, np.int32))
"""Of a plan that samples nothing."""

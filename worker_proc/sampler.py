"""From logits to tokens, by each slot's own parameters.

Rules: a token depends on its own row's logits, parameters, past, seed and position only, never on
the rows that ride along; a row pays only for what it asks, and one that asks for nothing but its
likeliest token is not seen here at all; log probabilities are of the logits as they come.
"""

from dataclasses import dataclass

import numpy as np
import torch

from runtime.errors import InternalError
from runtime.logprobs import Logprobs
from runtime.messages import SlotSetup
from runtime.types import BoolArray, IntArray
from worker_proc.drawing import Choices, Draw
from worker_proc.edits import Edits
from worker_proc.logprobs import logprobs_of
from worker_proc.philox import uniforms

#: Below this, dividing float32 logits by the temperature leaves one token: taken for greedy.
_GREEDY_BELOW = 1e-5
_NOT_ASKED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """tokens: int32 [r]. logprobs: theirs, of the rows that ask; None where none does."""

    tokens: IntArray
    logprobs: Logprobs | None


class Sampler:
    """Chooses the next token of each sampling row; keeps every slot's sampling parameters.

    token_table: int32 [num_slots, …], the worker's, for what depends on a sequence's past.
    draw: of whatever computes the model.
    """

    def __init__(self, token_table: IntArray, vocab_size: int, draw: Draw) -> None:
        num_slots = len(token_table)
        self._draw = draw
        self._token_table = token_table
        self._vocab_size = vocab_size
        self._needs_logits: BoolArray = np.zeros(num_slots, np.bool_)
        self._temperatures = np.zeros(num_slots, np.float64)
        self._top_ks = np.zeros(num_slots, np.int64)
        self._top_ps = np.ones(num_slots, np.float64)
        self._min_ps = np.zeros(num_slots, np.float64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._num_likeliest: IntArray = np.full(num_slots, _NOT_ASKED, np.int32)
        self._edits: list[Edits | None] = [None] * num_slots

    def set_slot(self, setup: SlotSetup) -> None:
        """From now on the slot samples as `setup` says; its seed is resolved if it draws at all."""
        slot, params = setup.slot, setup.sampling
        temperature = params.temperature or 0.0
        greedy = temperature < _GREEDY_BELOW
        if params.seed is None and not greedy:
            raise InternalError(f"slot {slot} samples at random but was given no seed")
        self._temperatures[slot] = 0.0 if greedy else temperature
        self._top_ks[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_ps[slot] = 1.0 if params.top_p is None else params.top_p
        self._min_ps[slot] = params.min_p or 0.0
        self._seeds[slot] = params.seed or 0
        asked = params.logprobs is not None
        self._num_likeliest[slot] = _NOT_ASKED if params.logprobs is None else params.logprobs
        edits = Edits.of(setup)
        self._edits[slot] = edits
        self._needs_logits[slot] = not greedy or asked or edits is not None

    def needs_logits(self, slots: IntArray) -> BoolArray:
        """Which of the slots `sample` must see; the others take the likeliest token. [r] -> [r]."""
        needs: BoolArray = self._needs_logits[slots]
        return needs

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """logits: float32 [r, vocab_size], which may be changed; slots, positions (of the new
        token) [r].
        """
        wanted = self._num_likeliest[slots]
        asked = np.flatnonzero(wanted != _NOT_ASKED)
        raw = logits[torch.from_numpy(asked)]  # a copy
        self._edit(logits, slots, positions)
        drawn = np.flatnonzero(self._temperatures[slots] > 0)
        tokens = np.empty(len(slots), np.int32)
        if len(drawn) < len(slots):
            tokens[:] = logits.argmax(-1).numpy()
        if len(drawn):
            rows = logits[torch.from_numpy(drawn)] if len(drawn) < len(slots) else logits
            tokens[drawn] = self._drawn(rows, slots[drawn], positions[drawn])
        if not len(asked):
            return Sampled(tokens=tokens, logprobs=None)
        logprobs = logprobs_of(raw, tokens[asked], wanted[asked])
        return Sampled(tokens=tokens, logprobs=logprobs.spread(wanted != _NOT_ASKED))

    def _edit(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> None:
        for row, slot in enumerate(slots):
            if (edits := self._edits[slot]) is not None:
                edits.apply(logits[row].numpy(), self._token_table[slot], int(positions[row]))

    def _drawn(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> IntArray:
        choices = Choices(
            temperatures=self._temperatures[slots],
            top_ks=self._top_ks[slots],
            top_ps=self._top_ps[slots],
            min_ps=self._min_ps[slots],
            points=uniforms(self._seeds[slots], positions),
        )
        return self._draw(logits, choices)

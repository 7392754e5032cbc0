"""A worker without a model: it answers every plan as a real one would, in a time and with tokens of
one's choosing.

It keeps the token table, the page table and the cells of a KV pool like any worker, so that a plan
which maps a wrong page, writes a cell twice or reuses one too early is found out.

It is as good as sure of its answer: temperature, filters and penalties don't change it. Where that
is banned (bad_token_ids, allowed_token_ids, min_tokens, a bias of -inf), the answer is the token of
the highest bias among the others, the lowest id of equals. Log probabilities are made up.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import IntegrityError
from runtime.logprobs import Logprobs
from runtime.messages import StepPlan
from runtime.types import IntArray
from worker_proc.answer import Answer
from worker_proc.batch import make_batch, ranges
from worker_proc.edits import Edits
from worker_proc.prompt_logprobs import PromptScorer

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_SURE = 1e30
"""A logit that no bias or penalty reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is simulated.

    answers: "random" draws from the request's seed and the position; "echo" repeats the prompt's
    ids, over and over; "attend" hashes every cell that attention would read, so that the tokens are
    right only if all the cells are.
    load_s: seconds until it is ready.
    step_s, token_s: seconds that a step takes, and more for each of its tokens.
    """

    vocab_size: int = 32000
    answers: str = "random"
    load_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0

    def step_time(self, num_tokens: int) -> float:
        """Seconds from a step's start to its end."""
        return self.step_s + self.token_s * num_tokens


class SimulatedEngine:
    """Executes plans on numbers that stand for keys and values."""

    def __init__(
        self,
        simulation: Simulation,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_seq_len: int,
    ) -> None:
        self._simulation = simulation
        self._page_size = page_size
        self.token_table: IntArray = np.zeros((num_slots, max_seq_len + 1), np.int32)
        self.page_table: IntArray = np.zeros((num_slots, -(-max_seq_len // page_size)), np.int32)
        self._cells = np.zeros(num_pages * page_size, np.uint64)
        self._prompt_lens = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._edits: list[Edits | None] = [None] * num_slots
        self._num_likeliest: list[int | None] = [None] * num_slots
        self._prompts = PromptScorer(self.token_table)

    def execute(self, plan: StepPlan) -> IntArray:
        """The sampled tokens in plan order, int32 [samples]."""
        return self.answer(plan).tokens

    def answer(self, plan: StepPlan) -> Answer:
        """As `execute`, with the log probabilities that are asked for."""
        self._apply_deltas(plan)
        batch = make_batch(plan)
        self._write_cells(plan, batch.token_slots, batch.positions)
        prompts = self._prompts.score(batch, lambda rows, ids, counts: self._made_up(ids, counts))
        slots, targets = batch.sample_slots, batch.sample_positions
        tokens = self._edited(self._answer(slots, targets), slots, targets)
        self.token_table[slots, targets] = tokens
        return Answer(
            tokens=tokens, logprobs=self._logprobs(tokens, slots), prompt_logprobs=prompts
        )

    def _apply_deltas(self, plan: StepPlan) -> None:
        for setup in plan.setups:
            self._prompt_lens[setup.slot] = setup.prompt_len
            self._seeds[setup.slot] = setup.sampling.seed or 0
            self._edits[setup.slot] = Edits.of(setup)
            self._num_likeliest[setup.slot] = setup.sampling.logprobs
            self._prompts.set_slot(setup)
        done = 0
        for slot, start, length in zip(
            plan.write_slots, plan.write_starts, plan.write_lens, strict=True
        ):
            self.token_table[slot, start : start + length] = plan.write_ids[done : done + length]
            done += length
        self.page_table[plan.page_slots, plan.page_indices] = plan.page_ids

    def _write_cells(self, plan: StepPlan, slots: IntArray, positions: IntArray) -> None:
        """Each cell becomes what its token and position spell."""
        if len(np.unique(plan.out_loc)) != len(plan.out_loc):
            raise IntegrityError(f"step {plan.step} writes a cell twice")
        self._cells[plan.out_loc] = _mix(positions, self.token_table[slots, positions])

    def _answer(self, slots: IntArray, targets: IntArray) -> IntArray:
        vocab_size = np.uint64(self._simulation.vocab_size)
        if self._simulation.answers == "echo":
            outputs = targets - self._prompt_lens[slots]
            echoed: IntArray = self.token_table[slots, outputs % self._prompt_lens[slots]]
            return echoed
        if self._simulation.answers == "random":
            return (_mix(targets, self._seeds[slots]) % vocab_size).astype(np.int32)
        sums = [self._attend(slot, int(end)) for slot, end in zip(slots, targets, strict=True)]
        return (np.array(sums, np.uint64) % vocab_size).astype(np.int32)

    def _edited(self, tokens: IntArray, slots: IntArray, targets: IntArray) -> IntArray:
        """The tokens, or what their requests have in place of them."""
        for index, slot in enumerate(slots):
            if (edits := self._edits[slot]) is not None:
                logits = np.zeros(self._simulation.vocab_size, np.float32)
                logits[tokens[index]] = _SURE
                edits.apply(logits, self.token_table[slot], int(targets[index]))
                tokens[index] = logits.argmax()
        return tokens

    def _logprobs(self, tokens: IntArray, slots: IntArray) -> Logprobs | None:
        asked = [self._num_likeliest[slot] for slot in slots]
        if all(count is None for count in asked):
            return None
        counts = [-1 if count is None else count for count in asked]
        return self._made_up(tokens, np.array(counts, np.int32))

    def _made_up(self, tokens: IntArray, num_likeliest: IntArray) -> Logprobs:
        """The token itself is the likeliest, the ids after it follow; the i-th has -1 - i."""
        counts = num_likeliest + 1
        places = ranges(np.zeros_like(counts), counts)  # 0, then the likeliest from 1 on
        ranks = np.maximum(places - 1, 0)
        ids = (np.repeat(tokens, counts) + ranks) % self._simulation.vocab_size
        return Logprobs(
            counts=counts, token_ids=ids.astype(np.int32), values=(-1.0 - ranks).astype(np.float32)
        )

    def _attend(self, slot: int, end: int) -> int:
        """A hash of the cells of positions 0 … end-1, read through the page table."""
        positions = np.arange(end)
        pages = self.page_table[slot, positions // self._page_size].astype(np.int64)
        return int(_fold(self._cells[pages * self._page_size + positions % self._page_size]))


def answer_alone(simulation: Simulation, prompt: IntArray, seed: int, num_tokens: int) -> list[int]:
    """The output ids that a request gets when nobody else is there: what every schedule must give
    it.
    """
    ids = [int(i) for i in prompt]
    vocab_size = simulation.vocab_size
    for index in range(num_tokens):
        if simulation.answers == "echo":
            ids.append(int(prompt[index % len(prompt)]))
        elif simulation.answers == "random":
            ids.append(int(_mix(np.array([len(ids)]), np.array([seed]))[0]) % vocab_size)
        else:
            cells = _mix(np.arange(len(ids)), np.array(ids))
            ids.append(int(_fold(cells)) % vocab_size)
    return ids[len(prompt) :]


def _mix(positions: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A well-spread uint64 of each (position, value)."""
    mixed = (positions.astype(np.uint64) << np.uint64(32)) ^ values.astype(np.uint64)
    for _ in range(2):
        mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    return mixed ^ (mixed >> _SHIFT)


def _fold(cells: npt.NDArray[np.uint64]) -> np.uint64:
    """One number of all cells; their order is in them already."""
    folded: np.uint64 = np.bitwise_xor.reduce(cells)
    return folded >> np.uint64(7)

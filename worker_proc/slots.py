"""What the worker keeps per slot: the token table, the page table and the sampling parameters."""

import numpy as np

from runtime.messages import StepPlan
from runtime.types import IntArray
from worker_proc.batch import ranges
from worker_proc.prompt_logprobs import PromptScorer
from worker_proc.sampler import Sampler


class SlotTables:
    """token_table: int32 [num_slots, max_seq_len + 1], by position; the last column takes the token
    that ends a full sequence. page_table: int32 [num_slots, max_pages]. Both start at 0.
    """

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int) -> None:
        self.token_table: IntArray = np.zeros((num_slots, max_seq_len + 1), np.int32)
        self.page_table: IntArray = np.zeros((num_slots, -(-max_seq_len // page_size)), np.int32)

    def apply(self, plan: StepPlan, sampler: Sampler, prompts: PromptScorer) -> None:
        """The plan's deltas, in the order of its fields: set-ups, token writes, pages."""
        for setup in plan.setups:
            sampler.set_slot(setup)
            prompts.set_slot(setup)
        # Most steps bring nothing new, and what is done before a step starts is idle time.
        if len(plan.write_ids):
            slots = np.repeat(plan.write_slots, plan.write_lens)
            self.token_table[slots, ranges(plan.write_starts, plan.write_lens)] = plan.write_ids
        if plan.pages.size:
            self.page_table[plan.page_slots, plan.page_indices] = plan.page_ids

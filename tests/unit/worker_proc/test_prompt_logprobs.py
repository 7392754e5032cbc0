"""Prompt log probabilities as plans compute prompts: each token once, few rows at a time."""

from typing import Any

import numpy as np
import pytest

from runtime.errors import InternalError
from runtime.logprobs import Logprobs
from runtime.messages import PromptLogprobs
from runtime.sampling import SamplingParams
from runtime.types import IntArray
from tests.plans import PlanMaker, set_up
from worker_proc.batch import make_batch
from worker_proc.prompt_logprobs import ROWS, PromptScorer

_ASKED = SamplingParams(prompt_logprobs=0)
_PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, 1000, 300)]


class Bench:
    """A scorer and every call for log probabilities that it made: (rows, tokens)."""

    def __init__(self) -> None:
        self.table = np.zeros((3, 400), np.int32)
        self.table[:, : len(_PROMPT)] = _PROMPT
        self.scorer = PromptScorer(self.table)
        self.calls: list[tuple[list[int], list[int]]] = []
        self.plans = PlanMaker(page_size=1)
        self.plans.rows = {slot: list(range(slot * 400, slot * 400 + 400)) for slot in range(3)}

    def set_slot(self, slot: int, params: SamplingParams = _ASKED, **others: Any) -> None:
        self.scorer.set_slot(set_up(slot, params, **{"prompt_len": len(_PROMPT), **others}))

    def step(self, *segments: tuple[int, int, int, bool]) -> tuple[PromptLogprobs, ...]:
        batch, before = make_batch(self.plans.plan(*segments)), len(self.calls)
        expected = self.scorer.asks_of(batch)
        news = self.scorer.score(batch, self._logprobs)
        assert expected or len(self.calls) == before
        return news

    def _logprobs(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> Logprobs:
        assert len(rows) <= ROWS
        self.calls.append((rows.tolist(), tokens.tolist()))
        values = np.zeros(len(rows), np.float32)
        return Logprobs(counts=counts + 1, token_ids=tokens, values=values)


def _told(news: list[PromptLogprobs]) -> list[int]:
    return [int(i) for part in news for i in part.logprobs.token_ids]


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 300])
def test_every_token_from_the_second_on_is_told_once_whatever_the_chunks(chunk: int) -> None:
    bench, news = Bench(), []
    bench.set_slot(1)
    for start in range(0, len(_PROMPT), chunk):
        length = min(chunk, len(_PROMPT) - start)
        news += bench.step((1, start, length, start + length == len(_PROMPT)))
    assert _told(news) == _PROMPT[1:]
    assert [part.start for part in news] == [1 + min(i * chunk, 299) for i in range(len(news))]
    assert bench.step((1, len(_PROMPT), 1, True)) == ()


def test_rows_are_those_of_the_tokens_before_in_a_step_with_others() -> None:
    bench = Bench()
    bench.set_slot(0, SamplingParams())
    bench.set_slot(2)
    (news,) = bench.step((0, 0, 10, False), (2, 0, 4, False))
    assert bench.calls == [([10, 11, 12, 13], _PROMPT[1:5])]
    assert (news.request, news.start) == (2, 1)


def test_a_request_that_comes_back_is_told_on_from_where_it_was() -> None:
    bench = Bench()
    bench.set_slot(0, first_prompt_logprob=120)
    assert bench.step((0, 0, 100, False)) == ()
    assert _told(list(bench.step((0, 100, 200, True)))) == _PROMPT[120:]
    bench.set_slot(0, first_prompt_logprob=len(_PROMPT))
    assert bench.step((0, 0, 300, True)) == ()


def test_outputs_of_a_request_that_comes_back_are_no_prompt() -> None:
    bench = Bench()
    bench.set_slot(0, prompt_len=20)
    assert _told(list(bench.step((0, 0, 30, True)))) == _PROMPT[1:20]


def test_a_slot_that_changes_hands_forgets_its_prompt() -> None:
    bench = Bench()
    bench.set_slot(0)
    bench.step((0, 0, 10, False))
    bench.set_slot(0, SamplingParams())
    assert bench.step((0, 0, 10, False)) == ()


def test_a_prompt_that_was_skipped_is_our_fault() -> None:
    bench = Bench()
    bench.set_slot(0)
    with pytest.raises(InternalError, match="prompt token 1 was to be told"):
        bench.step((0, 5, 10, False))


def test_a_step_without_a_prompt_to_be_told_is_not_asked_of() -> None:
    bench = Bench()
    bench.set_slot(1)
    plans = bench.plans
    assert not bench.scorer.asks_of(make_batch(plans.plan((0, 0, 4, False), (2, 0, 1, True))))
    assert bench.scorer.asks_of(make_batch(plans.plan((0, 0, 4, False), (1, 0, 1, False))))

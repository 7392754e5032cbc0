"""Penalties, biases and bans against a plain float64 model that knows the whole sequence."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sampling import SamplingParams
from tests.plans import int32, set_up
from worker_proc.edits import Edits
from worker_proc.history import History

_VOCAB = 40
_IDS = st.integers(0, _VOCAB - 1)
_PAST = st.lists(_IDS, min_size=1, max_size=30)


def _edits(prompt_len: int, stop_ids: tuple[int, ...] = (), **asked: Any) -> Edits:
    setup = set_up(0, SamplingParams(**asked), prompt_len=prompt_len, stop_ids=stop_ids)
    edits = Edits.of(setup)
    assert edits is not None
    return edits


def _logits(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 3, _VOCAB).astype(np.float32)


def _by_hand(logits: Any, past: list[int], prompt_len: int, params: SamplingParams) -> Any:
    """Token by token, in the order that the documentation gives."""
    edited, counts = logits.astype(np.float64), Counter(past[prompt_len:])
    for entry in params.logit_bias:
        edited[entry.token] += entry.bias
    for token in range(_VOCAB):
        if token in past:
            repetition = params.repetition_penalty or 1.0
            edited[token] *= repetition if edited[token] < 0 else 1 / repetition
        edited[token] -= params.frequency_penalty * counts[token]
        edited[token] -= params.presence_penalty * (counts[token] > 0)
        allowed = params.allowed_token_ids
        if token in params.bad_token_ids or (allowed is not None and token not in allowed):
            edited[token] = -np.inf
    return edited


@given(
    past=_PAST,
    prompt_share=st.floats(0, 1),
    repetition=st.floats(0.5, 2),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    biases=st.dictionaries(_IDS, st.floats(-100, 100) | st.just(-np.inf), max_size=4),
    allowed=st.none() | st.lists(_IDS, min_size=1, max_size=5),
    bad=st.lists(_IDS, max_size=5),
)
def test_edits_are_those_of_a_plain_model(
    past: list[int], prompt_share: float, repetition: float, frequency: float, presence: float,
    biases: dict[int, float], allowed: list[int] | None, bad: list[int],
) -> None:  # fmt: skip
    prompt_len = max(1, round(prompt_share * len(past)))
    asked: dict[str, Any] = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "logit_bias": biases,
        "allowed_token_ids": allowed,
        "bad_token_ids": bad,
        "min_tokens": 1,
    }
    edits, row = _edits(prompt_len, **asked), int32([*past, 0])
    # Token by token as a request is sampled, and at once as after a retraction.
    for start in (prompt_len, len(past)):
        for position in range(start, len(past) + 1):
            logits = _logits(position)
            expected = _by_hand(logits, past[:position], prompt_len, SamplingParams(**asked))
            edits.apply(logits, row, position)
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        edits = _edits(prompt_len, **asked)


@given(past=_PAST, prompt_len=st.integers(1, 30), looks=st.lists(st.integers(1, 30), max_size=6))
def test_a_history_is_what_the_row_says_however_often_it_looked(
    past: list[int], prompt_len: int, looks: list[int]
) -> None:
    history, row = History(prompt_len), int32(past)
    for end in sorted({min(look, len(past)) for look in looks} | {len(past)}):
        history.catch_up(row, end)
        outputs = Counter(past[prompt_len:end])
        found = dict(zip(history.tokens.tolist(), history.counts.tolist(), strict=True))
        assert found == {token: outputs[token] for token in past[:end]}


def test_ends_are_banned_until_there_are_min_tokens() -> None:
    edits = _edits(3, (5, 7), min_tokens=2)
    for position, banned in ((3, [5, 7]), (4, [5, 7]), (5, [])):
        logits = _logits()
        edits.apply(logits, int32([1] * 9), position)
        assert np.flatnonzero(np.isneginf(logits)).tolist() == banned


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1, top_k=3, top_p=0.5, min_p=0.1),
        SamplingParams(repetition_penalty=1.0, stop_token_ids=(3,), logprobs=2),
    ],
)
def test_a_request_that_leaves_its_logits_alone_has_no_edits(params: SamplingParams) -> None:
    assert Edits.of(set_up(0, params, prompt_len=3, stop_ids=(3,))) is None

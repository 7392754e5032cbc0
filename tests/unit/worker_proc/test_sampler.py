"""The sampler against a plain float64 one, row by row, and alone against in company."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import InternalError
from runtime.sampling import SamplingParams
from tests.plans import int32, set_up
from worker_proc.drawing import draw_by_torch
from worker_proc.filters import inverse_cdf, keep_likely
from worker_proc.logprobs import logprobs_of
from worker_proc.philox import uniforms
from worker_proc.sampler import Sampler

_VOCAB = 3000


def _sampler(*params: SamplingParams, vocab_size: int = _VOCAB) -> Sampler:
    sampler = Sampler(np.zeros((len(params), 64), np.int32), vocab_size, draw_by_torch)
    for slot, given in enumerate(params):
        sampler.set_slot(set_up(slot, given))
    return sampler


def _logits(rows: int, seed: int = 0, scale: float = 2.0, vocab_size: int = _VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


def _by_hand(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """One row: ranked by weight, then id; cut at top_k, then at top_p; drawn in order of id."""
    params = params.with_defaults(SamplingParams())
    wide = logits.double().numpy()
    weights = np.exp((wide - wide.max()) / params.temperature)
    order = np.lexsort((np.arange(len(weights)), -weights))[: params.top_k or None]
    sums = weights[order].cumsum()
    order = order[: int((sums < params.top_p * sums[-1]).sum()) + 1]
    order = order[weights[order] >= params.min_p]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    point = uniforms(np.array([params.seed], np.uint64), int32([position]))[0]
    return int(np.flatnonzero(kept.cumsum() > point * kept.sum())[0])


def _tokens(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int) -> list[int]:
    positions = int32([position] * len(slots))
    return [int(token) for token in sampler.sample(logits, int32(slots), positions).tokens]


#: The first is the prompt.
_PAST = [1, 2, 2, 3]


def _distribution(logits: Any, params: SamplingParams) -> Any:
    """The probabilities of 12 tokens after _PAST, in float64."""
    params, outputs = params.with_defaults(SamplingParams()), np.bincount(_PAST[1:], minlength=12)
    for entry in params.logit_bias:
        logits[entry.token] += entry.bias
    past = np.isin(np.arange(12), _PAST)
    repeated = np.where(logits > 0, logits / params.repetition_penalty,
                        logits * params.repetition_penalty)  # fmt: skip
    logits = np.where(past, repeated, logits) - params.frequency_penalty * outputs
    logits -= params.presence_penalty * (outputs > 0)
    if params.allowed_token_ids is not None:
        logits[~np.isin(np.arange(12), params.allowed_token_ids)] = -np.inf
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights)[: params.top_k or None]
    order = order[: int((weights[order].cumsum() < params.top_p * weights[order].sum()).sum()) + 1]
    order = order[weights[order] >= params.min_p]
    kept = np.zeros(12)
    kept[order] = weights[order]
    return kept / kept.sum()


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, _VOCAB)
    logits[0, [2999, 17, 400]] = 3.0
    sampler = _sampler(SamplingParams(), SamplingParams(temperature=1e-9))
    assert _tokens(sampler, logits, [0, 1], 0) == [17, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.3, seed=2**63 - 1),
        SamplingParams(temperature=1.0, top_k=1, seed=3),
        SamplingParams(temperature=1.5, top_k=40, seed=4),
        SamplingParams(temperature=1.5, top_k=2000, seed=5),
        SamplingParams(temperature=1.5, top_k=2000, top_p=0.8, seed=5),
        SamplingParams(temperature=1.0, top_p=0.5, seed=6),
        SamplingParams(temperature=9.0, top_p=0.95, seed=7),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.7, seed=8),
        SamplingParams(temperature=1.0, top_k=10**6, top_p=1e-9, seed=9),
        SamplingParams(temperature=1.5, min_p=0.03, seed=10),
        SamplingParams(temperature=1.5, min_p=0.2, top_k=30, top_p=0.9, seed=11),
        SamplingParams(temperature=1e6, min_p=0.9999, seed=12),
        SamplingParams(temperature=1e-4, seed=13),
    ],
    ids=str,
)
def test_tokens_equal_a_plain_float64_sampler(params: SamplingParams) -> None:
    logits = _logits(30)
    sampler = _sampler(params)
    for position, row in enumerate(logits):
        found = _tokens(sampler, row[None], [0], position)
        assert found == [_by_hand(row, params, position)], position


#: Each as extreme as may be, for its neighbours to bear.
_COMPANY = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=2.0, top_p=0.9, seed=2),
    SamplingParams(temperature=3.0, top_k=2500, top_p=0.99, seed=3),
    SamplingParams(temperature=1.0, top_k=7, seed=4),
    SamplingParams(temperature=1e-10, seed=5),
    SamplingParams(temperature=1e6, seed=6),
    SamplingParams(temperature=1.0, top_p=1e-9, seed=7),
    SamplingParams(temperature=1.0, min_p=1.0, seed=8),
    SamplingParams(temperature=1e6, logit_bias=dict.fromkeys(range(900), -np.inf), seed=9),  # type: ignore[arg-type]
    SamplingParams(temperature=1.0, allowed_token_ids=(5,), seed=10),
    SamplingParams(bad_token_ids=tuple(range(2999)), logprobs=20),
    SamplingParams(temperature=0.7, repetition_penalty=100, frequency_penalty=-2, seed=11),
    SamplingParams(temperature=1.0, repetition_penalty=0.01, presence_penalty=2, seed=12),
    SamplingParams(logprobs=3),
]


def test_rows_do_not_depend_on_who_rides_along() -> None:
    count = len(_COMPANY)
    logits = _logits(count, seed=3)

    def sampled(order: list[int]) -> list[int]:
        sampler = _sampler(*_COMPANY)
        return _tokens(sampler, logits[order], order, 11)

    alone = [sampled([slot])[0] for slot in range(count)]
    assert sampled(list(range(count))) == alone
    shuffled = [int(slot) for slot in np.random.default_rng(1).permutation(count)]
    assert sampled(shuffled) == [alone[slot] for slot in shuffled]


def test_rows_that_nothing_can_be_drawn_from_harm_nobody() -> None:
    """NaN, or -inf everywhere: a broken model's; a request's own are refused."""
    params = [SamplingParams(temperature=1.0, seed=n, top_p=0.9) for n in range(3)]
    logits = _logits(3)
    expected = _tokens(_sampler(*params), logits[:1].clone(), [0], 5)
    for broken in (float("nan"), -float("inf")):
        logits[1:] = broken
        found = _tokens(_sampler(*params), logits.clone(), [0, 1, 2], 5)
        assert found[:1] == expected
        assert all(0 <= token < _VOCAB for token in found)


def test_only_slots_that_ask_for_more_need_their_logits() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1e-10),
        SamplingParams(stop_token_ids=(3,), top_k=4, top_p=0.5),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(logprobs=0),
        SamplingParams(min_tokens=1),
        SamplingParams(repetition_penalty=1.1),
    ]
    needs = _sampler(*params).needs_logits(int32(range(7)))
    assert needs.tolist() == [False] * 3 + [True] * 4


def test_a_slot_that_changes_hands_keeps_nothing() -> None:
    sampler = _sampler(SamplingParams(bad_token_ids=(1,), logprobs=3, temperature=1.0, seed=3))
    sampler.set_slot(set_up(0, SamplingParams()))
    assert not sampler.needs_logits(int32([0])).any()
    logits = torch.zeros(1, _VOCAB)
    logits[0, 1] = 3.0
    sampled = sampler.sample(logits, int32([0]), int32([4]))
    assert (sampled.tokens.tolist(), sampled.logprobs) == ([1], None)


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = _logits(4)
    params = [
        SamplingParams(),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0.3, seed=4, logprobs=5, logit_bias={7: 50.0}),  # type: ignore[arg-type]
        SamplingParams(bad_token_ids=(int(logits[3].argmax()),), logprobs=2),
    ]
    expected = logits.double().log_softmax(-1)
    sampled = _sampler(*params).sample(logits.clone(), int32(range(4)), int32([3] * 4))
    assert sampled.logprobs is not None
    assert sampled.logprobs.counts.tolist() == [0, 1, 6, 3]
    for row, part in enumerate(sampled.logprobs.split()):
        if part is None:
            continue
        ids = part.token_ids.tolist()
        assert ids[0] == sampled.tokens[row]
        assert ids[1:] == expected[row].topk(len(ids) - 1).indices.tolist()
        np.testing.assert_allclose(part.values, expected[row][ids].numpy(), atol=1e-5)
    assert sampled.tokens[2] == 7


def test_equally_likely_tokens_are_told_lowest_id_first() -> None:
    logits = torch.zeros(1, _VOCAB)
    logits[0, [40, 7, 300]] = 2.0
    told = logprobs_of(logits, int32([40]), int32([3]))
    assert told.token_ids.tolist() == [40, 7, 40, 300]


def test_equal_weights_are_kept_lowest_id_first() -> None:
    weights = torch.ones(1, 50)
    kept = keep_likely(weights, torch.tensor([3]), torch.tensor([1.0], dtype=torch.float64))
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.5, seed=6),
        SamplingParams(temperature=1.7, top_k=5, seed=7),
        SamplingParams(temperature=1.0, top_p=0.8, seed=8),
        SamplingParams(temperature=1.0, min_p=0.2, seed=9),
        SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.5, seed=10),
        SamplingParams(temperature=0.8, repetition_penalty=1.6, seed=10),
        SamplingParams(temperature=1.0, logit_bias={3: 1.0, 4: -np.inf}, seed=11),  # type: ignore[arg-type]
        SamplingParams(temperature=1.0, allowed_token_ids=(0, 3, 9), seed=12),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square against the distribution in float64: each draw has a seed of its own."""
    draws = 6000
    logits = _logits(1, seed=2, scale=1.0, vocab_size=12)
    table = np.tile(int32([*_PAST, 0, 0]), (draws, 1))
    sampler = Sampler(table, 12, draw_by_torch)
    for slot in range(draws):
        sampler.set_slot(set_up(slot, replace(params, seed=slot), prompt_len=1))
    slots, positions = np.arange(draws, dtype=np.int32), np.full(draws, len(_PAST), np.int32)
    tokens = sampler.sample(logits.expand(draws, -1).clone(), slots, positions).tokens
    counts = np.bincount(tokens, minlength=12)
    expected = _distribution(logits[0].double().numpy(), params) * draws
    seen = expected > 0
    assert not counts[~seen].any()
    statistic = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    # Wilson and Hilferty: the cube root of chi-square by its freedom is nearly normal.
    spread = 2 / (9 * (seen.sum() - 1))
    deviations = ((statistic / (seen.sum() - 1)) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)
    assert deviations < 3.5, (counts, expected)


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(3, -1)
    points = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, points).tolist() == [1, 3, 3]


def test_a_draw_without_a_seed_is_our_fault() -> None:
    with pytest.raises(InternalError, match="no seed"):
        _sampler(SamplingParams(temperature=1.0))

"""The sampler against a plain float64 one, row by row, and alone against in company."""

import numpy as np
import pytest
import torch

from runtime.errors import InternalError
from runtime.sampling import SamplingParams
from tests.plans import int32, set_up
from worker_proc.filters import inverse_cdf, keep_likely
from worker_proc.philox import uniforms
from worker_proc.sampler import Sampler

_VOCAB = 3000


def _sampler(*params: SamplingParams, vocab_size: int = _VOCAB) -> Sampler:
    sampler = Sampler(np.zeros((len(params), 64), np.int32), vocab_size)
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
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    point = uniforms(np.array([params.seed], np.uint64), int32([position]))[0]
    return int(np.flatnonzero(kept.cumsum() > point * kept.sum())[0])


def _tokens(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int) -> list[int]:
    positions = int32([position] * len(slots))
    return [int(token) for token in sampler.sample(logits, int32(slots), positions).tokens]


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
    ],
    ids=str,
)
def test_tokens_equal_a_plain_float64_sampler(params: SamplingParams) -> None:
    logits = _logits(30)
    sampler = _sampler(params)
    for position, row in enumerate(logits):
        found = _tokens(sampler, row[None], [0], position)
        assert found == [_by_hand(row, params, position)], position


def test_rows_do_not_depend_on_who_rides_along() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=2.0, top_p=0.9, seed=2),
        SamplingParams(temperature=3.0, top_k=2500, top_p=0.99, seed=3),
        SamplingParams(temperature=1.0, top_k=7, seed=4),
    ]
    sampler, logits = _sampler(*params), _logits(5, seed=3)
    alone = [_tokens(sampler, logits[i : i + 1], [i], 11)[0] for i in range(5)]
    assert _tokens(sampler, logits, [0, 1, 2, 3, 4], 11) == alone
    order = [3, 0, 4, 2]
    assert _tokens(sampler, logits[order], order, 11) == [alone[i] for i in order]


def test_equal_weights_are_kept_lowest_id_first() -> None:
    weights = torch.ones(1, 50)
    kept = keep_likely(weights, torch.tensor([3]), torch.tensor([1.0], dtype=torch.float64))
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, -1)
    sampler = _sampler(SamplingParams(temperature=1.0, seed=5), vocab_size=4)
    positions = np.arange(4000, dtype=np.int32)
    tokens = sampler.sample(logits, np.zeros(4000, np.int32), positions).tokens
    shares = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(shares, torch.softmax(logits[0], 0).numpy(), atol=0.03)


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(3, -1)
    points = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, points).tolist() == [1, 3, 3]


def test_a_draw_without_a_seed_is_our_fault() -> None:
    with pytest.raises(InternalError, match="no seed"):
        _sampler(SamplingParams(temperature=1.0))

"""Native draws against a plain float64 sampler and torch's, on every variant that this processor
runs.
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tvm_ffi import Module

from runtime.types import IntArray
from worker_proc.drawing import Choices, draw_by_torch
from worker_proc.native import build

_VARIANTS = {variant.name: variant for variant in build.runnable()}
_SIZES = (1, 7, 33, 3001)
_LAST = 1 - 2.0**-53
"""The largest point."""
_ROUNDING = 3e-6
"""Of a float32 weight and of its share in the sum, with logits up to 20 below the largest."""

Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module", params=list(_VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Module:
    return build.load(_VARIANTS[request.param])


def drawn(kernels: Module, logits: torch.Tensor, choices: Choices, threads: int = 1) -> IntArray:
    tokens = np.full(len(logits), -1, np.int32)
    stacked = torch.from_numpy(choices.stacked())
    kernels.draw(logits, stacked, torch.from_numpy(tokens), threads)
    return tokens


def each(
    points: Floats,
    temperature: float = 1.0,
    top_k: int = 10**6,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Choices:
    """For every point, by the same filters."""
    rows = len(points)
    return Choices(
        temperatures=np.full(rows, temperature),
        top_ks=np.full(rows, top_k),
        top_ps=np.full(rows, top_p),
        min_ps=np.full(rows, min_p),
        points=points,
    )


def stepped(vocab_size: int, temperature: float, seed: int = 0) -> torch.Tensor:
    """Logits of which many are equal, and no two others so near that a weight's rounding may swap
    them; a tenth are banned.
    """
    rng = np.random.default_rng(seed)
    steps = np.minimum(rng.geometric(0.03, vocab_size), 150)
    logits = -steps / 8 * temperature
    logits[rng.random(vocab_size) < 0.1] = -np.inf
    logits[rng.integers(vocab_size)] = 0.0
    return torch.from_numpy(logits.astype(np.float32))


def kept_weights(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Floats:
    """Plainly: ranked by weight, then id; cut at top_k, then at top_p. Zero for what is dropped."""
    wide = logits.double().numpy()
    weights = np.exp((wide - wide.max()) / temperature)
    order = np.lexsort((np.arange(len(weights)), -weights))[:top_k]
    sums = weights[order].cumsum()
    order = order[: int((sums < top_p * sums[-1]).sum()) + 1]
    order = order[weights[order] >= min_p]
    kept: Floats = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1e6])
@pytest.mark.parametrize("vocab_size", _SIZES)
def test_what_may_be_drawn_equals_a_plain_float64_model(
    kernels: Module, vocab_size: int, temperature: float
) -> None:
    """Points just within both ends of a kept token's share show what is kept too much or too little
    before it. In a large vocabulary of every few tokens only.
    """
    logits = stepped(vocab_size, temperature)
    for top_k in sorted({1, 2, 5, vocab_size // 2 + 1, max(vocab_size - 1, 1), vocab_size}):
        for top_p in (1e-9, 0.3, 0.9011, 0.99, 1.0):
            for min_p in (0.0, 0.01, 0.77, 1.0):
                kept = kept_weights(logits, temperature, top_k, top_p, min_p)
                ids = np.flatnonzero(kept)
                ends = kept.cumsum()[ids] / kept.sum()
                starts = np.concatenate(([0.0], ends[:-1]))
                wide = np.flatnonzero(ends - starts > 4 * _ROUNDING)
                wide = wide[:: len(wide) // 40 + 1]
                low, high = starts[wide] + _ROUNDING, ends[wide] - _ROUNDING
                choices = each(np.concatenate((low, high)), temperature, top_k, top_p, min_p)
                tokens = drawn(
                    kernels, logits.expand(len(choices.points), -1).contiguous(), choices
                )
                expected = np.tile(ids[wide], 2)
                assert tokens.tolist() == expected.tolist(), (top_k, top_p, min_p)


def test_equal_weights_are_kept_lowest_id_first(kernels: Module) -> None:
    logits = torch.zeros(64, 3001)
    points = (np.arange(64) + 0.5) / 64
    assert set(drawn(kernels, logits, each(points, top_k=3))) == {0, 1, 2}
    assert set(drawn(kernels, logits, each(points, top_p=3 / 3001))) == {0, 1, 2}
    assert set(drawn(kernels, logits, each(points, top_k=1500, top_p=2 / 1500))) == {0, 1}


def test_the_first_and_the_last_point_draw_the_first_and_the_last_kept(kernels: Module) -> None:
    logits = torch.full((2, 3001), -float("inf"))
    logits[:, [5, 1024, 2047]] = 0.0
    points = np.array([0.0, _LAST])
    assert drawn(kernels, logits, each(points)).tolist() == [5, 2047]
    assert drawn(kernels, logits, each(points, top_k=2)).tolist() == [5, 1024]


def mixed(rows: int, seed: int = 1) -> Choices:
    """Rows of every kind, some with no limit."""
    rng = np.random.default_rng(seed)
    return Choices(
        temperatures=10 ** rng.uniform(-1, 1, rows),
        top_ks=np.where(rng.random(rows) < 0.5, rng.integers(1, 3001, rows), 3001),
        top_ps=np.where(rng.random(rows) < 0.5, rng.random(rows) * 0.999 + 1e-3, 1.0),
        min_ps=np.where(rng.random(rows) < 0.3, rng.random(rows) * 0.5, 0.0),
        points=rng.random(rows),
    )


def test_a_token_is_torchs_but_where_the_point_lies_on_a_border(kernels: Module) -> None:
    rows = 400
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, 3001, generator=generator) * 2
    choices = mixed(rows)
    ours, torchs = drawn(kernels, logits, choices), draw_by_torch(logits, choices)
    for row in np.flatnonzero(ours != torchs):
        kept = kept_weights(
            logits[row],
            choices.temperatures[row],
            int(choices.top_ks[row]),
            choices.top_ps[row],
            choices.min_ps[row],
        )
        first, second = sorted((ours[row], torchs[row]))
        assert not kept[first + 1 : second].any(), row
        border = kept[: first + 1].sum() / kept.sum()
        assert abs(border - choices.points[row]) < _ROUNDING, row
    assert (ours != torchs).sum() < 4


def part(choices: Choices, rows: slice) -> Choices:
    return Choices(
        temperatures=choices.temperatures[rows],
        top_ks=choices.top_ks[rows],
        top_ps=choices.top_ps[rows],
        min_ps=choices.min_ps[rows],
        points=choices.points[rows],
    )


def test_a_rows_token_is_the_same_alone_in_company_and_with_any_threads(kernels: Module) -> None:
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(6)) * 3
    logits[7], logits[9, ::3] = float("nan"), float("nan")
    logits[20], logits[30] = -float("inf"), float("inf")
    choices = mixed(40, seed=2)
    alone = [
        int(drawn(kernels, logits[row : row + 1], part(choices, slice(row, row + 1)))[0])
        for row in range(40)
    ]
    assert all(0 <= token < 3001 for token in alone)
    for threads in (1, 2, 3):
        assert drawn(kernels, logits, choices, threads).tolist() == alone
        some = drawn(kernels, logits[11:], part(choices, slice(11, 40)), threads)
        assert some.tolist() == alone[11:]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 12, 1.0, 0.0), (1.7, 5, 1.0, 0.0), (1.0, 12, 0.8, 0.0), (0.5, 12, 1.0, 0.2)],
)
def test_draws_follow_the_distribution(
    kernels: Module, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square of 6,000 draws against float64."""
    draws = 6000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2))
    points = np.random.default_rng(3).random(draws)
    choices = each(points, temperature, top_k, top_p, min_p)
    tokens = drawn(kernels, logits.expand(draws, -1).contiguous(), choices)
    kept = kept_weights(logits, temperature, top_k, top_p, min_p)
    seen, expected = kept > 0, kept / kept.sum() * draws
    counts = np.bincount(tokens, minlength=12)
    assert not counts[~seen].any()
    freedom = int(seen.sum()) - 1
    statistic = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom), (counts, expected)


def test_what_does_not_fit_is_refused(kernels: Module) -> None:
    logits, points = torch.zeros(2, 33), np.array([0.0, 0.5])
    for name, value in {"temperature": 0.0, "top_k": 0, "top_p": 0.0, "min_p": 1.5}.items():
        with pytest.raises(ValueError, match="out of range"):
            drawn(kernels, logits, each(points, **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out of range"):
        drawn(kernels, logits, each(np.array([0.0, 1.0])))
    with pytest.raises(ValueError, match="float64"):
        drawn(kernels, logits, each(points[:1]))
    with pytest.raises(ValueError, match="float32"):
        drawn(kernels, logits.double(), each(points))

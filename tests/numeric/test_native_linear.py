"""Native products against float64, on every variant that this processor runs, bit for bit where
the design promises it. Outputs are poisoned with NaN, so that a cell left out shows.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worker_proc.linear import TorchLinears
from worker_proc.native import build
from worker_proc.native.linear import NativeLinear, NativeLinears

_VARIANTS = {variant.name: variant for variant in build.runnable()}
_DTYPES = [torch.float32, torch.bfloat16]
# Outputs and inputs that fill blocks, tiles and words, and that don't.
_WIDTHS = [(64, 128), (32, 2), (1, 1), (33, 7), (100, 513), (70, 1030), (257, 96)]
_ROWS = [1, 2, 3, 4, 5, 8, 11, 12, 13, 16, 24, 25, 37, 64, 71]


@pytest.fixture(scope="module", params=list(_VARIANTS))
def linears(request: pytest.FixtureRequest) -> NativeLinears:
    return NativeLinears(_VARIANTS[request.param])


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype)


def poisoned(linear: NativeLinear, x: torch.Tensor) -> torch.Tensor:
    """linear(x), where new memory holds NaN and not zeros or the right answer of a run before."""

    class Poisoned(torch.Tensor):
        def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
            return torch.full(*args, float("nan"), dtype=self.dtype)

        def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.as_subclass(torch.Tensor).contiguous()

    return linear(x.as_subclass(Poisoned))


def error(ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> float:
    """The largest difference to float64, over the magnitude that the sum went through."""
    exact = x.double() @ weight.double().T + bias.double()
    scale = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    return float(((ours.double() - exact).abs() / scale).max())


def bits(x: torch.Tensor) -> torch.Tensor:
    """So that equality is of bits, NaN and the sign of zero included."""
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), _WIDTHS)
def test_a_product_equals_float64(
    linears: NativeLinears, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight = drawn(out_features, in_features, dtype=dtype)
    bias = drawn(out_features, dtype=dtype)
    zero = torch.zeros_like(bias)
    plain, offset = linears.linear(weight), linears.linear(weight, bias)
    # bfloat16 rounds the result once, to 8 bits; float32 rounds at every k.
    allowed = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for num_rows in _ROWS:
        x = drawn(num_rows, in_features, dtype=dtype, seed=num_rows)
        assert error(poisoned(plain, x), x, weight, zero) < allowed
        assert error(poisoned(offset, x), x, weight, bias) < allowed


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_long_prefill_equals_float64(linears: NativeLinears, dtype: torch.dtype) -> None:
    """Several blocks of rows, the last one not full."""
    weight, x = drawn(96, 1024, dtype=dtype), drawn(1100, 1024, dtype=dtype)
    ours = poisoned(linears.linear(weight), x)
    zero = torch.zeros(96, dtype=dtype)
    assert error(ours, x, weight, zero) < (2**-8 if dtype == torch.bfloat16 else 1e-6)


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even(linears: NativeLinears) -> None:
    """The product of two bfloat16 is exact in float32, and often halfway between two bfloat16."""
    weight, x = drawn(500, 1, dtype=torch.bfloat16), drawn(40, 1, dtype=torch.bfloat16)
    exact = x.float() @ weight.float().T
    assert torch.equal(linears.linear(weight)(x), exact.bfloat16())


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(257, 1030), (64, 513)])
def test_a_row_is_the_same_bits_in_any_batch_at_any_place_with_any_threads(
    linears: NativeLinears,
    threads: None,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    weight = drawn(out_features, in_features, dtype=dtype)
    linear = linears.linear(weight, drawn(out_features, dtype=dtype))
    x = drawn(600, in_features, dtype=dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 40), 64, 600):
            assert torch.equal(bits(linear(x[:num_rows])), bits(alone[:num_rows]))
            assert torch.equal(bits(linear(x[-num_rows:])), bits(alone[-num_rows:]))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_row_of_nan_or_infinity_harms_no_other(
    linears: NativeLinears, dtype: torch.dtype
) -> None:
    weight, x = drawn(40, 33, dtype=dtype), drawn(20, 33, dtype=dtype)
    linear = linears.linear(weight)
    clean = linear(x)
    x[4], x[9] = float("nan"), float("inf")
    ours = linear(x)
    others = [i for i in range(20) if i not in (4, 9)]
    assert torch.equal(bits(ours[others]), bits(clean[others]))
    assert ours[4].isnan().all()
    assert not ours[9].isfinite().any()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_rows_are_looked_up_exactly_in_the_packed_weights(
    linears: NativeLinears, dtype: torch.dtype
) -> None:
    for rows, width in ((100, 96), (33, 7), (1, 1)):
        weight = drawn(rows, width, dtype=dtype)
        tied = linears.tied(weight)
        ids = torch.randint(0, rows, (300,), dtype=torch.int32)
        assert torch.equal(tied.rows(ids), weight[ids])
        with pytest.raises(ValueError, match="no row"):
            tied.rows(torch.tensor([rows]))


def test_no_rows_and_views_are_taken(linears: NativeLinears) -> None:
    weight, x = drawn(40, 32, dtype=torch.float32), drawn(6, 64, dtype=torch.float32)
    linear = linears.linear(weight)
    assert linear(x[:0, :32]).shape == (0, 40)
    assert torch.equal(linear(x[::2, 32:]), linear(x[::2, 32:].clone()))
    wide = linears.linear(drawn(32, 80, dtype=torch.float32)[:, ::2])
    assert wide(x[:, :40]).shape == (6, 32)


def test_what_does_not_fit_is_refused(linears: NativeLinears) -> None:
    linear = linears.linear(drawn(40, 32, dtype=torch.float32))
    with pytest.raises(ValueError, match="packed weights"):
        linear(drawn(2, 31, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"one dtype|packed weights"):
        linear(drawn(2, 32, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float16"):
        linears.linear(drawn(4, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_torch_agrees_within_tolerance(linears: NativeLinears, dtype: torch.dtype) -> None:
    weight, x = drawn(300, 512, dtype=dtype), drawn(9, 512, dtype=dtype)
    bias = drawn(300, dtype=dtype)
    theirs = TorchLinears().linear(weight, bias)(x)
    ours = linears.linear(weight, bias)(x)
    worst = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert worst < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_reading_for_a_benchmark_reads_every_word(linears: NativeLinears) -> None:
    data = torch.randint(-(2**31), 2**31, (1_003,), dtype=torch.int32)
    expected = 0
    for word in data.tolist():
        expected ^= word & 0xFFFFFFFF
    assert build.load(_VARIANTS[linears.name]).read(data) == expected

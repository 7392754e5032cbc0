"""Native products against float64, on every variant that this processor runs, bit for bit where
the design promises it. Outputs are poisoned with NaN, so that a cell left out shows.
"""

import pytest
import torch
from torch.nn import functional
from tvm_ffi import Module

from worker_proc.native import build
from worker_proc.native.linear import Packer, interleaved

_VARIANTS = {variant.name: variant for variant in build.runnable()}
_DTYPES = [torch.float32, torch.bfloat16]
# Outputs and inputs that fill blocks, tiles and words, and that don't.
_WIDTHS = [(64, 128), (32, 2), (1, 1), (33, 7), (100, 513), (70, 1030), (257, 96)]
_ROWS = [1, 2, 3, 4, 5, 8, 11, 12, 13, 16, 24, 25, 37, 64, 70, 71]


class Product:
    """x Wᵀ + b by one variant's kernels."""

    def __init__(
        self, kernels: Module, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._kernels = kernels
        self._out_features = len(weight)
        self._packed = Packer(kernels, 2).pack([weight])
        self._bias = torch.empty(0) if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
        out = torch.full((len(x), self._out_features), float("nan"), dtype=x.dtype)
        self._kernels.linear(x.contiguous(), self._packed, self._bias, out, threads)
        return out


@pytest.fixture(scope="module", params=list(_VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Module:
    return build.load(_VARIANTS[request.param])


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype)


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
    kernels: Module, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight = drawn(out_features, in_features, dtype=dtype)
    bias = drawn(out_features, dtype=dtype)
    zero = torch.zeros_like(bias)
    plain, offset = Product(kernels, weight), Product(kernels, weight, bias)
    # bfloat16 rounds the result once, to 8 bits; float32 rounds at every k.
    allowed = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for num_rows in _ROWS:
        x = drawn(num_rows, in_features, dtype=dtype, seed=num_rows)
        assert error(plain(x), x, weight, zero) < allowed
        assert error(offset(x), x, weight, bias) < allowed


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_long_prefill_equals_float64(kernels: Module, dtype: torch.dtype) -> None:
    """Several blocks of rows, the last one not full."""
    weight, x = drawn(96, 1024, dtype=dtype), drawn(1100, 1024, dtype=dtype)
    ours = Product(kernels, weight)(x)
    zero = torch.zeros(96, dtype=dtype)
    assert error(ours, x, weight, zero) < (2**-8 if dtype == torch.bfloat16 else 1e-6)


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even(kernels: Module) -> None:
    """The product of two bfloat16 is exact in float32, and often halfway between two bfloat16."""
    weight, x = drawn(500, 1, dtype=torch.bfloat16), drawn(40, 1, dtype=torch.bfloat16)
    exact = x.float() @ weight.float().T
    assert torch.equal(Product(kernels, weight)(x), exact.bfloat16())


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(257, 1030), (64, 513)])
def test_a_row_is_the_same_bits_in_any_batch_at_any_place_with_any_threads(
    kernels: Module,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    weight = drawn(out_features, in_features, dtype=dtype)
    linear = Product(kernels, weight, drawn(out_features, dtype=dtype))
    x = drawn(600, in_features, dtype=dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_threads in (1, 2, 3):
        for num_rows in (*range(1, 40), 64, 600):
            assert torch.equal(bits(linear(x[:num_rows], num_threads)), bits(alone[:num_rows]))
            assert torch.equal(bits(linear(x[-num_rows:], num_threads)), bits(alone[-num_rows:]))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_row_of_nan_or_infinity_harms_no_other(kernels: Module, dtype: torch.dtype) -> None:
    weight, x = drawn(40, 33, dtype=dtype), drawn(20, 33, dtype=dtype)
    linear = Product(kernels, weight)
    clean = linear(x)
    x[4], x[9] = float("nan"), float("inf")
    ours = linear(x)
    others = [i for i in range(20) if i not in (4, 9)]
    assert torch.equal(bits(ours[others]), bits(clean[others]))
    assert ours[4].isnan().all()
    assert not ours[9].isfinite().any()


def test_no_rows_and_views_are_taken(kernels: Module) -> None:
    weight, x = drawn(40, 32, dtype=torch.float32), drawn(6, 64, dtype=torch.float32)
    linear = Product(kernels, weight)
    assert linear(x[:0, :32]).shape == (0, 40)
    assert torch.equal(linear(x[::2, 32:]), linear(x[::2, 32:].clone()))
    wide = Product(kernels, drawn(32, 80, dtype=torch.float32)[:, ::2])
    assert wide(x[:, :40]).shape == (6, 32)


def test_what_does_not_fit_is_refused(kernels: Module) -> None:
    linear = Product(kernels, drawn(40, 32, dtype=torch.float32))
    with pytest.raises(ValueError, match="packed weights"):
        linear(drawn(2, 31, dtype=torch.float32))
    with pytest.raises(ValueError, match="packed weights"):
        linear(drawn(2, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        Product(kernels, drawn(4, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_parts_packed_one_after_another_are_one_matrix(kernels: Module, dtype: torch.dtype) -> None:
    """Whose borders lie within blocks of columns, and on them."""
    parts = [drawn(rows, 70, dtype=dtype, seed=rows) for rows in (33, 64, 5, 90, 1)]
    packer = Packer(kernels, 3)
    assert torch.equal(packer.pack(parts), packer.pack([torch.cat(parts)]))


def test_gate_and_up_lie_side_by_side() -> None:
    gate, up = drawn(21, 3, dtype=torch.float32), drawn(21, 3, dtype=torch.float32, seed=1)
    rows = interleaved(gate, up)
    assert rows.shape == (64, 3)
    for place, matrix in ((0, gate), (16, up)):
        whole = torch.cat((rows[place : place + 16], rows[place + 32 : place + 48]))
        assert torch.equal(whole, functional.pad(matrix, (0, 0, 0, 11)))

"""Products with 8-bit and 4-bit weights against float64, on every variant that this processor runs:
the weights' rounding, the activations', and the sum, each by itself; and bit for bit where the
design promises it.
"""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from worker_proc.checkpoint import KEPT_TYPES
from worker_proc.native import build
from worker_proc.native.linear import INT8, Packer

_VARIANTS = {variant.name: variant for variant in build.runnable()}
_STORED = [INT8, *KEPT_TYPES]
# Outputs and inputs that fill blocks of 32 and groups, and that don't; GGUF's have whole groups.
_WIDTHS = [(64, 128), (32, 2), (1, 1), (33, 7), (100, 513), (70, 1030), (257, 96)]
_STORED_WIDTHS = [(64, 256), (1, 512), (70, 768), (257, 256)]
_ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 70]


@pytest.fixture(scope="module", params=list(_VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Any:
    return build.load(_VARIANTS[request.param])


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype)


def stored(kind: str, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A random matrix as `kind` stores it, float64 of what that stands for)."""
    if kind == INT8:
        weight = drawn(out_features, in_features)
        steps = weight.double() / (weight.abs().amax(-1, keepdim=True).double() / 127)
        # What lies in the middle between two steps may go either way.
        weight[(steps - steps.floor() - 0.5).abs() < 1e-4] = 0
        return weight, rounded(weight)
    blocks = random_blocks(kind, out_features, in_features)
    values = dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(blocks), torch.from_numpy(values).double()


def random_blocks(kind: str, out_features: int, in_features: int) -> np.ndarray:
    """Of a type whose quantizer the gguf package lacks (Q4_K), blocks of random bits."""
    random = np.random.default_rng(out_features)
    if kind != "Q4_K":
        weight = random.standard_normal((out_features, in_features)).astype(np.float32)
        return quantize(weight, gguf.GGMLQuantizationType[kind])
    blocks = random.integers(0, 256, (out_features, in_features // 256, 144), np.uint8)
    scales = random.uniform(0.01, 0.1, (out_features, in_features // 256, 2)).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(out_features, -1)


def groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """float64 [..., groups, size], the last group filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).double().unflatten(-1, (-1, size))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """float64 of `weight` in rows of steps of 1/127 of the largest, as float32 has that."""
    largest = weight.abs().amax(-1, keepdim=True)
    steps = (weight.double() / (largest / 127).double()).nan_to_num().round()
    return steps * (largest / 127).double()


def quantized(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 of `x` in groups of `size` steps of 1/127 of the largest, a step where a value lies
    so near the middle between two that it may go either way, else 0).
    """
    parts = groups(x, size)
    scales = parts.abs().amax(-1, keepdim=True) / 127
    exact = (parts / scales).nan_to_num()
    either = ((exact - exact.floor() - 0.5).abs() < 1e-4) * scales
    width = x.shape[-1]
    return tuple(t.flatten(-2)[..., :width] for t in (exact.round() * scales, either))


def packed(kernels: Any, kind: str, weight: torch.Tensor) -> torch.Tensor:
    return Packer(kernels, 2).quantized(kind, [weight])


def product(
    kernels: Any, weight: torch.Tensor, x: torch.Tensor, out_features: int, threads: int = 1
) -> torch.Tensor:
    """Into memory that holds NaN."""
    y = torch.full((len(x), out_features), float("nan"), dtype=x.dtype)
    kernels.linear(x.contiguous(), weight, torch.empty(0), y, threads)
    return y


def cases() -> list[tuple[str, int, int]]:
    plain = [(INT8, *widths) for widths in _WIDTHS]
    return plain + [(kind, *widths) for kind in KEPT_TYPES for widths in _STORED_WIDTHS]


@pytest.mark.parametrize(("kind", "out_features", "in_features"), cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_equals_float64_but_for_the_rounding_of_activations(
    kernels: Any, kind: str, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    # Q4_K's scales are rounded to float16, bfloat16 results to 8 bits; else only sums are.
    allowed = 2e-6 + 5e-4 * (kind == "Q4_K") + 2**-8 * (dtype == torch.bfloat16)
    weight, exact = stored(kind, out_features, in_features)
    ours = packed(kernels, kind, weight)
    size = 64 if kind == INT8 else 32
    for num_rows in _ROWS:
        x = drawn(num_rows, in_features, dtype=dtype, seed=num_rows)
        steps, either = quantized(x.float(), size)
        y = product(kernels, ours, x, out_features)
        room = allowed * (steps.abs() @ exact.T.abs()) + either @ exact.T.abs() + 1e-9
        assert ((y - steps @ exact.T).abs() <= room).all()


@pytest.mark.parametrize("kind", _STORED)
def test_a_row_is_the_same_bits_in_any_batch_at_any_place_with_any_threads(
    kernels: Any, kind: str
) -> None:
    weight, _ = stored(kind, 257, 1024)
    ours = packed(kernels, kind, weight)
    x = drawn(600, 1024)
    alone = torch.cat([product(kernels, ours, row[None], 257) for row in x[:80]])
    everyone = product(kernels, ours, x, 257)
    assert torch.equal(everyone[:80], alone)
    for threads in (1, 2, 3):
        for num_rows in (*range(1, 20), 33, 64, 600):
            y = product(kernels, ours, x[:num_rows], 257, threads)
            assert torch.equal(y, everyone[:num_rows])
            assert torch.equal(
                product(kernels, ours, x[-num_rows:], 257, threads), everyone[-num_rows:]
            )


@pytest.mark.parametrize("kind", _STORED)
def test_parts_stacked_are_packed_as_one_matrix_is(kernels: Any, kind: str) -> None:
    weight, _ = stored(kind, 100, 256)
    for threads in (1, 2, 3):
        packer = Packer(kernels, threads)
        parts = packer.quantized(kind, [weight[:37], weight[37:64], weight[64:]])
        assert torch.equal(parts, packed(kernels, kind, weight))


@pytest.mark.parametrize("kind", _STORED)
def test_a_row_of_nan_or_infinity_harms_no_other(kernels: Any, kind: str) -> None:
    weight, _ = stored(kind, 40, 256)
    ours = packed(kernels, kind, weight)
    x = drawn(20, 256)
    clean = product(kernels, ours, x, 40)
    x[4, 17], x[9, 200] = float("nan"), float("inf")
    y = product(kernels, ours, x, 40)
    others = [i for i in range(20) if i not in (4, 9)]
    assert torch.equal(y[others], clean[others])
    assert y[4].isnan().all()
    assert not y[9].isfinite().any()


@pytest.mark.parametrize("place", [0, 63, 64, 190, 299])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_makes_its_column_nan_and_harms_no_other(
    kernels: Any, value: float, place: int
) -> None:
    weight, x = drawn(40, 300), drawn(5, 300)
    clean = product(kernels, packed(kernels, INT8, weight), x, 40)
    weight[7, place] = value
    y = product(kernels, packed(kernels, INT8, weight), x, 40)
    others = [i for i in range(40) if i != 7]
    assert torch.equal(y[:, others], clean[:, others])
    assert y[:, 7].isnan().all()


@pytest.mark.parametrize("kind", _STORED)
def test_rows_of_zeros_and_of_next_to_nothing_are_zero(kernels: Any, kind: str) -> None:
    weight, _ = stored(kind, 40, 256)
    x = torch.stack([torch.zeros(256), torch.full((256,), 1e-38), torch.full((256,), -1e-45)])
    assert product(kernels, packed(kernels, kind, weight), x, 40).abs().max() < 1e-30


def test_weights_of_any_size_are_rounded_to_the_nearest_step(kernels: Any) -> None:
    """Rows of zeros, of one outlier, and of magnitudes near the ends of float32."""
    weight = drawn(96, 256)
    weight[0] = 0
    weight[1, 70] = 1000
    weight[2] *= 1e-28
    weight[3] *= 1e30
    ours = product(kernels, packed(kernels, INT8, weight), torch.eye(256).mul(127), 96).T / 127
    assert torch.allclose(ours.double(), rounded(weight), rtol=1e-6, atol=0)


def test_a_packed_matrix_of_another_shape_or_type_is_refused(kernels: Any) -> None:
    weight, _ = stored("Q8_0", 64, 256)
    ours = packed(kernels, "Q8_0", weight)
    with pytest.raises(ValueError, match="another shape or dtype"):
        product(kernels, ours, drawn(3, 288), 64)
    with pytest.raises(ValueError, match="another shape or dtype"):
        product(kernels, ours, drawn(3, 256), 65)
    with pytest.raises(ValueError, match="can't be packed"):
        kernels.pack_quantized(weight, "Q3_K", 0, ours, 1)
    with pytest.raises(ValueError, match="not of the shape"):
        kernels.pack_quantized(weight, "Q4_1", 0, ours, 1)
    with pytest.raises(ValueError, match="no room"):
        kernels.pack_quantized(weight, "Q8_0", 1, ours, 1)

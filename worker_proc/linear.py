"""Torch's products with a model's weights: by oneDNN with weights packed at load, or plain.

Packed is about twice as fast as plain where few rows meet a large matrix, which is what a decode
step is.
"""

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """y = x Wᵀ + b. x: [n, in_features] -> [n, out_features], same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """By torch, on the weight as it is: what a tied embedding needs, whose rows are also looked up.

    weight: [out_features, in_features]. bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._weight)


class PackedLinear:
    """By oneDNN, on its own copy of the weight in blocked layout; the caller drops the original.

    The two mkldnn operators are those that torch.compile emits on CPU (torch 2.13), not public.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest product that torch has here; weight and bias belong to it."""
    return PackedLinear(weight, bias) if _can_pack(weight.dtype) else PlainLinear(weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights, and this processor computes with such ones."""
    operators = torch.ops.mkldnn
    if not (torch._C._has_mkldnn and hasattr(operators, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or bool(operators._is_mkldnn_bf16_supported())

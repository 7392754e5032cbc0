"""Matrix products with a model's weights: by the native kernels, or by torch where they can't be.

Torch's own are oneDNN with weights packed at load, or plain. Packed is about twice as fast as plain
where few rows meet a large matrix, which is what a decode step is.
"""

import logging
from typing import Protocol

import torch
from torch.nn import functional

log = logging.getLogger(__name__)


class Linear(Protocol):
    """y = x Wᵀ + b. x: [n, in_features] -> [n, out_features], same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class TiedLinear(Linear, Protocol):
    """A head that is also the embedding."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int [n] -> [n, in_features], rows of the weight."""
        ...


class Linears(Protocol):
    """Makes a model's products; a weight that is given belongs to the product, bias included."""

    name: str
    """As TANDEM_KERNELS has it."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: [out_features, in_features]. bias: [out_features]."""
        ...

    def tied(self, weight: torch.Tensor) -> TiedLinear:
        """weight: [vocab_size, hidden_size]."""
        ...


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


class TorchLinears:
    """The fastest products that this build of torch has."""

    name = "torch"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        packs = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)

    def tied(self, weight: torch.Tensor) -> TiedLinear:
        return PlainLinear(weight)


def make_linears(kernels: str) -> Linears:
    """Products by the native kernels, or by torch where they can't be had: the log says why.

    kernels: as TANDEM_KERNELS. Raises ConfigError where the processor can't run those asked for.
    """
    if kernels == "torch":
        return TorchLinears()
    try:
        from worker_proc.native import build
        from worker_proc.native.linear import NativeLinears
    except ImportError as e:
        log.warning("computing with torch, slower than native kernels: %s", e)
        return TorchLinears()
    variant = build.pick(kernels)
    try:
        return NativeLinears(variant)
    except build.NoKernels as e:
        log.warning("computing with torch, slower than native kernels: %s", e)
        return TorchLinears()

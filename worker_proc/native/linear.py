"""Linear products by the native kernels, on weights in their packed layout (see linear.cpp)."""

import torch
from tvm_ffi import Module

from worker_proc.native import build

_COLUMNS = 32
_DTYPES = (torch.float32, torch.bfloat16)


class NativeLinear:
    """x Wᵀ + b on its own packed copy of the weight; the caller drops the original.

    A row's result is the same bits in any batch and with any number of threads. The packed
    weights are int32 [ceil(out_features / 32), words of a row, 32].
    """

    def __init__(self, kernels: Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.dtype not in _DTYPES:
            raise TypeError(f"the weight is {weight.dtype}: the kernels take float32 and bfloat16")
        self._linear = kernels.linear
        self._gather = kernels.gather
        self._out_features, self._in_features = weight.shape
        words = -(-self._in_features * weight.itemsize // 4)
        self._packed = torch.empty(
            (-(-self._out_features // _COLUMNS), words, _COLUMNS), dtype=torch.int32
        )
        kernels.pack(weight.contiguous(), self._packed)
        self._bias = weight.new_empty(0) if bias is None else bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((len(x), self._out_features))
        self._linear(x.contiguous(), self._packed, self._bias, out)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by index, unpacked. ids: int [n] -> [n, in_features]."""
        out = self._bias.new_empty((len(ids), self._in_features))
        self._gather(self._packed, self._out_features, ids.long().contiguous(), out)
        return out


class NativeLinears:
    """Makes the products of one model by one build of the kernels."""

    def __init__(self, variant: build.Variant) -> None:
        """Builds the kernels where no earlier start did. Raises build.NoKernels."""
        self.name = variant.name
        self._kernels = build.load(variant)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        return NativeLinear(self._kernels, weight, bias)

    def tied(self, weight: torch.Tensor) -> NativeLinear:
        return NativeLinear(self._kernels, weight, None)

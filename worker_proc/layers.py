"""The parts that model families share. Activations are [num_tokens, …] in the model's dtype."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from worker_proc.checkpoint import Weights
from worker_proc.linear import Linear, make_linear


class RMSNorm:
    """Each row scaled to a mean square of one, in float32, then weighted.

    weight: [..., size], broadcast against the rows' last dimensions.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(x.dtype) * self._weight


class Embedding:
    """Rows of a table by token id. weight: [vocab_size, hidden_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int [n] -> [n, hidden_size]."""
        return functional.embedding(ids, self._weight)


class GatedMlp:
    """down(silu(gate(x)) · up(x)). Source: SwiGLU (arXiv 2002.05202)."""

    def __init__(self, weights: Weights, prefix: str, bias: bool) -> None:
        self._gate_up = fused_linear(weights, prefix, ("gate_proj", "up_proj"), bias)
        self._down = fused_linear(weights, prefix, ("down_proj",), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate) * up)


def fused_linear(weights: Weights, prefix: str, names: Sequence[str], bias: bool) -> Linear:
    """One product for several matrices of the same input: their outputs lie side by side."""
    weight = weights.fused([f"{prefix}{name}.weight" for name in names])
    offset = weights.fused([f"{prefix}{name}.bias" for name in names]) if bias else None
    return make_linear(weight, offset)

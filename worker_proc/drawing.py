"""What a random draw goes by, and the draw as torch computes it: the reference for the kernels'."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.types import IntArray
from worker_proc.filters import inverse_cdf, keep_likely, keep_near_best

_Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Of each row, all [r].

    temperatures: above 0. top_ks: int64, at least 1; the vocabulary's size for no limit. top_ps:
    above 0, 1 for no limit. min_ps: of the largest weight, 0 for no limit. points: in [0, 1), where
    in the sum of the weights the token lies.
    """

    temperatures: _Float64s
    top_ks: npt.NDArray[np.int64]
    top_ps: _Float64s
    min_ps: _Float64s
    points: _Float64s

    def stacked(self) -> _Float64s:
        """[5, r], in the order of the fields."""
        columns = (self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.points)
        return np.stack([column.astype(np.float64, copy=False) for column in columns])


Draw = Callable[[torch.Tensor, Choices], IntArray]
"""Logits, float32 [r, vocab_size], and what each row is drawn by -> its token, int32 [r]."""


def draw_by_torch(logits: torch.Tensor, choices: Choices) -> IntArray:
    """A `Draw`."""
    temperatures = torch.from_numpy(choices.temperatures).float()[:, None]
    weights = torch.exp((logits - logits.amax(-1, keepdim=True)) / temperatures)
    limited = (choices.top_ks < logits.shape[1]) | (choices.top_ps < 1)
    if limited.any():
        rows = torch.from_numpy(np.flatnonzero(limited))
        weights[rows] = keep_likely(
            weights[rows],
            torch.from_numpy(choices.top_ks[limited]),
            torch.from_numpy(choices.top_ps[limited]),
        )
    keep_near_best(weights, choices.min_ps)
    return inverse_cdf(weights, torch.from_numpy(choices.points))

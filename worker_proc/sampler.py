"""From logits to tokens, by each slot's own parameters.

Rules: a token depends on its own row's logits, parameters, seed and position only, never on the
rows that ride along (so sums are running sums, whose order is fixed); equal logits are ranked by
token id, lowest first; a row pays only for what it asks (greedy rows are never sorted).
"""

import numpy as np
import torch

from runtime.errors import InternalError
from runtime.sampling import SamplingParams
from runtime.types import IntArray
from worker_proc.philox import uniforms

#: Below this, dividing float32 logits by the temperature leaves one token: taken for greedy.
_GREEDY_BELOW = 1e-5
_FIRST_LOOK = 1024


class Sampler:
    """Chooses the next token of each sampling row; keeps every slot's sampling parameters."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperatures = np.zeros(num_slots, np.float64)
        self._top_ks = np.zeros(num_slots, np.int64)
        self._top_ps = np.zeros(num_slots, np.float64)
        self._seeds = np.zeros(num_slots, np.uint64)

    def set_slot(self, slot: int, params: SamplingParams) -> None:
        """From now on `slot` samples by `params`, whose seed is resolved if it draws at all."""
        temperature = params.temperature or 0.0
        greedy = temperature < _GREEDY_BELOW
        if params.seed is None and not greedy:
            raise InternalError(f"slot {slot} samples at random but was given no seed")
        self._temperatures[slot] = 0.0 if greedy else temperature
        self._top_ks[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_ps[slot] = 1.0 if params.top_p is None else params.top_p
        self._seeds[slot] = params.seed or 0

    def sample(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> IntArray:
        """logits: float32 [r, vocab_size]; slots, positions (of the new token) [r] -> int32 [r]."""
        tokens = logits.argmax(-1).numpy().astype(np.int32)
        drawn = np.flatnonzero(self._temperatures[slots] > 0)
        if len(drawn):
            rows = logits[torch.from_numpy(drawn)]
            tokens[drawn] = self._draw(rows, slots[drawn], positions[drawn])
        return tokens

    def _draw(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> IntArray:
        temperatures = torch.from_numpy(self._temperatures[slots]).float()[:, None]
        weights = torch.exp((logits - logits.amax(-1, keepdim=True)) / temperatures)
        limited = (self._top_ks[slots] < self._vocab_size) | (self._top_ps[slots] < 1)
        if limited.any():
            rows = torch.from_numpy(np.flatnonzero(limited))
            weights[rows] = keep_likely(
                weights[rows],
                torch.from_numpy(self._top_ks[slots[limited]]),
                torch.from_numpy(self._top_ps[slots[limited]]),
            )
        return inverse_cdf(weights, torch.from_numpy(uniforms(self._seeds[slots], positions)))


def inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> IntArray:
    """The token at which the running sum, by id, first passes its row's point of the total.

    weights: float32 [r, vocab_size], not normed; points: float64 [r] in [0, 1) -> int32 [r].
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True)
    return tokens[:, 0].clamp(max=weights.shape[1] - 1).numpy().astype(np.int32)


def keep_likely(weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """The weights with zero for all but the top_k largest and, of these, the top_p of their sum.

    weights: float32 [r, vocab_size]; top_ks: int64 [r]; top_ps: float64 [r].
    """
    vocab_size = weights.shape[1]
    looked = min(_FIRST_LOOK, vocab_size)
    largest = weights.topk(looked).values
    sums = largest.cumsum(-1, dtype=torch.float64)
    within = top_ks <= looked
    wide = (top_ks >= vocab_size) & ~within
    totals = sums.gather(1, (top_ks.clamp(max=looked) - 1)[:, None])[:, 0]
    totals[wide] = weights[wide].cumsum(-1, dtype=torch.float64)[:, -1]
    settled = within | (wide & (top_ps < 1) & (sums[:, -1] >= top_ps * totals))
    kept = torch.empty_like(weights)
    kept[settled] = _keep(
        weights[settled], largest[settled], top_ks[settled], top_ps[settled], totals[settled]
    )
    if not settled.all():
        kept[~settled] = _keep_by_sort(weights[~settled], top_ks[~settled], top_ps[~settled])
    return kept


def _keep_by_sort(
    weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """As keep_likely, for rows whose kept tokens go beyond the first look."""
    ranked = weights.sort(-1, descending=True).values
    sums = ranked.cumsum(-1, dtype=torch.float64)
    totals = sums.gather(1, (top_ks - 1)[:, None])[:, 0]
    return _keep(weights, ranked, top_ks, top_ps, totals)


def _keep(
    weights: torch.Tensor,
    ranked: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    totals: torch.Tensor,
) -> torch.Tensor:
    """ranked: the largest weights, descending [r, n]; totals: the sum of each row's top_k."""
    sums = ranked.cumsum(-1, dtype=torch.float64)
    below = (sums < (top_ps * totals)[:, None]).sum(-1) + 1
    counts = torch.where(top_ps < 1, torch.minimum(below, top_ks), top_ks)
    least = ranked.gather(1, (counts.clamp(max=ranked.shape[1]) - 1)[:, None])
    tied = weights == least
    spare = counts[:, None] - (weights > least).sum(-1, keepdim=True)
    keep = (weights > least) | (tied & (tied.cumsum(-1) <= spare))
    return weights.where(keep, 0.0)

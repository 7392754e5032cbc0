"""Which tokens may be drawn, and the draw.

Rules: equal weights are ranked by token id, lowest first; sums are running sums, whose order is
fixed, so that a row's result does not depend on the rows beside it; a row whose filter is settled
by its largest weights is never sorted.
"""

import numpy as np
import numpy.typing as npt
import torch

from runtime.types import IntArray

_FIRST_LOOK = 1024


def inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> IntArray:
    """The token at which the running sum, by id, first passes its row's point of the total.

    weights: float32 [r, vocab_size], not normed; points: float64 [r] in [0, 1) -> int32 [r].
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True)
    return tokens[:, 0].clamp(max=weights.shape[1] - 1).numpy().astype(np.int32)


def keep_near_best(weights: torch.Tensor, min_ps: npt.NDArray[np.float64]) -> None:
    """Zero, in place, the weights below min_p times the largest, which is 1 in every row.

    weights: float32 [r, vocab_size]; min_ps: float64 [r], 0 to keep all.
    """
    if (rows := np.flatnonzero(min_ps > 0)).size:
        index = torch.from_numpy(rows)
        kept = weights[index]
        weights[index] = kept.where(kept >= torch.from_numpy(min_ps[rows]).float()[:, None], 0.0)


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

"""The filters of the sampler against a plain float64 model."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_proc.filters import keep_likely, keep_near_best

_VOCAB = 60
# Few different values: ties, at every border.
_ROWS = st.lists(
    st.lists(st.integers(0, 12), min_size=_VOCAB, max_size=_VOCAB), min_size=1, max_size=4
)


def _kept_by_hand(weights: np.ndarray, top_k: int, top_p: float) -> list[int]:
    """Ranked by weight, then id; cut at top_k, then where the share reaches top_p."""
    order = np.lexsort((np.arange(len(weights)), -weights))[:top_k]
    sums = weights[order].cumsum()
    count = int((sums < top_p * sums[-1]).sum()) + 1 if top_p < 1 else len(order)
    return sorted(order[:count].tolist())


@given(_ROWS, st.data())
def test_the_kept_tokens_are_those_of_a_plain_model(
    exponents: list[list[int]], data: st.DataObject
) -> None:
    """Weights are powers of two, so that sums are exact and a share may be reached exactly."""
    weights = 2.0 ** -torch.tensor(exponents).float()
    rows = len(exponents)
    top_ks = data.draw(st.lists(st.integers(1, _VOCAB), min_size=rows, max_size=rows))
    top_ps = data.draw(
        st.lists(st.sampled_from([1e-9, 0.25, 0.5, 0.9, 0.999, 1.0]), min_size=rows, max_size=rows)
    )
    kept = keep_likely(weights, torch.tensor(top_ks), torch.tensor(top_ps, dtype=torch.float64))
    for row in range(rows):
        expected = _kept_by_hand(weights[row].double().numpy(), top_ks[row], top_ps[row])
        assert kept[row].nonzero().flatten().tolist() == expected
        assert torch.equal(kept[row][expected], weights[row][expected])


@given(_ROWS, st.data())
def test_min_p_keeps_what_is_near_the_best(exponents: list[list[int]], data: st.DataObject) -> None:
    weights = 2.0 ** -torch.tensor(exponents).float()
    weights /= weights.amax(-1, keepdim=True)
    min_ps = data.draw(
        st.lists(st.sampled_from([0, 0.01, 0.25, 1]), min_size=len(weights), max_size=len(weights))
    )
    kept = weights.clone()
    keep_near_best(kept, np.array(min_ps, np.float64))
    for row, min_p in enumerate(min_ps):
        assert torch.equal(kept[row], weights[row] * (weights[row] >= min_p))

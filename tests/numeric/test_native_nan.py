"""What is no number stays with whom it belongs to: it never reaches a row that does not see it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.plans import PlanMaker
from tests.small_llama import small_llama
from worker_proc.engine import Engine
from worker_proc.native import build

_BAD = 7
"""The token whose embedding is no number."""


@pytest.fixture(params=[variant.name for variant in build.runnable()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TANDEM_KERNELS", request.param)
    name: str = request.param
    return name


def broken(folder: Path, value: float, **precision: str) -> Engine:
    """A model whose token _BAD is embedded as `value`."""

    def changed(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][_BAD] = value

    files = small_llama(folder, changed, vocab_size=99, hidden_size=48, seed=5)
    return Engine.load(files, **precision)


def logits(engine: Engine, ids: list[int], lens: list[int]) -> torch.Tensor:
    """Of every position, computed in chunks of these lengths."""
    engine.begin(256, 1, 1, 256)
    plans = PlanMaker(page_size=1)
    plans.admit(0, ids, range(len(ids)))
    found, start = [], 0
    for length in lens:
        engine.execute(plans.plan((0, start, length, False)), every_row=True)
        found.append(engine.computation.logits(np.arange(length, dtype=np.int32)))
        start += length
    return torch.cat(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_see_what_comes_after_it(
    kernels: str, tmp_path: Path, dtype: str, value: float
) -> None:
    """A masked value of NaN times a chance of zero was NaN once, for all rows of the chunk."""
    engine = broken(tmp_path, value, dtype=dtype)
    assert engine.computation.name == kernels
    ids = [3 + i % 3 for i in range(90)]
    ids[70] = _BAD
    alone, together = logits(engine, ids, [1] * 90), logits(engine, ids, [33, 57])
    assert alone[:70].isfinite().all()
    assert not alone[70:].isfinite().all(-1).any()
    assert torch.equal(alone[:70].view(torch.int32), together[:70].view(torch.int32))
    assert not together[70:].isfinite().all(-1).any()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_row_may_be_asked_for_more_often_than_the_step_has_rows(
    kernels: str, tmp_path: Path, quantization: str
) -> None:
    engine = broken(tmp_path, 0.5, dtype="float32", quantization=quantization)
    once = logits(engine, [4, 5, 6], [3])[2]
    often = engine.computation.logits(np.full(5000, 2, np.int32))
    assert torch.equal(often, once.expand(5000, -1))


def test_a_weight_that_is_no_number_is_none_in_8_bits_either(kernels: str, tmp_path: Path) -> None:
    engine = broken(tmp_path, float("nan"), dtype="float32", quantization="int8")
    assert logits(engine, [_BAD], [1]).isnan().all()
    assert logits(engine, [4], [1]).isfinite().all()

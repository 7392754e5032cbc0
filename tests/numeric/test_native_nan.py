"""What is no number stays with whom it belongs to: it never reaches a row that does not see it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.instance import ModelFiles
from tests.plans import PlanMaker
from worker_proc.engine import Engine
from worker_proc.model_config import read_config
from worker_proc.models import family_of
from worker_proc.native import build

_BAD = 7
"""The token whose embedding is no number."""
_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(params=[variant.name for variant in build.runnable()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TANDEM_KERNELS", request.param)
    name: str = request.param
    return name


def broken(folder: Path, value: float, **precision: str) -> Engine:
    """A model whose token _BAD is embedded as `value`."""
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / 8
        for name, shape in family_of(read_config(folder)).shapes(read_config(folder)).items()
    }
    weights["model.embed_tokens.weight"][_BAD] = value
    save_file(weights, folder / "model.safetensors")
    return Engine.load(ModelFiles(name="broken", path=str(folder), format="hf"), **precision)


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

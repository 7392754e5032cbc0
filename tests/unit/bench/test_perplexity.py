"""The figures of a comparison, on a model small enough to compute them another way."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.perplexity import Score, Scorer, compare
from runtime.instance import ModelFiles
from worker_proc.engine import Engine

_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
IDS = [int(i) for i in torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(1))]


def engine(folder: Path, dtype: str = "float32") -> Engine:
    (folder / "config.json").write_text(json.dumps(_TINY))
    files = ModelFiles(name="tiny", path=str(folder / "config.json"), format="preset")
    return Engine.load(files, dtype=dtype, load_format="dummy")


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    model = engine(tmp_path)
    result = compare(model, model, IDS, 64)
    assert result.num_tokens == 3 * 63  # 3 whole windows, whose first token nothing predicts
    assert result.perplexity == result.reference_perplexity
    assert result.greedy_agreement == 1.0
    assert result.mean_divergence == 0.0


def test_a_coarser_dtype_differs_a_little(tmp_path: Path) -> None:
    result = compare(engine(tmp_path, "bfloat16"), engine(tmp_path), IDS, 100)
    assert 0 < result.mean_divergence < 1e-3
    assert result.perplexity == pytest.approx(result.reference_perplexity, rel=0.01)


def test_a_position_is_predicted_by_what_came_before_it(tmp_path: Path) -> None:
    """Another last token changes no prediction; another first one changes all."""
    scorer = Scorer(engine(tmp_path), 150)

    def log_probs(ids: list[int]) -> torch.Tensor:
        return torch.cat(list(scorer.log_probs(ids)))

    found = log_probs(IDS[:150])
    assert found.shape == (149, 300)
    assert torch.allclose(found.exp().sum(-1), torch.ones(149))
    assert torch.equal(log_probs([*IDS[:149], 7]), found)
    assert not (log_probs([7, *IDS[1:150]]) == found).all(-1).any()


def test_the_sums_are_those_of_the_definitions() -> None:
    score = Score()
    model = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).double().log()
    reference = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).double().log()
    score.add(model, reference, torch.tensor([0, 1]))
    assert score.nll == pytest.approx(-math.log(0.5 * 0.8))
    assert score.reference_nll == pytest.approx(-math.log(0.9 * 0.1))
    assert score.num_agreed == 1
    first = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    second = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    assert score.divergence == pytest.approx(first + second)

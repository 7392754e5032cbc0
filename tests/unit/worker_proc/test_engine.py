"""The engine around the model: loading, capacity, deltas, steps that compute nothing."""

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError, InternalError
from runtime.instance import ModelFiles
from runtime.sampling import SamplingParams
from tests.plans import PlanMaker
from worker_proc.engine import Engine

_SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def preset(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(_SHAPE))
    return ModelFiles(name="tiny", path=str(path), format="preset")


def _dummy(preset: ModelFiles) -> Engine:
    return Engine.load(preset, dtype="float32", load_format="dummy")


def test_a_preset_has_no_weights_of_its_own(preset: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="a shape without weights"):
        Engine.load(preset)


def test_capacity_is_in_pages_and_at_least_one(preset: ModelFiles) -> None:
    engine = _dummy(preset)
    many, few = engine.capacity(0.1, 1), engine.capacity(0.1, 1024)
    assert 0 < few <= many // 512
    with pytest.raises(ConfigError, match="kv_memory_fraction"):
        engine.capacity(1e-12, 1024)


def test_a_step_before_begin_is_our_fault(preset: ModelFiles) -> None:
    with pytest.raises(InternalError, match="before begin"):
        _dummy(preset).execute(PlanMaker(page_size=1).plan())


def test_a_plan_without_segments_still_applies_its_deltas(preset: ModelFiles) -> None:
    engine = _dummy(preset)
    engine.begin(num_pages=16, page_size=4, num_slots=2, max_seq_len=30)
    plans = PlanMaker(page_size=4)
    plans.admit(1, [5, 6, 7], [9, 3])
    assert engine.execute(plans.plan()).tolist() == []
    assert engine.tables.token_table[1, :4].tolist() == [5, 6, 7, 0]
    assert engine.tables.page_table[1, :2].tolist() == [9, 3]
    assert engine.tables.page_table.shape == (2, 8)
    assert engine.execute(plans.plan((1, 0, 2, False))).tolist() == []


def test_a_sampled_token_stands_in_the_token_table_even_at_the_end(preset: ModelFiles) -> None:
    engine = _dummy(preset)
    engine.begin(num_pages=8, page_size=1, num_slots=1, max_seq_len=8)
    plans = PlanMaker(page_size=1)
    plans.admit(0, list(range(3, 11)), range(8))
    (token,) = engine.execute(plans.plan((0, 0, 8, True)))
    assert engine.tables.token_table[0].tolist() == [*range(3, 11), token]


def test_a_request_samples_the_same_alone_in_company_and_in_chunks(preset: ModelFiles) -> None:
    sampling = SamplingParams(temperature=1.0, seed=77)
    found = []
    for alone in (True, False):
        engine = _dummy(preset)
        engine.begin(num_pages=32, page_size=2, num_slots=2, max_seq_len=32)
        plans = PlanMaker(page_size=2)
        plans.admit(1, [9, 8, 7, 6, 5], range(4, 16), sampling)
        if alone:
            tokens = [engine.execute(plans.plan((1, 0, 5, True)))[0]]
        else:
            plans.admit(0, [3, 4], range(20, 32), SamplingParams(temperature=2.0, seed=1))
            engine.execute(plans.plan((0, 0, 2, True), (1, 0, 3, False)))
            tokens = [engine.execute(plans.plan((1, 3, 2, True), (0, 2, 1, True)))[0]]
        for position in range(5, 15):
            tokens.append(engine.execute(plans.plan((1, position, 1, True)))[0])
        found.append([int(token) for token in tokens])
    assert found[0] == found[1]
    assert len(set(found[0])) > 3

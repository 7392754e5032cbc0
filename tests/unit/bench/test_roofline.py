"""The least work of a step, and the limits that it is held against."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.limits import Limits
from bench.roofline import Segment, Work, prepared, steps, work
from runtime.config import configs_dir
from runtime.instance import ModelFiles
from worker_proc.engine import Engine
from worker_proc.model_config import read_config

LIMITS = Limits(dram_read_gb_s=50.0, peak_tflop_s={"bf16": 1.0, "fp32": 0.5, "int8": 2.0})
_TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 5000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_LAYERS = 2 * (32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48)
_HEAD = 5000 * 32


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "config.json").write_text(json.dumps(_TINY))
    return ModelFiles(name="tiny", path=str(tmp_path / "config.json"), format="preset")


def test_a_decode_reads_every_weight_once_and_its_cells(files: ModelFiles) -> None:
    config = read_config(Path(files.path))
    done = work(config, [Segment(length=1, context=10)] * 3, "bf16", "bf16")
    cell = 2 * 2 * 2 * 16 * 2  # keys and values of 2 layers, 2 heads of 16, 2 bytes
    assert done.num_bytes == (_LAYERS + _HEAD) * 2 + 30 * cell
    assert done.linear == 2 * 3 * (_LAYERS + _HEAD)
    assert done.attention == 4 * 30 * 2 * 4 * 16


def test_a_screened_head_has_a_byte_for_each_weight(files: ModelFiles) -> None:
    config = read_config(Path(files.path))
    segments = [Segment(length=1, context=10)] * 3
    plain = work(config, segments, "bf16", "bf16")
    screened = work(config, segments, "bf16", "bf16", screened=True)
    assert screened.num_bytes == plain.num_bytes - _HEAD
    assert (screened.linear, screened.screen) == (2 * 3 * _LAYERS, 2 * 3 * _HEAD)
    assert screened.seconds(LIMITS, "bf16", "bf16") < plain.seconds(LIMITS, "bf16", "bf16")


def test_a_prefill_attends_causally_and_computes_one_row_of_the_head(files: ModelFiles) -> None:
    config = read_config(Path(files.path))
    done = work(config, [Segment(length=5, context=12)], "int8", "bf16")
    assert done.num_bytes == _LAYERS + _HEAD + 12 * 256
    assert done.linear == 2 * (5 * _LAYERS + _HEAD)
    assert done.attention == 4 * (8 + 9 + 10 + 11 + 12) * 2 * 4 * 16


def test_the_weights_of_the_published_shape_are_counted() -> None:
    config = read_config(configs_dir() / "models" / "Qwen3-0.6B.json")
    done = work(config, [Segment(length=1, context=1)], "bf16", "bf16")
    assert done.linear == pytest.approx(2 * 596e6, rel=0.001)


def test_the_least_time_is_that_of_memory_or_of_products() -> None:
    reading = Work(num_bytes=100e9, linear=1e12, attention=0)
    assert reading.seconds(LIMITS, "bf16", "bf16") == pytest.approx(2.0)
    computing = Work(num_bytes=1e9, linear=4e12, attention=1e12)
    assert computing.seconds(LIMITS, "bf16", "bf16") == pytest.approx(5.0)
    assert computing.seconds(LIMITS, "int8", "bf16") == pytest.approx(3.0)


def test_of_two_measurements_the_higher_figures_count() -> None:
    other = Limits(dram_read_gb_s=40.0, peak_tflop_s={"bf16": 1.1, "fp32": 0.4, "int8": 2.0})
    assert LIMITS.or_better(other) == Limits(
        dram_read_gb_s=50.0, peak_tflop_s={"bf16": 1.1, "fp32": 0.5, "int8": 2.0}
    )


def test_a_prepared_step_may_be_repeated(files: ModelFiles) -> None:
    engine = Engine.load(files, dtype="float32", load_format="dummy")
    plan = prepared(engine, [Segment(length=1, context=7), Segment(length=5, context=9)])
    first = engine.execute(plan).tolist()
    assert len(first) == 2
    assert engine.execute(plan).tolist() == first


def test_every_step_that_the_results_name_is_measured() -> None:
    assert list(steps()) == ["1", "4", "8", "16", "32", "64", "decode_4k_context", "prefill2k"]

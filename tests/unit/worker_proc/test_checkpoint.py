"""Weights from every source come under one name, in one order, or are refused by name."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ConfigError, ModelNotFound
from runtime.gguf_file import GgufFile
from worker_proc.checkpoint import DummyCheckpoint, SafetensorsCheckpoint, Weights, check_weights
from worker_proc.gguf_checkpoint import GgufCheckpoint, read_gguf_config

_SHAPES = {"a.weight": (4, 8), "b.weight": (2, 8), "norm.weight": (8,)}


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    weights = {name: torch.randn(shape) for name, shape in _SHAPES.items()}
    save_file({"a.weight": weights["a.weight"]}, tmp_path / "m-1.safetensors")
    save_file({name: weights[name] for name in list(_SHAPES)[1:]}, tmp_path / "m-2.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    listed = {name: f"m-{1 if name[0] == 'a' else 2}.safetensors" for name in _SHAPES}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert dict(checkpoint.shapes()) == _SHAPES
    assert all(torch.equal(checkpoint.tensor(name), weights[name]) for name in _SHAPES)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"lacks m-2\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_weights_or_with_a_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no \*\.safetensors"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 9)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a usable"):
        SafetensorsCheckpoint(tmp_path)


def test_every_misfit_is_named_at_once() -> None:
    held = {"a.weight": (4, 9), "c.weight": (1,), "norm.weight": (8,), "lm_head.weight": (3, 3)}
    with pytest.raises(ConfigError) as caught:
        check_weights(held, _SHAPES)
    text = str(caught.value)
    assert "1 missing: b.weight" in text
    assert "1 not expected: c.weight" in text
    assert "a.weight is [4, 9] where the config says [4, 8]" in text
    assert "lm_head" not in text


def test_fused_weights_are_stacked_and_progress_reaches_one() -> None:
    heard: list[float] = []
    checkpoint = DummyCheckpoint(_SHAPES)
    weights = Weights(checkpoint, _SHAPES, torch.float32, heard.append)
    fused = weights.fused(["a.weight", "b.weight"])
    assert torch.equal(fused[4:], checkpoint.tensor("b.weight").float())
    assert torch.equal(weights.take("norm.weight"), torch.ones(8))
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_dummy_weights_are_the_same_for_a_seed_and_name() -> None:
    shapes = {"x.weight": (700, 3000), "y.weight": (700, 3000), "x.bias": (700,)}
    first, again, other = (DummyCheckpoint(shapes, seed=seed) for seed in (0, 0, 1))
    weight = first.tensor("x.weight")
    assert torch.equal(weight, again.tensor("x.weight"))
    assert not torch.equal(weight, other.tensor("x.weight"))
    assert not torch.equal(weight, first.tensor("y.weight"))
    assert abs(float(weight.float().std()) - 0.02) < 1e-3
    assert not first.tensor("x.bias").any()


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp stores query and key rows: the two halves of a head interleaved."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(path: Path, architecture: str, tensors: dict[str, np.ndarray]) -> GgufFile:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_comes_under_hugging_face_names_and_row_order(
    tmp_path: Path, architecture: str
) -> None:
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((n, 32)).astype(np.float32) for n in (32, 16))
    stored = architecture == "llama"
    tensors = {
        "token_embd.weight": random.standard_normal((11, 32)).astype(np.float16),
        "blk.0.attn_q.weight": _paired(query, 4) if stored else query,
        "blk.0.attn_k.weight": _paired(key, 2) if stored else key,
        "rope_freqs.weight": np.array([1, 2, 4, 8], np.float32),
    }
    file = _write_gguf(tmp_path / "m.gguf", architecture, tensors)
    config = read_gguf_config(file)
    checkpoint = GgufCheckpoint(file, config)
    names = {
        "model.embed_tokens.weight": (11, 32),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
    }
    assert dict(checkpoint.shapes()) == names
    for name, expected in zip(names, (tensors["token_embd.weight"], query, key), strict=True):
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), expected.astype(np.float32))
    assert (config.vocab_size, config.head_dim, config.tie_word_embeddings) == (11, 8, True)
    assert (config.rope_theta, config.rope_scaling.factors) == (5000.0, (1, 2, 4, 8))


def test_a_gguf_of_another_architecture_is_told_the_known_ones(tmp_path: Path) -> None:
    file = _write_gguf(tmp_path / "m.gguf", "gemma", {"token_embd.weight": np.ones((2, 2))})
    with pytest.raises(ConfigError, match="'gemma': known are llama, qwen3"):
        read_gguf_config(file)


def test_a_gguf_without_its_numbers_names_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"llama\.embedding_length is no number: None"):
        read_gguf_config(GgufFile(path))

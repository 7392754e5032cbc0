"""Configs in both of transformers' spellings, the presets, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import configs_dir
from runtime.errors import ConfigError, ModelNotFound
from worker_proc.machine import computes_bfloat16_fast, resolve_dtype
from worker_proc.model_config import config_from_json, read_config
from worker_proc.models import FAMILIES, family_of

_PRESETS = configs_dir() / "models"
_PARAMETERS = {
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M-Instruct": 134_515_008,
}


def _data(**changes: Any) -> dict[str, Any]:
    return {**json.loads((_PRESETS / "Llama-3.2-1B-Instruct.json").read_text()), **changes}


@pytest.mark.parametrize("name", list(_PARAMETERS))
def test_a_preset_has_as_many_parameters_as_published(name: str) -> None:
    config = read_config(_PRESETS / f"{name}.json")
    shapes = family_of(config).shapes(config)
    assert sum(math.prod(shape) for shape in shapes.values()) == _PARAMETERS[name]
    assert config.dtype == "bfloat16"


def test_both_spellings_mean_the_same() -> None:
    old = _data()
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    new["dtype"] = new.pop("torch_dtype")
    assert config_from_json(new) == config_from_json(old)
    assert config_from_json(new).rope_scaling.factor == 32.0


def test_an_unknown_architecture_is_told_the_known_ones() -> None:
    config = config_from_json(_data(architectures=["MambaForCausalLM"]))
    with pytest.raises(ConfigError) as caught:
        family_of(config)
    assert all(name in str(caught.value) for name in ("MambaForCausalLM", *FAMILIES))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"num_key_value_heads": 5}, "32 heads for 5 key/value heads"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_from_json(_data(**changes))


@pytest.mark.parametrize(
    ("text", "told"), [("{", "not valid JSON"), ("[]", "no JSON object"), ("{}", "has no 'max_")]
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json .*{told}"):
        read_config(tmp_path)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json can't be read"):
        read_config(tmp_path)


def test_auto_is_the_checkpoints_dtype_where_it_is_fast() -> None:
    own = torch.bfloat16 if computes_bfloat16_fast() else torch.float32
    assert resolve_dtype("auto", "bfloat16") == own
    assert resolve_dtype("auto", "float16") == torch.float32
    assert resolve_dtype("bfloat16", "float32") == torch.bfloat16

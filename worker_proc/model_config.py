"""The shape of a model, read from a Hugging Face config.json (gguf_checkpoint.py reads it from
GGUF).

What a checkpoint asks for and this code does not compute is refused here by name, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, ModelNotFound
from worker_proc.rope import RopeScaling, scaling_from_json

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model's shape. Sizes are in elements; head_dim is the same for queries, keys and values.

    architecture: as in config.json, for example "LlamaForCausalLM".
    dtype: how the checkpoint stores its weights, one of DTYPES.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str

    def __post_init__(self) -> None:
        """Raise ConfigError where the numbers can't be a model."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} is {getattr(self, name)}: at least 1 is")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model has {self.num_heads} heads for {self.num_kv_heads} key/value heads:"
                " a whole multiple is supported"
            )
        if self.head_dim % 2:
            raise ConfigError(f"the model's head_dim is {self.head_dim}: rope needs an even one")


def read_config(path: Path) -> ModelConfig:
    """The config in `path`: a config.json, or a directory that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
    except OSError as e:
        raise ModelNotFound(f"{file} can't be read: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a model's config: it holds no JSON object")
    try:
        return config_from_json(data)
    except KeyError as e:
        raise ConfigError(f"{file} is not a usable model config: it has no {e}") from None
    except (TypeError, AttributeError) as e:
        raise ConfigError(f"{file} is not a usable model config: {e}") from None


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The config in `data`, in transformers 4's or 5's spelling. Raises KeyError, ConfigError."""
    _refuse_unsupported(data)
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    max_positions = int(data["max_position_embeddings"])
    num_heads = int(data["num_attention_heads"])
    return ModelConfig(
        architecture=str((data.get("architectures") or [data.get("model_type")])[0]),
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
        head_dim=int(data.get("head_dim") or int(data["hidden_size"]) // num_heads),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0),
        rope_scaling=scaling_from_json(rope, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)),
        mlp_bias=bool(data.get("mlp_bias", False)),
        dtype=_dtype(data),
    )


def _dtype(data: Mapping[str, Any]) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"the checkpoint's dtype is {name!r}: known are {', '.join(DTYPES)}")
    return name


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    for key, allowed in (("hidden_act", ("silu", "swish")), ("quantization_config", ())):
        value = data.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"the model's {key} is {value!r:.80}: this is not supported")
    kinds = set(data.get("layer_types") or ()) - {"full_attention"}
    if kinds or (data.get("use_sliding_window") and data.get("sliding_window")):
        raise ConfigError("the model uses sliding-window attention: this is not supported")

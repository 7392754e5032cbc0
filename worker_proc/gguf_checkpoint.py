"""A model out of a GGUF file: its config from the metadata, its weights one at a time, dequantized
or in the blocks that they are stored in.

llama.cpp stores the query and key rows of some architectures in another order (pairs of rope side
by side); they are put back here, so the models know one order only.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from runtime.errors import ConfigError
from runtime.gguf_file import GgufFile
from worker_proc.checkpoint import KEPT_TYPES, Blocks, Shapes
from worker_proc.model_config import ModelConfig
from worker_proc.rope import RopeScaling

#: What follows "blk.N." here and "model.layers.N." there.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_FACTORS = "rope_freqs.weight"
#: general.architecture to (the name in config.json, are query and key rows in rope pairs).
_ARCHITECTURES = {"llama": ("LlamaForCausalLM", True), "qwen3": ("Qwen3ForCausalLM", False)}


class GgufCheckpoint:
    """The weights in `file`, by Hugging Face name."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._paired_rows = _architecture(file)[2]
        self._names = {_hf_name(name): name for name in file.tensors if name != _FACTORS}

    def shapes(self) -> Shapes:
        return {name: self._file.tensors[held].shape for name, held in self._names.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self._ordered(name, torch.from_numpy(_dequantized(self._file, self._names[name])))

    def blocks(self, name: str) -> Blocks | None:
        tensor = self._file.tensors[self._names[name]]
        if tensor.type_name not in KEPT_TYPES or len(tensor.shape) != 2:
            return None
        with warnings.catch_warnings():
            # Torch can't mark a tensor read-only as the mapped file is; nobody writes to it.
            warnings.simplefilter("ignore", UserWarning)
            data = torch.from_numpy(tensor.data)
        return Blocks(type_name=tensor.type_name, data=self._ordered(name, data))

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """rows: [out_features, …] as the file has them."""
        if self._paired_rows and ".q_proj." in name:
            return _unpaired(rows, self._config.num_heads)
        if self._paired_rows and ".k_proj." in name:
            return _unpaired(rows, self._config.num_kv_heads)
        return rows


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The config in the metadata of `file`; ConfigError for what is missing or not supported."""
    own_name, architecture, _ = _architecture(file)
    meta = _Metadata(file, own_name)
    hidden_size, num_heads = meta.whole("embedding_length"), meta.whole("attention.head_count")
    head_dim = meta.whole("attention.key_length", hidden_size // max(num_heads, 1))
    if meta.whole("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: rope over a part of each head is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0]
        if "token_embd.weight" in file.tensors
        else meta.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=meta.whole("feed_forward_length"),
        num_layers=meta.whole("block_count"),
        num_heads=num_heads,
        num_kv_heads=meta.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=meta.real("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=meta.real("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, meta),
        max_position_embeddings=meta.whole("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        dtype="bfloat16",
    )


class _Metadata:
    """The keys of one architecture, each a number."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._path = file.path
        self._metadata: Mapping[str, Any] = file.metadata
        self._architecture = architecture

    def get(self, name: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}")

    def whole(self, name: str, default: int | None = None) -> int:
        return int(self._number(name, default))

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._number(name, default))

    def _number(self, name: str, default: float | None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise ConfigError(f"{self._path}: {self._architecture}.{name} is no number: {value!r}")
        return value


def _architecture(file: GgufFile) -> tuple[str, str, bool]:
    """(GGUF's name, config.json's name, are query and key rows in rope pairs)."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.path} holds the architecture {name!r}: known are {', '.join(_ARCHITECTURES)}"
        )
    return name, *_ARCHITECTURES[name]


def _rope_scaling(file: GgufFile, meta: _Metadata) -> RopeScaling:
    kind = meta.get("rope.scaling.type") or "none"
    if _FACTORS in file.tensors:
        factors = _dequantized(file, _FACTORS).tolist()
        return RopeScaling(kind="factors", factors=tuple(factors))
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported")
    return RopeScaling(
        kind=kind,
        factor=meta.real("rope.scaling.factor"),
        original_len=meta.whole(
            "rope.scaling.original_context_length", meta.whole("context_length")
        ),
    )


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own where it has none, to be refused under it."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, number, rest = stem.split(".", 2)
        return f"model.layers.{number}.{_LAYER_NAMES.get(rest, rest)}.{kind}"
    return f"{_TOP_NAMES.get(stem, stem)}.{kind}"


def _dequantized(file: GgufFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    tensor = file.tensors[name]
    try:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.type_id))
    except NotImplementedError:
        raise ConfigError(
            f"{file.path}: {name} is stored as {tensor.type_name}, which can't be read"
        ) from None
    return np.array(values, np.float32).reshape(tensor.shape)


def _unpaired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from (pair, half) within each head to (half, pair). weight: [heads · head_dim, …]."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)

"""Llama 2 and 3, SmolLM2 and what else calls itself LlamaForCausalLM.

Source: Llama (arXiv 2302.13971); grouped-query attention (arXiv 2305.13245).
"""

from collections.abc import Callable

import torch

from worker_proc.attention import AttentionStep
from worker_proc.checkpoint import Weights
from worker_proc.layers import Embedding, GatedMlp, RMSNorm, fused_linear
from worker_proc.linear import Linear, PlainLinear, make_linear
from worker_proc.model_config import ModelConfig
from worker_proc.rope import Rope, rotate

Angles = tuple[torch.Tensor, torch.Tensor]
Lookup = Callable[[torch.Tensor], torch.Tensor]
"""ids: int [n] -> [n, hidden_size]."""


class LlamaAttention:
    """Queries of num_heads over keys and values of num_kv_heads, in the pool."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        self._layer = layer
        self._head_dim = config.head_dim
        self._num_heads = config.num_heads
        self._num_turned = config.num_heads + config.num_kv_heads
        bias = config.attention_bias
        self._qkv = fused_linear(weights, prefix, ("q_proj", "k_proj", "v_proj"), bias)
        self._out = fused_linear(weights, prefix, ("o_proj",), bias)

    def __call__(self, x: torch.Tensor, angles: Angles, attention: AttentionStep) -> torch.Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        queries_keys, values = heads.tensor_split((self._num_turned,), dim=1)
        turned = rotate(self.normalized(queries_keys), angles)
        queries, keys = turned.tensor_split((self._num_heads,), dim=1)
        return self._out(attention.run(self._layer, queries, keys, values).flatten(1))

    def normalized(self, queries_keys: torch.Tensor) -> torch.Tensor:
        """[n, num_heads + num_kv_heads, head_dim], as families that norm them change it."""
        return queries_keys


class LlamaLayer:
    """Attention, then the MLP, each on the normed residual and added to it."""

    attention_type = LlamaAttention

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix, eps = f"model.layers.{layer}.", config.rms_norm_eps
        self._input_norm = RMSNorm(weights.take(f"{prefix}input_layernorm.weight"), eps)
        self._attention = self.attention_type(config, weights, f"{prefix}self_attn.", layer)
        self._mlp_norm = RMSNorm(weights.take(f"{prefix}post_attention_layernorm.weight"), eps)
        self._mlp = GatedMlp(weights, f"{prefix}mlp.", config.mlp_bias)

    def __call__(self, x: torch.Tensor, angles: Angles, attention: AttentionStep) -> torch.Tensor:
        x = x + self._attention(self._input_norm(x), angles, attention)
        return x + self._mlp(self._mlp_norm(x))


class LlamaForCausalLM:
    """The whole model. A family that differs in a layer only names its own `layer_type`."""

    layer_type = LlamaLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._embedding, self._head = _ends(config, weights)
        self._rope = Rope(config.rope_theta, config.head_dim, config.rope_scaling)
        self._layers = [self.layer_type(config, weights, i) for i in range(config.num_layers)]
        self._norm = RMSNorm(weights.take("model.norm.weight"), config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        """input_ids, positions: int [n] -> hidden states [n, hidden_size], not yet normed."""
        x = self._embedding(input_ids)
        angles = self._rope.angles(positions)
        for layer in self._layers:
            x = layer(x, angles, attention)
        return x

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows: [r, hidden_size] of `forward` -> float32 [r, vocab_size]."""
        return self._head(self._norm(hidden_rows)).float()


def _ends(config: ModelConfig, weights: Weights) -> tuple[Lookup, Linear]:
    """The embedding and the head, on one matrix where they are tied."""
    table = weights.take("model.embed_tokens.weight")
    if config.tie_word_embeddings:
        tied = PlainLinear(table)
        return tied.rows, tied
    return Embedding(table), make_linear(weights.take("lm_head.weight"))


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the checkpoint and its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.attention_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes

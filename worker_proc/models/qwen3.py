"""Qwen3 (dense): Llama with each query and key head normed before the rotation.

Source: Qwen3 (arXiv 2505.09388).
"""

import torch

from worker_proc.checkpoint import Weights
from worker_proc.layers import RMSNorm
from worker_proc.model_config import ModelConfig
from worker_proc.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer, llama_shapes


class Qwen3Attention(LlamaAttention):
    """Llama's, with query and key norms."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        super().__init__(config, weights, prefix, layer)
        # One norm serves both: [num_heads + num_kv_heads, head_dim], a row per head.
        queries = weights.take(f"{prefix}q_norm.weight").expand(config.num_heads, -1)
        keys = weights.take(f"{prefix}k_norm.weight").expand(config.num_kv_heads, -1)
        self._norm = RMSNorm(torch.cat((queries, keys)), config.rms_norm_eps)

    def normalized(self, queries_keys: torch.Tensor) -> torch.Tensor:
        return self._norm(queries_keys)


class Qwen3Layer(LlamaLayer):
    """Llama's, with Qwen3's attention."""

    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_type = Qwen3Layer


def qwen3_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the checkpoint and its shape."""
    shapes = llama_shapes(config)
    for layer in range(config.num_layers):
        for name in ("q_norm", "k_norm"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (config.head_dim,)
    return shapes

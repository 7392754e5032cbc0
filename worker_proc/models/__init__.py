"""The model families this worker computes, by the architecture's name in config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.errors import ConfigError
from worker_proc.attention import AttentionStep
from worker_proc.checkpoint import Shapes, Weights
from worker_proc.model_config import ModelConfig
from worker_proc.models.llama import LlamaForCausalLM, llama_shapes
from worker_proc.models.qwen3 import Qwen3ForCausalLM, qwen3_shapes


class CausalLM(Protocol):
    """What the engine asks of a model."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep
    ) -> torch.Tensor:
        """input_ids, positions: int [n] -> hidden states [n, hidden_size]."""
        ...

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows: [r, hidden_size] -> float32 [r, vocab_size]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to build a model and which weights its checkpoint must hold."""

    build: Callable[[ModelConfig, Weights], CausalLM]
    shapes: Callable[[ModelConfig], Shapes]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(build=LlamaForCausalLM, shapes=llama_shapes),
    "Qwen3ForCausalLM": Family(build=Qwen3ForCausalLM, shapes=qwen3_shapes),
}


def family_of(config: ModelConfig) -> Family:
    """The family of `config`; ConfigError lists the known ones where there is none."""
    if config.architecture not in FAMILIES:
        raise ConfigError(
            f"the architecture {config.architecture!r} is not supported: known are "
            + ", ".join(FAMILIES)
        )
    return FAMILIES[config.architecture]

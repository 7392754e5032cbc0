"""A checkpoint of a llama of two layers with random weights, for tests that change some of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.instance import ModelFiles
from worker_proc.model_config import read_config
from worker_proc.models import family_of

_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def small_llama(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    *,
    vocab_size: int,
    hidden_size: int,
    seed: int,
) -> ModelFiles:
    """Written into `folder`. Matrices are normal with deviation 1/8, norms one, until `change` has
    had them, float32 and by their names in the checkpoint.
    """
    shape = {**_SHAPE, "vocab_size": vocab_size, "hidden_size": hidden_size}
    (folder / "config.json").write_text(json.dumps(shape))
    generator = torch.Generator().manual_seed(seed)
    config = read_config(folder)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / 8
        for name, shape in family_of(config).shapes(config).items()
    }
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return ModelFiles(name="small", path=str(folder), format="hf")

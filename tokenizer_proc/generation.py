"""A model's generation_config.json: what its makers would have a request do that doesn't say.

Source: GenerationConfig of transformers. Read are eos_token_id (in tokenizer_proc.loading),
do_sample, temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, RequestError
from runtime.instance import ModelFiles
from runtime.sampling import MAX_COUNT, SamplingParams
from runtime.types import Json
from tokenizer_proc.json_files import read_json

FILE = "generation_config.json"
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(choice: str, *places: ModelFiles) -> Json:
    """The first of the places' files; empty if there is none, or by `choice` "none"."""
    folders = [Path(files.path) for files in places if files.format == "hf"]
    files = [folder / FILE for folder in folders if (folder / FILE).is_file()]
    return read_json(files[0]) if files and choice == "auto" else {}


def sampling_defaults(config: Mapping[str, Any]) -> SamplingParams:
    """What a request's open fields become; None where the model leaves them open too.

    Without do_sample a model is greedy, unless it gives a temperature. Raises ConfigError for
    values that a request could not ask for.
    """
    given: dict[str, Any] = {ours: config.get(theirs) for theirs, ours in _FIELDS.items()}
    samples = config.get("do_sample")
    if samples is False:
        given["temperature"] = None
    elif samples and given["temperature"] is None:
        given["temperature"] = 1.0
    defaults = SamplingParams(**given)
    try:
        defaults.validate(MAX_COUNT)
    except RequestError as e:
        raise ConfigError(
            f"{FILE}: {e}; mend the file, or leave it out with generation_config none"
        ) from None
    return defaults

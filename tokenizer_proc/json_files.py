"""JSON files that come with a model."""

import json
from pathlib import Path

from runtime.errors import ConfigError
from runtime.types import Json


def read_json(path: Path) -> Json:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data

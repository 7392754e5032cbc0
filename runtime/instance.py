"""One running server: its private folder, what it was told, and the addresses of its internal
wires.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model was found.

    format: "hf" (a directory in Hugging Face layout), "gguf" (one file) or "preset" (a config.json
    alone).
    """

    name: str
    path: str
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What every process of one server reads at start: `--instance FOLDER` on its command line."""

    folder: Path
    config: Config
    model: ModelFiles
    tokenizer: ModelFiles
    server_id: str

    def save(self) -> None:
        """Write the instance into its folder, for the child processes."""
        data = {
            "config": self.config.to_json(),
            "model": asdict(self.model),
            "tokenizer": asdict(self.tokenizer),
            "server_id": self.server_id,
        }
        (self.folder / "instance.json").write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "Instance":
        """The instance that `save` wrote into `folder`."""
        data: Mapping[str, Any] = json.loads((folder / "instance.json").read_text())
        return cls(
            folder=folder,
            config=Config.from_json(data["config"]),
            model=ModelFiles(**data["model"]),
            tokenizer=ModelFiles(**data["tokenizer"]),
            server_id=data["server_id"],
        )

    def remove(self) -> None:
        """Delete the folder and every socket file in it; does nothing if it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def wire(self, name: str) -> str:
        """The address of the internal wire `name`, for example "scheduler" or "worker-0"."""
        return f"ipc://{self.folder}/{name}.sock"

    @property
    def endpoint(self) -> str:
        """Where clients connect, as configured."""
        return self.config.server.endpoint or self.wire("public")

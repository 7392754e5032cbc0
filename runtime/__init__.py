"""What users of Tandem import: the offline `LLM`, the clients of a running server, parameters and
errors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.client import AsyncClient
    from runtime.completion import Choice, Completion
    from runtime.errors import (
        ConfigError,
        ConnectionLost,
        ModelNotFound,
        Overloaded,
        ProcessDied,
        RequestError,
        ShuttingDown,
        TandemError,
    )
    from runtime.llm import LLM
    from runtime.messages import Chunk
    from runtime.sampling import SamplingParams
    from runtime.sync_client import Client

__all__ = [
    "LLM",
    "AsyncClient",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "ConnectionLost",
    "ModelNotFound",
    "Overloaded",
    "ProcessDied",
    "RequestError",
    "SamplingParams",
    "ShuttingDown",
    "TandemError",
]

_HOMES = {
    "LLM": "llm",
    "AsyncClient": "client",
    "Chunk": "messages",
    "Client": "sync_client",
    "Choice": "completion",
    "Completion": "completion",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the child processes need few of them, and start
    fast.
    """
    if name not in __all__:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runtime.{_HOMES.get(name, 'errors')}"), name)

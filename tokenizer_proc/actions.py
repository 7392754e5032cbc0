"""What the tokenizer's core wants done; its shell does it."""

from dataclasses import dataclass
from typing import Any

from tokenizer_proc.jobs import Job


@dataclass(frozen=True, slots=True)
class ToClient:
    client: bytes
    message: Any


@dataclass(frozen=True, slots=True)
class Forget:
    """The client is not sent anything any more."""

    client: bytes


@dataclass(frozen=True, slots=True)
class ToScheduler:
    message: Any


@dataclass(frozen=True, slots=True)
class Convert:
    """The job may take long: convert it elsewhere, and call `on_converted`."""

    job: Job


Action = ToClient | ToScheduler | Forget | Convert

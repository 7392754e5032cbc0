"""Where weights come from, and how a model takes them: whole, of the right shape, in its dtype.

Names and shapes are compared before a byte is read, so a wrong checkpoint fails in milliseconds.
A weight is copied once, from the mapped file into its final place (a part of a fused matrix, say).
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import ConfigError, ModelNotFound

KEPT_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K")
"""GGUF's types that products can be computed with as they are."""

Shapes = Mapping[str, tuple[int, ...]]
_INDEX = "model.safetensors.index.json"
_SHOWN = 6
_BLOCK = (1 << 20) - 3


class Quantization(Enum):
    """Which matrices have less than the dtype's bits in memory."""

    NONE = "none"
    KEPT = "kept"
    """Those that a GGUF file has in one of KEPT_TYPES."""
    INT8 = "int8"
    """All: those as they are, others are rounded to 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A matrix as a GGUF file has it. data: uint8 [rows, bytes of a row], perhaps a view of it."""

    type_name: str
    data: torch.Tensor


class Checkpoint(Protocol):
    """Weights by Hugging Face name."""

    def shapes(self) -> Shapes:
        """The shape of every weight it holds."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The weight `name`, in any float dtype; may be a view that lives as long as this does."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """The matrix `name` as it is stored, where that is in blocks of one of KEPT_TYPES."""
        ...


class SafetensorsCheckpoint:
    """The weights in a directory's *.safetensors, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as e:
                raise ConfigError(f"{path} is not a usable safetensors file: {e}") from None
            for name in file.keys():  # noqa: SIM118 (no dict)
                self._files[name] = file
                self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def shapes(self) -> Shapes:
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def blocks(self, name: str) -> Blocks | None:
        return None


class DummyCheckpoint:
    """Random weights: normal with deviation 0.02, norms one, biases zero; the same for a seed.

    Every matrix is a stretch of one random block, begun at a place that its name decides, since
    drawing each number takes longer than computing with it. The block's length is a prime, so that
    no row of a matrix is another's twin: a head would have as many likeliest tokens as twins.
    """

    def __init__(self, shapes: Shapes, seed: int = 0) -> None:
        self._shapes = shapes
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn(_BLOCK, generator=generator).mul_(0.02)
        self._block_bfloat16 = self._block.bfloat16()

    def shapes(self) -> Shapes:
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        size = math.prod(shape)
        start = zlib.crc32(f"{self._seed}/{name}".encode()) % _BLOCK
        rolled = self._block_bfloat16.roll(-start)
        return rolled.repeat(-(-size // _BLOCK))[:size].view(shape)

    def blocks(self, name: str) -> Blocks | None:
        return None


class Weights:
    """One pass over a checkpoint, in a model's dtype; `progress` hears the fraction done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        expected: Shapes,
        dtype: torch.dtype,
        progress: Callable[[float], None],
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        """expected: every weight that will be asked for. Raises ConfigError as check_weights."""
        check_weights(checkpoint.shapes(), expected)
        self.dtype = dtype
        self.quantization = quantization
        self._checkpoint = checkpoint
        self._expected = expected
        self._progress = progress
        self._total = sum(math.prod(shape) for shape in expected.values())
        self._done = 0

    def __contains__(self, name: str) -> bool:
        """Whether the model has a weight `name`."""
        return name in self._expected

    def view(self, name: str) -> torch.Tensor:
        """The weight `name`, to be read once: in the checkpoint's own memory where it can be."""
        weight = self._checkpoint.tensor(name).to(self.dtype)
        self._count(weight.numel())
        return weight

    def blocks(self, names: Sequence[str]) -> list[Blocks] | None:
        """Matrices as they are stored, to be read once; None unless all are, in one type, and such
        may be computed with.
        """
        if self.quantization is Quantization.NONE:
            return None
        found = [blocks for name in names if (blocks := self._checkpoint.blocks(name))]
        if len(found) < len(names) or len({blocks.type_name for blocks in found}) > 1:
            return None
        for name in names:
            self._count(math.prod(self._expected[name]))
        return found

    def take(self, name: str) -> torch.Tensor:
        """The weight `name`, own memory."""
        return self.fused((name,))

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Weights of equal row length stacked into one: [sum of rows, …], own memory."""
        shapes = [self._expected[name] for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            part.copy_(self._checkpoint.tensor(name))
            self._count(part.numel())
        return out

    def _count(self, size: int) -> None:
        self._done += size
        self._progress(self._done / self._total)


def check_weights(held: Shapes, expected: Shapes) -> None:
    """Raise ConfigError naming what is missing, not expected or of another shape.

    A tied checkpoint may still hold its head, and old ones hold rope's frequencies: not an error.
    """
    missing = [name for name in expected if name not in held]
    ignored = ("rotary_emb.inv_freq", "lm_head.weight")
    unexpected = [n for n in held if n not in expected and not n.endswith(ignored)]
    wrong = [
        f"{name} is {list(held[name])} where the config says {list(shape)}"
        for name, shape in expected.items()
        if name in held and tuple(held[name]) != tuple(shape)
    ]
    kinds = (("missing", missing), ("not expected", unexpected), ("of another shape", wrong))
    faults = [f"{len(found)} {kind}: {_some(found)}" for kind, found in kinds if found]
    if faults:
        raise ConfigError("the checkpoint does not fit the model's config; " + "; ".join(faults))


def _some(names: Sequence[str]) -> str:
    more = f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _weight_files(folder: Path) -> list[Path]:
    """What the index lists, else every *.safetensors, by name."""
    index = folder / _INDEX
    if index.is_file():
        try:
            listed = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise ConfigError(f"{index} is not a usable index: {e!r}") from None
        files = [folder / str(name) for name in sorted(listed)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ModelNotFound(
            f"{folder} lacks {_some(absent)}, which its index lists: fetch it again"
        )
    if not files:
        raise ModelNotFound(f"{folder} holds no *.safetensors file; other formats are not read")
    return files
